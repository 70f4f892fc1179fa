"""`make test`: its lanes one after another, all of them even if one fails, and what was skipped in one last line.

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
ELSEWHERE = "not clients and not trainers and not long"  # these have commands of their own
# What a test skips for is "needs THING (where to get it)" if a package or a right of this machine would let it run.
NEEDS = ("needs ", "could not import ")


def lanes() -> dict[str, list[str]]:
    """Return the arguments of pytest for each lane."""
    return {
        "fast": ["-n4", "--dist=loadfile", f"-m not engine and not ray and not hosts and {ELSEWHERE}"],
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


def run(names: list[str], arguments: list[str]) -> int:
    """Run lanes by name, each with further arguments of pytest. Returns the number of lanes that failed."""
    outcomes, skipped = [], Counter[str]()
    with TemporaryDirectory() as folder:
        for name in names:
            report = Path(folder) / f"{name}.xml"
            command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments, *lanes()[name]]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            # 5: none was collected, as where an argument selects tests of another lane.
            outcomes.append(f"{name} {'passed' if code in (0, 5) else 'FAILED'}")
            skipped += skips(report) if report.exists() else Counter()
    needs = {reason: count for reason, count in skipped.items() if reason.startswith(NEEDS)}
    by_choice = skipped.total() - sum(needs.values())
    listed = "".join(f"; {count} skipped: {reason}" for reason, count in sorted(needs.items()))
    print(f"lanes: {', '.join(outcomes)}; {by_choice} skipped for what an engine or a case does not have{listed}")
    return sum(one.endswith("FAILED") for one in outcomes)


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
    sys.exit(min(run(list(lanes()), sys.argv[1:]), 1))
