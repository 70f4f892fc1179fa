"""The view of an operator beside the status: `GET /metrics`, `/flight`, `/history`, `/why`."""

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

TIMEOUT_S = 5.0  # below Prometheus' own of 10
NUM_LOOKED_AT = 100  # of the oldest and the slowest, for findings

Limit = Annotated[int, Query(ge=1, le=1000)]
Name = Annotated[str | None, Query(max_length=512)]
Names = Annotated[Sequence[str], Query(max_length=32)]
Since = Annotated[float, Query(ge=0.0)]


class SeeingRoutes:
    """The routes; all but the metrics' need the admin key, for they tell of all users."""

    def __init__(self, coordinator: SeeingPort) -> None:
        self._coordinator = coordinator

    def routers(self, keys: Keys) -> tuple[APIRouter, APIRouter]:
        """Return the routes of the metrics' key and those of the admin's."""
        scraped = APIRouter(dependencies=[Depends(keys.require_metrics)], responses=errors(), tags=["status"])
        text = {CONTENT_TYPE_LATEST.partition(";")[0]: {"schema": {"type": "string"}}}
        add_route(scraped, "GET", "/metrics", self.metrics, responses={200: {"content": text}})
        watched = APIRouter(dependencies=[Depends(keys.require_admin)], responses=errors(), tags=["status"])
        add_route(watched, "GET", "/flight", self.flight, responses=answered(FlightPage))
        add_route(watched, "GET", "/history", self.history, responses=answered(HistoryPage))
        add_route(watched, "GET", "/why", self.why, responses=answered(list[Finding]))
        return scraped, watched

    async def metrics(self) -> Response:
        """Counters, gauges and histograms of all processes. Without the coordinator: that it does not answer."""
        try:
            page = await in_time(self._coordinator.metrics(), TIMEOUT_S, "no answer")
        except AgentLoopError:
            page = MetricsPage((MetricSample("process_up", ("coordinator",), 0.0),), ())
        text = await asyncio.to_thread(prometheus_text, page)  # a tenth of a second for 3,000 series
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def flight(self, limit: Limit = 20) -> Response:
        """The work of live trajectories and sessions; `limit` rows of the oldest, and of the slowest tools."""
        page = await in_time(self._coordinator.flight(limit), TIMEOUT_S, "the coordinator does not answer")
        return json_response(codec.to_builtins(page))

    async def history(self, metric: Names = (), since: Since = 0.0) -> Response:
        """The last quarter of an hour, a row a second: the series of each `metric`, a name of `/metrics` without
        its prefix, or of all that are kept; the rows after `since`, in seconds since 1970."""
        asked = self._coordinator.history(tuple(metric), since)
        page = await in_time(asked, TIMEOUT_S, "the coordinator does not answer")
        return json_response(codec.to_builtins(page))

    async def why(self, trajectory: Name = None) -> Response:
        """Findings of why nothing moves, or why it is slow, the most decisive first; with `trajectory`, an id as
        `GET /flight` has it, what that one waits for before the rest."""
        status = await in_time(self._coordinator.status(), TIMEOUT_S, "the coordinator does not answer")
        asked = self._coordinator.flight(NUM_LOOKED_AT, trajectory or "")
        flights = await in_time(asked, TIMEOUT_S, "the coordinator does not answer")
        found = findings(status, flights)
        if trajectory is not None:
            if (its := about(trajectory, flights)) is None:
                raise NotFound(
                    f"{trajectory!r} is not in flight: it waits, has ended, or never was", param="trajectory"
                )
            found = its, *found
        return json_response(codec.to_builtins(found))
