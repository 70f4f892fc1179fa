"""LoRA adapters by name on one engine: the cost of many adapters compared with one, and the effect of a push.

    python -m tests.gpu.adapters --out runs/adapters.json
    python -m tests.gpu.adapters --device cpu --shape tiny --window-s 3 --at-once 16

Two vLLM engines share the device, one without LoRA and one with slots for all adapters; one at a time has a load.
Steady windows come first: the base without LoRA, then alternately all calls under one adapter and calls spread over
all. Then the adapters get new versions under load, while a few streams record the time between their tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from agentloop.engine.interface import Adapter, Delta
from agentloop.errors import AdaptersFull
from agentloop.types import GenerateRequest, SamplingParams
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.benchmarks.gpu_models import model_folder
from tests.benchmarks.report import finish, say, table
from tests.benchmarks.shapes import SHAPES, Shape, random_prompts

PROMPT_TOKENS, MAX_TOKENS = 64, 128
STREAM_TOKENS = 512
RETRY_S = 0.1  # after a push found all slots pinned
STEADY_S = 5.0  # reference: streams without a push
NUMBERS = itertools.count()


@dataclass
class Calls:
    """The results of the calls, and the times between two tokens of the streams among them."""

    num_answered: int = 0
    num_failed: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)  # end time and length in seconds

    def longest_gap_s(self, began_at: float, ended_at: float) -> float:
        return max((gap_s for at, gap_s in self.gaps if began_at <= at and at - gap_s <= ended_at), default=0.0)


@dataclass
class Served:
    """An engine with its adapters, and the versions that a call may have."""

    engine: VllmEngine
    shape: Shape
    versions: dict[str, set[int]] = field(default_factory=dict)

    async def push(self, name: str, version: int, folder: Path) -> tuple[float, int]:
        """Push a version; returns the seconds of the load, and how many attempts found all slots pinned."""
        self.versions.setdefault(name, set()).add(version)
        for num_refused in itertools.count():
            began_at = time.monotonic()
            try:
                await self.engine.load_adapter(Adapter(name, version, str(folder)))
                return time.monotonic() - began_at, num_refused
            except AdaptersFull:
                await asyncio.sleep(RETRY_S)
        raise AssertionError("unreachable")


def write_adapter(shape: Shape, folder: Path, rank: int, seed: int, device: str) -> Path:
    """Write a random adapter of all linear layers."""
    generator, tensors = torch.Generator(device=device).manual_seed(seed), {}
    for name, size in shape.tensors():
        if "_proj" in name:
            layer = "base_model.model." + name.removesuffix(".weight")
            for half, rows, columns, spread in (("A", rank, size[1], size[1] ** -0.5), ("B", size[0], rank, 0.01)):
                tensor = torch.randn(rows, columns, generator=generator, device=device) * spread
                tensors[f"{layer}.lora_{half}.weight"] = tensor.to(torch.bfloat16).cpu()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def engine_of(options: argparse.Namespace, **lora: Any) -> VllmEngine:
    is_cpu = options.device == "cpu"
    return VllmEngine(
        VllmConfig(
            model=str(model_folder(options.shape, options.device)),
            initial_version=0,
            device=options.device,
            dtype="float32" if is_cpu else "bfloat16",
            max_model_len=1024,
            max_num_seqs=options.at_once + options.adapters,
            block_size=32,
            kv_cache_memory_bytes=(1 << 27) if is_cpu else (18 << 30),
            gpu_memory_utilization=0.4,
            **lora,
        )
    )


@asynccontextmanager
async def loaded(served: Served, names: Sequence[str], num_at_once: int) -> AsyncIterator[Calls]:
    """Keep calls running within the block, spread over adapters; wait until they end."""
    calls, ends = Calls(), asyncio.Event()

    async def one(name: str, prompt: tuple[int, ...]) -> None:
        while not ends.is_set():
            try:
                generation = await served.engine.generate(request_of(name, prompt, MAX_TOKENS))
                [span] = generation.weight_versions
                is_good = len(generation.token_ids) == MAX_TOKENS and span.version in served.versions[name]
            except Exception as error:
                say(f"a call failed: {error!r}")
                is_good = False
            calls.num_answered += is_good
            calls.num_failed += not is_good

    prompts = random_prompts(served.shape, num_at_once, PROMPT_TOKENS)
    tasks = [asyncio.create_task(one(names[i % len(names)], prompt)) for i, prompt in enumerate(prompts)]
    try:
        yield calls
    finally:
        ends.set()
        await asyncio.gather(*tasks)


async def note_gaps(served: Served, name: str, calls: Calls, ends: asyncio.Event) -> None:
    """Read streams under an adapter, and record the time between two pieces of each."""
    [prompt] = random_prompts(served.shape, 1, PROMPT_TOKENS, seed=1)
    while not ends.is_set():
        last_at = None
        async for piece in served.engine.stream(request_of(name, prompt, STREAM_TOKENS)):
            now = time.monotonic()
            if isinstance(piece, Delta) and last_at is not None:
                calls.gaps.append((now, now - last_at))
            last_at = now


def request_of(name: str, prompt: tuple[int, ...], max_tokens: int) -> GenerateRequest:
    return GenerateRequest(f"call-{next(NUMBERS)}", prompt, SamplingParams(max_tokens=max_tokens), adapter=name)


async def window(served: Served, names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second of a steady load."""
    async with loaded(served, names, options.at_once) as calls:
        await asyncio.sleep(options.settle_s)
        began_at, before = time.monotonic(), served.engine.load().num_sampled_tokens
        await asyncio.sleep(options.window_s)
        num_tokens, seconds = served.engine.load().num_sampled_tokens - before, time.monotonic() - began_at
    say(f"{len(names)} of {names[0] or 'the base'}: {num_tokens / seconds:,.0f} tokens/s")
    return {"tokens_per_s": num_tokens / seconds, "answered": calls.num_answered, "failed": calls.num_failed}


async def pushes(served: Served, folders: Sequence[Path], options: argparse.Namespace) -> dict[str, Any]:
    """Push new versions of all adapters one after another, under load."""
    names, ends, loads = list(served.versions), asyncio.Event(), []
    async with loaded(served, names, options.at_once) as calls:
        streams = [asyncio.create_task(note_gaps(served, name, calls, ends)) for name in names]
        await asyncio.sleep(options.settle_s)
        steady_at = time.monotonic()
        await asyncio.sleep(STEADY_S)
        began_at, before = time.monotonic(), served.engine.load().num_sampled_tokens
        for number in range(options.pushes):
            folder = folders[(number + 1) % len(folders)]
            loads.append((time.monotonic(), *await served.push(names[number % len(names)], 100 + number, folder)))
            await asyncio.sleep(options.push_every_s)
        ended_at = time.monotonic()
        num_tokens = served.engine.load().num_sampled_tokens - before
        ends.set()
        await asyncio.gather(*streams)
    gaps = sorted(gap_s for at, gap_s in calls.gaps if steady_at <= at <= began_at)
    return {
        "pushes": len(loads),
        "load_s": [load_s for _, load_s, _ in loads],
        "stall_s": [calls.longest_gap_s(at, at + load_s) for at, load_s, _ in loads],
        "refused": sum(num_refused for *_, num_refused in loads),
        "steady_gap_s": {"median": median(gaps), "longest": gaps[-1]},
        "tokens_per_s": num_tokens / (ended_at - began_at),
        "answered": calls.num_answered,
        "failed": calls.num_failed,
    }


async def measured(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    shape, device = SHAPES[options.shape], options.device
    folders = [write_adapter(shape, work / str(n), options.rank, n, device) for n in range(options.adapters + 1)]
    plain = Served(engine_of(options), shape, {"": {0}})
    adapted = Served(engine_of(options, lora_rank=options.rank, max_loras=options.adapters), shape)
    try:
        await asyncio.gather(plain.engine.start(), adapted.engine.start())
        results: dict[str, Any] = {"base": [await window(plain, [""], options)], "one": [], "many": []}
        await plain.engine.close()
        for number in range(options.adapters):
            await adapted.push(f"adapter{number}", 1, folders[number])
        names = list(adapted.versions)
        for _ in range(options.turns):
            results["one"].append(await window(adapted, names[:1], options))
            results["many"].append(await window(adapted, names, options))
        results["pushes"] = await pushes(adapted, folders, options)
        return results
    finally:
        await plain.engine.close()
        await adapted.engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="qwen3-4b", choices=SHAPES)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2, help="windows of one adapter, and of all")
    parser.add_argument("--window-s", type=float, default=45.0)
    parser.add_argument("--settle-s", type=float, default=2.0, help="of a load, before its window")
    parser.add_argument("--pushes", type=int, default=40)
    parser.add_argument("--push-every-s", type=float, default=0.25)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        results = asyncio.run(measured(options, Path(work)))
    windows = {name: found for name, found in results.items() if isinstance(found, list)}
    pushed = results["pushes"]
    rows = [[name, *(one["tokens_per_s"] for one in found)] for name, found in windows.items() if found]
    columns = ("calls under", *(f"tokens/s {n + 1}" for n in range(options.turns)))
    tables = {
        "throughput": table(columns, [[*row, *[""] * (len(columns) - len(row))] for row in rows]),
        f"{pushed['pushes']} pushes under load": table(
            ("", "median ms", "longest ms"),
            [
                ["load", 1e3 * median(pushed["load_s"]), 1e3 * max(pushed["load_s"])],
                [
                    "longest gap of a stream at a push",
                    1e3 * median(pushed["stall_s"]),
                    1e3 * max(pushed["stall_s"]),
                ],
                ["gap without a push", *(1e3 * gap_s for gap_s in pushed["steady_gap_s"].values())],
            ],
        ),
    }
    finish(f"{options.adapters} adapters, {options.shape}, rank {options.rank}", tables, results, options.out)
    num_failed = pushed["failed"] + sum(one["failed"] for found in windows.values() for one in found)
    say(f"{num_failed} calls failed; {pushed['tokens_per_s']:,.0f} tokens/s during the pushes")
    return 0 if num_failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
