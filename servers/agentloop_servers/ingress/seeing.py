"""Operator routes in addition to the status: `GET /metrics`, `/flight`, `/history`, `/why`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from agentloop.api.coordinator import SeeingPort
from agentloop.api.findings import Finding, about, findings
from agentloop.api.flight import FlightPage
from agentloop.api.history import HistoryPage
from agentloop.errors import AgentLoopError, NotFound
from agentloop.observability.metrics import MetricSample, MetricsPage
from agentloop.values import codec
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.openapi import add_route, answered, errors
from agentloop_servers.http.responses import in_time, json_response
from agentloop_servers.metrics import prometheus_text

TIMEOUT_S = 5.0  # below Prometheus' own scrape timeout of 10
NUM_LOOKED_AT = 100  # the oldest and the slowest trajectories, each this many, from which findings are made

Limit = Annotated[int, Query(ge=1, le=1000)]
Name = Annotated[str | None, Query(max_length=512)]
Names = Annotated[Sequence[str], Query(max_length=32)]
Since = Annotated[float, Query(ge=0.0)]


class SeeingRoutes:
    """The routes. All except `/metrics` require the admin key, because they show the work of all users."""

    def __init__(self, coordinator: SeeingPort) -> None:
        self._coordinator = coordinator

    def routers(self, keys: Keys) -> tuple[APIRouter, APIRouter]:
        """Return the routes of the metrics key and those of the admin key."""
        scraped = APIRouter(dependencies=[Depends(keys.require_metrics)], responses=errors(), tags=["status"])
        text = {CONTENT_TYPE_LATEST.partition(";")[0]: {"schema": {"type": "string"}}}
        add_route(scraped, "GET", "/metrics", self.metrics, responses={200: {"content": text}})
        watched = APIRouter(dependencies=[Depends(keys.require_admin)], responses=errors(), tags=["status"])
        add_route(watched, "GET", "/flight", self.flight, responses=answered(FlightPage))
        add_route(watched, "GET", "/history", self.history, responses=answered(HistoryPage))
        add_route(watched, "GET", "/why", self.why, responses=answered(list[Finding]))
        return scraped, watched

    async def metrics(self) -> Response:
        """Counters, gauges and histograms of all processes. Without the coordinator only `process_up`, which is
        0."""
        try:
            page = await in_time(self._coordinator.metrics(), TIMEOUT_S, "no answer in time")
        except AgentLoopError:
            page = MetricsPage((MetricSample("process_up", ("coordinator",), 0.0),), ())
        text = await asyncio.to_thread(prometheus_text, page)  # takes 0.1 s for 3,000 series
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def flight(self, limit: Limit = 20) -> Response:
        """The work of running trajectories and sessions: the `limit` oldest, and the `limit` slowest tool calls."""
        page = await in_time(
            self._coordinator.flight(limit), TIMEOUT_S, "the coordinator did not answer in time; retry"
        )
        return json_response(codec.to_builtins(page))

    async def history(self, metric: Names = (), since: Since = 0.0) -> Response:
        """The last 15 minutes, one row a second. `metric` selects series by their name in `/metrics` without its
        prefix (default: all that are kept); `since`, in seconds since 1970, selects the rows after it."""
        asked = self._coordinator.history(tuple(metric), since)
        page = await in_time(asked, TIMEOUT_S, "the coordinator did not answer in time; retry")
        return json_response(codec.to_builtins(page))

    async def why(self, trajectory: Name = None) -> Response:
        """Explain why the service makes no progress or is slow, the most decisive finding first. With `trajectory`,
        an id from `GET /flight`, the first finding says what that trajectory waits for."""
        status = await in_time(
            self._coordinator.status(), TIMEOUT_S, "the coordinator did not answer in time; retry"
        )
        asked = self._coordinator.flight(NUM_LOOKED_AT, trajectory or "")
        flights = await in_time(asked, TIMEOUT_S, "the coordinator did not answer in time; retry")
        found = findings(status, flights)
        if trajectory is not None:
            if (its := about(trajectory, flights)) is None:
                raise NotFound(
                    f"{trajectory!r} is not running: it is queued, has ended, or never existed", param="trajectory"
                )
            found = its, *found
        return json_response(codec.to_builtins(found))
