"""Loops of several agents: conversations, rewards and paths of each agent in one record."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentloop.errors import InvalidRequest, NotFound
from agentloop.rollout.context import LoopContext
from agentloop.types import Credit, Limits, Message, OnStale, RolloutTask, StalenessLimit, StopReason, Trajectory
from agentloop.values import codec
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import RENDERER, call, ids
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.lost_worker import HangingEngine
from tests.support.fleet.worker import running_worker, task


class Answering(HangingEngine):
    """A policy with a reply for each text in a prompt's last message; the first text that occurs counts."""

    def __init__(self, replies: dict[str, str], hangs_at: int = 99) -> None:
        super().__init__("", hangs_at=hangs_at)
        self.prompts: list[str] = []
        self.request_ids: list[str] = []

        def script(prompt_ids):
            prompt = RENDERER.decode(prompt_ids)
            self.prompts.append(prompt)
            last = prompt.rsplit("<|im_start|>", 2)[1]
            return ids(next(reply for text, reply in replies.items() if text in last))

        self._policy = ScriptedPolicy(script)

    async def generate(self, request, on_progress=None):
        self.request_ids.append(request.request_id)
        return await super().generate(request, on_progress)


async def run(rollout_task: RolloutTask, engine: HangingEngine, **options) -> Trajectory:
    feeder = FakeCoordinator([rollout_task], **options)
    async with running_worker(feeder, {"sim://a": engine}), asyncio.timeout(60):
        await feeder.is_done.wait()
    record = feeder.records["t/0"]
    assert codec.decode(codec.encode(record), Trajectory).agents == record.agents
    return record


class Debate:
    """The main agent and two others, which answer at the same time; one of them is not trained."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        pro = ctx.agent("pro", Message("user", "say pro"))
        con = ctx.agent("con", Message("user", "say con"), has_tools=False, is_trained=False)
        await asyncio.gather(pro.sample(), con.sample())
        await pro.run_tools(pro.last_turn.calls)
        await pro.sample()
        ctx.observe(Message("user", f"judge: {pro.messages[-1].content}"))
        await ctx.sample()
        pro.set_reward(0.25, {"style": 0.5})
        pro.set_turn_reward(0.125)
        con.set_metrics(length=3.0)
        ctx.set_reward(1.0)


REPLIES = {
    "say pro": call("calculator", expression="2 + 3"),
    "say con": "No: it is six.",
    "judge": "Pro wins.",
    "5": "Yes: it is five.",
}
DEBATE = task(loop=f"{__name__}:Debate", reward=None, seed=3)


async def test_the_record_has_the_paths_and_rewards_of_all_agents() -> None:
    engine = Answering(REPLIES)
    record = await run(DEBATE, engine)
    assert (record.error, record.is_complete, record.num_tool_calls) == (None, True, 1)
    assert record.agents == ("", "pro", "con")
    assert record.messages[-1].content == "Pro wins."
    assert [path.is_trainable for path in record.paths] == [True, True, False]
    assert record.path_rewards == (1.0, 0.25, 1.0)
    assert replace(record, credit=Credit.MAIN).path_rewards == (1.0, 0.25, 1.0)
    assert record.of_agent("pro").num_sampled_tokens == int(record.paths[1].response_mask.sum())
    assert (record.components, record.metrics) == ({"pro.style": 0.5}, {"con.length": 3.0})
    turns = [turn.turn_id for path in record.paths for turn in path.turns]
    assert turns == ["0", "pro-0", "pro-1", "con-0"]
    assert record.paths[1].turns[-1].reward == 0.125
    assert len(set(engine.request_ids)) == 4
    assert sum("<tools>" in prompt for prompt in engine.prompts) == 3
    assert record.num_sampled_tokens == sum(int(path.response_mask.sum()) for path in record.paths)


async def test_the_record_of_one_agent() -> None:
    record = await run(DEBATE, Answering(REPLIES))
    pro, main = record.of_agent("pro"), record.of_agent("")
    assert (pro.reward, pro.main_conversation, pro.messages[-1].content) == (0.25, (0,), "Yes: it is five.")
    assert (main.reward, main.messages) == (1.0, record.messages)
    with pytest.raises(
        NotFound, match=r"no agent 'x' sampled a turn; the trajectory's agents are \['', 'pro', 'con'\]"
    ):
        record.of_agent("x")


class Failing:
    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        helper = ctx.agent("helper", Message("user", "say con"))
        while True:
            await helper.sample()
            helper.observe(Message("user", "say con"))


async def test_a_limit_of_one_agent_ends_the_episode_with_its_reason() -> None:
    record = await run(task(loop=f"{__name__}:Failing", limits=Limits(max_turns=3)), Answering(REPLIES))
    assert (record.stop_reason, record.is_complete) == (StopReason.MAX_TURNS, True)
    assert record.agents == ("helper",)
    assert len(record.path.turns) == 3


class Refused:
    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        helper = ctx.agent("a", Message("user", "say con"))
        for context, name, messages, problem in (
            (ctx, "a", ("x",), "expected a new name"),
            (ctx, "a b", ("x",), "expected a new name"),
            (ctx, "b", (), "has no messages"),
            (helper, "b", ("x",), "only the main agent's context can start agents"),
            (ctx, "b", (None,), "must be a str"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                context.agent(name, *(Message("user", text) for text in messages))  # type: ignore[arg-type]
        await helper.sample()


async def test_agents_that_cannot_be_started_are_refused() -> None:
    record = await run(task(loop=f"{__name__}:Refused"), Answering(REPLIES))
    assert (record.error, record.agents) == (None, ("a",))


async def test_a_lost_call_of_an_agent_makes_the_record_incomplete() -> None:
    engine = Answering(REPLIES, hangs_at=1)
    feeder = FakeCoordinator([DEBATE])
    async with running_worker(feeder, {"sim://a": engine}), asyncio.timeout(60):
        await engine.is_hanging.wait()
        feeder.cancel_next = ["t/0"]
        await feeder.is_done.wait()
    assert (feeder.records["t/0"].is_complete, feeder.records["t/0"].stop_reason) == (False, StopReason.CANCELLED)


async def test_old_tokens_of_every_agent_are_masked() -> None:
    class Updated(Answering):
        async def generate(self, request, on_progress=None):
            generation = await super().generate(request, on_progress)
            version = 5 if "judge" in self.prompts[-1] else 0
            spans = tuple(replace(span, version=version) for span in generation.weight_versions)
            return replace(generation, weight_versions=spans)

    record = await run(DEBATE, Updated(REPLIES), staleness=StalenessLimit(1, OnStale.MASK))
    assert [int(path.response_mask.sum()) > 0 for path in record.paths] == [True, False, False]
    assert record.versions == (0, 5)


# Examples


@pytest.mark.parametrize(
    ("moves", "rewards", "num_moves"),
    [
        ({"There are 4": "take 3", "There are 1": "take 1"}, {"first": -1.0, "second": 1.0}, 2),
        ({"There are 4": "take 1", "There are 3": "take 3"}, {"first": -1.0, "second": 1.0}, 2),
        ({"There are 4": "I pass."}, {"first": -1.0}, 0),
        ({"There are 4": "take 2", "There are 2": "take 3"}, {"first": 1.0, "second": -1.0}, 1),
    ],
)
async def test_self_play(moves, rewards, num_moves) -> None:
    nim = RolloutTask("t", (Message("user", "4"),), loop="examples.20_self_play:Nim")
    record = await run(nim, Answering(moves))
    assert (record.error, record.stop_reason) == (None, StopReason.COMPLETED)
    assert (dict(record.agent_rewards), record.metrics) == (rewards, {"num_moves": float(num_moves)})
    assert set(record.agents) == set(rewards)


@pytest.mark.parametrize(
    ("replies", "rewards"),
    [
        ({"Question": "correct", "2 + 3": "The answer is 5"}, {"solver": 1.0, "verifier-1": 1.0}),
        ({"Question": "correct", "2 + 3": "The answer is 6"}, {"solver": 0.0, "verifier-1": 0.0}),
        (
            {"Answer: The answer is 6": "wrong: 5", "Question": "correct", "A reviewer": "The answer is 5",
             "2 + 3": "The answer is 6"},
            {"solver": 1.0, "verifier-1": 1.0, "verifier-2": 1.0},
        ),
    ],
)  # fmt: skip
async def test_solver_and_verifier(replies, rewards) -> None:
    question = (Message("user", "What is 2 + 3?"),)
    checked = RolloutTask("t", question, reference="5", loop="examples.21_solver_verifier:Checked")
    record = await run(checked, Answering(replies))
    assert (record.error, dict(record.agent_rewards)) == (None, rewards)
    assert record.reward == rewards["solver"]
