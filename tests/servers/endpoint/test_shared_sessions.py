"""Sessions of several processes in one database: each process sees its own, and another takes over lost ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest

from agentloop.api.coordinator import EndpointTable, FrontPort, sessions_lease
from agentloop.errors import ServiceUnavailable
from agentloop.sessions.calls import SessionState
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.trajectory.node import ModelCallState
from agentloop_servers.endpoint.session_store import SessionStore
from agentloop_servers.endpoint.shards import ShardRouter
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.records.turns import make_call, make_node, make_record

OF_A, OF_B = f"s-0-{0:020x}", f"s-1-{0:020x}"


class Process:
    """An endpoint process and its session store."""

    def __init__(self, home: Home, number: int, wall_s: float = 1000.0) -> None:
        self.wall_s = wall_s
        self.router = ShardRouter(FakeCoordinator(), number, None)
        self.store = SessionStore(home, lambda: self.wall_s, shards=self.router)


@asynccontextmanager
async def process(home: Home, number: int) -> AsyncIterator[Process]:
    one = Process(home, number)
    await one.store.start()
    yield one
    await one.store.close()


async def revoke(home: Home, number: int) -> None:
    """Remove a process from the partition map, as the coordinator does."""
    store = TrajectoryStore(home)
    await store.save_state("places", 1, [sessions_lease(number)])
    await store.close()


async def test_a_process_sees_its_own_sessions_alone(postgres_run: Home) -> None:
    async with process(postgres_run, 0) as a, process(postgres_run, 1) as b:
        for one, name in ((a, OF_A), (b, OF_B)):
            await one.store.create(make_record(name, owner="o"))
        for one, name in ((a, OF_A), (b, OF_B)):
            assert await one.store.num_of_owners() == {"o": 1}
            assert [record.session_id for record in await one.store.of_owners(["o"], "", 10)] == [name]
            one.wall_s += 200.0
            assert await one.store.expired(10) == [name]
            await one.store.spare(50.0)
            assert await one.store.expired(10) == []
            assert await one.store.last_use() == pytest.approx(one.wall_s - 50.0, abs=10.0)
            await one.store.save(replace(make_record(name, owner="o"), state=SessionState.FINISHED))
            assert await one.store.pending("", 10) == [name]


async def test_what_a_lost_process_had_is_gone_on_with_and_it_commits_nothing_more(postgres_run: Home) -> None:
    async with process(postgres_run, 0) as a, process(postgres_run, 1) as b:
        await b.store.create(make_record(OF_B))
        await a.store.create(make_record(OF_A))
        for number in range(3):
            a.store.open_call(OF_A, make_call(f"c{number}"))
            node = make_node(f"n{number}", f"c{number}", f"n{number - 1}" if number else None)
            await a.store.close_call(OF_A, make_call(f"c{number}", ModelCallState.COMMITTED), [node])
        a.store.open_call(OF_A, make_call("open"))
        await a.store.load(OF_A)  # the open call is committed first
        await revoke(postgres_run, 0)
        late = a.store.close_call(
            OF_A, make_call("open", ModelCallState.COMMITTED), [make_node("late", "open", "n2")]
        )
        with pytest.raises(ServiceUnavailable, match="taken over these sessions"):
            await late
        assert a.store.is_taken_over
        with pytest.raises(ServiceUnavailable):
            await a.store.save(replace(make_record(OF_A), state=SessionState.FINISHED))
        assert await b.store.take_in({0}) == 1
        stored = await b.store.load(OF_A)
        assert stored is not None
        assert [node.node_id for node in stored.nodes] == ["n0", "n1", "n2"]
        assert [call.state for call in stored.calls] == [ModelCallState.COMMITTED] * 3 + [ModelCallState.FAILED]
        b.store.open_call(OF_A, make_call("next"))
        await b.store.close_call(OF_A, make_call("next", ModelCallState.COMMITTED), [make_node("n3", "next", "n2")])
        stored = await b.store.load(OF_A)
        assert stored is not None
        assert [node.node_id for node in stored.nodes] == ["n0", "n1", "n2", "n3"]
        assert [call.call_id for call in stored.calls] == ["c0", "c1", "c2", "open", "next"]
        assert not b.store.is_taken_over


async def test_a_later_life_of_a_process_shuts_the_earlier_out_at_once(postgres_run: Home) -> None:
    async with process(postgres_run, 0) as first:
        await first.store.create(make_record(OF_A))
        async with process(postgres_run, 0) as second:
            with pytest.raises(ServiceUnavailable):
                await first.store.extend(OF_A)
            await second.store.extend(OF_A)
            assert await second.store.num_of_owners() == {"": 1}


class Places:
    """A coordinator with a table of the endpoint's processes."""

    def __init__(self, table: EndpointTable) -> None:
        self.table = table

    async def join_endpoint(self, number: int, url: str, public_url: str) -> EndpointTable:
        return replace(self.table, urls={number: url})


async def test_places_follow_the_coordinators_table_once_they_are_taken_in() -> None:
    router = ShardRouter(
        cast(FrontPort, Places(EndpointTable({}, (0, 1, 2, 1), failover_owners={2: 1, 5: 0}))), 1, None
    )
    assert router.places == {1}
    gained: list[Collection[int]] = []

    async def take_in(places: Collection[int]) -> None:
        assert router.places == {1}
        gained.append(places)
        if len(gained) == 1:
            raise ServiceUnavailable("the database is away")

    router.on_gained = take_in
    await router.start("http://here")
    async with asyncio.timeout(30.0):
        while router.places == {1}:
            await asyncio.sleep(0.01)
    await router.close()
    assert gained == [{2, -2, -4}] * 2
    assert router.places == {1, 2, -2, -4}
    assert router.place_of(OF_B) == 1
    assert {router.place_of(f"mine-{number}") for number in range(100)} == {-1, -2, -3, -4}
    router.check_is_here(f"s-2-{0:020x}")
