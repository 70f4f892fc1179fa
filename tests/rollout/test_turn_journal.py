"""Trajectories whose worker died: the turns that are restored, calls that are not repeated, and damaged files."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated

import pytest
from pydantic import Field

from agentloop.errors import EngineLost, ServiceUnavailable
from agentloop.rollout.context import LoopContext
from agentloop.rollout.journal_homes import JournalFolder
from agentloop.rollout.loops import SHIPPED_LOOPS, ResumableLoop
from agentloop.rollout.tool import ToolSpec, tool
from agentloop.rollout.turn_journal import FinishedTurn, RunProgress, ToolAnswers, TurnJournal
from agentloop.score import Score
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import (
    Assignment,
    FinishReason,
    Generation,
    Lease,
    Limits,
    OnStale,
    RolloutTask,
    StalenessLimit,
    StopReason,
    Timings,
    ToolResult,
    WeightVersionSpan,
)
from agentloop.values.codec import encode, to_builtins
from tests.support.engine.scripted import call
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.lost_worker import HangingEngine, Relay, files
from tests.support.fleet.worker import running_worker, task
from tests.support.records.turns import make_reply

ANSWER = "The answer is 5."


class Lookup:
    """A stateless tool that records its calls and hangs at given words."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.hangs_at: set[str] = set()
        self.is_hanging = asyncio.Event()

    def as_tool(self):
        @tool(name="lookup", timeout_s=60)
        async def lookup(word: Annotated[str, Field(description="The word.")]) -> str:
            """Look a word up."""
            self.words.append(word)
            if word in self.hangs_at:
                self.is_hanging.set()
                await asyncio.Event().wait()
            return f"{word} is a word"

        return lookup


async def written(folder) -> None:
    """Wait until the journal is on disk, and longer for entries that were written at the same time."""
    while not files(folder):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


@asynccontextmanager
async def at_work(feeder, engine, folder, flush_s: float = 0.02, **options):
    journal = TurnJournal(JournalFolder(folder), flush_s, young_s=0.0)
    try:
        async with running_worker(feeder, {"sim://a": engine}, journal=journal, **options), asyncio.timeout(60):
            yield
    finally:
        await journal.close()


async def undisturbed(rollout_task, replies, **options):
    feeder = FakeCoordinator([rollout_task])
    async with running_worker(feeder, {"sim://a": HangingEngine(*replies)}, **options), asyncio.timeout(60):
        await feeder.is_done.wait()
    return feeder.records["t/0"]


def assert_same(found, expected, num_resumed_turns: int) -> None:
    """Check that the record equals that of an undisturbed run, except for the engine's cache and the clock."""
    assert (found.attempt, found.num_resumed_turns) == (1, num_resumed_turns)
    assert to_builtins(comparable(found)) == to_builtins(comparable(expected))


def comparable(trajectory):
    paths = [
        replace(path, turns=tuple(replace(turn, cached_tokens=0, times=None) for turn in path.turns))
        for path in trajectory.paths
    ]
    return replace(
        trajectory,
        paths=tuple(paths),
        timings=Timings(),
        times=None,
        attempt=0,
        num_resumed_turns=0,
        restart_reason="",
    )


LOOKUPS = (call("lookup", word="one"), call("lookup", word="two"), call("lookup", word="three"), ANSWER)


async def test_a_trajectory_goes_on_at_its_last_turn_and_runs_no_tool_again(tmp_path):
    rollout_task, noted = task(tools=("lookup",), seed=7), Lookup()
    feeder, engine = Relay([rollout_task]), HangingEngine(*LOOKUPS, hangs_at=2)
    async with at_work(feeder, engine, tmp_path, tools=[noted.as_tool()]):
        await engine.is_hanging.wait()
        await written(tmp_path)
    assert feeder.records == {}
    feeder.lose_worker()
    second = HangingEngine(*LOOKUPS)
    async with at_work(feeder, second, tmp_path, tools=[noted.as_tool()]):
        await feeder.is_done.wait()
    assert second.num_turns == 2, "the turn that was under way, and the last one"
    assert noted.words == ["one", "two", "three"]
    expected = await undisturbed(rollout_task, LOOKUPS, tools=[Lookup().as_tool()])
    assert_same(feeder.records["t/0"], expected, num_resumed_turns=2)
    assert files(tmp_path) == []


async def test_answers_that_were_there_are_used_and_the_other_calls_run_again(tmp_path):
    two = f"{call('lookup', word='quick')}\n{call('lookup', word='slow')}"
    rollout_task, noted = task(tools=("lookup",)), Lookup()
    noted.hangs_at = {"slow"}
    feeder = Relay([rollout_task])
    async with at_work(feeder, HangingEngine(two, ANSWER), tmp_path, tools=[noted.as_tool()]):
        await noted.is_hanging.wait()
        await written(tmp_path)
    feeder.lose_worker()
    noted.hangs_at = set()
    async with at_work(feeder, HangingEngine(two, ANSWER), tmp_path, tools=[noted.as_tool()]):
        await feeder.is_done.wait()
    assert noted.words == ["quick", "slow", "slow"]
    expected = await undisturbed(rollout_task, (two, ANSWER), tools=[Lookup().as_tool()])
    assert_same(feeder.records["t/0"], expected, num_resumed_turns=1)


async def test_it_goes_on_after_every_death(tmp_path):
    """Each worker gets one turn further; the last one has the turns of all workers."""
    rollout_task, noted = task(tools=("lookup",)), Lookup()
    feeder = Relay([rollout_task])
    for _ in range(3):
        engine = HangingEngine(*LOOKUPS, hangs_at=1)
        async with at_work(feeder, engine, tmp_path, tools=[noted.as_tool()]):
            await engine.is_hanging.wait()
            await written(tmp_path)
        feeder.lose_worker()
    async with at_work(feeder, HangingEngine(*LOOKUPS), tmp_path, tools=[noted.as_tool()]):
        await feeder.is_done.wait()
    found = feeder.records["t/0"]
    assert (found.attempt, found.num_resumed_turns, found.num_tool_calls) == (3, 3, 3)
    assert noted.words == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("limits", "replies", "reason"),
    [
        (Limits(max_turns=1), LOOKUPS, StopReason.MAX_TURNS),
        (Limits(max_tokens_per_turn=3), LOOKUPS, StopReason.MAX_TOKENS_PER_TURN),
        (Limits(), (ANSWER,), StopReason.COMPLETED),
    ],
)
@pytest.mark.parametrize("loop", sorted(SHIPPED_LOOPS))
async def test_what_had_ended_when_its_worker_died_ends_the_same_way(tmp_path, loop, limits, replies, reason):
    rollout_task = task(tools=("lookup",), limits=limits, loop=loop)
    feeder, noted = Relay([rollout_task]), Lookup()
    feeder.refuses = set(StopReason)
    async with at_work(feeder, HangingEngine(*replies), tmp_path, tools=[noted.as_tool()]):
        await feeder.is_refused.wait()
        await written(tmp_path)
    assert len(files(tmp_path)) == 1, "a record that is not taken is no end"
    feeder.refuses = set()
    feeder.lose_worker()
    engine = HangingEngine(*replies)
    async with at_work(feeder, engine, tmp_path, tools=[noted.as_tool()]):
        await feeder.is_done.wait()
    found = feeder.records["t/0"]
    assert engine.num_turns == 0
    if loop == "tool_loop" or reason is not StopReason.MAX_TURNS:
        assert found.stop_reason is reason
    assert_same(found, await undisturbed(rollout_task, replies, tools=[Lookup().as_tool()]), 1)


async def test_a_record_without_an_engine_is_begun_elsewhere_from_its_turns(tmp_path):
    class DyingEngine(HangingEngine):
        async def generate(self, request, on_progress=None):
            if self.num_turns == 2:
                raise EngineLost("it died")
            return await super().generate(request, on_progress)

    noted = Lookup()
    feeder = Relay([task(tools=("lookup",))])
    feeder.refuses = {StopReason.ENGINE_FAILED}
    options = {"turn_attempts": 1, "tools": [noted.as_tool()]}
    async with at_work(feeder, DyingEngine(*LOOKUPS), tmp_path, **options):
        await feeder.is_refused.wait()
    feeder.lose_worker()
    async with at_work(feeder, HangingEngine(*LOOKUPS), tmp_path, **options):
        await feeder.is_done.wait()
    assert feeder.records["t/0"].num_resumed_turns == 2
    assert noted.words == ["one", "two", "three"]


SPENT_S = 1.0


class AsksTwice:
    """A user's own loop that resumes: it asks once more, and rewards each turn."""

    left_s: float | None = None

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        await self.resume(task, ctx)

    async def resume(self, task: RolloutTask, ctx: LoopContext) -> None:
        AsksTwice.left_s = ctx.deadline.left_s
        while True:
            ctx.set_turn_reward(float(ctx.budget.num_turns))
            if ctx.budget.num_turns == 3:
                return
            ctx.observe(replace(task.messages[0], content="Are you sure?"))
            await ctx.sample()


class AsksTwiceSlowly(AsksTwice):
    """AsksTwice with a delay."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await asyncio.sleep(SPENT_S)
        await super().run(task, ctx)


class AsksTwiceAgain:
    """AsksTwice without `resume`."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await AsksTwice().run(task, ctx)


class CutsItsFirstTurn(AsksTwice):
    """AsksTwice with a first turn that the loop cuts itself."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=2)
        await self.resume(task, ctx)


async def test_a_turn_that_its_loop_cut_is_gone_on_from(tmp_path):
    rollout_task = task(loop="tests.rollout.test_turn_journal:CutsItsFirstTurn", reward=None)
    replies = ("Perhaps 4.", "Perhaps 6.", ANSWER)
    feeder, engine = Relay([rollout_task]), HangingEngine(*replies, hangs_at=1)
    async with at_work(feeder, engine, tmp_path):
        await engine.is_hanging.wait()
        await written(tmp_path)
    feeder.lose_worker()
    async with at_work(feeder, HangingEngine(*replies), tmp_path):
        await feeder.is_done.wait()
    found = feeder.records["t/0"]
    assert found.path.turns[0].end - found.path.turns[0].start == 2
    assert_same(found, await undisturbed(rollout_task, replies), num_resumed_turns=1)


@pytest.mark.parametrize(("loop", "num_resumed"), [("AsksTwice", 2), ("AsksTwiceAgain", 0)])
async def test_a_users_loop_goes_on_if_it_can(tmp_path, loop, num_resumed):
    rollout_task = task(loop=f"tests.rollout.test_turn_journal:{loop}", reward=None)
    replies = ("Perhaps 4.", "Perhaps 6.", ANSWER)
    feeder, engine = Relay([rollout_task]), HangingEngine(*replies, hangs_at=2)
    async with at_work(feeder, engine, tmp_path):
        await engine.is_hanging.wait()
        if num_resumed:
            await written(tmp_path)
    assert len(files(tmp_path)) == (1 if num_resumed else 0)
    feeder.lose_worker()
    async with at_work(feeder, HangingEngine(*replies), tmp_path):
        await feeder.is_done.wait()
    found = feeder.records["t/0"]
    assert_same(found, await undisturbed(rollout_task, replies), num_resumed)
    assert [turn.reward for turn in found.path.turns] == [1.0, 2.0, 3.0]


class Pot:
    """A stateful tool whose state can be restored or not."""

    def __init__(self, *, can_be_carried: bool, fails: bool = False) -> None:
        self.spec = ToolSpec("pot", "Put one in.", {"type": "object"}, timeout_s=1.0)
        self.kind = CarriedPot if can_be_carried else OpenPot
        self.fails = fails
        self.num_calls = 0

    def open_session(self, trajectory_id: str, seed: int) -> "OpenPot":
        return self.kind(self)

    async def close(self) -> None:
        return None


class OpenPot:
    def __init__(self, pot: Pot) -> None:
        self.pot, self.count = pot, 0

    async def call(self, arguments) -> str:
        self.pot.num_calls += 1
        self.count += 1
        return str(self.count)

    async def close(self) -> None:
        return None


class CarriedPot(OpenPot):
    async def snapshot(self) -> bytes:
        if self.pot.fails:
            raise SystemExit(3)
        return str(self.count).encode()

    async def restore(self, state: bytes) -> None:
        self.count = int(state)


@pytest.mark.parametrize(
    ("options", "num_resumed", "num_calls"),
    [
        ({"can_be_carried": True}, 2, 3),
        ({"can_be_carried": False}, 0, 5),
        ({"can_be_carried": True, "fails": True}, 0, 5),
    ],
)
async def test_an_environment_is_carried_over_or_the_trajectory_begins_again(
    tmp_path, options, num_resumed, num_calls
):
    rollout_task, pot = task(tools=("pot",)), Pot(**options)
    replies = (call("pot"), call("pot"), call("pot"), ANSWER)
    feeder, engine = Relay([rollout_task]), HangingEngine(*replies, hangs_at=2)
    async with at_work(feeder, engine, tmp_path, tools=[pot]):
        await engine.is_hanging.wait()
        await asyncio.sleep(0.2)
    feeder.lose_worker()
    async with at_work(feeder, HangingEngine(*replies), tmp_path, tools=[pot]):
        await feeder.is_done.wait()
    found = feeder.records["t/0"]
    assert pot.num_calls == num_calls
    assert [message.content for message in found.messages if message.role == "tool"] == ["1", "2", "3"]
    assert_same(found, await undisturbed(rollout_task, replies, tools=[Pot(**options)]), num_resumed)


async def test_what_is_dropped_for_its_age_is_not_gone_on_from(tmp_path):
    class Older(Relay):
        async def finish_one(self, worker_id, trajectory):
            assert files(tmp_path) == [], "the sample may be given out again at once"
            return await super().finish_one(worker_id, trajectory)

    class Updated(HangingEngine):
        async def generate(self, request, on_progress=None):
            generation = await super().generate(request, on_progress)
            await asyncio.sleep(0.2)  # the previous turn is on disk
            return replace(generation, load=replace(self.load(), weight_version=self.num_turns))

    feeder = Older([task(tools=("lookup",))], staleness=StalenessLimit(1, OnStale.DROP))
    async with at_work(feeder, Updated(*LOOKUPS), tmp_path, tools=[Lookup().as_tool()]):
        await feeder.is_done.wait()
    assert feeder.records["t/0"].stop_reason is StopReason.STALE


def test_shipped_loops_can_go_on():
    assert all(isinstance(make_loop(), ResumableLoop) for make_loop in SHIPPED_LOOPS.values())


# Files

ASSIGNMENT = Assignment("r/g/0", "g", 0, task(), Lease("l", "a", "sim://a"), rollout_id="r")


def finished_turns(num: int, tokens: int = 3, left_s: float = 5.0) -> list[FinishedTurn]:
    path = GrowingPath(ASSIGNMENT.task.messages)
    path.start([1, 2, 3])
    found = []
    for number in range(num):
        if number:
            path.add_observed([7])
        spans = (WeightVersionSpan(number, 0, tokens),)
        one = Generation("q", (5,) * tokens, (-0.5,) * tokens, spans, FinishReason.STOP, replica_id="a")
        path.add_turn(make_reply(one))
        progress = RunProgress(left_s - number, 1.0, 2, 1, 0, 0.5, 0.25, Score(0.5, {"a": 1.0}), number)
        assert path.last_turn is not None
        found.append(FinishedTurn(path.last_turn, progress))
    return found


@asynccontextmanager
async def journal_at(folder, flush_s: float = 0.0):
    journal = TurnJournal(JournalFolder(folder), flush_s)
    try:
        yield journal
    finally:
        await journal.close()


async def begun(journal, attempt: int = 0, mark: bytes = b"task"):
    return await journal.begin(replace(ASSIGNMENT, attempt=attempt), lambda: mark)


class HeldThread(ThreadPoolExecutor):
    """A thread that does nothing until it is released."""

    def __init__(self):
        super().__init__(1)
        self.is_let = threading.Event()

    def submit(self, fn, /, *args, **kwargs):
        def when_let():
            self.is_let.wait(60)
            return fn(*args, **kwargs)

        return super().submit(when_let)


@pytest.mark.parametrize("call", ["flush", "close"])
async def test_a_flush_ends_after_what_is_being_written(tmp_path, call):
    """A worker deregisters after a flush, and the next worker of its samples then finds all entries."""
    thread = HeldThread()
    thread.submit(lambda: None)  # the write is queued
    journal = TurnJournal(JournalFolder(tmp_path, thread), flush_s=0.0, young_s=0.0)
    run = await begun(journal)
    run.append(finished_turns(1)[0])
    while not run.is_kept:  # the write is in progress
        await asyncio.sleep(0.001)
    ended = asyncio.create_task(getattr(journal, call)())
    await asyncio.sleep(0.05)
    assert not ended.done()
    thread.is_let.set()
    await ended
    async with journal_at(tmp_path) as other:
        found = await begun(other, attempt=1)
        assert found.kept is not None
        assert len(found.kept.turns) == 1
    await journal.close()


async def test_what_is_read_is_what_was_written(tmp_path):
    entries = finished_turns(3)
    answers = ToolAnswers("2", (ToolResult("c", "lookup", "x"),), {"pot": b"4"}, 1.5)
    stale = ToolAnswers("1", (ToolResult("c", "lookup", "of another turn"),), {"pot": b"3", "cup": b"1"}, 2.5)
    async with journal_at(tmp_path) as journal:
        run = await begun(journal)
        assert run.kept is None
        for entry in (*entries[:2], stale, entries[2], answers, replace(answers, results=(), states={"cup": None})):
            run.append(entry)
        await journal.flush()
        kept = (await begun(journal, 1)).kept
    assert encode(kept.turns) == encode(tuple(entries))
    assert kept.answers == answers.results
    assert (kept.states, kept.left_s, kept.num_sampled) == ({"pot": b"4"}, 1.5, 9)


async def test_a_torn_or_flipped_file_gives_the_turns_before_the_damage(tmp_path):
    async with journal_at(tmp_path) as journal:
        run = await begun(journal)
        entries = finished_turns(3)
        for entry in entries:
            run.append(entry)
        await journal.flush()
        (file,) = files(tmp_path)
        data, found = file.read_bytes(), []
        for size in range(0, len(data) + 1, 11):
            file.write_bytes(data[:size])
            kept = (await begun(journal, 1)).kept
            found.append(0 if kept is None else len(kept.turns))
        assert found == sorted(found)
        assert set(found) >= {0, 1, 2}
        for at in range(0, len(data), 23):
            file.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
            kept = (await begun(journal, 1)).kept
            turns = () if kept is None else kept.turns
            assert len(turns) < 3
            assert [one.node.node_id for one in turns] == [one.node.node_id for one in entries[: len(turns)]]


async def test_of_several_runs_the_one_with_the_most_tokens_counts(tmp_path):
    async with journal_at(tmp_path) as journal:
        for attempt, num_turns in enumerate((1, 3, 2, 3, 1)):
            run = await begun(journal, attempt)
            run.kept = None
            for entry in finished_turns(num_turns):
                run.append(entry)
            await journal.flush()
        run = await begun(journal, 5)
        assert (len(run.kept.turns), run.kept.attempt) == (3, 3)
        run.append(finished_turns(4)[3])
        await journal.flush()
        again = await begun(journal, 6)
        assert (len(again.kept.turns), again.kept.attempt) == (4, 5), "it has the turns that it went on from"


async def test_what_worker_and_coordinator_left_together_is_gone_on_from(tmp_path):
    """B2: a new coordinator counts attempts from 0.

    The sample is assigned to a worker that existed before, or to a new worker whose first sweep did not reach the
    coordinator.
    """

    async def absent(_):
        raise ServiceUnavailable("it starts")

    async with journal_at(tmp_path) as old, journal_at(tmp_path) as new:
        await old.sweep(absent)
        async with journal_at(tmp_path) as lost:
            run = await begun(lost, 2)
            for entry in finished_turns(2):
                run.append(entry)
            await lost.flush()
        with pytest.raises(ServiceUnavailable):
            await new.sweep(absent)
        assert (await begun(old)).kept is None  # it is known to be unclaimed, so the folder is not read
        for journal, assignment in ((old, replace(ASSIGNMENT, is_restored=True)), (new, ASSIGNMENT)):
            again = await journal.begin(assignment, lambda: b"task")
            assert (len(again.kept.turns), again.kept.attempt, again.attempt) == (2, 2, 3)


async def test_a_worker_that_was_given_up_for_lost_spoils_nothing(tmp_path):
    async with journal_at(tmp_path) as old, journal_at(tmp_path) as new:
        entries = finished_turns(4)
        lost = await begun(old)
        lost.append(entries[0])
        await old.flush()
        run = await begun(new, 1)
        run.append(entries[1])
        await new.flush()
        lost.append(entries[1])
        await old.flush()
        lost.append(entries[2])  # a torn entry: the writer is stopped during the write
        await old.flush()
        assert len((await begun(new, 2)).kept.turns) == 3
        run.forget()
        await new.flush()
        lost.append(entries[3])
        await old.flush()
        assert files(tmp_path) == [], "what it writes late makes no file"
        assert lost.is_over


@pytest.mark.parametrize("change", ["another task", "no file", "a folder in its place"])
async def test_what_cannot_be_gone_on_from_begins_again(tmp_path, change):
    async with journal_at(tmp_path) as journal:
        run = await begun(journal)
        run.append(finished_turns(1)[0])
        await journal.flush()
        (file,) = files(tmp_path)
        if change != "another task":
            file.unlink()
        if change == "a folder in its place":
            file.mkdir()
        again = await begun(journal, 1, b"other" if change == "another task" else b"task")
        assert again.kept is None
        again.append(finished_turns(1)[0])
        await journal.flush()
        assert not again.is_over


async def test_a_journal_that_cannot_be_written_ends_and_no_trajectory_does(tmp_path, capsys):
    folder = tmp_path / "turns"
    folder.write_text("a file where the folder should be")
    feeder, engine = Relay([task(tools=("lookup",))]), HangingEngine(*LOOKUPS)
    async with at_work(feeder, engine, folder, flush_s=0.0, tools=[Lookup().as_tool()]):
        await feeder.is_done.wait()
    assert feeder.records["t/0"].stop_reason is StopReason.COMPLETED
    assert capsys.readouterr().out.count("journal_not_written") == 1


async def test_a_sweep_removes_what_has_its_record(tmp_path):
    async def unfinished(names):
        return tuple(name for name in names if name != "r/g/1")

    async with journal_at(tmp_path) as journal:
        for index in range(3):
            run = await journal.begin(replace(ASSIGNMENT, assignment_id=f"r/g/{index}"), lambda: b"task")
            run.append(finished_turns(1)[0])
        await journal.flush()
        async with journal_at(tmp_path) as other:  # a worker that knows no attempt, as after two restarts
            await other.sweep(unfinished)
            assert len(files(tmp_path)) == 2
            for index, is_kept in enumerate((True, False, True)):
                run = await other.begin(replace(ASSIGNMENT, assignment_id=f"r/g/{index}"), lambda: b"task")
                assert (run.kept is not None) == is_kept


async def test_time_that_was_spent_counts_and_time_in_which_nobody_ran_it_does_not(tmp_path):
    rollout_task = task(
        loop="tests.rollout.test_turn_journal:AsksTwiceSlowly", reward=None, limits=Limits(timeout_s=500.0)
    )
    replies = ("Perhaps 4.", "Perhaps 6.", ANSWER)
    feeder, engine = Relay([rollout_task]), HangingEngine(*replies, hangs_at=1)
    async with at_work(feeder, engine, tmp_path):
        await engine.is_hanging.wait()
        await written(tmp_path)
    first_s = AsksTwice.left_s
    feeder.lose_worker()
    async with at_work(feeder, HangingEngine(*replies), tmp_path):
        await feeder.is_done.wait()
    assert first_s is not None
    assert AsksTwice.left_s is not None
    slack_s = SPENT_S / 2  # the time after the last written turn is unknown
    assert 0 < AsksTwice.left_s <= first_s + slack_s < 500.0
