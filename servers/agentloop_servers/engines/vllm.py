"""The Engine port over vLLM's AsyncLLM (0.32), on CPU and CUDA.

The engine proper is a process that AsyncLLM starts; this object is its only client and lives on one event loop.
What vLLM leaves to its caller is done here:

- A gate holds new requests while generation is not `SERVING`. So a held request takes its cache salt (the KV
  version) when it enters, after the update, and cannot meet older KV.
- vLLM itself is only ever paused in mode "keep". ABORT first ends what is in flight, WAIT first lets it end.
- Every request in flight has a `_Call`; whoever ends it for a reason of ours (closed, weights unknown) writes the
  reason there and aborts it in vLLM.

The version label of vLLM is `str(version)`; it changes only between a pause and a resume, under `_control`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from agentloop.engine import Delta, EngineInfo, KVEvent, WeightUpdate
from agentloop.errors import (
    AgentLoopError,
    Conflict,
    DeadlineExceeded,
    EngineError,
    EngineLost,
    EngineUnusable,
    WeightUpdateFailed,
)
from agentloop.types import GenerateRequest, Generation, KVPolicy, Load, PauseMode
from agentloop.validate import check_request, room_tokens
from agentloop_servers.engines import vllm_values as values
from agentloop_servers.engines.vllm_config import VllmConfig, prepare_environment
from agentloop_servers.engines.vllm_process import VllmProcess
from agentloop_servers.transfer.checkpoint import Staging

__all__ = ["VllmConfig", "VllmEngine", "prepare_environment"]


class _State(Enum):
    NEW = auto()
    SERVING = auto()
    DRAINING = auto()  # the gate is shut, requests in flight run to their end
    FREEZING = auto()  # vLLM was asked to pause and has not answered yet
    PAUSED = auto()
    CLOSED = auto()


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate` or `stream` under way."""

    request: GenerateRequest
    is_admitted: bool = False  # vLLM knows it
    is_aborted: bool = False
    verdict: AgentLoopError | None = None  # raised instead of an answer
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set to look at the gate again


class VllmEngine:
    """One vLLM engine. `start` takes 15 to 40 s on CPU; `close` ends its processes."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._state = _State.NEW
        self._info: EngineInfo | None = None
        self._process = VllmProcess(config)
        self._weight_version: int | None = None
        self._committed: set[int] = set()
        self._staging: Staging | None = None
        self._calls: dict[str, _Call] = {}  # by request id
        self._control = asyncio.Lock()  # freeze, resume and commit, one at a time
        self._drain_over = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineLost("the engine is not started")
        return self._info

    @property
    def weight_version(self) -> int | None:
        """None also after a failed commit: nobody knows what the weights are."""
        return self._weight_version

    @property
    def _is_open(self) -> bool:
        return self._state is _State.SERVING

    @property
    def is_paused(self) -> bool:
        return self._state is _State.PAUSED

    @property
    def is_usable(self) -> bool:
        return self._weight_version is not None and self._state not in (_State.NEW, _State.CLOSED)

    # --- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises CheckpointUnreadable for a bad model folder, EngineError if vLLM does not come up."""
        if self._state is not _State.NEW:
            raise Conflict("an engine is started once")
        is_dummy = self._config.load_format == "dummy"
        self._staging = await asyncio.to_thread(Staging, self._config.model, is_dummy=is_dummy)
        try:
            await self._process.start()
            if self._config.initial_version is not None:
                await self._stamp(self._config.initial_version)
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
        await self._end_all(EngineLost("the engine was closed"))
        await self._process.close()

    async def check_health(self) -> None:
        self._require_alive()
        try:
            await self._process.llm.check_health()
        except Exception as error:
            raise values.translate(error) from error

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
        completion = output.outputs[0]
        token_ids, logprobs = tuple(completion.token_ids), values.logprobs_of(completion)
        return values.to_generation(request, output, token_ids, logprobs, self.load())

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Generation]:
        deadline_at = asyncio.get_running_loop().time() + request.timeout_s
        token_ids: list[int] = []
        logprobs: list[float] = []
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
                    token_ids += output.outputs[0].token_ids
                    logprobs += values.logprobs_of(output.outputs[0])
                    spans = values.spans_so_far(self._process.llm, request.request_id, output, len(token_ids))
                    if spans is None or len(token_ids) == num_sent:
                        continue  # it finished meanwhile: the last piece has the spans of this one too
                    part = slice(num_sent, len(token_ids))
                    num_sent = len(token_ids)
                    yield Delta(
                        tuple(token_ids[part]), tuple(logprobs[part]), values.clip(spans, part.start, part.stop)
                    )
        if output is None:
            yield values.nothing(request, self.load())
        else:
            yield values.to_generation(request, output, tuple(token_ids), tuple(logprobs), self.load())

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            await self._abort([call])

    @contextlib.contextmanager
    def _registered(self, request: GenerateRequest) -> Iterator[_Call]:
        self._require_alive()
        check_request(request, self.info)
        if not self.is_usable:
            raise EngineUnusable("the engine holds no weights of a known version")
        if request.request_id in self._calls:
            raise Conflict(f"request {request.request_id} is already running", param="request_id")
        call = self._calls[request.request_id] = _Call(request)
        try:
            yield call
        finally:
            del self._calls[request.request_id]
            self._refresh_drain()

    async def _outputs(self, call: _Call, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for a call, from the gate on; none if it was aborted before it passed.

        Closing or cancelling this aborts the request in vLLM.
        """
        while not self._is_open and call.verdict is None and not call.is_aborted:
            call.wake.clear()
            await call.wake.wait()
        if call.verdict is not None:
            raise call.verdict
        if call.is_aborted:
            return
        # Nothing is awaited from here until vLLM has registered the request, so an abort cannot miss it.
        call.is_admitted = True
        request = call.request
        version = request.kv_version if request.kv_version is not None else self._weight_version
        try:
            params = values.sampling_params(
                request.sampling, room_tokens(request, self.info), is_streamed=is_streamed
            )
            prompt = values.tokens_prompt(request, version)
            async with contextlib.aclosing(
                self._process.llm.generate(prompt, params, request.request_id)
            ) as outputs:
                async for output in outputs:
                    if call.verdict is not None:
                        raise call.verdict
                    yield output
        except Exception as error:
            raise (call.verdict or values.translate(error)) from error

    async def _abort(self, calls: list[_Call]) -> None:
        for call in calls:
            call.is_aborted = True
            call.wake.set()
        admitted = [call.request.request_id for call in calls if call.is_admitted]
        if admitted:
            try:
                await self._process.llm.abort(admitted)
            except Exception as error:
                raise values.translate(error) from error

    async def _end_all(self, verdict: AgentLoopError) -> None:
        """Make every call raise `verdict`."""
        calls = list(self._calls.values())
        for call in calls:
            call.verdict = verdict
        with contextlib.suppress(EngineLost):  # then vLLM itself has ended them
            await self._abort(calls)

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
            await self._abort(list(self._calls.values()))
        async with self._control:
            self._require_alive()
            with _control_errors("pause"):
                async with asyncio.timeout(self._config.control_timeout_s):
                    await self._freeze(is_cache_cleared=kv_policy is KVPolicy.RECOMPUTE)

    async def resume(self) -> None:
        if self._state is _State.DRAINING:
            self._open()
        async with self._control:
            self._require_alive()
            if self._state in (_State.FREEZING, _State.PAUSED):
                with _control_errors("resume"):
                    async with asyncio.timeout(self._config.control_timeout_s):
                        await self._process.llm.resume_generation()
                self._require_alive()
                self._open()

    async def stage(self, update: WeightUpdate) -> None:
        self._require_alive()
        await asyncio.to_thread(self._require_staging().stage, update)

    async def commit(self, version: int) -> None:
        async with self._control:
            self._require_alive()
            if self._state is not _State.PAUSED:
                raise Conflict("weights are committed to a paused engine only")
            staging = self._require_staging()
            update = staging.take(version)
            self._weight_version = None
            try:
                async with asyncio.timeout(self._config.commit_timeout_s):
                    await asyncio.to_thread(staging.recheck, update)
                    await self._process.llm.collective_rpc("load_directory", args=(update.directory,))
                    if version in self._committed:
                        # KV under this version's salt may be of other weights.
                        await self._clear_cache()
                    await self._stamp(version)
                staging.confirm()
            except BaseException as error:  # cancelled too: the weights are of unknown state
                await self._end_all(EngineUnusable("its weights are of unknown state"))
                if isinstance(error, Exception):
                    raise WeightUpdateFailed(f"version {version}: {values.one_line(error)}") from error
                raise

    def _require_staging(self) -> Staging:
        assert self._staging is not None, "alive engines have one"
        return self._staging

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
        if self._is_open:
            raise Conflict("a resume came while the pause waited for requests to end")

    def _refresh_drain(self) -> None:
        is_busy = any(call.is_admitted for call in self._calls.values())
        if self._state is not _State.DRAINING or not is_busy:
            self._drain_over.set()

    async def _freeze(self, *, is_cache_cleared: bool) -> None:
        if self._state is not _State.PAUSED:
            self._state = _State.FREEZING
            self._refresh_drain()
            await self._process.llm.pause_generation(mode="keep", clear_cache=is_cache_cleared)
            self._require_alive()
            self._state = _State.PAUSED
            if is_cache_cleared:
                self._process.feed.clear()
        elif is_cache_cleared:
            await self._clear_cache()

    async def _clear_cache(self) -> None:
        """Drop all KV, that of frozen requests too: they are prefilled again."""
        if not await self._process.llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not clear its prefix cache")
        self._process.feed.clear()

    def _open(self) -> None:
        self._state = _State.SERVING
        self._refresh_drain()
        for call in self._calls.values():
            call.wake.set()

    async def _stamp(self, version: int) -> None:
        await self._process.llm.update_weight_version(str(version))
        self._weight_version = version
        self._committed.add(version)

    # --- observation --------------------------------------------------------------------------------------

    def load(self) -> Load:
        """Requests are counted here, so the sum is exact; how many wait inside vLLM is its last report."""
        num_admitted = sum(call.is_admitted for call in self._calls.values())
        num_queued = min(self._process.stats.num_waiting, num_admitted)
        capacity = self._info.kv_capacity_tokens if self._info is not None else 0
        return Load(
            num_running=num_admitted - num_queued,
            num_waiting=len(self._calls) - num_admitted + num_queued,
            kv_used_tokens=round(self._process.stats.kv_cache_usage * capacity) if num_admitted else 0,
            kv_capacity_tokens=capacity,
            weight_version=self._weight_version,
        )

    def kv_events(self) -> AsyncIterator[KVEvent]:
        self._require_alive()
        return self._process.feed.subscribe()

    def _require_alive(self) -> None:
        if self._state in (_State.NEW, _State.CLOSED):
            raise EngineLost(f"the engine is {self._state.name.lower()}")


def _too_late(request: GenerateRequest) -> DeadlineExceeded:
    return DeadlineExceeded(f"request {request.request_id} did not finish in {request.timeout_s} s")


@contextlib.contextmanager
def _control_errors(action: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise EngineError(f"vLLM did not answer a {action} in time") from error
    except Exception as error:
        raise values.translate(error) from error
