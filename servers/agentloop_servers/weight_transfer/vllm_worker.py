"""The part of a weight update that runs in vLLM's worker processes.

vLLM mixes `WeightWorker` into its worker class (`worker_extension_cls`), and the engine calls its methods with
`collective_rpc` between two steps. `staging.py` has the calls and the work. `RunningModel` repairs what vLLM's own
reload silently misses (see its methods). For LoRA, vLLM copies an adapter into a slot of stacked tensors, one pair
per slice of a layer: A padded to the largest rank, B times the scaling, and each tensor-parallel rank its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors import safe_open

from agentloop.plugins import resolve
from agentloop_servers.weight_transfer.copy_plan import QuantisedLayer
from agentloop_servers.weight_transfer.lora import (
    WEIGHTS_FILE,
    AdapterContent,
    is_expert,
    read_adapter,
    tensor_names,
)
from agentloop_servers.weight_transfer.quantised import dense
from agentloop_servers.weight_transfer.staged_weights import Tensors
from agentloop_servers.weight_transfer.staging import StagingCalls, WeightStager
from agentloop_servers.weight_transfer.verify import Read, compare_layers
from agentloop_servers.weight_transfer.worker_calls import StagingSetup


class WeightWorker(StagingCalls):
    """The extension of vLLM's worker class. Its names must not collide with the worker's."""

    vllm_config: Any
    model_runner: Any
    device: torch.device

    def extend_runner(self, function: str, argument: str) -> None:
        """Call the function at an import path with the model runner and `argument`."""
        extend = cast(Callable[[Any, str], None], resolve(function, param="function"))
        extend(self.model_runner, argument)

    def weights_stager(self, setup: StagingSetup) -> WeightStager:
        parallel = self.vllm_config.parallel_config
        return WeightStager(
            self.weights_model(),
            self.model_runner.get_model(),
            self.device,
            parallel.data_parallel_index * parallel.world_size + parallel.rank,
            policy=setup.policy,
            can_trace=self.device.type != "cpu",
            timeout_s=setup.timeout_s,
        )

    def weights_model(self) -> RunningModel:
        """Return the worker's model as commits use it."""
        return RunningModel(self)

    def adapter_load(self, number: int, directory: str) -> None:
        """Read an adapter's files, also if this worker already has an adapter with this number."""
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        if not self.add_lora(LoRARequest(str(number), number, directory, load_inplace=True)):  # type: ignore[attr-defined]
            raise RuntimeError("vLLM did not load the adapter")

    def adapter_remove(self, number: int) -> None:
        """Remove an adapter if this worker has it."""
        self.remove_lora(number)  # type: ignore[attr-defined]

    def weights_verify_adapter(self, number: int, directory: str) -> int:
        """Compare an adapter of this worker with its folder; see `verify_adapter`."""
        return verify_adapter(self.model_runner, number, directory)


class RunningModel:
    """A worker's model as commits use it; see `ServedModel`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._module: torch.nn.Module = worker.model_runner.get_model()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        # vLLM transposes quantized weights by a view
        return {name: dense(parameter.data) for name, parameter in self._module.named_parameters()}

    def quantised_layers(self) -> Sequence[QuantisedLayer]:
        return quantised_layers(self._module)

    def reload(self, tensors: Tensors) -> None:
        try:
            with self._packing_experts():
                self._worker.reload_weights(weights_iterator=tensors)
        except Exception as error:
            self._close_reload()
            # vLLM passes on only the message, and some of its assertions are empty.
            raise RuntimeError(f"the load failed: {error!r}") from error
        self.pack_tied_head()

    def compare(self, names: Sequence[str], read: Read) -> tuple[int, int]:
        return compare_layers(self._module, frozenset(names), read)

    def synchronize(self) -> None:
        if self._worker.device.type == "cuda":
            torch.cuda.synchronize(self._worker.device)

    def pack_tied_head(self) -> None:
        """Pack a tied output head again. No effect where layers compute with the parameter itself (CUDA).

        On the CPU a linear layer computes with a packed copy. A tied head shares its parameter, so the reload does
        not pack it.
        """
        head = getattr(self._module, "lm_head", None)
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    @contextmanager
    def _packing_experts(self) -> Iterator[None]:
        """Make a reload pack experts as the first load did. No effect where kernels use them as loaded (CUDA).

        On the CPU vLLM packs experts only for a layer without a kernel, then copies the result into the old
        kernel's tensors. Otherwise the kernel would read unpacked weights.
        """
        kernels: dict[Any, Any] = {}
        if self._worker.device.type == "cpu":
            methods: list[Any] = [getattr(module, "quant_method", None) for module in self._module.modules()]
            kernels = {method: method.moe_kernel for method in methods if hasattr(method, "moe_kernel")}
        try:
            for method in kernels:
                method.moe_kernel = None
            yield
        finally:
            for method, kernel in kernels.items():
                method.moe_kernel = kernel

    def _close_reload(self) -> None:
        """Restore the storage of every layer and drop incomplete buffers, so that another reload can start."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: PLC0415

        finalize_layerwise_reload(self._module, self._worker.vllm_config.model_config)


def quantised_layers(model: torch.nn.Module) -> list[QuantisedLayer]:
    """Return the layers that vLLM quantizes at loading without other ranks.

    vLLM keeps their original parameters for its own reload (`LAYERWISE_INFO`).
    """
    from vllm.model_executor.layers.quantization.online import fp8  # noqa: PLC0415

    of_any_shard = (fp8.Fp8PerBlockOnlineLinearMethod,)
    of_whole_layers = (fp8.Fp8PerTensorOnlineLinearMethod, fp8.Fp8PtpcOnlineLinearMethod)
    found = []
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        methods = of_any_shard if getattr(module, "tp_size", 1) > 1 else (*of_any_shard, *of_whole_layers)
        if isinstance(method, methods) and method.requantization_source is None:
            found.append(_quantised_layer(name, module))
    return found


def _quantised_layer(name: str, module: Any) -> QuantisedLayer:
    from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize  # noqa: PLC0415

    info = layerwise.get_layerwise_info(module)
    load_form = {}
    for own_name, parameter in info.restore_metadata[0].items():
        tensor = sanitize.restore_layer_refs(meta.to_meta_tensor(parameter), module)
        tensor.weight_loader = layerwise._get_original_loader(tensor)
        load_form[f"{name}.{own_name}"] = tensor
    kept = meta.SKIP_TENSORS & dict(module.named_parameters(recurse=False)).keys()
    return QuantisedLayer(name, module, load_form, info.restore_device, frozenset(kept))


_Slices: TypeAlias = list[torch.Tensor | None]


def verify_adapter(model_runner: Any, number: int, directory: str) -> int:
    """Compare the worker's adapter `number` with a folder. Returns the number of compared tensors.

    Experts are neither compared nor counted, because vLLM stores them in another layout. Raises RuntimeError at
    the first difference, if the adapter is not active, or if no tensor could be compared.
    """
    manager = model_runner.lora_manager._adapter_manager
    if number not in manager.lora_index_to_id:
        raise RuntimeError(f"the worker has no adapter {number}")
    slot = manager.lora_index_to_id.index(number)
    adapter = read_adapter(directory)
    same: list[torch.Tensor] = []  # one flag per comparison; all are read with one sync
    names: list[str] = []
    found: set[str] = set()
    with safe_open(Path(directory) / WEIGHTS_FILE, framework="pt") as file, torch.inference_mode():
        for name, parts, layer in _layers(manager, adapter):
            known = [part for part in parts if part in adapter.layers]
            # A layer that the adapter does not have must add nothing.
            if not known:
                same += [~stacked[slot].any() for stacked in layer.lora_b_stacked]
                names += [name] * (len(same) - len(names))
                continue
            found.update(known)
            for held, expected in _pairs(layer, slot, _wanted(layer, parts, adapter, file)):
                same.append(_is_equal(held, expected))
                names.append(name)
    for name, is_same in zip(names, torch.stack(same).tolist() if same else (), strict=True):
        if not is_same:
            raise RuntimeError(f"layer {name} differs from the adapter's tensors")
    missing = [name for name in adapter.layers if name not in found and not is_expert(name)]
    if missing:
        raise RuntimeError(f"the worker has no layer for the adapter's {missing[0]}")
    if not found:
        raise RuntimeError("no tensor of the adapter could be compared")
    return 2 * len(found)


def _layers(manager: Any, adapter: AdapterContent) -> Iterator[tuple[str, list[str], Any]]:
    """Yield the worker's comparable layers: name, checkpoint names of its slices, layer.

    The output head has no slices, and is compared only if the adapter has it.
    """
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    rename = mapper.get_rename_mapper()._map_name if mapper is not None else str
    checkpoint_names = {rename(f"{name}.weight").removesuffix(".weight"): name for name in adapter.layers}
    for name, layer in manager.modules.items():
        prefix, dot, leaf = name.rpartition(".")
        own = [f"{prefix}{dot}{part}" for part in manager.packed_modules_mapping.get(leaf, [leaf])]
        parts = [checkpoint_names.get(part, part) for part in own]
        if hasattr(layer, "n_slices") or parts[0] in adapter.layers:
            yield name, parts, layer


def _wanted(layer: Any, parts: Sequence[str], adapter: AdapterContent, file: Any) -> tuple[_Slices, _Slices]:
    """Return the expected A and B for every slice of a layer, unpadded; None if the adapter has none."""
    dtype = layer.lora_b_stacked[0].dtype
    halves_a: _Slices = []
    halves_b: _Slices = []
    for part in parts:
        if part not in adapter.layers:
            halves_a.append(None)
            halves_b.append(None)
            continue
        name_a, name_b = tensor_names(part)
        halves_a.append(file.get_tensor(name_a).to(dtype))
        halves_b.append(file.get_tensor(name_b).to(dtype) * adapter.layers[part].scaling)
    if not hasattr(layer, "n_slices") or layer.tp_size == 1:  # every rank has the complete tensors of a head
        return halves_a, halves_b
    if len(parts) == 1:
        return [layer.slice_lora_a(halves_a[0])], [layer.slice_lora_b(halves_b[0])]
    return layer.slice_lora_a(halves_a), layer.slice_lora_b(halves_b)


def _pairs(
    layer: Any, slot: int, wanted: tuple[_Slices, _Slices]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    for stacked, expected in zip((layer.lora_a_stacked, layer.lora_b_stacked), wanted, strict=True):
        # a head's tensors are not in a list
        slices = [stacked] if isinstance(stacked, torch.Tensor) else stacked
        for one, tensor in zip(slices, expected, strict=True):
            yield one[slot, 0], tensor


def _is_equal(held: torch.Tensor, expected: torch.Tensor | None) -> torch.Tensor:
    """Compare `held` with `expected`, padded with zeros. Returns a 0-dim bool tensor. Does not sync."""
    padded = torch.zeros_like(held)
    if expected is not None:
        padded[: expected.shape[0], : expected.shape[1]] = expected.to(held.device)
    return (held == padded).all()
