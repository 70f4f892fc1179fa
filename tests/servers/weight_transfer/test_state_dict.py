from __future__ import annotations

import pytest
import torch

from agentloop.engine.interface import TensorInfo
from agentloop.errors import InvalidRequest
from agentloop_servers.weight_transfer.trainer import CAST_DTYPES, checkpoint_name, collect, digest, parse_dtype

ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("model.embed.weight", "model.embed.weight"),
        ("module.model.embed.weight", "model.embed.weight"),
        ("module.module.a", "a"),
        ("_orig_mod.module.a", "a"),
        ("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module._orig_mod.w", "model.layers.1.w"),
        ("vision.module.weight", "vision.module.weight"),
    ],
)
def test_what_wrappers_add_is_taken_off(given: str, name: str) -> None:
    assert checkpoint_name(given) == name


def test_modules_mappings_and_generators_are_taken() -> None:
    model = torch.nn.Linear(3, 2)
    for weights in (model.named_parameters(), model.state_dict(), dict(model.named_parameters())):
        tensors = collect(weights)
        assert [one.name for one in tensors] == ["weight", "bias"]
        assert tensors[0].load().equal(model.weight)
        assert not tensors[0].load().requires_grad
        assert tensors[0].load().data_ptr() == model.weight.data_ptr()


def test_only_plain_floating_point_tensors_change_their_dtype() -> None:
    given = {
        "a": ONE,
        "b": ONE.half(),
        "c": ONE.to(torch.int8),
        "d": torch.tensor(True),
        "e": ONE.to(torch.float8_e4m3fn),
        "f": ONE.to(torch.complex64),
    }
    dtypes = [one.info(torch.bfloat16).dtype for one in collect(given)]
    assert dtypes == ["bfloat16", "bfloat16", "int8", "bool", "float8_e4m3fn", "complex64"]
    assert [one.info(None).dtype for one in collect(given)][:2] == ["float32", "float16"]
    assert collect(given)[0].info(None) == TensorInfo("a", "float32", (2, 3))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "the weights have no tensors"),
        ({"a": ONE, "b": 1.5}, "'b' is a float, not a tensor"),
        ({"a": ONE.numpy()}, "'a' is a ndarray, not a tensor"),
        (torch.nn.Linear(2, 2), "pass model.named_parameters"),
        ([ONE], "pairs of a name and a tensor, not Tensor"),
        ([("a", ONE, 1)], "pairs of a name and a tensor, not tuple"),
        ([(1, ONE)], "pairs of a name and a tensor"),
        ([("a", ONE), ("module.a", ONE)], "two tensors have the checkpoint name 'a'"),
        ({"a": ONE.to("meta")}, "on the meta device"),
        ({"a": ONE.to_sparse()}, "only dense tensors"),
        ({"a": torch.empty(0)}, "no elements"),
        ({"layers.0._flat_param": ONE}, "FSDP1"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_name(weights: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        collect(weights)  # type: ignore[arg-type]
    assert caught.value.param == "weights"


def test_a_digest_tells_names_dtypes_shapes_and_order_apart() -> None:
    cases = ({"a": ONE}, {"b": ONE}, {"a": ONE.half()}, {"a": ONE.T}, {"a": ONE, "b": ONE}, {"b": ONE, "a": ONE})
    assert len({digest(collect(weights)) for weights in cases}) == len(cases)
    assert digest(collect({"a": ONE})) == digest(collect({"module.a": torch.zeros(2, 3)}))


def test_dtypes_are_named() -> None:
    for name, dtype in CAST_DTYPES.items():
        assert parse_dtype(name) == parse_dtype(f"torch.{name}") == dtype
    for name in ("int8", "float8_e4m3fn", "tensor", ""):
        with pytest.raises(InvalidRequest, match="expected float64"):
            parse_dtype(name)
