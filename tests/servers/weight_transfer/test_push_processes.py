"""A push between processes, some of which are killed during the transfer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import msgspec
import pytest

from agentloop.engine.interface import PushSource
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.protocol import Done, EndAttempt, Hello
from agentloop_servers.weight_transfer.sender import ReceiverGroup
from tests.servers.weight_transfer.pushing import (
    WAIT_S,
    Stage,
    feed,
    leaving_no_files,
    line,
    num_connected,
    outgoing,
    same,
    to_workers,
    until,
    weights,
)

pytestmark = pytest.mark.slow

NOTICE_S = 5.0  # within one second on an idle machine; a deadline would take a minute


@pytest.fixture
def stage() -> Iterator[Stage]:
    with leaving_no_files():
        stage = Stage()
        yield stage
        stage.close()


def test_the_survivors_of_a_killed_receiver_get_a_fresh_pass(stage):
    sent, sender = weights(), stage.sender()
    stalling, sound = stage.process("receive", "1"), stage.process("receive", "-1")
    source = to_workers(sender.offer(outgoing(sent)), 4)
    running = stage.run(sender)
    for process in (stalling, sound):
        feed(process, source)
    arriving = [stage.receive(stage.receiver(rank), source) for rank in range(2)]
    assert line(stalling) == "stalled"
    stalling.kill()
    killed_at = time.monotonic()
    report = running.result(WAIT_S)
    assert time.monotonic() - killed_at < NOTICE_S
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert line(sound) == "done"
    assert (report.num_attempts, report.num_receivers) == (2, 3)
    assert "was lost" in report.failures[0]


@pytest.mark.parametrize("is_killed", [True, False])
def test_without_its_hosts_first_a_worker_is_sent_to_directly(stage, is_killed):
    sent, sender = weights(), stage.sender(transport="tcp", stall_s=2.0)
    first = stage.process("receive", "1")
    source = to_workers(sender.offer(outgoing(sent)), 4)
    feed(first, source)
    until(lambda: num_connected(sender) == 1)
    arriving = [stage.receive(stage.receiver(rank), source) for rank in range(3)]
    running = stage.run(sender, late_grace_s=2.0)
    assert line(first) == "stalled"
    if is_killed:
        first.kill()
    report = running.result(WAIT_S)
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert (report.num_attempts, report.num_receivers) == (2, 3)
    assert ("was lost" if is_killed else "did not send Go") in report.failures[0]


def test_a_worker_killed_before_it_is_ready_is_left_out(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    waiting = stage.process("receive", "-1")
    feed(waiting, source)  # it sends a hello, and waits for the other receiver
    other = stage.receiver()
    running = stage.run(sender)
    while not num_connected(sender):
        assert waiting.poll() is None, "the worker has ended by itself"
        time.sleep(0.01)
    waiting.kill()
    waiting.wait(WAIT_S)
    arriving = stage.receive(other, source)
    report = running.result(WAIT_S)
    assert same(arriving.result(WAIT_S), sent)
    assert report.num_receivers == 1
    assert "was lost" in report.failures[0]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("stall_at", ["0", "5"])
def test_the_receivers_of_a_killed_sender_raise_at_once(stage, stall_at, transport):
    sender = stage.process("send", stall_at, transport)
    source = to_workers(msgspec.json.decode(line(sender), type=PushSource), 2)
    arriving = [stage.receive(stage.receiver(rank), source) for rank in range(2)]
    assert line(sender) == "stalled"
    sender.kill()
    killed_at = time.monotonic()
    for one in arriving:
        with pytest.raises(CheckpointUnreadable, match="connection"):
            one.result(WAIT_S)
    assert time.monotonic() - killed_at < NOTICE_S


class LeavingWorker(threading.Condition):
    """A connection and its condition: during a wait, its `Done` arrives, immediately followed by its end."""

    connection_id, peer_address, death = 1, "a host", ""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.known = self, [self]
        self.messages: list[object] = [Hello("token", 0, "host", "cpu", True, 1)]

    def wait(self, timeout: float | None = None) -> bool:
        self.messages.append(Done())
        self.death = "the peer closed the connection"
        return True

    def peek(self, kind: type) -> object | None:
        return next((message for message in self.messages if isinstance(message, kind)), None)

    def pop(self, kind: type) -> object | None:
        found = self.peek(kind)
        self.messages = [message for message in self.messages if message is not found]
        return found

    send = forget = close = Mock()


def test_a_worker_that_ends_right_after_its_last_word_has_come_through():
    offer = Mock(num_expected=1, cancelled=None)
    group = ReceiverGroup(offer, LeavingWorker(), time.monotonic() + WAIT_S, WAIT_S, WAIT_S)
    group.gather()
    group.confirm(EndAttempt(1, ()))
    assert group.failures == ()


def test_strangers_during_a_push_change_nothing(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    host, _, port = source.addresses[0].rpartition(":")
    with contextlib.ExitStack() as strangers:

        def intrude() -> None:
            sock = strangers.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
            sock.sendall(os.urandom(200))
            # and sends nothing
            strangers.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))

        intrude()
        with pytest.raises(CheckpointUnreadable, match="token"):
            stage.receiver(7).open(replace(source, token="guessed"), can_hold=True, timeout_s=WAIT_S)
        arriving = [
            stage.receive(stage.receiver(rank), source, on_bucket=lambda bucket: intrude()) for rank in range(2)
        ]
        report = stage.run(sender).result(WAIT_S)
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert (report.num_attempts, report.num_receivers) == (1, 2)


def test_whole_processes_on_both_sides(stage):
    sender, receiver = stage.process("send", "-1"), stage.process("receive", "-1")
    feed(receiver, to_workers(msgspec.json.decode(line(sender), type=PushSource), 1))
    assert line(receiver) == "done"
    assert line(sender) == "done"
