"""Stateful tools: opened before the loop with separate deadlines, and closed once for every outcome."""

from __future__ import annotations

import asyncio

import pytest

from agentloop.errors import InvalidRequest
from agentloop.rollout.journal_homes import JournalFolder
from agentloop.rollout.tool import tool, tools_at
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.types import RolloutTask, StopReason
from tests.support.engine.scripted import call
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.life import Bed, Garden, KeptGarden, ending
from tests.support.fleet.lost_worker import HangingEngine, Relay, files
from tests.support.fleet.worker import running_worker, task

REWARD = "tests.support.fleet.life:number_of_words"
DONE = "The answer is 5."


def plants(*words: str) -> list[str]:
    return [call("garden", word=word) for word in words]


def garden_task(**fields: object) -> RolloutTask:
    return task(**{"tools": ("garden",), "reward": REWARD, **fields})


async def record_of(rollout_task: RolloutTask, garden: Garden, *replies: str):
    feeder = FakeCoordinator([rollout_task])
    async with running_worker(feeder, {"sim://a": HangingEngine(*replies)}, tools=[garden]), asyncio.timeout(60):
        await feeder.is_done.wait()
        lives = [list(bed.life) for bed in garden.beds]
    assert [bed.life for bed in garden.beds] == lives, "nothing is closed later"
    return feeder.records["t/0"]


async def test_a_session_is_opened_for_its_task_and_the_reward_sees_it_before_it_is_closed():
    garden = Garden()
    record = await record_of(
        garden_task(tool_setup={"garden": {"words": ["oak"]}}), garden, *plants("fir", "ash"), DONE
    )
    assert ending(record) == (StopReason.COMPLETED, None, 4.0)
    assert [bed.life for bed in garden.beds] == [["open", "fir", "ash", "looked", "close"]]
    assert [message.content for message in record.messages if message.role == "tool"] == ["oak fir", "oak fir ash"]


async def test_it_is_opened_though_it_is_never_called_and_a_reward_that_does_not_ask_comes_after_the_close():
    garden = Garden()
    record = await record_of(garden_task(reward="exact_match"), garden, DONE)
    assert ending(record) == (StopReason.COMPLETED, None, 1.0)
    assert [bed.life for bed in garden.beds] == [["open", "close"]]


@pytest.mark.parametrize(
    ("setup", "caps", "stop_reason", "error"),
    [
        ("raise", {}, StopReason.TOOL_FAILED, "tool 'garden' cannot be opened: OSError: no soil"),
        ("hang", {"open_timeout_s": 0.05}, StopReason.TOOL_FAILED, "tool 'garden' cannot be opened: timed out"),
        ("refuse", {}, StopReason.INVALID_TASK, "invalid_request: tool 'garden': such words do not grow"),
    ],
)
async def test_one_that_cannot_be_opened_ends_its_trajectory_without_a_reward(setup, caps, stop_reason, error):
    garden = Garden(**caps)
    record = await record_of(garden_task(tool_setup={"garden": {"open": setup}}), garden, DONE)
    assert (record.stop_reason, record.reward, record.is_complete) == (stop_reason, None, False)
    assert (record.error or "").startswith(error)
    assert [bed.life for bed in garden.beds] == [["open", "close"]]


async def test_a_setup_for_a_tool_that_the_task_does_not_have_is_refused():
    record = await record_of(garden_task(tool_setup={"gardem": {}}), Garden(), DONE)
    assert record.stop_reason is StopReason.INVALID_TASK
    assert "tool_setup names 'gardem'" in (record.error or "")


async def test_a_tool_that_is_lost_ends_the_trajectory():
    garden = Garden()
    record = await record_of(garden_task(), garden, *plants("fir", "lost"), DONE)
    assert ending(record) == (StopReason.TOOL_FAILED, "tool 'garden' is lost: the bed was flooded", None)
    assert [bed.life for bed in garden.beds] == [["open", "fir", "lost", "close"]]


async def test_a_session_in_the_place_of_one_that_was_too_late_is_opened_too():
    garden = Garden(timeout_s=0.05)
    record = await record_of(garden_task(), garden, *plants("fir", "hang", "ash"), DONE)
    assert ending(record) == (StopReason.COMPLETED, None, 2.0)
    assert [bed.life for bed in garden.beds] == [
        ["open", "fir", "hang", "close"],
        ["open", "ash", "looked", "close"],
    ]


async def test_no_setup_and_no_open_are_two_things():
    """A session without `open` is an error if its tool sets `open_timeout_s`; the first trajectory reports it."""

    class Closed(Garden):
        def open_session(self, trajectory_id: str, seed: int):
            @tool
            async def function() -> str:
                """Nothing."""
                return ""

            return function

    record = await record_of(garden_task(), Closed(), DONE)
    assert ending(record)[:2] == (
        StopReason.TOOL_FAILED,
        "tool 'garden' cannot be opened: its session FunctionTool has no open(), but the tool sets open_timeout_s",
    )


@pytest.mark.parametrize("during", ["open", "call"])
async def test_a_cancellation_closes_once(during: str):
    garden = Garden()
    setup = {"open": "hang"} if during == "open" else {}
    feeder = FakeCoordinator([garden_task(tool_setup={"garden": setup})])
    engine = HangingEngine(*plants("hang"))
    async with running_worker(feeder, {"sim://a": engine}, tools=[garden]), asyncio.timeout(60):
        await garden.is_hanging.wait()
        feeder.cancel_next = ["t/0"]
        await feeder.is_done.wait()
    assert feeder.records["t/0"].stop_reason is StopReason.CANCELLED
    assert [bed.life[-1] for bed in garden.beds] == ["close"]
    assert sum(bed.life.count("close") for bed in garden.beds) == 1


@pytest.mark.parametrize("during", ["open", "call"])
async def test_a_worker_that_ends_closes_once(during: str):
    garden = Garden()
    setup = {"open": "hang"} if during == "open" else {}
    feeder = Relay([garden_task(tool_setup={"garden": setup})])
    async with running_worker(feeder, {"sim://a": HangingEngine(*plants("hang"))}, tools=[garden]):
        await garden.is_hanging.wait()
    assert feeder.records == {}
    assert [bed.life.count("close") for bed in garden.beds] == [1]


# Resuming


async def resumed(tmp_path, garden: Garden, *words: str):
    """Lose a worker after these words. Returns the next worker's record, with one more plant, and its engine."""
    feeder = Relay([garden_task()])
    replies, journal = [*plants(*words, "elm"), DONE], TurnJournal(JournalFolder(tmp_path), 0.02, young_s=0.0)
    first = HangingEngine(*replies, hangs_at=len(words))
    async with running_worker(feeder, {"sim://a": first}, journal=journal, tools=[garden]), asyncio.timeout(60):
        await first.is_hanging.wait()
        while not files(tmp_path) and isinstance(garden, KeptGarden):
            await asyncio.sleep(0.01)
    await journal.close()
    feeder.lose_worker()
    engine, journal = HangingEngine(*replies), TurnJournal(JournalFolder(tmp_path), 0.02, young_s=0.0)
    async with running_worker(feeder, {"sim://a": engine}, journal=journal, tools=[garden]), asyncio.timeout(60):
        await feeder.is_done.wait()
    await journal.close()
    return feeder.records["t/0"], engine.num_turns


async def test_one_that_can_be_reopened_at_a_turn_goes_on_there(tmp_path):
    garden = KeptGarden()
    record, num_turns = await resumed(tmp_path, garden, "fir", "ash")
    assert (record.num_resumed_turns, record.reward, num_turns) == (2, 4.0, 2)
    assert [bed.life for bed in garden.beds] == [
        ["open", "fir", "ash", "close"],
        ["open", "restore", "elm", "looked", "close"],
    ]


async def test_one_that_cannot_begins_at_the_start(tmp_path):
    garden = Garden()
    record, num_turns = await resumed(tmp_path, garden, "fir", "ash")
    assert (record.num_resumed_turns, record.reward, num_turns) == (0, 4.0, 4)
    assert record.restart_reason == "no usable journal of an earlier attempt"
    assert garden.beds[1].life == ["open", "fir", "ash", "elm", "looked", "close"]


async def test_a_state_that_cannot_be_restored_is_not_begun_with(tmp_path):
    """A session that restored only part of a lost state is closed, and the trajectory starts with a new one."""
    garden = KeptGarden()
    record, _ = await resumed(tmp_path, garden, "fir", "salt")
    assert (record.num_resumed_turns, record.reward) == (0, 4.0)
    assert record.restart_reason.startswith("a tool's state cannot be restored: ")
    assert [bed.life for bed in garden.beds[1:]] == [
        ["open", "restore", "close"],
        ["open", "fir", "salt", "elm", "looked", "close"],
    ]


# Tool sets


class Two:
    def tools(self):
        return [Garden("one"), Garden("two")]


class Odd:
    def tools(self):
        return [Garden("one"), Bed]


two = Two()


def test_a_set_of_tools_is_named_like_a_tool():
    assert [one.spec.name for one in tools_at(f"{__name__}:two")] == ["one", "two"]
    assert [one.spec.name for one in tools_at(f"{__name__}:Two")] == ["one", "two"]
    with pytest.raises(InvalidRequest, match="returned an object that is not a Tool"):
        tools_at(f"{__name__}:Odd")


def test_the_time_that_tools_may_take_beside_the_loop_is_known():
    slow = Garden("slow", open_timeout_s=100.0, close_timeout_s=20.0, score_timeout_s=7.0)
    toolbox = Toolbox([slow, Garden("quick", open_timeout_s=1.0, close_timeout_s=30.0)])
    assert toolbox.own_s(["slow", "quick"]) == 137.0
    assert toolbox.own_s(["unknown"]) == 0.0
