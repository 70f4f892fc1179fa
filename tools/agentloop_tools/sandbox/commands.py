"""Sandboxes whose operations are all commands. An adapter implements creating one and running a program in it.

A shell session needs no permanent shell process: each command stores the current folder and the exported variables
in a file, which the next command reads. If that file cannot be written, there is no session.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shlex
import tarfile
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from agentloop.errors import InvalidRequest, ToolError
from agentloop_tools.sandbox.port import (
    DEFAULT_LIMITS,
    DEFAULT_SOURCE,
    FOLDER,
    SandboxLimits,
    SandboxRun,
    SandboxSource,
)

KILL_S = 60.0
KILL_ALL = ("sh", "-c", "kill -9 -1")
_SESSION = """
if [ -r /tmp/.session ]; then . /tmp/.session; cd -- "$PWD" 2>/dev/null || cd /task; else {begin} fi
trap '__status=$?; trap "" XFSZ; export PWD
{{ export -p > /tmp/.next && mv /tmp/.next /tmp/.session; }} 2>/dev/null; exit $__status' EXIT
__command=$1; shift; eval "$__command"
"""


class CommandSandboxes(ABC):
    """Creates CommandSandboxes. It owns the open ones and the snapshots, which are unnamed temporary files."""

    def __init__(self) -> None:
        self._open: set[CommandSandbox] = set()
        self._snapshots: dict[str, IO[bytes]] = {}

    @abstractmethod
    async def make(self, source: SandboxSource, limits: SandboxLimits) -> CommandSandbox:
        """Create a sandbox with an empty folder. `begin` starts it."""

    async def create(
        self, source: SandboxSource = DEFAULT_SOURCE, limits: SandboxLimits = DEFAULT_LIMITS
    ) -> CommandSandbox:
        content = None
        if source.snapshot is not None:
            if (file := self._snapshots.get(source.snapshot)) is None:
                raise InvalidRequest(
                    f"unknown snapshot {source.snapshot[:80]!r}: take it with the same source first",
                    param="snapshot",
                )
            size = os.fstat(file.fileno()).st_size
            # pread does not move the file position, so that snapshots can be read concurrently.
            content = await asyncio.to_thread(os.pread, file.fileno(), size, 0)
        elif source.folder is not None:
            content = await asyncio.to_thread(tar_of_folder, source.folder)
        return await self.filled(source, limits, content)

    async def filled(self, source: SandboxSource, limits: SandboxLimits, content: bytes | None) -> CommandSandbox:
        """Create and start a sandbox whose folder has the content of a tar file."""
        sandbox = await self.make(source, limits)
        try:
            await sandbox.begin()
            self._open.add(sandbox)
            if content is not None:
                await sandbox.put_tar(content)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def keep(self, content: bytes) -> str:
        """Store a snapshot and return its name."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        file.write(content)
        file.flush()
        self._snapshots[name := uuid.uuid4().hex] = file
        return name

    def forget(self, sandbox: CommandSandbox) -> None:
        """Remove a closed sandbox."""
        self._open.discard(sandbox)

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))
        for file in self._snapshots.values():
            file.close()
        self._snapshots.clear()


class CommandSandbox(ABC):
    """One sandbox. Subclasses implement `begin`, `perform` and `remove`."""

    def __init__(self, maker: CommandSandboxes, source: SandboxSource, limits: SandboxLimits) -> None:
        self._maker = maker
        self._source = source
        self._limits = limits
        self._shell = "sh"
        self._variables: Mapping[str, str] = {}  # additional variables at the start of a session
        self._turn = asyncio.Lock()
        self._killing: asyncio.Future[None] | None = None

    @abstractmethod
    async def begin(self) -> None:
        """Start the sandbox. Called once, before any other method. Raises ToolLost."""

    @abstractmethod
    async def perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        """Run a program with the input `given` and return its exit status. Raises ToolLost.

        The caller applies the time limit; `printed.stopped` reports any other limit that stopped the program.
        """

    async def kill(self) -> None:
        """Kill all processes."""
        async with asyncio.timeout(KILL_S):
            await self.perform(KILL_ALL, self._limits, b"", Printed(0))

    @abstractmethod
    async def remove(self) -> None:
        """Kill all processes and remove the files. Idempotent."""

    async def run(self, program: Sequence[str], limits: SandboxLimits, given: bytes = b"") -> SandboxRun:
        """Run a program until it ends or reaches a limit. A cancellation kills it."""
        printed = Printed(limits.max_output_bytes)
        async with self._turn:
            try:
                async with asyncio.timeout(limits.run_s):
                    status = await self.perform(program, limits, given, printed)
            except TimeoutError:
                await self.kill()
                status, printed.stopped = 137, f"it ran longer than {limits.run_s:g} s"
            except asyncio.CancelledError:
                self._killing = asyncio.ensure_future(self.kill())
                await asyncio.shield(self._killing)
                raise
            return printed.run(status)

    async def exec(self, command: str, limits: SandboxLimits | None = None) -> SandboxRun:
        if "\0" in command:
            raise ToolError("a command must not contain NUL characters")
        begin = [
            f"export {name}={shlex.quote(value)};"
            for name, value in self._variables.items()
            if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        ]
        script = _SESSION.format(begin=" ".join([*begin, f"cd {FOLDER};"]))
        return await self.run([self._shell, "-c", script, self._shell, command], limits or self._limits)

    async def read(self, path: str) -> bytes:
        whole = replace(self._limits, max_output_bytes=self._limits.max_folder_bytes)
        return answer(await self.run(self._script('cat -- "$1"', path), whole))

    async def write(self, path: str, data: bytes) -> None:
        answer(await self.run(self._script('cat > "$1"', path), self._limits, data))

    async def put_tar(self, data: bytes) -> None:
        answer(await self.run(self._script("tar -xpf -"), self._limits, data))

    async def get_tar(self, max_bytes: int | None = None) -> bytes:
        max_bytes = 2 * self._limits.max_folder_bytes if max_bytes is None else max_bytes
        ran = await self.run(self._script("tar -cf - ."), replace(self._limits, max_output_bytes=max_bytes))
        if ran.num_cut_bytes:
            raise ToolError(f"the folder's tar file is larger than {max_bytes >> 10} KiB")
        return answer(ran)

    async def snapshot(self) -> str:
        return self._maker.keep(await self.get_tar())

    async def fork(self) -> CommandSandbox:
        return await self._maker.filled(self._source, self._limits, await self.get_tar())

    async def close(self) -> None:
        await self.remove()
        self._maker.forget(self)

    def _script(self, script: str, *arguments: str) -> list[str]:
        return [self._shell, "-c", f"cd {FOLDER}; {script}", self._shell, *arguments]


class Printed:
    """The output of a command. The first `max_bytes` are kept, further bytes are only counted."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._num_cut = 0
        self.stopped: str | None = None  # the limit that stopped the command

    def add(self, data: bytes) -> None:
        room = self._max_bytes - len(self._kept)
        self._kept += data[:room]
        self._num_cut += max(0, len(data) - room)

    def clear(self) -> None:
        self._kept.clear()

    def begins_with(self, word: bytes) -> bool:
        return self._kept.startswith(word)

    def run(self, status: int) -> SandboxRun:
        """Return the result of the command, which ended with exit status `status`.

        Output that its background processes write later is discarded.
        """
        kept, self._kept, self._max_bytes = bytes(self._kept), bytearray(), 0
        return SandboxRun(128 - status if status < 0 else status, kept, self._num_cut, self.stopped)


def fed(program: Sequence[str], given: bytes) -> Sequence[str]:
    """Wrap a program so that its input ends after `given`, for connections that cannot close their input."""
    return ["sh", "-c", f'head -c {len(given)} | "$@"', "sh", *program] if given else program


def tar_of(files: Mapping[str, bytes | str]) -> bytes:
    """Pack files by path as a tar file. Text is encoded as UTF-8."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            data = content.encode(errors="replace") if isinstance(content, str) else content
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def tar_of_folder(folder: Path) -> bytes:
    """Pack the content of a folder as a tar file. Raises OSError."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name)
    return packed.getvalue()


def answer(ran: SandboxRun) -> bytes:
    """Return the output of an internal command. Raises ToolError if it failed."""
    if ran.status != 0 or ran.stopped is not None:
        text = ran.output.decode(errors="replace").strip()[:200]
        raise ToolError(ran.stopped or text or f"exit status {ran.status}")
    return ran.output
