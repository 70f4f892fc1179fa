"""Auxiliary rows: an engine's data per token, as arrays next to the token ids. They never become JSON or lists.

The rows of one kind belong to consecutive positions of a context (prompt and reply together). The first position is
stored with them, so joining and storing rows checks their alignment. Running requests have `AuxRows`; a recorded
turn has `PackedRows`, which processes that do not need the rows pass on as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentloop.errors import InvariantBroken, UnsupportedParameter

Values: TypeAlias = npt.NDArray[Any]

ZSTD_LEVEL = 1  # the ids are nearly random: higher levels only cost time
ZSTD = "zstandard"
"""The module that packs and unpacks rows; needed only where an engine returns them."""


class AuxKind(StrEnum):
    """A kind of auxiliary rows."""

    # The experts that routed the token at the position: [layers, experts per token]
    ROUTED_EXPERTS = "routed_experts"
    # The ids from which the token at the position was sampled: those that top-k, top-p and min-p kept.
    SAMPLING_MASK = "sampling_mask"

    @property
    def num_missing(self) -> int:
        """The number of rows that the last sampled tokens lack: a token has no experts until the next forward
        pass."""
        return 1 if self is AuxKind.ROUTED_EXPERTS else 0

    def span(self, first: int, num_prompt: int, num_sampled: int) -> tuple[int, int]:
        """Return the positions `[start, end)` of the rows of `num_sampled` > 0 tokens after a prompt.

        Routed experts start at position `first`, and masks at the first sampled token.
        """
        end = num_prompt + num_sampled - self.num_missing
        return (first if self is AuxKind.ROUTED_EXPERTS else num_prompt), end


@dataclass(frozen=True, slots=True, eq=False)
class AuxRows:
    """Rows of the positions from `start` on. `values` has the rows one after the other (uint8, uint16 or int32)."""

    start: int
    values: Values
    shape: tuple[int, ...] = ()  # the shape of each row; empty: rows have different lengths
    ends: npt.NDArray[np.int32] | None = None  # end of each row in `values`, if their lengths differ

    @property
    def num_rows(self) -> int:
        return len(self.values) // math.prod(self.shape) if self.ends is None else len(self.ends)

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + self.num_rows

    @property
    def problem(self) -> str | None:
        """The reason why the arrays do not fit together; None if they do."""
        if self.ends is None:
            width = math.prod(self.shape)
            return None if width > 0 and len(self.values) % width == 0 else f"{len(self.values)} values"
        sizes = np.diff(self.ends, prepend=0)
        is_whole = int(self.ends[-1] if len(self.ends) else 0) == len(self.values)
        return None if is_whole and (sizes > 0).all() else f"rows of {sizes.min(initial=0)} or more values"

    @property
    def table(self) -> Values:
        """The rows of equal shape as one array `[rows, *shape]`."""
        return self.values.reshape(-1, *self.shape)

    def rows(self) -> list[Values]:
        """Return each row as an array."""
        return list(self.table) if self.ends is None else np.split(self.values, self.ends[:-1])

    def cut(self, start: int, end: int) -> AuxRows:
        """Return the rows of the positions in `[start, end)`."""
        first = min(max(start - self.start, 0), self.num_rows)
        last = min(max(end - self.start, first), self.num_rows)
        if self.ends is None:
            width = math.prod(self.shape)
            return AuxRows(self.start + first, self.values[first * width : last * width], self.shape)
        bounds = np.concatenate((np.zeros(1, np.int32), self.ends))
        values = self.values[bounds[first] : bounds[last]]
        return AuxRows(self.start + first, values, ends=bounds[first + 1 : last + 1] - bounds[first])

    def check_follows(self, before: AuxRows) -> None:
        """Raise InvariantBroken unless these rows continue `before`."""
        if (self.start, self.shape, self.values.dtype) != (before.end, before.shape, before.values.dtype):
            raise InvariantBroken(
                f"auxiliary rows from position {self.start} of shape {self.shape} and type {self.values.dtype} do"
                f" not continue those to {before.end} of shape {before.shape} and type {before.values.dtype}"
            )

    def packed(self) -> PackedRows:
        """Return the rows in their stored form."""
        ends = b"" if self.ends is None else self.ends.astype(np.int32).tobytes()
        frame = _zstd().ZstdCompressor(level=ZSTD_LEVEL).compress(ends + self.values.tobytes())
        return PackedRows(self.start, self.num_rows, self.shape, self.values.dtype.str, frame)


Aux: TypeAlias = Mapping[AuxKind, AuxRows]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of one turn as a zstd frame: their ends as int32 if their lengths differ, then their values."""

    start: int
    num_rows: int
    shape: tuple[int, ...]
    dtype: str
    frame: bytes

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + self.num_rows

    def unpacked(self) -> AuxRows:
        """Return the rows as arrays. Raises InvariantBroken if the frame has another number of rows."""
        data = _zstd().ZstdDecompressor().decompress(self.frame)
        num_ends = 0 if self.shape else self.num_rows
        ends = np.frombuffer(data, np.int32, num_ends)
        values = np.frombuffer(data, np.dtype(self.dtype), offset=ends.nbytes)
        rows = AuxRows(self.start, values, self.shape, None if self.shape else ends)
        if rows.problem is not None or rows.num_rows != self.num_rows:
            raise InvariantBroken(f"stored rows are damaged: {self.num_rows} of shape {self.shape}, {rows.problem}")
        return rows


PackedAux: TypeAlias = Mapping[AuxKind, PackedRows]


def routes_from(num_known: int) -> int:
    """Return the first position whose experts a turn needs if its prompt extends a path of `num_known` tokens.

    It is the path's last token, which no forward pass has read before.
    """
    return max(num_known - 1, 0)


def ragged(start: int, rows: Sequence[Sequence[int] | Values]) -> AuxRows:
    """Return rows of ids with different lengths."""
    ends = np.cumsum([len(row) for row in rows], dtype=np.int32)
    values = np.concatenate([np.asarray(row, np.int32) for row in rows]) if len(rows) else np.empty(0, np.int32)
    return AuxRows(start, values, ends=ends)


def joined(parts: Sequence[AuxRows]) -> AuxRows:
    """Return consecutive parts, at least one, as one. Raises InvariantBroken if they do not continue each other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for before, part in pairwise(parts):
        part.check_follows(before)
    values = np.concatenate([part.values for part in parts])
    if first.ends is None:
        return AuxRows(first.start, values, first.shape)
    offsets = np.cumsum([0, *(len(part.values) for part in parts[:-1])])
    ends = [part.ends + offset for part, offset in zip(parts, offsets, strict=True) if part.ends is not None]
    return AuxRows(first.start, values, ends=np.concatenate(ends).astype(np.int32))


def packed(aux: Aux | None) -> PackedAux | None:
    """Return the stored form of a turn's rows; None for none."""
    return {kind: rows.packed() for kind, rows in aux.items()} if aux else None


def has_gap(parts: Sequence[PackedRows]) -> bool:
    """Return True unless the parts cover all positions from 0 on."""
    ends = [0, *(part.end for part in parts)]
    return any(part.start != end for part, end in zip(parts, ends, strict=False))


def unpacked(parts: Iterable[PackedRows]) -> AuxRows:
    """Return the rows of consecutive turns as one array."""
    return joined([part.unpacked() for part in parts])


def mask_lacks(rows: AuxRows, token_ids: Sequence[int]) -> bool:
    """Return True if a row of a sampling mask does not contain its sampled token."""
    if rows.ends is None or len(rows.ends) != len(token_ids) or rows.problem is not None:
        return True
    if not len(token_ids):
        return False
    sizes = np.diff(rows.ends, prepend=0)
    is_sampled = rows.values == np.repeat(np.asarray(token_ids, np.int32), sizes)
    return not np.logical_or.reduceat(is_sampled, rows.ends - sizes).all()


def _zstd() -> Any:
    try:
        return import_module(ZSTD)
    except ImportError as error:
        raise UnsupportedParameter(
            f"routed experts and sampling masks are stored with zstd: `pip install {ZSTD}`", param="routed_experts"
        ) from error
