"""Broadcast groups between a trainer and all replicas, with the operations of vLLM and SGLang.

    no group ─► group ─► transfer ─► part, part, ... ─► end: an update of the fleet ─► group
                           └ a part that no replica received, a lost replica, a silent trainer ─► no group

Replicas receive the parts into staging memory and continue to decode. `end_transfer` is an ordinary update whose
stage only checks that all tensors arrived. A replica that missed a part fails this stage, leaves traffic, and gets
the weights from another replica.

The coordinator's event loop owns the one object. Groups are not stored: after a coordinator restart the trainer
creates its group again. Workers drop an open transfer when their trainer is silent, so no task watches it here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from agentloop.api.coordinator import UpdateReport
from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import (
    GroupBackend,
    GroupInit,
    LeaveGroup,
    PullVersion,
    TensorInfo,
    TrainerOrder,
    TransferPart,
    WeightUpdate,
)
from agentloop.errors import (
    AgentLoopError,
    CheckpointUnreadable,
    Conflict,
    InvalidRequest,
    NoHealthyReplica,
    NotFound,
    WeightUpdateFailed,
)
from agentloop.fleet.registry import Fleet, ReplicaRecord, ReplicaState
from agentloop.fleet.replica_steps import ReplicaSteps

Update = Callable[[WeightUpdate], Awaitable[UpdateReport]]


@dataclass(slots=True)
class _Group:
    init: GroupInit
    members: tuple[ReplicaRecord, ...]  # their records when they joined
    is_joined: bool
    tensors: tuple[TensorInfo, ...] = ()  # the tensors of the last part, reused by a part that names none


@dataclass(slots=True)
class _OpenTransfer:
    group: _Group
    ends_at: float  # extended by every part
    transfer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    failed: dict[str, Exception] = field(default_factory=dict)  # replica id -> error
    version: int | None = None
    num_parts: int = 0


class TrainerGroups:
    """Implements TrainerPort. `update` updates the fleet to the weights that a transfer delivered."""

    def __init__(self, fleet: Fleet, steps: ReplicaSteps, clock: Clock, update: Update) -> None:
        self._fleet = fleet
        self._steps = steps
        self._clock = clock
        self._update = update
        self._groups: dict[str, _Group] = {}
        self._transfer: _OpenTransfer | None = None

    @property
    def open_transfer(self) -> str:
        """The group with an open transfer; empty if no transfer is open."""
        transfer = self._transfer
        return "" if transfer is None or self._is_silent(transfer) else transfer.group.init.name

    @property
    def names(self) -> tuple[str, ...]:
        """The groups that all members have joined."""
        return tuple(name for name, group in self._groups.items() if group.is_joined)

    async def init_group(self, group: GroupInit, is_replacement: bool = False) -> None:
        await self._end_silent()
        members = self._members()
        num_workers = sum(one.registration.info.num_workers for one in members)
        if group.backend is not GroupBackend.IPC and group.world_size != group.rank_offset + num_workers:
            raise InvalidRequest(
                f"world_size is {group.world_size}, not {group.rank_offset + num_workers} (rank_offset + workers)",
                param="world_size",
            )
        if is_replacement:
            await self.destroy_group(group.name)
        if group.name in self._groups:
            raise Conflict(f"group {group.name!r} already exists: destroy it first", param="group_name")
        made = self._groups[group.name] = _Group(group, members, is_joined=group.backend is GroupBackend.IPC)
        if made.is_joined:
            return
        failed = await self._on_members(members, _ranked(group, members))
        if failed:
            await self._leave(made)
            raise WeightUpdateFailed(f"replicas could not join group {group.name!r}: {_text(failed)}")
        made.is_joined = True

    async def begin_transfer(self, group: str, is_repeatable: bool = False) -> None:
        await self._end_silent()
        if self._transfer is not None:
            name = self._transfer.group.init.name
            if is_repeatable and name == group:
                return
            raise Conflict(f"a transfer of group {name!r} is open: end the transfer or destroy the group")
        known = self._groups.get(group)
        if known is None:
            raise NotFound(f"unknown group {group!r}: create it first", param="group_name")
        if not known.is_joined:
            raise Conflict(f"replicas are still joining group {group!r}: retry later", param="group_name")
        lost = [one.replica_id for one in known.members if self._is_lost(one)]
        if lost:
            await self._leave(known)
            raise Conflict(
                f"group {group!r} lost the replicas {', '.join(lost)} and was destroyed: create it again",
                param="group_name",
            )
        self._transfer = _OpenTransfer(known, self._silent_at())

    async def receive_part(self, part: TransferPart) -> None:
        await self._end_silent()
        transfer = self._opened(part.group)
        init, tensors = transfer.group.init, part.tensors or transfer.group.tensors
        if not tensors:
            raise InvalidRequest("the first part of a group must list its tensors", param="names")
        transfer.group.tensors = tensors
        order = msgspec.structs.replace(
            part,
            tensors=tensors,
            packing=init.packing if part.packing is None else part.packing,
            buffer_bytes=part.buffer_bytes or init.buffer_bytes,
            transfer_id=transfer.transfer_id,
        )
        transfer.version = transfer.version if part.version is None else part.version
        transfer.num_parts += 1
        transfer.ends_at = self._silent_at()
        # A replica that missed a part cannot complete the transfer; it fails the stage and gets the weights from a
        # peer.
        members = [one for one in transfer.group.members if one.replica_id not in transfer.failed]
        failed = await self._on_members(members, [order] * len(members))
        transfer.ends_at = self._silent_at()
        transfer.failed |= failed
        if len(failed) < len(members):
            return
        await self._leave(transfer.group)
        is_unfit = all(isinstance(one, CheckpointUnreadable) for one in failed.values())
        raise (CheckpointUnreadable if is_unfit else WeightUpdateFailed)(
            f"no replica received the part, and the served weights are unchanged: {_text(failed)}"
        )

    async def end_transfer(self, group: str, version: int | None = None) -> UpdateReport:
        await self._end_silent()
        transfer = self._opened(group)
        if not transfer.num_parts:
            raise InvalidRequest("the transfer has no parts: send at least one before its end")
        version = transfer.version if version is None else version
        if version is None:
            version = 0 if self._fleet.weight_version is None else self._fleet.weight_version + 1
        receivers = tuple(one.replica_id for one in transfer.group.members)
        self._transfer = None
        try:
            return await self._update(WeightUpdate(version, transfer=transfer.transfer_id, receivers=receivers))
        except (Conflict, InvalidRequest, NoHealthyReplica) as error:
            # The update was refused before it started, so the staged parts are still valid: the trainer may retry
            # the end.
            is_known = self._transfer is None and self._groups.get(group) is transfer.group
            if is_known and not isinstance(error, CheckpointUnreadable):
                self._transfer, transfer.ends_at = transfer, self._silent_at()
            raise

    async def destroy_group(self, name: str) -> None:
        if (group := self._groups.get(name)) is not None:
            await self._leave(group)

    async def pull_version(self, order: PullVersion) -> None:
        one_of_host = {one.host: one for one in self._members()}
        for error in (await self._on_members(list(one_of_host.values()), [order] * len(one_of_host))).values():
            raise error

    def _members(self) -> tuple[ReplicaRecord, ...]:
        found = (one for one in self._fleet.replicas if one.state is not ReplicaState.QUARANTINED)
        sound = [one for one in found if not one.needs_probe]
        if not sound:
            raise NoHealthyReplica("no healthy replica can join a group now: retry later")
        return tuple(sorted(sound, key=lambda one: one.replica_id))

    def _opened(self, group: str) -> _OpenTransfer:
        if self._transfer is None or self._transfer.group.init.name != group:
            raise Conflict(f"group {group!r} has no open transfer: start one first")
        return self._transfer

    def _is_lost(self, member: ReplicaRecord) -> bool:
        now = self._fleet.get(member.replica_id)
        return now is None or now.incarnation != member.incarnation or now.needs_probe

    def _silent_at(self) -> float:
        return self._clock.now() + self._steps.config.stage_timeout_s

    def _is_silent(self, transfer: _OpenTransfer) -> bool:
        return self._clock.now() > transfer.ends_at

    async def _end_silent(self) -> None:
        """Destroy the group of an open transfer whose trainer is silent."""
        if self._transfer is not None and self._is_silent(self._transfer):
            await self._leave(self._transfer.group)

    async def _leave(self, group: _Group) -> None:
        if self._groups.get(group.init.name) is not group:
            return  # already left; another group may use the name now
        del self._groups[group.init.name]
        if self._transfer is not None and self._transfer.group is group:
            self._transfer = None
        there = [one for one in group.members if not self._is_lost(one)]
        await self._on_members(there, [LeaveGroup(group.init.name)] * len(there))

    async def _on_members(
        self, members: Sequence[ReplicaRecord], orders: Sequence[TrainerOrder]
    ) -> dict[str, Exception]:
        """Send each member its order. Returns the failures by replica id."""
        calls = [self._steps.follow_trainer(*pair) for pair in zip(members, orders, strict=True)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed: dict[str, Exception] = {}
        for one, answer in zip(members, answers, strict=True):
            if isinstance(answer, AgentLoopError | TimeoutError | OSError):
                failed[one.replica_id] = answer
            elif answer is not None:
                raise answer
        return failed


def _ranked(group: GroupInit, members: Sequence[ReplicaRecord]) -> list[GroupInit]:
    """Return each member's join order, with the rank of its first worker."""
    orders, rank = [], group.rank_offset
    for one in members:
        orders.append(msgspec.structs.replace(group, rank_offset=rank))
        rank += one.registration.info.num_workers
    return orders


def _text(failed: dict[str, Exception]) -> str:
    return "; ".join(f"{name}: {error or type(error).__name__}" for name, error in failed.items())
