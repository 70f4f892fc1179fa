"""The admin routes: pause, resume, weights. They need the admin key wherever any key is set."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Depends
from starlette.responses import Response

from agentloop import codec
from agentloop.control import CoordinatorApi
from agentloop.engine import WeightUpdate
from agentloop.errors import DeadlineExceeded, InvalidRequest
from agentloop.types import PauseMode
from agentloop.wire import PauseBody, WeightsBody
from agentloop.wire_answers import StateBody, UpdateBody
from agentloop_servers.http_guard import HttpLimits, Keys, body_schema, json_body

T = TypeVar("T")

_SECURED: dict[str, Any] = {"security": [{"bearer": []}]}

Pause = Annotated[PauseBody, Depends(json_body(PauseBody))]
Weights = Annotated[WeightsBody, Depends(json_body(WeightsBody))]


class Admin:
    """What a trainer may do to the fleet."""

    def __init__(self, coordinator: CoordinatorApi, limits: HttpLimits, weight_roots: tuple[Path, ...]) -> None:
        self._coordinator = coordinator
        self._weight_roots = weight_roots
        self._limits = limits

    def routes(self, keys: Keys, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
        """The router, each route behind the admin key."""
        router = APIRouter(dependencies=[Depends(keys.require_admin)], responses=errors, tags=["admin"])
        router.add_api_route(
            "/admin/pause",
            self.pause,
            methods=["POST"],
            response_model=StateBody,
            openapi_extra={**body_schema(PauseBody), **_SECURED},
        )
        router.add_api_route(
            "/admin/resume", self.resume, methods=["POST"], response_model=StateBody, openapi_extra=_SECURED
        )
        router.add_api_route(
            "/admin/weights",
            self.weights,
            methods=["POST"],
            response_model=UpdateBody,
            openapi_extra={**body_schema(WeightsBody), **_SECURED},
        )
        return router

    async def pause(self, body: Pause) -> Response:
        """Pause generation on every replica until a resume. Idempotent."""
        await self._ask(self._coordinator.pause(PauseMode(body.mode)))
        return _json({"is_paused": True})

    async def resume(self) -> Response:
        """Go on after a pause. Idempotent."""
        await self._ask(self._coordinator.resume())
        return _json({"is_paused": False})

    async def weights(self, body: Weights) -> Response:
        """Bring every replica to a new weight version."""
        directory = await asyncio.to_thread(resolve_weights, body.directory, self._weight_roots)
        update = WeightUpdate(body.version, str(directory))
        report = await self._ask(self._coordinator.update_weights(update, body.policy))
        return _json(codec.to_builtins(report))

    async def _ask(self, question: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._limits.update_timeout_s):
                return await question
        except TimeoutError as error:
            raise DeadlineExceeded("the fleet did not answer in time; ask for its status") from error


def resolve_weights(directory: str, roots: Iterable[Path]) -> Path:
    """The real path of a weight directory. Raises InvalidRequest unless it lies under one of the roots.

    The message is the same whatever is wrong, so that it tells nothing of the file system.
    """
    refusal = InvalidRequest(
        "not an absolute path of a directory under the service's weight roots", param="directory"
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


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
