"""Sandboxes with bubblewrap on this host.

Isolated: separate user, process, network, mount, IPC and host name namespaces. No network, not even the host's
loopback; of the host's files only `/usr` and its libraries, read-only, or an image's files instead; no home
folders, `/etc` or `/var`; a writable folder `/task` and a small `/tmp`; no environment variables of the service; no
nested user namespaces, no capabilities, no new privileges. A seccomp filter (`confine.py`) refuses sockets that no
namespace isolates and memory that no limit counts.

Not isolated: the kernel is shared. The kernel limits the number of processes and the CPU time and memory of each
process (`setrlimit(2)`). Several times a second, a monitor adds up the memory and CPU time of all processes and the
size of the folder, including deleted files that are still open, and kills a sandbox that exceeds a limit. So a
limit can be exceeded briefly. In a full folder a command can only remove files. If the service runs as root,
commands run as the user `nobody`, because the kernel does not limit root's processes.

Each sandbox has three idle processes. `unshare` creates the user namespace and forbids nested ones. It also keeps
the `/proc` folder of the first process of `bwrap` open, so that a reused process id cannot select another process.
Commands enter through that folder (`nsenter`) with their limits set. All processes end with this process and with
`bwrap`. A limit kills the namespaces; the next command creates new ones with the same folder.

If the host does not support a part of this, `refusal` returns the reason and no command runs.
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
MIN_VERSION = (0, 8)  # the version of bubblewrap that the tests use
MAX_DEPTH = 64  # nesting of folders; a deeper folder counts as too many files
_TMP_BYTES = 64 << 20
_START_S = 20.0
_FIRST_LOOK_S, _LOOK_S = 0.05, 0.4  # interval of the monitor, first and later
_PIPE_READS = 16  # reads of 64 KiB: the maximum content of a pipe
_NUM_WAITING = 3  # threads of an idle sandbox: two of bwrap, and a shell
_NUM_SPARE = 8  # processes reserved for the idle ones and the next command
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
_NAMESPACES = ("user", "mount=mnt", "pid", "net", "ipc", "uts", "cgroup")  # nsenter's name=the kernel's name


@dataclass(frozen=True, slots=True)
class FolderUse:
    """The size of a folder. `is_too_deep` is True if folders are nested deeper than MAX_DEPTH."""

    num_files: int = 0
    num_bytes: int = 0
    is_too_deep: bool = False

    def excess(self, limits: SandboxLimits, began: FolderUse) -> str | None:
        """Return the limit that is exceeded, unless a command `began` with at least this size; None if none is."""
        is_deeper = self.is_too_deep and not began.is_too_deep
        if self.num_files > max(limits.max_files, began.num_files) or is_deeper:
            return f"{FOLDER} contains more than {limits.max_files} files, or folders deeper than {MAX_DEPTH}"
        if self.num_bytes > max(limits.max_folder_bytes, began.num_bytes):
            return f"{FOLDER} contains more than {limits.max_folder_bytes >> 20} MiB"
        return None


def refusal(base: Path | None = None) -> str | None:
    """Return the reason that this host cannot isolate commands, in one line; None if it can.

    `base` is the parent folder of the sandboxes' folders. Takes a few milliseconds.
    """
    if sys.platform != "linux":
        return f"bubblewrap needs Linux, this is {sys.platform}"
    if not confine.is_known(machine := os.uname().machine):
        return f"there is no seccomp filter for the machine type {machine}"
    for program, package in (("bwrap", "bubblewrap"), ("nsenter", "util-linux"), ("tar", "tar")):
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False).stdout
    installed = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if installed < MIN_VERSION:
        return f"{version.strip()} is too old: at least {'.'.join(map(str, MIN_VERSION))} is required"
    with tempfile.TemporaryDirectory(dir=base, prefix="probe-") as folder, ThreadPoolExecutor(1) as thread:
        _give(Path(folder))
        # In a thread: a loop may run in this one.
        problem = thread.submit(asyncio.run, _probe(Path(folder))).result()
    return None if problem is None else f"bwrap cannot isolate commands on this host: {' '.join(problem.split())}"


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
    """If this process is root, make the sandbox's user the owner of a folder."""
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)


class Bubblewrap(CommandSandboxes):
    """Creates sandboxes on this host. It owns their folders, which `close` removes."""

    def __init__(self, *, read_only: Sequence[str | Path] = (), images: str | Path | None = None) -> None:
        """`read_only` are folders of the host that are visible at the same path.

        `images` is a permanent folder for unpacked images; None: one that `close` removes. Raises InvalidRequest
        with param "tools" if the host cannot isolate commands.
        """
        super().__init__()
        self._read_only = [Path(path).resolve() for path in read_only]
        self._lock, self._base = _own_base()
        self._images = ImageStore(self._base / "images" if images is None else Path(images))
        if (problem := refusal(self._base)) is not None:
            self._remove()
            raise InvalidRequest(f"no sandbox can run on this host: {problem}", param="tools")

    async def make(self, source: SandboxSource, limits: SandboxLimits) -> BubblewrapSandbox:
        if source.network is not None:
            raise InvalidRequest(
                f"bubblewrap sandboxes have no network: the source must not set network {source.network!r}",
                param="network",
            )
        image = host_image() if source.image is None else await self._images.unpacked(source.image)
        try:
            folder = Path(tempfile.mkdtemp(dir=self._base, prefix="task-"))
        except OSError as error:
            raise ToolLost(f"cannot create a sandbox: {error}") from error
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
    """A sandbox: a folder, and the namespaces that use it while they exist."""

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
        if (excess := use.excess(self._limits, FolderUse())) is not None:  # do not wait for the monitor
            raise ToolError(excess)

    async def remove(self) -> None:
        self._unwatch()
        await self._namespaces.end()
        await asyncio.to_thread(remove_tree, self._folder)

    async def begin(self) -> None:
        """Create the namespaces if there are none: at the start, and after a limit has killed them.

        Also replace them if background processes leave no capacity for a command, even for one that kills them.
        """
        most = max(_NUM_WAITING, self._limits.max_processes - _NUM_SPARE)
        if not self._namespaces.is_alive or self._namespaces.usage().num_threads > most:
            await self._namespaces.end()
            await self._namespaces.start(self._image, self._folder)

    async def perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        status = await self._perform(program, limits, given, printed)
        if status == 1 and printed.begins_with(b"nsenter: "):  # the namespaces were being killed: retry in new ones
            await self._namespaces.end()
            printed.clear()
            status = await self._perform(program, limits, given, printed)
        return status

    async def _perform(self, program: Sequence[str], limits: SandboxLimits, given: bytes, printed: Printed) -> int:
        await self.begin()
        began = await asyncio.to_thread(folder_use, self._folder, limits)
        # In a full folder, allow removing files but no writes (RLIMIT_FSIZE is 0).
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
        """Monitor the sandbox's usage, and kill it at a limit. Continues while background processes run."""
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
    """The namespaces of a sandbox. They exist while their first process lives."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []  # `unshare` and `bwrap`
        self._entered: list[_Entered] = []
        self._first: int | None = None  # a pidfd of the first process inside; its death kills all others
        self._starting: asyncio.Future[None] | None = None
        self._ending = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        return self._first is not None and not _has_ended(self._first)

    @property
    def is_busy(self) -> bool:
        """True while a command or a background process runs."""
        return self.is_alive and self.usage().num_threads > _NUM_WAITING

    async def start(self, image: RootImage, folder: Path) -> None:
        """Create the namespaces. Raises ToolLost if the host refuses."""
        self._starting = asyncio.ensure_future(self._start(image, folder))
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(self._starting)
        except (OSError, TimeoutError, IndexError, ToolLost) as error:
            await self.end()
            raise ToolLost(str(error) or f"the sandbox did not start within {_START_S:g} s") from error

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
        """Start a program inside, with the limits that the kernel enforces. Raises ToolLost."""
        held = f"/proc/{self._processes[0].pid}/fd/3/ns"
        command = _chain(
            *("prlimit", f"--as={limits.max_memory_bytes}", f"--nproc={limits.max_processes}", "--core=0"),
            *(f"--fsize={limits.max_folder_bytes}", f"--cpu={max(1, round(limits.run_s))}", "--nofile=256"),
            *("nsenter", *(f"--{name.split('=')[0]}={held}/{name.split('=')[-1]}" for name in _NAMESPACES)),
            *("--preserve-credentials", "--", *program),
        )
        try:
            entered = _Entered([*_CONFINED, *command], given, printed)
        except OSError as error:
            raise ToolLost(f"cannot start a command: {error}") from error
        self._entered = [*(earlier for earlier in self._entered if earlier.is_open), entered]
        return entered

    def usage(self) -> TreeUse:
        """Return the usage of all processes."""
        running = (entered.process.pid for entered in self._entered if entered.process.returncode is None)
        return tree_use(*(process.pid for process in self._processes[-1:]), *running)

    def kill(self) -> None:
        """Kill all processes inside."""
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def end(self) -> None:
        """Kill all processes and wait until they have ended. Idempotent."""
        async with self._ending:
            if self._starting is not None:  # killing bwrap while it starts could leave a process that waits for it
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
                    process.kill()  # otherwise it is bwrap, which reaps the first process inside and ends
                await _exit(process)
                _pipe(process.stdin).close()
                _pipe(process.stdout).close()
            if self._first is not None:
                os.close(self._first)
            self._processes, self._entered, self._first, self._starting = [], [], None, None


class _Entered:
    """A program inside, with a reader of the output of the program and its children."""

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
        """True while the program runs or one of its background processes can still print."""
        return self.process.returncode is None or not self._pipe.closed

    def _read(self) -> bool:
        """Read once. Returns True if more output may be available."""
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
        """Wait until the program has ended, and return its status.

        Its background processes may continue to print.
        """
        await _exit(self.process)
        for _ in range(_PIPE_READS):
            if not self._read():
                break
        return self.process.returncode

    async def end(self) -> None:
        """Kill the program, wait for its end and stop reading."""
        self.process.kill()
        await _exit(self.process)
        while self._read():
            pass
        self._close()


def _popen(command: Sequence[str], given: int | IO[bytes], *fds: int) -> subprocess.Popen[bytes]:
    """Start a program whose output is a pipe.

    Do not call it in a thread that ends: the program would end with it.
    """
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
    """Return a command line that runs a program without privileges and without a way to gain them."""
    as_nobody = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups") if os.geteuid() == 0 else ()
    return ["setpriv", *as_nobody, "--no-new-privs", shutil.which(program) or program, *arguments]


def _bwrap(users: int, image: RootImage, folder: Path) -> list[str]:
    """Return the command line that creates the other namespaces in a user namespace and waits in them."""
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
    """Wait until a program prints a word. Raises ToolLost with any other output."""
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
    """Wait until a file descriptor is readable, or until the process of a pidfd has ended."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    with _closing(os.dup(fd)) as own:  # several tasks may wait for the same descriptor
        loop.add_reader(own, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(own)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
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
    """The usage of processes and their descendants. `cpu_s` includes descendants that were reaped."""

    num_bytes: int = 0  # resident memory
    num_threads: int = 0
    cpu_s: float = 0.0
    deleted: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes of deleted files that are still open or mapped, by device and inode."""

    def num_deleted_bytes(self, device: int) -> int:
        """Return the bytes of the deleted files on a device."""
        return sum(num_bytes for (own, _), num_bytes in self.deleted.items() if own == device)


def tree_use(*pids: int) -> TreeUse:
    """Return the usage of processes and their descendants."""
    use, waiting = TreeUse(), list(pids)
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            use.num_bytes += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            use.cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S  # including reaped children
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
        if line.endswith(" (deleted)"):  # a mapped file, whose descriptor may be closed
            addresses, _, _, device, inode = line.split(maxsplit=5)[:5]
            first, _, end = addresses.partition("-")
            major, _, minor = device.partition(":")
            key = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            deleted.setdefault(key, int(end, 16) - int(first, 16))


def _children(pid: int, thread: int | str) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]


def folder_use(folder: Path, limits: SandboxLimits) -> FolderUse:
    """Return the size of a folder. Does not follow links, and stops well beyond the limit of files."""
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
    """Create a folder for sandboxes, locked while this process lives. Removes the folders of ended processes."""
    root = Path(tempfile.gettempdir()) / f"agentloop-sandboxes-{os.geteuid()}"
    root.mkdir(mode=0o711, exist_ok=True)
    if root.stat().st_uid != os.geteuid():
        raise InvalidRequest(f"the folder {root} belongs to another user: remove it, or set TMPDIR", param="tools")
    with (root / ".lock").open("w") as making:
        fcntl.flock(making, fcntl.LOCK_EX)  # otherwise another process could remove our folder before it is locked
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
    """Kill processes of a bwrap that was killed with its worker while it started. They would wait forever."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), _closing(os.pidfd_open(int(pid))) as pidfd:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command.split(b"\0")[0].endswith(b"bwrap") and f"{base}/".encode() in command:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def remove_tree(folder: Path) -> None:
    """Remove a policy's folder of any depth and permissions, without following links. Idempotent."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # folders without permissions, or nested very deep
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
