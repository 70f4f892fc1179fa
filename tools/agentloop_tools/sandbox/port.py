"""The Sandboxes port: a place with a folder, `/task`, where commands run apart from this host.

Owned by its consumers: the shell tool, and environments. The calls of one sandbox run one after the other, in the
order in which they were made. An adapter raises ToolError for a mistake of the command's author (no such file, too
many bytes) and ToolLost when the sandbox is gone by no fault of theirs. Each call ends within the limits given at
`create`, or those of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

FOLDER = "/task"  # in the sandbox


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
        """Read a file, as far as the limit of the folder goes; a relative path is one in `/task`."""

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
