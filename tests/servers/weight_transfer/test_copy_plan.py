"""Plans for small models whose loaders use every supported operation, and refusals of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentloop.engine.interface import TensorInfo
from agentloop_servers.weight_transfer.copy_plan import (
    Copy,
    CopyPlan,
    Fill,
    PlanRefused,
    Region,
    apply,
    apply_fills,
    check_plan,
    source,
    trace,
)

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[Any, dict[str, torch.Tensor]], None]


class Model(torch.nn.Module):
    """One matrix and one vector, loaded by a function that receives the model and all tensors."""

    def __init__(self, load: Loader) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 6)
        self.layer.requires_grad_(False)
        self.register_buffer("table", torch.zeros(3))
        self.scale = torch.ones(3)
        self.loader = load

    def load_weights(self, weights: Weights) -> None:
        self.loader(self.layer, dict(weights))


TENSORS = {"w": torch.randn(6, 4), "b": torch.randn(6)}


def infos(tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [
        TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def loaded(load: Loader, tensors: dict[str, torch.Tensor] = TENSORS) -> tuple[Model, CopyPlan]:
    """Return a model loaded by its plan, after checking that the plan gives the same result as the loader."""
    model, reference = Model(load), Model(load)
    plan = trace(model, infos(tensors))
    parameters = dict(model.named_parameters())
    apply_fills(plan, parameters)
    for name, tensor in tensors.items():
        apply(plan, name, tensor, parameters)
    reference.load_weights(iter(tensors.items()))
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameters[name], parameter), name
    assert check_plan(plan, parameters, tensors.__getitem__) == len(plan.copies)
    return model, plan


def plain(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight.data.copy_(tensors["w"])
    layer.bias.data.copy_(tensors["b"])


def by_columns(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    for column in range(4):
        layer.weight.data.narrow(1, 3 - column, 1).copy_(tensors["w"][:, column : column + 1])
    layer.bias.data[:6].copy_(tensors["b"])


def with_padding(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight.data[:5].copy_(tensors["w"][1:])
    layer.weight.data[5:].zero_()
    layer.weight[6:].data.copy_(tensors["w"][6:])  # an empty slice
    layer.bias.data[:4].copy_(tensors["b"][2:])
    layer.bias.data[4:5].fill_(1)
    layer.bias.data[5:].fill_(torch.tensor(2.0))


def as_view(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight.data.copy_(tensors["w"].view(4, 6).t())
    layer.bias.data.view(2, 3).copy_(tensors["b"].unsqueeze(0).view(3, 2).transpose(0, 1))


def through_the_device(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight.data.copy_(tensors["w"].to(layer.weight.device))
    layer.bias.data[:3].copy_(tensors["b"][3:].to(layer.weight.device))
    layer.bias.data[3:].copy_(tensors["b"].to(layer.weight.device)[:3])


def spread(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight.data.copy_(tensors["b"][:4])
    layer.bias.data.fill_(tensors["w"][2, 3])


@pytest.mark.parametrize("load", [plain, by_columns, with_padding, as_view, through_the_device, spread])
def test_views_are_plain_copies(load: Loader) -> None:
    loaded(load)


def test_floats_are_cast() -> None:
    loaded(plain, {name: tensor.to(torch.bfloat16) for name, tensor in TENSORS.items()})
    loaded(plain, {name: tensor.double() for name, tensor in TENSORS.items()})


def test_scalars_are_copied() -> None:
    def load(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
        plain(layer, {**tensors, "b": tensors["s"]})

    loaded(load, {**TENSORS, "s": torch.tensor(3.0)})


def test_a_tensor_that_nothing_takes_is_told() -> None:
    _, plan = loaded(plain, {**TENSORS, "twin": torch.ones(2)})
    assert [name for name, copies in plan.by_tensor.items() if not copies] == ["twin"]


def test_the_trace_runs_in_inference_mode() -> None:
    with torch.inference_mode():
        loaded(plain)


def transposed(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, {**tensors, "w": tensors["w"].view(4, 6).t().contiguous()})


def negated(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, {**tensors, "b": -tensors["b"]})


def joined(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, {**tensors, "b": torch.cat([tensors["b"][3:], tensors["b"][:3]])})


def rounded(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, {**tensors, "b": tensors["b"].to(torch.bfloat16)})


def half(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight.data[:3].copy_(tensors["w"][:3])
    layer.bias.data.copy_(tensors["b"])


def nothing(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight.data.copy_(tensors["w"])


def twice(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, tensors)
    layer.weight.data[2:3].copy_(tensors["w"][2:3])


def filled_first(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.bias.data.zero_()
    plain(layer, tensors)


def in_place(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, tensors)
    layer.weight.data.mul_(2)


def by_index(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.bias.data[torch.tensor([0, 1])] = tensors["b"][:2]
    plain(layer, tensors)


def as_bits(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight.data.view(torch.int32).copy_(tensors["w"].view(torch.int32))


def replaced_parameter(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    layer.weight = torch.nn.Parameter(torch.ones(6, 4))
    layer.bias.data.copy_(tensors["b"])


def replaced_storage(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, tensors)
    layer.weight.data = torch.ones(6, 4)


def re_laid_out(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, tensors)
    layer.weight.data = layer.weight.data.view(4, 6).t()


def swallowing(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    for change in (negated, plain):
        try:
            change(layer, tensors)
        except PlanRefused:
            continue


def unknown(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain(layer, {**tensors, "b": tensors["c"]})


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (transposed, "weight gets computed values"),
        (negated, "bias gets computed values"),
        (joined, "bias gets computed values"),
        (rounded, "casts tensor b"),
        (half, "weight has 24 elements, of which 12 are not written"),
        (nothing, "bias has 6 elements, of which 6 are not written"),
        (twice, "weight has elements that are written twice"),
        (filled_first, "bias has elements that are written twice"),
        (in_place, r"weight with aten\.mul_"),
        (by_index, r"bias with aten\.index_put_"),
        (as_bits, "int32 bits into parameter layer.weight"),
        (replaced_parameter, "replaces parameter layer.weight"),
        (replaced_storage, "replaces parameter layer.weight"),
        (re_laid_out, "replaces parameter layer.weight"),
        (swallowing, "bias gets computed values"),
        (unknown, "raised KeyError: 'c'"),
    ],
)
def test_everything_else_is_refused_and_leaves_no_trace(load: Loader, reason: str) -> None:
    model = Model(load)
    layer = model.layer
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    objects = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(PlanRefused, match=reason):
        trace(model, infos(TENSORS))
    assert model.layer is layer
    for name, parameter in model.named_parameters():
        assert (id(parameter), parameter.data_ptr()) == (objects[name], addresses[name])
        assert torch.equal(parameter, values[name])
        assert parameter.is_contiguous()


def test_attributes_are_as_they_were() -> None:
    def load(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
        plain(layer, tensors)
        layer.weight.is_loaded = True
        layer.num_loads = 1
        del layer.weight.kept

    model = Model(load)
    model.layer.weight.kept = "yes"
    trace(model, infos(TENSORS))
    assert vars(model.layer.weight) == {"kept": "yes"}
    assert not hasattr(model.layer, "num_loads")


@pytest.mark.parametrize("name", ["table", "scale"])
def test_a_plan_writes_parameters_only(name: str) -> None:
    model = Model(plain)

    def load(layer: Any, tensors: dict[str, torch.Tensor]) -> None:
        plain(layer, tensors)
        getattr(model, name).fill_(5)

    model.loader = load
    before = getattr(model, name).clone()
    with pytest.raises(PlanRefused, match=f"{name}, which is not a parameter"):
        trace(model, infos(TENSORS))
    assert torch.equal(getattr(model, name), before)


def test_quantised_and_emptied_layers_are_refused() -> None:
    class SomeQuantisation: ...

    quantised, emptied, packed, strided = (Model(plain) for _ in range(4))
    quantised.layer.quant_method = SomeQuantisation()
    emptied.layer.weight.data = torch.empty(0)
    packed.layer.cpu_linear = lambda inputs: inputs
    strided.layer.weight.data = torch.zeros(4, 6).t()
    for model, reason in (
        (quantised, r"layer is quantized or has another layout \(SomeQuantisation\)"),
        (emptied, r"layer\.weight is empty"),
        (packed, "layer computes with a packed copy"),
        (strided, r"layer\.weight has no storage, or is not contiguous"),
    ):
        with pytest.raises(PlanRefused, match=reason):
            trace(model, infos(TENSORS))


@pytest.mark.parametrize("hook", ["post_load_weights", "process_weights_after_loading"])
def test_a_model_that_derives_weights_is_refused(hook: str) -> None:
    model = Model(plain)
    setattr(model, hook, lambda: None)
    with pytest.raises(PlanRefused, match="derives other weights from the loaded ones"):
        trace(model, infos(TENSORS))


@pytest.mark.parametrize("has_variants", [False, True])
def test_attention_that_keeps_its_sinks_in_another_type_is_refused(has_variants: bool) -> None:
    model = Model(plain)
    impl = SimpleNamespace(_sinks_source=model.layer.bias, sinks=model.layer.bias)
    other = SimpleNamespace(sinks=model.layer.bias)  # a backend that uses the sinks unchanged
    model.layer.impl = SimpleNamespace(get_impl_variants=lambda: (other, impl)) if has_variants else impl
    trace(model, infos(TENSORS))
    impl.sinks = model.layer.bias.double()
    with pytest.raises(PlanRefused, match="layer computes with a cast copy of its sinks"):
        trace(model, infos(TENSORS))


def test_tied_parameters_count_once_and_separate_ones_must_not_share_memory() -> None:
    model = Model(plain)
    model.twin = torch.nn.Linear(4, 6)
    model.twin.weight, model.twin.bias = model.layer.weight, model.layer.bias
    assert len(trace(model, infos(TENSORS)).copies) == 2
    model.twin.weight = torch.nn.Parameter(model.layer.weight.data, requires_grad=False)
    with pytest.raises(PlanRefused, match=r"layer\.weight and twin\.weight share memory"):
        trace(model, infos(TENSORS))


def test_tensors_that_cannot_be_cast_are_refused() -> None:
    for dtype in (torch.float8_e4m3fn, torch.int8):
        with pytest.raises(PlanRefused, match=f"layer.weight has dtype torch.float32, tensor w has {dtype}"):
            trace(Model(plain), infos({**TENSORS, "w": TENSORS["w"].to(dtype)}))
    with pytest.raises(PlanRefused, match="unknown dtype float3"):
        trace(Model(plain), [TensorInfo("w", "float3", (6, 4))])
    with pytest.raises(PlanRefused, match="twice"):
        trace(Model(plain), infos(TENSORS) * 2)


def test_a_wrong_tensor_is_not_applied() -> None:
    model, plan = loaded(plain)
    parameters = dict(model.named_parameters())
    with pytest.raises(ValueError, match="shape"):
        apply(plan, "w", torch.zeros(4, 6), parameters)
    with pytest.raises(ValueError, match="contiguous"):
        apply(plan, "w", torch.zeros(4, 6).t(), parameters)
    assert torch.equal(parameters["layer.weight"], TENSORS["w"])


def test_a_tensor_may_lie_in_a_larger_buffer() -> None:
    model, plan = loaded(plain)
    buffer = torch.randn(100)
    piece = buffer[10:34].view(6, 4)
    apply(plan, "w", piece, dict(model.named_parameters()))
    assert torch.equal(model.layer.weight, piece)
    assert source(plan.copies[0], piece).data_ptr() == piece.data_ptr()


def test_the_proof_reads_files_and_finds_the_parameter(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    model, plan = loaded(with_padding)
    parameters = dict(model.named_parameters())
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert check_plan(plan, parameters, file.get_slice) == 2
        model.layer.bias.data[0] += 1
        with pytest.raises(PlanRefused, match=r"layer\.bias differs from tensor b"):
            check_plan(plan, parameters, file.get_slice)


def test_the_proof_refuses_another_shape() -> None:
    model, plan = loaded(plain)
    with pytest.raises(PlanRefused, match="another shape"):
        check_plan(plan, dict(model.named_parameters()), {**TENSORS, "w": TENSORS["w"][:5]}.__getitem__)


def test_a_plan_can_be_written_by_hand() -> None:
    whole = Region(0, (2, 3), (3, 1))
    plan = CopyPlan((Copy("p", whole, "t", whole),), (Fill("q", Region(1, (2,), (1,)), 4.0),))
    assert plan.by_tensor == {"t": plan.copies}
    q = torch.zeros(4)
    apply_fills(plan, {"q": q})
    assert q.tolist() == [0.0, 4.0, 4.0, 0.0]
