"""The leases that calls use, and the process's reports to the coordinator that renew them.

A `LeaseHolder` is the lease of one trajectory or session in its process. A trajectory's lease comes with its
assignment and ends with its record; a session's lease is requested at its first call and released at its end. The
process's `LeaseReporter` sends the news of all holders every `coalesce_s` to `heartbeat_s` seconds, and passes the
coordinator's orders to the holders. No turn waits for a report.

Invariants: one report is in flight at a time, and it is repeated until it is acknowledged; a holder starts a turn
only with the lease that it was granted or ordered to use last.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import structlog

from agentloop.api.coordinator import (
    HeldLease,
    LeaseOrders,
    LeasePort,
    LeaseReport,
    Prefix,
    TurnBegun,
    TurnEnded,
    WorkerPort,
    group_key,
    prefixes_of,
    session_holder,
)
from agentloop.concurrency.aio import ChangeSignal, OwnedTasks, deadline_after
from agentloop.errors import (
    AgentLoopError,
    Conflict,
    ModelNotFound,
    NoHealthyReplica,
    NotFound,
    ServiceUnavailable,
    SessionFinished,
    WeightVersionNotServed,
)
from agentloop.types import FinishReason, GenerateRequest, Generation, Lease
from agentloop.values.capabilities import NO_NEEDS, Needs

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """Intervals and limits of a process's reports. All are finite."""

    coalesce_s: float = 0.5  # minimum interval of reports
    heartbeat_s: float = 1.0  # maximum interval while a lease is held; well below the coordinator's `lease_ttl_s`
    timeout_s: float = 10.0  # timeout of a report
    close_timeout_s: float = 5.0  # timeout of the last reports
    max_news: int = 20_000  # pending news, beyond which they are dropped for a full report


class LeaseReporter:
    """Reports a process's leases while there are leases or news. Call `stop` or `close` at the end."""

    def __init__(
        self,
        process_id: str,
        report: Callable[[LeaseReport], Awaitable[LeaseOrders]] | None,
        config: ReportConfig = ReportConfig(),
    ) -> None:
        """`report` is the coordinator's `report_leases`; None if another process reports the same turns.

        `process_id` is never reused by another process.
        """
        self.process_id = process_id
        # Tasks that change a holder's lease. They outlive their callers, so that no granted lease is lost.
        self.changes = OwnedTasks("lease")
        self._report = report
        self._config = config
        self._holders: dict[str, LeaseHolder] = {}  # lease id -> holder
        self._taken: dict[str, None] = {}
        self._turns: list[TurnBegun | TurnEnded] = []  # in order
        self._released: dict[str, Lease] = {}  # holder id -> lease
        self._needs_full_report = True
        self._unanswered: LeaseReport | None = None
        self._releasing: dict[str, Lease] = {}  # the leases that the unacknowledged report releases, by holder id
        self._sequence = 0
        self._reported_at = 0.0
        self._answered = ChangeSignal()
        self._tasks = OwnedTasks("lease-reporter")
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    async def stop(self) -> None:
        """Stop reporting. The coordinator ends the leases after their timeout. Idempotent."""
        self._is_closed = True
        await self.changes.close(cancels=True)
        await self._tasks.close(cancels=True)

    async def close(self) -> None:
        """Send the last reports within a timeout, then stop. Idempotent."""
        await self.stop()
        try:
            async with asyncio.timeout(self._config.close_timeout_s):
                while self._has_news:
                    if not await self._send():
                        return
        except TimeoutError:
            _log.warning("leases_not_released", num_leases=len(self._releasing) + len(self._released))

    # Called by holders

    def hold(self, holder: LeaseHolder, lease: Lease) -> None:
        """Record that a holder was granted a lease."""
        self._holders[lease.lease_id] = holder
        self._taken[lease.lease_id] = None
        self._note()

    def forget(self, lease: Lease) -> None:
        """Remove a lease that the coordinator knows to have ended."""
        self._holders.pop(lease.lease_id, None)
        self._taken.pop(lease.lease_id, None)

    def release(self, holder_id: str, lease: Lease) -> None:
        """Report that a lease is released."""
        self.forget(lease)
        self._released[holder_id] = lease
        self._note()

    def take_back(self, holder_id: str) -> Lease | None:
        """Return a released lease that was not reported yet, so that its holder may use it again."""
        return self._released.pop(holder_id, None)

    async def acked(self, holder_id: str) -> None:
        """Wait until the coordinator has acknowledged the release of a holder's lease.

        The caller sets a deadline.
        """
        while holder_id in self._releasing or holder_id in self._released:
            self._note()
            await self._answered.wait_until(deadline_after(self._config.timeout_s))

    def add(self, news: TurnBegun | TurnEnded) -> None:
        """Add a turn's news to the next report."""
        self._turns.append(news)
        self._note()

    @property
    def _has_news(self) -> bool:
        return bool(self._unanswered or self._taken or self._turns or self._released)

    def _note(self) -> None:
        if self._report is None:
            self._turns.clear()
            self._taken.clear()
            self._released.clear()
            return
        # Pending news are bounded. A report of all leases replaces the dropped ones.
        if len(self._turns) + len(self._released) > self._config.max_news:
            self._turns.clear()
            self._released.clear()
            self._needs_full_report = True
        if (self._running is None or self._running.done()) and not self._is_closed:
            # A new context: otherwise the logs of this task would name the turn that started it.
            self._running = contextvars.Context().run(self._tasks.start, self._run())

    async def _run(self) -> None:
        """Send reports while there are news or leases to renew."""
        while self._has_news or self._holders:
            await asyncio.sleep(self._config.coalesce_s)
            silent_s = asyncio.get_running_loop().time() - self._reported_at
            if self._has_news or silent_s >= self._config.heartbeat_s:
                await self._send()

    async def _send(self) -> bool:
        """Send the pending report and apply its orders. Returns False if it was not acknowledged."""
        assert self._report is not None, "nothing takes reports"
        report = self._unanswered = self._unanswered or self._next_report()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                orders = await self._report(report)
        except (AgentLoopError, TimeoutError) as error:
            _log.debug("leases_not_reported", error=repr(error))
            if isinstance(error, AgentLoopError) and not error.retryable:
                self._forget_report(needs_full_report=True)  # a repeat would be refused again
            return False
        self._reported_at = asyncio.get_running_loop().time()
        self._forget_report(needs_full_report=orders.send_all)
        for lease_id, lease in orders.moves:
            holder = self._holders.get(lease_id)
            if holder is not None:
                holder.order(lease)
        return True

    def _forget_report(self, *, needs_full_report: bool) -> None:
        self._unanswered, self._releasing = None, {}
        self._needs_full_report = self._needs_full_report or needs_full_report
        self._answered.notify()

    def _next_report(self) -> LeaseReport:
        self._sequence += 1
        released = tuple(lease.lease_id for lease in self._released.values())
        turns, taken = tuple(self._turns), tuple(self._taken)
        leases = None
        if self._needs_full_report:
            holders = self._holders.items()
            leases = tuple(held for _, one in holders if (held := one.to_report()) is not None)
            turns = tuple(TurnBegun(lease_id) for lease_id, one in holders if one.is_in_turn)
            taken, self._needs_full_report = (), False
        self._releasing, self._released = self._released, {}
        self._turns, self._taken = [], {}
        return LeaseReport(self.process_id, self._sequence, turns, taken, released, leases)


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Limits of a session's leases and calls."""

    max_attempts: int = 4  # consecutive failures of one call
    coordinator_timeout_s: float = 30.0


class LeaseHolder:
    """The lease of one trajectory or session. Concurrent calls share it; orders apply when no call runs."""

    def __init__(
        self,
        reporter: LeaseReporter,
        coordinator: WorkerPort | LeasePort,
        name: str,
        assigned: Lease | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """`name` is an assignment id with its lease `assigned`, or a session id, whose lease is requested later.

        `timeout_s` bounds each call of the coordinator.
        """
        self.lease: Lease | None = None
        self.is_in_turn = False  # a turn runs with this lease
        self._reporter = reporter
        self._coordinator = coordinator
        self._name = name
        self._is_session = assigned is None
        self._holder_id = session_holder(name) if assigned is None else name
        self._group_id = "" if assigned is None else group_key(name)  # shared by the samples of a group
        self._timeout_s = timeout_s
        self._changing = asyncio.Lock()
        self._has_failed = self._is_failure_acked = self._must_ask = self._is_closed = False
        self._order: tuple[Lease | None] | None = None  # applied before the next turn
        self._num_in_flight = 0
        self._num_context_tokens = 0  # prompt and sampled tokens of the last turn
        self._prefixes: tuple[Prefix, ...] = ()  # the prompt of the session's lease request
        if assigned is not None:
            self.hold(assigned)

    @property
    def process_id(self) -> str:
        """The process that reports the lease."""
        return self._reporter.process_id

    # Used by calls

    def held(self, needs: Needs = NO_NEEDS) -> Lease | None:
        """Return the lease to use; None if it must be requested.

        Raises SessionFinished or Conflict after `close`.
        """
        if self._is_closed:
            raise self._ended()
        if self.lease is None or self._has_failed or self._must_ask or not self.lease.can.suits(needs):
            return None
        return self.lease

    async def ask(self, prompt_ids: Sequence[int] = (), needs: Needs = NO_NEEDS, affinity: str = "") -> Lease:
        """Return the lease to use, and request one if the present lease does not serve the needs.

        A session's new lease is on the replica of earlier calls with the same `affinity`, if that has capacity.

        Raises NoHealthyReplica or ServiceUnavailable if no lease is available now, UnsupportedParameter if no
        engine meets the needs, WeightVersionNotServed, ModelNotFound for an adapter, and as `held` does.
        """
        if (lease := self.held(needs)) is not None:
            return lease
        return await self._reporter.changes.run(self._asked(prompt_ids, needs, affinity))

    def have_ask(self, lease: Lease) -> None:
        """Request a lease before the next call, because this replica serves no weights that the call accepts."""
        self._must_ask = self._must_ask or lease == self.lease

    async def failed(self, lease: Lease) -> None:
        """Report that a lease's replica failed, and use the lease that the coordinator grants instead."""
        if self._fail(lease):
            await self._reporter.changes.run(self._report_failure(lease))

    def give_up(self, lease: Lease) -> None:
        """Report a failure as `failed` does, without waiting. The next call waits for the other lease."""
        if self._fail(lease):
            self._reporter.changes.start(self._report_failure(lease))

    def enter(self) -> None:
        """Start a call. An order is applied now if no other call runs."""
        if self._num_in_flight == 0 and self._order is not None:
            (ordered,), self._order = self._order, None
            if ordered is None:
                self._must_ask = True
            else:
                self.hold(ordered)
        self._num_in_flight += 1

    def begin(self) -> None:
        """Record that the call is sent to the lease's replica."""
        if not self.is_in_turn and self.lease is not None:
            self.is_in_turn = True
            self._reporter.add(TurnBegun(self.lease.lease_id))

    def leave(self, lease: Lease | None, request: GenerateRequest, generation: Generation | None) -> None:
        """Record the end of a call, and report the end of the turn if the holder still has `lease`.

        `lease` is the last lease of the call. `generation` has the tokens sampled so far, if any.
        """
        self._num_in_flight -= 1
        if lease is None or lease != self.lease or not self.is_in_turn:
            return  # it was never sent, or the holder has another lease now
        num_sampled, num_cached = 0, None
        if generation is not None:
            num_sampled = len(generation.token_ids) if request.sampling.score_from is None else 0
            self._num_context_tokens = len(request.token_ids) + num_sampled
            if generation.finish_reason is not FinishReason.ABORT:
                num_cached = generation.cached_tokens
        counts = (self._num_context_tokens, num_sampled, num_cached, request.num_known_tokens)
        self._reporter.add(TurnEnded(self.lease.lease_id, *counts))
        self.is_in_turn = False
        if self._num_in_flight:
            self.begin()

    # Lifecycle

    def hold(self, lease: Lease) -> None:
        """Use a granted lease in place of the previous one."""
        self._has_failed = self._is_failure_acked = self._must_ask = False
        if lease != self.lease:
            if self.lease is not None:
                self._reporter.forget(self.lease)
            self.lease, self._order, self.is_in_turn = lease, None, False
        # Also if granted again, because the coordinator ends a lease that is not reported
        self._reporter.hold(self, lease)
        if self._is_closed:  # closed during the request
            self.close()

    def release(self) -> None:
        """Release a session's lease. Its next call requests one again. Idempotent."""
        if (lease := self._drop()) is not None:
            self._reporter.release(self._holder_id, lease)

    def close(self) -> None:
        """Stop using leases. A session's lease is released, a trajectory's ends with its record. Idempotent."""
        self._is_closed = True
        if self._is_session:
            self.release()
        else:
            self._drop()

    # Called by the reporter

    def order(self, lease: Lease | None) -> None:
        """Store the coordinator's order for the next turn: its lease, or None to request one."""
        self._order = (lease,)

    def to_report(self) -> HeldLease | None:
        """Return the lease for a full report, which counts as reported."""
        if self.lease is None:
            return None
        facts = self._holder_id, self._group_id, self._num_context_tokens, self._prefixes
        return HeldLease(self.lease, *facts)

    def _drop(self) -> Lease | None:
        lease, self.lease, self._order = self.lease, None, None
        self._has_failed = self._is_failure_acked = self._must_ask = self.is_in_turn = False
        if lease is not None:
            self._reporter.forget(lease)
        return lease

    def _fail(self, lease: Lease) -> bool:
        """Record a lease's failure. Returns False if it is not held or the failure is already recorded."""
        if lease != self.lease or self._has_failed:
            return False
        self._has_failed = True
        return True

    async def _asked(self, prompt_ids: Sequence[int], needs: Needs, affinity: str) -> Lease:
        async with self._changing:
            if self.lease is None and (given_back := self._reporter.take_back(self._holder_id)) is not None:
                self.hold(given_back)
            lease = self.held(needs)  # another call requested it first
            if lease is None:
                lease = await self._moved(needs) or await self._granted(prompt_ids, needs, affinity)
                self.hold(lease)
            if self._is_closed:
                raise self._ended()
            return lease

    async def _report_failure(self, failed: Lease) -> None:
        async with self._changing:
            if self.lease != failed or not self._has_failed:
                return  # another call has reported it
            try:
                if (lease := await self._moved(NO_NEEDS)) is not None:
                    self.hold(lease)
            except AgentLoopError as error:  # the next round requests a lease again
                _log.warning("not_moved", holder=self._holder_id, code=error.code, error=str(error))

    async def _moved(self, needs: Needs) -> Lease | None:
        """Return the lease that the coordinator grants in place of the present one; None if that is unknown to it.

        Re-raises the coordinator's errors, unless the present lease can still serve the call.
        """
        if (held := self.lease) is None:
            return None
        is_failed = self._has_failed and not self._is_failure_acked
        try:
            return await self._in_time(self._coordinator.move(self._name, held, is_failed, needs))
        except (NoHealthyReplica, WeightVersionNotServed, ModelNotFound):
            self._is_failure_acked = self._has_failed  # a second report would count the failure twice
            raise
        except AgentLoopError as error:
            if isinstance(error, NotFound) and self._is_session:
                self._drop()  # it has expired, or the coordinator was restarted
                return None
            if self._has_failed or not held.can.suits(needs):
                raise
            # The replica may work while the coordinator restarts; if not, the call fails.
            _log.warning("not_asked", holder=self._holder_id, code=error.code, error=str(error))
            return held

    async def _granted(self, prompt_ids: Sequence[int], needs: Needs, affinity: str) -> Lease:
        """Return the lease that the coordinator grants a session.

        Waits until a release is acknowledged: otherwise the coordinator would grant the same lease and then end
        it.
        """
        coordinator = cast(LeasePort, self._coordinator)

        async def granted() -> Lease:
            await self._reporter.acked(self._holder_id)
            process_id, self._prefixes = self._reporter.process_id, prefixes_of(prompt_ids, affinity)
            return await coordinator.lease(self._name, len(prompt_ids), process_id, needs, self._prefixes)

        return await self._in_time(granted())

    async def _in_time(self, answer: Awaitable[Lease]) -> Lease:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as error:
            raise ServiceUnavailable(f"the coordinator did not answer within {self._timeout_s:g} s") from error

    def _ended(self) -> AgentLoopError:
        if self._is_session:
            return SessionFinished(f"session {self._name} has ended")
        return Conflict(f"trajectory {self._name} has ended")
