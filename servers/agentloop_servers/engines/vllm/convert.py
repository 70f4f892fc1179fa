"""Conversion of requests to vLLM's types, and of vLLM's outputs and errors to agentloop's. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import numpy as np

from agentloop.errors import (
    AgentLoopError,
    EngineError,
    EngineLost,
    EnginePaused,
    InvalidRequest,
    InvariantBroken,
    MalformedEngineResponse,
    Overloaded,
    UnsupportedParameter,
)
from agentloop.types import (
    Constraint,
    FinishReason,
    GenerateRequest,
    Generation,
    IntArray,
    Load,
    SamplingParams,
    TopLogprobs,
    WeightVersionSpan,
)
from agentloop.values.aux_rows import AuxKind, AuxRows, ragged
from agentloop.values.checks import LOGPROB_SENTINEL, MAX_BIAS
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.common.constraints import structural_tag
from agentloop_servers.engines.common.process import one_line

RAW_TOKEN_ID = -1
"""The token id of a raw logprob's entry. It differs from the sampled token's id, because vLLM merges entries with
equal ids."""


def add_completion(sampled: SampledTokens, completion: Any, num_top_logprobs: int) -> None:
    """Append the tokens of one vLLM CompletionOutput; `stamp` sets their versions.

    Raises MalformedEngineResponse if its logprobs do not belong to its tokens.
    """
    token_ids, flat = list(completion.token_ids), completion.logprobs
    if not token_ids:
        return
    num_own = 2 if sampled.logprobs_mode is LogprobsMode.BOTH else 1
    has_one_each = num_own == 1 and not num_top_logprobs
    starts = range(len(token_ids)) if has_one_each or flat is None else flat.start_indices
    if flat is None or [flat.token_ids[start] for start in starts] != token_ids:
        raise MalformedEngineResponse("vLLM returned logprobs whose token ids differ from the sampled tokens")
    raw_logprobs: list[float] = []
    if num_own == 2:
        if any(flat.token_ids[start + 1] != RAW_TOKEN_ID for start in starts):
            raise MalformedEngineResponse("vLLM returned a position without its raw logprob")
        raw_logprobs = [flat.logprobs[start + 1] for start in starts]
    tops: TopLogprobs = ()
    if num_top_logprobs:
        ends, num_tops = flat.end_indices, repeat(num_top_logprobs)
        tops = tuple(map(_alternatives, repeat(flat), starts, ends, num_tops, repeat(num_own)))
    sampled.extend(token_ids, [flat.logprobs[start] for start in starts], tops, raw_logprobs)


def add_aux(sampled: SampledTokens, request: GenerateRequest, completion: Any) -> None:
    """Append the auxiliary rows of a CompletionOutput, whose tokens `sampled` has.

    Its sampling mask belongs to the output's tokens, its routed experts to the complete request.
    """
    aux: dict[AuxKind, AuxRows] = {}
    if completion.routed_experts is not None:
        aux[AuxKind.ROUTED_EXPERTS] = _routes(request.routes_from, completion.routed_experts)
    if completion.sampling_mask is not None:
        rows = completion.sampling_mask.token_ids
        aux[AuxKind.SAMPLING_MASK] = ragged(sampled.num_prompt + len(sampled) - len(rows), rows)
    if aux:
        sampled.add_aux(aux)


def add_routes_so_far(sampled: SampledTokens, request: GenerateRequest, state: Any, num_had: int) -> None:
    """Append the routed experts of the tokens after the first `num_had` from vLLM's internal request state.

    vLLM outputs them only at the end.
    """
    if state.routed_experts_chunks and len(sampled) > num_had:
        start = sampled.num_prompt + num_had - 1 if num_had else request.routes_from
        num_rows = sampled.num_prompt + len(sampled) - 1 - start
        chunks, part = _last_chunks(state, sampled, state.routed_experts_chunks, num_rows)
        sampled.add_aux({AuxKind.ROUTED_EXPERTS: _routes(start, np.concatenate(chunks)[part])})


def _add_masks_so_far(sampled: SampledTokens, state: Any, num_had: int) -> None:
    if state.sampling_mask_chunks and len(sampled) > num_had:
        found = [_mask_rows(chunk) for chunk in state.sampling_mask_chunks[num_had - len(sampled) :]]
        chunks, part = _last_chunks(state, sampled, found, len(sampled) - num_had)
        rows = [row for chunk in chunks for row in chunk][part]
        sampled.add_aux({AuxKind.SAMPLING_MASK: ragged(sampled.num_prompt + num_had, rows)})


def _mask_rows(chunk: Any) -> list[IntArray]:
    return [chunk.token_ids] if chunk.offsets is None else np.split(chunk.token_ids, chunk.offsets[1:-1])


def _last_chunks(
    state: Any, sampled: SampledTokens, chunks: Sequence[Any], num_rows: int
) -> tuple[list[Any], slice]:
    """Return the chunks with the last `num_rows` rows before those of tokens that `sampled` does not have yet, and
    the place of these rows in the chunks. vLLM appends a chunk per step."""
    num_ahead = state.detokenizer.num_output_tokens() - len(sampled)
    found, num_found = list[Any](), 0
    for chunk in reversed(chunks):
        if num_found >= num_ahead + num_rows:
            break
        found.append(chunk)
        num_found += len(chunk)
    first = num_found - num_ahead - num_rows
    if first < 0:
        raise MalformedEngineResponse(f"vLLM has {num_found} auxiliary rows of {num_ahead + num_rows}")
    return found[::-1], slice(first, first + num_rows)


def _routes(start: int, experts: Any) -> AuxRows:
    """Return vLLM's array `[rows, layers, experts per token]` as the rows of the positions from `start` on."""
    if experts.ndim != 3:
        raise MalformedEngineResponse(f"vLLM returned routed experts of shape {experts.shape}, not of 3 dimensions")
    return AuxRows(start, experts.ravel(), experts.shape[1:])


def add_so_far(sampled: SampledTokens, llm: Any, request: GenerateRequest, version: int | None = None) -> None:
    """Append the tokens of a running request that `sampled` does not have yet, with their versions.

    Append nothing if the request has ended. The tokens are read from vLLM's internal request state, because vLLM
    outputs them only at the end.
    """
    start = len(sampled)
    for state in states_of(llm, request.request_id):
        token_ids = state.detokenizer.output_token_ids[start:]
        if token_ids:
            new = SimpleNamespace(token_ids=token_ids, logprobs=state.logprobs_processor.logprobs[start:])
            add_completion(sampled, new, request.sampling.num_top_logprobs)
            stamp(sampled, spans_from_starts(state.weight_version_starts, len(sampled), version))
            add_routes_so_far(sampled, request, state, start)
            _add_masks_so_far(sampled, state, start)


def _alternatives(
    flat: Any, start: int, end: int, num_top_logprobs: int, num_own: int
) -> tuple[tuple[int, float], ...]:
    """Return the alternatives at one position of vLLM's FlatLogprobs: pairs (token id, logprob), the likeliest
    first.

    A position has `num_own` entries for the sampled token, followed by the most likely tokens.
    """
    entries = list(range(start + num_own, end))
    # When vLLM merges outputs, entries with equal ids become one: a sampled token that is also one of the most
    # likely then has only its first entry.
    if len(entries) < num_top_logprobs:
        entries.append(start)
    entries.sort(key=flat.ranks.__getitem__)
    # Tokens that sampling excludes (top-k, top-p, a constraint) have a logprob of minus infinity: omit them.
    return tuple(
        (flat.token_ids[entry], flat.logprobs[entry])
        for entry in entries
        if flat.logprobs[entry] > LOGPROB_SENTINEL
    )


def stamp(sampled: SampledTokens, spans: tuple[WeightVersionSpan, ...]) -> None:
    """Set the weight versions of all tokens so far. Raises MalformedEngineResponse unless the spans tile the
    tokens."""
    try:
        sampled.set_spans(spans)
    except InvariantBroken as error:
        raise MalformedEngineResponse(f"vLLM's {error.message}") from error


def sampling_params(
    sampling: SamplingParams,
    max_tokens: int,
    *,
    is_streamed: bool,
    eos_token_id: int | None = None,
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED,
    can_bias: bool = True,
    routes_from: int = 0,
) -> Any:
    """Convert to vLLM's SamplingParams, which stop at `stop_token_ids` only. `eos_token_id` is the tokenizer's.

    Raises UnsupportedParameter if a constraint would need a logit bias and `can_bias` is False.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    constraint, bias = sampling.constraint, dict(sampling.logit_bias)
    if constraint is not None and eos_token_id is not None and eos_token_id not in sampling.stop_token_ids:
        # vLLM's grammar always allows the end-of-sequence token at its end. That token would not stop the request,
        # and any token could follow it, so a bias excludes it.
        if not can_bias:
            raise UnsupportedParameter(
                "with speculative decoding a constraint requires the tokenizer's end-of-sequence token"
                f" {eos_token_id} in stop_token_ids, not {list(sampling.stop_token_ids)[:8]}",
                param="stop_token_ids",
            )
        bias[eos_token_id] = -MAX_BIAS

    return VllmSamplingParams(
        max_tokens=max_tokens,
        # vLLM also bans the end-of-sequence token up to min_tokens; without stop tokens nothing must be banned.
        min_tokens=min(sampling.min_tokens, max_tokens) if sampling.stop_token_ids else 0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=bias or None,
        structured_outputs=structured_outputs(constraint) if constraint is not None else None,
        # 0 returns the sampled token only. A raw logprob replaces one alternative (`raw_logprobs.py`).
        logprobs=sampling.num_top_logprobs + (logprobs_mode is LogprobsMode.BOTH),
        flat_logprobs=True,
        detokenize=False,
        # One final output costs the front end about half as much as a stream of deltas.
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=routes_from,
    )


def scoring_params(sampling: SamplingParams, *, reads_cache: bool, is_greedy: bool = True) -> Any:
    """Make vLLM's SamplingParams to score a prompt by its plain log-softmax. The one sampled token is discarded.

    With `reads_cache`, tokens that are in the prefix cache are not scored. An engine that returns sampling masks
    refuses greedy sampling.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        max_tokens=1,
        temperature=0.0 if is_greedy else 1.0,
        top_k=0 if is_greedy else 1,
        ignore_eos=True,
        prompt_logprobs=sampling.num_top_logprobs,
        skip_reading_prefix_cache=not reads_cache,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def structured_outputs(constraint: Constraint) -> Any:
    """Convert a constraint to vLLM's StructuredOutputsParams."""
    from vllm.sampling_params import StructuredOutputsParams

    tag = structural_tag(constraint)
    return StructuredOutputsParams(structural_tag=tag, regex=None if tag is not None else constraint.text)


def tokens_prompt(request: GenerateRequest, kv_version: int | None, shown: Any = None) -> Any:
    """Make a rendered prompt, which vLLM accepts without another thread. Its cache salt is the KV version.

    `shown` is the prompt of a request with images. Image encodings are cached by name, so the names include the
    version.
    """
    from vllm.inputs import tokens_input

    if shown is not None:
        names = {kind: [f"{name}@{kv_version}" for name in names] for kind, names in shown["mm_hashes"].items()}
        return {**shown, "mm_hashes": names, "cache_salt": str(kv_version)}
    return tokens_input(list(request.token_ids), cache_salt=str(kv_version))


def spans_from_starts(
    starts: list[tuple[str, int]], end: int, version: int | None = None
) -> tuple[WeightVersionSpan, ...]:
    """Make spans that tile `[0, end)` from vLLM's pairs (version label, first token).

    The labels are versions of the base weights. `version`, the version of the call's adapter, replaces them.
    """
    if version is not None:
        return (WeightVersionSpan(version, 0, end),) if end else ()
    ends = [first for _, first in starts[1:]] + [end]
    pairs = zip(starts, ends, strict=True)
    return tuple(WeightVersionSpan(int(label), start, stop) for (label, start), stop in pairs if start < stop)


def finish_reason(request: GenerateRequest, completion: Any) -> FinishReason:
    """Convert vLLM's finish reason. Raises EngineError for an unknown one."""
    reason = completion.finish_reason
    if reason not in ("stop", "length", "abort"):
        raise EngineError(
            f"request {request.request_id}: unknown vLLM finish reason {reason!r}, expected 'stop', 'length' or"
            " 'abort'"
        )
    return FinishReason(reason)


def final_spans(completion: Any, version: int | None = None) -> tuple[WeightVersionSpan, ...]:
    """Return the version spans of a finished CompletionOutput."""
    starts = [(span.version, span.start) for span in completion.weight_versions or ()]
    return spans_from_starts(starts, completion.weight_versions[-1].end, version) if starts else ()


def spans_so_far(
    llm: Any, request_id: str, output: Any, num_tokens: int, version: int | None = None
) -> tuple[WeightVersionSpan, ...] | None:
    """Return the version spans of a streamed request's first `num_tokens` tokens; None if vLLM no longer has the
    request.

    vLLM outputs spans only at the end, so they are read from its internal request state. The engine's current
    version would be wrong for an output that was sampled before an update and read after it.
    """
    if output.finished:
        return final_spans(output.outputs[0], version)
    for state in states_of(llm, request_id):
        starts = state.weight_version_starts
        return spans_from_starts([pair for pair in starts if pair[1] < num_tokens], num_tokens, version)
    return None


def states_of(llm: Any, request_id: str) -> list[Any]:
    """Return vLLM's internal state of a request; empty if the request has ended."""
    processor = llm.output_processor
    states = (processor.request_states.get(internal) for internal in processor.external_req_ids.get(request_id, ()))
    return [state for state in states if state is not None]


def is_unbegun(llm: Any, request_id: str) -> bool:
    """Return True if vLLM has a request and has not output a token of it."""
    states = states_of(llm, request_id)
    return bool(states) and all(state.is_prefilling for state in states)


def add_scores(sampled: SampledTokens, request: GenerateRequest, output: Any, version: int | None = None) -> None:
    """Append the scores of a finished request's prompt, with the weight version of its last step.

    Raises MalformedEngineResponse if the scores do not belong to its tokens.
    """
    start, num_tops = request.sampling.score_from or 0, request.sampling.num_top_logprobs
    token_ids, flat = request.token_ids[start:], output.prompt_logprobs
    spans = final_spans(output.outputs[0], version)
    if output.outputs[0].finish_reason != "length" or flat is None or not spans:
        return  # aborted
    starts, ends = flat.start_indices[-len(token_ids) :], flat.end_indices[-len(token_ids) :]
    if tuple(flat.token_ids[at] for at in starts) != token_ids:
        raise MalformedEngineResponse("vLLM returned prompt logprobs whose token ids differ from the prompt")
    tops: TopLogprobs = ()
    if num_tops:
        tops = tuple(map(_alternatives, repeat(flat), starts, ends, repeat(num_tops), repeat(1)))
    sampled.extend(token_ids, [flat.logprobs[at] for at in starts], tops)
    sampled.set_spans([WeightVersionSpan(spans[-1].version, 0, len(token_ids))])


def to_generation(
    request: GenerateRequest, output: Any, sampled: SampledTokens, load: Load, version: int | None = None
) -> Generation:
    """Make the Generation of a finished vLLM RequestOutput; `sampled` has its tokens.

    `output` is None for a request that was aborted before it reached vLLM.
    """
    if output is None:
        return sampled.generation(request.request_id, FinishReason.ABORT, load=load)
    completion = output.outputs[0]
    if request.sampling.score_from is None:
        stamp(sampled, final_spans(completion, version))
    generation = sampled.generation(
        request.request_id,
        finish_reason(request, completion),
        # After a preemption vLLM reports the cache hits of the repeated prefill, which can exceed the prompt.
        cached_tokens=min(output.num_cached_tokens or 0, len(request.token_ids)),
        load=load,
    )
    times = output.metrics
    if times is None or not times.first_token_ts:
        return generation
    return replace(generation, decode_s=times.last_token_ts - times.first_token_ts)


def translate(error: Exception) -> AgentLoopError:
    """Convert an error of vLLM to an agentloop error."""
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, AgentLoopError):
        return error
    if isinstance(error, EngineDeadError):
        return EngineLost("the vLLM engine process has exited")
    if isinstance(error, RetryableRequestError):
        return EnginePaused(one_line(error))
    if isinstance(error, VLLMClientError):
        return InvalidRequest(one_line(error))
    if isinstance(error, GracefulHTTPError):
        return Overloaded(one_line(error))
    return EngineError(f"vLLM: {one_line(error)}")
