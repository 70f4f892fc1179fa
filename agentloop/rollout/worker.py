"""Worker: runs many agent loops at once in one event loop.

Ownership: every trajectory is one task of the worker's TaskGroup and ends in exactly one terminal record, handed to
the coordinator until it says that the record is durable. A trajectory's failure stays its own. One that was dropped
for its age is handed in without tokens, and the coordinator has its sample begun anew, here or elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from dataclasses import dataclass, field, replace

import structlog
from structlog.contextvars import bind_contextvars
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from agentloop.api import WorkerPort, WorkerReport
from agentloop.errors import AgentLoopError, ContextLengthExceeded, InvalidRequest
from agentloop.generation import AssignedLease, Connect, LeasedEngine, NewestVersion
from agentloop.parsers import Parser
from agentloop.rendering import Renderer
from agentloop.rollout.budget import Budget, LimitReached
from agentloop.rollout.context import LoopContext
from agentloop.rollout.loops import AgentLoop, load_loop
from agentloop.rollout.rewards import RewardFunction, load_reward, score
from agentloop.rollout.staleness_guard import StalenessGuard
from agentloop.rollout.toolbox import Toolbox, ToolScope
from agentloop.types import (
    FAILURES,
    Assignment,
    GenerateRequest,
    Generation,
    KVPolicy,
    OnStale,
    StopReason,
    Timings,
    Trajectory,
)

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


@dataclass(slots=True)
class _Outcome:
    stop_reason: StopReason
    error: str | None = None
    is_dropped: bool = False


@dataclass(slots=True)
class _Parts:
    """The parts that several trajectories share, loaded once by name."""

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
    ) -> None:
        self.worker_id = worker_id
        self._coordinator = coordinator
        self._connect = connect
        self._renderer = renderer
        self._parser = parser
        self._toolbox = toolbox
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._parts = _Parts()
        self._newest = NewestVersion()
        self._running: dict[str, _Running] = {}
        self._has_free = asyncio.Event()
        self._is_closing = False
        self._log = structlog.get_logger("worker").bind(worker=worker_id)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Poll for work until `close`; then cancel what runs, which the coordinator gives to others."""
        async with asyncio.TaskGroup() as group:
            while not self._is_closing:
                await self._poll(group)
                await asyncio.sleep(self._config.poll_gap_s)
            for running in self._running.values():
                running.task.cancel()

    def close(self) -> None:
        """Make `run` return. Idempotent."""
        self._is_closing = True
        self._has_free.set()

    async def _poll(self, group: asyncio.TaskGroup) -> None:
        num_free = self._config.capacity - len(self._running)
        if num_free <= 0:
            # No room: still ask now and then, because cancellations come with the answer.
            self._has_free.clear()
            try:
                await asyncio.wait_for(self._has_free.wait(), timeout=1.0)
            except TimeoutError:
                self._log.debug("worker_full", num_running=len(self._running))
            num_free = self._config.capacity - len(self._running)
        # What was dropped is no more this worker's: reported, the coordinator would have it adopt that again.
        mine = tuple(name for name, running in self._running.items() if not running.is_dropped)
        report = WorkerReport(self.worker_id, num_free, mine)
        try:
            orders = await self._coordinator.take(report, self._config.poll_s if num_free > 0 else 0.0)
        except AgentLoopError as error:
            self._log.warning("take_failed", code=error.code, error=str(error))
            await asyncio.sleep(1.0)
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
                trajectory = await self._trajectory(next_attempt)
                await self._hand_in(trajectory)
        finally:
            del self._running[assignment.assignment_id]
            self._has_free.set()

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

    async def _trajectory(self, assignment: Assignment) -> Trajectory:
        """Run one trajectory to its terminal record. Only a shutdown's cancellation leaves without one."""
        started = time.perf_counter()
        task = assignment.task
        outcome = _Outcome(StopReason.COMPLETED)
        ctx: LoopContext | None = None
        reward, reward_error, reward_s = None, None, 0.0
        try:
            loop, reward_function, scope = self._prepare(assignment)
        except AgentLoopError as error:
            outcome = _Outcome(StopReason.INVALID_TASK, f"{error.code}: {error}")
        else:
            guard = None if assignment.staleness is None else StalenessGuard(assignment.staleness, self._newest)
            try:
                ctx = self._context(assignment, scope, guard)
                outcome = await self._drive(loop, assignment, ctx)
            finally:
                await scope.close()
            if guard is not None and _is_complete(outcome, ctx):
                outcome = _settled(outcome, guard.settle(ctx.path))
            self._running[assignment.assignment_id].is_dropped = outcome.is_dropped
            is_scored = outcome.stop_reason not in FAILURES | {StopReason.CANCELLED} and not outcome.is_dropped
            if reward_function is not None and is_scored:
                reward_started = time.perf_counter()
                reward, reward_error = await score(
                    reward_function, task, ctx.messages, self._config.reward_timeout_s
                )
                reward_s = time.perf_counter() - reward_started
        timings = Timings(
            queue_s=assignment.queue_s,
            generate_s=ctx.generate_s if ctx else 0.0,
            tool_s=ctx.tool_s if ctx else 0.0,
            reward_s=reward_s,
            total_s=time.perf_counter() - started,
        )
        trajectory = _record(assignment, ctx, outcome, timings)
        self._log.info(
            "trajectory_finished",
            stop_reason=outcome.stop_reason,
            error=outcome.error,
            reward=reward,
            num_turns=ctx.budget.num_turns if ctx else 0,
            total_s=round(timings.total_s, 3),
        )
        return replace(trajectory, reward=reward, reward_error=reward_error)

    def _prepare(self, assignment: Assignment) -> tuple[AgentLoop, RewardFunction | None, ToolScope]:
        task = assignment.task
        loop = self._parts.loops.get(task.loop) or self._parts.loops.setdefault(task.loop, load_loop(task.loop))
        reward_function = None
        if task.reward is not None:
            reward_function = self._parts.rewards.get(task.reward) or self._parts.rewards.setdefault(
                task.reward, load_reward(task.reward)
            )
        return (
            loop,
            reward_function,
            self._toolbox.open(task.tools, assignment.assignment_id, trajectory_seed(assignment)),
        )

    def _context(self, assignment: Assignment, scope: ToolScope, guard: StalenessGuard | None) -> LoopContext:
        task, config = assignment.task, self._config
        leased = LeasedEngine(
            self._connect,
            AssignedLease(self._coordinator, assignment),
            vocab_size=self._vocab_size,
            max_attempts=config.turn_attempts,
            newest=self._newest,
        )

        async def generate(request: GenerateRequest) -> Generation:
            # The trajectory's own deadline ends the call; an attempt has less time.
            return await leased.generate(replace(request, timeout_s=config.turn_timeout_s), deadline_at=math.inf)

        wanted = task.limits.max_context_tokens
        context = self._max_context_tokens if wanted is None else min(wanted, self._max_context_tokens)
        return LoopContext(
            task,
            f"{assignment.assignment_id}@{assignment.attempt}",
            generate=generate,
            renderer=self._renderer,
            parser=self._parser,
            tools=scope,
            tool_definitions=self._toolbox.definitions(task.tools),
            budget=Budget(task.limits, context),
            kv_policy=config.kv_policy,
            seed=None if task.seed is None else trajectory_seed(assignment),
            guard=guard,
        )

    async def _drive(self, loop: AgentLoop, assignment: Assignment, ctx: LoopContext) -> _Outcome:
        """Run the loop and name how it ended: every way that is not a bug of ours is an outcome, not an error."""
        running = self._running[assignment.assignment_id]
        if running.is_cancelled:
            return _Outcome(StopReason.CANCELLED)
        running.is_abortable = True
        try:
            async with asyncio.timeout(assignment.task.limits.timeout_s) as deadline:
                await loop.run(assignment.task, ctx)
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
            if isinstance(error, AgentLoopError) and error.retryable:
                return _Outcome(StopReason.ENGINE_FAILED, f"{error.code}: {error}")
            self._log.exception("loop_failed")
            return _Outcome(StopReason.LOOP_FAILED, f"{type(error).__name__}: {error}")
        finally:
            running.is_abortable = False
        return _Outcome(StopReason.COMPLETED)


def trajectory_seed(assignment: Assignment) -> int:
    """A seed that differs between samples and repeats between runs: of the task's seed and the sample's name."""
    name = f"{assignment.task.task_id}/{assignment.sample_index}/{assignment.task.seed}"
    return zlib.crc32(name.encode())


def _is_complete(outcome: _Outcome, ctx: LoopContext | None) -> bool:
    is_ended_well = outcome.stop_reason not in FAILURES | {StopReason.CANCELLED} and not outcome.is_dropped
    return is_ended_well and ctx is not None and not ctx.has_lost_call


def _settled(outcome: _Outcome, acted: OnStale | None) -> _Outcome:
    """How a complete trajectory ends after its run's staleness policy. MASK leaves it its own end."""
    if acted is None or acted is OnStale.MASK:
        return outcome
    if acted is OnStale.FINISH:
        return _Outcome(StopReason.STALE)
    return _Outcome(StopReason.STALE, "dropped: older than the run allows", is_dropped=True)


def _record(assignment: Assignment, ctx: LoopContext | None, outcome: _Outcome, timings: Timings) -> Trajectory:
    limit = assignment.staleness
    is_complete = _is_complete(outcome, ctx)
    ctx = None if outcome.is_dropped else ctx  # nothing of it is kept
    paths = ctx.path.paths() if ctx else ()
    messages = ctx.messages if ctx else assignment.task.messages
    return Trajectory(
        task_id=assignment.task.task_id,
        group_id=assignment.group_id,
        sample_index=assignment.sample_index,
        paths=paths,
        task_messages=() if paths else messages,
        stop_reason=outcome.stop_reason,
        is_complete=is_complete,
        error=outcome.error,
        num_tool_calls=ctx.budget.num_tool_calls if ctx else 0,
        num_tool_errors=ctx.num_tool_errors if ctx else 0,
        attempt=assignment.attempt,
        timings=timings,
        rollout_id=assignment.rollout_id,
        num_masked_tokens=ctx.path.num_masked_tokens if ctx else 0,
        num_stale_attempts=assignment.num_stale_attempts,
        max_staleness=limit.max_staleness if limit is not None else None,
    )
