"""Triton kernels that copy or sum the rows of many tensors on a GPU in one launch.

With one launch per tensor the host would be slower than the GPU: a commit has hundreds of tensors, during a pause.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 8, 128  # the tile of a program: whole rows, read in chunks of this many words
_WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}


class RowKernels:
    """The rows of tensors with shape [rows, words per row], dense; all must stay in place.

    `into` has tensors of the same shapes, for `copy`. `sums` has one element per row, in tensor order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor], sums: torch.Tensor) -> None:
        self._sums = sums
        self._launches: list[tuple[tl.dtype, torch.Tensor, torch.Tensor]] = []
        lengths = torch.tensor([len(one) for one in tensors])
        tiles, first_sum = -(-lengths // _ROWS), lengths.cumsum(0) - lengths
        for word in dict.fromkeys(one.dtype for one in tensors):
            own = [number for number, one in enumerate(tensors) if one.dtype is word]
            first_tile = tiles[own].cumsum(0) - tiles[own]
            rows = [
                (tensors[one].data_ptr(), into[one].data_ptr(), *tensors[one].shape, first_sum[one], first)
                for one, first in zip(own, first_tile.tolist(), strict=True)
            ]
            of_tile = torch.arange(len(own)).repeat_interleave(tiles[own])
            self._launches.append((_WORDS[word], torch.tensor(rows).to(sums.device), of_tile.to(sums.device)))

    def copy(self) -> None:
        """Copy all rows. Does not sync."""
        self._launch(is_copy=True)

    def sum(self) -> None:
        """Set `sums`, with wraparound. Does not sync."""
        self._launch(is_copy=False)

    def _launch(self, *, is_copy: bool) -> None:
        for word, tensors, of_tile in self._launches:
            if len(of_tile):
                _row_kernel[(len(of_tile),)](tensors, of_tile, self._sums, word, is_copy, _ROWS, _COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def] # Triton reads the annotations
    tensors,
    of_tile,
    sums,
    word: tl.constexpr,
    is_copy: tl.constexpr,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
) -> None:
    """Copy or sum `num_rows` rows of one tensor."""
    tile = tl.program_id(0)
    entry = tensors + tl.load(of_tile + tile) * 6
    source = tl.load(entry).to(tl.pointer_type(word))
    into = tl.load(entry + 1).to(tl.pointer_type(word))
    width = tl.load(entry + 3)
    row = (tile - tl.load(entry + 5)) * num_rows + tl.arange(0, num_rows)
    is_row = row < tl.load(entry + 2)
    total = tl.zeros((num_rows, num_columns), tl.int64)
    for start in range(0, width, num_columns):
        column = start + tl.arange(0, num_columns)
        at = row[:, None] * width + column[None, :]
        mask = is_row[:, None] & (column < width)[None, :]
        words = tl.load(source + at, mask, 0)
        if is_copy:
            tl.store(into + at, words, mask)
        else:
            total += words.to(tl.int64)
    if not is_copy:
        tl.store(sums + tl.load(entry + 4) + row, tl.sum(total, 1), is_row)
