"""Sampled logprobs leave vLLM's engine process as one array per step (vLLM 0.32 and 0.33).

vLLM sends three small arrays per request and step. With 512 requests, slicing, encoding and decoding them takes
more CPU time than all other parts of the output. `StepLogprobs` is the half in the engine process: the first output
of a step has the logprobs of all its outputs. `install` puts the other half into the front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from typing import Any

from agentloop.types import FloatArray, IntArray


class StepRows:
    """The logprobs of all sampled tokens of a step: row by row the ids, logprobs and ranks."""

    def __init__(self, ids: IntArray, logprobs: FloatArray, ranks: IntArray) -> None:
        """`ids` and `logprobs` are `[rows, 1 + alternatives]`, the sampled token first."""
        self.ids, self.logprobs = ids, logprobs
        # Lists of numbers: the garbage collector would visit a list per row.
        self.sampled_ids: list[int] = ids[:, 0].tolist()
        self.sampled_logprobs: list[float] = logprobs[:, 0].tolist()
        self.ranks: list[int] = ranks.tolist()


class StepLogprobs:
    """A mixin for vLLM's `Scheduler`: a step's outputs share one `LogprobsLists`, which the first output has.

    Its `cu_num_generated_tokens` has the first row of each output, and the number of rows last.
    """

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        logprobs = model_runner_output.logprobs
        if logprobs is not None:
            model_runner_output.logprobs = _Rows(logprobs.cu_num_generated_tokens)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if logprobs is not None:
            for of_client in outputs.values():
                pack(of_client.outputs, logprobs)
        return outputs


class _Rows:
    """Takes the place of a step's logprobs in the scheduler, which slices them for each request."""

    def __init__(self, firsts: Sequence[int] | None) -> None:
        self._firsts = firsts  # the first row of each request; None: one row per request

    def slice_request(self, index: int, num_tokens: int) -> range:
        first = index if self._firsts is None else self._firsts[index]
        return range(first, first + num_tokens)


def pack(outputs: Sequence[Any], logprobs: Any) -> None:
    """Move the rows of `logprobs` that the outputs name, as ranges, to the first output."""
    rows: list[int] = []
    firsts = [0]
    for output in outputs:
        rows += output.new_logprobs or ()  # None: the request wants no logprobs
        firsts.append(len(rows))
        output.new_logprobs = None
    if rows:
        ids, values, ranks = (part[rows] for part in logprobs[:3])
        outputs[0].new_logprobs = logprobs._replace(
            logprob_token_ids=ids, logprobs=values, sampled_token_ranks=ranks, cu_num_generated_tokens=firsts
        )


def unpack(outputs: Sequence[Any]) -> None:
    """Set the `new_logprobs` of each output to the step's rows and the range of the output's rows."""
    packed = outputs[0].new_logprobs if outputs else None
    if packed is None:
        return
    rows = StepRows(*packed[:3])
    for output, (first, end) in zip(outputs, pairwise(packed.cu_num_generated_tokens), strict=True):
        output.new_logprobs = (rows, range(first, end)) if end > first else None


def install(llm: Any) -> None:
    """Make a new AsyncLLM read the outputs of `StepLogprobs`. Call before its first request."""
    from vllm import envs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    receive = llm.engine_core.get_output_async

    async def received() -> Any:
        outputs = await receive()
        unpack(outputs.outputs)
        return outputs

    llm.engine_core.get_output_async = received
    LogprobsProcessor._update_sample_logprobs = append_rows
    # vLLM reads this variable for every output of a step: a third of the front end's time.
    envs.VLLM_COMPUTE_NANS_IN_LOGITS = envs.VLLM_COMPUTE_NANS_IN_LOGITS


def append_rows(processor: Any, own: tuple[StepRows, range]) -> None:
    """Append to a request's FlatLogprobs, as vLLM's `LogprobsProcessor` does without a tokenizer."""
    flat, num_logprobs, rows = processor.logprobs, processor.num_logprobs, own[0]
    for row in own[1]:
        processor.cumulative_logprob += rows.sampled_logprobs[row]
        if num_logprobs:
            ids, logprobs = rows.ids[row].tolist(), rows.logprobs[row].tolist()
            ranks = chain((rows.ranks[row],), range(1, num_logprobs + 1))
            flat.append_fast(ids, logprobs, ranks, repeat(None))
            continue
        # Another request of the step may want alternatives: the row then has more than the sampled token.
        flat.start_indices.append(len(flat.token_ids))
        flat.token_ids.append(rows.sampled_ids[row])
        flat.logprobs.append(rows.sampled_logprobs[row])
        flat.ranks.append(rows.ranks[row])
        flat.decoded_tokens.append(None)
        flat.end_indices.append(len(flat.token_ids))
