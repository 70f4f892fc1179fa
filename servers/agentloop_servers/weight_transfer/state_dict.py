"""A trainer's tensors under the names of its checkpoint: what wrappers added is taken off, nothing is left out.

Sharded tensors (DTensor, as FSDP2 and tensor-parallel trainers hold them) are gathered only when they are loaded,
one at a time; every rank of their mesh must load at the same moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from agentloop.client import NamedTensors
from agentloop.engine import TensorInfo
from agentloop.errors import InvalidRequest
from agentloop_servers.weight_transfer.layout import CAST_DTYPES, tensor_info

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_OUTERMOST = "module."  # DistributedDataParallel; further in, a model may have a part of that name


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor of the checkpoint, whole or as this rank's shard."""

    name: str
    tensor: torch.Tensor

    @property
    def num_ranks(self) -> int:
        """The number of ranks that must load it together."""
        return self.tensor.device_mesh.size() if isinstance(self.tensor, DTensor) else 1

    @property
    def load(self) -> Callable[[], torch.Tensor]:
        """The function that gives the whole tensor; collective if `num_ranks` is more than 1."""
        return _Load(self.tensor)

    def info(self, dtype: torch.dtype | None) -> TensorInfo:
        """Describe it as it is sent: in `dtype` if its own is one that may be cast, else in its own."""
        own = self.tensor.dtype
        sent = dtype if dtype is not None and own in CAST_DTYPES.values() else own
        return tensor_info(self.name, self.tensor, sent)


@dataclass(frozen=True, slots=True)
class _Load:
    tensor: torch.Tensor

    def __call__(self) -> torch.Tensor:
        own = self.tensor.detach()
        return own.full_tensor() if isinstance(own, DTensor) else own


def collect(weights: NamedTensors) -> list[NamedTensor]:
    """Return the tensors in their order. Raises InvalidRequest, naming it, for what a checkpoint cannot hold."""
    if not isinstance(weights, Iterable):
        raise _refusal(f"{type(weights).__name__} has no names for its tensors; give model.named_parameters()")
    pairs: Iterable[tuple[str, object]] = weights.items() if isinstance(weights, Mapping) else weights
    found: dict[str, NamedTensor] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise _refusal(f"weights are pairs of a name and a tensor, not {type(pair).__name__}")
        given, tensor = pair
        name = checkpoint_name(given)
        if reason := _problem(given, tensor):
            raise _refusal(f"{given!r} {reason}")
        if name in found:
            raise _refusal(f"two tensors are named {name!r}")
        assert isinstance(tensor, torch.Tensor)
        found[name] = NamedTensor(name, tensor)
    if not found:
        raise _refusal("there is no tensor in the weights")
    return list(found.values())


def checkpoint_name(name: str) -> str:
    """Return the name without what DDP, torch.compile, FSDP and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    while name.startswith(_OUTERMOST):
        name = name.removeprefix(_OUTERMOST)
    return name


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises InvalidRequest unless floating-point tensors are ever cast to it."""
    dtype = CAST_DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise InvalidRequest(f"weights are sent as one of {', '.join(CAST_DTYPES)}, not {name!r}", param="dtype")
    return dtype


def digest(tensors: Sequence[NamedTensor]) -> int:
    """Hash names, dtypes and shapes: equal on ranks that hold the same tensors (or shards) in order. 64 bits."""
    state = hashlib.blake2b(digest_size=8)
    for one in tensors:
        state.update(f"{one.name}\0{one.tensor.dtype}\0{tuple(one.tensor.shape)}\0{one.num_ranks}\n".encode())
    return int.from_bytes(state.digest())


def _problem(name: str, tensor: object) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"is no tensor but {type(tensor).__name__}; leave it out"
    if "_flat_param" in name:
        return "is a flattened shard of FSDP1; give its full state_dict(), or use fully_shard"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; only dense tensors can be sent"
    if tensor.is_meta:
        return "is on the meta device: it has no values"
    if tensor.numel() == 0:
        return "has no elements: is it one rank's empty shard?"
    return None


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="weights")
