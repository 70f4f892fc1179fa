"""Sandboxes of bubblewrap on this host: what is isolated, which limits hold, and whether this host allows it.

Isolation it gives: namespaces of its own for users, processes, network, mounts, IPC and names. No network, not even
loopback to the host; of the host's files `/usr` and its libraries, read-only, or an image's files instead;
nothing of homes, `/etc` or `/var`; a writable folder, `/task`, and a small `/tmp`; no environment variables of
ours; no user namespaces inside, no capabilities, no gain of privileges.

A seccomp filter (`confine.py`) refuses sockets that no namespace isolates and memory that no limit counts.

Isolation it does not give: the kernel is shared. The kernel limits processes, and the CPU seconds and memory of
each process (`setrlimit(2)`). Several times a second while a process runs, a watch adds up the memory and CPU time
of all processes and the size of the folder, deleted files that are still open included, and kills a sandbox that
exceeds a limit: bounds, not quotas. In a full folder a command can remove files, and write none.
Started as root, commands run as the user `nobody`: the kernel holds root to no limit of processes.

Three processes of a sandbox wait. `unshare` makes its user namespace and forbids others inside; it also holds the
`/proc` folder of the first process of `bwrap`, so that a number that is used again leads to no other process. A
command enters through that (`nsenter`), with its limits set. All die with this process, and with `bwrap`. A limit
kills the namespaces and all in them: the next command makes new ones around the same folder.

Nothing is weakened where a host forbids a part of this: `refusal` says what is missing, and nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from agentloop.errors import InvalidRequest, ToolError, ToolLost
from agentloop_tools.sandbox import confine
from agentloop_tools.sandbox.commands import CommandSandbox, CommandSandboxes, Printed, answer
from agentloop_tools.sandbox.images import ImageStore, RootImage, host_image
from agentloop_tools.sandbox.port import DEFAULT_LIMITS, FOLDER, SandboxLimits, SandboxSource

NOBODY = 65534
MIN_VERSION = (0, 8)  # of bubblewrap: the one that the tests run
MAX_DEPTH = 64  # of folders; a deeper one counts as too many files
_TMP_BYTES = 64 << 20
_START_S = 20.0
_FIRST_LOOK_S, _LOOK_S = 0.05, 0.4  # between two looks at memory and folder
_PIPE_READS = 16  # of 64 KiB: the most that a pipe can hold
_NUM_WAITING = 3  # threads of a sandbox in which nothing runs: bwrap's two, and a shell
_NUM_SPARE = 8  # of a sandbox's processes: room for those that wait, and for the next command
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": FOLDER,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "USER": "user",
}
_HOLD = """
echo 0 > /proc/sys/user/max_user_namespaces && echo made && read pid && exec 3< /proc/$pid && echo held
read _
"""
_PAGE_BYTES, _TICKS_PER_S = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_CONFINED = (sys.executable, "-I", "-S", confine.__file__)
_NAMESPACES = ("user", "mount=mnt", "pid", "net", "ipc", "uts", "cgroup")  # nsenter's name, and the kernel's


@dataclass(frozen=True, slots=True)
class FolderUse:
    """The content of a folder; `is_too_deep` of one whose folders are nested beyond MAX_DEPTH."""

    num_files: int = 0
    num_bytes: int = 0
    is_too_deep: bool = False

    def excess(self, limits: SandboxLimits, began: FolderUse) -> str | None:
        """Say what there is too much of, and more than when a command `began`; None: of nothing."""
        is_deeper = self.is_too_deep and not began.is_too_deep
        if self.num_files > max(limits.max_files, began.num_files) or is_deeper:
            return f"{FOLDER} holds more than {limits.max_files} files, or folders deeper than {MAX_DEPTH}"
        if self.num_bytes > max(limits.max_folder_bytes, began.num_bytes):
            return f"{FOLDER} holds more than {limits.max_folder_bytes >> 20} MiB"
        return None


def refusal(base: Path | None = None) -> str | None:
    """Return why this host cannot isolate commands, in one line; None: it can. Takes a few milliseconds.

    `base` is a folder under which those of sandboxes will lie.
    """
    if sys.platform != "linux":
        return f"bubblewrap needs Linux, this is {sys.platform}"
    if not confine.is_known(machine := os.uname().machine):
        return f"no seccomp filter is known for {machine}"
    for program, package in (("bwrap", "bubblewrap"), ("nsenter", "util-linux"), ("tar", "tar")):
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False).stdout
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < MIN_VERSION:
        return f"{version.strip()} is too old: {'.'.join(map(str, MIN_VERSION))} is wanted"
    with tempfile.TemporaryDirectory(dir=base, prefix="probe-") as folder, ThreadPoolExecutor(1) as thread:
        _give(Path(folder))
        why_not = thread.submit(asyncio.run, _probe(Path(folder))).result()  # also beside a running loop
    return None if why_not is None else f"bwrap cannot isolate here: {' '.join(why_not.split())}"


async def _probe(folder: Path) -> str | None:
    namespaces, printed = _Namespaces(), Printed(1000)
    try:
        await namespaces.start(host_image(), folder)
        status = await namespaces.enter(["touch", f"{FOLDER}/here"], DEFAULT_LIMITS, b"", printed).wait()
        answer(printed.run(status))
    except (ToolError, ToolLost) as error:
        return error.message
    finally:
        await namespaces.end()
    return None


def _give(folder: Path) -> None:
    """Make the sandbox's user the owner of a folder. As root alone; else a no-op."""
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)


class Bubblewrap(CommandSandboxes):
    """Sandboxes of this host; owns their folders, below one of its own that goes with it."""

    def __init__(self, *, read_only: Sequence[str | Path] = (), images: str | Path | None = None) -> None:
        """`read_only` are folders of the host that commands see, where they are; `images` is a folder that keeps
        unpacked images (None: one that goes with this object). Raises InvalidRequest, with param "tools", where
        the host cannot isolate commands."""
        super().__init__()
        self._read_only = [Path(path).resolve() for path in read_only]
        self._lock, self._base = _own_base()
        self._images = ImageStore(self._base / "images" if images is None else Path(images))
        if (why_not := refusal(self._base)) is not None:
            self._remove()
            raise InvalidRequest(f"no sandbox can run here: {why_not}", param="tools")

    async def make(self, source: SandboxSource, limits: SandboxLimits) -> BubblewrapSandbox:
        if source.network is not None:
            raise InvalidRequest("a bubblewrap sandbox has no network", param="network")
        image = host_image() if source.image is None else await self._images.unpacked(source.image)
        try:
            folder = Path(tempfile.mkdtemp(dir=self._base, prefix="task-"))
        except OSError as error:
            raise ToolLost(f"a sandbox cannot be made: {error}") from error
        _give(folder)
        return BubblewrapSandbox(self, source, limits, folder, image.seeing(self._read_only))

    async def close(self) -> None:
        await super().close()
        await self._images.close()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        remove_tree(self._base)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


class BubblewrapSandbox(CommandSandbox):
    """A folder, and the namespaces around it while they live."""

    def __init__(
        self, maker: Bubblewrap, source: SandboxSource, limits: SandboxLimits, folder: Path, image: RootImage
    ) -> None:
        super().__init__(maker, source, limits)
        self._shell = image.shell
        self._variables = image.variables
        self._folder = folder
        self._image = image
        self._namespaces = _Namespaces()
        self._watching: asyncio.Task[None] | None = None
        self._excess: str | None = None

    async def put_tar(self, data: bytes) -> None:
        await super().put_tar(data)
        use = await asyncio.to_thread(folder_use, self._folder, self._limits)
        if (excess := use.excess(self._limits, FolderUse())) is not None:  # between two looks
            raise ToolError(excess)

    async def remove(self) -> None:
        self._unwatch()
        await self._namespaces.end()
        await asyncio.to_thread(remove_tree, self._folder)

    async def begin(self) -> None:
        """Make the namespaces where there are none: at first, and after a limit has killed them.

        Also where background processes leave no room for a command, not even for one that kills them.
        """
        most = max(_NUM_WAITING, self._limits.max_processes - _NUM_SPARE)
        if not self._namespaces.is_alive or self._namespaces.usage().num_threads > most:
            await self._namespaces.end()
            await self._namespaces.start(self._image, self._folder)

    async def perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        status = await self._perform(program, limits, given, printed)
        if status == 1 and printed.begins_with(b"nsenter: "):  # the last command was killing the sandbox
            await self._namespaces.end()
            printed.clear()
            status = await self._perform(program, limits, given, printed)
        return status

    async def _perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        await self.begin()
        began = await asyncio.to_thread(folder_use, self._folder, limits)
        allowed = limits if began.excess(limits, FolderUse()) is None else replace(limits, max_folder_bytes=0)
        self._unwatch()
        self._excess = None
        began_cpu_s = self._namespaces.usage().cpu_s
        entered = self._namespaces.enter(program, allowed, given, printed)
        self._watching = asyncio.create_task(self._look(limits, began, began_cpu_s), name="sandbox watch")
        status = await entered.wait()
        if not self._namespaces.is_busy:
            self._unwatch()
        printed.stopped = self._excess
        return status

    async def kill(self) -> None:
        await self._namespaces.end()

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def _look(self, limits: SandboxLimits, began: FolderUse, began_cpu_s: float) -> None:
        """Add up what all processes use until it exceeds a limit. Continues after the command while others run."""
        pause_s, max_cpu_s = _FIRST_LOOK_S, limits.run_s * (os.cpu_count() or 1)
        while self._excess is None and self._namespaces.is_alive:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
            used = await asyncio.to_thread(self._namespaces.usage)
            if used.num_bytes > limits.max_memory_bytes:
                self._excess = f"its processes used more than {limits.max_memory_bytes >> 20} MiB of memory"
            elif used.cpu_s - began_cpu_s > max_cpu_s:
                self._excess = f"its processes used more than {max_cpu_s:g} s of CPU time"
            else:
                folder = await asyncio.to_thread(folder_use, self._folder, limits)
                num_deleted = used.num_deleted_bytes(self._folder.stat().st_dev)
                folder = replace(folder, num_bytes=folder.num_bytes + num_deleted)
                self._excess = folder.excess(limits, began)
        self._namespaces.kill()


class _Namespaces:
    """The namespaces of a sandbox: none, or those of a first process, while that lives."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []  # the holder, and bwrap
        self._entered: list[_Entered] = []
        self._first: int | None = None  # a pidfd of the first process inside: with it all others die
        self._starting: asyncio.Future[None] | None = None
        self._ending = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        return self._first is not None and not _has_ended(self._first)

    @property
    def is_busy(self) -> bool:
        """True while a process of a command is left."""
        return self.is_alive and self.usage().num_threads > _NUM_WAITING

    async def start(self, image: RootImage, folder: Path) -> None:
        """Make them. Raises ToolLost where this host does not."""
        self._starting = asyncio.ensure_future(self._start(image, folder))
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(self._starting)
        except (OSError, TimeoutError, IndexError, ToolLost) as error:
            await self.end()
            raise ToolLost(str(error) or "a sandbox could not be started in time") from error

    async def _start(self, image: RootImage, folder: Path) -> None:
        mapped = ("--user", "--map-user=1000", "--map-group=1000", "--keep-caps")
        holder = self._spawn(_chain("unshare", *mapped, "--", "sh", "-c", _HOLD))
        await _says(holder, "made")
        with _closing(os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY)) as users:
            bwrap = self._spawn([*_CONFINED, *_chain(*_bwrap(users, image, folder))], users)
        await _says(bwrap, "ready")
        first = _children(bwrap.pid, bwrap.pid)[0]
        self._first = os.pidfd_open(first)
        os.write(_pipe(holder.stdin).fileno(), f"{first}\n".encode())
        await _says(holder, "held")
        for process in self._processes:
            _pipe(process.stdout).close()

    def _spawn(self, command: Sequence[str], *fds: int) -> subprocess.Popen[bytes]:
        self._processes.append(started := _popen(command, subprocess.PIPE, *fds))
        return started

    def enter(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> _Entered:
        """Start a program inside, within limits that the kernel holds. Raises ToolLost."""
        held = f"/proc/{self._processes[0].pid}/fd/3/ns"
        command = _chain(
            *("prlimit", f"--as={limits.max_memory_bytes}", f"--nproc={limits.max_processes}", "--core=0"),
            *(f"--fsize={limits.max_folder_bytes}", f"--cpu={max(1, round(limits.run_s))}", "--nofile=256"),
            *("nsenter", *(f"--{one.split('=')[0]}={held}/{one.split('=')[-1]}" for one in _NAMESPACES)),
            *("--preserve-credentials", "--", *program),
        )
        try:
            entered = _Entered([*_CONFINED, *command], given, printed)
        except OSError as error:
            raise ToolLost(f"a command cannot be started: {error}") from error
        self._entered = [*(one for one in self._entered if one.is_open), entered]
        return entered

    def usage(self) -> TreeUse:
        """Return the use of all processes."""
        running = (one.process.pid for one in self._entered if one.process.returncode is None)
        return tree_use(*(process.pid for process in self._processes[-1:]), *running)

    def kill(self) -> None:
        """Kill all that is inside."""
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def end(self) -> None:
        """Kill all, and wait until nothing is left. Idempotent."""
        async with self._ending:
            if self._starting is not None:  # bwrap that is killed meanwhile can leave a process that waits for it
                await asyncio.wait({self._starting}, timeout=_START_S)
                self._starting.cancel()
                await asyncio.gather(self._starting, return_exceptions=True)
            self.kill()
            if self._first is not None:
                await _readable(self._first)
            for entered in self._entered:
                await entered.end()
            for process in self._processes:
                if self._first is None or process is self._processes[0]:
                    process.kill()  # else it is bwrap, which reaps the first process inside, and ends
                await _exit(process)
                _pipe(process.stdin).close()
                _pipe(process.stdout).close()
            if self._first is not None:
                os.close(self._first)
            self._processes, self._entered, self._first, self._starting = [], [], None, None


class _Entered:
    """A program inside, and a reader of what it and its children print."""

    def __init__(self, command: Sequence[str], given: bytes, printed: Printed) -> None:
        with open(os.memfd_create("given", os.MFD_ALLOW_SEALING), "w+b", buffering=0) as file:
            file.write(given)
            file.seek(0)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            self.process = _popen(command, file)
        self._printed = printed
        self._pipe = _pipe(self.process.stdout)
        os.set_blocking(self._pipe.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe.fileno(), self._read)

    @property
    def is_open(self) -> bool:
        """True while it runs, or a process that it left behind can print."""
        return self.process.returncode is None or not self._pipe.closed

    def _read(self) -> bool:
        """Read once. Return whether there may be more now."""
        try:
            chunk = b"" if self._pipe.closed else os.read(self._pipe.fileno(), 65_536)
        except BlockingIOError:
            return False
        if not chunk:
            self._close()
        self._printed.add(chunk)
        return bool(chunk)

    def _close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()

    async def wait(self) -> int:
        """Wait until the program has ended, and return its status. Others that it started may go on, and print."""
        await _exit(self.process)
        for _ in range(_PIPE_READS):
            if not self._read():
                break
        return self.process.returncode

    async def end(self) -> None:
        """Wait until it is gone, killed with its namespaces, and stop reading."""
        self.process.kill()
        await _exit(self.process)
        while self._read():
            pass
        self._close()


def _popen(command: Sequence[str], given: int | IO[bytes], *fds: int) -> subprocess.Popen[bytes]:
    """Start a program that prints into a pipe. Not in a thread that ends: what it starts would end with that."""
    return subprocess.Popen(
        command,
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=_ENVIRONMENT,
        pass_fds=fds,
        start_new_session=True,
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "it is piped"
    return pipe


def _chain(program: str, *arguments: str) -> list[str]:
    """Return a command line that runs without privileges, and without a way to gain them."""
    as_nobody = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups") if os.geteuid() == 0 else ()
    return ["setpriv", *as_nobody, "--no-new-privs", shutil.which(program) or program, *arguments]


def _bwrap(users: int, image: RootImage, folder: Path) -> list[str]:
    """Return the command line that makes the other namespaces of a user namespace, and waits in them."""
    mounts = list(image.mounts)
    for name in ("/tmp", "/dev/shm"):
        mounts += ["--size", str(_TMP_BYTES), "--tmpfs", name]
    return [
        *("bwrap", "--userns", str(users), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup", "--hostname", "sandbox", "--uid", "1000", "--gid", "1000"),
        *("--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev", *mounts),
        *("--bind", str(folder), FOLDER, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER, "--"),
        *(image.shell, "-c", "echo ready; read _"),
    ]


async def _says(process: subprocess.Popen[bytes], word: str) -> None:
    """Wait for a word that a program prints. Raises ToolLost with what it prints instead."""
    line, pipe = b"", _pipe(process.stdout)
    while not line.endswith(b"\n"):
        await _readable(pipe.fileno())
        if not (more := os.read(pipe.fileno(), 4096)):
            break
        line += more
    if line != f"{word}\n".encode():
        raise ToolLost(line.decode(errors="replace").strip()[:500] or f"{process.args!r:.80} ended")


async def _exit(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child to end, and reap it."""
    if process.poll() is None:
        with _closing(os.pidfd_open(process.pid)) as ended:
            await _readable(ended)
        process.wait()


async def _readable(fd: int) -> None:
    """Wait until there is something to read, or until the process of a pidfd has ended."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    with _closing(os.dup(fd)) as own:  # another task may wait for the same
        loop.add_reader(own, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(own)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    """Close a file descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@dataclass(slots=True)
class TreeUse:
    """The use of processes and their descendants. `cpu_s` includes descendants that have ended and were reaped."""

    num_bytes: int = 0  # resident
    num_threads: int = 0
    cpu_s: float = 0.0
    deleted: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes of deleted files that are still open or mapped, by device and inode."""

    def num_deleted_bytes(self, device: int) -> int:
        """Return the bytes of deleted files on a device."""
        return sum(num_bytes for (own, _), num_bytes in self.deleted.items() if own == device)


def tree_use(*pids: int) -> TreeUse:
    """Return the use of processes and their descendants."""
    use, waiting = TreeUse(), list(pids)
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            use.num_bytes += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            use.cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S  # own, and of children that were reaped
            for thread in os.listdir(f"/proc/{pid}/task"):
                use.num_threads += 1
                waiting += _children(pid, thread)
            _add_deleted(use.deleted, pid)
    return use


def _add_deleted(deleted: dict[tuple[int, int], int], pid: int) -> None:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # another thread has closed it
            file = os.stat(f"/proc/{pid}/fd/{number}")
            if file.st_nlink == 0 and stat.S_ISREG(file.st_mode):
                deleted[file.st_dev, file.st_ino] = file.st_blocks * 512
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        if line.endswith(" (deleted)"):  # its descriptor may be closed
            addresses, _, _, device, inode = line.split(maxsplit=5)[:5]
            first, _, end = addresses.partition("-")
            major, _, minor = device.partition(":")
            key = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            deleted.setdefault(key, int(end, 16) - int(first, 16))


def _children(pid: int, thread: int | str) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]


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


def _own_base() -> tuple[int, Path]:
    """Make a folder for sandboxes, locked while this process lives; remove those of processes that died."""
    root = Path(tempfile.gettempdir()) / f"agentloop-sandboxes-{os.geteuid()}"
    root.mkdir(mode=0o711, exist_ok=True)
    if root.stat().st_uid != os.geteuid():
        raise InvalidRequest(f"{root} is somebody else's", param="tools")
    with (root / ".lock").open("w") as making:
        fcntl.flock(making, fcntl.LOCK_EX)  # or another process would remove ours before it is locked
        for left in root.iterdir():
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            with contextlib.suppress(OSError), _closing(os.open(left, flags)) as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _kill_stuck(left)
                remove_tree(left)
        base = Path(tempfile.mkdtemp(dir=root, prefix=f"{os.getpid()}-"))
        base.chmod(0o711)
        lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock, base


def _kill_stuck(base: Path) -> None:
    """Kill what a bwrap left behind that died with its worker while it was starting: it would wait for ever."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), _closing(os.pidfd_open(int(pid))) as pidfd:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command.split(b"\0")[0].endswith(b"bwrap") and f"{base}/".encode() in command:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def remove_tree(folder: Path) -> None:
    """Remove a folder that a policy wrote to, of any depth and any permissions; follows no link. Idempotent."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # what the policy has shut, or nested without end
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
