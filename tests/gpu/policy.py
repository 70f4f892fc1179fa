"""A policy of a known shape for a service: model folders with a tokenizer, and a service config."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from agentloop_servers.config.service import ServiceConfig
from tests.benchmarks.shapes import Shape, write_checkpoint, write_model_folder
from tests.support.records.model_folder import write_folder


def write_policy(
    shape: Shape, tensors: dict[str, torch.Tensor], folder: Path, *, max_context_tokens: int, dtype: str
) -> Path:
    """Write a complete Hugging Face folder.

    The tokenizer is small; ids beyond its vocabulary are never rendered.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder)
    write_model_folder(shape, folder, max_context_tokens=max_context_tokens, dtype=dtype)
    return write_checkpoint(tensors, folder)


def service_config(
    model: Path,
    *,
    device: str,
    dtype: str,
    max_running: int,
    kv_cache_mib: int,
    kind: str = "vllm",
    batch_invariant: bool = False,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    expert_parallel: bool = False,
    gpu_share: float = 1.0,
    quantization: str | None = None,
    **changed: object,
) -> ServiceConfig:
    """Return a config with one replica by default, in eager mode for vLLM.

    `changed` are fields of ServiceConfig.
    """
    is_cpu = device == "cpu"
    engine = {
        "kind": kind,
        "device": device,
        "dtype": dtype,
        "max_running": max_running,
        "block_size": 32 if is_cpu else 16,
        "kv_cache_mib": kv_cache_mib,
        "gpu_memory_utilization": 0.3,  # must be free; the cache has its own size
        "enforce_eager": True,
        "batch_invariant": batch_invariant,
        "tensor_parallel_size": tensor_parallel_size,
        "data_parallel_size": data_parallel_size,
        "expert_parallel": expert_parallel,
        "gpu_share": gpu_share,
        "quantization": quantization,
        "num_cpus": 0.5 if is_cpu else 1.0,
    }
    return ServiceConfig.model_validate(
        {"model": str(model), "model_version": 0, "engine": engine, "port": 0, **changed}
    )


def show_gpus(number: int) -> None:
    """Reserve the host's first GPUs for the service that this process starts; this process keeps its own."""
    torch.cuda.device_count()  # caches the device count; the variable is for the service
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = mine.split(",") if mine else [str(n) for n in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[:number])
