"""A worker's membership in a trainer's own broadcast group, and the tensors of a transfer's part.

    vllm   a `StatelessProcessGroup` (a TCP store) has the NCCL id; all ranks sum one element after they joined
    nccl   a process group of torch.distributed has the id in its store; rank 0 writes it at its first broadcast
    gloo   torch's own `ProcessGroupGloo`, with the same keys of the store; also for `vllm` on a CPU
    ipc    no group: each part has the handles

The trainer uses vLLM's or torch's own code, so keys and the order of collectives are theirs (vLLM 0.32, torch
2.13). This side uses the communicators of `transports/nccl.py`, which no watchdog ends and which abort once
`check` raises. A member joins in its own thread; `receive` and `settle` belong to the stage's thread, `leave` to
any. A member that failed or left cannot return.
"""

from __future__ import annotations

import io
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from agentloop.engine.interface import GroupBackend, GroupInit, Packing, TensorInfo, TransferPart
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.layout import dtype_of
from agentloop_servers.weight_transfer.transports.nccl import LIBRARY, Communicator, NcclFailed
from agentloop_servers.weight_transfer.worker_calls import StageProgress, StageState

GLOO_POLL_S = 0.0005
_NCCL_ID_KEY = "0"  # key of a process group's first communicator

Check = Callable[[], None]


class _Rank(Protocol):
    """One rank of a joined group."""

    def receive(self, data: torch.Tensor, deadline_at: float, check: Check) -> None:
        """Fill `data` from rank 0's next broadcast, for work on the current stream."""

    def settle(self, deadline_at: float, check: Check) -> None:
        """Wait until all broadcasts so far have arrived."""

    def abort(self) -> None:
        """Leave now. Idempotent."""


class GroupMember:
    """A worker in a trainer's group: RECEIVING while it joins, HELD as a member, FAILED with an `error`."""

    def __init__(self, init: GroupInit, rank: int, device: torch.device, timeout_s: float) -> None:
        """Start to join. `rank` is the worker's rank in its replica."""
        self.state = StageState.RECEIVING
        self.error = ""
        self.transport = _transport(init, device)
        self._init = init
        self._device = device
        self._timeout_s = timeout_s
        self._is_left = False
        self._rank: _Rank | None = None
        self._joining = threading.Thread(target=self._join, args=(init.rank_offset + rank,), daemon=True)
        self._joining.start()

    def join(self) -> None:
        """Wait until it has joined or failed."""
        self._joining.join()

    @property
    def progress(self) -> StageProgress:
        """The progress of joining."""
        return StageProgress(self.state, self.error)

    def receive(self, part: TransferPart, check: Check) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a part, each valid until the next one for work on the current stream.

        `check` is called during waits; its exception ends the membership. Raises CheckpointUnreadable.
        """
        deadline_at = time.monotonic() + self._timeout_s

        def still_wanted() -> None:
            if self._is_left:
                raise CheckpointUnreadable(
                    "the worker has left the group: create the group again", param="update_info"
                )
            check()

        try:
            if self._rank is None:
                raise CheckpointUnreadable(
                    f"the worker is not in the group ({self.error or 'it has left'}): create the group again",
                    param="update_info",
                )
            for run in broadcasts(part):
                data = torch.empty(sum(map(_num_bytes, run)), dtype=torch.uint8, device=self._device)
                self._rank.receive(data, deadline_at, still_wanted)
                yield from unpacked(run, data)
            self._rank.settle(deadline_at, still_wanted)
        except BaseException as error:
            self.error = self.error or str(error) or type(error).__name__
            self.leave()
            if isinstance(error, NcclFailed | RuntimeError | TimeoutError):
                raise CheckpointUnreadable(f"the broadcast failed: {error}", param="update_info") from error
            raise

    def leave(self) -> None:
        """Leave the group, from any thread. Idempotent."""
        self._is_left = True
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.abort()

    def _join(self, rank: int) -> None:
        try:
            self._rank = _RANKS[self.transport](self._init, rank, self._device, self._timeout_s)
            self.state = StageState.HELD
        except Exception as error:  # joining has failed, but the worker keeps serving
            self.error = f"{type(error).__name__}: {error}"
            self.state = StageState.FAILED
        if self._is_left:
            self.leave()


def broadcasts(part: TransferPart) -> Iterator[Sequence[TensorInfo]]:
    """Yield the tensors of each broadcast of a part."""
    run: list[TensorInfo] = []
    size = 0
    for tensor in part.tensors:
        run.append(tensor)
        size += _num_bytes(tensor)
        if part.packing is Packing.PLAIN or (part.packing is Packing.PACKED and size > part.buffer_bytes):
            yield run
            run, size = [], 0
    if run:
        yield run


def unpacked(run: Sequence[TensorInfo], data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are consecutive in `data` (uint8), as views where they are aligned."""
    offset = 0
    for tensor in run:
        size, dtype = _num_bytes(tensor), dtype_of(tensor)
        piece = data[offset : offset + size]
        aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        yield tensor.name, aligned.view(dtype).view(tensor.shape)
        offset += size


def mapped(
    part: TransferPart, device: torch.device, buffers: dict[Any, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors whose memory another process of this host has exported, as vLLM's IPC engine does.

    They are the exporter's memory, valid until the part's call returns. `buffers` keeps a packed buffer for the
    transfer's next parts, because torch counts every mapping of an export. Raises CheckpointUnreadable.
    """
    try:
        handles = read_handles(part.handles)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        if isinstance(handles, dict):
            key = tuple(handles[uuid])
            if key not in buffers:
                buffers[key] = _rebuilt(key, device)
            yield from unpacked(part.tensors, buffers[key])
            return
        for tensor, of_gpus in zip(part.tensors, handles, strict=True):
            rebuilt = _rebuilt(of_gpus[uuid], device)
            if tuple(rebuilt.shape) != tuple(tensor.shape) or rebuilt.dtype != dtype_of(tensor):
                raise CheckpointUnreadable(
                    f"the handle of {tensor.name} belongs to a tensor of another shape or dtype",
                    param="update_info",
                )
            yield tensor.name, rebuilt
    except KeyError as error:
        raise CheckpointUnreadable(f"no handle for GPU {error}", param="update_info") from error
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError, RuntimeError) as error:
        raise CheckpointUnreadable(f"the handles cannot be mapped: {error}", param="update_info") from error


_HANDLE_TYPES = {
    one.__name__: one
    for one in (torch.Tensor, torch.nn.Parameter, torch.Size, torch.storage.TypedStorage, torch.UntypedStorage)
}


class _HandleUnpickler(pickle.Unpickler):
    """Unpickles IPC handles: only plain values and the few torch names that handles contain."""

    def find_class(self, module: str, name: str) -> Any:
        found = _HANDLE_TYPES.get(name, getattr(torch, name, None))
        if name in _HANDLE_TYPES or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a handle")


def read_handles(data: bytes) -> Any:
    """Read the pickled handles of a part. Raises UnpicklingError for other content."""
    return _HandleUnpickler(io.BytesIO(data)).load()


def _rebuilt(arguments: Sequence[Any], device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor  # noqa: PLC0415 # it starts CUDA's queues

    index = torch.cuda.current_device() if device.index is None else device.index
    tensor: torch.Tensor = rebuild_cuda_tensor(*arguments[:6], index, *arguments[7:])
    return tensor


class _GlooRank:
    def __init__(self, init: GroupInit, rank: int, device: torch.device, timeout_s: float) -> None:
        store = _torch_store(init, rank, "cpu", timeout_s)
        self._group = dist.ProcessGroupGloo(store, rank, init.world_size, timedelta(seconds=timeout_s))
        self._work: Any = None

    def receive(self, data: torch.Tensor, deadline_at: float, check: Check) -> None:
        host = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=data.dtype)
        work = self._work = self._group.broadcast(host, 0)
        while not work.is_completed():
            check()
            if time.monotonic() > deadline_at:
                raise TimeoutError(
                    "the broadcast did not finish before its deadline: check the other ranks, then create the group"
                    " again"
                )
            time.sleep(GLOO_POLL_S)
        work.wait()
        data.copy_(host)

    def settle(self, deadline_at: float, check: Check) -> None:
        """No effect: `receive` has waited for every broadcast."""

    def abort(self) -> None:
        threading.Thread(target=_end_gloo, args=(self._group, self._work), daemon=True).start()


def _end_gloo(group: Any, work: Any) -> None:
    """Keep a group alive while its last work runs: the destructor waits for it, and `abort` does not end it."""
    group.abort()
    while work is not None and not work.is_completed():
        time.sleep(1.0)


class _NcclRank:
    """A rank whose communicator is created by `_joined` at the first broadcast."""

    def __init__(self, init: GroupInit, rank: int, device: torch.device, timeout_s: float) -> None:
        self._init, self._number, self._device = init, rank, device
        self._timeout_s = timeout_s
        self._store = _torch_store(init, rank, "cuda", timeout_s)
        self._communicator: Communicator | None = None

    def receive(self, data: torch.Tensor, deadline_at: float, check: Check) -> None:
        self._joined(check).broadcast(
            data.data_ptr(),
            data.numel(),
            root=0,
            stream=torch.cuda.current_stream(self._device).cuda_stream,
            deadline_at=deadline_at,
            check=check,
        )

    def settle(self, deadline_at: float, check: Check) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._joined(check).wait(event.query, deadline_at=deadline_at, check=check)

    def abort(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()

    def _joined(self, check: Check) -> Communicator:
        if self._communicator is None:
            group_id = bytes(self._store.get(_NCCL_ID_KEY))
            self._communicator = self._join(group_id, check)
        return self._communicator

    def _join(self, group_id: bytes, check: Check, library: str = LIBRARY) -> Communicator:
        size, timeout_s = self._init.world_size, self._timeout_s
        return Communicator(group_id, self._number, size, timeout_s=timeout_s, check=check, library=library)


class _VllmRank(_NcclRank):
    """A rank as vLLM's `PyNcclCommunicator` creates it: joined at once, with a sum of one element as a check."""

    def __init__(self, init: GroupInit, rank: int, device: torch.device, timeout_s: float) -> None:
        from vllm.distributed.utils import StatelessProcessGroup  # noqa: PLC0415 # installed only in vLLM's workers
        from vllm.utils.nccl import find_nccl_library, unpinned_nccl_env  # noqa: PLC0415

        self._init, self._number, self._device = init, rank, device
        self._timeout_s = timeout_s
        group = StatelessProcessGroup.create(
            init.master_address, init.master_port, rank, init.world_size, store_timeout=math.ceil(timeout_s)
        )
        group_id = bytes(group.broadcast_obj(None, src=0).internal)
        with torch.cuda.device(device), unpinned_nccl_env():
            # As vLLM's trainer loads it.
            self._communicator = self._join(group_id, lambda: None, find_nccl_library())
            one = torch.zeros(1, device=device)
            self._communicator.sum(
                one.data_ptr(),
                stream=torch.cuda.current_stream(device).cuda_stream,
                deadline_at=time.monotonic() + timeout_s,
                check=lambda: None,
            )
            self.settle(time.monotonic() + timeout_s, lambda: None)


_RANKS: dict[str, Callable[[GroupInit, int, torch.device, float], _Rank]] = {
    "gloo": _GlooRank,
    "nccl": _NcclRank,
    "vllm-nccl": _VllmRank,
}


def _transport(init: GroupInit, device: torch.device) -> str:
    """Return the transport of a group's tensors. An engine on a CPU has only gloo."""
    if init.backend is GroupBackend.GLOO or device.type == "cpu":
        return "gloo"
    return "nccl" if init.backend is GroupBackend.NCCL else "vllm-nccl"


def _torch_store(init: GroupInit, rank: int, device_type: str, timeout_s: float) -> dist.Store:
    """Connect to the store of a torch.distributed process group, with the prefixes of the group's keys."""
    host = f"[{init.master_address}]" if ":" in init.master_address else init.master_address
    timeout = timedelta(seconds=timeout_s)
    url = f"tcp://{host}:{init.master_port}"
    store, _, _ = next(dist.rendezvous(url, rank, init.world_size, timeout=timeout))
    store.set_timeout(timeout)
    of_group = dist.PrefixStore(f"{init.name}/", dist.PrefixStore(init.name, store))
    return dist.PrefixStore(f"{device_type}/", of_group)


def _num_bytes(tensor: TensorInfo) -> int:
    return int(math.prod(tensor.shape) * dtype_of(tensor).itemsize)
