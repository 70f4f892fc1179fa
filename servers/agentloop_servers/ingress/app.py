"""The HTTP front door: validates, authorises, and passes on. It holds no policy and no state but calls in flight.

`create_app` is plain FastAPI; who serves it (Ray Serve, a test's uvicorn) is not its business. A direct call
takes a lease, talks to the replica's own port, and gives the lease back on every path; a client that leaves
cancels the call, which aborts it in the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import structlog
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi import Path as PathParam
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.responses import Response

from agentloop import codec
from agentloop.api import (
    ID_PATTERN,
    MAX_CURSOR,
    MAX_PAGE,
    MAX_WAIT_S,
    SESSIONS_ROLLOUT_ID,
    ErrorBody,
    FrontPort,
    GenerateAnswer,
    GenerateBody,
    HealthBody,
    Page,
    PageBody,
    RolloutStatusBody,
    StatusBody,
    SubmitBody,
    rollout_status,
)
from agentloop.chat import CountTokensBody, MessagesBody, ResponsesBody
from agentloop.engine import Engine
from agentloop.errors import AgentLoopError, DeadlineExceeded, InvalidRequest, Overloaded
from agentloop.rollout import load_loop, load_reward
from agentloop.types import GenerateRequest, Generation, Lease, RolloutGroup
from agentloop_servers.endpoint import Elsewhere, Endpoint, admit, names_session
from agentloop_servers.endpoint import routes_messages as messages_routes
from agentloop_servers.endpoint import routes_openai as routes
from agentloop_servers.endpoint import routes_responses as responses_routes
from agentloop_servers.endpoint import routes_sessions as session_routes
from agentloop_servers.http import (
    HttpGuard,
    HttpLimits,
    Keys,
    add_error_handlers,
    body_schema,
    describe_bodies,
    json_body,
    unless_client_leaves,
)
from agentloop_servers.ingress.admin import ADMIN_BODIES, Admin, ModeRules

__all__ = ["FrontDoor", "HttpLimits", "Keys", "ModeRules", "create_app"]

T = TypeVar("T")

MSGPACK = "application/msgpack"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody}
    for status in (400, 401, 403, 404, 408, 409, 410, 413, 415, 429, 500, 502, 503, 504)
}
_SECURED: dict[str, Any] = {"security": [{"bearer": []}]}

Generate = Annotated[GenerateBody, Depends(json_body(GenerateBody))]
Submit = Annotated[SubmitBody, Depends(json_body(SubmitBody))]

RolloutId = Annotated[str, PathParam(pattern=ID_PATTERN)]
Cursor = Annotated[int, Query(ge=0, le=MAX_CURSOR)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]
WaitS = Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)]

_log = structlog.stdlib.get_logger(__name__)


def create_app(
    coordinator: FrontPort,
    connect: Callable[[str], Engine],
    keys: Keys,
    limits: HttpLimits = HttpLimits(),  # noqa: B008 - frozen
    *,
    weight_roots: Iterable[Path] = (),
    tool_names: frozenset[str] | None = None,
    rules: ModeRules = ModeRules(),  # noqa: B008 - frozen
    endpoint: Endpoint | None = None,
) -> FastAPI:
    """The service's HTTP API over a coordinator; `connect` gives the engine behind a replica's private URL.

    Weight directories must lie under one of `weight_roots`; `rules` say what the service's mode allows. Tasks that
    name unknown loops or rewards are refused at once, and with `tool_names` also those that name other tools; the
    worker ends what remains as invalid. With an `endpoint`, agents are served and recorded too; starting and
    closing its sessions is the caller's.
    """
    door = FrontDoor(coordinator, connect, limits, tool_names, endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await door.close()

    app = FastAPI(
        title="agentloop",
        version="1",
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
        middleware=[Middleware(HttpGuard, limits=limits)],
    )
    add_error_handlers(app, limits)
    bodies: list[type[BaseModel]] = [GenerateBody, SubmitBody, *ADMIN_BODIES]
    if endpoint is not None:
        bodies += _include_endpoint(app, endpoint, keys)  # first: most requests are its
    app.include_router(_open_routes(door))
    app.include_router(_generate_route(door, keys, endpoint))
    app.include_router(_user_routes(door, keys))
    app.include_router(Admin(coordinator, limits, tuple(weight_roots), rules).routes(keys, ERRORS))
    describe_bodies(app, "agentloop", "Asynchronous rollouts of language-model agents.", bodies)
    return app


def _include_endpoint(app: FastAPI, endpoint: Endpoint, keys: Keys) -> list[type[BaseModel]]:
    """Add the routes for agents; returns the bodies that they take."""

    async def pass_on(request: Request, error: Exception) -> Response:
        assert isinstance(error, Elsewhere)
        assert endpoint.peers is not None
        return await endpoint.peers.forward(request, error.rank)

    app.add_exception_handler(Elsewhere, pass_on)
    app.include_router(routes.endpoint_routes(endpoint, keys, ERRORS))
    app.include_router(session_routes.session_routes(endpoint, keys, ERRORS))
    app.include_router(responses_routes.routes(endpoint, keys, ERRORS))
    app.include_router(messages_routes.routes(endpoint, keys, ERRORS))
    return [*routes.BODIES, *session_routes.BODIES, ResponsesBody, MessagesBody, CountTokensBody]


def _generate_route(door: FrontDoor, keys: Keys, endpoint: Endpoint | None) -> APIRouter:
    """With an endpoint the keys of sessions are good for it too."""
    is_user = keys.require_user if endpoint is None else admit(keys, endpoint.sessions)
    router = APIRouter(dependencies=[Depends(is_user)], responses=ERRORS, tags=["rollouts"])
    router.add_api_route(
        "/generate",
        door.generate,
        methods=["POST"],
        response_model=GenerateAnswer,
        openapi_extra={**body_schema(GenerateBody), **_SECURED},
    )
    return router


def _open_routes(door: FrontDoor) -> APIRouter:
    router = APIRouter(tags=["health"])
    router.add_api_route("/health", door.health, response_model=HealthBody, responses={503: {"model": HealthBody}})
    return router


def _user_routes(door: FrontDoor, keys: Keys) -> APIRouter:
    router = APIRouter(dependencies=[Depends(keys.require_user)], responses=ERRORS, tags=["rollouts"])
    router.add_api_route(
        "/rollouts",
        door.submit,
        methods=["POST"],
        response_model=RolloutStatusBody,
        openapi_extra={**body_schema(SubmitBody), **_SECURED},
    )
    rollout = "/rollouts/{rollout_id}"
    router.add_api_route(rollout, door.rollout, response_model=RolloutStatusBody, openapi_extra=_SECURED)
    router.add_api_route(
        f"{rollout}/trajectories", door.trajectories, response_model=PageBody, openapi_extra=_SECURED
    )
    router.add_api_route(
        f"{rollout}/cancel",
        door.cancel,
        methods=["POST"],
        response_model=RolloutStatusBody,
        openapi_extra=_SECURED,
    )
    router.add_api_route("/status", door.status, response_model=StatusBody, openapi_extra=_SECURED)
    return router


class FrontDoor:
    """The user routes. Close it at the end: it waits for leases that are being given back."""

    def __init__(
        self,
        coordinator: FrontPort,
        connect: Callable[[str], Engine],
        limits: HttpLimits,
        tool_names: frozenset[str] | None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self._sessions = None if endpoint is None else session_routes.SessionRoutes(endpoint)
        self._coordinator = coordinator
        self._connect = connect
        self._limits = limits
        self._tool_names = tool_names
        self._num_direct_calls = 0
        self._releases: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for the releases under way; each has a deadline."""
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def health(self) -> Response:
        """200 once a replica takes traffic, 503 before."""
        status = await self._ask(self._coordinator.status())
        headers = {} if status.is_ready else {"retry-after": str(self._limits.retry_after_s)}
        return _json({"is_ready": status.is_ready}, 200 if status.is_ready else 503, headers)

    async def status(self) -> Response:
        """Replicas, rollouts and weight updates at this moment."""
        status = await self._ask(self._coordinator.status())
        return _json({**codec.to_builtins(status), "rollouts": [rollout_status(r) for r in status.rollouts]})

    async def generate(self, request: Request, body: Generate) -> Response:
        """Token ids in, token ids out; aborted if the client leaves. Recorded if the request names a session."""
        if self._sessions is not None and names_session(request):
            return await self._sessions.generate(request, body)
        if self._num_direct_calls >= self._limits.max_direct_calls:
            raise Overloaded(f"{self._limits.max_direct_calls} direct calls are running")
        self._num_direct_calls += 1
        try:
            engine_request = body.to_request(f"direct-{uuid.uuid4().hex}")
            generation = await unless_client_leaves(request, self._generate(engine_request))
        finally:
            self._num_direct_calls -= 1
        if generation is None:
            return Response(status_code=499)  # nobody reads it
        answer = codec.to_builtins(generation)
        del answer["load"]
        return _json(answer)

    async def submit(self, body: Submit) -> Response:
        """Accept tasks, durably; repeating a named submit changes nothing."""
        self._check_names(body)
        if body.rollout_id == SESSIONS_ROLLOUT_ID:
            raise InvalidRequest(f"the name {SESSIONS_ROLLOUT_ID!r} is kept for sessions", param="rollout_id")
        rollout_id = body.rollout_id or f"r-{uuid.uuid4().hex[:16]}"
        groups = tuple(
            RolloutGroup(f"{rollout_id}-{index:06d}", task.to_task(), body.num_samples, rollout_id, body.staleness)
            for index, task in enumerate(body.tasks)
        )
        return _json(rollout_status(await self._ask(self._coordinator.submit(rollout_id, groups))))

    async def rollout(self, rollout_id: RolloutId) -> Response:
        """One rollout's counts."""
        page = await self._ask(self._coordinator.read(rollout_id, MAX_CURSOR, 1, 0.0))
        return _json(rollout_status(page.status))

    async def trajectories(
        self, request: Request, rollout_id: RolloutId, after: Cursor = 0, limit: PageSize = 64, wait_s: WaitS = 0.0
    ) -> Response:
        """Finished trajectories after a cursor, in commit order; waits up to `wait_s` for the first.

        JSON, or with `Accept: application/msgpack` the binary form that the Python client reads.
        """
        reading = self._coordinator.read(rollout_id, after, limit, wait_s)
        page = await unless_client_leaves(request, self._ask(reading, extra_s=wait_s))
        if page is None:
            return Response(status_code=499)
        if MSGPACK in request.headers.get("accept", ""):
            return Response(codec.encode(page), media_type=MSGPACK)
        # A page may hold millions of numbers as text: keep that off the event loop.
        return Response(await asyncio.to_thread(_page_json, page), media_type="application/json")

    async def cancel(self, rollout_id: RolloutId) -> Response:
        """End what is queued or running; each sample gets its record."""
        return _json(rollout_status(await self._ask(self._coordinator.cancel(rollout_id))))

    def _check_names(self, body: SubmitBody) -> None:
        """Refuse what no worker could run. Import paths are not resolved: a task's own code runs in workers."""
        for index, task in enumerate(body.tasks):
            try:
                if ":" not in task.loop:
                    load_loop(task.loop)
                if task.reward is not None and ":" not in task.reward:
                    load_reward(task.reward)
            except InvalidRequest as error:
                raise InvalidRequest(error.message, param=f"tasks.{index}.{error.param}") from error
            unknown = [name for name in task.tools if self._tool_names is not None and name not in self._tool_names]
            if unknown:
                known = ", ".join(sorted(self._tool_names or ()))
                raise InvalidRequest(
                    f"unknown tool {unknown[0]!r}; there are: {known}", param=f"tasks.{index}.tools"
                )

    async def _generate(self, request: GenerateRequest) -> Generation:
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._on_a_lease(request)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {request.timeout_s:g} s", param="timeout_s") from error

    async def _on_a_lease(self, request: GenerateRequest) -> Generation:
        num_tokens = len(request.token_ids) + request.sampling.max_tokens
        leases = [await self._ask(self._coordinator.lease(request.request_id, num_tokens))]
        try:
            try:
                return await self._connect(leases[0].url).generate(request)
            except AgentLoopError as error:
                if not error.retryable:
                    raise
                _log.warning("direct_call_retried", replica=leases[0].replica_id, code=error.code)
            # The first lease is still held, so that the balancer sees that place taken and offers another.
            leases.append(await self._ask(self._coordinator.lease(f"{request.request_id}-retry", num_tokens)))
            return await self._connect(leases[1].url).generate(request)
        finally:
            for lease in leases:
                self._give_back(lease)

    def _give_back(self, lease: Lease) -> None:
        task = asyncio.create_task(self._release(lease))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, lease: Lease) -> None:
        try:
            await self._ask(self._coordinator.release(lease))
        except AgentLoopError as error:
            # The caller has its answer; the coordinator drops leases of calls that went silent.
            _log.warning("lease_not_released", lease=lease.lease_id, code=error.code)

    async def _ask(self, question: Awaitable[T], extra_s: float = 0.0) -> T:
        """What the coordinator answers, within a deadline."""
        try:
            async with asyncio.timeout(self._limits.coordinator_timeout_s + extra_s):
                return await question
        except TimeoutError as error:
            raise DeadlineExceeded("the coordinator did not answer in time") from error


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


def _page_json(page: Page) -> bytes:
    return orjson.dumps({**codec.to_builtins(page), "status": rollout_status(page.status)})
