"""The half of pauses and weight updates that runs inside SGLang's scheduler processes.

SGLang has no extension class for its workers. So `run_scheduler` is started in place of SGLang's own entry function
(`Engine.run_scheduler_process_func`): it puts a subclass of SGLang's `Scheduler`, with `SchedulerExtension` before
it, where the entry function looks the class up, and calls that. What it rests on (SGLang 0.5.17 and 0.5.23):

- Rank 0 takes remote calls (`RpcReqInput`) between two steps, also while it is paused, and broadcasts them to its
  tensor-parallel group with all other requests. So every rank runs a call at the same place of its loop.
- `handle_rpc_request` answers with a text and logs what a method raises. Ours runs methods of this class in all
  ranks, and answers with the answers of all (`SchedulerCall`, `SchedulerAnswers`). Nothing is raised into the loop,
  which would end the whole group and send SIGQUIT to the engine's process.
- `pause_generation(in_place)` only sets a flag: with overlapped scheduling the last batch launched is still on the
  device, and its tokens are in no request. `requests_pause` takes its result in, as the next turn of the loop
  would, and waits for the device. The loop meets the same result after the pause: `process_batch_result` skips it.
- The loop watches over the batch it last began, and a pause with one in it for longer than `watchdog_timeout` would
  end the group: a paused scheduler has none.
- What a request that is not streamed has sampled is sent every `progress_tokens` steps. After a pause its first
  token is sent at once: with every place taken, the engine judges new weights by it, and holds output until then.
- `pause_generation(retract)` puts all running requests back into the queue and frees their KV, but `flush_cache`
  wants the queue to be empty. Queued requests hold no KV, and are matched against the cache when their turn comes.
- A commit writes into the parameters that the captured graphs read, on the thread that launches them.
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
"""The longest wait of a stage's thread for the interpreter, which the scheduler's loop never gives up by itself."""
FAILED_EXIT_CODE = 70
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The layers that SGLang's decoders fuse, with their parts' names in checkpoints; its models do not say it."""

_log = structlog.stdlib.get_logger(__name__)


class _Parent:
    """A stand-in for the engine's process, so that a failed scheduler ends its own process only."""

    def parent(self) -> _Parent:
        return self

    def send_signal(self, signum: int) -> None:
        """End this scheduler's process instead; the engine's process watches it."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED_EXIT_CODE)


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Run one scheduler process with our calls in it: SGLang's `run_scheduler_process`, its arguments and all.

    A scheduler that fails, or that its watchdog finds hung, exits with `FAILED_EXIT_CODE`.
    """
    from sglang.srt.managers import scheduler
    from sglang.srt.utils import watchdog

    # They look up their parent by `psutil.Process().parent()`, and for nothing else.
    scheduler.psutil = watchdog.psutil = SimpleNamespace(Process=_Parent)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    scheduler.Scheduler = type("Scheduler", (SchedulerExtension, scheduler.Scheduler), {})
    scheduler.run_scheduler_process(*arguments, **named)


class SchedulerExtension(StagingCalls):
    """The methods that we add to SGLang's Scheduler. Their names must not collide with its own."""

    # SGLang's own
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

    _taken_in: Any = None  # the result that a pause has processed before its turn

    def handle_rpc_request(self, recv_req: Any) -> Any:
        """Answer our calls, and pass SGLang's own on."""
        if recv_req.method != CALL:
            return super().handle_rpc_request(recv_req)  # type: ignore[misc]
        from sglang.srt.managers.io_struct import RpcReqOutput

        try:
            call = from_text(recv_req.parameters["call"], SchedulerCall)
        except (AgentLoopError, KeyError, TypeError, ValueError) as error:
            return RpcReqOutput(success=False, message=f"not a call: {error!r}")
        return RpcReqOutput(success=True, message=to_text(self.answer_call(call)))

    def answer_call(self, call: SchedulerCall) -> SchedulerAnswers:
        """Run a call in this rank, and gather the answers of all ranks."""
        own: tuple[Any, str] = None, f"the scheduler has no call {call.method}"
        if call.method in frozenset(WorkerMethod):
            own = self.agentloop_call(call.method, *call.arguments)
        gathered = self._gather(own)
        return SchedulerAnswers(
            call.call_id, tuple(one for one, _ in gathered), tuple(sentence for _, sentence in gathered)
        )

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Process a batch's result, unless a pause has processed it already."""
        if self._taken_in is not None and result is self._taken_in:
            self._taken_in = None
            return
        super().process_batch_result(batch, result)  # type: ignore[misc]

    def _reqs_finishing_inflight(self, batch: Any) -> list[Any]:
        """Return the requests that the queued result will end, and the next step leaves out (SGLang 0.5.23)."""
        # A result that a pause has processed ends nothing more: what it left unfinished needs the step.
        return [] if self._taken_in is not None else super()._reqs_finishing_inflight(batch)  # type: ignore[misc]

    def scheduler_extend(self, function: str, argument: str) -> None:
        """Call the function at an import path with this scheduler and `argument`."""
        extend = cast(Callable[[Any, str], None], resolve(function, param="function"))
        extend(self, argument)

    # --- requests -----------------------------------------------------------------------------------------

    def requests_pause(self, is_cache_cleared: bool) -> bytes:
        """Pause between two steps, after all work on the device. Returns `RequestCounts`.

        `is_cache_cleared`: all KV is dropped too, and requests in flight are prefilled again after the pause. In a
        paused scheduler, only that is done.
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
            # What torch has cached is used again at once; giving it back would cost time in the pause.
            self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))  # type: ignore[attr-defined]

    def requests_end(self, rids: bytes) -> None:
        """Abort requests of a paused scheduler at once; `rids` is an encoded tuple of ids.

        Outside a pause SGLang ends a request with its next step. Raises RuntimeError if it is not paused.
        """
        if not self._engine_paused:
            raise RuntimeError("requests are ended at once only in a pause")
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
        """End a request as if its last token were a stop token; the next batch leaves it out."""
        self._finish(req)
        release_kv(req, self.tree_cache)  # type: ignore[attr-defined]
        self._tell_end(req)

    def _end_queued(self, req: Any) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
        else:
            self.grammar_manager.grammar_queue.remove(req)
            if hasattr(req.grammar, "cancel"):  # the future of one that is being compiled
                req.grammar.cancel()
        if req.output_ids:  # it was put back into the queue
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
        """Process the overlapped batch's result now, and leave it in its queue for the loop to take out."""
        if self.enable_overlap and self.result_queue and self._taken_in is None:
            batch, result = self.result_queue[0]
            self.process_batch_result(batch, result)
            self._taken_in = result

    def _clear_cache(self) -> None:
        """Drop all KV: no batch is under way, and queued requests hold none. Raises RuntimeError."""
        with self._queues_put_away():
            is_cleared = self.flush_cache(empty_cache=False)  # type: ignore[attr-defined]
        if not is_cleared:
            raise RuntimeError("SGLang did not clear its cache")

    @contextlib.contextmanager
    def _queues_put_away(self) -> Iterator[None]:
        """Empty SGLang's queues during the block, so that it takes itself for idle. Queued requests hold no KV."""
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

    # --- memory -------------------------------------------------------------------------------------------

    def memory_release(self, tags: str) -> None:
        """Give the device memory of these tags back ("kv_cache,weights"). Paused, and the cache is cleared."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        with self._queues_put_away():
            self.weight_updater.release_memory_occupation(  # type: ignore[attr-defined]
                ReleaseMemoryOccupationReqInput(tags=tags.split(","))
            )

    def memory_resume(self, tags: str) -> None:
        """Take the memory of these tags back, with the weights if they were kept in host memory."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self.weight_updater.resume_memory_occupation(  # type: ignore[attr-defined]
            ResumeMemoryOccupationReqInput(tags=tags.split(","))
        )

    # --- weights ------------------------------------------------------------------------------------------

    def weights_stager(self, setup: StagingSetup) -> WeightStager:
        """Make this rank's stager. Raises RuntimeError for pipelines and data parallelism."""
        parallel = ranks(self)
        if parallel.pp_size != 1 or parallel.dp_size != 1:
            raise RuntimeError(
                "weights are updated in tensor-parallel groups only: no pipeline, no data parallelism"
            )
        model = SglangModel(self.tp_worker.model_runner)
        return WeightStager(
            model,
            model.module,
            model.device,
            parallel.tp_rank,
            policy=setup.policy,
            can_trace=True,  # packed copies of the CPU's kernels do not pass `check_plan`
            timeout_s=setup.timeout_s,
        )

    # --- inside -------------------------------------------------------------------------------------------

    def _gather(self, own: tuple[bytes | int | None, str]) -> list[tuple[bytes | int | None, str]]:
        if (size := ranks(self).tp_size) == 1:
            return [own]
        gathered: list[Any] = [None] * size
        torch.distributed.all_gather_object(gathered, own, group=self.tp_cpu_group)
        return gathered


class SglangModel:
    """A rank's model as commits use it; see `ServedModel`."""

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
            raise RuntimeError(f"the load broke off: {error!r}") from error

    def compare(self, names: Sequence[str], read: Read) -> tuple[int, int]:
        return compare_layers(self.module, frozenset(names), read, FUSED)

    def _check_reloadable(self) -> None:
        """Raise RuntimeError, before any write, for layers that a second load would spoil.

        A load leaves quantised layers in a form that the loader of their parameters does not know.
        """
        for name, module in self.module.named_modules():
            method = getattr(module, "quant_method", None)
            has_own = any(True for _ in module.parameters(recurse=False))
            if method is not None and has_own and type(method).__name__ not in PLAIN_METHODS:
                raise RuntimeError(
                    f"layer {name} is quantised ({type(method).__name__}): SGLang loads it once only"
                )

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
