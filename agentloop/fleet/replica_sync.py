"""The owner of the fleet's desired state, which brings every replica to it.

`DesiredState` has the weights and their source, the operator's pause, and the memory that is given back. Orders
hold over a restart: they are saved before a replica is told (`on_orders`), and `restore` takes them up again.
Fleet-wide orders (an update, pause and resume, sleep and wake) change it and reach all replicas at once. Replicas
that came late, failed a step or did not follow an order are brought to it one by one (`LateReplicas`).

Ownership: one object, in the coordinator's event loop. It alone writes the desired state. Engines come from
`connect`, which gives the same one for the same URL; every call to one has a deadline. Three rules keep the
procedures apart:
- fleet-wide: one update, sleep or wake at a time; bringing a replica up begins only while there is none;
- claimed: the replicas of a procedure, from its first step to its end; no other procedure touches these;
- gate: a lock held while engines pause or resume, so that the desired state does not change in between. Taken after
  fleet-wide, never before. Only the memory to stage into is woken without it.
Invariants:
- a procedure that is cut short leaves no replica in UPDATING;
- a replica that did not follow an order joins anew and gets the order again, so none is forgotten frozen or asleep.
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
    """The owner of the desired state: updates, the operator's orders, and single replicas brought to it."""

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
        """`initial`: the weights that engines load at their start. `on_weights`, `on_orders` and `on_adapters`
        store weights, standing orders and adapters; their errors are logged, and `save_owed` tries again, but an
        update that cannot be stored before it begins is refused. `on_change` is called after every order, also one
        that failed. `wall_time` dates the orders that status shows."""
        self._fleet = fleet
        self.steps = ReplicaSteps(fleet, connect, config or WeightConfig())
        self._clock = clock
        self._saved_weights = SavedValue(FleetWeights(), on_weights)
        self._saved_orders = SavedValue(StandingOrders(), on_orders)
        self._on_change = on_change
        self._wall_time = wall_time
        self._log = structlog.get_logger("fleet") if log is None else log
        self._desired = DesiredState(FleetWeights(None if initial is None else UpdateSource.of(*initial)))
        self._resolves_at: float | None = None  # of an interrupted update; None: there is none
        self._ongoing: str | None = None  # the fleet-wide procedure
        self._gate = asyncio.Lock()
        self._claimed: set[str] = set()
        self._released = ChangeSignal()  # when a procedure has ended
        self._update: FleetUpdate | None = None  # the last one begun
        self._answer: tuple[str, asyncio.Future[UpdateReport]] | None = None  # of the one under way, by its digest
        self.num_awaiting_turn = 0  # updates that wait for the turn of this model
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
        """True if serving replicas are ordered to be paused; None while an order is on its way to them."""
        return None if self._gate.locked() else self._desired.orders.is_paused

    @property
    def progress(self) -> UpdateProgress | None:
        """The progress of the update under way; None if there is none."""
        return None if self._update is None else self._update.progress

    @property
    def reports(self) -> tuple[UpdateReport, ...]:
        """The reports of the latest updates, oldest first."""
        return tuple(self._reports)

    def restore(
        self, weights: FleetWeights | None, orders: StandingOrders | None, reports: Sequence[UpdateReport] = ()
    ) -> None:
        """Take up the state that an earlier coordinator has stored. Call before replicas join.

        If it died within an update, no version is told until `resolve_interrupted_update` has ended that.
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
            self._ongoing = "finding out what replicas hold"
            self._fleet.withhold_version()
        elif weights.served is not None:
            self._fleet.set_weight_version(weights.served.version, weights.served.update.digest)
        if weights.served is not None and weights.served.update.is_repeatable and not weights.served.update.digest:
            self._log.warning(
                "weights_without_digest",
                field="weights.served.update.digest",
                version=weights.served.version,
                reason="the store was written without it: the first replica that joins decides the content",
            )

    def keep_digest(self) -> None:
        """Keep the digest of the served version with the desired state, if a replica's registration has told it."""
        served, digest = self.served_source(), self._fleet.weight_digest
        if served is None or served.update.digest or not digest:
            return
        served = replace(served, update=replace(served.update, digest=digest))
        self._desired = replace(self._desired, weights=replace(self._desired.weights, served=served))
        self._saved_weights.owe(self._desired.weights.without_secrets())

    async def resolve_interrupted_update(self) -> None:
        """End an update that a coordinator's death has interrupted, once its outcome is known. Call repeatedly.

        If a replica holds the new version, the fleet serves it. If none has reported it after `settle_s`, the fleet
        keeps its old version.
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

    async def save_owed(self) -> None:
        """Save weights, orders and adapters whose first save has failed. Raises what the store raises."""
        for saved in (self._saved_weights, self._saved_orders, self.adapters.saved):
            await saved.save_owed()

    async def _record(self, weights: FleetWeights) -> None:
        """Set and save the fleet's weights. If the store fails, the fleet serves them all the same."""
        self._desired = replace(self._desired, weights=weights)
        self._saved_weights.owe(weights.without_secrets())
        await self._save(self._saved_weights, "weights_not_saved")

    # --- the operator's orders ---

    async def pause(self, mode: PauseMode, reason: str = "") -> None:
        """Pause every replica until `resume`; replicas that join or update meanwhile end paused. Idempotent.

        Raises EngineLost naming the replicas that did not follow; the pause holds for all others.
        """
        with self._order(f"pause {mode}"):
            async with self._gate:
                await self._ordered(self._desired.orders.paused(mode, reason, self._wall_time()))

                async def pause(replica: ReplicaRecord) -> None:
                    await self.steps.pause_for_operator(replica, mode)

                await self._order_all("pause", pause)

    async def resume(self) -> None:
        """End a `pause`. Idempotent.

        Raises EngineLost naming the replicas that did not follow, or WeightsRefused if these refuse weights that
        were committed in the pause.
        """
        with self._order("resume"):
            async with self._gate:
                await self._ordered(self._desired.orders.resumed())
                await self._order_all("resume", self._resume)

    async def sleep(self, level: int, reason: str = "") -> None:
        """Freeze every replica and give its memory back; replicas that join later follow. Idempotent.

        Waits for a weight update to end, and for replicas that are being brought up. Raises InvalidRequest if a
        replica cannot sleep, or StorageFull if the weights to discard are not saved, both before any step;
        EngineLost naming the replicas that did not follow.
        """
        with self._order(f"sleep {level}"):
            if level not in (1, 2):
                raise InvalidRequest(f"sleep levels are 1 and 2, not {level}", param="level")
            await self.until_idle()
            with self._fleet_wide("a sleep"):
                async with self._gate:
                    replicas = self._fleet.replicas
                    if unable := [one.replica_id for one in replicas if not one.registration.info.can_sleep]:
                        raise InvalidRequest(f"cannot sleep: {', '.join(unable)}")
                    if level == 2 and self._saved_weights.is_owed:  # then replicas are the only ones to know
                        raise StorageFull("the last update's outcome is not saved: only its replicas hold it")
                    await self._ordered(self._desired.orders.put_to_sleep(level, reason, self._wall_time()))
                    await self._sleep_all()
                if not self._claimed:
                    return
                # A replica that is being brought up sleeps once it holds its weights. One that gets none needs a
                # second order.
                await self._until_unclaimed()
                async with self._gate:
                    await self._sleep_all()
                if self._claimed:
                    raise EngineLost(f"{', '.join(sorted(self._claimed))}: is still being brought up, then sleeps")

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory back, and resume once all of it is awake. Idempotent. Waits for a weight update to end.

        After a sleep(2) the weights are staged and committed again. Replicas of unknown weights keep their KV cache
        asleep until a commit. Raises Conflict if the weights have no source left, EngineLost naming the replicas
        that did not follow (all others are awake), or an update's errors.
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
                    raise Conflict("the weights were discarded: wake them before the KV cache")
                source = self.served_source()
                if source is None or not source.update.is_repeatable:
                    raise Conflict("the weights were discarded: push new ones, which wakes the fleet")
                await self._stage_and_switch(replicas, source, tags)

    async def drain(self, hosts: frozenset[str]) -> None:
        """Give the replicas of these hosts no work, and of no others. Idempotent."""
        async with self._gate:
            await self._ordered(replace(self._desired.orders, drained=hosts))
            self._fleet.drain(hosts)

    async def _ordered(self, orders: StandingOrders) -> None:
        """Set and save the standing orders. If the store fails, the fleet obeys them all the same."""
        self._desired = replace(self._desired, orders=orders)
        self._saved_orders.owe(orders)
        await self._save(self._saved_orders, "orders_not_saved")

    async def _save(self, saved: SavedValue[T], failed: str) -> None:
        try:
            await within(self.config.save_timeout_s, saved.save_owed())
        except Exception as error:
            self._log.error(failed, error=repr(error))

    async def _order_all(self, verb: str, order: Callable[[ReplicaRecord], Awaitable[object]]) -> None:
        states = (ReplicaState.READY, ReplicaState.SUSPECT)
        progress = [ReplicaProgress(one) for one in self._fleet.replicas if one.state in states]

        async def follow(one: ReplicaProgress) -> None:
            await order(one.replica)

        def failed(one: ReplicaProgress) -> None:
            # A replica that a procedure took meanwhile gets the order at its end, when its weights are known.
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
            self._fleet.fall_asleep(one.replica)  # not those in quarantine

        with self.claim(replicas, "the sleep was cut short"):
            await on_all(progress, "sleep", sleep, on_failed=self._fell_behind)
            self._raise_failed(progress)

    async def _wake_all(self, tags: frozenset[MemoryTag]) -> None:
        """Wake all replicas that sleep, and resume them once all memory is awake."""
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
        """Make a replica that did not follow join anew; quarantine one that refuses its weights."""
        left = self._fleet.refuse if isinstance(one.failure, WeightUpdateFailed) else self._fleet.rejoin
        left(one.replica, one.error or "")

    def _raise_failed(self, progress: Sequence[ReplicaProgress]) -> None:
        """Raise WeightsRefused if all failures are refusals, else EngineLost, if any replica did not follow."""
        if failed := [one for one in progress if one.error is not None]:
            is_refused = all(isinstance(one.failure, WeightsRefused) for one in failed)
            raise (WeightsRefused if is_refused else EngineLost)(failures(failed))

    # --- updates ---

    async def update_weights(self, update: WeightUpdate, kv_policy: KVPolicy, force: bool = False) -> UpdateReport:
        """Bring all replicas to `update`, and wake them. The report names the replicas that failed.

        A repeated update (same version and source) joins the one under way. A repeat of the served version (same
        version and content) gets its report; with other content it is a Conflict. With `force` the
        version need not grow (all KV is then computed anew), and no replica refuses noise. Raises InvalidRequest
        (a version that does not grow, a source that engines do not know), Conflict (another update, a sleep or a
        wake is going on, or the version is served already), NoHealthyReplica, ServiceUnavailable (the update cannot
        be recorded), CheckpointUnreadable (no replica can read it), WeightUpdateFailed (no replica took it) or
        WeightsRefused (the model samples noise under it). After each of these the fleet serves its old version.
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
                    outcome.exception()  # marks it as seen: there may be no repeated call
                raise
            else:
                outcome.set_result(report)
                return report
            finally:
                outcome.cancel()
                self._answer = None

    async def _until_its_turn(self) -> None:
        """Wait while another model has the turn. Raises ServiceUnavailable after `turn_wait_s`."""
        give_up_at = deadline_after(self.config.turn_wait_s)
        self.num_awaiting_turn += 1
        try:
            # An update wakes the fleet, and the other model may fill the memory of the accelerators.
            while (orders := self._desired.orders).asleep and orders.sleep_reason == TURN_REASON:
                if not await self._released.wait_until(give_up_at):
                    message = f"another model has had the turn for {self.config.turn_wait_s:g} s: push again later"
                    raise ServiceUnavailable(message)
        finally:
            self.num_awaiting_turn -= 1

    async def _repeated(self, update: WeightUpdate, digest: str, force: bool) -> UpdateReport | None:
        """Return the report of the served update if `update` has its version and content, and a replica holds it.

        Raises Conflict for other content, unless it is forced: then it is an update of its own.
        """
        weights = self._desired.weights
        served = weights.served
        if served is None or served.version != update.version or not self._is_held(self._fleet.weight_version):
            return None
        is_same = served.digest == digest
        # A push with the same token is a retry of the call: its sender has ended. With `force` it replaces others.
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
        # A coordinator that died after the first commit has left no report, or none of its replicas.
        report = weights.report or UpdateReport(served.version, None, served.kv_policy, (), 0.0)
        return report if report.replicas else replace(report, replicas=self._outcomes(served.version))

    async def _digest_of(self, update: WeightUpdate) -> str:
        """Return the digest of an update's weights as a replica reads or receives them; empty if none can.

        A folder's contents are read only if its files have changed. Pushed weights are staged, and never committed.
        """
        replicas = [one for one in self._fleet.placeable() if one.replica_id not in self._claimed]
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
        """Report a resolved update for each present replica: its times are not known."""
        told = {one: one.error or f"{one.state}: the version is still to come" for one in self._fleet.replicas}
        told |= dict.fromkeys((one for one in told if one.weight_version == version), "")
        return tuple(ReplicaUpdate(one.replica_id, 0.0, 0.0, error or None) for one, error in told.items())

    def _is_held(self, version: int | None) -> bool:
        return any(self._fleet.is_current(one) for one in self._fleet.replicas if one.weight_version == version)

    async def _update_fleet(self, update: WeightUpdate, kv_policy: KVPolicy, force: bool) -> UpdateReport:
        started_at, previous_version = self._clock.now(), self._fleet.weight_version
        began_at = self._wall_time()
        self._check_version(update.version, force)
        if previous_version is not None and update.version <= previous_version:
            kv_policy = KVPolicy.RECOMPUTE  # KV of an equal or a newer number is of other weights
        self._log.info("update_begins", version=update.version, kv_policy=kv_policy)
        known = self._desired.weights.served
        if known is not None and known.version == update.version and update.is_repeatable and not force:
            # No replica holds the version any more. Other content needs another version, or `force`.
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
            raise Conflict(f"version {served} is what the fleet serves", param="version")
        if version < served:
            message = f"versions grow: {version} after {served}; with `force` the fleet goes back"
            raise InvalidRequest(message, param="version")

    def _takers(self, receivers: tuple[str, ...]) -> list[ReplicaRecord]:
        """Return the replicas of an update. Those that are not in a trainer's group are late ones after it."""
        replicas = self._unclaimed(
            ReplicaState.READY, ReplicaState.JOINING, ReplicaState.QUARANTINED, ReplicaState.ASLEEP
        )
        if receivers:
            replicas = [one for one in replicas if one.replica_id in receivers or one.state is ReplicaState.ASLEEP]
        if not replicas:
            raise NoHealthyReplica("no replica can take new weights now")
        return replicas

    async def _stage_and_switch(
        self, replicas: Sequence[ReplicaRecord], source: UpdateSource, tags: frozenset[MemoryTag]
    ) -> FleetUpdate:
        """Take these replicas through all steps of an update, and wake the memory of `tags`."""
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
        """Store an update before any replica is touched. Raises ServiceUnavailable if the store fails."""
        weights = self._desired.weights
        intended = replace(weights, pending=source)
        self._desired = replace(self._desired, weights=intended)
        stored, before = intended.without_secrets(), weights.without_secrets()
        try:
            await self._saved_weights.save_first(stored, before, self.config.save_timeout_s)
        except ServiceUnavailable:
            self._desired = replace(self._desired, weights=weights)
            raise

    # --- adapters by name ---

    async def push_adapter(self, push: AdapterPush) -> UpdateReport:
        """Serve a version of an adapter on all replicas, beside what they serve. Nothing pauses.

        Waits for a weight update to end. Raises as `AdapterSync.push`.
        """
        with self._order():
            await self.until_idle()
            with self._fleet_wide("an adapter's push"):
                report = await self.adapters.push(push)
        self._reports.append(report)
        self._log.info("adapter_pushed", adapter=push.name, version=report.version)
        return report

    async def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more. Raises as `AdapterSync.unload`."""
        with self._order():
            await self.until_idle()
            with self._fleet_wide("an adapter's end"):
                await self.adapters.unload(name)
        self._log.info("adapter_unloaded", adapter=name)

    # --- one replica to the desired state ---

    async def apply(self, replica: ReplicaRecord) -> bool:
        """Bring a replica to the standing orders: asleep, paused or serving. True if it takes traffic now.

        A quarantined replica only gives its memory back or takes it back.
        """
        async with self._gate:
            if self._desired.orders.asleep:
                await self.steps.sleep(replica, self._desired.orders)
                self._fleet.fall_asleep(replica)
                return False
            await self.steps.wake(replica, ALL_MEMORY)
            return await self._resume_or_pause(replica)

    async def _resume_or_pause(self, replica: ReplicaRecord) -> bool:
        """Resume or pause a replica as ordered, and admit it; one without the fleet's weights stays frozen."""
        mode = self._desired.orders.pause
        now = self._fleet.get(replica.replica_id)
        if now is not None and now.state is ReplicaState.UPDATING and self._fleet.is_current(now):
            try:
                await (self._resume(replica) if mode is None else self.steps.pause_for_operator(replica, mode))
            except (WeightUpdateFailed, EngineUnusable) as error:
                self._fleet.refuse(replica, error.message)
                raise
            await self.adapters.bring(replica)
        return self._fleet.admit(replica)  # at once: an adapter that is pushed from here on finds it in service

    async def _resume(self, replica: ReplicaRecord) -> None:
        """Resume a replica, and keep traffic from it until it has answered.

        It may take its look only now, at weights that were committed in a pause, and refuse them.
        """
        self._fleet.hold(replica, True)
        try:
            await self.steps.resume(replica)
        finally:
            self._fleet.hold(replica, False)

    # --- shared by all procedures ---

    @contextmanager
    def _order(self, name: str | None = None) -> Iterator[None]:
        """Call `on_change` after the block, and log an order with a name. Raises StorageFull if it is not saved."""
        try:
            yield
        finally:
            self._on_change()  # also after a failure: those that did not follow are behind now
        if name is not None:
            self._log.info("fleet_ordered", order=name)
            if self._saved_orders.has_failed:
                raise StorageFull(f"{name}: done, not saved: a restart of the coordinator forgets it; repeat it")

    @contextmanager
    def _fleet_wide(self, name: str) -> Iterator[None]:
        """Run one fleet-wide procedure. Raises Conflict, naming the other, while another one runs."""
        if self._ongoing is not None:
            raise Conflict(f"{self._ongoing} is going on")
        self._ongoing = name
        try:
            yield
        finally:
            self._end_fleet_wide()

    def _end_fleet_wide(self) -> None:
        self._ongoing = None
        self._released.notify()

    async def until_idle(self) -> None:
        """Wait until no fleet-wide procedure runs; bounded, because all its steps have deadlines."""
        while self._ongoing is not None:
            await self._released.wait_until(deadline_after(self.config.update_timeout_s))

    async def _until_resolved(self) -> None:
        """Wait until an interrupted update is resolved, and late replicas have had time to serve its version."""
        await self.until_idle()
        await self._until_unclaimed()

    async def _until_unclaimed(self) -> None:
        """Wait until no procedure holds a replica, but no longer than `straggler_grace_s`."""
        give_up_at = deadline_after(self.config.straggler_grace_s)
        while self._claimed and await self._released.wait_until(give_up_at):
            pass

    @contextmanager
    def claim(self, replicas: Sequence[ReplicaRecord], error: str) -> Iterator[None]:
        """Claim replicas for one procedure; at its end none is UPDATING. Raises Conflict if one is claimed."""
        replica_ids = {replica.replica_id for replica in replicas}
        if taken := replica_ids & self._claimed:
            raise Conflict(f"replica {', '.join(sorted(taken))} is being brought up already")
        self._claimed |= replica_ids
        try:
            yield
        finally:
            for replica in replicas:
                self._release_claimed(replica, error)
            self._claimed -= replica_ids
            self._released.notify()

    def _release_claimed(self, replica: ReplicaRecord, error: str) -> None:
        """Take a replica out of UPDATING: back to its old state if its weights are the same, else to quarantine."""
        now = self._fleet.get(replica.replica_id)
        if now is not None and now.incarnation != replica.incarnation and now.url == replica.url:
            self._fleet.forget_version(now)  # it left and came back: its report may be older than our commit
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
        """Return the update whose weights the fleet serves; None if it is not known."""
        source = self._desired.weights.served
        return source if source is not None and source.version == self._fleet.weight_version else None
