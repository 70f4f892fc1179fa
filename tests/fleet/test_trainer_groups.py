"""Trainer groups over a fleet: ranks, states and failures."""

import asyncio
from dataclasses import replace

import pytest

from agentloop.engine.interface import GroupBackend, GroupInit, LeaveGroup, TensorInfo, TransferPart
from agentloop.errors import CheckpointUnreadable, Conflict, InvalidRequest, NotFound, WeightUpdateFailed
from agentloop.fleet.registry import ReplicaState
from agentloop.fleet.trainer_groups import TrainerGroups
from agentloop.types import KVPolicy
from tests.support.engine.engines import INFO
from tests.support.fleet.weights import CONFIG, FleetSite, push_source, virtual

PAIR = replace(INFO, num_workers=2)
PART = TransferPart("g", (TensorInfo("w", "bfloat16", (2, 3)),))


def group(world_size=5, name="g"):
    return GroupInit(name, GroupBackend.NCCL, "10.0.0.1", 4000, rank_offset=1, world_size=world_size)


def groups_of(site):
    async def update(update):
        return await site.sync.update_weights(update, KVPolicy.RECOMPUTE)

    return TrainerGroups(site.fleet, site.sync.steps, site.clock, update)


def orders(site, kind):
    return {name: [one for one in engine.orders if isinstance(one, kind)] for name, engine in site.engines.items()}


@virtual
async def test_ranks_count_over_all_workers_and_parts_become_the_next_version(clock):
    site = FleetSite(clock, "b", "a", info=PAIR)
    groups = groups_of(site)
    with pytest.raises(InvalidRequest, match=r"not 5 \(rank_offset") as error:
        await groups.init_group(group(world_size=3))
    assert error.value.param == "world_size"
    await groups.init_group(group())
    assert {name: one.rank_offset for name, [one] in orders(site, GroupInit).items()} == {"a": 1, "b": 3}
    await groups.begin_transfer("g")
    await groups.receive_part(PART)
    await groups.begin_transfer("g", is_repeatable=True)
    await groups.receive_part(PART)
    assert site.engines["a"].weight_version == 0
    report = await groups.end_transfer("g")
    assert (report.version, site.fleet.weight_version, groups.open_transfer) == (1, 1, "")
    transfers = {one.transfer_id for parts in orders(site, TransferPart).values() for one in parts}
    assert transfers == {site.engines["a"].updates[-1].transfer}
    await groups.begin_transfer("g")
    await groups.receive_part(replace_version(PART, 7))
    assert (await groups.end_transfer("g")).version == 7


@virtual
async def test_a_part_without_tensors_has_those_of_the_last_one(clock):
    site = FleetSite(clock, "a", info=PAIR)
    groups = groups_of(site)
    await groups.init_group(group(world_size=3))
    bare = TransferPart("g", ())
    await groups.begin_transfer("g")
    with pytest.raises(InvalidRequest, match="must list its tensors"):
        await groups.receive_part(bare)
    await groups.receive_part(PART)
    await groups.end_transfer("g")
    await groups.begin_transfer("g")
    await groups.receive_part(bare)
    assert [one.tensors for one in orders(site, TransferPart)["a"]] == [PART.tensors] * 2
    await groups.end_transfer("g")
    await groups.init_group(group(world_size=3), is_replacement=True)
    await groups.begin_transfer("g")
    with pytest.raises(InvalidRequest, match="must list its tensors"):
        await groups.receive_part(bare)


def replace_version(part, version):
    return TransferPart(part.group, part.tensors, version=version)


@virtual
async def test_a_replica_that_fails_in_a_part_leaves_traffic_and_gets_the_weights_from_another(clock):
    site = FleetSite(clock, "a", "b")
    groups = groups_of(site)
    await groups.init_group(group(world_size=3))
    await groups.begin_transfer("g")
    await groups.receive_part(PART)
    site.engines["b"].fail("follow", times=1)
    await groups.receive_part(PART)
    await groups.receive_part(PART)
    assert {name: len(parts) for name, parts in orders(site, TransferPart).items()} == {"a": 3, "b": 1}
    report = await groups.end_transfer("g", 4)
    assert [one.error is None for one in report.replicas] == [True, False]
    assert (site.placeable(), site.state("b")) == (["a"], ReplicaState.QUARANTINED)
    site.engines["a"].offered = push_source()
    assert await site.late.bring_up("b")
    assert (site.engines["b"].weight_version, site.placeable()) == (4, ["a", "b"])


@virtual
async def test_a_held_member_receives_the_parts_and_keeps_its_weights(clock):
    site = FleetSite(clock, "a", "b")
    groups = groups_of(site)
    await groups.init_group(group(world_size=3))
    site.fleet.hold(site.fleet.get("b"), "h")
    for version in (1, 2):
        await groups.begin_transfer("g")
        await groups.receive_part(PART)  # a broadcast needs all members
        report = await groups.end_transfer("g", version)
        assert [(one.replica_id, one.error) for one in report.replicas] == [("a", None)]
    assert {name: len(parts) for name, parts in orders(site, TransferPart).items()} == {"a": 2, "b": 2}
    assert (site.placeable(), site.engines["b"].weight_version, site.engines["b"].updates) == (["a", "b"], 0, [])
    site.fleet.end_hold("h")
    site.engines["a"].offered = push_source()
    assert await site.late.bring_up("b")
    assert (site.engines["b"].weight_version, site.placeable()) == (2, ["a", "b"])


@virtual
async def test_a_replica_that_came_after_the_group_gets_the_weights_from_another(clock):
    site = FleetSite(clock, "a", "b")
    groups = groups_of(site)
    await groups.init_group(group(world_size=3))
    site.register("c")
    site.fleet.begin_update(site.fleet.get("c"))
    site.fleet.admit(site.fleet.get("c"))
    await groups.begin_transfer("g")
    await groups.receive_part(PART)
    assert site.placeable() == ["a", "b", "c"]
    report = await groups.end_transfer("g", 4)
    assert [(one.replica_id, one.error) for one in report.replicas] == [("a", None), ("b", None)]
    assert (site.placeable(), site.state("c"), site.engines["c"].updates) == (["a", "b"], ReplicaState.JOINING, [])
    site.engines["a"].offered = push_source()
    assert await site.late.bring_up("c")
    assert (site.engines["c"].weight_version, site.placeable()) == (4, ["a", "b", "c"])


@virtual
async def test_what_fails_late_in_an_old_group_does_not_end_the_new_one(clock):
    for is_joining in (False, True):
        site = FleetSite(clock, "a")
        groups, engine = groups_of(site), site.engines["a"]
        if not is_joining:
            await groups.init_group(group(world_size=2))
            await groups.begin_transfer("g")
        engine.seconds["follow"] = 10.0
        late = groups.init_group(group(world_size=2)) if is_joining else groups.receive_part(PART)
        failing = asyncio.create_task(late)
        await clock.sleep(1.0)
        if is_joining:
            assert groups.names == ()
            with pytest.raises(Conflict, match="still joining"):
                await groups.begin_transfer("g")
        engine.seconds["follow"] = 0.0
        await groups.destroy_group("g")
        await groups.init_group(group(world_size=2))
        engine.fail("follow", times=1)
        with pytest.raises(WeightUpdateFailed):
            await failing
        assert (groups.names, engine.orders[-1]) == (("g",), group(world_size=2))
        await groups.begin_transfer("g")


@virtual
async def test_a_replacement_that_is_refused_leaves_the_group_as_it_is(clock):
    site = FleetSite(clock, "a")
    groups = groups_of(site)
    await groups.init_group(group(world_size=2), is_replacement=True)
    await groups.begin_transfer("g")
    with pytest.raises(InvalidRequest):
        await groups.init_group(group(world_size=3), is_replacement=True)
    assert groups.open_transfer == "g"
    await groups.init_group(group(world_size=2), is_replacement=True)
    assert (groups.open_transfer, orders(site, LeaveGroup)) == ("", {"a": [LeaveGroup("g")]})
    await groups.begin_transfer("g")


@virtual
async def test_a_transfer_stays_open_until_its_update_begins(clock):
    site = FleetSite(clock, "a")
    groups = groups_of(site)
    await groups.init_group(group(world_size=2))
    await groups.begin_transfer("g")
    with pytest.raises(InvalidRequest, match="no parts"):
        await groups.end_transfer("g")
    await groups.receive_part(PART)
    await site.update(5)
    for version, kind, refusal in (
        (5, Conflict, "already serves version 5"),
        (4, InvalidRequest, "lower than the served version"),
    ):
        with pytest.raises(kind, match=refusal):
            await groups.end_transfer("g", version)
    site.engines["a"].seconds["stage"] = 10.0
    other = asyncio.create_task(site.update(6))
    await clock.sleep(1.0)
    with pytest.raises(Conflict, match="is in progress"):
        await groups.end_transfer("g")
    await other
    assert (await groups.end_transfer("g")).version == 7
    await groups.begin_transfer("g")
    await groups.receive_part(PART)
    site.engines["a"].fail("stage", times=1)
    with pytest.raises(CheckpointUnreadable):
        await groups.end_transfer("g")
    assert groups.open_transfer == ""


@virtual
async def test_a_trainer_that_vanishes_changes_nothing(clock):
    site = FleetSite(clock, "a")
    groups = groups_of(site)
    await groups.init_group(group(world_size=2))
    await groups.begin_transfer("g")
    await groups.receive_part(PART)
    await clock.sleep(CONFIG.stage_timeout_s - 1.0)
    assert groups.open_transfer == "g"
    await clock.sleep(2.0)
    assert groups.open_transfer == ""
    with pytest.raises(Conflict):
        await groups.end_transfer("g")
    assert orders(site, LeaveGroup) == {"a": [LeaveGroup("g")]}
    assert (site.placeable(), site.engines["a"].weight_version) == (["a"], 0)
    await groups.init_group(group(world_size=2))  # the next group starts fresh


@virtual
async def test_a_group_that_has_lost_a_replica_is_made_again(clock):
    """A lost or failing replica would block every broadcast indefinitely."""
    for num_failures in (0, 3):
        site = FleetSite(clock, "a", "b")
        groups = groups_of(site)
        await groups.init_group(group(world_size=3))
        for _ in range(num_failures):
            site.fleet.report_failure("b", clock.now())
        if not num_failures:
            site.fleet.deregister("b")
        with pytest.raises(Conflict, match="lost the replicas b"):
            await groups.begin_transfer("g")
        with pytest.raises(NotFound):
            await groups.begin_transfer("g")
        await groups.init_group(group(world_size=2))
        await groups.begin_transfer("g")


@virtual
async def test_what_comes_out_of_turn_is_refused_and_what_fails_everywhere_ends_the_group(clock):
    site = FleetSite(clock, "a", "b")
    groups = groups_of(site)
    await groups.init_group(group(world_size=3))
    with pytest.raises(Conflict) as error:
        await groups.init_group(group(world_size=3))
    assert error.value.param == "group_name"
    with pytest.raises(Conflict, match="no open transfer"):
        await groups.receive_part(PART)
    await groups.begin_transfer("g")
    with pytest.raises(Conflict, match="is open"):
        await groups.begin_transfer("g")
    with pytest.raises(InvalidRequest, match="no parts"):
        await groups.end_transfer("g")
    for kind, raised in (
        (CheckpointUnreadable("no such tensor"), CheckpointUnreadable),
        (OSError(), WeightUpdateFailed),
    ):
        await groups.destroy_group("g")
        await groups.init_group(group(world_size=3))
        await groups.begin_transfer("g")
        for engine in site.engines.values():
            engine.failures, engine.num_failures = {"follow": kind}, 1
        with pytest.raises(raised):
            await groups.receive_part(PART)
        with pytest.raises(NotFound):
            await groups.begin_transfer("g")
    site.engines["b"].fail("follow", times=1)
    with pytest.raises(WeightUpdateFailed, match="b: "):
        await groups.init_group(group(world_size=3))
    assert site.placeable() == ["a", "b"]
