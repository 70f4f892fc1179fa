"""The Sandboxes port: a place with a folder, `/task`, where commands run apart from this host.

Owned by its consumers: the shell tool, and environments. The calls of one sandbox are made one after the other. An
adapter raises ToolError for a mistake of the command's author (no such file, too many bytes) and ToolLost when the
sandbox is gone by no fault of theirs. Each call ends within the limits given at `create`, or those of the call.

`in_session` makes a session of separate commands, in any sandbox with a shell: a command begins with the folder and
the exported variables that the last one ended with.
"""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentloop.errors import ToolError

FOLDER = "/task"  # in the sandbox
_SESSION = """
if [ -r /tmp/.session ]; then . /tmp/.session; cd -- "$PWD" 2>/dev/null || cd /task; else {begin} fi
trap '{{ trap "" XFSZ; export PWD; export -p > /tmp/.next && mv /tmp/.next /tmp/.session; }} 2>/dev/null' EXIT
__command=$1; shift; eval "$__command"
"""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Bounds of one command. All finite."""

    run_s: float = 10.0  # until it is killed
    max_memory_bytes: int = 512 << 20  # of each process's address space, and of all processes' resident memory
    max_processes: int = 64  # and threads, at once
    max_output_bytes: int = 32_768  # of what it prints, the first of it
    max_folder_bytes: int = 64 << 20
    max_files: int = 4096


DEFAULT_LIMITS = SandboxLimits()


@dataclass(frozen=True, slots=True)
class SandboxRun:
    """The end of a command. `output` is the first of what it printed to either stream, in order."""

    status: int  # of its exit; 128 and more: the signal that killed it
    output: bytes
    num_cut_bytes: int  # printed beyond the limit
    stopped: str | None  # the limit that stopped it


@dataclass(frozen=True, slots=True)
class SandboxSource:
    """The beginning of a sandbox: its software, and the content of `/task`."""

    image: str | None = None  # as its adapter names images; None: the adapter's own
    folder: Path | None = None  # of this host, copied
    snapshot: str | None = None  # by `Sandbox.snapshot` of the same adapter: instead of a folder
    network: str | None = None  # that the adapter knows by this name; None: no network


DEFAULT_SOURCE = SandboxSource()


class Sandbox(Protocol):
    """One sandbox."""

    async def exec(self, command: str, limits: SandboxLimits | None = None) -> SandboxRun:
        """Run a command line for a shell to its end or its first limit.

        It begins where the last one ended: its folder, its exported variables, its background processes. After a
        limit or a cancellation has killed a command, only the content of `/task` is sure to be left of these.
        """

    async def read(self, path: str) -> bytes:
        """Read a file, as far as the limit of output goes; a relative path is one in `/task`."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, whose folder is there."""

    async def put_tar(self, data: bytes) -> None:
        """Unpack a tar file in `/task`."""

    async def get_tar(self, max_bytes: int | None = None) -> bytes:
        """Pack `/task` as a tar file. Raises ToolError if it is longer than `max_bytes` (None: than the folder may
        be)."""

    async def snapshot(self) -> str:
        """Keep the files until `Sandboxes.close`, and name them for `SandboxSource.snapshot`."""

    async def fork(self) -> Sandbox:
        """Make another sandbox with a copy of the files, and with no process or session of this one."""

    async def close(self) -> None:
        """Kill what runs and remove the files. Idempotent."""


class Sandboxes(Protocol):
    """The maker of sandboxes; one object in each process."""

    async def create(
        self, source: SandboxSource = DEFAULT_SOURCE, limits: SandboxLimits = DEFAULT_LIMITS
    ) -> Sandbox:
        """Make a sandbox. Raises InvalidRequest for a source that cannot be, ToolLost if it cannot be made now."""

    async def close(self) -> None:
        """Close what is open, and free the rest. Idempotent."""


def in_session(command: str, shell: str, variables: Mapping[str, str] | None = None) -> list[str]:
    """Return the argument list that runs a command in its sandbox's session, which begins with `variables`."""
    begin = [
        f"export {name}={shlex.quote(value)};"
        for name, value in (variables or {}).items()
        if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
    ]
    return [shell, "-c", _SESSION.format(begin=" ".join([*begin, "cd /task;"])), shell, command]


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """Pack files by their paths as a tar file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def tar_of_folder(folder: Path) -> bytes:
    """Pack the content of a folder as a tar file. Raises OSError."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in sorted(folder.iterdir()):
            archive.add(name, arcname=name.name)
    return packed.getvalue()


def answer(ran: SandboxRun) -> bytes:
    """Return the output of one of our own commands. Raises ToolError if it failed."""
    if ran.status != 0 or ran.stopped is not None:
        text = ran.output.decode(errors="replace").strip()[:200]
        raise ToolError(ran.stopped or text or f"exit status {ran.status}")
    return ran.output
