"""The times of a trajectory: duration and replica of each turn and tool call, and the discarded work."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgspec

from agentloop.errors import ToolError
from agentloop.rollout.tool import tool
from agentloop.types import Limits, LossCause, OnExcess, ToolOutcome, Trajectory
from agentloop.values import codec
from tests.rollout.test_turn_journal import LOOKUPS, Lookup, at_work, written
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.lost_worker import HangingEngine, Relay
from tests.support.fleet.worker import running_worker, task
from tests.support.records.samples import make_trajectory


@tool(timeout_s=0.05)
async def late() -> str:
    """Take too long."""
    await asyncio.sleep(60)
    return ""


@tool
async def broken() -> str:
    """Fail."""
    raise ToolError("no")


async def test_a_record_tells_its_turns_and_its_tool_calls():
    calls = [call("calculator", expression="2 + 3"), call("late"), call("broken"), call("nothing"), call("broken")]
    limits = Limits(max_tool_calls_per_turn=4, on_excess_tool_calls=OnExcess.ANSWER)
    feeder = FakeCoordinator([task(tools=("calculator", "late", "broken"), limits=limits)])
    engine = scripted_engine("\n".join(calls), "The answer is 5.", decode_s=0.002)
    before = time.time()
    async with running_worker(feeder, {"sim://a": engine}, tools=[late, broken]), asyncio.timeout(60):
        await feeder.is_done.wait()
    record = feeder.records["t/0"]
    times, (first, second) = record.times, [turn.times for turn in record.path.turns]
    assert before <= times.began_at <= time.time()
    assert times.worker == "w"
    for turn, num_tokens in zip(
        (first, second), (turn.end - turn.start for turn in record.path.turns), strict=True
    ):
        assert turn.begun_us < turn.first_token_us < turn.ended_us <= times.ended_us
        assert turn.ended_us - turn.first_token_us >= 0.5 * 2000 * (num_tokens - 1), "it decoded from there on"
        assert (turn.queue_us, turn.unavailable_us) == (0, 0)
    outcomes = [(one.name, one.outcome.value) for one in times.tool_calls]
    expected = ("calculator", "ok"), ("late", "timeout"), ("broken", "error"), ("nothing", "unknown")
    assert outcomes == [*expected, ("broken", "excess")]
    assert times.tool_calls[1].duration_us >= 50_000
    assert all(first.ended_us <= one.begun_us <= second.begun_us for one in times.tool_calls)
    assert (times.moves, times.lost_tokens) == ((), {})


async def test_a_turn_that_moves_tells_when_and_how_long_it_had_no_place():
    engines = {"sim://a": scripted_engine("The answer is 5."), "sim://b": scripted_engine("The answer is 5.")}
    engines["sim://a"].faults.num_lost = 1
    feeder = FakeCoordinator([task()], urls=tuple(engines))
    async with running_worker(feeder, engines), asyncio.timeout(60):
        await feeder.is_done.wait()
    record = feeder.records["t/0"]
    (turn,) = record.path.turns
    (move,) = record.times.moves
    assert move.replica_id == "sim://b"
    assert turn.times.begun_us <= move.at_us <= turn.times.first_token_us
    assert 0 < turn.times.queue_us <= turn.times.ended_us - turn.times.begun_us


async def test_a_resumed_trajectory_keeps_its_clock_and_tells_what_was_lost(tmp_path):
    feeder, engine = Relay([task(tools=("lookup",), seed=7)]), HangingEngine(*LOOKUPS, hangs_at=2)
    before = time.time()
    async with at_work(feeder, engine, tmp_path, tools=[Lookup().as_tool()]):
        await engine.is_hanging.wait()
        await written(tmp_path)
    died = time.time()
    await asyncio.sleep(0.3)
    feeder.given = [
        replace(one, num_sampled_before=1000, lost_tokens={LossCause.KILL: 1000}) for one in feeder.given
    ]
    feeder.lose_worker()
    async with at_work(feeder, HangingEngine(*LOOKUPS), tmp_path, tools=[Lookup().as_tool()]):
        await feeder.is_done.wait()
    record = feeder.records["t/0"]
    times, turns = record.times, [turn.times for turn in record.path.turns]
    assert before <= times.began_at <= died
    assert [one.outcome for one in times.tool_calls] == [ToolOutcome.OK] * 3
    begun = [one.begun_us for one in times.tool_calls]
    assert turns[0].ended_us <= begun[0] <= turns[1].begun_us
    assert turns[1].ended_us + 300_000 <= turns[2].begun_us <= begun[2] <= times.ended_us
    num_kept = sum(turn.end - turn.start for turn in record.path.turns[:2])
    assert times.lost_tokens == {LossCause.KILL: 1000 - num_kept}


def test_a_record_of_an_earlier_release_reads_without_times():
    def without(value):
        if isinstance(value, dict):
            return {name: without(part) for name, part in value.items() if name != "times"}
        return [without(part) for part in value] if isinstance(value, list) else value

    written = msgspec.msgpack.encode(without(msgspec.msgpack.decode(codec.encode(make_trajectory()))))
    record = codec.decode(written, Trajectory)
    assert (record.times, [turn.times for turn in record.path.turns]) == (None, [None, None])
    assert codec.decode(codec.encode(make_trajectory()), Trajectory).times == make_trajectory().times
