"""The load that is set beside the bare engine: the same requests in every arm, and CPU time where it was spent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.benchmarks.cpu_seconds import CpuSeconds
from tests.benchmarks.gpu_load import Planned, Workload, chat
from tests.benchmarks.gpu_throughput import Figures, plan_of, run_loops, tables
from tests.support.service.whole_service import simulated_config, whole_service

LOAD = Workload(4, 2, num_sampled=8)


def test_a_workload_is_the_same_in_every_process():
    spread = Workload(64, 8, num_sampled=100, spread=0.5)
    assert [LOAD.lengths(number) for number in range(4)] == [[8, 8, 8]] * 4
    lengths = [length for number in range(64) for length in spread.lengths(number)]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len({spread.text(number).split()[0] for number in range(64)}) == 64
    assert spread.tasks() == spread.tasks()


async def test_loops_and_agents_have_the_turns_that_are_asked_for(tmp_path: Path):
    async with whole_service(simulated_config(), tmp_path) as url:
        figures, records = await run_loops(url, LOAD, "test")
        plain = await chat(url, LOAD, range(4), 2, is_streamed=False)
        streamed = await chat(url, LOAD, range(4), 2, is_streamed=True)
    assert figures.num_turns == 12
    assert figures.num_tokens == sum(record.num_sampled_tokens for record in records) <= 96
    assert figures.idle is not None
    assert 0 <= figures.idle < 1
    assert figures.outside_p50_s is not None
    assert 0 < figures.outside_p50_s <= figures.turn_p50_s
    assert [(len(one.turn_s), one.num_tokens, len(one.finish_s)) for one in (plain, streamed)] == [(12, 96, 4)] * 2
    assert (plain.num_chunks, len(streamed.first_s)) == (0, 12)
    assert streamed.num_chunks >= 12
    for planned, record in zip(plan_of(records), records, strict=True):
        path = record.path
        ids = sum(number + len(observed) for number, observed in planned.turns)
        assert (len(planned.prompt_ids), ids) == (len(path.prompt_ids), path.turns[-1].end)
        assert sum(number for number, _ in planned.turns) == path.response_mask.sum()
        assert [bool(observed) for _, observed in planned.turns] == [True, True, False]
        assert Planned.from_json(planned.to_json()) == planned


def test_arms_are_set_beside_the_bare_engine_of_the_same_load():
    def arm(name: str, at_once: int, seconds: float) -> Figures:
        return Figures(name, at_once, 12, 1000, seconds, 0.1, 0.2, cpu_s={"worker": 0.006})

    table, cpu = tables([arm("service", 8, 2.0), arm("service", 4, 2.0), arm("bare", 8, 1.6)]).values()
    rows = [line.split(" | ")[:3] for line in table.splitlines()[2:]]
    assert rows == [["| service, 8", "500", "0.8"], ["| service, 4", "500", ""], ["| bare, 8", "625", "1"]]
    assert cpu.splitlines()[2] == "| service, 8 | 0.5 | 0.5 |"


@pytest.mark.slow
def test_cpu_time_is_that_of_the_process_and_its_children():
    lines = ("import time", "end = time.process_time() + 0.35", "while time.process_time() < end: pass")
    spins = "\n".join((*lines, "print('spun', flush=True)", "time.sleep(60)"))
    cpu = CpuSeconds(os.getpid(), root="this")
    children = [subprocess.Popen([sys.executable, "-c", spins], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        begun = sum(psutil.Process().cpu_times()[:2])  # the clock of what is measured, which has ticks
        while sum(psutil.Process().cpu_times()[:2]) < begun + 0.12:
            pass
        used = cpu.used()
        assert used["others"] >= 0.6
        assert used["this"] >= 0.1
        assert cpu.used(frozenset({children[0].pid}))["others"] < used["others"]
    finally:
        for child in children:
            child.kill()
            child.communicate()
