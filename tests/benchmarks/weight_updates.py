"""The cost of a weight update while requests stream: our two-phase and blocking updates, and baselines.

    python -m tests.benchmarks.weight_updates --shape qwen3-4b --transport nccl --out runs/4b-nccl.json   # 2 GPUs
    python -m tests.benchmarks.weight_updates --shape qwen3-4b --transport ipc --out runs/4b-ipc.json     # 1 GPU
    python -m tests.benchmarks.weight_updates --engine sglang --graphs --transport ipc --kv-gib 24         # 1 GPU
    python -m tests.benchmarks.weight_updates --device cpu --shape tiny                                   # dry run

64 requests are in flight, and 12 of them are streamed: the largest number for which an engine emits a piece every
step. With the engine's own paths all are streamed. The trainer is another process, on the next GPU (nccl) or on the
same one (ipc). Variants run one after another, each on a new engine:
- `staged`: two phases, KV kept. Also throughput while staging, 20 updates in a row, and vLLM's prefill counters;
- `single`: single updates in two phases, and nothing else;
- `one-phase`: ours with `weight_staging` none;
- `quantised`: `single` of an engine with `--quantization`;
- `native`: the engine's own path. For vLLM packed NCCL (needs NCCL >= 2.29.7: VLLM_NCCL_SO_PATH); for SGLang
  `update_weights_from_distributed` (nccl), or `update_weights_from_tensor` (ipc). `resend`: abort, update by that
  path, send again.

A variant that fails is printed, and the others still run; the exit status is then 1. `gap` is the time between a
request's last token under the old weights and its first under the new ones. `transfer` of a baseline is its whole
update, including loading.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agentloop.types import KVPolicy
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_sglang.config import SglangConfig
from tests.benchmarks.baselines import PlainEngine, PlainUpdate, PlainVllm, agreement, delivered
from tests.benchmarks.baselines_sglang import PlainSglang
from tests.benchmarks.gpu_throughput import wait_for
from tests.benchmarks.link_speed import measure
from tests.benchmarks.report import finish
from tests.benchmarks.shapes import SHAPES, random_prompts, write_model_folder
from tests.benchmarks.site import EngineSite, TimedUpdate, running_site
from tests.benchmarks.streams import Flight, Gaps
from tests.benchmarks.trainer import TrainerConfig, TrainerProcess
from tests.benchmarks.update_results import Consecutive, Failed, Plain, Staged, Staging, Updates, is_bad, tables

PROBE_PROMPTS, PROBE_VERSION = 32, 1  # every variant's first version
PROBE_TOKENS = 1  # tokens after a near tie that was decided differently carry no information
WARM_TOKENS = 16
NUM_STREAMS = 12  # more streams would get larger pieces (`StreamPace`), and a gap would be the time between these
SPACING_S = 0.7  # time until the streams are steady


async def staged(site: EngineSite, options: argparse.Namespace) -> Staged:
    """Run the two-phase variant."""
    flight = await _flight(site, options, "staged")
    counts = site.counts
    single = await _updates(site, flight, options.updates, options.spacing_s)
    staging = await _staging(site, flight, options.window_s)
    before = await site.memory()
    row = await _updates(site, flight, options.consecutive, 0.0)
    after = await site.memory()
    kept, counts = site.counts - counts, site.counts
    await site.update(KVPolicy.RECOMPUTE)
    await flight.until(lambda stream: stream.arrivals[-1][2] == site.version, timeout_s=60)
    recomputed = site.counts - counts
    await flight.end(site.engine.abort)
    lost = site.num_lost(flight)
    return Staged(single, staging, Consecutive(row, before, after, options.requests, lost), kept, recomputed)


async def single(site: EngineSite, options: argparse.Namespace) -> Updates:
    """Run single updates only."""
    flight = await _flight(site, options, "single")
    updates = await _updates(site, flight, options.updates, options.spacing_s)
    await flight.end(site.engine.abort)
    return updates


async def _flight(site: EngineSite, options: argparse.Namespace, name: str) -> Flight:
    prompts = random_prompts(SHAPES[options.shape], options.requests, options.prompt_tokens)
    flight = Flight(site.stream, prompts, name, load=site.generate, num_streams=NUM_STREAMS)
    try:
        await flight.start(WARM_TOKENS, timeout_s=120)
    except BaseException:
        await flight.cancel()
        raise
    return flight


async def _updates(site: EngineSite, flight: Flight, num_updates: int, spacing_s: float) -> Updates:
    began_at = time.perf_counter()
    await asyncio.sleep(SPACING_S)
    ordinary_ms = flight.ordinary_gap_ms(began_at, time.perf_counter())
    timed: list[TimedUpdate] = []
    gaps: list[float] = []
    first_tokens: list[float] = []
    for _ in range(num_updates):
        update = await site.update()
        await flight.until(lambda stream: stream.arrivals[-1][2] == site.version, timeout_s=60)
        gaps += flight.gaps_ms(update.calls["pause"][0], lambda _, version: version == site.version)
        first_tokens.append(flight.first_token_at(lambda _, version: version == site.version))
        timed.append(update)
        await asyncio.sleep(spacing_s)
    flight.check_alive()
    return replace(_summary(timed, gaps, ordinary_ms), parts=_parts(timed, first_tokens))


def _parts(timed: Sequence[TimedUpdate], first_tokens: Sequence[float]) -> dict[str, Gaps]:
    """Return the parts of the gap in order; `copy` and `sums` are device times within the commit."""
    found: dict[str, list[float]] = {}
    for update, first_at in zip(timed, first_tokens, strict=True):
        calls, report = update.calls, update.report
        parts = {name: (ended_at - began_at) * 1e3 for name, (began_at, ended_at) in calls.items()}
        parts |= {"copy, of it": report.swap_ms, "sums, of it": report.verify_ms, "canary check": report.canary_ms}
        parts["commit ended to first token"] = (first_at - calls["commit"][1]) * 1e3
        parts["pause began to first token"] = (first_at - calls["pause"][0]) * 1e3
        for name, part in parts.items():
            found.setdefault(name, []).append(part)
    return {name: Gaps.of(values) for name, values in found.items()}


def _summary(timed: Sequence[TimedUpdate], gaps: Sequence[float], ordinary_ms: float) -> Updates:
    reports = [update.report for update in timed]
    last = reports[-1]
    stalls = [report.stall_ms for report in reports]
    return Updates(
        num_updates=len(reports),
        gaps=Gaps.of(gaps),
        ordinary_gap_ms=ordinary_ms,
        stall_p50_ms=statistics.median(stalls),
        stall_max_ms=max(stalls),
        transport=last.transport or "unknown",
        staging_device=str(last.staging_device) if last.staging_device is not None else None,
        num_bytes=last.num_bytes,
        transfer_ms=statistics.median(report.transfer_ms for report in reports),
        stage_ms=statistics.median(report.stage_ms for report in reports),
        swap_ms=statistics.median(report.swap_ms for report in reports),
        verify_ms=statistics.median(report.verify_ms for report in reports),
        num_verified=last.num_verified,
    )


async def _staging(site: EngineSite, flight: Flight, window_s: float) -> Staging:
    undisturbed, intervals, reports = [], [], []
    for is_staging in (False, True, False):
        await asyncio.sleep(0.2)
        began_at = time.perf_counter()
        while is_staging and time.perf_counter() - began_at < window_s:
            report, started_at, ended_at = await site.stage()
            intervals.append((started_at, ended_at))
            reports.append(report)
        if not is_staging:
            await asyncio.sleep(window_s)
            undisturbed.append((began_at, time.perf_counter()))
        else:
            elapsed_s = time.perf_counter() - began_at
    return Staging(
        undisturbed_tokens_per_s=flight.tokens_per_s(undisturbed),
        staging_tokens_per_s=flight.tokens_per_s(intervals),
        num_stages=len(reports),
        share_of_time=sum(end - start for start, end in intervals) / elapsed_s,
        transfer_ms=statistics.median(report.transfer_ms for report in reports),
        num_bytes=reports[-1].num_bytes,
    )


async def plain(engine: PlainEngine, trainer: TrainerProcess, options: argparse.Namespace, bench: Bench) -> None:
    """Run both baselines on one engine."""
    probes = random_prompts(SHAPES[options.shape], PROBE_PROMPTS, options.prompt_tokens, seed=1)
    try:
        await engine.start()
        await engine.connect(trainer)
        before = agreement(await engine.greedy(probes, PROBE_TOKENS), bench.probe_answers)
        await engine.load(trainer, PROBE_VERSION)
        answers = await engine.greedy(probes, PROBE_TOKENS)
        after, has_delivered = agreement(answers, bench.probe_answers), delivered(answers, bench.probe_answers)
        version = PROBE_VERSION
        for name, update in (("native", engine.update), ("resend", engine.update_by_resending)):
            if name not in options.variants:
                continue
            prompts = random_prompts(SHAPES[options.shape], options.requests, options.prompt_tokens)
            flight = Flight(engine.stream, prompts, name)
            try:
                await flight.start(WARM_TOKENS, timeout_s=120)
                began_at = time.perf_counter()
                found: list[PlainUpdate] = []
                for _ in range(options.updates):
                    await asyncio.sleep(SPACING_S)
                    version += 1
                    found.append(await update(trainer, flight, version))
                ordinary_ms = flight.ordinary_gap_ms(began_at, began_at + SPACING_S)
                await flight.end(engine.abort)
            finally:
                await flight.cancel()
            updates = _plain_summary(found, ordinary_ms, options)
            bench.results[name] = Plain(updates, has_delivered, before, after)
    finally:
        await engine.close()


def _plain_summary(found: Sequence[PlainUpdate], ordinary_ms: float, options: argparse.Namespace) -> Updates:
    return Updates(
        num_updates=len(found),
        gaps=Gaps.of([gap for update in found for gap in update.gaps_ms]),
        ordinary_gap_ms=ordinary_ms,
        stall_p50_ms=statistics.median(update.stall_ms for update in found),
        stall_max_ms=max(update.stall_ms for update in found),
        transport=options.transport,
        num_bytes=SHAPES[options.shape].num_bytes(options.dtype),
        transfer_ms=statistics.median(update.update_ms for update in found),  # includes loading
    )


class Bench:
    """The run: its options, and its results so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.results: dict[str, Any] = {}
        self.probe_answers: list[tuple[int, ...]] = []  # answers of our engine at PROBE_VERSION
        self._options = options
        self._config = _engine_config(options, folder)

    async def run(self) -> None:
        """Run all variants. Raises TimeoutError at the deadline; `results` then has the completed variants."""
        options = self._options
        device = {"nccl": "cuda:1", "ipc": "cuda:0"}.get(options.transport, options.device)
        config = TrainerConfig(
            options.shape, device, options.dtype, options.transport, version=PROBE_VERSION, engine=options.engine
        )
        async with asyncio.timeout(options.deadline_s):
            if "link" in options.variants:
                self.results["link"] = await asyncio.to_thread(measure)
            with TrainerProcess(config) as trainer:
                await self._ours(trainer)
                if {"native", "resend"} & set(options.variants):
                    report(options, self.results)  # a failing SGLang may end this process too
                    began_at = time.perf_counter()
                    await self._attempt("native", plain(_plain_engine(self._config), trainer, options, self))
                    _say(f"baselines: done after {time.perf_counter() - began_at:.0f} s")

    async def _ours(self, trainer: TrainerProcess) -> None:
        variants: dict[str, tuple[Any, dict[str, Any]]] = {
            "single": (single, {}),
            "quantised": (single, {"quantization": self._options.quantization}),
            "staged": (staged, {}),
            "one-phase": (single, {"weight_staging": "none"}),
        }
        for name, (run, changed) in variants.items():
            if name in self._options.variants:
                config = replace(self._config, **changed)
                await self._attempt(name, self._on_site(config, trainer, name, run))

    async def _on_site(
        self, config: VllmConfig | SglangConfig, trainer: TrainerProcess, name: str, run: Any
    ) -> None:
        began_at = time.perf_counter()
        async with running_site(config, trainer) as site:
            _say(f"{name}: engine and trainer ready after {time.perf_counter() - began_at:.0f} s")
            probes = random_prompts(SHAPES[self._options.shape], PROBE_PROMPTS, self._options.prompt_tokens, seed=1)
            self.probe_answers = await site.greedy(probes, PROBE_TOKENS)
            await asyncio.to_thread(wait_for, self._options.gate)
            self.results[name] = await run(site, self._options)
        _say(f"{name}: done after {time.perf_counter() - began_at:.0f} s")

    async def _attempt(self, name: str, run: Any) -> None:
        try:
            await run
        except Exception as error:
            self.results.setdefault(name, Failed(repr(error)))
            _say(f"{name}: FAILED: {error!r}")


def _plain_engine(config: VllmConfig | SglangConfig) -> PlainEngine:
    return PlainVllm(config) if isinstance(config, VllmConfig) else PlainSglang(config)


def _engine_config(options: argparse.Namespace, folder: Path) -> VllmConfig | SglangConfig:
    is_cpu = options.device == "cpu"
    if options.engine == "sglang":
        return SglangConfig(
            model=str(folder),
            initial_version=None,
            load_format="dummy",
            device=options.device,
            dtype=options.dtype,
            max_model_len=options.context,
            max_num_seqs=max(options.requests, PROBE_PROMPTS),
            kv_cache_memory_bytes=int(options.kv_gib * 2**30),
            gpu_memory_utilization=0.85,
            enforce_eager=not options.graphs,
        )
    return VllmConfig(
        model=str(folder),
        initial_version=None,
        load_format="dummy",
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.context,
        max_num_seqs=max(options.requests, PROBE_PROMPTS),
        block_size=32 if is_cpu else 16,
        kv_cache_memory_bytes=int(options.kv_gib * 2**30),
        gpu_memory_utilization=0.6,
        enforce_eager=not options.graphs,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", choices=("nccl", "ipc", "shm"))
    parser.add_argument("--variants", help="comma-separated: link,single,quantised,staged,one-phase,native,resend")
    parser.add_argument("--quantization", default="fp8", help="of the variant quantised")
    parser.add_argument("--dtype")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--context", type=int, help="prompt and answer; must not fill up during a variant")
    parser.add_argument("--kv-gib", type=float, help="enough for all requests at the full context")
    parser.add_argument("--updates", type=int, default=5, help="single ones, for the table of gaps")
    parser.add_argument("--spacing-s", type=float, default=SPACING_S, help="between them")
    parser.add_argument("--consecutive", type=int, default=20)
    parser.add_argument("--window-s", type=float, default=3.0)
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs and compilation instead of eager mode")
    parser.add_argument("--gate", type=Path, help="measure once this file exists; the engine starts before")
    parser.add_argument("--deadline-s", type=float, default=510.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    is_cpu = options.device == "cpu"
    defaults = {
        "transport": "shm" if is_cpu else "nccl",
        "dtype": "float32" if is_cpu else "bfloat16",
        "requests": 8 if is_cpu else 64,
        "prompt_tokens": 32 if is_cpu else 512,
        "context": 6144,
        "kv_gib": 0.25 if is_cpu else 56.0,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    has_baselines = options.transport == "nccl" or options.engine == "sglang"
    usual = "link,staged,one-phase,native,resend" if has_baselines else "staged,one-phase"
    options.variants = (options.variants or usual).split(",")
    if not has_baselines and {"native", "resend", "link"} & set(options.variants):
        parser.error("vLLM's own path and the link are between two GPUs: --transport nccl")
    if options.transport == "nccl" and torch.cuda.device_count() < 2:
        parser.error("nccl needs two GPUs: the trainer has one of its own")
    if not {"staged", "one-phase"} & set(options.variants) and {"native", "resend"} & set(options.variants):
        parser.error("a baseline is checked against one of our variants in the same run")
    return options


def report(options: argparse.Namespace, results: dict[str, Any]) -> None:
    title = f"Weight updates, {options.engine}, {options.shape}, {options.dtype}"
    finish(title, tables(results), results, options.out)


def main() -> None:
    """Print the tables and write the JSON file, even after a failure."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(
            SHAPES[options.shape], Path(folder), max_context_tokens=options.context, dtype=options.dtype
        )
        bench = Bench(options, Path(folder))
        is_late = False
        try:
            asyncio.run(bench.run())
        except TimeoutError:
            is_late = True
            _say(f"FAILED: not done within {options.deadline_s:g} s")
    report(options, bench.results)
    sys.exit(is_late or any(is_bad(result) for result in bench.results.values()))


if __name__ == "__main__":
    main()
