"""The files of the `shm` transport: permissions to map them, and their removal after use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from agentloop.engine.interface import TensorInfo
from agentloop.errors import WeightUpdateFailed
from agentloop_servers.weight_transfer.layout import lay_out
from agentloop_servers.weight_transfer.protocol import TransportBroken
from agentloop_servers.weight_transfer.transports.handshake import BuffersMapped, MapBuffers, post, take
from agentloop_servers.weight_transfer.transports.shared_memory import (
    SHM_FOLDER,
    SHM_PREFIX,
    ShmReceiveTransport,
    create_buffer,
    create_pair,
    unlink,
)

CPU = torch.device("cpu")
LAYOUT = lay_out([TensorInfo("a", "float32", (1000,))])


class LoopPeer:
    """Stores a message of one side until the other side receives it."""

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
    assert path.parent == Path(SHM_FOLDER)
    assert path.name.startswith(SHM_PREFIX)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    buffer.data.fill_(3)
    unlink([buffer])
    unlink([buffer])
    assert not path.exists()
    assert int(buffer.data.sum()) == 15_000


def test_no_room_is_an_error_and_leaves_no_file():
    before = set(Path(SHM_FOLDER).glob(f"{SHM_PREFIX}*"))
    with pytest.raises(WeightUpdateFailed, match="cannot allocate"):
        create_pair(2**50)
    assert not {
        path for path in set(Path(SHM_FOLDER).glob(f"{SHM_PREFIX}*")) - before if path.stat().st_size == 2**50
    }


def test_a_mapping_shows_what_the_sender_wrote():
    buffer, peer, transport = create_buffer(LAYOUT.largest_bucket), LoopPeer(), ShmReceiveTransport(CPU)
    post(peer, MapBuffers([buffer.export], LAYOUT.largest_bucket))
    transport.begin(peer, LAYOUT)
    unlink([buffer])
    assert take(peer, BuffersMapped).error is None
    post(peer, MapBuffers([buffer.export], LAYOUT.largest_bucket))  # unlinked, but still mapped
    transport.begin(peer, LAYOUT)
    assert take(peer, BuffersMapped).error is None
    transport.close()
    post(peer, MapBuffers([buffer.export], LAYOUT.largest_bucket))
    with pytest.raises(TransportBroken):
        transport.begin(peer, LAYOUT)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/dev/shm/other",
        f"/tmp/{SHM_PREFIX}x",
        f"/dev/shm/{SHM_PREFIX}/../../etc/passwd",
        f"/dev/shm/../shm/{SHM_PREFIX}x",
        f"{SHM_PREFIX}x",
        f"/dev/shm/{SHM_PREFIX}\0x",
        "",
    ],
)
def test_only_a_senders_own_files_are_mapped(path):
    peer = LoopPeer()
    post(peer, MapBuffers([path.encode()], 2**20))
    with pytest.raises(TransportBroken, match="does not belong to a buffer"):
        ShmReceiveTransport(CPU).begin(peer, LAYOUT)
    assert "does not belong to a buffer" in (take(peer, BuffersMapped).error or "")


def test_links_and_short_files_are_not_mapped(tmp_path):
    real, link = create_buffer(64), Path(SHM_FOLDER) / f"{SHM_PREFIX}test-link-{os.getpid()}"
    target = tmp_path / "target"
    target.write_bytes(bytes(2**20))
    link.symlink_to(target)
    try:
        for path in (os.fsdecode(real.export), str(link)):
            peer = LoopPeer()
            post(peer, MapBuffers([path.encode()], 2**20))
            with pytest.raises(TransportBroken):
                ShmReceiveTransport(CPU).begin(peer, LAYOUT)
    finally:
        link.unlink()
        unlink([real])


def test_buffers_smaller_than_a_bucket_are_refused():
    peer = LoopPeer()
    post(peer, MapBuffers([b"/dev/shm/agentloop-x"], 100))
    with pytest.raises(TransportBroken, match="smaller"):
        ShmReceiveTransport(CPU).begin(peer, LAYOUT)
