"""vLLM's own reload instead of ours, inside the worker: reproduces a known silent failure.

A file in the folder of an update requests it, for that update only; all other updates use the shipped path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from agentloop.values import codec
from agentloop_servers.weight_transfer.verify import Read
from agentloop_servers.weight_transfer.vllm_worker import RunningModel, WeightWorker
from agentloop_servers.weight_transfer.worker_calls import StageOrder

EXTENSION = f"{__name__}.StockReload"
STOCK = "reload_as_stock_vllm"  # load with `collective_rpc("reload_weights")`
UNPROVEN = "skip_the_proof"  # and compare nothing afterwards


class StockReload(WeightWorker):
    """The shipped worker extension, over a model that can be loaded by vLLM alone on request."""

    def weights_model(self) -> RunningModel:
        self._faulty = _FaultyModel(self)
        return self._faulty

    def weights_stage(self, order: bytes) -> None:
        folder = codec.decode(order, StageOrder).folder
        assert folder is not None
        self._faulty.folder = Path(folder.directory)
        super().weights_stage(order)


class _FaultyModel(RunningModel):
    folder: Path

    def reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if (self.folder / STOCK).exists():
            self._worker.reload_weights(weights_path=str(self.folder))
        else:
            super().reload(tensors)

    def compare(self, names: Sequence[str], read: Read) -> tuple[int, int]:
        return (0, 0) if (self.folder / UNPROVEN).exists() else super().compare(names, read)
