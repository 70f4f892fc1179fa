"""A push over shared memory from a sender to receivers, on threads: the received tensors, and each failure."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from agentloop.errors import CheckpointUnreadable, InvalidRequest, WeightUpdateFailed
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.protocol import TransportBroken
from agentloop_servers.weight_transfer.receiver import RECEIVE_TRANSPORTS, AttemptRestarted, Receiver
from agentloop_servers.weight_transfer.sender import SEND_TRANSPORTS
from agentloop_servers.weight_transfer.transports.handshake import MapBuffers, TransportKind
from agentloop_servers.weight_transfer.transports.shared_memory import ShmReceiveTransport, ShmSendTransport
from agentloop_servers.weight_transfer.transports.tcp import TcpReceiveTransport
from tests.servers.weight_transfer.pushing import (
    WAIT_S,
    Stage,
    collect,
    connection_threads,
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

NEVER_S = 5.0  # far less than any deadline here, far more than a notice takes


@pytest.fixture
def stage() -> Iterator[Stage]:
    with leaving_no_files():
        stage = Stage()
        yield stage
        stage.close()


class ZeroTransport(ShmReceiveTransport):
    """Succeeds and delivers zeros, like a transport that disabled itself."""

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        for bucket, data in super().buckets():
            yield bucket, torch.zeros_like(data)


class BrokenTransport(ShmSendTransport):
    """Fails at bucket 2 of the first `num_broken` attempts although no peer is lost."""

    num_broken = 1

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_left = self.num_broken

    def send(self, bucket: int, buffer: int) -> None:
        if bucket == 2 and self.num_left > 0:
            self.num_left -= 1
            raise TransportBroken("the wire is cut")
        super().send(bucket, buffer)


class AlwaysBrokenTransport(BrokenTransport):
    num_broken = 100


def test_several_workers_get_what_was_sent(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 3)
    assert source.tensors[0].name == "t0"
    arriving = [stage.receive(stage.receiver(rank), source) for rank in range(3)]
    report = stage.run(sender).result(WAIT_S)
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert report.num_bytes == sum(tensor.nbytes for tensor in sent.values())
    assert (report.transports, report.num_attempts, report.num_receivers) == (("shm",), 1, 3)
    assert report.failures == ()
    assert report.transfer_ms > 0


def test_equal_weights_have_equal_checksums_whatever_was_sent_before(stage):
    """Tensors of odd sizes leave gaps in the buckets, which are reused."""

    def digest(sent):
        sender, receiver = stage.sender(), stage.receiver(0)
        found = []
        for tensors in sent:
            source = to_workers(sender.offer(outgoing(tensors)), 1)
            sending = stage.run(sender)
            incoming = receiver.open(source, can_hold=True, timeout_s=WAIT_S)
            assert same(collect(incoming), tensors)
            sending.result(WAIT_S)
            found.append(incoming.digest)
        return found

    def odd(seed):
        return {name: tensor.view(-1)[: 100 + 1001 * n] for n, (name, tensor) in enumerate(weights(seed).items())}

    changed = {name: tensor + (name == "t8") for name, tensor in odd(0).items()}
    first, again, other = digest([odd(0), odd(0), changed])
    assert first == again != other
    assert digest([odd(1), odd(0)])[1] == first


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("num_tensors", [1, 9])
def test_what_goes_by_sockets_is_what_was_sent(stage, num_tensors, is_encrypted):
    sender = stage.sender(transport="tcp", is_encrypted=is_encrypted)
    receivers = [stage.receiver(rank) for rank in range(2)]
    for seed in range(2):
        sent = weights(seed, num_tensors)
        source = to_workers(sender.offer(outgoing(sent)), 2)
        arriving = [stage.receive(receiver, source) for receiver in receivers]
        assert stage.run(sender).result(WAIT_S).transports == ("tcp",)
        assert all(same(one.result(WAIT_S), sent) for one in arriving)


@pytest.fixture
def socket_bytes(monkeypatch) -> list[int]:
    """Record the sizes of all writes to data connections from now on."""
    sizes: list[int] = []
    sendall = socket.socket.sendall

    def counting(one: socket.socket, data: memoryview | bytes, *flags: int) -> None:
        sizes.append(len(data))
        sendall(one, data, *flags)

    monkeypatch.setattr(socket.socket, "sendall", counting)
    return sizes


@pytest.mark.parametrize("num_receivers", [1, 2, 4])
def test_what_goes_by_sockets_goes_once_to_a_host(stage, socket_bytes, num_receivers):
    sender = stage.sender(transport="tcp")
    receivers = [stage.receiver(rank) for rank in range(num_receivers)]
    for seed in range(2):
        sent = weights(seed, num_tensors=9 + seed)
        source = to_workers(sender.offer(outgoing(sent)), num_receivers)
        arriving = [stage.receive(receiver, source) for receiver in receivers]
        report = stage.run(sender).result(WAIT_S)
        assert (report.num_attempts, report.failures) == (1, ())
        assert all(same(one.result(WAIT_S), sent) for one in arriving)
        assert report.num_bytes <= sum(socket_bytes) < 1.1 * report.num_bytes
        socket_bytes.clear()


class BlindMapping(ShmReceiveTransport):
    """Cannot open another worker's files, as in a separate container."""

    def _map(self, setup: MapBuffers) -> list[torch.Tensor]:
        raise FileNotFoundError


class BlindTransport(TcpReceiveTransport):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._mapped = BlindMapping(device)


def test_a_worker_that_cannot_map_its_hosts_memory_has_sockets_of_its_own(stage, socket_bytes):
    sent, sender = weights(), stage.sender(transport="tcp")
    source = to_workers(sender.offer(outgoing(sent)), 3)
    blind = {**RECEIVE_TRANSPORTS, TransportKind.TCP: BlindTransport}
    first = stage.receive(stage.receiver(0), source)
    until(lambda: num_connected(sender) == 1)
    arriving = [
        first,
        *[stage.receive(stage.receiver(1, transports=one), source) for one in (blind, RECEIVE_TRANSPORTS)],
    ]
    report = stage.run(sender).result(WAIT_S)
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert (report.num_attempts, report.num_receivers) == (1, 3)
    assert 2 * report.num_bytes <= sum(socket_bytes) < 2.2 * report.num_bytes


@pytest.mark.slow
def test_without_room_in_shared_memory_each_worker_has_sockets_of_its_own(stage, socket_bytes):
    sent, sender = weights(), stage.sender(transport="tcp")
    first = stage.process("receive", "-1")
    source = to_workers(sender.offer(outgoing(sent)), 2)
    resource.prlimit(first.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    feed(first, source)
    until(lambda: num_connected(sender) == 1)
    arriving = stage.receive(stage.receiver(), source)
    report = stage.run(sender).result(WAIT_S)
    assert same(arriving.result(WAIT_S), sent)
    assert line(first) == "done"
    assert (report.num_attempts, report.num_receivers) == (1, 2)
    assert 2 * report.num_bytes <= sum(socket_bytes)


def test_workers_may_come_before_or_after_the_run_begins(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    early = stage.receive(stage.receiver(0), source)
    time.sleep(0.1)
    running = stage.run(sender)
    time.sleep(0.1)
    assert not running.done()
    late = stage.receive(stage.receiver(1), source)
    assert running.result(WAIT_S).num_receivers == 2
    assert same(early.result(WAIT_S), sent)
    assert same(late.result(WAIT_S), sent)


def test_tensors_are_cast_to_what_was_offered(stage):
    sent, sender = weights(num_tensors=3), stage.sender()
    source = to_workers(sender.offer(outgoing(sent, "bfloat16")), 1)
    arriving = stage.receive(stage.receiver(), source)
    stage.run(sender).result(WAIT_S)
    assert same(arriving.result(WAIT_S), sent, torch.bfloat16)


def test_later_updates_use_the_same_links(stage):
    sender, receivers = stage.sender(), [stage.receiver(rank) for rank in range(2)]
    num_threads = []
    for seed in range(4):
        sent = weights(seed, num_tensors=4 + seed % 2)
        source = to_workers(sender.offer(outgoing(sent)), 2)
        arriving = [stage.receive(receiver, source) for receiver in receivers]
        assert stage.run(sender).result(WAIT_S).num_receivers == 2
        assert all(same(one.result(WAIT_S), sent) for one in arriving)
        num_threads.append(connection_threads())
    assert len(set(num_threads)) == 1
    sender.release()  # and they survive the creation of new buffers
    source = to_workers(sender.offer(outgoing(sent)), 2)
    arriving = [stage.receive(receiver, source) for receiver in receivers]
    assert stage.run(sender).result(WAIT_S).num_receivers == 2
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert connection_threads() == num_threads[-1]


def test_another_worker_may_join_and_one_may_be_gone_at_the_next_update(stage):
    sent, sender = weights(), stage.sender()
    kept, gone, new = (stage.receiver(rank) for rank in range(3))
    for receivers in ([kept, gone], [kept, new]):
        source = to_workers(sender.offer(outgoing(sent)), 2)
        arriving = [stage.receive(receiver, source) for receiver in receivers]
        assert stage.run(sender).result(WAIT_S).num_receivers == 2
        assert all(same(one.result(WAIT_S), sent) for one in arriving)
        gone.close()


def test_zeros_instead_of_the_data_are_refused(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    blind = stage.receive(
        stage.receiver(0, transports={**RECEIVE_TRANSPORTS, TransportKind.SHM: ZeroTransport}), source
    )
    sound = stage.receive(stage.receiver(1), source)
    report = stage.run(sender).result(WAIT_S)
    with pytest.raises(CheckpointUnreadable, match="5 of 5 buckets changed in transit"):
        blind.result(WAIT_S)
    assert same(sound.result(WAIT_S), sent)
    assert report.num_receivers == 1
    assert "changed in transit" in report.failures[0]


def test_an_update_that_reaches_nobody_fails(stage):
    sender = stage.sender()
    source = to_workers(sender.offer(outgoing(weights())), 1)
    arriving = stage.receive(
        stage.receiver(0, transports={**RECEIVE_TRANSPORTS, TransportKind.SHM: ZeroTransport}), source
    )
    with pytest.raises(WeightUpdateFailed, match=r"no worker can receive the weights.*changed in transit"):
        stage.run(sender).result(WAIT_S)
    with pytest.raises(CheckpointUnreadable):
        arriving.result(WAIT_S)


def test_one_phase_bytes_flow_only_once_all_have_committed(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    opening = [
        stage.submit(stage.receiver(rank).open, source, can_hold=rank == 0, timeout_s=WAIT_S) for rank in range(2)
    ]
    started = threading.Event()
    running = stage.run(sender, before_attempt=started.set)
    first, second = (one.result(WAIT_S) for one in opening)
    assert first.is_one_phase
    assert second.is_one_phase
    arriving = [stage.submit(collect, first)]
    time.sleep(0.3)
    assert not started.is_set()
    arriving.append(stage.submit(collect, second))
    assert running.result(WAIT_S).num_receivers == 2
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert first.transfer_ms > 0


def test_one_phase_a_worker_that_gives_up_does_not_hold_the_others(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    opening = [
        stage.submit(stage.receiver(rank).open, source, can_hold=False, timeout_s=WAIT_S) for rank in range(2)
    ]
    running = stage.run(sender)
    first, second = (one.result(WAIT_S) for one in opening)
    arriving = stage.submit(collect, first)
    second.fail("its pause failed")
    report = running.result(WAIT_S)
    assert same(arriving.result(WAIT_S), sent)
    assert (report.num_receivers, report.num_attempts) == (1, 1)
    assert "its pause failed" in report.failures[0]


def test_a_broken_pass_is_sent_again_and_every_load_is_called_once_a_pass(stage):
    sent, loads, num_begun, num_restarts = weights(), [], [], []
    sender = stage.sender(transports={**SEND_TRANSPORTS, TransportKind.SHM: BrokenTransport})

    def load(name: str) -> torch.Tensor:
        loads.append(name)
        return sent[name]

    items = [Outgoing(item.info, lambda name=item.info.name: load(name)) for item in outgoing(sent)]
    source = to_workers(sender.offer(items), 2)
    arriving = [stage.receive(stage.receiver(rank), source, num_restarts=num_restarts) for rank in range(2)]
    report = stage.run(sender, before_attempt=lambda: num_begun.append(1)).result(WAIT_S)
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert (report.num_attempts, report.num_receivers) == (2, 2)
    assert len(num_begun) == len(num_restarts) == 2
    assert loads == [*sent, *sent]


def test_a_lane_that_never_holds_ends_the_update(stage):
    sender = stage.sender(transports={**SEND_TRANSPORTS, TransportKind.SHM: AlwaysBrokenTransport})
    source = to_workers(sender.offer(outgoing(weights())), 1)
    arriving = stage.receive(stage.receiver(), source)
    with pytest.raises(WeightUpdateFailed, match=r"all 3 attempts failed.*the wire is cut"):
        stage.run(sender).result(WAIT_S)
    with pytest.raises(CheckpointUnreadable, match="the wire is cut"):
        arriving.result(WAIT_S)


def test_a_load_that_raises_ends_the_update_and_the_others_are_still_called(stage):
    sent, loads, sender = weights(), [], stage.sender()

    def load(name: str) -> torch.Tensor:
        loads.append(name)
        if name == "t4":
            raise RuntimeError("out of memory")
        return sent[name]

    items = [Outgoing(item.info, lambda name=item.info.name: load(name)) for item in outgoing(sent)]
    source = to_workers(sender.offer(items), 1)
    arriving = stage.receive(stage.receiver(), source)
    with pytest.raises(WeightUpdateFailed, match="out of memory"):
        stage.run(sender).result(WAIT_S)
    with pytest.raises(CheckpointUnreadable, match="out of memory"):
        arriving.result(WAIT_S)
    assert loads == list(sent)


def test_a_tensor_of_another_shape_than_offered_ends_the_update(stage):
    sent, sender = weights(num_tensors=2), stage.sender()
    items = outgoing(sent)
    items[1] = Outgoing(items[1].info, lambda: torch.zeros(1))  # would broadcast
    source = to_workers(sender.offer(items), 1)
    arriving = stage.receive(stage.receiver(), source)
    with pytest.raises(WeightUpdateFailed, match=r"t1 has shape \(1,\)"):
        stage.run(sender).result(WAIT_S)
    with pytest.raises(CheckpointUnreadable):
        arriving.result(WAIT_S)


def test_a_worker_that_fails_in_the_middle_is_left_out(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    whole = stage.receive(stage.receiver(0), source)

    def fails() -> None:
        incoming = stage.receiver(1).open(source, can_hold=True, timeout_s=WAIT_S)
        for bucket, _ in incoming.receive_attempt():
            if bucket == 1:
                incoming.fail("no memory")
                return

    failing = stage.submit(fails)
    report = stage.run(sender).result(WAIT_S)
    failing.result(WAIT_S)
    assert same(whole.result(WAIT_S), sent)
    assert (report.num_receivers, report.num_attempts) == (1, 2)
    assert "no memory" in report.failures[0]


@pytest.mark.parametrize("has_begun", [False, True], ids=["waiting", "sending"])
def test_cancel_from_another_thread_ends_both_sides_at_once(stage, has_begun):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 1 if has_begun else 2)
    reached, go_on = threading.Event(), threading.Event()

    def on_bucket(bucket: int) -> None:
        if bucket == 1:
            reached.set()
            go_on.wait(WAIT_S)

    arriving = stage.receive(stage.receiver(), source, on_bucket=on_bucket)
    running = stage.run(sender)
    if has_begun:
        assert reached.wait(WAIT_S)
    else:
        time.sleep(0.2)
    began_at = time.monotonic()
    sender.cancel("the trainer has changed its mind")
    with pytest.raises(WeightUpdateFailed, match="changed its mind"):
        running.result(WAIT_S)
    go_on.set()
    with pytest.raises(CheckpointUnreadable, match="changed its mind"):
        arriving.result(WAIT_S)
    assert time.monotonic() - began_at < NEVER_S


def test_after_a_cancel_the_next_update_works(stage):
    sent, sender, receiver = weights(), stage.sender(), stage.receiver()
    sender.offer(outgoing(sent))
    sender.cancel("not yet")
    with pytest.raises(WeightUpdateFailed, match="not yet"):
        sender.run(WAIT_S)
    source = to_workers(sender.offer(outgoing(sent)), 1)
    arriving = stage.receive(receiver, source)
    assert stage.run(sender).result(WAIT_S).num_receivers == 1
    assert same(arriving.result(WAIT_S), sent)


def test_abort_from_another_thread_ends_the_receiver_and_spares_the_others(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    opening = [
        stage.submit(stage.receiver(rank).open, source, can_hold=True, timeout_s=WAIT_S) for rank in range(2)
    ]
    running = stage.run(sender)
    kept, aborted = (one.result(WAIT_S) for one in opening)
    ending = stage.submit(collect, aborted)  # waits because the other receiver is not ready
    time.sleep(0.2)
    began_at = time.monotonic()
    aborted.abort()
    aborted.abort()
    with pytest.raises(CheckpointUnreadable, match="cancelled"):
        ending.result(WAIT_S)
    assert time.monotonic() - began_at < NEVER_S
    arriving = stage.submit(collect, kept)
    assert running.result(WAIT_S).num_receivers == 1
    assert same(arriving.result(WAIT_S), sent)


def test_an_open_that_is_given_up_ends_at_once(stage):
    source = to_workers(stage.sender().offer(outgoing(weights())), 1)
    with pytest.raises(CheckpointUnreadable, match="cancelled"):
        stage.receiver().open(source, can_hold=True, timeout_s=WAIT_S, is_given_up=lambda: True)


def test_deadlines_end_both_sides(stage):
    sender = stage.sender()
    source = to_workers(sender.offer(outgoing(weights())), 2)
    arriving = stage.receive(stage.receiver(), source)
    until(lambda: connection_threads() > 1)
    time.sleep(0.2)
    with pytest.raises(WeightUpdateFailed, match="1 of 2 workers connected"):
        sender.run(0.3)
    with pytest.raises(CheckpointUnreadable, match="1 of 2 workers connected"):
        arriving.result(WAIT_S)
    source = to_workers(sender.offer(outgoing(weights())), 1)
    with pytest.raises(CheckpointUnreadable, match="no Accept message before the deadline"):
        stage.receiver().open(source, can_hold=True, timeout_s=0.2)


def test_an_offer_is_for_one_run(stage):
    sent, sender = weights(), stage.sender()
    with pytest.raises(WeightUpdateFailed, match="no offer is open"):
        sender.run(1.0)
    old = to_workers(sender.offer(outgoing(sent)), 1)
    sender.offer(outgoing(sent))
    with pytest.raises(CheckpointUnreadable, match="earlier offer"):
        stage.receiver().open(old, can_hold=True, timeout_s=WAIT_S)


def test_a_transport_that_cannot_serve_is_refused_by_name(stage):
    sender = stage.sender(transport="nccl")
    source = to_workers(sender.offer(outgoing(weights())), 1)
    arriving = stage.receive(stage.receiver(), source)
    with pytest.raises(WeightUpdateFailed, match="needs the transport shm, but nccl was requested"):
        stage.run(sender).result(WAIT_S)
    with pytest.raises(CheckpointUnreadable, match="needs the transport shm"):
        arriving.result(WAIT_S)


def test_impossible_requests_are_refused(stage):
    with pytest.raises(InvalidRequest, match="listen_host"):
        stage.sender(listen_host="0.0.0.0")
    source = stage.sender().offer(outgoing(weights()))
    with pytest.raises(CheckpointUnreadable, match="num_receivers"):
        stage.receiver().open(source, can_hold=True, timeout_s=1.0)


def test_closing_ends_everything(stage):
    before = connection_threads()
    sent, sender, receiver = weights(), stage.sender(), stage.receiver()
    source = to_workers(sender.offer(outgoing(sent)), 1)
    arriving = stage.receive(receiver, source)
    stage.run(sender).result(WAIT_S)
    arriving.result(WAIT_S)
    sender.close()
    sender.close()
    receiver.close()
    until(lambda: connection_threads() <= before)
    with pytest.raises(CheckpointUnreadable, match="could not connect"):
        receiver.open(source, can_hold=True, timeout_s=1.0)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_leaves_at_whatever_moment_the_others_get_everything(stage, seed):
    """Two of four workers leave at random moments in random ways; the second update uses kept connections."""
    moments = random.Random(seed)
    sender, receivers = stage.sender(), [stage.receiver(rank) for rank in range(4)]
    for _ in range(2):
        sent = weights(moments.randrange(1000))
        source = to_workers(sender.offer(outgoing(sent)), 4)

        def leaves(receiver: Receiver, bucket: int, delay_s: float, is_abort: bool, source=source) -> None:
            incoming = receiver.open(source, can_hold=True, timeout_s=WAIT_S)
            timer = threading.Timer(delay_s, incoming.abort)
            with contextlib.suppress(CheckpointUnreadable, AttemptRestarted):
                if is_abort:
                    timer.start()
                for number, _ in incoming.receive_attempt():
                    if number == bucket and not is_abort:
                        break
                if is_abort:
                    timer.join()
                else:
                    incoming.fail("enough")
            incoming.abort()
            timer.cancel()

        leaving = [
            stage.submit(
                leaves, receiver, moments.randrange(6), moments.choice((0, 0.001, 0.01)), moments.random() < 0.5
            )
            for receiver in receivers[:2]
        ]
        arriving = [stage.receive(receiver, source) for receiver in receivers[2:]]
        report = stage.run(sender).result(WAIT_S)
        assert all(same(one.result(WAIT_S), sent) for one in arriving)
        assert [one.result(WAIT_S) for one in leaving] == [None, None]
        assert report.num_receivers == 2
        assert len(report.failures) == 2


def test_a_worker_that_never_comes_does_not_hold_the_others(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 3)
    arriving = [stage.receive(stage.receiver(rank), source) for rank in range(2)]
    report = stage.run(sender, late_grace_s=0.3).result(WAIT_S)
    assert all(same(one.result(WAIT_S), sent) for one in arriving)
    assert (report.num_receivers, report.failures) == (
        2,
        ("1 of 3 workers did not connect within 0.3 s of the others",),
    )


def test_a_worker_that_comes_too_late_is_told_so(stage):
    sent, sender = weights(), stage.sender()
    source = to_workers(sender.offer(outgoing(sent)), 2)
    go_on = threading.Event()
    arriving = stage.receive(
        stage.receiver(0), source, on_bucket=lambda bucket: None if bucket else go_on.wait(WAIT_S)
    )
    running = stage.run(sender, late_grace_s=0.1)
    time.sleep(0.5)
    late = stage.receive(stage.receiver(1), source)
    time.sleep(0.2)
    go_on.set()
    assert running.result(WAIT_S).num_receivers == 1
    with pytest.raises(CheckpointUnreadable, match="started without this worker"):
        late.result(WAIT_S)
    assert same(arriving.result(WAIT_S), sent)


def test_the_others_do_not_wait_for_a_worker_that_the_transfer_can_do_without(stage):
    sent, sender = weights(), stage.sender()
    source = replace(to_workers(sender.offer(outgoing(sent)), 1), num_optional=2)
    optional = replace(source, is_optional=True)
    came = stage.receive(stage.receiver(1), optional)
    until(lambda: num_connected(sender) == 1)
    running = stage.run(sender)
    time.sleep(0.2)
    assert not running.done()  # required receivers are not replaced by optional ones
    needed = stage.receive(stage.receiver(0), source)
    report = running.result(WAIT_S)
    assert (report.num_receivers, report.failures) == (2, ())
    assert same(came.result(WAIT_S), sent)
    assert same(needed.result(WAIT_S), sent)


@pytest.mark.parametrize("moment", ["memory", "bucket", "done"])
def test_a_worker_that_hangs_at_whatever_moment_is_left_out(stage, moment):
    sent, sender = weights(), stage.sender(stall_s=0.3)
    source = to_workers(sender.offer(outgoing(sent)), 2)
    go_on = threading.Event()

    def hangs() -> None:
        incoming = stage.receiver(1).open(source, can_hold=True, timeout_s=WAIT_S)
        with contextlib.suppress(CheckpointUnreadable, AttemptRestarted):
            for bucket, _ in incoming.receive_attempt() if moment != "memory" else ():
                if moment == "bucket" and bucket == 1:
                    go_on.wait(WAIT_S)
            go_on.wait(WAIT_S)
            incoming.finish()

    hanging, whole = stage.submit(hangs), stage.receive(stage.receiver(0), source)
    report = stage.run(sender, late_grace_s=0.3).result(WAIT_S)
    assert same(whole.result(WAIT_S), sent)
    assert (report.num_receivers, report.num_attempts) == (1, 2 if moment == "bucket" else 1)
    (failure,) = report.failures
    assert failure.startswith("worker 1 of ")
    go_on.set()
    hanging.result(WAIT_S)
