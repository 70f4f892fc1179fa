"""The examples run, are short, and behave as described."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentloop.rollout.tool import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.types import StopReason, ToolCall
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.worker import running_worker, task

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("0*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize(
    ("replies", "num_turns"),
    [
        ([call("calculator", expression="2 + 3"), "The answer is 5."], 2),
        (["It is 5.", "The answer is 5."], 2),
        (["It is 5.", call("calculator", expression="2 + 3"), "Still 5."], 3),
    ],
)
async def test_the_loop_asks_once_more(replies, num_turns):
    coordinator = FakeCoordinator([task(loop="examples.02_own_loop:AskOnceMore")])
    async with running_worker(coordinator, {"sim://a": scripted_engine(*replies)}), asyncio.timeout(30):
        await coordinator.is_done.wait()
    record = coordinator.records["t/0"]
    assert record.stop_reason is StopReason.COMPLETED
    assert len(record.path.turns) == num_turns
    assert record.reward == (1.0 if "answer is" in replies[-1] else 0.0)
    is_reminded = any("Please finish" in message.content for message in record.messages)
    assert record.metrics == ({"num_reminders": 1.0} if is_reminded else {})


async def test_the_tools_answer_and_remember():
    shipped = {"roll": "examples.03_own_tool:roll", "notes": "examples.03_own_tool:Notes"}
    toolbox = Toolbox(load_tools(("roll", "notes"), shipped))
    one, other = (toolbox.open(("roll", "notes"), name, 0) for name in ("one", "other"))
    (rolled, wrong) = await one.run(
        [ToolCall("a", "roll", {"sides": 6}), ToolCall("b", "roll", {"sides": 1})], max_response_bytes=1000
    )
    assert 1 <= int(rolled.content) <= 6
    assert wrong.is_error
    await one.run([ToolCall("c", "notes", {"text": "mine"})], max_response_bytes=1000)
    read = [
        await scope.run([ToolCall("d", "notes", {"text": ""})], max_response_bytes=1000) for scope in (one, other)
    ]
    assert [results[0].content for results in read] == ["mine", ""]
    await toolbox.close()
