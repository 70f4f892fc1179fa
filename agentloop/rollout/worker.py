"""Worker: runs many trajectories concurrently in one event loop.

Invariants: every trajectory is one task of the worker's TaskGroup and ends in exactly one terminal record, which
the worker submits until the coordinator acknowledges that it is durable. A failed trajectory affects no other one.
The record of a trajectory that was dropped for staleness has no tokens; the coordinator assigns its sample again,
to this worker or another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
from structlog.contextvars import bind_contextvars
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

from agentloop.api.coordinator import Orders, WorkerPort, WorkerReport
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.flight import Doing, Flight
from agentloop.concurrency.aio import deadline_after, is_set_by
from agentloop.errors import AgentLoopError, InvalidRequest, StorageFull
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.leased_engine import Connect
from agentloop.generation.leases import LeaseReporter
from agentloop.generation.turn_reader import TurnReader
from agentloop.observability.metrics import MetricsTally
from agentloop.parsers.base import Parser
from agentloop.rendering.port import Renderer
from agentloop.rollout.hand_ins import HandIns
from agentloop.rollout.models import ModelsPort, NoModels
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import AssignedRun, RunParts, TrajectoryRun, WorkerConfig
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.types import Assignment

FULL_WAIT_S = 0.25  # wait for capacity before a full worker polls: usually some is freed within this time
HAND_IN_GRACE_S = 1.0  # for records being submitted when the worker stops: Ray Serve allows a process 5 s
LEAVE_TIMEOUT_S = 2.0  # to flush the journal and deregister, after that
FLIGHTS_EVERY_S = 1.0
START_BATCH = 16  # trajectories started without yielding to the event loop: a first render takes about 0.3 ms


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    run: AssignedRun | None = None  # None: not started
    is_cancelled: bool = False  # by the client; its record is still pending
    is_dropped: bool = False  # its submission may cause a new assignment of the sample before the response arrives
    again: Assignment | None = None  # the new assignment
    is_handing_in: bool = False  # its record is being submitted


def _flight_of(running: _Running) -> Flight:
    return Flight(Doing.LOAD, 0.0, 0.0) if running.run is None else running.run.flight


class Worker:
    """Runs trajectories of a coordinator in this process. `await run()` returns after `close()`."""

    def __init__(
        self,
        worker_id: str,
        coordinator: WorkerPort,
        connect: Connect,
        renderer: Renderer,
        parser: Parser,
        toolbox: Toolbox,
        config: WorkerConfig,
        *,
        max_context_tokens: int,
        vocab_size: int,
        takes_images: bool = False,
        journal: TurnJournal | None = None,
        begin: Callable[[Assignment], AssignedRun] | None = None,
        reporter: LeaseReporter | None = None,
        host: str = "",
        tally: MetricsTally | None = None,
        parser_name: str = "",
        models: ModelsPort = NoModels(),  # noqa: B008 - it has no state
    ) -> None:
        """Create a worker.

        `begin` creates the run of an assignment; by default in this process. `reporter` reports the leases of these
        runs; the worker stops it. The caller closes `journal`. `host` is the worker's address. `tally` counts
        finished trajectories and calls that the parser `parser_name` cannot read.
        """
        self.worker_id = worker_id
        self._host = host
        self._reporter = LeaseReporter(worker_id, coordinator.report_leases) if reporter is None else reporter
        self._coordinator = coordinator
        self._hand_ins = HandIns(worker_id, coordinator)
        self._config = config
        self._log = structlog.get_logger("worker").bind(worker=worker_id)
        self._parts = RunParts(
            coordinator=coordinator,
            connect=connect,
            renderer=renderer,
            reader=TurnReader(renderer, parser, parser_name),
            toolbox=toolbox,
            config=config,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            placer=ImagePlacer(takes_images=takes_images),
            reporter=self._reporter,
            tally=MetricsTally() if tally is None else tally,
            journal=journal,
            models=models,
        )
        self._journal = journal
        self._begin = begin or partial(TrajectoryRun, self._parts)
        self._running: dict[str, _Running] = {}
        self._wake = asyncio.Event()  # set when a full worker has free capacity, and by `close`
        self._is_full = False
        self._is_closing = False
        self._has_left = False
        self._told_at = 0.0  # the last report of activities

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Poll for work until `close`, then cancel running trajectories and return them to the coordinator."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._sweep()  # before the first poll: an assignment may resume from a lost worker's journal
                sweeping = group.create_task(self._keep_sweeping(), name="turn-journal-sweep")
                while not self._is_closing:
                    await self._poll(group)
                    await asyncio.sleep(self._config.poll_gap_s)
                sweeping.cancel()
                await self._stop_running()
                await self._leave()
        finally:
            # Deregister also after an error, so that the coordinator reassigns the trajectories immediately.
            try:
                await self._leave()
            finally:
                await self._hand_ins.close()
                await self._reporter.stop()

    def close(self) -> None:
        """Make `run` return. Idempotent."""
        self._is_closing = True
        self._wake.set()

    async def _poll(self, group: asyncio.TaskGroup) -> None:
        if not self._is_closing:  # `close` has set the event, which must stay set
            self._wake.clear()
        num_free = self._config.capacity - len(self._running)
        self._is_full = num_free <= 0
        # A full worker polls only if no capacity is freed soon: it still needs the heartbeat and cancellations.
        if self._is_full and await self._is_woken(FULL_WAIT_S):
            return
        try:
            orders = await self._orders(num_free)
        except AgentLoopError as error:
            self._log.warning("take_failed", code=error.code, error=str(error))
            await self._is_woken(1.0)
            return
        for assignment_id in orders.cancel:
            self._cancel(assignment_id)
        for position, assignment in enumerate(orders.start):
            if position % START_BATCH == 0:
                await asyncio.sleep(0)
            known = self._running.get(assignment.assignment_id)
            if known is None:
                task = group.create_task(self._run_one(assignment), name=assignment.assignment_id)
                self._running[assignment.assignment_id] = _Running(task)
            elif known.is_dropped:  # the coordinator assigned the sample again before it acknowledged the record
                known.again, known.is_cancelled = assignment, False

    async def _orders(self, num_free: int) -> Orders:
        """Send the worker's report and wait for assignments or cancellations.

        A full worker waits until it has capacity.

        The waiting call is also the heartbeat: the coordinator sees the connection close if this process dies.
        """
        # Do not report dropped trajectories: the coordinator would count their samples as running here.
        mine = {name: running for name, running in self._running.items() if not running.is_dropped}
        num_sampled = (0 if each.run is None else each.run.num_sampled_tokens for each in mine.values())
        flights = tuple(map(_flight_of, mine.values())) if self._tells_flights() else ()
        report = WorkerReport(self.worker_id, num_free, tuple(mine), tuple(num_sampled), self._host, flights)
        taking = asyncio.ensure_future(self._coordinator.take(report, self._config.poll_s))
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait((taking, waking), return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else Orders()
        finally:
            for task in (taking, waking):
                task.cancel()
            await asyncio.gather(taking, waking, return_exceptions=True)

    def _tells_flights(self) -> bool:
        now = time.monotonic()
        if now - self._told_at < FLIGHTS_EVERY_S:
            return False
        self._told_at = now
        return True

    async def _is_woken(self, wait_s: float) -> bool:
        """Wait for free capacity or `close`. Returns False at the timeout."""
        return await is_set_by(self._wake, deadline_after(wait_s))

    async def _stop_running(self) -> None:
        """Cancel all trajectories, after a grace period for records that are being submitted."""
        handing_in = [running.task for running in self._running.values() if running.is_handing_in]
        if handing_in:
            await asyncio.wait(handing_in, timeout=HAND_IN_GRACE_S)
        for running in self._running.values():
            running.task.cancel()

    async def _leave(self) -> None:
        """Deregister from the coordinator. Idempotent.

        Other workers resume the trajectories from their journals, even if a loop still runs here. Without this
        call, the coordinator detects the lost worker by its silence.
        """
        if self._has_left:
            return
        self._has_left = True
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                if self._journal is not None:
                    await self._journal.flush()
                await self._coordinator.leave(self.worker_id)
        except (AgentLoopError, TimeoutError) as error:
            self._log.warning("leave_failed", error=repr(error))

    async def _sweep(self) -> None:
        """Remove journals of lost workers whose samples have records."""
        if self._journal is not None:
            try:
                await self._journal.sweep(self._coordinator.unfinished)
            except (AgentLoopError, OSError) as error:
                self._log.warning("journal_not_swept", error=repr(error))

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_s)
            await self._sweep()

    def _cancel(self, assignment_id: str) -> None:
        running = self._running.get(assignment_id)
        if running is not None and not running.is_cancelled:
            running.is_cancelled = True
            if running.run is not None:
                running.run.cancel()

    async def _run_one(self, assignment: Assignment) -> None:
        # Each task has its own context, so log fields bound later (turn, replica, version) end with it.
        bind_contextvars(worker=self.worker_id, assignment=assignment.assignment_id)
        running = self._running[assignment.assignment_id]
        try:
            running.again = assignment
            while running.again is not None:
                next_attempt, running.again, running.is_dropped = running.again, None, False
                running.run = self._begin(next_attempt)
                if running.is_cancelled:
                    running.run.cancel()
                record = await running.run.to_record()
                running.is_dropped = running.run.is_dropped
                running.is_handing_in = True
                # Remove a dropped journal before the sample is assigned again, so that no attempt resumes from it.
                if running.is_dropped and self._journal is not None:
                    await running.run.forget()
                    await self._journal.flush()
                if await self._hand_in(record):
                    await running.run.forget()
                running.is_handing_in = False
        finally:
            del self._running[assignment.assignment_id]
            if self._is_full:
                self._wake.set()

    async def _hand_in(self, record: EncodedRecord) -> bool:
        """Submit the record until it is durable.

        Submitting twice is harmless. Returns True if the sample has a record.

        A full disk of the coordinator is retried without a time limit.
        """
        is_late = stop_after_delay(self._config.hand_in_timeout_s)

        def gives_up(state: RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome is not None else None
            return is_late(state) and not isinstance(error, StorageFull)

        retrying = AsyncRetrying(
            # Do not retry a CancelledError: it would be lost, and the worker could not stop.
            retry=retry_if_exception(
                lambda error: isinstance(error, Exception) and not isinstance(error, InvalidRequest)
            ),
            stop=gives_up,
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            reraise=True,
        )
        try:
            return await retrying(self._hand_ins.give, record)
        except Exception as error:
            # The coordinator counts the trajectory as running here until the next report omits it; then it
            # reassigns it.
            self._log.error("record_not_handed_in", error=repr(error))
            return False
