"""The layout of an update: the position of each tensor in the buckets that are sent.

Sender and receivers compute the same `Layout` from the tensor list and the bucket size, so positions are not sent.
Tensors fill the buckets in list order; none spans two buckets, and each starts at a multiple of `ALIGNMENT_BYTES`,
so that a view of any dtype is possible.
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
ROW_BYTES = 4096  # bucket sizes are multiples of a row, the unit of the bucket checksum
DEFAULT_BUCKET_BYTES = 2**30
CAST_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The dtypes that may be cast. FP8 may not, because its scales are in other tensors."""


@dataclass(frozen=True, slots=True)
class Place:
    """The position of one tensor: `num_bytes` bytes at `offset` in bucket `bucket`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions in tensor list order, and the size of each bucket in bytes."""

    places: tuple[Place, ...]
    bucket_sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors, without the gaps between them."""
        return sum(place.num_bytes for place in self.places)

    @property
    def largest_bucket(self) -> int:
        """The size of the largest bucket in bytes, which is also the buffer size."""
        return max(self.bucket_sizes)

    def in_bucket(self, bucket: int) -> tuple[Place, ...]:
        """Return the positions in one bucket, in order."""
        first = bisect_left(self.places, bucket, key=_bucket)
        return self.places[first : bisect_right(self.places, bucket, lo=first, key=_bucket)]


def lay_out(tensors: Sequence[TensorInfo], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Layout:
    """Fill buckets of about `bucket_bytes` in order. A larger tensor gets a bucket of its size.

    Raises CheckpointUnreadable for an empty list, a duplicate name, an unknown dtype or an invalid shape.
    """
    if not tensors:
        raise CheckpointUnreadable("the update has no tensors: send at least one", param="push")
    places: list[Place] = []
    sizes = [0]
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise CheckpointUnreadable(f"tensor {tensor.name} is listed twice: send each tensor once", param="push")
        names.add(tensor.name)
        dtype = dtype_of(tensor)
        if min(tensor.shape, default=0) < 0:
            raise CheckpointUnreadable(f"tensor {tensor.name} has the invalid shape {tensor.shape}", param="push")
        num_bytes = math.prod(tensor.shape) * dtype.itemsize
        if sizes[-1] > 0 and sizes[-1] + num_bytes > bucket_bytes:
            sizes.append(0)
        places.append(Place(tensor.name, dtype, tuple(tensor.shape), len(sizes) - 1, sizes[-1], num_bytes))
        sizes[-1] += math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    # If all tensors are empty there is still one bucket, because buffers cannot be empty.
    return Layout(tuple(places), tuple(max(1, math.ceil(size / ROW_BYTES)) * ROW_BYTES for size in sizes))


def dtype_of(tensor: TensorInfo) -> torch.dtype:
    """Return the torch dtype of a `TensorInfo`. Raises CheckpointUnreadable for an unknown name."""
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointUnreadable(f"tensor {tensor.name} has the unknown dtype {tensor.dtype!r}", param="push")
    return dtype


def tensor_info(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorInfo:
    """Describe a tensor that is sent in `dtype`; None for its own dtype."""
    sent = tensor.dtype if dtype is None else dtype
    return TensorInfo(name, str(sent).removeprefix("torch."), tuple(tensor.shape))


def view(data: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a view of the tensor at `place` in a bucket's bytes (one-dimensional uint8)."""
    return data[place.offset : place.offset + place.num_bytes].view(place.dtype).view(place.shape)


def _bucket(place: Place) -> int:
    return place.bucket
