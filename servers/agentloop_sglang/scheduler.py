"""The part of the adapter that runs inside SGLang's scheduler processes; `install` patches a scheduler.

`worker.py` calls it through `scheduler_extend` before the first request. Changes (SGLang 0.5.17 and 0.5.23):

- `sampler.py` samples tokens. SGLang calls `model_runner.sample` once per batch, on the stream of the forward pass;
  a
  batch with grammars is sampled after the results of the previous batch have been processed.
- The model's own stop tokens are removed, because SGLang adds them to the stop tokens of each request.
- SGLang has no grammars without a tokenizer, and with a tokenizer it would send all output through another process.
  It
  is therefore started without one, and its grammar backend is created here. Each request has its own stop token
  ids.
- A canary check runs before all other requests (`CanaryPrefill`).
- Counters are written to a file that the engine reads (`FactsFile`): a remote call would take time between two
  steps.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from agentloop.engine.canary import CANARY_PREFIX
from agentloop_servers.engines.common.process import slow_step_s
from agentloop_sglang.internals import ranks
from agentloop_sglang.requests import (
    PARAMETER,
    FactsFile,
    SchedulerFacts,
    SchedulerSetup,
    sampling_from_text,
)
from agentloop_sglang.sampler import BatchSampler, Row, SampledBatch

_PREFILL_INTERVAL_S = 0.05  # between two counts of queued prompts, which walk the queue


def install(scheduler: Any, argument: str) -> None:
    """Install our sampling, grammars and counters in a scheduler. `argument` is an encoded `SchedulerSetup`."""
    setup = SchedulerSetup.from_text(argument)
    scheduler.model_config.hf_eos_token_id = None
    if setup.can_constrain:
        scheduler.grammar_manager.grammar_backend = _grammar_backend(scheduler)
    sampling = Sampling(scheduler, setup)
    sampling.install()
    CanaryPrefill(scheduler).install()
    if ranks(scheduler).tp_rank == 0:
        Counters(scheduler, sampling, FactsFile(setup.facts_path)).install()


class Sampling:
    """Replaces SGLang's sampling with `BatchSampler`."""

    def __init__(self, scheduler: Any, setup: SchedulerSetup) -> None:
        self.num_sampled = 0
        self._scheduler = scheduler
        self._runner = scheduler.tp_worker.model_runner
        self._sampler = BatchSampler(setup.logprobs_mode)
        self._seed = setup.seed
        self._num_rows = 0
        self._rows: list[Row] = []

    def install(self) -> None:
        """Patch the scheduler and its model runner."""
        run_batch = self._scheduler.run_batch

        def run(batch: Any, *arguments: Any, **options: Any) -> Any:
            self._begin(batch)
            return run_batch(batch, *arguments, **options)

        self._scheduler.run_batch = run
        self._runner.sample = self.sample

    def sample(self, logits_output: Any, forward_batch: Any) -> torch.Tensor:
        """Sample for the current batch; replaces SGLang's `ModelRunner.sample`."""
        info, logits = forward_batch.sampling_info, logits_output.next_token_logits
        info.update_regex_vocab_mask()
        mask, info.grammar_mask = info.grammar_mask, None
        constrain = None if mask is None else _applied(mask)
        sampled = self._sampler.sample(logits, constrain)
        self.num_sampled += len(self._rows)
        if forward_batch.return_logprob:
            _put_logprobs(logits_output, sampled, forward_batch.top_logprobs_nums)
        return sampled.token_ids.to(torch.int32)

    def _begin(self, batch: Any) -> None:
        self._rows = [self._row_of(req) for req in batch.reqs]
        if batch.forward_mode.is_extend():
            for row, req in zip(self._rows, batch.reqs, strict=True):
                row.restart(req.output_ids)
        if self._rows:
            self._sampler.begin(self._rows)

    def _row_of(self, req: Any) -> Row:
        row: Row | None = getattr(req, "agentloop_row", None)
        if row is None:
            self._num_rows += 1
            sampling = sampling_from_text(req.sampling_params.custom_params[PARAMETER])
            # The number is equal in all ranks, because they process requests in the same order.
            seed = self._seed * 0x9E3779B1 + self._num_rows
            size, device = self._runner.model_config.vocab_size, torch.device(self._runner.device)
            row = req.agentloop_row = Row(sampling, req.origin_input_ids, size, device, seed)
        return row


class _Late:
    """Values that are being copied to the host. SGLang reads the rows after the batch's copies have finished."""

    def __init__(self, values: torch.Tensor) -> None:
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done: Any = torch.cuda.Event()
            self._done.record()
        else:
            self._values, self._done = values, None
        self._rows: list[list[Any]] | None = None

    def row(self, place: int, end: int) -> list[Any]:
        if self._rows is None:
            if self._done is not None:
                self._done.synchronize()
            self._rows = self._values.tolist()
        return self._rows[place][:end]


class _LateRow:
    """One row of a `_Late` block. SGLang calls `tolist`."""

    __slots__ = ("_block", "_end", "_place")

    def __init__(self, block: _Late, place: int, end: int) -> None:
        self._block, self._place, self._end = block, place, end

    def tolist(self) -> list[Any]:
        return self._block.row(self._place, self._end)


def _put_logprobs(logits_output: Any, sampled: SampledBatch, nums: Sequence[int]) -> None:
    """Pass logprobs to SGLang, with one copy of all alternatives per batch. `nums` is the number of alternatives
    per row."""
    logits_output.next_token_logprobs = sampled.logprobs
    if any(nums):
        values, ids = _Late(sampled.top_logprobs), _Late(sampled.top_ids)
        places = list(enumerate(nums))
        logits_output.next_token_top_logprobs_val = [_LateRow(values, place, end) for place, end in places]
        logits_output.next_token_top_logprobs_idx = [_LateRow(ids, place, end) for place, end in places]


def _applied(mask: Any) -> Any:
    """Return a function that applies a batch's grammar mask to logits in place."""

    def constrain(logits: torch.Tensor) -> None:
        if logits.is_cuda:
            mask.apply(logits)
        else:  # SGLang has kernels for GPUs only
            import xgrammar

            xgrammar.apply_token_bitmask_inplace(logits, mask.vocab_mask)

    return constrain


def _grammar_backend(scheduler: Any) -> Any:
    """Return an SGLang grammar backend with xgrammar for our constraint format (`constraint_to_text`)."""
    import xgrammar
    from sglang.srt.constrained import xgrammar_backend
    from sglang.srt.constrained.base_grammar_backend import GrammarStats, InvalidGrammarObject
    from sglang.srt.constrained.xgrammar_backend import (
        MAX_ROLLBACK_TOKENS,
        XGrammarGrammar,
        XGrammarGrammarBackend,
    )
    from transformers import AutoTokenizer

    if not torch.cuda.is_available():  # SGLang allocates its masks in pinned memory, which requires CUDA
        xgrammar_backend._allocate_token_bitmask = lambda size, num_rows: xgrammar.allocate_token_bitmask(
            num_rows, size
        )
    tokenizer = AutoTokenizer.from_pretrained(scheduler.model_config.model_path)
    vocab_size = scheduler.model_config.vocab_size
    compilers: dict[tuple[int, ...], Any] = {}

    def compiler(stop_ids: tuple[int, ...]) -> Any:
        if stop_ids not in compilers:
            vocabulary = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_ids)
            )
            compilers[stop_ids] = xgrammar.GrammarCompiler(vocabulary)
        return compilers[stop_ids]

    class Grammars(XGrammarGrammarBackend):  # type: ignore[misc, unused-ignore]
        def dispatch_structural_tag(self, key_string: str) -> Any:
            wanted = json.loads(key_string)
            compile_with = compiler(tuple(wanted["stop"]))
            try:
                if wanted["regex"] is not None:
                    grammar = compile_with.compile_regex(wanted["regex"])
                else:
                    grammar = compile_with.compile_structural_tag(wanted["tag"])
            except (RuntimeError, ValueError) as error:
                return InvalidGrammarObject(str(error))
            matcher = xgrammar.GrammarMatcher(grammar, max_rollback_tokens=MAX_ROLLBACK_TOKENS)
            stats = GrammarStats(dispatch_type="structural_tag")
            return XGrammarGrammar(matcher, vocab_size, grammar, None, key_string, stats)

    return Grammars(tokenizer, vocab_size)


class CanaryPrefill:
    """Prefills a canary request alone, before all other requests of the scheduler.

    One of the `SPARE_SLOTS` is reserved for it. If running requests hold all KV, one of them is retracted, like
    SGLang does when a decode step lacks memory; it is prefilled again later.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._num_waiting = 0
        self._prefill = scheduler.get_new_batch_prefill
        self._batch_type = type(scheduler.running_batch)

    def install(self) -> None:
        """Patch the scheduler."""
        scheduler, enqueue = self._scheduler, self._scheduler._add_request_to_queue

        def enqueued(req: Any, *arguments: Any, **options: Any) -> Any:
            self._num_waiting += req.rid.startswith(CANARY_PREFIX)
            return enqueue(req, *arguments, **options)

        scheduler._add_request_to_queue = enqueued
        scheduler.get_new_batch_prefill = self.prefill

    def prefill(self, running_batch: Any) -> Any:
        """Plan the next prefill; replaces SGLang's `get_new_batch_prefill`."""
        if self._num_waiting == 0:
            return self._prefill(running_batch)
        self._num_waiting = 0
        scheduler = self._scheduler
        canary = [req for req in scheduler.waiting_queue if req.rid.startswith(CANARY_PREFIX)]
        if not canary:  # aborted
            return self._prefill(running_batch)
        # Hide all other requests, so that their slots and the KV that SGLang reserves for their growth do not
        # count.
        others = [req for req in scheduler.waiting_queue if req not in canary]
        chunked, scheduler.chunked_req = scheduler.chunked_req, None
        scheduler.waiting_queue = canary
        try:
            batch = self._plan_alone()
            if batch is None and not running_batch.is_empty():
                self._retract(running_batch)
                batch = self._plan_alone()
        finally:
            scheduler.waiting_queue, scheduler.chunked_req = scheduler.waiting_queue + others, chunked
            self._num_waiting = sum(req.rid.startswith(CANARY_PREFIX) for req in scheduler.waiting_queue)
        if batch is None:
            return self._prefill(running_batch)
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)

    def _plan_alone(self) -> Any:
        return self._prefill(self._batch_type(reqs=[], batch_is_full=False)).batch_to_run

    def _retract(self, running_batch: Any) -> None:
        retract = running_batch.retract_decode  # has no parameter since 0.5.23
        has_parameter = bool(inspect.signature(retract).parameters)
        retracted, ratio, _ = retract(self._scheduler.server_args) if has_parameter else retract()
        self._scheduler.new_token_ratio_tracker.current = ratio
        for req in retracted:
            self._scheduler._add_request_to_queue(req, is_retracted=True)


class Counters:
    """Writes the scheduler's counters to the `FactsFile` after every batch."""

    def __init__(self, scheduler: Any, sampling: Sampling, file: FactsFile) -> None:
        self._scheduler = scheduler
        self._sampling = sampling
        self._file = file
        self._num_preemptions = 0
        self._num_prefill_tokens = 0
        self._counted_at = 0.0
        self._last_step_at: float | None = None  # None: no request was running
        self._slow_step_s = 0.0

    def install(self) -> None:
        """Patch the scheduler."""
        scheduler = self._scheduler
        process, enqueue = scheduler.process_batch_result, scheduler._add_request_to_queue

        def processed(*arguments: Any, **options: Any) -> Any:
            result = process(*arguments, **options)
            self.write()
            return result

        def enqueued(req: Any, *arguments: Any, **options: Any) -> Any:
            self._num_preemptions += req.retraction_count > 0
            return enqueue(req, *arguments, **options)

        scheduler.process_batch_result, scheduler._add_request_to_queue = processed, enqueued

    def write(self) -> None:
        """Write the current counters."""
        scheduler, now = self._scheduler, time.monotonic()
        if self._last_step_at is not None:
            self._slow_step_s = slow_step_s(self._slow_step_s, now - self._last_step_at)
        self._last_step_at = None if scheduler.running_batch.is_empty() else now
        waiting = scheduler.waiting_queue
        if now - self._counted_at > _PREFILL_INTERVAL_S or not waiting:
            self._counted_at = now
            self._num_prefill_tokens = sum(len(req.origin_input_ids) for req in waiting if not req.output_ids)
            if scheduler.chunked_req is not None:
                self._num_prefill_tokens += len(scheduler.chunked_req.origin_input_ids)
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        self._file.write(
            SchedulerFacts(
                num_steps=scheduler.forward_ct,
                num_sampled_tokens=self._sampling.num_sampled,
                num_preemptions=self._num_preemptions,
                num_waiting=len(waiting) + len(scheduler.grammar_manager.grammar_queue),
                num_kv_tokens=max(0, int(scheduler.max_total_num_tokens - free)),
                num_prefill_tokens=self._num_prefill_tokens,
                slow_step_us=round(1e6 * self._slow_step_s),
            )
        )
