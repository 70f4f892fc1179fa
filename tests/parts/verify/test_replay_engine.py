"""Replays on a real engine (vLLM on CPU, one request at a time): all identical, and each planted change named."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agentloop.client.rollout import load_tasks
from agentloop.types import RolloutTask, Trajectory
from agentloop_servers.config.service import CHECKOUT
from agentloop_verify.replay import MAX_DISTANCE, Difference, DifferenceCause, ReplayReport
from tests.parts.verify.replayed_runs import ReplayWorld, with_path, with_tool_text
from tests.support.transfer.adapters import POLICY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NUM_TASKS, NUM_SAMPLES = 8, 4


@dataclass(frozen=True)
class Recorded:
    """A run of 32 trajectories, and the world that replays them."""

    world: ReplayWorld
    records: list[tuple[RolloutTask, Trajectory]]

    @property
    def with_tools(self) -> tuple[RolloutTask, Trajectory]:
        """A trajectory whose tool has returned a result."""
        return next(one for one in self.records if one[1].num_tool_calls and not one[1].num_tool_errors)


@pytest.fixture(scope="module")
async def recorded() -> AsyncIterator[Recorded]:
    case = importlib.import_module("tests.contract.vllm_case")
    module = importlib.import_module("agentloop_servers.engines.vllm.engine")
    engine = module.VllmEngine(case.vllm_config(POLICY))
    await engine.start()
    world = ReplayWorld(engine)
    tasks = load_tasks(CHECKOUT / "examples" / "data" / "tasks.jsonl")
    records = []
    for task in [task for task in tasks if task.tools == ("calculator",)][:NUM_TASKS]:
        seeded = replace(task, seed=11, reward=None)
        records += [(seeded, await world.record(seeded, sample)) for sample in range(NUM_SAMPLES)]
    yield Recorded(world, records)
    await engine.close()


def difference(report: ReplayReport) -> Difference:
    assert report.difference is not None
    return report.difference


async def test_32_of_32_replays_are_identical(recorded: Recorded) -> None:
    assert len(recorded.records) == 32
    assert sum(record.num_tool_calls for _, record in recorded.records) >= 32
    for task, record in recorded.records:
        report = await recorded.world.replay(record, task)
        assert report.difference is None
        assert (report.num_turns, report.num_tokens) == (len(record.path.turns), record.num_sampled_tokens)
        assert report.max_distance <= MAX_DISTANCE


async def test_a_changed_template_is_named(recorded: Recorded, tmp_path: Path) -> None:
    task, record = recorded.with_tools
    model = shutil.copytree(POLICY, tmp_path / "model")
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("<tool_response>", "<tool_response>\n", 1))
    found = difference(await ReplayWorld(recorded.world.engine, model=model).replay(record, task))
    assert (found.turn, found.cause, found.token) == (2, DifferenceCause.TEMPLATE, None)


async def test_tokens_of_another_seed_are_named(recorded: Recorded) -> None:
    for task, record in recorded.records[:4]:
        other = await recorded.world.record(replace(task, seed=12), record.sample_index)
        if other.path.turns[0].end != record.path.turns[0].end:
            break
    turns = [replace(turn, seed=record.path.turns[0].seed) for turn in other.path.turns[:1]]
    planted = with_path(other, lambda path: replace(path, turns=tuple(turns)))
    found = difference(await recorded.world.replay(planted, task))
    assert (found.turn, found.cause) == (1, DifferenceCause.SEED)
    assert found.distance is not None
    assert found.distance <= MAX_DISTANCE
    relabeled = [replace(turn, seed=(turn.seed or 0) + 1) for turn in record.path.turns]
    planted = with_path(record, lambda path: replace(path, turns=tuple(relabeled)))
    found = difference(await recorded.world.replay(planted, task))
    assert (found.turn, found.cause, found.token) == (1, DifferenceCause.SEED, None)


async def test_other_weights_are_named(recorded: Recorded) -> None:
    task, record = recorded.with_tools
    [version] = record.versions
    found = difference(await recorded.world.replay(record, task, {version: POLICY.parent / "v1"}))
    assert (found.turn, found.cause) == (1, DifferenceCause.WEIGHTS)
    assert found.distance is not None
    assert found.distance > MAX_DISTANCE
    recorded.world.folder = POLICY.parent / "v1"  # the engine serves it now
    assert (await recorded.world.replay(record, task, {version: POLICY})).difference is None
    recorded.world.folder = POLICY


async def test_a_changed_tool_result_is_named(recorded: Recorded) -> None:
    task, record = recorded.with_tools
    planted = with_path(record, lambda path: with_tool_text(path, "1000000"))
    found = difference(await recorded.world.replay(planted, task))
    assert (found.turn, found.cause) == (2, DifferenceCause.TOOL)
