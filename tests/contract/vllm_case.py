"""The real vLLM engine's case with the shipped policy: on the GPU if there is one, else on CPU.

float32, because the suite compares greedy tokens across prefill and decode. No `fresh`: every start takes half a
minute, and `tests/servers/engines/vllm/test_vllm_weights.py` makes that comparison once.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.contract.cases import EngineCase

POLICY = Path(__file__).parents[2] / "examples" / "tiny_policy"
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


async def start_vllm_case() -> EngineCase:
    temporary = Path(tempfile.mkdtemp())
    _TEMPORARY.append(temporary)
    write_poisoned(POLICY / "v0", temporary / "poisoned")
    tokenizer = Tokenizer.from_file(str(POLICY / "v0" / "tokenizer.json"))
    engine = VllmEngine(vllm_config(POLICY / "v0"))
    await engine.start()
    return EngineCase(
        "vllm",
        engine,
        checkpoints=(str(POLICY / "v0"), str(POLICY / "v1")),
        failing_checkpoint=lambda: str(temporary / "poisoned"),
        long_tokens=160,
        text_of=lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False),
        stop_id=tokenizer.token_to_id("<|im_end|>"),
    )


async def stop_vllm_case(case: EngineCase) -> None:
    await case.engine.close()
    while _TEMPORARY:
        shutil.rmtree(_TEMPORARY.pop())
