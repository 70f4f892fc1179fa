"""Worker: runs many agent loops at once in one event loop.

Ownership: every trajectory is one task of the worker's TaskGroup and ends in exactly one terminal record, handed to
the coordinator until it says that the record is durable. A trajectory's failure stays its own. One that was dropped
for its age is handed in without tokens, and the coordinator has its sample begun anew, here or elsewhere.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass, field, replace

import structlog
from structlog.contextvars import bind_contextvars
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from agentloop.aio import deadline_after, is_set_by
from agentloop.api import Orders, WorkerPort, WorkerReport
from agentloop.errors import AgentLoopError, ContextLengthExceeded, DeadlineExceeded, InvalidRequest, RewardError
from agentloop.generation import AssignedLease, Connect, ImagePlacer, LeasedEngine, NewestVersion, TurnReader
from agentloop.parsers import Parser
from agentloop.rendering import Renderer
from agentloop.rollout.budget import Budget, LimitReached
from agentloop.rollout.context import LoopContext
from agentloop.rollout.loops import AgentLoop, load_loop
from agentloop.rollout.rewards import RewardFunction, load_reward, score
from agentloop.rollout.staleness_guard import StalenessGuard
from agentloop.rollout.toolbox import Toolbox, ToolScope
from agentloop.score import Score, ended, scored
from agentloop.types import (
    FAILURES,
    Assignment,
    KVPolicy,
    OnStale,
    StopReason,
    Timings,
    Trajectory,
)

FULL_WAIT_S = 0.25  # for room before a full worker reports: much of it is free again within that
LEAVE_TIMEOUT_S = 2.0  # for records on their way, and then for the goodbye: Serve gives a process 5 s
START_BATCH = 16  # trajectories started in one pass of the loop: their first renders take about 0.3 ms each


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Capacity and deadlines of one worker. All finite."""

    capacity: int = 256  # trajectories at once
    poll_s: float = 5.0  # the longest wait for work in one call
    poll_gap_s: float = 0.02  # between two calls: permits freed meanwhile are asked for together
    turn_timeout_s: float = 300.0  # one generation, pauses included
    turn_attempts: int = 5  # of one generation, on as many replicas; pauses are not counted
    reward_timeout_s: float = 30.0
    commit_timeout_s: float = 600.0  # how long a finished record is offered to an absent coordinator
    kv_policy: KVPolicy = KVPolicy.RECOMPUTE


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    is_cancelled: bool = False  # by the client: the trajectory still owes its record
    is_abortable: bool = False  # its loop is running; before and after, only the flag is set
    is_dropped: bool = False  # it says so to the coordinator, which may give it out again before we hear the answer
    again: Assignment | None = None  # the same sample, which came in that moment
    is_handing_in: bool = False  # its record is on the way to the coordinator
    budget: Budget | None = None  # once its loop runs


@dataclass(slots=True)
class _Outcome:
    stop_reason: StopReason
    error: str | None = None
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class _Shared:
    """The parts that a worker's trajectories share; loops and rewards are loaded once by name."""

    coordinator: WorkerPort
    connect: Connect
    renderer: Renderer
    reader: TurnReader
    toolbox: Toolbox
    config: WorkerConfig
    max_context_tokens: int
    vocab_size: int
    log: structlog.stdlib.BoundLogger
    placer: ImagePlacer
    newest: NewestVersion = field(default_factory=NewestVersion)
    loops: dict[str, AgentLoop] = field(default_factory=dict)
    rewards: dict[str, RewardFunction] = field(default_factory=dict)


class Worker:
    """Takes trajectories from a coordinator and runs them. Construct, then `await run()` until `close()`."""

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
    ) -> None:
        self.worker_id = worker_id
        self._coordinator = coordinator
        self._config = config
        self._log = structlog.get_logger("worker").bind(worker=worker_id)
        self._shared = _Shared(
            coordinator=coordinator,
            connect=connect,
            renderer=renderer,
            reader=TurnReader(renderer, parser),
            toolbox=toolbox,
            config=config,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            log=self._log,
            placer=ImagePlacer(takes_images=takes_images),
        )
        self._running: dict[str, _Running] = {}
        self._wake = asyncio.Event()  # room came up in a full worker, or the end
        self._is_full = False
        self._is_closing = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Poll for work until `close`; then cancel what runs, and give it back to the coordinator."""
        try:
            async with asyncio.TaskGroup() as group:
                while not self._is_closing:
                    await self._poll(group)
                    await asyncio.sleep(self._config.poll_gap_s)
                await self._stop_running()
        finally:
            await self._leave()

    def close(self) -> None:
        """Make `run` return. Idempotent."""
        self._is_closing = True
        self._wake.set()

    async def _poll(self, group: asyncio.TaskGroup) -> None:
        if not self._is_closing:
            self._wake.clear()
        num_free = self._config.capacity - len(self._running)
        self._is_full = num_free <= 0
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
        for place, assignment in enumerate(orders.start):
            if place % START_BATCH == 0:
                await asyncio.sleep(0)
            known = self._running.get(assignment.assignment_id)
            if known is None:
                task = group.create_task(self._run_one(assignment), name=assignment.assignment_id)
                self._running[assignment.assignment_id] = _Running(task)
            elif known.is_dropped:
                known.again, known.is_cancelled = assignment, False

    async def _orders(self, num_free: int) -> Orders:
        """Report, and wait for work or cancellations; without room only until there is some.

        The call that waits is also the sign of life: the coordinator sees it break when this process dies.
        """
        # What was dropped is no more this worker's: reported, the coordinator would have it adopt that again.
        mine = {name: running for name, running in self._running.items() if not running.is_dropped}
        num_sampled = (0 if one.budget is None else one.budget.num_sampled_tokens for one in mine.values())
        report = WorkerReport(self.worker_id, num_free, tuple(mine), tuple(num_sampled))
        taking = asyncio.ensure_future(self._coordinator.take(report, self._config.poll_s))
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait((taking, waking), return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else Orders()
        finally:
            for task in (taking, waking):
                task.cancel()
            await asyncio.gather(taking, waking, return_exceptions=True)

    async def _is_woken(self, wait_s: float) -> bool:
        """Wait for room in a full worker, or the end. False: there was neither."""
        return await is_set_by(self._wake, deadline_after(wait_s, wait_s))

    async def _stop_running(self) -> None:
        """Cancel what runs; records on their way to the coordinator have a moment to get there."""
        handing_in = [running.task for running in self._running.values() if running.is_handing_in]
        for running in self._running.values():
            if not running.is_handing_in:
                running.task.cancel()
        if handing_in:
            _, late = await asyncio.wait(handing_in, timeout=LEAVE_TIMEOUT_S)
            for task in late:
                task.cancel()

    async def _leave(self) -> None:
        """Tell the coordinator, which finds out by itself if it does not hear."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._coordinator.leave(self.worker_id)
        except (AgentLoopError, TimeoutError) as error:
            self._log.warning("leave_failed", error=repr(error))

    def _cancel(self, assignment_id: str) -> None:
        running = self._running.get(assignment_id)
        if running is not None and not running.is_cancelled:
            running.is_cancelled = True
            if running.is_abortable:
                running.task.cancel()

    async def _run_one(self, assignment: Assignment) -> None:
        # This task's own context: what is bound on the way (turn, replica, version) ends with it.
        bind_contextvars(task=assignment.assignment_id)
        running = self._running[assignment.assignment_id]
        try:
            running.again = assignment
            while running.again is not None:
                next_attempt, running.again, running.is_dropped = running.again, None, False
                running.budget = None
                rollout = _Rollout(self._shared, next_attempt, running)
                if rollout.prepare():
                    await rollout.drive()
                    rollout.settle()
                    await rollout.score()
                running.is_handing_in = True
                await self._hand_in(rollout.record())
                running.is_handing_in = False
        finally:
            del self._running[assignment.assignment_id]
            if self._is_full:
                self._wake.set()

    async def _hand_in(self, trajectory: Trajectory) -> None:
        """Offer the record until it is durable; finishing twice is harmless."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: not isinstance(error, InvalidRequest)),
            stop=stop_after_delay(self._config.commit_timeout_s),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            reraise=True,
        )
        try:
            await retrying(self._coordinator.finish, self.worker_id, trajectory)
        except Exception as error:
            # The coordinator still counts it as running here, and gives it out again when it hears it is not.
            self._log.error("record_not_committed", error=repr(error))


class _Rollout:
    """One trajectory, from its assignment to its terminal record: prepare, drive, settle, score, record.

    Only a shutdown's cancellation leaves without a record.
    """

    def __init__(self, shared: _Shared, assignment: Assignment, running: _Running) -> None:
        self._shared = shared
        self._assignment = assignment
        self._task = assignment.task
        self._running = running
        self._started = time.perf_counter()
        self._outcome = _Outcome(StopReason.COMPLETED)
        self._loop: AgentLoop | None = None
        self._ctx: LoopContext | None = None
        self._scope: ToolScope | None = None
        self._guard: StalenessGuard | None = None
        self._reward_function: RewardFunction | None = None
        self._tools_score = Score()
        self._tools_problem: str | None = None
        self._record: Trajectory | None = None  # without its timings, once it has ended
        self._reward_s = 0.0

    def prepare(self) -> bool:
        """Load what the task names. False, and an outcome, for a task that cannot run."""
        shared, task, assignment = self._shared, self._task, self._assignment
        try:
            self._loop = shared.loops.get(task.loop) or shared.loops.setdefault(task.loop, load_loop(task.loop))
            if task.reward is not None:
                self._reward_function = shared.rewards.get(task.reward) or shared.rewards.setdefault(
                    task.reward, load_reward(task.reward)
                )
            scope = shared.toolbox.open(task.tools, assignment.assignment_id, trajectory_seed(assignment))
        except AgentLoopError as error:
            self._outcome = _Outcome(StopReason.INVALID_TASK, f"{error.code}: {error}")
            return False
        self._scope = scope
        if assignment.staleness is not None:
            self._guard = StalenessGuard(assignment.staleness, shared.newest)
        return True

    async def drive(self) -> None:
        """Run the loop, let its environments score, and close its tools."""
        assert self._scope is not None, "not prepared"
        try:
            self._ctx = self._context(self._scope)
            self._running.budget = self._ctx.budget
            self._outcome = await self._driven(self._ctx)
            if self._is_ended_well:
                started = time.perf_counter()
                self._tools_score, self._tools_problem = await self._scope.score(self._task)
                self._reward_s = time.perf_counter() - started
        finally:
            await self._scope.close()

    def settle(self) -> None:
        """Apply the run's staleness policy to a complete trajectory. MASK leaves it its own end."""
        if self._guard is not None and self._ctx is not None and self._is_complete:
            acted = self._guard.settle(self._ctx.path)
            if acted is OnStale.FINISH:
                self._outcome = _Outcome(StopReason.STALE)
            elif acted is OnStale.DROP:
                self._outcome = _Outcome(StopReason.STALE, "dropped: older than the run allows", is_dropped=True)
        self._running.is_dropped = self._outcome.is_dropped

    async def score(self) -> None:
        """Put the score of the loop, the tools and the task's reward function into the record.

        The reward function sees what the others said, and has the last word. Of a trajectory that failed, only the
        loop's metrics are kept.
        """
        if self._ctx is None or self._outcome.is_dropped:
            return
        record, said, problems = self._ended(), self._ctx.score, [self._tools_problem]
        try:
            said = said.joined(self._tools_score) if self._is_ended_well else Score(metrics=said.metrics)
            record = scored(record, said)
        except RewardError as error:
            problems.append(str(error))
        if self._reward_function is not None and self._is_ended_well:
            started = time.perf_counter()
            found, problem = await score(
                self._reward_function, self._task, record, self._shared.config.reward_timeout_s
            )
            self._reward_s += time.perf_counter() - started
            problems.append(problem)
            # Without its score there is no reward: what the others said may be of another scale.
            record = replace(record, reward=None) if found is None else scored(record, found)
        reward_error = "; ".join(problem for problem in problems if problem) or None
        self._record = replace(record, reward_error=reward_error)

    def record(self) -> Trajectory:
        """Return the terminal record; of a dropped trajectory nothing is kept."""
        record, timed = self._record or self._ended(), self._ctx
        timings = Timings(
            queue_s=self._assignment.queue_s,
            generate_s=timed.generate_s if timed else 0.0,
            tool_s=timed.tool_s if timed else 0.0,
            reward_s=self._reward_s,
            total_s=time.perf_counter() - self._started,
        )
        self._shared.log.info(
            "trajectory_finished",
            stop_reason=record.stop_reason,
            error=record.error,
            reward=record.reward,
            num_turns=timed.budget.num_turns if timed else 0,
            total_s=round(timings.total_s, 3),
        )
        return replace(record, timings=timings)

    def _ended(self) -> Trajectory:
        """Return the record without its score and its timings."""
        assignment, outcome, limit = self._assignment, self._outcome, self._assignment.staleness
        ctx = None if outcome.is_dropped else self._ctx
        paths = ctx.path.paths() if ctx else ()
        messages = ctx.messages if ctx else self._task.messages
        trajectory = Trajectory(
            task_id=self._task.task_id,
            group_id=assignment.group_id,
            sample_index=assignment.sample_index,
            paths=paths,
            task_messages=() if paths else messages,
            stop_reason=outcome.stop_reason,
            is_complete=self._is_complete,
            error=outcome.error,
            num_tool_calls=ctx.budget.num_tool_calls if ctx else 0,
            num_tool_errors=ctx.num_tool_errors if ctx else 0,
            attempt=assignment.attempt,
            rollout_id=assignment.rollout_id,
            num_masked_tokens=sum(path.num_masked_tokens for path in paths),
            num_stale_attempts=assignment.num_stale_attempts,
            max_staleness=limit.max_staleness if limit is not None else None,
            num_resampled_turns=ctx.num_resampled_turns if ctx else 0,
            thinking=self._shared.renderer.facts.thinking,
        )
        return ended(trajectory)

    @property
    def _is_ended_well(self) -> bool:
        return self._outcome.stop_reason not in FAILURES | {StopReason.CANCELLED} and not self._outcome.is_dropped

    @property
    def _is_complete(self) -> bool:
        return self._is_ended_well and self._ctx is not None and not self._ctx.has_lost_call

    def _context(self, scope: ToolScope) -> LoopContext:
        shared, task, assignment = self._shared, self._task, self._assignment
        engine = LeasedEngine(
            shared.connect,
            AssignedLease(shared.coordinator, assignment),
            vocab_size=shared.vocab_size,
            max_attempts=shared.config.turn_attempts,
            newest=shared.newest,
        )
        wanted = task.limits.max_context_tokens
        context = shared.max_context_tokens if wanted is None else min(wanted, shared.max_context_tokens)
        return LoopContext(
            task,
            f"{assignment.assignment_id}@{assignment.attempt}",
            engine=engine,
            reader=shared.reader,
            renderer=shared.renderer,
            tools=scope,
            tool_definitions=shared.toolbox.definitions(task.tools),
            budget=Budget(task.limits, context),
            kv_policy=shared.config.kv_policy,
            seed=None if task.seed is None else trajectory_seed(assignment),
            turn_timeout_s=shared.config.turn_timeout_s,
            guard=self._guard,
            placer=shared.placer,
        )

    async def _driven(self, ctx: LoopContext) -> _Outcome:
        """Run the loop and name how it ended: every way that is not a bug of ours is an outcome, not an error."""
        running, loop = self._running, self._loop
        assert loop is not None, "not prepared"
        if running.is_cancelled:
            return _Outcome(StopReason.CANCELLED)
        running.is_abortable = True
        try:
            async with asyncio.timeout(self._task.limits.timeout_s) as deadline:
                ctx.deadline = deadline
                await loop.run(self._task, ctx)
        except LimitReached as limit:
            return _Outcome(limit.reason)
        except asyncio.CancelledError:
            if not running.is_cancelled:
                raise  # a shutdown: the coordinator gives the trajectory to another worker
            running.task.uncancel()
            return _Outcome(StopReason.CANCELLED)
        except ContextLengthExceeded as error:
            return _Outcome(StopReason.PROMPT_TOO_LONG, str(error))
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                return _Outcome(StopReason.DEADLINE)
            if isinstance(error, DeadlineExceeded) or (isinstance(error, AgentLoopError) and error.retryable):
                return _Outcome(StopReason.ENGINE_FAILED, f"{error.code}: {error}")
            self._shared.log.exception("loop_failed")
            return _Outcome(StopReason.LOOP_FAILED, f"{type(error).__name__}: {error}")
        finally:
            running.is_abortable = False
        return _Outcome(StopReason.COMPLETED)


def trajectory_seed(assignment: Assignment) -> int:
    """A seed that differs between samples and repeats between runs: of the task's seed and the sample's name."""
    name = f"{assignment.task.task_id}/{assignment.sample_index}/{assignment.task.seed}"
    return zlib.crc32(name.encode())
