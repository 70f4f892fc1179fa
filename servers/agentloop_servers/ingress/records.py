"""Record routes for the viewer and `RolloutClient.list_records`: `GET /trajectories`, and one complete record.

A service reads records from its coordinator's store, `agentloop view` from the files of a run.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as PathParameter
from starlette.responses import Response
from tokenizers import Tokenizer

from agentloop.api.annotations import AnnotatedRecord
from agentloop.api.coordinator import RecordsPort, UpdateReport, as_its_users, seen_reports
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
from agentloop.api.owners import shown_id
from agentloop.observability.metrics import phase_seconds
from agentloop.types import Trajectory
from agentloop.values import codec
from agentloop_servers.config.service import TOKENIZER_HASH_NAME, TOKENIZER_NAME
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.openapi import add_route, answered, errors
from agentloop_servers.http.responses import in_time, json_response

_STORE_TIMEOUT_S = 30.0
_MAX_SEQ = (1 << 63) - 1  # larger integers do not fit the database's column

T = TypeVar("T")

CROSSED, _MAX_CROSSED = "crossed an update", 3
NOTABLE = {
    CROSSED: FactsQuery(limit=MAX_LISTED, has_totals=False),  # filtered from the latest
    "best": FactsQuery(ListOrder.BEST, limit=2, has_totals=False),
    "worst": FactsQuery(ListOrder.WORST, limit=2, has_totals=False),
    "slowest": FactsQuery(ListOrder.SLOWEST, limit=2, has_totals=False),
    "failed": FactsQuery(failed=True, limit=3, has_totals=False),
}
"""The reasons to show a record, each with the query that finds candidates."""

_Text = Annotated[str, Query(max_length=MAX_QUERY_CHARS)]


class TokenLabels:
    """The texts of single tokens, for display. A token with part of a character is shown as U+FFFD.

    Uses the run's copy of the tokenizer, or the model's tokenizer if it is the one that the run started with.
    """

    def __init__(self, model: Path | None, run_dir: Path | None = None) -> None:
        self._files = [folder / TOKENIZER_NAME for folder in (run_dir, model) if folder is not None]
        kept = None if run_dir is None else run_dir / TOKENIZER_HASH_NAME
        self._sha256 = kept.read_text() if kept is not None and kept.is_file() else None
        self._tokenizer: Tokenizer | None = None

    def page(self, found: AnnotatedRecord) -> RecordPage:
        """Return a record with its tokens' texts. Without the tokenizer the texts are empty and the page says why.
        Blocks."""
        record = codec.decode(found.data, Trajectory).without_aux
        if self._tokenizer is None:
            file = next(filter(Path.is_file, self._files), None)
            if file is None:
                missing = f"{self._files[-1] if self._files else 'the tokenizer'} is missing"
                return RecordPage(record, {}, f"token texts are not available: {missing}", found.annotations)
            content = file.read_bytes()
            if self._sha256 not in (None, hashlib.sha256(content).hexdigest()):
                missing = f"{file} is not the run's tokenizer"
                return RecordPage(record, {}, f"token texts are not available: {missing}", found.annotations)
            self._tokenizer = Tokenizer.from_buffer(content)
        parts = [part for path in record.paths for part in (path.prompt_ids, path.response_ids)]
        ids = np.unique(np.concatenate(parts)).tolist() if parts else []
        texts = self._tokenizer.decode_batch([[one] for one in ids], skip_special_tokens=False)
        return RecordPage(record, dict(zip(map(str, ids), texts, strict=True)), annotations=found.annotations)


def notable(pages: Mapping[str, FactsPage]) -> tuple[NotableRecord, ...]:
    """Select the records to show from the pages that answer `NOTABLE`; each record appears once, with its
    reasons."""
    reasons = dict[RecordFacts, list[str]]()
    for reason, page in pages.items():
        records = page.records
        if reason == CROSSED:
            records = tuple(one for one in records if one.oldest_version != one.newest_version)[:_MAX_CROSSED]
        for one in records:
            reasons.setdefault(one, []).append(reason)
    return tuple(NotableRecord(one, tuple(found)) for one, found in reasons.items())


class RecordRoutes:
    """The record routes. With `keys` users see their own records and admins all; without keys everyone sees all."""

    def __init__(self, records: RecordsPort, labels: TokenLabels, keys: Keys | None = None) -> None:
        self._records = records
        self._labels = labels
        self._keys = keys

    def router(self) -> APIRouter:
        keys = self._keys
        needs = [] if keys is None else [Depends(keys.require_owner)]
        of_all = [] if keys is None else [Depends(keys.require_admin)]
        router = APIRouter(dependencies=needs, responses=errors(), tags=["records"])
        add_route(router, "GET", "/trajectories", self.list_records, responses=answered(FactsPage))
        add_route(router, "GET", "/trajectories/notable", self.notable, responses=answered(list[NotableRecord]))
        add_route(router, "GET", "/trajectories/{seq}", self.record, responses=answered(RecordPage))
        add_route(router, "GET", "/updates", self.updates, responses=answered(list[UpdateReport]))
        phases = answered(dict[str, float])
        add_route(router, "GET", "/phases", self.phases, responses=phases, dependencies=of_all)
        return router

    async def list_records(
        self,
        request: Request,
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
        """Summaries of the caller's records (an admin's: all), filtered by failure, task, group, text and
        ranges."""
        ranges = min_reward, max_reward, min_s, max_s
        query = FactsQuery(order, failed, task, text, limit, cursor, group, *ranges, has_totals)
        page = await self._page(query, self._sees(request))
        return json_response(codec.to_builtins(page))

    async def notable(self, request: Request) -> Response:
        """Notable records: the best, worst, slowest and failed ones, and some that crossed a weight update."""
        names = self._sees(request)
        pages = {reason: await self._page(query, names) for reason, query in NOTABLE.items()}
        return json_response(codec.to_builtins(notable(pages)))

    async def updates(self, request: Request) -> Response:
        """The reports of the latest weight updates, oldest first."""
        found = await in_time(
            self._records.update_reports(), _STORE_TIMEOUT_S, "the record store did not answer in time; retry"
        )
        return json_response(codec.to_builtins(seen_reports(found, self._sees(request))))

    async def phases(self) -> Response:
        """The seconds that trajectories and turns have spent, by phase."""
        page = await in_time(
            self._records.metrics(), _STORE_TIMEOUT_S, "the record store did not answer in time; retry"
        )
        return json_response(phase_seconds(page))

    async def record(
        self, request: Request, seq: Annotated[int, PathParameter(ge=-_MAX_SEQ - 1, le=_MAX_SEQ)]
    ) -> Response:
        """One complete record, by the `seq` of its summary, with the texts of its tokens and its annotations."""
        names = self._sees(request)
        asked = self._records.record_at(seq, names)
        found = await in_time(asked, _STORE_TIMEOUT_S, "the record store did not answer in time; retry")
        return await asyncio.to_thread(self._shown, found, names)

    def _sees(self, request: Request) -> tuple[str, ...] | None:
        return None if self._keys is None else self._keys.sees(request)

    async def _page(self, query: FactsQuery, names: tuple[str, ...] | None) -> FactsPage:
        asked = self._records.list_records(query, names)
        page = await in_time(asked, _STORE_TIMEOUT_S, "the record store did not answer in time; retry")
        return replace(page, records=tuple(_as_seen(one, names) for one in page.records))

    def _shown(self, found: AnnotatedRecord, names: tuple[str, ...] | None) -> Response:
        page = self._labels.page(found)
        return json_response(codec.to_builtins(replace(page, record=_as_seen(page.record, names))))


R = TypeVar("R", RecordFacts, Trajectory)


def _as_seen(record: R, names: tuple[str, ...] | None) -> R:
    """Return a record with ids as its user knows them. Admins (`names` is None) read full ids."""
    if names is None:
        return record
    own = as_its_users(record) if isinstance(record, Trajectory) else record
    return replace(own, rollout_id=shown_id(record.rollout_id))
