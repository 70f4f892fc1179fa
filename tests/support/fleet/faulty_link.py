"""A network between processes and simulated engines that loses, delays, repeats and reorders calls by a seed.

A caller that gives up closes the connection, and the engine's call is canceled, as on the data plane. Over a
half-open connection, the engine does not detect this and continues.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from enum import StrEnum
from math import inf
from random import Random
from typing import Any, TypeVar

from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import (
    ALL_MEMORY,
    Adapter,
    CommitReport,
    Delta,
    MemoryTag,
    OnProgress,
    PushSource,
    StageReport,
    WeightUpdate,
)
from agentloop.errors import AgentLoopError, Conflict, EngineLost, ServiceUnavailable
from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import GenerateRequest, Generation, KVPolicy, PauseMode
from agentloop.values.codec import decode, encode
from agentloop_servers.coordinator.server import CallType
from agentloop_servers.private_http.fencing import CommandKind, FencingGuard, FencingToken
from agentloop_servers.replica.client import SILENCE_S

T = TypeVar("T")
Ask = Callable[[str, tuple[Any, ...]], Awaitable[Any]]
FOR_EVER_S = 1e6
CALL_TIMEOUT_S = 5.0  # for a call to the coordinator, in addition to the time that it requests


class Fault(StrEnum):
    """Possible faults of one call."""

    LOST_REQUEST = "lost_request"  # it never arrives
    LOST_ANSWER = "lost_answer"  # it takes effect, and its answer is lost
    CUT = "cut"  # the connection breaks while the engine works on it
    HUNG_REQUEST = "hung_request"  # like LOST_REQUEST, and the caller detects it only by its deadline
    HUNG_ANSWER = "hung_answer"  # like LOST_ANSWER, and the caller detects it only by its deadline
    DELAYED = "delayed"  # it arrives late, perhaps after the caller's deadline
    TWICE = "twice"  # a proxy sends it a second time; the second answer counts
    COPIED = "copied"  # it succeeds, and a copy arrives later
    HALF_OPEN = "half_open"  # it is late, and a caller that gives up is not detected


_GENERATE_FAULTS = (Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.CUT, Fault.HUNG_REQUEST, Fault.DELAYED)


_PORT_FAULTS = (
    *(Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.HUNG_REQUEST, Fault.HUNG_ANSWER),
    *(Fault.DELAYED, Fault.TWICE, Fault.COPIED),
)


class Stall:
    """A process that may be suspended for a while: it neither receives nor sends until it continues."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.until = 0.0

    async def passed(self) -> None:
        """Return once the process continues."""
        while self._clock.now() < self.until:
            await self._clock.sleep(self.until - self._clock.now())


class StallingClock:
    """The clock of one process (a Clock): its sleeps do not end while the process is suspended."""

    def __init__(self, clock: Clock, stall: Stall) -> None:
        self._clock = clock
        self._stall = stall

    def now(self) -> float:
        return self._clock.now()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        await self._stall.passed()


class Network:
    """Every link's faults, until `heal`. Owns the calls whose callers have gone."""

    def __init__(self, clock: Clock, rng: Random, fault_rate: float, max_delay_s: float) -> None:
        self.clock = clock
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []  # from calls without a caller; engines may raise only our own errors
        self._fault_rate = fault_rate
        self.is_perfect = fault_rate == 0.0
        self._max_delay_s = max_delay_s
        # in insertion order: a set's order does not follow from the seed
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @property
    def num_late(self) -> int:
        """Return the number of calls without a caller that have not arrived."""
        return len(self._tasks)

    def heal(self) -> None:
        """Stop all faults; late calls still arrive."""
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

    def __init__(self, engine: SimulatedEngine, network: Network, stall: Stall) -> None:
        self.engine = engine
        self.network = network
        self.stall = stall
        self.fence = FencingGuard()
        self.slowness_s = 0.0
        self.commits: list[int] = []  # versions that were swapped in, whether or not the answer arrived
        self.num_blind_resumes = 0  # resumes sent to an engine with an unknown weight version

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        """Raises EngineLost for an unreachable replica, as the data plane's client does."""
        network = self.network
        fault = network.draw(_GENERATE_FAULTS)
        await self._arrive(fault)
        if fault is Fault.CUT:
            try:
                async with asyncio.timeout(network.delay_s()):
                    await self.engine.generate(request, on_progress)
            except TimeoutError:
                pass
        generation = await self.engine.generate(request, on_progress) if fault is not Fault.CUT else None
        await self._heard()
        if generation is None or fault is Fault.LOST_ANSWER:
            raise EngineLost("injected: the connection broke")
        return generation

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Stream the tokens of `generate`, piece by piece."""
        network, loop = self.network, asyncio.get_running_loop()
        fault = network.draw(_GENERATE_FAULTS)
        await self._arrive(fault)
        cut_at = loop.time() + network.delay_s() if fault is Fault.CUT else inf
        async with aclosing(self.engine.stream(request, on_progress)) as pieces:  # type: ignore[type-var] # a generator
            while True:
                try:
                    async with asyncio.timeout_at(cut_at):
                        piece = await anext(pieces, None)
                        await self._heard()
                except TimeoutError as error:
                    raise EngineLost("injected: the connection broke") from error
                if piece is None:
                    return
                if fault is Fault.LOST_ANSWER and isinstance(piece, Generation):
                    raise EngineLost("injected: the connection broke")
                yield piece

    async def abort(self, request_id: str) -> None:
        await self._arrive(self.network.draw((Fault.LOST_REQUEST, Fault.DELAYED)))
        await self.engine.abort(request_id)

    async def _arrive(self, fault: Fault | None) -> None:
        """Deliver a request to the engine's process."""
        if fault is Fault.LOST_REQUEST:
            raise EngineLost("injected: connection refused")
        if fault is Fault.HUNG_REQUEST:
            await self.network.clock.sleep(SILENCE_S)
            raise EngineLost("injected: silence")
        if fault is Fault.DELAYED:
            await self.network.clock.sleep(self.network.delay_s())
        await self._heard()

    async def _heard(self) -> None:
        """Wait while the process is suspended. Raises EngineLost if that takes too long."""
        try:
            async with asyncio.timeout(SILENCE_S):
                await self.stall.passed()
        except TimeoutError as error:
            raise EngineLost("injected: silence") from error


class Caller:
    """The remote engine of one coordinator, whose control orders are numbered."""

    def __init__(self, link: FaultyLink, next_order: Callable[[], FencingToken]) -> None:
        self._link = link
        self._engine = link.engine
        self._network = link.network
        self._next_order = next_order

    @property
    def weight_version(self) -> int | None:
        """Return the version of the last answer; it is read only right after one."""
        return self._engine.weight_version

    async def stage(self, update: WeightUpdate) -> StageReport:
        return await self._order(CommandKind.STAGE, lambda: self._engine.stage(update))

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        return await self._order(CommandKind.STAGE, lambda: self._engine.load_adapter(adapter))

    async def unload_adapter(self, name: str) -> None:
        await self._order(CommandKind.STAGE, lambda: self._engine.unload_adapter(name))

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        await self._order(CommandKind.FREEZE, lambda: self._engine.pause(mode, kv_policy))

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        await self._ask(lambda: self._engine.drain_pinned(version, grace_s))

    async def commit(self, version: int, *, resumes: bool = False) -> CommitReport:
        async def commit() -> CommitReport:
            report = await self._engine.commit(version, resumes=resumes)
            self._link.commits.append(version)
            return report

        return await self._order(CommandKind.FREEZE, commit, "commit")

    async def resume(self) -> float:
        async def resume() -> float:
            is_blind = self._engine.weight_version is None
            canary_s = await self._engine.resume()  # an engine that refused its weights refuses this too
            self._link.num_blind_resumes += is_blind
            return canary_s

        return await self._order(CommandKind.FREEZE, resume)

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
        await self._link.stall.passed()
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


class FaultyPort:
    """The coordinator's ports as another process has them, over the network and through the codec.

    A dead process sends nothing; a suspended process sends and receives nothing until it continues.
    """

    def __init__(self, network: Network, calls: Mapping[str, CallType], ask: Ask, stall: Stall) -> None:
        """`ask` delivers a call to the current coordinator, or raises ServiceUnavailable."""
        self._network = network
        self._calls = calls
        self._ask = ask
        self._stall = stall
        self.is_dead = False

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call = self._calls[name]

        async def send(*arguments: Any, **named: Any) -> Any:
            arguments += tuple((call.defaults | named)[one] for one in call.parameters[len(arguments) :])
            timeout_s = CALL_TIMEOUT_S + (
                arguments[call.parameters.index("wait_s")] if "wait_s" in call.parameters else 0.0
            )
            body = encode(arguments)
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._send(call, body)
            except TimeoutError as error:
                raise ServiceUnavailable(f"no answer to {name}") from error

        return send

    async def _send(self, call: CallType, body: bytes) -> Any:
        network, clock = self._network, self._network.clock

        async def deliver() -> Any:
            return encode(await self._ask(call.name, decode(body, call.arguments)))

        async def late() -> Any:
            await clock.sleep(network.delay_s())
            return await deliver()

        if self.is_dead:
            raise ServiceUnavailable("a dead process asks nobody")
        await self._stall.passed()
        fault = network.draw(_PORT_FAULTS)
        if fault is Fault.LOST_REQUEST:
            raise ServiceUnavailable("injected: connection refused")
        if fault is Fault.HUNG_REQUEST:
            await clock.sleep(FOR_EVER_S)
        if fault is Fault.DELAYED:
            await clock.sleep(network.delay_s())
        if fault is Fault.TWICE:
            await asyncio.gather(deliver(), return_exceptions=True)
        if fault is Fault.COPIED:
            network.spawn(late())
        answer = await deliver()
        await self._stall.passed()
        if fault is Fault.LOST_ANSWER:
            raise ServiceUnavailable("injected: the connection broke")
        if fault is Fault.HUNG_ANSWER:
            await clock.sleep(FOR_EVER_S)
        return decode(answer, call.answer)
