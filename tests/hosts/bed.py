"""Hosts on one Linux machine: each has its own network, disk, processes, name and shared memory.

A host is an init process in its own namespaces; when it ends, all processes of the host end, as on a machine that
loses power. Its `eth0` leads through a `link.py` process to a switch, which is also a namespace: the machine's own
network is not touched. All hosts share the files of the checkout and the machine's software; `DISK`, which includes
`TMPDIR`, and `/dev/shm` are separate per host. The disk outlives a loss of power.

Needs root, `ip`, `unshare`, `nsenter` and `/dev/net/tun`; `why_not` returns what is missing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
STATE = Path("/run/agentloop-hosts")
DISK = Path("/mnt")
"""Mount point of each host's own disk."""

_NETWORK = "10.77.0"
_START_S = 20.0
_UNSHARE = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child=KILL", "--mount-proc"]
_INIT = "import os, signal; signal.signal(signal.SIGCHLD, lambda *_: None)\nwhile True:\n"
_INIT += "    try: os.waitpid(-1, 0)\n    except ChildProcessError: signal.pause()\n"


def why_not() -> str | None:
    """Return the reason why this machine cannot have test hosts; None if it can."""
    if os.geteuid() != 0:
        return "test hosts need root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"test hosts need {', '.join(missing)}"
    if not Path("/dev/net/tun").exists():
        return "test hosts need /dev/net/tun"
    probe = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return None if probe.returncode == 0 else f"no namespaces: {probe.stderr.decode().strip()}"


@dataclass
class Host:
    """One host of a bed."""

    number: int
    namespace: str
    environment: dict[str, str]
    link: subprocess.Popen[str]
    folder: Path
    """The bed's folder, with `disk-NUMBER` and `names`."""
    init: subprocess.Popen[bytes] | None = None
    init_pid: int = 0
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{_NETWORK}.{10 + self.number}"

    def power_on(self) -> None:
        """Start the host, with its existing disk."""
        mounts = ["mount --make-rprivate /", "mount -t tmpfs -o size=2g tmpfs /dev/shm"]
        mounts += [f"mount --bind {self.folder}/disk-{self.number} {DISK}"]
        mounts += [f"mount --bind {self.folder}/names /etc/hosts"]
        init = shlex.join([sys.executable, "-Ic", _INIT])
        inside = " && ".join([f"hostname host{self.number}", *mounts, f"touch /dev/shm/up && exec {init}"])
        self.init = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *_UNSHARE, "bash", "-c", inside],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        (self.folder / f"init-{self.number}").write_text(str(self.init.pid))
        self.init_pid = _child_of(self.init.pid)
        deadline_at = time.monotonic() + _START_S
        while not Path(f"/proc/{self.init_pid}/root/dev/shm/up").exists():
            assert time.monotonic() < deadline_at, f"host {self.number} did not start"
            time.sleep(0.05)

    def start(self, command: Sequence[str], log: Path | None = None) -> subprocess.Popen[str]:
        """Start a command on the host, in the checkout; its output goes to `log`, or to a pipe."""
        inside = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(command)}"
        entered = ["nsenter", "-t", str(self.init_pid), "-n", "-p", "-m", "-u", "-i", "--", "bash", "-c", inside]
        with contextlib.ExitStack() as stack:
            output = subprocess.PIPE if log is None else stack.enter_context(log.open("a"))
            process = subprocess.Popen(
                entered, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, env=self.environment
            )
        self.started.append(process)
        return process

    def run(self, command: Sequence[str], timeout_s: float = 60.0) -> str:
        """Run a command on the host and return its output. Raises CalledProcessError with the whole output."""
        process = self.start(command)
        output, errors = process.communicate(timeout=timeout_s)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, list(command), output, errors)
        return output

    def received_bytes(self) -> int:
        """Return the number of bytes that its interface has received."""
        (line,) = [line for line in self.run(["cat", "/proc/net/dev"]).splitlines() if "eth0:" in line]
        return int(line.partition(":")[2].split()[0])

    def order(self, order: str) -> None:
        """Change its link by an order of `link.py`."""
        assert self.link.stdin is not None
        assert self.link.stdout is not None
        self.link.stdin.write(order + "\n")
        self.link.stdin.flush()
        assert self.link.stdout.readline() == "done\n", f"the link did not {order}"

    def processes(self) -> Iterator[psutil.Process]:
        """Return its processes, seen from outside."""
        own = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # the process has ended
                if os.readlink(f"/proc/{process.pid}/ns/pid") == own:
                    yield process

    def kill(self) -> None:
        """Power off: all processes end at once. Idempotent."""
        if self.init is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init_pid, 9)
        self.init.wait(10.0)
        for process in self.started:
            process.kill()
            process.wait(10.0)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self.started.clear()


class Bed:
    """The hosts of a test. Use as a context manager; `add` a host at any time."""

    def __init__(self) -> None:
        self.name = f"alh{secrets.token_hex(2)}"
        self._folder = STATE / self.name
        self.hosts: list[Host] = []
        # the switch's address in the namespace `name`: the switch is not a host, and does not lose power
        self.address = f"{_NETWORK}.1"

    def __enter__(self) -> Bed:
        _remove_abandoned()
        self._folder.mkdir(parents=True)
        (self._folder / "owner").write_text(str(os.getpid()))
        names = "".join(f"{_NETWORK}.{10 + number} host{number}\n" for number in range(16))
        (self._folder / "names").write_text(f"127.0.0.1 localhost\n{names}")
        try:
            _ip("netns", "add", self.name)
            _ip("-n", self.name, "link", "add", "switch", "type", "bridge")
            _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "switch")
            _ip("-n", self.name, "link", "set", "switch", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, **environment: str) -> Host:
        """Start one more host, whose processes also have these environment variables."""
        number = len(self.hosts)
        namespace = f"{self.name}-{number}"
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        address = f"{_NETWORK}.{10 + number}/24"
        link = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.link", self.name, namespace, f"tap{number}", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert link.stdout is not None
        assert link.stdout.readline() == "up\n", "the link did not come up"
        disk = self._folder / f"disk-{number}"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(disk)], check=True)
        variables = {**os.environ, "TMPDIR": str(DISK), **environment}
        host = Host(number, namespace, variables, link, self._folder)
        self.hosts.append(host)
        host.power_on()
        return host

    def close(self) -> None:
        """Remove all hosts and the switch. Idempotent."""
        for host in self.hosts:
            host.kill()
            host.link.kill()
            host.link.wait(10.0)
            for pipe in (host.link.stdin, host.link.stdout):
                if pipe is not None:
                    pipe.close()
        _remove(self._folder)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _child_of(pid: int) -> int:
    """Return the process that `unshare` forks: the init of its namespace."""
    deadline_at = time.monotonic() + _START_S
    while not (found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < deadline_at, "a host's namespaces were not made"
        time.sleep(0.02)
    return int(found[0])


def _namespaces_of(name: str) -> Iterator[str]:
    for path in Path("/run/netns").glob(f"{name}*"):
        yield path.name


def _remove(folder: Path) -> None:
    for file in folder.glob("init-*"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(file.read_text()), 9)
    for namespace in _namespaces_of(folder.name):
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
    for disk in folder.glob("disk-*"):
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the beds of test runs that ended without cleanup."""
    for owner in STATE.glob("*/owner"):
        if not Path(f"/proc/{owner.read_text()}").exists():
            _remove(owner.parent)
