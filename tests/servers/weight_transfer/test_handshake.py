"""Selection of the transport for each worker."""

from __future__ import annotations

import pytest
import torch

from agentloop_servers.weight_transfer.protocol import Hello
from agentloop_servers.weight_transfer.transports.handshake import (
    CPU,
    TransportKind,
    Unreachable,
    choose,
    device_name,
    host_name,
)


def hello(device: str, host: str = "here") -> Hello:
    return Hello(token="t", rank=3, host=host, device=device, can_hold=True, num_receivers=1)


@pytest.mark.parametrize(
    ("sender", "worker", "host", "chosen"),
    [
        ("gpu-0", "gpu-0", "here", TransportKind.IPC),
        ("gpu-0", "gpu-1", "here", TransportKind.NCCL),
        ("gpu-0", "gpu-1", "there", TransportKind.NCCL),
        ("gpu-0", CPU, "here", TransportKind.SHM),
        (CPU, "gpu-0", "here", TransportKind.SHM),
        (CPU, CPU, "here", TransportKind.SHM),
        (CPU, CPU, "there", TransportKind.TCP),
        (CPU, "gpu-1", "there", TransportKind.TCP),
        ("gpu-0", CPU, "there", TransportKind.TCP),
        ("gpu-0", "gpu-0", "there", TransportKind.TCP),
    ],
)
def test_auto_takes_the_shortest_way(sender, worker, host, chosen):
    assert choose(TransportKind.AUTO, sender, "here", hello(worker, host)) is chosen
    assert choose(chosen, sender, "here", hello(worker, host)) is chosen


@pytest.mark.parametrize(
    ("asked", "sender", "worker", "host", "reason"),
    [
        (TransportKind.IPC, "gpu-0", "gpu-0", "there", "needs the transport tcp, but ipc was requested"),
        (TransportKind.NCCL, CPU, "gpu-1", "here", "needs the transport shm, but nccl was requested"),
        (TransportKind.NCCL, "gpu-0", "gpu-0", "here", "needs the transport ipc, but nccl was requested"),
        (TransportKind.IPC, "gpu-0", "gpu-1", "here", "needs the transport nccl, but ipc was requested"),
        (TransportKind.SHM, "gpu-0", "gpu-1", "there", "another host"),
    ],
)
def test_what_cannot_be_reached_is_named(asked, sender, worker, host, reason):
    with pytest.raises(Unreachable, match=f"worker 3 .*{reason}"):
        choose(asked, sender, "here", hello(worker, host))


@pytest.mark.parametrize("asked", [TransportKind.SHM, TransportKind.TCP])
def test_memory_and_sockets_of_the_host_may_be_asked_for_between_gpus(asked):
    assert choose(asked, "gpu-0", "here", hello("gpu-1")) is asked


def test_names_are_the_same_each_time():
    assert host_name() == host_name()
    assert device_name(torch.device("cpu")) == CPU
