"""LoRA adapters of the shipped policy, a worker with a corruptible adapter, and the merged models as a check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from agentloop_servers.weight_transfer.vllm_worker import WeightWorker

POLICY = Path(__file__).parents[3] / "examples" / "tiny_policy" / "v0"
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, *, seed: int = 1, rank: int = 4, alpha: float = 8, targets: Sequence[str] = ALL_LINEAR
) -> Path:
    """Write a random adapter that clearly changes the policy."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(POLICY / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets:
            for half, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensor = torch.randn(shape, generator=generator) * 0.05
                tensors[f"base_model.model.{layer}.lora_{half}.weight"] = tensor
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def shipped_policy() -> Any:
    """Return the policy as a transformers model."""
    return transformers.AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)


def merged_model(adapter: Path | None) -> Any:
    """Return the policy with the adapter added to its weights, computed without vLLM."""
    model = shipped_policy()
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
                weights[target] += config["lora_alpha"] / config["r"] * (b @ a)
    return model


class SpoilableWorker(WeightWorker):
    """Our vLLM worker extension, with a method that corrupts an adapter."""

    def spoil_adapter(self, layer: str, index: int) -> None:
        """Change one number of a layer's stacked B."""
        self.model_runner.lora_manager._adapter_manager.modules[layer].lora_b_stacked[index][0, 0, 0, 0] += 1
