"""Clients that compact their history or start sub-agents: every sampled token is credited once.

Codex and Claude Code run with their default prompts; openai-agents hands over, and LangGraph runs a subgraph. The
policy is a script in the simulated engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from agentloop.types import Trajectory
from tests.clients.test_coding_agents import CLAUDE_CODE, CODEX, ENVIRONMENTS, MAX_CONTEXT_TOKENS, opened, run
from tests.support.endpoint.dialect_app import DialectService, dialect_service
from tests.support.engine.scripted import call
from tests.support.service.programs import output_of

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(300)]

AGENTS = Path(__file__).parent / "agents"
FINDING = "I looked into every folder of the project, and counted three files in all of them."
ANSWER = "There are three files in the project."
SUMMARY = "So far: the file word.txt was read, and nothing else has to be done but to answer."


async def finished(service: DialectService, session_id: str) -> Trajectory:
    record = await service.sessions.finish(session_id, ("",))
    assert record.is_complete, record.error
    return record


def check_credited(record: Trajectory, kinds: list[str | None], answer: str) -> None:
    """Check the paths' kinds, the final answer, and that each sampled token is in one credited mask."""
    found = [None if path.lineage is None else path.lineage.kind.value for path in record.paths]
    assert sorted(found, key=str) == sorted(kinds, key=str), [path.lineage for path in record.paths]
    assert record.messages[-1].content == answer
    assert record.credited_paths == tuple(range(len(record.paths)))
    turns = {turn.turn_id: turn.end - turn.start for path in record.paths for turn in path.turns}
    assert sum(int(path.response_mask.sum()) for path in record.paths) == sum(turns.values())


def with_sub_agent(prompt: str) -> str:
    """The main agent starts a sub-agent with Claude Code's tool, and answers after its result."""
    if FINDING in prompt:
        return ANSWER
    if prompt.count("<|im_start|>assistant") > 1 or "HELPER-TASK" in prompt:
        return FINDING
    return call(
        "Agent", description="Count", prompt="HELPER-TASK: count the files.", subagent_type="general-purpose"
    )


async def test_claude_code_with_a_sub_agent(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    async with (
        dialect_service(tmp_path, max_context_tokens=MAX_CONTEXT_TOKENS, reply_to=with_sub_agent) as service,
        aiohttp.ClientSession(service.url) as http,
    ):
        session = await opened(http)
        out = await run(
            CLAUDE_CODE,
            "-p",
            "How many files are there?",
            cwd=tmp_path / "project",
            home=tmp_path,
            ANTHROPIC_BASE_URL=session.base_url.removesuffix("/v1"),
            ANTHROPIC_AUTH_TOKEN=session.api_key,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        assert ANSWER in out
        record = await finished(service, session.session_id)
    check_credited(record, [None, "delegates"], ANSWER)
    assert [path.lineage.is_declared for path in record.paths if path.lineage] == [True]


def compacting(prompt: str) -> str:
    """Codex reads a file, is asked for a summary, and answers."""
    last = prompt.rsplit("<|im_start|>user", 1)[1]
    if "CONTEXT CHECKPOINT COMPACTION" in last:
        return SUMMARY
    return ANSWER if "wombat" in prompt or SUMMARY in prompt else call("exec_command", cmd="cat word.txt")


async def test_codex_with_a_compaction(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "word.txt").write_text("wombat\n" * 400)
    (tmp_path / "home" / ".codex").mkdir(parents=True)
    async with (
        dialect_service(tmp_path, max_context_tokens=MAX_CONTEXT_TOKENS, reply_to=compacting) as service,
        aiohttp.ClientSession(service.url) as http,
    ):
        session = await opened(http)
        (tmp_path / "home" / ".codex" / "config.toml").write_text(
            f"""
            model = "default"
            model_provider = "agentloop"
            model_auto_compact_token_limit = 5000
            [model_providers.agentloop]
            name = "agentloop"
            base_url = "{session.base_url}"
            env_key = "SESSION_KEY"
            """
        )
        options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        out = await run(
            CODEX,
            "exec",
            *options,
            "Which word does the file word.txt hold?",
            cwd=tmp_path / "project",
            home=tmp_path / "home",
            SESSION_KEY=session.api_key,
        )
        assert ANSWER in out
        record = await finished(service, session.session_id)
    # Codex asks for the summary without its tools, which is another path of the same conversation.
    check_credited(record, [None, "continues", "compacts"], ANSWER)


def handing_over(prompt: str) -> str:
    return ANSWER if "You count files." in prompt else call("transfer_to_specialist")


def planning(prompt: str) -> str:
    last = prompt.rsplit("<|im_start|>user", 1)[1]
    for text, reply in (("Report.", FINDING), ("Helper", "I look into the folders."), (FINDING, ANSWER)):
        if text in last:
            return reply
    return "I ask my helper to count the files of the project."


@pytest.mark.parametrize(
    ("environment", "script", "reply_to", "kinds"),
    [
        ("openai-agents", "openai_agents_handoff.py", handing_over, [None, "continues"]),
        ("langgraph", "langgraph_subgraph.py", planning, [None, "delegates"]),
    ],
    ids=["openai-agents", "langgraph"],
)
async def test_a_framework(
    tmp_path: Path, environment: str, script: str, reply_to: Callable[[str], str], kinds: list[str | None]
) -> None:
    program = ENVIRONMENTS / environment / "bin" / "python"
    assert program.exists(), f"no environment for {environment}: run `make test-clients`"
    async with (
        dialect_service(tmp_path, max_context_tokens=1 << 16, reply_to=reply_to) as service,
        aiohttp.ClientSession(service.url) as http,
    ):
        session = await opened(http)
        command = (program, AGENTS / script, session.base_url, session.api_key)
        assert ANSWER in await output_of(*command, home=tmp_path, timeout_s=120)
        record = await finished(service, session.session_id)
    check_credited(record, kinds, ANSWER)
