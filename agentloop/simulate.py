"""An engine without a model, for tests, load tests and simulation: the whole Engine port, token by token.

One task (owned: made by `start`, ended by `close`) runs the engine step: admit what fits, let the step's time pass
on the injected clock, give every running request one token. All other methods change state synchronously between
two steps, so none ever sees half a token. Everything is seeded: under a VirtualClock two runs are equal.

Requests wait in order of arrival, take KV blocks when admitted, and give them back when they end. If a running
request finds no block, the one admitted last is preempted: it goes back to the head of the queue without KV and
is prefilled again later. With a zero-latency model there is no time to model, so a step takes tokens request by
request up to a bound, after which other tasks run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum

from agentloop.clock import Clock, RealClock
from agentloop.engine import Delta, EngineInfo, KVEvent, WeightUpdate
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    EngineError,
    EngineLost,
    EngineUnusable,
    InvalidRequest,
    InvariantBroken,
    WeightUpdateFailed,
)
from agentloop.simulated_kv import KVCache, KVSequence
from agentloop.simulated_policy import (
    Faults,
    HashPolicy,
    LatencyModel,
    Malformation,
    ScriptedPolicy,
    TokenPolicy,
    malformed,
)
from agentloop.simulated_scheduler import LiveRequest, Scheduler
from agentloop.types import FinishReason, GenerateRequest, Generation, KVPolicy, Load, PauseMode
from agentloop.validate import check_checkpoint, check_request, room_tokens

__all__ = [
    "Faults",
    "HashPolicy",
    "LatencyModel",
    "Malformation",
    "ScriptedPolicy",
    "SimulatedEngine",
    "SimulatedSpec",
    "TokenPolicy",
]

# Bounds of a step without latency, about a millisecond of work: the loop's other tasks are not held up.
_ZERO_LATENCY_TOKENS_PER_STEP = 256
_ZERO_LATENCY_ADMISSIONS_PER_STEP = 8


@dataclass(frozen=True, slots=True)
class SimulatedSpec:
    """What a simulated engine is. `initial_version` None: dummy weights, unusable until the first commit."""

    vocab_size: int = 32_000
    max_context_tokens: int = 4096
    block_size: int = 16
    num_blocks: int = 4096
    max_running: int = 256
    latency: LatencyModel = field(default_factory=LatencyModel)
    seed: int = 0
    initial_version: int | None = 0


class _State(Enum):
    NEW = "new"
    SERVING = "serving"
    DRAINING = "draining"  # a pause(WAIT) lets what began run to its end, and admits nothing else
    PAUSED = "paused"
    CLOSED = "closed"


_MOVES = {
    _State.NEW: {_State.SERVING, _State.CLOSED},
    _State.SERVING: {_State.DRAINING, _State.PAUSED, _State.CLOSED},
    _State.DRAINING: {_State.SERVING, _State.PAUSED, _State.CLOSED},
    _State.PAUSED: {_State.SERVING, _State.CLOSED},
    _State.CLOSED: set(),
}


class SimulatedEngine:
    """An Engine whose tokens come from a `TokenPolicy`. `faults` may be armed at any time."""

    def __init__(
        self,
        spec: SimulatedSpec | None = None,
        *,
        clock: Clock | None = None,
        policy: TokenPolicy | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._spec = spec = spec if spec is not None else SimulatedSpec()
        if spec.num_blocks * spec.block_size < spec.max_context_tokens:
            raise InvalidRequest("the KV cache must hold one full context", param="num_blocks")
        self._clock = clock if clock is not None else RealClock()
        self._policy = policy if policy is not None else HashPolicy(spec.vocab_size, spec.seed)
        self.faults = faults if faults is not None else Faults()
        self._kv = KVCache(spec.num_blocks, spec.block_size)
        self._scheduler = Scheduler(self._kv, spec.max_running)
        self._state = _State.NEW
        self._weight_version = spec.initial_version
        self._staged: WeightUpdate | None = None
        self._has_work = asyncio.Event()
        self._drain_ended = asyncio.Event()
        self._swap_lock = asyncio.Lock()  # a resume waits for a commit under way
        self._task: asyncio.Task[None] | None = None
        self._end_reason = ""

    @property
    def info(self) -> EngineInfo:
        spec = self._spec
        return EngineInfo(
            name="simulated",
            max_context_tokens=spec.max_context_tokens,
            vocab_size=spec.vocab_size,
            block_size=spec.block_size,
            kv_capacity_tokens=spec.num_blocks * spec.block_size,
            max_running=spec.max_running,
        )

    @property
    def weight_version(self) -> int | None:
        """None also after a failed commit: nobody knows what the weights are."""
        return self._weight_version

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens whose KV was computed a second time, after a preemption or a RECOMPUTE."""
        return self._scheduler.num_recomputed_tokens

    @property
    def is_paused(self) -> bool:
        return self._state is _State.PAUSED

    @property
    def is_usable(self) -> bool:
        return self._weight_version is not None and self._state is not _State.CLOSED

    async def start(self) -> None:
        self._move(_State.SERVING)
        self._task = asyncio.create_task(self._serve(), name="simulated engine")

    async def close(self) -> None:
        self.kill("the engine was closed")
        if self._task is not None:
            await asyncio.wait([self._task])

    def kill(self, reason: str = "the engine died") -> None:
        """Die between two tokens, as a process does that is killed: everything raises EngineLost from now on."""
        if self._state is _State.CLOSED:
            return
        self._move(_State.CLOSED)
        self._end_reason = reason
        self._fail_all(EngineLost, reason)
        self._kv.close()
        if self._task is not None:
            self._task.cancel()

    async def generate(self, request: GenerateRequest) -> Generation:
        live = self._submit(request, is_streamed=False)
        try:
            return await live.done
        finally:
            self._drop(live)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Generation]:
        live = self._submit(request, is_streamed=True)
        has_progress = live.has_progress
        assert has_progress is not None
        start = 0
        try:
            while not live.done.done():
                await has_progress.wait()
                has_progress.clear()
                end = len(live.token_ids)
                if end > start:
                    ids, logprobs = tuple(live.token_ids[start:end]), tuple(live.logprobs[start:end])
                    yield Delta(ids, logprobs, live.spans(start, end))
                    start = end
            if len(live.token_ids) > start:
                ids, logprobs = tuple(live.token_ids[start:]), tuple(live.logprobs[start:])
                yield Delta(ids, logprobs, live.spans(start, len(live.token_ids)))
            yield live.done.result()
        finally:
            self._drop(live)

    async def abort(self, request_id: str) -> None:
        live = self._scheduler.find(request_id)
        if live is not None:
            self._finish(live, FinishReason.ABORT)

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        """As the port says. A second pause may tighten the first: ABORT ends what KEEP froze, RECOMPUTE drops KV;
        WAIT after a completed pause changes nothing. Raises Conflict if a resume ends a WAIT."""
        self._require_alive()
        if mode is PauseMode.ABORT:
            for live in self._scheduler.all():
                self._finish(live, FinishReason.ABORT)
        if mode is PauseMode.WAIT and self._state is _State.SERVING:
            self._drain_ended.clear()
            self._move(_State.DRAINING)
        if mode is PauseMode.WAIT and self._state is _State.DRAINING:
            await self._drain_ended.wait()
            self._require_alive()
            if not self.is_paused:
                raise Conflict("a resume came while the pause waited for requests to end")
        if self._state is not _State.PAUSED:
            self._move(_State.PAUSED)
        if kv_policy is KVPolicy.RECOMPUTE:
            self._scheduler.drop_kv()

    async def resume(self) -> None:
        async with self._swap_lock:
            self._require_alive()
            if self._state is not _State.SERVING:
                self._move(_State.SERVING)

    async def stage(self, update: WeightUpdate) -> None:
        self._require_alive()
        if self.faults.num_failed_stages:
            self.faults.num_failed_stages -= 1
            raise CheckpointUnreadable("injected: the weights do not fit the model", param="directory")
        check_checkpoint(update.directory)
        self._staged = update

    async def commit(self, version: int) -> None:
        async with self._swap_lock:
            self._require_alive()
            if self._state is not _State.PAUSED:
                raise Conflict("weights are committed to a paused engine only")
            if self._staged is None or self._staged.version != version:
                held = "nothing" if self._staged is None else f"version {self._staged.version}"
                raise Conflict(f"version {version} cannot be committed: {held} is staged")
            self._staged = None
            try:
                if self.faults.commit_delay_s:
                    await self._clock.sleep(self.faults.commit_delay_s)
                if self.faults.num_failed_commits:
                    self.faults.num_failed_commits -= 1
                    raise WeightUpdateFailed(f"injected: version {version} could not be loaded")
            except BaseException:  # cancelled too: the weights are half written
                self._weight_version = None
                self._fail_all(EngineUnusable, "its weights are of unknown state")
                raise
            self._require_alive()
            self._weight_version = version

    def load(self) -> Load:
        return Load(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_used_tokens=self._kv.num_held_blocks * self._spec.block_size,
            kv_capacity_tokens=self._spec.num_blocks * self._spec.block_size,
            weight_version=self._weight_version,
        )

    def kv_events(self) -> AsyncIterator[KVEvent]:
        return self._kv.subscribe()

    async def check_health(self) -> None:
        self._require_alive()

    # --- requests -----------------------------------------------------------------------------------------

    def _submit(self, request: GenerateRequest, *, is_streamed: bool) -> LiveRequest:
        self._require_alive()
        if self.faults.num_lost:
            self.faults.num_lost -= 1
            raise EngineLost("injected: the connection broke")
        check_request(request, self.info)
        if self._weight_version is None:
            raise EngineUnusable("the engine holds no weights of a known version")
        if self._scheduler.find(request.request_id) is not None:
            raise Conflict(f"request {request.request_id} is already running", param="request_id")
        live = LiveRequest(
            request=request,
            stream=self._policy.open(request),
            max_tokens=room_tokens(request, self.info),
            done=asyncio.get_running_loop().create_future(),
            malformation=self.faults.malformed.pop(0) if self.faults.malformed else None,
            has_progress=asyncio.Event() if is_streamed else None,
            sequence=KVSequence(self._weight_version),
        )
        is_hung = self.faults.num_hung > 0
        if is_hung:
            self.faults.num_hung -= 1
        self._scheduler.submit(live, is_hung=is_hung)
        self._refresh()
        return live

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        """Answer a request and forget it."""
        self._drop(live)
        generation = Generation(
            request_id=live.request.request_id,
            token_ids=tuple(live.token_ids),
            logprobs=tuple(live.logprobs),
            weight_versions=live.spans(0, len(live.token_ids)),
            finish_reason=reason,
            cached_tokens=live.cached_tokens,
            load=self.load(),
        )
        if live.malformation is not None and live.token_ids:
            generation = malformed(generation, live.malformation, self._spec.vocab_size)
        if not live.done.done():
            live.done.set_result(generation)

    def _fail_all(self, kind: type[EngineError], reason: str) -> None:
        for live in self._scheduler.all():
            self._drop(live)
            if not live.done.done():
                live.done.set_exception(kind(f"request {live.request.request_id}: {reason}"))
                live.done.exception()  # marks it as seen: a caller that has left must not cause a log line

    def _drop(self, live: LiveRequest) -> None:
        self._scheduler.remove(live)
        if live.has_progress is not None:
            live.has_progress.set()
        self._refresh()

    # --- the engine's task --------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while True:
                await self._has_work.wait()
                await self._step()
        except Exception as error:
            # A bug, or a policy that raised: all callers hear of it, now and later, rather than wait for ever.
            self.kill(f"its step failed: {error!r}")

    async def _step(self) -> None:
        """Admit, let the step's time pass, and sample, unless a pause came meanwhile."""
        latency, version = self._spec.latency, self._weight_version
        if version is None:
            raise InvariantBroken("a request runs without weights")
        num_prefilled = self._scheduler.admit(
            version,
            only_begun=self._state is _State.DRAINING,
            max_admitted=_ZERO_LATENCY_ADMISSIONS_PER_STEP if latency.is_zero else self._spec.max_running,
        )
        if latency.is_zero:
            await self._clock.sleep(0)
        else:
            await self._clock.sleep(latency.step_s(num_prefilled, *self._scheduler.decoding_tokens()))
        if self._state is _State.PAUSED or self._weight_version is None:
            return
        max_burst = _ZERO_LATENCY_TOKENS_PER_STEP if latency.is_zero else 1
        for live, reason in self._scheduler.step(self._weight_version, max_burst):
            self._finish(live, reason)
        self._refresh()

    # --- states -------------------------------------------------------------------------------------------

    def _move(self, state: _State) -> None:
        if state not in _MOVES[self._state]:
            raise Conflict(f"the engine is {self._state.value} and cannot become {state.value}")
        self._state = state
        self._refresh()

    def _refresh(self) -> None:
        """Bring the events in line with the state; called after every change of state or of the queues."""
        if self._state is _State.DRAINING and not self._scheduler.has_begun:
            self._state = _State.PAUSED
        if self._state is not _State.DRAINING:
            self._drain_ended.set()
        is_running = self._state in (_State.SERVING, _State.DRAINING)
        if is_running and self._scheduler.can_step(only_begun=self._state is _State.DRAINING):
            self._has_work.set()
        else:
            self._has_work.clear()

    def _require_alive(self) -> None:
        if self._state is _State.NEW:
            raise EngineLost("the engine was not started")
        if self._state is _State.CLOSED:
            raise EngineLost(self._end_reason)
