"""Write the 4B model on this machine, and fill vLLM's cache of its compiled graphs, so that later starts are fast.

    python -m tests.benchmarks.gpu_warm_up --engine vllm

The bare engine is started once with a small KV cache, samples a few tokens, and is stopped. SGLang compiles no
graphs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from agentloop_servers.config.service import ServiceConfig
from tests.benchmarks import report
from tests.benchmarks.gpu_bare import ENGINES
from tests.benchmarks.gpu_models import model_folder
from tests.benchmarks.shapes import SHAPES

KV_MIB = 2048
GPU_SHARE = 0.2  # other processes use the GPU too


async def start_once(config: ServiceConfig) -> float:
    """Return the seconds of a start, imports included."""
    began_at = time.perf_counter()
    engine = ENGINES[config.engine.kind](config)
    await asyncio.to_thread(engine.load)
    await engine.start()
    seconds = time.perf_counter() - began_at
    try:
        await engine.sample("warm", list(range(100, 200)), 8)
    finally:
        await engine.close()
    return seconds


def main() -> None:
    """Write the model, and start the engine on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument(
        "--max-running", type=int, default=512, help="as the later ones have it: graphs depend on it"
    )
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    is_cpu = options.device == "cpu"
    shape = options.shape or ("tiny" if is_cpu else "qwen3-4b")
    began_at = time.perf_counter()
    model = model_folder(shape, options.device)
    model_s = time.perf_counter() - began_at
    engine = {
        "kind": options.engine,
        "device": options.device,
        "dtype": "float32" if is_cpu else "bfloat16",
        "max_running": 8 if is_cpu else options.max_running,
        "block_size": 32 if is_cpu else 16,
        "kv_cache_mib": 64 if is_cpu else KV_MIB,
        "gpu_memory_utilization": GPU_SHARE,
        "max_context_tokens": options.context,
    }
    config = ServiceConfig.model_validate({"model": str(model), "mode": "debug", "engine": engine, "port": 0})
    seconds = {"model_s": model_s}
    if options.engine == "vllm":
        seconds["start_s"] = asyncio.run(start_once(config))
    report.finish("Model and graphs", {"": report.table(("", "s"), list(seconds.items()))}, seconds, options.out)
    sys.exit(0)


if __name__ == "__main__":
    main()
