"""The Engine port over vLLM's AsyncLLM (0.32), on CPU and CUDA.

The engine proper is a process that AsyncLLM starts; this object is its only client and lives on one event loop.
What vLLM leaves to its caller is done here and beside:

- A gate holds new requests while the engine is not serving (`requests.py`).
- vLLM itself is only ever paused in mode "keep". ABORT first ends what is in flight, WAIT first lets it end.
- Its version label is `str(version)` and changes only in a pause (`weights.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentloop.checks import check_request, room_tokens
from agentloop.engine import (
    ALL_MEMORY,
    CommitReport,
    Delta,
    EngineInfo,
    KVEvent,
    MemoryTag,
    OnProgress,
    PushSource,
    StageReport,
    WeightUpdate,
)
from agentloop.engine_lifecycle import EngineLifecycle, EnginePhase
from agentloop.errors import (
    Conflict,
    DeadlineExceeded,
    EngineLost,
    EngineUnusable,
    InvalidRequest,
    WeightUpdateFailed,
)
from agentloop.images import Image, ImageTokens
from agentloop.request_watch import RequestWatch
from agentloop.sampled_tokens import SampledTokens
from agentloop.types import GenerateRequest, Generation, KVPolicy, Load, PauseMode
from agentloop_servers.engines.vllm import convert as values
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.images import VllmImages
from agentloop_servers.engines.vllm.process import VllmProcess, vllm_call
from agentloop_servers.engines.vllm.requests import Call, Calls
from agentloop_servers.engines.vllm.weights import LoraAdapters, vllm_weights


class VllmEngine:
    """One vLLM engine. `start` takes 15 to 40 s on CPU; `close` ends its processes."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._info: EngineInfo | None = None
        self._process = VllmProcess(config)
        self._adapters = LoraAdapters(config, self._process) if config.lora_rank is not None else None
        self._weights = vllm_weights(config, self._process, self._adapters)
        self._images: VllmImages | None = None
        self._lifecycle = EngineLifecycle(has_begun=lambda: self._calls.num_admitted > 0)
        self._calls = Calls(self._process, self._lifecycle)

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

    # --- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises CheckpointUnreadable for a bad model folder, EngineError if vLLM does not come up."""
        if self._lifecycle.phase is not EnginePhase.NEW:
            raise Conflict("an engine is started once")
        await self._weights.check()
        try:
            await self._process.start()
            await self._weights.start()
        except BaseException:
            await self.close()
            raise
        self._images = VllmImages(self._process.llm)
        self._info = replace(self._process.describe(), takes_images=self._images.takes_images)
        self._lifecycle.started(self._config.initial_version)

    async def close(self) -> None:
        if not self._lifecycle.close("the engine was closed"):
            return
        await self._calls.end_all(EngineLost("the engine was closed"))
        await self._process.close()
        self._weights.close()

    async def check_health(self) -> None:
        self._lifecycle.require_alive()
        async with vllm_call("health check", self._config.control_timeout_s):
            await self._process.llm.check_health()

    # --- requests -----------------------------------------------------------------------------------------

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        self._lifecycle.require_alive()
        if self._images is None:
            raise EngineLost("the engine is not started")
        return await self._images.tokens(images)

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        told = SampledTokens(self._config.logprobs_mode)

        def look(start: int) -> Delta:
            values.add_so_far(told, self._process.llm, request)
            return told.since(start)

        with (
            self._registered(request) as call,
            RequestWatch(
                request,
                self._lifecycle,
                self._config.pace,
                on_progress,
                look=look,
                end=partial(self.abort, request.request_id),
            ) as watch,
        ):
            async with contextlib.aclosing(self._outputs(call, is_streamed=False)) as outputs:
                output = await watch.in_time(anext(outputs, None))
        sampled = SampledTokens(self._config.logprobs_mode)
        if output is not None:
            values.add_completion(sampled, output.outputs[0], request.sampling.num_top_logprobs)
        return watch.finished(values.to_generation(request, output, sampled, self.load()))

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        sampled, num_sent, output = SampledTokens(self._config.logprobs_mode), 0, None
        with (
            self._registered(request) as call,
            RequestWatch(request, self._lifecycle, self._config.pace, on_progress) as watch,
        ):
            async with contextlib.aclosing(self._outputs(call, is_streamed=True)) as outputs:
                while True:
                    piece = await watch.in_time(anext(outputs, None))
                    if piece is None:
                        break
                    output = piece
                    values.add_completion(sampled, output.outputs[0], request.sampling.num_top_logprobs)
                    spans = values.spans_so_far(self._process.llm, request.request_id, output, len(sampled))
                    if spans is None or len(sampled) == num_sent:
                        continue  # it finished meanwhile: the last piece has the spans of this one too
                    values.stamp(sampled, spans)
                    delta, num_sent = sampled.since(num_sent), len(sampled)
                    yield delta
        yield watch.finished(values.to_generation(request, output, sampled, self.load()))

    async def abort(self, request_id: str) -> None:
        await self._calls.abort(self._calls.find(request_id))

    @contextlib.contextmanager
    def _registered(self, request: GenerateRequest) -> Iterator[Call]:
        self._lifecycle.require_alive()
        check_request(request, self.info)
        self._lifecycle.require_usable()
        with self._calls.entered(request) as call:
            yield call

    async def _outputs(self, call: Call, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for a call, from the gate on; none if it was aborted before it passed.

        Closing or cancelling this aborts the request in vLLM.
        """
        shown = None if self._images is None else await self._images.prompt(call.request)
        while await self._calls.pass_gate(call):
            # Nothing is awaited from here until vLLM has registered the request, so an abort cannot miss it.
            call.is_admitted, call.is_recalled = True, False
            try:
                async with contextlib.aclosing(
                    self._admitted(call.request, shown, is_streamed=is_streamed)
                ) as outputs:
                    async for output in outputs:
                        if call.verdict is not None:
                            raise call.verdict
                        if call.is_recalled:
                            break
                        yield output
                    else:
                        return
            except Exception as error:
                raise (call.verdict or values.translate(error)) from error
            call.is_admitted = False

    def _admitted(self, request: GenerateRequest, shown: Any, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        """Hand a request on; `shown` is its prompt, if it has images."""
        kv_version = self._lifecycle.kv_version(request.kv_version, self._lifecycle.require_usable())
        params = values.sampling_params(
            request.sampling,
            room_tokens(request, self.info),
            is_streamed=is_streamed,
            eos_token_id=self._process.eos_token_id,
            logprobs_mode=self._config.logprobs_mode,
        )
        prompt = values.tokens_prompt(request, kv_version, shown)
        outputs: AsyncGenerator[Any, None] = self._process.llm.generate(
            prompt,
            params,
            request.request_id,
            lora_request=None if self._adapters is None else self._adapters.request,
        )
        return outputs

    # --- pause and weights --------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        """As the port says. Raises DeadlineExceeded if a WAIT takes longer than `drain_timeout_s`."""
        lifecycle = self._lifecycle
        lifecycle.require_alive()
        if mode is not PauseMode.KEEP:
            lifecycle.shut()
        if mode is PauseMode.ABORT:
            await self._calls.abort(self._calls.all())
        if mode is PauseMode.WAIT:
            try:
                async with asyncio.timeout(self._config.drain_timeout_s):
                    await lifecycle.drained()
            except TimeoutError as error:
                raise DeadlineExceeded("requests in flight did not end in time for a pause") from error
        async with lifecycle.control:
            lifecycle.require_alive()
            await self._freeze(is_cache_cleared=kv_policy is KVPolicy.RECOMPUTE)
            lifecycle.paused(kv_policy)

    async def _freeze(self, *, is_cache_cleared: bool) -> None:
        async with vllm_call("pause", self._config.control_timeout_s):
            if not self.is_paused:
                self._lifecycle.freezing()
                await self._process.pause(is_cache_cleared=is_cache_cleared)
            elif is_cache_cleared and not self.asleep:
                await self._process.clear_cache()

    async def resume(self) -> None:
        lifecycle = self._lifecycle
        async with lifecycle.control:
            lifecycle.check_resume()
            if lifecycle.phase in (EnginePhase.FREEZING, EnginePhase.PAUSED):
                async with vllm_call("resume", self._config.control_timeout_s):
                    await self._process.llm.resume_generation()
            lifecycle.resumed()
            self._calls.wake_all()

    async def stage(self, update: WeightUpdate) -> StageReport:
        self._lifecycle.check_stage()
        return await self._weights.stage(update)

    async def commit(self, version: int) -> CommitReport:
        async with self._lifecycle.control:
            self._lifecycle.check_commit(version, self._weights.staged_version)
            staged = self._weights.take_staged()
            try:
                with self._lifecycle.committing(version):
                    await self._calls.recall(has_all=self._lifecycle.ends_older_kv)
                    return await self._weights.commit(staged)
            except BaseException as error:  # cancelled too: the weights are of unknown state
                await self._calls.end_all(EngineUnusable("its weights are of unknown state"))
                if isinstance(error, Exception):
                    raise WeightUpdateFailed(f"version {version}: {values.one_line(error)}") from error
                raise

    async def offer(self) -> PushSource | None:
        self._lifecycle.require_alive()
        is_known = self._lifecycle.version is not None
        return await self._weights.offer() if is_known and not self.asleep else None

    async def sleep(self, level: int) -> None:
        """As the port says. Raises InvalidRequest for level 2 of an engine with adapters."""
        self._lifecycle.check_sleep(level, can_sleep=self._config.can_sleep)
        if level == 2 and self._config.lora_rank is not None:
            raise InvalidRequest(
                "base weights are not pushed to an engine with adapters: use level 1", param="level"
            )
        await self.pause(PauseMode.KEEP)
        async with self._lifecycle.control:
            if not self._lifecycle.has_to_sleep(level):
                return
            async with vllm_call("sleep", self._config.commit_timeout_s):
                if self.asleep:  # vLLM only falls asleep as a whole
                    await self._process.llm.wake_up(sorted(tag.value for tag in self.asleep))
                await self._weights.release()
                await self._process.llm.sleep(level=level, mode="keep")
            self._lifecycle.slept(level)
            self._process.feed.clear()

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        """As the port says. With all memory awake vLLM goes on by itself for a step or two, until the pause that
        follows here."""
        async with self._lifecycle.control:
            wanted = self._lifecycle.wakeable(tags)
            if not wanted:
                return
            async with vllm_call("wake", self._config.commit_timeout_s):
                if await self._process.llm.wake_up(sorted(tag.value for tag in wanted)):
                    await self._process.pause(is_cache_cleared=False)
            self._lifecycle.woken(wanted)

    # --- observation --------------------------------------------------------------------------------------

    def load(self) -> Load:
        """Requests are counted here, so the sum is exact; how many wait inside vLLM is its last report."""
        num_admitted = self._calls.num_admitted
        num_queued = min(self._process.stats.num_waiting, num_admitted)
        capacity = self._info.kv_capacity_tokens if self._info is not None else 0
        num_held_tokens = self._calls.num_held_tokens if len(self._calls) > num_admitted else 0
        return Load(
            num_running=num_admitted - num_queued,
            num_waiting=len(self._calls) - num_admitted + num_queued,
            kv_used_tokens=round(self._process.stats.kv_cache_usage * capacity) if num_admitted else 0,
            kv_capacity_tokens=capacity,
            weight_version=self._lifecycle.version,
            num_steps=self._process.stats.num_steps,
            num_sampled_tokens=self._process.stats.num_sampled_tokens,
            num_preemptions=self._process.stats.num_preemptions,
            num_prefill_tokens=num_held_tokens + self._process.num_prefill_tokens,
        )

    def kv_events(self) -> AsyncIterator[KVEvent]:
        self._lifecycle.require_alive()
        return self._process.feed.events.subscribe()
