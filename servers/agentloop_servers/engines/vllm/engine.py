"""The Engine port over vLLM's AsyncLLM (0.32), on CPU and CUDA.

The engine proper is a process that AsyncLLM starts; this object is its only client and lives on one event loop.
What vLLM leaves to its caller is done here and beside:

- A gate holds new requests while generation is not `SERVING` (`vllm_calls.py`).
- vLLM itself is only ever paused in mode "keep". ABORT first ends what is in flight, WAIT first lets it end.
- Its version label is `str(version)` and changes only in a pause, under `_control` (`vllm_weights.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from enum import Enum, auto
from typing import Any

from agentloop.checks import check_request, room_tokens
from agentloop.engine import (
    ALL_MEMORY,
    CommitReport,
    Delta,
    EngineInfo,
    KVEvent,
    MemoryTag,
    PushSource,
    StageReport,
    WeightUpdate,
)
from agentloop.errors import (
    Conflict,
    DeadlineExceeded,
    EngineLost,
    EngineUnusable,
    InvalidRequest,
    WeightUpdateFailed,
)
from agentloop.kv_floor import KVFloor
from agentloop.types import GenerateRequest, Generation, KVPolicy, Load, PauseMode
from agentloop_servers.engines.vllm import convert as values
from agentloop_servers.engines.vllm.config import VllmConfig, prepare_environment
from agentloop_servers.engines.vllm.process import VllmProcess, control_call
from agentloop_servers.engines.vllm.requests import Call, Calls
from agentloop_servers.engines.vllm.weights import VllmWeights

__all__ = ["VllmConfig", "VllmEngine", "prepare_environment"]


class _State(Enum):
    NEW = auto()
    SERVING = auto()
    DRAINING = auto()  # the gate is shut, requests in flight run to their end
    FREEZING = auto()  # vLLM was asked to pause and has not answered yet
    PAUSED = auto()
    CLOSED = auto()


class VllmEngine:
    """One vLLM engine. `start` takes 15 to 40 s on CPU; `close` ends its processes."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._state = _State.NEW
        self._info: EngineInfo | None = None
        self._process = VllmProcess(config)
        self._weights = VllmWeights(config, self._process)
        self._asleep: frozenset[MemoryTag] = frozenset()
        self._is_committing = False
        self._kv_floor = KVFloor()
        self._calls = Calls(self._process, on_leave=self._refresh_drain)
        self._control = asyncio.Lock()  # freeze, resume, commit, sleep and wake, one at a time
        self._drain_over = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineLost("the engine is not started")
        return self._info

    @property
    def weight_version(self) -> int | None:
        """None also after a failed commit: nobody knows what the weights are."""
        return self._weights.version

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        return self._asleep

    def _is_open(self) -> bool:
        return self._state is _State.SERVING

    @property
    def is_paused(self) -> bool:
        return self._state is _State.PAUSED

    @property
    def is_usable(self) -> bool:
        return self._weights.version is not None and self._state not in (_State.NEW, _State.CLOSED)

    # --- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises CheckpointUnreadable for a bad model folder, EngineError if vLLM does not come up."""
        if self._state is not _State.NEW:
            raise Conflict("an engine is started once")
        await self._weights.check()
        try:
            await self._process.start()
            await self._weights.start()
        except BaseException:
            await self.close()
            raise
        self._info = self._process.describe()
        self._state = _State.SERVING

    async def close(self) -> None:
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._drain_over.set()
        await self._calls.end_all(EngineLost("the engine was closed"))
        await self._process.close()
        self._weights.close()

    async def check_health(self) -> None:
        self._require_alive()
        async with control_call("health check", self._config.control_timeout_s):
            await self._process.llm.check_health()

    # --- requests -----------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        with self._registered(request) as call:
            try:
                async with (
                    asyncio.timeout(request.timeout_s),
                    contextlib.aclosing(self._outputs(call, is_streamed=False)) as outputs,
                ):
                    output = await anext(outputs, None)
            except TimeoutError as error:
                raise _too_late(request) from error
        if output is None:
            return values.nothing(request, self.load())
        sampled = values.Sampled(request.sampling.num_top_logprobs)
        sampled.add(output.outputs[0])
        return values.to_generation(request, output, sampled, self.load())

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Generation]:
        deadline_at = asyncio.get_running_loop().time() + request.timeout_s
        sampled = values.Sampled(request.sampling.num_top_logprobs)
        num_sent, output = 0, None
        with self._registered(request) as call:
            async with contextlib.aclosing(self._outputs(call, is_streamed=True)) as outputs:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline_at):
                            piece = await anext(outputs, None)
                    except TimeoutError as error:
                        raise _too_late(request) from error
                    if piece is None:
                        break
                    output = piece
                    sampled.add(output.outputs[0])
                    num_tokens = len(sampled.token_ids)
                    spans = values.spans_so_far(self._process.llm, request.request_id, output, num_tokens)
                    if spans is None or num_tokens == num_sent:
                        continue  # it finished meanwhile: the last piece has the spans of this one too
                    token_ids, logprobs, top_logprobs = sampled.part(num_sent)
                    spans, num_sent = values.clip(spans, num_sent, num_tokens), num_tokens
                    yield Delta(token_ids, logprobs, spans, top_logprobs)
        if output is None:
            yield values.nothing(request, self.load())
        else:
            yield values.to_generation(request, output, sampled, self.load())

    async def abort(self, request_id: str) -> None:
        await self._calls.abort(self._calls.find(request_id))

    @contextlib.contextmanager
    def _registered(self, request: GenerateRequest) -> Iterator[Call]:
        self._require_alive()
        check_request(request, self.info)
        if not self.is_usable and not self._is_committing:  # during a commit it waits at the gate
            raise EngineUnusable("the engine holds no weights of a known version")
        with self._calls.entered(request) as call:
            yield call

    async def _outputs(self, call: Call, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for a call, from the gate on; none if it was aborted before it passed.

        Closing or cancelling this aborts the request in vLLM.
        """
        while await self._calls.pass_gate(call, self._is_open):
            # Nothing is awaited from here until vLLM has registered the request, so an abort cannot miss it.
            call.is_admitted, call.is_recalled = True, False
            try:
                async with contextlib.aclosing(self._admitted(call.request, is_streamed=is_streamed)) as outputs:
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

    def _admitted(self, request: GenerateRequest, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        served = self._weights.version
        if served is None:
            raise EngineUnusable("the engine holds no weights of a known version")
        version = self._kv_floor.version_for(request.kv_version, served)
        params = values.sampling_params(
            request.sampling,
            room_tokens(request, self.info),
            is_streamed=is_streamed,
            eos_token_id=self._process.eos_token_id,
        )
        prompt = values.tokens_prompt(request, version)
        outputs: AsyncGenerator[Any, None] = self._process.llm.generate(
            prompt, params, request.request_id, lora_request=self._weights.lora_request
        )
        return outputs

    # --- pause and weights --------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        """As the port says. A second pause may tighten the first: ABORT ends what KEEP froze, RECOMPUTE drops KV;
        WAIT after a completed pause changes nothing. Raises Conflict if a resume ends a WAIT."""
        self._require_alive()
        if mode is PauseMode.WAIT:
            await self._drain()
        elif mode is PauseMode.ABORT:
            if self._state is _State.SERVING:
                self._state = _State.DRAINING
            await self._calls.abort(self._calls.all())
        async with self._control:
            self._require_alive()
            await self._freeze(is_cache_cleared=kv_policy is KVPolicy.RECOMPUTE)
            self._kv_floor.paused(kv_policy)

    async def resume(self) -> None:
        if self._state is _State.DRAINING:
            self._open()
        async with self._control:
            self._require_alive()
            if self._asleep:
                raise Conflict(
                    f"the engine cannot go on while its memory is asleep: {', '.join(sorted(self._asleep))}"
                )
            if self._state in (_State.FREEZING, _State.PAUSED):
                async with control_call("resume", self._config.control_timeout_s):
                    await self._process.llm.resume_generation()
                self._require_alive()
                self._open()
            self._kv_floor.resumed()

    async def stage(self, update: WeightUpdate) -> StageReport:
        self._require_alive()
        self._require_awake()
        return await self._weights.stage(update)

    async def commit(self, version: int) -> CommitReport:
        async with self._control:
            self._require_alive()
            self._require_awake()
            if self._state is not _State.PAUSED:
                raise Conflict("weights are committed to a paused engine only")
            self._is_committing = True
            try:
                await self._calls.recall(has_all=self._kv_floor.is_rising)
                report = await self._weights.commit(version)
                self._kv_floor.committed(version)
                return report
            except Conflict:
                raise  # nothing was touched
            except BaseException as error:  # cancelled too: the weights are of unknown state
                await self._calls.end_all(EngineUnusable("its weights are of unknown state"))
                if isinstance(error, Exception):
                    raise WeightUpdateFailed(f"version {version}: {values.one_line(error)}") from error
                raise
            finally:
                self._is_committing = False

    async def offer(self) -> PushSource | None:
        self._require_alive()
        return None if self._asleep else await self._weights.offer()

    async def sleep(self, level: int) -> None:
        if level == 2 and self._config.lora_rank is not None:
            raise InvalidRequest(
                "base weights are not pushed to an engine with adapters: use level 1", param="level"
            )
        if not self._config.can_sleep or level not in (1, 2):
            raise InvalidRequest(
                "levels are 1 and 2, and the mode that sleeps is hybrid or colocated", param="level"
            )
        await self.pause(PauseMode.KEEP)
        async with self._control:
            self._require_alive()
            is_discarded = self._weights.version is None
            if self._asleep == ALL_MEMORY and (level == 1 or is_discarded):
                return
            if self._asleep and is_discarded:
                raise Conflict("weights are committed before the engine sleeps again: these were discarded")
            async with control_call("sleep", self._config.commit_timeout_s):
                if self._asleep:  # vLLM only falls asleep as a whole
                    await self._process.llm.wake_up(sorted(tag.value for tag in self._asleep))
                await self._weights.release()
                await self._process.llm.sleep(level=level, mode="keep")
            self._asleep = ALL_MEMORY
            self._process.feed.clear()
            if level == 2:
                self._weights.version = None

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        """As the port says; Conflict for the KV cache while nobody knows the weights: with all memory awake vLLM
        goes on by itself for a step or two, until the pause that follows here."""
        async with self._control:
            self._require_alive()
            wanted = self._asleep & tags
            if MemoryTag.KV_CACHE in wanted and self._weights.version is None:
                raise Conflict("weights are committed before the KV cache wakes: these were discarded")
            if not wanted:
                return
            async with control_call("wake", self._config.commit_timeout_s):
                if await self._process.llm.wake_up(sorted(tag.value for tag in wanted)):
                    await self._process.pause(is_cache_cleared=False)
            self._asleep -= wanted

    async def _drain(self) -> None:
        if self._state is _State.SERVING:
            self._state = _State.DRAINING
        if self._state is not _State.DRAINING:
            return
        self._drain_over.clear()
        self._refresh_drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._drain_over.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("requests in flight did not end in time for a pause") from error
        self._require_alive()
        if self._is_open():
            raise Conflict("a resume came while the pause waited for requests to end")

    def _refresh_drain(self) -> None:
        if self._state is not _State.DRAINING or not self._calls.num_admitted:
            self._drain_over.set()

    async def _freeze(self, *, is_cache_cleared: bool) -> None:
        async with control_call("pause", self._config.control_timeout_s):
            if self._state is not _State.PAUSED:
                self._state = _State.FREEZING
                self._refresh_drain()
                await self._process.pause(is_cache_cleared=is_cache_cleared)
                self._require_alive()
                self._state = _State.PAUSED
            elif is_cache_cleared and not self._asleep:
                await self._process.clear_cache()

    def _open(self) -> None:
        self._state = _State.SERVING
        self._refresh_drain()
        self._calls.wake_all()

    # --- observation --------------------------------------------------------------------------------------

    def load(self) -> Load:
        """Requests are counted here, so the sum is exact; how many wait inside vLLM is its last report."""
        num_admitted = self._calls.num_admitted
        num_queued = min(self._process.stats.num_waiting, num_admitted)
        capacity = self._info.kv_capacity_tokens if self._info is not None else 0
        return Load(
            num_running=num_admitted - num_queued,
            num_waiting=len(self._calls) - num_admitted + num_queued,
            kv_used_tokens=round(self._process.stats.kv_cache_usage * capacity) if num_admitted else 0,
            kv_capacity_tokens=capacity,
            weight_version=self._weights.version,
        )

    def kv_events(self) -> AsyncIterator[KVEvent]:
        self._require_alive()
        return self._process.feed.subscribe()

    def _require_awake(self) -> None:
        if MemoryTag.WEIGHTS in self._asleep:
            raise Conflict("the engine's weights are asleep")

    def _require_alive(self) -> None:
        if self._state in (_State.NEW, _State.CLOSED):
            raise EngineLost(f"the engine is {self._state.name.lower()}")


def _too_late(request: GenerateRequest) -> DeadlineExceeded:
    return DeadlineExceeded(f"request {request.request_id} did not finish in {request.timeout_s} s")
