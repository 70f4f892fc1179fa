"""The base of engines that run in separate processes: gate, pause modes, commits, sleep and load reports.

A subclass submits requests to its process and reads the outputs. Invariants:

- A gate holds new requests while the engine is not serving (`calls.py`).
- The process only supports freezing in place. Before it, pause mode ABORT ends running requests, and WAIT drains
  them.
- An admitted request without a sampled token passes the gate again after a commit, so it never reuses older KV.
- The first request under new weights is a fixed canary prompt. All outputs wait for its result (`_run_canary`).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from agentloop.engine.canary import canary_deadline_s, canary_request, find_weight_fault
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
    TrainerOrder,
    TransferPart,
    WeightUpdate,
)
from agentloop.engine.lifecycle import EngineLifecycle, EnginePhase
from agentloop.engine.request_watch import RequestWatch, StreamPace
from agentloop.errors import (
    AgentLoopError,
    CheckpointUnreadable,
    Conflict,
    DeadlineExceeded,
    EngineLost,
    EngineUnusable,
    InvalidRequest,
    MalformedEngineResponse,
    UnsupportedParameter,
    WeightsRefused,
    WeightUpdateFailed,
)
from agentloop.images import Image, ImageTokens
from agentloop.types import GenerateRequest, Generation, KVPolicy, Load, PauseMode
from agentloop.values.checks import check_request
from agentloop.values.sampled_tokens import SampledTokens
from agentloop_servers.engines.common.calls import Call, Calls
from agentloop_servers.engines.common.config import ProcessEngineConfig
from agentloop_servers.engines.common.constraints import ConstraintChecks
from agentloop_servers.engines.common.process import EngineProcess, one_line
from agentloop_servers.engines.common.weights import EngineWeights, Staged

ConfigT = TypeVar("ConfigT", bound=ProcessEngineConfig)
ProcessT = TypeVar("ProcessT", bound=EngineProcess)


class ProcessEngine(ABC, Generic[ConfigT, ProcessT]):
    """The base of engines in separate processes. `start` takes 15 to 60 s; `close` ends the processes."""

    stream_pace = StreamPace()
    """With many streams, tokens are polled (`add_so_far`): one output per token and stream would cost the engine
    and its readers more time than sampling."""

    def __init__(self, config: ConfigT, process: ProcessT, weights: EngineWeights) -> None:
        self._config = config
        self._process = process
        self._served_weights = weights
        self._info: EngineInfo | None = None
        self._lifecycle = EngineLifecycle(has_begun=lambda: self._calls.num_admitted > 0)
        self._calls = Calls(process, self._lifecycle, ConstraintChecks().check)
        self._num_streams = 0

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineLost("the engine is not started")
        return self._info

    @property
    def weight_version(self) -> int | None:
        return self._lifecycle.version

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        return self._lifecycle.asleep

    @property
    def is_paused(self) -> bool:
        return self._lifecycle.is_paused

    @property
    def is_usable(self) -> bool:
        return self._lifecycle.is_usable

    # Methods of a subclass

    @abstractmethod
    async def came_up(self) -> EngineInfo:
        """Finish the start after processes and weights are ready. Return the engine's constant properties."""

    async def prepared(self, request: GenerateRequest) -> Any:
        """Prepare a request before the gate, which may be slow; the result is passed to `admitted`."""
        return None

    @abstractmethod
    def admitted(self, call: Call, prepared: Any, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        """Iterate over the outputs of a request; without `is_streamed` the last output has all tokens.

        The first step submits the request to the process before any await. Closing the iterator aborts the request.
        """

    @abstractmethod
    def add_so_far(self, sampled: SampledTokens, call: Call) -> None:
        """Append the tokens of a running request that `sampled` does not have yet, with their versions.

        Append nothing if the request has ended.
        """

    @abstractmethod
    def add_piece(self, sampled: SampledTokens, call: Call, output: Any) -> bool:
        """Append the tokens of one stream output. Return False if their versions arrive with the last output."""

    @abstractmethod
    def finished(self, call: Call, output: Any, sampled: SampledTokens) -> Generation:
        """Make the generation of a request from its last output and the tokens streamed so far, `sampled`.

        `output` is None for a request that was aborted before it reached the process.
        """

    @abstractmethod
    def translated(self, error: Exception) -> AgentLoopError:
        """Convert an error of the engine's library to an agentloop error."""

    @abstractmethod
    def committed(self, version: int) -> None:
        """Record that tokens sampled after the next resume have weight version `version`."""

    # Lifecycle

    async def start(self) -> None:
        """Start the engine. Raises CheckpointUnreadable for a bad model folder, EngineError if the start fails."""
        if self._lifecycle.phase is not EnginePhase.NEW:
            raise Conflict("the engine was already started: create a new engine to start again")
        await self._served_weights.check()
        try:
            await self._process.start()
            await self._served_weights.start()
            self._info = await self.came_up()
        except BaseException:
            await self.close()
            raise
        self._lifecycle.started(self._config.initial_version)

    async def close(self) -> None:
        if self._lifecycle.close("the engine was closed"):
            await self._calls.end_all(EngineLost("the engine was closed"))
            await self._process.close()
        self._served_weights.close()

    async def check_health(self) -> None:
        self._lifecycle.require_alive()
        await self._process.check_health()

    # Requests

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        self._lifecycle.require_alive()
        raise UnsupportedParameter(f"this engine ({self.info.name}) does not support images", param="images")

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        reported = self._no_tokens(request)
        with self._registered(request) as call:

            def tokens_from(start: int) -> Delta:
                self.add_so_far(reported, call)
                return reported.since(start)

            with self._watched(request, on_progress, tokens_from, partial(self.abort, request.request_id)) as watch:
                async with contextlib.aclosing(self._outputs(call, is_streamed=False)) as outputs:
                    output = await watch.in_time(anext(outputs, None))
        return watch.finished(self.finished(call, output, self._no_tokens(request)))

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        self._num_streams += 1
        try:
            is_paced = self.stream_pace.wait_s(self._num_streams) > 0
            pieces = (self._stream_by_polling if is_paced else self._stream_each_output)(request, on_progress)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
        finally:
            self._num_streams -= 1

    async def _stream_by_polling(
        self, request: GenerateRequest, on_progress: OnProgress | None
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Stream a request that has one output at its end: poll its tokens until then."""
        polled, num_sent = self._no_tokens(request), 0
        with self._registered(request) as call, self._watched(request, on_progress) as watch:
            ending = asyncio.create_task(self._last_output(call), name="streamed request")
            try:
                while not ending.done():
                    wait_s = self.stream_pace.wait_s(self._num_streams) or self.stream_pace.least_s
                    await watch.in_time(asyncio.wait([ending], timeout=wait_s))
                    if ending.done():
                        break
                    await watch.in_time(self._lifecycle.until_output_released())
                    self.add_so_far(polled, call)
                    if len(polled) > num_sent:
                        delta, num_sent = polled.since(num_sent), len(polled)
                        yield delta
                output = ending.result()
            finally:
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)  # the cancelled task aborts the request
        sampled = self._no_tokens(request)
        generation = self.finished(call, output, sampled)
        if len(sampled) > num_sent:
            yield sampled.since(num_sent)
        yield watch.finished(generation)

    async def _last_output(self, call: Call) -> Any:
        async with contextlib.aclosing(self._outputs(call, is_streamed=False)) as outputs:
            return await anext(outputs, None)

    async def _stream_each_output(
        self, request: GenerateRequest, on_progress: OnProgress | None
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Stream a request with one delta for each output of the process."""
        sampled, num_sent, output = self._no_tokens(request), 0, None
        with self._registered(request) as call, self._watched(request, on_progress) as watch:
            async with contextlib.aclosing(self._outputs(call, is_streamed=True)) as outputs:
                while True:
                    piece = await watch.in_time(anext(outputs, None))
                    if piece is None:
                        break
                    output = piece
                    if not self.add_piece(sampled, call, output) or len(sampled) == num_sent:
                        continue  # the last output has the version spans of these tokens
                    delta, num_sent = sampled.since(num_sent), len(sampled)
                    yield delta
        yield watch.finished(self.finished(call, output, sampled))

    def _no_tokens(self, request: GenerateRequest) -> SampledTokens:
        return SampledTokens(self._config.logprobs_mode, len(request.token_ids))

    async def abort(self, request_id: str) -> None:
        await self._calls.abort(self._calls.find(request_id))

    def _watched(
        self,
        request: GenerateRequest,
        on_progress: OnProgress | None,
        tokens_from: Callable[[int], Delta] | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> RequestWatch:
        return RequestWatch(
            request, self._lifecycle, self._config.pace, on_progress, tokens_from=tokens_from, end=end
        )

    @contextlib.contextmanager
    def _registered(self, request: GenerateRequest) -> Iterator[Call]:
        self._lifecycle.require_alive()
        check_request(request, self.info)
        self._lifecycle.require_usable()
        with self._calls.entered(request) as call:
            yield call

    async def _outputs(self, call: Call, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        """Pass the gate and iterate over the outputs of a call; there is no output if it was aborted before
        admission.

        Closing or cancelling the iterator aborts the request in the engine.
        """
        prepared = await self.prepared(call.request)
        while await self._calls.pass_gate(call):
            # No await from here until the engine has registered the request, so that an abort cannot miss it.
            call.is_admitted, call.is_recalled = True, False
            try:
                async with contextlib.aclosing(self.admitted(call, prepared, is_streamed=is_streamed)) as outputs:
                    async for output in outputs:
                        if call.is_recalled:
                            break
                        await self._lifecycle.until_output_released()
                        if call.verdict is not None:
                            raise call.verdict
                        yield output
                    else:
                        return
            except Exception as error:
                raise (call.verdict or self.translated(error)) from error
            call.is_admitted = False

    # Pause

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        """Implement `Engine.pause`. Raises DeadlineExceeded if WAIT takes longer than `drain_timeout_s`."""
        lifecycle = self._lifecycle
        lifecycle.require_alive()
        if mode is not PauseMode.KEEP:
            lifecycle.begin_drain()
        if mode is PauseMode.ABORT:
            await self._calls.abort(self._calls.all())
        if mode is PauseMode.WAIT:
            try:
                async with asyncio.timeout(self._config.drain_timeout_s):
                    await lifecycle.until_drained()
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"pause(WAIT): requests were still running after {self._config.drain_timeout_s:g} s; pause with"
                    " ABORT or KEEP, or retry"
                ) from error
        async with lifecycle.control:
            lifecycle.require_alive()
            await self._freeze(is_cache_cleared=kv_policy is KVPolicy.RECOMPUTE)
            lifecycle.paused(kv_policy)

    async def _freeze(self, *, is_cache_cleared: bool) -> None:
        if not self.is_paused:
            self._lifecycle.begin_freeze()
            await self._process.pause(is_cache_cleared=is_cache_cleared)
        elif is_cache_cleared and not self.asleep:
            await self._process.clear_cache()

    async def resume(self) -> float:
        async with self._lifecycle.control:
            return await self._resume()

    async def _resume(self) -> float:
        self._lifecycle.check_resume()
        if self._lifecycle.begin_canary():
            return await self._run_canary(self._lifecycle.require_usable(), self._unfreeze)
        await self._unfreeze()
        return 0.0

    async def _unfreeze(self) -> None:
        if self._lifecycle.phase in (EnginePhase.FREEZING, EnginePhase.PAUSED):
            await self._process.resume()
        self._resumed()

    def _resumed(self) -> None:
        self._lifecycle.resumed()
        self._calls.wake_all()

    # Canary check

    async def _run_canary(self, version: int, resume: Callable[[], Awaitable[None]]) -> float:
        """Call `resume` with the canary request as the first request. Return the duration of the check in seconds.

        Raises WeightsRefused if the weights are broken, WeightUpdateFailed if the deadline passes.
        """
        loop, request = asyncio.get_running_loop(), canary_request(self.info)
        deadline_s = canary_deadline_s(self._process.stats().slow_step_s)
        answering = asyncio.create_task(self._answer_canary(request), name="canary check")
        try:
            await asyncio.sleep(0)  # let the task submit the canary request before the process resumes
            await resume()
            started_at = loop.time()
            try:
                async with asyncio.timeout(deadline_s):
                    fault = find_weight_fault(await answering, self.info.vocab_size)
            except MalformedEngineResponse as error:
                fault = error.message
            if fault is not None:
                raise WeightsRefused(f"version {version}: {fault}")
            self._lifecycle.release_output()
            return loop.time() - started_at
        except Exception as error:
            await self._refuse()
            if isinstance(error, TimeoutError):
                raise WeightUpdateFailed(
                    f"version {version}: the canary check had no answer within {deadline_s:g} s; "
                    "the engine is stuck or its host is overloaded"
                ) from error
            raise
        except BaseException:  # cancelled: the next resume runs the check again
            await self._freeze_again(is_cache_cleared=False)
            raise
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer_canary(self, request: GenerateRequest) -> Generation:
        """Generate without passing the gate, which is closed."""
        call = Call(request)
        async with contextlib.aclosing(self.admitted(call, None, is_streamed=False)) as outputs:
            output = await anext(outputs, None)
            return self.finished(call, output, self._no_tokens(request))

    async def _refuse(self) -> None:
        """Refuse the new weights: end all requests, freeze the process, and drop all KV."""
        self._lifecycle.refuse()
        await self._calls.end_all(EngineUnusable("the engine's weights are in an unknown state"))
        await self._freeze_again(is_cache_cleared=True)

    async def _freeze_again(self, *, is_cache_cleared: bool) -> None:
        with contextlib.suppress(AgentLoopError):  # the caller raises its own error
            await self._freeze(is_cache_cleared=is_cache_cleared)
            self._lifecycle.paused(KVPolicy.KEEP)

    # Weights

    @property
    def weight_digest(self) -> str:
        return self._served_weights.digest

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        await self._lifecycle.drain_pinned(version, grace_s)

    async def follow_trainer(self, order: TrainerOrder) -> None:
        if isinstance(order, TransferPart):
            self._lifecycle.check_stage()
        await self._served_weights.follow_trainer(order)

    async def stage(self, update: WeightUpdate) -> StageReport:
        self._lifecycle.check_stage()
        return await self._served_weights.stage(update)

    async def commit(self, version: int, *, resumes: bool = False) -> CommitReport:
        lifecycle = self._lifecycle
        async with lifecycle.control:
            lifecycle.check_commit(version, self._served_weights.staged_version)
            if resumes:
                lifecycle.check_resume()
            if lifecycle.is_output_held:  # the previous weights have not passed their canary check
                await self._refuse()
            staged = self._served_weights.take_staged()
            # The combined call submits the canary request before the commit, which needs a served version.
            if resumes and lifecycle.version is not None and not staged[1].is_forced:
                return await self._commit_and_resume(version, staged)
            report = await self._commit(version, staged)
            return replace(report, canary_ms=1e3 * await self._resume()) if resumes else report

    async def _commit_and_resume(self, version: int, staged: Staged) -> CommitReport:
        """Commit and resume in one call of the process, after the canary request was submitted."""
        report = CommitReport()

        async def commit() -> None:
            nonlocal report
            self._lifecycle.begin_freeze()  # if the call fails, the process may already have resumed
            report = await self._commit(version, staged, resumes=True)
            self._resumed()

        self._lifecycle.hold_output()
        canary_s = await self._run_canary(version, commit)
        return replace(report, canary_ms=1e3 * canary_s)

    async def _commit(self, version: int, staged: Staged, *, resumes: bool = False) -> CommitReport:
        lifecycle = self._lifecycle
        try:
            with lifecycle.committing(version, is_forced=staged[1].is_forced):
                await self._calls.recall(has_all=lifecycle.ends_older_kv)
                for request_id in lifecycle.refusing(version):
                    await self.abort(request_id)
                report = await self._served_weights.commit(staged, resumes=resumes)
                self.committed(version)
            return report
        except BaseException as error:  # after a cancellation, too, the weights are in an unknown state
            await self._calls.end_all(EngineUnusable("the engine's weights are in an unknown state"))
            if isinstance(error, Exception):
                raise WeightUpdateFailed(f"version {version}: {one_line(error)}") from error
            raise

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        self._lifecycle.check_stage()
        raise CheckpointUnreadable(
            f"adapter {adapter.name!r} cannot be loaded: this engine does not serve adapters by name", param="name"
        )

    async def unload_adapter(self, name: str) -> None:
        self._lifecycle.require_alive()

    async def offer(self) -> PushSource | None:
        self._lifecycle.require_alive()
        is_known = self._lifecycle.version is not None
        return await self._served_weights.offer() if is_known and not self.asleep else None

    async def sleep(self, level: int) -> None:
        """Implement `Engine.sleep`. Raises InvalidRequest for level 2 of an engine with adapters."""
        self._lifecycle.check_sleep(level, can_sleep=self._config.can_sleep)
        if level == 2 and self._config.lora_rank is not None:
            raise InvalidRequest(
                "level 2 discards the base weights, which are not pushed to an engine with adapters: use level 1",
                param="level",
            )
        try:
            await self.check_health()
        except EngineLost:  # the processes have exited and hold no memory
            return
        await self.pause(PauseMode.KEEP)
        async with self._lifecycle.control:
            if not self._lifecycle.has_to_sleep(level):
                return
            if self.asleep and self._lifecycle.version is None:
                # vLLM wakes all memory before it sleeps again and may run a step, which must not use unknown
                # weights.
                await self._refuse()
            await self._served_weights.release()
            await self._process.sleep(level, self.asleep)
            self._lifecycle.slept(level)

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        async with self._lifecycle.control:
            wanted = self._lifecycle.wakeable(tags)
            if wanted:
                self._lifecycle.begin_canary()  # vLLM may run a step before it is paused again
                await self._process.wake(wanted)
                self._lifecycle.woken(wanted)

    # Load report

    def load(self) -> Load:
        """Return the load. The total number of requests is exact; the number waiting is from the last
        report's."""
        num_admitted, stats = self._calls.num_admitted, self._process.stats()
        num_queued = min(stats.num_waiting, num_admitted)
        num_held_tokens = self._calls.num_held_tokens if len(self._calls) > num_admitted else 0
        return Load(
            num_running=num_admitted - num_queued,
            num_waiting=len(self._calls) - num_admitted + num_queued,
            kv_used_tokens=stats.num_kv_tokens if num_admitted else 0,
            kv_capacity_tokens=self._info.kv_capacity_tokens if self._info is not None else 0,
            weight_version=self._lifecycle.version,
            num_steps=stats.num_steps,
            num_sampled_tokens=stats.num_sampled_tokens,
            num_preemptions=stats.num_preemptions,
            num_prefill_tokens=num_held_tokens + stats.num_prefill_tokens,
        )
