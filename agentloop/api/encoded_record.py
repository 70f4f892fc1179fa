"""A terminal record in transit: its maker encodes it once; its readers alone decode it.

The header has the fields that the coordinator uses. The coordinator adds the staleness, the last field of the
encoded bytes, by appending its value.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from agentloop.api.facts import Values, facts_of
from agentloop.types import StopReason, Trajectory
from agentloop.values import codec


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A Trajectory as bytes, and the facts of it that its queue, its group and its store need."""

    rollout_id: str
    group_id: str
    sample_index: int
    attempt: int
    stop_reason: StopReason
    is_complete: bool
    is_sound: bool
    num_response_tokens: int  # over all paths
    oldest_version: int | None  # of the tokens in its mask; None: it is empty
    newest_version: int | None
    max_staleness: int | None
    adapter: str  # by whose versions it is as old as it is
    staleness: int | None
    facts: Values  # `facts_of` it
    data: memoryview  # `codec.encode` of the Trajectory, without the value of its last field, `staleness`
    digest: bytes  # SHA-256 of `data`, so also of the attempt; whoever changes the record keeps its maker's digest

    @classmethod
    def of(cls, trajectory: Trajectory, encoded: bytes | None = None) -> EncodedRecord:
        """Encode a record, unless it is `encoded`.

        Raises what the codec raises for text or numbers that have no wire form.
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
        """True if the trainer consumes it, as `Trajectory.is_trained`."""
        return self.is_sound and self.oldest_version is not None

    @property
    def value(self) -> bytes:
        """The bytes of the whole record, as `codec.encode(Trajectory)` makes them."""
        return b"".join((self.data, codec.encode(self.staleness)))

    def decoded(self) -> Trajectory:
        """Return the record. Raises InvalidRequest if the bytes hold none."""
        return codec.decode(self.value, Trajectory)
