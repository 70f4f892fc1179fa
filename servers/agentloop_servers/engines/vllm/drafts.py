"""Fixes for the verification of draft tokens, installed in vLLM's worker processes.

Two bugs in the first generation of vLLM 0.32's model runners are fixed here:

- On CPU, a kernel distributes each request's temperature, top-k and top-p to its drafts but writes them to a copy
  of
  its output. Drafts are then sampled with uninitialized parameters, without an error.
- A step without drafts crashes the engine if one of its requests has a top-k.
"""

from __future__ import annotations

from typing import Any

import torch


def install(model_runner: Any, _: str) -> None:
    """Patch the worker's rejection sampler. Call once, after the worker's start."""
    from vllm.v1.sample import rejection_sampler

    if model_runner.device.type == "cpu":
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    apply_top_k_top_p = rejection_sampler.apply_top_k_top_p

    def apply_to_drafts(logits: torch.Tensor, *cuts: torch.Tensor | None) -> torch.Tensor:
        return apply_top_k_top_p(logits, *cuts) if len(logits) else logits

    rejection_sampler.apply_top_k_top_p = apply_to_drafts


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its tokens, and replace `replace_from` with `replace_to`."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.where(x != replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
