"""Checksums over a tensor's bytes, their sensitivity, and layers compared with a checkpoint."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from agentloop_servers.weight_transfer.verify import (
    RowChecksums,
    checksum,
    compare_layers,
    first_not_finite,
    to_host,
)

PlainChecksums = RowChecksums

SHAPES = [(), (1,), (7,), (8, 16), (5, 3), (3, 1, 5), (64, 33), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64]


def reference(tensor: torch.Tensor) -> int:
    """The definition, computed with Python's integers."""
    if tensor.numel() == 0:
        return 0
    num_rows = tensor.shape[0] if tensor.ndim else 1
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    row_bytes = len(data) // num_rows
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    total = 0
    for row in range(num_rows):
        words = data[row * row_bytes : (row + 1) * row_bytes]
        for start in range(0, row_bytes, size):
            total += (row + 1) * int.from_bytes(words[start : start + size], "little", signed=size > 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_what_its_definition_says(shape, dtype):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert checksum(tensor).item() == reference(tensor)


def checksums(tensors):
    return to_host([checksum(tensor) for tensor in tensors])


def test_zeros_swapped_rows_and_one_changed_bit_are_found():
    torch.manual_seed(0)
    tensor = torch.randn(16, 24).bfloat16()
    swapped = tensor.clone()
    swapped[[2, 9]] = swapped[[9, 2]]
    changed = tensor.clone()
    changed.view(torch.int16)[11, 3] ^= 1
    found = checksums([tensor, torch.zeros_like(tensor), swapped, changed, tensor.roll(1, 0)])
    assert len(set(found)) == 5


def test_memory_layout_and_position_do_not_matter():
    torch.manual_seed(0)
    tensor = torch.randn(6, 8)
    shifted = torch.empty(49)[1:].view(6, 8).copy_(tensor)  # not aligned for eight-byte words
    turned = tensor.T.contiguous().T
    assert checksums([tensor, shifted, turned]) == [checksum(tensor).item()] * 3


def test_no_tensors_have_no_sums():
    assert checksums([]) == []


def test_a_convolution_is_compared():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, kernel_size=2, bias=False))
    stored = {"0.weight": model[0].weight.detach().clone()}
    assert compare_layers(model, stored.keys(), stored.__getitem__) == (1, 0)
    stored["0.weight"][5, 1, 0, 1] += 1
    with pytest.raises(RuntimeError, match="layer 0 differs from the checkpoint"):
        compare_layers(model, stored.keys(), stored.__getitem__)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_found_in_every_float_type(dtype, bad):
    values = torch.randn(5, 7)
    values[4, 2] = float("nan") if dtype is torch.float8_e4m3fn else bad  # the dtype has no infinities
    tensors = {"good": torch.randn(5, 7).to(dtype), "bad": values.to(dtype), "other": torch.ones(3).to(dtype)}
    assert first_not_finite(tensors) == "bad"
    del tensors["bad"]
    assert first_not_finite(tensors) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_greatest_numbers_of_a_type_are_numbers(dtype):
    ends = torch.tensor([torch.finfo(dtype).min, 0.0, torch.finfo(dtype).max], dtype=torch.float64).to(dtype)
    assert first_not_finite({"ends": ends, "none": ends[:0], "one": ends[2]}) is None


def test_integers_and_flags_are_numbers():
    tensors = {
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "bool": torch.tensor([True]),
        "none": torch.ones(0),
    }
    assert first_not_finite(tensors) is None


def test_a_view_and_one_number_are_looked_at():
    whole = torch.zeros(6, 4)
    whole[2, 1] = float("nan")
    assert first_not_finite({"turned": whole.T, "part": whole[3:]}) == "turned"
    assert first_not_finite({"scale": torch.tensor(float("inf"))}) == "scale"


FP8 = torch.float8_e4m3fn
ODD = [
    (torch.float32, (5, 640)),
    (torch.bfloat16, (9,)),
    (FP8, (7, 3)),
    (torch.bfloat16, (3, 4162)),
    (FP8, (17, 130)),
]
ODD += [(torch.float32, ()), (torch.bfloat16, (2, 64, 512)), (torch.float32, (0, 4))]


def odd_tensors(device="cpu"):
    """Return tensors of every word size, with odd numbers of rows and words, and one inside another's memory."""
    torch.manual_seed(0)
    made = {f"{n}": (torch.randn(shape) * 50).to(dtype).to(device) for n, (dtype, shape) in enumerate(ODD)}
    return made | {"inside": torch.randn(99).bfloat16().to(device)[3:80].view(11, 7)}


INTERPRETED = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs under TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(params=["cpu", pytest.param("triton", marks=INTERPRETED), pytest.param("cuda", marks=GPU)])
def device(request, monkeypatch):
    """The device; `triton` runs the kernels in the interpreter on a CPU."""
    if request.param != "triton":
        return request.param
    from agentloop_servers.weight_transfer import row_kernels  # noqa: PLC0415 - needs Triton

    class Interpreted(RowChecksums):
        def __init__(self, *tensors):
            super().__init__(*tensors)
            self._kernels = row_kernels.RowKernels(self._rows, self._into, self._sums)

    monkeypatch.setattr(sys.modules[__name__], "RowChecksums", Interpreted)
    return "cpu"


def test_rows_are_copied_byte_for_byte_and_summed_alike_everywhere(device):
    tensors = odd_tensors(device)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sent, held = RowChecksums(tensors, into), RowChecksums(into)
    sent.load_kernels()
    sent.compute()
    sent.copy()
    held.compute()
    assert held.first_difference(sent) is None
    plain = PlainChecksums({name: tensor.cpu() for name, tensor in tensors.items()})
    plain.compute()
    assert held.first_difference(plain) is None  # a copy that is staged in the host's memory has the same checksums
    for name, tensor in tensors.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), into[name].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("name", ["0", "1", "2", "3", "4", "5", "6", "inside"])
def test_one_changed_bit_of_any_tensor_is_found(device, name):
    tensors = odd_tensors(device)
    into = {name: tensor.clone() for name, tensor in tensors.items()}
    into[name].view(-1).view(torch.uint8)[-1] ^= 1
    sent, held = RowChecksums(tensors), RowChecksums(into)
    sent.compute()
    held.compute()
    assert held.first_difference(sent) == name


def test_parts_of_an_experts_matrix_that_changed_places_are_found():
    matrix = torch.randn(2, 64, 512).bfloat16()
    turned = matrix.view(2, 2, -1).flip(1).reshape(matrix.shape)
    sent, held = RowChecksums({"w": matrix}), RowChecksums({"w": turned})
    sent.compute()
    held.compute()
    assert held.first_difference(sent) == "w"


@pytest.mark.parametrize("tensor", [torch.randn(4, 6).T, torch.empty(49)[1:].view(6, 8)])
def test_what_cannot_be_summed_in_place_is_refused(tensor):
    with pytest.raises(ValueError, match="tensor w is not contiguous"):
        RowChecksums({"w": tensor})
