"""Arize Phoenix, in its own environment, as a trace receiver: its API shows a service's trajectories as trees."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from agentloop.client.client import RolloutClient
from agentloop.types import Message, RolloutTask, Trajectory
from agentloop_servers.net.tcp import free_ports
from agentloop_view.export import export_records
from tests.parts.traces import test_tracing
from tests.support.service.whole_service import simulated_config, whole_service

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(300)]

PHOENIX = Path(__file__).parents[2] / ".venv" / "clients" / "phoenix" / "bin" / "phoenix"


class Phoenix:
    """Phoenix's default project, as seen through its API."""

    def __init__(self, url: str, http: ClientSession) -> None:
        self.url = url
        self._http = http

    async def is_up(self) -> bool:
        try:
            async with self._http.get(f"{self.url}/healthz") as answer:
                return answer.status == 200
        except ClientError:
            return False

    async def shown(self, what: str, **query: Any) -> list[dict[str, Any]]:
        """Return its traces or spans; an empty list before the first arrives."""
        place = f"{self.url}/v1/projects/default/{what}"
        async with self._http.get(place, params={"limit": 1000, **query}) as answer:
            return (await answer.json())["data"] if answer.status == 200 else []


@pytest.fixture
async def phoenix(tmp_path: Path) -> AsyncIterator[Phoenix]:
    if not PHOENIX.exists():
        pytest.skip("there is no Phoenix: `make test-clients` installs it from the package index")
    port, grpc_port = map(str, free_ports(2, "127.0.0.1"))
    given = {"HOST": "127.0.0.1", "PORT": port, "GRPC_PORT": grpc_port, "WORKING_DIR": str(tmp_path / "phoenix")}
    environment = {f"PHOENIX_{name}": value for name, value in {**given, "TELEMETRY_ENABLED": "false"}.items()}
    log = (tmp_path / "phoenix.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        PHOENIX, "serve", env={"PATH": os.environ["PATH"], **environment}, stdout=log, stderr=log
    )
    try:
        async with ClientSession() as http:
            started = Phoenix(f"http://127.0.0.1:{port}", http)
            async with asyncio.timeout(120):
                while not await started.is_up():
                    assert process.returncode is None, (tmp_path / "phoenix.log").read_text()[-4000:]
                    await asyncio.sleep(0.5)
            yield started
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


def tree_of(record: Trajectory) -> list[tuple[str, str, str]]:
    """Return the name, kind and parent name of a trajectory's spans, without waits: two turns and a call."""
    root = f"invoke_agent {record.loop}"
    chats = [("chat policy", "LLM", root)] * len(record.path.turns)
    return sorted([(root, "AGENT", ""), ("execute_tool calculator", "TOOL", "chat policy"), *chats])


async def test_phoenix_shows_trajectories_with_their_tools_and_token_counts(phoenix, tmp_path):
    task = RolloutTask("t", (Message("user", "Hi"),), ("calculator",), f"{test_tracing.__name__}:Works")
    url = phoenix.url
    tracing, workers = {"endpoint": url, "sample": 1.0}, {"allowed_imports": [test_tracing.__name__]}
    config = simulated_config(workers=workers, tracing=tracing, endpoint={"model_name": "policy"})
    async with whole_service(config, tmp_path) as service, RolloutClient(service) as client:
        tasks = [task, replace(task, task_id="u")]
        records = [record async for record in await client.submit(tasks, num_samples=2)]
        async with asyncio.timeout(60):
            while len(await phoenix.shown("traces")) < len(records):
                await asyncio.sleep(0.5)
    await asyncio.to_thread(export_records, str(tmp_path), "otlp", endpoint=url)  # sent again
    await asyncio.sleep(3)  # Phoenix writes after it has answered
    traces = await phoenix.shown("traces", include_spans="true")
    details = {span["context"]["span_id"]: span["attributes"] for span in await phoenix.shown("spans")}
    by_conversation = {}
    for trace in traces:
        (conversation,) = {details[span["span_id"]]["gen_ai.conversation.id"] for span in trace["spans"]}
        by_conversation[conversation] = trace
    assert by_conversation.keys() == {test_tracing.id_of(record) for record in records}
    for record in records:
        trace, turns = by_conversation[test_tracing.id_of(record)], record.path.turns
        names = {span["span_id"]: span["name"] for span in trace["spans"]} | {None: ""}
        found = [(span["name"], span["span_kind"], names[span["parent_id"]]) for span in trace["spans"]]
        assert sorted(one for one in found if one[0] not in ("queue", "reward")) == tree_of(record)
        assert trace["token_count_prompt"] == sum(turn.prompt_len for turn in turns)
        assert trace["token_count_completion"] == sum(turn.end - turn.start for turn in turns)
        counts = [details[span["span_id"]] for span in trace["spans"] if span["span_kind"] == "LLM"]
        assert sorted(one["llm.token_count.prompt"] for one in counts) == sorted(turn.prompt_len for turn in turns)
