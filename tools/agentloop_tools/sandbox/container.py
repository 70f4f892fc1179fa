"""Sandboxes that are containers of podman or docker, through the HTTP API that both serve on a socket.

Isolation it gives: that of the runtime, with no network unless a source names one of the runtime's, no capability,
no gain of privileges, the user 1000, the image read-only, and its default seccomp filter. Memory and processes of a
container are limited by its cgroup, `/task` and `/tmp` by their size in memory: quotas. Ask for gVisor or Kata by
their name as `runtime`.

Whoever can write to the socket of a daemon that runs as root is root: let podman run as the worker's user.

A container outlives a worker that is killed, by at most `max_life_s`: it ends by itself and removes itself.
Podman 4.3 is tested. Docker serves the same API (1.41), and is not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from agentloop.errors import ToolLost, error_line
from agentloop_tools.sandbox.commands import CommandSandbox, CommandSandboxes, Printed
from agentloop_tools.sandbox.port import FOLDER, SandboxLimits, SandboxSource

_API = "http://runtime/v1.41"
_REQUEST_S = 60.0
_PULL_S = 1800.0
_LIVE = "end=$(($(date +%s)+{seconds})); while [ $(date +%s) -lt $end ]; do sleep 60 & wait; done"  # and reap
_TMP_BYTES = 64 << 20
_FIRST_ASK_S, _ASK_S = 0.01, 0.3  # between two questions whether a command has ended
_LAST_WORDS_S = 0.2  # of a command that ended while others still hold what it printed into


class Containers(CommandSandboxes):
    """Sandboxes of the runtime behind a socket."""

    def __init__(self, socket: str, *, image: str, runtime: str | None = None, max_life_s: float = 3600.0) -> None:
        """`image` is that of a source without one; all need a shell and the usual programs beside it."""
        super().__init__()
        self._image = image
        self._runtime = {} if runtime is None else {"Runtime": runtime}
        self._max_life_s = max_life_s
        transport = httpx.AsyncHTTPTransport(uds=socket)
        self.http = httpx.AsyncClient(transport=transport, base_url=_API, timeout=_REQUEST_S)

    async def make(self, source: SandboxSource, limits: SandboxLimits) -> ContainerSandbox:
        image = source.image or self._image
        wanted = self._wanted(image, source.network or "none", limits)
        made = await self.ask("POST", "/containers/create", wanted, absent_is_fine=True)
        if made is None:
            await self.ask("POST", f"/images/create?fromImage={image}", timeout_s=_PULL_S)
            made = await self.ask("POST", "/containers/create", wanted)
        sandbox = ContainerSandbox(self, source, limits, name=(made or {})["Id"])
        try:
            await self.ask("POST", f"/containers/{sandbox.name}/start")
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _wanted(self, image: str, network: str, limits: SandboxLimits) -> dict[str, Any]:
        memory = limits.max_memory_bytes + limits.max_folder_bytes + _TMP_BYTES
        return {
            "Image": image,
            "Entrypoint": ["sh", "-c", _LIVE.format(seconds=round(self._max_life_s))],
            "Cmd": [],
            "User": "1000:1000",
            "WorkingDir": FOLDER,
            "Env": [f"HOME={FOLDER}", "TMPDIR=/tmp", "LANG=C.UTF-8", "USER=user"],
            "HostConfig": {
                **self._runtime,
                "AutoRemove": True,
                "NetworkMode": network,
                "ReadonlyRootfs": True,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": memory,
                "MemorySwap": memory,
                "PidsLimit": limits.max_processes,
                "Tmpfs": {
                    FOLDER: f"rw,exec,mode=1777,size={limits.max_folder_bytes}",
                    "/tmp": f"rw,exec,mode=1777,size={_TMP_BYTES}",
                },
                "Ulimits": [
                    {"Name": name, "Soft": most, "Hard": most}
                    for name, most in (("nofile", 1024), ("nproc", 4096), ("core", 0))
                ],
            },
        }

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        absent_is_fine: bool = False,
        timeout_s: float = _REQUEST_S,
    ) -> dict[str, Any] | None:
        """Call the runtime. Raises ToolLost if it does not answer, or refuses."""
        try:
            answer = await self.http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise ToolLost(f"the container runtime does not answer: {error_line(error)}") from error
        if answer.status_code == 404 and absent_is_fine:
            return None
        if answer.status_code >= 400:
            raise ToolLost(f"the container runtime refuses {path.split('?')[0]}: {answer.text.strip()[:300]}")
        is_json = answer.headers.get("content-type", "").startswith("application/json") and answer.content
        return answer.json() if is_json and not path.startswith("/images") else {}

    async def close(self) -> None:
        await super().close()
        await self.http.aclose()


class ContainerSandbox(CommandSandbox):
    """A container, in which programs are started by `exec`."""

    def __init__(self, maker: Containers, source: SandboxSource, limits: SandboxLimits, *, name: str) -> None:
        super().__init__(maker, source, limits)
        self._runtime = maker
        self.name = name

    async def perform(
        self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed
    ) -> tuple[int, str | None]:
        if given:  # the connection cannot be closed to one side only, so the program's input has a length
            program = ["sh", "-c", f'head -c {len(given)} | "$@"', "sh", *program]
        name = await self._prepared(program, is_fed=bool(given))
        async with self._started(name) as stream:
            await stream.write(given)
            reading = asyncio.create_task(_read(stream, printed), name="container output")
            try:
                pause_s = _FIRST_ASK_S
                while (state := await self._runtime.ask("GET", f"/exec/{name}/json")) and state["Running"]:
                    await asyncio.wait({reading}, timeout=pause_s)
                    await asyncio.sleep(_FIRST_ASK_S)
                    pause_s = min(2 * pause_s, _ASK_S)
                await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        return int((state or {})["ExitCode"]), None

    async def _prepared(self, program: Sequence[str], *, is_fed: bool) -> str:
        wanted = {"AttachStdin": is_fed, "AttachStdout": True, "AttachStderr": True, "Cmd": list(program)}
        made = await self._runtime.ask("POST", f"/containers/{self.name}/exec", wanted)
        return str((made or {})["Id"])

    @contextlib.asynccontextmanager
    async def _started(self, name: str) -> AsyncIterator[Any]:
        """Start a prepared program, and give the connection that is its input and output."""
        upgrade = {"Connection": "Upgrade", "Upgrade": "tcp"}
        body = {"Detach": False, "Tty": False}
        try:
            async with self._runtime.http.stream(
                "POST", f"/exec/{name}/start", json=body, headers=upgrade
            ) as answer:
                if answer.status_code != 101:
                    text = (await answer.aread()).decode(errors="replace")
                    raise ToolLost(f"the container runtime starts nothing: {text[:300]}")
                yield answer.extensions["network_stream"]
        except httpx.HTTPError as error:
            raise ToolLost(f"the container runtime is gone: {error_line(error)}") from error

    async def kill(self) -> None:
        async with asyncio.timeout(_REQUEST_S):
            name = await self._prepared(["sh", "-c", "kill -9 -1"], is_fed=False)
            await self._runtime.ask("POST", f"/exec/{name}/start", {"Detach": True, "Tty": False})

    async def remove(self) -> None:
        with contextlib.suppress(ToolLost):  # it is being removed, or the runtime is gone: its life is bounded
            await self._runtime.ask("DELETE", f"/containers/{self.name}?force=true&v=true", absent_is_fine=True)


async def _read(stream: Any, printed: Printed) -> None:
    """Read frames: a byte for the stream, three of nothing, four of length, and what was printed."""
    waiting = b""
    while more := await stream.read(65_536):
        waiting += more
        while len(waiting) >= 8 and len(waiting) >= (end := 8 + int.from_bytes(waiting[4:8], "big")):
            printed.add(waiting[8:end])
            waiting = waiting[end:]
