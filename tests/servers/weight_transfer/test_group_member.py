"""A worker's handling of a trainer's part: the layout of packed buffers, and handles restricted in unpickling."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from agentloop.engine.interface import Packing, TensorInfo, TransferPart
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.group_member import broadcasts, mapped, read_handles, unpacked

INFOS = (
    TensorInfo("a", "bfloat16", (3,)),
    TensorInfo("b", "float32", (2, 2)),  # not aligned, after the first six bytes
    TensorInfo("c", "bfloat16", (4,)),
)


@pytest.mark.parametrize(
    ("packing", "buffer_bytes", "expected"),
    [
        (Packing.PLAIN, 0, ["a", "b", "c"]),
        (Packing.PACKED, 6, ["ab", "c"]),  # a buffer ends with the first tensor that exceeds it, like vLLM's
        (Packing.PACKED, 5, ["a", "b", "c"]),
        (Packing.PACKED, 1000, ["abc"]),
        (Packing.FLAT, 0, ["abc"]),
    ],
)
def test_the_broadcasts_of_a_part_are_cut_as_the_trainer_cuts_them(
    packing: Packing, buffer_bytes: int, expected: list[str]
) -> None:
    part = TransferPart("g", INFOS, packing, buffer_bytes)
    assert ["".join(one.name for one in run) for run in broadcasts(part)] == expected


def test_tensors_of_a_buffer_are_what_was_packed() -> None:
    tensors = [torch.randn(one.shape).to(getattr(torch, one.dtype)) for one in INFOS]
    data = torch.cat([one.view(-1).view(torch.uint8) for one in tensors])
    assert all(torch.equal(found, sent) for (_, found), sent in zip(unpacked(INFOS, data), tensors, strict=True))


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self._path),))


def test_handles_hold_plain_values_and_types_of_torch_alone(tmp_path: Path) -> None:
    arguments = (torch.Tensor, torch.Size((2, 3)), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 0)
    handles = [{"GPU-1": (*arguments, b"handle", 12, 0, False, b"counter", 0, b"event", True)}]
    assert read_handles(pickle.dumps(handles)) == handles
    sprung = tmp_path / "sprung"
    for data in (pickle.dumps([{"GPU-1": Trap(sprung)}]), b"no pickle"):
        with pytest.raises(CheckpointUnreadable, match="cannot be mapped"):
            list(mapped(TransferPart("g", INFOS, handles=data), torch.device("cpu"), {}))
    assert not sprung.exists()
