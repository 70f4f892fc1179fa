"""Layers that the engine quantizes at loading, within a copy plan.

A plan writes their tensors in the form in which they are loaded. Once all tensors of a layer are there, the
engine's own code quantizes a copy of the layer next to the serving one, so the result is the same as after a load
by the engine, byte for byte. This needs the unquantized memory of one layer at a time. It runs during decoding, so
layers whose scales are agreed between ranks by collectives are not part of plans.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import torch

from agentloop_servers.weight_transfer.copy_plan import Copy, CopyPlan, PlanRefused, QuantisedLayer, apply
from agentloop_servers.weight_transfer.verify import Read

_IS_PROCESSED = "_already_called_process_weights_after_loading"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the dimensions in memory order, which is contiguous if the memory is dense."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


class QuantisedLoad:
    """Loads the tensors that `accept` receives by a plan, on their stream.

    Unquantized tensors are written into `parameters`; `take` receives a quantized layer's served tensors, dense.
    """

    def __init__(
        self,
        plan: CopyPlan,
        parameters: Mapping[str, torch.Tensor],
        take: Callable[[str, torch.Tensor], None],
    ) -> None:
        self._plan = plan
        self._take = take
        self._loaded: dict[str, torch.Tensor] = {}  # tensors of incomplete layers
        self._into = ChainMap(self._loaded, dict(parameters))
        self._missing: dict[str, set[Copy]] = {}  # layer -> copies that are missing

    def accept(self, name: str, tensor: torch.Tensor) -> None:
        """Load a checkpoint tensor. It may be repeated together with all other tensors of its layer."""
        layers = {
            layer.name: layer
            for one in self._plan.by_tensor[name]
            if (layer := self._plan.layers.get(one.parameter)) is not None
        }
        for layer in layers.values():
            if layer.name not in self._missing:
                self._begin(layer)
        apply(self._plan, name, tensor, self._into)
        for layer in layers.values():
            self._missing[layer.name].difference_update(self._plan.by_tensor[name])
            if not self._missing[layer.name]:
                self._end(layer)

    def _begin(self, layer: QuantisedLayer) -> None:
        self._missing[layer.name] = {one for one in self._plan.copies if one.parameter in layer.load_form}
        for name, form in layer.load_form.items():
            self._loaded[name] = torch.empty(form.shape, dtype=form.dtype, device=layer.device)

    def _end(self, layer: QuantisedLayer) -> None:
        loaded = {name: self._loaded.pop(name) for name in layer.load_form}
        del self._missing[layer.name]
        for name, tensor in quantised(layer, loaded).items():
            self._take(name, tensor)


def quantised(layer: QuantisedLayer, loaded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that the layer would serve after loading `loaded`. The layer does not change."""
    double = copy.copy(layer.module)
    prefix = f"{layer.name}."
    as_loaded = {
        name: parameter for name, parameter in layer.module.named_parameters(recurse=False) if name in layer.kept
    }
    own = {
        name.removeprefix(prefix): torch.nn.Parameter(tensor, requires_grad=False)
        for name, tensor in loaded.items()
    }
    vars(double).update(_parameters={**as_loaded, **own}, _buffers=dict(layer.module._buffers))
    vars(double).pop(_IS_PROCESSED, None)
    method: Any = layer.module.quant_method
    method.process_weights_after_loading(double)
    return {
        prefix + name: dense(parameter.data)
        for name, parameter in double.named_parameters(recurse=False)
        if name not in as_loaded
    }


def check_quantised(plan: CopyPlan, parameters: Mapping[str, torch.Tensor], read: Read) -> None:
    """Quantize a checkpoint's layers and compare each with the served one, byte for byte. Raises PlanRefused."""

    def compare(name: str, made: torch.Tensor) -> None:
        served = parameters.get(name)
        is_same = served is not None and (served.shape, served.dtype) == (made.shape, made.dtype)
        if not is_same or not made.is_contiguous() or not torch.equal(_bytes(served), _bytes(made)):
            raise PlanRefused(f"parameter {name} differs from the quantized tensors of the checkpoint")

    load = QuantisedLoad(plan, {}, compare)
    for name, copies in plan.by_tensor.items():
        if any(one.parameter in plan.layers for one in copies):
            load.accept(name, read(name)[:])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
