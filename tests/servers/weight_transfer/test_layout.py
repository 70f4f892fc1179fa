"""Positions of tensors in buckets: both sides compute them; they must be equal, aligned and disjoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentloop.engine.interface import TensorInfo
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.layout import ALIGNMENT_BYTES, lay_out, view

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")


def tensors(shapes: list[tuple[str, tuple[int, ...]]]) -> list[TensorInfo]:
    return [TensorInfo(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(shapes)]


def test_buckets_fill_in_order_and_a_large_tensor_has_its_own():
    layout = lay_out(
        tensors([("float32", (16,)), ("float32", (64,)), ("float32", (1000,)), ("bfloat16", (3,))]),
        bucket_bytes=512,
    )
    assert [place.bucket for place in layout.places] == [0, 0, 1, 2]
    assert [place.offset for place in layout.places] == [0, 256, 0, 0]
    assert layout.bucket_sizes == (4096, 4096, 4096)
    assert layout.largest_bucket == 4096
    assert layout.num_bytes == 64 + 256 + 4000 + 6
    assert [place.name for place in layout.in_bucket(0)] == ["t0", "t1"]
    assert [place.name for place in layout.in_bucket(2)] == ["t3"]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3).map(tuple)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 20_000),
)
def test_places_are_aligned_disjoint_and_inside_their_bucket(shapes, bucket_bytes):
    infos = tensors(shapes)
    layout = lay_out(infos, bucket_bytes)
    assert layout == lay_out(list(infos), bucket_bytes)
    assert [place.name for place in layout.places] == [info.name for info in infos]
    found = [place for bucket in range(len(layout.bucket_sizes)) for place in layout.in_bucket(bucket)]
    assert found == list(layout.places)
    end = {}
    for place in layout.places:
        assert place.offset % ALIGNMENT_BYTES == 0
        assert place.offset >= end.get(place.bucket, 0)
        end[place.bucket] = place.offset + place.num_bytes
        assert end[place.bucket] <= layout.bucket_sizes[place.bucket]


def test_a_view_has_the_tensors_form_and_shares_the_buckets_memory():
    layout = lay_out(tensors([("bfloat16", (3, 5)), ("float32", ()), ("float32", (0, 4))]))
    data = torch.zeros(layout.largest_bucket, dtype=torch.uint8)
    for place in layout.places:
        view(data, place).fill_(7)
    assert view(data, layout.places[0]).shape == (3, 5)
    assert view(data, layout.places[0]).float().sum() == 7 * 15
    assert view(data, layout.places[1]).item() == 7
    assert view(data, layout.places[2]).shape == (0, 4)
    assert int(data.count_nonzero()) > 15


@pytest.mark.parametrize(
    ("infos", "reason"),
    [
        ([], "no tensors"),
        ([TensorInfo("a", "float32", (1,)), TensorInfo("a", "float32", (2,))], "a is listed twice"),
        ([TensorInfo("a", "Tensor", (1,))], "unknown dtype"),
        ([TensorInfo("a", "no_such", (1,))], "unknown dtype"),
        ([TensorInfo("a", "float32", (2, -1))], "shape"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(infos, reason):
    with pytest.raises(CheckpointUnreadable, match=reason):
        lay_out(infos)
