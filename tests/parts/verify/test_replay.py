"""`agentloop replay` on a simulated engine: identical replays, each cause of a difference, refusals."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field
from typer.testing import CliRunner

from agentloop.client.publish import PublishOptions
from agentloop.engine.interface import WeightUpdate
from agentloop.plugins import resolve
from agentloop.rollout.context import LoopContext
from agentloop.rollout.tool import tool
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.simulation.engine import SimulatedEngine
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop.testing.episode import without_ids
from agentloop.types import (
    KVPolicy,
    Message,
    PauseMode,
    RolloutGroup,
    RolloutTask,
    TokenPath,
    Trajectory,
    WeightVersionSpan,
)
from agentloop_servers.cli.commands import app
from agentloop_servers.config.service import CONFIG_NAME, ServiceConfig
from agentloop_servers.processes.engine_parts import build_engine
from agentloop_verify.replay import DifferenceCause, ReplayReport
from tests.parts.verify.replayed_runs import ROLLOUT, ReplayWorld, with_path, with_seeds, with_tool_text
from tests.support.records.samples import fill_store
from tests.support.transfer.adapters import POLICY

CONFIG = ServiceConfig.model_validate(
    {"model": str(POLICY), "mode": "debug", "engine": {"kind": "simulated", "device": "cpu"}}
)
HERE = "tests.parts.verify.replayed_runs"
TASK = RolloutTask(
    "adds",
    (Message("user", "What is 40 + 1?"),),
    tools=("calculator",),
    loop=f"{HERE}:Adds",
    seed=7,
)


@tool(name="calculator")
async def wrong_calculator(
    expression: Annotated[str, Field(description="An arithmetic expression, such as 12 * (3 + 4)")],
) -> str:
    """Evaluate an arithmetic expression."""
    return "43"


@pytest.fixture
async def world() -> AsyncIterator[ReplayWorld]:
    engine = build_engine(CONFIG)
    assert isinstance(engine, SimulatedEngine)
    await engine.start()
    yield ReplayWorld(engine)
    await engine.close()


def with_the_seeds(path: TokenPath, seeds: Sequence[int | None]) -> TokenPath:
    return replace(
        path, turns=tuple(replace(turn, seed=seed) for turn, seed in zip(path.turns, seeds, strict=True))
    )


def cause(report: ReplayReport) -> tuple[int, DifferenceCause]:
    assert report.difference is not None
    return report.difference.turn, report.difference.cause


async def test_each_sample_is_replayed_to_its_end_or_to_a_turn(world: ReplayWorld) -> None:
    for sample in range(4):
        record = await world.record(TASK, sample)
        assert [turn.seed is not None for turn in record.path.turns] == [True] * 3
        assert await world.replay(record, TASK) == ReplayReport(3, record.num_sampled_tokens, 0.0, None)
        first = record.path.turns[0]
        assert await world.replay(record, TASK, to_turn=1) == ReplayReport(1, first.end - first.start, 0.0, None)


async def test_a_run_with_sampling_masks_and_few_alternatives_is_replayed() -> None:
    engine = {"kind": "simulated", "device": "cpu", "sampling_mask_top_k": 5, "max_logprobs": 2}
    config = ServiceConfig.model_validate({"model": str(POLICY), "mode": "debug", "engine": engine})
    simulated = build_engine(config)
    await simulated.start()
    try:
        world = ReplayWorld(simulated, worker=WorkerConfig(default_top_k=5))
        record = await world.record(TASK)
        assert [turn.sampling.top_k for turn in record.path.turns if turn.sampling is not None] == [5] * 3
        assert await world.replay(record, TASK) == ReplayReport(3, record.num_sampled_tokens, 0.0, None)
        other = await world.record(replace(TASK, seed=8))
        seeds = [turn.seed for turn in record.path.turns]
        report = await world.replay(with_path(other, lambda path: with_the_seeds(path, seeds)), TASK)
        assert cause(report) == (1, DifferenceCause.SEED)
    finally:
        await simulated.close()


async def test_live_tools_run_again(world: ReplayWorld) -> None:
    record = await world.record(TASK)
    assert (await world.replay(record, TASK, runs_tools=True)).difference is None
    world.tool = wrong_calculator
    report = await world.replay(record, TASK, runs_tools=True)
    assert cause(report) == (2, DifferenceCause.TOOL)
    assert report.difference is not None
    assert report.difference.detail == "messages[2]: tool '[call_1_0] 41' was there, tool '[call_1_0] 43' came"
    assert (await world.replay(record, TASK)).difference is None


async def test_a_changed_text_of_a_tool_result_is_named(world: ReplayWorld) -> None:
    record = await world.record(TASK)
    assert cause(await world.replay(with_path(record, lambda path: with_tool_text(path, "17")), TASK)) == (
        2,
        DifferenceCause.TOOL,
    )


async def test_a_changed_template_is_named(world: ReplayWorld, tmp_path: Path) -> None:
    record = await world.record(TASK)
    model = shutil.copytree(POLICY, tmp_path / "model")
    template = (model / "chat_template.jinja").read_text()
    assert "<tool_response>" in template
    (model / "chat_template.jinja").write_text(template.replace("<tool_response>", "<tool_response>\n", 1))
    changed = ReplayWorld(world.engine, model=model)
    assert cause(await changed.replay(record, TASK)) == (2, DifferenceCause.TEMPLATE)


async def test_a_changed_seed_is_named_before_and_after_sampling(world: ReplayWorld) -> None:
    record = await world.record(TASK)
    other = await world.record(replace(TASK, seed=8))
    assert cause(await world.replay(with_path(record, lambda path: with_seeds(path, 1)), TASK)) == (
        1,
        DifferenceCause.SEED,
    )
    # The record has the tokens of seed 8 and says that it was seed 7.
    seeds = [turn.seed for turn in record.path.turns]
    report = await world.replay(with_path(other, lambda path: with_the_seeds(path, seeds)), TASK)
    assert cause(report) == (1, DifferenceCause.SEED)
    assert report.difference is not None
    assert report.difference.distance == 0


async def test_changed_weights_and_another_engine_are_named(world: ReplayWorld) -> None:
    record = await world.record(TASK)
    other = with_path(
        record, lambda path: replace(path, weight_versions=(WeightVersionSpan(1, 0, len(path.response_ids)),))
    )
    report = await world.replay(other, TASK, {1: POLICY})
    assert cause(report) == (1, DifferenceCause.WEIGHTS)
    assert report.difference is not None
    assert report.difference.distance is not None
    assert report.difference.distance > 0.1
    await world.replay(record, TASK, {0: POLICY})  # serves version 0 again
    sampled_elsewhere = with_path(
        other, lambda path: replace(path, turns=tuple(replace(turn, engine="vllm") for turn in path.turns))
    )
    assert cause(await world.replay(sampled_elsewhere, TASK, {1: POLICY})) == (1, DifferenceCause.ENGINE)


async def test_a_loop_that_does_something_else_is_named(world: ReplayWorld) -> None:
    record = await world.record(TASK)
    report = await world.replay(record, replace(TASK, loop=f"{HERE}:WithoutTools"))
    assert cause(report) == (2, DifferenceCause.LOOP)
    assert cause(await world.replay(record, replace(TASK, temperature=0.5))) == (1, DifferenceCause.LOOP)
    assert cause(await world.replay(record, replace(TASK, messages=(Message("user", "?"),)))) == (
        1,
        DifferenceCause.LOOP,
    )


def run_of(folder: Path, record: Trajectory, task: RolloutTask | None = TASK) -> str:
    (folder / CONFIG_NAME).write_text(CONFIG.model_dump_json())
    groups = [] if task is None else [RolloutGroup(task.task_id, task, 1)]
    fill_store(folder / STORE_NAME, {ROLLOUT: groups}, [record])
    return str(folder)


@pytest.fixture
def record() -> Trajectory:
    """The record of `TASK`, made outside of the test's event loop."""

    async def made() -> Trajectory:
        engine = build_engine(CONFIG)
        await engine.start()
        try:
            return await ReplayWorld(engine).record(TASK)
        finally:
            await engine.close()

    return asyncio.run(made())


def test_the_command_says_identical_or_names_the_difference(tmp_path: Path, record: Trajectory) -> None:
    result = CliRunner().invoke(app, ["replay", run_of(tmp_path, record), "adds/0"])
    assert result.exit_code == 0, result.output
    num = record.num_sampled_tokens
    assert result.stdout == f"identical: 3 turns, {num} sampled tokens, largest distance of two logprobs 0\n"

    changed = with_path(record, lambda path: with_tool_text(path, "17"))
    other = tmp_path / "other"
    other.mkdir()
    result = CliRunner().invoke(app, ["replay", run_of(other, changed), "adds/0"])
    assert result.exit_code == 1
    first, detail, before = result.stdout.splitlines()
    assert first == "first difference: turn 2, before its first token; cause: tool"
    assert "'41\\n</tool_response>" in detail
    assert before.startswith("identical before it: 1 turns, 12 sampled tokens")
    result = CliRunner().invoke(app, ["replay", str(other), "adds/0", "--to-turn", "1"])
    assert result.exit_code == 0, result.output


def without_seed(record: Trajectory) -> Trajectory:
    return with_path(
        record, lambda path: replace(path, turns=tuple(replace(turn, seed=None) for turn in path.turns))
    )


def of_versions(record: Trajectory, *spans: tuple[int, int, int]) -> Trajectory:
    return with_path(
        record, lambda path: replace(path, weight_versions=tuple(WeightVersionSpan(*span) for span in spans))
    )


@pytest.mark.parametrize(
    ("change", "has_task", "missing"),
    [
        (without_ids, True, "turn 1 has no token ids"),
        (without_seed, True, "turn 3 has no seed: set `seed` in the task before the rollout"),
        (
            lambda record: of_versions(record, (3, 0, 10_000)),
            True,
            "the weights of version 3 are not stored: give their checkpoint, --model-version 3=DIR",
        ),
        (
            lambda record: of_versions(record, (0, 0, record.path.turns[1].start + 2), (1, 0, 10_000)),
            True,
            "the weights changed during turn 2 (versions 0 and 1), which cannot be repeated: use --to-turn 1",
        ),
        (lambda record: replace(record, adapter="french"), True, "the versions of the adapter 'french' are not"),
        (lambda record: record, False, "its task is no longer in the store"),
        (lambda record: replace(record, loop=""), False, "captured from a session, which only its own agent can"),
        (lambda record: replace(record, paths=()), True, "it has no sampled turn"),
    ],
)
def test_a_record_that_cannot_be_replayed_is_refused_with_what_is_missing(
    tmp_path: Path, record: Trajectory, change, has_task: bool, missing: str
) -> None:
    run = run_of(tmp_path, change(record), TASK if has_task else None)
    result = CliRunner().invoke(app, ["replay", run, "adds/0"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: r/adds/0 cannot be replayed: ")
    assert missing in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_versions_of_the_followed_store_are_used(tmp_path: Path, record: Trajectory) -> None:
    """The simulated engine's tokens depend on the version's number, so the record of version 0 differs at once."""
    store = {"store": str(tmp_path / "store"), "run": "run-7"}
    publisher = resolve("agentloop_store.publisher:VersionPublisher", param="store")
    options = PublishOptions(store["store"], store["run"], cache=str(tmp_path / "cache"))
    for version in (1, 2):
        publisher(options).publish(POLICY, version)
    (tmp_path / "run").mkdir()
    run = run_of(tmp_path / "run", of_versions(record, (2, 0, 10_000)))
    following = {**CONFIG.model_dump(), "mode": "standalone", "weights": store}
    (tmp_path / "run" / CONFIG_NAME).write_text(ServiceConfig.model_validate(following).model_dump_json())
    result = CliRunner().invoke(app, ["replay", run, "adds/0"])
    assert result.exit_code == 1, result.output
    assert "first difference: turn 1, sampled token 0; cause: weights" in result.stdout
    run = run_of(tmp_path, of_versions(record, (3, 0, 10_000)))
    (tmp_path / CONFIG_NAME).write_text((tmp_path / "run" / CONFIG_NAME).read_text())
    result = CliRunner().invoke(app, ["replay", run, "adds/0"])
    assert "version 3 of run run-7 is not in the store" in result.stderr
    assert "the weights of version 3 are not stored" in result.stderr


def test_a_store_without_its_run_directory_is_refused(tmp_path: Path, record: Trajectory) -> None:
    run_of(tmp_path, record)
    (tmp_path / CONFIG_NAME).unlink()
    result = CliRunner().invoke(app, ["replay", str(tmp_path / STORE_NAME), "adds/0"])
    assert result.exit_code == 1
    assert "has no config of the service" in result.stderr


async def test_a_trajectory_of_two_versions_is_replayed_with_both(world: ReplayWorld) -> None:
    """The tool commits version 1 after the first turn."""
    engine = world.engine

    @tool(name="calculator")
    async def updating(
        expression: Annotated[str, Field(description="An arithmetic expression, such as 12 * (3 + 4)")],
    ) -> str:
        """Evaluate an arithmetic expression."""
        if engine.weight_version == 0:
            await engine.stage(WeightUpdate(1, str(POLICY)))
            await engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
            await engine.commit(1, resumes=True)
        return "41"

    world.tool = updating
    record = await world.record(TASK)
    assert [span.version for span in record.path.weight_versions] == [0, 1, 1]
    report = await world.replay(record, TASK, {0: POLICY, 1: POLICY})
    assert (report.num_turns, report.difference) == (3, None)
    assert engine.weight_version == 1
    swapped = of_versions(record, (1, 0, record.path.turns[0].end), (0, record.path.turns[0].end, 10_000))
    assert cause(await world.replay(swapped, TASK, {0: POLICY, 1: POLICY})) == (1, DifferenceCause.WEIGHTS)


class Debates:
    """A loop with a second agent and a replaced history."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=8)
        critic = ctx.agent("critic", Message("user", ctx.last_turn.content), has_tools=False)
        await critic.sample(max_tokens=8)
        ctx.replace_history(*task.messages, Message("user", critic.last_turn.content))
        await ctx.sample(max_tokens=8)


async def test_agents_and_replaced_histories_are_replayed(world: ReplayWorld) -> None:
    task = replace(TASK, loop="tests.parts.verify.test_replay:Debates")
    record = await world.record(task)
    assert len(record.paths) == 3
    assert (await world.replay(record, task)).num_turns == 3
    assert (await world.replay(record, task)).difference is None
    other = replace(task, messages=(Message("user", "What is 40 + 2?"),))
    assert cause(await world.replay(record, other)) == (1, DifferenceCause.LOOP)


async def test_a_turn_that_a_stop_string_ended_is_replayed(world: ReplayWorld) -> None:
    record = await world.record(TASK)
    text = world.chat.renderer.decode(record.path.response_ids[3:6].tolist())
    stopping = replace(TASK, stop=(text,))
    record = await world.record(stopping)
    assert record.path.turns[0].end < 12
    report = await world.replay(record, stopping)
    assert (report.num_turns, report.difference) == (3, None)
