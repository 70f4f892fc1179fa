"""Which transport reaches a worker, decided from what the worker said of itself."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path

import torch

from agentloop_servers.weight_transfer.messages import Hello

CPU = "cpu"


class Transport(StrEnum):
    """How a sender's bytes reach a worker; `AUTO` chooses for each."""

    AUTO = "auto"
    NCCL = "nccl"  # another CUDA device, on any host
    IPC = "ipc"  # another process on the same CUDA device
    SHM = "shm"  # memory of the host that both run on


class Unreachable(Exception):
    """No transport, or not the one asked for, serves this worker. `str()` is one clear line."""


def host_name() -> str:
    """Equal for processes that see one /dev/shm: one boot of one host, and one container on it."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{socket.gethostname()}"


def device_name(device: torch.device) -> str:
    """ "cpu", or the CUDA device's uuid."""
    if device.type != "cuda":
        return CPU
    return str(torch.cuda.get_device_properties(device).uuid)


def choose(asked: Transport, sender_device: str, sender_host: str, hello: Hello) -> Transport:
    """The transport from a sender to the worker that said `hello`. Raises Unreachable."""
    is_same_host = sender_host == hello.host
    is_between_gpus = CPU not in (sender_device, hello.device)
    if is_between_gpus:
        needed = Transport.IPC if sender_device == hello.device else Transport.NCCL
    else:
        needed = Transport.SHM
    chosen = needed if asked is Transport.AUTO else asked
    worker = f"worker {hello.rank} (on {hello.device})"
    # Memory of the host serves any two processes on it, GPUs or not.
    if chosen is not needed and chosen is not Transport.SHM:
        raise Unreachable(f"{worker} would need the transport {needed}, not {chosen}; or write a directory instead")
    if chosen in (Transport.SHM, Transport.IPC) and not is_same_host:
        raise Unreachable(
            f"{worker} is on another host or in another container than the sender (on {sender_device}), where "
            f"{chosen} does not reach; between hosts weights go from GPU to GPU (nccl): write a directory instead"
        )
    return chosen
