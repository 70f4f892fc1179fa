"""The load for the comparison with the bare engine: the same requests in every arm, and CPU time by process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.benchmarks.cpu_seconds import CpuSeconds
from tests.benchmarks.gpu_load import PromptSizes, Turn, Window, Workload, chat, turns_of
from tests.benchmarks.gpu_throughput import Figures, figures_of, ratios, run_loops, tables
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
        load = replace(LOAD, until=time.perf_counter() + 60)
        records, _ = await run_loops(url, load)
        ended = replace(LOAD, until=time.perf_counter())
        after, _ = await run_loops(url, ended)
        plain = await chat(url, load, range(4), 2, is_streamed=False)
        streamed = await chat(url, load, range(4), 2, is_streamed=True)
        unasked = await chat(url, ended, range(4), 2, is_streamed=False)
    turns = [turn for record in records for turn in turns_of(record)]
    assert len(turns) == 12
    assert sum(turn.num_tokens for turn in turns) == sum(record.num_sampled_tokens for record in records) <= 96
    assert all(turn.outside_s is not None and 0 < turn.outside_s <= turn.ended_at - turn.began_at for turn in turns)
    assert [turns_of(record) for record in after] == [[]] * 4
    assert unasked.turns == []
    for one in (plain, streamed):
        assert (len(one.turns), sum(turn.num_tokens for turn in one.turns), len(one.finish_s)) == (12, 96, 4)
    assert (plain.num_chunks, len(streamed.first_s)) == (0, 12)
    assert streamed.num_chunks >= 12
    sizes = PromptSizes.of(records)
    path = records[0].path
    assert sizes.num_shared + sizes.num_own == len(path.prompt_ids)
    observed = path.turns[-1].end - int(path.response_mask.sum())
    assert sizes.num_observed == round(observed / 2)


def test_a_window_has_the_share_of_the_tokens_whose_turns_cross_its_edges():
    window = Window(10.0, 20.0)
    turns = [
        Turn(5.0, 15.0, 100, 1.0),
        Turn(12.0, 14.0, 7, 0.5),
        Turn(19.0, 23.0, 40, 2.0),
        Turn(0.0, 9.0, 99, 0.0),
    ]
    assert window.num_tokens(turns) == pytest.approx(50 + 7 + 10)
    load = Workload(8, 2)
    figures = figures_of("service", load, window, turns, {"worker": 0.4})
    assert (figures.num_turns, figures.tokens_per_s) == (2, pytest.approx(6.7))
    assert figures.idle == pytest.approx(1 - (0.5 * 9 + 1.5 + 0.25 * 2) / 20)
    assert figures.cpu_s_per_turn == {"worker": pytest.approx(0.1)}
    with pytest.raises(RuntimeError, match="more --rounds"):
        figures_of("service", load, window, turns[:2], {})


def test_arms_are_set_beside_the_bare_engine_of_the_same_load():
    def arm(name: str, at_once: int, tokens: float) -> Figures:
        return Figures(name, at_once, 12, tokens, 2.0, 0.1, 0.2, cpu_s_per_turn={"worker": 0.0005})

    cycles = [(800, 1000), (900, 1100), (820, 990)]
    found = [arm(*one) for some, bare in cycles for one in (("service", 8, some), ("bare", 8, bare))]
    found.append(arm("service", 4, 700))
    assert ratios(found) == {"service 8": 0.82}
    table, cpu = tables(found).values()
    rows = [line.split(" | ")[:3] for line in table.splitlines()[2:]]
    assert rows[:2] == [["| service, 8", "400", "0.82"], ["| bare, 8", "500", ""]]
    assert rows[-1] == ["| service, 4", "350", ""]
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
        begun = sum(psutil.Process().cpu_times()[:2])  # the measured clock, which has coarse ticks
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
