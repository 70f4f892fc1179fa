"""The transport between different GPUs: NCCL broadcasts from the sender, rank 0, to all peers.

Every bucket is one broadcast; stream order replaces messages. A communicator is created in `begin` and kept for
later attempts between the same connections; any failure ends it on both sides. A broken communicator may deliver
garbage, so `buckets` and `finish` check it before they return.

NCCL is called through ctypes instead of `torch.distributed`: a broadcast to a dead peer must end in a process that
keeps serving, without watchdogs and without effects on a trainer's process groups. Communicators are non-blocking:
waits are polled with a deadline and the caller's check, and ended by `ncclCommAbort`. The library is the one that
torch has loaded, or one that the caller names, because ranks with different versions hang. Signatures follow
`nccl.h` (2.18 and later).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import msgspec
import torch

from agentloop.errors import EngineError
from agentloop_servers.weight_transfer.layout import Layout
from agentloop_servers.weight_transfer.protocol import Peer, TransportBroken
from agentloop_servers.weight_transfer.transports.base import Buffer

NCCL_POLL_S = 0.0005
LIBRARY = "libnccl.so.2"  # the name under which torch loads it

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32 = 1, 7
_SUM = 0
_MAGIC = 0xCAFEBEEF
_LAYOUT_VERSION = 21801  # 2.18.1, whose fields end with split_share; later versions accept it
_UNDEFINED = -(2**31)


class NcclFailed(Exception):
    """A communicator has failed and is aborted. A new one may work."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


_COMM = ctypes.c_void_p
_SIGNATURES: dict[str, list[type]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(_COMM),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ],
    "ncclCommGetAsyncError": [_COMM, ctypes.POINTER(ctypes.c_int)],
    "ncclCommAbort": [_COMM],
    "ncclBroadcast": [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        _COMM,
        ctypes.c_void_p,
    ],
    "ncclAllReduce": [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        _COMM,
        ctypes.c_void_p,
    ],
}


@cache
def _library(name: str = LIBRARY) -> ctypes.CDLL:
    """Return the process's NCCL library. Raises EngineError if it is missing."""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise EngineError(
            f"cannot load NCCL ({error}): install a torch build with CUDA, which provides it"
        ) from error
    for symbol, arguments in _SIGNATURES.items():
        function = getattr(library, symbol)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.ncclGetErrorString.argtypes = [ctypes.c_int]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def unique_id() -> bytes:
    """Make the 128-byte id of a new communicator, for all its ranks."""
    created = _UniqueId()
    library = _library()
    _check(library, "unique id", library.ncclGetUniqueId(ctypes.byref(created)))
    return bytes(created.internal)


class Communicator:
    """One rank of an NCCL group. Call it from one thread, with the rank's CUDA device current.

    `check` is called while a call waits for its peers; its exception ends the wait. Abort the communicator after a
    failure.
    """

    def __init__(
        self,
        group_id: bytes,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        check: Callable[[], None],
        library: str = LIBRARY,
    ) -> None:
        """Join the group.

        Raises NcclFailed if not all ranks join in time. All ranks must use the same `library`.
        """
        self._library = _library(library)
        group = _UniqueId.from_buffer_copy(group_id)
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=_LAYOUT_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
        )
        self._handle: ctypes.c_void_p | None = _COMM()
        result = self._library.ncclCommInitRankConfig(
            ctypes.byref(self._handle), world_size, group, rank, ctypes.byref(config)
        )
        self._finish_call("join", result, time.monotonic() + timeout_s, check)

    def broadcast(
        self,
        address: int,
        num_bytes: int,
        *,
        root: int,
        stream: int,
        deadline_at: float,
        check: Callable[[], None],
    ) -> None:
        """Enqueue a broadcast of device memory on a CUDA stream.

        `deadline_at` is in `time.monotonic`. The first broadcast opens connections, so it waits for the peers.
        """
        if self._handle is None:
            raise NcclFailed("the NCCL communicator was aborted: repeat the transfer with a new one")
        result = self._library.ncclBroadcast(address, address, num_bytes, _UINT8, root, self._handle, stream)
        self._finish_call("broadcast", result, deadline_at, check)

    def sum(self, address: int, *, stream: int, deadline_at: float, check: Callable[[], None]) -> None:
        """Enqueue the sum of one float32 over all ranks, in place."""
        if self._handle is None:
            raise NcclFailed("the NCCL communicator was aborted: repeat the transfer with a new one")
        result = self._library.ncclAllReduce(address, address, 1, _FLOAT32, _SUM, self._handle, stream)
        self._finish_call("sum", result, deadline_at, check)

    def wait(self, is_done: Callable[[], bool], *, deadline_at: float, check: Callable[[], None]) -> None:
        """Poll `is_done` (a CUDA event's query) until it returns True. Raises NcclFailed if the group fails."""
        while not is_done():
            self._finish_call("transfer", _SUCCESS, deadline_at, check)
            check()
            if time.monotonic() > deadline_at:
                raise NcclFailed("NCCL transfer: did not finish before the deadline")
            time.sleep(NCCL_POLL_S)
        # A failed group also ends the enqueued work, so "done" alone proves nothing.
        self._finish_call("transfer", _SUCCESS, deadline_at, check)

    def abort(self) -> None:
        """End the communicator and its enqueued work now, without its peers. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None and handle.value is not None:
            self._library.ncclCommAbort(handle)

    def _finish_call(self, what: str, result: int, deadline_at: float, check: Callable[[], None]) -> None:
        """Wait until the current call has completed. Raises NcclFailed, or the error of `check`."""
        state = ctypes.c_int(result)
        try:
            if self._handle is None:
                raise NcclFailed("the NCCL communicator was aborted: repeat the transfer with a new one")
            while True:
                if state.value == _SUCCESS or state.value == _IN_PROGRESS:
                    _check(
                        self._library, what, self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(state))
                    )
                _check(self._library, what, state.value)
                if state.value == _SUCCESS:
                    return
                check()
                if time.monotonic() > deadline_at:
                    raise NcclFailed(f"NCCL {what}: the other ranks did not respond before the deadline")
                time.sleep(NCCL_POLL_S)
        except BaseException:
            self.abort()
            raise


def _check(library: ctypes.CDLL, what: str, result: int) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        text = library.ncclGetErrorString(result).decode()
        raise NcclFailed(f"NCCL {what}: {text}")


# Each process reads these, and NCCL does not reconcile them: with different values a join or broadcast fails or
# hangs. vLLM sets some of them in its workers in batch-invariant mode.
SHARED_SETTINGS = {
    "NCCL_ALGO": "",
    "NCCL_PROTO": "",
    "NCCL_MIN_NCHANNELS": "",
    "NCCL_MAX_NCHANNELS": "",
    "NCCL_NTHREADS": "",
    "NCCL_COLLNET_ENABLE": "",
    "NCCL_NVLS_ENABLE": "2",
    "NCCL_CUMEM_ENABLE": "-2",
}
"""The variables that all ranks of a group must share, with the value that means unset (NCCL 2.28)."""
GROUP_JOIN_TIMEOUT_S = 60.0
TRANSFER_TIMEOUT_S = 600.0  # per attempt; `Peer.check` usually ends it earlier


class _Join(msgspec.Struct):
    """The sender's message with a receiver's rank. `group_id` None means that the group is kept.

    `settings` are the sender's NCCL variables of `SHARED_SETTINGS`.
    """

    rank: int
    world_size: int
    settings: dict[str, str]
    group_id: bytes | None = None


class _NcclTransport:
    """Base of both sides: a rank of a group, with a communicator that is kept until an attempt fails."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layout: Layout | None = None
        self._lazy_stream: torch.cuda.Stream | None = None
        self._communicator: Communicator | None = None
        self._is_aborted = False
        self._peers: Sequence[Peer] = ()
        self._deadline_at = 0.0

    @property
    def _stream(self) -> torch.cuda.Stream:
        if self._lazy_stream is None:
            self._lazy_stream = torch.cuda.Stream(self._device)
        return self._lazy_stream

    def abort(self) -> None:
        """End the attempt: waits for the group raise TransportBroken."""
        self._is_aborted = True

    def close(self) -> None:
        """Leave the group."""
        self._leave()

    def _begin_attempt(self, peers: Sequence[Peer], layout: Layout) -> None:
        """Start an attempt, and leave a group that an earlier attempt has broken."""
        if self._is_aborted:
            self._leave()
        self._is_aborted = False
        self._peers, self._layout = peers, layout
        self._deadline_at = time.monotonic() + TRANSFER_TIMEOUT_S

    def _join(self, group_id: bytes, rank: int, world_size: int) -> None:
        self._leave()
        with torch.cuda.device(self._device), self._ending():
            self._communicator = Communicator(
                group_id, rank, world_size, timeout_s=GROUP_JOIN_TIMEOUT_S, check=self._check
            )

    def _broadcast(self, data: torch.Tensor, num_bytes: int) -> None:
        with torch.cuda.device(self._device), self._ending():
            self._joined().broadcast(
                data.data_ptr(),
                num_bytes,
                root=0,
                stream=self._stream.cuda_stream,
                deadline_at=self._deadline_at,
                check=self._check,
            )

    def _wait(self, event: torch.cuda.Event) -> None:
        with self._ending():
            self._joined().wait(event.query, deadline_at=self._deadline_at, check=self._check)

    def _check(self) -> None:
        if self._is_aborted:
            raise TransportBroken("the transfer was cancelled")
        for peer in self._peers:
            peer.check()

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def _joined(self) -> Communicator:
        if self._communicator is None:
            raise TransportBroken("the NCCL group was not joined")
        return self._communicator

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Leave the group if the block raises. NcclFailed becomes TransportBroken."""
        try:
            yield
        except BaseException as error:
            self._leave()
            if isinstance(error, NcclFailed):
                raise TransportBroken(str(error)) from error
            raise


class NcclSendTransport(_NcclTransport):
    """The sending side; see `SendTransport`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._members: tuple[int, ...] = ()
        self._buffers: Sequence[Buffer] = ()
        self._sent: list[torch.cuda.Event] = []

    def begin(self, peers: Sequence[Peer], layout: Layout, buffers: Sequence[Buffer]) -> None:
        self._begin_attempt(peers, layout)
        self._buffers = buffers
        self._sent = [torch.cuda.Event() for _ in buffers]
        members = tuple(peer.connection_id for peer in peers)
        world_size = len(peers) + 1
        is_kept = self._communicator is not None and members == self._members
        group_id = None if is_kept else unique_id()
        for rank, peer in enumerate(peers, start=1):
            peer.post(msgspec.msgpack.encode(_Join(rank, world_size, settings(), group_id)))
        if group_id is not None:
            self._join(group_id, 0, world_size)
            self._members = members

    def send(self, bucket: int, buffer: int) -> None:
        assert self._layout is not None, "begin comes first"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._broadcast(self._buffers[buffer].data, self._layout.bucket_sizes[bucket])
        self._sent[buffer].record(self._stream)

    def wait_free(self, buffer: int) -> None:
        self._check()
        torch.cuda.current_stream(self._device).wait_event(self._sent[buffer])

    def finish(self) -> None:
        for event in self._sent:
            self._wait(event)
        self._buffers = ()

    def close(self) -> None:
        super().close()
        self._buffers = ()


class NcclReceiveTransport(_NcclTransport):
    """The receiving side; see `ReceiveTransport`.

    Buckets arrive alternately in two buffers, so that the next one arrives while the last is consumed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffers: list[torch.Tensor] = []

    def begin(self, peer: Peer, layout: Layout) -> None:
        self._begin_attempt([peer], layout)
        place = msgspec.msgpack.decode(peer.take(), type=_Join)
        check_settings(place.settings)
        if place.group_id is not None:
            self._join(place.group_id, place.rank, place.world_size)
        num_buffers = min(2, len(layout.bucket_sizes))
        size = layout.largest_bucket
        if len(self._buffers) < num_buffers or self._buffers[0].numel() < size:
            self._buffers = []
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(num_buffers)]

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        assert self._layout is not None, "begin comes first"
        sizes = self._layout.bucket_sizes
        arrived = [torch.cuda.Event() for _ in self._buffers]
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # wait for the previous users of this memory

        def receive(bucket: int) -> None:
            turn = bucket % len(arrived)
            self._broadcast(self._buffers[turn], sizes[bucket])
            arrived[turn].record(self._stream)

        receive(0)
        for bucket, size in enumerate(sizes):
            if bucket + 1 < len(sizes):
                receive(bucket + 1)
            turn = bucket % len(arrived)
            current.wait_event(arrived[turn])
            yield bucket, self._buffers[turn][:size]
            self._stream.wait_stream(current)  # before a later bucket overwrites this buffer
        for event in arrived:
            self._wait(event)

    def finish(self) -> None:
        self._check()

    def close(self) -> None:
        super().close()
        self._buffers = []


def settings() -> dict[str, str]:
    """Return this process's NCCL variables that all ranks of a group must share."""
    return {name: os.environ.get(name, unset) for name, unset in SHARED_SETTINGS.items()}


def check_settings(theirs: Mapping[str, str]) -> None:
    """Raise TransportBroken with the first variable that differs between the sender and this process."""
    ours = settings()
    for name, unset in SHARED_SETTINGS.items():
        here, there = (
            "unset" if found in ("", unset) else found for found in (ours[name], theirs.get(name, unset))
        )
        if here != there:
            raise TransportBroken(
                f"{name} is {here} in the engine's worker and {there} in the sender: start the sender with the "
                "worker's NCCL variables (batch-invariant vLLM sets them)"
            )
