"""One weight update: new weights on a set of replicas, in one order, with no token of unknown weights.

    the update     IDLE ─► STAGING ─► SWITCHING ─► IDLE       every state ─► IDLE on failure

    each replica   stage ─► pause ─► commit ─► wake ─► resume, and look at the first step
                   decodes  frozen             in a    └ the first one makes the version the fleet's
                                               sleeping fleet
    if it fails    quarantine joins  quarantine     joins anew, with the weights that it holds; refused: quarantine

In two phases the bytes arrive while decoding goes on, and a commit only swaps: then each replica switches by
itself, and one that hangs freezes no other. One is asked first: the others serve the
old version until its first step was looked at, and stay there if it refuses the weights. From then on a replica
takes new traffic only once it holds the new version; one that has not switched yet ends what it has, under the
version it holds. Where memory does not allow staging (HeldIn.NOWHERE) the bytes arrive in the commit, at all
receivers at once: then all switch together. Each step waits for the others, its stragglers for seconds only, and
each replica looks for itself. A sleeping fleet is woken by an update: its weights' memory before the stage, the KV
cache's after the commit. A paused one looks once it is resumed.

Ownership: a `FleetUpdate` belongs to the `ReplicaSync` that made it, which calls its steps and writes the desired
state in between. The steps decide on the `Fleet` without awaits in between, and every call to an engine has a
deadline, which counts for that replica only. Invariant: no replica is resumed on unknown weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agentloop.api.coordinator import UpdateProgress
from agentloop.clock import Clock
from agentloop.engine import EngineControl, HeldIn, MemoryTag, WeightUpdate
from agentloop.errors import (
    CheckpointUnreadable,
    EngineLost,
    InvalidRequest,
    InvariantBroken,
    WeightsRefused,
    WeightUpdateFailed,
)
from agentloop.fleet.desired_state import WEIGHTS
from agentloop.fleet.parallel_step import ReplicaProgress, StepLimits, failures, on_all, unfailed, within
from agentloop.fleet.registry import Fleet, ReplicaRecord, ReplicaState
from agentloop.types import KVPolicy, PauseMode

READ_SLOWNESS = 2.0  # a directory is read at the speed of each replica's own disk and cache
_READ_SHARE = 0.5
_WAIT = "wait"  # for the one that is asked first


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Deadlines of each step on one replica, and how often a late one is tried."""

    stage_timeout_s: float = 600.0
    pause_timeout_s: float = 60.0
    commit_timeout_s: float = 300.0  # in one phase the commit transfers
    resume_timeout_s: float = 60.0
    straggler_grace_s: float = 10.0  # after the others are through with a step
    sleep_timeout_s: float = 120.0
    wake_timeout_s: float = 120.0
    offer_timeout_s: float = 30.0
    save_timeout_s: float = 5.0  # of an order, into the store; the fleet obeys also one that is not saved
    operator_pause_timeout_s: float = 600.0  # PauseMode.WAIT runs requests to their end
    settle_s: float = 5.0  # after a restart within an update: the time for replicas to say what they hold
    max_catch_up_attempts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    catch_up_pause_s: float = 60.0  # between two rounds of such attempts
    num_reports: int = 16

    @property
    def switch_timeout_s(self) -> float:
        """The longest that a replica can take from its pause to its resume."""
        return self.pause_timeout_s + self.commit_timeout_s + self.wake_timeout_s + self.resume_timeout_s

    @property
    def update_timeout_s(self) -> float:
        """The longest that an update can take: in a sleeping fleet, if every step takes its whole time."""
        return self.wake_timeout_s + self.stage_timeout_s + self.switch_timeout_s + 2 * self.save_timeout_s


class UpdateState(StrEnum):
    """Progress of the update under way."""

    IDLE = "idle"
    STAGING = "staging"
    SWITCHING = "switching"


MOVES: Mapping[UpdateState, frozenset[UpdateState]] = {
    UpdateState.IDLE: frozenset({UpdateState.STAGING}),
    UpdateState.STAGING: frozenset({UpdateState.SWITCHING, UpdateState.IDLE}),
    UpdateState.SWITCHING: frozenset({UpdateState.IDLE}),
}


@dataclass(frozen=True, slots=True)
class SwitchOrder:
    """The switch to `version`, and the state in which replicas end.

    `asleep` is the memory that the fleet has given back before, `tags` what of it wakes. `serve` is awaited once,
    as soon as the first replica holds the version; no replica takes traffic before that.
    """

    version: int
    kv_policy: KVPolicy
    asleep: frozenset[MemoryTag]
    tags: frozenset[MemoryTag]
    is_paused: bool
    serve: Callable[[], Awaitable[None]]

    @property
    def is_asleep(self) -> bool:
        return bool(self.asleep - self.tags)


class FleetUpdate:
    """One update on its way. Call `wake_weights`, `stage` and `switch` in order, and `end` whatever happened.

    `stage` and `switch` raise if they leave no replica to go on with: WeightUpdateFailed, from `stage` also
    CheckpointUnreadable or InvalidRequest if that is what every replica says.
    """

    def __init__(
        self,
        fleet: Fleet,
        connect: Callable[[str], EngineControl],
        clock: Clock,
        config: WeightConfig,
        replicas: Sequence[ReplicaRecord],
    ) -> None:
        self.progress = [ReplicaProgress(replica) for replica in replicas]
        self._fleet = fleet
        self._connect = connect
        self._clock = clock
        self._config = config
        self._state = UpdateState.IDLE

    @property
    def _is_one_phase(self) -> bool:
        """Tell if the commit transfers."""
        return any(one.staged is not None and one.staged.held_in is HeldIn.NOWHERE for one in self.progress)

    async def wake_weights(self, asleep: frozenset[MemoryTag]) -> None:
        """Take back the memory to stage into, of a fleet that has given back `asleep`."""
        self._move(UpdateState.STAGING)

        async def wake(one: ReplicaProgress) -> None:
            await self._connect(one.replica.url).wake(WEIGHTS)

        limits = StepLimits(self._config.wake_timeout_s, self._config.straggler_grace_s)
        await on_all(_sleepers(self.progress, asleep), "wake", wake, limits)

    async def stage(self, updates: Mapping[str, WeightUpdate]) -> None:
        """Have the weights received and checked while decoding goes on; `updates` is what each replica is told.

        Whoever failed is quarantined. Nothing has changed if it raises; who alone was to blame is quarantined then
        too, so that the next update does not wait for it.
        """
        started_at, config = self._clock.now(), self._config

        async def stage(one: ReplicaProgress) -> None:
            one.staged = await self._connect(one.replica.url).stage(updates[one.replica.replica_id])
            one.stage_s = self._clock.now() - started_at

        is_push = any(update.push is not None for update in updates.values())  # all receive it at once
        share, slowness = (0.0, 0.0) if is_push else (_READ_SHARE, READ_SLOWNESS)
        limits = StepLimits(config.stage_timeout_s, config.straggler_grace_s, share, slowness)
        await on_all(unfailed(self.progress), "stage", stage, limits)
        failed = [one for one in self.progress if one.error is not None]
        if len(failed) < len(self.progress):
            self._quarantine(failed)
            return
        self._quarantine(_culprits(failed))
        for kind in (CheckpointUnreadable, InvalidRequest):
            if all(isinstance(one.failure, kind) for one in failed):
                raise kind(failures(failed), param="push" if is_push else "directory")
        raise WeightUpdateFailed(f"nothing has changed: {failures(failed)}")

    async def switch(self, order: SwitchOrder) -> None:
        """Take all that have staged to the new version, each by itself after a first one, or all together.

        Raises WeightsRefused or WeightUpdateFailed if no replica serves it: one that still holds its old weights
        then only has to be resumed.
        """
        self._move(UpdateState.SWITCHING)
        async with asyncio.TaskGroup() as group:
            serving: list[asyncio.Task[None]] = []

            def served() -> asyncio.Task[None]:
                if not serving:
                    serving.append(group.create_task(_awaited(order.serve()), name="serve the new version"))
                return serving[0]

            switch = _Switch(self._fleet, self._connect, self._clock, self._config, order, served)
            if self._is_one_phase:
                await switch.take_together(self.progress)
            else:
                await switch.take_alone(unfailed(self.progress))
            is_refused = any(isinstance(one.failure, WeightsRefused) for one in self.progress)
            held = [
                one for one in self.progress if one.committed and not isinstance(one.failure, WeightUpdateFailed)
            ]
            if held and not is_refused:
                await served()  # also where no replica went on
        if not serving:
            raise (WeightsRefused if is_refused else WeightUpdateFailed)(failures(self.progress))

    def end(self) -> None:
        self._move(UpdateState.IDLE)

    def status(self, version: int) -> UpdateProgress | None:
        """Return how far it has come; None once it is over."""
        if self._state is UpdateState.IDLE:
            return None
        awaited = awaited_replicas([one.replica for one in self.progress])
        num_receivers = sum(
            one.replica.registration.info.num_workers
            for one in unfailed(self.progress)
            if one.replica.replica_id in awaited
        )
        failed = tuple(f"{one.replica.replica_id}: {one.error}" for one in self.progress if one.error is not None)
        return UpdateProgress(version, self._state, num_receivers, failed)

    def _quarantine(self, failed: Sequence[ReplicaProgress]) -> None:
        for one in failed:
            self._fleet.quarantine(one.replica, one.error or "")

    def _move(self, state: UpdateState) -> None:
        if state not in MOVES[self._state]:
            raise InvariantBroken(f"a weight update cannot go from {self._state} to {state}")
        self._state = state


Step = Callable[[ReplicaProgress], Awaitable[None]]


class _Switch:
    """The steps of one switch, from the pause to the resume, on any of its replicas."""

    def __init__(
        self,
        fleet: Fleet,
        connect: Callable[[str], EngineControl],
        clock: Clock,
        config: WeightConfig,
        order: SwitchOrder,
        served: Callable[[], asyncio.Task[None]],
    ) -> None:
        self._fleet = fleet
        self._connect = connect
        self._clock = clock
        self._config = config
        self._order = order
        self._served = served
        self._turn = asyncio.Lock()  # to be asked first
        self._is_proved = False  # a replica has gone on under the version
        self._is_refused = False

    async def take_together(self, progress: Sequence[ReplicaProgress]) -> None:
        """Take all steps on all replicas, with a wait for the others after each that freezes, swaps or goes on."""

        async def go_on(one: ReplicaProgress) -> None:
            for step in (self._wake, self._resume, self._admit):
                await step(one)

        for step in (self._begin, self._pause, self._commit, go_on):
            await self._on_all(unfailed(progress), step)

    async def take_alone(self, progress: Sequence[ReplicaProgress]) -> None:
        """Take all steps on one replica, and on the others once it goes on. Where it fails otherwise than by
        refusing the weights, or takes a straggler's time, the next one is asked first."""

        async def follow(one: ReplicaProgress) -> None:
            one.verb = _WAIT
            async with self._turn:
                is_first = not self._is_proved
                if self._is_refused:
                    raise WeightsRefused("another replica was asked first, and refused them")
                if is_first:
                    patience_s = self._config.straggler_grace_s + READ_SLOWNESS * one.stage_s
                    is_last = one is asked[-1]
                    try:
                        await within(self._config.switch_timeout_s if is_last else patience_s, self._go(one))
                    except WeightsRefused:
                        self._is_refused = True
                        raise
                    self._is_proved = True
            if not is_first:
                await self._go(one)
            await self._admit(one)

        # Of those in service the first to have staged.
        asked = sorted(progress, key=lambda one: (one.replica.state is not ReplicaState.READY, one.stage_s))
        await self._on_all(asked, follow)

    async def _on_all(self, progress: Sequence[ReplicaProgress], follow: Step) -> None:
        limits = StepLimits(self._config.switch_timeout_s, self._config.straggler_grace_s, slowness=READ_SLOWNESS)
        await on_all(progress, "switch", follow, limits, self._failed)

    async def _go(self, one: ReplicaProgress) -> None:
        for step in (self._begin, self._pause, self._commit, self._wake, self._resume):
            await step(one)

    async def _begin(self, one: ReplicaProgress) -> None:
        one.verb = "switch"
        if self._fleet.begin_update(one.replica) is None:
            raise EngineLost("it left the fleet during the update")

    async def _pause(self, one: ReplicaProgress) -> None:
        one.verb, one.paused_at = "pause", self._clock.now()
        pausing = self._connect(one.replica.url).pause(PauseMode.KEEP, self._order.kv_policy)
        await within(self._config.pause_timeout_s, pausing)

    async def _commit(self, one: ReplicaProgress) -> None:
        one.verb = "commit"
        self._fleet.forget_version(one.replica)
        version = self._order.version
        one.committed = await within(self._config.commit_timeout_s, self._connect(one.replica.url).commit(version))
        self._fleet.committed(one.replica, version)

    async def _wake(self, one: ReplicaProgress) -> None:
        if _sleepers([one], self._order.asleep):
            one.verb = "wake"
            waking = self._connect(one.replica.url).wake(self._order.tags)
            await within(self._config.wake_timeout_s, waking)

    async def _resume(self, one: ReplicaProgress) -> None:
        one.verb = "resume"
        if not (self._order.is_asleep or self._order.is_paused):
            resuming = self._connect(one.replica.url).resume()
            one.look_s = await within(self._config.resume_timeout_s, resuming)
            one.end_stall(self._clock.now() - one.look_s)

    async def _admit(self, one: ReplicaProgress) -> None:
        await asyncio.shield(self._served())
        if self._order.is_asleep:
            self._fleet.fall_asleep(one.replica)
        else:
            self._fleet.admit(one.replica)
            one.end_stall(self._clock.now())

    def _failed(self, one: ReplicaProgress) -> None:
        one.end_stall(self._clock.now())
        if one.verb == _WAIT:  # it serves what it served
            return
        if isinstance(one.failure, WeightUpdateFailed):
            self._fleet.refuse(one.replica, one.error or "")
        elif one.verb == "commit":
            self._fleet.quarantine(one.replica, one.error or "")
        else:  # its weights are known: it only has to go on
            self._fleet.rejoin(one.replica, one.error or "")


def awaited_replicas(replicas: Sequence[ReplicaRecord]) -> set[str]:
    """Return the ids of those that the sender of a push waits for: all but those in quarantine, which may hang,
    unless there are no others."""
    sound = {one.replica_id for one in replicas if one.state is not ReplicaState.QUARANTINED}
    return sound or {one.replica_id for one in replicas}


def addressed(update: WeightUpdate, replicas: Sequence[ReplicaRecord]) -> dict[str, WeightUpdate]:
    """Return what each replica is told of an update: of a push, for how many workers its sender waits."""
    push = update.push
    if push is None:
        return {one.replica_id: update for one in replicas}
    awaited = awaited_replicas(replicas)
    sizes = {one.replica_id: one.registration.info.num_workers for one in replicas}
    num_awaited = sum(sizes[replica_id] for replica_id in awaited)
    counted = replace(push, num_receivers=num_awaited, num_optional=sum(sizes.values()) - num_awaited)
    return {
        replica_id: replace(update, push=replace(counted, is_optional=replica_id not in awaited))
        for replica_id in sizes
    }


def _culprits(failed: Sequence[ReplicaProgress]) -> list[ReplicaProgress]:
    """Return those that failed by themselves, where all have failed: lost, or silent while others said why not."""
    lost = [one for one in failed if isinstance(one.failure, EngineLost | ConnectionError)]
    silent = [one for one in failed if isinstance(one.failure, TimeoutError)]
    for own in (lost, [*lost, *silent]):
        if 0 < len(own) < len(failed):
            return own
    return []


def _sleepers(progress: Sequence[ReplicaProgress], asleep: frozenset[MemoryTag]) -> list[ReplicaProgress]:
    """Return the replicas that are asleep, and those that may be because they were not with the others."""
    return [
        one
        for one in progress
        if one.replica.registration.info.can_sleep and (asleep or one.replica.state is not ReplicaState.READY)
    ]


async def _awaited(call: Awaitable[None]) -> None:
    await call
