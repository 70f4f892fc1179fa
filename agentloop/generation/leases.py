"""Leases that calls run under, and the process's reports of them.

Ownership: a `LeaseHolder` is the lease of one trajectory or session as its process has it: held, ordered elsewhere,
failed, or given back. A trajectory's lease comes with its assignment, and the coordinator takes it back with its
record; a session's is asked for at its first call, and given back at its end. The process's `LeaseReporter` sends
the news of all holders at most every `coalesce_s` and at least every `heartbeat_s`, which renews the leases, and
gives the orders that come back to the holders. A turn waits for no report, and no failed report reaches it.

Invariants: one report is on its way at a time, and the same one is sent until it is answered; a holder begins a
turn under no lease but the one it was last granted or ordered to. News that wait are bounded: beyond `max_news`
they are dropped, and the next report names all leases.
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
    """Times and bounds of a process's reports. All finite."""

    coalesce_s: float = 0.5  # between two reports at least
    heartbeat_s: float = 1.0  # and at most, while a lease is held; well below the coordinator's `lease_ttl_s`
    timeout_s: float = 10.0  # of one report
    close_timeout_s: float = 5.0  # of the last one
    max_news: int = 20_000  # that wait for their report


class LeaseReporter:
    """The reporter of a process's leases. It runs while there is a lease or news; `stop` or `close` it."""

    def __init__(
        self,
        process_id: str,
        report: Callable[[LeaseReport], Awaitable[LeaseOrders]] | None,
        config: ReportConfig = ReportConfig(),
    ) -> None:
        """`report` is the coordinator's `report_leases`; None: another process sees the same turns, and reports.
        `process_id` is never used by another process."""
        self.process_id = process_id
        self.changes = OwnedTasks(
            "lease"
        )  # of holders; they outlive their callers: no lease is granted and forgotten
        self._report = report
        self._config = config
        self._holders: dict[str, LeaseHolder] = {}  # by lease id
        self._taken: dict[str, None] = {}
        self._turns: list[TurnBegun | TurnEnded] = []  # in their order
        self._released: dict[str, Lease] = {}  # by holder id
        self._needs_full_report = True
        self._unanswered: LeaseReport | None = None
        self._releasing: dict[str, Lease] = {}  # as `_released`, within the unanswered report
        self._sequence = 0
        self._reported_at = 0.0
        self._answered = ChangeSignal()
        self._tasks = OwnedTasks("lease-reporter")
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    async def stop(self) -> None:
        """Report no more; the coordinator finds that out, and takes the leases back. Idempotent."""
        self._is_closed = True
        await self.changes.close(cancels=True)
        await self._tasks.close(cancels=True)

    async def close(self) -> None:
        """Send a last report, if the coordinator takes it in time, and report no more. Idempotent."""
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
        """Take out a lease that the coordinator knows to be held no more."""
        self._holders.pop(lease.lease_id, None)
        self._taken.pop(lease.lease_id, None)

    def release(self, holder_id: str, lease: Lease) -> None:
        """Report that a lease is given back."""
        self.forget(lease)
        self._released[holder_id] = lease
        self._note()

    def take_back(self, holder_id: str) -> Lease | None:
        """Return a lease that was given back and not reported yet: its holder may hold it again."""
        return self._released.pop(holder_id, None)

    async def acked(self, holder_id: str) -> None:
        """Wait until the coordinator knows that a holder gave its lease back. The caller has a deadline."""
        while holder_id in self._releasing or holder_id in self._released:
            self._note()
            await self._answered.wait_until(deadline_after(self._config.timeout_s))

    def add(self, news: TurnBegun | TurnEnded) -> None:
        """Add news of a turn to the next report."""
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
            self._needs_full_report = True
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
        assert self._report is not None, "nothing takes reports"
        report = self._unanswered = self._unanswered or self._next_report()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                orders = await self._report(report)
        except (AgentLoopError, TimeoutError) as error:
            _log.debug("leases_not_reported", error=repr(error))
            if isinstance(error, AgentLoopError) and not error.retryable:
                self._forget_report(needs_full_report=True)  # sent again, it would be refused again
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
    """Bounds of a session's leases and calls."""

    max_attempts: int = 4  # of one call that fails in a row
    coordinator_timeout_s: float = 30.0


class LeaseHolder:
    """The lease of one trajectory or session. Calls may share it: an order of the coordinator counts once none
    runs."""

    def __init__(
        self,
        reporter: LeaseReporter,
        coordinator: WorkerPort | LeasePort,
        name: str,
        assigned: Lease | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """`name` is an assignment's id, and `assigned` its lease; without that it is a session's id, and its lease
        is asked for. `timeout_s` bounds each answer of the coordinator."""
        self.lease: Lease | None = None
        self.is_in_turn = False  # under this lease
        self._reporter = reporter
        self._coordinator = coordinator
        self._name = name
        self._is_session = assigned is None
        self._holder_id = session_holder(name) if assigned is None else name
        self._group_id = "" if assigned is None else group_key(name)  # siblings have one in common
        self._timeout_s = timeout_s
        self._changing = asyncio.Lock()
        self._has_failed = self._is_failure_acked = self._must_ask = self._is_closed = False
        self._order: tuple[Lease | None] | None = None  # obeyed before the next turn
        self._num_in_flight = 0
        self._num_context_tokens = 0  # of the last turn: its prompt and what was sampled
        self._prefixes: tuple[Prefix, ...] = ()  # the prompt that a session's lease was granted for
        if assigned is not None:
            self.hold(assigned)

    @property
    def process_id(self) -> str:
        """The process that reports the lease."""
        return self._reporter.process_id

    # --- for calls ---

    def held(self, needs: Needs = NO_NEEDS) -> Lease | None:
        """Return the lease to call under; None: ask. Raises SessionFinished or Conflict after `close`."""
        if self._is_closed:
            raise self._ended()
        if self.lease is None or self._has_failed or self._must_ask or not self.lease.can.suits(needs):
            return None
        return self.lease

    async def ask(self, prompt_ids: Sequence[int] = (), needs: Needs = NO_NEEDS) -> Lease:
        """Return the lease to call under, asked for if there is none that serves.

        Raises NoHealthyReplica or ServiceUnavailable if there is none now, UnsupportedParameter if no engine can
        serve the needs, WeightVersionNotServed, ModelNotFound for an adapter, and as `held` does.
        """
        if (lease := self.held(needs)) is not None:
            return lease
        return await self._reporter.changes.run(self._asked(prompt_ids, needs))

    def have_ask(self, lease: Lease) -> None:
        """Ask before the next call: the replica of this lease serves no weights that the call accepts."""
        self._must_ask = self._must_ask or lease == self.lease

    async def failed(self, lease: Lease) -> None:
        """Report that the replica of a lease failed, and hold the lease that the coordinator gives instead."""
        if self._fail(lease):
            await self._reporter.changes.run(self._report_failure(lease))

    def give_up(self, lease: Lease) -> None:
        """Report a failure as `failed` does, without waiting: the next call waits for the other lease."""
        if self._fail(lease):
            self._reporter.changes.start(self._report_failure(lease))

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
            self._reporter.add(TurnBegun(self.lease.lease_id))

    def leave(self, lease: Lease | None, request: GenerateRequest, generation: Generation | None) -> None:
        """End a call whose last lease was `lease`; `generation` is what it has of its reply."""
        self._num_in_flight -= 1
        if lease is None or lease != self.lease or not self.is_in_turn:
            return  # it never ran, or the holder has moved meanwhile
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

    # --- its life ---

    def hold(self, lease: Lease) -> None:
        """Hold a lease that was granted, in place of the one before."""
        self._has_failed = self._is_failure_acked = self._must_ask = False
        if lease != self.lease:
            if self.lease is not None:
                self._reporter.forget(self.lease)
            self.lease, self._order, self.is_in_turn = lease, None, False
        self._reporter.hold(self, lease)  # granted again too: it ends unless that is heard of
        if self._is_closed:  # while the coordinator was asked
            self.close()

    def release(self) -> None:
        """Give a session's lease back; its next call asks for one again. Idempotent."""
        if (lease := self._drop()) is not None:
            self._reporter.release(self._holder_id, lease)

    def close(self) -> None:
        """Hold no lease any more. A session's is given back, a trajectory's ends with its record. Idempotent."""
        self._is_closed = True
        if self._is_session:
            self.release()
        else:
            self._drop()

    # --- for the reporter ---

    def order(self, lease: Lease | None) -> None:
        """Take the coordinator's order: the lease of the next turn, or None to ask for it."""
        self._order = (lease,)

    def to_report(self) -> HeldLease | None:
        """Return the lease and its facts for a full report; they count as reported."""
        if self.lease is None:
            return None
        facts = self._holder_id, self._group_id, self._num_context_tokens, self._prefixes
        return HeldLease(self.lease, *facts)

    # --- inside ---

    def _drop(self) -> Lease | None:
        lease, self.lease, self._order = self.lease, None, None
        self._has_failed = self._is_failure_acked = self._must_ask = self.is_in_turn = False
        if lease is not None:
            self._reporter.forget(lease)
        return lease

    def _fail(self, lease: Lease) -> bool:
        """Note a lease's failure. False: it is not held, or another call has noted it."""
        if lease != self.lease or self._has_failed:
            return False
        self._has_failed = True
        return True

    async def _asked(self, prompt_ids: Sequence[int], needs: Needs) -> Lease:
        async with self._changing:
            if self.lease is None and (given_back := self._reporter.take_back(self._holder_id)) is not None:
                self.hold(given_back)
            lease = self.held(needs)  # another call was faster
            if lease is None:
                lease = await self._moved(needs) or await self._granted(prompt_ids, needs)
                self.hold(lease)
            if self._is_closed:
                raise self._ended()
            return lease

    async def _report_failure(self, failed: Lease) -> None:
        async with self._changing:
            if self.lease != failed or not self._has_failed:
                return  # a call that asked has told of it
            try:
                if (lease := await self._moved(NO_NEEDS)) is not None:
                    self.hold(lease)
            except AgentLoopError as error:  # the next round asks again
                _log.warning("not_moved", holder=self._holder_id, code=error.code, error=str(error))

    async def _moved(self, needs: Needs) -> Lease | None:
        """Return the lease that the coordinator gives in place of the one held; None if it does not know that one.

        Raises what the coordinator raises, unless the lease held still serves.
        """
        if (held := self.lease) is None:
            return None
        is_failed = self._has_failed and not self._is_failure_acked
        try:
            return await self._in_time(self._coordinator.move(self._name, held, is_failed, needs))
        except (NoHealthyReplica, WeightVersionNotServed, ModelNotFound):
            self._is_failure_acked = self._has_failed  # reported again, the failure would count again
            raise
        except AgentLoopError as error:
            if isinstance(error, NotFound) and self._is_session:
                self._drop()  # it has expired, or the coordinator is a new one
                return None
            if self._has_failed or not held.can.suits(needs):
                raise
            # The replica may well serve while the coordinator restarts; if it does not, the call says so.
            _log.warning("not_asked", holder=self._holder_id, code=error.code, error=str(error))
            return held

    async def _granted(self, prompt_ids: Sequence[int], needs: Needs) -> Lease:
        """Return the lease that the coordinator grants a session. Asked before it knows what was given back, it
        would grant that again, and then take it back."""
        coordinator = cast(LeasePort, self._coordinator)

        async def granted() -> Lease:
            await self._reporter.acked(self._holder_id)
            process_id, self._prefixes = self._reporter.process_id, prefixes_of(prompt_ids)
            return await coordinator.lease(self._name, len(prompt_ids), process_id, needs, self._prefixes)

        return await self._in_time(granted())

    async def _in_time(self, answer: Awaitable[Lease]) -> Lease:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as error:
            raise ServiceUnavailable("the coordinator did not answer in time") from error

    def _ended(self) -> AgentLoopError:
        if self._is_session:
            return SessionFinished(f"session {self._name} has ended")
        return Conflict(f"trajectory {self._name} is over")
