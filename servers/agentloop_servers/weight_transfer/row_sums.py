"""Whether tensors hold the same bytes as others did: one sum a row, for all of a model's tensors at once.

One kernel a tensor, whose views are made beforehand: while generation stands still only launches are left to do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from agentloop_servers.weight_transfer.checksum import words


class RowSums:
    """The sums of every row of these tensors, as they are at each `compute`; a row is an index of the first
    dimension. The tensors must stay where they are."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError for a tensor that is not contiguous."""
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {name} is not contiguous")
        self._names = list(tensors)
        self._rows = [words(tensor) for tensor in tensors.values()]
        self._lengths = [len(rows) for rows in self._rows]
        device = self._rows[0].device
        self._sums = torch.empty(sum(self._lengths), dtype=torch.int64, device=device)
        self._parts = self._sums.split(self._lengths)

    def compute(self) -> None:
        """Sum, in place of what was computed last. No sync."""
        for rows, part in zip(self._rows, self._parts, strict=True):
            torch.sum(rows, dim=1, dtype=torch.int64, out=part)

    def first_difference(self, other: RowSums) -> str | None:
        """The name of the first tensor whose sums differ from another's of the same shapes, both as computed last;
        None if all are equal. Syncs."""
        theirs = other._sums.to(self._sums.device)
        if torch.equal(self._sums, theirs):
            return None
        first, end = int((self._sums != theirs).int().argmax()), 0
        for name, length in zip(self._names, self._lengths, strict=True):
            end += length
            if first < end:
                return name
        raise AssertionError("the lengths are those of the sums")
