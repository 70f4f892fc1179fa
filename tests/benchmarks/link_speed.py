"""Speed of the hardware: an NCCL broadcast between two GPUs by torch.distributed, and a copy within one GPU.

    python -m tests.benchmarks.link_speed --out link.json

Without a second GPU, its row is left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from agentloop_servers.local import free_port
from tests.benchmarks.report import finish, table

NUM_BYTES = 1 << 30
NUM_ROUNDS = 20
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """In GB/s of payload; None: not measured. A copy counts each byte once."""

    broadcast_gbps: float | None
    copy_gbps: float | None


def measure() -> LinkSpeed:
    """Measure in separate processes, so that no GPU memory stays allocated. Takes about 15 s."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        return LinkSpeed(None, None)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    world_size, port = min(2, num_gpus), free_port("127.0.0.1")
    processes = [
        context.Process(target=_measure, args=(rank, world_size, port, theirs), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError(f"the link was not measured within {TIMEOUT_S:g} s")
        speed: LinkSpeed = ours.recv()
    finally:
        for process in processes:
            process.join(timeout=20)
            process.kill()
    return speed


def _measure(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    torch.cuda.set_device(rank)
    data = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    broadcast = None
    if world_size > 1:
        dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        broadcast = _gbps(lambda: dist.broadcast(data, src=0))
        dist.destroy_process_group()
    if rank == 0:
        other = torch.empty_like(data)
        pipe.send(LinkSpeed(broadcast, _gbps(lambda: other.copy_(data))))


def _gbps(move: Callable[[], object]) -> float:
    for _ in range(3):
        move()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(NUM_ROUNDS):
        move()
    end.record()
    end.synchronize()
    seconds = float(start.elapsed_time(end)) / 1000
    return NUM_BYTES * NUM_ROUNDS / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    speed = measure()
    rows = [("NCCL broadcast, GPU to GPU", speed.broadcast_gbps), ("copy within a GPU", speed.copy_gbps)]
    finish("Link", {"GB/s of payload": table(("", "GB/s"), rows)}, speed, options.out)


if __name__ == "__main__":
    main()
