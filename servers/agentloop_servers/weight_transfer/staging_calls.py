"""The calls that an engine's process makes to a worker's stager; the engines' worker classes inherit them.

Arguments and results are numbers and codec bytes (`worker_calls.py`). All calls come on the worker's own thread,
between two steps, one at a time.
"""

from __future__ import annotations

import torch

from agentloop import codec
from agentloop_servers.weight_transfer.staging import WeightStager
from agentloop_servers.weight_transfer.worker_calls import StageOrder, StagingSetup


class StagingCalls:
    """A worker's half of weight updates, mixed into the engine's own class: its names must not collide with that.

    Who inherits says how its stager is made.
    """

    _stager: WeightStager

    def weights_stager(self, setup: StagingSetup) -> WeightStager:
        """Make this worker's stager."""
        raise NotImplementedError

    def weights_prepare(self, setup: bytes) -> None:
        """Make the stager from a `StagingSetup`. Once, after the start and before any request."""
        settings = codec.decode(setup, StagingSetup)
        self._stager = self.weights_stager(settings)
        if settings.loaded is not None:
            self._stager.prepare(settings.loaded)

    def weights_stage(self, order: bytes) -> None:
        """Begin to receive what a `StageOrder` names."""
        wanted = codec.decode(order, StageOrder)
        source = wanted.push or wanted.folder
        if source is None:
            raise ValueError("a stage without a source")
        self._stager.stage(wanted.number, source)

    def weights_poll(self, number: int) -> bytes:
        """Return a stage's `StageProgress`."""
        return codec.encode(self._stager.poll(number))

    def weights_drop(self, number: int) -> None:
        """Give a stage up."""
        self._stager.drop(number)

    def weights_commit(self, number: int) -> bytes:
        """Bring a stage into the model while generation is paused; returns a `CommitReport`."""
        with torch.no_grad():
            return codec.encode(self._stager.commit(number))

    def weights_offer(self, token: str) -> bytes | None:
        """Give the served weights to another engine's worker; returns a `PushSource`, None if that cannot be."""
        offer = self._stager.offer(token)
        return None if offer is None else codec.encode(offer)

    def weights_release(self) -> None:
        """Give back all memory that is not the model's."""
        self._stager.release()
