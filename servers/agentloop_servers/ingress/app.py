"""The service's HTTP application: combines all routes behind one guard.

`create_app` returns a plain FastAPI app, for any ASGI server (Ray Serve, uvicorn in tests).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agentloop.api.coordinator import FrontPort
from agentloop.engine.interface import TokenEngine
from agentloop.generation.leased_engine import CallLeases
from agentloop.generation.leases import LeaseConfig, LeaseReporter
from agentloop.observability.metrics import MetricsTally
from agentloop.plugins import AllowedImports
from agentloop_servers.endpoint import routes_calls, routes_sessions
from agentloop_servers.endpoint.endpoint import Endpoint, ServedBeside
from agentloop_servers.endpoint.shards import HeldElsewhere
from agentloop_servers.endpoint.token_calls import TokenCallLimits, TokenCalls
from agentloop_servers.http.auth import SESSION_HEADER, Caller, Keys, SessionKey, caller_of
from agentloop_servers.http.guard import HttpGuard, HttpLimits, add_error_handlers
from agentloop_servers.http.openapi import describe
from agentloop_servers.ingress.admin import AdminRoutes, ModeRules
from agentloop_servers.ingress.records import RecordRoutes, TokenLabels
from agentloop_servers.ingress.rollouts import RolloutRoutes
from agentloop_servers.ingress.routes import RouteContext, RouteSettings, registered_routers
from agentloop_servers.ingress.seeing import SeeingRoutes

MODELS_PATH = "/models"
"""Path prefix of the models served next to the policy. Each has all routes below its name."""

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
    labels: TokenLabels = TokenLabels(None),  # noqa: B008 - without a tokenizer it has no state
    model: Path = Path(),
    others: Mapping[str, FastAPI] = MappingProxyType({}),
    judges: Collection[str] = (),
    is_inside: bool = False,
    route_settings: RouteSettings = MappingProxyType({}),
) -> FastAPI:
    """Make the service's HTTP API over a coordinator; `connect` returns the engine at a replica's private URL.

    Weight directories must lie under one of `weight_roots`, image files under one of `image_roots`. A submit with
    an unknown loop or reward, a tool outside `tool_names` or a module outside `allowed_imports` is refused.
    `nodes_without` returns the hosts on which a directory is missing; it blocks. `model` is the directory of the
    engines' initial weights. With an `endpoint` the app serves agents; the caller starts and closes the endpoint's
    sessions and enters the lifespans of `others`, the apps of other models. They are mounted at `/models/NAME` and
    made with `is_inside`: this app's guard protects them. `judges` names the models that rewards may call.
    """
    config = LeaseConfig(max_attempts=2, coordinator_timeout_s=limits.coordinator_timeout_s)
    if endpoint is None:
        tally, reporter = MetricsTally(), LeaseReporter(f"ingress-{uuid.uuid4().hex}", coordinator.report_leases)
    else:
        tally, reporter = endpoint.sessions.parts.tally, endpoint.sessions.reporter  # the endpoint closes them
    leases = CallLeases(coordinator, connect, reporter, config=config, tally=tally)
    rollouts = RolloutRoutes(
        coordinator, keys, leases, limits, tool_names, endpoint, [*image_roots], allowed_imports, judges
    )
    admin = AdminRoutes(coordinator, limits, tuple(weight_roots), rules, endpoint, nodes_without, model)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await rollouts.close()
        await leases.close()
        if endpoint is None:
            await reporter.close()

    opened_by = _no_session_keys if endpoint is None else endpoint.sessions.keys.opened_by
    turns = partial(keys.turn_user, opened_by=opened_by)
    app = _empty_app(keys, turns, limits, tally, lifespan, is_inside=is_inside)
    token_calls = None if endpoint is None else _include_endpoint(app, endpoint, keys, leases, others)
    context = RouteContext(coordinator, keys, limits, admin, endpoint, token_calls)
    routers = registered_routers(context, route_settings)
    routers += [rollouts.open_routes(), rollouts.generate_route(context.generate_dialects), rollouts.user_routes()]
    routers += [admin.router(keys), *SeeingRoutes(coordinator).routers(keys)]
    for router in [*routers, RecordRoutes(coordinator, labels, keys).router()]:
        app.include_router(router)
    describe(app)
    return app


def _no_session_keys(key: str) -> SessionKey | None:
    return None


def _empty_app(
    keys: Keys,
    turns: Callable[[Headers], str],
    limits: HttpLimits,
    tally: MetricsTally,
    lifespan: Callable[[FastAPI], Any],
    *,
    is_inside: bool,
) -> FastAPI:
    """Make an app without routes. It has the guard unless another app mounts it (`is_inside`)."""
    local_only, scopes = keys.is_open, dict[int, Scope]()
    guard = Middleware(
        HttpGuard, limits=limits, is_local_only=local_only, user_of=turns, tally=tally, in_flight=scopes
    )
    middleware = [] if is_inside else [guard]
    app = FastAPI(**_ABOUT, lifespan=lifespan, redirect_slashes=False, middleware=middleware)
    app.state.in_flight = scopes
    add_error_handlers(app, limits)
    return app


def _include_endpoint(
    app: FastAPI,
    endpoint: Endpoint,
    keys: Keys,
    leases: CallLeases,
    others: Mapping[str, FastAPI],
) -> TokenCalls:
    """Add the agents' routes and return the process's unrecorded calls.

    If a handler raises HeldElsewhere, the process that it names answers the request; for ServedBeside the named
    model's app does.
    """

    async def pass_on(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServedBeside)
        return _OfModel(request, others[error.name], f"{MODELS_PATH}/{error.name}", await request.body())

    async def forward(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeldElsewhere)
        assert endpoint.shards is not None
        return await endpoint.shards.forward(request, error.rank)

    app.add_exception_handler(HeldElsewhere, forward)
    app.add_exception_handler(ServedBeside, pass_on)
    limits = TokenCallLimits(score_share=endpoint.limits.score_share)
    token_calls = TokenCalls(endpoint.sessions.parts, leases, limits)
    # Routes match in order and most requests are agents', so theirs are first.
    app.include_router(routes_calls.router(endpoint, keys, token_calls))
    app.include_router(routes_sessions.router(endpoint, keys))
    for name, other in others.items():
        app.mount(f"{MODELS_PATH}/{name}", other)
    return token_calls


class _OfModel(Response):
    """The response of another model's app to a call that arrived at this app.

    The call is outside of any session: a session records only the policy's calls.
    """

    def __init__(self, request: Request, app: FastAPI, root_path: str, body: bytes) -> None:
        super().__init__()
        self._request = request
        self._app = app
        self._root_path = root_path
        self._request_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, body = self._request, self._request_body
        path = request.scope["path"]
        if (session_id := request.path_params.get("session_id")) is not None:
            path = path.removeprefix(f"/sessions/{session_id}")
        state = dict(request.scope["state"])
        if caller_of(request).key is not None:
            state["passed_on"] = Caller((caller_of(request).owner,))
        headers = [(name, value) for name, value in request.scope["headers"] if name != SESSION_HEADER.encode()]
        full = f"{self._root_path}{path}"
        changed = {"path": full, "raw_path": full.encode(), "root_path": self._root_path, "path_params": {}}
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(parts, None) or await receive()

        await self._app({**request.scope, **changed, "state": state, "headers": headers}, again, send)
