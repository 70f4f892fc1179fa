"""A network that loses, delays, repeats and reorders, between callers and simulated engines. All from one seed.

A caller that gives up hangs up, and the engine's call is cancelled with it, as the data plane does it; over a
half-open connection the engine never hears of that and goes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from random import Random
from typing import Any, TypeVar

from agentloop.clock import Clock
from agentloop.engine import (
    ALL_MEMORY,
    CommitReport,
    MemoryTag,
    OnProgress,
    PushSource,
    StageReport,
    WeightUpdate,
)
from agentloop.errors import AgentLoopError, Conflict, EngineLost
from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import GenerateRequest, Generation, KVPolicy, PauseMode
from agentloop_servers.private_http.fencing import CommandKind, FencingGuard, FencingToken
from agentloop_servers.replica.client import SILENCE_S

T = TypeVar("T")
FOR_EVER_S = 1e6


class Fault(StrEnum):
    """What may become of one call."""

    LOST_REQUEST = "lost_request"  # it never arrives
    LOST_ANSWER = "lost_answer"  # it takes effect, and nobody hears of it
    CUT = "cut"  # the connection breaks while the engine works on it
    HUNG_REQUEST = "hung_request"  # as LOST_REQUEST, and the caller only has its deadline
    HUNG_ANSWER = "hung_answer"  # as LOST_ANSWER, and the caller only has its deadline
    DELAYED = "delayed"  # it arrives late, perhaps after the caller's deadline
    TWICE = "twice"  # a proxy sends it a second time; the second answer counts
    COPIED = "copied"  # all goes well, and a copy arrives later
    HALF_OPEN = "half_open"  # it is late, and a caller that gives up is not noticed


_GENERATE_FAULTS = (Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.CUT, Fault.HUNG_REQUEST, Fault.DELAYED)


class Network:
    """Every link's faults, until `heal`. Owns the calls whose callers have gone."""

    def __init__(self, clock: Clock, rng: Random, fault_rate: float, max_delay_s: float) -> None:
        self.clock = clock
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []  # of calls without a caller; no engine may raise any but our own
        self._fault_rate = fault_rate
        self.is_perfect = fault_rate == 0.0
        self._max_delay_s = max_delay_s
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in order: a set's order is not the seed's

    @property
    def num_late(self) -> int:
        """Calls that nobody waits for and that have not arrived."""
        return len(self._tasks)

    def heal(self) -> None:
        """No more faults; what is late still arrives."""
        self._fault_rate = 0.0

    def draw(self, faults: tuple[Fault, ...]) -> Fault | None:
        if self.rng.random() >= self._fault_rate:
            return None
        fault = self.rng.choice(faults)
        self.counts[fault] += 1
        return fault

    def delay_s(self) -> float:
        return self.rng.uniform(0.0, self._max_delay_s)

    def spawn(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a call that outlives its caller."""
        task = asyncio.create_task(call, name="half-open call")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AgentLoopError):
            self.errors.append(error)


class FaultyLink:
    """One engine behind its data plane, as its remote callers see it."""

    def __init__(self, engine: SimulatedEngine, network: Network) -> None:
        self.engine = engine
        self.network = network
        self.fence = FencingGuard()
        self.slowness_s = 0.0
        self.commits: list[int] = []  # versions that were swapped in, whoever heard of it
        self.num_blind_resumes = 0  # resumes sent to an engine whose weights nobody knows

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        """Raises EngineLost for a replica that is not heard of, as the data plane's client does."""
        network = self.network
        fault = network.draw(_GENERATE_FAULTS)
        if fault is Fault.LOST_REQUEST:
            raise EngineLost("injected: connection refused")
        if fault is Fault.HUNG_REQUEST:
            await network.clock.sleep(SILENCE_S)
            raise EngineLost("injected: silence")
        if fault is Fault.DELAYED:
            await network.clock.sleep(network.delay_s())
        if fault is Fault.CUT:
            try:
                async with asyncio.timeout(network.delay_s()):
                    await self.engine.generate(request, on_progress)
            except TimeoutError:
                pass
        generation = await self.engine.generate(request, on_progress) if fault is not Fault.CUT else None
        if generation is None or fault is Fault.LOST_ANSWER:
            raise EngineLost("injected: the connection broke")
        return generation


class Caller:
    """The remote engine of one coordinator, whose control orders are numbered."""

    def __init__(self, link: FaultyLink, next_order: Callable[[], FencingToken]) -> None:
        self._link = link
        self._engine = link.engine
        self._network = link.network
        self._next_order = next_order

    async def stage(self, update: WeightUpdate) -> StageReport:
        return await self._order(CommandKind.STAGE, lambda: self._engine.stage(update))

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        await self._order(CommandKind.FREEZE, lambda: self._engine.pause(mode, kv_policy))

    async def commit(self, version: int) -> CommitReport:
        async def commit() -> CommitReport:
            report = await self._engine.commit(version)
            self._link.commits.append(version)
            return report

        return await self._order(CommandKind.FREEZE, commit, "commit")

    async def resume(self) -> None:
        self._link.num_blind_resumes += self._engine.weight_version is None
        await self._order(CommandKind.FREEZE, self._engine.resume)

    async def sleep(self, level: int) -> None:
        await self._order(CommandKind.FREEZE, lambda: self._engine.sleep(level))

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        await self._order(CommandKind.FREEZE, lambda: self._engine.wake(tags))

    async def offer(self) -> PushSource | None:
        return await self._ask(self._engine.offer)

    async def _order(self, lane: CommandKind, send: Callable[[], Awaitable[T]], name: str = "order") -> T:
        order = self._next_order()

        async def obey() -> T:
            try:
                self._link.fence.admit(lane, order)
            except Conflict:
                self._network.counts[f"{name} refused"] += 1
                raise
            return await send()

        return await self._ask(obey)

    async def _ask(self, send: Callable[[], Awaitable[T]]) -> T:
        network, clock = self._network, self._network.clock
        if self._link.slowness_s:
            await clock.sleep(self._link.slowness_s)
        fault = network.draw(tuple(Fault))
        match fault:
            case Fault.LOST_REQUEST:
                raise EngineLost("injected: connection refused")
            case Fault.HUNG_REQUEST:
                await clock.sleep(FOR_EVER_S)
            case Fault.DELAYED:
                await clock.sleep(network.delay_s())
            case Fault.CUT:
                try:
                    async with asyncio.timeout(network.delay_s()):
                        await send()
                except TimeoutError:
                    pass
                raise EngineLost("injected: the connection broke")
            case Fault.HALF_OPEN:
                return await asyncio.shield(network.spawn(self._late(send)))
            case Fault.TWICE:
                await asyncio.gather(send(), return_exceptions=True)
            case Fault.COPIED:
                network.spawn(self._late(send))
        answer = await send()
        if fault is Fault.LOST_ANSWER:
            raise EngineLost("injected: the connection broke")
        if fault is Fault.HUNG_ANSWER:
            await clock.sleep(FOR_EVER_S)
        return answer

    async def _late(self, send: Callable[[], Awaitable[T]]) -> T:
        await self._network.clock.sleep(self._network.delay_s())
        return await send()
