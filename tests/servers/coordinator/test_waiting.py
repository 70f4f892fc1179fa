"""Capacity for samples, sessions and calls: real store, real balancer, fake engines, virtual time."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from agentloop.api.coordinator import LeaseReport, RolloutTerms, TurnBegun, TurnEnded
from agentloop.api.flight import Doing
from agentloop.api.owners import UserLimits, UserTable
from agentloop.engine.interface import ALL_MEMORY
from agentloop.errors import NoHealthyReplica, WeightVersionNotServed
from agentloop.scheduling.waiting import WaitingConfig
from agentloop.values.capabilities import Needs
from agentloop.values.sampling import VersionDemand
from tests.support.engine.engines import INFO, SLEEPER
from tests.support.fleet.service import CONFIG, assignment_ids, hand_in, record, report, service
from tests.support.records.samples import make_group

SMALL = replace(INFO, kv_capacity_tokens=1000)  # each sample below is expected to grow by 100 tokens


async def fill(coordinator, num_groups=40):
    """Submit groups of one sample until some wait for capacity. Returns the started samples."""
    await coordinator.rollouts.submit("r", tuple(make_group(f"g{n}", 1) for n in range(num_groups)))
    begun = (await coordinator.rollouts.take(report("w", 50), 0.0)).start
    assert 0 < len(begun) < num_groups
    return list(begun)


class Process:
    """A worker or an ingress process, with the requests that it sends to the coordinator."""

    def __init__(self, coordinator, name="ingress"):
        self.coordinator, self.name = coordinator, name
        self.num_reports = 0

    async def report(self, **news):
        self.num_reports += 1
        return await self.coordinator.rollouts.report_leases(LeaseReport(self.name, self.num_reports, **news))

    async def lease(self, name, num_tokens=10):
        return await self.coordinator.rollouts.lease(name, num_tokens, self.name)

    async def release(self, lease):
        await self.report(released=(lease.lease_id,))


async def calls_until_full(coordinator):
    """Acquire leases for sessions until one has to wait."""
    ingress, leases = Process(coordinator), []
    await ingress.report(leases=())
    while len(leases) < 100:
        asking = asyncio.create_task(ingress.lease(f"s{len(leases)}"))
        await asyncio.sleep(0)
        if not asking.done():
            return ingress, leases, asking
        leases.append(await asking)
    raise AssertionError("there is no end to the room")


@service("a", info=SMALL)
async def test_samples_wait_before_their_prefill_and_begin_as_soon_as_others_end(site, coordinator):
    begun = await fill(coordinator)
    taking = asyncio.create_task(coordinator.rollouts.take(report("w", 1, *assignment_ids(begun)), 4.0))
    await site.clock.sleep(0.5)
    assert not taking.done()
    status = await coordinator.status()
    assert status.queue.num_queued == 40 - len(begun)
    assert status.queue.kv_limit_tokens >= status.queue.kv_predicted_tokens > 0
    assert status.queue.reason == (
        f"no KV capacity: {status.queue.kv_predicted_tokens} of {status.queue.kv_limit_tokens} tokens"
        " are expected to be used"
    )
    ended_at = site.clock.now()
    await hand_in(coordinator.rollouts, "w", record(begun[0]))
    assert len((await taking).start) == 1
    assert site.clock.now() == ended_at


@service("a", info=SMALL)
async def test_another_replica_is_room(site, coordinator):
    begun = await fill(coordinator)
    taking = asyncio.create_task(coordinator.rollouts.take(report("w", 50, *assignment_ids(begun)), 4.0))
    await site.clock.sleep(0.5)
    assert not taking.done()
    await site.join("b")
    assert {one.lease.replica_id for one in (await taking).start} == {"b"}


@service("a", info=SMALL, config=replace(CONFIG, waiting=WaitingConfig(is_limited=False)))
async def test_without_a_limit_everything_begins(site, coordinator):
    await coordinator.rollouts.submit("r", tuple(make_group(f"g{n}", 1) for n in range(40)))
    assert len((await coordinator.rollouts.take(report("w", 50), 0.0)).start) == 40


@service("a", info=SMALL)
async def test_calls_begin_beyond_the_room_of_samples_and_then_wait_in_their_order(site, coordinator):
    await fill(coordinator)
    ingress, leases, waiting = await calls_until_full(coordinator)
    assert leases
    after = asyncio.create_task(ingress.lease("after"))
    await site.clock.sleep(0.1)
    assert (await coordinator.status()).queue.num_waiting == 2
    assert await ingress.lease("s0") == leases[0]  # a session with a lease does not wait
    await ingress.release(leases[0])
    await site.clock.sleep(0.0)
    assert (waiting.done(), after.done()) == (True, False)
    await ingress.release(leases[1])
    assert (await after).replica_id == "a"
    assert (await coordinator.status()).queue.num_waiting == 0


@service("a", info=SMALL)
async def test_the_wait_for_room_is_seen_from_the_first_request_on(site, coordinator):
    ingress, leases, waiting = await calls_until_full(coordinator)
    asked_at, name = site.clock.now(), f"s{len(leases)}"
    await site.clock.sleep(4.0)
    bobs = [asyncio.create_task(ingress.lease(f"bob~s{number}")) for number in range(50)]
    with pytest.raises(NoHealthyReplica):
        await waiting
    again = asyncio.create_task(ingress.lease(name))
    await site.clock.sleep(1.0)
    longest_s, num_begun = site.clock.now() - asked_at, sum(task.done() for task in bobs)
    status, page = await coordinator.status(), await coordinator.flight(2, "bob~s49")
    assert 0 < num_begun < 40
    assert (status.queue.longest_wait_s, status.queue.median_wait_s) == (longest_s, longest_s - 4.0)
    assert [(one.name, one.waiting_calls) for one in status.users] == [("bob", 50 - num_begun)]
    rows = [(one.id, one.flight.for_s) for one in page.sessions if one.flight.doing is Doing.PLACE]
    assert rows == [(name, longest_s), *((f"bob~s{number}", longest_s - 4.0) for number in (num_begun, 49))]
    for task in (again, *bobs):
        task.cancel()
    await asyncio.gather(again, *bobs, return_exceptions=True)
    assert (await coordinator.status()).queue.longest_wait_s == 0.0


@service("a", info=SMALL)
async def test_a_session_keeps_its_room_before_its_first_report_and_gives_it_back_if_none_follows(
    site, coordinator
):
    ingress, leases, waiting = await calls_until_full(coordinator)
    balancer, reported = coordinator.replicas.balancer, leases[::2]
    used_tokens = balancer.kv_use("a").predicted_tokens

    async def insist():  # another session requests the capacity all the time
        with suppress(NoHealthyReplica):
            await waiting
        while True:
            with suppress(NoHealthyReplica):
                return await ingress.lease(f"s{len(leases)}")

    other = asyncio.create_task(insist())
    orders = await ingress.report(turns=tuple(TurnBegun(lease.lease_id) for lease in reported))
    for _ in range(60):
        assert (orders.moves, balancer.kv_use("a").predicted_tokens, other.done()) == ((), used_tokens, False)
        await site.clock.sleep(1.0)
        orders = await ingress.report()
    await site.clock.sleep(CONFIG.placement_wait_s + 2.0)
    assert other.done()
    assert [lease for lease in leases if balancer.holder_of(lease.lease_id) is not None] == reported


@service("a", info=SLEEPER)
async def test_a_call_for_another_version_does_not_wait_for_room_while_the_fleet_sleeps(site, coordinator):
    await coordinator.replicas.sleep(1)
    later, served = (Needs(version=VersionDemand(min_version=number)) for number in (1, 0))
    asking = asyncio.create_task(coordinator.rollouts.lease("later", 10, "ingress", later))
    waiting = asyncio.create_task(coordinator.rollouts.lease("served", 10, "ingress", served))
    await site.clock.sleep(0.1)
    assert (await coordinator.status()).queue.num_waiting == 1
    with pytest.raises(
        WeightVersionNotServed, match="requires weight version 1 or a later one, but version 0 is served"
    ):
        await asking
    await coordinator.replicas.wake(ALL_MEMORY)
    assert (await waiting).replica_id == "a"


@service("a", info=SMALL)
async def test_a_call_that_asks_again_keeps_its_turn(site, coordinator):
    ingress, leases, first = await calls_until_full(coordinator)
    await site.clock.sleep(CONFIG.placement_wait_s - 1.0)
    second = asyncio.create_task(ingress.lease("second"))
    with pytest.raises(NoHealthyReplica, match="no replica has KV capacity"):
        await first
    await site.clock.sleep(0.5)
    again = asyncio.create_task(ingress.lease(f"s{len(leases)}"))
    await site.clock.sleep(0.1)
    await ingress.release(leases[0])
    await site.clock.sleep(0.1)
    assert (again.done(), second.done()) == (True, False)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert (await coordinator.status()).queue.num_waiting == 0


@service("a", info=SMALL)
async def test_calls_that_never_stop_coming_hold_a_sample_off_for_a_bounded_time(site, coordinator):
    """Each call lasts a second, and two others always wait; the single sample starts after its patience."""

    async def caller(name):
        number = 0
        while True:
            lease = await ingress.lease(f"{name}-{number}")
            await site.clock.sleep(1.0)
            await ingress.release(lease)
            number += 1

    ingress, leases, waiting = await calls_until_full(coordinator)
    waiting.cancel()
    for lease in leases:
        await ingress.release(lease)
    callers = [asyncio.create_task(caller(f"c{number}")) for number in range(len(leases) + 2)]
    await site.clock.sleep(5.0)
    await coordinator.rollouts.submit("r", (make_group("g", 1),))
    asked_at, begun = site.clock.now(), ()
    while not begun and site.clock.now() - asked_at < 60.0:
        begun = (await coordinator.rollouts.take(report("w", 1), 4.0)).start
    assert assignment_ids(begun) == ["r/g/0"]
    assert site.clock.now() - asked_at <= WaitingConfig().patience_s + 2.0
    for task in callers:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*callers, return_exceptions=True)


@service("a", info=SMALL)
async def test_samples_that_nobody_could_run_do_not_hold_calls_off(site, coordinator):
    await fill(coordinator)
    await site.clock.sleep(60.0)  # no worker has a free slot, and the refusals are old
    _, leases, waiting = await calls_until_full(coordinator)
    assert leases
    waiting.cancel()


@service("a", info=SMALL)
async def test_what_comes_back_from_a_long_tool_goes_on_at_the_moment_that_room_is_given_back(site, coordinator):
    """Two sessions wait for capacity in FIFO order; each continues as soon as another ends, not a second later."""
    begun = await fill(coordinator)
    worker, gone = Process(coordinator, "w"), begun[:2]
    await worker.report(leases=())
    for one in gone:
        lease_id = one.lease.lease_id
        await worker.report(turns=(TurnBegun(lease_id), TurnEnded(lease_id, 400, 10, 0)))
    asked = {(one.lease.lease_id, None) for one in gone}
    more = []
    while not asked <= set((await worker.report()).moves):  # until other sessions request its capacity
        names = assignment_ids([*begun, *more])
        more += (await coordinator.rollouts.take(report("w", 1, *names), 0.0)).start
        await site.clock.sleep(1.0)
        assert site.clock.now() < 60.0
    names = assignment_ids([*begun, *more])
    more += (await coordinator.rollouts.take(report("w", 50, *names), 0.0)).start
    waiting = []
    for one in gone:
        moving = coordinator.rollouts.move(one.assignment_id, one.lease, False)
        waiting.append(asyncio.create_task(moving))
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    ends = iter([*begun[2:], *more])
    for index, task in enumerate(waiting):
        while not task.done():
            await site.clock.sleep(0.01)  # long before the next fleet check, which wakes all
            assert not task.done()
            now = site.clock.now()
            await hand_in(coordinator.rollouts, "w", record(next(ends)))
            for _ in range(20):
                await asyncio.sleep(0)
        assert site.clock.now() == now
        assert not any(later.done() for later in waiting[index + 2 :])
    assert {(await task).replica_id for task in waiting} == {"a"}


@service("a", info=SMALL)
async def test_a_users_crowd_keeps_no_other_user_out(site, coordinator):
    """User A has more sessions than the capacity, many of them waiting; B's calls start as they arrive."""
    ingress, held = Process(coordinator), []
    await ingress.report(leases=())

    async def call(name):
        held.append((name, await ingress.lease(name)))

    async def wait_for_call(name):
        while True:
            try:
                return await call(name)
            except NoHealthyReplica:
                continue

    crowd = [asyncio.create_task(wait_for_call(f"a~s{index}")) for index in range(300)]
    await site.clock.sleep(1.0)
    num_begun = len(held)
    assert 0 < num_begun < 100
    began_at = site.clock.now()
    for index in range(3):
        await call(f"b~s{index}")
    assert site.clock.now() == began_at
    before = len(held)
    for _, lease in held[:num_begun]:  # A's first sessions end, and its waiting ones start in order
        await ingress.release(lease)
        await site.clock.sleep(0.01)
    later = [name for name, _ in held[before:]]
    assert later == [f"a~s{index}" for index in range(num_begun, num_begun + len(later))] != []
    waiting = asyncio.create_task(call("b~s3"))
    await site.clock.sleep(1.0)
    assert waiting.done()
    for task in crowd:
        task.cancel()


SHARES = UserTable(limits={"a": UserLimits(share=3.0), "b": UserLimits()})


@service("a", info=SMALL, config=replace(CONFIG, read_users=lambda: SHARES))
async def test_waiting_sessions_begin_by_their_users_shares(site, coordinator):
    """A and B have many waiting sessions each; sessions that start are divided by share."""
    ingress, begun = Process(coordinator), []
    await ingress.report(leases=())

    async def begin(name):
        while True:
            try:
                begun.append((name, await ingress.lease(name)))
                return
            except NoHealthyReplica:
                continue

    waiting = [asyncio.create_task(begin(f"{user}~s{number}")) for number in range(100) for user in "ba"]
    await site.clock.sleep(1.0)
    for index in range(80):
        await ingress.release(begun[index][1])
        await site.clock.sleep(0.3)
    held = Counter(name[0] for name, _ in begun[80:])
    assert held["a"] + held["b"] >= 8
    assert held["a"] == pytest.approx(3 * held["b"], abs=2)
    for task in waiting:
        task.cancel()


@service("a", info=SMALL)
async def test_samples_and_calls_of_users_take_turns(site, coordinator):
    users = coordinator.rollouts.queue
    for name in ("a", "b"):
        await coordinator.rollouts.submit(
            "r", tuple(make_group(f"g{n}", 1) for n in range(20)), RolloutTerms(name), (name,)
        )
    begun = (await coordinator.rollouts.take(report("w", 50), 0.0)).start
    counted = Counter(one.rollout_id for one in begun)
    assert abs(counted["a~r"] - counted["b~r"]) <= 1 < counted["a~r"]
    users.check()


@service("a", info=replace(INFO, kv_capacity_tokens=3200))  # 32 sessions of 10 tokens that grow by 100
async def test_parents_that_wait_for_their_childrens_sessions_do_not_deadlock(site, coordinator):
    """64 parents each open a session for a child before their last turn, with KV for about 32 sessions."""
    ingress, running, most = Process(coordinator), 0, 0
    await ingress.report(leases=())

    async def insist(ask, *arguments):
        while True:
            try:
                return await ask(*arguments)
            except NoHealthyReplica:  # the deadline of one request to the coordinator: the call continues to wait
                continue

    async def turn(lease, num_known):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await ingress.report(taken=(lease.lease_id,), turns=(TurnBegun(lease.lease_id),))
        await site.clock.sleep(1.0)
        await ingress.report(turns=(TurnEnded(lease.lease_id, num_known + 50, 40, num_known, num_known),))
        running -= 1

    async def parent(number):
        name = f"parent{number}"
        lease = await insist(ingress.lease, name)
        await turn(lease, 0)
        child = await insist(ingress.lease, f"child{number}")
        await turn(child, 0)
        await ingress.release(child)
        lease = await insist(coordinator.rollouts.move, name, lease, False)
        await turn(lease, 50)
        await ingress.release(lease)

    began_at = site.clock.now()
    async with asyncio.timeout(600.0):
        await asyncio.gather(*(parent(number) for number in range(64)))
    assert most < 64, "the KV was scarce"
    assert site.clock.now() - began_at < 120.0
    coordinator.replicas.balancer.check()
