"""Pauses and weight updates inside SGLang's scheduler processes.

SGLang has no worker extension class. `run_scheduler` therefore replaces SGLang's entry function
(`Engine.run_scheduler_process_func`): it replaces SGLang's `Scheduler` with a subclass that has the mixin
`SchedulerExtension`, and calls the original entry function. It depends on this behavior of SGLang 0.5.17 and
0.5.23:

- Rank 0 handles remote calls (`RpcReqInput`) between two steps, also while paused, and broadcasts them to its
  tensor-parallel group with all other requests, so every rank runs a call at the same position of its loop.
- `handle_rpc_request` returns a text and logs exceptions. Ours runs methods of this class in all ranks and returns
  the
  answers of all ranks (`SchedulerCall`, `SchedulerAnswers`). Exceptions must not reach the loop, which would end
  the group and send SIGQUIT to the engine's process.
- `pause_generation(in_place)` only sets a flag: with overlapped scheduling the last batch is still running on the
  device, and its tokens are not in the requests yet. `requests_pause` processes its result like the next iteration
  of the loop would, and waits for the device. The loop gets the same result after the pause; `process_batch_result`
  then skips it.
- The watchdog monitors the last started batch. A pause longer than `watchdog_timeout` with such a batch would end
  the
  group, so a paused scheduler clears it.
- The tokens of a request that is not streamed are sent every `progress_tokens` steps.
- `pause_generation(retract)` requeues all running requests and frees their KV, but `flush_cache` requires an empty
  queue. Queued requests hold no KV, and are matched against the cache when they are scheduled.
- A commit writes to the parameters that captured graphs read, on the thread that launches the graphs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import structlog
import torch

from agentloop.errors import AgentLoopError
from agentloop.plugins import resolve
from agentloop.values import codec
from agentloop_servers.weight_transfer.copy_plan import PLAIN_METHODS, QuantisedLayer
from agentloop_servers.weight_transfer.staged_weights import Tensors
from agentloop_servers.weight_transfer.staging import StagingCalls, WeightStager
from agentloop_servers.weight_transfer.verify import Read, compare_layers
from agentloop_servers.weight_transfer.worker_calls import (
    CALL,
    RequestCounts,
    SchedulerAnswers,
    SchedulerCall,
    StagingSetup,
    WorkerMethod,
    from_text,
    to_text,
)
from agentloop_sglang.internals import holds_kv, ranks, release_kv

SWITCH_INTERVAL_S = 0.0005
"""The longest time that a stage's thread waits for the GIL, which the scheduler's loop never releases
voluntarily."""
FAILED_EXIT_CODE = 70
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The layers that SGLang's decoders fuse, with the names of their parts in checkpoints. SGLang's models do not
declare them."""

_log = structlog.stdlib.get_logger(__name__)


class _Parent:
    """Replaces the engine's process for SGLang, so that a failed scheduler ends only its own process."""

    def parent(self) -> _Parent:
        return self

    def send_signal(self, signum: int) -> None:
        """Exit this scheduler's process instead; the engine's process monitors it."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED_EXIT_CODE)


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Run SGLang's `run_scheduler_process`, with the same arguments, and with our calls in the scheduler.

    A scheduler that fails, or that its watchdog finds hung, exits with `FAILED_EXIT_CODE`.
    """
    from sglang.srt.managers import scheduler
    from sglang.srt.utils import watchdog

    # Both modules use psutil only for `psutil.Process().parent()`.
    scheduler.psutil = watchdog.psutil = SimpleNamespace(Process=_Parent)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    scheduler.Scheduler = type("Scheduler", (SchedulerExtension, scheduler.Scheduler), {})
    scheduler.run_scheduler_process(*arguments, **named)


class SchedulerExtension(StagingCalls):
    """The methods that we add to SGLang's Scheduler. Their names must not collide with SGLang's."""

    # Attributes of SGLang's Scheduler
    tp_worker: Any
    tp_cpu_group: Any
    running_batch: Any
    last_batch: Any
    cur_batch_for_debug: Any
    chunked_req: Any
    _pending_chunked_abort_req: Any
    waiting_queue: list[Any]
    grammar_manager: Any
    result_queue: deque[Any]
    enable_overlap: bool
    _engine_paused: bool

    _taken_in: Any = None  # the result that a pause has already processed

    def handle_rpc_request(self, recv_req: Any) -> Any:
        """Handle our calls, and pass other calls to SGLang."""
        if recv_req.method != CALL:
            return super().handle_rpc_request(recv_req)  # type: ignore[misc]
        from sglang.srt.managers.io_struct import RpcReqOutput

        try:
            call = from_text(recv_req.parameters["call"], SchedulerCall)
        except (AgentLoopError, KeyError, TypeError, ValueError) as error:
            return RpcReqOutput(success=False, message=f"malformed call: {error!r}")
        return RpcReqOutput(success=True, message=to_text(self.answer_call(call)))

    def answer_call(self, call: SchedulerCall) -> SchedulerAnswers:
        """Run a call in this rank, and gather the answers of all ranks."""
        own: tuple[Any, str] = None, f"unknown scheduler call {call.method!r}"
        if call.method in frozenset(WorkerMethod):
            own = self.agentloop_call(call.method, *call.arguments)
        gathered = self._gather(own)
        return SchedulerAnswers(
            call.call_id, tuple(answer for answer, _ in gathered), tuple(error for _, error in gathered)
        )

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Process a batch's result, unless a pause has processed it already."""
        if self._taken_in is not None and result is self._taken_in:
            self._taken_in = None
            return
        super().process_batch_result(batch, result)  # type: ignore[misc]

    def _reqs_finishing_inflight(self, batch: Any) -> list[Any]:
        """Return the requests that the queued result will finish, so that the next step omits them (SGLang
        0.5.23)."""
        # A result that a pause has processed finishes no more requests: the unfinished ones need the next step.
        return [] if self._taken_in is not None else super()._reqs_finishing_inflight(batch)  # type: ignore[misc]

    def scheduler_extend(self, function: str, argument: str) -> None:
        """Call the function at an import path with this scheduler and `argument`."""
        extend = cast(Callable[[Any, str], None], resolve(function, param="function"))
        extend(self, argument)

    # Requests

    def requests_pause(self, is_cache_cleared: bool) -> bytes:
        """Pause between two steps, after all work on the device has finished. Return encoded `RequestCounts`.

        With `is_cache_cleared`, also drop all KV; running requests are prefilled again after the pause. If the
        scheduler is already paused, only the KV is dropped.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if not self._engine_paused:
            self.pause_generation(PauseGenerationReqInput(mode="in_place"))  # type: ignore[attr-defined]
        self._take_in_result()
        if is_cache_cleared:
            self.pause_generation(PauseGenerationReqInput(mode="retract"))  # type: ignore[attr-defined]
            self._clear_cache()
        SglangModel(self.tp_worker.model_runner).synchronize()
        self.cur_batch_for_debug = None
        live = list(self._live_requests())
        unbegun = [req.rid for req in live if not holds_kv(req) and not req.output_ids]
        return codec.encode(RequestCounts({req.rid: len(req.output_ids) for req in live}, tuple(unbegun)))

    def requests_resume(self) -> None:
        """End a pause. No-op in a scheduler that is not paused."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self._engine_paused:
            # torch reuses its cached memory immediately; releasing it would make the pause longer.
            self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))  # type: ignore[attr-defined]

    def requests_end(self, rids: bytes) -> None:
        """Abort requests of a paused scheduler immediately. `rids` is an encoded tuple of ids.

        Outside of a pause, SGLang itself ends aborted requests in its next step. Raises RuntimeError if not paused.
        """
        if not self._engine_paused:
            raise RuntimeError("requests_end requires a paused scheduler")
        wanted = frozenset(codec.decode(rids, tuple[str, ...]))
        queued = [*self.waiting_queue, *self.grammar_manager.grammar_queue]
        for req in [req for req in self._live_requests() if req.rid in wanted]:
            if req is self.chunked_req:
                self._pending_chunked_abort_req = req
                self.process_pending_chunked_abort()  # type: ignore[attr-defined]
            elif req in queued:
                self._end_queued(req)
            else:
                self._end_running(req)

    def _end_running(self, req: Any) -> None:
        """End a request as if its last token were a stop token; the next batch omits it."""
        self._finish(req)
        release_kv(req, self.tree_cache)  # type: ignore[attr-defined]
        self._tell_end(req)

    def _end_queued(self, req: Any) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
        else:
            self.grammar_manager.grammar_queue.remove(req)
            if hasattr(req.grammar, "cancel"):  # a future of a grammar that is being compiled
                req.grammar.cancel()
        if req.output_ids:  # a request that was retracted into the queue
            self._finish(req)
            self._tell_end(req)
        else:
            self.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)  # type: ignore[attr-defined]

    def _finish(self, req: Any) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.to_finish = FINISH_ABORT()
        req.update_finish_state()

    def _tell_end(self, req: Any) -> None:
        req.time_stats.set_completion_time()
        self.output_streamer.stream_output([req], req.return_logprob)  # type: ignore[attr-defined]

    def _take_in_result(self) -> None:
        """Process the result of the overlapped batch now, and leave it in its queue, from which the loop removes
        it."""
        if self.enable_overlap and self.result_queue and self._taken_in is None:
            batch, result = self.result_queue[0]
            self.process_batch_result(batch, result)
            self._taken_in = result

    def _clear_cache(self) -> None:
        """Drop all KV. No batch may be running; queued requests hold no KV. Raises RuntimeError."""
        with self._queues_put_away():
            is_cleared = self.flush_cache(empty_cache=False)  # type: ignore[attr-defined]
        if not is_cleared:
            raise RuntimeError("SGLang did not clear its cache")

    @contextlib.contextmanager
    def _queues_put_away(self) -> Iterator[None]:
        """Hide the queued requests during the block, so that SGLang considers itself idle. They hold no KV."""
        waiting, self.waiting_queue = self.waiting_queue, []
        grammars, self.grammar_manager.grammar_queue = self.grammar_manager.grammar_queue, []
        try:
            yield
        finally:
            self.waiting_queue, self.grammar_manager.grammar_queue = waiting, grammars

    def _live_requests(self) -> Iterator[Any]:
        batches = [batch.reqs for batch in (self.running_batch, self.last_batch) if batch is not None]
        chunked = [] if self.chunked_req is None else [self.chunked_req]
        known: set[int] = set()
        for req in chain(*batches, chunked, self.waiting_queue, self.grammar_manager.grammar_queue):
            if id(req) not in known and not req.finished():
                known.add(id(req))
                yield req

    # Memory

    def memory_release(self, tags: str) -> None:
        """Release the device memory of these tags ("kv_cache,weights"). The scheduler must be paused, its cache
        cleared."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        with self._queues_put_away():
            self.weight_updater.release_memory_occupation(  # type: ignore[attr-defined]
                ReleaseMemoryOccupationReqInput(tags=tags.split(","))
            )

    def memory_resume(self, tags: str) -> None:
        """Allocate the memory of these tags again, and restore the weights from host memory if they were kept
        there."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self.weight_updater.resume_memory_occupation(  # type: ignore[attr-defined]
            ResumeMemoryOccupationReqInput(tags=tags.split(","))
        )

    # Weights

    def weights_stager(self, setup: StagingSetup) -> WeightStager:
        """Make this rank's stager. Raises RuntimeError for pipeline and data parallelism."""
        parallel = ranks(self)
        if parallel.pp_size != 1 or parallel.dp_size != 1:
            raise RuntimeError(
                "weight updates support tensor parallelism only, not pp_size"
                f" {parallel.pp_size} and dp_size {parallel.dp_size}"
            )
        model = SglangModel(self.tp_worker.model_runner)
        return WeightStager(
            model,
            model.module,
            model.device,
            parallel.tp_rank,
            policy=setup.policy,
            can_trace=True,  # `check_plan` rejects the packed weight copies of CPU kernels
            timeout_s=setup.timeout_s,
        )

    def _gather(self, own: tuple[bytes | int | None, str]) -> list[tuple[bytes | int | None, str]]:
        if (size := ranks(self).tp_size) == 1:
            return [own]
        gathered: list[Any] = [None] * size
        torch.distributed.all_gather_object(gathered, own, group=self.tp_cpu_group)
        return gathered


class SglangModel:
    """Implements `ServedModel` for the model of one rank."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self.module: torch.nn.Module = model_runner.model
        self.device = next(self.module.parameters()).device

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.module.named_parameters()}

    def quantised_layers(self) -> Sequence[QuantisedLayer]:
        return ()

    def reload(self, tensors: Tensors) -> None:
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        self._check_reloadable()
        try:
            with set_default_torch_dtype(self._runner.model_config.dtype):
                DefaultModelLoader.load_weights_and_postprocess(self.module, tensors, self.device)
        except Exception as error:
            raise RuntimeError(f"SGLang failed to load the weights: {error!r}") from error

    def compare(self, names: Sequence[str], read: Read) -> tuple[int, int]:
        return compare_layers(self.module, frozenset(names), read, FUSED)

    def _check_reloadable(self) -> None:
        """Raise RuntimeError, before any write, for layers that a second load would corrupt.

        A load converts quantized layers to a format that the loader of their parameters does not support.
        """
        for name, module in self.module.named_modules():
            method = getattr(module, "quant_method", None)
            has_own = any(True for _ in module.parameters(recurse=False))
            if method is not None and has_own and type(method).__name__ not in PLAIN_METHODS:
                raise RuntimeError(
                    f"layer {name} is quantized ({type(method).__name__}): SGLang can load it only once, so its"
                    " weights cannot be updated"
                )

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
