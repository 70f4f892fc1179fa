"""Many loops in one worker: their records and stop reasons, and isolation of failures."""

import asyncio
import shutil
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from agentloop.api.coordinator import Orders
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import WeightUpdate
from agentloop.errors import ServiceUnavailable, StorageFull, TemplateNotPrefixStable
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.rollout.context import LoopContext
from agentloop.rollout.tool import ToolSpec
from agentloop.score import PathScore, Score
from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    KVPolicy,
    Limits,
    Message,
    OnExcess,
    OnStale,
    PauseMode,
    RolloutTask,
    StalenessLimit,
    StopReason,
    Trajectory,
)
from agentloop.values import codec
from agentloop.values.endings import FailureClass
from agentloop.values.sampling import LogprobsMode
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import POLICY, RENDERER, SPEC, call, ids, scripted_engine, turns
from tests.support.fleet.calculator import calculator
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.live_run import live_run, talk, write_checkpoint
from tests.support.fleet.worker import running_worker, task

CALL = call("calculator", expression="2 + 3")
ANSWER = "The answer is 5."


async def records(feeder: FakeCoordinator, engines, timeout_s: float = 60, **config):
    async with running_worker(feeder, engines, **config), asyncio.timeout(timeout_s):
        await feeder.is_done.wait()
    return feeder.records


async def one(rollout_task: RolloutTask, *replies: str, **config):
    feeder = FakeCoordinator([rollout_task])
    return (await records(feeder, {"sim://a": scripted_engine(*replies)}, **config))[f"{rollout_task.task_id}/0"]


async def test_a_tool_call_and_an_answer_become_one_exact_path():
    trajectory = await one(task(), CALL, ANSWER)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.is_complete
    assert trajectory.reward == 1.0
    assert (trajectory.num_tool_calls, trajectory.num_tool_errors) == (1, 0)
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    timings = trajectory.timings
    assert 0 < timings.engine_s < timings.generate_s < timings.total_s
    assert trajectory.messages[2].content == "5"
    (path,) = trajectory.paths
    stop = RENDERER.stop_token_ids[0]
    sampled = [token for token, is_sampled in zip(path.response_ids, path.response_mask, strict=True) if is_sampled]
    assert sampled == [*ids(CALL), stop, *ids(ANSWER), stop]
    assert len(path.turns) == 2
    assert path.turns[1].prompt_len == len(path.prompt_ids) + path.turns[1].start
    assert not path.logprobs[~path.response_mask].any()
    assert (path.logprobs[path.response_mask] < 0).all()


async def test_a_record_is_offered_until_a_full_disk_has_room_beyond_any_deadline():
    class FullDisk(FakeCoordinator):
        num_refused = 0

        async def finish_one(self, worker_id: str, trajectory: Trajectory) -> bool:
            if self.num_refused < 3:
                self.num_refused += 1
                raise StorageFull("the disk is full")
            return await super().finish_one(worker_id, trajectory)

    feeder = FullDisk([task()])
    found = await records(feeder, {"sim://a": scripted_engine(CALL, ANSWER)}, hand_in_timeout_s=0.0)
    assert feeder.num_refused == 3
    assert [trajectory.is_complete for trajectory in found.values()] == [True]


async def test_each_turn_says_how_it_was_sampled():
    asked = replace(task(), temperature=0.5, top_k=7, seed=11)
    (path,) = (await one(asked, CALL, ANSWER)).paths
    assert [turn.seed is None for turn in path.turns] == [False, False]
    assert path.turns[0].seed != path.turns[1].seed
    for turn in path.turns:
        assert turn.sampling is not None
        assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.top_k) == (0.5, 1.0, 7)
        assert turn.sampling.stop_token_ids == RENDERER.stop_token_ids
        assert turn.sampling.logprobs_mode is LogprobsMode.SAMPLED
    assert not path.constrained.any()
    assert path.raw_logprobs is None


async def test_a_task_is_sampled_with_every_option_that_it_names():
    options = {
        "min_p": 0.0,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": ((7, -1.0),),
        "min_tokens": 1,
        "stop_token_ids": (9,),
    }
    (path,) = (await one(replace(task(), **options), CALL, ANSWER)).paths
    for turn in path.turns:
        assert {name: getattr(turn.sampling, name) for name in options if name != "stop_token_ids"} == {
            name: value for name, value in options.items() if name != "stop_token_ids"
        }
        assert turn.sampling.stop_token_ids == (*RENDERER.stop_token_ids, 9)
    assert path.constrained[path.response_mask].all()  # constrained by the bias
    stopped = await one(replace(task(), stop=("answer",)), "The answer is 5.")
    assert stopped.messages[-1].content == "The"
    endless = await one(replace(task(), ignore_eos=True, stop_token_ids=(RENDERER.stop_token_ids[0],)), ANSWER)
    assert endless.paths[0].turns[0].sampling.stop_token_ids == (RENDERER.stop_token_ids[0],)


async def test_a_long_constraint_is_in_the_record_once():
    long = Constraint(ConstraintKind.REGEX, "|".join(f"word{n}" for n in range(1000)))
    loop = f"{__name__ if '.' in __name__ else 'tests.rollout.' + __name__}:AsksTwice"
    engine = scripted_engine(ANSWER, ANSWER, spec=replace(SPEC, can_constrain=True))
    asked = replace(task(), tools=(), constraint=long, loop=loop)
    record = (await records(FakeCoordinator([asked]), {"sim://a": engine}))["t/0"]
    assert len(record.paths[0].turns) == 2
    [digest] = {turn.sampling.constraint_digest for turn in record.paths[0].turns}
    assert dict(record.constraints) == {digest: long.text}
    assert [turn.sampling.constraint_text for turn in record.paths[0].turns] == ["", ""]
    encoded = codec.encode(record)
    assert encoded.count(b"word999") == 1
    assert codec.decode(encoded, Trajectory).constraints == record.constraints


class AsksTwice:
    """A loop of two turns, independent of the answers."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        ctx.observe(Message("user", "Again."))
        await ctx.sample()


async def test_every_prompt_extends_the_turn_before():
    """Turn n's prompt is the prompt and response of turn n-1, byte for byte, followed by the observed messages."""
    trajectory = await one(task(), CALL, CALL, CALL, ANSWER)
    (path,) = trajectory.paths
    from_template = RENDERER.render(list(trajectory.messages), _definitions())
    whole = [*path.prompt_ids.tolist(), *path.response_ids.tolist()]
    # The scripted ids are canonical, so rendering the complete conversation must give the same ids.
    assert from_template[: len(whole)] == whole


def _definitions():
    return [calculator.spec.definition()]


async def test_a_malformed_call_is_answered_not_dropped():
    trajectory = await one(task(), "<tool_call>\n{not json\n</tool_call>", ANSWER)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.num_tool_errors == 1
    assert trajectory.messages[2].content.startswith("Error: ")


@pytest.mark.parametrize("thought", [f"I could call it.\n{CALL}", ANSWER.replace("5", "6")])
async def test_a_thought_is_neither_run_nor_scored(thought: str):
    trajectory = await one(task(), f"<think>\n{thought}\n</think>\n\n{ANSWER}")
    assert (trajectory.stop_reason, trajectory.num_tool_calls, trajectory.reward) == (StopReason.COMPLETED, 0, 1.0)
    assert trajectory.messages[1:] == (Message("assistant", ANSWER, reasoning=thought),)
    (turn,) = trajectory.path.turns
    assert thought in RENDERER.decode(trajectory.path.response_ids[turn.start : turn.end].tolist())


async def test_a_call_after_a_thought_is_run():
    trajectory = await one(task(tools=("calculator",)), f"<think>{CALL}</think>{CALL}", ANSWER)
    assert (trajectory.num_tool_calls, trajectory.messages[2].content, trajectory.reward) == (1, "5", 1.0)
    assert trajectory.messages[1].reasoning == CALL


async def test_without_tools_an_answer_within_a_thought_is_no_answer():
    trajectory = await one(task(tools=()), f"<think>{ANSWER}</think>I do not know.")
    assert (trajectory.messages[-1].content, trajectory.reward) == ("I do not know.", 0.0)


async def test_an_unknown_tool_and_bad_arguments_are_answered():
    trajectory = await one(task(), call("missing", x=1) + "\n" + call("calculator", wrong=1), ANSWER)
    assert trajectory.num_tool_errors == 2
    errors = [message.content for message in trajectory.messages if message.role == "tool"]
    assert "calculator" in errors[0]
    assert "invalid arguments" in errors[1]
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("limits", "replies", "expected"),
    [
        (Limits(max_turns=2), [CALL], StopReason.MAX_TURNS),
        (Limits(max_tool_calls=2), [CALL], StopReason.MAX_TOOL_CALLS),
        (Limits(max_tokens_per_turn=3), [CALL], StopReason.MAX_TOKENS_PER_TURN),
        (Limits(max_sampled_tokens=20), [CALL], StopReason.MAX_SAMPLED_TOKENS),
        (Limits(max_context_tokens=180), [CALL], StopReason.MAX_CONTEXT),
        (Limits(max_context_tokens=10), [CALL], StopReason.PROMPT_TOO_LONG),
        (
            Limits(max_tool_calls_per_turn=1, on_excess_tool_calls=OnExcess.STOP),
            [CALL + CALL],
            StopReason.MAX_TOOL_CALLS_PER_TURN,
        ),
        (
            Limits(max_tool_response_bytes=4, on_long_tool_response=OnExcess.STOP),
            [call("calculator", expression="1234567 * 1")],
            StopReason.TOOL_RESPONSE_TOO_LONG,
        ),
    ],
    ids=lambda value: value.value if isinstance(value, StopReason) else "",
)
async def test_each_limit_has_its_stop_reason(limits, replies, expected):
    trajectory = await one(task(limits=limits), *replies)
    assert trajectory.stop_reason is expected
    assert trajectory.is_complete is (expected is not StopReason.PROMPT_TOO_LONG)


async def test_excess_calls_and_long_responses_are_marked_and_go_on():
    limits = Limits(max_tool_calls_per_turn=1, max_tool_response_bytes=4)
    trajectory = await one(task(limits=limits), call("calculator", expression="1234567 * 1") + CALL, ANSWER)
    tools = [message.content for message in trajectory.messages if message.role == "tool"]
    assert "truncated" in tools[0]
    assert "too many calls" in tools[1]
    assert trajectory.stop_reason is StopReason.COMPLETED


async def test_a_template_that_rewrites_history_forks_with_its_reason(tmp_path):
    """Fallback: the sampled tokens stay in one path, and the next turn starts another path."""
    folder = shutil.copytree(POLICY, tmp_path / "model")
    template = folder / "chat_template.jinja"
    shortened = "{{- message.content if loop.last else 'Earlier words.' }}"
    template.write_text(template.read_text().replace("{{- message.content }}", shortened))
    with pytest.raises(TemplateNotPrefixStable):
        TemplateRenderer.from_directory(folder)
    forking = TemplateRenderer.from_directory(folder, RenderSettings(on_unstable=OnUnstable.FORK))
    feeder = FakeCoordinator([task()])
    engines = {"sim://a": scripted_engine("Let me see.\n" + CALL, ANSWER)}
    found = await records(feeder, engines, renderer=forking)
    first, second = found["t/0"].paths
    assert (first.split_reason, second.split_reason) == (None, "template")
    assert "Let me see." in RENDERER.decode(first.response_ids.tolist())
    assert "Let me see." not in RENDERER.decode(second.prompt_ids.tolist())
    assert len(first.turns) == len(second.turns) == 1
    assert found["t/0"].reward == 1.0
    assert (second.parent, found["t/0"].main_conversation, found["t/0"].path is second) == (0, (0, 1), True)
    assert [message.role for message in first.messages] == ["user", "assistant"]
    assert [message.role for message in second.messages] == ["user", "assistant", "tool", "assistant"]
    assert found["t/0"].messages == second.messages


async def test_the_limit_of_a_trajectory_does_not_count_the_time_in_which_its_engine_is_frozen():
    engine = scripted_engine(ANSWER)
    feeder = FakeCoordinator([task(limits=Limits(timeout_s=0.5))])
    async with running_worker(feeder, {"sim://a": engine}), asyncio.timeout(30):
        await engine.pause(PauseMode.KEEP, KVPolicy.KEEP)
        while engine.load().num_waiting == 0:
            await asyncio.sleep(0.005)
        await asyncio.sleep(1.2)
        await engine.resume()
        await feeder.is_done.wait()
    trajectory = feeder.records["t/0"]
    assert (trajectory.stop_reason, trajectory.is_complete) == (StopReason.COMPLETED, True)
    assert trajectory.timings.total_s > trajectory.timings.unavailable_s > 1.1


SLOW = "Let me think about this for a long while, for I am in no hurry, and it is not easy to say at all."


@pytest.mark.parametrize("limits", [{"limits": Limits(timeout_s=0.5)}, {}], ids=["trajectory", "turn"])
async def test_a_turn_that_takes_too_long_is_kept_as_far_as_it_came(limits):
    feeder = FakeCoordinator([task(tools=(), reward="contains_reference", **limits)], urls=["sim://a", "sim://b"])
    engines = {url: scripted_engine(SLOW, decode_s=0.05) for url in feeder.urls}
    found = (await records(feeder, engines, turn_timeout_s=300.0 if limits else 0.5))["t/0"]
    assert (found.stop_reason, found.is_complete, found.is_truncated) == (StopReason.DEADLINE, True, True)
    assert (found.reward, found.num_resampled_turns) == (0.0, 0)
    [turn] = found.path.turns
    assert turn.finish_reason is FinishReason.DEADLINE
    said = found.messages[-1].content
    assert said
    assert said != SLOW
    assert SLOW.startswith(said)
    assert found.path.response_mask.sum() == turn.end > 0


async def test_a_turn_without_a_token_is_asked_for_elsewhere_and_counted():
    feeder = FakeCoordinator([task(tools=())], urls=["sim://a", "sim://b"])
    engines = {url: scripted_engine(ANSWER) for url in feeder.urls}
    engines["sim://a"].faults.num_hung = 1
    found = (await records(feeder, engines, turn_timeout_s=0.3))["t/0"]
    assert (found.stop_reason, found.reward) == (StopReason.COMPLETED, 1.0)
    assert found.num_resampled_turns == 1
    assert engines["sim://a"].load().num_running == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"loop": "no_such_loop"}, "no_such_loop"),
        ({"loop": "no.such.module:Loop"}, "no.such.module"),
        ({"tools": ("no_such_tool",)}, "no_such_tool"),
        ({"reward": "no_such_reward"}, "no_such_reward"),
    ],
)
async def test_an_invalid_task_is_a_record_and_disturbs_nobody(fields, named):
    feeder = FakeCoordinator([task("bad", **fields), *(task(f"good{n}") for n in range(8))])
    found = await records(feeder, {"sim://a": scripted_engine(CALL, ANSWER)})
    assert found["bad/0"].stop_reason is StopReason.INVALID_TASK
    assert named in (found["bad/0"].error or "")
    assert not found["bad/0"].is_complete
    assert all(found[f"good{n}/0"].reward == 1.0 for n in range(8))


class Raising:
    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        raise ValueError("the loop's own bug")


class AsksAgain:
    """A loop that observes a message between two turns."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        ctx.observe(Message("user", "Are you sure?"))
        await ctx.sample()


async def test_a_users_loop_by_import_path():
    trajectory = await one(task(loop="tests.rollout.test_worker:AsksAgain"), "Perhaps 4.", ANSWER)
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert trajectory.reward == 1.0


class AsksForLittle:
    """A loop that cuts its first turn with a token limit, and then asks for the answer."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        turn = await ctx.sample(max_tokens=6)
        ctx.set_metrics(num_cut=float(len(turn.token_ids)), is_closed=float(turn.is_closed))
        ctx.observe(Message("user", "Briefly."))
        await ctx.sample()


@pytest.mark.parametrize(
    ("limits", "expected", "num_turns"),
    [
        (Limits(), StopReason.COMPLETED, 2),
        (Limits(max_turns=2), StopReason.COMPLETED, 2),
        (Limits(max_turns=1), StopReason.MAX_TURNS, 1),
        (Limits(max_tokens_per_turn=6), StopReason.MAX_TOKENS_PER_TURN, 1),
        (Limits(max_sampled_tokens=6), StopReason.MAX_SAMPLED_TOKENS, 1),
    ],
)
async def test_a_turn_that_the_loop_cut_returns_and_a_limit_ends_it(limits, expected, num_turns):
    asked = task(loop="tests.rollout.test_worker:AsksForLittle", limits=limits)
    trajectory = await one(asked, "Let me think about this for a while.", ANSWER)
    assert (trajectory.stop_reason, len(trajectory.path.turns)) == (expected, num_turns)
    assert trajectory.is_complete
    first = trajectory.path.turns[0]
    assert (first.end - first.start, first.finish_reason) == (6, FinishReason.LENGTH)
    if num_turns == 2:
        assert trajectory.metrics == {"num_cut": 6.0, "is_closed": 0.0}
        assert (trajectory.messages[-1].content, trajectory.reward) == (ANSWER, 1.0)
        assert not trajectory.is_truncated, "its last turn ended by itself"


async def test_a_raising_loop_fails_its_trajectory_only():
    feeder = FakeCoordinator([task("bad", loop="tests.rollout.test_worker:Raising"), task("good")])
    found = await records(feeder, {"sim://a": scripted_engine(CALL, ANSWER)})
    assert found["bad/0"].stop_reason is StopReason.LOOP_FAILED
    assert "ValueError: the loop's own bug" in (found["bad/0"].error or "")
    assert not found["bad/0"].is_complete
    assert found["bad/0"].path.response_mask.any(), "what was sampled is kept"
    assert found["good/0"].reward == 1.0


async def test_a_failing_reward_loses_no_trajectory():
    trajectory = await one(task(reward="tests.rollout.test_worker:broken_reward"), CALL, ANSWER)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.is_complete
    assert trajectory.reward is None
    assert "ZeroDivisionError" in (trajectory.reward_error or "")
    assert (trajectory.failure, trajectory.is_sound) == (FailureClass.INFRASTRUCTURE, False)


async def test_a_reward_function_has_a_time_limit_of_its_own():
    limits = Limits(reward_timeout_s=0.05)
    trajectory = await one(task(reward="tests.rollout.test_worker:endless_reward", limits=limits), CALL, ANSWER)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, None)
    assert trajectory.reward_error == "timed out after 0.05 s"
    assert trajectory.failure is FailureClass.INFRASTRUCTURE


def test_a_reward_may_take_longer_than_its_trajectory_might(tmp_path):
    clock = VirtualClock()
    limits = Limits(max_turns=1, timeout_s=30.0, reward_timeout_s=100.0)
    slow = replace(talk(), reward="tests.rollout.test_worker:slow_reward", limits=limits)

    async def main():
        async with live_run(clock, write_checkpoint(tmp_path), num_workers=1) as run:
            await run.submit("r", 1, 1, slow, None)
            await run.until_done("r")
            return list(run.store.records.values())

    [trajectory] = clock.run(main())
    assert (trajectory.stop_reason, trajectory.reward, trajectory.failure) == (StopReason.COMPLETED, 0.5, None)
    assert trajectory.timings.generate_s < 30.0


async def endless_reward(task, messages):
    await asyncio.sleep(3600)


async def slow_reward(task, messages):
    await asyncio.sleep(80.0)
    return 0.5


def broken_reward(task, messages):
    return 1 / 0


class ScoresItself:
    """A loop that sets every field that a loop can set."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample()
        ctx.set_turn_reward(0.25)
        ctx.set_reward(3.0, {"form": 1.0})
        ctx.observe(Message("user", "Are you sure?"))
        await ctx.sample()
        ctx.set_turn_reward(0.5)
        ctx.set_turn_reward(-0.25, "0")
        ctx.set_metrics(num_turns=2)
        if task.task_id == "bad":
            ctx.set_metrics(num_turns=float("nan"))
        if task.task_id == "out":
            ctx.exclude_path()
        if task.task_id == "raises":
            raise ValueError("the loop's own bug")


def from_the_record(task, messages, trajectory):
    """Score a record from the fields that the loop set."""
    return Score(trajectory.reward / 2, main=PathScore(tokens=trajectory.path.response_mask * 0.5))


LOOP = {"loop": "tests.rollout.test_worker:ScoresItself", "reward": None}


async def test_a_loop_scores_its_trajectory():
    found = await one(task(**LOOP), "Perhaps 4.", ANSWER)
    assert (found.reward, found.reward_error, found.components) == (3.0, None, {"form": 1.0})
    assert (found.metrics, found.is_truncated, found.path.is_trainable) == ({"num_turns": 2.0}, False, True)
    assert [(turn.turn_id, turn.reward) for turn in found.path.turns] == [("0", -0.25), ("1", 0.5)]
    assert not (await one(task("out", **LOOP), "Perhaps 4.", ANSWER)).path.is_trainable


async def test_a_reward_function_has_the_last_word():
    found = await one(task(**{**LOOP, "reward": "tests.rollout.test_worker:from_the_record"}), "Perhaps 4.", ANSWER)
    assert (found.reward, found.components, found.reward_error) == (1.5, {"form": 1.0}, None)
    assert found.path.token_rewards.tolist() == (found.path.response_mask * 0.5).tolist()
    lost = await one(task(**{**LOOP, "reward": "tests.rollout.test_worker:broken_reward"}), "Perhaps 4.", ANSWER)
    assert (lost.reward, lost.components) == (None, {"form": 1.0})
    assert lost.reward_error.startswith("ZeroDivisionError")


async def test_what_a_loop_says_wrongly_is_told_and_what_failed_is_not_trainable():
    found = await one(task("bad", **LOOP), "Perhaps 4.", ANSWER)
    assert (found.reward, found.metrics, found.is_complete) == (None, {}, True)
    assert found.reward_error == "the metric 'num_turns' must be finite, not nan"
    failed = await one(task("raises", **LOOP), "Perhaps 4.", ANSWER)
    assert (failed.reward, failed.components, failed.metrics) == (None, {}, {"num_turns": 2.0})
    assert not failed.path.is_trainable


class Counter:
    """An environment whose tool counts up. Its score is the distance between the count and the task's reference."""

    def __init__(self, fate: str = "") -> None:
        self.spec = ToolSpec("count", "Count up.", {"type": "object"}, score_timeout_s=0.1)
        self.fate = fate
        self.num_closed = 0

    def open_session(self, trajectory_id: str, seed: int) -> "Counting":
        return Counting(self)

    async def close(self) -> None:
        return None


class Counting:
    def __init__(self, tool: Counter) -> None:
        self.tool = tool
        self.count = 0

    async def call(self, arguments) -> str:
        self.count += 1
        return str(self.count)

    async def score(self, task: RolloutTask):
        assert not self.tool.num_closed
        if self.tool.fate == "raises":
            raise OSError("the disk is full\nreally")
        if self.tool.fate == "hangs":
            await asyncio.sleep(60)
        return {"nonsense": "much"}.get(
            self.tool.fate, Score(self.count / int(task.reference), {"count": self.count})
        )

    async def close(self) -> None:
        self.tool.num_closed += 1


async def with_counter(tool: Counter, *replies: str, **fields):
    feeder = FakeCoordinator([task(**{"tools": ("count",), "reward": None, **fields})])
    async with running_worker(feeder, {"sim://a": scripted_engine(*replies)}, tools=[tool]), asyncio.timeout(60):
        await feeder.is_done.wait()
    return feeder.records["t/0"]


async def test_an_environment_scores_before_it_is_closed():
    tool = Counter()
    found = await with_counter(tool, call("count"), call("count"), "Done.")
    assert (found.reward, found.components, found.reward_error) == (0.4, {"count": 2.0}, None)
    assert tool.num_closed == 1
    assert found.timings.reward_s > 0


async def test_an_environment_that_was_never_called_scores_too():
    tool = Counter()
    assert (await with_counter(tool, "I will not.")).reward == 0.0
    assert tool.num_closed == 1


@pytest.mark.parametrize(
    ("fate", "problem"),
    [
        ("raises", "tool 'count': OSError: the disk is full"),
        ("hangs", "tool 'count': no score within 0.1 s"),
        ("nonsense", "tool 'count': the reward must be a number or a Score, not str"),
    ],
)
async def test_an_environment_that_cannot_score_loses_no_trajectory(fate: str, problem: str):
    tool = Counter(fate)
    found = await with_counter(tool, call("count"), "Done.")
    assert (found.reward, found.is_complete, found.reward_error) == (None, True, problem)
    assert tool.num_closed == 1


async def test_a_loop_and_an_environment_must_not_both_give_the_reward():
    found = await with_counter(Counter(), "Perhaps 4.", ANSWER, loop=LOOP["loop"])
    assert (found.reward, found.reward_error) == (
        None,
        "two scores set a reward: add a reward function to the task, which overrides both",
    )


async def test_a_tool_without_a_score_is_told():
    tool = Counter()
    tool.open_session = lambda trajectory_id, seed: calculator
    assert (await with_counter(tool, "Done.")).reward_error == (
        "tool 'count': its session FunctionTool has no score(), but the tool sets score_timeout_s"
    )


async def test_a_lost_replica_costs_a_retry_elsewhere():
    broken, healthy = scripted_engine(CALL, ANSWER), scripted_engine(CALL, ANSWER)
    feeder = FakeCoordinator([task(f"t{n}") for n in range(10)], urls=["sim://a", "sim://b"])
    async with running_worker(feeder, {"sim://a": broken, "sim://b": healthy}), asyncio.timeout(60):
        broken.kill("gone")
        feeder.dead.add("sim://a")
        await feeder.is_done.wait()
    assert all(trajectory.reward == 1.0 for trajectory in feeder.records.values())
    assert {turn.replica_id for t in feeder.records.values() for turn in t.path.turns} <= {"", "sim://b"}


async def test_no_replica_left_is_a_failed_record():
    engine = scripted_engine(CALL, ANSWER)
    feeder = FakeCoordinator([task()])
    async with running_worker(feeder, {"sim://a": engine}, max_unavailable_s=0.5), asyncio.timeout(60):
        engine.kill("gone")
        await feeder.is_done.wait()
    trajectory = feeder.records["t/0"]
    assert trajectory.stop_reason is StopReason.ENGINE_FAILED
    assert (trajectory.error or "").startswith("no_healthy_replica: no other replica, for ")


async def test_an_operators_abort_goes_on_as_the_same_turn():
    """pause(ABORT) cuts the turn. The sampled tokens stay, and the turn continues after the resume."""
    engine = scripted_engine(" ".join(["word"] * 400))
    feeder = FakeCoordinator([task(tools=(), limits=Limits(max_tokens_per_turn=2000))])
    async with running_worker(feeder, {"sim://a": engine}), asyncio.timeout(60):
        while engine.load().num_running == 0 and not feeder.is_done.is_set():
            await asyncio.sleep(0)
        await engine.pause(PauseMode.ABORT, KVPolicy.KEEP)
        await engine.resume()
        await feeder.is_done.wait()
    trajectory = feeder.records["t/0"]
    assert trajectory.stop_reason is StopReason.COMPLETED
    (turn,) = trajectory.path.turns
    assert trajectory.path.response_mask.all()
    assert turn.end == len(trajectory.path.response_ids)


async def test_cancelled_trajectories_have_their_record():
    engine = scripted_engine(CALL, ANSWER)
    feeder = FakeCoordinator([task(f"t{n}") for n in range(4)])
    async with running_worker(feeder, {"sim://a": engine}) as worker, asyncio.timeout(60):
        await engine.pause(PauseMode.KEEP, KVPolicy.KEEP)
        while worker.num_running + len(feeder.records) < 4:
            await asyncio.sleep(0.01)
        feeder.cancel_next = ["t0/0", "t1/0"]
        while "t0/0" not in feeder.records or "t1/0" not in feeder.records:
            await asyncio.sleep(0.01)
        await engine.resume()
        await feeder.is_done.wait()
    stops = {key: record.stop_reason for key, record in feeder.records.items()}
    assert stops["t2/0"] is StopReason.COMPLETED
    assert {stops["t0/0"], stops["t1/0"]} <= {StopReason.CANCELLED, StopReason.COMPLETED}


async def test_a_record_is_offered_until_it_is_durable():
    feeder = FakeCoordinator([task()])
    feeder.next_errors.extend([ServiceUnavailable("restarting"), ConnectionError("cut")])
    found = await records(feeder, {"sim://a": scripted_engine(CALL, ANSWER)})
    assert found["t/0"].reward == 1.0


class UpdatedAfterATurn(SimulatedEngine):
    """An engine that gets version 1 when its first turn has been sampled, and reports it with the turn's answer."""

    def __init__(self, checkpoint, *replies):
        super().__init__(SPEC, policy=ScriptedPolicy(turns(*replies)))
        self.checkpoint = str(write_checkpoint(checkpoint))

    async def generate(self, request, on_progress=None):
        generation = await super().generate(request, on_progress)
        if self.weight_version == 0:
            await self.stage(WeightUpdate(1, self.checkpoint))
            await self.pause(PauseMode.KEEP, KVPolicy.KEEP)
            await self.commit(1)
            await self.resume()
        return replace(generation, load=self.load())


async def stale(tmp_path, limit: StalenessLimit):
    """Return the record of a two-turn trajectory that an update interrupts between the turns."""
    engine = UpdatedAfterATurn(tmp_path, "Perhaps 4.", ANSWER)
    feeder = FakeCoordinator([task(loop="tests.rollout.test_worker:AsksAgain")], staleness=limit)
    trajectory = (await records(feeder, {"sim://a": engine}))["t/0"]
    assert trajectory.max_staleness == limit.max_staleness
    return trajectory


async def test_finish_ends_a_stale_trajectory_with_what_it_has(tmp_path):
    trajectory = await stale(tmp_path, StalenessLimit(0, OnStale.FINISH))
    assert (trajectory.stop_reason, trajectory.failure) == (StopReason.STALE, FailureClass.STALE)
    assert (trajectory.is_complete, trajectory.is_sound, trajectory.reward) == (False, False, None)
    assert (len(trajectory.path.turns), trajectory.versions, trajectory.num_masked_tokens) == (1, (0,), 0)
    assert trajectory.path.response_mask.all()


async def test_finish_runs_no_tool_for_a_turn_that_will_not_follow(tmp_path):
    engine = UpdatedAfterATurn(tmp_path, CALL, ANSWER)
    feeder = FakeCoordinator([task()], staleness=StalenessLimit(0, OnStale.FINISH))
    trajectory = (await records(feeder, {"sim://a": engine}))["t/0"]
    assert (trajectory.stop_reason, trajectory.times.tool_calls) == (StopReason.STALE, ())


@pytest.mark.parametrize("on_stale", [OnStale.MASK, OnStale.FINISH])
async def test_a_trajectory_that_reached_its_own_end_keeps_its_reward(tmp_path, on_stale):
    """The update arrives with the answer of the last turn."""
    engine = UpdatedAfterATurn(tmp_path, ANSWER)
    feeder = FakeCoordinator([task()], staleness=StalenessLimit(0, on_stale))
    trajectory = (await records(feeder, {"sim://a": engine}))["t/0"]
    assert (trajectory.stop_reason, trajectory.failure) == (StopReason.COMPLETED, None)
    assert (trajectory.is_sound, trajectory.reward) == (True, 1.0)
    assert trajectory.path.response_mask.any() == (on_stale is OnStale.FINISH)


async def test_mask_goes_on_and_takes_the_old_tokens_out(tmp_path):
    trajectory = await stale(tmp_path, StalenessLimit(0, OnStale.MASK))
    assert (trajectory.stop_reason, trajectory.is_complete) == (StopReason.COMPLETED, True)
    first, second = trajectory.path.turns
    assert trajectory.versions == (0, 1)
    assert trajectory.num_masked_tokens == first.end - first.start
    assert trajectory.path.response_mask.nonzero()[0].tolist() == list(range(second.start, second.end))
    assert trajectory.reward == 1.0


async def test_drop_hands_in_nothing_and_says_so(tmp_path):
    trajectory = await stale(tmp_path, StalenessLimit(0, OnStale.DROP))
    assert (trajectory.stop_reason, trajectory.is_complete, trajectory.paths) == (StopReason.STALE, False, ())
    assert trajectory.reward is None
    assert len(trajectory.messages) == 1


@pytest.mark.parametrize("on_stale", OnStale)
async def test_within_its_limit_nothing_happens_to_it(tmp_path, on_stale):
    trajectory = await stale(tmp_path, StalenessLimit(1, on_stale))
    assert (trajectory.stop_reason, trajectory.versions) == (StopReason.COMPLETED, (0, 1))
    assert trajectory.path.response_mask.sum() == trajectory.num_sampled_tokens


async def test_a_failed_trajectory_keeps_its_own_reason(tmp_path):
    limit = StalenessLimit(0, OnStale.FINISH)
    feeder = FakeCoordinator([task("bad", loop="tests.rollout.test_worker:Raising")], staleness=limit)
    found = await records(feeder, {"sim://a": scripted_engine(CALL, ANSWER)})
    assert (found["bad/0"].stop_reason, found["bad/0"].is_complete) == (StopReason.LOOP_FAILED, False)


async def test_a_turn_that_an_abort_cut_does_not_go_on_when_it_is_too_old(tmp_path):
    """Its tokens are kept, and the record shows a turn cut by an abort."""
    engine = scripted_engine(" ".join(["word"] * 400))
    limits = Limits(max_tokens_per_turn=2000)
    feeder = FakeCoordinator([task(tools=(), limits=limits)], staleness=StalenessLimit(0, OnStale.FINISH))
    async with running_worker(feeder, {"sim://a": engine}), asyncio.timeout(60):
        while engine.load().kv_used_tokens < 200:  # more than the prompt, less than the answer
            await asyncio.sleep(0)
        await engine.stage(WeightUpdate(1, str(write_checkpoint(tmp_path))))
        await engine.pause(PauseMode.KEEP, KVPolicy.KEEP)
        await engine.commit(1)  # the answer that the abort causes reports version 1
        await engine.pause(PauseMode.ABORT, KVPolicy.KEEP)
        await engine.resume()
        await feeder.is_done.wait()
    trajectory = feeder.records["t/0"]
    assert (trajectory.stop_reason, trajectory.is_complete) == (StopReason.STALE, False)
    assert trajectory.versions == (0,)
    assert [turn.finish_reason for turn in trajectory.path.turns] == [FinishReason.ABORT]


class Again(FakeCoordinator):
    """A coordinator that reassigns a dropped sample to the same worker, before the worker has the answer."""

    def __init__(self, tasks, **options):
        super().__init__(tasks, **options)
        self.first = self._waiting[0]
        self.reports: list[tuple[str, ...]] = []
        self.is_out = asyncio.Event()
        self.is_taken = asyncio.Event()

    async def take(self, report, wait_s):
        if self.is_out.is_set():
            self.reports.append(report.running)
            if not self.is_taken.is_set():
                self.is_taken.set()
                return Orders((replace(self.first, attempt=1, num_stale_attempts=1),), ())
        return await super().take(report, wait_s)

    async def finish_one(self, worker_id, trajectory):
        if trajectory.stop_reason is StopReason.STALE and trajectory.attempt == 0:
            self.is_out.set()
            await self.is_taken.wait()
            await asyncio.sleep(0.05)
            return False
        return await super().finish_one(worker_id, trajectory)


async def test_a_dropped_sample_may_come_back_at_once(tmp_path):
    engine = UpdatedAfterATurn(tmp_path, "Perhaps 4.", ANSWER)
    feeder = Again([task(loop="tests.rollout.test_worker:AsksAgain")], staleness=StalenessLimit(0, OnStale.DROP))
    trajectory = (await records(feeder, {"sim://a": engine}))["t/0"]
    assert (trajectory.stop_reason, trajectory.versions) == (StopReason.COMPLETED, (1,))
    assert (trajectory.attempt, trajectory.num_stale_attempts) == (1, 1)
    assert "t/0" not in feeder.reports[0], "reported as running, it would be adopted"


async def test_a_worker_that_ends_hands_in_what_is_finished_and_leaves():
    feeder = FakeCoordinator([task("done"), task("running")])
    answered = asyncio.Event()

    async def finish_late(worker_id, trajectory):
        answered.set()
        await asyncio.sleep(0.1)
        return await FakeCoordinator.finish_one(feeder, worker_id, trajectory)

    feeder.finish_one = finish_late
    engines = {"sim://a": scripted_engine(CALL, ANSWER)}
    async with running_worker(feeder, engines, capacity=1, poll_s=5.0), asyncio.timeout(20):
        await answered.wait()
    assert list(feeder.records) == ["done/0"]
    assert feeder.left == ["w"]


async def test_a_loop_that_the_workers_end_cancels_has_not_failed():
    feeder, has_begun = FakeCoordinator([task("running")]), asyncio.Event()
    engine = scripted_engine(ANSWER)
    generate = engine.generate

    async def generate_for_long(*given, **named):
        has_begun.set()
        await asyncio.sleep(60)
        return await generate(*given, **named)

    engine.generate = generate_for_long
    with capture_logs() as logs:
        async with running_worker(feeder, {"sim://a": engine}), asyncio.timeout(20):
            await has_begun.wait()
    assert feeder.left == ["w"]
    assert not feeder.records
    assert [line for line in logs if line["log_level"] == "error"] == []


async def test_a_full_worker_waits_for_work_or_cancellations_as_any_other():
    """Its waiting call also serves as its heartbeat."""
    feeder = FakeCoordinator([task(limits=Limits(timeout_s=1.0))])
    waits: list[tuple[int, float]] = []

    async def take(report, wait_s):
        waits.append((report.num_free, wait_s))
        return await FakeCoordinator.take(feeder, report, wait_s)

    feeder.take = take
    engine = scripted_engine("word " * 500, decode_s=0.01)
    await records(feeder, {"sim://a": engine}, capacity=1, poll_s=0.1)
    assert (0, 0.1) in waits


@pytest.mark.parametrize("num", [200, pytest.param(1000, marks=pytest.mark.long)])
async def test_many_trajectories_at_once_in_one_worker(num: int):
    feeder = FakeCoordinator([task(f"t{n}") for n in range(num // 2)], num_samples=2)
    found = await records(feeder, {"sim://a": scripted_engine(CALL, ANSWER)}, capacity=num)
    assert len(found) == num
    assert all(record.reward == 1.0 for record in found.values())
