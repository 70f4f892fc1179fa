"""Verification of drafts: the half that runs inside vLLM's worker processes.

Two faults of vLLM 0.32's first generation of model runners are mended here:

- On a CPU each draft gets its request's temperature, top-k and top-p by a kernel that writes into a copy of its
  output. Samples are then under whatever the memory held, and vLLM says nothing.
- A step without any draft ends the engine if a request in it has a top-k.
"""

from __future__ import annotations

from typing import Any

import torch


def install(model_runner: Any, _: str) -> None:
    """Mend the worker's rejection sampler. Call once, after its start."""
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
    """Repeat each request's value for its tokens, with `replace_to` in place of `replace_from`."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.where(x != replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
