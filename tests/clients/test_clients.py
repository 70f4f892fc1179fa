"""Unmodified third-party agents, each in its own environment, on the shipped policy in real vLLM.

For every conversation, the captured ids are token for token the ids that the engine received and sampled, and each
prompt begins with the previous prompt and response. A client that keeps its history yields one path; a client that
does not yields forks with their reasons.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import aiohttp
import pytest

from agentloop.api.sessions import decode_trajectories
from agentloop.types import Trajectory
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.processes.engine_parts import build_engine
from tests.support.engine.recording import RecordingEngine
from tests.support.service.programs import output_of
from tests.support.service.whole_service import whole_service

pytestmark = [pytest.mark.clients, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
AGENTS = Path(__file__).parent / "agents"
SCRIPT_TIMEOUT_S = 240
MAX_CONTEXT_TOKENS = 8192
CLIENTS = {
    "openai-2.8": "openai_sdk.py",
    "openai-3": "openai_sdk.py",
    "openai-agents": "openai_agents.py",
    "langgraph": "langgraph_agent.py",
    "pydantic-ai": "pydantic_ai_agent.py",
    "smolagents": "smolagents_agent.py",
    "anthropic": "anthropic_sdk.py",
    "llama-index": "llama_index_agent.py",
    "instructor": "instructor_client.py",
    "litellm": "litellm_client.py",
    "renderers": "renderers_client.py",
    "verifiers": "verifiers_train.py",
}


class ClientSite:
    """The service, and its engine."""

    def __init__(self, url: str, engine: RecordingEngine) -> None:
        self.url = url
        self.engine = engine


@pytest.fixture(scope="module")
async def site(tmp_path_factory):
    document = ServiceConfig.load(ROOT / "servers" / "cpu.yaml").model_dump()
    document |= {"replicas": 1, "model": str(with_long_context(tmp_path_factory)), "model_version": 1}
    document["engine"] |= {"num_threads": 2}
    config = ServiceConfig.model_validate(document)
    engines = []

    def build(of: ServiceConfig) -> RecordingEngine:
        engines.append(RecordingEngine(build_engine(of)))
        return engines[-1]

    async with whole_service(config, tmp_path_factory.mktemp("run"), build=build) as url:
        yield ClientSite(url, engines[0])


def with_long_context(tmp_path_factory) -> Path:
    """The policy with a larger context than the 1,024 tokens of its training: frameworks send long prompts."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(ROOT / "examples" / "tiny_policy" / "v1", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_CONTEXT_TOKENS}))
    return folder


async def run_script(client: str, script: str, url: str) -> list[dict]:
    """Return the script's output; its errors fail the test."""
    python = ROOT / ".venv" / "clients" / client / "bin" / "python"
    assert python.exists(), f"no environment for {client}: run `make test-clients`"
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch prices
    command, home = (python, AGENTS / script, url), os.environ.get("HOME", "/")
    out = await output_of(*command, home=home, timeout_s=SCRIPT_TIMEOUT_S, env=environment)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


async def finished(http: aiohttp.ClientSession, session_id: str, control_key: str) -> Trajectory:
    """End the session and return its trajectory."""
    headers = {"accept": "application/msgpack", "authorization": f"Bearer {control_key}"}
    async with http.post(f"/sessions/{session_id}/finish", json={}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        (trajectory,) = decode_trajectories(await answer.read())
        return trajectory


def turns_of(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (prompt ids, sampled ids) of every turn; fail if a prompt does not begin with the turns before it."""
    found = []
    for path in trajectory.paths:
        ids = (*path.prompt_ids.tolist(), *path.response_ids.tolist())
        start = len(path.prompt_ids)
        end_before = 0
        for turn in path.turns:
            assert turn.prompt_len == start + turn.start
            assert turn.prompt_len >= end_before  # begins with all earlier tokens
            end_before = start + turn.end
            found.append((ids[: turn.prompt_len], ids[turn.prompt_len : start + turn.end]))
    return found


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_unmodified_client_is_captured_token_for_token(client, site):
    already = len(site.engine.served)
    sessions = await run_script(client, CLIENTS[client], site.url)
    assert sessions
    captured = set()
    async with aiohttp.ClientSession(site.url) as http:
        for session in sessions:
            trajectory = await finished(http, session["session_id"], session["control_key"])
            label = f"{client}: {session['label']}"
            assert trajectory.is_complete, f"{label}: {trajectory.error}"
            turns = turns_of(trajectory)
            assert len(turns) >= session["num_turns"], label
            splits = {path.split_reason for path in trajectory.paths[1:]}
            details = [(path.split_reason, path.split_detail) for path in trajectory.paths]
            assert splits == set(session["splits"]), (label, details)
            for prompt_ids, token_ids in session.get("served", ()):
                assert (tuple(prompt_ids), tuple(token_ids)) in turns, label
            for path in trajectory.paths:
                assert path.trained_versions <= {1}
            captured |= set(turns)
    served = site.engine.served[already:]
    for prompt_ids, sampled_ids in captured:
        # A stop string ends a turn before the end of the text that the engine had already streamed.
        assert any(
            prompt == prompt_ids and sampled[: len(sampled_ids)] == sampled_ids for prompt, sampled in served
        )
    assert {prompt for prompt, _ in served} == {prompt for prompt, _ in captured}
