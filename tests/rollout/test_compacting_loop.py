"""The compacting tool loop: summaries are trained turns, and a lost worker does not change the record."""

from __future__ import annotations

import asyncio

import pytest

from agentloop.errors import InvalidRequest
from agentloop.rollout.context import LoopContext
from agentloop.rollout.loops import SUMMARY_REQUEST, ToolLoop
from agentloop.types import Credit, Limits, Message, RolloutTask, StopReason
from tests.rollout.test_turn_journal import Lookup, assert_same, at_work, written
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import RENDERER, call, ids
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.lost_worker import HangingEngine, Relay
from tests.support.fleet.worker import running_worker, task

SUMMARY = "I looked up {n} words so far: they are words of the English language."
ANSWER = "The answer is 5."
LIMITS = Limits(max_context_tokens=1000, max_turns=80)
NUM_WORDS = 40


def words(prompt: str) -> int:
    """Return the number of words that were looked up: those of the summary, and those after it."""
    _, summary, after = prompt.rpartition("I looked up ")
    return (int(after.partition(" ")[0]) if summary else 0) + after.count(" is a word")


def reply_to(prompt: str) -> str:
    if prompt.rstrip().endswith(f"{SUMMARY_REQUEST}<|im_end|>\n<|im_start|>assistant"):
        return SUMMARY.format(n=words(prompt))
    done = words(prompt)
    return ANSWER if done >= NUM_WORDS else call("lookup", word=f"word-{done}")


class LookupEngine(HangingEngine):
    """A policy that looks up NUM_WORDS words, and writes a summary where it is asked for one."""

    def __init__(self, hangs_at: int = 99) -> None:
        super().__init__("", hangs_at=hangs_at)
        self._policy = ScriptedPolicy(lambda prompt: ids(reply_to(RENDERER.decode(prompt))))


def compacting(**options) -> RolloutTask:
    return task(tools=("lookup",), limits=LIMITS, loop="compacting_tool_loop", seed=7, **options)


async def undisturbed(rollout_task: RolloutTask, noted: Lookup):
    feeder = FakeCoordinator([rollout_task])
    workers = running_worker(feeder, {"sim://a": LookupEngine()}, tools=[noted.as_tool()])
    async with workers, asyncio.timeout(60):
        await feeder.is_done.wait()
    return feeder.records["t/0"]


async def test_the_policy_continues_from_its_summary_and_every_token_is_credited() -> None:
    rollout_task, noted = compacting(), Lookup()
    record = await undisturbed(rollout_task, noted)
    assert (record.stop_reason, record.num_tool_calls) == (StopReason.COMPLETED, NUM_WORDS)
    assert noted.words == [f"word-{number}" for number in range(NUM_WORDS)]
    assert len(record.paths) > 2
    links = [path.lineage for path in record.paths]
    assert links[0] is None
    assert [(link.kind, link.parent) for link in links[1:]] == [("compacts", at) for at in range(len(links) - 1)]
    assert [path.split_reason for path in record.paths[1:]] == ["compacted"] * (len(links) - 1)
    assert record.messages[-1].content == ANSWER
    for before, after in zip(record.paths, record.paths[1:], strict=False):
        assert before.messages[-2] == Message("user", SUMMARY_REQUEST)
        summary = before.messages[-1].content
        assert before.response_mask[before.turns[-1].start : before.turns[-1].end].all()
        expected = (*rollout_task.messages, Message("user", f"Summary of the work so far:\n{summary}"))
        assert after.messages[: len(expected)] == expected
        assert len(after.prompt_ids) + len(after.response_ids) < 1000
    assert record.path_rewards == (1.0,) * len(record.paths)
    assert sum(int(path.response_mask.sum()) for path in record.paths) == record.num_sampled_tokens


async def test_without_summaries_the_context_is_full() -> None:
    feeder = FakeCoordinator([task(tools=("lookup",), limits=LIMITS)])
    async with running_worker(feeder, {"sim://a": LookupEngine()}, tools=[Lookup().as_tool()]), asyncio.timeout(60):
        await feeder.is_done.wait()
    assert feeder.records["t/0"].stop_reason is StopReason.MAX_CONTEXT


async def test_a_lost_worker_at_any_turn_changes_nothing(tmp_path) -> None:
    rollout_task = compacting(credit=Credit.MAIN)
    expected = await undisturbed(rollout_task, Lookup())
    num_turns = sum(len(path.turns) for path in expected.paths)
    assert num_turns > NUM_WORDS + 2
    for lost_after in range(1, num_turns, 3):
        folder, noted = tmp_path / str(lost_after), Lookup()
        feeder, engine = Relay([rollout_task]), LookupEngine(hangs_at=lost_after)
        async with at_work(feeder, engine, folder, tools=[noted.as_tool()]):
            await engine.is_hanging.wait()
            await written(folder)
        feeder.lose_worker()
        async with at_work(feeder, LookupEngine(), folder, tools=[noted.as_tool()]):
            await feeder.is_done.wait()
        assert_same(feeder.records["t/0"], expected, num_resumed_turns=lost_after)
        assert noted.words == [f"word-{number}" for number in range(NUM_WORDS)]


class ReplacesEarly:
    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        with pytest.raises(InvalidRequest, match="no turn was sampled from the last prompt"):
            ctx.replace_history(Message("user", "again"))
        await ctx.sample()
        with pytest.raises(InvalidRequest, match="must be a str"):
            ctx.replace_history(Message("user", None))  # type: ignore[arg-type]
        ctx.replace_history(Message("user", "again"))
        assert ctx.messages == (Message("user", "again"),)
        with pytest.raises(InvalidRequest, match="no turn was sampled from the last prompt"):
            ctx.replace_history(Message("user", "twice"))
        await ctx.sample()


async def test_a_loop_of_ones_own_replaces_its_history_after_a_turn() -> None:
    feeder = FakeCoordinator([task(loop=f"{__name__}:ReplacesEarly")])
    async with running_worker(feeder, {"sim://a": HangingEngine("First.", "Second.")}), asyncio.timeout(60):
        await feeder.is_done.wait()
    record = feeder.records["t/0"]
    assert (record.error, record.stop_reason) == (None, StopReason.COMPLETED)
    assert [len(path.turns) for path in record.paths] == [1, 1]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_outside_of_the_context_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="expected a share between 0 and 1"):
        ToolLoop(compacts_at=share)
