"""Two users' adapters in a service on real vLLM (CPU, float32), pushed under load and proved with transformers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from agentloop.client.client import RolloutClient
from agentloop.types import Limits, Message, RolloutTask, Trajectory
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import running_service
from tests.servers.test_users import ROOT, digest, write
from tests.support.transfer.adapters import POLICY, merged_model, write_adapter

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

SAME, DIFFERENT = 0.001, 0.03  # mean absolute difference of logprobs
USERS, NUM_VERSIONS, NUM_SAMPLES = ("alice", "bob"), 3, 8
LIMITS = Limits(max_turns=1, max_tokens_per_turn=48)


def gap(model: torch.nn.Module, ids: Sequence[int], start: int, logprobs: Sequence[float]) -> float:
    """Return the mean difference between a model's logprobs of `ids` from `start` on and the given ones."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    own = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
    return float((own - torch.tensor(logprobs)).abs().mean())


async def train(client: RolloutClient, folders: Sequence[Path]) -> list[Trajectory]:
    """Push every version while the rollouts of the previous one run."""
    records = []
    tasks = [RolloutTask(f"t{n}", (Message("user", f"Tell me about {n}."),), limits=LIMITS) for n in range(3)]
    await client.update_adapter(folders[0], version=0, name="math")
    for version in range(1, NUM_VERSIONS + 1):
        rollout = await client.submit(tasks, num_samples=NUM_SAMPLES, adapter="math")
        if version < NUM_VERSIONS:
            await asyncio.sleep(0.3)
            report = await client.update_adapter(folders[version], version=version, name="math")
            assert report.stall_ms == 0.0
        records += [record async for record in rollout]
    return records


async def test_every_token_is_of_its_users_adapter_and_version(tmp_path: Path) -> None:
    people = [{"name": name, "keys": [digest(name)], "adapters": True} for name in USERS]
    roots = {name: tmp_path / "weights" / name for name in USERS}
    for root in roots.values():
        root.mkdir(parents=True)
    folders = {
        name: [write_adapter(root / str(version), seed=10 * place + version) for version in range(NUM_VERSIONS)]
        for place, (name, root) in enumerate(roots.items(), 1)
    }
    engine = {"kind": "vllm", "device": "cpu", "dtype": "float32", "max_running": 16, "kv_cache_mib": 64}
    config = ServiceConfig(
        port=0,
        model=str(POLICY),
        users=str(write(tmp_path / "users.yaml", *people, ROOT)),
        weight_roots=[str(tmp_path / "weights")],
        engine={**engine, "block_size": 32, "num_threads": 1, "num_cpus": 0.5, "lora_rank": 8, "max_loras": 2},
    )
    async with running_service(config, tmp_path / "run") as url:
        clients = {name: RolloutClient(url, api_key=name) for name in USERS}
        async with clients["alice"], clients["bob"]:
            found = await asyncio.gather(*(train(clients[name], folders[name]) for name in USERS))
    models = {
        (name, version): merged_model(folders[name][version]) for name in USERS for version in range(NUM_VERSIONS)
    }
    versions, gaps = defaultdict(set), []
    for name, records in zip(USERS, found, strict=True):
        assert [record.is_complete for record in records] == [True] * 3 * NUM_SAMPLES * NUM_VERSIONS
        for record in records:
            (path,), ids = record.paths, [*record.path.prompt_ids.tolist(), *record.path.response_ids.tolist()]
            (span,), logprobs = path.weight_versions, path.logprobs.tolist()  # a call has a single version
            versions[name].add(span.version)
            of = {key: gap(model, ids, len(path.prompt_ids), logprobs) for key, model in models.items()}
            gaps.append(of.pop((name, span.version)))
            assert gaps[-1] < SAME, (name, record.adapter, span.version, gaps[-1], of)
            assert len(logprobs) < 8 or min(of.values()) > DIFFERENT, (name, span.version, of)
    assert {name: len(seen) for name, seen in versions.items()} == dict.fromkeys(USERS, NUM_VERSIONS)
    print(f"{len(gaps)} records, worst mean gap {max(gaps):.6f}")
