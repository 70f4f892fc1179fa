"""Reading a LoRA folder without torch, and refusals before vLLM reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.checkpoint import inspect_checkpoint
from agentloop_servers.weight_transfer.lora import (
    check_adapter,
    read_adapter,
    tensor_names,
    write_zero_adapter,
)
from tests.support.transfer.adapters import ALL_LINEAR, POLICY, write_adapter

LAYER = "model.layers.0.self_attn.k_proj"
SERVED = inspect_checkpoint(str(POLICY)).tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def configure(folder: Path, **fields: object) -> str:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return str(folder)


def change(folder: Path, add: dict[str, torch.Tensor], *, drop: str = "") -> str:
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    save_file({**tensors, **add}, path)
    return str(folder)


def test_an_adapter_is_what_its_files_say(folder):
    adapter = check_adapter(str(folder), 8, SERVED)
    assert len(adapter.layers) == len(ALL_LINEAR) * 4
    layer = adapter.layers[LAYER]
    assert (layer.rank, layer.scaling, layer.shape) == (4, 2.0, SERVED[f"{LAYER}.weight"].shape)
    tensors = load_file(folder / "adapter_model.safetensors").values()
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors)


def test_the_scaling_is_that_of_peft(folder):
    assert read_adapter(configure(folder, use_rslora=True)).layers[LAYER].scaling == 8 / 4**0.5
    patterns = {"alpha_pattern": {"self_attn.k_proj": 2, "proj": 1}, "use_rslora": False}
    layers = read_adapter(configure(folder, **patterns)).layers
    assert layers[LAYER].scaling == 0.5
    assert layers["model.layers.0.self_attn.q_proj"].scaling == 2.0  # "proj" does not start after a dot


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "rank 0"),
        ({"r": "four"}, "adapter_config.json"),
        ({"r": 3}, "do not have rank 3"),
        ({"rank_pattern": {"k_proj": 2}}, "do not have rank 2"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias 'all'"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    ],
)
def test_a_configuration_that_vllm_cannot_follow_is_refused(folder, fields, message):
    with pytest.raises(CheckpointUnreadable, match=message) as caught:
        check_adapter(configure(folder, **fields), 8)
    assert caught.value.param == "adapter"
    assert "\n" not in str(caught.value)


def test_a_rank_above_the_engine_s_is_refused(folder):
    with pytest.raises(CheckpointUnreadable, match=r"has rank 4, above the engine's 2"):
        check_adapter(str(folder), 2)


def test_tensors_that_do_not_belong_are_refused(folder, tmp_path):
    name_a, name_b = tensor_names(LAYER)
    wide = {name_a: torch.zeros(4, 7), name_b: torch.zeros(64, 4)}
    cases = [
        ({"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "", "lm_head.weight is not the lora_A or lora_B"),
        ({}, name_b, f"layer {LAYER} has no lora_B"),
        (wide, "", f"layer {LAYER} adapts a weight"),
        (dict(zip(tensor_names("model.layers.9.self_attn.k_proj"), wide.values(), strict=True)), "", "no layer"),
    ]
    for number, (add, drop, message) in enumerate(cases):
        other = write_adapter(tmp_path / str(number))
        with pytest.raises(CheckpointUnreadable, match=message):
            check_adapter(change(other, add, drop=drop), 8, SERVED)


def test_a_folder_that_is_no_adapter_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointUnreadable, match=r"cannot read adapter_config\.json"):
        check_adapter(str(POLICY), 8)
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "model.safetensors")
    with pytest.raises(CheckpointUnreadable, match="only the file"):
        check_adapter(str(folder), 8)
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointUnreadable):
        check_adapter(str(folder), 8)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointUnreadable, match="no safetensors file"):
        check_adapter(str(folder), 8)


def test_the_zero_adapter_fits_the_model_and_is_zero(tmp_path):
    write_zero_adapter(str(POLICY), str(tmp_path))
    adapter = check_adapter(str(tmp_path), 1, SERVED)
    assert len(adapter.layers) == 1
    assert all(not tensor.any() for tensor in load_file(tmp_path / "adapter_model.safetensors").values())


def test_a_model_without_weights_says_the_shape_in_its_config(tmp_path):
    model, folder = tmp_path / "model", tmp_path / "zero"
    model.mkdir()
    folder.mkdir()
    with pytest.raises(CheckpointUnreadable, match=r"no weights or usable config\.json"):
        write_zero_adapter(str(model), str(folder))
    (model / "config.json").write_bytes((POLICY / "config.json").read_bytes())
    write_zero_adapter(str(model), str(folder))
    check_adapter(str(folder), 1, SERVED)
