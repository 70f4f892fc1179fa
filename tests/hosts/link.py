"""The link of a test host: frames between its `eth0` and the switch, delayed, lost or cut on order.

    python -m tests.hosts.link SWITCH HOST NAME ADDRESS/PREFIX

One TAP device is in the host's network namespace and one in the switch's, with this process between them, because
kernels without the netem scheduler have no other way to delay. Orders are lines on stdin, each answered by one line
on stdout: `delay MS` (each way), `loss PERCENT`, `cut`, `cut in`, `cut out` (one way: towards the host, from it)
and `heal`; `record FILE` writes all frames to a pcap file until `record` alone. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_FRAME_BYTES = 70_000
_PCAP_BEGIN = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, _MAX_FRAME_BYTES, 1)  # Ethernet
_PCAP_FRAME = struct.Struct("<IIII")  # seconds, microseconds, captured bytes, original bytes
_BATCH = 64  # frames of one side before the other side is polled

_libc = ctypes.CDLL(None, use_errno=True)


def in_namespace(name: str) -> None:
    """Move this process into a network namespace, by its name. Raises OSError."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"no namespace {name}")
    finally:
        os.close(descriptor)


def tap(name: str) -> int:
    """Return the descriptor of a new TAP device in the current namespace."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


class Link:
    """Two TAP devices, and the handling of frames between them."""

    def __init__(self, outer: int, inner: int) -> None:
        self._to = {outer: inner, inner: outer}
        self._outer = outer
        self._delay_s = 0.0
        self._loss = 0.0
        self._cut: frozenset[int] = frozenset()  # devices whose frames are dropped
        self._late: list[tuple[float, int, int, bytes]] = []  # time due, number, destination, frame
        self._num_frames = 0
        self._record: BinaryIO | None = None

    def obey(self, order: str) -> None:
        """Execute one order."""
        match order.split():
            case ["delay", ms]:
                self._delay_s = float(ms) / 1000
            case ["loss", percent]:
                self._loss = float(percent) / 100
            case ["heal"]:
                self._cut = frozenset()
            case ["record", *path]:
                if self._record is not None:
                    self._record.close()
                self._record = Path(path[0]).open("wb") if path else None  # noqa: SIM115 - until the next order
                if self._record is not None:
                    self._record.write(_PCAP_BEGIN)
            case ["cut"]:
                self._cut = frozenset(self._to)
            case ["cut", way]:
                self._cut = frozenset(side for side in self._to if (side == self._outer) == (way == "in"))
            case _:
                raise ValueError(f"no order: {order}")

    def take(self, side: int) -> None:
        """Read the frames that have arrived on one side."""
        for _ in range(_BATCH):
            try:
                frame = os.read(side, _MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            self._num_frames += 1
            if self._record is not None:
                self._record.write(_PCAP_FRAME.pack(int(time.time()), 0, len(frame), len(frame)) + frame)
            if side in self._cut or (self._loss and random.random() < self._loss):
                continue
            if self._delay_s:
                due_at = time.monotonic() + self._delay_s
                heapq.heappush(self._late, (due_at, self._num_frames, self._to[side], frame))
            else:
                _send(self._to[side], frame)

    def send_due(self) -> float | None:
        """Send the frames that are due; returns the seconds until the next one."""
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, side, frame = heapq.heappop(self._late)
            _send(side, frame)
        return self._late[0][0] - now if self._late else None


def _send(side: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue drops, like a switch
        os.write(side, frame)


def main() -> None:
    switch, host, name, address = sys.argv[1:]
    in_namespace(switch)
    outer = tap(name)
    run(f"ip link set {name} master switch up")
    in_namespace(host)
    inner = tap("eth0")
    run(f"ip addr add {address} dev eth0")
    run("ip link set eth0 up")
    gateway = address.rpartition(".")[0] + ".1"
    # nothing is reachable through it, but Ray asks the kernel for the default route
    run(f"ip route add default via {gateway}")
    link, poll = Link(outer, inner), select.poll()
    for descriptor in (0, outer, inner):
        poll.register(descriptor, select.POLLIN)
    print("up", flush=True)
    while True:
        wait_s = link.send_due()
        for descriptor, _ in poll.poll(None if wait_s is None else max(0.0, wait_s * 1000)):
            if descriptor != 0:
                link.take(descriptor)
                continue
            order = sys.stdin.readline()
            if not order:
                return  # the bed has ended
            link.obey(order)
            print("done", flush=True)


if __name__ == "__main__":
    main()
