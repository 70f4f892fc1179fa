"""The routes of rollouts, health, status and direct generation. The only state is running direct calls.

A direct call releases its lease on every path. A client that disconnects cancels its call, and the engine aborts
it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as PathParam
from starlette.responses import Response

from agentloop import parts
from agentloop.api.coordinator import (
    FrontPort,
    Page,
    RolloutStatus,
    ServiceStatus,
    as_its_users,
    seen_adapters,
    seen_reports,
)
from agentloop.api.openapi import generation_answer, rollout_status
from agentloop.api.owners import OWN_ID_PATTERN, own_id, owner_of, shown_id
from agentloop.api.requests import (
    MAX_CURSOR,
    MAX_PAGE,
    MAX_WAIT_S,
    AcknowledgeBody,
    AnnotateBody,
    GenerateBody,
    JudgeBody,
    SubmitBody,
)
from agentloop.api.sessions import SESSIONS_ROLLOUT_ID
from agentloop.chat.fields import read_body
from agentloop.errors import (
    AgentLoopError,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    UnsupportedParameter,
)
from agentloop.generation.leased_engine import CallLeases
from agentloop.plugins import AllowedImports
from agentloop.rollout.loops import load_loop
from agentloop.rollout.models import unknown_model
from agentloop.rollout.rewards import SHIPPED_REWARDS
from agentloop.types import GenerateRequest, Generation, RolloutGroup, RolloutTask
from agentloop.values import codec
from agentloop_servers.endpoint import routes_sessions
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http.auth import Keys, authenticate, caller_of, names_session
from agentloop_servers.http.guard import HttpLimits, json_body, traceparent_of
from agentloop_servers.http.openapi import add_route, answered, errors
from agentloop_servers.http.responses import (
    in_time,
    json_response,
    long_response,
    unless_client_leaves,
    unread_response,
)
from agentloop_servers.ingress.routes import GenerateDialect, generate_body

T = TypeVar("T")

READINESS_AGE_S = 1.0
READINESS_TIMEOUT_S = 2.0

Acknowledge = Annotated[AcknowledgeBody, Depends(json_body(AcknowledgeBody))]
Annotate = Annotated[AnnotateBody, Depends(json_body(AnnotateBody))]
Submit = Annotated[SubmitBody, Depends(json_body(SubmitBody))]

RolloutId = Annotated[str, PathParam(pattern=OWN_ID_PATTERN)]
Cursor = Annotated[int, Query(ge=0, le=MAX_CURSOR)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]
WaitS = Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Health:
    """The response to a health check: whether any replica accepts requests. `GET /status` lists the
    degraded parts."""

    is_ready: bool
    is_degraded: bool


class Readiness:
    """The fleet's readiness; queries the coordinator at most once a second."""

    def __init__(self, coordinator: FrontPort) -> None:
        self._coordinator = coordinator
        self._asked: asyncio.Task[Health] | None = None
        self._answered_at = 0.0

    async def known(self) -> Health:
        """Return the readiness, at most a second old. Not ready if the coordinator does not answer."""
        loop = asyncio.get_running_loop()
        if self._asked is None or (self._asked.done() and loop.time() - self._answered_at > READINESS_AGE_S):
            self._asked = asyncio.create_task(self._ask(), name="readiness")
        return await asyncio.shield(self._asked)

    async def close(self) -> None:
        """Stop querying. Idempotent."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)

    async def _ask(self) -> Health:
        try:
            status = await in_time(self._coordinator.status(), READINESS_TIMEOUT_S, "no answer")
            return Health(status.is_ready, not status.is_ready or bool(status.degraded))
        except AgentLoopError:
            return Health(is_ready=False, is_degraded=True)
        finally:
            self._answered_at = asyncio.get_running_loop().time()


class RolloutRoutes:
    """The user routes; direct calls use `leases`."""

    def __init__(
        self,
        coordinator: FrontPort,
        keys: Keys,
        leases: CallLeases,
        limits: HttpLimits,
        tool_names: frozenset[str] | None,
        endpoint: Endpoint | None = None,
        image_roots: Sequence[Path] = (),
        allowed_imports: AllowedImports = AllowedImports(),  # noqa: B008 - frozen
        judges: Collection[str] = (),
    ) -> None:
        """`judges` names the models that rewards may call."""
        self._judges = judges
        self._allowed_imports = allowed_imports
        self._image_roots = image_roots
        self._keys = keys
        self._endpoint = endpoint
        self._sessions = None if endpoint is None else routes_sessions.SessionRoutes(endpoint)
        self._coordinator = coordinator
        self._limits = limits
        self._tool_names = tool_names
        self._num_direct_calls = 0
        self._leases = leases
        self._readiness = Readiness(coordinator)

    def open_routes(self) -> APIRouter:
        """Return the routes that need no key."""
        router = APIRouter(tags=["health"])
        for path in ("/health", "/health_generate"):  # the second path is SGLang's
            router.add_api_route(path, self.health, response_model=Health, responses={503: {"model": Health}})
        return router

    def generate_route(self, dialects: Collection[GenerateDialect]) -> APIRouter:
        """Return the route of direct generation. With an endpoint, session keys are accepted too."""
        form = generate_body(dialects)
        read = json_body(form, read_body)
        answers = {one.body: one.answer for one in dialects}

        async def generate(request: Request) -> Response:
            """Token ids in, token ids out. Aborted if the client disconnects. Recorded if the request names a
            session.

            Optional parts add other forms of the body, each with its own response.
            """
            body = (await read(request)).root
            return await answers.get(type(body), self.generate)(request, body)

        is_user = (
            self._keys.require_user
            if self._endpoint is None
            else authenticate(self._keys, self._endpoint.sessions.keys.opened_by)
        )
        router = APIRouter(dependencies=[Depends(is_user)], responses=errors(), tags=["rollouts"])
        schemas = [one.answer_schema for one in dialects]
        add_route(router, "POST", "/generate", generate, form, responses=answered(Generation, *schemas))
        return router

    def user_routes(self) -> APIRouter:
        """Return the routes of rollouts. A user's key gives access to the user's own rollouts, an admin's key to
        all."""
        router = APIRouter(dependencies=[Depends(self._keys.require_user)], responses=errors(), tags=["rollouts"])
        rollout, status = "/rollouts/{rollout_id}", answered(RolloutStatus)
        add_route(router, "POST", "/rollouts", self.submit, SubmitBody, responses=status)
        add_route(router, "GET", rollout, self.rollout, responses=status)
        add_route(router, "GET", f"{rollout}/trajectories", self.trajectories, responses=answered(Page))
        add_route(router, "POST", f"{rollout}/acknowledge", self.acknowledge, AcknowledgeBody, responses=status)
        add_route(router, "POST", f"{rollout}/annotate", self.annotate, AnnotateBody, responses=status)
        add_route(router, "POST", f"{rollout}/cancel", self.cancel, responses=status)
        add_route(router, "GET", "/status", self.status, responses=answered(ServiceStatus))
        return router

    async def health(self) -> Response:
        """Return 200 once a replica accepts requests, 503 before."""
        health = await self._readiness.known()
        headers = {} if health.is_ready else {"retry-after": str(self._limits.retry_after_s)}
        return json_response(health, 200 if health.is_ready else 503, headers)

    async def close(self) -> None:
        """Stop querying readiness. Idempotent."""
        await self._readiness.close()

    async def status(self, request: Request) -> Response:
        """Replicas, the caller's rollouts and weight updates at this moment."""
        status, (names, sees_all) = await self._ask(self._coordinator.status()), self._user_of(request)
        rollouts = [
            rollout_status(replace(one, rollout_id=shown_id(one.rollout_id)) if one.owner in names else one)
            for one in status.rollouts
            if sees_all or one.owner in names
        ]
        users = [codec.to_builtins(one) for one in status.users if sees_all or one.name in names]
        sees = None if sees_all else names
        found = {"adapters": seen_adapters(status.adapters, sees), "updates": seen_reports(status.updates, sees)}
        rest = {"rollouts": rollouts, "users": users, **codec.to_builtins(found)}
        return json_response({**codec.to_builtins(status), **rest})

    async def generate(self, request: Request, body: GenerateBody) -> Response:
        """Answer a body in the service's own form."""
        if self._sessions is not None and names_session(request):
            return await self._sessions.generate(request, body)
        if self._num_direct_calls >= self._limits.max_direct_calls:
            raise Overloaded(f"{self._limits.max_direct_calls} direct calls are running, the maximum: retry later")
        self._num_direct_calls += 1
        try:
            owner = "" if self._endpoint is None else caller_of(request).owner
            asked = body.to_request(own_id(owner, f"direct-{uuid.uuid4().hex}"))
            adapter = await self._adapter_of(request, body.model)
            asked = replace(asked, traceparent=traceparent_of(request), adapter=adapter)
            generation = await unless_client_leaves(request, self._generate(asked))
        finally:
            self._num_direct_calls -= 1
        if generation is None:
            return unread_response()
        return json_response(generation_answer(replace(generation, request_id=shown_id(generation.request_id))))

    async def submit(self, request: Request, body: Submit) -> Response:
        """Accept tasks durably. Repeating a submit with the same `rollout_id` changes nothing."""
        self._check_names(body)
        if body.rollout_id == SESSIONS_ROLLOUT_ID:
            raise InvalidRequest(f"the name {SESSIONS_ROLLOUT_ID!r} is kept for sessions", param="rollout_id")
        rollout_id = body.rollout_id or f"r-{uuid.uuid4().hex[:16]}"
        has_images = any(task.first_image is not None for task in body.tasks)
        tasks = await asyncio.to_thread(self._tasks, body) if has_images else self._tasks(body)
        names = self._keys.caller(request).names
        staleness = body.staleness
        if staleness is not None and staleness.run_id:
            staleness = replace(staleness, run_id=own_id(names[0], staleness.run_id))
        groups = tuple(
            RolloutGroup(f"{rollout_id}-{index:06d}", task, body.num_samples, rollout_id, staleness, body.keep)
            for index, task in enumerate(tasks)
        )
        caller = traceparent_of(request)
        is_one = len(groups) == body.num_samples == 1  # a batch's shared trace could grow without bound
        terms = body.terms(names[0])
        terms = replace(terms, traceparent=caller) if is_one else replace(terms, trace_link=caller)
        submitting = self._coordinator.submit(rollout_id, groups, terms, names)
        return _status_response(rollout_id, await self._ask(submitting))

    async def rollout(self, request: Request, rollout_id: RolloutId) -> Response:
        """One rollout's counts."""
        page = await self._ask_as_user(
            request, lambda user_names: self._coordinator.read(rollout_id, MAX_CURSOR, 1, 0.0, user_names)
        )
        return _status_response(rollout_id, page.status)

    async def trajectories(
        self, request: Request, rollout_id: RolloutId, after: Cursor = 0, limit: PageSize = 64, wait_s: WaitS = 0.0
    ) -> Response:
        """Finished trajectories after a cursor, in commit order; waits up to `wait_s` for the first.

        JSON, or with `Accept: application/msgpack` the binary form that the Python client reads.
        """
        reading = self._ask_as_user(
            request, lambda user_names: self._coordinator.read(rollout_id, after, limit, wait_s, user_names), wait_s
        )
        page = await unless_client_leaves(request, reading)
        if page is None:
            return unread_response()
        page = replace(page, status=replace(page.status, rollout_id=rollout_id))
        return await long_response(request, lambda: codec.encode(page), lambda: _page_json(page.decoded()))

    async def acknowledge(self, request: Request, rollout_id: RolloutId, body: Acknowledge) -> Response:
        """Acknowledge the records up to a cursor. The service deletes them if the run's retention allows."""
        await self._ask_as_user(
            request, lambda user_names: self._coordinator.acknowledge(rollout_id, body.cursor, user_names)
        )
        return await self.rollout(request, rollout_id)

    async def annotate(self, request: Request, rollout_id: RolloutId, body: Annotate) -> Response:
        """Store a trainer's annotations of records, all or none. The newest value of a name is shown."""
        given = body.to_annotations()
        status = await self._ask_as_user(
            request, lambda user_names: self._coordinator.annotate(rollout_id, given, user_names)
        )
        return _status_response(rollout_id, status)

    async def cancel(self, request: Request, rollout_id: RolloutId) -> Response:
        """Cancel queued and running samples. Each sample still gets a record."""
        status = await self._ask_as_user(
            request, lambda user_names: self._coordinator.cancel(rollout_id, user_names)
        )
        return _status_response(rollout_id, status)

    def _tasks(self, body: SubmitBody) -> list[RolloutTask]:
        """Return the tasks with their images, which are decoded or read here."""
        takes_images = self._endpoint is not None and self._endpoint.takes_images
        tasks = []
        for index, task in enumerate(body.tasks):
            if task.first_image is not None and not takes_images:
                place = f"tasks.{index}.{task.first_image}"
                raise UnsupportedParameter("this service's model does not accept images", param=place)
            try:
                tasks.append(task.to_task(self._image_roots))
            except InvalidRequest as error:
                raise type(error)(error.message, param=f"tasks.{index}.{error.param}") from error
        return tasks

    def _check_names(self, body: SubmitBody) -> None:
        """Refuse tasks that no worker could run, without importing user code: that runs only in workers."""
        for index, task in enumerate(body.tasks):
            try:
                self._allowed_imports.check(task.loop, param="loop")
                if ":" not in task.loop:
                    load_loop(task.loop)
                if task.environment is not None:
                    name, _ = parts.split_variant(parts.ENVIRONMENTS, task.environment)
                    if name:
                        parts.path_of(parts.ENVIRONMENTS, name, param="environment")
                    else:
                        self._allowed_imports.check(task.environment, param="environment")
                if isinstance(task.reward, JudgeBody):
                    if task.reward.model not in self._judges:
                        raise unknown_model(task.reward.model, self._judges, "reward.model")
                elif task.reward is not None and task.reward not in SHIPPED_REWARDS:
                    self._allowed_imports.check(task.reward, param="reward")
                    if ":" not in task.reward:
                        parts.path_of(parts.REWARDS, task.reward, param="reward", shipped=SHIPPED_REWARDS)
            except (InvalidRequest, Forbidden, NotFound) as error:
                raise type(error)(error.message, param=f"tasks.{index}.{error.param}") from error
            objection = None if self._endpoint is None else self._endpoint.renderer.facts.tools_objection
            if task.tools and objection is not None:
                raise UnsupportedParameter(
                    f"this service's model cannot be given tools: {objection}", param=f"tasks.{index}.tools"
                )
            unknown = [name for name in task.tools if self._tool_names is not None and name not in self._tool_names]
            if unknown:
                known = ", ".join(sorted(self._tool_names or ()))
                raise InvalidRequest(
                    f"unknown tool {unknown[0]!r}; this service has: {known}", param=f"tasks.{index}.tools"
                )

    async def _adapter_of(self, request: Request, model: str | None) -> str:
        if model is None:
            return ""
        if self._endpoint is None:
            raise UnsupportedParameter("this service has no endpoint for agents", param="model")
        return await self._endpoint.adapter_of(model, caller_of(request).names)

    async def _generate(self, request: GenerateRequest) -> Generation:
        engine = self._leases.engine(request.request_id)
        users = None if self._endpoint is None else self._endpoint.users
        try:
            with nullcontext() if users is None else users.call(owner_of(request.request_id)):
                return await engine.generate(request, continues_after_abort=lambda sampled: False)
        finally:
            self._leases.end(request.request_id)

    def _user_of(self, request: Request) -> tuple[tuple[str, ...], bool]:
        """Return the user names of the caller, and whether it may access all rollouts. Raises Unauthorized."""
        names = self._keys.caller(request).names
        return names, self._keys.is_open or self._keys.user_of(request).is_admin

    async def _ask_as_user(
        self, request: Request, ask: Callable[[tuple[str, ...] | None], Awaitable[T]], extra_s: float = 0.0
    ) -> T:
        """Query a rollout of the caller; an admin may name any rollout by its full id. Raises NotFound."""
        names, sees_all = self._user_of(request)
        try:
            return await self._ask(ask(names), extra_s)
        except NotFound:
            if not sees_all:
                raise
        return await self._ask(ask(None), extra_s)

    async def _ask(self, question: Awaitable[T], extra_s: float = 0.0) -> T:
        """Return the coordinator's answer. Raises DeadlineExceeded."""
        timeout_s = self._limits.coordinator_timeout_s + extra_s
        return await in_time(question, timeout_s, "the coordinator did not answer in time; retry")


def _page_json(page: Page) -> dict[str, Any]:
    records = (as_its_users(record).without_aux for record in page.trajectories)
    return {**codec.to_builtins(replace(page, trajectories=tuple(records))), "status": rollout_status(page.status)}


def _status_response(rollout_id: str, status: RolloutStatus) -> Response:
    """Return a status under the id that the caller passed."""
    return json_response(rollout_status(replace(status, rollout_id=rollout_id)))
