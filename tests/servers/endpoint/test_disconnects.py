"""A disconnected client aborts its calls, and a waiting client receives keep-alives."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from agentloop.types import PauseMode
from agentloop_servers.endpoint.endpoint import EndpointLimits
from tests.support.endpoint.chat_service import MODEL, Bounds, ChatService, chat_service
from tests.support.endpoint.raw_requests import JSON, request
from tests.support.records.samples import counted

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 3000},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3000, "n": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3000},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000},
}
KEEP_ALIVE_S = 0.05
CUT_BY_CLIENT = "streams_cut_total", ("client",)


@pytest.fixture(scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    """A service whose calls take at least half a minute."""
    bounds = Bounds(endpoint=EndpointLimits(keep_alive_s=KEEP_ALIVE_S))
    async with chat_service(tmp_path_factory.mktemp("service"), bounds=bounds, decode_s=0.02) as service:
        yield service


@pytest.fixture
async def service(started: ChatService) -> AsyncIterator[ChatService]:
    """The service, with a check for open calls before and after each test."""
    yield started
    await started.engine.resume()
    await until_running(started, False)


async def until_running(service: ChatService, is_running: bool) -> float:
    """Wait until the engine has, or has no, requests. Returns the seconds that this took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with asyncio.timeout(30):
        while (service.engine.load().num_running + service.engine.load().num_waiting > 0) != is_running:
            await asyncio.sleep(0.005)
    return loop.time() - started


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, **PATHS[path], "min_tokens": 2000, **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("is_paused", [False, True])
async def test_14_a_client_that_leaves_frees_the_engine(
    service: ChatService, path: str, is_streaming: bool, is_paused: bool
) -> None:
    """Within the promised second, and also while the engine is paused."""
    call = asyncio.create_task(_call_for_ever(service, path, is_streaming))
    await until_running(service, True)
    if is_paused:
        await service.engine.pause(PauseMode.KEEP)
    await asyncio.sleep(0.1)  # the stream must have begun
    assert not call.done()
    call.cancel()
    assert await until_running(service, False) < 1.0
    assert service.engine.load().kv_used_tokens == 0
    await asyncio.gather(call, return_exceptions=True)


async def _call_for_ever(service: ChatService, path: str, is_streaming: bool) -> None:
    body = body_of(path, stream=is_streaming)
    async with service.http.post(service.url + path, json=body) as answer:
        assert answer.status == 200
        async for _ in answer.content.iter_any():
            pass


@pytest.mark.parametrize("path", PATHS)
async def test_14_a_client_that_leaves_a_stream_is_no_error(service: ChatService, path: str) -> None:
    cuts = counted(service.sessions.parts.tally).get(CUT_BY_CLIENT, 0)
    with capture_logs() as logs:
        for _ in range(10):
            async with service.http.post(service.url + path, json=body_of(path, stream=True)) as answer:
                await answer.content.readany()
            await until_running(service, False)
        reset = socket.create_connection(("127.0.0.1", service.port))  # a reset connection instead of a closed one
        data = orjson.dumps(body_of(path, stream=True))
        reset.sendall(request(JSON, f"Content-Length: {len(data)}", target=path, body=data))
        await asyncio.to_thread(reset.recv, 100)
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        await until_running(service, False)
        async with asyncio.timeout(30):  # a cut is counted shortly after its call has ended
            while counted(service.sessions.parts.tally).get(CUT_BY_CLIENT, 0) < cuts + 11:
                await asyncio.sleep(0.01)
    assert [log for log in logs if log["log_level"] not in ("debug", "info")] == []
    assert [log["event"] for log in logs if log["log_level"] == "info"] == []
    assert counted(service.sessions.parts.tally)[CUT_BY_CLIENT] == cuts + 11


async def test_a_stream_that_fails_is_counted(service: ChatService) -> None:
    path = "/sessions/fails/v1/chat/completions"
    body = body_of("/v1/chat/completions", n=1, stream=True)
    _, session, _ = await service.call("POST", "/sessions", json={"session_id": "fails"})
    control = {"authorization": f"Bearer {session['control_key']}"}
    async with service.http.post(service.url + path, json=body) as answer:
        await answer.content.readany()
        await service.call("POST", "/sessions/fails/finish", json={"wait_s": 0}, headers=control)
        assert b'"session_finished"' in await answer.content.read()
    assert counted(service.sessions.parts.tally)["streams_cut_total", ("failure",)] == 1


async def test_14_a_retry_that_waits_too_keeps_the_call(service: ChatService) -> None:
    path = "/v1/chat/completions"
    body = body_of(path, n=1, min_tokens=40, max_tokens=40, session="s", return_token_ids=True)
    first = asyncio.create_task(service.call("POST", path, json=body))
    await until_running(service, True)
    second = asyncio.create_task(service.call("POST", path, json=body, headers={"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.2)
    first.cancel()
    status, answer, _ = await second
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 40)
    facts = (await service.call("GET", "/sessions/s"))[1]
    assert (facts["num_turns"], facts["is_complete"]) == (1, True)


@pytest.mark.parametrize("path", PATHS)
async def test_08_comments_keep_a_stream_alive_through_a_pause(service: ChatService, path: str) -> None:
    body = body_of(path, stream=True, min_tokens=0) | {"temperature": 0}
    body.pop("n", None)
    body["max_output_tokens" if "responses" in path else "max_tokens"] = 20
    await service.engine.pause(PauseMode.KEEP)
    seen: list[bytes] = []
    async with asyncio.timeout(60), service.http.post(service.url + path, json=body) as answer:
        assert answer.status == 200
        assert answer.headers["x-request-id"]
        assert answer.headers["x-session-id"]
        async for line in answer.content:
            seen.append(line.strip())
            if seen.count(b": keep-alive") == 3:
                await service.engine.resume()
    events = [line for line in seen if line and not line.startswith((b":", b"event:"))]
    assert all(line.startswith(b"data: ") for line in events)
    assert seen.count(b": keep-alive") >= 3
    assert (events[-1] == b"data: [DONE]") == ("completions" in path)
    assert not any(b'"error":{' in line for line in events)
    assert len(events) > 3
