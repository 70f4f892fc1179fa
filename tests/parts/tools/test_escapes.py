"""A hundred attempts to escape from a bubblewrap sandbox or to exceed its limits; all must fail.

An attempt prints `OUT` if it succeeds. Each runs as a command of a session in which an earlier command still runs
in the background, because a sandbox that outlives a command might be weaker.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from agentloop_tools.sandbox import SandboxLimits
from agentloop_tools.sandbox.bubblewrap import Bubblewrap, refusal

WHY_NOT = refusal()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"needs isolated commands (apt: bubblewrap): {WHY_NOT}")
LIMITS = SandboxLimits(
    run_s=3.0, max_memory_bytes=256 << 20, max_processes=40, max_folder_bytes=8 << 20, max_files=300
)
SECRET = "secret-of-the-host-7351"


def python(code: str) -> str:
    return f"python3 -c '{code}'"


def reads(*paths: str) -> dict[str, str]:
    """Return attempts to read files that are not in the sandbox."""
    return {f"read {path}": f'[ -n "$(cat {path} 2>/dev/null | head -c 1)" ] && echo OUT' for path in paths}


def writes(*paths: str) -> dict[str, str]:
    return {f"write {path}": f"(echo 1 > {path}) 2>/dev/null && echo OUT" for path in paths}


def libc(name: str, call: str) -> dict[str, str]:
    """Return a kernel or libc call that must fail."""
    code = f'import ctypes; c = ctypes.CDLL(None, use_errno=True); print("OUT" if {call} >= 0 else "refused")'
    return {name: python(code)}


CONNECT = 'import socket; s = socket.socket({kind}); s.settimeout(0.5); s.{call}; print("OUT")'
NETWORK = {
    "the host's loopback": "(exec 3<>/dev/tcp/127.0.0.1/$PORT) 2>/dev/null && echo OUT",
    "the host's loopback, IPv6": python(CONNECT.format(kind="socket.AF_INET6", call='connect(("::1", $PORT))')),
    "the internet": "(exec 3<>/dev/tcp/1.1.1.1/53) 2>/dev/null && echo OUT",
    "a name": "getent hosts localhost.localdomain example.com && echo OUT",
    "UDP": python(CONNECT.format(kind="socket.AF_INET, socket.SOCK_DGRAM", call='sendto(b"x", ("8.8.8.8", 53))')),
    "the cloud's metadata": "(exec 3<>/dev/tcp/169.254.169.254/80) 2>/dev/null && echo OUT",
    "raw sockets": python('import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print("OUT")'),
    "ICMP": python('import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("OUT")'),
    "an abstract socket of the host": python(
        'import socket; s = socket.socket(socket.AF_UNIX); s.connect("\\0$WORKER"); print("OUT")'
    ),
    "an interface of its own": "ip link add x type dummy && echo OUT",
    "its loopback taken down": "ip link set lo down && echo OUT",
    "the docker socket": "[ -S /var/run/docker.sock ] || [ -S /run/docker.sock ] && echo OUT",
    "the session bus": "ls /run/dbus /run/user/* 2>/dev/null | grep . && echo OUT",
    "more than its loopback": "tail -n +3 /proc/net/dev | grep -v ' lo:' && echo OUT",
    "another network namespace": "nsenter --net=/proc/1/ns/net true && ip link add y type dummy && echo OUT",
}
PROC = {
    **reads("/proc/kcore", "/proc/kmsg", "/proc/1/root/etc/passwd", "/proc/self/root/etc/shadow"),
    **reads("/proc/self/cwd/../etc/passwd", "/proc/1/cwd/../etc/passwd", "/proc/self/fd/3", "/proc/vmallocinfo"),
    **writes("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory"),
    **writes("/proc/sysrq-trigger", "/proc/sys/user/max_user_namespaces", "/proc/self/oom_score_adj_of_another"),
    **writes("/proc/sys/net/ipv4/ip_forward", "/proc/self/uid_map", "/proc/1/mem"),
    "the host's processes": "[ $(ls /proc | grep -c '^[0-9]') -gt 12 ] && echo OUT",
    "a process of the worker": "[ -d /proc/$WORKER ] && grep -q python /proc/$WORKER/cmdline && echo OUT",
    "the worker's secrets": f"grep -a {SECRET[:6]}[a-z] /proc/*/environ 2>/dev/null && echo OUT",
    "a signal to the first process": "kill -9 1 && sleep 0.2 && [ ! -d /proc/1 ] && echo OUT",
    "a signal to the worker": "kill -0 $WORKER 2>/dev/null && grep -q pytest /proc/$WORKER/cmdline && echo OUT",
    "the first process's memory": python('open("/proc/1/mem", "r+b", 0).write(b"x"); print("OUT")'),
    **libc("tracing the worker", "c.ptrace(16, $WORKER, 0, 0)"),
    "the last to be killed": "(echo -1000 > /proc/self/oom_score_adj) 2>/dev/null && echo OUT",
    "the first process's capabilities": "grep -E '^Cap(Inh|Prm|Eff)' /proc/*/status | grep -v ':.0*$' && echo OUT",
    "file descriptors of the host": "ls -l /proc/*/fd 2>&1 | grep -E '/proc/[0-9]+$|/work|/root' && echo OUT",
    "its cgroup's path": "grep -E ':/.+' /proc/self/cgroup | grep -v '/\\.\\.' | grep slice && echo OUT",
}
FILES = {
    **reads(
        "/etc/passwd",
        "/etc/shadow",
        "/root/.bashrc",
        "/var/log/dpkg.log",
        "/home/*",
        "$THIS",
        "/sys/class/dmi/id/*",
    ),
    **reads("/boot/*", "/run/*", "/mnt/*", "/opt/*", "/srv/*", "/tmp/agentloop-sandboxes-0/.lock", "/.dockerenv"),
    **writes("/usr/x", "/x", "/etc/x", "/usr/bin/python3", "/bin/sh", "/lib/x", "/etc/ld.so.preload", "/root/x"),
    "a file of the host's /tmp": "echo 1 > $HOST",
    "a link to a file of the host": "ln -sf /etc/passwd link; [ -s link ] && echo OUT",
    "a link up and out": "ln -sfn ../../../../../.. up; ls up/home up/root up/var 2>/dev/null | grep . && echo OUT",
    "a hard link out": "ln /etc/passwd hard 2>/dev/null && echo OUT",
    "a link through /proc": "ln -sfn /proc/1/root out; cat out/etc/shadow 2>/dev/null && echo OUT",
    "another sandbox's folder": "ls /task/../tmp/agentloop* /tmp/agentloop* 2>/dev/null | grep . && echo OUT",
    "removing the root": "rm -rf --no-preserve-root /usr/bin/env 2>/dev/null; [ -e /usr/bin/env ] || echo OUT",
    "renaming /usr": "mv /usr /usr2 2>/dev/null && echo OUT",
    "chmod of the system": "chmod u+w /usr 2>/dev/null && touch /usr/x 2>/dev/null && echo OUT",
}
PRIVILEGES = {
    "root by su": "su -c true 2>/dev/null < /dev/null && echo OUT",
    "a set-user-ID copy": "cp /bin/sh s; chmod 6755 s; ./s -p -c '[ $(id -u) = 0 ]' && echo OUT",
    "mount": "mount -t tmpfs x /mnt 2>/dev/null || mount -o remount,rw /usr 2>/dev/null && echo OUT",
    "umount": "umount /proc 2>/dev/null || umount -l /task 2>/dev/null && echo OUT",
    "a user namespace": "unshare -Ur true 2>/dev/null && echo OUT",
    "a mount namespace": "unshare -m true 2>/dev/null && echo OUT",
    "a network namespace": "unshare -n true 2>/dev/null && echo OUT",
    "the first process's namespaces": "nsenter -t 1 -U -m -p --preserve-credentials true 2>/dev/null && echo OUT",
    "a sandbox in the sandbox": "bwrap --ro-bind / / --unshare-user true 2>/dev/null && echo OUT",
    "chroot": "chroot / true 2>/dev/null && echo OUT",
    "capabilities": "grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/self/status | grep -v ':.0000000000000000' && echo OUT",
    "new privileges": "grep -q 'NoNewPrivs:.1' /proc/self/status || echo OUT",
    "file capabilities": "cp /bin/cat c; setcap cap_dac_override+ep c 2>/dev/null && echo OUT",
    **libc("setuid(0)", "c.setuid(0)"),
    **libc("bpf", "c.syscall(321, 0, 0, 0)"),
    **libc("loading a module", 'c.syscall(175, 0, 0, b"")'),
    **libc("reboot", "c.reboot(0)"),
    **libc("swapon", 'c.swapon(b"/task/x", 0)'),
    **libc("a hostname", 'c.sethostname(b"x", 1)'),
    **libc("the clock", 'c.settimeofday(b"\\0" * 16, 0)'),
    **libc("pivot_root", 'c.syscall(155, b"/task", b"/task")'),
    **libc("open by handle", 'c.open_by_handle_at(3, b"\\0" * 128, 0)'),
    **libc("higher limits", "c.prlimit(0, 6, (ctypes.c_ulong * 2)(100000, 100000), 0)"),
    **libc("real time", "c.sched_setscheduler(0, 1, (ctypes.c_int * 1)(50))"),
    **libc("a better priority", "c.setpriority(0, 0, -10)"),
}
DEVICES = {
    **reads("/dev/mem", "/dev/kmem", "/dev/vda", "/dev/sda", "/dev/kvm", "/dev/fuse", "/dev/loop-control"),
    **writes("/dev/x", "/dev/kmsg", "/dev/shm/../x"),
    "a device of its own": "mknod d b 254 0 2>/dev/null && echo OUT",
    "a terminal's input": python('import fcntl; fcntl.ioctl(0, 0x5412, b"x"); print("OUT")'),
    "graphics cards": "ls /dev/nvidia* /dev/dri 2>/dev/null | grep . && echo OUT",
}
MORE = {
    "a fork bomb": ":(){ :|:& };: 2>/dev/null; sleep 1; echo made",
    "a fork bomb out of its session": "f() { setsid bash -c 'f' & f; }; export -f f; f 2>/dev/null",
    "threads": python(
        "import threading, time\nfor n in range(200): threading.Thread(target=time.sleep, args=(9,)).start()"
        '\nprint("OUT")'
    ),
    "memory at once": python('x = bytearray(600 << 20); print("OUT")'),
    "memory bit by bit": "for n in 1 2 3 4 5 6; do "
    + python("x = bytearray(90 << 20); import time; time.sleep(9)")
    + " & done; wait; echo OUT",
    "a full folder": "while n=$((n+1)); do head -c 1M /dev/zero > $n; done 2>/dev/null; echo OUT",
    "one long file": "head -c 100M /dev/zero > long && echo OUT",
    "a full /tmp": "head -c 100M /dev/zero > /tmp/long 2>/dev/null && echo OUT",
    "a full /dev/shm": "head -c 100M /dev/zero > /dev/shm/long 2>/dev/null && echo OUT",
    "files without end": "while : > f$((n++)); do :; done; echo OUT",
    "folders without end": "while mkdir d && cd d; do :; done 2>/dev/null; echo OUT",
    "CPU": "timeout 60 yes > /dev/null; echo OUT",
    "output without end": "yes",
    "memory of files without a name": python(
        'import os\nfor n in range(100): os.write(os.memfd_create(str(n)), bytes(1 << 22))\nprint("OUT")'
    ),
    "deleted files that stay open": 'for n in 1 2 3 4 5 6 7 8 9; do eval "exec $((n+10))>big$n"; rm big$n; '
    "head -c 7M /dev/zero >&$((n+10)); done; sleep 2; echo OUT",
    "a hypervisor's sockets": python('import socket; socket.socket(40, socket.SOCK_STREAM); print("OUT")'),
    "the kernel's cryptography": python('import socket; socket.socket(38, 5, 0); print("OUT")'),
    "System V shared memory": python(
        'import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 28, 0o1600) >= 0: print("OUT")'
    ),
    "io_uring": python('import ctypes\nif ctypes.CDLL(None).syscall(425, 4, bytes(200)) >= 0: print("OUT")'),
    "system calls of the x32 ABI": python(
        'import ctypes\nif ctypes.CDLL(None).syscall(0x40000000 | 41, 40, 1, 0) >= 0: print("OUT")'
    ),
    "a core file": "ulimit -c unlimited 2>/dev/null && echo OUT",
}
ATTEMPTS = {**NETWORK, **PROC, **FILES, **PRIVILEGES, **DEVICES, **MORE}


def test_there_are_a_hundred() -> None:
    assert len(ATTEMPTS) >= 100


@pytest.fixture
async def host(monkeypatch) -> AsyncIterator[dict[str, object]]:
    """Return the host resources that an attempt may search for."""
    monkeypatch.setenv("AGENTLOOP_ADMIN_KEY", SECRET)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    with socket.socket(socket.AF_UNIX) as abstract, tempfile.NamedTemporaryFile() as file:
        abstract.bind(f"\0{os.getpid()}")
        abstract.listen()
        file.write(b"of the host")
        file.flush()
        port = server.sockets[0].getsockname()[1]
        yield {"PORT": port, "WORKER": os.getpid(), "THIS": __file__, "HOST": file.name}
        file.seek(0)
        assert file.read() == b"of the host"
    server.close()


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_an_escape_fails(name: str, host: dict[str, object]) -> None:
    command = ATTEMPTS[name]
    for variable, value in host.items():
        command = command.replace(f"${variable}", str(value))
    sandboxes = Bubblewrap()
    try:
        sandbox = await sandboxes.create(limits=LIMITS)
        await sandbox.exec("sleep 30 &")
        ran = await sandbox.exec(command)
        assert "OUT" not in ran.output.decode(errors="replace"), ran
        ran = await sandbox.exec("rm -rf /task/* 2>/dev/null; echo on", replace(LIMITS, run_s=60.0))
        assert ran.output == b"on\n", ran
    finally:
        await sandboxes.close()
