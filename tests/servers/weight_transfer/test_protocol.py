"""The connection: authentication, errors that end it, and fast detection of a lost peer."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator

import msgspec
import pytest

from agentloop_servers.weight_transfer.protocol import (
    MAX_HELLO_BYTES,
    MAX_WAITING,
    Abandon,
    Connection,
    ConnectionLost,
    ControlConnections,
    Done,
    EndAttempt,
    Go,
    Hello,
    Peer,
    TransportBroken,
    TransportBytes,
)

WAIT_S = 20.0
TOKEN = "right"


def hello(token: str = TOKEN) -> Hello:
    return Hello(token=token, rank=0, host="h", device="cpu", can_hold=True, num_receivers=1)


class Side:
    """The sender's connections and the workers'."""

    def __init__(self, hello_timeout_s: float = 0.3) -> None:
        self.listening = ControlConnections(
            "weights-sender", threading.Condition(), lambda said: said.token == TOKEN, hello_timeout_s
        )
        self.address = self.listening.listen("127.0.0.1")
        self.workers = ControlConnections("weights-receiver", threading.Condition())

    @property
    def connections(self) -> list[Connection]:
        return self.listening.known

    def connect(self) -> Connection:
        return self.workers.connect(self.address, WAIT_S)

    def pair(self) -> tuple[Connection, Connection]:
        """Return a worker's end and the listener's, after the hello."""
        end = self.connect()
        end.send(hello())
        until(lambda: any(connection.peek(Hello) for connection in self.connections))
        connection = next(connection for connection in self.connections if connection.peek(Hello))
        connection.pop(Hello)
        return end, connection

    @contextlib.contextmanager
    def stranger(self) -> Iterator[socket.socket]:
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
            yield sock

    def close(self) -> None:
        self.listening.close()
        self.workers.close()


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    yield side
    side.close()


def until(condition) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def deadline() -> float:
    return time.monotonic() + WAIT_S


def test_messages_arrive_whole_and_in_order_both_ways(side):
    end, connection = side.pair()
    connection.send(EndAttempt(attempt_id=1, checksums=list(range(300_000))))
    for number in range(5):
        end.send(TransportBytes(attempt_id=number, body=b"x"))
    assert end.take(EndAttempt, deadline_at=deadline()).checksums[-1] == 299_999
    assert [connection.take(TransportBytes, deadline_at=deadline()).attempt_id for _ in range(5)] == list(range(5))


def test_a_message_of_another_kind_waits(side):
    end, connection = side.pair()
    end.send(TransportBytes(attempt_id=1, body=b"x"))
    end.send(Done())
    assert connection.take(Done, deadline_at=deadline()) == Done()
    assert connection.pop(TransportBytes) is not None
    assert connection.pop(TransportBytes) is None


def test_a_wait_ends_with_its_deadline_or_its_check(side):
    end, _ = side.pair()
    with pytest.raises(TimeoutError):
        end.take(Done, deadline_at=time.monotonic() + 0.05)

    def check() -> None:
        raise TransportBroken("enough")

    with pytest.raises(TransportBroken, match="enough"):
        end.take(Done, check=check)


def test_the_wrong_token_is_refused_and_dropped(side):
    end = side.connect()
    end.send(hello("wrong"))
    assert "token" in end.take(Abandon, deadline_at=deadline()).reason
    until(lambda: end.death)
    assert side.connections == []


def test_a_later_hello_must_have_the_right_token_too(side):
    end, connection = side.pair()
    end.send(hello("belongs to an earlier offer"))
    until(lambda: connection.death)
    assert connection.peek(Hello) is None


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        (MAX_HELLO_BYTES + 1).to_bytes(4, "big") + b"x" * 100,
        (5).to_bytes(4, "big") + b"\xff" * 5,
        (5).to_bytes(4, "big") + b"\xa3",
        (0).to_bytes(4, "big"),
        len(body := msgspec.msgpack.encode(Go())).to_bytes(4, "big") + body,
        os.urandom(10_000),
    ],
    ids=["nothing", "a byte", "http", "too long", "no msgpack", "broken off", "empty", "no Hello", "noise"],
)
def test_a_stranger_is_dropped_and_disturbs_nobody(side, said):
    end, connection = side.pair()
    with side.stranger() as sock:
        sock.sendall(said)
        sock.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    end.send(Done())
    assert connection.take(Done, deadline_at=deadline()) == Done()
    assert side.connections == [connection]
    assert not connection.death


def test_strangers_who_leave_again_leave_nothing_behind(side):
    for _ in range(20):
        with side.stranger():
            pass
    end, connection = side.pair()
    assert side.connections == [connection]
    assert not end.death
    assert not connection.death


def test_the_end_of_a_peer_is_seen_while_waiting(side):
    end, connection = side.pair()
    timer = threading.Timer(0.1, connection.close)
    timer.start()
    began_at = time.monotonic()
    with pytest.raises(ConnectionLost):
        end.take(Done, deadline_at=deadline())
    assert time.monotonic() - began_at < WAIT_S / 2
    timer.join()
    with pytest.raises(ConnectionLost):
        end.send(Done())


def test_what_was_said_before_the_end_is_still_heard(side):
    end, connection = side.pair()
    for _ in range(10):
        end.send(TransportBytes(attempt_id=0, body=b"x"))
    connection.send(Abandon(reason="because"))
    connection.close()
    assert end.take(Abandon, deadline_at=deadline()).reason == "because"


def test_a_peer_that_floods_is_cut_off(side):
    end, connection = side.pair()
    with contextlib.suppress(ConnectionLost):
        for _ in range(MAX_WAITING + 10):
            end.send(Go())
    until(lambda: connection.death)
    assert "messages that were not read" in connection.death


def test_a_peer_skips_the_messages_of_earlier_attempts(side):
    end, connection = side.pair()
    end.send(TransportBytes(attempt_id=1, body=b"old"))
    end.send(TransportBytes(attempt_id=2, body=b"new"))
    peer = Peer(connection, 2, lambda: None)
    assert peer.take() == b"new"
    end.close()
    with pytest.raises(TransportBroken):
        peer.take()
    with pytest.raises(TransportBroken):
        Peer(end, 2, lambda: None).post(b"x")


def test_nobody_listens(side):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    for wrong in (address, "127.0.0.1", "no port:x"):
        with pytest.raises(ConnectionLost, match="could not connect"):
            side.workers.connect(wrong, 1.0)


def test_a_close_amid_an_accept_leaves_no_socket_open():
    """In most of the hundred closes, a connection is being accepted."""
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        for number in range(100):
            listening = ControlConnections("amid", threading.Condition())
            host, _, port = listening.listen("127.0.0.1").rpartition(":")
            closing = threading.Timer(number / 50_000, listening.close)
            closing.start()
            for _ in range(3):
                with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                    pass
            closing.join()
        until(lambda: not any(thread.name == "amid" for thread in threading.enumerate()))
        gc.collect()
    assert not [str(one.message) for one in left]
