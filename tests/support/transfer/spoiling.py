"""A vLLM worker whose commit of a folder with a file "spoil" fails: a parameter is replaced after the stage."""

from __future__ import annotations

from pathlib import Path

from agentloop.values import codec
from agentloop_servers.weight_transfer.vllm_worker import WeightWorker
from agentloop_servers.weight_transfer.worker_calls import StageOrder


class SpoilingWorker(WeightWorker):
    """The service's worker extension, with the fault added."""

    _directory: str | None = None  # directory of the last stage

    def weights_stage(self, order: bytes) -> None:
        folder = codec.decode(order, StageOrder).folder
        self._directory = None if folder is None else folder.directory
        super().weights_stage(order)

    def weights_commit(self, number: int) -> bytes:
        if self._directory is not None and (Path(self._directory) / "spoil").exists():
            parameter = next(self.model_runner.get_model().parameters())
            parameter.data = parameter.data.clone()
        return super().weights_commit(number)
