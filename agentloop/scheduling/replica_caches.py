"""The models of all replicas' prefix caches, what the replicas tell of theirs, and what turns found in them.

A model predicts: turns put blocks in, its own eviction takes some out. What a replica tells corrects it, about a
heartbeat later. Until then the model may hold blocks that the engine evicted against the prediction. Reports are
numbered (`KVChanges`): after a gap a model stays as it is until the replica has told all that it holds.
"""

from __future__ import annotations

from agentloop.api.coordinator import KVChanges
from agentloop.fleet.registry import Fleet
from agentloop.kv_hashes import hashes_of
from agentloop.scheduling.cache_hits import CacheHits
from agentloop.scheduling.lease_table import Holding
from agentloop.scheduling.residency import ReplicaKV


class ReplicaCaches:
    """One model a replica, from the first time that it is asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.hits = CacheHits()
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

    def turn(self, holding: Holding, num_left: float, num_prompt: int, num_cached: int | None) -> None:
        """Compare what a turn found cached with what was to be there, and put its context in.

        `num_left`: tokens that its last turn left there. A prompt's last token is always computed.
        """
        lease, hashes = holding.lease, holding.hashes
        cache = self.of(lease.replica_id)
        if num_cached is not None:
            num_blocks = 0 if cache is None or not lease.block_size else cache.match(hashes)
            num_full = max(num_prompt - 1, 0) // max(lease.block_size, 1)
            self.hits.take(lease.replica_id, num_left, min(num_blocks, num_full) * lease.block_size, num_cached)
        if cache is not None and hashes:
            cache.store(holding.demand.holder_id, hashes)
            cache.release(holding.demand.holder_id)

    def flushed(self) -> None:
        """Take in that no replica has KV left."""
        self.hits.flushed()
        for replica in self._fleet.replicas:
            cache = self.of(replica.replica_id)
            if cache is not None:
                cache.clear()

    def drop(self, replica_id: str) -> None:
        """Forget a replica that is lost, or whose KV is."""
        self._models.pop(replica_id, None)
        self._sequences.pop(replica_id, None)
        self.hits.forget(replica_id)
