"""A worker whose trajectories run in child processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentloop.engine.interface import Engine
from agentloop.generation.leases import LeaseReporter
from agentloop.observability.trace_context import EngineTraces
from agentloop.parsers.by_name import get_parser
from agentloop.rollout.journal_homes import JournalFolder, StoredJournals
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.rollout.worker import Worker
from agentloop_isolation.frames import Setup
from agentloop_isolation.processes import IsolatedRuns
from agentloop_servers.config.service import ServiceConfig
from tests.support.engine.scripted import POLICY, RENDERER, SPEC
from tests.support.fleet.fake_coordinator import FakeCoordinator

TRACES = EngineTraces("run", 1.0)


@asynccontextmanager
async def isolated_worker(
    coordinator: FakeCoordinator,
    engine: Engine,
    *,
    tools: Mapping[str, str],
    capacity: int = 4,
    turns_folder: str | None = None,
    **settings: Any,
):
    """Start a worker whose trajectories run in processes with `tools` (import paths by name). Yields them."""
    await engine.start()
    service = {"model": str(POLICY), "engine": {"kind": "simulated"}, "workers": {"tools": tools}}
    limits = WorkerConfig(capacity=capacity, poll_s=0.05, poll_gap_s=0.001, grace_s=0.5, traces=TRACES)
    setup = Setup(ServiceConfig.model_validate(service).model_dump_json(), limits, turns_folder=turns_folder)
    reporter = LeaseReporter("w", coordinator.report_leases)
    home = JournalFolder(Path(turns_folder)) if turns_folder else StoredJournals(coordinator)
    journal = None if turns_folder is None else TurnJournal(home)
    runs = IsolatedRuns(setup, coordinator, {"sim://a": engine}.__getitem__, reporter, journal=journal, **settings)
    worker = Worker(
        "w",
        coordinator,
        {"sim://a": engine}.__getitem__,
        RENDERER,
        get_parser("hermes"),
        Toolbox([]),
        limits,
        max_context_tokens=SPEC.max_context_tokens,
        vocab_size=RENDERER.vocab_size,
        begin=runs.begin,
        reporter=reporter,
    )
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(200):
            yield runs
    finally:
        worker.close()
        await running
        await runs.close()
        if journal is not None:
            await journal.close()
        await engine.close()
        assert runs.num_processes == 0
