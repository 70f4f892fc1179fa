"""The side of a push that holds the weights: a trainer, or an engine worker that helps another one.

`WeightSender` listens from its first offer on. Workers say hello with the offer's token; `run` waits for all of
them, chooses a lane for each, and sends one pass after the other until one reaches every worker that is left. A
worker lost during a pass ends that pass for all, and the others get a fresh one. Links of workers that came through
stay open for the next update, and with them what their lanes keep.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from agentloop.engine import PushSource, TensorNames
from agentloop.errors import InvalidRequest, WeightUpdateFailed
from agentloop_servers.weight_transfer.broadcast import Outgoing, PackBuffers, Route, Sent, send_buckets
from agentloop_servers.weight_transfer.connection import Link, LinkLost, Listener
from agentloop_servers.weight_transfer.layout import DEFAULT_BUCKET_BYTES, Layout, lay_out
from agentloop_servers.weight_transfer.messages import AbandonPass, EndPass, Hello, Refuse, StartPass
from agentloop_servers.weight_transfer.receiver_group import SETTLE_S, Attendance
from agentloop_servers.weight_transfer.route import Transport, device_name
from agentloop_servers.weight_transfer.transports.base import LaneBroken, SendLane
from agentloop_servers.weight_transfer.transports.cuda_ipc import IpcSendLane
from agentloop_servers.weight_transfer.transports.nccl import NcclSendLane
from agentloop_servers.weight_transfer.transports.shared_memory import ShmSendLane

MAX_PASSES = 3
CLOSE_TIMEOUT_S = 30.0
SEND_LANES: Mapping[Transport, Callable[[torch.device], SendLane]] = {
    Transport.NCCL: NcclSendLane,
    Transport.IPC: IpcSendLane,
    Transport.SHM: ShmSendLane,
}


@dataclass(frozen=True, slots=True)
class SendReport:
    """What a transfer did. `failures` has a line for each worker that did not come through."""

    num_bytes: int  # to each worker
    transports: tuple[str, ...]
    transfer_ms: float  # of the pass that worked, from its first byte to its last
    num_passes: int
    num_receivers: int  # that have compared what arrived with what was sent
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Offer:
    token: str
    items: tuple[Outgoing, ...]
    layout: Layout


class WeightSender:
    """One process's offers of weights, one at a time. Blocking; run it in a thread."""

    def __init__(
        self,
        *,
        listen_host: str = "127.0.0.1",
        transport: str = Transport.AUTO,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | None = None,
        lanes: Mapping[Transport, Callable[[torch.device], SendLane]] = SEND_LANES,
    ) -> None:
        """`listen_host` is the address that workers reach this process at, so no wildcard.

        Tensors are packed on `device`: the current CUDA device by default, or the CPU if there is none.
        """
        if listen_host in ("", "0.0.0.0", "::"):
            raise InvalidRequest("listen_host must be an address that workers can connect to", param="listen_host")
        self._listen_host = listen_host
        self._transport = Transport(transport)
        self._bucket_bytes = bucket_bytes
        self._device = device if device is not None else _default_device()
        self._make_lane = lanes
        self._lanes: dict[Transport, SendLane] = {}
        self._buffers = PackBuffers(self._device)
        self._condition = threading.Condition()  # guards what follows, and is shared with the links
        self._listener: Listener | None = None
        self._links: list[Link] = []
        self._offer: _Offer | None = None
        self._cancelled: str | None = None
        self._run_lock = threading.Lock()
        self._num_passes = 0  # ever; numbers the passes

    @property
    def num_connected(self) -> int:
        """Links to workers, at this moment: those that have said hello, and those kept from the last update."""
        with self._condition:
            return sum(link.is_known and not link.is_dead for link in self._links)

    def offer(
        self,
        items: Sequence[Outgoing],
        names: TensorNames = TensorNames.CHECKPOINT,
        token: str | None = None,
    ) -> PushSource:
        """Open an offer for one `run`; an earlier one that was not run is void. Raises CheckpointUnreadable.

        Listens from the first call on. `token`: a fresh secret that several senders share, instead of a new one.
        """
        tensors = tuple(item.info for item in items)
        offer = _Offer(token or secrets.token_urlsafe(32), tuple(items), lay_out(tensors, self._bucket_bytes))
        with self._condition:
            if self._listener is None:
                self._listener = Listener(self._listen_host, self._condition, self._knows, self._add_link)
            self._offer, self._cancelled = offer, None
            return PushSource((self._listener.address,), offer.token, tensors, names)

    def run(self, timeout_s: float, before_pass: Callable[[], None] | None = None) -> SendReport:
        """Serve the open offer to the workers that its receivers were told of; `before_pass` runs before each pass.

        Returns if at least one worker came through. Raises WeightUpdateFailed. Either way the offer is used up.
        """
        with self._run_lock:
            group = Attendance(self._condition, time.monotonic() + timeout_s, lambda: self._cancelled)
            reason = "the transfer has begun without this worker"
            try:
                offer = self._open_offer()
                group.gather(lambda: self._links)
                group.welcome(self._transport, device_name(self._device), self._bucket_bytes)
                return self._send(offer, group, before_pass)
            except Exception as error:
                reason = str(error) if isinstance(error, WeightUpdateFailed) else f"the transfer failed: {error!r}"
                group.fail_rest(reason)
                if isinstance(error, WeightUpdateFailed):
                    raise
                raise WeightUpdateFailed(reason) from error
            finally:
                self._end_offer(reason)

    def cancel(self, reason: str) -> None:
        """End the offer, from any thread: a `run` in progress raises WeightUpdateFailed, or the next one does."""
        with self._condition:
            self._cancelled = self._cancelled or reason
            lanes = list(self._lanes.values())
            self._condition.notify_all()
        for lane in lanes:
            lane.abort()

    def release(self) -> None:
        """Give the pack buffers' memory back between updates; the next one takes it again."""
        with self._run_lock:
            self._buffers.free()

    def close(self) -> None:
        """End the offer, the links and the lanes, and stop listening. Idempotent.

        Raises WeightUpdateFailed if a `run` in another thread does not end, because a tensor's load hangs.
        """
        self.cancel("the sender was closed")
        if not self._run_lock.acquire(timeout=CLOSE_TIMEOUT_S):
            raise WeightUpdateFailed("the transfer does not end: a tensor's load hangs")
        try:
            with self._condition:
                listener, self._listener = self._listener, None
            if listener is not None:
                listener.close()
            with self._condition:
                links, self._links = self._links, []
            for link in links:
                link.close()
            while self._lanes:
                self._lanes.popitem()[1].close()
            self._buffers.free()
        finally:
            self._run_lock.release()

    def _send(self, offer: _Offer, group: Attendance, before_pass: Callable[[], None] | None) -> SendReport:
        """Pass after pass until one reaches everybody who is left."""
        broken = ""
        for num_passes in range(1, MAX_PASSES + 1):
            group.check("the weights were on their way")
            group.drop_lost()
            group.require_some()
            transports = tuple(sorted({str(worker.transport) for worker in group.left}))
            try:
                end, sent = self._pass(offer, group, before_pass)
            except LaneBroken as error:
                broken = str(error)
                group.drop_lost(SETTLE_S)
                continue
            group.finish(end)
            group.require_some()
            num_receivers = len(group.left)
            return SendReport(
                offer.layout.num_bytes, transports, sent.transfer_ms, num_passes, num_receivers, group.failures
            )
        group.check("the weights were on their way")
        raise WeightUpdateFailed(f"{MAX_PASSES} passes broke off, the last one: {broken}")

    def _pass(
        self, offer: _Offer, group: Attendance, before_pass: Callable[[], None] | None
    ) -> tuple[EndPass, Sent]:
        """One pass. Raises LaneBroken if another one may help."""
        links = frozenset(worker.link.link_id for worker in group.left)
        buffers = self._buffers.get(offer.layout.largest_bucket, links)
        if before_pass is not None:
            before_pass()
        self._num_passes += 1
        pass_id = self._num_passes
        group.tell_all(StartPass(pass_id))
        routes = [Route(self._lane(transport), wires) for transport, wires in group.wires(pass_id).items()]

        def give_up(error: Exception) -> None:
            for route in routes:
                route.lane.abort()
            group.tell_all(AbandonPass(str(error), pass_id))

        sent = send_buckets(offer.items, offer.layout, buffers, routes, group.check_pass, give_up)
        try:
            group.await_arrivals(pass_id)
        except LaneBroken as error:
            give_up(error)
            raise
        return EndPass(pass_id, sent.checksums), sent

    def _lane(self, transport: Transport) -> SendLane:
        with self._condition:
            if transport not in self._lanes:
                self._lanes[transport] = self._make_lane[transport](self._device)
            return self._lanes[transport]

    def _open_offer(self) -> _Offer:
        with self._condition:
            if self._offer is None:
                raise WeightUpdateFailed("there is no open offer: call `offer` before each `run`")
            return self._offer

    def _end_offer(self, reason: str) -> None:
        """Nobody can take the offer any more; workers that came too late are told."""
        with self._condition:
            self._offer = None
            self._links = [link for link in self._links if not link.is_dead]
            late = [link for link in self._links if link.pop(Hello) is not None]
        for link in late:
            with contextlib.suppress(LinkLost):
                link.send(Refuse(reason))
            link.close()

    def _knows(self, hello: Hello) -> bool:
        with self._condition:
            token = "" if self._offer is None else self._offer.token
        return token != "" and hmac.compare_digest(hello.token.encode(), token.encode())

    def _add_link(self, link: Link) -> None:
        with self._condition:
            self._links = [known for known in self._links if not known.is_dead]
            self._links.append(link)


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
