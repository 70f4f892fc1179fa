"""The owner of the fleet's desired state: brings every replica to it.

`DesiredState` has the weights with their source, the operator's pause, and the released memory. Fleet-wide orders
(an update, pause, resume, sleep, wake) change it and are sent to all replicas at once. `LateReplicas` brings
replicas to it that joined late, failed a step or did not follow an order. Orders are saved before replicas receive
them, and `restore` loads them after a coordinator restart.

One object in the coordinator's event loop; only it writes the desired state. Three rules separate the procedures:
- fleet-wide: one update, sleep or wake runs at a time; a replica starts to catch up only while none runs;
- claimed: a procedure locks its replicas from its first step to its end;
- gate: a lock that is held while engines pause or resume, so that the desired state cannot change in between. It
  is acquired after fleet-wide, never before.

Invariants: an interrupted procedure leaves no replica in UPDATING. A replica that did not follow an order rejoins
and receives the order again, so no replica stays frozen or asleep.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import structlog
from structlog.typing import FilteringBoundLogger

from agentloop.api.coordinator import AdapterPush, ReplicaUpdate, UpdateProgress, UpdateReport
from agentloop.concurrency.aio import ChangeSignal, deadline_after
from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import ALL_MEMORY, MemoryTag, WeightUpdate
from agentloop.engine.weight_digest import are_comparable
from agentloop.errors import (
    Conflict,
    EngineLost,
    EngineUnusable,
    InvalidRequest,
    NoHealthyReplica,
    ServiceUnavailable,
    StorageFull,
    WeightsRefused,
    WeightUpdateFailed,
)
from agentloop.fleet.adapter_sync import AdapterSync
from agentloop.fleet.desired_state import (
    TURN_REASON,
    DesiredState,
    FleetAdapters,
    FleetWeights,
    SavedValue,
    StandingOrders,
    UpdateSource,
)
from agentloop.fleet.registry import Fleet, ReplicaRecord, ReplicaState
from agentloop.fleet.replica_steps import (
    Connect,
    ReplicaProgress,
    ReplicaSteps,
    WeightConfig,
    failures,
    on_all,
    unfailed,
    within,
)
from agentloop.fleet.weight_update import FleetUpdate, addressed
from agentloop.types import KVPolicy, PauseMode

T = TypeVar("T")


class ReplicaSync:
    """The owner of the desired state: weight updates, the operator's orders, and catching replicas up."""

    def __init__(
        self,
        fleet: Fleet,
        connect: Connect,
        clock: Clock,
        config: WeightConfig | None = None,
        *,
        initial: tuple[WeightUpdate, KVPolicy] | None = None,
        on_weights: Callable[[FleetWeights], Awaitable[None]] | None = None,
        on_orders: Callable[[StandingOrders], Awaitable[None]] | None = None,
        on_adapters: Callable[[FleetAdapters], Awaitable[None]] | None = None,
        on_change: Callable[[], None] = lambda: None,
        log: FilteringBoundLogger | None = None,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        """Make the owner for a new service; `restore` loads an earlier one's state.

        `initial` is the weights that engines load at their start. `on_weights`, `on_orders` and `on_adapters`
        store the weights, orders and adapters. Their errors are logged and `save_pending` retries, but an update
        that cannot be stored before it starts is refused. `on_change` is called after every order, also after a
        failed one. `wall_time` gives the displayed times of orders.
        """
        self._fleet = fleet
        self.steps = ReplicaSteps(fleet, connect, config or WeightConfig())
        self._clock = clock
        self._saved_weights = SavedValue(FleetWeights(), on_weights)
        self._saved_orders = SavedValue(StandingOrders(), on_orders)
        self._on_change = on_change
        self._wall_time = wall_time
        self._log = structlog.get_logger("fleet") if log is None else log
        self._desired = DesiredState(FleetWeights(None if initial is None else UpdateSource.of(*initial)))
        self._resolves_at: float | None = None  # when an interrupted update is resolved; None: no such update
        self._ongoing: str | None = None  # the running fleet-wide procedure
        self._gate = asyncio.Lock()
        self._claimed: set[str] = set()
        self._released = ChangeSignal()  # notified when a procedure ends
        self._update: FleetUpdate | None = None  # the last update that was started
        # The running update's digest and result
        self._answer: tuple[str, asyncio.Future[UpdateReport]] | None = None
        self.num_awaiting_turn = 0  # updates that wait for the accelerators, which another model uses
        self._reports: deque[UpdateReport] = deque(maxlen=self.config.num_reports)
        self.adapters = AdapterSync(
            fleet,
            self.steps,
            clock,
            on_adapters,
            save=self._save,
            takers=lambda: self._unclaimed(ReplicaState.READY, ReplicaState.SUSPECT),
            fell_behind=self._fell_behind,
            wall_time=wall_time,
            log=self._log,
        )

    @property
    def config(self) -> WeightConfig:
        return self.steps.config

    @property
    def desired(self) -> DesiredState:
        return self._desired

    @property
    def ordered_pause(self) -> bool | None:
        """True if serving replicas are ordered to pause; None while an order is being sent."""
        return None if self._gate.locked() else self._desired.orders.is_paused

    @property
    def progress(self) -> UpdateProgress | None:
        """The progress of the running update; None if no update runs."""
        return None if self._update is None else self._update.progress

    @property
    def may_end_early(self) -> bool:
        """True while the running update only stages: no replica has changed, and no change is stored."""
        progress = self.progress
        is_staging = progress is not None and progress.state == "staging"
        return is_staging and self._desired.weights.pending is None

    @property
    def reports(self) -> tuple[UpdateReport, ...]:
        """The reports of the latest updates, oldest first."""
        return tuple(self._reports)

    def restore(
        self, weights: FleetWeights | None, orders: StandingOrders | None, reports: Sequence[UpdateReport] = ()
    ) -> None:
        """Load the state that an earlier coordinator stored. Call before replicas join.

        If that coordinator died during an update, the fleet has no version until `resolve_interrupted_update`
        resolves it.
        """
        if orders is not None:
            self._desired = replace(self._desired, orders=orders)
            self._fleet.drain(orders.drained)
        if weights is None:
            return
        self._desired = replace(self._desired, weights=weights)
        self._reports.extend(reports)
        if weights.report is not None and weights.report not in reports:
            self._reports.append(weights.report)
        if weights.pending is not None:
            self._resolves_at = self._clock.now() + self.config.settle_s
            self._ongoing = "the recovery of an interrupted update"
            self._fleet.withhold_version()
        elif weights.served is not None:
            self._fleet.set_weight_version(weights.served.version, weights.served.update.digest)
        if weights.served is not None and weights.served.update.is_repeatable and not weights.served.update.digest:
            self._log.warning(
                "weights_without_digest",
                field="weights.served.update.digest",
                version=weights.served.version,
                reason="the stored state has no digest: the digest of the first replica that joins is used",
            )

    def keep_digest(self) -> None:
        """Store the digest of the served version, once a replica's registration has reported it."""
        served, digest = self.served_source(), self._fleet.weight_digest
        if served is None or served.update.digest or not digest:
            return
        served = replace(served, update=replace(served.update, digest=digest))
        self._desired = replace(self._desired, weights=replace(self._desired.weights, served=served))
        self._saved_weights.owe(self._desired.weights.without_secrets())

    async def resolve_interrupted_update(self) -> None:
        """Resolve an update that a coordinator's death interrupted, once its result is known. Call repeatedly.

        If a replica holds the new version, the fleet serves it. If none has reported it after `settle_s`, the
        fleet keeps the old version.
        """
        weights = self._desired.weights
        if self._resolves_at is None or (pending := weights.pending) is None:
            return
        is_held = any(one.weight_version == pending.version for one in self._fleet.replicas)
        if not is_held and self._clock.now() < self._resolves_at:
            return
        self._resolves_at = None
        self._log.info("update_settled", version=pending.version, is_served=is_held)
        if is_held:
            report = UpdateReport(pending.version, weights.served_version, pending.kv_policy, (), 0.0)
            self._fleet.set_weight_version(pending.version, pending.update.digest)
            await self._record(replace(weights.now_serving(pending), report=report))
        else:
            await self._record(weights.rolled_back())
            self._fleet.stay_at(weights.served_version, weights.served.update.digest if weights.served else "")
        self._end_fleet_wide()
        self._on_change()

    async def save_pending(self) -> None:
        """Save the weights, orders and adapters that are pending. Re-raises the store's error."""
        for saved in (self._saved_weights, self._saved_orders, self.adapters.saved):
            await saved.save_pending()

    async def _record(self, weights: FleetWeights) -> None:
        """Set and save the fleet's weights. The fleet serves them even if the store fails."""
        self._desired = replace(self._desired, weights=weights)
        self._saved_weights.owe(weights.without_secrets())
        await self._save(self._saved_weights, "weights_not_saved")

    # Orders of the operator

    async def pause(self, mode: PauseMode, reason: str = "") -> None:
        """Pause every replica until `resume`. Replicas that join or update during the pause also pause. Idempotent.

        Raises EngineLost with the names of the replicas that failed; the pause is in force for all others.
        """
        with self._order(f"pause {mode}"):
            async with self._gate:
                await self._ordered(self._desired.orders.paused(mode, reason, self._wall_time()))

                async def pause(replica: ReplicaRecord) -> None:
                    await self.steps.pause_for_operator(replica, mode)

                await self._order_all("pause", pause)

    async def resume(self) -> None:
        """End a pause. Idempotent.

        Raises EngineLost with the names of the replicas that failed, or WeightsRefused if they refuse weights that
        were committed during the pause.
        """
        with self._order("resume"):
            async with self._gate:
                await self._ordered(self._desired.orders.resumed())
                await self._order_all("resume", self._resume)

    async def sleep(self, level: int, reason: str = "") -> None:
        """Freeze every replica and release its memory. Replicas that join later also sleep. Idempotent.

        Waits for a running update and for replicas that are catching up. Raises InvalidRequest if a replica cannot
        sleep, or StorageFull if the weights to discard are not saved, both before any step; EngineLost with the
        names of the replicas that failed.
        """
        with self._order(f"sleep {level}"):
            if level not in (1, 2):
                raise InvalidRequest(f"unknown sleep level {level}: expected 1 or 2", param="level")
            await self.until_idle()
            with self._fleet_wide("a sleep"):
                async with self._gate:
                    replicas = self._fleet.replicas
                    if unable := [one.replica_id for one in replicas if not one.registration.info.can_sleep]:
                        raise InvalidRequest(f"these replicas cannot sleep: {', '.join(unable)}")
                    # Then only the replicas have the weights, and level 2 discards them
                    if level == 2 and self._saved_weights.is_pending:
                        raise StorageFull(
                            "the last update is not stored yet, so sleep level 2 would lose it: retry later"
                        )
                    await self._ordered(self._desired.orders.put_to_sleep(level, reason, self._wall_time()))
                    await self._sleep_all()
                if not self._claimed:
                    return
                # A replica that is catching up falls asleep once it has its weights. One that gets no weights
                # needs a second order.
                await self._until_unclaimed()
                async with self._gate:
                    await self._sleep_all()
                if self._claimed:
                    raise EngineLost(
                        f"{', '.join(sorted(self._claimed))}: still catching up, will sleep afterwards"
                    )

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate memory again, and resume once all of it is awake. Idempotent. Waits for a running update.

        After a level-2 sleep the weights are staged and committed again. The KV cache of a replica without a known
        weight version stays asleep until a commit. Raises Conflict if no source of the weights is left, EngineLost
        with the names of the replicas that failed (all others are awake), or an update's errors.
        """
        with self._order(f"wake {', '.join(sorted(tags))}"):
            await self.until_idle()
            with self._fleet_wide("a wake"):
                replicas = self._unclaimed(ReplicaState.ASLEEP)
                if self._desired.orders.sleep_level != 2 or all(self._fleet.is_current(one) for one in replicas):
                    async with self._gate:
                        await self._ordered(self._desired.orders.woken(tags))
                        await self._wake_all(tags)
                    return
                if MemoryTag.WEIGHTS not in tags:
                    raise Conflict("the weights were discarded: wake 'weights' before or together with 'kv_cache'")
                source = self.served_source()
                if source is None or not source.update.is_repeatable:
                    raise Conflict(
                        "the weights were discarded and their source is gone: push new weights to wake the fleet"
                    )
                await self._stage_and_switch(replicas, source, tags)

    async def drain(self, hosts: frozenset[str]) -> None:
        """Stop new work on the replicas of `hosts`, and on no others. Idempotent."""
        async with self._gate:
            await self._ordered(replace(self._desired.orders, drained=hosts))
            self._fleet.drain(hosts)

    async def _ordered(self, orders: StandingOrders) -> None:
        """Set and save the orders. The fleet follows them even if the store fails."""
        self._desired = replace(self._desired, orders=orders)
        self._saved_orders.owe(orders)
        await self._save(self._saved_orders, "orders_not_saved")

    async def _save(self, saved: SavedValue[T], failed: str) -> None:
        try:
            await within(self.config.save_timeout_s, saved.save_pending())
        except Exception as error:
            self._log.error(failed, error=repr(error))

    async def _order_all(self, verb: str, order: Callable[[ReplicaRecord], Awaitable[object]]) -> None:
        states = (ReplicaState.READY, ReplicaState.SUSPECT)
        progress = [ReplicaProgress(one) for one in self._fleet.replicas if one.state in states]

        async def follow(one: ReplicaProgress) -> None:
            await order(one.replica)

        def failed(one: ReplicaProgress) -> None:
            # A replica that another procedure has locked by now gets the order at that procedure's end.
            now = self._fleet.get(one.replica.replica_id)
            is_taken = now is not None and now.state is ReplicaState.UPDATING
            if not is_taken or isinstance(one.failure, WeightUpdateFailed):
                self._fell_behind(one)

        await on_all(progress, verb, follow, on_failed=failed)
        self._raise_failed(progress)

    async def _sleep_all(self) -> None:
        states = (ReplicaState.READY, ReplicaState.SUSPECT, ReplicaState.JOINING, ReplicaState.ASLEEP)
        replicas = self._unclaimed(*states)
        for replica in replicas:
            self._fleet.begin_update(replica)
        progress = [ReplicaProgress(one) for one in (*replicas, *self._unclaimed(ReplicaState.QUARANTINED))]

        async def sleep(one: ReplicaProgress) -> None:
            await self.steps.sleep(one.replica, self._desired.orders)
            self._fleet.fall_asleep(one.replica)  # no effect on a quarantined replica

        with self.claim(replicas, "the sleep was cut short"):
            await on_all(progress, "sleep", sleep, on_failed=self._fell_behind)
            self._raise_failed(progress)

    async def _wake_all(self, tags: frozenset[MemoryTag]) -> None:
        replicas = self._unclaimed(ReplicaState.ASLEEP)
        progress = [ReplicaProgress(one) for one in replicas]

        async def wake(one: ReplicaProgress) -> None:
            await self.steps.wake(one.replica, tags)

        async def resume(one: ReplicaProgress) -> None:
            await self._resume_or_pause(one.replica)

        with self.claim(replicas, "the wake was cut short"):
            await on_all(progress, "wake", wake, on_failed=self._fell_behind)
            if not self._desired.orders.asleep:
                woken = unfailed(progress)
                for one in woken:
                    self._fleet.begin_update(one.replica)
                await on_all(woken, "resume", resume, on_failed=self._fell_behind)
            self._raise_failed(progress)

    def _fell_behind(self, one: ReplicaProgress) -> None:
        """Move a replica that failed an order to JOINING, or to QUARANTINED if it refuses its weights."""
        left = self._fleet.refuse if isinstance(one.failure, WeightUpdateFailed) else self._fleet.rejoin
        left(one.replica, one.error or "")

    def _raise_failed(self, progress: Sequence[ReplicaProgress]) -> None:
        """Raise EngineLost if a replica failed, or WeightsRefused if all failures are refusals."""
        if failed := [one for one in progress if one.error is not None]:
            is_refused = all(isinstance(one.failure, WeightsRefused) for one in failed)
            raise (WeightsRefused if is_refused else EngineLost)(failures(failed))

    # Weight updates

    async def update_weights(self, update: WeightUpdate, kv_policy: KVPolicy, force: bool = False) -> UpdateReport:
        """Update all replicas to `update`, and wake them. The report has the errors of failed replicas.

        A repeated request (same version and source) joins the running update. If the version is already served
        with the same content, its report is returned; other content raises Conflict. With `force` the version may
        be equal or lower (all KV is then recomputed), and no replica refuses broken weights.

        Raises InvalidRequest (the version does not increase, or engines do not support the source), Conflict
        (another update, a sleep or a wake runs, or the version is served), NoHealthyReplica, ServiceUnavailable
        (the update cannot be stored), CheckpointUnreadable (no replica can read it), WeightUpdateFailed (all
        replicas failed) or WeightsRefused (its logits are not finite or all equal). After each of these errors the
        fleet serves its old version.
        """
        if self._resolves_at is not None:
            await self._until_resolved()
        digest = UpdateSource.of(update, kv_policy).digest
        await self._until_its_turn()
        if self._answer is not None and self._answer[0] == digest:
            return await asyncio.shield(self._answer[1])
        if (report := await self._repeated(update, digest, force)) is not None:
            return report
        with self._order(), self._fleet_wide("a weight update"):
            outcome: asyncio.Future[UpdateReport] = asyncio.get_running_loop().create_future()
            self._answer = digest, outcome
            try:
                report = await self._update_fleet(update, kv_policy, force)
            except BaseException as error:
                if isinstance(error, Exception):
                    outcome.set_exception(error)
                    outcome.exception()  # mark the exception as retrieved: no repeated request may be waiting
                raise
            else:
                outcome.set_result(report)
                return report
            finally:
                outcome.cancel()
                self._answer = None

    async def _until_its_turn(self) -> None:
        """Wait while another model uses the accelerators. Raises ServiceUnavailable after `turn_wait_s`."""
        give_up_at = deadline_after(self.config.turn_wait_s)
        self.num_awaiting_turn += 1
        try:
            # An update wakes the fleet, but the other model may fill the accelerators' memory.
            while (orders := self._desired.orders).asleep and orders.sleep_reason == TURN_REASON:
                if not await self._released.wait_until(give_up_at):
                    message = (
                        f"another model used the accelerators for {self.config.turn_wait_s:g} s: push again later"
                    )
                    raise ServiceUnavailable(message)
        finally:
            self.num_awaiting_turn -= 1

    async def _repeated(self, update: WeightUpdate, digest: str, force: bool) -> UpdateReport | None:
        """Return the served update's report if `update` has its version and content, and a replica holds it.

        Raises Conflict for other content unless `force`, which makes it a new update.
        """
        weights = self._desired.weights
        served = weights.served
        if served is None or served.version != update.version or not self._is_held(self._fleet.weight_version):
            return None
        is_same = served.digest == digest
        # A push with the same token is a retry of the same call, whose sender has ended. `force` replaces other
        # content.
        if (is_same and update.is_repeatable) or not (is_same or force):
            found = await self._digest_of(update) if served.update.digest else ""
            if are_comparable(found, served.update.digest):
                is_same = found == served.update.digest
                if not is_same and not force:
                    raise Conflict(
                        f"version {served.version} is served with digest {served.update.digest}, and the weights "
                        f"pushed now have {found}: push them as a new version, or with `force` to replace it",
                        param="version",
                    )
        if not is_same:
            return None
        # If the coordinator died after the first commit, the report is missing or has no replicas.
        report = weights.report or UpdateReport(served.version, None, served.kv_policy, (), 0.0)
        return report if report.replicas else replace(report, replicas=self._outcomes(served.version))

    async def _digest_of(self, update: WeightUpdate) -> str:
        """Return the digest of an update's weights as a replica receives them; empty if no replica can.

        A folder is read only if its files have changed. Pushed weights are staged but never committed.
        """
        free = (one for one in self._fleet.placeable() if one.replica_id not in self._claimed)
        replicas = [one for one in free if not one.held_by]
        if update.receivers:
            replicas = [one for one in replicas if one.replica_id in update.receivers]
        if not replicas:
            return ""
        if update.is_repeatable:
            return await self.steps.digest_of(replicas[0], replace(update, is_probe=True))
        with self._fleet_wide("a weight update"), self.claim(replicas[:1], "the comparison was cut short"):
            pushed = addressed(update, replicas[:1])[replicas[0].replica_id]
            return await self.steps.digest_of(replicas[0], pushed)

    def _outcomes(self, version: int) -> tuple[ReplicaUpdate, ...]:
        """Report a recovered update for each replica; its times are unknown."""
        told = {one: one.error or f"{one.state}: it does not hold the version yet" for one in self._fleet.replicas}
        told |= dict.fromkeys((one for one in told if one.weight_version == version), "")
        return tuple(ReplicaUpdate(one.replica_id, 0.0, 0.0, error or None) for one, error in told.items())

    def _is_held(self, version: int | None) -> bool:
        return any(self._fleet.is_current(one) for one in self._fleet.replicas if one.weight_version == version)

    async def _update_fleet(self, update: WeightUpdate, kv_policy: KVPolicy, force: bool) -> UpdateReport:
        started_at, previous_version = self._clock.now(), self._fleet.weight_version
        began_at = self._wall_time()
        self._check_version(update.version, force)
        if previous_version is not None and update.version <= previous_version:
            kv_policy = KVPolicy.RECOMPUTE  # KV with an equal or higher version number comes from other weights
        self._log.info("update_begins", version=update.version, kv_policy=kv_policy)
        known = self._desired.weights.served
        if known is not None and known.version == update.version and update.is_repeatable and not force:
            # No replica holds the version now, so the content must match the earlier digest. Other content needs a
            # new version or `force`.
            update = replace(update, digest=known.update.digest)
        source = UpdateSource.of(replace(update, is_forced=force), kv_policy)
        run = await self._stage_and_switch(self._takers(update.receivers), source, ALL_MEMORY)
        report = UpdateReport(
            version=update.version,
            previous_version=previous_version,
            kv_policy=kv_policy,
            replicas=tuple(one.report() for one in run.replicas),
            total_ms=(self._clock.now() - started_at) * 1000.0,
            began_at=began_at,
        )
        self._reports.append(report)
        await self._record(replace(self._desired.weights, report=report))
        self._log.info("update_done", version=report.version, stall_ms=round(report.stall_ms, 1))
        return report

    def _check_version(self, version: int, force: bool) -> None:
        served = self._fleet.weight_version
        if served is None or force:
            return
        if version == served and self._is_held(served):
            raise Conflict(f"the fleet already serves version {served}: push a higher version", param="version")
        if version < served:
            message = (
                f"version {version} is lower than the served version {served}: push a higher one or use `force`"
            )
            raise InvalidRequest(message, param="version")

    def _takers(self, receivers: tuple[str, ...]) -> list[ReplicaRecord]:
        """Return the replicas of an update. Held replicas catch up after their hold, and replicas outside the
        trainer's group afterwards."""
        replicas = self._unclaimed(
            ReplicaState.READY, ReplicaState.JOINING, ReplicaState.QUARANTINED, ReplicaState.ASLEEP
        )
        # An update wakes a sleeping fleet, so it ends the holds there.
        replicas = [one for one in replicas if not one.held_by or one.state is ReplicaState.ASLEEP]
        if receivers:
            replicas = [one for one in replicas if one.replica_id in receivers or one.state is ReplicaState.ASLEEP]
        if not replicas:
            held = len(self._fleet.held())
            of_holds = (
                f" ({held} keep their version for evaluations, until `holds` in the status end)" if held else ""
            )
            raise NoHealthyReplica(f"no healthy replica can receive weights now{of_holds}: retry later")
        return replicas

    async def _stage_and_switch(
        self, replicas: Sequence[ReplicaRecord], source: UpdateSource, tags: frozenset[MemoryTag]
    ) -> FleetUpdate:
        """Run all steps of an update on `replicas`, and wake the memory of `tags`."""
        run = self._update = FleetUpdate(self._fleet, self.steps, self._clock, replicas, source, tags)

        async def publish_version() -> None:
            await self._record(self._desired.weights.now_serving(run.source))
            self._fleet.set_weight_version(run.source.version, run.source.update.digest)
            if self._desired.orders.asleep:
                await self._ordered(self._desired.orders.woken(tags))

        with self.claim(replicas, "the update was cut short"):
            try:
                await run.wake_weights(self._desired.orders.asleep)
                self._desired = replace(self._desired, orders=self._desired.orders.awake_to_stage())
                await run.stage()
                self._fleet.pin_version()
                await self._intend(run.source)
                async with self._gate:
                    await run.switch(self._desired.orders, publish_version)
            except WeightUpdateFailed:
                await self._record(self._desired.weights.rolled_back())
                raise
            finally:
                run.mark_over()
        return run

    async def _intend(self, source: UpdateSource) -> None:
        """Store the update as pending before any replica changes. Raises ServiceUnavailable if the store fails."""
        weights = self._desired.weights
        intended = replace(weights, pending=source)
        self._desired = replace(self._desired, weights=intended)
        stored, before = intended.without_secrets(), weights.without_secrets()
        try:
            await self._saved_weights.save_first(stored, before, self.config.save_timeout_s)
        except ServiceUnavailable:
            self._desired = replace(self._desired, weights=weights)
            raise

    # Named adapters

    async def push_adapter(self, push: AdapterPush) -> UpdateReport:
        """Load a version of an adapter on all replicas. Nothing pauses.

        Waits for a running weight update. Raises as `AdapterSync.push`.
        """
        with self._order():
            await self.until_idle()
            with self._fleet_wide("an adapter's push"):
                report = await self.adapters.push(push)
        self._reports.append(report)
        self._log.info("adapter_pushed", adapter=push.name, version=report.version)
        return report

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises as `AdapterSync.unload`."""
        with self._order():
            await self.until_idle()
            with self._fleet_wide("an adapter's unload"):
                await self.adapters.unload(name)
        self._log.info("adapter_unloaded", adapter=name)

    # Catching up one replica

    async def apply(self, replica: ReplicaRecord) -> bool:
        """Apply the orders in force to a replica. Returns True if it takes traffic now.

        On a quarantined replica only the sleep and wake orders have an effect.
        """
        async with self._gate:
            if self._desired.orders.asleep:
                await self.steps.sleep(replica, self._desired.orders)
                self._fleet.fall_asleep(replica)
                return False
            await self.steps.wake(replica, ALL_MEMORY)
            return await self._resume_or_pause(replica)

    async def _resume_or_pause(self, replica: ReplicaRecord) -> bool:
        """Resume or pause a replica as ordered, and admit it.

        A replica without the fleet's weights stays frozen.
        """
        mode = self._desired.orders.pause
        now = self._fleet.get(replica.replica_id)
        if now is not None and now.state is ReplicaState.UPDATING and self._fleet.is_current(now):
            try:
                await (self._resume(replica) if mode is None else self.steps.pause_for_operator(replica, mode))
            except (WeightUpdateFailed, EngineUnusable) as error:
                self._fleet.refuse(replica, error.message)
                raise
            await self.adapters.bring(replica)
        # No await since `bring`: adapters that are pushed from here on find the replica in service
        return self._fleet.admit(replica)

    async def _resume(self, replica: ReplicaRecord) -> None:
        """Resume a replica, and keep it out of traffic until the resume has succeeded.

        The canary check of weights that were committed in a pause runs here, and may refuse them.
        """
        self._fleet.mark_resuming(replica, True)
        try:
            await self.steps.resume(replica)
        finally:
            self._fleet.mark_resuming(replica, False)

    # Shared by all procedures

    @contextmanager
    def _order(self, name: str | None = None) -> Iterator[None]:
        """Call `on_change` after the block, and log a named order. Raises StorageFull if it was not saved."""
        try:
            yield
        finally:
            self._on_change()  # also after a failure, so that failed replicas start to catch up
        if name is not None:
            self._log.info("fleet_ordered", order=name)
            if self._saved_orders.has_failed:
                raise StorageFull(
                    f"{name}: done but not stored, so a coordinator restart would lose it: repeat the order"
                )

    @contextmanager
    def _fleet_wide(self, name: str) -> Iterator[None]:
        """Run the block as the one fleet-wide procedure. Raises Conflict with the name of another running one."""
        if self._ongoing is not None:
            raise Conflict(f"{self._ongoing} is in progress: retry after it")
        self._ongoing = name
        try:
            yield
        finally:
            self._end_fleet_wide()

    def _end_fleet_wide(self) -> None:
        self._ongoing = None
        self._released.notify()

    async def until_idle(self) -> None:
        """Wait until no fleet-wide procedure runs. Bounded, because all its steps have deadlines."""
        while self._ongoing is not None:
            await self._released.wait_until(deadline_after(self.config.update_timeout_s))

    async def _until_resolved(self) -> None:
        """Wait until an interrupted update is resolved and late replicas have had time to catch up."""
        await self.until_idle()
        await self._until_unclaimed()

    async def _until_unclaimed(self) -> None:
        """Wait until no procedure has locked a replica, for at most `straggler_grace_s`."""
        give_up_at = deadline_after(self.config.straggler_grace_s)
        while self._claimed and await self._released.wait_until(give_up_at):
            pass

    @contextmanager
    def claim(self, replicas: Sequence[ReplicaRecord], error: str) -> Iterator[None]:
        """Lock replicas for one procedure. At its end none is UPDATING. Raises Conflict if one is locked."""
        replica_ids = {replica.replica_id for replica in replicas}
        if taken := replica_ids & self._claimed:
            raise Conflict(f"replica {', '.join(sorted(taken))} is locked by another procedure: retry later")
        self._claimed |= replica_ids
        try:
            yield
        finally:
            for replica in replicas:
                self._release_claimed(replica, error)
            self._claimed -= replica_ids
            self._released.notify()

    def _release_claimed(self, replica: ReplicaRecord, error: str) -> None:
        """Move a replica out of UPDATING: to its old state if its weights are unchanged, otherwise to
        QUARANTINED."""
        now = self._fleet.get(replica.replica_id)
        if now is not None and now.incarnation != replica.incarnation and now.url == replica.url:
            self._fleet.forget_version(now)  # it left and registered again; its report may be older than our commit
        if now is None or now.state is not ReplicaState.UPDATING:
            return
        is_untouched = now.weight_version == replica.weight_version and now.weight_version is not None
        if replica.state in (ReplicaState.JOINING, ReplicaState.ASLEEP) and is_untouched:
            self._fleet.put_back(replica)
        else:
            self._fleet.quarantine(replica, error)

    def _unclaimed(self, *states: ReplicaState) -> list[ReplicaRecord]:
        return [one for one in self._fleet.replicas if one.state in states and one.replica_id not in self._claimed]

    def served_source(self) -> UpdateSource | None:
        """Return the update whose weights the fleet serves; None if it is unknown."""
        source = self._desired.weights.served
        return source if source is not None and source.version == self._fleet.weight_version else None
