"""The real service under kills: two vLLM replicas on CPU, processes killed or stopped one after another.

At the end, every record, every turn and every token is accounted for.

    make soak                                    # 20 minutes, both cores
    make soak ARGS="--minutes 5 --seed 3"
    make soak ARGS="--kinds worker"              # the cost of one kind of process
    make soak ARGS="--results tests/benchmarks/RESULTS.md"

Load: rollouts through `RolloutClient`, agents in sessions through the OpenAI client, and weight updates,
alternately from a directory and from tensors; version n has the weights of the shipped checkpoint n % 2. Clients
retry calls as the SDK does, and no more. `lost`: accepted and without a record at the end. `doubled`: delivered or
stored twice. `recovered`: see `soak_recovery.py`. `wasted`: the share of the sampled tokens that is in no complete
record; tokens that an engine sampled after its last heartbeat are not counted. Exits with 1 if anything was lost,
doubled or mislabelled, or did not end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import yaml
from transformers import AutoModelForCausalLM

from agentloop.client.client import RolloutClient
from agentloop.client.rollout import load_tasks
from agentloop.errors import AgentLoopError
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader
from agentloop.types import Limits, RolloutTask, Trajectory
from tests.benchmarks import report
from tests.benchmarks.soak_processes import KINDS, OTHERS, Kill, Tree, release, strike
from tests.benchmarks.soak_recovery import Sight, recovered_s
from tests.servers.recompute import POLICY, difference

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "servers" / "cpu_push.yaml"
NUM_REPLICAS = 2
NUM_SUBMITTERS = 3
TASKS_PER_SUBMIT = 8
NUM_SAMPLES = 2
NUM_AGENTS = 6
SESSION_TURNS = 5
AGENT_RETRIES = 30  # the OpenAI client's waits grow to 8 s: longer than any process takes to recover
SETTLE_S = 300.0  # limit for accepted work to end, after the kills
STOPPED_FOR_GOOD_S = 120.0  # a stop of this length means that no supervisor detected it
MAX_RETURN_S = 120.0  # limit for a replica to rejoin, after the load has ended
MEAN_LOGPROB_TOLERANCE = 0.02
NUM_RECOMPUTED = 200


@dataclass(slots=True)
class Ledger:
    """Requests to the service, and its answers."""

    accepted: dict[str, set[tuple[str, int]]] = field(default_factory=dict)  # by rollout id
    delivered: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    # The answers of each finished session, turn by turn.
    sessions: dict[str, list[str]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)  # calls that failed with an error, by kind and error
    updates_s: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # reported as served
    attempted: set[int] = field(default_factory=lambda: {0})


class Soak:
    """One run. `await run()`, then read `tables`."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self._options = options
        self._out = out
        self._rng = random.Random(options.seed)
        self._ledger = Ledger()
        self._sights: list[Sight] = []
        self._kills: list[Kill] = []
        self._unnoticed = 0
        self._sampled: dict[str, int] = {}  # by replica id
        self._is_over = asyncio.Event()
        self.problems: list[str] = []

    async def run(self) -> dict[str, str]:
        """Return the tables, by heading."""
        async with self._service() as (url, self._tree):
            seconds = await self._drive(url)
            found = await asyncio.to_thread(self._records)
        left = await asyncio.to_thread(_gone, self._tree)
        if left:
            self.problems.append(f"processes left: {left}")
        return await asyncio.to_thread(self._tables, found, seconds)

    async def _drive(self, url: str) -> float:
        """Run load and kills until all accepted work has ended. Returns the elapsed seconds."""
        async with RolloutClient(url, retry_timeout_s=240.0) as client, asyncio.TaskGroup() as group:
            watching = [group.create_task(one) for one in (self._watch(url), self._measure())]
            load = [group.create_task(self._submit(client, n)) for n in range(NUM_SUBMITTERS)]
            load += [group.create_task(self._agent(client, n)) for n in range(NUM_AGENTS)]
            load.append(group.create_task(self._train(client)))
            started = time.monotonic()
            await asyncio.sleep(self._options.every_s)
            while time.monotonic() - started < self._options.minutes * 60:
                group.create_task(self._strike())
                await asyncio.sleep(self._options.every_s)
            self._is_over.set()
            _, late = await asyncio.wait(load, timeout=SETTLE_S)
            if late:
                self.problems.append(f"{len(late)} clients had not ended {SETTLE_S:g} s after the last kill")
            await self._until_whole()
            for task in (*late, *watching):
                task.cancel()
        return time.monotonic() - started

    async def _until_whole(self) -> None:
        """Wait until the processes killed last have been replaced."""
        until = time.monotonic() + MAX_RETURN_S
        while len(self._sights[-1].ready) < NUM_REPLICAS and time.monotonic() < until:
            await asyncio.sleep(0.5)

    # Service

    @contextlib.asynccontextmanager
    async def _service(self) -> AsyncIterator[tuple[str, Tree]]:
        document = yaml.safe_load(CONFIG.read_text())
        document["applications"][0]["args"].update(port=0, model=str(POLICY / "v0"))
        config = self._out / "soak.yaml"
        config.write_text(yaml.safe_dump(document))
        arguments = ["-m", "agentloop_servers.cli", "serve", "--config", str(config), "--out", str(self._out)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "400"},
            stdout=asyncio.subprocess.PIPE,
            stderr=(self._out / "stderr.txt").open("w"),
            start_new_session=True,
        )
        tree = Tree(process.pid)
        try:
            assert process.stdout is not None
            async with asyncio.timeout(400):
                while line := (await process.stdout.readline()).decode():
                    if line.startswith("ready at"):
                        break
                else:
                    raise SystemExit(f"the service did not start: {(self._out / 'stderr.txt').read_text()[-2000:]}")
            tree.refresh()
            yield line.split()[2], tree
        finally:
            tree.refresh()
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                try:
                    await asyncio.wait_for(process.wait(), 90.0)
                except TimeoutError:
                    self.problems.append("the service did not end within 90 s of Ctrl-C")
                    process.kill()
                    await process.wait()
            if process.returncode not in (130, -9):
                self.problems.append(f"the service ended with {process.returncode}")

    # Load

    async def _submit(self, client: RolloutClient, number: int) -> None:
        """Run rollouts one after another, and read each to its end."""
        tasks, rng, ledger = load_tasks(ROOT / "examples/data/tasks.jsonl"), random.Random(number), self._ledger
        while not self._is_over.is_set():
            chosen = rng.sample(tasks, TASKS_PER_SUBMIT)
            if number == 0:
                limits = Limits(max_turns=6, max_tokens_per_turn=256)
                loop = "tests.support.fleet.live_run:Talk"  # long trajectories: most of them meet a kill
                chosen = [RolloutTask(one.task_id, one.messages, loop=loop, limits=limits) for one in chosen]
            try:
                rollout = await client.submit(chosen, num_samples=NUM_SAMPLES)
                for rollout_id in rollout.rollout_ids:
                    ledger.accepted[rollout_id] = {(t.task_id, s) for t in chosen for s in range(NUM_SAMPLES)}
                async for record in rollout:
                    ledger.delivered[record.rollout_id, record.task_id, record.sample_index] += 1
            except AgentLoopError as error:
                ledger.refused[f"rollout: {error.code}"] += 1

    async def _agent(self, client: RolloutClient, number: int) -> None:
        """Run sessions one after another."""
        ledger, rng = self._ledger, random.Random(number)
        while not self._is_over.is_set():
            answers: list[str] = []
            try:
                async with client.session(max_retries=AGENT_RETRIES, timeout_s=120.0) as session:
                    said: list[Any] = []
                    for _ in range(SESSION_TURNS):
                        said.append(
                            {"role": "user", "content": f"What is {rng.randrange(99)} + {rng.randrange(99)}?"}
                        )
                        answer = await session.openai.chat.completions.create(
                            model="any", messages=said, max_tokens=64
                        )
                        text = answer.choices[0].message.content or ""
                        answers.append(text)
                        said.append({"role": "assistant", "content": text})
                        await asyncio.sleep(rng.uniform(0.0, 1.0))
                    await session.finish(reward=0.0)
                    ledger.sessions[session.session_id] = answers
            except (AgentLoopError, openai.OpenAIError) as error:
                ledger.refused[f"session: {getattr(error, 'code', None) or type(error).__name__}"] += 1
                await asyncio.sleep(1.0)

    async def _train(self, client: RolloutClient) -> None:
        """Update the weights periodically; version n has the weights of checkpoint n % 2."""
        ledger, version = self._ledger, 0
        models = [AutoModelForCausalLM.from_pretrained(POLICY / f"v{n}") for n in (0, 1)]
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), self._options.update_s)
            if self._is_over.is_set():
                return
            version += 1
            ledger.attempted.add(version)
            place = version % 2
            weights = POLICY / f"v{place}" if version % 4 < 2 else models[place].named_parameters()
            began = time.monotonic()
            try:
                made = await client.update_weights(weights, version=version, timeout_s=120.0)
            except AgentLoopError as error:
                ledger.refused[f"update: {error.code}"] += 1
            else:
                ledger.versions.append(made.version)
                ledger.updates_s.append(time.monotonic() - began)

    # Kills

    async def _strike(self) -> None:
        rng, options = self._rng, self._options
        self._tree.refresh()
        kinds = [kind for kind in options.kinds if self._tree.of(kind)]
        if not kinds:
            return
        kind = rng.choice(kinds)
        victim = rng.choice(self._tree.of(kind))
        stop_s = rng.choice((None, None, rng.uniform(2.0, 8.0), float("inf") if rng.random() < 0.3 else 4.0))
        kill = strike(kind, victim, stop_s)
        self._kills.append(kill)
        print(f"{time.strftime('%H:%M:%S')} {kill.name} {kind} {victim.pid}", flush=True)
        if stop_s is None:
            return
        until = time.monotonic() + min(stop_s, STOPPED_FOR_GOOD_S)
        while time.monotonic() < until and victim.is_running():
            await asyncio.sleep(0.2)
        kill.over_at_s = time.monotonic()
        is_for_good = stop_s == float("inf")
        if release(kill, is_killed=is_for_good) and is_for_good:
            self._unnoticed += 1

    async def _watch(self, url: str) -> None:
        """Poll the service from outside, twice a second."""
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with (
            RolloutClient(url, timeout_s=2.0, retry_timeout_s=0.01) as client,
            aiohttp.ClientSession(timeout=timeout),
        ):
            while True:
                status = None
                with contextlib.suppress(AgentLoopError):
                    status = await client.status()
                for one in status.replicas if status is not None else ():
                    known = self._sampled.get(one.replica_id, 0)
                    self._sampled[one.replica_id] = max(known, one.load.num_sampled_tokens)
                self._tree.refresh()
                living = {kind: frozenset(self._tree.of(kind)) for kind in KINDS}
                self._sights.append(Sight(time.monotonic(), status, self._ledger.delivered.total(), living))
                await asyncio.sleep(0.5)

    async def _measure(self) -> None:
        while True:
            self._tree.sample()
            await asyncio.sleep(5.0)

    # Results

    def _records(self) -> dict[str, list[Trajectory]]:
        """Return the store's records, by rollout."""
        (path,) = (run for run in self._out.glob(f"*/{STORE_NAME}") if not run.parent.is_symlink())
        reader = TrajectoryReader(path)
        try:
            return {name: [record for _, record in reader.read(name, 0, 1 << 30)] for name in reader.rollouts()}
        finally:
            reader.close()

    def _tables(self, found: dict[str, list[Trajectory]], seconds: float) -> dict[str, str]:
        ledger, everything = self._ledger, [record for records in found.values() for record in records]
        keys = {
            name: Counter((one.task_id, one.sample_index) for one in records) for name, records in found.items()
        }
        lost = sum(len(wanted - set(keys.get(name, ()))) for name, wanted in ledger.accepted.items())
        doubled = sum(count - 1 for name in ledger.accepted for count in keys.get(name, Counter()).values())
        doubled += sum(count - 1 for count in ledger.delivered.values())
        undelivered = sum(len(wanted) for wanted in ledger.accepted.values()) - len(ledger.delivered)
        sessions_lost, turns_wrong = self._check_sessions(found.get("sessions", []))
        named, other = _recomputed(everything, self._rng)
        reasons = Counter(one.stop_reason.value for one in everything if not one.is_complete)
        num_sampled = sum(self._sampled.values())
        num_kept = sum(_num_sampled(one) for one in everything if one.is_complete)
        mean = float(named.mean())
        for problem, count in (
            ("trajectories lost", lost),
            ("records doubled", doubled),
            ("records not delivered", undelivered),
            ("sessions lost", sessions_lost),
            ("sessions whose record says otherwise than the client heard", turns_wrong),
            (f"mean |recorded - recomputed| is {mean:.4f}", int(mean > MEAN_LOGPROB_TOLERANCE)),
        ):
            if count:
                self.problems.append(f"{problem}: {count}")
        served = [one.status.weight_version for one in self._sights if one.status is not None][-1]
        if served not in ledger.attempted or (ledger.versions and (served or 0) < max(ledger.versions)):
            self.problems.append(f"version {served} is served after reports of {ledger.versions[-3:]}")
        minutes = seconds / 60
        outcome = [
            ("minutes, settling included", f"{minutes:.1f}"),
            ("kills and stops", len(self._kills)),
            ("stopped for good and noticed by nobody", self._unnoticed),
            ("trajectories accepted / lost / doubled", f"{ledger.delivered.total():,} / {lost} / {doubled}"),
            (
                "sessions finished / lost / other than heard",
                f"{len(ledger.sessions):,} / {sessions_lost} / {turns_wrong}",
            ),
            ("records incomplete, by reason", _listed(reasons)),
            ("calls that failed openly after their repeats", _listed(ledger.refused)),
            (
                "weight updates / p50 s / max s",
                f"{len(ledger.versions)} / {_p50(ledger.updates_s):.1f} / {max(ledger.updates_s, default=0):.1f}",
            ),
            (
                "|recorded - recomputed| mean / p99.9 / max",
                f"{mean:.5f} / {np.quantile(named, 0.999):.4f} / {named.max():.4f}",
            ),
            ("the same under the other checkpoint, mean", f"{other.mean():.3f}"),
            ("tokens sampled / in complete records", f"{num_sampled:,} / {num_kept:,}"),
            ("wasted, share", f"{1 - num_kept / max(1, num_sampled):.1%}"),
            ("tokens sampled again per kill", f"{(num_sampled - num_kept) / max(1, len(self._kills)):,.0f}"),
            ("trajectories begun again", sum(one.attempt > 0 for one in everything)),
        ]
        tables = {"Outcome": report.table(("", ""), outcome)}
        tables["Time to recover, s"] = report.table(
            ("process", "blow", "times", "p50", "max", "never"), self._recoveries()
        )
        rows = []
        for kind in (*KINDS, *OTHERS, "service"):
            one = self._tree.growth(kind)
            if one is not None:
                figures = (one.rss_mib, one.rss_slope, one.threads, one.threads_slope, one.files, one.files_slope)
                rows.append((kind, one.num_processes, *(float(value) for value in figures)))
        columns = ("process", "lives", "MiB", "MiB/min", "threads", "threads/min", "files", "files/min")
        tables["Size (at the end, and growth a minute past each process's first 2 minutes)"] = report.table(
            columns, rows
        )
        return tables

    def _check_sessions(self, records: list[Trajectory]) -> tuple[int, int]:
        """Count the finished sessions without exactly one record, and those whose record has different turns."""
        by_group = defaultdict(list)
        for record in records:
            by_group[record.group_id].append(record)
        num_lost = num_wrong = 0
        for session_id, answers in self._ledger.sessions.items():
            own = by_group.get(session_id, [])
            if len(own) != 1:
                num_lost += 1
                continue
            said = [one.content for one in own[0].messages if one.role == "assistant"]
            num_wrong += said != answers or not own[0].is_complete
        return num_lost, num_wrong

    def _recoveries(self) -> list[tuple[object, ...]]:
        by_kind: dict[tuple[str, str], list[float | None]] = defaultdict(list)
        for kill in self._kills:
            by_kind[kill.kind, kill.name].append(recovered_s(kill, self._sights))
        rows: list[tuple[object, ...]] = []
        for (kind, name), times in sorted(by_kind.items()):
            known = [one for one in times if one is not None]
            rows.append((kind, name, len(times), _p50(known), max(known, default=0.0), len(times) - len(known)))
        return rows


def _recomputed(records: list[Trajectory], rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Return |recorded - recomputed| of some records' tokens, under the reported and the other checkpoint."""
    linear = [one for one in records if len(one.paths) == 1 and _num_sampled(one)]
    resumed = [
        one for one in linear if one.attempt or one.num_resampled_turns or len(one.paths[0].weight_versions) > 1
    ]
    chosen = rng.sample(resumed, min(len(resumed), NUM_RECOMPUTED // 2))
    chosen += rng.sample(linear, min(len(linear), NUM_RECOMPUTED - len(chosen)))
    found = [difference(_row(one)) for one in chosen]
    return np.concatenate([one.named for one in found]), np.concatenate([one.other for one in found])


def _row(record: Trajectory) -> dict[str, Any]:
    (path,) = record.paths
    spans = [{"version": one.version % 2, "start": one.start, "end": one.end} for one in path.weight_versions]
    arrays = {"prompt_ids": path.prompt_ids.tolist(), "response_ids": path.response_ids.tolist()}
    return {**arrays, "response_mask": path.response_mask, "logprobs": path.logprobs, "weight_versions": spans}


def _num_sampled(record: Trajectory) -> int:
    return sum(int(path.response_mask.sum()) for path in record.paths)


def _gone(tree: Tree) -> list[str]:
    """Wait for every process to end; return the processes that still run."""
    until = time.monotonic() + 30.0
    while (left := tree.living()) and time.monotonic() < until:
        time.sleep(0.5)
    return left


def _p50(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=20.0, help="between two kills")
    parser.add_argument("--update-s", type=float, default=30.0, help="between two weight updates")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the run directory here")
    parser.add_argument("--out", type=Path, help="write the tables as JSON too")
    parser.add_argument("--results", type=Path, help="replace the section of this page")
    return parser.parse_args()


def main() -> None:
    """Run the soak, print the tables, and exit with 1 on a failure."""
    options = _parsed()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        out = options.keep or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        soak = Soak(options, out)
        tables = asyncio.run(soak.run())
        title = "Soak: kills under load (CPU)"
        report.finish(title, tables, tables, options.out)
        if options.results is not None:
            report.replace_section(options.results, title, tables)
        for problem in soak.problems:
            print(f"PROBLEM: {problem}")
        sys.exit(1 if soak.problems else 0)


if __name__ == "__main__":
    main()
