"""The running requests of one engine, and the gate that holds new requests while the engine is not serving.

A held request gets its cache salt (the KV version) when it passes the gate, after an update, so it cannot reuse
older KV. To end a request with an agentloop error, its `verdict` is set and the engine aborts it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentloop.engine.lifecycle import EngineLifecycle
from agentloop.errors import AgentLoopError, Conflict, EngineLost
from agentloop.types import Constraint, GenerateRequest


class EngineRequests(Protocol):
    """The requests in an engine's process."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; each returns the tokens sampled so far. Unknown ids are ignored."""

    async def unbegun(self, request_ids: Sequence[str]) -> Collection[str]:
        """Return the ids of requests that have not sampled a token. Call it while the engine is paused.

        An engine may omit requests whose prefill has started.
        """


@dataclass(slots=True, eq=False)
class Call:
    """One running `generate` or `stream`."""

    request: GenerateRequest
    is_admitted: bool = False  # the engine's process has the request
    is_aborted: bool = False
    is_recalled: bool = False  # aborted in the process so that it passes the gate again
    verdict: AgentLoopError | None = None  # raised instead of returning a generation
    adapter_version: int | None = None  # version of the adapter, set at admission; None: the base weights
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set to check the gate again
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (version, index of its first token), for engines that do not record versions themselves."""


class Calls:
    """All calls of one engine, and the gate for new calls, which is open while `lifecycle` is serving."""

    def __init__(
        self,
        process: EngineRequests,
        lifecycle: EngineLifecycle,
        check_constraint: Callable[[Constraint], Awaitable[None]],
    ) -> None:
        """`check_constraint` raises InvalidRequest for a constraint that must not reach the engine."""
        self._process = process
        self._lifecycle = lifecycle
        self._check_constraint = check_constraint
        self._by_id: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_admitted(self) -> int:
        return sum(call.is_admitted for call in self._by_id.values())

    @property
    def num_held_tokens(self) -> int:
        """The number of prompt tokens of calls that wait at the gate."""
        return sum(len(call.request.token_ids) for call in self._by_id.values() if not call.is_admitted)

    @contextlib.contextmanager
    def entered(self, request: GenerateRequest) -> Iterator[Call]:
        """Register a call during the block. Raises Conflict if a call with the same request id is running."""
        if request.request_id in self._by_id:
            raise Conflict(
                f"request {request.request_id} is already running: request ids must be unique", param="request_id"
            )
        call = self._by_id[request.request_id] = Call(request)
        try:
            yield call
        finally:
            del self._by_id[request.request_id]
            self._lifecycle.refresh()

    async def pass_gate(self, call: Call) -> bool:
        """Check the call's constraint and wait until the engine serves. Return False if the call was aborted.

        After True, the caller must submit the request to the engine before its next await, so that an abort cannot
        miss the request. Raises the call's verdict, or InvalidRequest for the constraint.
        """
        constraint = call.request.sampling.constraint
        if constraint is not None:
            await self._check_constraint(constraint)
        while not self._lifecycle.is_serving and call.verdict is None and not call.is_aborted:
            call.wake.clear()
            await call.wake.wait()  # bounded by the request's own deadline
        if call.verdict is not None:
            raise call.verdict
        return not call.is_aborted

    def find(self, request_id: str) -> Sequence[Call]:
        call = self._by_id.get(request_id)
        return [call] if call is not None else []

    def all(self) -> Sequence[Call]:
        return list(self._by_id.values())

    def wake_all(self) -> None:
        for call in self._by_id.values():
            call.wake.set()

    async def abort(self, calls: Sequence[Call]) -> None:
        """End these calls now; each returns the tokens sampled so far."""
        for call in calls:
            call.is_aborted = True
            call.wake.set()
        await self._abort_in_process([call for call in calls if call.is_admitted])

    async def end_all(self, verdict: AgentLoopError) -> None:
        """End all calls with `verdict`."""
        calls = self.all()
        for call in calls:
            call.verdict = verdict
        with contextlib.suppress(EngineLost):  # the process has exited, which ended its requests
            await self.abort(calls)

    async def recall(self, *, has_all: bool) -> None:
        """Return admitted requests without a sampled token to the gate. After the commit they are admitted with the
        new cache salt, so they cannot reuse KV of older weights. Unless `has_all`, requests with an explicit KV
        version stay in the engine."""
        calls = [call for call in self.all() if call.is_admitted and (has_all or call.request.kv_version is None)]
        unbegun = await self._process.unbegun([call.request.request_id for call in calls]) if calls else ()
        recalled = [call for call in calls if call.request.request_id in unbegun]
        for call in recalled:
            call.is_recalled = True
        await self._abort_in_process(recalled)

    async def _abort_in_process(self, calls: Sequence[Call]) -> None:
        if calls:
            await self._process.abort([call.request.request_id for call in calls])
