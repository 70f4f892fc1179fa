"""Agents with the defaults of their libraries: openai's typed helpers, Vercel's `ai`, Microsoft's agent-framework.

The policy is a script in the simulated engine. Every conversation has turns with tool calls, and forms one path.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.support.endpoint.dialect_app import dialect_service
from tests.support.engine.scripted import call
from tests.support.service.programs import output_of

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(300)]

ENVIRONMENTS = Path(__file__).parents[2] / ".venv" / "clients"
AGENTS = Path(__file__).parent / "agents"
RUN_TIMEOUT_S = 120
REPLIES = (
    "<think>Two facts.</think>I look.\n" + call("lookup", q="a"),
    call("lookup", q="a"),
    "It is five.",
    "Bye.",
)
OPENAI = "openai-3", "bin/python", "openai_typed.py"
AGENT_RUNS = {
    "openai parse": (*OPENAI, ("parse",), 3),
    "openai stream": (*OPENAI, ("stream",), 3),
    "openai responses parse": (*OPENAI, ("responses-parse",), 3),
    "openai responses stream": (*OPENAI, ("responses-stream",), 3),
    "vercel ai": ("vercel-ai", None, "vercel_ai.mjs", (), 4),
    "agent-framework": ("agent-framework", "bin/python", "agent_framework_agent.py", (), 4),
}


@pytest.mark.parametrize("agent", AGENT_RUNS)
async def test_an_agent_in_its_defaults_is_one_path(agent: str, tmp_path: Path) -> None:
    environment, program, script, arguments, num_turns = AGENT_RUNS[agent]
    folder = ENVIRONMENTS / environment
    assert folder.exists(), f"no environment for {environment}: run `make test-clients`"
    start = ["node", AGENTS / script, folder] if program is None else [folder / program, AGENTS / script]
    async with (
        dialect_service(tmp_path, *REPLIES, max_context_tokens=1 << 16) as service,
        aiohttp.ClientSession(service.url) as http,
    ):
        async with http.post("/sessions", json={}) as answer:
            made = await answer.json()
        command = (*start, made["base_url"], made["api_key"], *arguments)
        answers = (await output_of(*command, home=tmp_path, timeout_s=RUN_TIMEOUT_S)).splitlines()
        expected = ["It is five.", "Bye."][: num_turns - 2]
        assert [given.endswith(text) for given, text in zip(answers, expected, strict=True)] == [True] * len(
            expected
        )
        trajectory = await service.trajectory(made["session_id"])
    assert trajectory.is_complete
    [path] = trajectory.paths
    assert len(path.turns) == num_turns, [turn.turn_id for turn in path.turns]
