"""The service of all tests with Ray that need no special settings.

`agentloop serve` runs in a separate process, with simulated engines and two ingress processes. A test that kills a
part of it waits until the service is complete again.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai

from agentloop.client.client import RolloutClient
from agentloop.observability.logs import LOG_NAME
from tests.servers.processes import deployed

NUM_INGRESS = 2
NUM_REPLICAS = 2


@dataclass(frozen=True)
class Service:
    url: str
    pid: int
    run_dir: Path
    http: aiohttp.ClientSession
    client: RolloutClient

    async def open(self, owner: int) -> dict[str, Any]:
        """Create a session that ingress process `owner` owns."""
        names = (f"s-{uuid.uuid4().hex}" for _ in range(1000))
        session_id = next(name for name in names if zlib.crc32(name.encode()) % NUM_INGRESS == owner)
        async with self.http.post(f"{self.url}/sessions", json={"session_id": session_id}) as answer:
            assert answer.status == 200, await answer.text()
            place: dict[str, Any] = await answer.json()
            return place

    async def facts(self, session_id: str) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/sessions/{session_id}") as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def call(self, place: dict[str, Any], **changed: Any) -> int:
        """Return the status of one call on the public port."""
        async with self.http.post(f"{place['base_url']}/chat/completions", json=body(**changed)) as answer:
            await answer.read()
            return answer.status

    async def call_with_retries(self, place: dict[str, Any], **changed: Any) -> str:
        """Return the finish reason of a call, made by a client that retries long enough to survive a restart."""
        async with openai.AsyncOpenAI(base_url=place["base_url"], api_key="any", max_retries=10) as agent:
            given = body(**changed)
            extra = {"min_tokens": given.pop("min_tokens", 0)}  # not a parameter of the client
            reply = await agent.chat.completions.create(**given, extra_body=extra)
        return reply.choices[0].finish_reason

    async def until_open(self, session_id: str, num_open_calls: int, timeout_s: float = 10.0) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            while (found := await self.facts(session_id))["num_open_calls"] != num_open_calls:
                await asyncio.sleep(0.05)
        return found

    async def until_engines_idle(self, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while sum(replica.load.num_running for replica in (await self.client.status()).replicas):
                await asyncio.sleep(0.1)

    def deployed(self, kind: str) -> list[int]:
        """Return the process ids of one Serve deployment."""
        return deployed(kind, self.pid)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one kind in the service's log."""
        lines = (self.run_dir / LOG_NAME).read_text().splitlines()
        return [found for line in lines if (found := json.loads(line))["event"] == name]

    async def until_whole(self) -> None:
        """Wait until replacements of the killed processes are ready."""
        async with asyncio.timeout(120):
            while len((await self.client.status()).replicas) < NUM_REPLICAS:
                await asyncio.sleep(0.5)

    def pid_of(self, seat: int) -> int:
        """Return the process that owns the sessions of `seat`."""
        lock = str(self.run_dir / f"sessions-{seat}.lock")
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if os.readlink(descriptor) == lock:
                    return int(descriptor.parts[2])
            except OSError:
                continue  # the process ended during the lookup
        raise LookupError(lock)


def of_length(num_tokens: int) -> dict[str, int]:
    """Return the parameters for a reply of exactly so many tokens, at 4 ms or more per token.

    Without them the simulated policy may stop at any token.
    """
    return {"max_tokens": num_tokens, "min_tokens": num_tokens}


def body(content: str = "What is 2 + 3?", **changed: Any) -> dict[str, Any]:
    given = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    return {**given, **changed}
