"""Detection of weights that were transferred correctly but break the model (NaN or uniform logits).

Checksums cannot detect them: they also match if the trainer multiplied a layer by 1e30. After a commit an engine
runs `canary_request` before any other request, and refuses the weights if `find_weight_fault` returns a fault. A
replica whose generations stay at the logprob of a uniform distribution reports it in `degraded`
(`UniformLogprobWatch`).
"""

from __future__ import annotations

import math
import uuid

from agentloop.engine.interface import EngineInfo
from agentloop.types import GenerateRequest, Generation, SamplingParams
from agentloop.values.capabilities import Feature

CANARY_PREFIX = "/canary-"
"""Requests with this id prefix are scheduled first (`engines/*/scheduler.py`). Ids of user requests
begin with the id of a rollout or session, which contains no slash."""

_MIN_DEADLINE_S = 10.0
_MAX_DEADLINE_S = 50.0  # below the fleet's `resume_timeout_s`, so that the engine reports the reason
_STEPS_ALLOWED = 8  # the canary needs one step; the others are a margin for a busy host

_NUM_PROMPT_TOKENS = 4  # prompt and sampled token are shorter than a KV block, so the prefix cache stores nothing
_TOLERANCE = 1e-3  # nats; uniform logits yield -ln(vocabulary) up to float32 rounding
_NUM_IN_A_ROW = 16  # generations; a good model samples a token at the uniform logprob about once in thousands


def canary_deadline_s(slow_step_s: float) -> float:
    """Return the deadline of a canary check in seconds after the resume.

    `slow_step_s` is the duration of the engine's slowest recent step.
    """
    return min(max(_MIN_DEADLINE_S, _STEPS_ALLOWED * slow_step_s), _MAX_DEADLINE_S)


def canary_request(info: EngineInfo) -> GenerateRequest:
    """Return the request that tests new weights: a fixed prompt and one sampled token."""
    # An engine that returns sampling masks requires a `top_k`. All ids are kept, because equal logits are only
    # detected if the distribution is not truncated.
    top_k = 0 if Feature.GREEDY in info.features else info.vocab_size
    sampling = SamplingParams(max_tokens=1, num_top_logprobs=1, top_k=top_k)
    prompt = tuple(range(min(_NUM_PROMPT_TOKENS, info.vocab_size)))
    return GenerateRequest(CANARY_PREFIX + uuid.uuid4().hex, prompt, sampling, _MAX_DEADLINE_S)


def find_weight_fault(answer: Generation, vocab_size: int) -> str | None:
    """Return the fault of the weights that produced this answer to `canary_request`, or None."""
    tops = [logprob for alternatives in answer.top_logprobs for _, logprob in alternatives]
    logprobs = [*answer.logprobs, *tops]
    if not tops or not all(map(math.isfinite, logprobs)):
        return "the logits of a fixed prompt are not finite"
    # The most likely token has the uniform logprob only if all tokens have it.
    if max(logprobs) <= _TOLERANCE - math.log(vocab_size):
        return "the logits of a fixed prompt are all equal"
    return None


class UniformLogprobWatch:
    """Counts an engine's consecutive generations whose last token has the logprob of a uniform distribution."""

    def __init__(self) -> None:
        self._num_uniform = 0

    @property
    def is_uniform(self) -> bool:
        """True if sampled logprobs stay at -ln(vocabulary)."""
        return self._num_uniform >= _NUM_IN_A_ROW

    def see(self, generation: Generation, vocab_size: int) -> None:
        """Count a generation. A generation without tokens has no effect."""
        for logprob in generation.logprobs[-1:]:
            is_uniform = not math.isfinite(logprob) or abs(logprob + math.log(vocab_size)) <= _TOLERANCE
            self._num_uniform = self._num_uniform + 1 if is_uniform else 0
