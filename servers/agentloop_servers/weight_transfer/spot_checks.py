"""The proof after a load through vLLM's own loader: some columns of every layer, as it computes with them.

A load can end without an error and have changed nothing, or only some layers (a tied output head on the CPU
build goes on with its packed copy). So every layer is compared with the checkpoint through the path that it
computes with: its parameter, and a packed copy by what it makes of unit vectors. A fixed place a layer, not the
same in all: a few columns cover the model and are cheap to read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch

PROBE_COLUMNS = 16
RELATIVE_TOLERANCE = 2.0**-7  # one unit in the last place of bfloat16


class Stored(Protocol):
    """A tensor of a checkpoint, in memory or in a file: sliced, it gives a tensor."""

    def __getitem__(self, key: Any) -> torch.Tensor: ...


Read = Callable[[str], Stored]


@dataclass(frozen=True, slots=True)
class _Strip:
    """Columns `[first, first + values.shape[1])` of a stored weight `width` wide; a norm's whole vector."""

    values: torch.Tensor
    first: int
    width: int


def compare_layers(model: torch.nn.Module, names: Set[str], read: Read) -> tuple[int, int]:
    """Compare every layer of `model` with the checkpoint's tensors `names`. Raises RuntimeError on a difference.

    Returns how many layers were compared, and how many could not be: those whose shape is not the checkpoint's
    (tensor-parallel shards, fused experts) or that it has under another name.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    name_by_weight: dict[int, str] = {}
    num_compared = num_skipped = 0
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        parts = _checkpoint_names(name, packed)
        if parts[0] not in names:  # a tied head is stored once, under its twin's name
            parts = [name_by_weight.get(id(weight), parts[0])]
        name_by_weight.setdefault(id(weight), parts[0])
        num_stored = sum(part in names for part in parts)
        if num_stored == 0:
            num_skipped += 1
            continue
        if num_stored < len(parts):
            raise RuntimeError(f"layer {name} has only {num_stored} of {len(parts)} parts in the checkpoint")
        strip = _stored_strip(name, [read(part) for part in parts])
        is_compared = False
        for actual in _effective_strips(layer, weight, strip):
            _check_equal(name, actual, strip.values)
            is_compared = True
        num_compared += is_compared
        num_skipped += not is_compared
    if num_compared == 0:
        raise RuntimeError("no layer could be compared with the checkpoint")
    return num_compared, num_skipped


def _checkpoint_names(module_name: str, packed: dict[str, list[str]]) -> list[str]:
    prefix, _, leaf = module_name.rpartition(".")
    dot = "." if prefix else ""
    return [f"{prefix}{dot}{part}.weight" for part in packed.get(leaf, [leaf])]


def _stored_strip(name: str, pieces: list[Stored]) -> _Strip:
    shape = _shape(pieces[0])
    if len(shape) == 1:
        return _Strip(torch.cat([piece[:] for piece in pieces]), 0, 1)
    first = zlib.crc32(name.encode()) % max(1, shape[1] - PROBE_COLUMNS + 1)
    values = torch.cat([piece[:, first : first + PROBE_COLUMNS] for piece in pieces])
    return _Strip(values, first, shape[1])


def _shape(piece: Any) -> list[int]:
    return list(piece.shape) if isinstance(piece, torch.Tensor) else list(piece.get_shape())


def _effective_strips(layer: Any, weight: torch.Tensor, strip: _Strip) -> Iterator[torch.Tensor]:
    """The same columns as the layer computes with them: its parameter, and its packed copy if it has one."""
    if strip.values.ndim == 1:
        if weight.shape == strip.values.shape:
            yield weight
        return
    num_rows, num_columns = strip.values.shape
    # Rows beyond the stored ones are the vocabulary's padding.
    if weight.numel() > 0 and weight.shape[0] >= num_rows and weight.shape[1] == strip.width:
        yield weight[:num_rows, strip.first : strip.first + num_columns]
    width = getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None)
    if hasattr(layer, "cpu_linear") and width == strip.width:
        unit = torch.zeros(num_columns, width, dtype=weight.dtype)
        unit[torch.arange(num_columns), strip.first + torch.arange(num_columns)] = 1
        columns = layer.cpu_linear(unit, weight, None).T
        if columns.shape[0] >= num_rows:
            yield columns[:num_rows]


def _check_equal(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    want = expected.to(device=actual.device, dtype=actual.dtype).float()
    if actual.shape != want.shape or not torch.allclose(actual.float(), want, rtol=RELATIVE_TOLERANCE):
        raise RuntimeError(f"layer {name} does not hold the checkpoint's weights after the load")
