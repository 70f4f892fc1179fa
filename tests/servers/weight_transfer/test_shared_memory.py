"""The files of the `shm` lane: who may map what, and that names do not outlive their use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from agentloop.engine import TensorInfo
from agentloop.errors import WeightUpdateFailed
from agentloop_servers.weight_transfer.layout import lay_out
from agentloop_servers.weight_transfer.transports.base import TransportBroken
from agentloop_servers.weight_transfer.transports.handshake import BuffersMapped, MapBuffers, post, take
from agentloop_servers.weight_transfer.transports.shared_memory import (
    FOLDER,
    PREFIX,
    ShmReceiveTransport,
    create_buffer,
    create_pair,
    unlink,
)

CPU = torch.device("cpu")
LAYOUT = lay_out([TensorInfo("a", "float32", (1000,))])


class LoopWire:
    """What one side posts waits here for whoever takes it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    @property
    def connection_id(self) -> int:
        return 1

    def post(self, body: bytes) -> None:
        self.bodies.append(body)

    def take(self) -> bytes:
        return self.bodies.pop(0)

    def check(self) -> None: ...


def test_a_buffer_is_private_and_goes_with_its_name():
    buffer = create_buffer(5000)
    path = Path(os.fsdecode(buffer.export))
    assert path.parent == Path(FOLDER)
    assert path.name.startswith(PREFIX)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    buffer.data.fill_(3)
    unlink([buffer])
    unlink([buffer])
    assert not path.exists()
    assert int(buffer.data.sum()) == 15_000


def test_no_room_is_an_error_and_leaves_no_file():
    before = set(Path(FOLDER).glob(f"{PREFIX}*"))
    with pytest.raises(WeightUpdateFailed, match="no room"):
        create_pair(2**50)
    assert not {path for path in set(Path(FOLDER).glob(f"{PREFIX}*")) - before if path.stat().st_size == 2**50}


def test_a_mapping_shows_what_the_sender_wrote():
    buffer, wire, lane = create_buffer(LAYOUT.largest_bucket), LoopWire(), ShmReceiveTransport(CPU)
    post(wire, MapBuffers([buffer.export], LAYOUT.largest_bucket))
    lane.begin(wire, LAYOUT)
    unlink([buffer])
    assert take(wire, BuffersMapped).error is None
    post(wire, MapBuffers([buffer.export], LAYOUT.largest_bucket))  # without its name, but still mapped
    lane.begin(wire, LAYOUT)
    assert take(wire, BuffersMapped).error is None
    lane.close()
    post(wire, MapBuffers([buffer.export], LAYOUT.largest_bucket))
    with pytest.raises(TransportBroken):
        lane.begin(wire, LAYOUT)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/dev/shm/other",
        f"/tmp/{PREFIX}x",
        f"/dev/shm/{PREFIX}/../../etc/passwd",
        f"/dev/shm/../shm/{PREFIX}x",
        f"{PREFIX}x",
        f"/dev/shm/{PREFIX}\0x",
        "",
    ],
)
def test_only_a_senders_own_files_are_mapped(path):
    wire = LoopWire()
    post(wire, MapBuffers([path.encode()], 2**20))
    with pytest.raises(TransportBroken, match="not a buffer's"):
        ShmReceiveTransport(CPU).begin(wire, LAYOUT)
    assert "not a buffer's" in (take(wire, BuffersMapped).error or "")


def test_links_and_short_files_are_not_mapped(tmp_path):
    real, link = create_buffer(64), Path(FOLDER) / f"{PREFIX}test-link-{os.getpid()}"
    target = tmp_path / "target"
    target.write_bytes(bytes(2**20))
    link.symlink_to(target)
    try:
        for path in (os.fsdecode(real.export), str(link)):
            wire = LoopWire()
            post(wire, MapBuffers([path.encode()], 2**20))
            with pytest.raises(TransportBroken):
                ShmReceiveTransport(CPU).begin(wire, LAYOUT)
    finally:
        link.unlink()
        unlink([real])


def test_buffers_smaller_than_a_bucket_are_refused():
    wire = LoopWire()
    post(wire, MapBuffers([b"/dev/shm/agentloop-x"], 100))
    with pytest.raises(TransportBroken, match="smaller"):
        ShmReceiveTransport(CPU).begin(wire, LAYOUT)
