"""The service beside the bare engine on GPUs: loops and endpoint clients against the same requests straight in.

    python -m tests.benchmarks.gpu_throughput --shape qwen3-4b             # 256 and 512 in flight, 6 minutes
    python -m tests.benchmarks.gpu_throughput --shape qwen3-4b --quick     # 512, shorter turns, 4 minutes
    python -m tests.benchmarks.gpu_throughput --model examples/tiny_policy/v1 --engine sglang
    python -m tests.benchmarks.gpu_throughput --replicas 2 --arms service           # on two GPUs
    python -m tests.benchmarks.gpu_throughput --device cpu --model examples/tiny_policy/v1 --at-once 8 --sampled 24

Trajectories of three turns with exact lengths, each prompt its own, so that a prefix is reused within a trajectory
only. `service`: agent loops whose tool answers at once; `endpoint`, `streams`: agents in processes of their own, in
sessions of the chat endpoint. What the first arm recorded is then asked of the engine itself (`bare`), final-only,
in one process, with the service's engine arguments: same prompts and observed ids, same numbers of tokens.

All figures are from the first turn's beginning to the last one's end. `idle`: the share of the places in which no
request was in the engine. `outside`: a turn's time, tool included, less what the engine took. CPU is of all
processes of the service (the load's own are not).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentloop.client import RolloutClient
from agentloop.types import Trajectory
from agentloop_servers.config import CHECKOUT, ServiceConfig
from agentloop_servers.local import running_service
from tests.benchmarks import report
from tests.benchmarks.cpu_seconds import CpuSeconds
from tests.benchmarks.gpu_load import Planned, Workload, chat_from_processes
from tests.benchmarks.gpu_models import model_folder
from tests.benchmarks.shapes import SHAPES

ARMS = ("service", "endpoint", "streams", "bare")
GOALS = {"service": 0.97, "endpoint": 0.90, "streams": 0.75}
SHORT_TURNS = 128  # tokens, with --quick
WARM_UP_TOKENS = 16
BARE_START_S = 300.0
GRAPHS_MIB = 8192  # activations, graphs and contexts
OTHERS_MIB = 12288  # for those that still run while the service starts
SMALL_KV_MIB = 8192  # of a small model


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm with so many trajectories in flight. Times in seconds; None: not measured in this arm."""

    arm: str
    num_at_once: int
    num_turns: int
    num_tokens: int
    seconds: float
    turn_p50_s: float
    turn_p99_s: float
    idle: float | None = None
    outside_p50_s: float | None = None
    outside_p99_s: float | None = None
    begin_s: float | None = None  # from the submit to the first turn
    end_s: float | None = None  # from the last turn to the last record, or of finishing a session, p99
    first_p50_s: float | None = None  # to a stream's first piece
    num_chunks: int | None = None
    cpu_s: dict[str, float] = field(default_factory=dict)  # by kind of process

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def quantile(values: Sequence[float], share: float) -> float:
    """A value that so much of them is below."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def workload(options: argparse.Namespace, at_once: int) -> Workload:
    """The trajectories of one arm."""
    return Workload(
        num_trajectories=at_once * options.rounds,
        num_at_once=at_once,
        num_turns=options.turns,
        num_sampled=options.sampled,
        spread=options.spread,
        has_tools=not options.no_tools,
    )


async def run_loops(url: str, load: Workload, name: str) -> tuple[Figures, list[Trajectory]]:
    """Roll out as agent loops."""
    cpu, submitted_at = CpuSeconds(os.getpid()), time.perf_counter()
    async with RolloutClient(url) as client:
        run_id = f"{name}-{time.time_ns():x}"
        rollout = await client.submit(load.tasks(), run_id=run_id, max_running=load.num_at_once)
        records = [record async for record in rollout]
    ended_at, cpu_s = time.perf_counter(), cpu.used(children_of_this())
    broken = [record for record in records if len(record.path.turns) != load.num_turns or not record.is_complete]
    if broken:
        raise RuntimeError(f"{len(broken)} trajectories are not whole: {broken[0].stop_reason}, {broken[0].error}")
    metrics = [record.metrics for record in records]
    turn_s = [one[f"turn_s.{n}"] for one in metrics for n in range(load.num_turns)]
    outside_s = [one[f"outside_s.{n}"] for one in metrics for n in range(load.num_turns)]
    first_at, last_at = min(one["began_at"] for one in metrics), max(one["ended_at"] for one in metrics)
    in_engine_s = sum(record.timings.engine_s for record in records)
    figures = Figures(
        "service",
        load.num_at_once,
        num_turns=len(turn_s),
        num_tokens=sum(record.num_sampled_tokens for record in records),
        seconds=last_at - first_at,
        turn_p50_s=statistics.median(turn_s),
        turn_p99_s=quantile(turn_s, 0.99),
        idle=1 - in_engine_s / (load.num_at_once * (last_at - first_at)),
        outside_p50_s=statistics.median(outside_s),
        outside_p99_s=quantile(outside_s, 0.99),
        begin_s=first_at - submitted_at,
        end_s=ended_at - last_at,
        cpu_s=cpu_s,
    )
    return figures, records


async def run_chat(url: str, load: Workload, num_processes: int, *, is_streamed: bool) -> Figures:
    """Roll out as agents of the endpoint."""
    ready: list[tuple[CpuSeconds, float]] = []

    def on_ready() -> None:
        ready.append((CpuSeconds(os.getpid()), time.perf_counter()))

    seen = await chat_from_processes(url, load, num_processes, is_streamed=is_streamed, on_ready=on_ready)
    ((cpu, begun_at),) = ready
    if len(seen.turn_s) != load.num_trajectories * load.num_turns:
        raise RuntimeError(f"{len(seen.turn_s)} turns were answered")
    return Figures(
        "streams" if is_streamed else "endpoint",
        load.num_at_once,
        num_turns=len(seen.turn_s),
        num_tokens=seen.num_tokens,
        seconds=seen.ended_at - seen.began_at,
        turn_p50_s=statistics.median(seen.turn_s),
        turn_p99_s=quantile(seen.turn_s, 0.99),
        begin_s=seen.began_at - begun_at,
        end_s=quantile(seen.finish_s, 0.99),
        first_p50_s=statistics.median(seen.first_s) if is_streamed else None,
        num_chunks=seen.num_chunks if is_streamed else None,
        cpu_s=cpu.used(children_of_this()),
    )


_OTHER_CHILDREN: list[int] = []


def children_of_this() -> frozenset[int]:
    """Processes that are the benchmark's own: the bare engine's, which waits."""
    return frozenset(_OTHER_CHILDREN)


def plan_of(records: Sequence[Trajectory]) -> list[Planned]:
    """What was asked of the engine, without the sampled ids themselves."""
    plan = []
    for record in records:
        path, turns = record.path, record.path.turns
        starts = [turn.start for turn in turns[1:]] + [turns[-1].end]
        parts = [
            (turn.end - turn.start, path.response_ids[turn.end : start].tolist())
            for turn, start in zip(turns, starts, strict=True)
        ]
        plan.append(Planned(path.prompt_ids.tolist(), parts))
    return plan


async def run_service(options: argparse.Namespace, config: ServiceConfig, work: Path, found: list[Figures]) -> None:
    """All arms of the service, and a plan for the bare engine."""
    run_dir = work / f"run-{time.time_ns():x}"
    run_dir.mkdir()
    async with running_service(config, run_dir) as url:
        say("the service is ready")
        await asyncio.to_thread(wait_for, options.gate)
        most = max(options.at_once)
        warm_up = Workload(most, most, num_turns=1, num_sampled=WARM_UP_TOKENS, has_tools=not options.no_tools)
        async with asyncio.timeout(options.arm_s):
            await run_loops(url, warm_up, "warm-up")
        for at_once in options.at_once:
            load = workload(options, at_once)
            for arm in options.arms:
                if arm == "bare":
                    continue
                try:
                    async with asyncio.timeout(options.arm_s):
                        if arm == "service":
                            figures, records = await run_loops(url, load, arm)
                            lines = (planned.to_json() for planned in plan_of(records))
                            (work / f"plan-{at_once}").write_text("\n".join(lines))
                        else:
                            figures = await run_chat(
                                url, load, options.load_processes, is_streamed=arm == "streams"
                            )
                except (Exception, TimeoutError) as error:
                    say(f"{arm}, {at_once} at once: failed: {error!r}")
                    options.failures.append(f"{arm} {at_once}: {error!r}"[:500])
                    continue
                keep(options, found, figures)
    say("the service has ended")


def keep(options: argparse.Namespace, found: list[Figures], figures: Figures) -> None:
    """Keep an arm's figures, also on disk: what comes after may be cut."""
    found.append(figures)
    say(f"{figures.arm}, {figures.num_at_once} at once: {figures.tokens_per_s:,.0f} tok/s")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".partial.json").write_text(json.dumps([asdict(one) for one in found]))


def begin_bare(config: ServiceConfig, work: Path, at_once: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the bare engine's process, which imports its engine and waits."""
    (work / "config.json").write_text(config.model_dump_json())
    plans = [part for number in at_once for part in ("--plan", f"{number}={work / f'plan-{number}'}")]
    command = [sys.executable, "-m", "tests.benchmarks.gpu_bare", "--config", str(work / "config.json"), *plans]
    bare = subprocess.Popen([*command, "--out", str(work / "bare.json")], stdin=subprocess.PIPE, cwd=CHECKOUT)
    _OTHER_CHILDREN.append(bare.pid)
    return bare


async def end_bare(bare: subprocess.Popen[bytes], options: argparse.Namespace, work: Path) -> list[Figures]:
    """Let it run; returns what it measured, also if it failed in its middle."""
    timeout_s = BARE_START_S + options.arm_s * len(options.at_once)
    try:
        await asyncio.to_thread(bare.communicate, b"go\n", timeout_s)
    except subprocess.TimeoutExpired:
        options.failures.append("bare: it did not end in time")
    if bare.returncode:
        options.failures.append(f"bare: exit status {bare.returncode}")
    path = work / "bare.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return [
        Figures(
            "bare",
            one["num_at_once"],
            num_turns=one["num_turns"],
            num_tokens=one["num_tokens"],
            seconds=one["seconds"],
            turn_p50_s=statistics.median(one["turn_s"]),
            turn_p99_s=quantile(one["turn_s"], 0.99),
            idle=1 - sum(one["turn_s"]) / (one["num_at_once"] * one["seconds"]),
            cpu_s=one["cpu_s"],
        )
        for one in found
    ]


async def measure(options: argparse.Namespace, work: Path) -> list[Figures]:
    """All arms. What fails is in `options.failures`."""
    config = service_config(options)
    found: list[Figures] = []
    bare = begin_bare(config, work, options.at_once) if "bare" in options.arms else None
    try:
        if options.arms != ["bare"]:
            try:
                await run_service(options, config, work, found)
            except Exception as error:
                say(f"the service failed: {error!r}")
                options.failures.append(f"service: {error!r}"[:500])
        if bare is not None and all((work / f"plan-{number}").exists() for number in options.at_once):
            for figures in await end_bare(bare, options, work):
                keep(options, found, figures)
    finally:
        if bare is not None and bare.poll() is None:
            bare.terminate()
            await asyncio.to_thread(bare.wait, 60)
    return found


def service_config(options: argparse.Namespace) -> ServiceConfig:
    """The service's config: defaults, but for what is measured."""
    is_cpu, most = options.device == "cpu", max(options.at_once)
    engine: dict[str, object] = {
        "kind": options.engine,
        "device": options.device,
        "dtype": "float32" if is_cpu else "bfloat16",
        "max_running": -(-most // options.replicas),
        "block_size": 32 if is_cpu else 16,
        "gpu_memory_utilization": options.gpu_share,
        "tensor_parallel_size": options.tp,
        "max_context_tokens": options.context if options.model is None else None,
    }
    engine["kv_cache_mib"] = options.kv_mib or (256 if is_cpu else kv_mib_of_this_gpu(options))
    if is_cpu:
        engine["num_cpus"] = 0.5
    fields: dict[str, object] = {"workers": {"capacity": most}}
    if options.ingress is not None:
        fields["ingress_replicas"] = options.ingress
    model = model_folder(options.shape, options.device) if options.model is None else options.model
    return ServiceConfig.model_validate(
        {"model": str(model), "mode": "debug", "port": 0, "replicas": options.replicas, "engine": engine, **fields}
    )


def kv_mib_of_this_gpu(options: argparse.Namespace) -> int:
    """What is left beside the weights and graphs: a size of its own, as others may be on the GPU at the start."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    total_mib = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    if options.model is not None:
        return SMALL_KV_MIB
    weights_mib = SHAPES[options.shape].num_bytes("bfloat16") / options.tp / 2**20
    others_mib = 0 if options.gate is None else OTHERS_MIB
    return int(0.9 * total_mib - weights_mib - GRAPHS_MIB - others_mib)


def wait_for(gate: Path | None) -> None:
    """Wait until others on this host have ended, which the file's existence says."""
    while gate is not None and not gate.exists():
        time.sleep(0.2)


def tables(found: Sequence[Figures]) -> dict[str, str]:
    """The table of throughput, and that of CPU seconds for 1,000 turns."""
    bare = {one.num_at_once: one.tokens_per_s for one in found if one.arm == "bare"}

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else 1000 * seconds

    rows = [
        (
            f"{one.arm}, {one.num_at_once}",
            one.tokens_per_s,
            round(one.tokens_per_s / bare[one.num_at_once], 3) if one.num_at_once in bare else None,
            None if one.idle is None else 100 * one.idle,
            ms(one.outside_p50_s),
            ms(one.outside_p99_s),
            one.turn_p50_s,
            one.turn_p99_s,
            one.first_p50_s,
            one.begin_s,
            one.end_s,
            one.num_turns,
            one.num_tokens,
            None if one.num_chunks is None else one.num_chunks / one.num_turns,
        )
        for one in found
    ]
    columns = ["arm, in flight", "tok/s", "of bare", "idle %", "outside p50 ms", "p99 ms", "turn p50 s", "p99 s"]
    columns += ["first piece p50 s", "begin s", "end s", "turns", "tokens", "pieces a turn"]
    kinds = sorted({kind for one in found for kind in one.cpu_s}, key=lambda kind: -sum(_cpu(found, kind)))
    cpu_rows = [
        (
            f"{one.arm}, {one.num_at_once}",
            *(1000 * one.cpu_s.get(kind, 0.0) / one.num_turns for kind in kinds),
            1000 * sum(one.cpu_s.values()) / one.num_turns,
        )
        for one in found
    ]
    return {
        "": report.table(columns, rows),
        "CPU seconds for 1,000 turns": report.table(["arm, in flight", *kinds, "all"], cpu_rows),
    }


def _cpu(found: Sequence[Figures], kind: str) -> list[float]:
    return [one.cpu_s.get(kind, 0.0) for one in found]


def say(what: str) -> None:
    """Progress on stderr, with the seconds since the script began."""
    print(f"{time.monotonic() - STARTED_AT:6.1f} s  {what}", file=sys.stderr, flush=True)


STARTED_AT = time.monotonic()


def parse() -> argparse.Namespace:
    """The options; `--quick` fills in those that were not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang", "simulated"), default="vllm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--model", help="a model folder, in place of a shape")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--at-once", type=int, nargs="+", help="trajectories in flight")
    parser.add_argument("--rounds", type=int, help="of so many trajectories")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sampled", type=int, help="tokens a turn")
    parser.add_argument("--spread", type=float, default=0.0, help="0.5: turns of half to one and a half of that")
    parser.add_argument("--no-tools", action="store_true", help="a user's message stands for the tool's answer")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ingress", type=int, help="ingress processes; else the service's default")
    parser.add_argument("--load-processes", type=int, default=4)
    parser.add_argument(
        "--gpu-share", type=float, default=0.85, help="of the GPU's memory, that is free at the start"
    )
    parser.add_argument("--kv-mib", type=int, help="of the KV cache; else what the GPU has room for")
    parser.add_argument("--gate", type=Path, help="measure once this file exists; the service starts before")
    parser.add_argument("--context", type=int, default=2048, help="of a shape; a model has its own")
    parser.add_argument("--arm-s", type=float, default=120.0, help="the time limit of an arm")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.arms = [arm for arm in ARMS if arm in options.arms.split(",")]
    options.at_once = options.at_once or ([512] if options.quick else [256, 512])
    options.rounds = options.rounds or 1
    options.sampled = options.sampled or (SHORT_TURNS if options.quick else 160)
    options.failures = []
    if options.engine == "simulated":
        options.arms = [arm for arm in options.arms if arm != "bare"]
    return options


def main() -> None:
    """Print the tables; exit with 1 if an arm failed. Goals that are not met are named, and are no failure."""
    options = parse()
    paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the workers import the loop
    with tempfile.TemporaryDirectory() as work:
        found = asyncio.run(measure(options, Path(work)))
    bare = {one.num_at_once: one.tokens_per_s for one in found if one.arm == "bare"}
    ratios = {
        f"{one.arm} {one.num_at_once}": round(one.tokens_per_s / bare[one.num_at_once], 4)
        for one in found
        if one.num_at_once in bare and one.arm != "bare"
    }
    missed = [name for name, ratio in ratios.items() if ratio < GOALS[name.split()[0]]]
    shown = tables(found)
    notes = [f"below its goal: {name}" for name in missed] + [f"failed: {what}" for what in options.failures]
    if notes:
        shown["Notes"] = "\n".join(f"- {note}" for note in notes)
    results = {
        "figures": found,
        "tokens_per_s": {f"{one.arm} {one.num_at_once}": round(one.tokens_per_s, 1) for one in found},
        "ratios": ratios,
        "below_goal": missed,
        "failures": options.failures,
    }
    name = options.model or options.shape
    report.finish(f"Throughput, {options.engine}, {name}", shown, results, options.out)
    sys.exit(bool(options.failures) or not found)


if __name__ == "__main__":
    main()
