"""Scoring calls: logprobs of a prompt's own tokens, without sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agentloop.api.requests import MAX_SCORES, VersionDemandBody
from agentloop.chat.call import ChatCall, ChatModel
from agentloop.errors import InvalidRequest
from agentloop.types import Generation, SamplingParams, TokenScores
from agentloop.values.checks import check_num_top


def score_call(
    prompt_ids: tuple[int, ...],
    start: int,
    num_top: int,
    model: ChatModel,
    demand: VersionDemandBody | None,
    *,
    param: str,
    top_param: str = "top_k",
) -> ChatCall | None:
    """Return the call that scores `prompt_ids[start:]`; None if that range is empty.

    Raises InvalidRequest with `param` if `start` is larger than the prompt's length, and with `top_param` for more
    alternatives than the engines return.
    """
    check_num_top(num_top, model.max_logprobs, top_param)
    if start > len(prompt_ids):
        raise InvalidRequest(
            f"cannot score from position {start - 1}: the prompt has {len(prompt_ids)} tokens. Use a position"
            f" below {len(prompt_ids)}",
            param=param,
        )
    if start == len(prompt_ids):
        return None
    sampling = SamplingParams(max_tokens=1, num_top_logprobs=num_top, score_from=start)
    if demand is not None:
        sampling = replace(sampling, weight_version=demand.to_demand())
    return ChatCall((), sampling, max_tokens=1, prompt_ids=prompt_ids, timeout_s=model.timeout_s)


def check_num_scores(calls: Iterable[ChatCall], param: str) -> None:
    """Raise InvalidRequest with `param` if the calls return more than `MAX_SCORES` logprobs together."""
    num_scores = 0
    for call in calls:
        num_tokens = len(call.prompt_ids or ()) - (call.sampling.score_from or 0)
        num_scores += num_tokens * (1 + call.sampling.num_top_logprobs)
    if num_scores > MAX_SCORES:
        raise InvalidRequest(
            f"the request asks for {num_scores} logprobs, more than the limit of {MAX_SCORES}", param=param
        )


def scores_of(generation: Generation) -> TokenScores:
    """Convert an engine's generation to token scores."""
    [span] = generation.weight_versions
    return TokenScores(generation.token_ids, generation.logprobs, span.version, generation.top_logprobs)
