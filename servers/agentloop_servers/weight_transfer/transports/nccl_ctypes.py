"""NCCL through ctypes: communicators that never block for ever.

Why not `torch.distributed`: a broadcast whose peer has died must end when we say so, in a process that goes on
serving, and neither its watchdog's timeouts nor a trainer's own process groups may be touched. Communicators here
are non-blocking: every call that waits for peers is polled against a deadline and a caller's own test, and ended by
`ncclCommAbort`. The library is the one that torch has loaded into the process, so both ends speak what torch does.

Signatures and the configuration's layout are those of `nccl.h` (2.18 and later; NCCL takes older, shorter layouts).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache

from agentloop.errors import EngineError

NCCL_POLL_S = 0.0005

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_MAGIC = 0xCAFEBEEF
_LAYOUT_VERSION = 21801  # 2.18.1, whose fields end with split_share
_UNDEFINED = -(2**31)


class NcclFailed(Exception):
    """A communicator broke, or was ended: it is aborted, and a new one may work."""


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
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
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
}


@cache
def _library() -> ctypes.CDLL:
    """Return the NCCL that torch has loaded. Raises EngineError if there is none."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise EngineError(f"no NCCL in this process: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.ncclGetErrorString.argtypes = [ctypes.c_int]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def version() -> int:
    """Return NCCL's version as a number, 22809 for 2.28.9. Raises EngineError without NCCL."""
    number = ctypes.c_int()
    _check("version", _library().ncclGetVersion(ctypes.byref(number)))
    return number.value


def unique_id() -> bytes:
    """Make the 128 bytes that the ranks of one new communicator have in common."""
    created = _UniqueId()
    _check("unique id", _library().ncclGetUniqueId(ctypes.byref(created)))
    return bytes(created.internal)


class Communicator:
    """One rank of a group. All calls from one thread, with the rank's CUDA device current.

    `check` is called while a call waits for its peers; what it raises ends the wait and the communicator.
    """

    def __init__(
        self, group_id: bytes, rank: int, world_size: int, *, timeout_s: float, check: Callable[[], None]
    ) -> None:
        """Join the group. Raises NcclFailed if not all its ranks do in time."""
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
        result = _library().ncclCommInitRankConfig(
            ctypes.byref(self._handle), world_size, group, rank, ctypes.byref(config)
        )
        self._settle("join", result, time.monotonic() + timeout_s, check)

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
        """Enqueue a broadcast of device memory on a CUDA stream; returns once it is enqueued.

        `deadline_at` is of `time.monotonic`. The first one sets connections up, so it waits for the peers.
        """
        if self._handle is None:
            raise NcclFailed("the communicator was ended")
        result = _library().ncclBroadcast(address, address, num_bytes, _UINT8, root, self._handle, stream)
        self._settle("broadcast", result, deadline_at, check)

    def wait(self, is_done: Callable[[], bool], *, deadline_at: float, check: Callable[[], None]) -> None:
        """Poll `is_done` (a CUDA event's query) while the group is sound."""
        while not is_done():
            self._settle("transfer", _SUCCESS, deadline_at, check)
            try:
                check()
                if time.monotonic() > deadline_at:
                    raise NcclFailed("NCCL transfer: not finished in time")
            except BaseException:
                self.abort()
                raise
            time.sleep(NCCL_POLL_S)
        # A broken group also ends what was enqueued: "done" alone proves nothing.
        self._settle("transfer", _SUCCESS, deadline_at, check)

    def abort(self) -> None:
        """End it now, whatever its peers do; what is enqueued ends too. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None and handle.value is not None:
            _library().ncclCommAbort(handle)

    def _settle(self, what: str, result: int, deadline_at: float, check: Callable[[], None]) -> None:
        """Wait until the call under way is through. Raises NcclFailed, or what `check` raises."""
        state = ctypes.c_int(result)
        try:
            if self._handle is None:
                raise NcclFailed("the communicator was ended")
            while True:
                if state.value == _SUCCESS or state.value == _IN_PROGRESS:
                    _check(what, _library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
                _check(what, state.value)
                if state.value == _SUCCESS:
                    return
                check()
                if time.monotonic() > deadline_at:
                    raise NcclFailed(f"NCCL {what}: the other ranks did not answer in time")
                time.sleep(NCCL_POLL_S)
        except BaseException:
            self.abort()
            raise


def _check(what: str, result: int) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        text = _library().ncclGetErrorString(result).decode()
        raise NcclFailed(f"NCCL {what}: {text}")
