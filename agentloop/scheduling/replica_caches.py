"""The models of all replicas' prefix caches, and what the replicas themselves tell of theirs.

A model predicts: turns put blocks in, its own eviction takes some out. What a replica tells corrects it, about a
heartbeat later. Until then the model may hold blocks that the engine evicted against the prediction. Reports are
numbered (`KVChanges`): after a gap a model stays as it is until the replica has told all that it holds.
"""

from __future__ import annotations

from agentloop.api import KVChanges
from agentloop.fleet import Fleet
from agentloop.kv_hashes import hashes_of
from agentloop.scheduling.residency import ReplicaKV


class ReplicaCaches:
    """One model a replica, from the first time that it is asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._models: dict[str, ReplicaKV] = {}
        self._sequences: dict[str, int] = {}  # of the last changes taken in

    def of(self, replica_id: str) -> ReplicaKV | None:
        """Return the model of a replica; None if it is unknown, or its engine does not say how much it holds."""
        model = self._models.get(replica_id)
        replica = self._fleet.get(replica_id)
        if model is None and replica is not None:
            info = replica.registration.info
            if info.kv_capacity_tokens >= info.block_size > 0:
                model = self._models[replica_id] = ReplicaKV(info.kv_capacity_tokens // info.block_size)
        return model

    def changed(self, replica_id: str, changes: KVChanges) -> bool:
        """Take in what a replica tells; False: something before it is missing, and all has to be told."""
        model, last = self.of(replica_id), self._sequences.get(replica_id)
        if model is None or changes.sequence == last:
            return True
        if changes.resident is not None:
            model.keep_only(hashes_of(changes.resident))
        elif last is None or changes.sequence != last + 1:
            return False
        else:
            model.remove(hashes_of(changes.removed))
        self._sequences[replica_id] = changes.sequence
        return True

    def drop(self, replica_id: str) -> None:
        """Forget a replica that is lost, or whose KV is."""
        self._models.pop(replica_id, None)
        self._sequences.pop(replica_id, None)
