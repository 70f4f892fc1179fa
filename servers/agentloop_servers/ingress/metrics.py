"""`GET /metrics`: the whole service in Prometheus' text format, from any of its processes."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from agentloop.api.coordinator import FrontPort
from agentloop.errors import AgentLoopError
from agentloop.metrics import MetricSample, MetricsPage
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.openapi import errors
from agentloop_servers.http.responses import in_time
from agentloop_servers.metrics import prometheus_text

TIMEOUT_S = 5.0  # below Prometheus' own of 10


def metrics_route(coordinator: FrontPort, keys: Keys) -> APIRouter:
    """Return the route, behind the metrics' key or the admin's."""
    router = APIRouter(dependencies=[Depends(keys.require_metrics)], responses=errors(), tags=["status"])

    async def metrics() -> Response:
        """Counters, gauges and histograms of all processes. Without the coordinator: that it does not answer."""
        try:
            page = await in_time(coordinator.metrics(), TIMEOUT_S, "no answer")
        except AgentLoopError:
            page = MetricsPage((MetricSample("process_up", ("coordinator",), 0.0),), ())
        return Response(prometheus_text(page), media_type=CONTENT_TYPE_LATEST)

    content = {CONTENT_TYPE_LATEST.partition(";")[0]: {"schema": {"type": "string"}}}
    router.add_api_route(
        "/metrics", metrics, methods=["GET"], response_class=Response, responses={200: {"content": content}}
    )
    return router
