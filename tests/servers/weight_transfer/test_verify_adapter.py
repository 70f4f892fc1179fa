"""`verify_adapter` on layers like vLLM's, for cases that one CPU engine cannot show: shards, new names, experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentloop_servers.weight_transfer.lora import tensor_names
from agentloop_servers.weight_transfer.vllm_worker import verify_adapter
from tests.support.transfer.adapters import write_adapter

MAX_RANK, RANK, SCALING = 8, 4, 2.0
ATTENTION = "model.layers.0.self_attn"


class Layer:
    """A linear layer with slots, as one of `tp_size` tensor-parallel ranks holds it.

    `split` is "rows" for a layer whose inputs are divided, "columns" for one whose outputs are.
    """

    def __init__(self, shapes, split="columns", tp_size=1, tp_rank=0):
        self.n_slices, self.tp_size = len(shapes), tp_size
        self._split, self._rank = split, tp_rank
        rows = tp_size if split == "columns" else 1
        columns = tp_size if split == "rows" else 1
        self.lora_a_stacked = [torch.zeros(1, 1, MAX_RANK, shape[1] // columns) for shape in shapes]
        self.lora_b_stacked = [torch.zeros(1, 1, shape[0] // rows, MAX_RANK) for shape in shapes]

    def slice_lora_a(self, a):
        return self._sliced(a, 1) if self._split == "rows" else a

    def slice_lora_b(self, b):
        return self._sliced(b, 0) if self._split == "columns" else b

    def load(self, halves):
        """Load like vLLM loads an adapter: for every slice its A and its scaled B, or None."""
        for index, half in enumerate(halves):
            if half is not None:
                a, b = half
                if self.tp_size > 1:
                    a, b = self.slice_lora_a(a), self.slice_lora_b(b)
                self.lora_a_stacked[index][0, 0, : a.shape[0]] = a
                self.lora_b_stacked[index][0, 0, :, : b.shape[1]] = b

    def _sliced(self, tensor, dim):
        if isinstance(tensor, list):
            return [None if one is None else self._sliced(one, dim) for one in tensor]
        return tensor.chunk(self.tp_size, dim)[self._rank]


def worker(modules, packed=None, mapper=None):
    model = SimpleNamespace(hf_to_vllm_mapper=mapper) if mapper is not None else SimpleNamespace()
    packed = packed if packed is not None else {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    manager = SimpleNamespace(lora_index_to_id=[1], modules=modules, packed_modules_mapping=packed, model=model)
    return SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter of the first layer's q, v and o projections; k has none."""
    folder = write_adapter(tmp_path / "adapter", targets=("q_proj", "v_proj", "o_proj"))
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if ".layers.0." in name}, path)
    return folder


def halves(folder: Path, name: str):
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = tensor_names(name)
    return tensors[a], tensors[b] * SCALING


def attention(folder: Path, tp_size=1, tp_rank=0):
    q, v, o = (halves(folder, f"{ATTENTION}.{part}") for part in ("q_proj", "v_proj", "o_proj"))
    shapes = [(b.shape[0], a.shape[1]) for a, b in (q, v, v)]
    qkv = Layer(shapes, "columns", tp_size, tp_rank)
    qkv.load([q, None, v])
    out = Layer([(o[1].shape[0], o[0].shape[1])], "rows", tp_size, tp_rank)
    out.load([o])
    return {f"{ATTENTION}.qkv_proj": qkv, f"{ATTENTION}.o_proj": out}


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_every_rank_holds_its_shard(folder, tp_size, tp_rank):
    modules = attention(folder, tp_size, tp_rank)
    assert verify_adapter(worker(modules), 1, str(folder)) == 6
    for name, layer in modules.items():
        for stacked in (layer.lora_a_stacked[-1], layer.lora_b_stacked[-1]):
            before = stacked.clone()
            stacked[0, 0, -1, -1] += 1  # even in the padding
            with pytest.raises(RuntimeError, match=f"layer {name} differs from"):
                verify_adapter(worker(modules), 1, str(folder))
            stacked.copy_(before)
    assert verify_adapter(worker(modules), 1, str(folder)) == 6


def test_another_rank_s_shard_is_found(folder):
    modules, others = attention(folder, 2, 0), attention(folder, 2, 1)
    modules[f"{ATTENTION}.o_proj"].lora_a_stacked = others[f"{ATTENTION}.o_proj"].lora_a_stacked
    with pytest.raises(RuntimeError, match=r"o_proj differs from"):
        verify_adapter(worker(modules), 1, str(folder))


def test_a_layer_that_the_worker_lacks_is_found(folder):
    modules = attention(folder)
    del modules[f"{ATTENTION}.o_proj"]
    with pytest.raises(RuntimeError, match="o_proj"):
        verify_adapter(worker(modules), 1, str(folder))


def test_a_worker_without_an_adapter_is_found(folder):
    empty = worker(attention(folder))
    empty.lora_manager._adapter_manager.lora_index_to_id = [None]
    with pytest.raises(RuntimeError, match="no adapter"):
        verify_adapter(empty, 1, str(folder))


def test_layers_that_vllm_calls_otherwise_are_compared(folder):
    rename = SimpleNamespace(_map_name=lambda name: f"language_model.{name}")
    mapper = SimpleNamespace(get_rename_mapper=lambda: rename)
    modules = {f"language_model.{name}": layer for name, layer in attention(folder).items()}
    assert verify_adapter(worker(modules, mapper=mapper), 1, str(folder)) == 6
    modules[f"language_model.{ATTENTION}.o_proj"].lora_b_stacked[0].zero_()
    with pytest.raises(RuntimeError, match="differs from"):
        verify_adapter(worker(modules, mapper=mapper), 1, str(folder))


def test_experts_are_not_counted(folder):
    path = folder / "adapter_model.safetensors"
    experts = dict(
        zip(tensor_names("model.layers.0.mlp.experts.0.up_proj"), (torch.ones(4, 8), torch.ones(8, 4)), strict=True)
    )
    save_file({**load_file(path), **experts}, path)
    modules = attention(folder)
    modules["model.layers.0.mlp.experts"] = SimpleNamespace(lora_b_stacked=[torch.ones(1, 4, 8, 8)])
    assert verify_adapter(worker(modules), 1, str(folder)) == 6
