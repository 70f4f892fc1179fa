"""`client.update_weights(tensors)`: connects a torch training process to `WeightSender`.

An update runs the sender in a thread, and the call that sends its address to the service. A failure of one ends
the other. The service's response is the result, because only the service knows the versions of all replicas. Under
torch.distributed every rank calls `push`: rank 0 sends, the others take part in its gathers (`trainer_group.py`).
`push` returns, raises or is cancelled only after its threads have ended; each has a deadline.

Tensors have their checkpoint names, without the prefixes of wrappers. Sharded tensors (DTensor) are gathered one
at a time when they are loaded, and every rank of their mesh must load at the same time.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
import torch
from torch.distributed.tensor import DTensor

from agentloop.api.coordinator import ServiceStatus, UpdateReport
from agentloop.client.publish import TensorBytes
from agentloop.client.push import NamedTensors, PushOptions, PushTarget, precision_gap
from agentloop.concurrency.aio import in_daemon_thread, run_to_end
from agentloop.engine.interface import PushSource, TensorInfo
from agentloop.errors import AgentLoopError, Conflict, DeadlineExceeded, InvalidRequest, WeightUpdateFailed
from agentloop.values.checks import is_loopback
from agentloop_servers.net.tcp import url_of
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.layout import CAST_DTYPES, dtype_of, tensor_info
from agentloop_servers.weight_transfer.sender import WeightSender
from agentloop_servers.weight_transfer.trainer_group import (
    RankPart,
    TrainerGroup,
    UpdateOutcome,
    is_distributed,
    shortened,
)

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_OUTERMOST = "module."  # DistributedDataParallel; inside a model the prefix may be part of a name


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor of the checkpoint, complete or as this rank's shard."""

    name: str
    tensor: torch.Tensor

    @property
    def num_ranks(self) -> int:
        """The number of ranks that must load it together."""
        return self.tensor.device_mesh.size() if isinstance(self.tensor, DTensor) else 1

    def load(self) -> torch.Tensor:
        """Return the complete tensor. A collective of its `num_ranks` ranks."""
        own = self.tensor.detach()
        return own.full_tensor() if isinstance(own, DTensor) else own

    def info(self, dtype: torch.dtype | None) -> TensorInfo:
        """Describe the tensor as sent: in `dtype` if its own dtype may be cast, otherwise in its own."""
        own = self.tensor.dtype
        sent = dtype if dtype is not None and own in CAST_DTYPES.values() else own
        return tensor_info(self.name, self.tensor, sent)


def collect(weights: NamedTensors) -> list[NamedTensor]:
    """Return the tensors in order. Raises InvalidRequest, with the name, for one that a checkpoint cannot have."""
    if not isinstance(weights, Iterable):
        raise _refusal(f"{type(weights).__name__} has no names for its tensors: pass model.named_parameters()")
    pairs: Iterable[tuple[str, object]] = weights.items() if isinstance(weights, Mapping) else weights
    found: dict[str, NamedTensor] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise _refusal(f"weights must be pairs of a name and a tensor, not {type(pair).__name__}")
        given, tensor = pair
        name = checkpoint_name(given)
        if reason := _problem(given, tensor):
            raise _refusal(f"{given!r} {reason}")
        if name in found:
            raise _refusal(f"two tensors have the checkpoint name {name!r}")
        assert isinstance(tensor, torch.Tensor)
        found[name] = NamedTensor(name, tensor)
    if not found:
        raise _refusal("the weights have no tensors")
    return list(found.values())


def as_bytes(weights: NamedTensors, dtype: str | None) -> list[TensorBytes]:
    """Return tensors to publish, each copied to host memory when it is loaded. Raises InvalidRequest."""
    wanted = None if dtype is None else parse_dtype(dtype)

    def bytes_of(one: NamedTensor) -> TensorBytes:
        if one.num_ranks > 1:
            raise _refusal(f"{one.name!r} is sharded: gather it first, because one process publishes")
        info = one.info(wanted)

        def load() -> object:
            whole = one.load().to("cpu", dtype_of(info)).contiguous()
            return whole.view(-1).view(torch.uint8).numpy()

        return TensorBytes(info.name, info.dtype, info.shape, load)

    return [bytes_of(one) for one in collect(weights)]


def checkpoint_name(name: str) -> str:
    """Return the name without the prefixes of DDP, torch.compile, FSDP and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    while name.startswith(_OUTERMOST):
        name = name.removeprefix(_OUTERMOST)
    return name


def _fleet_dtype(status: ServiceStatus) -> torch.dtype | None:
    """Return the dtype of all replicas; None if they differ or it is unknown, so that tensors keep their own."""
    dtypes = {replica.weight_dtype for replica in status.replicas}
    name = dtypes.pop() if len(dtypes) == 1 else None
    return parse_dtype(name) if name is not None and name in CAST_DTYPES else None


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype with that name. Raises InvalidRequest if tensors are never cast to it."""
    dtype = CAST_DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise InvalidRequest(
            f"unknown dtype {name!r} for weights: expected {', '.join(CAST_DTYPES)}", param="dtype"
        )
    return dtype


def digest(tensors: Sequence[NamedTensor]) -> int:
    """Return a 64-bit hash of names, dtypes and shapes.

    Equal on ranks with the same tensors (or shards) in order.
    """
    state = hashlib.blake2b(digest_size=8)
    for one in tensors:
        state.update(f"{one.name}\0{one.tensor.dtype}\0{tuple(one.tensor.shape)}\0{one.num_ranks}\n".encode())
    return int.from_bytes(state.digest())


def _problem(name: str, tensor: object) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}, not a tensor: leave it out"
    if "_flat_param" in name:
        return "is a flattened shard of FSDP1: pass the full state_dict(), or use fully_shard"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: only dense tensors can be sent"
    if tensor.is_meta:
        return "is on the meta device: it has no values"
    if tensor.numel() == 0:
        return "has no elements: is it one rank's empty shard?"
    return None


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="weights")


T = TypeVar("T")

ANSWER_GRACE_S = 30.0  # a failed sender closes its connections, so that the service soon responds with the reason
_STOP_TIMEOUT_S = 60.0  # a cancelled sender still loads the rest of its attempt, for the other ranks
_LET_GO_TIMEOUT_S = 5.0  # for a thread that has returned; the event loop is blocked during this time
_MARGIN_S = ANSWER_GRACE_S + _STOP_TIMEOUT_S + 30.0  # the other ranks wait longer than rank 0 can take
_WATCH_S = 0.5  # seconds between two polls of the service's status
_GROUP_TIMEOUT_S = 900.0  # the timeout of the ranks' own group; longer if an update needs more

_log = structlog.stdlib.get_logger(__name__)


def make_sender(listen_host: str, transport: str, is_encrypted: bool) -> WeightSender:
    """Make a pusher's sender."""
    return WeightSender(listen_host=listen_host, transport=transport, is_encrypted=is_encrypted)


class TensorPusher:
    """A `Pusher` of this process's tensors. It keeps its connections while updates succeed."""

    def __init__(
        self,
        target: PushTarget,
        listen_host: str | None = None,
        *,
        make_sender: Callable[[str, str, bool], WeightSender] = make_sender,
        answer_grace_s: float = ANSWER_GRACE_S,
    ) -> None:
        """`answer_grace_s` is how long the sender or the service may run after the other one has ended."""
        self._target = target
        self._listen_host = listen_host
        self._make_sender = make_sender
        self._answer_grace_s = answer_grace_s
        self._sender: WeightSender | None = None
        self._transport = ""
        self._group: TrainerGroup | None = None
        self._is_pushing = False
        self._has_compared = False

    async def push(self, weights: NamedTensors, options: PushOptions) -> UpdateReport:
        """Update the fleet once. The tensors must not change until this returns.

        Raises InvalidRequest for weights that cannot be sent, DeadlineExceeded, and the service's errors. A
        cancelled rank other than 0 continues to the update's end, because rank 0's gathers need it.
        """
        if self._is_pushing:
            raise Conflict("this client is already pushing weights: wait for the end of that push")
        self._is_pushing = True
        try:
            if options.dtype is not None:
                parse_dtype(options.dtype)
            if options.all_ranks and is_distributed():
                return await self._push_together(weights, options)
            tensors = collect(weights)
            sharded = next((one for one in tensors if one.num_ranks > 1), None)
            if sharded is not None:
                raise InvalidRequest(
                    f"{sharded.name!r} is sharded over {sharded.num_ranks} ranks: all of them must push",
                    param="weights",
                )
            return await self._send(tensors, options, None)
        finally:
            self._is_pushing = False

    async def close(self) -> None:
        """Close the connections and the ranks' group. Idempotent."""
        await self._drop_sender()
        if self._group is not None:
            group, self._group = self._group, None
            group.close()

    # All ranks together

    async def _push_together(self, weights: NamedTensors, options: PushOptions) -> UpdateReport:
        group = await _in_thread(self._join_group, options.timeout_s)
        tensors, refusal = [], None
        try:
            tensors = collect(weights)
        except InvalidRequest as error:
            refusal = error  # the others must receive it, or they would wait
        part = RankPart(
            options.version, digest(tensors), len(tensors), shortened(refusal.message) if refusal else None
        )
        try:
            await _in_thread(group.check_equal_parts, part, options.timeout_s)
        except InvalidRequest:
            if refusal is not None:
                raise refusal from None
            raise
        if not group.is_sender:
            load_all = _on_this_device(lambda: _load_all(tensors))
            return await _in_thread(group.follow, load_all, options.timeout_s + _MARGIN_S)
        give_up_at = time.monotonic() + options.timeout_s
        try:
            report = await self._send(tensors, options, lambda: group.begin_attempt(give_up_at - time.monotonic()))
        except BaseException as error:  # also a cancellation: the others wait for the outcome
            await self._tell(group, UpdateOutcome.failed(error))
            raise
        await self._tell(group, UpdateOutcome(report))
        return report

    def _join_group(self, timeout_s: float) -> TrainerGroup:
        """Return the trainer group, or a new one if the last has a shorter timeout. All ranks decide alike."""
        if self._group is None or not self._group.can_wait(timeout_s):
            if self._group is not None:
                self._group.close()
            self._group = TrainerGroup(max(timeout_s, _GROUP_TIMEOUT_S))
        return self._group

    async def _tell(self, group: TrainerGroup, outcome: UpdateOutcome) -> None:
        """Send the outcome to the other ranks.

        A failure is only logged, because it does not change the outcome.
        """
        try:
            await _in_thread(group.end, outcome, _STOP_TIMEOUT_S)
        except AgentLoopError as error:
            _log.error("trainer_group_not_told", reason=error.message)

    # One process

    async def _send(
        self, tensors: Sequence[NamedTensor], options: PushOptions, before_attempt: Callable[[], None] | None
    ) -> UpdateReport:
        try:
            async with asyncio.timeout(options.timeout_s):
                status = await self._target.status()
                self._compare_precision(tensors, status)
                dtype = _fleet_dtype(status) if options.dtype is None else parse_dtype(options.dtype)
                items = [Outgoing(one.info(dtype), one.load) for one in tensors]
                sender = await self._open_sender(options.transport, status)
                push = await _in_thread(sender.offer, items)
                report = await self._exchange(sender, push, options, before_attempt)
                await _in_thread(sender.release)  # the training step may need the memory
        except TimeoutError as error:
            await self._drop_sender()
            raise DeadlineExceeded(
                f"the update did not end within {options.timeout_s:g} s: see the service's log, or raise timeout_s"
            ) from error
        except BaseException:
            await self._drop_sender()  # its connections are in an unknown state
            raise
        return report

    async def _exchange(
        self,
        sender: WeightSender,
        push: PushSource,
        options: PushOptions,
        before_attempt: Callable[[], None] | None,
    ) -> UpdateReport:
        """Run the sender and the service's update in parallel. Both have ended when this returns."""
        run = _on_this_device(
            lambda: sender.run(options.timeout_s, before_attempt, late_grace_s=options.late_grace_s)
        )
        sending = asyncio.ensure_future(_in_thread(run))
        asking = asyncio.ensure_future(self._target.update_from(push, options))
        watching = asyncio.ensure_future(self._watch(sender, options.version))
        try:
            await asyncio.wait((sending, asking), return_when=asyncio.FIRST_COMPLETED)
            is_sent = sending.done() and sending.exception() is None
            if not asking.done():  # after everything is sent, the service still has to commit
                await asyncio.wait((asking,), timeout=None if is_sent else self._answer_grace_s)
            elif asking.exception() is None:
                await asyncio.wait((sending,), timeout=self._answer_grace_s)
        finally:
            asking.cancel()
            watching.cancel()
            if not sending.done():
                sender.cancel("the update has ended")
            await run_to_end(_all_done(sending, asking, watching))
        failure = sending.exception()
        if asking.cancelled():  # no response from the service: the sender failed first
            raise failure or WeightUpdateFailed("the service did not respond")
        if failure is not None:
            _log.warning("sending_failed", version=options.version, reason=str(failure))
        if (error := asking.exception()) is not None:
            raise error from failure
        return asking.result()

    async def _watch(self, sender: WeightSender, version: int) -> None:
        """Lower the number of workers that the sender waits for when the service reports failures."""
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                update = (await self._target.status()).update
            except AgentLoopError:
                continue  # without it the sender's grace applies
            if update is not None and update.version == version and update.failures:
                sender.expect(update.num_receivers)

    def _compare_precision(self, tensors: Sequence[NamedTensor], status: ServiceStatus) -> None:
        """Warn at the first push if engines compute in another dtype than most elements have."""
        if self._has_compared:
            return
        self._has_compared = True
        sizes: Counter[torch.dtype] = Counter()
        for one in tensors:
            if one.tensor.dtype in CAST_DTYPES.values():
                sizes[one.tensor.dtype] += one.tensor.numel()
        gap = precision_gap(status, str(sizes.most_common(1)[0][0])) if sizes else None
        if gap is not None:
            _log.warning("precision_differs", reason=gap)

    async def _open_sender(self, transport: str, status: ServiceStatus) -> WeightSender:
        if self._sender is not None and transport != self._transport:
            await self._drop_sender()
        if self._sender is None:
            if self._listen_host is None:
                url = way_to_replicas(self._target.url, status)
                self._listen_host = await _in_thread(host_towards, url)
            self._sender = self._make_sender(self._listen_host, transport, status.is_encrypted)
            self._transport = transport
        return self._sender

    async def _drop_sender(self) -> None:
        if self._sender is not None:
            sender, self._sender = self._sender, None
            await _in_thread(sender.close)


def way_to_replicas(url: str, status: ServiceStatus) -> str:
    """Return a URL on the route to the replicas: the service's, or a remote replica's if the service is on
    loopback."""
    others = [replica.host for replica in status.replicas if replica.host and not is_loopback(replica.host)]
    return url_of(others[0], 80) if others and is_loopback(urlsplit(url).hostname or "") else url


def host_towards(url: str) -> str:
    """Return the address of this machine that the host of `url` can reach.

    Raises InvalidRequest if there is no route.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host):
        return "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; the kernel only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidRequest(f"no route to {host} ({error}): set listen_host", param="listen_host") from error


def _load_all(tensors: Sequence[NamedTensor]) -> None:
    for one in tensors:
        one.load()


def _on_this_device(work: Callable[[], T]) -> Callable[[], T]:
    """Wrap `work` for another thread: it runs on the caller's CUDA device, after the work on the caller's
    stream."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return work
    device, stream_end = torch.cuda.current_device(), torch.cuda.current_stream().record_event()

    def placed() -> T:
        with torch.cuda.device(device):
            stream_end.synchronize()
            return work()

    return placed


async def _in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run a blocking function with its own deadline. A cancellation takes effect after its return."""
    threads: list[threading.Thread] = []

    @wraps(function)
    def work() -> T:
        threads.append(threading.current_thread())
        return function(*arguments)

    async def outcome() -> T:
        result: T = await in_daemon_thread(work)
        return result

    try:
        return await run_to_end(outcome())
    finally:
        # The thread releases its objects only when it ends. If a process group is destroyed there during the
        # interpreter's shutdown, the process aborts.
        for thread in threads:
            thread.join(_LET_GO_TIMEOUT_S)


async def _all_done(*work: asyncio.Future[Any]) -> None:
    """Wait until all futures have ended, without raising their errors."""
    await asyncio.gather(*work, return_exceptions=True)
