"""The admin routes: pause, resume, weights, sleep, wake, drain. They require the admin key if any key is
configured."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from agentloop.api.coordinator import (
    AdapterPush,
    FrontPort,
    HostDrain,
    ReplicaHold,
    ServiceStatus,
    StoreStatus,
    UpdateJob,
    UpdateReport,
)
from agentloop.api.owners import own_id
from agentloop.api.requests import (
    ID_PATTERN,
    DrainBody,
    HoldBody,
    PauseBody,
    RenewHoldBody,
    SleepBody,
    WakeBody,
    WeightsBody,
)
from agentloop.engine.interface import GroupInit, MemoryTag, PublishedSource, PullVersion, WeightUpdate
from agentloop.errors import AgentLoopError, Conflict, InvalidRequest
from agentloop.types import PauseMode
from agentloop.values import codec
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import HttpLimits, json_body
from agentloop_servers.http.openapi import add_route, answered, errors
from agentloop_servers.http.responses import in_time, json_response

T = TypeVar("T")

_ADAPTER_NAME = re.compile(ID_PATTERN)

Drain = Annotated[DrainBody, Depends(json_body(DrainBody))]
Hold = Annotated[HoldBody, Depends(json_body(HoldBody))]
RenewHold = Annotated[RenewHoldBody, Depends(json_body(RenewHoldBody))]
Pause = Annotated[PauseBody, Depends(json_body(PauseBody))]
Sleep = Annotated[SleepBody, Depends(json_body(SleepBody))]
Wake = Annotated[WakeBody, Depends(json_body(WakeBody))]
Weights = Annotated[WeightsBody, Depends(json_body(WeightsBody))]


@dataclass(frozen=True, slots=True)
class ModeRules:
    """The admin commands that the service's mode allows, besides pause and resume. Refusals name the `mode`."""

    mode: str = "standalone"
    allows_weights: bool = True  # new weights from any source
    allows_push: bool = True  # tensors from a trainer
    allows_adapters: bool = True
    names_adapters: bool = False  # adapters have names and the base weights never change
    can_sleep: bool = True

    def check_named(self) -> None:
        """Raise InvalidRequest if adapters have no names."""
        if not self.names_adapters:
            raise InvalidRequest(
                "this service serves no adapters by name: set its engines' `max_loras`, or push without a name",
                param="name",
            )

    def check_source(self, update: WeightUpdate) -> None:
        """Raise InvalidRequest if the mode does not accept the update's source."""
        if self.names_adapters:
            raise InvalidRequest(
                "this service serves adapters by name (`max_loras`) over base weights that stay: push an adapter,"
                " with a `name`",
                param="name",
            )
        if not self.allows_weights:
            raise InvalidRequest(f"in mode {self.mode} weights never change", param="version")
        if (update.push is not None or update.transfer is not None) and not self.allows_push:
            raise InvalidRequest(f"in mode {self.mode} tensors cannot be pushed: pass a 'directory'", param="push")
        if update.adapter is not None and not self.allows_adapters:
            raise InvalidRequest(
                f"this service (mode {self.mode}) was not configured for adapters", param="adapter"
            )

    def check_sleep(self, level: int = 1) -> None:
        """Raise InvalidRequest if the mode does not allow sleep, or not at this level."""
        if not self.can_sleep:
            raise InvalidRequest(
                f"in mode {self.mode} engines never release memory: sleep and wake are not available"
            )
        if level == 2 and self.names_adapters:
            raise InvalidRequest("level 2 would discard the adapters: sleep at level 1", param="level")


@dataclass(frozen=True, slots=True)
class PauseState:
    """The response to a pause or a resume."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class SleepState:
    """The response to a sleep or a wake: the kinds of memory that the fleet has released."""

    asleep: tuple[MemoryTag, ...]


@dataclass(frozen=True, slots=True)
class UsersRead:
    """The response after the users' file was read again."""

    num_users: int


class AdminRoutes:
    """The routes by which a trainer controls the fleet."""

    def __init__(
        self,
        coordinator: FrontPort,
        limits: HttpLimits,
        weight_roots: tuple[Path, ...],
        rules: ModeRules,
        endpoint: Endpoint | None = None,
        nodes_without: Callable[[str], tuple[str, ...]] | None = None,
        model: Path = Path(),
    ) -> None:
        self._model = model
        self._endpoint = endpoint
        self._users = None if endpoint is None else endpoint.users
        self._coordinator = coordinator
        self._weight_roots = weight_roots
        self._limits = limits
        self._rules = rules
        self._nodes_without = nodes_without

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes. All require the admin key, except `/admin/weights`: some users may push their own
        adapters."""
        self._keys, whole = keys, APIRouter()
        pushed = APIRouter(dependencies=[Depends(keys.require_pusher)], responses=errors(), tags=["admin"])
        add_route(pushed, "POST", "/admin/weights", self.weights, WeightsBody, responses=answered(UpdateReport))
        router = APIRouter(dependencies=[Depends(keys.require_admin)], responses=errors(), tags=["admin"])
        posts: list[tuple[str, Any, type[BaseModel] | None, Any, dict[int | str, dict[str, Any]]]] = [
            ("/admin/pause", self.pause, PauseBody, PauseState, {}),
            ("/admin/resume", self.resume, None, PauseState, {}),
            ("/admin/weights/follow", self.follow, None, None, answered(StoreStatus)),
            ("/admin/sleep", self.sleep, SleepBody, SleepState, {}),
            ("/admin/wake", self.wake, WakeBody, SleepState, {}),
            ("/admin/users", self.users, None, UsersRead, {}),
            ("/admin/drain", self.drain, DrainBody, HostDrain, {}),
            ("/admin/hold", self.hold, HoldBody, None, answered(ReplicaHold)),
            ("/admin/hold/renew", self.renew_hold, RenewHoldBody, None, answered(ReplicaHold)),
        ]
        for path, handler, body, answer, responses in posts:
            add_route(router, "POST", path, handler, body, answer, responses)
        whole.include_router(pushed)
        whole.include_router(router)
        return whole

    async def users(self) -> Response:
        """Read the users' file again, in this process at once and in all other processes within two seconds."""
        if self._users is None or not self._users.has_file:
            raise Conflict("this service has no users' file: set 'users' in its config", param="users")
        await self.ask(self._users.read_again())
        return json_response(UsersRead(self._users.num_users))

    async def pause(self, body: Pause) -> Response:
        """Pause generation on every replica until a resume. Idempotent."""
        await self.ask(self._coordinator.pause(PauseMode(body.mode), body.reason))
        return json_response(PauseState(is_paused=True))

    async def resume(self) -> Response:
        """Resume generation after a pause. Idempotent."""
        await self.ask(self._coordinator.resume())
        return json_response(PauseState(is_paused=False))

    async def weights(self, request: Request, body: Weights) -> Response:
        """Bring every replica to a new weight version, from a directory, a listening process or an adapter.

        With a `name`, load an adapter next to the base weights and the other adapters. Users with the right to push
        adapters may do this too.
        """
        if body.name is not None:
            push = body.to_push(body.name)
            return json_response(codec.to_builtins(await self.push_adapter(request, push)))
        await self._keys.require_admin(request)
        return json_response(await self._updated(body))

    async def push_adapter(self, request: Request, push: AdapterPush) -> UpdateReport:
        """Load an adapter under the caller's name for it.

        An adapter pushed by an admin serves all users, any other only the user who pushed it.
        """
        self._rules.check_named()
        if _ADAPTER_NAME.fullmatch(push.name) is None or (self._endpoint and self._endpoint.has_model(push.name)):
            raise InvalidRequest(
                f"adapter name {push.name!r}: expected 1 to 128 letters, digits, `.`, `_` or `-`, and a name that"
                " no other model of this service has",
                param="name",
            )
        directory = await asyncio.to_thread(self._found, push.directory, "adapter")
        report = await self.ask(
            self._coordinator.push_adapter(replace(push, name=self._own(request, push.name), directory=directory))
        )
        return replace(report, adapter=push.name)

    async def unload_adapter(self, request: Request, name: str) -> None:
        """Unload an adapter by the caller's name for it; an admin may unload any. Raises ModelNotFound."""
        self._rules.check_named()
        await self.ask(self._coordinator.unload_adapter(self._own(request, name)))

    def _own(self, request: Request, name: str) -> str:
        names = self._keys.sees(request)
        return name if names is None else own_id(names[0], name)

    async def update(self, version: int | None, names: Mapping[str, str], **source: Any) -> dict[str, Any]:
        """Update the weights for a dialect, whose body's fields have other `names`.

        Without a `version` the update goes to the next one.
        """
        if version is None:
            served = (await self.status()).weight_version
            version = 0 if served is None else served + 1
        with fields_called(names):
            report = await self._updated(WeightsBody(version=version, **source))
        return {"weight_version": str(version), "report": report}

    async def _updated(self, body: WeightsBody) -> Any:
        update = body.to_update()
        self._rules.check_source(update)
        update = await asyncio.to_thread(self._located, update)
        report = await self.ask(self._coordinator.update_weights(update, body.policy, body.force))
        return codec.to_builtins(report)

    async def status(self) -> ServiceStatus:
        """Return the service's status. It has no route here: `GET /status` serves users too."""
        message = "the coordinator did not answer in time; retry"
        return await in_time(self._coordinator.status(), self._limits.coordinator_timeout_s, message)

    async def follow(self) -> Response:
        """Check the store of published versions now, not at the next poll. Idempotent."""
        return json_response(await self.ask(self._coordinator.look_at_store()))

    async def init_group(self, group: GroupInit, is_replacement: bool = False) -> None:
        """Make all replicas join a trainer's broadcast group. It has no route here: dialects have verbs for it."""
        self._rules.check_source(WeightUpdate(0, transfer=group.name))
        await self.ask(self._coordinator.init_group(group, is_replacement))

    async def pull_version(self, source: str, folder: str, version: int) -> None:
        """Make each host write a version from the versions in `source` to the path `folder`.

        `folder` need not exist yet, but its parent must.
        """
        self._rules.check_source(WeightUpdate(version, directory=folder))
        found = await asyncio.to_thread(self._found, source, "source_dir")
        to = self._new_path(folder, "local_checkpoint_dir")
        await self.ask(self._coordinator.pull_version(PullVersion(found, to, version, str(self._model))))

    async def begin_update(self, job: UpdateJob) -> UpdateJob:
        """Start an update job. It has no route here: dialects have verbs for it."""
        self._rules.check_source(WeightUpdate(0, published=PublishedSource("", "")))
        return await self.ask(self._coordinator.begin_update(job))

    async def sleep(self, body: Sleep) -> Response:
        """Pause every replica and release its memory. Idempotent."""
        self._rules.check_sleep(body.level)
        await self.ask(self._coordinator.sleep(body.level, body.reason))
        return await self._memory()

    async def wake(self, body: Wake) -> Response:
        """Restore memory. Generation resumes once all of it is restored. Idempotent."""
        self._rules.check_sleep()
        await self.ask(self._coordinator.wake(body.memory))
        return await self._memory()

    async def drain(self, body: Drain) -> Response:
        """Send a host no more work, or with `undo` end that; returns the work that the host still has.
        Idempotent."""
        return json_response(await self.ask(self._coordinator.drain_host(body.host, body.undo)))

    async def hold(self, body: Hold) -> Response:
        """Keep replicas at the served weight version for an evaluation. Idempotent by `hold_id`."""
        held = self._coordinator.hold(body.hold_id, body.replicas, body.timeout_s, body.lease_s)
        return json_response(await self.ask(held))

    async def renew_hold(self, body: RenewHold) -> Response:
        """Extend a hold, or end it with `lease_s` 0; its replicas then catch up with the served version."""
        return json_response(await self.ask(self._coordinator.renew_hold(body.hold_id, body.lease_s)))

    async def _memory(self) -> Response:
        return json_response(SleepState((await self.status()).asleep))

    def _located(self, update: WeightUpdate) -> WeightUpdate:
        """Return the update with real paths.

        Raises InvalidRequest if a path is outside the weight roots or missing on a host.
        """
        if update.directory is not None:
            return replace(update, directory=self._found(update.directory, "directory"))
        if update.adapter is not None:
            return replace(update, adapter=self._found(update.adapter, "adapter"))
        return update

    def _found(self, given: str, param: str) -> str:
        directory = str(resolve_weights(given, self._weight_roots, param=param))
        if self._nodes_without is not None and (missing := self._nodes_without(directory)):
            raise InvalidRequest(
                f"{given!r} is missing on {', '.join(missing)}: copy it there, because every host reads it",
                param=param,
            )
        return directory

    def _new_path(self, given: str, param: str) -> str:
        """Return a path whose parent exists. Raises InvalidRequest unless the parent is under the weight roots."""
        above, name = os.path.split(os.path.normpath(given))
        return str(resolve_weights(above, self._weight_roots, param=param) / name)

    async def ask(self, question: Awaitable[T]) -> T:
        """Await the fleet's answer, for at most the time of an update."""
        message = "the fleet did not answer in time: read `GET /status` for its state"
        return await in_time(question, self._limits.update_timeout_s, message)


@contextmanager
def fields_called(names: Mapping[str, str]) -> Iterator[None]:
    """Within this context errors use a dialect's names for a body's fields."""
    try:
        yield
    except AgentLoopError as error:
        error.param = names.get(error.param or "", error.param)
        raise


def resolve_weights(directory: str, roots: Collection[Path], *, param: str) -> Path:
    """Return the real path of a weight directory. Raises InvalidRequest unless it lies under one of the roots.

    The message is the same for a missing folder and for one outside the roots: it does not reveal the file system.
    """
    refusal = InvalidRequest(
        f"{directory!r} is not the absolute path of a folder under the service's weight roots "
        f"({', '.join(map(str, roots))}): move the folder there, or add its parent to 'weight_roots' in the config",
        param=param,
    )
    if not os.path.isabs(directory) or "\0" in directory:
        raise refusal
    try:
        real = Path(directory).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise refusal from error
    if not real.is_dir() or not any(real.is_relative_to(root.resolve()) for root in roots):
        raise refusal
    return real
