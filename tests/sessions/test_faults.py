"""Sessions under random faults, in virtual time.

The faults are clients that disconnect and retry, lost engines, failing journals, weight updates and an early
finish. Every accepted call is committed once or has failed, and all data agree.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from agentloop.chat.call import ChatResult
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import WeightUpdate
from agentloop.errors import AgentLoopError, EngineLost
from agentloop.sessions.calls import SessionEnd
from agentloop.trajectory.node import ModelCallState
from agentloop.types import KVPolicy, Message, PauseMode
from tests.support.endpoint.sessions import MemoryJournal, ask, check_trajectory, key, make_session
from tests.support.engine.scripted import scripted_engine, started

NUM_SCHEDULES = 240
NUM_CHUNKS = 8
CHUNKS = [0, 1, *(pytest.param(chunk, marks=pytest.mark.long) for chunk in range(2, NUM_CHUNKS))]
MAX_TRIES = 5


class FaultyEngine:
    """An engine whose connection breaks at random: before a request, during it, or with its answer."""

    def __init__(self, engine, random, clock, odds):
        self.engine, self.random, self.clock, self.odds = engine, random, clock, odds
        self.served = {}  # the prompt and the output of each request

    async def generate(self, request, on_progress=None):
        self._break("before")
        generation = await self.engine.generate(request, on_progress)
        self._break("after")
        self.served[request.token_ids, generation.token_ids] = request.request_id
        return generation

    async def stream(self, request, on_progress=None):
        self._break("before")
        source = self.engine.stream(request, on_progress)
        try:
            async for item in source:
                self._break("middle", self.odds / 10)
                if not hasattr(item, "weight_versions") or hasattr(item, "finish_reason"):
                    self.served[request.token_ids, item.token_ids] = request.request_id
                yield item
        finally:
            await source.aclose()

    def _break(self, where, odds=None):
        if self.random.random() < (self.odds if odds is None else odds):
            raise EngineLost(f"injected {where}")


class SlowJournal(MemoryJournal):
    """A journal whose writes fail at random. All writes except a call's start take time, one after the other."""

    def __init__(self, random, clock, odds):
        super().__init__()
        self.random, self.clock, self.odds = random, clock, odds
        self.order = asyncio.Lock()

    async def _write(self, what, put):
        async with self.order:
            await self.clock.sleep(self.random.choice((0.0, 0.001, 0.05)))
            await super()._write(what, put)

    def _write_now(self, what, put):
        if self.random.random() < self.odds:
            self.failures = [(what, OSError("injected"))]
        super()._write_now(what, put)


@dataclass
class Schedule:
    """The observations of the clients."""

    random: Random
    clock: VirtualClock
    answers: dict = field(default_factory=dict)  # by digest: every result that a client received
    num_left: int = 0
    num_errors: int = 0
    errors: Counter = field(default_factory=Counter)


async def one_try(run, session, chat, call_key):
    """Make one HTTP request. Its client may disconnect at any time, or lose the answer."""
    random = run.random

    async def whole():
        if random.random() < 0.5:
            return await session.call(chat, call_key)
        result = None
        async for item in session.stream(chat, call_key):
            result = item
        assert isinstance(result, ChatResult)
        return result

    task = asyncio.create_task(whole())
    if random.random() < 0.4:
        await run.clock.sleep(random.uniform(0.0, 0.4))
        if not task.done():
            run.num_left += 1
        task.cancel()
        if random.random() < 0.5:
            return None  # the retry does not wait for the end of the old request
    try:
        result = await task
    except asyncio.CancelledError:
        return None
    run.answers.setdefault(call_key.digest, []).append(result)
    return None if random.random() < 0.1 else result


async def one_turn(run, session, chat, name):
    for retry_count in range(MAX_TRIES):
        try:
            result = await one_try(run, session, chat, key(name, retry_count))
        except AgentLoopError as error:
            run.errors[error.code] += 1
            if not error.retryable:
                return None
            result = None
        if result is not None:
            return result
        await run.clock.sleep(run.random.choice((0.0, 0.0, 0.01, 0.1)))
    return None


async def one_agent(run, session, name):
    messages = [Message("user", f"I am {name}")]
    for turn in range(run.random.randint(1, 4)):
        num_choices = run.random.choice((1, 1, 1, 2))
        max_tokens, seed = run.random.randint(1, 20), run.random.randrange(1000)
        chat = ask(*messages, max_tokens=max_tokens, seed=seed, num_choices=num_choices, timeout_s=60.0)
        result = await one_turn(run, session, chat, f"{name}/{turn}")
        if result is None:
            if run.random.random() < 0.5:
                return
            continue  # the agent sends another request
        assert len(result.choices) == num_choices
        reply = run.random.choice(result.choices).reply.message
        kept = messages[:1] if run.random.random() < 0.2 else messages  # it drops the history
        messages = [*kept, reply, Message("user", f"go on {turn}")]


async def updates(clock, engine, folder):
    for version in (1, 2):
        await clock.sleep(0.3)
        await engine.stage(WeightUpdate(version, str(folder)))
        await engine.pause(PauseMode.KEEP)
        await clock.sleep(0.05)
        await engine.commit(version)
        await engine.resume()


async def play(seed, clock, folder):
    random = Random(seed)
    run = Schedule(random, clock)
    odds = random.choice((0.0, 0.1, 0.3))
    journal = SlowJournal(random, clock, random.choice((0.0, 0.0, 0.1)))
    policy = random.choice((KVPolicy.KEEP, KVPolicy.FRESH))
    async with started(scripted_engine(decode_s=0.01, clock=clock)) as inner:
        engine = FaultyEngine(inner, random, clock, odds)
        session = make_session(engine, journal, clock=clock, kv_policy=policy)
        async with asyncio.TaskGroup() as group:
            group.create_task(updates(clock, inner, folder))
            for agent in range(random.randint(1, 4)):
                group.create_task(one_agent(run, session, f"agent {agent}"))
            if random.random() < 0.3:
                await clock.sleep(random.uniform(0.0, 2.0))
                await finished(run, session, random.choice((0.0, 0.3)))
        await session.finish(SessionEnd(wait_s=1.0)) if journal.odds == 0 else await finished(run, session, 1.0)
        check(run, session, journal, engine)
        restored = journal.restored(session, engine, clock=clock)
        assert restored.is_complete is session.is_complete
        check_same(restored.trajectory(), session.trajectory())
        assert inner.load().num_running == inner.load().num_waiting == 0
    return run, session


async def finished(run, session, wait_s):
    """Finish the session, retrying while the journal fails."""
    while True:
        try:
            return await session.finish(SessionEnd(wait_s=wait_s))
        except AgentLoopError as error:
            if not error.retryable:
                raise
            run.errors[error.code] += 1


def check(run, session, journal, engine):
    assert session.num_open_calls == 0
    nodes = {node.node_id: node for node in session.graph.nodes}
    assert list(nodes) == [node.node_id for node in session.graph.nodes]
    assert set(nodes) == {node.node_id for node in journal.stored_nodes}
    committed = [record for record in journal.records if record.state is ModelCallState.COMMITTED]
    assert {node.call_id for node in nodes.values()} == {record.call_id for record in committed}
    # A digest is one turn of one agent: it is committed once, however often it was retried.
    assert max(Counter(record.digest for record in committed).values(), default=0) <= 1
    if not journal.odds:
        assert all(record.state is not ModelCallState.OPEN for record in journal.records)
    for results in run.answers.values():
        assert len({result.call_id for result in results}) == 1
        for node in results[0].choices:
            assert nodes[node.node_id] is node
    for node in nodes.values():
        path = session.graph.context_ids(node.node_id)
        num_prompt = len(path) - len(node.reply.token_ids)
        assert (path[:num_prompt], path[num_prompt:]) in engine.served
    trajectory = session.trajectory()
    check_trajectory(trajectory, tuple(nodes.values()))
    lost = {record.digest for record in journal.records} - {record.digest for record in committed}
    assert trajectory.is_complete is (not lost)
    assert (trajectory.error is None) is trajectory.is_complete


def check_same(one, two):
    paths = [sorted((path.response_ids.tolist(), path.logprobs.tolist()) for path in t.paths) for t in (one, two)]
    assert paths[0] == paths[1]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_schedules(chunk, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    totals = Counter()
    for seed in range(chunk, NUM_SCHEDULES, NUM_CHUNKS):
        clock = VirtualClock()
        try:
            run, session = clock.run(play(seed, clock, tmp_path))
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
        totals.update(run.errors)
        totals["left"] += run.num_left
        totals["calls"] += len(session.calls)
        totals["turns"] += session.num_turns
        totals["complete"] += session.is_complete
        totals["two versions"] += any(len(node.reply.weight_versions) > 1 for node in session.graph.nodes)
    # The schedules must contain both successes and every kind of fault.
    assert min(totals[what] for what in ("left", "engine_lost", "service_unavailable", "two versions")) > 2
    assert totals["session_finished"] > 0
    assert 0.2 < totals["complete"] / (NUM_SCHEDULES / NUM_CHUNKS) < 1
    assert totals["turns"] > 100
