"""The service's HTTP application: its routes put together, behind one guard.

`create_app` makes a plain FastAPI app, for any server (Ray Serve, a test's uvicorn).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import Scope

from agentloop.api.coordinator import FrontPort
from agentloop.engine import TokenEngine
from agentloop.generation.leased_engine import CallLeases
from agentloop.generation.leases import LeaseConfig, LeaseReporter
from agentloop.metrics import MetricsTally
from agentloop.plugins import AllowedImports
from agentloop_servers.endpoint import routes_calls, routes_sessions
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.endpoint.sglang_calls import SglangCalls
from agentloop_servers.endpoint.shards import HeldElsewhere
from agentloop_servers.endpoint.token_calls import TokenCalls
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import HttpGuard, HttpLimits, add_error_handlers
from agentloop_servers.http.openapi import describe
from agentloop_servers.ingress.admin import AdminRoutes, ModeRules
from agentloop_servers.ingress.rollouts import RolloutRoutes
from agentloop_servers.ingress.seeing import SeeingRoutes
from agentloop_servers.ingress.sglang_control import SglangControlRoutes
from agentloop_servers.ingress.vllm_control import VllmControlRoutes
from agentloop_servers.viewer.app import viewer_routers
from agentloop_servers.viewer.records import TokenLabels

_ABOUT: dict[str, Any] = {
    "title": "agentloop",
    "description": "Asynchronous rollouts of language-model agents.",
    "version": "1",
    "docs_url": None,
    "redoc_url": None,
}


def create_app(
    coordinator: FrontPort,
    connect: Callable[[str], TokenEngine],
    keys: Keys,
    limits: HttpLimits = HttpLimits(),  # noqa: B008 - frozen
    *,
    weight_roots: Iterable[Path] = (),
    tool_names: frozenset[str] | None = None,
    allowed_imports: AllowedImports = AllowedImports(),  # noqa: B008 - frozen
    rules: ModeRules = ModeRules(),  # noqa: B008 - frozen
    endpoint: Endpoint | None = None,
    image_roots: Iterable[Path] = (),
    nodes_without: Callable[[str], tuple[str, ...]] | None = None,
    labels: TokenLabels = TokenLabels(None),  # noqa: B008 - it has none
    model: Path = Path(),
) -> FastAPI:
    """Make the service's HTTP API over a coordinator; `connect` gives the engine behind a replica's private URL.

    Weight directories must lie under one of `weight_roots`; `rules` say what the service's mode allows. Tasks that
    name unknown loops or rewards are refused at once, with `tool_names` also those that name other tools, and with
    `allowed_imports` those that name other modules; the worker ends what remains as invalid. Their images may be
    files within `image_roots`. `nodes_without` names the hosts that do not see a directory of weights; it blocks.
    `labels` are the viewer's; `model` has the weights that engines begin with. With an `endpoint`, agents are
    served and recorded too, and trainers that speak to vLLM's or SGLang's server; its sessions are the caller's to
    start and close, and their parts have the tally.
    """
    config = LeaseConfig(max_attempts=2, coordinator_timeout_s=limits.coordinator_timeout_s)
    if endpoint is None:
        tally, reporter = MetricsTally(), LeaseReporter(f"ingress-{uuid.uuid4().hex}", coordinator.report_leases)
    else:
        tally, reporter = endpoint.sessions.parts.tally, endpoint.sessions.reporter  # theirs to close
    leases = CallLeases(coordinator, connect, reporter, config=config, tally=tally)
    images, sglang = tuple(image_roots), _sglang_calls(endpoint, leases)
    rollouts = RolloutRoutes(
        coordinator, keys, leases, limits, tool_names, endpoint, images, allowed_imports, sglang
    )
    admin = AdminRoutes(coordinator, limits, tuple(weight_roots), rules, endpoint, nodes_without, model)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await rollouts.close()
        await leases.close()
        if endpoint is None:
            await reporter.close()

    local_only, turns, scopes = keys.is_open, keys.turn_user, dict[int, Scope]()
    guard = Middleware(
        HttpGuard, limits=limits, is_local_only=local_only, user_of=turns, tally=tally, in_flight=scopes
    )
    app = FastAPI(**_ABOUT, lifespan=lifespan, redirect_slashes=False, middleware=[guard])
    app.state.in_flight = scopes
    add_error_handlers(app, limits)
    if endpoint is not None and sglang is not None:
        _include_endpoint(app, endpoint, keys, sglang, coordinator, admin)
    routers = rollouts.open_routes(), rollouts.generate_route(), rollouts.user_routes(), admin.router(keys)
    for router in (*routers, *SeeingRoutes(coordinator).routers(keys), *viewer_routers(coordinator, labels, keys)):
        app.include_router(router)
    describe(app)
    return app


def _sglang_calls(endpoint: Endpoint | None, leases: CallLeases) -> SglangCalls | None:
    return None if endpoint is None else SglangCalls(endpoint, TokenCalls(endpoint.sessions.parts, leases))


def _include_endpoint(
    app: FastAPI, endpoint: Endpoint, keys: Keys, sglang: SglangCalls, coordinator: FrontPort, admin: AdminRoutes
) -> None:
    """Add the routes for agents and the dialects' control verbs, first: most requests are theirs.

    A handler that raises HeldElsewhere is answered by the process that it names.
    """

    async def forward(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeldElsewhere)
        assert endpoint.shards is not None
        return await endpoint.shards.forward(request, error.rank)

    app.add_exception_handler(HeldElsewhere, forward)
    app.include_router(routes_calls.router(endpoint, keys, sglang.token_calls))
    controls = (
        VllmControlRoutes(coordinator, admin, endpoint),
        SglangControlRoutes(coordinator, admin, sglang, endpoint),
    )
    for routes in (sglang, *controls):
        app.include_router(routes.router(keys))
    app.include_router(routes_sessions.router(endpoint, keys))
