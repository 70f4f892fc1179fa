"""`make test`: runs every lane, even if one fails, and prints a last line with results and skipped tests.

Two lanes run at a time, with two processes each: on two cores, one lane computes while the other waits for an
engine or a service to start. A lane receives only the files that contain its tests, because importing all others
takes half a minute.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LANES_AT_ONCE = 2
ELSEWHERE = "not clients and not trainers and not long"  # each has its own command
# A skip reason starts with one of these if installing a package, or a permission, would let the test run.
NEEDS = ("needs ", "could not import ")


def lanes() -> dict[str, list[str]]:
    """Return the pytest arguments of each lane, the longest lane first."""
    quick = ["-n2", "--dist=loadfile", f"-m not engine and not ray and not hosts and {ELSEWHERE}"]
    return {
        "engine": [
            *("-n2", "--dist=loadgroup", f"-m engine and not ray and not hosts and {ELSEWHERE}"),
            *("tests/contract", *files_with("engine")),
        ],
        "fast": [*quick, "--ignore=tests/parts"],
        "ray": ["-n2", "--dist=loadgroup", f"-m ray and not hosts and {ELSEWHERE}", *files_with("ray")],
        "parts": [*quick, "tests/parts"],
        "hosts": ["-m hosts", "-k", "a_cut_a_join_and_a_kill", "tests/hosts"],
    }


def files_with(mark: str) -> list[str]:
    """Return the test files that contain the name of the mark."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(one.relative_to(ROOT)) for one in files if re.search(rf"mark\.{mark}\b", one.read_text())]


def run(lanes_by_name: dict[str, list[str]], arguments: list[str]) -> bool:
    """Run each lane with additional pytest arguments. Returns True if all passed."""
    outcomes, skipped = [], Counter[str]()
    with TemporaryDirectory() as folder, ThreadPoolExecutor(LANES_AT_ONCE) as pool:
        reports = [Path(folder) / f"{name}.xml" for name in lanes_by_name]
        commands = (
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments, *of_lane]
            for report, of_lane in zip(reports, lanes_by_name.values(), strict=True)
        )
        codes = pool.map(run_lane, lanes_by_name, commands)
        for name, report, code in zip(lanes_by_name, reports, codes, strict=True):
            # Exit code 5: no test was collected, for example because an argument selects tests of another lane.
            outcomes.append(f"{name} {'passed' if code in (0, 5) else 'FAILED'}")
            skipped += skips(report) if report.exists() else Counter()
    needs = {reason: count for reason, count in skipped.items() if reason.startswith(NEEDS)}
    num_other = skipped.total() - sum(needs.values())
    listed = "".join(f"; {count} skipped: {reason}" for reason, count in sorted(needs.items()))
    print(
        f"lanes: {', '.join(outcomes)}; {num_other} skipped because an engine or a case lacks a capability{listed}"
    )
    return not any(one.endswith("FAILED") for one in outcomes)


def run_lane(name: str, command: list[str]) -> int:
    """Run a command, print each line of its output after the lane's name, and return its exit status."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name}: {line}", end="", flush=True)
    return process.returncode


def skips(report: Path) -> Counter[str]:
    """Return the skip reasons in a JUnit report, each with its number of tests."""
    found = Counter[str]()
    for skipped in ElementTree.parse(report).iter("skipped"):
        reason = skipped.attrib["message"]
        if reason == "collection skipped":  # a whole file: the text is its path, the line and "Skipped: reason"
            reason = ast.literal_eval(skipped.text or "")[2].removeprefix("Skipped: ")
        found[reason] += 1
    return found


if __name__ == "__main__":
    sys.exit(0 if run(lanes(), sys.argv[1:]) else 1)
