"""The table of faults is complete, names existing tests, and matches its page."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.faults.matrix import PAGE, ROWS, page
from tests.faults.mutations import MUTATIONS, ROOT

TESTS = Path(__file__).parents[1]
NUM_ROWS = 75


def test_every_row_has_tests_or_a_reason() -> None:
    assert len(ROWS) == NUM_ROWS
    for number, row in enumerate(ROWS, 1):
        assert bool(row.tests) != bool(row.why_not), f"row {number}: {row.case}"


def test_every_test_that_is_named_exists() -> None:
    known: dict[str, set[str]] = {}
    for name in {name for row in ROWS for name in row.tests}:
        file, _, test = name.partition("::")
        if file not in known:
            nodes = ast.parse((TESTS / file).read_text()).body
            known[file] = {one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in known[file], name


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.faults.matrix`"


def test_the_text_of_each_planted_fault_is_in_its_file_once():
    found = {one.name: (ROOT / one.file).read_text().count(one.old) for one in MUTATIONS}
    assert set(found.values()) == {1}, found
