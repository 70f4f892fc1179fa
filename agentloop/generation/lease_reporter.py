"""The one reporter of a process, and the leases that the process holds.

A `LeaseHolder` is one trajectory's or session's lease as its process has it: what is held, and what the coordinator
ordered. The `LeaseReporter` gathers the news of all holders and sends them at most every `coalesce_s` and at least
every `heartbeat_s`, which renews the leases; it gives the orders that come back to the holders. A turn only notes:
it waits for no report, and no failure of one reaches it.

Invariants: one report is on its way at a time, and the same one is sent until it is answered; a holder begins a
turn under no lease but the one it was last granted or ordered to. News that wait are bounded: beyond `max_news`
they are dropped, and all leases are told anew.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from agentloop.aio import ChangeSignal, OwnedTasks, deadline_after
from agentloop.api.coordinator import HeldLease, LeaseOrders, LeaseReport, TurnBegun, TurnEnded
from agentloop.errors import AgentLoopError
from agentloop.types import FinishReason, GenerateRequest, Generation, Lease

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """Times and bounds of a process's reports. All finite."""

    coalesce_s: float = 0.5  # between two reports at least
    heartbeat_s: float = 1.0  # and at most, while a lease is held; well below the coordinator's `lease_ttl_s`
    timeout_s: float = 10.0  # of one report
    close_timeout_s: float = 5.0  # of the last one
    max_news: int = 20_000  # that wait for their report


class LeaseReporter:
    """The reporter of one process. Its task runs while there is a lease or news; `stop` or `close` it."""

    def __init__(
        self,
        process_id: str,
        report: Callable[[LeaseReport], Awaitable[LeaseOrders]] | None,
        config: ReportConfig = ReportConfig(),
    ) -> None:
        """`report` is the coordinator's `report_leases`; None: another process sees the same turns, and reports.
        `process_id` is never used by another process."""
        self.process_id = process_id
        self._report = report
        self._config = config
        self._holders: dict[str, LeaseHolder] = {}  # by lease id
        self._taken: dict[str, None] = {}
        self._turns: list[TurnBegun | TurnEnded] = []  # in their order
        self._released: dict[str, Lease] = {}  # by holder id
        self._is_all_due = True
        self._unanswered: LeaseReport | None = None
        self._releasing: dict[str, Lease] = {}  # as `_released`, within the unanswered report
        self._sequence = 0
        self._reported_at = 0.0
        self._answered = ChangeSignal()
        self._tasks = OwnedTasks("lease-reporter")
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    async def stop(self) -> None:
        """Report no more: the coordinator takes back by itself what the process holds. Idempotent."""
        self._is_closed = True
        await self._tasks.close(cancels=True)

    async def close(self) -> None:
        """Report no more, after a last report of what is left, if the coordinator takes it in time. Idempotent."""
        await self.stop()
        try:
            async with asyncio.timeout(self._config.close_timeout_s):
                while self._has_news:
                    if not await self._send():
                        return
        except TimeoutError:
            _log.warning("leases_not_released", num_leases=len(self._releasing) + len(self._released))

    # --- for holders ---

    def hold(self, holder: LeaseHolder, lease: Lease) -> None:
        """Note that a holder was granted a lease."""
        self._holders[lease.lease_id] = holder
        self._taken[lease.lease_id] = None
        self._note()

    def forget(self, lease: Lease) -> None:
        """Note that a lease is held no more, which the coordinator knows by itself."""
        self._holders.pop(lease.lease_id, None)
        self._taken.pop(lease.lease_id, None)

    def release(self, holder_id: str, lease: Lease) -> None:
        """Have the coordinator take a lease back."""
        self.forget(lease)
        self._released[holder_id] = lease
        self._note()

    def take_back(self, holder_id: str) -> Lease | None:
        """Return the lease that a holder gave back and that nobody was told of yet: it may hold it again."""
        return self._released.pop(holder_id, None)

    async def told(self, holder_id: str) -> None:
        """Wait until the coordinator knows that a holder gave its lease back. The caller has a deadline."""
        while holder_id in self._releasing or holder_id in self._released:
            self._note()
            await self._answered.wait_until(deadline_after(self._config.timeout_s))

    def tell(self, news: TurnBegun | TurnEnded) -> None:
        """Take news of a turn."""
        self._turns.append(news)
        self._note()

    # --- inside ---

    @property
    def _has_news(self) -> bool:
        return bool(self._unanswered or self._taken or self._turns or self._released)

    def _note(self) -> None:
        if self._report is None:
            self._turns.clear()
            self._taken.clear()
            self._released.clear()
            return
        if len(self._turns) + len(self._released) > self._config.max_news:
            self._turns.clear()
            self._released.clear()
            self._is_all_due = True
        if (self._running is None or self._running.done()) and not self._is_closed:
            # Not in the context of the turn that it serves first: its logs would name that.
            self._running = contextvars.Context().run(self._tasks.start, self._run())

    async def _run(self) -> None:
        """Report while there is something to report, or a lease to renew."""
        while self._has_news or self._holders:
            await asyncio.sleep(self._config.coalesce_s)
            silent_s = asyncio.get_running_loop().time() - self._reported_at
            if self._has_news or silent_s >= self._config.heartbeat_s:
                await self._send()

    async def _send(self) -> bool:
        """Send the report that is due, and obey the answer. False: there was none."""
        assert self._report is not None, "nobody takes reports"
        report = self._unanswered = self._unanswered or self._next_report()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                orders = await self._report(report)
        except (AgentLoopError, TimeoutError) as error:
            _log.debug("leases_not_reported", error=repr(error))
            if isinstance(error, AgentLoopError) and not error.retryable:
                self._forget_report(is_all_due=True)  # sent again, it would be refused again
            return False
        self._reported_at = asyncio.get_running_loop().time()
        self._forget_report(is_all_due=orders.send_all)
        for lease_id, lease in orders.moves:
            holder = self._holders.get(lease_id)
            if holder is not None:
                holder.order(lease)
        return True

    def _forget_report(self, *, is_all_due: bool) -> None:
        self._unanswered, self._releasing = None, {}
        self._is_all_due = self._is_all_due or is_all_due
        self._answered.notify()

    def _next_report(self) -> LeaseReport:
        self._sequence += 1
        released = tuple(lease.lease_id for lease in self._released.values())
        turns, taken = tuple(self._turns), tuple(self._taken)
        leases = None
        if self._is_all_due:
            holders = tuple(self._holders.values())
            leases = tuple(held for one in holders if (held := one.to_report()) is not None)
            turns = tuple(TurnBegun(lease_id) for lease_id, one in self._holders.items() if one.is_in_turn)
            taken, self._is_all_due = (), False
        self._releasing, self._released = self._released, {}
        self._turns, self._taken = [], {}
        return LeaseReport(self.process_id, self._sequence, turns, taken, released, leases)


class LeaseHolder:
    """The lease of one trajectory or session, as its process has it. Synchronous.

    Calls may run side by side under it; what the coordinator ordered counts once none does.
    """

    __slots__ = (
        "_group_id",
        "_has_failed",
        "_holder_id",
        "_must_ask",
        "_num_context_tokens",
        "_num_in_flight",
        "_order",
        "_reporter",
        "is_in_turn",
        "lease",
    )

    def __init__(self, reporter: LeaseReporter, holder_id: str, group_id: str = "") -> None:
        """`group_id`: siblings have one in common; empty: it has none."""
        self._reporter = reporter
        self._holder_id = holder_id
        self._group_id = group_id
        self.lease: Lease | None = None
        self.is_in_turn = False  # under this lease
        self._has_failed = False
        self._must_ask = False
        self._order: tuple[Lease | None] | None = None  # obeyed before the next turn
        self._num_in_flight = 0
        self._num_context_tokens = 0  # of the last turn: its prompt and what was sampled

    @property
    def has_failed(self) -> bool:
        """True if the lease held is no use any more."""
        return self._has_failed

    @property
    def must_ask(self) -> bool:
        """True if the coordinator is to be asked for a place before the next turn."""
        return self._must_ask

    @property
    def usable(self) -> Lease | None:
        """The lease to call under; None if one has to be asked for."""
        return None if self._has_failed or self._must_ask else self.lease

    def hold(self, lease: Lease) -> None:
        """Hold a lease that was granted, in place of the one before."""
        self._has_failed = self._must_ask = False
        if lease == self.lease:
            self._reporter.hold(self, lease)  # granted again: it ends unless that is heard of
            return
        if self.lease is not None:
            self._reporter.forget(self.lease)
        self.lease, self._order, self.is_in_turn = lease, None, False
        self._reporter.hold(self, lease)

    def fail(self, lease: Lease) -> bool:
        """Note that a lease is no use any more. False: it is not held, or that was noted."""
        if lease != self.lease or self._has_failed:
            return False
        self._has_failed = True
        return True

    def keep(self) -> None:
        """Go on under the lease at hand: there was no other."""
        self._must_ask = False

    def drop(self) -> None:
        """Hold nothing any more, which the coordinator knows by itself. Idempotent."""
        lease = self._let_go()
        if lease is not None:
            self._reporter.forget(lease)

    def release(self) -> None:
        """Give the lease back. Idempotent."""
        lease = self._let_go()
        if lease is not None:
            self._reporter.release(self._holder_id, lease)

    def take_back(self) -> bool:
        """Hold again what was given back, if nobody was told of that yet."""
        lease = self._reporter.take_back(self._holder_id)
        if lease is not None:
            self.hold(lease)
        return lease is not None

    async def told(self) -> None:
        """Wait until the coordinator knows what was given back. The caller has a deadline."""
        await self._reporter.told(self._holder_id)

    def order(self, lease: Lease | None) -> None:
        """Take the coordinator's order: the lease of the next turn, or None to ask for it."""
        self._order = (lease,)

    # --- turns ---

    def enter(self) -> None:
        """Begin a call. An order is obeyed now if no other call is under way."""
        if self._num_in_flight == 0 and self._order is not None:
            (ordered,), self._order = self._order, None
            if ordered is None:
                self._must_ask = True
            else:
                self.hold(ordered)
        self._num_in_flight += 1

    def begin(self) -> None:
        """Note that the call goes to the replica of the lease."""
        if not self.is_in_turn and self.lease is not None:
            self.is_in_turn = True
            self._reporter.tell(TurnBegun(self.lease.lease_id))

    def leave(self, lease: Lease | None, request: GenerateRequest, generation: Generation | None) -> None:
        """End a call that ran under `lease` at last, with what it has of its reply."""
        self._num_in_flight -= 1
        if lease is None or lease != self.lease or not self.is_in_turn:
            return  # it never ran, or the holder has moved meanwhile
        num_sampled, num_cached = 0, None
        if generation is not None:
            num_sampled = len(generation.token_ids)
            self._num_context_tokens = len(request.token_ids) + num_sampled
            if generation.finish_reason is not FinishReason.ABORT:
                num_cached = generation.cached_tokens
        self._reporter.tell(TurnEnded(self.lease.lease_id, self._num_context_tokens, num_sampled, num_cached))
        self.is_in_turn = False
        if self._num_in_flight:
            self.begin()

    def to_report(self) -> HeldLease | None:
        """Return all that is known, which counts as reported."""
        if self.lease is None:
            return None
        return HeldLease(self.lease, self._holder_id, self._group_id, self._num_context_tokens)

    def _let_go(self) -> Lease | None:
        lease, self.lease = self.lease, None
        self._has_failed = self._must_ask = self.is_in_turn = False
        self._order = None
        return lease
