"""Thinking Machines' `tinker`: its sampling client."""

from __future__ import annotations

import math
from typing import Any

import tinker
from tinker import types
from verbs import serve


class Sampler:
    """A client that samples, and scores its samples."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        service = tinker.ServiceClient(base_url=url, api_key="tml-none")
        sampler = service.create_sampling_client(base_model="default").result()
        self.service, self.sampler = service, sampler

    def rollouts(self) -> dict[str, Any]:
        """Sample all prompts at once, and compare the logprobs with the scores of the sampled tokens."""
        sampler, served = self.sampler, []
        for prompt, sequence in self._sampled(types.SamplingParams(max_tokens=16)):
            whole = types.ModelInput.from_ints([*prompt, *sequence.tokens])
            scores = sampler.compute_logprobs(whole).result()[len(prompt) :]
            pairs = zip(scores, sequence.logprobs, strict=True)
            assert all(math.isclose(one, other, abs_tol=0.01) for one, other in pairs), (scores, sequence.logprobs)
            served.append((prompt, sequence.tokens))
        return {"served": served}

    def killed(self) -> dict[str, Any]:
        """Sample without an end of text, so that the calls are long enough to lose a replica."""
        sampled = self._sampled(types.SamplingParams(max_tokens=900, stop=[]))
        return {"served": [(prompt, sequence.tokens) for prompt, sequence in sampled]}

    def _sampled(self, params: types.SamplingParams) -> list[tuple[list[int], types.SampledSequence]]:
        futures = [self.sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in self.prompts]
        return [
            (prompt, future.result().sequences[0]) for prompt, future in zip(self.prompts, futures, strict=True)
        ]


serve(Sampler)
