"""The examples with a user's own agents: an OpenAI client, and a framework that is not installed here."""

from __future__ import annotations

import ast
import asyncio
import importlib
from pathlib import Path

import pytest

from agentloop.agents.program import AgentProgram
from agentloop.agents.runner import run_agents
from agentloop.client.client import RolloutClient
from agentloop.plugins import resolve
from agentloop_tools.calculator import calculator
from tests.support.endpoint.fake_sessions import FakeSessions, session_service, uses_a_calculator
from tests.support.records.samples import make_task

EXAMPLES = Path(__file__).parents[3] / "examples"
OPENAI_AGENT = "examples.08_openai_agent"


async def test_the_openai_agent_calls_its_tool_and_answers():
    fake = FakeSessions(script=uses_a_calculator)
    async with session_service(fake) as url, RolloutClient(url) as client, asyncio.timeout(60):
        with AgentProgram.load(f"{OPENAI_AGENT}:run") as program:
            run = await run_agents(client, program, [make_task()], num_samples=2)
    assert run.num_failed == 0
    for record in fake.records:
        assert [message.role for message in record.messages] == ["user", "assistant", "tool", "assistant"]
        assert (record.messages[-1].content, record.reward) == ("The answer is 5.", 1.0)


def test_its_tool_is_the_one_that_the_shipped_policy_knows():
    definition = resolve(f"{OPENAI_AGENT}:CALCULATOR", param="example")
    assert definition == calculator.spec.definition()["function"]


@pytest.mark.parametrize("arguments", ['{"expression": "84 x 3"}', "{", "[]", "{}", '{"expression": 5}'])
def test_its_tool_answers_a_bad_call_too(arguments):
    assert importlib.import_module(OPENAI_AGENT).calculator(arguments).startswith("Error: ")


def test_the_framework_agent_needs_nothing_of_ours():
    tree = ast.parse((EXAMPLES / "09_framework_agent.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("agentloop") for name in imported)
    assert "pip install" in (ast.get_docstring(tree) or "")
