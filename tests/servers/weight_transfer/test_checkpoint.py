"""Checks of checkpoint folders that read only their headers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentloop.engine.interface import TensorInfo
from agentloop.engine.weight_digest import read_files
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.checkpoint import (
    ServedForm,
    inspect_checkpoint,
    read_contents,
    read_through,
)

Tensors = dict[str, tuple[str, list[int], int]]  # name: dtype, shape, bytes

MODEL: Tensors = {
    "model.embed_tokens.weight": ("BF16", [4, 2], 16),
    "model.norm.weight": ("F32", [2], 8),
}


def write(folder: Path, tensors: Tensors, *, is_tied: bool = True) -> str:
    folder.mkdir(exist_ok=True)
    header, end = {}, 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
    return str(folder)


def test_names_dtypes_shapes_and_bytes_are_read(tmp_path: Path) -> None:
    info = inspect_checkpoint(write(tmp_path / "a", MODEL))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in info.tensors.items()} == {
        "model.embed_tokens.weight": ("bfloat16", (4, 2)),
        "model.norm.weight": ("float32", (2,)),
    }
    assert info.num_bytes == 24


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (("I32", [2], 8), "not a float type"),
        (("F32", [3], 8), "offsets that do not fit"),
        (("F32", [-1, -2], 8), "offsets that do not fit"),
    ],
)
def test_impossible_tensors_are_refused(tmp_path: Path, entry: tuple[str, list[int], int], reason: str) -> None:
    with pytest.raises(CheckpointUnreadable, match=reason):
        inspect_checkpoint(write(tmp_path / "a", {"model.norm.weight": entry}))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "a", MODEL))
    (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointUnreadable, match="in two files"):
        inspect_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model.norm.weight": ("F32", [4], 16)}, "has shape"),
        ({"model.other.weight": ("F32", [2], 8)}, "are not in the served model"),
    ],
)
def test_only_the_served_models_tensors_are_taken(tmp_path: Path, changed: Tensors, reason: str) -> None:
    form = ServedForm(write(tmp_path / "served", MODEL), is_dummy=False)
    with pytest.raises(CheckpointUnreadable, match=reason):
        form.check_directory(write(tmp_path / "other", {**MODEL, **changed}))
    with pytest.raises(CheckpointUnreadable, match="1 tensors of the served model are missing"):
        form.check_directory(write(tmp_path / "less", {"model.norm.weight": ("F32", [2], 8)}))
    with pytest.raises(CheckpointUnreadable, match="1 tensors of the served model are missing"):
        form.check_push([TensorInfo("model.norm.weight", "float32", (2,))])


def test_a_push_in_another_dtype_fits(tmp_path: Path) -> None:
    form = ServedForm(write(tmp_path / "served", MODEL), is_dummy=False)
    form.check_push([replace(tensor, dtype="float64") for tensor in form.tensors])
    with pytest.raises(CheckpointUnreadable, match="duplicate tensor names"):
        form.check_push([*form.tensors, form.tensors[0]])


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_output_head_is_optional_where_it_is_tied(tmp_path: Path, is_tied: bool) -> None:
    form = ServedForm(write(tmp_path / "served", MODEL, is_tied=is_tied), is_dummy=False)
    directory = write(tmp_path / "a", {**MODEL, "lm_head.weight": ("BF16", [4, 2], 16)})
    if is_tied:
        assert "lm_head.weight" in {tensor.name for tensor in form.check_directory(directory)[0]}
    else:
        with pytest.raises(CheckpointUnreadable, match=r"lm_head\.weight"):
            form.check_directory(directory)


def test_a_dummy_model_takes_its_form_from_the_first_served_update(tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "served", MODEL))
    (folder / "model.safetensors").unlink()
    form = ServedForm(str(folder), is_dummy=True)
    bad = write(tmp_path / "bad", {"model.norm.weight": ("F32", [9], 36)})
    form.check_directory(bad)  # its commit failed: the shapes are not known yet
    assert form.tensors == ()
    form.check_directory(write(tmp_path / "good", MODEL))
    form.confirm()
    with pytest.raises(CheckpointUnreadable):
        form.check_directory(bad)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.norm.running_mean", "lm_head.weight", "model.embed_tokens.weight"])
def test_values_that_are_no_numbers_are_found_in_any_tensor(
    tmp_path: Path, dtype: torch.dtype, bad: float, name: str
) -> None:
    """A parameter, a buffer, a tied head; in the last element of the last piece that is read."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(4, 70_001),
        "model.norm.running_mean": torch.full((7,), 448.0),
        "lm_head.weight": torch.randn(4, 70_001),
    }
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    read_through(inspect_checkpoint(str(tmp_path)))
    # the dtype has no infinities
    tensors[name].view(-1)[-1] = float("nan") if dtype is torch.float8_e4m3fn else bad
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnreadable, match=f"{name} has values that are not finite numbers"):
        read_through(inspect_checkpoint(str(tmp_path)))


EMBEDDINGS, HEAD = torch.arange(8.0).reshape(4, 2), "lm_head.weight"


@pytest.mark.parametrize(
    ("head", "is_tied", "is_taken"),
    [
        (EMBEDDINGS.clone(), True, True),
        (EMBEDDINGS + 1, True, False),
        (EMBEDDINGS.flip(0), True, False),
        (EMBEDDINGS.to(torch.bfloat16), True, False),
        (EMBEDDINGS[:3].clone(), True, False),
        (EMBEDDINGS + 1, False, True),
    ],
)
@pytest.mark.parametrize("form", ["flat", "text_config"])
def test_a_head_that_the_model_ties_has_the_values_of_the_embeddings(
    tmp_path: Path, head: torch.Tensor, is_tied: bool, is_taken: bool, form: str
) -> None:
    names = {"model.embed_tokens.weight": EMBEDDINGS, "model.norm.weight": torch.ones(2)}
    served, pushed = tmp_path / "served", tmp_path / "pushed"
    for folder in (served, pushed):
        folder.mkdir()
        config = {"tie_word_embeddings": is_tied}
        (folder / "config.json").write_text(json.dumps(config if form == "flat" else {"text_config": config}))
    own = names if is_tied else {**names, HEAD: EMBEDDINGS.clone()}
    save_file(own, served / "model.safetensors")
    save_file({**names, HEAD: head}, pushed / "model.safetensors")
    checked = ServedForm(str(served), is_dummy=False)
    if is_taken:
        checked.check_directory(str(pushed))
    else:
        with pytest.raises(CheckpointUnreadable, match=r"lm_head\.weight has other values than the embeddings"):
            checked.check_directory(str(pushed))


def test_an_engines_reading_and_the_simulated_ones_have_one_digest(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.randn(300, 1000), "model.norm.weight": torch.ones(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    info = inspect_checkpoint(str(tmp_path))
    assert read_contents(str(tmp_path), info).digest == asyncio.run(read_files(str(tmp_path))).digest
