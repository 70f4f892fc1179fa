"""Shared helpers of the push tests: tensors, receivers in threads, and processes that a test may kill."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from agentloop.engine.interface import PushSource, TensorInfo
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.layout import view
from agentloop_servers.weight_transfer.receiver import AttemptRestarted, Incoming, Receiver
from agentloop_servers.weight_transfer.sender import SendReport, WeightSender

WAIT_S = 60.0
CPU = torch.device("cpu")
BUCKET_BYTES = 2**16
Tensors = dict[str, torch.Tensor]


def weights(seed: int = 0, num_tensors: int = 9, size: int = BUCKET_BYTES // 8) -> Tensors:
    """Return float32 tensors, two of which fill a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{number}": torch.randn(4, size // 4, generator=generator) for number in range(num_tensors)}


def outgoing(tensors: Tensors, dtype: str = "float32") -> list[Outgoing]:
    return [
        Outgoing(TensorInfo(name, dtype, tuple(tensor.shape)), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    ]


def to_workers(source: PushSource, num_receivers: int) -> PushSource:
    return replace(source, num_receivers=num_receivers)


def collect(
    incoming: Incoming,
    on_bucket: Callable[[int], None] = lambda bucket: None,
    num_restarts: list[int] | None = None,
) -> Tensors:
    """Consume an update like an engine's worker."""
    while True:
        try:
            found: Tensors = {}
            for bucket, data in incoming.receive_attempt():
                on_bucket(bucket)
                for place in incoming.layout.in_bucket(bucket):
                    found[place.name] = view(data, place).clone()
            incoming.finish()
        except AttemptRestarted:
            if num_restarts is not None:
                num_restarts.append(1)
            continue
        return found


def same(found: Tensors, sent: Tensors, dtype: torch.dtype = torch.float32) -> bool:
    return found.keys() == sent.keys() and all(
        found[name].dtype is dtype and torch.equal(found[name], sent[name].to(dtype)) for name in sent
    )


class CountingSender(WeightSender):
    @property
    def num_connected(self) -> int:
        """Return the number of worker connections that completed the hello or were kept from the last update."""
        with self._condition:
            return sum(connection.is_known and not connection.is_dead for connection in self._connections)


class Stage:
    """A sender, receivers, and threads for all of them. Closes everything that it created."""

    def __init__(self) -> None:
        self._exits = contextlib.ExitStack()
        self._pool = self._exits.enter_context(ThreadPoolExecutor(16))

    def sender(self, **options: object) -> CountingSender:
        sender = CountingSender(**{"bucket_bytes": BUCKET_BYTES, "device": CPU, **options})
        self._exits.callback(sender.close)
        return sender

    def receiver(self, rank: int = 0, **options: object) -> Receiver:
        receiver = Receiver(CPU, rank, **options)
        self._exits.callback(receiver.close)
        return receiver

    def run(self, sender: WeightSender, timeout_s: float = WAIT_S, **options: object) -> Future[SendReport]:
        """Send with a long grace period unless a test sets it: processes start slowly on a busy machine."""
        return self._pool.submit(sender.run, timeout_s, **{"late_grace_s": WAIT_S, **options})

    def receive(self, receiver: Receiver, source: PushSource, **options: object) -> Future[Tensors]:
        def work() -> Tensors:
            return collect(receiver.open(source, can_hold=True, timeout_s=WAIT_S), **options)

        return self._pool.submit(work)

    def submit(self, function: Callable[..., object], *arguments: object, **options: object) -> Future:
        return self._pool.submit(function, *arguments, **options)

    def process(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            # -B: a process that may not write large files would leave truncated bytecode of a module.
            [sys.executable, "-B", "-m", "tests.servers.weight_transfer.push_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )

        def end() -> None:
            process.kill()
            process.wait(WAIT_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

        self._exits.callback(end)
        return process

    def close(self) -> None:
        self._exits.close()


def feed(process: subprocess.Popen[str], source: PushSource) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(source).decode() + "\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def num_connected(sender: WeightSender) -> int:
    return len(sender.connections.known)


def connection_threads() -> int:
    return sum(thread.name.startswith("weights-") for thread in threading.enumerate())


def buffer_files() -> set[Path]:
    return set(Path("/dev/shm").glob("agentloop-*"))


@contextlib.contextmanager
def leaving_no_files() -> Iterator[None]:
    """Check that no buffer file stays. Concurrent tests may use the folder, so files that vanish do not count."""
    yield
    left = buffer_files()
    give_up_at = time.monotonic() + WAIT_S
    while left := left & buffer_files():
        assert time.monotonic() < give_up_at, f"left behind: {left}"
        time.sleep(0.05)
