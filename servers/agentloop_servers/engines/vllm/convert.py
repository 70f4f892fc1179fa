"""Our requests as vLLM's, vLLM's outputs and errors as ours. Values only: no state, nothing awaited."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any

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
    Load,
    SamplingParams,
    TopLogprobs,
    WeightVersionSpan,
)
from agentloop.values.checks import LOGPROB_SENTINEL, MAX_BIAS
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.common.constraints import structural_tag
from agentloop_servers.engines.common.process import one_line

RAW_TOKEN_ID = -1
"""The id under which a raw logprob travels, beside that of the sampled token: vLLM merges what has one id."""


def add_completion(sampled: SampledTokens, completion: Any, num_top_logprobs: int) -> None:
    """Append the tokens of one vLLM CompletionOutput; `stamp` sets their versions.

    Raises MalformedEngineResponse if its logprobs are not those of its tokens.
    """
    token_ids, flat = list(completion.token_ids), completion.logprobs
    if not token_ids:
        return
    num_own = 2 if sampled.logprobs_mode is LogprobsMode.BOTH else 1
    has_one_each = num_own == 1 and not num_top_logprobs
    starts = range(len(token_ids)) if has_one_each or flat is None else flat.start_indices
    if flat is None or [flat.token_ids[start] for start in starts] != token_ids:
        raise MalformedEngineResponse("vLLM's logprobs are not those of its tokens")
    raw_logprobs: list[float] = []
    if num_own == 2:
        if any(flat.token_ids[start + 1] != RAW_TOKEN_ID for start in starts):
            raise MalformedEngineResponse("vLLM's logprobs have no raw ones beside them")
        raw_logprobs = [flat.logprobs[start + 1] for start in starts]
    tops: TopLogprobs = ()
    if num_top_logprobs:
        ends, num_tops = flat.end_indices, repeat(num_top_logprobs)
        tops = tuple(map(_alternatives, repeat(flat), starts, ends, num_tops, repeat(num_own)))
    sampled.extend(token_ids, [flat.logprobs[start] for start in starts], tops, raw_logprobs)


def add_so_far(sampled: SampledTokens, llm: Any, request: GenerateRequest, version: int | None = None) -> None:
    """Append an unfinished request's tokens beyond `sampled`, with versions; none if it has ended.

    They are read from vLLM's own record of the request, which it outputs only at the end.
    """
    processor, start = llm.output_processor, len(sampled)
    for internal_id in processor.external_req_ids.get(request.request_id, ()):
        state = processor.request_states[internal_id]
        token_ids = state.detokenizer.output_token_ids[start:]
        if token_ids:
            new = SimpleNamespace(token_ids=token_ids, logprobs=state.logprobs_processor.logprobs[start:])
            add_completion(sampled, new, request.sampling.num_top_logprobs)
            stamp(sampled, spans_from_starts(state.weight_version_starts, len(sampled), version))


def _alternatives(
    flat: Any, start: int, end: int, num_top_logprobs: int, num_own: int
) -> tuple[tuple[int, float], ...]:
    """Return the alternatives at one position of vLLM's FlatLogprobs.

    It has `num_own` entries of the sampled token, then the likeliest ones; these lack it if vLLM has merged pieces.
    """
    places = list(range(start + num_own, end))
    if len(places) < num_top_logprobs:
        places.append(start)
    places.sort(key=flat.ranks.__getitem__)
    # What sampling excludes (top-k, top-p, a constraint) has a logprob of minus infinity.
    return tuple(
        (flat.token_ids[place], flat.logprobs[place]) for place in places if flat.logprobs[place] > LOGPROB_SENTINEL
    )


def stamp(sampled: SampledTokens, spans: tuple[WeightVersionSpan, ...]) -> None:
    """Set the versions of all tokens so far. Raises MalformedEngineResponse if the spans do not tile them."""
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
) -> Any:
    """Make vLLM's SamplingParams, which stop at `stop_token_ids` only. `eos_token_id`: the tokenizer's.

    Raises UnsupportedParameter for a constraint that only a bias keeps from ending without a stop.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    constraint, bias = sampling.constraint, dict(sampling.logit_bias)
    if constraint is not None and eos_token_id is not None and eos_token_id not in sampling.stop_token_ids:
        # vLLM lets it end a constraint all the same; it would not end the request, and anything could follow it.
        if not can_bias:
            raise UnsupportedParameter(
                f"with speculative a constraint needs the tokenizer's end, {eos_token_id}, in stop_token_ids",
                param="stop_token_ids",
            )
        bias[eos_token_id] = -MAX_BIAS

    return VllmSamplingParams(
        max_tokens=max_tokens,
        # vLLM bans the tokenizer's end for as long too; without stop tokens nothing is to be banned.
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
        # 0: the sampled token's only. A raw one takes the place of an alternative (`raw_logprobs.py`).
        logprobs=sampling.num_top_logprobs + (logprobs_mode is LogprobsMode.BOTH),
        flat_logprobs=True,
        detokenize=False,
        # One final output costs the front end about half of what a stream of deltas does.
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
    )


def scoring_params(sampling: SamplingParams, *, reads_cache: bool) -> Any:
    """Make vLLM's SamplingParams that score a prompt: its plain log-softmax, and one token that is left out.

    With `reads_cache` what the prefix cache has of the prompt is not scored.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        prompt_logprobs=sampling.num_top_logprobs,
        skip_reading_prefix_cache=not reads_cache,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def structured_outputs(constraint: Constraint) -> Any:
    """Make vLLM's form of a constraint."""
    from vllm.sampling_params import StructuredOutputsParams

    tag = structural_tag(constraint)
    return StructuredOutputsParams(structural_tag=tag, regex=None if tag is not None else constraint.text)


def tokens_prompt(request: GenerateRequest, kv_version: int | None, shown: Any = None) -> Any:
    """Make a rendered prompt, which vLLM takes without a detour over a thread; its salt is the KV version.

    `shown` is the prompt of a request with images, whose encodings are cached by name: names have the version too.
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

    The labels are of the base weights; `version` is that of the call's adapter, and takes their place.
    """
    if version is not None:
        return (WeightVersionSpan(version, 0, end),) if end else ()
    ends = [first for _, first in starts[1:]] + [end]
    pairs = zip(starts, ends, strict=True)
    return tuple(WeightVersionSpan(int(label), start, stop) for (label, start), stop in pairs if start < stop)


def finish_reason(request: GenerateRequest, completion: Any) -> FinishReason:
    """Translate vLLM's reason for a generation's end. Raises EngineError for any other."""
    reason = completion.finish_reason
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"request {request.request_id}: vLLM ended it with {reason!r}")
    return FinishReason(reason)


def final_spans(completion: Any, version: int | None = None) -> tuple[WeightVersionSpan, ...]:
    """Return the version spans of a finished CompletionOutput."""
    starts = [(span.version, span.start) for span in completion.weight_versions or ()]
    return spans_from_starts(starts, completion.weight_versions[-1].end, version) if starts else ()


def spans_so_far(
    llm: Any, request_id: str, output: Any, num_tokens: int, version: int | None = None
) -> tuple[WeightVersionSpan, ...] | None:
    """Return the version spans of a streamed request's first `num_tokens` tokens; None if vLLM has dropped it.

    vLLM outputs spans only at the end, so its own record is read: the engine's present version may be newer than
    a piece that waited to be read.
    """
    if output.finished:
        return final_spans(output.outputs[0], version)
    processor = llm.output_processor
    for internal_id in processor.external_req_ids.get(request_id, ()):
        starts = processor.request_states[internal_id].weight_version_starts
        return spans_from_starts([pair for pair in starts if pair[1] < num_tokens], num_tokens, version)
    return None


def is_unbegun(llm: Any, request_id: str) -> bool:
    """Tell if vLLM has a request and has output no token of it."""
    processor = llm.output_processor
    states = [processor.request_states.get(internal) for internal in processor.external_req_ids.get(request_id, ())]
    return bool(states) and all(state is not None and state.is_prefilling for state in states)


def add_scores(sampled: SampledTokens, request: GenerateRequest, output: Any, version: int | None = None) -> None:
    """Append the scores of a finished request's prompt, under the version of its last step.

    Raises MalformedEngineResponse if they are not those of its tokens.
    """
    start, num_tops = request.sampling.score_from or 0, request.sampling.num_top_logprobs
    token_ids, flat = request.token_ids[start:], output.prompt_logprobs
    spans = final_spans(output.outputs[0], version)
    if output.outputs[0].finish_reason != "length" or flat is None or not spans:
        return  # it was aborted
    starts, ends = flat.start_indices[-len(token_ids) :], flat.end_indices[-len(token_ids) :]
    if tuple(flat.token_ids[at] for at in starts) != token_ids:
        raise MalformedEngineResponse("vLLM's prompt logprobs are not those of the prompt")
    tops: TopLogprobs = ()
    if num_tops:
        tops = tuple(map(_alternatives, repeat(flat), starts, ends, repeat(num_tops), repeat(1)))
    sampled.extend(token_ids, [flat.logprobs[at] for at in starts], tops)
    sampled.set_spans([WeightVersionSpan(spans[-1].version, 0, len(token_ids))])


def to_generation(
    request: GenerateRequest, output: Any, sampled: SampledTokens, load: Load, version: int | None = None
) -> Generation:
    """Make the Generation of a finished vLLM RequestOutput; `sampled` has its tokens.

    `output` is None for a request that was aborted before vLLM saw it.
    """
    if output is None:
        return sampled.generation(request.request_id, FinishReason.ABORT, load=load)
    completion = output.outputs[0]
    if request.sampling.score_from is None:
        stamp(sampled, final_spans(completion, version))
    generation = sampled.generation(
        request.request_id,
        finish_reason(request, completion),
        # A request that was preempted and prefilled again reports that prefill's hits, past its prompt too.
        cached_tokens=min(output.num_cached_tokens or 0, len(request.token_ids)),
        load=load,
    )
    times = output.metrics
    if times is None or not times.first_token_ts:
        return generation
    return replace(generation, decode_s=times.last_token_ts - times.first_token_ts)


def translate(error: Exception) -> AgentLoopError:
    """Translate an error of vLLM to ours."""
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, AgentLoopError):
        return error
    if isinstance(error, EngineDeadError):
        return EngineLost("the vLLM engine process is gone")
    if isinstance(error, RetryableRequestError):
        return EnginePaused(one_line(error))
    if isinstance(error, VLLMClientError):
        return InvalidRequest(one_line(error))
    if isinstance(error, GracefulHTTPError):
        return Overloaded(one_line(error))
    return EngineError(f"vLLM: {one_line(error)}")
