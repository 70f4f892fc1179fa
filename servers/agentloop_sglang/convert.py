"""Our requests as SGLang's, SGLang's outputs and errors as ours. Values only: no state, nothing awaited."""

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
    """Make SGLang's GenerateReqInput, which stops at `stop_token_ids` and nowhere else.

    The sampling parameters travel in our own form in `custom_params` (`scheduler.py`); SGLang's own fields only
    stop the request, and keep their neutral values otherwise.
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
    """Append the tokens of an SGLang output beyond `sampled`: every output repeats all tokens of the request.

    Raises MalformedEngineResponse if its logprobs are not those of its tokens.
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
    """Append the tokens of an unfinished request beyond `sampled`, from SGLang's state, a few steps behind."""
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
    """Append the tokens from index `len(sampled)` on. Every list is of all tokens; `tops` has (logprob, id, ...).

    Raises MalformedEngineResponse if they do not belong together.
    """
    start, end = len(sampled), len(token_ids)
    if start >= end:
        return
    has_raw = sampled.logprobs_mode is LogprobsMode.BOTH
    if list(logprob_ids[start:end]) != list(token_ids[start:end]) or len(logprobs) < end:
        raise MalformedEngineResponse("SGLang's logprobs are not those of its tokens")
    raw_logprobs: list[float] = []
    alternatives: TopLogprobs = ()
    if has_raw or num_top_logprobs:
        if len(tops) < end:
            raise MalformedEngineResponse("SGLang gave alternatives of fewer tokens than it sampled")
        rows = tops[start:end]
        if has_raw:
            if any(not row or row[0][1] != RAW_TOKEN_ID for row in rows):
                raise MalformedEngineResponse("SGLang's logprobs have no raw ones beside them")
            raw_logprobs = [row[0][0] for row in rows]
        if num_top_logprobs:
            alternatives = tuple(map(_alternatives, rows, repeat(int(has_raw)), repeat(num_top_logprobs)))
    sampled.extend(list(token_ids[start:end]), list(logprobs[start:end]), alternatives, raw_logprobs)


def _alternatives(row: Sequence[Any], start: int, num_tops: int) -> tuple[tuple[int, float], ...]:
    # What sampling excludes (top-k, top-p, a constraint) has a logprob of minus infinity.
    pairs = row[start : start + num_tops]
    return tuple((int(pair[1]), float(pair[0])) for pair in pairs if pair[0] > LOGPROB_SENTINEL)


def start_version(starts: list[tuple[int, int]], version: int, num_tokens: int) -> None:
    """Record that a request's tokens from index `num_tokens` on are of `version`; `starts` as in `Call`."""
    while starts and starts[-1][1] >= num_tokens:
        starts.pop()  # of a version that sampled nothing of it
    starts.append((version, num_tokens))


def stamp(sampled: SampledTokens, starts: Sequence[tuple[int, int]]) -> None:
    """Set the versions of all tokens so far. Raises MalformedEngineResponse if the starts do not tile them."""
    num_tokens = len(sampled)
    ends = [first for _, first in starts[1:]] + [num_tokens]
    cut = ((version, first, min(end, num_tokens)) for (version, first), end in zip(starts, ends, strict=True))
    try:
        sampled.set_spans(WeightVersionSpan(version, first, end) for version, first, end in cut if first < end)
    except InvariantBroken as error:
        raise MalformedEngineResponse(f"of SGLang's tokens: {error.message}") from error


def finish_reason(request: GenerateRequest, output: Any) -> FinishReason:
    """Translate SGLang's reason for a generation's end. Raises InvalidRequest if SGLang refused the request,
    Overloaded if it had no room, EngineError for other errors."""
    reason = output["meta_info"]["finish_reason"] or {}
    kind, status, message = reason.get("type"), reason.get("status_code"), str(reason.get("message") or "")
    if kind == "abort" and status == 400:
        raise InvalidRequest(message)
    if kind == "abort" and status == 503:
        raise Overloaded(message)
    if kind not in ("stop", "length", "abort") or (kind == "abort" and status is not None and status >= 500):
        raise EngineError(f"request {request.request_id}: SGLang ended it with {kind!r}: {message}")
    return FinishReason(kind)


def to_generation(request: GenerateRequest, output: Any, sampled: SampledTokens, load: Load) -> Generation:
    """Make the Generation of a finished request; `sampled` has its tokens and versions.

    `output` is None for a request that was aborted before SGLang saw it.
    """
    if output is None:
        return sampled.generation(request.request_id, FinishReason.ABORT, load=load)
    return sampled.generation(
        request.request_id,
        finish_reason(request, output),
        # A request that was prefilled again reports that prefill's hits, past its prompt too.
        cached_tokens=min(int(output["meta_info"].get("cached_tokens") or 0), len(request.token_ids)),
        load=load,
    )


def translate(error: Exception) -> AgentLoopError:
    """Translate an error of SGLang to ours."""
    status = getattr(error, "status_code", None)  # of FastAPI's HTTPException, which it raises without a server too
    if isinstance(error, AgentLoopError):
        return error
    if isinstance(error, ConnectionError):
        return EngineLost(f"SGLang: {one_line(error)}")
    if isinstance(error, ValueError):
        return InvalidRequest(one_line(error))
    if status == 503:
        return Overloaded(str(getattr(error, "detail", error)))
    return EngineError(f"SGLang: {one_line(error)}")
