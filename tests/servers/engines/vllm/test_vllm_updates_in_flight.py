"""64 trajectories of the shipped policy run during five weight updates, under each KV policy.

The coordinator, worker and tools are real, over one real vLLM engine on CPU for all three policies.

The proof is independent: transformers recomputes the logprob of every sampled token, given exactly the ids before
it, with the weights of the version that its span names. The result equals the recorded logprob wherever all KV
before the token is from that version: always under RECOMPUTE, up to a turn's first update under FRESH, and up to a
trajectory's first update under KEEP. The differences of the other tokens are the cost of those policies; they are
measured and printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentloop import parts
from agentloop.api.coordinator import ReplicaRegistration, ReplicaReport, UpdateReport
from agentloop.client.rollout import load_tasks
from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import OnProgress, WeightUpdate
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.rollout.tool import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.worker import Worker
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import GenerateRequest, Generation, KVPolicy, Limits, RolloutGroup, TokenPath, Trajectory
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.servers.recompute import POLICY, logprobs

pytestmark = [pytest.mark.engine, pytest.mark.long]

TASKS = Path(__file__).parents[4] / "examples" / "data" / "tasks.jsonl"
NUM_GROUPS, NUM_SAMPLES = 32, 2
NUM_UPDATES = 5
TURNS_PER_UPDATE = 24  # turns that end between two updates, of at least 200
LIMITS = Limits(max_turns=6, max_tokens_per_turn=64)
REPLICA = "replica-0"
NOISE = 0.6  # in standard deviations of the tensor
SOFTNESS = 0.7  # divides the logits: `v0` is so certain of most tokens that noise would not show in their logprobs
SAME = 0.02  # absolute difference of logprobs, in nats
DIFFERENT = 0.2


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Six model folders: `v0` softened, and five copies of it with different noise."""
    root = tmp_path_factory.mktemp("weights")
    folders = []
    for number in range(NUM_UPDATES + 1):
        folder = root / f"w{number}"
        shutil.copytree(POLICY / "v0", folder)
        generator = torch.Generator().manual_seed(number)
        noise = NOISE if number > 0 else 0.0
        tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        for name, tensor in tensors.items():
            tensors[name] = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        tensors["model.norm.weight"] *= SOFTNESS
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    return tuple(folders)


def weights_of(version: int) -> int:
    """Return the folder of a version: 0, then the other five in rotation."""
    return 0 if version == 0 else (version - 1) % NUM_UPDATES + 1


@pytest.fixture(scope="module")
async def engine(weights: tuple[Path, ...]) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(
        VllmConfig(
            model=str(weights[0]),
            initial_version=0,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=64,
            kv_cache_memory_bytes=128 * 2**20,
        )
    )
    await engine.start()
    yield engine
    await engine.close()


class CountedTurns:
    """The engine as the worker sees it, counting the turns that have ended."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._num_ended = 0
        self._is_changed = asyncio.Event()

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        generation = await self._engine.generate(request, on_progress)
        self._num_ended += 1
        self._is_changed.set()
        return generation

    async def reached(self, num_turns: int) -> None:
        async with asyncio.timeout(60):
            while self._num_ended < num_turns:
                self._is_changed.clear()
                await self._is_changed.wait()


@asynccontextmanager
async def service(
    engine: VllmEngine, turns: CountedTurns, kv_policy: KVPolicy, folder: Path
) -> AsyncIterator[Coordinator]:
    """A coordinator with one replica, and one worker that runs all its samples."""
    store = TrajectoryStore(folder / "trajectories.sqlite")
    coordinator = Coordinator(
        store, lambda url: engine, CoordinatorConfig(), RealClock(), probe=lambda url: engine.check_health()
    )
    await coordinator.start()
    await coordinator.replicas.register(
        ReplicaRegistration(REPLICA, "local://", engine.info, engine.weight_version)
    )
    toolbox = Toolbox(load_tools(list(tools := parts.registered(parts.DEFAULT_TOOLS)), tools))
    renderer = TemplateRenderer.from_directory(POLICY / "v0")
    worker = Worker(
        "worker-0",
        coordinator.rollouts,
        lambda url: turns,
        renderer,
        get_parser("hermes"),
        toolbox,
        WorkerConfig(kv_policy=kv_policy),
        max_context_tokens=engine.info.max_context_tokens,
        vocab_size=engine.info.vocab_size,
    )

    async def heartbeat() -> None:
        while True:
            assert await coordinator.replicas.heartbeat(REPLICA, ReplicaReport(engine.load(), engine.is_usable))
            await asyncio.sleep(1.0)

    try:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(heartbeat())
            group.create_task(worker.run())
            try:
                yield coordinator
            finally:
                worker.close()
                beating.cancel()
        await coordinator.check_health()
    finally:
        await coordinator.close()
        await toolbox.close()


def work() -> tuple[RolloutGroup, ...]:
    tasks = [task for task in load_tasks(TASKS) if task.task_id.startswith("three_calls")][:NUM_GROUPS]
    return tuple(RolloutGroup(task.task_id, replace(task, limits=LIMITS), NUM_SAMPLES, "r") for task in tasks)


async def roll_out(
    engine: VllmEngine, kv_policy: KVPolicy, weights: tuple[Path, ...], folder: Path
) -> tuple[list[Trajectory], list[UpdateReport]]:
    """Return all trajectories, and the reports of the updates that were made while they ran."""
    first_version = engine.weight_version
    assert first_version is not None
    turns, reports = CountedTurns(engine), []
    async with asyncio.timeout(120), service(engine, turns, kv_policy, folder) as coordinator:
        await coordinator.rollouts.submit("r", work())
        for number in range(1, NUM_UPDATES + 1):
            await turns.reached(number * TURNS_PER_UPDATE)
            version = first_version + number
            directory = folder / f"version-{version}"
            directory.mkdir()
            os.link(weights[weights_of(version)] / "model.safetensors", directory / "model.safetensors")
            reports.append(
                await coordinator.replicas.update_weights(WeightUpdate(version, str(directory)), kv_policy)
            )
        found: list[Trajectory] = []
        cursor = 0
        while len(found) < NUM_GROUPS * NUM_SAMPLES:
            page = (await coordinator.rollouts.read("r", cursor, 1000, 60)).decoded()
            found += page.trajectories
            cursor = page.cursor
    return found, reports


@dataclass(frozen=True)
class Differences:
    """|recorded - recomputed| of sampled tokens, in nats: under the version of each token, and under another."""

    named: np.ndarray
    other: np.ndarray
    is_settled: np.ndarray  # according to the KV policy, all KV before the token is from its version


def differences(trajectory: Trajectory, kv_policy: KVPolicy, weights: tuple[Path, ...]) -> Differences:
    """Compare recorded and recomputed logprobs.

    Raises AssertionError unless the version spans cover exactly the sampled tokens, each once.
    """
    (path,) = trajectory.paths
    ids, first = [*path.prompt_ids.tolist(), *path.response_ids.tolist()], len(path.prompt_ids)
    versions = versions_of(path)
    seen = trajectory.versions
    recomputed = {version: logprobs(ids, weights[weights_of(version)])[first:] for version in seen}
    if len(seen) == 1:
        recomputed[seen[0] + 1] = logprobs(ids, weights[weights_of(seen[0] + 1)])[first:]
    named, other = np.zeros(len(versions)), np.zeros(len(versions))
    for version in seen:
        wrong = next(one for one in recomputed if one != version)
        here = versions == version
        named[here] = np.abs(path.logprobs - recomputed[version])[here]
        other[here] = np.abs(path.logprobs - recomputed[wrong])[here]
    mask = path.response_mask
    return Differences(named[mask], other[mask], is_settled(path, versions, kv_policy)[mask])


def versions_of(path: TokenPath) -> np.ndarray:
    """Return the version of every token of the response, -1 for observed tokens."""
    versions = np.full(len(path.response_ids), -1)
    for span in path.weight_versions:
        assert (versions[span.start : span.end] == -1).all(), "spans overlap"
        versions[span.start : span.end] = span.version
    assert ((versions >= 0) == path.response_mask).all(), "spans cover other tokens than the sampled ones"
    return versions


def is_settled(path: TokenPath, versions: np.ndarray, kv_policy: KVPolicy) -> np.ndarray:
    """Return a mask of the tokens for which all KV before the token must be from the token's version."""
    if kv_policy is KVPolicy.RECOMPUTE:
        return np.full(len(versions), True)
    if kv_policy is KVPolicy.KEEP:
        return versions == versions[path.turns[0].start]
    settled = np.full(len(versions), False)
    for turn in path.turns:
        settled[turn.start : turn.end] = versions[turn.start : turn.end] == versions[turn.start]
    return settled


def joined(parts: list[Differences]) -> Differences:
    return Differences(
        named=np.concatenate([part.named for part in parts]),
        other=np.concatenate([part.other for part in parts]),
        is_settled=np.concatenate([part.is_settled for part in parts]),
    )


def figures_of(found: Differences) -> dict[str, dict[str, float]]:
    """Return count, number of differences and size of the difference (nats), for settled and other tokens."""
    figures = {}
    for kind, mask in (("settled", found.is_settled), ("mixed", ~found.is_settled)):
        if mask.any():
            named, other = found.named[mask], found.other[mask]
            figures[kind] = {
                "num_tokens": len(named),
                "num_off": int((named > SAME).sum()),
                "mean": round(float(named.mean()), 5),
                "max": round(float(named.max()), 5),
                "mean_under_another_version": round(float(other.mean()), 5),
            }
    return figures


@pytest.mark.parametrize(
    "kv_policy",
    [
        # the default policy, and the others
        one if one is KVPolicy.RECOMPUTE else pytest.param(one, marks=pytest.mark.long)
        for one in KVPolicy
    ],
)
async def test_every_token_is_of_the_version_it_names(
    engine: VllmEngine,
    weights: tuple[Path, ...],
    tmp_path: Path,
    kv_policy: KVPolicy,
    record_property: Callable[[str, object], None],
) -> None:
    first_version = engine.weight_version
    assert first_version is not None
    trajectories, reports = await roll_out(engine, kv_policy, weights, tmp_path)
    assert len(trajectories) == NUM_GROUPS * NUM_SAMPLES
    assert all(one.is_complete for one in trajectories)
    assert [report.version - first_version for report in reports] == [1, 2, 3, 4, 5]
    seen = Counter(version - first_version for one in trajectories for version in one.versions)
    assert {1, 2, 3, 4, 5} <= set(seen)
    num_mixed = sum(len(one.versions) > 1 for one in trajectories)
    assert num_mixed >= len(trajectories) / 3

    found = joined([differences(one, kv_policy, weights) for one in trajectories])
    figures = figures_of(found)
    record_property("figures", figures)
    stalls_ms = [round(report.stall_ms) for report in reports]
    print(f"{kv_policy}: {num_mixed} mixed, stalls {stalls_ms} ms, {json.dumps(figures)}")
    settled = figures["settled"]
    assert settled["num_off"] == 0
    if kv_policy is KVPolicy.RECOMPUTE:
        assert settled["mean_under_another_version"] > DIFFERENT
    else:
        assert settled["mean_under_another_version"] > 5 * SAME
        assert SAME < figures["mixed"]["mean"] < figures["mixed"]["mean_under_another_version"]
