"""PostgreSQL as a storage backend: refusals, write access, and a server that becomes unavailable."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from agentloop.errors import Conflict, InvalidRequest, NotFound, ServiceUnavailable
from agentloop.storage.home import LEASE_S, Home, shown_url
from agentloop.storage.trajectory_store import TrajectoryReader, TrajectoryStore
from tests.support.records.samples import encoded, make_group, make_trajectory
from tests.support.service.postgres_server import PASSWORD, PostgresServer


def writer_of(store: TrajectoryStore) -> Any:
    """Return the thread that runs a store's transactions."""
    return store._writer


@pytest.fixture
async def store(postgres_run: Home) -> AsyncIterator[TrajectoryStore]:
    store = TrajectoryStore(postgres_run)
    yield store
    await store.close()


def end_lease(server: PostgresServer, run: Home) -> None:
    """Expire the lease of a run's owner, as after a silence."""
    server.execute("UPDATE leases SET until = clock_timestamp()", run.name)


# Refusals


def refusal(run: Home, **changed: object) -> str:
    """Return the message with which a storage backend is refused."""
    with pytest.raises(InvalidRequest) as refused:
        TrajectoryStore(dataclasses.replace(run, **changed))
    assert refused.value.param == "store"
    assert PASSWORD not in str(refused.value)
    return str(refused.value)


def test_what_cannot_be_a_home_is_refused_without_its_password(
    postgres_run: Home, postgres_server: PostgresServer
) -> None:
    at = f"store postgresql://127.0.0.1:{postgres_server.port}/postgres"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"postgresql://me:{PASSWORD}@127.0.0.1:{closed.getsockname()[1]}/db"
        message = refusal(postgres_run, url=url)
    assert message.startswith(f"store {shown_url(url)}: cannot connect")
    assert "refused" in message
    postgres_server.execute("CREATE ROLE reader LOGIN")
    url = postgres_server.url.replace("agentloop:", "reader:")
    assert refusal(postgres_run, url=url).startswith(f"{at}: cannot create schema {postgres_run.name!r}: Insuf")
    assert "malformed URL, expected postgresql://" in refusal(
        postgres_run, url=f"postgresql://me:{PASSWORD}@x@127.0.0.1/db"
    )
    assert "malformed URL, expected postgresql://" in refusal(
        postgres_run, url=f"postgresql://me@127.0.0.1:{PASSWORD}/db"
    )


async def test_a_run_of_another_owner_or_a_later_format_is_refused(
    postgres_run: Home, postgres_server: PostgresServer
) -> None:
    with pytest.raises(NotFound, match="has no run"):
        TrajectoryReader(postgres_run)
    ours = dataclasses.replace(postgres_run, owner="a")
    await TrajectoryStore(ours).close()
    await TrajectoryStore(ours).close()
    TrajectoryReader(postgres_run).close()
    for other in ("b", ""):
        assert "belongs to another run" in refusal(postgres_run, owner=other)
    postgres_server.execute("UPDATE about SET value = '99' WHERE name = 'trajectory store'", postgres_run.name)
    assert "has a trajectory store of format 99, not 3" in refusal(ours)


def test_a_shown_url_has_no_secret_whatever_is_odd_in_it() -> None:
    good = "postgresql://host:5432/db"
    assert shown_url("postgresql://me:secret@host:5432/db") == good
    assert shown_url(f"{good}?password=secret&sslmode=require") == good
    for odd in ("sec@ret", "sec/ret", "sec?ret", "s/e@c?r@et", "a?b@c"):
        for url in (f"postgresql://me:{odd}@host/db", f"postgresql://host/db?password={odd}"):
            shown = shown_url(url)
            assert not any(part in shown for part in ("sec", "ret", "s/e", "et")), (url, shown)


# Write access


async def test_a_second_owner_waits_for_the_lease_and_shuts_the_first_out(
    store: TrajectoryStore, postgres_run: Home, postgres_server: PostgresServer
) -> None:
    first = await store.take_over()
    await store.accept("r", [make_group(num_samples=2)])
    second = TrajectoryStore(postgres_run)
    with pytest.raises(Conflict, match=r"another service is still running this run: process \d+ on "):
        await second.take_over()
    assert await store.take_over(above=first + 5) == first + 6  # its own lease
    end_lease(postgres_server, postgres_run)
    await store.add_records(encoded([make_trajectory()]))  # no other owner came, so it has the lease again
    with pytest.raises(Conflict):
        await second.take_over()
    end_lease(postgres_server, postgres_run)
    assert await second.take_over() == first + 7
    late = store.add_records(encoded([make_trajectory(sample_index=1)]))
    for write in (late, store.check_owner(), store.cancel("r")):
        with pytest.raises(ServiceUnavailable, match=f"has taken this run over .its epoch is {first + 7}"):
            await write
    assert store.successor == first + 7
    assert await second.counts("r") == (2, 1)
    await asyncio.wait_for(store.keep_lease(), 30.0)  # it must end
    await second.close()
    third = TrajectoryStore(postgres_run)
    assert await third.take_over() == first + 8  # an owner that ends releases the lease at once
    await third.close()


async def test_a_lease_is_renewed_by_whatever_is_written(
    store: TrajectoryStore, postgres_run: Home, postgres_server: PostgresServer
) -> None:
    await store.take_over()
    left = f"SELECT until > clock_timestamp() + interval '{LEASE_S / 2} s' FROM leases"
    end_lease(postgres_server, postgres_run)
    assert postgres_server.execute(left, postgres_run.name) == [(False,)]
    await store.check_owner()  # only reads
    assert postgres_server.execute(left, postgres_run.name) == [(False,)]
    await store.accept("r", [])
    assert postgres_server.execute(left, postgres_run.name) == [(True,)]


async def test_an_owner_that_writes_nothing_renews_its_lease(
    store: TrajectoryStore, postgres_run: Home, postgres_server: PostgresServer
) -> None:
    await store.take_over()
    end_lease(postgres_server, postgres_run)
    keeping = asyncio.create_task(store.keep_lease())
    is_held = "SELECT until > clock_timestamp() FROM leases"
    async with asyncio.timeout(30.0):
        while (await asyncio.to_thread(postgres_server.execute, is_held, postgres_run.name)) != [(True,)]:
            assert not keeping.done()
    keeping.cancel()


async def test_a_state_that_revokes_a_lease_shuts_its_owner_out(store: TrajectoryStore, postgres_run: Home) -> None:
    lease = postgres_run.lease("shard 1")
    number = await writer_of(store).run(lambda db: lease.take(db, None, 0))
    await store.save_state("places", 1)
    assert await writer_of(store).run(lambda db: lease.newest(db, number)) == number
    await store.save_state("places", 2, revokes=("shard 1",))
    assert await writer_of(store).run(lambda db: lease.newest(db, number)) == number + 1
    assert await writer_of(store).run(lambda db: lease.take(db, None, 0)) == number + 2  # the lease is free at once


async def test_commits_of_records_wait_for_the_servers_disk(store: TrajectoryStore) -> None:
    setting = await writer_of(store).run(lambda db: db.execute("SHOW synchronous_commit").fetchone()[0])
    assert setting == "on"


async def test_what_an_owner_writes_and_its_end_are_one_after_the_other(
    store: TrajectoryStore, postgres_run: Home, postgres_server: PostgresServer
) -> None:
    """A lease that expires during a transaction is acquired only after the transaction has ended."""
    await store.take_over()
    await store.accept("r", [make_group(num_samples=2)])
    other = TrajectoryStore(postgres_run)
    is_begun, may_go_on = threading.Event(), threading.Event()

    def slow(db: object) -> int:
        is_begun.set()
        may_go_on.wait(60.0)
        return 1

    end_lease(postgres_server, postgres_run)
    writing = asyncio.create_task(writer_of(store).run(slow))
    assert await asyncio.to_thread(is_begun.wait, 60.0)
    taking = asyncio.create_task(other.take_over())
    await asyncio.sleep(0.3)
    assert not taking.done()
    may_go_on.set()
    assert await writing == 1
    with pytest.raises(Conflict):  # the transaction has renewed the lease
        await taking
    await other.close()


# An unavailable server


async def test_a_server_that_stops_is_waited_for_without_a_restart(
    store: TrajectoryStore, postgres_server: PostgresServer
) -> None:
    await store.take_over()
    await store.accept("r", [make_group(num_samples=40)])
    keeping = asyncio.create_task(store.keep_lease())
    acknowledged = []

    async def hand_in(sample: int) -> None:
        while True:
            with suppress(ServiceUnavailable):
                acknowledged.append(
                    (sample, await store.add_records(encoded([make_trajectory(sample_index=sample)])))
                )
                return
            await asyncio.sleep(0.05)

    await hand_in(0)
    with capture_logs() as logs:
        postgres_server.stop()
        late = store.add_records(encoded([make_trajectory(sample_index=1)]))
        for call in (store.counts("r"), store.accept("s", []), late):
            with pytest.raises(ServiceUnavailable, match=r"^store postgresql://127.0.0.1:\d+/postgres: cannot"):
                await call
        waiting = [asyncio.create_task(hand_in(sample)) for sample in range(1, 40)]
        await asyncio.sleep(0.5)
        assert acknowledged == [(0, 1)]
        postgres_server.start()
        async with asyncio.timeout(60.0):
            await asyncio.gather(*waiting)
        assert await store.counts("r") == (40, 40)
    assert sorted(acknowledged) == [(sample, 1) for sample in range(40)]
    assert [entry["event"] for entry in logs].count("store_is_away") == 2  # once per connection
    assert [entry["event"] for entry in logs].count("store_is_back") == 2
    assert PASSWORD not in str(logs)
    assert not keeping.done()
    keeping.cancel()


async def test_connections_that_are_ended_are_made_again(
    store: TrajectoryStore, postgres_server: PostgresServer
) -> None:
    await store.take_over()
    await store.accept("r", [make_group(num_samples=3)])
    for sample in range(3):
        assert postgres_server.end_connections() >= 2
        assert await store.add_records(encoded([make_trajectory(sample_index=sample)])) == 1
        assert await store.counts("r") == (3, sample + 1)


class Relay:
    """A proxy in front of a server that loses the next COMMIT or its answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.loses: str | None = None
        self.is_silent = False  # it accepts connections and forwards nothing
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._ends += (client, server)
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        is_order = target.getpeername()[1] == self._port
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if b"COMMIT" in data and self.loses == ("order" if is_order else "answer"):
                    self.loses = None
                    break
                if not self.is_silent:
                    target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listening, *self._ends):
            end.close()


@contextmanager
def relay(server: PostgresServer) -> Iterator[Relay]:
    one = Relay(server.port)
    yield one
    one.close()


async def test_a_commit_whose_answer_was_lost_is_asked_for(
    postgres_run: Home, postgres_server: PostgresServer
) -> None:
    with relay(postgres_server) as way:
        url = postgres_server.url.replace(str(postgres_server.port), str(way.port))
        store = TrajectoryStore(dataclasses.replace(postgres_run, url=url))
        await store.take_over()
        await store.accept("r", [make_group(num_samples=2)])
        way.loses = "answer"
        assert await store.add_records(encoded([make_trajectory()])) == 1
        way.loses = "order"
        with pytest.raises(ServiceUnavailable, match="the connection was lost"):
            await store.add_records(encoded([make_trajectory(sample_index=1)]))
        assert way.loses is None
        assert await store.counts("r") == (2, 1)
        assert await store.add_records(encoded([make_trajectory(sample_index=1)])) == 1
        await store.close()


async def test_a_server_that_accepts_and_never_answers_is_away(
    postgres_run: Home, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop_postgres.home._STATEMENT_S", 0.3)
    with relay(postgres_server) as way:
        url = postgres_server.url.replace(str(postgres_server.port), str(way.port))
        store = TrajectoryStore(dataclasses.replace(postgres_run, url=url))
        await store.take_over()
        await store.accept("r", [make_group(num_samples=2)])
        assert store.away == ""
        way.is_silent = True
        for call in (store.add_records(encoded([make_trajectory()])), store.check_owner()):
            with pytest.raises(ServiceUnavailable, match=r"no answer within 0\.3 s|cannot connect"):
                await call
        assert store.away.startswith(f"store {shown_url(url)}: ")
        way.is_silent = False
        assert await store.add_records(encoded([make_trajectory()])) == 1
        await store.check_owner()
        assert store.away == ""
        await store.close()


class SilentHome:
    """A storage backend on a host that does not respond."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def __getattr__(self, name: str) -> object:
        return getattr(self._home, name)

    def is_reachable(self) -> bool:
        return False


@pytest.mark.slow
async def test_an_owner_that_hears_nothing_for_as_long_as_its_lease_is_to_end(
    postgres_run: Home, postgres_server: PostgresServer
) -> None:
    store = TrajectoryStore(SilentHome(postgres_run))
    await store.take_over()
    keeping = asyncio.create_task(store.keep_lease())
    await asyncio.sleep(0)
    began_at = asyncio.get_running_loop().time()
    postgres_server.stop()
    try:
        await asyncio.wait_for(keeping, 60.0)
        assert asyncio.get_running_loop().time() - began_at >= LEASE_S - 4.0  # up to 3 s of it had passed
    finally:
        postgres_server.start()
    await store.close()


def test_a_host_that_refuses_answers_and_one_that_is_not_there_does_not(
    postgres_run: Home, postgres_server: PostgresServer
) -> None:
    assert postgres_run.is_reachable()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"postgresql://127.0.0.1:{closed.getsockname()[1]}/db"
        assert dataclasses.replace(postgres_run, url=url).is_reachable()
    assert not dataclasses.replace(postgres_run, url="postgresql://no.such.host.invalid/db").is_reachable()
