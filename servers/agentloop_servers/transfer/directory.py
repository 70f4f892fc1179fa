"""The half of a directory weight update that runs inside vLLM's worker process.

vLLM mixes `DirectoryWeights` into its worker class (`worker_extension_cls`); the engine calls `load_directory`
through `collective_rpc` while it is paused. Only the folder's name crosses the process border.

Two things stock reloading does not do, both silent:

- On the CPU build a linear layer computes with a packed copy of its weight. The output head of a model with tied
  embeddings shares its parameter, so the reload never packs it again and it goes on with the old weights.
- A reload that raises half-way leaves layers without storage, and buffers that the next reload would count twice.

After a load every layer is compared with the files through the path it computes with, so a load that changed
nothing, or only some layers, raises.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from agentloop.validate import check_checkpoint

PROBE_COLUMNS = 16
RELATIVE_TOLERANCE = 2.0**-7  # one unit in the last place of bfloat16


@dataclass(frozen=True, slots=True)
class _Strip:
    """Columns `[first, first + values.shape[1])` of a stored weight `width` wide; a norm's whole vector."""

    values: torch.Tensor
    first: int
    width: int


class DirectoryWeights:
    """vLLM worker extension. Its method names must not collide with the worker's."""

    model_runner: Any
    vllm_config: Any

    def load_directory(self, directory: str) -> dict[str, int]:
        """Load the folder's safetensors into the running model, in place, and prove that it arrived.

        Returns `num_checked` and `num_skipped` layers. Raises on any failure, then the weights are of unknown
        state, and a later call with a good folder repairs them.
        """
        model = self.model_runner.get_model()
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in check_checkpoint(directory)]
            try:
                self.reload_weights(weights_iterator=_tensors(files))  # type: ignore[attr-defined]
            except Exception as error:
                _close_reload(model, self.vllm_config.model_config)
                # vLLM passes on the message only, and some of its own assertions have none.
                raise RuntimeError(f"the load broke off: {error!r}") from error
            _pack_tied_head(model)
            file_by_name = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            with torch.inference_mode():
                return _compare(model, file_by_name)


def _tensors(files: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for name in file.keys():  # noqa: SIM118 - safe_open is not iterable
            yield name, file.get_tensor(name)


def _close_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Give every layer its storage back and drop half-collected buffers, so that another reload can start."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: PLC0415

    finalize_layerwise_reload(model, model_config)


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied output head again; a no-op where layers compute with the parameter itself (CUDA)."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


def _compare(model: torch.nn.Module, file_by_name: dict[str, Any]) -> dict[str, int]:
    """Compare some columns of every layer's effective weight with the files. Raises on the first difference.

    Layers whose shape is not the checkpoint's (tensor-parallel shards, fused experts) are skipped and counted.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    name_by_weight: dict[int, str] = {}
    num_checked = num_skipped = 0
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        parts = _checkpoint_names(name, packed)
        if parts[0] not in file_by_name:  # a tied head is stored once, under its twin's name
            parts = [name_by_weight.get(id(weight), parts[0])]
        name_by_weight.setdefault(id(weight), parts[0])
        num_stored = sum(part in file_by_name for part in parts)
        if num_stored == 0:  # under another name in checkpoints of this model
            num_skipped += 1
            continue
        if num_stored < len(parts):
            raise RuntimeError(f"layer {name} has only {num_stored} of {len(parts)} parts in the checkpoint")
        strip = _stored_strip(name, parts, file_by_name)
        is_checked = False
        for actual in _effective_strips(layer, weight, strip):
            _check_equal(name, actual, strip.values)
            is_checked = True
        num_checked += is_checked
        num_skipped += not is_checked
    if num_checked == 0:
        raise RuntimeError("no layer could be compared with the checkpoint")
    return {"num_checked": num_checked, "num_skipped": num_skipped}


def _checkpoint_names(module_name: str, packed: dict[str, list[str]]) -> list[str]:
    prefix, _, leaf = module_name.rpartition(".")
    dot = "." if prefix else ""
    return [f"{prefix}{dot}{part}.weight" for part in packed.get(leaf, [leaf])]


def _stored_strip(name: str, parts: list[str], file_by_name: dict[str, Any]) -> _Strip:
    slices = [file_by_name[part].get_slice(part) for part in parts]
    shape = slices[0].get_shape()
    if len(shape) == 1:
        return _Strip(torch.cat([piece[:] for piece in slices]), 0, 1)
    # A fixed place a layer, not the same in all: a few strips cover the model and are cheap to read.
    first = zlib.crc32(name.encode()) % max(1, shape[1] - PROBE_COLUMNS + 1)
    values = torch.cat([piece[:, first : first + PROBE_COLUMNS] for piece in slices])
    return _Strip(values, first, shape[1])


def _effective_strips(layer: Any, weight: torch.Tensor, strip: _Strip) -> Iterator[torch.Tensor]:
    """The same columns as the layer computes with them: its parameter, and its packed copy if it has one."""
    if strip.values.ndim == 1:
        if weight.shape == strip.values.shape:
            yield weight
        return
    num_rows, num_columns = strip.values.shape
    # Rows beyond the stored ones are the vocabulary's padding.
    if weight.numel() > 0 and weight.shape[0] >= num_rows and weight.shape[1] == strip.width:
        yield weight[:num_rows, strip.first : strip.first + num_columns]
    width = getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None)
    if hasattr(layer, "cpu_linear") and width == strip.width:
        unit = torch.zeros(num_columns, width, dtype=weight.dtype)
        unit[torch.arange(num_columns), strip.first + torch.arange(num_columns)] = 1
        columns = layer.cpu_linear(unit, weight, None).T
        if columns.shape[0] >= num_rows:
            yield columns[:num_rows]


def _check_equal(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    want = expected.to(device=actual.device, dtype=actual.dtype).float()
    if actual.shape != want.shape or not torch.allclose(actual.float(), want, rtol=RELATIVE_TOLERANCE):
        raise RuntimeError(f"layer {name} does not hold the checkpoint's weights after the load")
