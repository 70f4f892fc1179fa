"""The SGLang processes of an engine: the tokenizer manager in this process, the schedulers, and calls to them.

SGLang's `Engine` starts the schedulers and the tokenizer manager, which sends requests to them and collects
outputs. The rest of `Engine` is not used, because it affects its complete process: at shutdown it kills all
children, and a dead scheduler or an error in the output loop ends the process by a signal. Here a thread starts the
schedulers and lives until they have exited (they exit with the thread that started them), a task reads outputs, and
a task monitors the schedulers. When a scheduler dies, all waiting calls raise EngineLost.

Calls to our code in the schedulers (`worker.py`) run one at a time and are answered by every rank between two
steps, so an answer to a pause proves that the schedulers are paused. They use the socket of requests, so the
schedulers have received all earlier requests when they answer. Answers use the socket of SGLang's remote calls.
SGLang's own pause is not used: it returns before the schedulers are paused, and would hold requests a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import tempfile
import threading
import warnings
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import structlog

from agentloop.engine.interface import EngineInfo, MemoryTag
from agentloop.errors import AgentLoopError, EngineError, EngineLost
from agentloop.plugins import resolve
from agentloop.values import codec
from agentloop_servers.engines.common.config import check_names
from agentloop_servers.engines.common.process import EngineStats, engine_call, one_line
from agentloop_servers.engines.common.versions import require_driven
from agentloop_servers.weight_transfer.worker_calls import (
    CALL,
    RequestCounts,
    SchedulerAnswers,
    SchedulerCall,
    WorkerMethod,
    answers_of,
    from_text,
    to_text,
)
from agentloop_sglang.config import SglangConfig, prepare_environment, server_arguments
from agentloop_sglang.convert import translate
from agentloop_sglang.internals import is_abort_sent
from agentloop_sglang.requests import FactsFile, SchedulerFacts, SchedulerSetup

RUN_SCHEDULER = "agentloop_sglang.worker:run_scheduler"
INSTALL = "agentloop_sglang.scheduler:install"

WATCH_INTERVAL_S = 0.5
EXIT_TIMEOUT_S = 15.0  # then a scheduler is killed

_IMPORT_LOCK = threading.Lock()

_log = structlog.stdlib.get_logger(__name__)


def sglang_call(action: str, timeout_s: float | None = None) -> AbstractAsyncContextManager[None]:
    """Run a call to SGLang with a timeout, and convert its errors to agentloop errors."""
    return engine_call("SGLang", translate, action, timeout_s)


class SglangProcess:
    """One tokenizer manager (`manager`, valid after `start`) and its schedulers."""

    def __init__(self, config: SglangConfig) -> None:
        self._config = config
        self._facts_dir: str | None = None
        self._launched: _Launched | None = None
        self._facts: FactsFile | None = None
        self._calls = SchedulerCalls()
        self._tasks: list[asyncio.Task[None]] = []
        self._counts = RequestCounts({})
        self._is_paused = False
        self._lost: EngineLost | None = None

    # Lifecycle

    async def start(self) -> None:
        """Start SGLang. Raises EngineError if it does not start; then, and if cancelled, no process is left
        behind."""
        # mkdtemp makes the folder accessible to this user only.
        self._facts_dir = tempfile.mkdtemp(prefix="agentloop-")
        facts_path = str(Path(self._facts_dir) / "facts")
        self._facts = FactsFile(facts_path, is_new=True)
        launch = _Launch(self._config)
        try:
            self._launched = await asyncio.shield(asyncio.wrap_future(launch.done))
            self._calls.start(self._launched.manager, self._launched.rpc_endpoint)
            self._tasks = [
                asyncio.create_task(self._read_outputs(), name="sglang-outputs"),
                asyncio.create_task(self._watch(), name="sglang-watch"),
            ]
            setup = SchedulerSetup(
                facts_path, self._config.logprobs_mode, self._config.seed, self._config.can_constrain
            )
            await self.on_workers(WorkerMethod.EXTEND_SCHEDULER, INSTALL, setup.to_text())
        except BaseException as error:
            if self._launched is None:
                # The thread cannot be stopped. Wait for it, to stop the processes that it starts.
                with contextlib.suppress(Exception):
                    self._launched = await asyncio.wrap_future(launch.done)
            await self.close()
            if isinstance(error, Exception) and not isinstance(error, AgentLoopError):
                raise EngineError(f"SGLang did not start: {one_line(error)}") from error
            raise

    async def close(self) -> None:
        self._lose("the engine was closed")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            self._tasks = []
        self._calls.close()
        launched, self._launched = self._launched, None
        if launched is not None:
            # Must run on the loop that reads from it.
            launched.manager.recv_from_detokenizer.context.destroy(linger=0)
            await asyncio.to_thread(launched.end)
        if self._facts is not None:
            self._facts.close()
            self._facts = None
        if self._facts_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._facts_dir, ignore_errors=True)

    @property
    def is_up(self) -> bool:
        return self._launched is not None and self._lost is None

    @property
    def manager(self) -> Any:
        """SGLang's TokenizerManager. Raises EngineLost."""
        if self._lost is not None:
            raise EngineLost(self._lost.message)
        if self._launched is None:
            raise EngineLost("the engine is not started")
        return self._launched.manager

    def describe(self) -> EngineInfo:
        """Return the engine's constant properties."""
        model = self.manager.model_config
        return EngineInfo(
            name="sglang",
            max_context_tokens=self._config.max_model_len,
            vocab_size=model.vocab_size,
            block_size=self._config.block_size,
            kv_capacity_tokens=self._launched.max_total_tokens if self._launched is not None else 0,
            max_running=self._config.max_num_seqs,
            num_workers=self._config.num_workers,
            weight_dtype=str(model.dtype).removeprefix("torch."),
            can_sleep=self._config.can_sleep,
            features=self._config.features,
            lora_rank=self._config.lora_rank,
            logprobs_mode=self._config.logprobs_mode,
            max_logprobs=self._config.max_logprobs,
        )

    def stats(self) -> EngineStats:
        """Return the latest statistics, which the schedulers write after every step."""
        facts = SchedulerFacts() if self._facts is None else self._facts.read()
        return EngineStats(
            num_waiting=facts.num_waiting,
            num_kv_tokens=facts.num_kv_tokens,
            num_steps=facts.num_steps,
            num_sampled_tokens=facts.num_sampled_tokens,
            num_preemptions=facts.num_preemptions,
            num_prefill_tokens=facts.num_prefill_tokens,
            slow_step_s=facts.slow_step_us / 1e6,
        )

    async def check_health(self) -> None:
        """Raise EngineLost if a scheduler has exited. A scheduler with a hung step exits itself
        (`watchdog_timeout`)."""
        if not self.is_up:
            raise EngineLost("the engine is not started" if self._lost is None else self._lost.message)

    # Requests

    async def outputs(self, request: Any) -> AsyncGenerator[Any, None]:
        """Iterate over the outputs of a GenerateReqInput, which the first step sends. Closing aborts the
        request."""
        manager = self.manager
        generator = manager.generate_request(request, None)
        try:
            async for output in generator:
                if self._lost is not None:
                    raise EngineLost(self._lost.message)
                yield output
        except Exception as error:
            if self._lost is not None and not isinstance(error, EngineLost):
                raise EngineLost(self._lost.message) from error
            raise
        finally:
            await generator.aclose()
            # During a pause, SGLang would otherwise keep the request and its KV until the next step.
            manager.rid_to_state.pop(request.rid, None)

    def state(self, request_id: str) -> Any:
        """Return SGLang's state of a running request; None if it has ended."""
        return None if self._launched is None else self._launched.manager.rid_to_state.get(request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now, also during a pause. SGLang ends all requests whose ids start with a given id, so
        all ids must have the same length."""
        manager = self.manager
        known = tuple(request_id for request_id in request_ids if request_id in manager.rid_to_state)
        if known and self._is_paused:
            async with sglang_call("abort", self._config.control_timeout_s):
                await self.on_workers(WorkerMethod.END_REQUESTS, codec.encode(known))
            return
        for request_id in known:
            manager.abort_request(request_id)

    async def unbegun(self, request_ids: Sequence[str]) -> Collection[str]:
        counts = await self._pause(is_cache_cleared=False)
        return set(counts.unbegun) & set(request_ids)

    # Control

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a `WorkerMethod` in every scheduler between two steps. Return the results in rank order."""
        _ = self.manager
        async with sglang_call(method):
            answers = await self._calls.call(method, *arguments)
        return answers_of(answers.answers, answers.errors)

    @property
    def num_output_ids(self) -> Mapping[str, int]:
        """The number of tokens that each request had sampled at the last pause."""
        return self._counts.num_output_ids

    async def pause(self, *, is_cache_cleared: bool) -> None:
        """Pause every scheduler; returns when all have answered.

        Requests that were aborted before the pause are ended now; SGLang would end them in its next step.
        """
        self._is_paused = True
        counts = await self._pause(is_cache_cleared=is_cache_cleared)
        states = self.manager.rid_to_state
        live = counts.num_output_ids
        ended = tuple(key for key in live if key not in states or is_abort_sent(states[key]))
        if ended:
            async with sglang_call("pause", self._config.control_timeout_s):
                await self.on_workers(WorkerMethod.END_REQUESTS, codec.encode(ended))

    async def commit(self, number: int, version: int, *, resumes: bool) -> list[bytes]:
        """Implement `Workers.commit`. SGLang has no version labels."""
        answers = await self.on_workers(WorkerMethod.COMMIT, number)
        if resumes:
            await self.resume()
        return answers

    async def clear_cache(self) -> None:
        await self._pause(is_cache_cleared=True)

    async def _pause(self, *, is_cache_cleared: bool) -> RequestCounts:
        async with sglang_call("pause", self._config.control_timeout_s):
            answers = await self.on_workers(WorkerMethod.PAUSE_REQUESTS, is_cache_cleared)
        self._counts = codec.decode(answers[0], RequestCounts)
        return self._counts

    async def resume(self) -> None:
        self._is_paused = False  # from now on, aborts can be left to SGLang: they arrive after the resume
        async with sglang_call("resume", self._config.control_timeout_s):
            await self.on_workers(WorkerMethod.RESUME_REQUESTS)

    async def sleep(self, level: int, asleep: frozenset[MemoryTag]) -> None:
        """Implement `EngineProcess.sleep`. The memory in `asleep` is released already.

        Level 2 keeps a copy of the weights in host memory, like level 1: SGLang decides at its start whether it has
        one.
        """
        awake = sorted(tag.value for tag in MemoryTag if tag not in asleep)
        if not awake:
            return
        async with sglang_call("sleep", self._config.commit_timeout_s):
            await self._pause(is_cache_cleared=True)
            await self.on_workers(WorkerMethod.RELEASE_MEMORY, ",".join(awake))

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        async with sglang_call("wake", self._config.commit_timeout_s):
            await self.on_workers(WorkerMethod.RESUME_MEMORY, ",".join(sorted(tag.value for tag in tags)))

    async def _read_outputs(self) -> None:
        """Run SGLang's output loop. If it ends, the engine is lost."""
        manager = self.manager
        manager.event_loop = asyncio.get_running_loop()  # otherwise SGLang starts its own task and signal handlers
        try:
            await manager.handle_loop()
        except Exception as error:
            _log.exception("sglang_outputs_not_read")
            self._lose(f"SGLang's output loop failed: {one_line(error)}")

    async def _watch(self) -> None:
        while self._launched is not None:
            dead = next((process for process in self._launched.schedulers if not process.is_alive()), None)
            if dead is not None:
                self._lose(f"an SGLang scheduler exited with code {dead.exitcode}")
                return
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _lose(self, reason: str) -> None:
        """Fail all running requests and scheduler calls with EngineLost."""
        if self._lost is not None:
            return
        self._lost = EngineLost(reason)
        self._calls.fail(self._lost)
        if self._launched is None:
            return
        end = {"type": "abort", "message": reason, "status_code": 500}
        for request_id, state in self._launched.manager.rid_to_state.items():
            state.finished = True
            state.out_list.append({"output_ids": [], "meta_info": {"id": request_id, "finish_reason": end}})
            state.event.set()


class SchedulerCalls:
    """Sends calls of a `WorkerMethod` to the schedulers, one at a time."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._one_at_a_time = asyncio.Lock()
        self._manager: Any = None
        self._socket: Any = None
        self._lost: EngineLost | None = None
        self._waiting: asyncio.Future[SchedulerAnswers] | None = None

    def start(self, manager: Any, endpoint: str) -> None:
        """Bind the socket to which the first scheduler connects. `manager` sends the calls in order with its
        requests."""
        import zmq
        import zmq.asyncio

        self._manager = manager
        self._socket = zmq.asyncio.Context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    async def call(self, method: str, *arguments: Any) -> SchedulerAnswers:
        """Call a method in every rank. Raises EngineLost if a scheduler exits."""
        async with self._one_at_a_time:
            if self._lost is not None:
                raise EngineLost(self._lost.message)
            call = SchedulerCall(next(self._numbers), method, arguments)
            self._waiting = asyncio.get_running_loop().create_future()
            exchange = asyncio.create_task(self._exchange(call), name="sglang-call")
            try:
                done, _ = await asyncio.wait([exchange, self._waiting], return_when=asyncio.FIRST_COMPLETED)
                return self._waiting.result() if self._waiting in done else exchange.result()
            finally:
                exchange.cancel()
                self._waiting = None

    def fail(self, error: EngineLost) -> None:
        """Make the current call and all later calls raise `error`."""
        self._lost = error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(EngineLost(error.message))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._socket is not None:
            self._socket.context.destroy(linger=0)
            self._socket = None

    async def _exchange(self, call: SchedulerCall) -> SchedulerAnswers:
        from sglang.srt.managers.io_struct import RpcReqInput, async_sock_recv

        request = RpcReqInput(method=CALL, parameters={"call": to_text(call)})
        self._manager._dispatch_to_scheduler(request)
        while True:
            output = await async_sock_recv(self._socket)
            if not output.success:
                raise EngineError(f"SGLang rejected the call {call.method}: {output.message}")
            answers = from_text(output.message, SchedulerAnswers)
            if answers.call_id == call.call_id:  # otherwise the answer is for an earlier call that was cancelled
                return answers


class _Launched:
    """The started schedulers and their tokenizer manager."""

    def __init__(self, manager: Any, ports: Any, schedulers: Sequence[Any], max_total_tokens: int) -> None:
        self.manager = manager
        self.schedulers = schedulers
        self.max_total_tokens = max_total_tokens
        self._ports = ports
        self.over = threading.Event()

    @property
    def rpc_endpoint(self) -> str:
        endpoint: str = self._ports.rpc_ipc_name
        return endpoint

    def end(self) -> None:
        """Stop the schedulers, and remove the files that SGLang leaves behind. Blocks."""
        for process in self.schedulers:
            process.terminate()
        for process in self.schedulers:
            process.join(EXIT_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        self.over.set()
        for name in vars(self._ports).values():
            if isinstance(name, str) and name.startswith("ipc://"):
                Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
        self._remove_load_snapshot()

    def _remove_load_snapshot(self) -> None:
        from sglang.srt.managers.load_snapshot import shm_path_for

        Path(shm_path_for(self._ports.instance_id)).unlink(missing_ok=True)


class _Launch:
    """Starts an engine's processes in a dedicated thread, which lives until they have exited.

    A thread does not block the event loop (health checks, other tasks). It is dedicated because the kernel kills a
    scheduler when the thread that started it ends.
    """

    def __init__(self, config: SglangConfig) -> None:
        self.done: Future[_Launched] = Future()
        self._config = config
        threading.Thread(target=self._run, name="sglang-schedulers", daemon=True).start()

    def _run(self) -> None:
        try:
            launched = self._construct()
        except BaseException as error:
            self.done.set_exception(error if isinstance(error, Exception) else EngineError(one_line(error)))
            return
        self.done.set_result(launched)
        launched.over.wait()

    def _construct(self) -> _Launched:
        prepare_environment(self._config)
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        try:
            return self._launch()
        finally:  # SGLang replaces the log configuration of the complete process
            root.handlers[:] = handlers
            root.setLevel(level)
            logging.getLogger("sglang.srt.managers.tokenizer_manager").setLevel(logging.CRITICAL)

    def _launch(self) -> _Launched:
        # Suppress the warnings of SGLang's and torch's imports. The filters are process-wide, so one thread at a
        # time.
        with _IMPORT_LOCK, warnings.catch_warnings(action="ignore"):
            require_driven("sglang", allow_untested=self._config.allow_untested)
            from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
            from sglang.srt.observability.trace import process_tracing_init
            from sglang.srt.server_args import ServerArgs

            if self._config.can_constrain:
                import xgrammar  # noqa: F401 - import now, because the first constraint's trial has a timeout

            check_names("SGLang", self._config.arguments, ServerArgs)
            arguments = ServerArgs(**server_arguments(self._config))
        if self._config.traces_url is not None:
            process_tracing_init(self._config.traces_url, "sglang")
        schedulers: list[Any] = []

        class Launcher(Engine):  # type: ignore[misc, unused-ignore]
            @classmethod
            def _launch_scheduler_processes(cls, *positional: Any, **named: Any) -> Any:
                result, started = super()._launch_scheduler_processes(*positional, **named)
                schedulers.extend(started)
                return result, started

            @classmethod
            def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> Any:
                return [], []  # outputs are token ids, so no detokenizer is needed

        try:
            manager, _, ports, started, watchdog, _ = Launcher._launch_subprocesses(
                server_args=arguments,
                init_tokenizer_manager_func=init_tokenizer_manager,
                run_scheduler_process_func=resolve(RUN_SCHEDULER, param="function"),
                run_detokenizer_process_func=None,
            )
        except BaseException:
            for process in schedulers:
                process.kill()
            raise
        watchdog.stop()  # it would end this process when a scheduler dies
        return _Launched(manager, ports, schedulers, int(started.scheduler_infos[0]["max_total_num_tokens"]))
