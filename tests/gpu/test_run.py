"""The runner of GPU checks: a failed or slow part does not stop the others, and the table reports it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from tests.gpu.run import (
    GATE,
    PARTS,
    Part,
    Run,
    chosen,
    continued,
    last_line,
    ratios,
    run_parts,
    suite_counts,
    summary,
)

LIMIT_S = 60.0


def part(name: str, code: str, timeout_s: float = LIMIT_S, **fields: object) -> Part:
    return Part(name, "", lambda run: [sys.executable, "-c", code], timeout_s, last_line, **fields)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("vllm", "cuda", tmp_path, num_gpus=1)


async def test_what_fails_or_hangs_stops_nothing_else(run: Run):
    hangs = "import time; print('begun', flush=True); time.sleep(600)"
    parts = [
        part("fails", "print('no'); raise SystemExit(3)"),
        part("hangs", hangs, timeout_s=1.0, after=("fails", "of another lane")),
        part("passes", "print('yes')"),
        part("later", "print('at last')", is_alone=True),
    ]
    found = {one.part: one for one in await run_parts(parts, run, LIMIT_S)}
    assert {name: one.verdict for name, one in found.items()} == {
        "fails": "FAIL",
        "hangs": "TIME",
        "passes": "PASS",
        "later": "PASS",
    }
    assert (found["fails"].figures, found["later"].figures) == ("no", "at last")
    assert json.loads((run.folder("later") / "part.json").read_text())["verdict"] == "PASS"


async def test_the_whole_run_ends_in_its_time_and_leaves_some_to_what_comes_last(run: Run):
    code = "import time; time.sleep(600)"
    parts = [
        part("long", code),
        part("unbegun", code, after=("long",)),
        part("last", "print(1)", is_alone=True, reserve_s=LIMIT_S),
    ]
    found = {one.part: one.verdict for one in await run_parts(parts, run, LIMIT_S + 3.0)}
    assert found == {"long": "CUT", "unbegun": "CUT", "last": "PASS"}


async def test_measurements_wait_for_the_end_of_all_others_that_are_not_alone(run: Run):
    gate = run.out / GATE
    waits = (
        f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.02)\nprint('quiet')"
    )
    begins = f"import pathlib; print(pathlib.Path({str(gate)!r}).exists())"
    parts = [part("other", begins), part("measures", waits, has_gate=True), part("alone", begins, is_alone=True)]
    found = {one.part: (one.verdict, one.figures) for one in await run_parts(parts, run, LIMIT_S)}
    assert found == {"other": ("PASS", "False"), "measures": ("PASS", "quiet"), "alone": ("PASS", "True")}
    assert [one.verdict for one in await run_parts(parts[1:2], run, LIMIT_S)] == ["PASS"]


async def test_the_table_keeps_parts_of_earlier_commands(run: Run):
    first, second = PARTS[0], PARTS[1]
    await run_parts([part(first.name, "print('one')")], run, LIMIT_S)
    await run_parts([part(second.name, "print('two')")], run, LIMIT_S)
    rows = summary(run).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {first.name}", f"| {second.name}"]


def test_parts_are_chosen_by_name_and_by_what_the_host_has(run: Run):
    def names(only: str = "", skip: str = "") -> list[str]:
        return [one.name for one in chosen(argparse.Namespace(only=only, skip=skip), run)]

    assert "contract" in names()
    assert "step-times" not in names()
    assert names("step-times,contract") == ["contract", "step-times"]
    assert "contract" not in names(skip="contract")
    assert names("continuation-nccl") == [], "one GPU"
    with pytest.raises(SystemExit, match="no such part: contrakt"):
        names("contrakt")


def test_figures_are_read_from_logs_and_results(run: Run):
    folder = run.folder("contract")
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text(
        "..F\nFAILED tests/contract/test_engine_contract.py::test_a[vllm] - assert 1\n"
        "1 failed, 103 passed, 5 skipped in 230.13s (0:03:50)\n"
    )
    assert suite_counts(run, "contract") == "1 failed, 103 passed, 5 skipped in 230.13s (0:03:50); test_a[vllm]"
    results = {"tokens_per_s": {"bare 512": 18490.0, "service 512": 16400.0}, "ratios": {"service 512": 0.887}}
    run.folder("throughput").mkdir()
    run.result("throughput").write_text(json.dumps({"results": {**results, "failures": []}}))
    assert ratios(run, "throughput") == "bare 512 18,490 tok/s, service 512 0.887"
    ways = [{"transport": "ipc", "stall_ms": 40.0}, {"transport": "nccl", "stall_ms": 50.0}]
    outcome = {"num_equal_after": 31, "num_prompts": 32}
    reports = [{"replicas": ways}, {"replicas": [{**way, "stall_ms": 29.0} for way in ways]}]
    run.folder("push-2").mkdir()
    run.result("push-2").write_text(
        json.dumps({"results": {"verdict": "RIGHT", "outcome": outcome, "reports": reports}})
    )
    assert continued(run, "push-2") == (
        "RIGHT, 31 of 32 as a fresh engine, ipc, stall 40 ms, nccl, stall 50 ms, then up to 29 ms"
    )


@pytest.mark.parametrize("lane", ["vllm", "sglang"])
def test_every_part_names_its_command_and_its_place(lane: str, tmp_path: Path):
    run = Run(lane, "cuda", tmp_path, num_gpus=2)
    assert len({one.name for one in PARTS}) == len(PARTS)
    for one in PARTS:
        command = one.command(run)
        assert "{" not in "".join(command)
        module = command[command.index("-m") + 1]
        assert (
            module == "pytest"
            or (Path(__file__).parents[2] / module.replace(".", "/")).with_suffix(".py").is_file()
        )
