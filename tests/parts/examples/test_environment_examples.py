"""The environment examples: a single class, the user's own MCP server, and a shell with hidden tests."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentloop import rollout
from agentloop.rollout.environment import ScriptedTurn, load_environment, tasks_of
from agentloop.rollout.tool import tools_at
from agentloop.rollout.toolbox import Toolbox
from agentloop.testing import play, validate
from agentloop.types import ToolCall
from agentloop_tools.calculator import calculator
from agentloop_tools.sandbox.bubblewrap import refusal
from agentloop_tools.shell import ShellTool
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.worker import running_worker, task

EXAMPLES = Path(__file__).parents[3] / "examples"
WHY_NOT = refusal()


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, 60) for name in ("10_mcp_tool.py", "11_shell_tool.py", "16_nemo_gym.py")),
        ("22_harbor_agent.py", 65),
        *((name, 110) for name in ("12_verifiers.py", "15_repair.py", "19_harbor.py")),
    ],
)
def test_an_example_is_short(name: str, most: int):
    assert len((EXAMPLES / name).read_text().splitlines()) < most


@pytest.mark.parametrize(
    ("path", "most"),
    [("14_shop:Shop", 60), ("17_wiki:Wiki", 70), ("18_dungeon:Dungeon", 90), ("train.refusals:Refusals", 40)],
)
async def test_an_environment_has_no_fault_and_says_who_solved_it(path: str, most: int):
    module, _, _ = path.partition(":")
    code = (EXAMPLES / f"{module.replace('.', '/')}.py").read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= most
    assert await validate(f"examples.{path}", max_tasks=3) == []
    for one in tasks_of(f"examples.{path}")[:3]:
        solved, silent = [await play(f"examples.{path}", one, turns) for turns in (None, ["I do not know."])]
        assert (solved.reward, silent.reward) == (1.0, 0.0)


CALCULATED = [rollout.call("calculator", expression=written) for written in ("8% of 5600", "8 * 5600 / 100")]


@pytest.mark.parametrize(
    ("path", "turns", "reward"),
    [
        ("17_wiki:Wiki", [rollout.call("answer", text="A Crow!")], 1.0),
        ("17_wiki:Wiki", [rollout.call("answer", text="a crown")], 0.0),
        ("18_dungeon:Dungeon", [rollout.call("do", action="take treasure"), "It is mine."], 0.0),
        ("train.refusals:Refusals", [*CALCULATED, "The answer is 448."], 0.5),
        ("train.refusals:Refusals", [*CALCULATED, "The answer is 8."], 0.0),
        ("train.refusals:Refusals", ["The answer is 448."], 0.0),
    ],
)
async def test_a_policy_gets_what_it_earned(path: str, turns: Sequence[ScriptedTurn], reward: float):
    record = await play(f"examples.{path}", policy=turns)
    assert (record.reward, record.reward_error) == (reward, None)


async def test_a_search_of_the_wiki_takes_any_text():
    turns = [rollout.call("search", query='the founder of "Quenovar AND (NEAR -*'), "I see."]
    record = await play("examples.17_wiki:Wiki", policy=turns)
    [found] = [message.content for message in record.messages if message.role == "tool"]
    assert json.loads(found)[0] == "Quenovar"


def test_the_shipped_policy_knows_the_tool_of_refusals():
    [method] = load_environment("examples.train.refusals:Refusals").methods.values()
    assert method.spec.definition() == calculator.spec.definition()


async def test_the_shop_of_the_page_has_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (EXAMPLES.parent / "docs" / "guides" / "environments.md").read_text()
    (tmp_path / "page_env.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    assert await validate("page_env:Shop") == []


@pytest.mark.long
async def test_each_trajectory_has_a_notebook():
    toolbox = Toolbox(tools_at("examples.10_mcp_tool:notebook"))
    one, other = (toolbox.open(("write", "read"), name, 0) for name in ("one", "other"))
    try:
        await asyncio.gather(one.open(task()), other.open(task()))
        [wrote] = await one.run([ToolCall("a", "write", {"line": "mine"})], 1000)
        read = [(await scope.run([ToolCall("b", "read", {})], 1000))[0].content for scope in (one, other)]
        assert (wrote.content, read) == ("1 lines", ["mine", ""])
    finally:
        await toolbox.close()


@pytest.mark.skipif(WHY_NOT is not None, reason=f"needs isolated commands (apt: bubblewrap): {WHY_NOT}")
@pytest.mark.parametrize(("repair", "reward"), [("sed -i s/-/+/ add.py", 1.0), ("cat add.py", 0.0)])
async def test_hidden_tests_decide(repair: str, reward: float):
    given = importlib.import_module("examples.11_shell_tool").TASK
    feeder = FakeCoordinator([given])
    engines = {"sim://a": scripted_engine(call("shell", command=repair), "Done.")}
    async with running_worker(feeder, engines, tools=[ShellTool()]), asyncio.timeout(60):
        await feeder.is_done.wait()
    record = feeder.records["repair/0"]
    assert (record.reward, record.reward_error) == (reward, None)


CLONE = "git clone -q slug.git slug; cd slug; python3 -m unittest 2>&1 | tail -n 1"
BODY = 'return "-".join(re.findall("[a-z0-9]+", title.lower()))'
PATCH = f"printf '%s\\n' 'import re' 'def slug(title):' '    {BODY}' > slug.py"
CHEAT = "rm test_slug.py; mkdir -p bin; echo '#!/bin/sh' > bin/python3; chmod +x bin/*; export PATH=$PWD/bin:$PATH"
TEST = "python3 -m unittest 2>&1 | tail -n 1; git diff --stat | cat"


@pytest.mark.skipif(WHY_NOT is not None, reason=f"needs isolated commands (apt: bubblewrap): {WHY_NOT}")
@pytest.mark.parametrize(
    ("patch", "num_samples", "seen", "reward"),
    [
        (PATCH, 1, "OK\n slug.py | 5 +----", 1.0),
        (CHEAT, 1, " test_slug.py | 11 -----------\n 1 file changed, 11 deletions(-)", 0.0),
        pytest.param(PATCH, 512, "OK\n", 1.0, marks=pytest.mark.long),
    ],
)
async def test_a_repository_is_repaired(patch: str, num_samples: int, seen: str, reward: float):
    given = importlib.import_module("examples.15_repair").TASK
    feeder = FakeCoordinator([given], num_samples=num_samples)
    replies = [call("shell", command=one) for one in (CLONE, patch, TEST)]
    engines = {"sim://a": scripted_engine(*replies, "Done.")}
    async with running_worker(feeder, engines, tools=[ShellTool()]), asyncio.timeout(600):
        await feeder.is_done.wait()
    assert len(feeder.records) == num_samples
    for record in feeder.records.values():
        told = [message.content for message in record.messages if message.role == "tool"]
        assert (told[0], told[1], record.reward_error) == ("FAILED (failures=1)", "", None)
        assert told[2].startswith(seen)
        assert (record.reward, record.components["hidden_titles"]) == (reward, reward)
