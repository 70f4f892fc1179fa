"""The `tcp` transport: unauthenticated connections, and attempts that fail in the middle."""

from __future__ import annotations

import os
import socket
import threading
import time

import msgspec
import pytest
import torch

from agentloop.engine.interface import TensorInfo
from agentloop_servers.net.tls import certificate, serving, trusting
from agentloop_servers.weight_transfer.layout import lay_out
from agentloop_servers.weight_transfer.protocol import TransportBroken
from agentloop_servers.weight_transfer.transports.base import Buffer
from agentloop_servers.weight_transfer.transports.tcp import (
    NUM_STREAMS,
    Connect,
    TcpReceiveTransport,
    TcpSendTransport,
    stripes,
)

CPU = torch.device("cpu")
LAYOUT = lay_out([TensorInfo("a", "uint8", (2**22,)), TensorInfo("b", "uint8", (3,))], bucket_bytes=2**22)


class LoopPeer:
    """A peer on this host, which stores its message for the other side."""

    connection_id = 1
    host = own_host = peer_host = "127.0.0.1"

    def __init__(self, pem: str = "") -> None:
        self._contexts = [serving(pem), trusting(pem)] if pem else [None, None]
        self.posted = threading.Event()
        self.is_over = False
        self.body = b""

    def post(self, body: bytes) -> None:
        self.body = body
        self.posted.set()

    def take(self) -> bytes:
        assert self.posted.wait(10.0)
        return self.body

    @property
    def tls(self):
        """Return the TLS context of the caller's side: the sender runs in a thread, the receiver in the test's."""
        return self._contexts[threading.current_thread() is threading.main_thread()]

    def check(self) -> None:
        if self.is_over:
            raise TransportBroken("another worker was lost")


@pytest.fixture(params=["in clear", "encrypted"])
def peer(request):
    return LoopPeer(certificate() if request.param == "encrypted" else "")


@pytest.fixture
def begun(peer):
    """Return a sender and a receiver in an attempt with a stranger in between, and the sender's buffers."""
    sender, receiver = TcpSendTransport(CPU), TcpReceiveTransport(CPU)
    buffers = [Buffer(torch.from_numpy(_noise(2**22)), b"") for _ in range(2)]
    beginning = threading.Thread(target=sender.begin, args=([peer], LAYOUT, buffers))
    beginning.start()
    port = msgspec.msgpack.decode(peer.take(), type=Connect).port
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    strangers[0].sendall(os.urandom(17))
    receiver.begin(peer, LAYOUT)
    beginning.join(10.0)
    assert not beginning.is_alive()
    yield sender, receiver, buffers
    for one in (sender, receiver, *strangers):
        one.close()


def send_for_ever(sender):
    for _ in range(100):
        sender.send(0, 0)
        sender.wait_free(0)


def _noise(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8).numpy()


def test_a_bucket_arrives_whole_and_small_ones_too(begun):
    sender, receiver, buffers = begun
    arriving = receiver.buckets()
    for bucket in range(2):
        sender.send(bucket, bucket)
        number, data = next(arriving)
        assert number == bucket
        assert torch.equal(data, buffers[bucket].data[: LAYOUT.bucket_sizes[bucket]])
    sender.finish()
    receiver.finish()


def test_a_token_may_be_lost_and_sent_again():
    peer, sender = LoopPeer(), TcpSendTransport(CPU)
    beginning = threading.Thread(target=sender.begin, args=([peer], LAYOUT, [Buffer(torch.empty(2**22), b"")] * 2))
    beginning.start()
    told = msgspec.msgpack.decode(peer.take(), type=Connect)
    for number in range(NUM_STREAMS):
        with socket.create_connection(("127.0.0.1", told.port)) as connection:
            time.sleep(0.2)  # the kernel's shortest retransmission timeout
            connection.sendall(told.token + bytes([number]))
    beginning.join(10.0)
    assert not beginning.is_alive()
    sender.close()


def test_a_receiver_that_hangs_up_breaks_the_attempt(begun):
    sender, receiver, _ = begun
    receiver.abort()
    with pytest.raises(TransportBroken, match="connection"):
        send_for_ever(sender)


def test_a_sender_that_gives_up_breaks_what_waits(begun):
    sender, receiver, _ = begun
    sender.abort()
    with pytest.raises(TransportBroken, match="connection"):
        next(receiver.buckets())
    with pytest.raises(TransportBroken, match="cancelled"):
        next(TcpReceiveTransport(CPU).buckets())


def test_a_wait_ends_when_another_worker_is_lost(begun, peer):
    sender, receiver, _ = begun
    peer.is_over = True
    with pytest.raises(TransportBroken, match="another worker"):
        next(receiver.buckets())
    # no process reads, so the kernel's buffers are full
    with pytest.raises(TransportBroken, match="another worker"):
        send_for_ever(sender)


def test_stripes_cover_a_bucket_of_any_size():
    for size in (0, 1, NUM_STREAMS - 1, NUM_STREAMS, 1001):
        assert [number for part in stripes(size) for number in range(size)[part]] == list(range(size))
