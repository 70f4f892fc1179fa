"""The requests of one vLLM engine that are under way, and the gate that holds new ones.

A held request takes its cache salt (the KV version) when it enters, after an update, and so cannot meet older KV.
Whoever ends a request for a reason of ours writes the reason to its `verdict` and aborts it in vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agentloop.errors import AgentLoopError, Conflict
from agentloop.types import GenerateRequest


@dataclass(slots=True, eq=False)
class Call:
    """One `generate` or `stream` under way."""

    request: GenerateRequest
    is_admitted: bool = False  # vLLM knows it
    is_aborted: bool = False
    verdict: AgentLoopError | None = None  # raised instead of an answer
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set to look at the gate again


class Calls:
    """All of one engine's. `on_leave` is called when one has ended."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        self._on_leave = on_leave
        self._by_id: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_admitted(self) -> int:
        return sum(call.is_admitted for call in self._by_id.values())

    @contextlib.contextmanager
    def entered(self, request: GenerateRequest) -> Iterator[Call]:
        """Raises Conflict for an id that is under way."""
        if request.request_id in self._by_id:
            raise Conflict(f"request {request.request_id} is already running", param="request_id")
        call = self._by_id[request.request_id] = Call(request)
        try:
            yield call
        finally:
            del self._by_id[request.request_id]
            self._on_leave()

    async def pass_gate(self, call: Call, is_open: Callable[[], bool]) -> bool:
        """Wait until the gate is open. False if the call was aborted meanwhile; raises its verdict.

        The caller awaits nothing between a True and handing the request on, so an abort cannot miss it.
        """
        while not is_open() and call.verdict is None and not call.is_aborted:
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


def mark_aborted(calls: Sequence[Call]) -> list[str]:
    """Mark them, and return the ids of those that vLLM has to be told of."""
    for call in calls:
        call.is_aborted = True
        call.wake.set()
    return [call.request.request_id for call in calls if call.is_admitted]
