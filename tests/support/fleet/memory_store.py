"""A coordinator's store in memory: it outlives the coordinator, not the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from agentloop.api.coordinator import RolloutTerms, assignment_id_of
from agentloop.api.encoded_record import EncodedRecord
from agentloop.errors import Conflict, NotFound
from agentloop.storage.trajectory_store import encoded_groups, groups_digest
from agentloop.types import RolloutGroup, Trajectory
from agentloop.values import codec

T = TypeVar("T")


class MemoryStore:
    """Implements `agentloop.storage.trajectory_store.TrajectoryStore`; records live as long as this object."""

    successor: int | None = None
    is_full = False
    away = ""
    is_shared = False

    def __init__(self) -> None:
        self.groups: dict[str, list[RolloutGroup]] = {}
        self.records: dict[str, Trajectory] = {}
        self.sessions: set[str] = set()
        self.state: dict[str, bytes] = {}
        self.rollout_terms: dict[str, RolloutTerms] = {}
        self.is_broken = False

    async def accept(
        self,
        rollout_id: str,
        groups: Sequence[RolloutGroup],
        terms: RolloutTerms = RolloutTerms(),  # noqa: B008 - frozen
        encoded: Sequence[bytes] | None = None,
    ) -> None:
        await self._turn()
        self.groups[rollout_id] = list(groups)
        self.rollout_terms[rollout_id] = replace(
            terms, groups_digest=groups_digest(encoded or encoded_groups(groups))
        )

    async def cancel(self, rollout_id: str) -> None:
        await self._disk()
        self.rollout_terms[rollout_id] = replace(self.rollout_terms[rollout_id], is_cancelled=True)

    async def check_owner(self) -> None:
        await self._turn()

    async def has_record(self, record: EncodedRecord) -> bool:
        await self.counts(record.rollout_id)
        name = assignment_id_of(record.rollout_id, record.group_id, record.sample_index)
        return name in self.records

    async def stored(self, assignment_id: str) -> EncodedRecord | None:
        await self._disk()
        known = self.records.get(assignment_id)
        return None if known is None else EncodedRecord.of(known)

    async def acknowledge(self, rollout_id: str, cursor: int) -> None:
        await self._turn()

    async def terms(self, rollout_id: str) -> RolloutTerms:
        await self._turn()
        return self.rollout_terms.get(rollout_id, RolloutTerms())

    async def add_records(self, records: Sequence[EncodedRecord]) -> int:
        await self._disk()
        known = len(self.records)
        for one in records:
            self.records.setdefault(assignment_id_of(one.rollout_id, one.group_id, one.sample_index), one.decoded())
        return len(self.records) - known

    async def record(self, record: EncodedRecord) -> bool:
        await self._turn()
        if record.rollout_id in self.groups:
            raise Conflict(f"rollout {record.rollout_id} was submitted")
        self.sessions.add(record.rollout_id)
        return await self.add_records([record]) > 0

    async def holds_sessions(self, rollout_id: str) -> bool:
        await self._turn()
        return rollout_id in self.sessions

    async def read(self, rollout_id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        await self._turn()
        rows = [(row, one) for row, one in enumerate(self.records.values(), 1) if one.rollout_id == rollout_id]
        return [(row, codec.encode(one)) for row, one in rows if row > after][:limit]

    async def counts(self, rollout_id: str) -> tuple[int, int]:
        await self._turn()
        if rollout_id in self.sessions:
            num_recorded = sum(one.rollout_id == rollout_id for one in self.records.values())
            return num_recorded, num_recorded
        if rollout_id not in self.groups:
            raise NotFound(f"no rollout {rollout_id}")
        num_accepted = sum(group.num_samples for group in self.groups[rollout_id])
        return num_accepted, sum(one.rollout_id == rollout_id for one in self.records.values())

    async def unfinished(self) -> list[tuple[RolloutGroup, tuple[int, ...]]]:
        await self._turn()
        owed = []
        for rollout_id, groups in self.groups.items():
            for group in groups:
                indexes = range(group.num_samples)
                names = [assignment_id_of(rollout_id, group.group_id, index) for index in indexes]
                missing = tuple(index for index in indexes if names[index] not in self.records)
                if missing:
                    owed.append((group, missing))
        return owed

    async def take_over(self, above: int = 0) -> int:
        await self._turn()
        epoch = max(codec.decode(self.state.get("epoch", codec.encode(0)), int), above) + 1
        self.state["epoch"] = codec.encode(epoch)
        return epoch

    async def save_state(self, name: str, value: object, revokes: Sequence[str] = ()) -> None:
        await self._disk()
        self.state[name] = codec.encode(value)

    def time_commits(self, observe: Callable[[float], None]) -> None:
        pass

    async def saved_state(self, name: str, kind: type[T]) -> T | None:
        await self._turn()
        return codec.decode(self.state[name], kind) if name in self.state else None

    async def close(self) -> None:
        """Do nothing: the next coordinator reopens the store."""

    async def _disk(self) -> None:
        await self._turn()
        if self.is_broken:
            raise OSError("injected: disk I/O error")

    async def _turn(self) -> None:
        """Yield to other tasks, as the answer of a thread does."""
        await asyncio.sleep(0)
