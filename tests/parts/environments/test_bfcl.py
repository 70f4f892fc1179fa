"""BFCL's tasks as environments: gold paths, calls of code, concurrent samples of a task, and a failing checker."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event

import pytest

from agentloop.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.rollout import ScriptedTurn, call, tasks_of
from agentloop.rollout.environment import load_environment
from agentloop.testing import play
from agentloop.types import RolloutTask, StopReason
from agentloop_environments import bfcl
from agentloop_environments.packages import import_package
from tests.support.service.whole_service import simulated_config, whole_service

pytest.importorskip("bfcl_eval", reason="needs bfcl-eval: docs/guides/published-tasks.md")


BASE = "bfcl:multi_turn_base"
NOTHING = ["I do nothing."] * 20
UNANSWERABLE = {  # tasks whose published answer fails BFCL's own checker
    "parallel_multiple_26",
    "live_simple_106-63-0",
    "live_simple_112-68-0",
    "live_multiple_862-181-3",
    "live_multiple_964-207-0",
}


def task_named(category: str, task_id: str) -> RolloutTask:
    return next(one for one in tasks_of(f"bfcl:{category}") if one.task_id == task_id)


def gold_of(task: RolloutTask) -> list[ScriptedTurn]:
    assert task.environment is not None
    return list(load_environment(task.environment).kind.gold(task) or ())


async def reward_of(task: RolloutTask, turns: Sequence[ScriptedTurn] | None = None) -> float | None:
    assert task.environment is not None
    record = await play(task.environment, task, turns)
    assert record.is_complete, record.error
    return record.reward


async def check_gold(category: str, every: int) -> None:
    for task in tasks_of(f"bfcl:{category}")[::every]:
        if task.task_id not in UNANSWERABLE:
            assert await reward_of(task) == 1.0, task.task_id
        expected = 1.0 if category in bfcl.NO_CALL else 0.0
        assert await reward_of(task, NOTHING) == expected, task.task_id


@pytest.mark.parametrize("category", bfcl.Bfcl.variants())
async def test_gold_calls_earn_the_reward_and_no_call_earns_none(category):
    await check_gold(category, every=25)


@pytest.mark.long
@pytest.mark.parametrize("category", bfcl.Bfcl.variants())
async def test_gold_calls_of_all_tasks(category):
    assert len(tasks_of(f"bfcl:{category}")) == 200 or category not in bfcl.MULTI_TURN
    await check_gold(category, every=1)


async def test_a_call_that_python_would_evaluate_is_an_error_and_runs_nothing(tmp_path):
    file = tmp_path / "touched"
    code = f"__import__('os').system('touch {file}')"
    task = tasks_of(BASE, count=1)[0]
    turns: list[ScriptedTurn] = [call(code), call("cd", folder=code), call("cd", **{f"folder={code}, other": 1})]
    turns += [call("_load_scenario", scenario={}, long_context=False), call("__init__"), "Done."]
    record = await play(BASE, task, [*turns, *NOTHING])
    answers = [message.content for message in record.messages if message.role == "tool"]
    assert len(answers) == 5
    assert [answer.startswith(("Error: ", '{"error": ')) for answer in answers] == [True] * 5
    assert record.reward == 0.0
    assert not file.exists()


@pytest.mark.parametrize("task_id", ["multi_turn_base_0", "multi_turn_base_53", "multi_turn_base_120"])
async def test_eight_samples_of_a_task_have_the_rewards_that_each_has_alone(task_id):
    task = task_named("multi_turn_base", task_id)
    gold = gold_of(task)
    wrong = [NOTHING, gold[2:], [*gold[:-2], "Done."], [gold[0], *gold]]
    mixed = [turns for one in wrong for turns in (one, gold)]
    alone = [await reward_of(task, turns) for turns in mixed]
    assert alone == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, alone[6], 1.0]
    assert await asyncio.gather(*(reward_of(task, turns) for turns in mixed)) == alone
    assert [await reward_of(task, turns) for turns in reversed(mixed)] == alone[::-1]
    gc.collect()
    classes = bfcl.import_package("bfcl_eval.constants.executable_backend_config").CLASS_FILE_PATH_MAPPING
    assert [one for one in gc.get_objects() if type(one).__name__ in classes] == []


async def test_a_result_of_another_sample_does_not_change_with_the_precision_of_this_one():
    [task] = [one for one in tasks_of("bfcl:multi_turn_miss_func") if one.task_id == "multi_turn_miss_func_49"]
    apis = [bfcl.Apis(bfcl.entries_of("multi_turn_miss_func")[task.task_id]) for _ in range(2)]
    arguments = {"value": 20, "base": 10}
    first = apis[0].call("logarithm", {**arguments, "precision": 50})
    assert apis[1].call("logarithm", {**arguments, "precision": 5}) != first
    assert apis[0].call("logarithm", {**arguments, "precision": 50}) == first
    refused = apis[0].results([("logarithm", {**arguments, "precision": 10**9})])
    assert refused == ["Error during execution: precision must be a number of at most 1000"]


async def test_a_withheld_function_is_described_when_the_user_offers_it():
    task = task_named("multi_turn_miss_func", "multi_turn_miss_func_0")
    kind = load_environment("bfcl:multi_turn_miss_func").kind
    withheld = [spec.name for spec in kind.task_tools(task) if not spec.is_listed]
    assert withheld == ["sort"]
    record = await play("bfcl:multi_turn_miss_func", task)
    offers = [one.content for one in record.messages if one.role == "user" and '"name": "sort"' in one.content]
    assert len(offers) == 1
    assert offers[0].endswith("I have updated some more functions you can choose from. What about now?")
    assert record.reward == 1.0


async def test_a_restored_trajectory_continues_with_equal_objects():
    task = tasks_of(BASE, count=1)[0]
    turns = bfcl.entries_of("multi_turn_base")[task.task_id].gold_turns()
    first, second = load_environment(BASE).kind(), load_environment(BASE).kind()
    for one in (first, second):
        one.open(task)
    for name, arguments in turns[0]:
        first.call_tool(name, arguments)
    second.restore(first.snapshot())
    for index, calls in enumerate(turns):
        for name, arguments in calls if index else ():
            assert not second.call_tool(name, arguments).startswith("Error")
        second.react(())
    assert second.score(task, ()) == 1.0


async def test_a_checker_that_raises_is_an_error_and_not_a_zero(monkeypatch):
    checker = bfcl.import_package(bfcl.CHECKER)

    def fails(*_: object) -> None:
        raise ZeroDivisionError("the checker")

    monkeypatch.setattr(checker, "state_checker", fails)
    record = await play(BASE, tasks_of(BASE, count=1)[0])
    assert record.reward is None
    assert record.reward_error is not None
    assert "ZeroDivisionError" in record.reward_error


async def test_a_single_call_is_judged_and_not_run():
    task = task_named("simple_python", "simple_python_0")
    right = call("calculate_triangle_area", base=10, height=5)
    for turn, reward in (
        (right, 1.0),
        (call("calculate_triangle_area", base=10, height=6), 0.0),
        ([right] * 2, 0.0),
    ):
        record = await play("bfcl:simple_python", task, [turn])
        assert (record.reward, [one.role for one in record.messages]) == (reward, ["user", "assistant"])


def test_samples_that_are_judged_at_once_import_the_checker_once(monkeypatch):
    imported, barrier = [], Barrier(4)

    def import_slowly(module, command):
        Event().wait(0.05)  # the other threads arrive in this time
        imported.append(module)
        return import_package(module, command)

    monkeypatch.setattr(bfcl, "import_package", import_slowly)
    monkeypatch.delitem(sys.modules, bfcl.AST_CHECKER, raising=False)
    with ThreadPoolExecutor(4) as threads:
        checkers = list(threads.map(lambda _: (barrier.wait(), bfcl.ast_checker())[1], range(4)))
    assert imported == [bfcl.AST_CHECKER]
    assert len(set(checkers)) == 1
    assert callable(checkers[0].ast_checker)


def test_a_missing_package_and_an_unknown_category_are_one_line(monkeypatch):
    with pytest.raises(InvalidRequest, match=r"no variant 'multi_turn_bas'; did you mean multi_turn_base or"):
        tasks_of("bfcl:multi_turn_bas")
    with pytest.raises(
        InvalidRequest, match=r"needs a variant, as in bfcl:irrelevance; expected irrelevance, live_"
    ):
        tasks_of("bfcl")
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    bfcl.entries_of.cache_clear()
    with pytest.raises(
        InvalidRequest, match=r"^no module named 'bfcl_eval': pip install --no-deps bfcl-eval=="
    ) as caught:
        tasks_of(BASE)
    assert "\n" not in caught.value.message


async def test_a_task_of_another_category_is_invalid():
    record = await play(BASE, replace(tasks_of("bfcl:simple_python", count=1)[0], environment=BASE), NOTHING)
    assert record.stop_reason is StopReason.INVALID_TASK
    assert "bfcl:multi_turn_base has no task 'simple_python_0'" in (record.error or "")


@pytest.mark.slow
@pytest.mark.parametrize("environment", [BASE, "bfcl:live_multiple"])
async def test_a_service_rolls_the_tasks_out(tmp_path: Path, environment: str):
    config = simulated_config(engine={"max_context_tokens": 65_536}, workers={"allowed_imports": []})
    tasks = tasks_of(environment, count=2)
    async with whole_service(config, tmp_path) as url, RolloutClient(url) as client:
        records = [record async for record in await client.submit(tasks, num_samples=2)]
    assert [(record.is_complete, record.reward) for record in records] == [(True, 0.0)] * 4
