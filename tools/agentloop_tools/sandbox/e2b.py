"""Sandboxes of a provider with E2B's API: E2B, or a compatible service.

`POST /sandboxes` creates a sandbox from a template. A server in the sandbox starts programs and receives files,
with Connect's streaming protocol in JSON. It is reached at the sandbox's own host name or by headers.

Isolation: that of the provider, at E2B a small virtual machine. There is no network unless the source sets
`internet`. The template determines processes, memory and disk; only the time and output limits are applied here. If
a worker is killed, its sandboxes end after at most `max_life_s`.

Tested with our own server for this protocol, which also works with the SDK e2b 2.63; not tested with E2B.
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
_IS_LAST = 2  # flag of the last message of a stream
_GIVEN = "/tmp/.given"


class E2B(ServiceSandboxes):
    """Creates sandboxes at a provider."""

    def __init__(
        self,
        *,
        api_key: str,
        api_url: str = "https://api.e2b.app",
        sandbox_url: str = "https://49983-{id}.{domain}",
        template: str = "base",
        max_life_s: float = 3600.0,
    ) -> None:
        """The image of a source is the name of a template; the default is `template`."""
        super().__init__("the provider of sandboxes", api_url)
        self._sandbox_url = sandbox_url
        self._template = template
        self._max_life_s = max_life_s
        self._key = {"X-API-Key": api_key}

    async def make(self, source: SandboxSource, limits: SandboxLimits) -> E2BSandbox:
        if source.network not in (None, NETWORK):
            raise InvalidRequest(
                f"unknown network {source.network!r}: the only network is {NETWORK!r}", param="network"
            )
        wanted = {
            "templateID": source.image or self._template,
            "timeout": round(self._max_life_s),
            "secure": True,
            "allow_internet_access": source.network == NETWORK,
        }
        made = await self.ask("POST", "/sandboxes", json=wanted)
        return E2BSandbox(self, source, limits, made, self._sandbox_url)

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Call the provider's API. Only these calls contain the API key, not those to a sandbox."""
        return await super().ask(method, path, headers=self._key, **options)


class E2BSandbox(CommandSandbox):
    """A sandbox, controlled through the server in it."""

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
            raise ToolLost(f"cannot create {FOLDER} in the sandbox")

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
        """Run a program as a user of the template, and return its exit status."""
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
        async with self._provider.call("POST", url, headers=headers, data=framed, timeout_s=None) as response:
            async for message in _messages(response):
                event = message.get("event", {})
                for stream in ("stdout", "stderr"):
                    printed.add(base64.b64decode(event.get("data", {}).get(stream, "")))
                if (end := event.get("end")) is not None:  # background processes may keep the stream open
                    is_killed = str(end.get("status", "")).startswith("signal")
                    return 137 if is_killed else int(end.get("exitCode", 0))
        raise ToolLost("the sandbox ended before its command")

    async def remove(self) -> None:
        await self._provider.delete(f"/sandboxes/{self._name}")


async def _messages(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield Connect messages: one byte of flags, four bytes of length, and JSON. Raises ToolLost for an error."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            header = await answer.content.readexactly(5)
            message = json.loads(await answer.content.readexactly(int.from_bytes(header[1:], "big")))
            if header[0] & _IS_LAST and "error" in message:
                raise ToolLost(f"the sandbox reports an error: {message['error'].get('message', '')[:300]}")
            yield message
