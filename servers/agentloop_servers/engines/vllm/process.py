"""The vLLM process of an engine: the lifecycle, control calls and statistics of AsyncLLM."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

import psutil

from agentloop.engine.interface import EngineInfo, MemoryTag
from agentloop.errors import AgentLoopError, EngineError, EngineLost, UnsupportedParameter
from agentloop.values.capabilities import Feature
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.common.process import EngineStats, engine_call, one_line, slow_step_s
from agentloop_servers.engines.common.versions import require_driven
from agentloop_servers.engines.vllm import step_logprobs
from agentloop_servers.engines.vllm.config import HostShare, VllmConfig, engine_arguments, prepare_environment
from agentloop_servers.engines.vllm.convert import is_unbegun, translate
from agentloop_servers.engines.vllm.scheduler import COMMIT_AND_RESUME
from agentloop_servers.weight_transfer.worker_calls import CALL, WorkerMethod, answers_of

RAW_LOGPROBS = "agentloop_servers.engines.vllm.raw_logprobs:install"
PROMPT_WINDOWS = "agentloop_servers.engines.vllm.prompt_windows:install"
DRAFTS = "agentloop_servers.engines.vllm.drafts:install"
FP8_CAPABILITY = 89  # minimum CUDA compute capability: Ada
WINDOW_TOKENS = 256  # prompt tokens whose logits are in memory at once

_IMPORT_LOCK = threading.Lock()

_LOST_CHECK_S = 1.0  # interval of the check during a start: a process may be created after its host was lost
EXIT_TIMEOUT_S = 15.0  # then the process is killed; with torch loaded, an exit takes seconds on busy cores


class SchedulerStats:
    """A vLLM stat logger that stores the latest statistics. They do not change while vLLM is idle or paused."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last_step_at: float | None = None  # None: no request was running, or the engine was paused
        self.slow_step_s = 0.0
        self.num_waiting = 0
        self.kv_cache_usage = 0.0  # fraction of the blocks that requests hold
        self.num_steps = 0  # steps that sampled or prefilled
        self.num_sampled_tokens = 0  # total
        self.num_preemptions = 0  # total; counted with the next token of the preempted request

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        if iteration_stats is not None:
            self.num_sampled_tokens += iteration_stats.num_generation_tokens
            self.num_preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.num_steps += 1
            now = self._now()
            if self._last_step_at is not None:
                self.slow_step_s = slow_step_s(self.slow_step_s, now - self._last_step_at)
            self._last_step_at = now if scheduler_stats.num_running_reqs else None
            self.num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage

    def paused(self) -> None:
        """Exclude the duration of a pause from the next step."""
        self._last_step_at = None

    def log_engine_initialized(self) -> None: ...
    def log(self) -> None: ...
    def record_sleep_state(self, *_: Any) -> None: ...


def vllm_call(action: str, timeout_s: float | None = None) -> AbstractAsyncContextManager[None]:
    """Run a call to vLLM with a timeout, and convert its errors to agentloop errors."""
    return engine_call("vLLM", translate, action, timeout_s)


class OtherHosts(Protocol):
    """The other hosts of an engine that spans hosts."""

    async def start(self, on_lost: Callable[[str], None]) -> HostShare:
        """Start the engine's parts on the other hosts, and return the share of this host.

        The parts finish their start after this host's part has started. `on_lost` is called with a message when a
        part has exited.
        """

    async def close(self) -> None:
        """Stop the parts. Idempotent."""


class VllmProcess:
    """One AsyncLLM (`llm`, valid after `start`), the only client of its engine process."""

    def __init__(self, config: VllmConfig, other_hosts: OtherHosts | None = None) -> None:
        self._config = config
        self._other_hosts = other_hosts
        self._lost: str | None = None  # the message of `on_lost`, after another host's part has exited
        self.llm: Any = None
        self.scheduler_stats = SchedulerStats()
        self._num_blocks_tokens = 0  # KV cache capacity in tokens

    async def start(self) -> None:
        """Start vLLM. Raises EngineError if it does not start; then, and if cancelled, no process is left
        behind."""
        if self._other_hosts is not None:
            self._config = replace(self._config, share=await self._other_hosts.start(self._lose))
        construction = asyncio.create_task(self._constructed())
        try:
            self.llm = await asyncio.shield(construction)
            # Fills vLLM's cache, so that the first request does not wait for it.
            await self.llm.get_supported_tasks()
            await self.on_workers(WorkerMethod.EXTEND_RUNNER, PROMPT_WINDOWS, str(WINDOW_TOKENS))
            if self._config.speculative is not None:
                await self.on_workers(WorkerMethod.EXTEND_RUNNER, DRAFTS, "")
            if self._config.logprobs_mode is not LogprobsMode.SAMPLED:
                await self.on_workers(WorkerMethod.EXTEND_RUNNER, RAW_LOGPROBS, self._config.logprobs_mode.value)
        except BaseException as error:
            if self.llm is None:
                # The thread cannot be stopped. Wait for it, to stop the processes that it starts.
                with contextlib.suppress(Exception):
                    self.llm = await construction
            await self.close()
            if isinstance(error, Exception) and not isinstance(error, AgentLoopError):
                raise EngineError(f"vLLM did not start: {self._lost or one_line(error)}") from error
            raise

    async def _constructed(self) -> Any:
        """Construct vLLM in a thread, so that the event loop (health checks, other tasks) is not blocked."""
        construction = asyncio.create_task(asyncio.to_thread(self._construct))
        while not construction.done():
            await asyncio.wait([construction], timeout=_LOST_CHECK_S)
            if self._lost is not None:
                _kill_engines()
        return construction.result()

    def _lose(self, because: str) -> None:
        """Kill the engine: its ranks, and so its requests, would wait for the lost host's ranks forever."""
        self._lost = because
        _kill_engines()

    async def close(self) -> None:
        try:
            await self._close()
        finally:
            if self._other_hosts is not None:
                await self._other_hosts.close()

    async def _close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            if llm.output_handler is not None:
                # Cancel it before its sockets are closed: it would report a dead engine.
                llm.output_handler.cancel()
                await asyncio.wait([llm.output_handler])
            await asyncio.to_thread(llm.shutdown, EXIT_TIMEOUT_S)
            await asyncio.sleep(0)  # the shutdown closes its sockets in a callback of this loop
            llm.engine_core.resources.ctx.destroy(linger=0)  # the shutdown leaves the ZeroMQ context open
            # vLLM's destructor shuts down again, which fails during interpreter exit.
            llm.shutdown = lambda *_: None

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a `WorkerMethod` in every worker. Return the results in rank order.

        Arguments and results are strings, numbers and codec bytes. Raises agentloop errors.
        """
        async with vllm_call(method):
            call = self.llm.engine_core.call_utility_all_async
            engines = await call("collective_rpc", CALL, None, (method, *arguments), None)
        results = [result for engine in engines for result in engine]
        return answers_of([answer for answer, _ in results], [error for _, error in results])

    @property
    def is_up(self) -> bool:
        """True from the end of `start` until `close`, so that calls to the workers are possible."""
        return self.llm is not None

    async def commit(self, number: int, version: int, *, resumes: bool) -> list[bytes]:
        """Commit stage `number` in all workers of the paused engine, and set vLLM's version label.

        With `resumes`, also end the pause, unless a worker has failed. Returns the workers' reports.
        """
        if resumes and self._config.data_parallel_size == 1:
            async with vllm_call("commit"):
                results = await self.llm.engine_core.call_utility_async(COMMIT_AND_RESUME, number, str(version))
            return answers_of([answer for answer, _ in results], [error for _, error in results])
        # With several engine processes, none may resume before all have committed.
        answers = await self.on_workers(WorkerMethod.COMMIT, number)
        await self.label(version)
        if resumes:
            await self.resume()
        return answers

    async def label(self, version: int) -> None:
        """Set the weight version label of all tokens sampled from now on."""
        await self.llm.update_weight_version(str(version))

    async def abort(self, request_ids: Sequence[str]) -> None:
        async with vllm_call("abort"):
            await self.llm.abort(list(request_ids))

    async def unbegun(self, request_ids: Sequence[str]) -> Collection[str]:
        return {request_id for request_id in request_ids if is_unbegun(self.llm, request_id)}

    async def check_health(self) -> None:
        if self._lost is not None:
            raise EngineLost(self._lost)
        async with vllm_call("health check", self._config.control_timeout_s):
            await self.llm.check_health()

    async def pause(self, *, is_cache_cleared: bool) -> None:
        """Freeze vLLM between two tokens; returns when no step is running."""
        async with vllm_call("pause", self._config.control_timeout_s):
            # vLLM's `pause_generation` also sleeps 20 ms to order events. Version labels do not need that order:
            # the engine process attaches them to the outputs of each step.
            await self.llm.engine_core.pause_scheduler_async("keep", is_cache_cleared)
        self.scheduler_stats.paused()

    async def resume(self) -> None:
        async with vllm_call("resume", self._config.control_timeout_s):
            await self.llm.resume_generation()

    async def clear_cache(self) -> None:
        async with vllm_call("pause", self._config.control_timeout_s):
            if not await self.llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("vLLM did not clear its prefix cache")
            if self._config.has_vision:
                await self.llm.reset_encoder_cache()

    async def sleep(self, level: int, asleep: frozenset[MemoryTag]) -> None:
        async with vllm_call("sleep", self._config.commit_timeout_s):
            if asleep:  # vLLM can only release all memory at once, so wake the rest first
                await self.llm.wake_up(sorted(tag.value for tag in asleep))
            await self.llm.sleep(level=level, mode="keep")

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate released memory again, and stay paused."""
        async with vllm_call("wake", self._config.commit_timeout_s):
            # When all memory is awake, vLLM resumes and may run a step or two before this pause.
            if await self.llm.wake_up(sorted(tag.value for tag in tags)):
                await self.pause(is_cache_cleared=False)

    def stats(self) -> EngineStats:
        """Return the latest statistics. vLLM does not update them while it is idle or paused."""
        stats = self.scheduler_stats
        return EngineStats(
            num_waiting=stats.num_waiting,
            num_kv_tokens=round(stats.kv_cache_usage * self._num_blocks_tokens),
            num_steps=stats.num_steps,
            num_sampled_tokens=stats.num_sampled_tokens,
            num_preemptions=stats.num_preemptions,
            num_prefill_tokens=0 if self.llm is None else int(self.llm.output_processor.get_num_queued_tokens()),
            slow_step_s=stats.slow_step_s,
        )

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence id."""
        eos_token_id: int | None = self.llm.renderer.get_eos_token_id()
        return eos_token_id

    def describe(self) -> EngineInfo:
        """Return the engine's constant properties."""
        config = self.llm.vllm_config
        block_size, num_ranks = config.cache_config.block_size, self._config.data_parallel_size
        # vLLM reports the blocks of one rank, of which it reserves one (the null block).
        self._num_blocks_tokens = (config.cache_config.num_gpu_blocks - 1) * block_size * num_ranks
        return EngineInfo(
            name="vllm",
            max_context_tokens=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_size=block_size,
            kv_capacity_tokens=self._num_blocks_tokens,
            max_running=config.scheduler_config.max_num_active_seqs * num_ranks,
            num_workers=self._config.num_workers,
            weight_dtype=str(config.model_config.dtype).removeprefix("torch."),
            can_sleep=self._config.can_sleep,
            features=self._config.features | {Feature.SCORES},
            lora_rank=self._config.lora_rank,
            max_loras=self._config.max_loras,
            logprobs_mode=self._config.logprobs_mode,
            quantization=self._config.quantization or "",
            max_logprobs=self._config.max_logprobs,
        )

    def _construct(self) -> Any:
        prepare_environment(self._config)
        # Suppress the warnings of vLLM's and torch's imports. The filters are process-wide, so one thread at a
        # time.
        with _IMPORT_LOCK, warnings.catch_warnings(action="ignore"):
            require_driven("vllm", allow_untested=self._config.allow_untested)
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if self._config.can_constrain:
                # Import now, because the first constraint's trial has a timeout.
                importlib.import_module("xgrammar")
            arguments = AsyncEngineArgs(**engine_arguments(self._config))
            from vllm.platforms import current_platform
            from vllm.v1.metrics.loggers import PrometheusStatLogger
        is_fp8_device = self._config.device == "cpu" or current_platform.has_device_capability(FP8_CAPABILITY)
        if self._config.quantization is not None and not is_fp8_device:
            raise UnsupportedParameter(
                f"{current_platform.get_device_name()} does not support FP8 (compute capability"
                f" {FP8_CAPABILITY / 10:g} or later): remove engine.quantization",
                param="quantization",
            )
        loggers = [lambda *_: self.scheduler_stats, *([PrometheusStatLogger] if self._config.has_metrics else [])]
        llm = AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
        step_logprobs.install(llm)
        return llm


def _kill_engines() -> None:
    """Kill this process's engines and their descendants, which may hang in a collective operation."""
    for engine in multiprocessing.active_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(engine.pid).children(recursive=True), engine]:
                process.kill()
