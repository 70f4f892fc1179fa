"""Conversion of requests to SGLang's types, and of SGLang's outputs and errors to agentloop's. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from agentloop.errors import (
    AgentLoopError,
    EngineError,
    EngineLost,
    InvalidRequest,
    InvariantBroken,
    MalformedEngineResponse,
    Overloaded,
)
from agentloop.types import FinishReason, GenerateRequest, Generation, Load, TopLogprobs, WeightVersionSpan
from agentloop.values.checks import LOGPROB_SENTINEL
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.common.process import one_line
from agentloop_sglang.requests import (
    PARAMETER,
    RAW_TOKEN_ID,
    constraint_to_text,
    sampling_to_text,
)


def generate_input(
    request: GenerateRequest,
    max_tokens: int,
    kv_version: int,
    *,
    is_streamed: bool,
    logprobs_mode: LogprobsMode,
) -> Any:
    """Convert a request to SGLang's GenerateReqInput, which stops only at `stop_token_ids`.

    The sampling parameters are passed in our own format in `custom_params` (`scheduler.py`). SGLang's own fields
    only contain the stop conditions; all others keep their neutral values.
    """
    from dataclasses import replace

    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling, constraint = request.sampling, request.sampling.constraint
    params: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "custom_params": {PARAMETER: sampling_to_text(replace(sampling, constraint=None))},
    }
    if constraint is not None:
        params["structural_tag"] = constraint_to_text(constraint, sampling.stop_token_ids)
    return GenerateReqInput(
        rid=request.request_id,
        input_ids=list(request.token_ids),
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=-1,
        top_logprobs_num=sampling.num_top_logprobs + (logprobs_mode is LogprobsMode.BOTH),
        stream=is_streamed,
        extra_key=str(kv_version),
        priority=sampling.priority,
        log_metrics=False,
        external_trace_header={"traceparent": request.traceparent} if request.traceparent else None,
    )


def add_output(sampled: SampledTokens, output: Any, num_top_logprobs: int) -> None:
    """Append the tokens of an SGLang output that `sampled` does not have yet. Every output has all tokens so far.

    Raises MalformedEngineResponse if its logprobs do not belong to its tokens.
    """
    facts = output["meta_info"]
    add_tokens(
        sampled,
        output["output_ids"],
        [pair[0] for pair in facts.get("output_token_logprobs") or ()],
        [pair[1] for pair in facts.get("output_token_logprobs") or ()],
        facts.get("output_top_logprobs") or (),
        num_top_logprobs,
    )


def add_so_far(sampled: SampledTokens, state: Any, num_top_logprobs: int) -> None:
    """Append the new tokens of a running request from SGLang's request state, which is a few steps behind."""
    values, ids = state.output_top_logprobs_val, state.output_top_logprobs_idx
    add_tokens(
        sampled,
        state.output_ids,
        state.output_token_logprobs_val,
        state.output_token_logprobs_idx,
        [list(zip(*pair, strict=True)) for pair in zip(values, ids, strict=True)],
        num_top_logprobs,
    )


def add_tokens(
    sampled: SampledTokens,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    logprob_ids: Sequence[int],
    tops: Sequence[Sequence[Any]],
    num_top_logprobs: int,
) -> None:
    """Append the tokens from index `len(sampled)` on. Each list covers all tokens; `tops` has rows of (logprob, id,
    ...).

    Raises MalformedEngineResponse if the lists are inconsistent.
    """
    start, end = len(sampled), len(token_ids)
    if start >= end:
        return
    has_raw = sampled.logprobs_mode is LogprobsMode.BOTH
    if list(logprob_ids[start:end]) != list(token_ids[start:end]) or len(logprobs) < end:
        raise MalformedEngineResponse("SGLang returned logprobs whose token ids differ from the sampled tokens")
    raw_logprobs: list[float] = []
    alternatives: TopLogprobs = ()
    if has_raw or num_top_logprobs:
        if len(tops) < end:
            raise MalformedEngineResponse(
                f"SGLang returned alternatives for {len(tops)} tokens, but sampled {end} tokens"
            )
        rows = tops[start:end]
        if has_raw:
            if any(not row or row[0][1] != RAW_TOKEN_ID for row in rows):
                raise MalformedEngineResponse("SGLang returned a position without its raw logprob")
            raw_logprobs = [row[0][0] for row in rows]
        if num_top_logprobs:
            alternatives = tuple(map(_alternatives, rows, repeat(int(has_raw)), repeat(num_top_logprobs)))
    sampled.extend(list(token_ids[start:end]), list(logprobs[start:end]), alternatives, raw_logprobs)


def _alternatives(row: Sequence[Any], start: int, num_tops: int) -> tuple[tuple[int, float], ...]:
    # Tokens that sampling excludes (top-k, top-p, a constraint) have a logprob of minus infinity: omit them.
    pairs = row[start : start + num_tops]
    return tuple((int(pair[1]), float(pair[0])) for pair in pairs if pair[0] > LOGPROB_SENTINEL)


def start_version(starts: list[tuple[int, int]], version: int, num_tokens: int) -> None:
    """Record that tokens from index `num_tokens` on have the weight version `version`. `starts` is as in `Call`."""
    while starts and starts[-1][1] >= num_tokens:
        starts.pop()  # no token was sampled under this version
    starts.append((version, num_tokens))


def stamp(sampled: SampledTokens, starts: Sequence[tuple[int, int]]) -> None:
    """Set the weight versions of all tokens so far. Raises MalformedEngineResponse unless the starts tile the
    tokens."""
    num_tokens = len(sampled)
    ends = [first for _, first in starts[1:]] + [num_tokens]
    cut = ((version, first, min(end, num_tokens)) for (version, first), end in zip(starts, ends, strict=True))
    try:
        sampled.set_spans(WeightVersionSpan(version, first, end) for version, first, end in cut if first < end)
    except InvariantBroken as error:
        raise MalformedEngineResponse(f"of SGLang's tokens: {error.message}") from error


def finish_reason(request: GenerateRequest, output: Any) -> FinishReason:
    """Convert SGLang's finish reason. Raises InvalidRequest if SGLang rejected the request, Overloaded if it lacked
    capacity, and EngineError for other errors."""
    reason = output["meta_info"]["finish_reason"] or {}
    kind, status, message = reason.get("type"), reason.get("status_code"), str(reason.get("message") or "")
    if kind == "abort" and status == 400:
        raise InvalidRequest(message)
    if kind == "abort" and status == 503:
        raise Overloaded(message)
    if kind not in ("stop", "length", "abort") or (kind == "abort" and status is not None and status >= 500):
        raise EngineError(f"request {request.request_id}: SGLang failed with finish reason {kind!r}: {message}")
    return FinishReason(kind)


def to_generation(request: GenerateRequest, output: Any, sampled: SampledTokens, load: Load) -> Generation:
    """Make the Generation of a finished request; `sampled` has its tokens and versions.

    `output` is None for a request that was aborted before it reached SGLang.
    """
    if output is None:
        return sampled.generation(request.request_id, FinishReason.ABORT, load=load)
    return sampled.generation(
        request.request_id,
        finish_reason(request, output),
        # A repeated prefill reports its own cache hits, which can exceed the prompt.
        cached_tokens=min(int(output["meta_info"].get("cached_tokens") or 0), len(request.token_ids)),
        load=load,
    )


def translate(error: Exception) -> AgentLoopError:
    """Translate an error of SGLang to ours."""
    # FastAPI's HTTPException, which SGLang raises without a server too.
    status = getattr(error, "status_code", None)
    if isinstance(error, AgentLoopError):
        return error
    if isinstance(error, ConnectionError):
        return EngineLost(f"SGLang: {one_line(error)}")
    if isinstance(error, ValueError):
        return InvalidRequest(one_line(error))
    if status == 503:
        return Overloaded(str(getattr(error, "detail", error)))
    return EngineError(f"SGLang: {one_line(error)}")
