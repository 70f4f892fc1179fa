"""The records as the viewer and `RolloutClient.list_records` read them: `GET /trajectories`, and one of them whole.

A service answers from its coordinator's store, `agentloop view` from the files of a run (`StoredRun`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Query
from starlette.responses import Response
from tokenizers import Tokenizer

from agentloop import codec
from agentloop.api.coordinator import RecordsPort, UpdateReport
from agentloop.api.facts import (
    MAX_LISTED,
    MAX_QUERY_CHARS,
    FactsPage,
    FactsQuery,
    ListOrder,
    NotableRecord,
    RecordFacts,
    RecordPage,
)
from agentloop.storage.home import Home
from agentloop.storage.sqlite import one_thread
from agentloop.storage.trajectory_store import TrajectoryReader
from agentloop.types import Trajectory
from agentloop_servers.config import TOKENIZER_HASH_NAME, TOKENIZER_NAME
from agentloop_servers.http.openapi import add_route, answered, errors
from agentloop_servers.http.responses import in_time, json_response

_STORE_TIMEOUT_S = 30.0

T = TypeVar("T")

CROSSED, _MAX_CROSSED = "crossed an update", 3
NOTABLE = {
    CROSSED: FactsQuery(limit=MAX_LISTED, has_totals=False),  # among the latest
    "best": FactsQuery(ListOrder.BEST, limit=2, has_totals=False),
    "worst": FactsQuery(ListOrder.WORST, limit=2, has_totals=False),
    "slowest": FactsQuery(ListOrder.SLOWEST, limit=2, has_totals=False),
    "failed": FactsQuery(failed=True, limit=3, has_totals=False),
}
"""What makes a record worth a look, by the query that finds it."""

_Text = Annotated[str, Query(max_length=MAX_QUERY_CHARS)]


class TokenLabels:
    """The texts of single tokens, for people: one that has a part of a character is shown as U+FFFD.

    The tokenizer is the run's copy, or the model's while it is the one that the run was begun with.
    """

    def __init__(self, model: Path | None, run_dir: Path | None = None) -> None:
        self._files = [folder / TOKENIZER_NAME for folder in (run_dir, model) if folder is not None]
        kept = None if run_dir is None else run_dir / TOKENIZER_HASH_NAME
        self._sha256 = kept.read_text() if kept is not None and kept.is_file() else None
        self._tokenizer: Tokenizer | None = None

    def page(self, data: bytes) -> RecordPage:
        """Return an encoded record with its tokens' texts; without the tokenizer with none, and why. Blocks."""
        record = codec.decode(data, Trajectory)
        if self._tokenizer is None:
            file = next(filter(Path.is_file, self._files), None)
            if file is None:
                missing = f"there is no {self._files[-1] if self._files else 'tokenizer'} any more"
                return RecordPage(record, {}, f"no texts of tokens: {missing}")
            content = file.read_bytes()
            if self._sha256 not in (None, hashlib.sha256(content).hexdigest()):
                return RecordPage(record, {}, f"no texts of tokens: {file} is another tokenizer than the run's")
            self._tokenizer = Tokenizer.from_buffer(content)
        parts = [part for path in record.paths for part in (path.prompt_ids, path.response_ids)]
        ids = np.unique(np.concatenate(parts)).tolist() if parts else []
        texts = self._tokenizer.decode_batch([[one] for one in ids], skip_special_tokens=False)
        return RecordPage(record, dict(zip(map(str, ids), texts, strict=True)))


def notable(pages: Mapping[str, FactsPage]) -> tuple[NotableRecord, ...]:
    """Return the records worth a look, each once, of the pages that answer `NOTABLE`."""
    reasons = dict[RecordFacts, list[str]]()
    for reason, page in pages.items():
        records = page.records
        if reason == CROSSED:
            records = tuple(one for one in records if one.oldest_version != one.newest_version)[:_MAX_CROSSED]
        for one in records:
            reasons.setdefault(one, []).append(reason)
    return tuple(NotableRecord(one, tuple(found)) for one, found in reasons.items())


class RecordRoutes:
    """The routes of the records."""

    def __init__(self, records: RecordsPort, labels: TokenLabels) -> None:
        self._records = records
        self._labels = labels

    def router(self, dependencies: Sequence[Any] = ()) -> APIRouter:
        """Return the routes, behind these dependencies."""
        router = APIRouter(dependencies=list(dependencies), responses=errors(), tags=["records"])
        add_route(router, "GET", "/trajectories", self.list_records, responses=answered(FactsPage))
        add_route(router, "GET", "/trajectories/notable", self.notable, responses=answered(list[NotableRecord]))
        add_route(router, "GET", "/trajectories/{seq}", self.record, responses=answered(RecordPage))
        add_route(router, "GET", "/updates", self.updates, responses=answered(list[UpdateReport]))
        return router

    async def list_records(
        self,
        order: ListOrder = ListOrder.NEWEST,
        failed: bool = False,
        task: _Text = "",
        text: _Text = "",
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50,
        cursor: _Text = "",
        group: _Text = "",
        min_reward: float | None = None,
        max_reward: float | None = None,
        min_s: float | None = None,
        max_s: float | None = None,
        has_totals: bool = True,
    ) -> Response:
        """The facts of all stored records, by order, failure, task, group, text, ranges of reward and seconds."""
        ranges = min_reward, max_reward, min_s, max_s
        query = FactsQuery(order, failed, task, text, limit, cursor, group, *ranges, has_totals)
        page = await self._page(query)
        return json_response(codec.to_builtins(page))

    async def notable(self) -> Response:
        """The records worth a look: the best, worst and slowest, failed ones, and some over a weight update."""
        pages = {reason: await self._page(query) for reason, query in NOTABLE.items()}
        return json_response(codec.to_builtins(notable(pages)))

    async def updates(self) -> Response:
        """The reports of the latest weight updates, oldest first."""
        found = await in_time(self._records.update_reports(), _STORE_TIMEOUT_S, "the store does not answer")
        return json_response(codec.to_builtins(found))

    async def record(self, seq: int) -> Response:
        """One record whole, by the `seq` of its facts, with the texts of its tokens."""
        data = await in_time(self._records.record_at(seq), _STORE_TIMEOUT_S, "the store does not answer")
        return await asyncio.to_thread(self._shown, data)

    async def _page(self, query: FactsQuery) -> FactsPage:
        return await in_time(self._records.list_records(query), _STORE_TIMEOUT_S, "the store does not answer")

    def _shown(self, data: bytes) -> Response:
        return json_response(codec.to_builtins(self._labels.page(data)))


class StoredRun:
    """The records of a run in its files or database, read beside whoever writes it. Close it in the end."""

    def __init__(self, where: Path | Home) -> None:
        """Raises InvalidRequest if there is no store."""
        self._executor: Executor = one_thread("viewer")  # SQLite's connections are of one thread
        self._reader = self._executor.submit(TrajectoryReader, where).result()

    async def list_records(self, query: FactsQuery) -> FactsPage:
        """As RecordsPort."""
        return await self._ask(lambda: self._reader.list_records(query))

    async def record_at(self, seq: int) -> bytes:
        """As RecordsPort."""
        return await self._ask(lambda: self._reader.record_at(seq))

    async def update_reports(self) -> tuple[UpdateReport, ...]:
        """As RecordsPort."""
        return await self._ask(self._reader.updates)

    def close(self) -> None:
        """Let go of the store."""
        self._executor.submit(self._reader.close).result()
        self._executor.shutdown()

    async def _ask(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)
