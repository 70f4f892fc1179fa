"""TRL's AsyncGRPOTrainer without a GPU: torch in the place of the flash-attention kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: Any,
    **kw: Any,
) -> torch.Tensor:
    """Attention over packed segments, causal from each segment's end: [tokens, heads, size], in and out."""
    if kw.get("window_size", (-1, -1)) != (-1, -1) or kw.get("softcap"):
        raise NotImplementedError("sliding windows and soft caps need the kernel")
    parts = []
    for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True):
        own, keys, values = (one.transpose(0, 1)[None] for one in (q[a:b], k[c:d], v[c:d]))
        is_seen = torch.ones(int(b - a), int(d - c), dtype=torch.bool).tril(int((d - c) - (b - a)))
        part = scaled_dot_product_attention(own, keys, values, is_seen, scale=kw["softmax_scale"], enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def use_cpu() -> None:
    """Patch TRL 1.16: its attention kernel, and the look at the GPU's name for its peak speed."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
