"""The half of a weight update that runs inside vLLM's worker processes.

vLLM mixes `WeightWorker` into its worker class (`worker_extension_cls`); the engine calls its methods through
`collective_rpc`, between two steps. Only plain values cross the process border. The work itself is in `depot.py`.

Two things stock reloading does not do, both silent:

- On the CPU build a linear layer computes with a packed copy of its weight. The output head of a model with tied
  embeddings shares its parameter, so the reload never packs it again and it goes on with the old weights.
- A reload that raises half-way leaves layers without storage, and buffers that the next reload would count twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from agentloop.engine import PushSource, TensorInfo, TensorNames
from agentloop_servers.weight_transfer.lora import AdapterCheck
from agentloop_servers.weight_transfer.spot_checks import Read, compare_layers
from agentloop_servers.weight_transfer.staged_weights import Tensors
from agentloop_servers.weight_transfer.staging import Depot


class WeightWorker(AdapterCheck):
    """vLLM worker extension. Its names must not collide with the worker's."""

    vllm_config: Any
    device: torch.device
    _depot: Depot

    def weights_prepare(
        self, directory: str | None, tensors: Sequence[Sequence[Any]], staging: str, timeout_s: float
    ) -> None:
        """Once, after the start and before any request. `directory` None: the weights are dummy."""
        parallel = self.vllm_config.parallel_config
        self._depot = Depot(
            self.weights_model(),
            self.model_runner.get_model(),
            self.device,
            parallel.data_parallel_index * parallel.world_size + parallel.rank,
            staging=staging,
            can_trace=self.device.type != "cpu",
            timeout_s=timeout_s,
        )
        if directory is not None:
            self._depot.prepare(directory, _infos(tensors))

    def weights_model(self) -> RunningModel:
        """The model that updates go into."""
        return RunningModel(self)

    def weights_stage(self, number: int, source: Mapping[str, Any]) -> None:
        """Begin to receive."""
        tensors = _infos(source["tensors"])
        if "directory" in source:
            self._depot.stage(number, source["directory"], tensors)
            return
        push = PushSource(
            addresses=tuple(source["addresses"]),
            token=source["token"],
            tensors=tensors,
            names=TensorNames(source["names"]),
            num_receivers=source["num_receivers"],
        )
        self._depot.stage(number, push, tensors)

    def weights_poll(self, number: int) -> dict[str, Any]:
        """How far it is."""
        return self._depot.poll(number)

    def weights_drop(self, number: int) -> None:
        """Give it up."""
        self._depot.drop(number)

    def weights_commit(self, number: int) -> dict[str, Any]:
        """Swap; generation is paused."""
        with torch.no_grad():
            return asdict(self._depot.commit(number))

    def weights_offer(self, token: str) -> dict[str, Any] | None:
        """Give the served weights to another engine's worker."""
        return self._depot.offer(token)

    def weights_release(self) -> None:
        """Give back all memory that is not the model's."""
        self._depot.release()


class RunningModel:
    """A worker's model as commits see it; see `holds.Model`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._module: torch.nn.Module = worker.model_runner.get_model()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self._module.named_parameters()}

    def reload(self, tensors: Tensors) -> None:
        try:
            self._worker.reload_weights(weights_iterator=tensors)
        except Exception as error:
            self._close_reload()
            # vLLM passes on the message only, and some of its own assertions have none.
            raise RuntimeError(f"the load broke off: {error!r}") from error
        self.pack_tied_head()

    def compare(self, names: Sequence[str], read: Read) -> tuple[int, int]:
        return compare_layers(self._module, frozenset(names), read)

    def synchronize(self) -> None:
        if self._worker.device.type == "cuda":
            torch.cuda.synchronize(self._worker.device)

    def pack_tied_head(self) -> None:
        """Pack a tied output head again; a no-op where layers compute with the parameter itself (CUDA)."""
        head = getattr(self._module, "lm_head", None)
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    def _close_reload(self) -> None:
        """Give every layer its storage back and drop half-collected buffers, so that another reload can start."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: PLC0415

        finalize_layerwise_reload(self._module, self._worker.vllm_config.model_config)


def _infos(tensors: Sequence[Sequence[Any]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in tensors)
