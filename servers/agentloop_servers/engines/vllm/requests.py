"""The requests of one vLLM engine that are under way, and the gate that holds new ones.

A held request takes its cache salt (the KV version) when it enters, after an update, and so cannot meet older KV.
Code that ends a request for a reason of ours writes the reason to its `verdict` and aborts it in vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentloop.engine_lifecycle import EngineLifecycle
from agentloop.errors import AgentLoopError, Conflict, EngineLost
from agentloop.types import GenerateRequest
from agentloop_servers.engines.vllm.constraints import ConstraintTrials
from agentloop_servers.engines.vllm.convert import is_unbegun
from agentloop_servers.engines.vllm.process import VllmProcess, vllm_call


@dataclass(slots=True, eq=False)
class Call:
    """One `generate` or `stream` under way."""

    request: GenerateRequest
    is_admitted: bool = False  # vLLM knows it
    is_aborted: bool = False
    is_recalled: bool = False  # aborted in vLLM, to pass the gate once more
    verdict: AgentLoopError | None = None  # raised instead of an answer
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set to look at the gate again


class Calls:
    """All calls of one engine. Its lifecycle opens and shuts the gate, and hears of every call that has ended."""

    def __init__(self, process: VllmProcess, lifecycle: EngineLifecycle) -> None:
        self._process = process
        self._lifecycle = lifecycle
        self._by_id: dict[str, Call] = {}
        self._trials = ConstraintTrials()

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
            self._lifecycle.refresh()

    async def pass_gate(self, call: Call) -> bool:
        """Try the call's constraint, and wait until the engine serves. False if the call was aborted meanwhile;
        raises its verdict, or InvalidRequest for the constraint.

        The caller awaits nothing between a True and handing the request on, so an abort cannot miss it.
        """
        constraint = call.request.sampling.constraint
        if constraint is not None:
            await self._trials.check(constraint)
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
        """End these now; each gives out what it has."""
        for call in calls:
            call.is_aborted = True
            call.wake.set()
        await self._abort_in_vllm([call for call in calls if call.is_admitted])

    async def end_all(self, verdict: AgentLoopError) -> None:
        """Make every call raise `verdict`."""
        calls = self.all()
        for call in calls:
            call.verdict = verdict
        with contextlib.suppress(EngineLost):  # then vLLM itself has ended them
            await self.abort(calls)

    async def recall(self, *, has_all: bool) -> None:
        """Take requests that vLLM has admitted but not begun back behind the gate: after a commit they enter with
        its salt, and so meet no KV of older weights. Unless `has_all`, those that may go on with older KV stay."""
        calls = [call for call in self.all() if call.is_admitted and (has_all or call.request.kv_version is None)]
        waiting = [call for call in calls if is_unbegun(self._process.llm, call.request.request_id)]
        for call in waiting:
            call.is_recalled = True
        await self._abort_in_vllm(waiting)

    async def _abort_in_vllm(self, calls: Sequence[Call]) -> None:
        if calls:
            async with vllm_call("abort"):
                await self._process.llm.abort([call.request.request_id for call in calls])
