"""The SGLang adapter with the shipped policy: start, answers, pauses and reports, each part independently.

    python -m tests.gpu.sglang_engine [--device cuda] [--sleep] [--graphs] [--out FOLDER/engine.json]

A part that fails does not stop the others. SGLang's own outputs are stored unchanged, as the tests' recorded
shapes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentloop.engine.interface import Delta, WeightUpdate
from agentloop.types import GenerateRequest, Generation, KVPolicy, PauseMode
from agentloop.values.sampling import Constraint, ConstraintKind, LogprobsMode, SamplingParams
from agentloop_sglang.config import SglangConfig
from agentloop_sglang.engine import SglangEngine
from tests.benchmarks.report import finish, table

POLICY = Path(__file__).parents[2] / "examples" / "tiny_policy"
PART_TIMEOUT_S = 60.0
PROMPT = tuple(range(300, 380))


@dataclass
class Site:
    """A started engine, and the results."""

    engine: SglangEngine
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    shapes: dict[str, Any] = field(default_factory=dict)
    numbers: int = 0

    def request(self, max_tokens: int, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
        self.numbers += 1
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})
        return GenerateRequest(f"shape-{self.numbers:032d}", prompt, params)

    async def part(self, name: str, run: Callable[[Site], Awaitable[str]]) -> None:
        began_at = time.perf_counter()
        try:
            found = await asyncio.wait_for(run(self), PART_TIMEOUT_S)
        except Exception as error:
            traceback.print_exc()
            found = f"FAILED: {type(error).__name__}: {str(error)[:160]}"
        self.rows.append((name, found, f"{time.perf_counter() - began_at:.2f} s"))
        print(f"{name}: {found}", file=sys.stderr, flush=True)

    def record(self, name: str, value: Any) -> None:
        self.shapes[name] = repr(value)[:20_000]


async def generate(site: Site) -> str:
    request = site.request(12, num_top_logprobs=2)
    outputs = site.engine._process.outputs
    kept: list[Any] = []

    async def keeping(made: Any) -> Any:
        async with contextlib.aclosing(outputs(made)) as found:
            async for output in found:
                kept.append(output)
                yield output

    site.engine._process.outputs = keeping  # type: ignore[method-assign]
    try:
        generation = await site.engine.generate(request)
        streamed = [piece async for piece in site.engine.stream(site.request(12))]
    finally:
        site.engine._process.outputs = outputs  # type: ignore[method-assign]
    site.record("final output", kept[0])
    site.record("streamed outputs", kept[1:])
    whole = streamed[-1]
    assert isinstance(whole, Generation)
    assert whole.token_ids == generation.token_ids
    pieces = [piece for piece in streamed if isinstance(piece, Delta)]
    return f"{len(generation.token_ids)} tokens, streamed in {len(pieces)} pieces"


async def abort(site: Site) -> str:
    request = site.request(800)
    task = asyncio.create_task(site.engine.generate(request))
    await asyncio.sleep(0.3)
    await site.engine.abort(request.request_id)
    generation = await task
    return f"{generation.finish_reason}, {len(generation.token_ids)} tokens"


async def pauses(site: Site, policy: KVPolicy, version: int) -> str:
    """Commit in the middle of a streamed request: spans, and the time from pause to resume."""
    engine, request = site.engine, site.request(300)
    task = asyncio.create_task(engine.generate(request))
    await engine.stage(WeightUpdate(version, str(POLICY / f"v{version % 2}")))
    await asyncio.sleep(0.2)
    began_at = time.perf_counter()
    await engine.pause(PauseMode.KEEP, policy)
    paused_at = time.perf_counter()
    is_still = not task.done()
    await engine.commit(version)
    committed_at = time.perf_counter()
    await engine.resume()
    resumed_at = time.perf_counter()
    generation = await task
    spans = [(span.version, span.start, span.end) for span in generation.weight_versions]
    times = (paused_at - began_at, committed_at - paused_at, resumed_at - committed_at)
    milliseconds = " + ".join(f"{seconds * 1e3:.1f}" for seconds in times)
    return f"{spans}, in the middle: {is_still}; pause + commit + resume {milliseconds} ms"


async def keep(site: Site) -> str:
    return await pauses(site, KVPolicy.KEEP, 1)


async def recompute(site: Site) -> str:
    return await pauses(site, KVPolicy.RECOMPUTE, 2)


async def abort_in_a_pause(site: Site) -> str:
    engine, request = site.engine, site.request(800)
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.2)
    await engine.pause(PauseMode.KEEP)
    try:
        await engine.abort(request.request_id)
        generation = await asyncio.wait_for(task, 5)
    finally:
        await engine.resume()
    return f"{generation.finish_reason}, {len(generation.token_ids)} tokens"


async def constrained(site: Site) -> str:
    constraint = Constraint(ConstraintKind.REGEX, "(yes|no|maybe)")
    stop_id = 2
    generation = await site.engine.generate(
        site.request(20, constraint=constraint, stop_token_ids=(stop_id,), temperature=1.0)
    )
    return f"{generation.finish_reason}, ids {generation.token_ids}"


async def load(site: Site) -> str:
    tasks = [asyncio.create_task(site.engine.generate(site.request(300))) for _ in range(8)]
    await asyncio.sleep(0.3)
    found = site.engine.load()
    await asyncio.gather(*tasks)
    site.record("load", found)
    return f"{found.num_running} running, {found.kv_used_tokens} KV tokens, {found.num_steps} steps"


async def sleep(site: Site) -> str:
    engine = site.engine
    task = asyncio.create_task(engine.generate(site.request(300)))
    await asyncio.sleep(0.2)
    await engine.sleep(1)
    await engine.wake()
    await engine.resume()
    generation = await task
    return f"{len(generation.token_ids)} tokens across a sleep"


PARTS = (generate, abort, keep, recompute, abort_in_a_pause, constrained, load)


async def run(arguments: argparse.Namespace) -> Site:
    config = SglangConfig(
        model=str(POLICY / "v0"),
        initial_version=0,
        device=arguments.device,
        dtype="float32" if arguments.device == "cpu" else "bfloat16",
        max_model_len=1024,
        max_num_seqs=64,
        kv_cache_memory_bytes=128 * 2**20,
        gpu_memory_utilization=0.3,
        can_sleep=arguments.sleep,
        enforce_eager=not arguments.graphs,
        logprobs_mode=LogprobsMode.BOTH,
        progress_tokens=4,
    )
    engine = SglangEngine(config)
    began_at = time.perf_counter()
    await asyncio.wait_for(engine.start(), 300)
    site = Site(engine)
    site.rows.append(("start", str(engine.info), f"{time.perf_counter() - began_at:.1f} s"))
    try:
        for part in (*PARTS, sleep) if arguments.sleep else PARTS:
            await site.part(part.__name__, part)
    finally:
        began_at = time.perf_counter()
        await asyncio.wait_for(engine.close(), 60)
        site.rows.append(("close", "", f"{time.perf_counter() - began_at:.1f} s"))
    return site


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    site = asyncio.run(run(arguments))
    shown = {"": table(("part", "found", "time"), site.rows)}
    finish("The SGLang adapter", shown, {"rows": site.rows, "shapes": site.shapes}, arguments.out)
    return int(any(found.startswith("FAILED") for _, found, _ in site.rows))


if __name__ == "__main__":
    sys.exit(main())
