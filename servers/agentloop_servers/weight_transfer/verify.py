"""Verification that weights arrived unchanged and that the model computes with them.

Checksums are sums of a tensor's words, computed by sender and receiver on their own devices. They detect silent
transfer errors: zeros, stale or shifted memory, exchanged tensors or rows. They do not detect forged weights. Sums
do not detect NaN that was sent, so finiteness is checked separately.

Spot checks follow a load by vLLM's own loader, which can succeed without changing all layers (the CPU build keeps
a packed copy of a tied output head). They compare a few columns of each layer, as it computes with them, with the
checkpoint.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from agentloop_servers.weight_transfer.layout import ROW_BYTES

if TYPE_CHECKING:
    from agentloop_servers.weight_transfer.row_kernels import RowKernels

PROBE_COLUMNS = 16
RELATIVE_TOLERANCE = 2.0**-7  # one unit in the last place of bfloat16
FP8_TOLERANCE = 2.0**-4  # half a unit in the last place of e4m3, which has three fraction bits
FP8_LEAST = 2.0**-9  # its smallest positive value, in units of the scale
_PART_WORDS = 4096  # a longer row is split, because the whole matrix of an expert is one row
# By size in bytes. The widest word that divides a row has the fewest elements, and int64 sums need no conversion.
WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over rows r of (r+1) times the sum of the row's words, with wraparound, as a 0-dim int64
    tensor.

    Does not sync. A row is one index of the first dimension. The value depends only on the bytes and the number of
    rows, so it is equal on all devices.
    """
    rows = words(tensor)
    weights = torch.arange(1, len(rows) + 1, dtype=torch.int64, device=tensor.device)
    return (rows.sum(dim=1, dtype=torch.int64) * weights).sum()


def bucket_checksum(data: torch.Tensor) -> torch.Tensor:
    """Return the `checksum` of a bucket (uint8), with the gaps between its tensors."""
    return checksum(data.view(-1, ROW_BYTES))


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bytes as integers, [rows, words per row]; of a copy if its memory is not
    dense."""
    num_rows = tensor.shape[0] if tensor.ndim > 0 else 1
    if tensor.numel() == 0:
        return torch.zeros((num_rows, 1), dtype=torch.uint8, device=tensor.device)
    flat = tensor.detach().contiguous().reshape(-1)
    row_bytes = flat.numel() // num_rows * flat.element_size()
    size, word = next((size, word) for size, word in WORDS if row_bytes % size == 0)
    if flat.storage_offset() * flat.element_size() % size:  # words must be aligned to their size
        flat = flat.clone()
    return flat.view(torch.uint8).view(word).view(num_rows, -1)


def to_host(sums: list[torch.Tensor]) -> list[int]:
    """Return 0-dim int64 tensors of one device as ints, with one sync."""
    return torch.stack(sums).tolist() if sums else []


class RowChecksums:
    """The checksums of the rows of some tensors, as of the last `compute`. The tensors must stay in place.

    A row is an index of the first dimension, or a part of it if it is long. All launches are prepared here,
    because `copy` and `compute` run while generation is paused: on a GPU one launch each.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor] | None = None) -> None:
        """`into` has tensors of the same names and shapes, for `copy`.

        Raises ValueError for a tensor that is not contiguous.
        """
        self._names = list(tensors)
        self._rows = [_rows(name, tensor) for name, tensor in tensors.items()]
        self._into = self._rows if into is None else [_rows(name, into[name]) for name in self._names]
        self._lengths = [len(rows) for rows in self._rows]
        device = self._rows[0].device
        self._sums = torch.empty(sum(self._lengths), dtype=torch.int64, device=device)
        self._kernels: RowKernels | None = None
        if device.type == "cuda" and self._into[0].device == device:
            from agentloop_servers.weight_transfer.row_kernels import RowKernels  # noqa: PLC0415 - needs Triton

            self._kernels = RowKernels(self._rows, self._into, self._sums)

    def compute(self) -> None:
        """Compute the sums again. Does not sync."""
        if self._kernels is not None:
            self._kernels.sum()
            return
        for rows, part in zip(self._rows, self._sums.split(self._lengths), strict=True):
            torch.sum(rows, dim=1, dtype=torch.int64, out=part)

    def copy(self) -> None:
        """Copy all tensors into `into`. Does not sync."""
        if self._kernels is not None:
            self._kernels.copy()
        else:
            torch._foreach_copy_(self._into, self._rows, non_blocking=True)

    def load_kernels(self) -> None:
        """Launch the kernels of `copy` on a few words, because CUDA takes 12 ms to load a kernel at its first
        launch."""
        small = {str(rows.dtype): rows.new_zeros(1, 1) for rows in self._rows}
        RowChecksums(small, {name: one.to(self._into[0].device) for name, one in small.items()}).copy()

    def first_difference(self, other: RowChecksums) -> str | None:
        """Return the name of the first tensor with a sum that differs from `other`; None if all are equal.

        Both must have tensors of the same shapes, and must be computed. Syncs.
        """
        theirs = other._sums.to(self._sums.device)
        if torch.equal(self._sums, theirs):
            return None
        first, end = int((self._sums != theirs).int().argmax()), 0
        for name, length in zip(self._names, self._lengths, strict=True):
            end += length
            if first < end:
                return name
        raise AssertionError("a checksum that differs belongs to no tensor: the checksums do not match the lengths")


def _rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's words, with long rows split. Raises ValueError if the memory is not dense."""
    rows = words(tensor)
    if tensor.numel() > 0 and rows.data_ptr() != tensor.data_ptr():
        raise ValueError(f"tensor {name} is not contiguous")
    part = math.gcd(rows.shape[1], _PART_WORDS)
    return rows.view(-1, part) if rows.shape[1] > _PART_WORDS and part >= _PART_WORDS // 16 else rows


class FiniteCheck:
    """Checks tensors for NaN and infinite values. Does not sync before `first_bad`."""

    def __init__(self) -> None:
        self._ends: dict[str, torch.Tensor] = {}  # name -> the minimum and maximum, or NaN if a value is not finite

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Check a tensor's current values. A later call with the same name replaces the earlier result."""
        if tensor.numel() == 0:
            return
        tensor = tensor.detach()
        if tensor.dtype in _FLOAT8_NOT_FINITE:
            is_bad = _FLOAT8_NOT_FINITE[tensor.dtype](tensor.view(torch.uint8))
            self._ends[name] = torch.where(is_bad, float("nan"), 0.0).double().expand(2)
        elif tensor.is_floating_point():
            self._ends[name] = torch.stack(torch.aminmax(tensor)).double()
        # Other dtypes have only finite values.

    def first_bad(self) -> str | None:
        """Return the name of the first tensor with a value that is not finite. Syncs once per device."""
        by_device: dict[torch.device, list[str]] = {}
        for name, ends in self._ends.items():
            by_device.setdefault(ends.device, []).append(name)
        for names in by_device.values():
            is_finite = torch.isfinite(torch.stack([self._ends[name] for name in names])).all(dim=1).tolist()
            for name, one in zip(names, is_finite, strict=True):
                if not one:
                    return name
        return None


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN or infinite value."""
    check = FiniteCheck()
    for name, tensor in tensors.items():
        check.add(name, tensor)
    return check.first_bad()


_FLOAT8_NOT_FINITE: Mapping[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.float8_e4m3fn: lambda bits: ((bits & 0x7F) == 0x7F).any(),  # it has no infinities
    torch.float8_e5m2: lambda bits: (bits & 0x7F).amax() >= 0x7C,
    torch.float8_e4m3fnuz: lambda bits: (bits == 0x80).any(),  # its only NaN has the bits of minus zero
    torch.float8_e5m2fnuz: lambda bits: (bits == 0x80).any(),
    torch.float8_e8m0fnu: lambda bits: (bits == 0xFF).any(),
}
"""Tests the bits of dtypes that torch cannot reduce (OCP 8-bit floating point, 2023)."""


Read = Callable[[str], Any]
"""Returns a checkpoint's tensor by name, in memory or as a file slice; both can be indexed."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns `[first, first + values.shape[1])` of a stored weight with `width` columns; all values of a
    norm."""

    values: torch.Tensor
    first: int
    width: int


def compare_layers(
    model: torch.nn.Module, names: Set[str], read: Read, packed: Mapping[str, Sequence[str]] | None = None
) -> tuple[int, int]:
    """Compare every layer of `model` with the checkpoint's tensors `names`. Raises RuntimeError for a difference.

    `packed` maps fused layers to the checkpoint's names of their parts; None: the model's own mapping in vLLM's
    form. Returns the numbers of compared layers and of not comparable ones, which have another shape
    (tensor-parallel shards, fused experts) or another name.
    """
    packed = getattr(model, "packed_modules_mapping", {}) if packed is None else packed
    name_by_weight: dict[int, str] = {}
    num_compared = num_skipped = 0
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            num_skipped += bool(layer._parameters)
            continue
        parts = _checkpoint_names(name, packed)
        if parts[0] not in names:  # a tied head is stored once, under the name of the embeddings
            parts = [name_by_weight.get(id(weight), parts[0])]
        name_by_weight.setdefault(id(weight), parts[0])
        num_stored = sum(part in names for part in parts)
        if num_stored == 0:
            num_skipped += 1
            continue
        if num_stored < len(parts):
            raise RuntimeError(
                f"layer {name} is incomplete in the checkpoint: it has {num_stored} of {len(parts)} parts"
            )
        stored = _stored_columns(name, [read(part) for part in parts])
        is_compared = False
        for actual in _effective_columns(layer, weight, stored):
            _check_equal(name, actual, stored.values)
            is_compared = True
        for actual, scale in _dequantised_columns(layer, weight, stored):
            _check_equal(name, actual, stored.values, FP8_TOLERANCE, FP8_LEAST * scale)
            is_compared = True
        num_compared += is_compared
        num_skipped += not is_compared
    if num_compared == 0:
        raise RuntimeError("no layer could be compared with the checkpoint")
    return num_compared, num_skipped


def _checkpoint_names(module_name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    prefix, _, leaf = module_name.rpartition(".")
    dot = "." if prefix else ""
    return [f"{prefix}{dot}{part}.weight" for part in packed.get(leaf, [leaf])]


def _stored_columns(name: str, pieces: list[Any]) -> _Columns:
    shape = _shape(pieces[0])
    if len(shape) == 1:
        return _Columns(torch.cat([piece[:] for piece in pieces]), 0, 1)
    # The columns are fixed per layer and differ between layers: a few columns cover the model and are cheap to
    # read.
    first = zlib.crc32(name.encode()) % max(1, shape[1] - PROBE_COLUMNS + 1)
    values = torch.cat([piece[:, first : first + PROBE_COLUMNS] for piece in pieces])
    return _Columns(values, first, shape[1])


def _shape(piece: Any) -> list[int]:
    return list(piece.shape) if isinstance(piece, torch.Tensor) else list(piece.get_shape())


def _effective_columns(layer: Any, weight: torch.Tensor, stored: _Columns) -> Iterator[torch.Tensor]:
    """Yield the same columns of the layer's parameter, and of its packed copy if it has one."""
    if stored.values.ndim == 1:
        if weight.shape == stored.values.shape:
            yield weight
        return
    if weight.dtype in _FLOAT8_NOT_FINITE:
        return
    num_rows, num_columns, *kernel = stored.values.shape
    if kernel:  # a convolution, with which vision models cut an image into patches
        if list(weight.shape) == [num_rows, stored.width, *kernel]:
            yield weight[:, stored.first : stored.first + num_columns]
        return
    # Further rows are padding of the vocabulary.
    if weight.numel() > 0 and weight.shape[0] >= num_rows and weight.shape[1] == stored.width:
        yield weight[:num_rows, stored.first : stored.first + num_columns]
    # The width of a shard, a complete layer or a head.
    widths = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next((getattr(layer, name) for name in widths if hasattr(layer, name)), None)
    # A packed copy can be read only by products, here with unit vectors.
    if hasattr(layer, "cpu_linear") and width == stored.width:
        unit = torch.zeros(num_columns, width, dtype=weight.dtype)
        unit[torch.arange(num_columns), stored.first + torch.arange(num_columns)] = 1
        columns = layer.cpu_linear(unit, weight, None).T
        if columns.shape[0] >= num_rows:
            yield columns[:num_rows]


def _dequantised_columns(
    layer: torch.nn.Module, weight: torch.Tensor, stored: _Columns
) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield the same columns of an FP8 weight, and its largest scale. vLLM stores such a weight transposed.

    Yields nothing for a weight with block scales or padding.
    """
    scales = layer._parameters.get("weight_scale")
    if weight.dtype not in _FLOAT8_NOT_FINITE or scales is None:
        return
    num_rows, num_columns = stored.values.shape
    if list(weight.shape) == [stored.width, num_rows] and scales.numel() in (1, num_rows):
        rows = weight[stored.first : stored.first + num_columns].float()
        yield (rows * scales.reshape(1, -1)).T, float(scales.max())


def _check_equal(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    relative: float = RELATIVE_TOLERANCE,
    absolute: float = 1e-8,
) -> None:
    want = expected.to(device=actual.device, dtype=actual.dtype).float()
    if actual.shape != want.shape or not torch.allclose(actual.float(), want, rtol=relative, atol=absolute):
        raise RuntimeError(f"layer {name} differs from the checkpoint after the load")
