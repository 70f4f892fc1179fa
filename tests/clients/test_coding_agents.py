"""Coding agents with their default configuration: Codex on `/v1/responses`, Claude Code on `/v1/messages`.

Their prompts have tens of thousands of tokens, so the policy is a script in the simulated engine: it runs a command
with the agent's own tool, and then answers. The captured ids are token for token the ids that the engine received
and sampled, on one path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from agentloop.types import Message, StopReason
from tests.support.endpoint.dialect_app import DialectService, dialect_service
from tests.support.engine.scripted import call
from tests.support.service.programs import output_of

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(300)]

ENVIRONMENTS = Path(__file__).parents[2] / ".venv" / "clients"
CODEX = "codex/node_modules/@openai/codex/bin/codex.js"
CLAUDE_CODE = "claude-code/node_modules/@anthropic-ai/claude-code-*/claude"
RUN_TIMEOUT_S = 120
MAX_CONTEXT_TOKENS = 1 << 18
WORD = "wombat"
QUESTION = "Which word does the file word.txt hold?"
ANSWER = f"The file holds the word {WORD}."


@dataclass(frozen=True)
class Session:
    """A session of the service, as configured in an agent."""

    session_id: str
    base_url: str  # ends in /v1
    api_key: str


@pytest.fixture
async def http(service: DialectService) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(service.url) as client:
        yield client


@pytest.fixture
async def workdir(tmp_path: Path) -> Path:
    """The project that the agent works in."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "word.txt").write_text(f"{WORD}\n")
    return tmp_path / "project"


async def opened(http: aiohttp.ClientSession) -> Session:
    async with http.post("/sessions", json={}) as answer:
        made = await answer.json()
    return Session(made["session_id"], made["base_url"], made["api_key"])


async def run(pattern: str, *arguments: str, cwd: Path, home: Path, **environment: str) -> str:
    """Run an agent to its end without this machine's configuration; returns its output."""
    path = next(ENVIRONMENTS.glob(pattern), None)
    assert path is not None, f"no {pattern}: run `make test-clients`"
    command = (*(["node"] if path.suffix == ".js" else []), path, *arguments)
    return await output_of(*command, home=home, timeout_s=RUN_TIMEOUT_S, cwd=cwd, env=environment)


async def check_captured(service: DialectService, session: Session, tool: str) -> None:
    """Check a conversation of two turns (call, result, answer) token for token against the engine."""
    trajectory = await service.sessions.finish(session.session_id, ("",))
    assert (trajectory.is_complete, trajectory.stop_reason, trajectory.error) == (True, StopReason.COMPLETED, None)
    [path] = trajectory.paths
    assert len(path.turns) == 2
    ids = (*path.prompt_ids.tolist(), *path.response_ids.tolist())
    start = len(path.prompt_ids)
    for turn in path.turns:
        served = (ids[: turn.prompt_len], ids[turn.prompt_len : start + turn.end])
        assert turn.prompt_len == start + turn.start
        assert served in [(tuple(prompt), tuple(sampled)) for prompt, sampled in service.engine.served]
    called, result, answer = path.messages[-3:]
    assert [one.name for one in called.tool_calls] == [tool]
    assert (result.role, WORD in result.content) == ("tool", True)
    assert answer == Message("assistant", ANSWER)


class TestCodex:
    """Version 0.169: a namespace of tools, a hosted search and metadata in every request."""

    @pytest.fixture
    async def service(self, tmp_path: Path) -> AsyncIterator[DialectService]:
        replies = (call("exec_command", cmd="cat word.txt"), ANSWER)
        async with dialect_service(tmp_path, *replies, max_context_tokens=MAX_CONTEXT_TOKENS) as running:
            yield running

    async def test_it_is_captured(
        self, service: DialectService, http: aiohttp.ClientSession, tmp_path: Path, workdir: Path
    ) -> None:
        session = await opened(http)
        home = tmp_path / "home"
        (home / ".codex").mkdir(parents=True)
        (home / ".codex" / "config.toml").write_text(
            f"""
            model = "default"
            model_provider = "agentloop"
            [model_providers.agentloop]
            name = "agentloop"
            base_url = "{session.base_url}"
            env_key = "SESSION_KEY"
            """
        )
        out = await run(
            CODEX,
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            QUESTION,
            cwd=workdir,
            home=home,
            SESSION_KEY=session.api_key,
        )
        assert ANSWER in out
        await check_captured(service, session, "exec_command")


class TestClaudeCode:
    """Version 2.1: thinking and edits of reasoning in every request, and the names of Anthropic's models."""

    @pytest.fixture
    async def service(self, tmp_path: Path) -> AsyncIterator[DialectService]:
        replies = (call("Bash", command="cat word.txt", description="Read the word"), ANSWER)
        async with dialect_service(tmp_path, *replies, max_context_tokens=MAX_CONTEXT_TOKENS) as running:
            yield running

    async def test_it_is_captured(
        self, service: DialectService, http: aiohttp.ClientSession, tmp_path: Path, workdir: Path
    ) -> None:
        session = await opened(http)
        out = await run(
            CLAUDE_CODE,
            "-p",
            QUESTION,
            "--allowedTools",
            "Bash(cat:*)",
            cwd=workdir,
            home=tmp_path,
            ANTHROPIC_BASE_URL=session.base_url.removesuffix("/v1"),
            ANTHROPIC_AUTH_TOKEN=session.api_key,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        assert ANSWER in out
        await check_captured(service, session, "Bash")
