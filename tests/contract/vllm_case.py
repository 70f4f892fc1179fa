"""The real vLLM engine's case with the shipped policy: on the GPU if there is one, else on CPU.

float32, because the suite compares greedy tokens across prefill and decode. `fresh` is not set: every start takes
half a minute, and `tests/servers/engines/vllm/test_vllm_weights.py` makes that comparison once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from agentloop.engine.request_watch import ReportPace
from agentloop.types import FloatArray
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.vllm.config import Speculative, VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.contract.cases import EngineCase
from tests.contract.policy_model import NUM_SHARDS, POLICY, allowed_by, logit_error, logits_of, write_poisoned
from tests.support.transfer.adapters import ALL_LINEAR, merged_model, write_adapter

_TEMPORARY: list[Path] = []


def vllm_config(model: Path, **changed: object) -> VllmConfig:
    """Return the config of a small engine.

    On CPU it uses one thread, because the test process runs at the same time.
    """
    fields: dict[str, object] = {
        "model": str(model),
        "initial_version": 0,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 128 * 2**20,
        "gpu_memory_utilization": 0.1,  # must be free: other processes may use the GPU
        "tensor_parallel_size": NUM_SHARDS,
        "max_logprobs": 256,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "enforce_eager": True,
        "allow_untested": True,  # `make test-newest`
    }
    return VllmConfig(**{**fields, **changed})  # type: ignore[arg-type]


async def start_speculative_case() -> EngineCase:
    """Start the same engine with n-gram drafts at any load."""
    case = await start_vllm_case(speculative=Speculative(num_tokens=3, max_running=64))
    return replace(case, name="vllm-speculative")


async def start_vllm_case(**changed: object) -> EngineCase:
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
        **changed,
    )
    engine = VllmEngine(config)
    await engine.start()

    def spoil(directory: str) -> None:
        (Path(directory) / "spoil").touch()  # see `SpoilingWorker`
        (Path(directory) / "model.safetensors").unlink()  # on CPU the commit reads this file

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


async def start_adapters_case(folder: Path) -> EngineCase:
    """Start an engine with slots for two adapters by name."""
    config = vllm_config(
        POLICY / "v0",
        logprobs_mode=LogprobsMode.BOTH,
        pace=ReportPace(interval_s=0.02),
        lora_rank=8,
        max_loras=2,
    )
    engine = VllmEngine(config)
    await engine.start()

    @cache
    def adapter(seed: int) -> str:
        rank = 4 if seed % 2 else 8
        targets = ALL_LINEAR if seed % 2 else ALL_LINEAR[:4]
        return str(write_adapter(folder / str(seed), seed=seed, rank=rank, alpha=4 * rank, targets=targets))

    @cache
    def model(directory: str | None) -> Any:
        return merged_model(None if directory is None else Path(directory))

    def logprobs(directory: str | None, prompt: Sequence[int], ids: Sequence[int]) -> FloatArray:
        with torch.inference_mode():
            logits = model(directory)(torch.tensor([[*prompt, *ids]])).logits[0]
        found = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        array: FloatArray = found.numpy()
        return array

    return EngineCase(
        "vllm-adapters",
        engine,
        checkpoints=(str(POLICY / "v0"), str(POLICY / "v1")),
        long_tokens=160,
        adapter=adapter,
        unfit_adapters=_unfit_adapters(folder),
        adapted_logprobs=logprobs,
    )


def _unfit_adapters(folder: Path) -> dict[str, str]:
    high = write_adapter(folder / "high", rank=16)
    weightless = write_adapter(folder / "weightless")
    (weightless / "adapter_model.safetensors").unlink()
    foreign = write_adapter(folder / "foreign")
    tensors = load_file(foreign / "adapter_model.safetensors")
    wide = {name: torch.cat([tensor, tensor], dim=1) for name, tensor in tensors.items() if ".lora_A." in name}
    save_file({**tensors, **wide}, foreign / "adapter_model.safetensors")
    cut = write_adapter(folder / "cut")
    content = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(content[:-8])
    unloadable = write_adapter(folder / "unloadable")  # rejected only by vLLM: it adapts an embedding
    num_ids, num_inputs = load_file(POLICY / "v0" / "model.safetensors")["model.embed_tokens.weight"].shape
    halves = {"A": torch.ones(4, num_inputs), "B": torch.ones(num_ids, 4)}
    embedding = {f"base_model.model.model.embed_tokens.lora_{half}.weight": one for half, one in halves.items()}
    save_file({**tensors, **embedding}, unloadable / "adapter_model.safetensors")
    return {
        "not loaded": str(unloadable),
        "rank 16": str(high),
        "no safetensors": str(weightless),
        "but the served one has": str(foreign),
        "cut off": str(cut),
    }


async def stop_vllm_case(case: EngineCase) -> None:
    await case.engine.close()
    while _TEMPORARY:
        shutil.rmtree(_TEMPORARY.pop())
