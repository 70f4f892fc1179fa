"""Commands in a bubblewrap sandbox: what is isolated, which limits hold, and whether this host allows it.

Isolation it gives: namespaces of its own for users, processes, network, mounts, IPC and names. No network, not even
loopback to the host; of the host's files `/usr` and its libraries, read-only, nothing of homes, `/etc` or `/var`;
one writable folder, `/task`, and a small `/tmp` that is empty at each command; no environment variables of ours; no
user namespaces inside. Every process of a command dies with it, and with this process.

Isolation it does not give: the kernel is shared, and no seccomp filter stands before it. Processes and CPU seconds
are limited by the kernel (`setrlimit(2)`), so is the memory of each process. The memory of all of them together and
the size of the folder are looked at several times a second, and a command that is over is killed: bounds, not
quotas. In a folder that is full a command can remove files, and write none.
Started as root, commands run as the user `nobody`: the kernel holds root to no limit of processes.

Nothing is weakened where a host forbids a part of this: `refusal` says what is missing, and nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = "/task"  # in the sandbox
NOBODY = 65534
MIN_VERSION = (0, 8)  # of bubblewrap: the first that can forbid user namespaces inside
MAX_DEPTH = 64  # of folders; a deeper one counts as too many files
_TMP_BYTES = 64 << 20
_PROBE_TIMEOUT_S = 20.0
_FIRST_LOOK_S, _LOOK_S = 0.05, 0.4  # between two looks at memory and folder
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Bounds of one command. All finite."""

    run_s: float = 10.0  # until it is killed
    max_memory_bytes: int = 512 << 20  # of each process's address space, and of all processes' resident memory
    max_processes: int = 64  # and threads, at once
    max_output_bytes: int = 32_768  # of what it prints, the first of it
    max_folder_bytes: int = 64 << 20
    max_files: int = 4096


@dataclass(frozen=True, slots=True)
class SandboxRun:
    """The end of a command. `output` is the first of what it printed to either stream, in order."""

    status: int  # of its exit; 128 and more: the signal that killed it
    output: bytes
    num_cut_bytes: int  # printed beyond the limit
    stopped: str | None  # the limit that stopped it


@dataclass(frozen=True, slots=True)
class FolderUse:
    """The content of a folder; `is_too_deep` of one whose folders are nested beyond MAX_DEPTH."""

    num_files: int
    num_bytes: int
    is_too_deep: bool

    def excess(self, limits: SandboxLimits, began: FolderUse | None = None) -> str | None:
        """Say what there is too much of, and more than when a command `began`; None: of nothing."""
        began = FolderUse(0, 0, is_too_deep=False) if began is None else began
        is_deeper = self.is_too_deep and not began.is_too_deep
        if self.num_files > max(limits.max_files, began.num_files) or is_deeper:
            return f"{FOLDER} holds more than {limits.max_files} files, or folders deeper than {MAX_DEPTH}"
        if self.num_bytes > max(limits.max_folder_bytes, began.num_bytes):
            return f"{FOLDER} holds more than {limits.max_folder_bytes >> 20} MiB"
        return None


def refusal(base: Path | None = None) -> str | None:
    """Return why this host cannot isolate commands, in one line; None: it can. Takes a few milliseconds.

    `base` is a folder under which those of trajectories will lie.
    """
    if sys.platform != "linux":
        return f"bubblewrap needs Linux, this is {sys.platform}"
    for program, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux"), ("tar", "tar")):
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    version = _output([shutil.which("bwrap") or "", "--version"])[1]
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < MIN_VERSION:
        return f"{version.strip()} is too old: {'.'.join(map(str, MIN_VERSION))} is wanted"
    with tempfile.TemporaryDirectory(dir=base, prefix="probe-") as folder:
        give_to_sandbox(Path(folder))
        status, said = _output(_command(Path(folder), ["touch", "here"], SandboxLimits()), **_as_nobody())
    if status == 0:
        return None
    return f"bwrap cannot isolate here: {' '.join(said.split()) or f'exit status {status}'}"


def _output(command: Sequence[str], **options: Any) -> tuple[int, str]:
    try:
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            **options,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return 1, str(error)
    return ended.returncode, ended.stdout.decode(errors="replace")


def give_to_sandbox(path: Path) -> None:
    """Make the sandbox's user the owner of this one file or folder. As root alone; else a no-op."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def _as_nobody() -> dict[str, Any]:
    """Return what starts a process as `nobody`, where this one is root's."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _command(
    folder: Path, command: Sequence[str], limits: SandboxLimits, read_only: Sequence[Path] = ()
) -> list[str]:
    """Return the whole command line: the sandbox, its limits, the command."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        if os.path.islink(name):
            mounts += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            mounts += ["--ro-bind", name, name]
    for name in (*_ETC, *map(str, read_only)):
        mounts += ["--ro-bind-try", name, name]
    for name in ("/tmp", "/dev/shm"):
        mounts += ["--size", str(_TMP_BYTES), "--tmpfs", name]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-net", "--unshare-ipc"),
        *("--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox", "--uid", "1000", "--gid", "1000"),
        *("--die-with-parent", "--new-session", "--clearenv"),
        *(
            "--setenv",
            "PATH",
            "/usr/local/bin:/usr/bin:/bin",
            "--setenv",
            "HOME",
            FOLDER,
            "--setenv",
            "TMPDIR",
            "/tmp",
        ),
        *("--setenv", "LANG", "C.UTF-8", "--setenv", "USER", "user"),
        *("--proc", "/proc", "--dev", "/dev", *mounts, "--bind", str(folder), FOLDER),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER, "--"),
        *("prlimit", f"--as={limits.max_memory_bytes}", f"--nproc={limits.max_processes}", "--core=0"),
        *(f"--fsize={limits.max_folder_bytes}", f"--cpu={max(1, round(limits.run_s))}", "--nofile=256"),
        *command,
    ]


async def run_sandboxed(
    folder: Path,
    command: Sequence[str],
    limits: SandboxLimits,
    *,
    given: bytes = b"",
    read_only: Sequence[Path] = (),
) -> SandboxRun:
    """Run a command with `folder` as its `/task` and `given` as its input, to its end or the first limit.

    A cancellation kills it. Raises OSError if it cannot be started.
    """
    began = await asyncio.to_thread(folder_use, folder, limits)
    allowed = limits if began.excess(limits) is None else replace(limits, max_folder_bytes=0)
    process = await asyncio.create_subprocess_exec(
        *_command(folder, command, allowed, read_only),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd="/",
        env={},
        start_new_session=True,
        **_as_nobody(),
    )
    reading = asyncio.create_task(_read(process, limits.max_output_bytes), name="sandbox output")
    feeding = asyncio.create_task(_feed(process, given), name="sandbox input")
    watching = asyncio.create_task(_watch(process.pid, folder, limits, began), name="sandbox watch")
    try:
        await asyncio.wait({reading, watching}, timeout=limits.run_s, return_when=asyncio.FIRST_COMPLETED)
        stopped = None
        if not reading.done():
            stopped = watching.result() if watching.done() else f"it ran longer than {limits.run_s:g} s"
            _kill(process)
        output, num_cut = await reading
        status = await process.wait()
        return SandboxRun(128 - status if status < 0 else status, output, num_cut, stopped)
    finally:
        _kill(process)
        for task in (reading, feeding, watching):
            task.cancel()
        await asyncio.gather(reading, feeding, watching, return_exceptions=True)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # bwrap dies, and with it the first process inside, and all others


async def _read(process: asyncio.subprocess.Process, max_bytes: int) -> tuple[bytes, int]:
    """Read to the end, keep the first bytes, and count the others: a command that prints on is not held up."""
    assert process.stdout is not None, "it is piped"
    kept, num_cut = bytearray(), 0
    while chunk := await process.stdout.read(65_536):
        room = max_bytes - len(kept)
        kept += chunk[:room]
        num_cut += max(0, len(chunk) - room)
    return bytes(kept), num_cut


async def _feed(process: asyncio.subprocess.Process, given: bytes) -> None:
    assert process.stdin is not None, "it is piped"
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(given)
        await process.stdin.drain()
        process.stdin.close()


async def _watch(pid: int, folder: Path, limits: SandboxLimits, began: FolderUse) -> str:
    """Look at what a command uses until it is too much, and say of what."""
    pause_s = _FIRST_LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)
        if (excess := await asyncio.to_thread(_excess, pid, folder, limits, began)) is not None:
            return excess


def _excess(pid: int, folder: Path, limits: SandboxLimits, began: FolderUse) -> str | None:
    if resident_bytes(pid) > limits.max_memory_bytes:
        return f"its processes used more than {limits.max_memory_bytes >> 20} MiB of memory"
    return folder_use(folder, limits).excess(limits, began)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and of its descendants."""
    total, waiting, page = 0, [pid], os.sysconf("SC_PAGE_SIZE")
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * page
            for thread in os.listdir(f"/proc/{one}/task"):
                waiting += map(int, Path(f"/proc/{one}/task/{thread}/children").read_text().split())
    return total


def folder_use(folder: Path, limits: SandboxLimits) -> FolderUse:
    """Count what is in a folder, following no link, and not much further than the limits go."""
    num_files, num_bytes, is_too_deep, waiting = 0, 0, False, [(str(folder), 0)]
    while waiting and num_files <= 2 * limits.max_files:
        path, depth = waiting.pop()
        with (
            contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError),
            os.scandir(path) as entries,
        ):
            for entry in entries:
                num_files += 1
                with contextlib.suppress(FileNotFoundError):
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    if depth < MAX_DEPTH:
                        waiting.append((entry.path, depth + 1))
                    is_too_deep = is_too_deep or depth >= MAX_DEPTH
    return FolderUse(num_files, num_bytes, is_too_deep)
