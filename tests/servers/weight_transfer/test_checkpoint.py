"""Checkpoint folders are judged by their headers alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.engine import TensorInfo
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.checkpoint import ServedForm, inspect_checkpoint

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
        (("F32", [3], 8), "impossible offsets"),
        (("F32", [-1, -2], 8), "impossible offsets"),
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
        ({"model.other.weight": ("F32", [2], 8)}, "the served model lacks"),
    ],
)
def test_only_the_served_models_tensors_are_taken(tmp_path: Path, changed: Tensors, reason: str) -> None:
    form = ServedForm(write(tmp_path / "served", MODEL), is_dummy=False)
    with pytest.raises(CheckpointUnreadable, match=reason):
        form.check_directory(write(tmp_path / "other", {**MODEL, **changed}))
    with pytest.raises(CheckpointUnreadable, match="lacks 1 tensors"):
        form.check_directory(write(tmp_path / "less", {"model.norm.weight": ("F32", [2], 8)}))
    with pytest.raises(CheckpointUnreadable, match="lacks 1 tensors"):
        form.check_push([TensorInfo("model.norm.weight", "float32", (2,))])


def test_a_push_in_another_dtype_fits(tmp_path: Path) -> None:
    form = ServedForm(write(tmp_path / "served", MODEL), is_dummy=False)
    form.check_push([replace(tensor, dtype="float64") for tensor in form.tensors])
    with pytest.raises(CheckpointUnreadable, match="twice"):
        form.check_push([*form.tensors, form.tensors[0]])


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_output_head_is_optional_where_it_is_tied(tmp_path: Path, is_tied: bool) -> None:
    form = ServedForm(write(tmp_path / "served", MODEL, is_tied=is_tied), is_dummy=False)
    directory = write(tmp_path / "a", {**MODEL, "lm_head.weight": ("BF16", [4, 2], 16)})
    if is_tied:
        assert "lm_head.weight" in {tensor.name for tensor in form.check_directory(directory)}
    else:
        with pytest.raises(CheckpointUnreadable, match=r"lm_head\.weight"):
            form.check_directory(directory)


def test_a_dummy_model_takes_its_form_from_the_first_served_update(tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "served", MODEL))
    (folder / "model.safetensors").unlink()
    form = ServedForm(str(folder), is_dummy=True)
    bad = write(tmp_path / "bad", {"model.norm.weight": ("F32", [9], 36)})
    form.check_directory(bad)  # its commit failed: nothing is known yet
    assert form.tensors == ()
    form.check_directory(write(tmp_path / "good", MODEL))
    form.confirm()
    with pytest.raises(CheckpointUnreadable):
        form.check_directory(bad)
