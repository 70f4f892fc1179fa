"""Access to the records of a run in its files or database, for `agentloop view`."""

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
    """Reads the records of a run from its files or database, also while a service is writing. Must be closed."""

    def __init__(self, where: Path | Home) -> None:
        """Raise InvalidRequest if the store does not exist."""
        self._executor: Executor = one_thread("viewer")  # a SQLite connection can be used in one thread only
        self._reader = self._executor.submit(TrajectoryReader, where).result()

    async def list_records(self, query: FactsQuery, user_names: tuple[str, ...] | None = None) -> FactsPage:
        """Implement `RecordsPort.list_records`. Returns all users' records: the caller has access to the files."""
        return await self._ask(lambda: self._reader.list_records(query))

    async def record_at(self, seq: int, user_names: tuple[str, ...] | None = None) -> AnnotatedRecord:
        """Implement `RecordsPort.record_at`."""
        return await self._ask(lambda: self._reader.record_at(seq))

    async def update_reports(self) -> tuple[UpdateReport, ...]:
        """Implement `RecordsPort.update_reports`."""
        return await self._ask(self._reader.updates)

    async def metrics(self) -> MetricsPage:
        """Implement `RecordsPort.metrics` with the metrics that the coordinator saved last."""
        return await self._ask(self._reader.metrics)

    def close(self) -> None:
        """Close the store."""
        self._executor.submit(self._reader.close).result()
        self._executor.shutdown()

    async def _ask(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)
