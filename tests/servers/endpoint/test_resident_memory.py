"""The memory quota of sessions in bytes of a real process, measured by the growth of its resident memory."""

import asyncio
from pathlib import Path

import pytest

from tests.benchmarks.endpoint_load import Load, open_sessions, talk
from tests.benchmarks.endpoint_processes import EndpointFigures, ask, process, run_endpoint, run_engine

QUOTA_MIB = 4
NUM_BATCHES = 20
NUM_TOGETHER = 10
NUM_TURNS = 20
# The process also needs memory for the cached messages (2.5 MiB of these), its connections and open calls, SQLite's
# pages and the tokenizer's cache.
BESIDE_MIB = 12


@pytest.mark.long
def test_the_process_grows_by_about_its_quota(tmp_path: Path):
    with process(run_engine) as (_, engine_url):
        settings = {"max_resident_mib": QUOTA_MIB}
        with process(run_endpoint, tmp_path, engine_url, settings) as (pipe, url):

            async def load() -> EndpointFigures:
                await talk(await open_sessions(url, NUM_TOGETHER, "warm-up"), NUM_TURNS, Load())
                ask(pipe, "mark")
                for batch in range(NUM_BATCHES):
                    await talk(await open_sessions(url, NUM_TOGETHER, f"agent-{batch}"), NUM_TURNS, Load())
                return ask(pipe, "read")

            found = asyncio.run(load())
    num_sessions = NUM_BATCHES * NUM_TOGETHER
    assert found.num_sessions < num_sessions / 2  # the quota was exceeded several times
    assert found.counted_bytes < (QUOTA_MIB + 1) << 20
    assert found.rss_bytes < (2 * QUOTA_MIB + BESIDE_MIB) << 20
