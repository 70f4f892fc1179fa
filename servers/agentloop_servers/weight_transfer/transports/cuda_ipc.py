"""The `ipc` transport: another process on the same GPU maps the sender's pack buffers with CUDA IPC handles.

The buffers are allocated by the CUDA driver instead of torch: an IPC handle covers a complete allocation, torch's
expandable segments have none, and torch's reference counts leak if a receiver is killed. A worker unmaps at the
end of every attempt before it reports, so the sender may free its buffers between updates.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from agentloop.errors import WeightUpdateFailed
from agentloop_servers.weight_transfer.layout import Layout
from agentloop_servers.weight_transfer.protocol import Peer, TransportBroken
from agentloop_servers.weight_transfer.transports.base import Buffer
from agentloop_servers.weight_transfer.transports.handshake import (
    AckedSendTransport,
    MapBuffers,
    MappedReceiveTransport,
)

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class DriverError(OSError):
    """A failed call of the CUDA driver. `status` is its CUresult."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} failed with CUDA error {status}")
        self.status = status


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _Span:
    """Device memory that torch can wrap without a copy (CUDA Array Interface, version 3)."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class DeviceMemory:
    """Memory on a CUDA device that torch did not allocate. `tensor` must not be used after `free`."""

    def __init__(self, pointer: int, num_bytes: int, device: torch.device, release: str) -> None:
        self._pointer = pointer
        self._device = device
        self._release = release  # the driver function that releases it
        self.tensor = torch.as_tensor(_Span(pointer, num_bytes), device=device)

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> DeviceMemory:
        """Allocate memory. Raises WeightUpdateFailed if memory is short even without torch's cache."""
        pointer = ctypes.c_uint64()
        with _context(device):
            try:
                try:
                    _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
                except DriverError as error:
                    if error.status != OUT_OF_MEMORY:
                        raise
                    torch.cuda.empty_cache()
                    _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            except DriverError as error:
                raise WeightUpdateFailed(
                    f"cannot allocate {num_bytes:,} bytes on {device}: {error}; free device memory, or use the "
                    "transport 'shm'"
                ) from error
            return cls(pointer.value, num_bytes, device, "cuMemFree_v2")

    @classmethod
    def open(cls, handle: bytes, num_bytes: int, device: torch.device) -> DeviceMemory:
        """Map another process's allocation. Raises DriverError, TransportBroken."""
        if len(handle) != HANDLE_BYTES:
            raise TransportBroken(f"an IPC handle has {len(handle)} bytes, expected {HANDLE_BYTES}")
        pointer = ctypes.c_uint64()
        with _context(device):
            _call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS),
            )
            return cls(pointer.value, num_bytes, device, "cuIpcCloseMemHandle")

    def handle(self) -> bytes:
        """Return the handle for `open` in another process. Raises DriverError."""
        handle = _Handle()
        with _context(self._device):
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._pointer))
        return bytes(handle)

    def free(self) -> None:
        """Wait for the work on the device, then free or unmap the memory. Idempotent. Raises DriverError."""
        if self._pointer:
            pointer, self._pointer = self._pointer, 0
            with _context(self._device):
                torch.cuda.synchronize(self._device)
                _call(self._release, ctypes.c_uint64(pointer))


class IpcSendTransport(AckedSendTransport):
    """The sending side; see `SendTransport`."""

    def begin(self, peers: Sequence[Peer], layout: Layout, buffers: Sequence[Buffer]) -> None:
        self._map_all(peers, buffers)

    def send(self, bucket: int, buffer: int) -> None:
        torch.cuda.current_stream(self._device).synchronize()  # the workers' streams do not wait for this one
        self.announce(bucket, buffer)


class IpcReceiveTransport(MappedReceiveTransport):
    """The receiving side; see `ReceiveTransport`.

    The sender's memory is mapped from `begin` to the end of `buckets`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._memories: list[DeviceMemory] = []

    def finish(self) -> None:
        super().finish()
        while self._memories:
            self._memories.pop().free()

    def _map(self, setup: MapBuffers) -> list[torch.Tensor]:
        self.finish()
        for handle in setup.exports:
            self._memories.append(DeviceMemory.open(handle, setup.num_bytes, self._device))
        return [memory.tensor for memory in self._memories]


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    return library


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status != 0:
        raise DriverError(function, status)


@functools.cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """Return the context that torch uses on the device, kept for the life of the process.

    If it were released before torch has retained it, all its mappings would be lost.
    """
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    return context


@contextlib.contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Make the context that torch uses on the device current in this thread."""
    index = torch.cuda.current_device() if device.index is None else device.index
    _call("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
