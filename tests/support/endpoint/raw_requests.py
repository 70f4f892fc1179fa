"""Requests that no HTTP library would send, written to a socket verbatim, and the answers to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import orjson

from agentloop_servers.endpoint.endpoint import EndpointLimits
from agentloop_servers.endpoint.registry import SessionLimits
from agentloop_servers.http.connections import ConnectionLimits
from agentloop_servers.http.guard import HttpLimits
from tests.support.endpoint.chat_service import MODEL, Bounds, ChatService, check_answer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
BODY = {"model": MODEL, "messages": [USER], "max_tokens": 1}
DATA = orjson.dumps(BODY)
JSON = "Content-Type: application/json"
CONNECTIONS = ConnectionLimits(headers_timeout_s=2.0, check_interval_s=0.1)
BOUNDS = Bounds(
    endpoint=EndpointLimits(keep_alive_s=0.05, send_timeout_s=1.0),
    http=HttpLimits(max_body_bytes=200_000, body_timeout_s=1.0),
    sessions=SessionLimits(watch_interval_s=0.05),
    connections=CONNECTIONS,
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def check_good(service: ChatService, headers: dict[str, str] | None = None) -> None:
    assert (await service.call("POST", CHAT, json=BODY, headers=headers or {}))[0] == 200


@dataclass
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


def request(
    *headers: str,
    method: str = "POST",
    target: str = CHAT,
    host: str = "localhost",
    body: bytes = b"",
    is_last: bool = True,
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers, *(["Connection: close"] if is_last else [])]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def exchanged(service: ChatService, data: bytes) -> list[RawAnswer]:
    """Send bytes verbatim; return all answers until the server closes, or is silent for half a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1 << 20)
    answers: list[RawAnswer] = []
    try:
        writer.write(data)
        while True:
            try:
                async with asyncio.timeout(0.5 if answers else 30):
                    head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, TimeoutError, ConnectionError):
                return answers
            lines = head.decode("latin-1").split("\r\n")
            fields = dict(line.split(": ", 1) for line in lines[1:] if line)
            headers = {name.lower(): value for name, value in fields.items()}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            answers.append(RawAnswer(int(lines[0].split(" ")[1]), headers, body))
    finally:
        writer.close()


async def refused(service: ChatService, data: bytes, status: int, code: str) -> RawAnswer:
    [answer] = await exchanged(service, data)
    check_answer(answer.status, answer.headers, answer.body)
    assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (status, code)
    return answer
