"""Sandboxes of a provider that speaks E2B's API: E2B itself, or a service of one's own with the same calls.

`POST /sandboxes` makes one of a template; in it a server starts programs and takes files. That server speaks
Connect's streaming protocol in JSON, and is reached at a host name of the sandbox's own, or by its headers.

Isolation it gives: the provider's, at E2B a small virtual machine. Its network is off unless a source names
`internet`. Processes, memory and disk are the template's; of our limits those of time and output hold.
A sandbox outlives a worker that is killed, by at most `max_life_s`.

Tested against a server of our own that speaks this protocol, which the SDK e2b 2.63 accepts too; not against E2B.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from agentloop.errors import InvalidRequest, ToolLost
from agentloop_tools.sandbox.commands import CommandSandbox, Printed
from agentloop_tools.sandbox.http import ServiceSandboxes
from agentloop_tools.sandbox.port import FOLDER, SandboxLimits, SandboxSource

NETWORK = "internet"
_IS_LAST = 2  # a flag of a message in a stream
_GIVEN = "/tmp/.given"


class E2B(ServiceSandboxes):
    """Sandboxes of a provider."""

    def __init__(
        self,
        *,
        api_key: str,
        api_url: str = "https://api.e2b.app",
        sandbox_url: str = "https://49983-{id}.{domain}",
        template: str = "base",
        max_life_s: float = 3600.0,
    ) -> None:
        """A source's image names its template; `template` is used for a source without an image."""
        super().__init__("the provider of sandboxes", api_url)
        self._sandbox_url = sandbox_url
        self._template = template
        self._max_life_s = max_life_s
        self._key = {"X-API-Key": api_key}

    async def make(self, source: SandboxSource, limits: SandboxLimits) -> E2BSandbox:
        if source.network not in (None, NETWORK):
            raise InvalidRequest(f"the one network is {NETWORK!r}", param="network")
        wanted = {
            "templateID": source.image or self._template,
            "timeout": round(self._max_life_s),
            "secure": True,
            "allow_internet_access": source.network == NETWORK,
        }
        made = await self.ask("POST", "/sandboxes", json=wanted)
        return E2BSandbox(self, source, limits, made, self._sandbox_url)

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Call the provider's API, which alone is told the key."""
        return await super().ask(method, path, headers=self._key, **options)


class E2BSandbox(CommandSandbox):
    """A sandbox, by the server inside."""

    def __init__(
        self, maker: E2B, source: SandboxSource, limits: SandboxLimits, made: dict[str, Any], url: str
    ) -> None:
        super().__init__(maker, source, limits)
        self._provider = maker
        self._name = str(made["sandboxID"])
        self._url = url.format(id=self._name, domain=made.get("domain") or "e2b.app")
        self._headers = {
            "E2b-Sandbox-Id": self._name,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": made.get("envdAccessToken") or "",
        }

    async def begin(self) -> None:
        if await self.run_as("root", ["mkdir", "-p", "-m", "777", FOLDER], Printed(0)):
            raise ToolLost(f"{FOLDER} cannot be made")

    async def perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        if given:
            form = aiohttp.FormData()
            form.add_field("file", given, filename="given")
            where = {"path": _GIVEN, "username": "user"}
            url = f"{self._url}/files"
            async with self._provider.call("POST", url, headers=self._headers, params=where, data=form):
                program = ["sh", "-c", f'exec "$@" < {_GIVEN}', "sh", *program]
        return await self.run_as("user", program, printed)

    async def run_as(self, user: str, program: Sequence[str], printed: Printed) -> int:
        """Run a program as one of the template's users. Return its status."""
        process = {"cmd": program[0], "args": list(program[1:]), "envs": {"HOME": FOLDER}}
        body = json.dumps({"process": process, "stdin": False}).encode()
        headers = {
            **self._headers,
            "Authorization": f"Basic {base64.b64encode(f'{user}:'.encode()).decode()}",
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
        }
        url = f"{self._url}/process.Process/Start"
        framed = bytes([0]) + len(body).to_bytes(4, "big") + body
        async with self._provider.call("POST", url, headers=headers, data=framed, timeout_s=None) as got:
            async for message in _messages(got):
                event = message.get("event", {})
                for stream in ("stdout", "stderr"):
                    printed.add(base64.b64decode(event.get("data", {}).get(stream, "")))
                if (end := event.get("end")) is not None:  # what it left behind may hold the stream open
                    is_killed = str(end.get("status", "")).startswith("signal")
                    return 137 if is_killed else int(end.get("exitCode", 0))
        raise ToolLost("the sandbox ended before its command")

    async def remove(self) -> None:
        await self._provider.delete(f"/sandboxes/{self._name}")


async def _messages(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Read messages of Connect: a byte of flags, four of length, and JSON. Raises ToolLost for an error."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            header = await answer.content.readexactly(5)
            message = json.loads(await answer.content.readexactly(int.from_bytes(header[1:], "big")))
            if header[0] & _IS_LAST and "error" in message:
                raise ToolLost(f"the sandbox refuses: {message['error'].get('message', '')[:300]}")
            yield message
