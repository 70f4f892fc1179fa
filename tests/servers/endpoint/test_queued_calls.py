"""Calls that wait for capacity on a replica: the bytes that their clients receive during and after the wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentloop_servers.endpoint.endpoint import EndpointLimits
from tests.support.endpoint.chat_service import MODEL, SHORT_CALLS, Bounds, ChatService, chat_service


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path, bounds=Bounds(EndpointLimits(keep_alive_s=0.05))) as running:
        running.coordinator.has_room = False
        yield running


async def give_room(service: ChatService, num_refused: int) -> None:
    """Provide capacity once the coordinator has refused so many requests for a lease."""
    while service.coordinator.num_refused < num_refused:
        await asyncio.sleep(0.005)
    service.coordinator.has_room = True


@pytest.mark.parametrize("path", SHORT_CALLS)
async def test_a_stream_sends_comments_until_there_is_room(service: ChatService, path: str) -> None:
    seen: list[bytes] = []
    body = {"model": MODEL, "stream": True, **SHORT_CALLS[path]}
    async with asyncio.timeout(60), service.http.post(service.url + path, json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            seen.append(line.strip())
            service.coordinator.has_room = seen.count(b": keep-alive") >= 3
    assert service.coordinator.num_refused > 0
    first = next(index for index, line in enumerate(seen) if line.startswith(b"data: "))
    assert seen[:first].count(b": keep-alive") >= 3
    assert not any(b'"error":{' in line for line in seen)


@pytest.mark.parametrize("path", SHORT_CALLS)
async def test_without_room_a_call_is_refused_at_its_deadline_and_may_come_again(
    service: ChatService, path: str
) -> None:
    body, headers = {"model": MODEL, **SHORT_CALLS[path]}, {"x-stainless-read-timeout": "0.5"}
    status, answer, received = await service.call("POST", path, json=body, headers=headers)
    assert (status, received["retry-after"], received["x-should-retry"]) == (503, "1", "true"), answer
    assert "no replica has KV capacity" in answer["error"]["message"]
    assert service.coordinator.num_refused > 0


async def test_an_answer_says_how_long_its_call_waited_for_room(service: ChatService) -> None:
    giving = asyncio.create_task(give_room(service, 3))
    body = {"model": MODEL, **SHORT_CALLS["/v1/chat/completions"]}
    waits_s = []
    for _ in range(2):
        status, _, received = await service.call(
            "POST", "/v1/chat/completions", json=body, headers={"x-session-id": "a"}
        )
        assert status == 200
        waits_s.append(float(received["x-queue-seconds"]))
    await giving
    assert waits_s[0] > 0.0
    assert waits_s[1] == 0.0, "the session has a lease"
