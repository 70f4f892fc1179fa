"""The real vLLM engine's case with the shipped policy: on the GPU if there is one, else on CPU.

float32, because the suite compares greedy tokens across prefill and decode. No `fresh`: every start takes half a
minute, and `tests/servers/engines/vllm/test_vllm_weights.py` makes that comparison once.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer

from agentloop.request_watch import ReportPace
from agentloop.sampling import LogprobsMode
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.contract.cases import EngineCase
from tests.contract.policy_model import NUM_SHARDS, POLICY, allowed_by, logit_error, logits_of, write_poisoned

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


async def start_vllm_case() -> EngineCase:
    temporary = Path(tempfile.mkdtemp())
    _TEMPORARY.append(temporary)
    poisoned = temporary / "poisoned"
    write_poisoned(POLICY / "v0", poisoned)
    tokenizer = Tokenizer.from_file(str(POLICY / "v0" / "tokenizer.json"))
    pace = ReportPace(interval_s=0.02)
    config = vllm_config(
        POLICY / "v0",
        logprobs_mode=LogprobsMode.BOTH,
        pace=pace,
        scheduling_policy="priority",
        worker_extension="tests.support.transfer.spoiling.SpoilingWorker",
    )
    engine = VllmEngine(config)
    await engine.start()

    def spoil(directory: str) -> None:
        (Path(directory) / "spoil").touch()  # see `SpoilingWorker`
        (Path(directory) / "model.safetensors").unlink()  # on CPU the commit reads it

    return EngineCase(
        "vllm",
        engine,
        checkpoints=(str(POLICY / "v0"), str(POLICY / "v1")),
        failing_checkpoint=lambda: str(shutil.copytree(POLICY / "v1", temporary / "failing", dirs_exist_ok=True)),
        spoil=spoil,
        poisoned=str(poisoned),
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
