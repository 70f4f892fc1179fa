"""Step times: the seconds an engine takes, as two curves that are measured once for a model and a GPU.

    prefill(x) = a + b x + c x^2           x: tokens of one prompt, none of them cached
    step(B, C) = alpha + beta B + gamma C  B: sequences of a decode step; C: tokens of all their contexts

The curves are fitted by `tests/gpu/step_times.py`; the defaults are those of an 8B model in bfloat16 on one H200.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The coefficients of both curves, in seconds."""

    prefill_s: float = 6.808e-3  # a
    prefill_token_s: float = 1.996e-5  # b
    prefill_pair_s: float = 5.867e-10  # c
    step_s: float = 5.045e-3  # alpha
    step_sequence_s: float = 1.962e-5  # beta
    step_token_s: float = 3.18e-8  # gamma

    def prefill(self, num_tokens: float, num_cached: float = 0.0) -> float:
        """Return the seconds to compute a prompt of `num_tokens` of which the first `num_cached` are there."""
        num_new = num_tokens - num_cached
        if num_new <= 0:
            return 0.0
        return self.prefill_s + num_new * (self.prefill_token_s + self.prefill_pair_s * (num_tokens + num_cached))

    def turn_share(self, num_context_tokens: float, num_sampled: float, num_observed: float) -> float:
        """Return the seconds that tokens to come add to a full batch: what only they cost, not the step itself.

        They are spread over turns that begin at `num_context_tokens` and grow by all of them.
        """
        mean_context = num_context_tokens + (num_sampled + num_observed) / 2
        sampled_s = num_sampled * (self.step_sequence_s + self.step_token_s * mean_context)
        return sampled_s + num_observed * (self.prefill_token_s + 2 * self.prefill_pair_s * mean_context)
