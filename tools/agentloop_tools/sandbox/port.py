"""The Sandboxes interface, for the shell tool and environments. A sandbox runs commands isolated from this host.

Every sandbox has a folder `/task`. The calls of one sandbox run one at a time, in call order. An adapter raises
ToolError for a mistake of the caller (no such file, too many bytes) and ToolLost if the sandbox is lost for another
reason. Each call ends within the limits of `create` or of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

FOLDER = "/task"  # in the sandbox


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one command. All values are finite."""

    run_s: float = 10.0  # then the command is killed
    max_memory_bytes: int = 512 << 20  # address space of each process, and resident memory of all together
    max_processes: int = 64  # processes and threads
    max_output_bytes: int = 32_768  # further output is discarded
    max_folder_bytes: int = 64 << 20
    max_files: int = 4096


DEFAULT_LIMITS = SandboxLimits()


@dataclass(frozen=True, slots=True)
class SandboxRun:
    """The result of a command. `output` is the beginning of standard output and error, interleaved."""

    status: int  # exit status; 128 + N: killed by signal N
    output: bytes
    num_cut_bytes: int  # discarded output beyond the limit
    stopped: str | None  # the limit that stopped it


@dataclass(frozen=True, slots=True)
class SandboxSource:
    """The initial state of a sandbox: its software and the content of `/task`."""

    image: str | None = None  # an image reference of the adapter; None: the adapter's default
    folder: Path | None = None  # a folder of this host that is copied to `/task`
    snapshot: str | None = None  # a result of `Sandbox.snapshot` of the same adapter, instead of a folder
    network: str | None = None  # a network name of the adapter; None: no network


DEFAULT_SOURCE = SandboxSource()


class Sandbox(Protocol):
    """One sandbox."""

    async def exec(self, command: str, limits: SandboxLimits | None = None) -> SandboxRun:
        """Run a shell command line until it ends or reaches a limit.

        The command continues the session of the last one: the current folder, exported variables and background
        processes. After a limit or a cancellation killed a command, only the content of `/task` is guaranteed.
        """

    async def read(self, path: str) -> bytes:
        """Return the content of a file, up to `max_folder_bytes`. Relative paths are relative to `/task`."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file. Its folder must exist."""

    async def put_tar(self, data: bytes) -> None:
        """Unpack a tar file into `/task`."""

    async def get_tar(self, max_bytes: int | None = None) -> bytes:
        """Pack `/task` as a tar file. Raises ToolError if it is longer than `max_bytes`.

        None: twice the limit of the folder.
        """

    async def snapshot(self) -> str:
        """Save the files until `Sandboxes.close`. Returns a name for `SandboxSource.snapshot`."""

    async def fork(self) -> Sandbox:
        """Create another sandbox with a copy of the files, without this one's processes and session."""

    async def close(self) -> None:
        """Kill all processes and remove the files. Idempotent."""


class Sandboxes(Protocol):
    """Creates sandboxes. There is one object per process."""

    async def create(
        self, source: SandboxSource = DEFAULT_SOURCE, limits: SandboxLimits = DEFAULT_LIMITS
    ) -> Sandbox:
        """Create a sandbox. Raises InvalidRequest for an invalid source, and ToolLost if the creation fails."""

    async def close(self) -> None:
        """Close all sandboxes and release other resources. Idempotent."""
