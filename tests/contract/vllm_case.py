"""The real vLLM engine's case with the shipped policy: on the GPU if there is one, else on CPU.

float32, because the suite compares greedy tokens across prefill and decode. No `fresh`: every start takes half a
minute, and `tests/servers/engines/vllm/test_vllm_weights.py` makes that comparison once.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentloop.request_watch import ReportPace
from agentloop.sampling import LogprobsMode
from agentloop.types import BoolArray, Constraint, FloatArray
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.convert import structured_outputs
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.contract.cases import EngineCase

POLICY = Path(__file__).parents[2] / "examples" / "tiny_policy"
CPU_ROUNDING = 2.0**-24  # unit roundoff of float32
NUM_SHARDS = int(os.environ.get("CONTRACT_TENSOR_PARALLEL", "1"))
GPU_ROUNDING = 2.0**-10
"""Of TF32, whose 10 bits of mantissa are cut: on GPUs the products of attention in float32 are made in it (Triton's
`tl.dot` by default), the others in float32."""
_TEMPORARY: list[Path] = []


def vllm_config(model: Path, **changed: object) -> VllmConfig:
    """A small engine. On CPU one thread: the tests' process runs beside it."""
    fields: dict[str, object] = {
        "model": str(model),
        "initial_version": 0,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 128 * 2**20,
        "gpu_memory_utilization": 0.1,  # that has to be free: others may be on the GPU
        "tensor_parallel_size": NUM_SHARDS,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "enforce_eager": True,
    }
    return VllmConfig(**{**fields, **changed})  # type: ignore[arg-type]


def write_poisoned(source: Path, target: Path) -> None:
    """A checkpoint in perfect form whose first layer's weights are not numbers."""
    target.mkdir(parents=True)
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name] * float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@cache
def _model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(folder: str, token_ids: Sequence[int]) -> FloatArray:
    with torch.inference_mode():
        logits: FloatArray = _model(folder)(torch.tensor([list(token_ids)])).logits[0].float().numpy()
    return logits


def logit_error(folder: str) -> float:
    """Two rounded products a layer, in series: errors of random sign add up as the root of their number."""
    rounding = GPU_ROUNDING if torch.cuda.is_available() else CPU_ROUNDING
    return rounding * math.sqrt(2 * _model(folder).config.num_hidden_layers)


@cache
def _grammar(constraint: Constraint, stop_ids: tuple[int, ...]) -> tuple[Any, int]:
    tokenizer, size = AutoTokenizer.from_pretrained(POLICY / "v0"), _model(str(POLICY / "v0")).config.vocab_size
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=list(stop_ids))
    compiler, wanted = xgrammar.GrammarCompiler(vocabulary), structured_outputs(constraint)
    if wanted.regex is not None:
        return compiler.compile_regex(wanted.regex), size
    return compiler.compile_structural_tag(wanted.structural_tag), size


def allowed_by(constraint: Constraint, token_ids: Sequence[int], stop_ids: Sequence[int]) -> BoolArray:
    grammar, size = _grammar(constraint, tuple(stop_ids))
    matcher, mask, rows = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, size), []
    for token_id in token_ids:
        matcher.fill_next_token_bitmask(mask, 0)
        rows.append(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:size].astype(np.bool_))
        assert matcher.accept_token(token_id)
    return np.array(rows)


async def start_vllm_case() -> EngineCase:
    temporary = Path(tempfile.mkdtemp())
    _TEMPORARY.append(temporary)
    poisoned = temporary / "poisoned"
    write_poisoned(POLICY / "v0", poisoned)
    tokenizer = Tokenizer.from_file(str(POLICY / "v0" / "tokenizer.json"))
    pace = ReportPace(interval_s=0.02)
    engine = VllmEngine(vllm_config(POLICY / "v0", logprobs_mode=LogprobsMode.BOTH, pace=pace))
    await engine.start()
    return EngineCase(
        "vllm",
        engine,
        checkpoints=(str(POLICY / "v0"), str(POLICY / "v1")),
        # The check of packed copies, which only the CPU build has, finds them; plain copies hold them faithfully.
        failing_checkpoint=None if torch.cuda.is_available() else lambda: str(poisoned),
        long_tokens=160,
        text_of=lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False),
        stop_id=tokenizer.token_to_id("<|im_end|>"),
        logits_of=logits_of,
        logit_error=logit_error(str(POLICY / "v0")),
        allowed_by=allowed_by,
    )


async def stop_vllm_case(case: EngineCase) -> None:
    await case.engine.close()
    while _TEMPORARY:
        shutil.rmtree(_TEMPORARY.pop())
