"""The progress of `agentloop rollout` on a terminal."""

from __future__ import annotations

import asyncio
import io
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from agentloop.client.client import RolloutClient
from agentloop.types import Limits, Message, RolloutTask, Timings
from agentloop_servers.cli import progress as module
from agentloop_servers.cli.progress import Tally, open_progress
from tests.servers.cli.test_top import LOOP
from tests.support.records.samples import make_trajectory
from tests.support.service.whole_service import simulated_config, whole_service


def test_seconds_and_the_time_to_the_end() -> None:
    tally = Tally(200, time.monotonic() - 100)
    assert "p50" not in tally.describe()
    assert "ETA" not in tally.describe()
    for seconds in range(1, 101):
        tally.add(replace(make_trajectory(), timings=Timings(total_s=seconds)))
    assert "p50 50.5 s, p95 95.0 s  ETA 100 s" in tally.describe()
    for _ in range(100):
        tally.add_lost()
    assert "ETA" not in tally.describe()


async def test_the_three_oldest_of_the_run_and_what_they_wait_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_OLDEST_S", 0.1)
    task = RolloutTask("t", (Message("user", "Hi"),), loop=LOOP, limits=Limits(timeout_s=100))
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    async with whole_service(simulated_config(), tmp_path) as url, RolloutClient(url) as client:
        other = await client.submit([task])
        await asyncio.sleep(0.5)
        own = await client.submit([task], num_samples=4)
        async with open_progress(console, client) as progress, asyncio.timeout(30):
            progress.show(Tally(4, time.monotonic(), own.rollout_ids))
            while output.getvalue().rpartition("rollout")[2].count(": loop for") < 3:
                await asyncio.sleep(0.1)
        for rollout in (other, own):
            await client.cancel(rollout.rollout_ids[0])
    shown = output.getvalue()
    assert shown.rpartition("rollout")[2].count(own.rollout_ids[0] + "/") == 3
    assert other.rollout_ids[0] not in shown
