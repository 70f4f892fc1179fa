"""Pushes between processes over every transport that this machine has: figures, kills, and memory growth.

    python3 -m tests.gpu.push_transports [--gib 4] [--updates 20] [--transports ipc,nccl,auto,shm,tcp]

`ipc` needs one GPU, `nccl` two; `auto` is one push over ipc to a receiver on the sender's GPU and over nccl to
others; `shm` is GPU to CPU and CPU to GPU; `tcp` is CPU to GPU, where one receiver maps the other's memory. For
each: updates over kept connections, then a receiver killed midway (the other gets a second attempt), a further
update, and a sender killed midway (receivers raise at once). With `auto`, first the nccl receiver is killed, then
the ipc receiver. Every tensor is compared value by value, in addition to the transfer's own checksums. Prints a
table; exits with 1 on any failure. Takes about a minute per transport.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from agentloop.engine.interface import PushSource, TensorInfo
from agentloop.errors import AgentLoopError
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.layout import DEFAULT_BUCKET_BYTES, view
from agentloop_servers.weight_transfer.receiver import AttemptRestarted, Receiver
from agentloop_servers.weight_transfer.sender import WeightSender
from tests.benchmarks.report import finish, table

ANSWER_S = 180.0
NOTICE_S = 5.0
STALL_S = 120.0
ROWS, COLUMNS = 4096, 8192  # 64 MiB of bfloat16 per tensor
CPU_BUCKET_BYTES = 2 * ROWS * COLUMNS * 2  # several buckets for a rehearsal's few tensors
MAX_GROWTH_BYTES = 128 * 2**20


# Processes


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def send(device: torch.device, transport: str) -> None:
    """Read commands from stdin: {"value", "num_tensors", "stall_at"}.

    Tensors are float32 here, bfloat16 in transfer.
    """
    bucket_bytes = DEFAULT_BUCKET_BYTES if device.type == "cuda" else CPU_BUCKET_BYTES
    sender = WeightSender(device=device, transport=transport, bucket_bytes=bucket_bytes)
    held = torch.empty(ROWS, COLUMNS, device=device)

    def load(value: int, number: int, stall_at: int) -> torch.Tensor:
        if number == stall_at:
            say(stalled=True)
            time.sleep(STALL_S)
        return held.fill_((value + number) % 251)

    for line in sys.stdin:
        order = json.loads(line)
        value, stall_at = order["value"], order["stall_at"]
        items = [
            Outgoing(
                TensorInfo(f"t{number}", "bfloat16", (ROWS, COLUMNS)),
                lambda number=number, value=value, stall_at=stall_at: load(value, number, stall_at),
            )
            for number in range(order["num_tensors"])
        ]
        say(source=msgspec.to_builtins(sender.offer(items)))
        try:
            report = sender.run(ANSWER_S)
        except AgentLoopError as error:
            say(error=str(error))
            continue
        sender.release()
        say(report=msgspec.to_builtins(report), free=free_bytes(device))


def receive(device: torch.device, rank: int) -> None:
    """Read commands from stdin: {"source", "value", "stall_at"}."""
    receiver = Receiver(device, rank)
    for line in sys.stdin:
        order = json.loads(line)
        source = msgspec.convert(order["source"], PushSource)
        try:
            incoming = receiver.open(source, can_hold=True, timeout_s=ANSWER_S)
            num_wrong, num_attempts = consume(incoming, order["value"], order["stall_at"])
        except AgentLoopError as error:
            say(error=str(error), at=time.time())
            continue
        say(
            transport=incoming.transport,
            ms=incoming.transfer_ms,
            wrong=num_wrong,
            attempts=num_attempts,
            free=free_bytes(device),
        )


def consume(incoming: Any, value: int, stall_at: int) -> tuple[int, int]:
    """Return the number of tensors that differ from the sender's, and the number of attempts."""
    num_attempts = 0
    while True:
        num_attempts += 1
        equal = []
        try:
            for bucket, data in incoming.receive_attempt():
                if bucket == stall_at:
                    say(stalled=True)
                    time.sleep(STALL_S)
                for place in incoming.layout.in_bucket(bucket):
                    tensor = view(data, place)
                    number = int(place.name.removeprefix("t"))
                    equal.append((tensor == (value + number) % 251).all())
            num_wrong = len(equal) - int(torch.stack(equal).sum())
            incoming.finish()
        except AttemptRestarted:
            continue
        return num_wrong, num_attempts


# Script


class Child:
    """A process of this file, its commands and its answers."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.push_transports", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def order(self, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return dict(json.loads(self._answers.get(timeout=ANSWER_S)))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._answers.put(line)
        self._answers.put(json.dumps({"error": "the process ended"}))


@dataclass(frozen=True)
class Pairing:
    """The devices of one trial: the sender's, and the receivers', of which the first is killed."""

    transport: str
    sender: str
    receivers: tuple[str, ...]

    def way_to(self, receiver: str) -> str:
        """Return the transport that a receiver on this device has to report."""
        if self.transport != "auto":
            return self.transport
        return "ipc" if receiver == self.sender else "nccl"


class Trial:
    """One pairing's processes, and its failures."""

    def __init__(self, pairing: Pairing, num_tensors: int, *, is_alone: bool) -> None:
        self.pairing = pairing
        self.num_tensors = num_tensors
        self.is_alone = is_alone
        self.faults: list[str] = []
        self.sender = Child("--send", pairing.sender, pairing.transport)
        self.receivers = [Child("--receive", device, str(rank)) for rank, device in enumerate(pairing.receivers)]
        self.ways = [pairing.way_to(device) for device in pairing.receivers]

    def expect(self, is_right: bool, text: str) -> None:
        if not is_right:
            self.faults.append(text)

    def start(self, value: int, sender_stalls: int = -1, receiver_stalls: int = -1) -> None:
        self.sender.order(value=value, num_tensors=self.num_tensors, stall_at=sender_stalls)
        source = msgspec.convert(self.sender.answer()["source"], PushSource)
        for rank, receiver in enumerate(self.receivers):
            receiver.order(
                source=msgspec.to_builtins(replace(source, num_receivers=len(self.receivers))),
                value=value,
                stall_at=receiver_stalls if rank == 0 else -1,
            )

    def finish(self, num_attempts: int = 1) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        sent, taken = self.sender.answer(), [receiver.answer() for receiver in self.receivers]
        self.expect("report" in sent and sent["report"]["num_attempts"] == num_attempts, f"sender: {sent}")
        for one, way in zip(taken, self.ways, strict=True):
            is_right = one.get("wrong") == 0 and one["transport"] == way
            self.expect(is_right and one["attempts"] == num_attempts, f"receiver: {one}")
        return sent, taken

    def updates(self, num_updates: int) -> list[object]:
        """Run several updates. The first ones may warm caches; after that no memory may grow."""
        times, free = [], []
        for value in range(num_updates):
            self.start(value)
            sent, taken = self.finish()
            if self.faults:
                return [None] * 4
            times.append(sent["report"]["transfer_ms"])
            free.append([sent["free"], *(one["free"] for one in taken)])
        # Processes share a device, and one may measure before another has emptied its cache: use the maximum of a
        # few readings.
        warm, most = min(3, num_updates - 1), lambda looks: [max(column) for column in zip(*looks, strict=True)]
        growth = max(
            before - after for before, after in zip(most(free[warm:][:6]), most(free[warm:][-6:]), strict=True)
        )
        self.expect(
            not self.is_alone or growth < MAX_GROWTH_BYTES,
            f"memory grew by {growth:,} bytes over {num_updates} updates",
        )
        steady = sorted(times[1:] or times)[len(times[1:] or times) // 2]
        size = self.num_tensors * ROWS * COLUMNS * 2
        return [times[0], steady, size / steady / 1e6, max(growth, 0) / 2**20]

    def kill_receiver(self) -> float:
        """Kill the first receiver in its second bucket; the others must get everything in a second attempt."""
        self.start(100, receiver_stalls=1)
        self.expect(self.receivers[0].answer().get("stalled") is True, "the receiver did not stall")
        self.receivers.pop(0).kill()
        self.ways.pop(0)
        killed_at = time.time()
        self.finish(num_attempts=2)
        recovered_s = time.time() - killed_at
        self.start(101)
        self.finish()
        return recovered_s

    def kill_sender(self) -> float:
        self.start(102, sender_stalls=self.num_tensors // 2)
        self.expect(self.sender.answer().get("stalled") is True, "the sender did not stall")
        self.sender.kill()
        killed_at = time.time()
        answers = [receiver.answer() for receiver in self.receivers]
        noticed_s = max(one.get("at", float("inf")) - killed_at for one in answers)
        self.expect(noticed_s < NOTICE_S, f"a killed sender was noticed after {noticed_s:.1f} s: {answers}")
        return noticed_s

    def close(self) -> None:
        for child in (self.sender, *self.receivers):
            child.kill()


def pairings_here(wanted: list[str]) -> list[Pairing]:
    """Return the pairings that this machine can run. The parent process makes no CUDA context."""
    num_gpus = torch.cuda.device_count()
    others = tuple(f"cuda:{index}" for index in range(1, num_gpus))
    pairings = [
        Pairing("ipc", "cuda:0", ("cuda:0", "cuda:0")),
        Pairing("nccl", "cuda:0", others),
        *(Pairing("auto", "cuda:0", order) for order in ((*others, "cuda:0"), ("cuda:0", *others)) if others),
        Pairing("shm", "cuda:0", ("cpu", "cpu")),
        Pairing("shm", "cpu", ("cuda:0", "cuda:0")),
        Pairing("tcp", "cpu", ("cuda:0", "cuda:0")),
    ]
    if num_gpus == 0:
        pairings = [Pairing(transport, "cpu", ("cpu", "cpu")) for transport in ("shm", "tcp")]
    return [pairing for pairing in pairings if pairing.transport in wanted and pairing.receivers]


HEADS: tuple[str, ...] = ("how", "sender -> receivers", "first ms", "steady ms", "GB/s", "grew MiB")
HEADS += ("receiver lost s", "sender lost s")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--transports", default="ipc,nccl,auto,shm,tcp")
    parser.add_argument("--shared", action="store_true", help="others use the GPUs: memory may grow")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    num_tensors = max(4, int(options.gib * 2**30) // (ROWS * COLUMNS * 2))
    rows: list[list[object]] = []
    faults: list[str] = []
    for pairing in pairings_here(options.transports.split(",")):
        trial = Trial(pairing, num_tensors, is_alone=not options.shared)
        route = f"{pairing.sender} -> {','.join(pairing.receivers)}"
        rows.append([pairing.transport, route, *[None] * (len(HEADS) - 2)])
        try:
            rows[-1][2:6] = trial.updates(options.updates)
            if len(pairing.receivers) > 1 and not trial.faults:
                rows[-1][6] = trial.kill_receiver()
            if not trial.faults:
                rows[-1][7] = trial.kill_sender()
        except (queue.Empty, KeyError, OSError) as error:
            trial.faults.append(f"no answer: {error!r}")
        finally:
            trial.close()
        print(f"{route}: {rows[-1][2:]}", *(f"WRONG: {fault}" for fault in trial.faults), sep="\n  ", flush=True)
        faults += [f"{pairing.transport}, {route}: {fault}" for fault in trial.faults]
    shown = {"": table(HEADS, rows), "Faults": "\n".join(f"- WRONG: {fault}" for fault in faults) or "none"}
    finish(f"Transports, {options.gib:g} GiB", shown, {"rows": rows, "faults": faults}, options.out)
    return 1 if faults or not rows else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send(torch.device(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["--receive"]:
        receive(torch.device(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
