"""A sum over a tensor's bytes that sender and receiver compute on their own devices and then compare.

It finds what has gone wrong silently in weight transfers: zeros, stale or shifted memory, tensors or rows that
changed places. It is no defence against somebody who forges weights.
"""

from __future__ import annotations

import torch

from agentloop_servers.weight_transfer.layout import ROW_BYTES

# By size in bytes. The widest that divides a row: fewer elements, and int64 sums need no converted copy.
WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over rows r of (r+1) times the sum of the row's words, wrapping; a 0-dim int64 tensor, no sync.

    A row is one index of the first dimension. The value depends on the bytes and the number of rows only, and is
    the same on every device.
    """
    rows = words(tensor)
    weights = torch.arange(1, len(rows) + 1, dtype=torch.int64, device=tensor.device)
    return (rows.sum(dim=1, dtype=torch.int64) * weights).sum()


def bucket_checksum(data: torch.Tensor) -> torch.Tensor:
    """`checksum` of a whole bucket (uint8), gaps between its tensors included."""
    return checksum(data.view(-1, ROW_BYTES))


def words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as integers, [rows, words of a row]: a view, or of a copy where its memory is not dense."""
    num_rows = tensor.shape[0] if tensor.ndim > 0 else 1
    if tensor.numel() == 0:
        return torch.zeros((num_rows, 1), dtype=torch.uint8, device=tensor.device)
    flat = tensor.detach().contiguous().reshape(-1)
    row_bytes = flat.numel() // num_rows * flat.element_size()
    size, word = next((size, word) for size, word in WORDS if row_bytes % size == 0)
    if flat.storage_offset() * flat.element_size() % size:  # words must start at a multiple of their size
        flat = flat.clone()
    return flat.view(torch.uint8).view(word).view(num_rows, -1)


def to_host(sums: list[torch.Tensor]) -> list[int]:
    """0-dim int64 tensors of one device as ints, with one sync."""
    return torch.stack(sums).tolist() if sums else []
