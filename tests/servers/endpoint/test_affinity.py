"""Affinity names of model calls: one table of headers and a body field, for the choice of a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentloop.api.coordinator import Prefix
from agentloop.types import Generation
from agentloop_servers.endpoint.calls import AFFINITY_HEADERS
from tests.support.endpoint.chat_service import SHORT_CALLS, SPEC, ChatService, chat_service

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", **SHORT_CALLS[CHAT]}


class Placed:
    """A service whose coordinator lists the affinity key of each requested lease, or None."""

    def __init__(self, service: ChatService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service, self.keys, lease = service, list[str | None](), service.coordinator.lease

        async def noted(*args: Any, **options: Any) -> Any:
            prefixes: tuple[Prefix, ...] = next((one for one in args if isinstance(one, tuple) and one), ())
            prefixes = tuple(options.get("prefixes", prefixes))
            self.keys.append(next((key for key, _ in prefixes if key.startswith("key-")), None))
            return await lease(*args, **options)

        monkeypatch.setattr(service.coordinator, "lease", noted)

    async def call(self, path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, str]:
        body = {"model": "tiny", **SHORT_CALLS[path], **fields}
        status, answer, headers_back = await self.service.call("POST", path, json=body, headers=headers or {})
        assert status == 200, answer
        return {name.lower(): value for name, value in headers_back.items()}


@pytest.fixture
async def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Placed]:
    async with chat_service(tmp_path) as service:
        yield Placed(service, monkeypatch)


async def test_equal_names_in_any_header_and_in_the_body_are_one_key(placed: Placed) -> None:
    for header in AFFINITY_HEADERS:
        await placed.call(headers={header: "rollout-1"})
    await placed.call(prompt_cache_key="rollout-1")
    await placed.call("/v1/responses", prompt_cache_key="rollout-1")
    for path in ("/v1/messages", "/v1/completions"):
        await placed.call(path, headers={"x-session-affinity": "rollout-1"})
    assert len(placed.keys) == len(AFFINITY_HEADERS) + 4
    assert len({*placed.keys}) == 1
    assert placed.keys[0] is not None
    await placed.call(headers={"x-session-affinity": "rollout-2"})
    await placed.call()
    assert placed.keys[-2] not in (None, placed.keys[0])
    assert placed.keys[-1] is None


async def test_of_different_names_the_first_of_the_table_counts_and_is_named(placed: Placed) -> None:
    names = {header: f"name-{place}" for place, header in enumerate(AFFINITY_HEADERS)}
    for header in AFFINITY_HEADERS:
        await placed.call(headers={header: names[header]})
        alone = placed.keys[-1]
        answer = await placed.call(headers={**names}, prompt_cache_key="another")
        assert answer["x-affinity-source"] == header
        if header != AFFINITY_HEADERS[0]:  # the session of the first header has its lease already
            assert placed.keys[-1] == alone
        del names[header]
    assert "x-affinity-source" not in await placed.call(prompt_cache_key="another")
    same = dict.fromkeys(AFFINITY_HEADERS[1:], "one")
    assert "x-affinity-source" not in await placed.call(headers=same, prompt_cache_key="one")


async def test_a_session_in_the_url_ignores_the_names(placed: Placed) -> None:
    await placed.service.call("POST", "/sessions", json={"session_id": "mine"})
    path = f"/sessions/mine{CHAT}"
    headers = {"x-session-affinity": "x" * 300, "x-dynamo-session-id": "another"}
    status, _, answer = await placed.service.call("POST", path, json=BODY, headers=headers)
    assert (status, placed.keys) == (200, [None])
    assert "x-affinity-source" not in answer


@pytest.mark.parametrize("value", ["", "x" * 257])
async def test_a_name_that_is_empty_or_too_long_is_refused(placed: Placed, value: str) -> None:
    headers = {"x-multi-turn-session-id": value}
    status, answer, _ = await placed.service.call("POST", CHAT, json=BODY, headers=headers)
    assert (status, answer["error"]["param"]) == (400, "x-multi-turn-session-id")


HINTS = {"agent_hints": {"priority": 5, "osl": 1024}, "annotations": ["token_ids"]}


@pytest.mark.parametrize(("policy", "expected"), [("priority", [-5, -5, 2, 0]), ("fcfs", [0, 0, 0])])
async def test_dynamos_priority_is_ours_with_the_other_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, expected: list[int]
) -> None:
    async with chat_service(tmp_path, spec=replace(SPEC, scheduling_policy=policy)) as service:
        placed, priorities, generate = Placed(service, monkeypatch), list[int](), service.engine.generate

        async def noted(request: Any, *args: Any) -> Generation:
            priorities.append(request.sampling.priority)
            return await generate(request, *args)

        monkeypatch.setattr(service.engine, "generate", noted)
        await placed.call(nvext=HINTS)
        await placed.call("/v1/completions", nvext=HINTS)
        if policy == "priority":  # vLLM's field takes precedence
            await placed.call(nvext=HINTS, priority=2)
        await placed.call(nvext={})
        assert priorities == expected
