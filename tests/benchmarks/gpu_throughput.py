"""The service compared with the bare engine on GPUs, for agent loops and endpoint clients.

    python -m tests.benchmarks.gpu_throughput --shape qwen3-4b             # 512 in flight, 9 minutes
    python -m tests.benchmarks.gpu_throughput --arms service,bare --bare max_graph_tokens=512
    python -m tests.benchmarks.gpu_throughput --model examples/tiny_policy/v1 --engine sglang
    python -m tests.benchmarks.gpu_throughput --replicas 2 --arms service           # on two GPUs
    python -m tests.benchmarks.gpu_throughput --device cpu --model examples/tiny_policy/v1 --at-once 8 --sampled 24
    python -m tests.benchmarks.gpu_throughput --arms service,scored --at-once 256 --context 4096 --scored 4000

Trajectories have three turns and unique prompts, so that prefixes are reused only within a trajectory. A turn's
token count is drawn from 0.5 to 1.5 times `--sampled`, so that turns end in different steps. Arms:
- `service`: agent loops whose tool answers at once;
- `endpoint`, `streams`: agents in separate processes, in sessions of the chat endpoint;
- `bare`: requests of the same sizes sent directly to the engine, final-only, in one process, with the service's
  engine arguments;
- `scored`: loops, while sequences of `--scored` ids are scored, 512 at a time;
- `idle`: no load; its row of the CPU table is in thousandths of a core.

`--bare KEY=VALUE,...` adds a bare engine with other settings of its engine pool in the config. `--split N`: N
engines share the GPU, and the slots and KV of one engine. `--alternate FILE`: another command with this file runs
on the same GPU; their windows alternate, and each takes half of the memory.

All engines are up at the same time, each with its share of the GPU's memory, and the arms run one after another,
`--cycles` times. Figures are of a steady window: `--window-s` seconds that begin `--ramp-s` after the load. `idle`:
the share of the slots without a request in the engine. `outside`: a turn's time, including the tool, less the
engine's time. CPU is that of all processes of the service, without the load's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentloop.client.client import RolloutClient
from agentloop.types import Trajectory
from agentloop_servers.config.service import CHECKOUT, ServiceConfig, model_sizes
from agentloop_servers.local import running_service
from tests.benchmarks import report
from tests.benchmarks.cpu_seconds import CpuSeconds
from tests.benchmarks.gpu_load import PromptSizes, Turn, Window, Workload, chat_from_processes, sessions, turns_of
from tests.benchmarks.gpu_models import model_folder
from tests.benchmarks.report import say
from tests.benchmarks.shapes import SHAPES, TOKENS_START

ARMS = ("idle", "service", "scored", "endpoint", "streams", "bare")
SCORES_AT_ONCE = 512
GOALS = {"service": 0.97, "endpoint": 0.90, "streams": 0.75}
WARM_UP_TOKENS = 16
BARE_START_S = 420.0
DRAIN_S = 8.0  # for the turns in flight at a load's end
DEFAULT_SIZES = PromptSizes(200, 60, 30)  # if no service reports them
GRAPHS_MIB = 8192  # per engine: activations, graphs and contexts
OTHERS_MIB = 12288  # for processes that still run while the service starts
SMALL_KV_MIB = 8192  # for a small model


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one arm's window. Times in seconds; None: not measured in this arm."""

    arm: str
    num_at_once: int
    num_turns: int  # turns that ended in the window
    num_tokens: float
    seconds: float
    turn_p50_s: float
    turn_p99_s: float
    idle: float | None = None
    outside_p50_s: float | None = None
    outside_p99_s: float | None = None
    end_s: float | None = None  # p99 of finishing a session
    first_p50_s: float | None = None  # until a stream's first piece
    num_chunks: int | None = None
    scored_per_s: float | None = None
    cpu_s_per_turn: dict[str, float] = field(default_factory=dict)  # by kind of process

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def let_workers_import_loop() -> None:
    """Add this checkout to the path of the service's workers, which import the benchmark's loop."""
    paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def begin_load(options: argparse.Namespace, at_once: int) -> tuple[Workload, Window]:
    """Start a load now; returns it and its measured window."""
    begins_at = time.perf_counter() + options.ramp_s
    window = Window(begins_at, begins_at + options.window_s)
    load = Workload(
        num_trajectories=at_once * options.rounds,
        num_at_once=at_once,
        until=window.ends_at,
        num_turns=options.turns,
        num_sampled=options.sampled,
        spread=options.spread,
        has_tools=not options.no_tools,
    )
    return load, window


def figures_of(arm: str, load: Workload, window: Window, turns: Sequence[Turn], cpu_s: dict[str, float]) -> Figures:
    """Return the figures of a window. Raises RuntimeError if the load ended before it."""
    within = window.ended_within(turns)
    if len(within) < 2 or max(turn.began_at for turn in turns) < window.ends_at - window.seconds / 4:
        raise RuntimeError("the load ended before its window: give it more --rounds")
    turn_s = [turn.ended_at - turn.began_at for turn in within]
    outside_s = [turn.outside_s for turn in within if turn.outside_s is not None]
    in_engine_s = sum(
        window.share(turn) * (turn.ended_at - turn.began_at - (turn.outside_s or 0.0)) for turn in turns
    )
    return Figures(
        arm,
        load.num_at_once,
        num_turns=len(within),
        num_tokens=window.num_tokens(turns),
        seconds=window.seconds,
        turn_p50_s=statistics.median(turn_s),
        turn_p99_s=quantile(turn_s, 0.99),
        idle=1 - in_engine_s / (load.num_at_once * window.seconds) if outside_s or arm.startswith("bare") else None,
        outside_p50_s=statistics.median(outside_s) if outside_s else None,
        outside_p99_s=quantile(outside_s, 0.99) if outside_s else None,
        cpu_s_per_turn={kind: seconds / len(turns) for kind, seconds in cpu_s.items()},
    )


async def run_loops(
    url: str, load: Workload, *, drain_s: float = DRAIN_S
) -> tuple[list[Trajectory], dict[str, float]]:
    """Roll out as agent loops until the load's end, and cancel queued tasks `drain_s` later.

    Returns the records, and the CPU seconds until the load's end.
    """
    cpu, records = CpuSeconds(os.getpid()), []
    async with RolloutClient(url) as client, asyncio.TaskGroup() as group:
        run_id = f"loops-{time.time_ns():x}"
        rollout = await client.submit(load.tasks(), run_id=run_id, max_running=load.num_at_once)

        async def read() -> None:
            async for record in rollout:
                records.append(record)

        reading = group.create_task(read())
        await asyncio.wait([reading], timeout=load.until - time.perf_counter())
        cpu_s = cpu.used(children_of_this())
        await asyncio.wait([reading], timeout=drain_s)
        await rollout.cancel()
    if broken := [record for record in records if not record.is_complete and turns_of(record)]:
        raise RuntimeError(f"{len(broken)} trajectories are not whole: {broken[0].stop_reason}, {broken[0].error}")
    return records, cpu_s


async def run_chat(options: argparse.Namespace, url: str, at_once: int, *, is_streamed: bool) -> Figures:
    """Roll out as agents of the endpoint."""
    begun: list[tuple[CpuSeconds, Workload, Window]] = []

    def on_ready() -> Workload:
        begun.append((CpuSeconds(os.getpid()), *begin_load(options, at_once)))
        return begun[0][1]

    talk = partial(sessions, is_streamed=is_streamed)
    seen = await chat_from_processes(url, options.load_processes, talk, on_ready)
    ((cpu, load, window),) = begun
    arm = "streams" if is_streamed else "endpoint"
    figures = figures_of(arm, load, window, seen.turns, cpu.used(children_of_this()))
    return replace(
        figures,
        end_s=quantile(seen.finish_s, 0.99),
        first_p50_s=statistics.median(seen.first_s) if is_streamed else None,
        num_chunks=round(seen.num_chunks * figures.num_turns / len(seen.turns)) if is_streamed else None,
    )


async def run_idle(options: argparse.Namespace) -> Figures:
    """Leave the service idle for a window. Its CPU is in cores, where other arms have seconds per turn."""
    await asyncio.sleep(options.ramp_s)
    cpu = CpuSeconds(os.getpid())
    await asyncio.sleep(options.window_s)
    cores = {kind: seconds / options.window_s for kind, seconds in cpu.used(children_of_this()).items()}
    return Figures("idle", 0, 0, 0.0, options.window_s, 0.0, 0.0, cpu_s_per_turn=cores)


async def scored_within(url: str, window: Window, num_ids: int, vocab_size: int) -> float:
    """Score sequences during a window; returns the sequences per second."""
    await asyncio.sleep(window.begins_at - time.perf_counter())
    choose, num_scored = random.Random(0), 0
    async with RolloutClient(url) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(window.ends_at - time.perf_counter()), asyncio.TaskGroup() as group:

                async def keep_scoring() -> None:
                    nonlocal num_scored
                    while True:
                        await client.score([choose.choices(range(TOKENS_START, vocab_size), k=num_ids)])
                        num_scored += 1

                for _ in range(SCORES_AT_ONCE):
                    group.create_task(keep_scoring())
    return num_scored / window.seconds


_OTHER_CHILDREN: list[int] = []


def children_of_this() -> frozenset[int]:
    """Return the benchmark's own child processes, such as the waiting bare engine."""
    return frozenset(_OTHER_CHILDREN)


class BareProcess:
    """A bare engine in a separate process; it starts at once."""

    def __init__(self, arm: str, config: ServiceConfig, work: Path) -> None:
        self.arm = arm
        folder = work / f"bare-{len(_OTHER_CHILDREN)}"
        folder.mkdir()
        (folder / "config.json").write_text(config.model_dump_json())
        self._out = folder / "figures.jsonl"
        self._num_read = 0
        command = [sys.executable, "-m", "tests.benchmarks.gpu_bare", "--config", str(folder / "config.json")]
        self._process = subprocess.Popen(
            [*command, "--out", str(self._out)], stdin=subprocess.PIPE, cwd=CHECKOUT, text=True
        )
        _OTHER_CHILDREN.append(self._process.pid)

    async def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return its next output line.

        Raises RuntimeError if the process ended, TimeoutError if no line arrives.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                lines = self._out.read_text().split("\n") if self._out.exists() else [""]
                if len(lines) > self._num_read + 1:
                    self._num_read += 1
                    found: dict[str, Any] = json.loads(lines[self._num_read - 1])
                    return found
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self.arm} ended with status {self._process.returncode}")
                await asyncio.sleep(0.2)

    async def run(
        self, load: Workload, sizes: PromptSizes, timeout_s: float
    ) -> tuple[list[Turn], dict[str, float]]:
        """Run a load to its end; returns its turns and CPU seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"load": asdict(load), "sizes": asdict(sizes)}) + "\n")
        self._process.stdin.flush()
        found = await self.answer(timeout_s)
        return [Turn(*turn) for turn in found["turns"]], found["cpu_s"]

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.to_thread(self._process.wait, 30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@dataclass(slots=True)
class Measurement:
    """The work of one command, and its results so far."""

    options: argparse.Namespace
    found: list[Figures] = field(default_factory=list)
    starts: dict[str, dict[str, float]] = field(default_factory=dict)
    sizes: PromptSizes = DEFAULT_SIZES
    failures: list[str] = field(default_factory=list)
    vocab_size: int = 0

    async def run(self, config: ServiceConfig, work: Path) -> None:
        """Start all engines, and run all arms one after another."""
        options, self.vocab_size = self.options, model_sizes(config).vocab_size
        bares = [BareProcess(name, _with(config, settings), work) for name, settings in options.bares]
        try:
            if any(not arm.startswith("bare") for arm in options.arms):
                begun_at = time.perf_counter()
                async with running_service(config, work / "run") as url:
                    self.starts["service"] = {"start_s": time.perf_counter() - begun_at}
                    await self._run_arms(url, bares)
            else:
                await self._run_arms("", bares)
        finally:
            for bare in bares:
                await bare.close()

    async def _run_arms(self, url: str, bares: Sequence[BareProcess]) -> None:
        options = self.options
        for bare in bares:
            self.starts[bare.arm] = await bare.answer(BARE_START_S)
        say(f"all are up: {self.starts}; GPU {gpu_used_mib(options)} MiB")
        await asyncio.to_thread(wait_for, options.gate)
        by_name = {bare.arm: bare for bare in bares}
        arms = [arm for arm in options.arms if arm != "bare"] + list(by_name)
        await self._warm_up(url, bares)
        for cycle in range(options.cycles):
            for at_once in options.at_once:
                for arm in arms:
                    try:
                        async with asyncio.timeout(options.arm_s):
                            figures = await self._run_arm(url, arm, at_once, by_name.get(arm))
                    except (Exception, TimeoutError) as error:
                        say(f"{arm}, {at_once} at once, cycle {cycle}: failed: {error!r}")
                        self.failures.append(f"{arm} {at_once}: {error!r}"[:500])
                        continue
                    self._keep(figures)

    async def _warm_up(self, url: str, bares: Sequence[BareProcess]) -> None:
        """Use every slot of each engine once; the service's records give the prompt sizes."""
        most = max(self.options.at_once)
        load = Workload(most, most, num_turns=2, num_sampled=WARM_UP_TOKENS, has_tools=not self.options.no_tools)
        if url:
            records, _ = await run_loops(url, replace(load, until=time.perf_counter() + self.options.arm_s))
            self.sizes = PromptSizes.of(records)
            say(f"prompts: {self.sizes}")
        for bare in bares:
            await bare.run(replace(load, until=time.perf_counter() + self.options.arm_s), self.sizes, 120)

    async def _run_arm(self, url: str, arm: str, at_once: int, bare: BareProcess | None) -> Figures:
        if self.options.alternate is not None:
            await asyncio.sleep(1.0)  # lets the other command acquire the lock that this one has just released
        with locked(self.options.alternate):
            return await self._measure(url, arm, at_once, bare)

    async def _measure(self, url: str, arm: str, at_once: int, bare: BareProcess | None) -> Figures:
        if arm in ("endpoint", "streams"):
            return await run_chat(self.options, url, at_once, is_streamed=arm == "streams")
        if arm == "idle":
            return await run_idle(self.options)
        load, window = begin_load(self.options, at_once)
        if arm == "scored":
            scoring = scored_within(url, window, self.options.scored, self.vocab_size)
            (records, cpu_s), scored_per_s = await asyncio.gather(run_loops(url, load), scoring)
            turns = [turn for record in records for turn in turns_of(record)]
            return replace(figures_of(arm, load, window, turns, cpu_s), scored_per_s=scored_per_s)
        if bare is None:
            records, cpu_s = await run_loops(url, load)
            turns = [turn for record in records for turn in turns_of(record)]
        else:
            turns, cpu_s = await bare.run(load, self.sizes, self.options.arm_s)
        return figures_of(arm, load, window, turns, cpu_s)

    def _keep(self, figures: Figures) -> None:
        """Keep an arm's figures, also on disk, in case the run is cut short."""
        self.found.append(figures)
        outside = "" if figures.outside_p99_s is None else f", outside p99 {figures.outside_p99_s:.3f} s"
        say(f"{figures.arm}, {figures.num_at_once} at once: {figures.tokens_per_s:,.0f} tok/s{outside}")
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            document = {"starts": self.starts, "figures": [asdict(one) for one in self.found]}
            self.options.out.with_suffix(".partial.json").write_text(json.dumps(document))


def _with(config: ServiceConfig, settings: str) -> ServiceConfig:
    """Return the config with other settings of its engine, given as `key=value,...`."""
    engine = config.engine.model_dump()
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        engine[key] = json.loads(value)
    return ServiceConfig.model_validate({**config.model_dump(), "engine": engine})


def service_config(options: argparse.Namespace) -> ServiceConfig:
    """Return the service's config: defaults, except for the measured settings."""
    is_cpu, most = options.device == "cpu", max(options.at_once)
    engine: dict[str, object] = {
        "kind": options.engine,
        "device": options.device,
        "dtype": "float32" if is_cpu else "bfloat16",
        "max_running": -(-most // (options.replicas * options.split)),
        "block_size": 32 if is_cpu else 16,
        "gpu_memory_utilization": 0.85
        / options.num_engines
        / options.split,  # share of the memory that is free at the start
        "gpu_share": 1 / options.split,
        "tensor_parallel_size": options.tp,
        "max_context_tokens": options.context if options.model is None else None,
    }
    kv_mib = options.kv_mib or (256 if is_cpu else kv_mib_of_this_gpu(options))
    engine["kv_cache_mib"] = kv_mib // options.split
    if is_cpu:
        engine["num_cpus"] = 0.5
    fields: dict[str, object] = {"workers": {"capacity": most}, "endpoint": {"score_share": options.score_share}}
    if options.ingress is not None:
        fields["ingress_replicas"] = options.ingress
    model = model_folder(options.shape, options.device) if options.model is None else options.model
    return ServiceConfig.model_validate(
        {
            "model": str(model),
            "mode": "debug",
            "port": 0,
            "replicas": options.replicas * options.split,
            "engine": engine,
            **fields,
        }
    )


def kv_mib_of_this_gpu(options: argparse.Namespace) -> int:
    """Return an engine's share of the memory that the weights and graphs of all engines leave free."""
    if options.model is not None:
        return SMALL_KV_MIB
    weights_mib = SHAPES[options.shape].num_bytes("bfloat16") / options.tp / 2**20
    others_mib = 0 if options.gate is None else OTHERS_MIB
    free_mib = 0.9 * _nvidia_smi("memory.total") - others_mib
    return int(free_mib / options.num_engines - weights_mib - GRAPHS_MIB)


def gpu_used_mib(options: argparse.Namespace) -> int:
    """Return the GPU's memory in use; 0 without a GPU."""
    return _nvidia_smi("memory.used") if options.device == "cuda" and options.engine != "simulated" else 0


def _nvidia_smi(what: str) -> int:
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def wait_for(gate: Path | None) -> None:
    """Wait until the file exists, which means that other commands on this host have ended."""
    while gate is not None and not gate.exists():
        time.sleep(0.2)


@contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold the lock of a file; wait while another command holds it."""
    if file is None:
        yield
        return
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ratios(found: Sequence[Figures]) -> dict[str, float]:
    """Return each arm's tokens per second relative to `bare` at the same concurrency, as medians of the cycles."""
    medians = {
        key: statistics.median(one.tokens_per_s for one in found if (one.arm, one.num_at_once) == key)
        for key in dict.fromkeys((one.arm, one.num_at_once) for one in found)
    }
    return {
        f"{arm} {at_once}": round(value / medians["bare", at_once], 4)
        for (arm, at_once), value in medians.items()
        if arm != "bare" and ("bare", at_once) in medians
    }


def tables(found: Sequence[Figures]) -> dict[str, str]:
    """Return the table of all windows, in order, and the table of CPU seconds per 1,000 turns."""
    of_bare = ratios(found)

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else 1000 * seconds

    rows = [
        (
            f"{one.arm}, {one.num_at_once}",
            one.tokens_per_s,
            of_bare.get(f"{one.arm} {one.num_at_once}"),
            None if one.idle is None else 100 * one.idle,
            ms(one.outside_p50_s),
            ms(one.outside_p99_s),
            one.turn_p50_s,
            one.turn_p99_s,
            one.first_p50_s,
            one.end_s,
            one.num_turns,
            None if one.num_chunks is None else one.num_chunks / one.num_turns,
            one.scored_per_s,
        )
        for one in found
    ]
    columns = ["arm, in flight", "tok/s", "median of bare's", "idle %", "outside p50 ms", "p99 ms", "turn p50 s"]
    columns += ["p99 s", "first piece p50 s", "end s", "turns", "pieces a turn", "scored/s"]
    kinds = sorted({kind for one in found for kind in one.cpu_s_per_turn}, key=lambda kind: -sum(_cpu(found, kind)))
    cpu_rows = [
        (
            f"{one.arm}, {one.num_at_once}",
            *(1000 * one.cpu_s_per_turn.get(kind, 0.0) for kind in kinds),
            1000 * sum(one.cpu_s_per_turn.values()),
        )
        for one in found
    ]
    return {
        "": report.table(columns, rows),
        "CPU seconds for 1,000 turns": report.table(["arm, in flight", *kinds, "all"], cpu_rows),
    }


def _cpu(found: Sequence[Figures], kind: str) -> list[float]:
    return [one.cpu_s_per_turn.get(kind, 0.0) for one in found]


def parse() -> argparse.Namespace:
    """Parse the options; `--quick` sets options that were not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang", "simulated"), default="vllm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--model", help="a model folder, in place of a shape")
    parser.add_argument("--arms", default=",".join(ARMS[1:]))
    parser.add_argument("--bare", action="append", default=[], metavar="KEY=VALUE,...", help="one more bare engine")
    parser.add_argument("--set", default="", metavar="KEY=VALUE,...", help="of the service's engine, and of `bare`")
    parser.add_argument("--at-once", type=int, nargs="+", default=[512], help="trajectories in flight")
    parser.add_argument("--cycles", type=int, default=2, help="of all arms")
    parser.add_argument("--window-s", type=float, default=45.0)
    parser.add_argument("--ramp-s", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=12, help="of so many trajectories, at most")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sampled", type=int, default=160, help="tokens a turn, in the mean")
    parser.add_argument("--spread", type=float, default=0.5, help="0.5: turns of half to one and a half of that")
    parser.add_argument("--scored", type=int, default=512, help="tokens of a sequence that is scored")
    parser.add_argument("--score-share", type=float, default=1.0, help="`endpoint.score_share` of the service")
    parser.add_argument("--no-tools", action="store_true", help="a user's message stands for the tool's answer")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--split", type=int, default=1, help="engines of the service on each GPU")
    parser.add_argument("--alternate", type=Path, help="the file that another command has too")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ingress", type=int, help="ingress processes; else the service's default")
    parser.add_argument("--load-processes", type=int, default=4)
    parser.add_argument("--kv-mib", type=int, help="of the KV cache; else what the GPU has room for")
    parser.add_argument("--gate", type=Path, help="measure once this file exists; the service starts before")
    parser.add_argument("--context", type=int, default=2048, help="of a shape; a model has its own")
    parser.add_argument("--arm-s", type=float, default=120.0, help="the time limit of a window")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.arms = [arm for arm in ARMS if arm in options.arms.split(",")]
    if options.engine == "simulated":
        options.arms, options.bare = [arm for arm in options.arms if arm != "bare"], []
    plain = [("bare", "")] if "bare" in options.arms else []
    options.bares = plain + [(f"bare {settings}", settings) for settings in options.bare]
    has_service = any(arm != "bare" for arm in options.arms)
    options.num_engines = (len(options.bares) + has_service) * (1 if options.alternate is None else 2)
    return options


def main() -> None:
    """Print the tables; exit with 1 if an arm failed. Missed goals are printed, and are not a failure."""
    options = parse()
    let_workers_import_loop()
    measurement = Measurement(options)
    with tempfile.TemporaryDirectory() as work:
        try:
            asyncio.run(measurement.run(_with(service_config(options), options.set), Path(work)))
        except Exception as error:
            say(f"failed: {error!r}")
            measurement.failures.append(repr(error)[:500])
    found, of_bare = measurement.found, ratios(measurement.found)
    missed = [name for name, ratio in of_bare.items() if ratio < GOALS.get(name.split()[0], 0.0)]
    shown = tables(found)
    notes = [
        f"{arm} started in {', '.join(f'{k} {v:.0f}' for k, v in took.items())}"
        for arm, took in measurement.starts.items()
    ]
    notes += [f"below its goal: {name}" for name in missed] + [f"failed: {what}" for what in measurement.failures]
    shown["Notes"] = "\n".join(f"- {note}" for note in notes)
    results = {
        "figures": found,
        "starts": measurement.starts,
        "tokens_per_s": {f"{one.arm} {one.num_at_once}": round(one.tokens_per_s, 1) for one in found},
        "ratios": of_bare,
        "below_goal": missed,
        "failures": measurement.failures,
    }
    name = options.model or options.shape
    report.finish(f"Throughput, {options.engine}, {name}", shown, results, options.out)
    sys.exit(bool(measurement.failures) or not found)


if __name__ == "__main__":
    main()
