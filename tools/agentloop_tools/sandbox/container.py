"""Sandboxes as containers of podman or docker, through the HTTP API that both serve on a Unix socket.

Isolation: that of the container runtime, with no network unless the source names one, no capabilities, no new
privileges, user 1000, a read-only image and the default seccomp filter. The cgroup limits memory and processes;
`/task` and `/tmp` are in-memory file systems of limited size. For gVisor or Kata, set `runtime` to its name.

A user with write access to the socket of a root daemon has root privileges: run podman as the worker's user.

If a worker is killed, its containers stop and are removed after at most `max_life_s`. Tested with podman 4.3.
Docker serves the same API (1.41), but is not tested.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from agentloop.errors import ToolLost
from agentloop_tools.sandbox.commands import KILL_ALL, KILL_S, CommandSandbox, Printed, fed
from agentloop_tools.sandbox.http import ServiceSandboxes
from agentloop_tools.sandbox.port import FOLDER, SandboxLimits, SandboxSource

_API = "/v1.41"
_PULL_S = 1800.0
_LIVE = "end=$(($(date +%s)+{seconds})); while [ $(date +%s) -lt $end ]; do sleep 60 & wait; done"  # also reaps
_TMP_BYTES = 64 << 20
_FIRST_ASK_S, _ASK_S = 0.01, 0.3  # interval of polls for the end of a command, first and later
_LAST_WORDS_S = 0.2  # for the remaining output after a command's end: background processes may keep it open


class Containers(ServiceSandboxes):
    """Creates sandboxes with the container runtime that serves a socket."""

    def __init__(self, socket: str, *, image: str, runtime: str | None = None, max_life_s: float = 3600.0) -> None:
        """`image` is the default image. Images must have a shell and the standard utilities."""
        super().__init__("the container runtime", "http://runtime")
        self._image = image
        self._runtime = {} if runtime is None else {"Runtime": runtime}
        self._max_life_s = max_life_s
        self.socket = socket

    def connector(self) -> aiohttp.BaseConnector:
        return aiohttp.UnixConnector(self.socket)

    async def make(self, source: SandboxSource, limits: SandboxLimits) -> ContainerSandbox:
        image = source.image or self._image
        wanted = self._wanted(image, source.network or "none", limits)
        try:
            container = await self.ask("POST", "/containers/create", json=wanted)
        except ToolLost as error:
            if (error.details or {}).get("status") != 404:  # 404: the image has to be pulled
                raise
            await self.ask("POST", "/images/create", params={"fromImage": image}, timeout_s=_PULL_S)
            container = await self.ask("POST", "/containers/create", json=wanted)
        return ContainerSandbox(self, source, limits, name=container["Id"])

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
                "MemorySwap": memory,  # equal to `Memory`: no swap
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

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        return await super().ask(method, f"{_API}{path}", **options)


class ContainerSandbox(CommandSandbox):
    """A container. Programs run in it through the runtime's `exec` API."""

    def __init__(self, maker: Containers, source: SandboxSource, limits: SandboxLimits, *, name: str) -> None:
        super().__init__(maker, source, limits)
        self._containers = maker
        self._path = f"/containers/{name}"

    async def begin(self) -> None:
        await self._containers.ask("POST", f"{self._path}/start")

    async def perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        name = await self._prepared(program, given)
        async with self._started(name) as (reader, writer):
            writer.write(given)
            reading = asyncio.create_task(_read(reader, printed), name="container output")
            try:
                pause_s = _FIRST_ASK_S
                while (state := await self._containers.ask("GET", f"/exec/{name}/json"))["Running"]:
                    await asyncio.wait({reading}, timeout=pause_s)
                    await asyncio.sleep(_FIRST_ASK_S)
                    pause_s = min(2 * pause_s, _ASK_S)
                await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        return int(state["ExitCode"])

    async def _prepared(self, program: Sequence[str], given: bytes = b"") -> str:
        words = list(fed(program, given))
        wanted = {"AttachStdin": bool(given), "AttachStdout": True, "AttachStderr": True, "Cmd": words}
        return str((await self._containers.ask("POST", f"{self._path}/exec", json=wanted))["Id"])

    @contextlib.asynccontextmanager
    async def _started(self, name: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Start a prepared program. Yields the connection for its input and output."""
        body = b'{"Detach": false, "Tty": false}'
        head = (
            f"POST {_API}/exec/{name}/start HTTP/1.1\r\nHost: runtime\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_unix_connection(self._containers.socket)
            try:
                writer.write(head.encode() + body)
                answer = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
                if answer.split()[1] != "101":
                    raise ToolLost(f"the container runtime did not start the command: {answer.splitlines()[0]}")
                yield reader, writer
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ToolLost(f"the connection to the container runtime is lost: {error}") from error

    async def kill(self) -> None:
        async with asyncio.timeout(KILL_S):
            name = await self._prepared(KILL_ALL)
            await self._containers.ask("POST", f"/exec/{name}/start", json={"Detach": True, "Tty": False})

    async def remove(self) -> None:
        await self._containers.delete(self._path, params={"force": "true", "v": "true"})


async def _read(reader: asyncio.StreamReader, printed: Printed) -> None:
    """Read output frames: one byte for the stream, three unused bytes, four bytes of length, and the output."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            header = await reader.readexactly(8)
            printed.add(await reader.readexactly(int.from_bytes(header[4:], "big")))
