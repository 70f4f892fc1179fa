"""The records of a run in its files or database, for `agentloop view`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

from agentloop.api.annotations import AnnotatedRecord
from agentloop.api.coordinator import UpdateReport
from agentloop.api.facts import FactsPage, FactsQuery
from agentloop.observability.metrics import MetricsPage
from agentloop.storage.home import Home
from agentloop.storage.sqlite import one_thread
from agentloop.storage.trajectory_store import TrajectoryReader

T = TypeVar("T")


class StoredRun:
    """The records of a run in its files or database, also while a service writes it. Close it in the end."""

    def __init__(self, where: Path | Home) -> None:
        """Raises InvalidRequest if there is no store."""
        self._executor: Executor = one_thread("viewer")  # SQLite's connections are of one thread
        self._reader = self._executor.submit(TrajectoryReader, where).result()

    async def list_records(self, query: FactsQuery, user_names: tuple[str, ...] | None = None) -> FactsPage:
        """As RecordsPort; with access to the files, all users' records are visible."""
        return await self._ask(lambda: self._reader.list_records(query))

    async def record_at(self, seq: int, user_names: tuple[str, ...] | None = None) -> AnnotatedRecord:
        """As RecordsPort."""
        return await self._ask(lambda: self._reader.record_at(seq))

    async def update_reports(self) -> tuple[UpdateReport, ...]:
        """As RecordsPort."""
        return await self._ask(self._reader.updates)

    async def metrics(self) -> MetricsPage:
        """As RecordsPort: those that the coordinator saved last."""
        return await self._ask(self._reader.metrics)

    def close(self) -> None:
        """Let go of the store."""
        self._executor.submit(self._reader.close).result()
        self._executor.shutdown()

    async def _ask(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)
