"""A weight update of a set of replicas. No token is sampled from unknown weights.

    the update     IDLE ─► STAGING ─► SWITCHING ─► IDLE       every state ─► IDLE on failure

    each replica   stage ─► drain ─► pause ─► commit ─► wake ─► resume, with the canary check
                   decodes           frozen             (only in a sleeping fleet)
    on failure     quarantine joins  quarantine     joins again with the weights it holds; refused: quarantine

Rolling swap: replicas stage the weights while they decode, then one canary replica swaps first. The fleet's
version changes once it has resumed; then the other replicas swap independently of each other. Blocking update:
without staging memory (`StagingDevice.NOWHERE`) the bytes are transferred in the commit, so all replicas take each
step together.

`ReplicaSync` owns each `FleetUpdate`, calls its steps and writes the desired state between them. `Fleet` is read
and changed without awaits. Each engine call has its own deadline. Invariant: no replica resumes with unknown
weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from enum import StrEnum

from agentloop.api.coordinator import UpdateProgress
from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import MemoryTag, StagingDevice, WeightUpdate
from agentloop.errors import (
    CheckpointUnreadable,
    EngineLost,
    InvalidRequest,
    WeightsRefused,
    WeightUpdateFailed,
)
from agentloop.fleet.desired_state import WEIGHTS, StandingOrders, UpdateSource
from agentloop.fleet.registry import Fleet, ReplicaRecord, ReplicaState
from agentloop.fleet.replica_steps import (
    ReplicaProgress,
    ReplicaSteps,
    StepLimits,
    failures,
    on_all,
    unfailed,
    within,
)

# Stragglers get this multiple of the others' time, because each disk and page cache has its own speed
READ_SLOWNESS = 2.0
_READ_SHARE = 0.5
_PROMPT_S = 0.2
_WAIT = "wait"  # for requests pinned to older versions, or for the canary replica

Step = Callable[[ReplicaProgress], Awaitable[None]]


class UpdateState(StrEnum):
    IDLE = "idle"
    STAGING = "staging"
    SWITCHING = "switching"


class FleetUpdate:
    """An update of `replicas` to `source`, which also wakes the memory of `tags`.

    Call `wake_weights`, `stage` and `switch` in this order, and `mark_over` in every case. `stage` and `switch`
    raise WeightUpdateFailed if all replicas fail; `stage` raises CheckpointUnreadable or InvalidRequest instead if
    all failures have this type.
    """

    def __init__(
        self,
        fleet: Fleet,
        steps: ReplicaSteps,
        clock: Clock,
        replicas: Sequence[ReplicaRecord],
        source: UpdateSource,
        tags: frozenset[MemoryTag],
    ) -> None:
        self.replicas = [ReplicaProgress(replica) for replica in replicas]
        self._fleet = fleet
        self._steps = steps
        self._config = steps.config
        self._clock = clock
        self._began_at = clock.now()
        self.source = source
        self._tags = tags
        self._orders = StandingOrders()  # the orders in force during the swap
        self._publish_once: Callable[[], asyncio.Task[None]]
        self._in_turn: list[ReplicaProgress] = []  # candidates for the canary replica
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._state = UpdateState.STAGING
        self._turn = asyncio.Lock()  # held by the canary replica
        self._has_first_switched = False  # a canary replica has resumed with the version
        self._is_refused = False

    async def wake_weights(self, asleep: frozenset[MemoryTag]) -> None:
        """Wake the memory that the stage needs. `asleep` is the memory that the fleet has released."""

        async def wake(one: ReplicaProgress) -> None:
            await self._steps.wake(one.replica, WEIGHTS)

        limits = StepLimits(self._config.wake_timeout_s, self._config.straggler_grace_s)
        await on_all([one for one in self.replicas if _may_sleep(one, asleep)], "wake", wake, limits)

    async def stage(self) -> None:
        """Receive and verify the weights on all replicas while they decode.

        A failed replica is quarantined. If all fail, only lost or silent replicas are quarantined, so that the
        next update does not wait for them. Raises CheckpointUnreadable if the replicas received different weights;
        nothing has changed then.
        """
        started_at, config = self._clock.now(), self._config
        # The sender transfers to all replicas at once, so they finish together
        is_push = not self.source.update.is_repeatable
        updates = addressed(self.source.update, [one.replica for one in self.replicas])

        async def stage(one: ReplicaProgress) -> None:
            one.staged = await self._steps.stage(one.replica, updates[one.replica.replica_id])
            one.stage_s = self._clock.now() - started_at

        share, slowness = (0.0, 0.0) if is_push else (_READ_SHARE, READ_SLOWNESS)
        limits = StepLimits(config.stage_timeout_s, config.straggler_grace_s, share, slowness)
        await on_all(unfailed(self.replicas), "stage", stage, limits)
        failed = [one for one in self.replicas if one.error is not None]
        is_over = len(failed) == len(self.replicas)
        for one in _culprits(failed) if is_over else failed:
            self._fleet.quarantine(one.replica, one.error or "")
        if not is_over:
            self._agree()
            return
        for kind in (type(failed[0].failure), CheckpointUnreadable, InvalidRequest):
            if issubclass(kind, InvalidRequest) and all(isinstance(one.failure, kind) for one in failed):
                raise kind(failures(failed), param="push" if is_push else "directory")
        raise WeightUpdateFailed(
            f"no replica could stage the weights, and the served weights are unchanged: {failures(failed)}"
        )

    def _agree(self) -> None:
        """Record the digest of the staged weights.

        Raises CheckpointUnreadable if replicas have different digests.
        """
        staged = {one.replica.replica_id: one.staged.digest for one in unfailed(self.replicas) if one.staged}
        if len(digests := set(staged.values()) - {""}) > 1:
            found = ", ".join(f"{replica_id}: {digest or 'unknown'}" for replica_id, digest in staged.items())
            raise CheckpointUnreadable(
                f"replicas read different weights for version {self.source.version} ({found}): the folder changed "
                "during the update, or hosts have different copies; use the same files on every host",
                param="directory",
            )
        if digests:
            self.source = replace(self.source, update=replace(self.source.update, digest=digests.pop()))

    async def switch(self, orders: StandingOrders, publish: Callable[[], Coroutine[None, None, None]]) -> None:
        """Swap the weights on all replicas that have staged them: a rolling swap, or a blocking update.

        `publish` is awaited once, as soon as the first replica holds the version; no replica takes traffic before.
        Raises WeightsRefused or WeightUpdateFailed if no replica serves the version; replicas with their old
        weights then only need a resume.
        """
        self._state, self._orders = UpdateState.SWITCHING, orders
        async with asyncio.TaskGroup() as group:
            publishing: list[asyncio.Task[None]] = []

            def publish_once() -> asyncio.Task[None]:
                if not publishing:
                    publishing.append(group.create_task(publish(), name="publish the new version"))
                return publishing[0]

            self._publish_once = publish_once
            for one in unfailed(self.replicas):
                draining = self._steps.drain_pinned(one.replica, self.source.version)
                self._drains[one.replica.replica_id] = group.create_task(draining, name="drain")
            await asyncio.wait(self._drains.values(), timeout=_PROMPT_S)  # most replicas have no pinned requests
            if any(
                one.staged is not None and one.staged.staging_device is StagingDevice.NOWHERE
                for one in self.replicas
            ):
                # A blocking update: the transfer needs all replicas in the same step.
                for step in (self._drain, self._begin_update, self._pause, self._commit, self._resume_and_admit):
                    await self._on_all(unfailed(self.replicas), step)
            else:
                # The canary is a replica in service, so that a joining one does not delay the others; the fastest
                # stage goes first.
                self._in_turn = sorted(
                    unfailed(self.replicas),
                    key=lambda one: (one.replica.state is not ReplicaState.READY, one.stage_s),
                )
                await self._on_all(tuple(self._in_turn), self._switch_in_turn)
            is_refused = any(isinstance(one.failure, WeightsRefused) for one in self.replicas)
            held = [
                one for one in self.replicas if one.committed and not isinstance(one.failure, WeightUpdateFailed)
            ]
            if held and not is_refused:
                # The weights are committed, so they are the fleet's even if no replica has resumed
                await publish_once()
        if not publishing:
            raise (WeightsRefused if is_refused else WeightUpdateFailed)(failures(self.replicas))

    def mark_over(self) -> None:
        self._state = UpdateState.IDLE

    @property
    def progress(self) -> UpdateProgress | None:
        """The progress of the update; None after its end."""
        if self._state is UpdateState.IDLE:
            return None
        awaited = _awaited_replicas([one.replica for one in self.replicas])
        waits_for = [one.replica for one in unfailed(self.replicas) if one.replica.replica_id in awaited]
        num_receivers = sum(replica.registration.info.num_workers for replica in waits_for)
        names, age_s = tuple(replica.replica_id for replica in waits_for), self._clock.now() - self._began_at
        failed = tuple(f"{one.replica.replica_id}: {one.error}" for one in self.replicas if one.error is not None)
        return UpdateProgress(self.source.version, self._state, num_receivers, failed, names, age_s)

    async def _switch_in_turn(self, one: ReplicaProgress) -> None:
        """Swap one replica, as the canary or after the canary has resumed.

        If the canary fails or exceeds a straggler's time, the next replica becomes the canary. If it refuses the
        weights, all others keep the old version.
        """
        await self._drain(one)
        async with self._turn:
            self._in_turn.remove(one)
            is_first = not self._has_first_switched
            if self._is_refused:
                raise WeightsRefused("the canary replica refused the weights")
            if is_first:
                # The other replicas wait for the canary; with no other candidate it has the full time.
                patience_s = self._config.straggler_grace_s + READ_SLOWNESS * one.stage_s
                limit_s = patience_s if self._in_turn else self._config.switch_timeout_s
                try:
                    await within(limit_s, self._switch_one(one))
                except WeightsRefused:
                    self._is_refused = True
                    raise
                self._has_first_switched = True
        if not is_first:
            await self._switch_one(one)
        await self._admit(one)

    async def _switch_one(self, one: ReplicaProgress) -> None:
        await self._begin_update(one)
        await self._pause(one)
        # Without a sleep or a pause, commit and resume are one call, which saves a round trip of the stall.
        if _may_sleep(one, self._orders.asleep) or self._orders.is_paused:
            await self._commit(one)
            await self._wake_and_resume(one)
        else:
            await self._commit(one, resumes=True)

    async def _drain(self, one: ReplicaProgress) -> None:
        one.verb = _WAIT
        await self._drains[one.replica.replica_id]

    async def _begin_update(self, one: ReplicaProgress) -> None:
        one.verb = "switch"
        if self._fleet.begin_update(one.replica) is None:
            raise EngineLost("the replica left the fleet during the update")

    async def _pause(self, one: ReplicaProgress) -> None:
        one.verb, one.paused_at = "pause", self._clock.now()
        one.paused_after_s = one.paused_at - self._began_at
        await self._steps.pause_for_commit(one.replica, self.source.kv_policy)

    async def _commit(self, one: ReplicaProgress, *, resumes: bool = False) -> None:
        one.verb = "commit"
        one.committed = await self._steps.commit(one.replica, self.source.version, resumes=resumes)
        if resumes:
            self._resumed(one, one.committed.canary_ms / 1e3)

    async def _wake_and_resume(self, one: ReplicaProgress) -> None:
        if _may_sleep(one, self._orders.asleep):
            one.verb = "wake"
            await self._steps.wake(one.replica, self._tags)
        one.verb = "resume"
        if not (self._stays_asleep or self._orders.is_paused):
            self._resumed(one, await self._steps.resume(one.replica))

    def _resumed(self, one: ReplicaProgress, canary_s: float) -> None:
        one.canary_s = canary_s
        one.end_stall(self._clock.now() - canary_s)

    async def _admit(self, one: ReplicaProgress) -> None:
        # The version is stored and set before the first token under it is sampled for a caller. Other replicas use
        # the same task, so one cancelled replica must not cancel it.
        await asyncio.shield(self._publish_once())
        if self._stays_asleep:
            self._fleet.fall_asleep(one.replica)
        else:
            self._fleet.admit(one.replica)
            one.end_stall(self._clock.now())

    async def _resume_and_admit(self, one: ReplicaProgress) -> None:
        await self._wake_and_resume(one)
        await self._admit(one)

    @property
    def _stays_asleep(self) -> bool:
        return bool(self._orders.asleep - self._tags)

    async def _on_all(self, progress: Sequence[ReplicaProgress], step: Step) -> None:
        timeout_s = self._config.switch_timeout_s + self._config.exact_grace_s
        limits = StepLimits(timeout_s, self._config.straggler_grace_s, slowness=READ_SLOWNESS)
        await on_all(progress, "switch", step, limits, self._failed)

    def _failed(self, one: ReplicaProgress) -> None:
        one.end_stall(self._clock.now())
        if one.verb == _WAIT:  # the drain failed or timed out; the replica serves the old version as before
            return
        if isinstance(one.failure, WeightUpdateFailed):
            self._fleet.refuse(one.replica, one.error or "")
        elif one.verb == "commit":
            self._fleet.quarantine(one.replica, one.error or "")
        else:  # The version of its weights is known, so it only needs a resume.
            self._fleet.rejoin(one.replica, one.error or "")


def _awaited_replicas(replicas: Sequence[ReplicaRecord]) -> set[str]:
    """Return the ids of the replicas that a push's sender waits for.

    A quarantined replica may hang, so the sender does not wait for it, unless all are quarantined.
    """
    sound = {one.replica_id for one in replicas if one.state is not ReplicaState.QUARANTINED}
    return sound or {one.replica_id for one in replicas}


def addressed(update: WeightUpdate, replicas: Sequence[ReplicaRecord]) -> dict[str, WeightUpdate]:
    """Return the update that each replica stages.

    For a push it has the number of workers that the sender waits for.
    """
    push = update.push
    if push is None:
        return {one.replica_id: update for one in replicas}
    awaited = _awaited_replicas(replicas)
    sizes = {one.replica_id: one.registration.info.num_workers for one in replicas}
    num_awaited = sum(sizes[replica_id] for replica_id in awaited)
    counted = replace(push, num_receivers=num_awaited, num_optional=sum(sizes.values()) - num_awaited)
    return {
        replica_id: replace(update, push=replace(counted, is_optional=replica_id not in awaited))
        for replica_id in sizes
    }


def _culprits(failed: Sequence[ReplicaProgress]) -> list[ReplicaProgress]:
    """Return the replicas at fault after all have failed: lost ones, and silent ones if others answered."""
    lost = [one for one in failed if isinstance(one.failure, EngineLost | ConnectionError)]
    silent = [one for one in failed if isinstance(one.failure, TimeoutError)]
    for own in (lost, [*lost, *silent]):
        if 0 < len(own) < len(failed):
            return own
    return []


def _may_sleep(one: ReplicaProgress, asleep: frozenset[MemoryTag]) -> bool:
    """Return True if the replica may be asleep: the fleet sleeps, or the replica is not in service."""
    return bool(asleep) or one.replica.state is not ReplicaState.READY
