"""`make test`: runs every lane, even if one fails, and prints one last line with the results and the skipped tests.

Of two cores, a lane of tests that wait half of their time takes four processes; one of engines of one thread, or of
services, takes two. A lane is given only the files that have its tests: to import all others takes half a minute.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ELSEWHERE = "not clients and not trainers and not long"  # each has its own command
# The reason of a skip begins with one of these if a package, or a right on this machine, would let the test run.
NEEDS = ("needs ", "could not import ")


def lanes() -> dict[str, list[str]]:
    """Return the arguments of pytest for each lane."""
    quick = ["-n4", "--dist=loadfile", f"-m not engine and not ray and not hosts and {ELSEWHERE}"]
    return {
        "fast": [*quick, "--ignore=tests/parts"],
        "parts": [*quick, "tests/parts"],
        "engine": [
            *("-n2", "--dist=loadgroup", f"-m engine and not ray and not hosts and {ELSEWHERE}"),
            *("tests/contract", *files_with("engine")),
        ],
        "ray": ["-n2", "--dist=loadfile", f"-m ray and not hosts and {ELSEWHERE}", *files_with("ray")],
        "hosts": ["-m hosts", "-k", "a_cut_a_join_and_a_kill", "tests/hosts"],
    }


def files_with(mark: str) -> list[str]:
    """Return the test files that name the mark."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(one.relative_to(ROOT)) for one in files if re.search(rf"mark\.{mark}\b", one.read_text())]


def run(lanes_by_name: dict[str, list[str]], arguments: list[str]) -> bool:
    """Run each lane with further arguments of pytest. Returns True if all passed."""
    outcomes, skipped = [], Counter[str]()
    with TemporaryDirectory() as folder:
        for name, of_lane in lanes_by_name.items():
            report = Path(folder) / f"{name}.xml"
            command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments, *of_lane]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            # 5: none was collected, as where an argument selects tests of another lane.
            outcomes.append(f"{name} {'passed' if code in (0, 5) else 'FAILED'}")
            skipped += skips(report) if report.exists() else Counter()
    needs = {reason: count for reason, count in skipped.items() if reason.startswith(NEEDS)}
    num_other = skipped.total() - sum(needs.values())
    listed = "".join(f"; {count} skipped: {reason}" for reason, count in sorted(needs.items()))
    print(
        f"lanes: {', '.join(outcomes)}; {num_other} skipped because an engine or a case lacks a capability{listed}"
    )
    return not any(one.endswith("FAILED") for one in outcomes)


def skips(report: Path) -> Counter[str]:
    """Return the reasons of the tests that a JUnit report says were skipped, each with its number of tests."""
    found = Counter[str]()
    for skipped in ElementTree.parse(report).iter("skipped"):
        reason = skipped.attrib["message"]
        if reason == "collection skipped":  # a whole file: the text is its path, the line and "Skipped: reason"
            reason = ast.literal_eval(skipped.text or "")[2].removeprefix("Skipped: ")
        found[reason] += 1
    return found


if __name__ == "__main__":
    sys.exit(0 if run(lanes(), sys.argv[1:]) else 1)
