"""Scores of prompts in bounded memory: the half that runs inside vLLM's worker processes.

vLLM 0.32's first generation of model runners makes the logits of all tokens that a step has of a request's prompt
at once, and their float32 log-softmax beside them: 2 * 4 bytes * vocabulary * tokens. Here they exist for a window
of tokens at a time. The second generation has windows of its own, of 1,024 tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def install(model_runner: Any, window_tokens: str) -> None:
    """Make a worker's model runner score prompts by windows of so many tokens. Call once, after its start."""
    at_once = getattr(model_runner, "_get_prompt_logprobs_dict", None)
    if at_once is not None:
        model_runner._get_prompt_logprobs_dict = partial(
            at_once.__func__, _ByWindows(model_runner, int(window_tokens))
        )


class _ByWindows:
    """A model runner as `_get_prompt_logprobs_dict` sees it: model and sampler, which hands on hidden states until
    it gathers from their logits."""

    def __init__(self, model_runner: Any, window_tokens: int) -> None:
        self._model_runner = model_runner
        self._window_tokens = window_tokens
        self.model = self.sampler = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_runner, name)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def compute_logprobs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def gather_logprobs(
        self, hidden_states: torch.Tensor, num_top: int, token_ids: torch.Tensor
    ) -> tuple[Any, ...]:
        """Return ids, logprobs and ranks of all windows, as the sampler does of one."""
        model, sampler, size = self._model_runner.model, self._model_runner.sampler, self._window_tokens
        windows = [
            sampler.gather_logprobs(sampler.compute_logprobs(model.compute_logits(hidden)), num_top, ids)
            for hidden, ids in zip(hidden_states.split(size), token_ids.split(size), strict=True)
        ]
        return tuple(torch.cat(parts) for parts in zip(*(window[:3] for window in windows), strict=True))
