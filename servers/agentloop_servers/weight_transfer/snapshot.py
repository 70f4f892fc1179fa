"""What a model is apart from its weights' bytes, so that running its loading code for show can be undone."""

from __future__ import annotations

from typing import Any

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Names a tensor's storage as long as it lives; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)


class Snapshot:
    """The Python state of a model's modules and parameters; the bytes are never touched."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # `detach` keeps the storage that an assignment to `.data` would let go of.
        self._parameters = [(name, parameter, parameter.detach()) for name, parameter in model.named_parameters()]
        states: list[Any] = [vars(parameter) for _, parameter, _ in self._parameters]
        for module in model.modules():
            states += (vars(module), module._parameters, module._buffers, module._modules)
        self._states = [(state, state.copy()) for state in states]

    def restore(self) -> str | None:
        """Undo what the loading changed; returns the first parameter that was replaced or got another storage."""
        found = dict(self._model.named_parameters())
        replaced = found.keys() - {name for name, _, _ in self._parameters}
        for name, parameter, data in self._parameters:
            if found.get(name) is not parameter or _geometry(parameter) != _geometry(data):
                replaced.add(name)
                parameter.data = data
        for state, saved in self._states:
            state.clear()
            state.update(saved)
        return min(replaced, default=None)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
