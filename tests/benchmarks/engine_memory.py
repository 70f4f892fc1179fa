"""How one vLLM engine's processes grow under constant load: vLLM by itself, and ours around it.

    python -m tests.benchmarks.engine_memory --minutes 10
    python -m tests.benchmarks.engine_memory --arms ours --kv-mib 256

Arms: `bare` is AsyncLLM alone; `ours` is `VllmEngine` with reports on what runs, as in a replica. The load: 32
requests at a time, prompts of random ids, 64 tokens each. On CPU the pages of the KV cache are taken as blocks are
first used, so a small cache is whole within seconds, and what grows later is something else.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import multiprocessing
import os
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentloop.engine import Progress
from agentloop.sampling import SamplingParams
from agentloop.types import GenerateRequest
from agentloop_servers.engines.vllm.config import VllmConfig, engine_arguments, prepare_environment
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.benchmarks import report

POLICY = Path(__file__).parents[2] / "examples" / "tiny_policy" / "v0"
ARMS = ("bare", "ours")
NUM_AT_ONCE = 32
NUM_TOKENS = 64
SAMPLE_S = 10.0
Sample = tuple[float, dict[str, float]]
"""Seconds since the load began, and MiB by process."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine, and for how long."""

    seconds: float
    kv_mib: int
    min_prompt_tokens: int
    max_prompt_tokens: int


def run_arm(arm: str, load: Load) -> tuple[list[Sample], int]:
    """Return the sizes over time, and the requests that were answered."""
    run = _ours if arm == "ours" else _bare
    return asyncio.run(run(load))


async def _ours(load: Load) -> tuple[list[Sample], int]:
    engine = VllmEngine(_config(load.kv_mib))
    await engine.start()

    async def ask(number: int, prompt: list[int]) -> None:
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        await engine.generate(GenerateRequest(f"r{number}", tuple(prompt), sampling), tell)

    def tell(progress: Progress) -> None:
        """Take a report, as the data plane does."""

    try:
        return await _under_load(ask, load)
    finally:
        await engine.close()


async def _bare(load: Load) -> tuple[list[Sample], int]:
    config = _config(load.kv_mib)
    prepare_environment(config)
    vllm = importlib.import_module("vllm")  # it reads its environment then

    arguments = engine_arguments(config)
    del arguments["worker_extension_cls"]
    llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**arguments))
    params = vllm.SamplingParams(
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=0,
        output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
    )

    async def ask(number: int, prompt: list[int]) -> None:
        async for _output in llm.generate({"prompt_token_ids": prompt}, params, f"r{number}"):
            pass

    try:
        return await _under_load(ask, load)
    finally:
        llm.shutdown()


async def _under_load(ask: Callable[[int, list[int]], Awaitable[None]], load: Load) -> tuple[list[Sample], int]:
    """Ask without a pause, and look at the processes now and then."""
    started, rng, num_asked, samples = time.monotonic(), random.Random(0), 0, []

    async def keep_asking() -> None:
        nonlocal num_asked
        while time.monotonic() - started < load.seconds:
            num_asked += 1
            num_tokens = rng.randint(load.min_prompt_tokens, load.max_prompt_tokens)
            await ask(num_asked, [rng.randrange(5, 400) for _ in range(num_tokens)])

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(keep_asking())
        while time.monotonic() - started < load.seconds:
            await asyncio.sleep(SAMPLE_S)
            samples.append((time.monotonic() - started, _sizes()))
    return samples, num_asked


def _config(kv_mib: int) -> VllmConfig:
    return VllmConfig(
        model=str(POLICY),
        initial_version=0,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=128,
        kv_cache_memory_bytes=kv_mib * 2**20,
        enforce_eager=True,
    )


def _sizes() -> dict[str, float]:
    """Return the MiB of this process and of the engine core."""
    own = psutil.Process()
    cores = [one for one in own.children(recursive=True) if any("VLLM::" in word for word in one.cmdline())]
    sizes = {"front end": own.memory_info().rss / 2**20}
    return sizes | {"engine core": sum(one.memory_info().rss for one in cores) / 2**20}


def main() -> None:
    """Run the arms one after another, each in a process of its own, and print how they grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kv-mib", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(64, 320), metavar=("MIN", "MAX"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = Load(options.minutes * 60, options.kv_mib, *options.prompt_tokens)
    rows: list[list[object]] = []
    found: dict[str, Any] = {}
    for arm in options.arms:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            samples, num_asked = pool.submit(run_arm, arm, load).result()
        found[arm] = samples
        for process in samples[0][1]:
            at_min = np.array([at_s / 60 for at_s, _ in samples])
            mib = np.array([sizes[process] for _, sizes in samples])
            half = len(mib) // 2
            slopes = [float(np.polyfit(at_min[part], mib[part], 1)[0]) for part in (slice(half), slice(half, None))]
            rows.append([arm, process, num_asked, float(mib[0]), float(mib[half]), float(mib[-1]), *slopes])
        print(arm, [(round(at_s), {k: round(v) for k, v in sizes.items()}) for at_s, sizes in samples], flush=True)
    columns = [
        "arm",
        "process",
        "requests",
        "MiB at 10 s",
        "half way",
        "at the end",
        "MiB/min, 1st half",
        "2nd half",
    ]
    title = f"Engine memory over {options.minutes:g} minutes of constant load, {options.kv_mib} MiB of KV cache"
    report.finish(title, {"": report.table(columns, rows)}, found, options.out)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
