"""Scores of a prompt's own tokens, in the terms that the dialects share. Nothing is sampled for them."""

from __future__ import annotations

from dataclasses import replace

from agentloop.api.requests import VersionDemandBody
from agentloop.chat.call import ChatCall, ChatModel
from agentloop.checks import check_num_scores
from agentloop.errors import InvalidRequest
from agentloop.types import Generation, SamplingParams, TokenScores


def score_call(
    prompt_ids: tuple[int, ...],
    start: int,
    num_top: int,
    model: ChatModel,
    demand: VersionDemandBody | None,
    *,
    param: str,
) -> ChatCall | None:
    """Return the call that scores `prompt_ids[start:]`; None if `start` is their end. Raises InvalidRequest naming
    `param` for one beyond it, or for more scores than an answer has."""
    if start > len(prompt_ids):
        raise InvalidRequest(f"{start - 1} is beyond a prompt of {len(prompt_ids)} tokens", param=param)
    check_num_scores(len(prompt_ids) - start, num_top, param)
    if start == len(prompt_ids):
        return None
    sampling = SamplingParams(max_tokens=1, num_top_logprobs=num_top, score_from=start)
    if demand is not None:
        sampling = replace(sampling, weight_version=demand.to_demand())
    return ChatCall((), sampling, max_tokens=1, prompt_ids=prompt_ids, timeout_s=model.timeout_s)


def scores_of(generation: Generation) -> TokenScores:
    """Return the scores that an engine's answer has."""
    [span] = generation.weight_versions
    return TokenScores(generation.token_ids, generation.logprobs, span.version, generation.top_logprobs)
