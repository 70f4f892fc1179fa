"""The coordinator over its HTTP port: types, errors, deadlines, restart at a new address, lost callers."""

import asyncio
import gc
import inspect
import tracemalloc
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import get_args, get_type_hints

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from agentloop.api.coordinator import (
    AdapterPush,
    FleetPort,
    FrontPort,
    HeldLease,
    JournalPart,
    LeasePort,
    LeaseReport,
    MetricsPort,
    Refusal,
    ReplicaPort,
    ReplicaReport,
    RolloutPort,
    TurnBegun,
    TurnEnded,
    WorkerPort,
    session_holder,
)
from agentloop.api.encoded_record import EncodedRecord
from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import Adapter, StageReport, WeightUpdate
from agentloop.errors import AdaptersFull, Conflict, Forbidden, InvalidRequest, NotFound, ServiceUnavailable
from agentloop.images import Image
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import Lease, Load, PauseMode, Trajectory
from agentloop.values.codec import encode
from agentloop_servers.coordinator.client import CoordinatorClient
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.coordinator.server import SERVER_NAME, CoordinatorServer, calls_of
from agentloop_servers.http.auth import SessionKeys
from agentloop_servers.private_http.client import Connector
from agentloop_servers.private_http.fencing import EPOCH_HEADER, ORDER_HEADER
from agentloop_servers.private_http.server import PrivateServer
from agentloop_servers.private_http.trust import Trust
from tests.support.engine.engines import FakeEngine
from tests.support.fleet.service import CONFIG, assignment_ids, hand_in, record, report
from tests.support.records.samples import encoded, make_group, make_trajectory

PORTS = (MetricsPort, ReplicaPort, WorkerPort, RolloutPort, LeasePort, FleetPort, FrontPort)
# Parameter types of the store's methods that have the same wire format as a tuple.
WIDER = (Sequence[JournalPart], Sequence[tuple[str, str]], list[tuple[str, bytes]], Sequence[Image])


class Store(TrajectoryStore):
    """A store whose commits can be delayed."""

    has_bug = False

    def __init__(self, path) -> None:
        super().__init__(path)
        self.commits, self.may_commit = asyncio.Event(), asyncio.Event()
        self.may_commit.set()
        self.num_commits = 0

    async def accept(self, rollout_id, groups, *terms):
        if self.has_bug:
            raise ZeroDivisionError
        await super().accept(rollout_id, groups, *terms)

    async def add_records(self, records):
        self.commits.set()
        self.num_commits += 1
        await self.may_commit.wait()
        return await super().add_records(records)


class PortSite:
    """A coordinator with one replica behind its port, and a client with a locator."""

    def __init__(self, path) -> None:
        self.path = path
        self.num_found = 0
        self.old_urls = []  # the URLs that `find` returns first
        self.engine = FakeEngine(RealClock(), "fake://a", 0)
        self.client = CoordinatorClient(self.find, Trust("secret"))

    async def find(self) -> str:
        self.num_found += 1
        if self.old_urls:
            return self.old_urls.pop()
        if self.server is None:
            raise ServiceUnavailable("nobody there")
        return self.server.url

    async def start(self) -> None:
        self.store = Store(self.path / "trajectories.sqlite")
        config = CoordinatorConfig(
            restart_grace_s=0.0, heartbeat_interval_s=0.05, worker_cut_s=0.2, balancer=CONFIG.balancer
        )
        self.coordinator = Coordinator(
            self.store, lambda url: self.engine, config, RealClock(), probe=lambda url: self.engine.sample()
        )
        await self.coordinator.start()
        self.server = CoordinatorServer(self.coordinator, Trust("secret"))
        await self.server.start()
        await self.coordinator.replicas.register(self.engine.registration())
        while not (await self.coordinator.status()).is_ready:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        server, self.server = self.server, None
        await server.close()
        await self.coordinator.close()


@asynccontextmanager
async def site_at(path):
    site = PortSite(path)
    await site.start()
    try:
        async with asyncio.timeout(30):
            yield site
    finally:
        await site.client.close()
        if site.server is not None:
            await site.stop()


async def test_every_call_of_every_port_is_served(tmp_path):
    names = set().union(*(calls_of(port) for port in PORTS))
    async with site_at(tmp_path) as site, aiohttp.ClientSession(connector=Connector(Trust("secret"))) as session:
        for name in names:
            async with session.post(f"{site.server.url}/{name}", data=b"\xc1") as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_request"), name


async def test_the_method_that_answers_a_call_has_its_parameters_and_types(tmp_path):
    calls = dict(item for port in PORTS for item in calls_of(port).items())
    async with site_at(tmp_path) as site:
        for name, call in calls.items():
            method = site.coordinator.answering(name)
            assert tuple(inspect.signature(method).parameters) == call.parameters, name
            hints = get_type_hints(method)
            assert hints.pop("return") in (call.answer, *WIDER), name
            assert all(
                mine in (theirs, *WIDER)
                for mine, theirs in zip(hints.values(), get_args(call.arguments), strict=True)
            ), name


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
async def test_numbers_beyond_63_bits_are_refused(tmp_path, number):
    async with site_at(tmp_path) as site, aiohttp.ClientSession(connector=Connector(Trust("secret"))) as session:
        front = site.client.front
        await front.submit("r", (make_group("g", 1),))
        update = {"version": number, "directory": "/weights"}
        headers = {EPOCH_HEADER: "1", ORDER_HEADER: "1"}
        body = encode((update, None, False))
        async with session.post(f"{site.server.url}/update_weights", headers=headers, data=body) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "version")
        for asked in (
            front.acknowledge("r", number),
            front.read("r", number, 10, 0.0),
            front.record(EncodedRecord.of(make_trajectory("g", number, rollout_id="s"))),
            hand_in(site.client.workers, "w", make_trajectory("g", number, rollout_id="r")),
        ):
            with pytest.raises(InvalidRequest):
                await asked
        assert [one.num_accepted for one in (await front.status()).rollouts] == [1]


async def test_a_trajectory_goes_through_it_whole(tmp_path):
    async with site_at(tmp_path) as site:
        front, worker = site.client.front, site.client.workers
        await front.submit("r", (make_group("g", 2),))
        orders = await worker.take(report(), wait_s=1.0)
        assert assignment_ids(orders.start) == ["r/g/0", "r/g/1"]
        moved = await worker.move("r/g/0", orders.start[0].lease, False)
        assert moved.replica_id == orders.start[0].lease.replica_id
        done = [record(assignment) for assignment in orders.start]
        stranger = make_trajectory("g", 7, rollout_id="unknown")  # only this record fails
        answers = await worker.finish("w", tuple(encoded([done[0], stranger, done[1]])))
        assert (answers[0], answers[2]) == (True, True)
        assert isinstance(answers[1], Refusal)
        assert isinstance(answers[1].raised(), NotFound)
        page = await site.coordinator.rollouts.read("r", 0, 10, 0.0)
        assert encode(await front.read("r", 0, 10, 0.0)) == encode(page)
        assert page.status.is_done
        assert (await front.status()).replicas[0].replica_id == "a"
        assert (await front.join_endpoint(3, "http://there", "")).urls == {3: "http://there"}
        assert not await site.client.replicas.heartbeat("unknown", ReplicaReport(Load(), True))
        lease = await front.lease("s", 100, "ingress")
        held = HeldLease(lease, session_holder("s"), "", 9)
        assert (await front.report_leases(LeaseReport("ingress", 1))).send_all
        assert not (await front.report_leases(LeaseReport("ingress", 2, leases=(held,)))).send_all
        turns = TurnBegun(lease.lease_id), TurnEnded(lease.lease_id, 9, 4, None)
        orders = await front.report_leases(LeaseReport("ingress", 3, (*turns, TurnBegun("other"))))
        assert orders.moves == (("other", None),)
        await front.report_leases(LeaseReport("ingress", 4, released=(lease.lease_id,)))
        assert (await front.status()).replicas[0].num_leases == 0
        await front.pause(PauseMode.KEEP)
        await front.resume()
    assert site.num_found == 1


async def test_errors_arrive_as_themselves(tmp_path):
    async with site_at(tmp_path) as site:
        with pytest.raises(NotFound) as caught:
            await site.client.front.read("nobody", 0, 10, 0.0)
        assert caught.value.param == "rollout_id"
        site.store.has_bug = True
        with pytest.raises(ServiceUnavailable, match="failed while it handled submit"):
            await site.client.front.submit("r", (make_group("g", 1),))


async def test_a_restarted_coordinator_is_found_at_its_new_port(tmp_path):
    async with site_at(tmp_path) as site:
        await site.client.front.submit("r", (make_group("g", 1),))
        old = site.server.url
        await site.stop()
        for _ in range(3):
            with pytest.raises(ServiceUnavailable):
                await site.client.front.status()
        await site.start()
        assert site.server.url != old
        (assignment,) = (await site.client.workers.take(report(), 5.0)).start
        await hand_in(site.client.workers, "w", record(assignment))
        assert (await site.client.front.read("r", 0, 1, 0.0)).status.is_done


async def test_a_call_that_was_cut_is_sent_once_more(tmp_path):
    async with site_at(tmp_path) as site:
        first, site.server = site.server, None
        site.old_urls.append(first.url)
        reading = asyncio.create_task(site.client.workers.take(report(), 20.0))
        await asyncio.sleep(0.1)
        site.server = CoordinatorServer(site.coordinator, Trust("secret"))
        await site.server.start()
        await first.close()  # the process dies
        await site.coordinator.rollouts.submit("r", (make_group("g", 1),))
        assert len((await reading).start) == 1


async def test_another_server_at_its_port_is_not_taken_for_it(tmp_path):
    async with site_at(tmp_path) as site:
        replica = PrivateServer("replica-1", (), Trust("secret"))
        await replica.start()
        try:
            site.old_urls.append(replica.url)
            assert (await site.client.front.status()).is_ready
        finally:
            await replica.close()


async def test_a_lost_answer_repeats_a_push_only_of_a_named_version(tmp_path):
    async def cut(request: web.Request) -> web.Response:
        request.transport.abort()
        return web.Response()

    pushed = []

    async def refuse(adapter: Adapter) -> StageReport:
        pushed.append(adapter.version)
        raise AdaptersFull("all places are taken")

    async with site_at(tmp_path) as site:
        cutting = PrivateServer(SERVER_NAME, (web.post("/push_adapter", cut),), Trust("secret"))
        await cutting.start()
        site.engine.load_adapter = refuse
        for version, seen in ((3, AdaptersFull), (None, ServiceUnavailable)):
            site.old_urls.append(cutting.url)
            client = CoordinatorClient(site.find, Trust("secret"))
            with pytest.raises(seen):
                await client.front.push_adapter(AdapterPush("math", "/adapter", version))
            await client.close()
        await cutting.close()
    assert pushed == [3]


async def test_a_hand_in_goes_on_when_its_caller_leaves(tmp_path):
    async with site_at(tmp_path) as site:
        await site.client.front.submit("r", (make_group("g", 1),))
        (assignment,) = (await site.client.workers.take(report(), 1.0)).start
        site.store.may_commit.clear()
        handing_in = asyncio.create_task(hand_in(site.client.workers, "w", record(assignment)))
        await site.store.commits.wait()
        handing_in.cancel()
        await asyncio.gather(handing_in, return_exceptions=True)
        await asyncio.sleep(0.1)
        site.store.may_commit.set()
        assert len((await site.client.front.read("r", 0, 1, 10.0)).trajectories) == 1


def with_long_prompt(trajectory: Trajectory) -> Trajectory:
    """Return a record that takes 4 MB on the wire."""
    path = replace(trajectory.paths[0], prompt_ids=np.zeros(1_000_000, np.int32))
    return replace(trajectory, paths=(path,))


async def offered_in_vain(site: PortSite, records: list[Trajectory], num_commits: int) -> None:
    """Submit records until `num_commits` wait for the disk, then cancel the calls."""
    offers = [asyncio.create_task(hand_in(site.client.workers, "w", one)) for one in records]
    while site.store.num_commits < num_commits:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    for offer in offers:
        offer.cancel()
    await asyncio.wait(offers)


async def test_a_stalled_disk_costs_the_memory_of_each_record_once(tmp_path):
    """Workers submit records again and again because their calls end without an answer."""
    async with site_at(tmp_path) as site:
        await site.client.front.submit("r", (make_group("g", 4),))
        assignments = (await site.client.workers.take(report("w", 4), 1.0)).start
        records = [with_long_prompt(record(one)) for one in assignments]
        size = len(encode(records[0]))
        site.store.may_commit.clear()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(8):
                await offered_in_vain(site, records, 4 if number == 0 else 0)
            held = bound = 5 * size
            while held >= bound:  # the port detects that the callers left
                await asyncio.sleep(0.05)
                gc.collect()
                held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert held > 3 * size, "the records wait for the disk"
        assert site.store.num_commits == 4
        site.store.may_commit.set()
        assert await asyncio.gather(*(hand_in(site.client.workers, "w", one) for one in records)) == [True] * 4
        assert len((await site.client.front.read("r", 0, 8, 10.0)).trajectories) == 4


async def test_a_command_that_arrives_late_is_refused(tmp_path):
    async with site_at(tmp_path) as site, aiohttp.ClientSession(connector=Connector(Trust("secret"))) as session:

        async def send(name: str, epoch: int, number: int, *arguments: object) -> int:
            headers = {EPOCH_HEADER: str(epoch), ORDER_HEADER: str(number)}
            async with session.post(f"{site.server.url}/{name}", headers=headers, data=encode(arguments)) as answer:
                return answer.status

        assert await send("resume", 7, 2) == 200
        assert await send("pause", 7, 1, PauseMode.KEEP, "") == 409
        assert not (await site.client.front.status()).is_paused
        assert await send("pause", 1, 1, PauseMode.KEEP, "") == 200  # a call of another caller
        async with session.post(f"{site.server.url}/resume", data=encode(())) as answer:
            assert answer.status == 400
        await site.client.front.resume()
        with pytest.raises(Conflict):
            await site.client.front.update_weights(WeightUpdate(0, "directory"), None, False)


async def test_a_worker_whose_process_ends_is_noticed_by_its_connection(tmp_path):
    async with site_at(tmp_path) as site:
        await site.client.front.submit("r", (make_group("g", 1),))
        dying = CoordinatorClient(site.find, Trust("secret"))
        running = assignment_ids((await dying.workers.take(report("w"), 1.0)).start)
        waiting = asyncio.create_task(dying.workers.take(report("w", 7, *running), 120.0))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await dying.close()  # as the system does with the connections of a dead process
        async with asyncio.timeout(60.0):
            (again,) = (await site.client.workers.take(report("v"), 120.0)).start
        assert again.attempt == 1


async def test_a_workers_key_gives_no_order_and_is_no_secret(tmp_path):
    async with site_at(tmp_path) as site:
        worker = CoordinatorClient(site.find, Trust("secret").of_workers)
        try:
            assert (await worker.workers.take(report("w"), 0.0)).start == ()
            with pytest.raises(NotFound):
                await worker.workers.move("no/such/0", Lease("l", "a", "fake://a"), False)
            for refused in (
                worker.front.pause(PauseMode.KEEP),
                worker.front.sleep(1),
                worker.front.update_weights(WeightUpdate(1, "/weights"), None, False),
                worker.front.submit("r", (make_group(),)),
                worker.front.status(),
                worker.replicas.deregister("a"),
            ):
                with pytest.raises(Forbidden):
                    await refused
            assert not (await site.coordinator.status()).is_paused
        finally:
            await worker.close()
        assert SessionKeys("secret").opened_by(SessionKeys(Trust("secret").of_workers.key).agent_key("s")) is None
