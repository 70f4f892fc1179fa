"""The link: who is let in, what ends it, and how soon the end of a peer is seen."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from agentloop_servers.weight_transfer.connection import (
    MAX_HELLO_BYTES,
    MAX_WAITING,
    Link,
    LinkLost,
    LinkTimeout,
    Listener,
    PassWire,
    connect,
)
from agentloop_servers.weight_transfer.messages import Done, EndPass, Hello, LaneBytes, Ready, Refuse
from agentloop_servers.weight_transfer.transports.base import LaneBroken

WAIT_S = 20.0
TOKEN = "right"


def hello(token: str = TOKEN) -> Hello:
    return Hello(token=token, rank=0, host="h", device="cpu", can_hold=True, num_receivers=1)


class Side:
    """A listener whose links are kept, and the workers' ends."""

    def __init__(self, hello_timeout_s: float = 0.3) -> None:
        self.condition = threading.Condition()
        self.links: list[Link] = []
        self.ends: list[Link] = []
        self.listener = Listener(
            "127.0.0.1", self.condition, lambda said: said.token == TOKEN, self.links.append, hello_timeout_s
        )

    def connect(self) -> Link:
        self.ends.append(connect(self.listener.address, threading.Condition(), WAIT_S))
        return self.ends[-1]

    def pair(self) -> tuple[Link, Link]:
        """A worker's end and the listener's, after the hello."""
        end = self.connect()
        end.send(hello())
        until(lambda: any(link.peek(Hello) for link in self.links))
        link = next(link for link in self.links if link.peek(Hello))
        link.pop(Hello)
        return end, link

    @contextlib.contextmanager
    def stranger(self) -> Iterator[socket.socket]:
        host, _, port = self.listener.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
            yield sock

    def close(self) -> None:
        self.listener.close()
        for link in self.links + self.ends:
            link.close()


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
    end, link = side.pair()
    link.send(EndPass(pass_id=1, checksums=list(range(300_000))))
    for number in range(5):
        end.send(LaneBytes(pass_id=number, body=b"x"))
    assert end.take(EndPass, deadline_at=deadline()).checksums[-1] == 299_999
    assert [link.take(LaneBytes, deadline_at=deadline()).pass_id for _ in range(5)] == list(range(5))


def test_a_message_of_another_kind_waits(side):
    end, link = side.pair()
    end.send(LaneBytes(pass_id=1, body=b"x"))
    end.send(Done())
    assert link.take(Done, deadline_at=deadline()) == Done()
    assert link.pop(LaneBytes) is not None
    assert link.pop(LaneBytes) is None


def test_a_wait_ends_with_its_deadline_or_its_check(side):
    end, _ = side.pair()
    with pytest.raises(LinkTimeout):
        end.take(Done, deadline_at=time.monotonic() + 0.05)

    def check() -> None:
        raise LaneBroken("enough")

    with pytest.raises(LaneBroken, match="enough"):
        end.take(Done, check=check)


def test_the_wrong_token_is_refused_and_dropped(side):
    end = side.connect()
    end.send(hello("wrong"))
    assert "token" in end.take(Refuse, deadline_at=deadline()).reason
    until(lambda: end.is_dead and side.links[0].is_dead)
    assert side.links[0].peek(Hello) is None


def test_a_later_hello_must_have_the_right_token_too(side):
    end, link = side.pair()
    end.send(hello("of an earlier offer"))
    until(lambda: link.is_dead)
    assert link.peek(Hello) is None


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
        len(body := msgspec.msgpack.encode(Ready())).to_bytes(4, "big") + body,
        os.urandom(10_000),
    ],
    ids=["nothing", "a byte", "http", "too long", "no msgpack", "broken off", "empty", "no hello", "noise"],
)
def test_a_stranger_is_dropped_and_disturbs_nobody(side, said):
    end, link = side.pair()
    with side.stranger() as sock:
        sock.sendall(said)
        sock.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    end.send(Done())
    assert link.take(Done, deadline_at=deadline()) == Done()
    until(lambda: side.links[1].is_dead)
    assert not link.is_dead


def test_strangers_who_leave_again_leave_nothing_behind(side):
    for _ in range(20):
        with side.stranger():
            pass
    end, link = side.pair()
    until(lambda: sum(not known.is_dead for known in side.links) == 1)
    assert not end.is_dead
    assert not link.is_dead


def test_the_end_of_a_peer_is_seen_while_waiting(side):
    end, link = side.pair()
    timer = threading.Timer(0.1, link.close)
    timer.start()
    began_at = time.monotonic()
    with pytest.raises(LinkLost):
        end.take(Done, deadline_at=deadline())
    assert time.monotonic() - began_at < WAIT_S / 2
    timer.join()
    with pytest.raises(LinkLost):
        end.send(Done())


def test_what_was_said_before_the_end_is_still_heard(side):
    end, link = side.pair()
    for _ in range(10):
        end.send(LaneBytes(pass_id=0, body=b"x"))
    link.send(Refuse(reason="because"))
    link.close()
    assert end.take(Refuse, deadline_at=deadline()).reason == "because"


def test_a_peer_that_floods_is_cut_off(side):
    end, link = side.pair()
    with contextlib.suppress(LinkLost):
        for _ in range(MAX_WAITING + 10):
            end.send(Ready())
    until(lambda: link.is_dead)
    assert "more than it may" in link.death


def test_a_wire_skips_the_messages_of_earlier_passes(side):
    end, link = side.pair()
    end.send(LaneBytes(pass_id=1, body=b"old"))
    end.send(LaneBytes(pass_id=2, body=b"new"))
    wire = PassWire(link, 2, lambda: None)
    assert wire.take() == b"new"
    end.close()
    with pytest.raises(LaneBroken):
        wire.take()
    with pytest.raises(LaneBroken):
        PassWire(end, 2, lambda: None).post(b"x")


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    for wrong in (address, "127.0.0.1", "no port:x"):
        with pytest.raises(LinkLost, match="no connection"):
            connect(wrong, threading.Condition(), 1.0)
