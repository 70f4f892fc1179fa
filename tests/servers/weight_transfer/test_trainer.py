"""A trainer in one process, against the real HTTP app; `test_trainer_group.py` tests several processes."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import torch
from structlog.testing import capture_logs

from agentloop.api.coordinator import ReplicaStatus, ServiceStatus
from agentloop.client.client import RolloutClient
from agentloop.client.push import PushOptions
from agentloop.engine.interface import Load, TensorInfo, WeightUpdate
from agentloop.errors import AgentLoopError, Conflict, DeadlineExceeded, InvalidRequest, WeightUpdateFailed
from agentloop.types import KVPolicy
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.app import create_app
from agentloop_servers.weight_transfer.trainer import TensorPusher, host_towards, way_to_replicas
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.transfer.receiving import FakeSender, ReceivingFleet

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor([1, 2])}


@dataclass
class PushingSite:
    """A service, and a pusher whose senders do not send."""

    coordinator: FakeCoordinator
    client: RolloutClient
    senders: list[FakeSender] = field(default_factory=list)
    sender_options: dict[str, object] = field(default_factory=dict)

    def make_sender(self, host: str, transport: str, is_encrypted: bool) -> FakeSender:
        self.senders.append(FakeSender(host, transport, **self.sender_options))  # type: ignore[arg-type]
        return self.senders[-1]

    def pusher(self, answer_grace_s: float = 20.0, listen_host: str | None = None) -> TensorPusher:
        return TensorPusher(self.client, listen_host, make_sender=self.make_sender, answer_grace_s=answer_grace_s)


@pytest.fixture
async def site() -> AsyncIterator[PushingSite]:
    coordinator = FakeCoordinator()
    app = create_app(coordinator, ReversingEngine().connect, Keys.of(["user"], "admin"))
    async with serving(app) as url, RolloutClient(url, api_key="user", admin_key="admin") as client:
        yield PushingSite(coordinator, client)


async def forever(update: WeightUpdate) -> None:
    await asyncio.Event().wait()


def sent_dtypes(update: WeightUpdate) -> list[str]:
    assert update.push is not None
    return [tensor.dtype for tensor in update.push.tensors]


async def test_tensors_arrive_as_they_are_in_the_fleets_dtype(site: PushingSite) -> None:
    site.coordinator.weight_dtypes = ["bfloat16", "bfloat16"]
    fleet = ReceivingFleet()
    site.coordinator.on_update = fleet.take
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 1))
    try:
        for version in (1, 2):
            with torch.no_grad():
                model[0].weight.fill_(version)
            report = await site.client.update_weights(
                model.named_parameters(), version=version, kv_policy=KVPolicy.KEEP
            )
            assert (report.version, report.kv_policy, report.stall_ms) == (version, KVPolicy.KEEP, 20.0)
            received = fleet.received[-1]
            assert list(received) == ["0.weight", "0.bias", "1.weight", "1.bias"]
            for name, parameter in model.named_parameters():
                assert received[name].equal(parameter.detach().bfloat16())
    finally:
        fleet.close()
    assert fleet.transports == ["shm", "shm"]
    sources = [update.push for update, _ in site.coordinator.updates]
    assert sources[0].addresses == sources[1].addresses  # the sender was kept
    assert sources[0].addresses[0].startswith("127.0.0.1:")
    assert sources[0].token != sources[1].token


@pytest.mark.parametrize(
    ("fleet", "dtype", "sent"),
    [
        (["bfloat16", "bfloat16"], None, "bfloat16"),
        (["bfloat16", "float32"], None, "float32"),
        (["bfloat16", None], None, "float32"),
        ([None], None, "float32"),
        ([], None, "float32"),
        (["fp8"], None, "float32"),
        (["bfloat16"], "float16", "float16"),
    ],
)
async def test_who_says_the_dtype(site: PushingSite, fleet: list[str | None], dtype: str | None, sent: str) -> None:
    site.coordinator.weight_dtypes = fleet
    await site.pusher().push(WEIGHTS, PushOptions(1, dtype=dtype))
    assert sent_dtypes(site.coordinator.updates[0][0]) == [sent, "int64"]


async def test_a_fleet_of_another_precision_is_warned_of_at_the_first_push(site: PushingSite) -> None:
    site.coordinator.weight_dtypes = ["bfloat16", "bfloat16"]
    pusher = site.pusher()
    with capture_logs() as logs:
        await pusher.push(WEIGHTS, PushOptions(1))
        await pusher.push(WEIGHTS, PushOptions(2))
    said = [one["reason"] for one in logs if one["event"] == "precision_differs"]
    assert len(said) == 1
    assert "float32" in said[0]
    same = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in WEIGHTS.items()}
    with capture_logs() as logs:
        await site.pusher().push(same, PushOptions(3))
    assert not [one for one in logs if one["event"] == "precision_differs"]


async def test_what_is_offered_is_what_is_announced(site: PushingSite) -> None:
    pusher = site.pusher()
    await pusher.push(((f"module.{name}", tensor) for name, tensor in WEIGHTS.items()), PushOptions(7))
    [(update, policy)] = site.coordinator.updates
    assert update.push is not None
    assert (update.version, policy, update.push.addresses, update.push.token) == (
        7,
        None,
        ("127.0.0.1:1",),
        "token",
    )
    assert update.push.tensors == (TensorInfo("a", "float32", (2, 3)), TensorInfo("b", "int64", (2,)))
    [sender] = site.senders
    assert (sender.host, sender.transport, len(sender.attempts)) == ("127.0.0.1", "auto", 1)
    assert sender.attempts[0][0].equal(WEIGHTS["a"])


async def test_a_sender_is_kept_while_updates_succeed_over_the_same_transport(site: PushingSite) -> None:
    pusher = site.pusher(listen_host="127.0.0.2")
    for transport in ("shm", "shm", "nccl"):
        await pusher.push(WEIGHTS, PushOptions(1, transport=transport))
    first, second = site.senders
    assert (first.transport, first.num_released, first.is_closed) == ("shm", 2, True)
    assert (second.transport, second.host, second.is_closed) == ("nccl", "127.0.0.2", False)
    site.coordinator.next_errors = [Conflict("an update is staging")]
    with pytest.raises(Conflict):
        await pusher.push(WEIGHTS, PushOptions(1, transport="nccl"))
    assert second.is_closed
    await pusher.push(WEIGHTS, PushOptions(1))
    assert len(site.senders) == 3
    await pusher.close()
    await pusher.close()
    assert site.senders[2].is_closed


async def test_what_the_service_says_ends_the_sender_and_is_what_the_caller_gets(site: PushingSite) -> None:
    site.sender_options = {"is_hanging": True}
    site.coordinator.update_error = Conflict("a weight update is staging")
    async with asyncio.timeout(30):
        with pytest.raises(Conflict, match="staging"):
            await site.pusher(answer_grace_s=0.1).push(WEIGHTS, PushOptions(1))
    [sender] = site.senders
    assert (len(sender.reasons), sender.num_running, sender.is_closed) == (1, 0, True)


async def test_a_report_stands_though_the_sender_does_not_end(site: PushingSite) -> None:
    site.sender_options = {"is_hanging": True}
    report = await site.pusher(answer_grace_s=0.1).push(WEIGHTS, PushOptions(1))
    assert (report.version, site.senders[0].num_running) == (1, 0)


async def test_a_sender_that_fails_waits_for_what_the_service_makes_of_it(site: PushingSite) -> None:
    site.sender_options = {"error": WeightUpdateFailed("every worker was lost")}

    async def fail_late(update: WeightUpdate) -> None:
        await asyncio.sleep(0.2)
        raise WeightUpdateFailed("replica-1: the connection was lost")

    site.coordinator.on_update = fail_late
    with pytest.raises(WeightUpdateFailed, match="replica-1") as caught:
        await site.pusher().push(WEIGHTS, PushOptions(1))
    assert "every worker" in str(caught.value.__cause__)


async def test_a_sender_that_fails_is_the_error_where_the_service_says_nothing(site: PushingSite) -> None:
    site.sender_options = {"error": WeightUpdateFailed("no receiver came")}
    site.coordinator.on_update = forever
    with pytest.raises(WeightUpdateFailed, match="no receiver came"):
        await site.pusher(answer_grace_s=0.1).push(WEIGHTS, PushOptions(1))


async def test_a_deadline_and_a_cancellation_leave_nothing_running(site: PushingSite) -> None:
    site.sender_options = {"is_hanging": True}
    site.coordinator.on_update = forever
    threads = set(threading.enumerate())
    pusher = site.pusher()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s"):
        await pusher.push(WEIGHTS, PushOptions(1, timeout_s=0.5))
    pushing = asyncio.create_task(pusher.push(WEIGHTS, PushOptions(2)))
    async with asyncio.timeout(30):
        while len(site.coordinator.updates) < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(Conflict, match="already pushing weights"):
            await pusher.push(WEIGHTS, PushOptions(3))
        pushing.cancel()
        await asyncio.sleep(0)
        pushing.cancel()  # a caller that gives up early
        with pytest.raises(asyncio.CancelledError):
            await pushing
    assert [(sender.num_running, sender.is_closed) for sender in site.senders] == [(0, True)] * 2
    async with asyncio.timeout(30):  # a thread ends shortly after its result is available
        while [one for one in set(threading.enumerate()) - threads if not one.name.startswith("asyncio")]:
            await asyncio.sleep(0.01)
    site.coordinator.on_update = None
    site.sender_options = {}
    assert (await pusher.push(WEIGHTS, PushOptions(3))).version == 3


async def test_no_tensor_is_held_after_an_update(site: PushingSite) -> None:
    fleet = ReceivingFleet()
    site.coordinator.on_update = fleet.take
    try:
        weights = {"a": torch.ones(1000)}
        tensor = weakref.ref(weights["a"])
        await site.client.update_weights(weights, version=1)
        del weights
        gc.collect()
        assert tensor() is None
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("weights", "options", "param"),
    [
        ({}, {}, "weights"),
        ({"a": "text"}, {}, "weights"),
        (WEIGHTS, {"dtype": "int8"}, "dtype"),
        (WEIGHTS, {"transport": "pigeon"}, "transport"),
        (WEIGHTS, {"timeout_s": 0}, "timeout_s"),
    ],
)
async def test_what_cannot_be_sent_is_refused_before_anything_happens(
    site: PushingSite, weights: dict[str, object], options: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await site.client.update_weights(weights, version=1, **options)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert site.coordinator.updates == []


async def test_the_admin_key_is_needed_and_is_enough(site: PushingSite) -> None:
    async with RolloutClient(site.client.url, admin_key="admin") as client:
        pusher = TensorPusher(client, make_sender=site.make_sender)
        assert (await pusher.push(WEIGHTS, PushOptions(1))).version == 1
    async with RolloutClient(site.client.url, api_key="user") as client:
        with pytest.raises(AgentLoopError, match="admin key"):
            await client.update_weights(WEIGHTS, version=1)


def test_where_workers_can_reach_this_machine() -> None:
    for url in ("http://127.0.0.1:8000", "http://localhost", "http://[::1]:80", "https://127.9.9.9/x"):
        assert host_towards(url) == "127.0.0.1"
    with pytest.raises(InvalidRequest, match="listen_host"):
        host_towards("http://no-such-host.invalid")


def test_a_trainer_beside_the_service_offers_where_the_replicas_of_other_hosts_reach_it() -> None:
    def status(*hosts: str) -> ServiceStatus:
        replicas = tuple(ReplicaStatus("r", "ready", "e", 0, Load(), 0, 0.5, host=host) for host in hosts)
        return ServiceStatus(True, False, 0, replicas, 1, (), ())

    here = "http://127.0.0.1:8000"
    assert way_to_replicas(here, status()) == way_to_replicas(here, status("127.0.0.1", "")) == here
    assert way_to_replicas(here, status("10.0.0.1", "10.0.0.2")) == "http://10.0.0.1:80"
    assert way_to_replicas(here, status("fd00::5")) == "http://[fd00::5]:80"
    assert way_to_replicas("http://head:8000", status("10.0.0.1")) == "http://head:8000"


def test_a_client_without_torch_says_what_is_missing() -> None:
    program = """
import asyncio, sys
sys.modules["torch"] = None  # as if it were not installed
from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest

async def main():
    async with RolloutClient("http://127.0.0.1:9") as client:
        try:
            await client.update_weights({"a": 1}, version=1)
        except InvalidRequest as error:
            print(error)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "no module named 'torch'" in done.stdout
