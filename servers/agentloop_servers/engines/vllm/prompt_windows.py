"""Prompt scores in bounded memory, installed in vLLM's worker processes.

The first generation of vLLM 0.32's model runners computes the logits of all prompt tokens of a step at once, plus
their float32 log-softmax: 2 * 4 bytes * vocabulary size * tokens. This patch computes them for one window of tokens
at a time. The second generation has its own windows of 1,024 tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def install(model_runner: Any, window_tokens: str) -> None:
    """Make a worker's model runner score prompts in windows of `window_tokens`. Call once, after the worker's
    start."""
    at_once = getattr(model_runner, "_get_prompt_logprobs_dict", None)
    if at_once is not None:
        model_runner._get_prompt_logprobs_dict = partial(
            at_once.__func__, _ByWindows(model_runner, int(window_tokens))
        )


class _ByWindows:
    """Replaces the model runner, its model and its sampler for `_get_prompt_logprobs_dict`: passes hidden states on
    unchanged, and computes logits only in `gather_logprobs`, window by window."""

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
        """Return ids, logprobs and ranks of all windows, in the sampler's format."""
        model, sampler, size = self._model_runner.model, self._model_runner.sampler, self._window_tokens
        windows = [
            sampler.gather_logprobs(sampler.compute_logprobs(model.compute_logits(hidden)), num_top, ids)
            for hidden, ids in zip(hidden_states.split(size), token_ids.split(size), strict=True)
        ]
        return tuple(torch.cat(parts) for parts in zip(*(window[:3] for window in windows), strict=True))
