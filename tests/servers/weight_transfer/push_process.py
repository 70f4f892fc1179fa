"""One side of a push in a separate process, so that a test can kill it.

python -m tests.servers.weight_transfer.push_process receive <stall at bucket, or -1>  stdin: a PushSource as JSON
python -m tests.servers.weight_transfer.push_process send <stall at tensor, or -1> [<transport> <address> ...]
    stdout: a PushSource as JSON; at the end "done", and the SendReport as JSON. Then: tensors, bytes of each
"""

from __future__ import annotations

import sys
import time

import msgspec
import torch

from agentloop.engine.interface import PushSource, TensorInfo
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.layout import view
from agentloop_servers.weight_transfer.receiver import AttemptRestarted, Receiver
from agentloop_servers.weight_transfer.sender import WeightSender

TIMEOUT_S = 60.0
BUCKET_BYTES = 2**16
CPU = torch.device("cpu")


def say(text: str) -> None:
    print(text, flush=True)


def stall() -> None:
    say("stalled")
    time.sleep(TIMEOUT_S)


def receive(source: PushSource, stall_at: int) -> None:
    """Receive. Prints "done" after a complete update, or "stalled" at the bucket where it stops."""
    incoming = Receiver(CPU, 0).open(source, can_hold=True, timeout_s=TIMEOUT_S)
    while True:
        try:
            found = {}
            for bucket, data in incoming.receive_attempt():
                if bucket == stall_at:
                    stall()
                for place in incoming.layout.in_bucket(bucket):
                    found[place.name] = view(data, place).clone()
            incoming.finish()
        except AttemptRestarted:
            continue
        say("done")
        return


def send(
    stall_at: int,
    transport: str = "auto",
    address: str = "127.0.0.1",
    num_tensors: int = 12,
    num_bytes: int = BUCKET_BYTES,
) -> None:
    """Send. Prints the offer, then "stalled" at the tensor where it stops."""

    def load(number: int) -> torch.Tensor:
        if number == stall_at:
            stall()
        return torch.full((num_bytes // 4,), float(number))

    infos = [TensorInfo(f"t{number}", "float32", (num_bytes // 4,)) for number in range(num_tensors)]
    sender = WeightSender(listen_host=address, transport=transport, bucket_bytes=num_bytes, device=CPU)
    source = sender.offer([Outgoing(info, lambda n=n: load(n)) for n, info in enumerate(infos)])
    say(msgspec.json.encode(source).decode())
    report = sender.run(TIMEOUT_S, late_grace_s=TIMEOUT_S)  # starting processes takes long on a busy machine
    sender.close()
    say("done")
    say(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "receive":
        receive(msgspec.json.decode(sys.stdin.readline(), type=PushSource), int(sys.argv[2]))
    else:
        stall_at, *options = sys.argv[2:]
        send(int(stall_at), *options[:2], *map(int, options[2:]))
