"""The shipped policy as an independent model: its logits and its grammar, for the cases of real engines."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xgrammar
from safetensors.torch import load_file, save_file

from agentloop.types import BoolArray, Constraint, FloatArray
from agentloop_servers.engines.common.constraints import structural_tag

POLICY = Path(__file__).parents[2] / "examples" / "tiny_policy"
BFLOAT16_ROUNDING = 2.0**-8  # unit roundoff of bfloat16, in which the residual stream is rounded too
CPU_ROUNDING = 2.0**-24  # unit roundoff of float32
NUM_SHARDS = int(os.environ.get("CONTRACT_TENSOR_PARALLEL", "1"))
GPU_ROUNDING = 2.0**-10
"""Unit roundoff of TF32, whose mantissa is truncated to 10 bits: GPUs use it for float32 attention products
(the default of Triton's `tl.dot`), and float32 for others."""


def write_poisoned(source: Path, target: Path) -> None:
    """Write a well-formed checkpoint whose first layer's weights are NaN."""
    target.mkdir(parents=True)
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name] * float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@cache
def _model(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits_of(folder: str, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> FloatArray:
    with torch.inference_mode():
        logits: FloatArray = _model(folder, dtype)(torch.tensor([list(token_ids)])).logits[0].float().numpy()
    return logits


def logit_error(folder: str, dtype: str = "float32") -> float:
    """Return the relative error of the logits.

    Each layer has two rounded products in series; errors of random sign add up as the root of their number.
    """
    rounding = GPU_ROUNDING if torch.cuda.is_available() else CPU_ROUNDING
    if dtype == "bfloat16":
        rounding = BFLOAT16_ROUNDING
    return rounding * math.sqrt(2 * _model(folder).config.num_hidden_layers)


@cache
def _grammar(constraint: Constraint, stop_ids: tuple[int, ...]) -> tuple[Any, int]:
    tokenizer, size = (
        transformers.AutoTokenizer.from_pretrained(POLICY / "v0"),
        _model(str(POLICY / "v0")).config.vocab_size,
    )
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=list(stop_ids))
    compiler, tag = xgrammar.GrammarCompiler(vocabulary), structural_tag(constraint)
    if tag is None:
        return compiler.compile_regex(constraint.text), size
    return compiler.compile_structural_tag(tag), size


def allowed_by(constraint: Constraint, token_ids: Sequence[int], stop_ids: Sequence[int]) -> BoolArray:
    grammar, size = _grammar(constraint, tuple(stop_ids))
    matcher, mask, rows = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, size), []
    for token_id in token_ids:
        matcher.fill_next_token_bitmask(mask, 0)
        rows.append(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:size].astype(np.bool_))
        assert matcher.accept_token(token_id)
    return np.array(rows)
