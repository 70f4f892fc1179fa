"""Draining a host: it gets no new work, and holders of its replicas move to other replicas between turns."""

from dataclasses import replace

import pytest

from agentloop.api.coordinator import HostDrain, LeaseReport, TurnBegun, TurnEnded
from agentloop.errors import Conflict, NotFound, ServiceUnavailable
from tests.support.fleet.service import CONFIG, assignment_ids, hand_in, record, report, service
from tests.support.records.samples import make_group


def taken_by(host):
    return replace(report(f"worker on {host}"), host=host)


@service("a", "b")
async def test_new_work_goes_to_other_hosts(site, coordinator):
    rollouts = coordinator.rollouts
    await coordinator.drain_host("a")
    await rollouts.submit("r", (make_group("g", 4),))
    assert (await rollouts.take(taken_by("a"), 0.0)).start == ()
    start = (await rollouts.take(taken_by("b"), 0.0)).start
    assert [one.lease.replica_id for one in start] == ["b"] * 4
    assert "a is drained: it receives no work" in (await coordinator.status()).degraded
    await coordinator.drain_host("a", is_undone=True)
    await rollouts.submit("s", (make_group("g", 4),))
    assert assignment_ids((await rollouts.take(taken_by("a"), 0.0)).start)
    assert (await coordinator.status()).degraded == ()


@service("a", "b")
async def test_what_runs_there_ends_or_goes_elsewhere_at_its_next_turn(site, coordinator):
    rollouts = coordinator.rollouts
    await rollouts.submit("r", tuple(make_group(f"g{number}", 1) for number in range(4)))
    start = (await rollouts.take(taken_by("a"), 0.0)).start
    there = [one for one in start if one.lease.replica_id == "a"]
    assert 0 < len(there) < 4
    begun = tuple(TurnBegun(one.lease.lease_id) for one in start)
    assert (await rollouts.report_leases(LeaseReport("worker on a", 1, begun, leases=()))).moves == ()
    assert await coordinator.drain_host("a") == HostDrain("a", 4, len(there))
    assert not (await coordinator.drain_host("a")).may_go
    ended = tuple(TurnEnded(one.lease.lease_id, 20, 5, None) for one in there)
    orders = await rollouts.report_leases(LeaseReport("worker on a", 2, ended))
    assert {lease_id for lease_id, _ in orders.moves} == {one.lease.lease_id for one in there}
    assert {lease.replica_id for _, lease in orders.moves if lease is not None} == {"b"}
    assert await coordinator.drain_host("a") == HostDrain("a", 4, 0)
    for one in start:
        await hand_in(rollouts, "worker on a", record(one))
    assert (await coordinator.drain_host("a")).may_go


@service("a", "b")
async def test_a_holder_at_its_tools_goes_without_another_turn(site, coordinator):
    rollouts = coordinator.rollouts
    leases = [await rollouts.lease(f"s{number}", 100, "ingress") for number in range(2)]
    (there,) = [lease for lease in leases if lease.replica_id == "a"]
    turns = (TurnBegun(there.lease_id), TurnEnded(there.lease_id, 20, 5, None))
    await rollouts.report_leases(LeaseReport("ingress", 1, turns, leases=()))
    assert (await coordinator.drain_host("a")).num_leases == 1
    await site.clock.sleep(2.0)
    assert (await coordinator.drain_host("a")).may_go


@service("a", "b")
async def test_a_drain_outlives_the_coordinator(site, coordinator):
    await coordinator.drain_host("a")
    await site.stop()
    coordinator = await site.start()
    await site.join("a", "b")
    await coordinator.rollouts.submit("r", (make_group("g", 2),))
    start = (await coordinator.rollouts.take(taken_by("b"), 0.0)).start
    assert [one.lease.replica_id for one in start] == ["b"] * 2
    with pytest.raises(Conflict, match="b is the last host with a replica"):
        await coordinator.drain_host("b")


@service("a", "b", config=replace(CONFIG, head="b"))
async def test_drains_that_cannot_be_are_refused(site, coordinator):
    with pytest.raises(NotFound, match="unknown host c, expected a, b"):
        await coordinator.drain_host("c")
    with pytest.raises(Conflict, match="b cannot be drained, because it has the run"):
        await coordinator.drain_host("b")


@service("a", "b", "c")
async def test_the_last_host_that_takes_traffic_is_not_drained(site, coordinator):
    fleet = coordinator.replicas.fleet
    fleet.quarantine(fleet.get("b"), "its weights are unknown")
    site.silent.add("c")
    await site.clock.sleep(4.0)
    assert (await site.states()) == {"a": "ready", "b": "quarantined", "c": "suspect"}
    with pytest.raises(Conflict, match="a is the last host with a replica in traffic"):
        await coordinator.drain_host("a")
    await coordinator.drain_host("b")
    await coordinator.drain_host("c")
    assert (await coordinator.status()).drained == ("b", "c")


@service("a", "b")
async def test_a_replica_of_a_node_that_ray_gave_up_takes_no_traffic_again(site, coordinator):
    """The replica becomes reachable after a network cut, before Ray has ended its process."""
    registration = replace(site.engines["a"].registration(), node_id="n")
    await coordinator.replicas.register(registration)
    site.silent.add("a")
    await site.clock.sleep(4.0)
    assert (await site.states())["a"] == "suspect"
    coordinator.replicas.dead_nodes = frozenset({"n"})
    site.silent.clear()
    await site.clock.sleep(1.5)
    assert (await site.states())["a"] == "suspect"
    with pytest.raises(ServiceUnavailable, match="declared the host of replica a dead"):
        await coordinator.replicas.register(registration)
    coordinator.replicas.dead_nodes = frozenset()
    await site.clock.sleep(1.5)
    assert (await site.states())["a"] == "ready"
