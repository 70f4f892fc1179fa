"""A terminal record in transit. The process that creates it encodes it once, and only its final readers decode it.

The header fields are those that the coordinator needs. The coordinator sets `staleness` without decoding the
record: it is the last field of the encoding, so its value is appended to the bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from agentloop.api.facts import Values, facts_of
from agentloop.types import StopReason, Trajectory
from agentloop.values import codec


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """An encoded Trajectory with the header fields that the queue, the group and the store use."""

    rollout_id: str
    group_id: str
    sample_index: int
    attempt: int
    stop_reason: StopReason
    is_complete: bool
    is_sound: bool
    num_response_tokens: int  # over all paths
    oldest_version: int | None  # the range over the tokens in the loss mask; None: it is empty
    newest_version: int | None
    max_staleness: int | None
    adapter: str  # `staleness` counts the versions of this adapter
    staleness: int | None
    facts: Values  # the result of `facts_of`
    data: memoryview  # `codec.encode(trajectory)` without the value of the last field, `staleness`
    digest: bytes  # SHA-256 of `data` as first encoded; a component that changes the record keeps the digest

    @classmethod
    def of(cls, trajectory: Trajectory, encoded: bytes | None = None) -> EncodedRecord:
        """Create an EncodedRecord. `encoded` are the bytes of `codec.encode(trajectory)`, if already known.

        Raises the codec's error for text or numbers that cannot be encoded.
        """
        encoded = codec.encode(trajectory) if encoded is None else encoded
        staleness = codec.encode(trajectory.staleness)
        data = memoryview(encoded)[: -len(staleness)]
        versions = trajectory.trained_versions
        return cls(
            rollout_id=trajectory.rollout_id,
            group_id=trajectory.group_id,
            sample_index=trajectory.sample_index,
            attempt=trajectory.attempt,
            stop_reason=trajectory.stop_reason,
            is_complete=trajectory.is_complete,
            is_sound=trajectory.is_sound,
            num_response_tokens=sum(len(path.response_ids) for path in trajectory.paths),
            oldest_version=min(versions, default=None),
            newest_version=max(versions, default=None),
            max_staleness=trajectory.max_staleness,
            adapter=trajectory.adapter,
            staleness=trajectory.staleness,
            facts=facts_of(trajectory),
            data=data,
            digest=hashlib.sha256(data).digest(),
        )

    @property
    def is_trained(self) -> bool:
        """True if the trainer uses the record, like `Trajectory.is_trained`."""
        return self.is_sound and self.oldest_version is not None

    @property
    def value(self) -> bytes:
        """The bytes of the complete record, equal to `codec.encode(trajectory)`."""
        return b"".join((self.data, codec.encode(self.staleness)))

    def decoded(self) -> Trajectory:
        """Decode the record. Raises InvalidRequest if the bytes are not a valid record."""
        return codec.decode(self.value, Trajectory)
