"""Replicas follow the work: the number of useful replicas, and a service that starts and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentloop.api.coordinator import QueueStatus, ReplicaStatus, RolloutStatus, ServiceStatus
from agentloop.client.client import RolloutClient
from agentloop.types import Limits, Load, Message, RolloutTask
from agentloop_servers.config.engines import EngineEntry
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import running_service
from agentloop_servers.processes import placement
from agentloop_servers.processes.placement import replicas_wanted

ROOT = Path(__file__).parents[2]


def replica(entry: str, num_leases: int, predicted: int, limit: int = 1000) -> ReplicaStatus:
    return ReplicaStatus(
        f"{entry}-{num_leases}-{predicted}",
        "ready",
        "simulated",
        0,
        Load(),
        num_leases,
        0.0,
        kv_predicted_tokens=predicted,
        kv_limit_tokens=limit,
        entry=entry,
    )


def status(*replicas: ReplicaStatus, num_queued: int = 0, num_held: int = 0, is_full: bool = True) -> ServiceStatus:
    queue = QueueStatus(num_queued, 0, sum(one.kv_predicted_tokens for one in replicas), 0, "no room" * is_full)
    held = RolloutStatus("r", num_queued, 0, 0, num_queued, num_held)
    return ServiceStatus(True, False, 0, replicas, 1, (held,), (), queue=queue)


ONE = [EngineEntry(name="a", replicas=1, max_replicas=4)]


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (status(), 1),  # no replica takes traffic yet
        (status(replica("a", 10, 900)), 1),
        (status(replica("a", 10, 1000), num_queued=10), 2),  # the same amount of KV is needed again
        # the held samples wait for new weights, not for a replica
        (status(replica("a", 10, 1000), num_queued=15, num_held=5), 2),
        # capacity is free: the workers are the limit
        (status(replica("a", 10, 1000), num_queued=10, is_full=False), 1),
        (status(replica("a", 10, 1000), num_queued=1000), 4),
        # two of the three replicas
        (status(replica("a", 10, 1000), replica("a", 9, 900), replica("a", 1, 100)), 2),
    ],
)
def test_as_many_as_the_work_needs_kv(seen: ServiceStatus, wanted: int) -> None:
    assert replicas_wanted(ONE, seen) == {"a": wanted}


def test_what_waits_goes_to_the_first_entry_that_has_room_for_it() -> None:
    fixed = EngineEntry(name="b", replicas=2)
    last = EngineEntry(name="c", replicas=1, max_replicas=9)
    seen = status(replica("a", 10, 1000), replica("b", 10, 1000), replica("c", 10, 1000), num_queued=50)
    assert replicas_wanted([*ONE, fixed, last], seen) == {"a": 4, "b": 2, "c": 2}


def test_the_most_is_not_below_the_least() -> None:
    with pytest.raises(ValidationError, match="max_replicas 1 is less than replicas 2"):
        EngineEntry(replicas=2, max_replicas=1)


@pytest.mark.ray
@pytest.mark.long
async def test_replicas_come_with_the_work_and_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_MORE_AFTER_S", 0.5)
    monkeypatch.setattr(placement, "_FEWER_AFTER_S", 4.0)
    engine = {"kind": "simulated", "device": "cpu", "num_cpus": 0.1, "max_context_tokens": 512}
    config = ServiceConfig.model_validate(
        {
            "model": str(ROOT / "examples" / "tiny_policy" / "v0"),
            "port": 0,
            "engines": [{**engine, "name": "sim", "replicas": 1, "max_replicas": 3}],
            "balancer": {"min_kv_share": 0.02, "max_kv_share": 0.05},
        }
    )
    limits = Limits(max_tokens_per_turn=300, max_turns=1, timeout_s=300)
    tasks = [RolloutTask(f"t{n}", (Message("user", "Count."),), limits=limits) for n in range(400)]
    async with running_service(config, tmp_path / "run") as url, RolloutClient(url) as client:

        async def replicas(enough: Callable[[int], bool]) -> None:
            async with asyncio.timeout(120):
                while not enough(len([one for one in (await client.status()).replicas if one.state == "ready"])):
                    await asyncio.sleep(0.2)

        rollout = await client.submit(tasks)
        await replicas(lambda num: num == 3)
        async with asyncio.timeout(240):
            records = [record async for record in rollout]
        calls = asyncio.create_task(steady_calls(client))  # while replicas end
        await replicas(lambda num: num == 1)
        assert not calls.done()
        calls.cancel()
        lost = (await client.status()).lost
    assert len({turn.replica_id for record in records for turn in record.path.turns}) == 3
    assert all(record.is_complete and record.attempt == 0 for record in records)
    assert [one.reason for one in lost] == ["it shut down", "it shut down"]


async def steady_calls(client: RolloutClient) -> None:
    """Make calls without a pause. An error of any call fails the test."""
    while True:
        await asyncio.gather(*(client.generate(list(range(1, 20)), max_tokens=200) for _ in range(4)))
