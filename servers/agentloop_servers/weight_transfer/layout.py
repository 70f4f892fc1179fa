"""The layout of an update: the place of each tensor in the buckets that travel.

Sender and receivers compute the same `Layout` from the same tensor list and bucket size, so places never cross the
wire. Places are in the order of the list, bucket by bucket; no tensor spans two buckets, and every tensor starts at
a multiple of `ALIGNMENT_BYTES`, so that any dtype can be viewed in place.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentloop.engine.interface import TensorInfo
from agentloop.errors import CheckpointUnreadable

ALIGNMENT_BYTES = 256
ROW_BYTES = 4096  # every bucket is a whole number of rows, the unit of its checksum
DEFAULT_BUCKET_BYTES = 2**30
CAST_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The dtypes that may be cast; FP8, which has its scales in other tensors, may not."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor's place: `num_bytes` bytes at `offset` of bucket number `bucket`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All places in the order of the tensor list, and the size of each bucket in bytes."""

    places: tuple[Place, ...]
    bucket_sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The tensors' bytes, without the gaps between them."""
        return sum(place.num_bytes for place in self.places)

    @property
    def largest_bucket(self) -> int:
        """The size of the largest bucket in bytes, and so of a buffer."""
        return max(self.bucket_sizes)

    def in_bucket(self, bucket: int) -> tuple[Place, ...]:
        """Return the places of one bucket, in order."""
        first = bisect_left(self.places, bucket, key=_bucket)
        return self.places[first : bisect_right(self.places, bucket, lo=first, key=_bucket)]


def lay_out(tensors: Sequence[TensorInfo], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Layout:
    """Fill buckets of about `bucket_bytes` in order; a bigger tensor gets a bucket of its own size.

    Raises CheckpointUnreadable for no tensors, one name twice, an unknown dtype or an impossible shape.
    """
    if not tensors:
        raise CheckpointUnreadable("the update has no tensors", param="push")
    places: list[Place] = []
    sizes = [0]
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise CheckpointUnreadable(f"tensor {tensor.name} is listed twice", param="push")
        names.add(tensor.name)
        dtype = dtype_of(tensor)
        if min(tensor.shape, default=0) < 0:
            raise CheckpointUnreadable(f"tensor {tensor.name} has shape {tensor.shape}", param="push")
        num_bytes = math.prod(tensor.shape) * dtype.itemsize
        if sizes[-1] > 0 and sizes[-1] + num_bytes > bucket_bytes:
            sizes.append(0)
        places.append(Place(tensor.name, dtype, tuple(tensor.shape), len(sizes) - 1, sizes[-1], num_bytes))
        sizes[-1] += math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    # A transfer of nothing but empty tensors still has one bucket, and buffers cannot be empty.
    return Layout(tuple(places), tuple(max(1, math.ceil(size / ROW_BYTES)) * ROW_BYTES for size in sizes))


def dtype_of(tensor: TensorInfo) -> torch.dtype:
    """Return the torch dtype that a `TensorInfo` names. Raises CheckpointUnreadable for any other name."""
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointUnreadable(f"tensor {tensor.name} has the unknown dtype {tensor.dtype!r}", param="push")
    return dtype


def tensor_info(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorInfo:
    """Describe a tensor that is sent in `dtype`; None: in its own."""
    sent = tensor.dtype if dtype is None else dtype
    return TensorInfo(name, str(sent).removeprefix("torch."), tuple(tensor.shape))


def view(data: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the tensor at `place` of a bucket's bytes (one-dimensional uint8), as a view."""
    return data[place.offset : place.offset + place.num_bytes].view(place.dtype).view(place.shape)


def _bucket(place: Place) -> int:
    return place.bucket
