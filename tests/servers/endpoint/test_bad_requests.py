"""Bad, slow and repeating clients against the real chat endpoint, on the server for agents of this host.

Covers the rows of the fault table that concern requests rather than their contents.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from agentloop_servers.endpoint.endpoint import EndpointLimits
from agentloop_servers.http.connections import ConnectionLimits
from tests.support.endpoint.chat_service import Bounds, ChatService, chat_service, check_answer
from tests.support.endpoint.raw_requests import (
    BODY,
    BOUNDS,
    CHAT,
    CONNECTIONS,
    DATA,
    JSON,
    bearer,
    check_good,
    exchanged,
    refused,
    request,
)

CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path_factory.mktemp("open"), bounds=BOUNDS) as service:
        yield service


# Row 16: refused calls


async def turns_of(service: ChatService, session_id: str) -> int:
    facts = (await service.call("GET", f"/sessions/{session_id}"))[1]
    assert facts["is_complete"]
    return int(facts["num_turns"])


async def test_16_equal_calls_that_are_refused_and_retried_are_siblings(tmp_path: Path) -> None:
    """The first call that finds a slot creates the session; the others are refused before it exists."""
    asked = {**BODY, "max_tokens": 30, "session": "siblings", "return_token_ids": True}
    refusals = 0

    async def answer(service: ChatService, is_streamed: bool) -> str:
        nonlocal refusals
        for count in range(1000):
            sent = {**asked, "stream": is_streamed}
            headers = {"x-stainless-retry-count": str(count)}
            async with service.http.post(service.url + CHAT, json=sent, headers=headers) as reply:
                text = await reply.text()
                if reply.status == 200:
                    return text
                assert reply.status == 429
                refusals += 1
        raise AssertionError("no slot")

    bounds = Bounds(endpoint=EndpointLimits(max_open_calls=1))
    async with chat_service(tmp_path, decode_s=0.001, bounds=bounds) as service:
        await asyncio.gather(*(answer(service, index % 2 == 0) for index in range(8)))
        assert refusals > 7
        assert await turns_of(service, "siblings") == 8


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_refused_calls_leave_no_session(tmp_path: Path, is_streamed: bool) -> None:
    asked = {**BODY, "max_tokens": 4, "stream": is_streamed}
    too_long = {**asked, "messages": [{"role": "user", "content": "word " * 5000}]}
    full = Bounds(endpoint=EndpointLimits(max_open_calls=0))
    for name, bounds, body, status in (("full", full, asked, 429), ("long", Bounds(), too_long, 400)):
        folder = tmp_path / name
        folder.mkdir()
        async with chat_service(folder, bounds=bounds) as service:
            headers = {"x-session-id": "named"} if status == 429 else {}
            for sent in ({}, headers):
                assert (await service.call("POST", CHAT, json=body, headers=sent))[0] == status
            assert service.sessions.num_open == 0


# Rows 35 to 39: slow clients and excessive requests


@pytest.mark.slow
async def test_35_who_does_not_read_is_cut_off_and_others_do_not_wait(tmp_path: Path) -> None:
    async with chat_service(tmp_path, bounds=BOUNDS) as service:
        asked = {**BODY, "max_tokens": 3500, "n": 12, "stream": True, "logprobs": True, "top_logprobs": 20}
        data = orjson.dumps({**asked, "logit_bias": {"2": -100}})  # more than all buffers on the way hold
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        async with asyncio.timeout(120):
            await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", service.port))
            reader, writer = await asyncio.open_connection(sock=slow, limit=1024)
            writer.write(request(JSON, f"Content-Length: {len(data)}", body=data))
            await reader.readexactly(1)
            for _ in range(20):
                await check_good(service)
                await asyncio.sleep(BOUNDS.endpoint.send_timeout_s / 4)
            read = b""
            while data := await _some(reader):  # the contents of the buffers
                read = (read + data)[-100:]
        writer.close()
        assert b"[DONE]" not in read
        await check_good(service)


async def _some(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""


async def test_36_headers_that_do_not_come_are_not_waited_for(service: ChatService) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    async with asyncio.timeout(60):
        while True:
            if await _is_over(reader):
                break
            writer.write(b"a")
    writer.close()
    await check_good(service)


async def _is_over(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.2):
            return not await reader.read(1024)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def test_36_a_body_that_does_not_come_is_not_waited_for(service: ChatService) -> None:
    await refused(service, request(JSON, "Content-Length: 50", body=b'{"mod'), 408, "body_timeout")
    await check_good(service)


async def test_37_a_body_beyond_the_bound(service: ChatService) -> None:
    asked = {**BODY, "messages": [{"role": "user", "content": "x" * 200_000}]}
    status, body, _ = await service.call("POST", CHAT, json=asked)
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    huge = f"Content-Length: {1 << 40}"
    await refused(service, request(JSON, huge), 413, "body_too_large")  # before any of it is sent
    await check_good(service)


async def test_37_a_body_without_a_length(service: ChatService) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    await refused(service, request(JSON, "Transfer-Encoding: chunked", body=chunk * 8), 413, "body_too_large")
    await check_good(service)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Endless: ", b"a" * 100_000),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX", b"a" * 100_000),
        (b"GET /", b"a" * 100_000),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: a\r\n" * 20_000),
        (CHUNKED + b"1\r\n{\r\n0\r\nX-Trailer: ", b"a" * 100_000),
        (CHUNKED + b"1;", b"a" * 100_000),
    ],
    ids=["value", "name", "path", "lines", "trailer", "chunk extension"],
)
async def test_39_what_has_no_end_is_not_listened_to(service: ChatService, head: bytes, piece: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(head)
    num_sent = 0
    with suppress(ConnectionError):
        while num_sent < 50_000_000:  # the system's buffers hold only a small part of it
            writer.write(piece)
            await writer.drain()
            num_sent += len(piece)
            await asyncio.sleep(0)
    writer.close()
    assert num_sent < 50_000_000
    await check_good(service)


async def test_39_lines_are_counted_while_they_come(service: ChatService) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    for index in range(CONNECTIONS.header_lines + 1):
        writer.write(f"X-{index}: a\r\n".encode())
        await writer.drain()
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"\r\nx-request-id: " in head
    assert orjson.loads(body)["error"]["code"] == "headers_too_large"


async def test_39_trailers_are_no_headers(service: ChatService) -> None:
    chunked = f"{len(DATA):x}\r\n".encode() + DATA + b"\r\n0\r\nX-Session-ID: of-a-trailer\r\n\r\n"
    [answer] = await exchanged(service, request(JSON, "Transfer-Encoding: chunked", body=chunked))
    assert answer.status == 200
    assert answer.headers["x-session-id"] != "of-a-trailer"


@pytest.fixture(scope="module")
async def hasty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    limits = replace(CONNECTIONS, headers_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=0.3)
    bounds = replace(BOUNDS, connections=limits)
    async with chat_service(tmp_path_factory.mktemp("hasty"), bounds=bounds) as service:
        yield service


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
        b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
    ],
    ids=["nothing", "a line's end", "one request", "the next one's begin", "a body that nobody wants"],
)
async def test_36_no_connection_is_kept_for_ever(hasty: ChatService, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(sent)
    async with asyncio.timeout(30):
        with suppress(ConnectionError):
            while await reader.read(1024):
                # another byte does not keep the connection open
                writer.write(b"\r" if sent.endswith(b"\n") else b"x")
    writer.close()
    await check_good(hasty)


@pytest.mark.parametrize("limits", [{"max_unfinished": 20}, {"max_unfinished_of_address": 20}, {"max_idle": 20}])
async def test_36_the_oldest_connections_make_room(tmp_path: Path, limits: dict[str, int]) -> None:
    async with chat_service(tmp_path, bounds=replace(BOUNDS, connections=ConnectionLimits(**limits))) as service:
        connections = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(60)]
        if "max_idle" in limits:
            for reader, writer in connections:
                writer.write(request(method="GET", target="/none", is_last=False))
                await reader.readuntil(b"\r\n\r\n")
        await check_good(service)  # a new client is served
        readers = [reader for reader, _ in connections]
        async with asyncio.timeout(60):
            for reader in readers[:39]:
                while await reader.read(1 << 16):
                    pass
        assert not any(await asyncio.gather(*(_is_over(reader) for reader in readers[-19:])))
        for _, writer in connections:
            writer.close()


async def test_35_an_answer_that_nobody_takes_is_given_up(tmp_path: Path) -> None:
    limits = ConnectionLimits(send_timeout_s=0.3, send_rate=1 << 30, check_interval_s=0.1)
    async with chat_service(tmp_path, bounds=replace(BOUNDS, connections=limits)) as service:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", service.port))
        with suppress(ConnectionError):
            async with asyncio.timeout(120):  # the system itself drops such a peer after a quarter of an hour
                while True:  # pipelined requests for pages that exceed the server's buffers
                    await loop.sock_sendall(slow, request(method="GET", target="/openapi.json", is_last=False))
        slow.close()
        await check_good(service)


async def test_37_long_bodies_wait_for_each_other_and_short_ones_do_not(tmp_path: Path) -> None:
    """Two of three fit: the third is read after one of them has been read, has disconnected, or was too slow."""
    long = orjson.dumps({**BODY, "messages": [{"role": "user", "content": "x" * 400_000}]})
    head = request(JSON, f"Content-Length: {len(long)}", is_last=False)
    http = replace(BOUNDS.http, max_body_bytes=1 << 20, max_bytes_of_bodies=2 * len(long), body_timeout_s=20.0)
    async with chat_service(tmp_path, bounds=replace(BOUNDS, http=http)) as service:
        opened = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(3)]
        for _, writer in opened[:2]:
            writer.write(head + long[:-1])
            await writer.drain()
        await check_good(service)  # time for both to start
        opened[2][1].write(head + long)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await opened[2][0].readline()
        await check_good(service)
        opened[0][1].close()  # it disconnects
        async with asyncio.timeout(20):
            assert (await opened[2][0].readline()).startswith(b"HTTP/1.1 400 ")  # longer than the context
        for _, writer in opened:
            writer.close()


@pytest.fixture(scope="module")
def bomb() -> bytes:
    data = gzip.compress(bytes(100_000_000), 9)
    assert len(data) < 200_000
    return data


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "deflate", "br", "GZIP", "identity, gzip"])
async def test_38_compressed_bodies_are_not_taken(service: ChatService, bomb: bytes, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    status, body, _ = await service.call("POST", CHAT, data=bomb, headers=headers, compress=None)
    assert (status, body["error"]["code"], body["error"]["param"]) == (
        415,
        "unsupported_media_type",
        "content-encoding",
    )
    await check_good(service)


@pytest.mark.parametrize(
    "headers",
    [
        [f"X-Large: {'a' * 100_000}"],
        [f"X-{index}: a" for index in range(10_000)],
        [f"{'X' * 100_000}: a"],
        [f"X-{index}: a" for index in range(1000)],
        [f"X-Large: {'a' * 65_000}", f"X-Other: {'a' * 2000}"],
        [f"X-Endless: {'a' * 5_000_000}"],
    ],
    ids=["one of 100 KB", "10,000", "name of 100 KB", "1,000", "67 KB", "5 MB"],
)
async def test_39_too_many_headers(service: ChatService, headers: Sequence[str]) -> None:
    answers = await exchanged(service, request(JSON, f"Content-Length: {len(DATA)}", *headers, body=DATA))
    # Otherwise the server has not read all of it.
    if answers and answers[0].headers.get("content-type") == "application/json":
        check_answer(answers[0].status, answers[0].headers, answers[0].body)
    assert [answer.status for answer in answers] in ([400], [431], [])  # or it closes the connection
    await check_good(service)


async def test_39_a_long_path(service: ChatService) -> None:
    answers = await exchanged(service, request("Content-Length: 0", target="/v1/" + "a" * 100_000))
    assert [answer.status for answer in answers] in ([400], [404], [414], [431], [])
    await check_good(service)


# Row 50: sessions that have ended


async def test_50_a_session_that_expired_is_gone(service: ChatService) -> None:
    await service.call("POST", "/sessions", json={"session_id": "short", "ttl_s": 0.1})
    path = f"/sessions/short{CHAT}"
    async with asyncio.timeout(60):
        while (answer := await service.call("POST", path, json=BODY))[0] == 200:
            await asyncio.sleep(0.3)
    assert (answer[0], answer[1]["error"]["code"]) == (410, "gone")
    assert "its record is among GET /rollouts/" in answer[1]["error"]["message"]
    for method, one in (("GET", "/sessions/short"), ("GET", "/sessions/short/trajectories")):
        assert (await service.call(method, one))[0] == 410
    assert (await service.call("POST", CHAT, json=BODY, headers={"x-session-id": "short"}))[0] == 410


async def test_50_a_finished_session_takes_no_call_and_a_deleted_one_never_was(service: ChatService) -> None:
    path = "/sessions/ended"
    _, made, _ = await service.call("POST", "/sessions", json={"session_id": "ended"})
    control = bearer(made["control_key"])
    assert (await service.call("POST", f"{path}/finish", json={}, headers=control))[0] == 200
    status, body, headers = await service.call("POST", f"{path}{CHAT}", json=BODY)
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (409, "session_finished", "false")
    assert (await service.call("POST", f"{path}/reward", json={"reward": 1}, headers=control))[0] == 409
    assert (await service.call("DELETE", path, headers=control))[0] == 200
    for method, one in (("GET", path), ("DELETE", path), ("POST", f"{path}{CHAT}"), ("POST", f"{path}/finish")):
        status, body, _ = await service.call(method, one, json=BODY if one.endswith(CHAT) else {})
        assert (status, body["error"]["code"]) == (404, "session_not_found")
    status, body, _ = await service.call("POST", "/sessions", json={"session_id": "ended"})
    assert (status, body["error"]["code"]) == (409, "conflict")
