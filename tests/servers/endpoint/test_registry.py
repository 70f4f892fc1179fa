"""The registry of sessions over a real file and real sessions, mostly in virtual time."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentloop.api.coordinator import RolloutTerms
from agentloop.chat.call import CallKey
from agentloop.concurrency.clock import RealClock
from agentloop.errors import Conflict, DeadlineExceeded, InvalidRequest, Overloaded, SessionNotFound
from agentloop.score import Score
from agentloop.sessions.session import Session
from agentloop.types import Message
from agentloop.values.codec import to_builtins
from agentloop_servers.endpoint.open_calls_log import read_open_calls
from agentloop_servers.endpoint.registry import NewSession, SessionLimits, Sessions
from agentloop_servers.http.auth import SessionKey, SessionKeys
from tests.support.endpoint.session_site import EPOCH_S, LIMITS, NOBODY, SessionSite, chat, say, talk, virtually
from tests.support.records.samples import make_group
from tests.support.records.turns import make_call

# Ownership of sessions


@virtually()
async def test_sessions_are_found_by_their_owner_alone(site: SessionSite, sessions: Sessions) -> None:
    alice, session = ("alice",), await sessions.create(NewSession("mine"), ("alice",))
    assert await sessions.find("mine", alice) is session
    assert await sessions.find(session.session_id, None) is session  # by its own key
    assert await sessions.find_or_create("mine", alice) is session
    for other in (("bob",), NOBODY):
        with pytest.raises(SessionNotFound):
            await sessions.find("mine", other)
        with pytest.raises(SessionNotFound):
            await sessions.find(session.session_id, other)
        with pytest.raises(SessionNotFound):
            await sessions.finish("mine", other)
        with pytest.raises(SessionNotFound):
            await sessions.delete("mine", other)
    with pytest.raises(SessionNotFound):
        await sessions.find("nobody's", alice)
    await site.clock.sleep(70.0)  # on disk
    with pytest.raises(SessionNotFound):
        await sessions.find("mine", ("bob",))
    assert (await sessions.find("mine", alice)).record == session.record


@virtually()
async def test_an_id_is_one_users_own(site: SessionSite, sessions: Sessions) -> None:
    made = {name: await sessions.create(NewSession("eval-1"), (name,)) for name in ("alice", "bob", "")}
    made["carol"] = await sessions.find_or_create("eval-1", ("carol",))
    assert len({id(session) for session in made.values()}) == 4
    for name, session in made.items():
        assert (session.shown_id, session.record.owner) == ("eval-1", name)
        assert await sessions.find("eval-1", (name,)) is session
        records = await sessions.of_user((name,), "", 9)
        assert [record.session_id for record in records] == [session.session_id]
        await sessions.finish("eval-1", (name,))
    stored = {name: [one.group_id for one in records] for name, records in site.coordinator.finished.items()}
    assert stored == {f"{name}sessions": ["eval-1"] for name in ("alice~", "bob~", "carol~", "")}


@virtually()
async def test_a_named_rollout_is_claimed_when_the_session_is_made(site: SessionSite, sessions: Sessions) -> None:
    site.coordinator.groups["alice~trained"] = {"g": make_group("g", 1)}
    site.coordinator.terms["alice~trained"] = RolloutTerms("alice")
    site.coordinator.finished["alice~trained"] = []
    with pytest.raises(Conflict, match="submitted"):  # before any work
        await sessions.create(NewSession("s", rollout_id="trained"), ("alice",))
    assert (await sessions.create(NewSession("s", rollout_id="trained"), ("bob",))).shown_id == "s"
    for index in range(3):
        await sessions.create(NewSession(f"s{index}", rollout_id="run"), ("alice",))
    assert site.coordinator.terms["alice~run"].owner == "alice"


@virtually()
async def test_a_create_may_be_repeated_until_the_first_call(site: SessionSite, sessions: Sessions) -> None:
    wanted = NewSession("s", ttl_s=50.0, rollout_id="r", group_id="g", task_id="t", sample_index=3)
    session = await sessions.create(wanted, NOBODY)
    await site.clock.sleep(1.0)
    assert await sessions.create(wanted, NOBODY) is session
    record = session.record
    assert (record.rollout_id, record.group_id, record.task_id, record.sample_index) == ("r", "g", "t", 3)
    assert (record.created_at, record.ttl_s) == (EPOCH_S, 50.0)
    with pytest.raises(Conflict):
        await sessions.create(replace(wanted, sample_index=4), NOBODY)
    await talk(session, 1)
    with pytest.raises(Conflict):
        await sessions.create(wanted, NOBODY)
    assert (await sessions.create(NewSession(), NOBODY)).session_id != "s"
    assert sessions.num_open == 2


@virtually()
async def test_what_is_asked_for_is_checked(site: SessionSite, sessions: Sessions) -> None:
    for wanted in (
        NewSession("a b"),
        NewSession("../x"),
        NewSession(""),
        NewSession("x" * 129),
        NewSession(ttl_s=0.0),
        NewSession(ttl_s=float("nan")),
        NewSession(ttl_s=1e9),
    ):
        with pytest.raises(InvalidRequest):
            await sessions.create(wanted, NOBODY)
    with pytest.raises(InvalidRequest):
        await sessions.find_or_create("a/b", NOBODY)
    assert sessions.num_open == 0


@virtually()
async def test_first_users_of_an_id_share_one_session(site: SessionSite, sessions: Sessions) -> None:
    found = await asyncio.gather(*(sessions.find_or_create("s", NOBODY) for _ in range(20)))
    assert len({id(session) for session in found}) == 1
    one_offs = await asyncio.gather(*(sessions.find_or_create(None, NOBODY) for _ in range(5)))
    assert len({session.session_id for session in one_offs}) == 5
    assert all(session.record.is_one_off for session in one_offs)
    assert sessions.num_open == 6


@virtually()
async def test_open_sessions_are_bounded(site: SessionSite, sessions: Sessions) -> None:
    for index in range(8):
        await sessions.create(NewSession(f"s{index}"), NOBODY)
    with pytest.raises(Overloaded):
        await sessions.create(NewSession("more"), NOBODY)
    with pytest.raises(Overloaded):
        await sessions.find_or_create(None, NOBODY)
    assert (await sessions.find_or_create("s3", NOBODY)).session_id == "s3"
    await sessions.finish("s0", NOBODY)
    await sessions.create(NewSession("more"), NOBODY)
    await sessions.delete("s1", NOBODY)
    await sessions.create(NewSession("even-more"), NOBODY)
    assert sessions.num_open == 8


async def test_a_client_that_leaves_while_a_session_is_made_leaves_the_count_true(tmp_path: Path) -> None:
    site = SessionSite(RealClock(), tmp_path, is_virtual=False)
    sessions = await site.start()
    for index in range(6):
        making = asyncio.create_task(sessions.create(NewSession(f"s{index}"), NOBODY))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
    made = 0
    for index in range(6):
        stored = await site.store.load(f"s{index}")
        made += stored is not None
    assert sessions.num_open == made
    deleting = asyncio.create_task(sessions.delete("s0", NOBODY))
    await asyncio.sleep(0.001)
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)
    stored = await site.store.load("s0")
    is_open = stored is not None and stored.record is not None
    assert sessions.num_open == made - 1 + is_open
    await site.stop()


def test_keys_open_one_session_of_one_run() -> None:
    keys = SessionKeys("secret")
    for session_id in ("s", "a.b-c_d", "x" * 128):
        agent, control = keys.agent_key(session_id), keys.control_key(session_id)
        assert agent.startswith("sk-agentloop-")
        assert keys.opened_by(agent) == SessionKey(session_id)
        assert keys.opened_by(control) == SessionKey(session_id, is_control=True)
        # a key of one kind cannot be derived from the other
        assert keys.opened_by(agent.replace("sk-", "ck-")) is None
        for key in (agent, control):
            assert SessionKeys("other").opened_by(key) is None
            for bad in (key[:-1], key + "0", key.replace(session_id, "t"), key.upper(), f" {key}"):
                assert keys.opened_by(bad) is None
    for junk in ("", "sk-agentloop-", "sk-agentloop-.", "sk-agentloop-s", "sk-agentloop-\u00e9.\ud800", "sk-other"):
        assert keys.opened_by(junk) is None


# Memory


@virtually()
async def test_an_idle_session_leaves_memory_and_comes_back_as_it_was(
    site: SessionSite, sessions: Sessions
) -> None:
    session = await sessions.find_or_create("s", NOBODY)
    history = await talk(session, 3)
    await session.set_score(Score(0.5))
    before = session.trajectory()
    assert len(site.coordinator.leases) == 1
    await site.clock.sleep(65.0)
    assert (len(sessions.cache), sessions.cache.num_bytes) == (0, 0)
    assert site.coordinator.leases == {}
    del session
    gc.collect()
    session = await sessions.find("s", NOBODY)
    assert sessions.num_restored == 1
    after = session.trajectory()
    assert to_builtins(replace(after, timings=before.timings, times=before.times)) == to_builtins(before)
    result = await say(session, *history, Message("user", "and now?"))
    assert result.choices[0].split is None
    assert result.choices[0].parent_id is not None
    assert len(session.trajectory().paths) == 1


@virtually()
async def test_whoever_has_a_spilled_session_has_the_only_one(site: SessionSite, sessions: Sessions) -> None:
    session = await sessions.find_or_create("s", NOBODY)
    await site.clock.sleep(65.0)
    assert len(sessions.cache) == 0
    await talk(session, 1)  # from the process that has owned it all the time
    assert len(sessions.cache) == 1
    assert await sessions.find("s", NOBODY) is session
    await site.clock.sleep(65.0)
    assert await sessions.find("s", NOBODY) is session
    assert sessions.num_restored == 0


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_replica_that_is_silent_until_a_calls_deadline_is_told_of(is_streamed: bool, tmp_path: Path) -> None:
    @virtually()
    async def run(site: SessionSite, sessions: Sessions) -> None:
        session = await sessions.create(NewSession("s"), NOBODY)
        site.talker.gate.clear()
        asked, first = replace(chat(Message("user", "Are you there?")), timeout_s=30.0), CallKey(b"1", 0)
        began_at = site.clock.now()
        with pytest.raises(DeadlineExceeded):
            await (anext(session.stream(asked, first)) if is_streamed else session.call(asked, first))
        assert 30.0 <= site.clock.now() - began_at < 31.0
        site.talker.gate.set()
        await session.call(asked, CallKey(b"2", 0))
        (holder, lease, is_failed), *others = site.coordinator.moved
        assert (holder, is_failed, others) == ("s", True, [])
        assert site.coordinator.held["s"].url != lease.url

    run(tmp_path)


@virtually()
async def test_a_session_with_a_call_under_way_stays_and_lives(site: SessionSite, sessions: Sessions) -> None:
    session = await sessions.create(NewSession("s", ttl_s=30.0), NOBODY)
    site.talker.gate.clear()
    calling = asyncio.create_task(talk(session, 1))
    await site.clock.sleep(200.0)
    assert len(sessions.cache) == 1
    site.talker.gate.set()
    await calling
    assert (await sessions.find("s", NOBODY)).num_turns == 1


@virtually(replace(LIMITS, max_sessions=3))
async def test_a_user_with_all_its_sessions_leaves_others_theirs(site: SessionSite, sessions: Sessions) -> None:
    for index in range(3):
        await sessions.find_or_create(f"s{index}", ["alice"])
    for session_id in ("s3", None):
        with pytest.raises(Overloaded, match="3 open sessions"):
            await sessions.find_or_create(session_id, ["alice"])
    assert (await sessions.find_or_create("s3", ["bob"])).record.owner == "bob"
    await sessions.delete("s0", ["alice"])
    await sessions.find_or_create("s3", ["alice"])
    assert sessions.num_open == 4


@virtually(replace(LIMITS, max_resident_bytes=100_000, max_sessions=1000))
async def test_over_the_quota_the_longest_unused_go(site: SessionSite, sessions: Sessions) -> None:
    for index in range(100):
        await talk(await sessions.find_or_create(f"s{index}", NOBODY), 2)
        assert sessions.cache.num_bytes < 150_000
    assert sessions.cache.num_evicted >= 50
    assert 1 <= len(sessions.cache) < 50
    await sessions.find("s99", NOBODY)
    assert sessions.num_restored == 0
    assert (await sessions.find("s0", NOBODY)).num_turns == 2
    assert sessions.num_restored == 1


@virtually(replace(LIMITS, max_resident_bytes=20_000, max_sessions=1000))
async def test_memory_that_is_all_in_use_is_an_overload(site: SessionSite, sessions: Sessions) -> None:
    site.talker.gate.clear()
    calls: list[asyncio.Task[Any]] = []

    async def fill() -> None:
        for index in range(100):
            calls.append(asyncio.create_task(talk(await sessions.find_or_create(f"s{index}", NOBODY), 1)))
            await site.clock.sleep(0.1)

    with pytest.raises(Overloaded):
        await fill()
    assert 2 <= len(calls) < 20
    site.talker.gate.set()
    await asyncio.gather(*calls)
    await sessions.find_or_create("now", NOBODY)


# Many sessions

BYTES_PER_SESSION = 1600  # the quota's share; each session takes more


def num_alive() -> int:
    """Return the number of sessions in this process's memory."""
    gc.collect()
    return sum(type(one) is Session for one in gc.get_objects())  # isinstance would access proxies


@pytest.mark.parametrize(
    "num_sessions", [pytest.param(1000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.long)]
)
async def test_many_sessions_take_bounded_memory_and_all_come_back(tmp_path: Path, num_sessions: int) -> None:
    num_others, quota_bytes = num_alive(), num_sessions * BYTES_PER_SESSION
    limits = SessionLimits(max_resident_bytes=quota_bytes, watch_interval_s=0.2)
    site = SessionSite(RealClock(), tmp_path, limits, is_virtual=False)
    sessions = await site.start()
    largest = 0

    async def use(index: int) -> None:
        nonlocal largest
        await talk(await sessions.find_or_create(f"s{index}", NOBODY), 2)
        largest = max(largest, sessions.cache.num_bytes)

    for start in range(0, num_sessions, 100):
        await asyncio.gather(*(use(index) for index in range(start, start + 100)))
    assert sessions.num_open == num_sessions
    assert largest < quota_bytes + 100 * 100_000  # the quota, and the memory of the calls in progress
    assert sessions.cache.num_evicted > num_sessions / 2
    assert num_alive() - num_others == len(sessions.cache)
    for start in range(0, num_sessions, 100):
        found = await asyncio.gather(*(sessions.find(f"s{index}", NOBODY) for index in range(start, start + 100)))
        assert [session.num_turns for session in found] == [2] * 100
        assert all(session.is_complete for session in found)
    await site.stop()
    assert site.coordinator.leases == {}


@virtually()
async def test_a_session_that_was_thrown_away_begins_nothing(site: SessionSite, sessions: Sessions) -> None:
    with pytest.raises(SessionNotFound):
        sessions.journal.open_call("s", make_call("c"))
    assert read_open_calls(site.path / "sessions.open-calls") == []
