"""Weights that arrived whole and make noise: how a model is recognised whose logits say nothing.

A layer times 1e30 passes every checksum, and the model then gives each id of its vocabulary the same logit, or NaN.
Two readers: an engine asks `look_request` with the first step after a commit, and refuses weights of which
`noise_problem` names a fault (`EngineLifecycle.begin_look`); a replica whose generations go on at the logprob of
a uniform choice says so in its reports (`NoiseWatch`, a line of `degraded`).
"""

from __future__ import annotations

import math
import uuid

from agentloop.engine import EngineInfo
from agentloop.types import GenerateRequest, Generation, SamplingParams

LOOK_TIMEOUT_S = 10.0
"""The longest that a replica holds its tokens back for the answer."""

_LOOK_TOKENS = 4  # with the sampled one less than a block: no KV of it is kept
_TOLERANCE = 1e-3  # nats; all-equal logits give the uniform logprob within float32's rounding
_NUM_IN_A_ROW = 16  # generations: by chance a token of a good model has that logprob once in thousands
_MIN_TOP_P = 0.5


def look_request(info: EngineInfo) -> GenerateRequest:
    """Return the fixed prompt by which new weights are tested; its answer is one token."""
    sampling = SamplingParams(max_tokens=1, num_top_logprobs=1)
    prompt = tuple(range(min(_LOOK_TOKENS, info.vocab_size)))
    return GenerateRequest(f"look-{uuid.uuid4().hex}", prompt, sampling, LOOK_TIMEOUT_S)


def noise_problem(answer: Generation, vocab_size: int) -> str | None:
    """Return the fault of weights with this answer to `look_request`; None: its logits differ.

    The likeliest id has the uniform logprob only where all ids have it.
    """
    tops = [logprob for alternatives in answer.top_logprobs for _, logprob in alternatives]
    logprobs = [*answer.logprobs, *tops]
    if not tops or not all(map(math.isfinite, logprobs)):
        return "the logits of a fixed prompt are not finite"
    if max(logprobs) <= _TOLERANCE - math.log(vocab_size):
        return "the logits of a fixed prompt are all equal: the model is noise"
    return None


def is_telling(sampling: SamplingParams, logprob: float, vocab_size: int) -> bool:
    """True if this logprob shows that logits differed; never for requests with few ids to choose from."""
    is_narrow = sampling.constraint is not None or sampling.top_k > 0 or sampling.top_p < _MIN_TOP_P
    return not is_narrow and not sampling.logit_bias and logprob > 1.0 - math.log(vocab_size)


class NoiseWatch:
    """The number of an engine's latest generations in a row whose tokens have the uniform logprob, or none."""

    def __init__(self) -> None:
        self._num_uniform = 0

    @property
    def is_noise(self) -> bool:
        """True if sampled logprobs stay at -ln(vocabulary)."""
        return self._num_uniform >= _NUM_IN_A_ROW

    def see(self, generation: Generation, vocab_size: int) -> None:
        """Count a generation; one without tokens says nothing."""
        for logprob in generation.logprobs[-1:]:
            is_uniform = not math.isfinite(logprob) or abs(logprob + math.log(vocab_size)) <= _TOLERANCE
            self._num_uniform = self._num_uniform + 1 if is_uniform else 0
