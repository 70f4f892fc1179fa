"""A policy, a judge and a user simulator in one service: three vLLM engines of the tiny policies on a CPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from agentloop.client.client import RolloutClient
from agentloop.types import StopReason
from agentloop_servers.config.service import ServiceConfig, WorkerSettings
from agentloop_servers.local import running_service

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


async def test_the_users_words_are_observed_and_the_judge_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In isolated processes, which reach the other models through their worker."""
    monkeypatch.chdir(ROOT)
    example = importlib.import_module("examples.05_judge")
    config = ServiceConfig.load(ROOT / "servers" / "three.yaml")
    workers = WorkerSettings(replicas=1, isolation="process", max_processes=2)
    config = config.model_copy(update={"port": 0, "workers": workers})
    sampled = {}
    async with running_service(config, tmp_path / "run") as url, RolloutClient(url) as client:
        rollout = await client.submit(example.tasks(2), num_samples=2)
        records = [record async for record in rollout]
        for name in ("judge", "user"):
            async with RolloutClient(f"{url}/models/{name}") as model:
                sampled[name] = sum(one.load.num_sampled_tokens for one in (await model.status()).replicas)
    assert len(records) == 4
    assert all(sampled.values()), sampled
    talked = [one for one in records if one.stop_reason is StopReason.COMPLETED]
    assert talked
    for record in talked:
        roles = [message.role for message in record.messages]
        assert roles.count("user") == 2, roles
        assert {span.version for path in record.paths for span in path.weight_versions} == {1}
        assert record.reward is not None or "contains no yes, no or number" in (record.reward_error or "")
