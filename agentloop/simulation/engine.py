"""An engine without a model that implements the complete `Engine` protocol, for tests, load tests and simulation.

One task, from `start` to `close`, runs the engine steps: admit requests, wait for the step's duration on the
injected clock, sample one token for every running request. All other methods change state synchronously between two
steps. Invariant: everything is seeded, so two runs under a VirtualClock are equal. Requests wait in order of
arrival and hold KV blocks from admission to end. If a running request gets no block, the request admitted last is
preempted: it returns to the head of the queue without KV and is prefilled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from agentloop.concurrency.clock import Clock, RealClock
from agentloop.engine.adapters import HeldAdapters
from agentloop.engine.interface import (
    ALL_MEMORY,
    Adapter,
    CommitReport,
    Delta,
    EngineInfo,
    MemoryTag,
    OnProgress,
    PushSource,
    StageReport,
    StagingDevice,
    TrainerOrder,
    TransferPart,
    WeightUpdate,
)
from agentloop.engine.lifecycle import EngineLifecycle, EnginePhase
from agentloop.engine.request_watch import ReportPace, RequestWatch, StreamPace
from agentloop.engine.weight_digest import check_digest, read_files
from agentloop.errors import (
    AgentLoopError,
    CheckpointUnreadable,
    Conflict,
    EngineError,
    EngineLost,
    EngineUnusable,
    InvalidRequest,
    InvariantBroken,
    UnsupportedParameter,
    WeightsRefused,
)
from agentloop.images import Image, ImageTokens
from agentloop.simulation.kv_cache import KVCache
from agentloop.simulation.policy import (
    Faults,
    HashPolicy,
    LatencyModel,
    TokenPolicy,
    malformed,
)
from agentloop.simulation.scheduler import LiveRequest, Scheduler
from agentloop.simulation.weights import NoPushes, ReadFolder, SimulatedWeights, WeightSource
from agentloop.types import FinishReason, GenerateRequest, Generation, KVPolicy, Load, PauseMode
from agentloop.values.capabilities import Feature, configured_features
from agentloop.values.checks import check_request, room_tokens
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode

# Limits of a step without latency (about a millisecond of work), so that other tasks of the event loop can run.
_ZERO_LATENCY_TOKENS_PER_STEP = 256
_ZERO_LATENCY_ADMISSIONS_PER_STEP = 8


@dataclass(frozen=True, slots=True)
class SimulatedSpec:
    """The size and speed of a simulated engine."""

    vocab_size: int = 32_000
    max_context_tokens: int = 4096
    block_size: int = 16
    num_blocks: int = 4096
    max_running: int = 256
    latency: LatencyModel = field(default_factory=LatencyModel)
    seed: int = 0
    initial_version: int | None = 0  # None: dummy weights; the engine is unusable until a commit
    num_workers: int = 1
    can_sleep: bool = True
    scheduling_policy: str = "fcfs"  # or "priority"
    can_constrain: bool = False  # True if the policy respects constraints; the engine does not enforce them
    lora_rank: int | None = None
    max_loras: int | None = None  # maximum number of adapters served by name; None: not supported
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    model: str = ""  # the weight folder of the initial version, or empty
    pace: ReportPace = field(default_factory=ReportPace)
    stream_pace: StreamPace = field(default_factory=StreamPace)
    routed_experts: bool = False  # return them, as `policy.routed_experts` makes them
    sampling_mask: bool = False  # return the ids that each token was sampled from
    max_logprobs: int = 20

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="simulated",
            max_context_tokens=self.max_context_tokens,
            vocab_size=self.vocab_size,
            block_size=self.block_size,
            kv_capacity_tokens=self.num_blocks * self.block_size,
            max_running=self.max_running,
            num_workers=self.num_workers,
            can_sleep=self.can_sleep,
            features=configured_features(can_constrain=self.can_constrain, scheduling_policy=self.scheduling_policy)
            - ({Feature.GREEDY} if self.sampling_mask else frozenset())
            | {Feature.SCORES},
            lora_rank=self.lora_rank,
            max_loras=self.max_loras,
            logprobs_mode=self.logprobs_mode,
            max_logprobs=self.max_logprobs,
        )


class SimulatedEngine:
    """An Engine that samples from a `TokenPolicy`. `faults` may be changed at any time."""

    def __init__(
        self,
        spec: SimulatedSpec | None = None,
        *,
        clock: Clock | None = None,
        policy: TokenPolicy | None = None,
        faults: Faults | None = None,
        weight_source: WeightSource | None = None,
        read_folder: ReadFolder = read_files,
    ) -> None:
        """`weight_source` receives pushed weights; without one, pushes are refused.

        `read_folder` reads and validates weight folders; the default accepts any format.
        """
        self._spec = spec = spec if spec is not None else SimulatedSpec()
        if spec.num_blocks * spec.block_size < spec.max_context_tokens:
            raise InvalidRequest(
                f"the KV cache ({spec.num_blocks} blocks of {spec.block_size} tokens) is smaller than one context "
                f"({spec.max_context_tokens} tokens)",
                param="num_blocks",
            )
        self._clock = clock if clock is not None else RealClock()
        self._policy = policy if policy is not None else HashPolicy(spec.vocab_size, spec.seed)
        self.faults = faults if faults is not None else Faults()
        self._kv = KVCache(spec.num_blocks, spec.block_size)
        self._lifecycle = EngineLifecycle(has_begun=lambda: self._scheduler.has_begun)
        self._scheduler = Scheduler(self._kv, spec.max_running, self._lifecycle.kv_version)
        self._weight_source = weight_source if weight_source is not None else NoPushes()
        self._weights = SimulatedWeights(self._clock, self.faults, self._weight_source, read_folder)
        self._adapters = HeldAdapters(spec.max_loras or 0)
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_steps = self._num_streams = 0

    @property
    def info(self) -> EngineInfo:
        return self._spec.info

    @property
    def weight_version(self) -> int | None:
        return self._lifecycle.version

    @property
    def weight_digest(self) -> str:
        return self._weights.digest

    @property
    def is_paused(self) -> bool:
        return self._lifecycle.is_paused

    @property
    def is_usable(self) -> bool:
        return self._lifecycle.is_usable

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        return self._lifecycle.asleep

    async def start(self) -> None:
        if self._spec.model:
            await self._weights.start(self._spec.model)
        self._lifecycle.started(self._spec.initial_version)
        self._task = asyncio.create_task(self._serve(), name="simulated engine")

    async def close(self) -> None:
        self.kill("the engine was closed")
        if self._task is not None:
            await asyncio.wait([self._task])

    def kill(self, reason: str = "the engine died") -> None:
        """Simulate a killed process: all requests and later calls raise EngineLost."""
        if not self._lifecycle.close(reason):
            return
        self._fail_all(EngineLost, reason)
        if self._task is not None:
            self._task.cancel()

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        raise UnsupportedParameter("the engine (simulated) takes no images", param="images")

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        live = self._submit(request, is_streamed=False)
        watch = RequestWatch(
            request,
            self._lifecycle,
            self._spec.pace,
            on_progress,
            tokens_from=lambda start: live.with_aux().since(start),
            end=partial(self.abort, request.request_id),
        )
        try:
            with watch:
                generation = await watch.in_time(live.done)
                await self._lifecycle.until_output_released()
                return watch.finished(generation)
        finally:
            self._drop(live)

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        live = self._submit(request, is_streamed=True)
        has_progress = live.has_progress
        assert has_progress is not None
        start = 0
        self._num_streams += 1
        try:
            with RequestWatch(request, self._lifecycle, self._spec.pace, on_progress) as watch:
                while not live.done.done():
                    if start and (wait_s := self._spec.stream_pace.wait_s(self._num_streams)):
                        await watch.in_time(asyncio.wait([live.done], timeout=wait_s))
                    await watch.in_time(has_progress.wait())
                    await watch.in_time(self._lifecycle.until_output_released())
                    has_progress.clear()
                    if len(live.sampled) > start:
                        delta = live.with_aux().since(start)
                        start += len(delta.token_ids)
                        yield delta
                if len(live.sampled) > start:
                    yield live.with_aux().since(start)
                yield watch.finished(live.done.result())
        finally:
            self._num_streams -= 1
            self._drop(live)

    async def abort(self, request_id: str) -> None:
        live = self._scheduler.find(request_id)
        if live is not None:
            self._finish(live, FinishReason.ABORT)

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        lifecycle = self._lifecycle
        lifecycle.require_alive()
        if mode is not PauseMode.KEEP:
            lifecycle.begin_drain()
            self._refresh()
        if mode is PauseMode.ABORT:
            for live in self._scheduler.all():
                self._finish(live, FinishReason.ABORT)
        if mode is PauseMode.WAIT:
            await lifecycle.until_drained()  # outside `control`: a resume must be able to end the wait
        async with lifecycle.control:
            lifecycle.paused(kv_policy)
            if kv_policy is KVPolicy.RECOMPUTE:
                self._scheduler.drop_kv()
            self._refresh()

    async def resume(self) -> float:
        async with self._lifecycle.control:
            return await self._resume()

    async def _resume(self) -> float:
        lifecycle, began_at = self._lifecycle, self._clock.now()
        lifecycle.check_resume()
        needs_canary = lifecycle.begin_canary()
        version = lifecycle.require_usable() if needs_canary else None
        lifecycle.resumed()
        self._pin_adapters()
        self._refresh()
        if version is not None:
            await self._run_canary(version)
        return 0.0 if version is None else self._clock.now() - began_at

    async def _run_canary(self, version: int) -> None:
        """Run the canary check, whose result is determined by the injected faults. Raises WeightsRefused."""
        try:
            if self.faults.canary_delay_s:
                await self._clock.sleep(self.faults.canary_delay_s)
            if version in self.faults.noise_versions:
                raise WeightsRefused(f"injected fault: the weights of version {version} are broken")
            self._lifecycle.require_alive()
        except Exception:
            self._refuse()
            raise
        else:
            self._lifecycle.release_output()
        finally:
            # After a cancellation too, the next resume runs the check again.
            if self._lifecycle.is_output_held and self._lifecycle.is_serving:
                self._lifecycle.paused(KVPolicy.KEEP)
            self._refresh()

    def _refuse(self) -> None:
        self._lifecycle.refuse()
        self._fail_all(EngineUnusable, "the state of the engine's weights is unknown")
        self._scheduler.drop_kv()

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        await self._lifecycle.drain_pinned(version, grace_s)

    async def follow_trainer(self, order: TrainerOrder) -> None:
        if isinstance(order, TransferPart):
            self._lifecycle.check_stage()
        await self._weight_source.follow_trainer(order)

    async def stage(self, update: WeightUpdate) -> StageReport:
        self._lifecycle.check_stage()
        if self._spec.max_loras is not None and not update.is_probe:
            raise CheckpointUnreadable(
                "this engine serves adapters by name, so its base weights cannot be updated", param="directory"
            )
        report = await self._weights.stage(update)
        self._lifecycle.require_alive()
        return report

    async def commit(self, version: int, *, resumes: bool = False) -> CommitReport:
        async with self._lifecycle.control:
            self._lifecycle.check_commit(version, self._weights.staged_version)
            if resumes:
                self._lifecycle.check_resume()
            if self._lifecycle.is_output_held:
                self._refuse()
            try:
                with self._lifecycle.committing(version, is_forced=self._weights.is_forced):
                    report = await self._weights.commit()
            except BaseException:
                self._fail_all(EngineUnusable, "the state of the engine's weights is unknown")
                raise
            # Requests that do not accept the new version must not sample a token with it.
            for request_id in self._lifecycle.refusing(version):
                await self.abort(request_id)
            return replace(report, canary_ms=1e3 * await self._resume()) if resumes else report

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        self._lifecycle.check_stage()
        if self._spec.max_loras is None:
            raise CheckpointUnreadable(
                "this engine does not serve adapters by name: set max_loras when it starts", param="name"
            )
        if (served := self._adapters.serving(adapter)) is not None:
            return StageReport(StagingDevice.DEVICE, "adapter", digest=served.digest)
        if self.faults.num_failed_stages:
            self.faults.num_failed_stages -= 1
            raise CheckpointUnreadable("injected fault: the adapter does not match the model", param="directory")
        contents = await self._weights.contents(adapter.directory)
        check_digest(adapter.digest, contents.digest, adapter.directory)
        self._adapters.take_unused()
        self._adapters.serve(self._adapters.new(replace(adapter, digest=contents.digest)))
        return StageReport(StagingDevice.FILES, "adapter", contents.num_bytes, digest=contents.digest)

    async def unload_adapter(self, name: str) -> None:
        self._lifecycle.require_alive()
        self._adapters.retire(name)

    async def offer(self) -> PushSource | None:
        self._lifecycle.require_alive()
        version = self._lifecycle.version
        if version is None or MemoryTag.WEIGHTS in self.asleep:
            return None
        return await self._weight_source.offer(version)

    async def sleep(self, level: int) -> None:
        self._lifecycle.check_sleep(level, can_sleep=self._spec.can_sleep)
        try:
            await self.check_health()
        except EngineLost:  # an ended engine holds no memory
            return
        await self.pause(PauseMode.KEEP)
        async with self._lifecycle.control:
            if self._lifecycle.has_to_sleep(level):
                if self.asleep and self._lifecycle.version is None:
                    self._refuse()
                self._scheduler.drop_kv()
                self._weights.release()
                self._lifecycle.slept(level)

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        async with self._lifecycle.control:
            self._lifecycle.woken(self._lifecycle.wakeable(tags))

    def load(self) -> Load:
        return Load(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_used_tokens=self._kv.num_held_blocks * self._spec.block_size,
            kv_capacity_tokens=self._spec.num_blocks * self._spec.block_size,
            weight_version=self._lifecycle.version,
            num_steps=self._num_steps,
            num_sampled_tokens=self._scheduler.num_sampled_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_prefill_tokens=self._scheduler.num_prefill_tokens,
        )

    async def check_health(self) -> None:
        self._lifecycle.require_alive()

    # Requests

    def _submit(self, request: GenerateRequest, *, is_streamed: bool) -> LiveRequest:
        self._lifecycle.require_alive()
        if self.faults.num_lost:
            self.faults.num_lost -= 1
            raise EngineLost("injected fault: the connection was lost")
        check_request(request, self.info)
        version = self._lifecycle.require_usable()
        if self._scheduler.find(request.request_id) is not None:
            raise Conflict(f"request {request.request_id} is already running", param="request_id")
        is_score = request.sampling.score_from is not None
        live = LiveRequest(
            request=request,
            stream=self._policy.open(request),
            max_tokens=room_tokens(request, self.info),
            done=asyncio.get_running_loop().create_future(),
            malformation=self.faults.malformed.pop(0) if self.faults.malformed else None,
            has_progress=asyncio.Event() if is_streamed else None,
            sequence=self._kv.sequence(version),
            sampled=SampledTokens(
                LogprobsMode.RAW if is_score else self._spec.logprobs_mode, len(request.token_ids)
            ),
            has_routes=self._spec.routed_experts and not is_score,
            mask=[] if self._spec.sampling_mask else None,
        )
        if self._lifecycle.is_serving:
            self._pin_adapter(live)
        is_hung = self.faults.num_hung > 0
        if is_hung:
            self.faults.num_hung -= 1
        self._scheduler.submit(live, is_hung=is_hung)
        self._refresh()
        return live

    def _pin_adapter(self, live: LiveRequest) -> None:
        """Assign the served version of its adapter to a new request. Raises the errors of `HeldAdapters.pin`."""
        if live.request.adapter and live.adapter is None:
            live.adapter = self._adapters.pin(live.request)

    def _pin_adapters(self) -> None:
        """Call `_pin_adapter` for all requests that were held by a pause."""
        for live in self._scheduler.all():
            try:
                self._pin_adapter(live)
            except AgentLoopError as error:
                self._fail(live, error)

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        """Remove a request and resolve its future with the generation."""
        self._drop(live)
        request_id, load = live.request.request_id, self.load()
        generation = live.with_aux().generation(request_id, reason, cached_tokens=live.cached_tokens, load=load)
        if live.first_token_at is not None:
            generation = replace(generation, decode_s=live.done.get_loop().time() - live.first_token_at)
        if live.malformation is not None and live.sampled:
            generation = malformed(generation, live.malformation, self._spec.vocab_size)
        if not live.done.done():
            live.done.set_result(generation)

    def _fail_all(self, kind: type[EngineError], reason: str) -> None:
        for live in self._scheduler.all():
            self._fail(live, kind(f"request {live.request.request_id}: {reason}"))

    def _fail(self, live: LiveRequest, error: AgentLoopError) -> None:
        self._drop(live)
        if not live.done.done():
            live.done.set_exception(error)
            live.done.exception()  # mark it as retrieved: asyncio logs it otherwise if the caller was cancelled

    def _drop(self, live: LiveRequest) -> None:
        self._scheduler.remove(live)
        if live.adapter is not None:
            live.adapter.num_calls -= 1
            live.adapter = None
        if live.has_progress is not None:
            live.has_progress.set()
        self._refresh()

    # The engine's task

    async def _serve(self) -> None:
        try:
            while True:
                await self._has_work.wait()
                if self._has_work.is_set():  # a pause may have cleared it before this task ran
                    await self._step()
        except Exception as error:
            # After a bug, or an error of the policy, fail all current and later calls, so that none waits forever.
            self.kill(f"an engine step failed: {error!r}")

    async def _step(self) -> None:
        """Admit requests, wait for the step's duration, and sample, unless the engine was paused in between."""
        latency, lifecycle = self._spec.latency, self._lifecycle
        if lifecycle.version is None:
            raise InvariantBroken("a request is running, but the weight version is unknown")
        num_prefilled = self._scheduler.admit(
            lifecycle.version,
            only_begun=not lifecycle.is_serving,
            max_admitted=_ZERO_LATENCY_ADMISSIONS_PER_STEP if latency.is_zero else self._spec.max_running,
        )
        if latency.is_zero:
            await self._clock.sleep(0)
        else:
            await self._clock.sleep(latency.step_s(num_prefilled, *self._scheduler.decoding_tokens()))
        # The engine may have been paused, or its weights refused, during the sleep.
        if lifecycle.is_paused or lifecycle.version is None:
            return
        self._num_steps += 1
        max_burst = _ZERO_LATENCY_TOKENS_PER_STEP if latency.is_zero else 1
        for live, reason in self._scheduler.step(lifecycle.version, max_burst):
            self._finish(live, reason)
        self._refresh()

    def _refresh(self) -> None:
        """Update the events from the state. Call after every change of the phase or the queues."""
        lifecycle = self._lifecycle
        lifecycle.refresh()
        can_run = lifecycle.phase in (EnginePhase.SERVING, EnginePhase.DRAINING)
        if can_run and self._scheduler.can_step(only_begun=not lifecycle.is_serving):
            self._has_work.set()
        else:
            self._has_work.clear()
