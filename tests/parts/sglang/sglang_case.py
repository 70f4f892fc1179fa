"""The engine case of the real SGLang with the shipped policy: on the GPU if there is one, else on CPU.

float32 where possible, because the suite compares greedy tokens across prefill and decode. On CUDA, SGLang's
kernels do not support float32, and bfloat16 may differ in ties.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from agentloop.engine.request_watch import ReportPace
from agentloop.values.sampling import LogprobsMode
from agentloop_sglang.config import SglangConfig
from agentloop_sglang.engine import SglangEngine
from tests.contract.cases import EngineCase
from tests.contract.policy_model import NUM_SHARDS, POLICY, allowed_by, logit_error, logits_of, write_poisoned

DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
_TEMPORARY: list[Path] = []


def sglang_config(**changed: object) -> SglangConfig:
    """Return the config of a small engine with the shipped policy."""
    fields: dict[str, object] = {
        "model": str(POLICY / "v0"),
        "initial_version": 0,
        "dtype": DTYPE,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "block_size": 16,
        "kv_cache_memory_bytes": 128 * 2**20,
        "gpu_memory_utilization": 0.1,  # other processes may use the GPU
        "tensor_parallel_size": NUM_SHARDS,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "enforce_eager": True,
    }
    return SglangConfig(**{**fields, **changed})  # type: ignore[arg-type]


async def start_sglang_case() -> EngineCase:
    temporary = Path(tempfile.mkdtemp())
    _TEMPORARY.append(temporary)
    write_poisoned(POLICY / "v0", temporary / "poisoned")
    tokenizer = Tokenizer.from_file(str(POLICY / "v0" / "tokenizer.json"))
    pace = ReportPace(interval_s=0.02)
    engine = SglangEngine(
        sglang_config(logprobs_mode=LogprobsMode.BOTH, pace=pace, scheduling_policy="priority", progress_tokens=2)
    )
    await engine.start()
    return EngineCase(
        "sglang",
        engine,
        checkpoints=(str(POLICY / "v0"), str(POLICY / "v1")),
        poisoned=str(temporary / "poisoned"),
        long_tokens=160,
        text_of=lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False),
        stop_id=tokenizer.token_to_id("<|im_end|>"),
        logits_of=logits_of,
        logit_error=logit_error(str(POLICY / "v0"), DTYPE),
        rounded_logits_of=partial(logits_of, dtype=torch.bfloat16) if DTYPE == "bfloat16" else None,
        allowed_by=allowed_by,
    )


async def stop_sglang_case(case: EngineCase) -> None:
    await case.engine.close()
    while _TEMPORARY:
        shutil.rmtree(_TEMPORARY.pop())
