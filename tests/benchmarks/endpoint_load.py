"""Load for the chat endpoint: agents without pauses between turns, over raw keep-alive connections.

An agent calls the same tool in every turn and sends its whole history each time, as OpenAI clients do. Apart from
copying bytes, the generator does one JSON parse per turn, because it shares two cores with the processes that it
measures.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast

import orjson

from tests.support.engine.scripted import call

REPLY = call("calculator", expression="12 * 34 + 5")  # the engine's reply in every turn
LONG_TEXT = "The quick brown fox looks for the number 12345. "
_TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "What to work out."}},
            "required": ["expression"],
        },
    },
}
_HEAD = b'{"model":"default","max_tokens":64,"tools":' + orjson.dumps([_TOOL]) + b',"messages":['
_OPENING = (
    {"role": "system", "content": "You are a careful assistant. Use the calculator for every step."},
    {"role": "user", "content": "What is 12 * 34 + 5, and what is it again? Check it until you are sure."},
)
_TURN_HEADER = b"x-turn-id: "
_LENGTH_HEADER = b"content-length: "


@dataclass(slots=True)
class Load:
    """Measurements of the agents."""

    turn_s: dict[str, float] = field(default_factory=dict)  # by call id
    wall_s: float = 0.0
    long_s: float | None = None


async def open_sessions(url: str, num_sessions: int, name: str) -> list[Agent]:
    """Open new sessions, each with its own connection."""
    agents = [Agent(url, f"{name}-{index}") for index in range(num_sessions)]
    for agent in agents:
        await agent.open()
    return agents


async def talk(agents: list[Agent], num_turns: int, load: Load, long_chars: int = 0) -> None:
    """Run the turns of all agents concurrently, and add their measurements to `load`.

    One additional agent sends a message of `long_chars` in the middle.
    """
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.talk(num_turns, load))
        if long_chars:
            while len(load.turn_s) < len(agents) * num_turns // 3:
                await asyncio.sleep(0.01)
            load.long_s = await agents[0].other("long").say(LONG_TEXT * (long_chars // len(LONG_TEXT)))
    load.wall_s += time.perf_counter() - start


class Agent:
    """One session, its conversation so far, and its connection."""

    def __init__(self, url: str, session_id: str, key: str = "") -> None:
        self._url = url
        self._key = key
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._session_id = session_id
        self._messages = [orjson.dumps(message) for message in _OPENING]
        self._connection = Connection()

    def other(self, session_id: str) -> Agent:
        """Return an agent of the same endpoint for another session."""
        return Agent(self._url, session_id, self._key)

    async def open(self) -> None:
        """Connect, and create the session."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._connection, self._host, self._port)
        await self._post("/sessions", orjson.dumps({"session_id": self._session_id}))

    async def talk(self, num_turns: int, load: Load) -> None:
        """Run `num_turns` turns, each with the whole history, and disconnect."""
        for turn in range(num_turns):
            body = self._body()
            before = time.perf_counter()
            head, answer = await self._post(f"/sessions/{self._session_id}/v1/chat/completions", body)
            load.turn_s[_call_id(head)] = time.perf_counter() - before
            message = orjson.loads(answer)["choices"][0]["message"]
            self._messages.append(orjson.dumps(message))
            for tool_call in message["tool_calls"]:
                content = f"413, as {self._session_id} has it in turn {turn}"
                result = {"role": "tool", "tool_call_id": tool_call["id"], "content": content}
                self._messages.append(orjson.dumps(result))
        self._connection.close()

    async def say(self, text: str) -> float:
        """Open a session, send one message, and disconnect. Returns the seconds until the answer."""
        await self.open()
        self._messages = [orjson.dumps({"role": "user", "content": text})]
        before = time.perf_counter()
        await self._post(f"/sessions/{self._session_id}/v1/chat/completions", self._body())
        self._connection.close()
        return time.perf_counter() - before

    def _body(self) -> bytes:
        return _HEAD + b",".join(self._messages) + b"]}"

    async def _post(self, path: str, body: bytes) -> tuple[bytes, bytes]:
        lines = (
            f"POST {path} HTTP/1.1",
            f"host: {self._host}:{self._port}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *([f"authorization: Bearer {self._key}"] if self._key else []),
        )
        head, answer = await self._connection.ask("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"{path} was refused: {answer[:500]!r}")
        return head, answer


class Connection(asyncio.Protocol):
    """One request at a time. An answer has a length or is chunked; its body then includes the chunk framing."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._head: bytes | None = None
        self._body = bytearray()
        self._length: int | None = None  # None: chunked
        self.first_body_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not a subclass

    def data_received(self, data: bytes) -> None:
        self._body += data
        if self._head is None:
            head, separator, body = bytes(self._body).partition(b"\r\n\r\n")
            if not separator:
                return
            length = _header(head, _LENGTH_HEADER)
            self._head, self._body, self._length = head, bytearray(body), int(length) if length else None
        if self._body and not self.first_body_at:
            self.first_body_at = time.perf_counter()
        is_whole = self._body.endswith(b"0\r\n\r\n") if self._length is None else len(self._body) >= self._length
        if is_whole:
            if self._answer is None or self._answer.done():  # its agent was cancelled at the end of the measurement
                return
            head, body, self._head, self._body = self._head, bytes(self._body), None, bytearray()
            self._answer.set_result((head, body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the endpoint hung up"))

    async def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Return the head and the body of the answer."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.first_body_at = 0.0
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _call_id(head: bytes) -> str:
    """Return the call's id: a turn's id without the number of the choice."""
    return _header(head, _TURN_HEADER).decode().partition(".")[0]


def _header(head: bytes, name: bytes) -> bytes:
    return head.partition(b"\r\n" + name)[2].partition(b"\r\n")[0]
