"""The session owners among the endpoint's processes, while hosts are lost and rejoin, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from agentloop.values import codec
from agentloop_servers.coordinator.endpoint_places import (
    LOST_AFTER_S,
    NUM_SLOTS,
    TAKEN_OVER_AFTER_S,
    EndpointPlaces,
    SavedPlaces,
)


class Hosts:
    """A coordinator on disk "head" and processes that join."""

    def __init__(self, num_expected: int = 3, *, are_taken_over: bool = False) -> None:
        self.are_taken_over = are_taken_over
        self.revoked: list[str] = []
        self.now = 0.0
        self.saved: bytes | None = None
        self.num_expected = num_expected
        self.places = self.coordinator()

    def coordinator(self) -> EndpointPlaces:
        """A coordinator that starts now from the state saved by its predecessor."""

        async def save(saved: SavedPlaces, revokes: Sequence[str]) -> None:
            self.saved = codec.encode(saved)
            self.revoked += revokes

        log = structlog.get_logger()
        options = {"are_taken_over": self.are_taken_over}
        self.places = EndpointPlaces("head", self.num_expected, lambda: self.now, save, log, **options)
        self.places.restore(None if self.saved is None else codec.decode(self.saved, SavedPlaces))
        return self.places

    async def join(self, *numbers: int):
        for number in numbers:
            table = await self.places.join_endpoint(number, f"http://{number}", f"http://public-{number}")
        await self.places.look()
        return await self.places.join_endpoint(numbers[-1], table.urls[numbers[-1]], f"http://public-{numbers[-1]}")

    async def pass_time(self, seconds: float, *numbers: int):
        """Advance the time, and let these processes join every second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            table = await self.join(*numbers)
        return table


async def three_hosts(*, are_taken_over: bool = False) -> tuple[Hosts, list[int]]:
    hosts = Hosts(are_taken_over=are_taken_over)
    numbers = [(await hosts.places.endpoint_numbers(disk, 1))[0] for disk in ("head", "b", "c")]
    return hosts, numbers


async def test_a_disk_keeps_its_numbers_also_under_a_later_coordinator():
    hosts, numbers = await three_hosts()
    assert numbers == [0, 1, 2]
    assert await hosts.places.endpoint_numbers("b", 2) == (1, 3)
    hosts.coordinator()
    assert await hosts.places.endpoint_numbers("c", 1) == (2,)
    assert await hosts.places.endpoint_numbers("b", 1) == (1, 3)


async def test_slots_wait_for_the_processes_that_are_expected_and_are_shared_evenly():
    hosts, _ = await three_hosts()
    assert (await hosts.join(0, 1)).holders == ()
    holders = (await hosts.join(0, 1, 2)).holders
    assert len(holders) == NUM_SLOTS
    assert sorted(holders.count(number) for number in (0, 1, 2)) == [21, 21, 22]


async def test_slots_do_not_wait_for_ever():
    hosts, _ = await three_hosts()
    assert set((await hosts.pass_time(61, 0, 1)).holders) == {0, 1}


async def test_a_lost_hosts_slots_go_to_others_and_stay_there():
    hosts, _ = await three_hosts()
    before = (await hosts.join(0, 1, 2)).holders
    table = await hosts.pass_time(LOST_AFTER_S - 1, 0, 1)
    assert (table.lost, table.holders) == (frozenset(), before)
    table = await hosts.pass_time(3, 0, 1)
    assert table.lost == {2}
    assert table.inherited == {slot for slot, number in enumerate(before) if number == 2}
    assert all(table.holders[slot] == number for slot, number in enumerate(before) if number != 2)
    assert 2 not in table.holders
    assert hosts.places.public_urls == ("http://public-0", "http://public-1")
    back = await hosts.join(0, 1, 2)
    assert (back.lost, back.holders, back.inherited) == (frozenset(), table.holders, table.inherited)


async def test_the_coordinators_own_disk_is_never_lost():
    hosts, _ = await three_hosts()
    before = (await hosts.join(0, 1, 2)).holders
    table = await hosts.pass_time(10 * LOST_AFTER_S, 1, 2)
    assert (table.lost, table.holders) == (frozenset(), before)


async def test_a_later_coordinator_gives_each_process_its_time():
    hosts, _ = await three_hosts()
    before = (await hosts.join(0, 1, 2)).holders
    hosts.now += 1000.0
    hosts.coordinator()
    table = await hosts.join(0, 1)
    assert (table.lost, table.holders) == (frozenset(), before)
    assert (await hosts.pass_time(LOST_AFTER_S + 2, 0, 1)).lost == {2}


async def test_a_process_that_joins_later_gets_no_slot_but_those_of_the_lost():
    hosts, _ = await three_hosts()
    before = (await hosts.join(0, 1, 2)).holders
    (late,) = await hosts.places.endpoint_numbers("d", 1)
    assert (await hosts.join(0, 1, 2, late)).holders == before
    table = await hosts.pass_time(LOST_AFTER_S + 2, 0, 1, late)
    assert {table.holders[slot] for slot in table.inherited} == {late}


async def test_on_one_host_there_are_no_slots():
    hosts = Hosts(num_expected=0)
    table = await hosts.pass_time(60, 0, 1)
    assert table.urls == {0: "http://0", 1: "http://1"}
    assert (table.holders, table.lost, table.inherited) == ((), frozenset(), frozenset())


async def test_in_a_database_all_that_a_lost_process_has_goes_to_others_and_its_lease_with_it():
    hosts, _ = await three_hosts(are_taken_over=True)
    before = (await hosts.join(0, 1, 2)).holders
    table = await hosts.pass_time(TAKEN_OVER_AFTER_S - 1, 0, 1)
    assert (table.lost, table.failover_owners, table.holders, hosts.revoked) == (frozenset(), {}, before, [])
    table = await hosts.pass_time(3, 0, 1)
    assert set(table.failover_owners) == table.lost == {2}
    assert table.failover_owners[2] in (0, 1)
    assert 2 not in table.holders
    assert table.inherited == frozenset(), "what is not known was never there"
    assert hosts.revoked == ["sessions-2"]
    assert (await hosts.pass_time(30, 0, 1)).failover_owners == table.failover_owners
    assert hosts.revoked == ["sessions-2"]
    hosts.coordinator()
    assert (await hosts.join(0, 1)).failover_owners == table.failover_owners


async def test_an_heir_that_is_lost_leaves_what_it_inherited_too():
    hosts = Hosts(are_taken_over=True)
    for disk in ("b", "c", "d"):  # 1, 2, 3; the process on the coordinator's disk never joins
        await hosts.places.endpoint_numbers(disk, 1)
    await hosts.join(1, 2, 3)
    (failover_owner,) = (await hosts.pass_time(TAKEN_OVER_AFTER_S + 2, 2, 3)).failover_owners.values()
    (last,) = {2, 3} - {failover_owner}
    table = await hosts.pass_time(TAKEN_OVER_AFTER_S + 2, last)
    assert table.failover_owners == {1: last, failover_owner: last}
    assert set(table.holders) == {last}
    assert hosts.revoked == ["sessions-1", f"sessions-{failover_owner}"]


async def test_a_disk_that_comes_back_gets_a_number_of_its_own():
    hosts, _ = await three_hosts(are_taken_over=True)
    await hosts.join(0, 1, 2)
    await hosts.pass_time(TAKEN_OVER_AFTER_S + 2, 0, 1)
    assert await hosts.places.endpoint_numbers("c", 1) == (3,)
    assert await hosts.places.endpoint_numbers("c", 1) == (3,)
    assert (await hosts.join(0, 1, 3)).failover_owners.keys() == {2}


async def test_a_process_that_is_being_started_again_is_not_lost_meanwhile():
    hosts, _ = await three_hosts(are_taken_over=True)
    await hosts.join(0, 1, 2)
    await hosts.pass_time(TAKEN_OVER_AFTER_S - 1, 0, 1)
    assert await hosts.places.endpoint_numbers("c", 1) == (2,)
    assert (await hosts.pass_time(TAKEN_OVER_AFTER_S - 1, 0, 1)).lost == frozenset()
