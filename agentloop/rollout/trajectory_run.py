"""Runs one trajectory in a worker, from its assignment to its terminal record.

Invariants: every run ends in a record, except when the worker shuts down. Whatever user code raises (including
SystemExit and exception groups) is the outcome of this trajectory only. The loop runs in a separate task; if it
ignores its cancellation for the grace period, it is abandoned and the record is written without it.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import structlog
from structlog.contextvars import bind_contextvars, get_contextvars

from agentloop.api.coordinator import MAX_RECORD_BYTES, WorkerPort
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.flight import Doing, Flight
from agentloop.concurrency.aio import UserTasks, is_being_cancelled
from agentloop.concurrency.clock import Stopwatch
from agentloop.errors import (
    AgentLoopError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RewardError,
    ToolError,
    ToolLost,
    error_line,
    error_trace,
)
from agentloop.generation.deadline import Deadline
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.leased_engine import Connect, LeasedEngine, NewestVersion, NewestVersions
from agentloop.generation.leases import LeaseHolder, LeaseReporter
from agentloop.generation.turn_reader import TurnReader
from agentloop.observability.metrics import MetricsTally, count_record
from agentloop.observability.trace_context import EngineTraces, turn_context
from agentloop.plugins import LoadedOnce
from agentloop.rendering.port import Renderer
from agentloop.rollout.budget import Budget, LimitReached, StalenessGuard
from agentloop.rollout.context import LoopContext
from agentloop.rollout.environment import LoadedEnvironment, load_environment
from agentloop.rollout.episode import episode_paths, episode_score
from agentloop.rollout.loops import SHIPPED_LOOPS, AgentLoop, ResumableLoop, load_loop
from agentloop.rollout.models import JUDGE_TIMEOUT_S, ModelsPort, NoModels
from agentloop.rollout.rewards import (
    SHIPPED_REWARDS,
    RewardFunction,
    Weighted,
    function_of,
    load_reward,
    score,
    takes,
)
from agentloop.rollout.tool import EndEpisode
from agentloop.rollout.toolbox import MAX_REASON_BYTES, Toolbox, ToolScope, capped
from agentloop.rollout.turn_journal import RunJournal, TurnJournal, fingerprint
from agentloop.score import Score, ended, judged, scored
from agentloop.types import (
    FAILURES,
    Assignment,
    Judge,
    KVPolicy,
    LossCause,
    OnStale,
    StopReason,
    Timings,
    Trajectory,
    TrajectoryTimes,
)

SHUTDOWN_GRACE_S = 1.0  # for each loop when the worker shuts down: the worker has only seconds for all of them


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Capacity and deadlines of one worker. All values are finite."""

    capacity: int = 256  # concurrent trajectories
    poll_s: float = 5.0  # the longest wait for work in one poll
    poll_gap_s: float = 0.02  # between two polls: capacity that is freed in this time is requested together
    turn_timeout_s: float = 300.0  # for one engine request, not counting pauses of the engine
    turn_attempts: int = 4  # consecutive failures of one generation on replicas that accepted it
    max_unavailable_s: float = 4 * 3600.0  # unavailable time per trajectory; then it ends as ENGINE_FAILED
    grace_s: float = 5.0  # for a cancelled loop to end
    hand_in_timeout_s: float = 600.0  # for retries to submit a record while the coordinator is unavailable
    max_record_bytes: int = MAX_RECORD_BYTES  # a larger record is replaced by a failure record
    sweep_s: float = 600.0  # between two removals of journals of lost workers whose samples have records
    kv_policy: KVPolicy = KVPolicy.RECOMPUTE
    default_top_k: int = 0  # for tasks without one: engines with a sampling mask require it
    traces: EngineTraces | None = None  # the traces to which engines add spans


@dataclass(slots=True)
class _Outcome:
    stop_reason: StopReason
    error: str | None = None
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class RunParts:
    """The objects that all trajectories of a worker share. Each loop, reward and environment is loaded once."""

    coordinator: WorkerPort
    connect: Connect
    renderer: Renderer
    reader: TurnReader
    toolbox: Toolbox
    config: WorkerConfig
    max_context_tokens: int
    vocab_size: int
    placer: ImagePlacer
    reporter: LeaseReporter
    tally: MetricsTally = field(default_factory=MetricsTally)
    journal: TurnJournal | None = None  # None: trajectories of a lost worker restart from their first turn
    models: ModelsPort = field(default_factory=NoModels)  # other than the policy
    newest: NewestVersions = field(default_factory=lambda: defaultdict(NewestVersion))
    loops: LoadedOnce[AgentLoop] = field(
        default_factory=lambda: LoadedOnce(load_loop, param="loop", shipped=SHIPPED_LOOPS)
    )
    rewards: LoadedOnce[RewardFunction] = field(
        default_factory=lambda: LoadedOnce(load_reward, param="reward", shipped=SHIPPED_REWARDS)
    )
    environments: LoadedOnce[LoadedEnvironment] = field(
        default_factory=lambda: LoadedOnce(load_environment, param="environment")
    )
    user_tasks: UserTasks = field(default_factory=lambda: UserTasks("loop"))


class AssignedRun(Protocol):
    """A run of one trajectory, in the worker's process or in a separate one."""

    @property
    def is_dropped(self) -> bool:
        """True if the trajectory was dropped for staleness: the sample is then run again from its first turn."""

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens of the turns so far."""

    @property
    def flight(self) -> Flight:
        """The current activity of the trajectory."""

    def cancel(self) -> None:
        """Cancel the loop for the client. The run still ends in a record. Idempotent."""

    async def to_record(self) -> EncodedRecord:
        """Run the trajectory to its terminal record. Raises only CancelledError, when the worker shuts down."""

    async def forget(self) -> None:
        """Remove the journals of this run and of the sample's earlier runs."""


class TrajectoryRun:
    """The AssignedRun in the worker's process.

    Its steps in order: `_load`, `_open_tools`, `_run_loop`, `_apply_staleness_policy`, `_score`, `_final_record`.
    """

    def __init__(self, parts: RunParts, assignment: Assignment) -> None:
        self._parts = parts
        self._assignment = assignment
        self._task = assignment.task
        self._log = structlog.stdlib.get_logger("worker")
        self._started = time.perf_counter()
        self._stopwatch = Stopwatch()
        self._lease = LeaseHolder(parts.reporter, parts.coordinator, assignment.assignment_id, assignment.lease)
        self._outcome = _Outcome(StopReason.COMPLETED)
        self._cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop_task: asyncio.Task[_Outcome] | None = None
        self._loop: AgentLoop | None = None
        self._ctx: LoopContext | None = None
        self._scope: ToolScope | None = None
        self._journal: RunJournal | None = None
        self._guard: StalenessGuard | None = None
        self._reward_function: RewardFunction | None = None
        self._tools_score = Score()
        self._tools_problem: str | None = None
        self._record: Trajectory | None = None  # the scored record, without its timings
        self._reward_s = 0.0
        self._ended_at: float | None = None  # the end of the loop

    @property
    def is_dropped(self) -> bool:
        return self._outcome.is_dropped

    @property
    def num_sampled_tokens(self) -> int:
        return self._ctx.budget.num_sampled_tokens if self._ctx else 0

    @property
    def ctx(self) -> LoopContext | None:
        """The running loop's context; None before the loop starts."""
        return self._ctx

    @property
    def flight(self) -> Flight:
        if self._ctx is None:
            return Flight(Doing.LOAD, age_s := self._stopwatch() / 1e6, age_s)
        flight = self._ctx.flight
        if self._ended_at is None:
            return flight
        is_done, for_s = self._record is not None, time.perf_counter() - self._ended_at
        return replace(flight, doing=Doing.HAND_IN if is_done else Doing.REWARD, for_s=for_s, left_s=None)

    def cancel(self) -> None:
        if not self._cancelled.done():
            self._cancelled.set_result(None)
            if self._loop_task is not None:
                self._loop_task.cancel()

    async def to_record(self) -> EncodedRecord:
        try:
            if await self._load():
                await self._to_end()
            record = self._final_record()
            encoded = EncodedRecord.of(record)
            self._check(encoded)
        except BaseException as error:
            if is_being_cancelled(error):
                raise
            self._log.error("trajectory_failed", error=error_line(error), exception=error_trace(error))
            record = self._failure_record(error)
            encoded = EncodedRecord.of(record)
        finally:
            # Release the KV reservation on every path, and before the record is submitted.
            self._lease.close()
        # Do not count a dropped trajectory: its sample is run again.
        if not self.is_dropped:
            count_record(self._parts.tally, record, "rollout")
        self._log.info(
            "trajectory_finished",
            stop_reason=record.stop_reason,
            error=record.error,
            reward=record.reward,
            num_turns=self._ctx.budget.num_turns if self._ctx else 0,
            total_s=round(record.timings.total_s, 3),
        )
        return encoded

    def _check(self, record: EncodedRecord) -> None:
        """Raise InvalidRequest if the record is too large to submit or cannot be stored."""
        limit = self._parts.config.max_record_bytes
        if len(record.data) > limit:
            raise InvalidRequest(f"its size of {len(record.data)} bytes exceeds the limit of {limit} bytes")
        record.decoded()  # the coordinator must be able to decode it: values from user code may be invalid

    async def _load(self) -> bool:
        """Load the task's loop, reward, environment and tools.

        Returns False and sets the outcome INVALID_TASK if one of them cannot be loaded.
        """
        parts, task, assignment = self._parts, self._task, self._assignment
        try:
            self._loop = await parts.loops.get(task.loop)
            if isinstance(task.reward, Judge):
                self._reward_function = function_of(task.reward)
            elif task.reward is not None:
                self._reward_function = await parts.rewards.get(task.reward)
            for name in task.tool_setup:
                if name not in (*task.tools, task.environment):
                    raise InvalidRequest(
                        f"tool_setup names {name!r}, but the task's tools are {[*task.tools]} and its environment "
                        f"is {task.environment!r}",
                        param="tool_setup",
                    )
            environment = None
            if task.environment is not None:
                loaded = await parts.environments.get(task.environment)
                environment = replace(loaded, models=parts.models, task=task)
            seed = trajectory_seed(assignment)
            scope = parts.toolbox.open(task.tools, assignment.assignment_id, seed, environment)
        except AgentLoopError as error:
            self._outcome = _Outcome(StopReason.INVALID_TASK, f"{error.code}: {error}")
            return False
        self._scope = scope
        if assignment.staleness is not None:
            self._guard = StalenessGuard(assignment.staleness, parts.newest[assignment.adapter])
        return True

    async def _to_end(self) -> None:
        """Run and score the trajectory, and close its tools."""
        assert self._scope is not None, "not loaded"
        function = self._reward_function
        try:
            await self._drive(self._scope)
            self._apply_staleness_policy()
            # Free the tools' resources before a slow reward, such as a judge, unless the reward uses the tools.
            if function is None or not (takes(function, "tools") or takes(function, "environment")):
                await self._scope.close()
            await self._score(self._scope)
        finally:
            await self._scope.close()

    async def _drive(self, scope: ToolScope) -> None:
        """Open the tools, run the loop and collect the tools' scores."""
        self._journal, opening_s = await self._begin_journal(), 0.0
        if scope.has_openings or (self._journal is not None and self._journal.kept is not None):
            started = time.perf_counter()
            failed = await self._open_tools(scope)
            if failed is not None:
                self._outcome = failed
                return
            opening_s = time.perf_counter() - started
        self._ctx = self._context(scope)
        self._ctx.tool_s = opening_s
        self._outcome = await self._run_loop(self._ctx)
        self._ended_at = time.perf_counter()
        # A failed or cancelled trajectory has no score: it would not measure the policy.
        if self._has_ended_well:
            started = time.perf_counter()
            self._tools_score, self._tools_problem = await scope.score(self._task, self._ctx.messages)
            self._reward_s = time.perf_counter() - started

    async def _open_tools(self, scope: ToolScope) -> _Outcome | None:
        """Open the tools, until the client cancels. Returns the outcome if the trajectory ends here, else None."""
        opening = asyncio.create_task(
            self._open_or_restore(scope), name=f"open tools of {self._assignment.assignment_id}"
        )
        try:
            await asyncio.wait({opening, self._cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return _Outcome(StopReason.CANCELLED)
            opening.result()
        except InvalidRequest as error:
            return _Outcome(StopReason.INVALID_TASK, f"{error.code}: {error}")
        except ToolLost as error:
            return _Outcome(StopReason.TOOL_FAILED, str(error))
        finally:
            # Wait for the end, so that no session is opened while the scope is closed.
            opening.cancel()
            await asyncio.wait({opening})
        return None

    async def _open_or_restore(self, scope: ToolScope) -> None:
        """Open the tools and restore their state from the journal of a lost worker.

        If the state cannot be restored, the trajectory restarts from its first turn.
        """
        await scope.open(self._task)
        if self._journal is not None and self._journal.kept is not None:
            try:
                await scope.restore(self._journal.kept.states)
            except ToolError as error:
                self._journal.restart_reason = f"a tool's state cannot be restored: {error.message}"
                self._log.warning("trajectory_begins_again", reason=self._journal.restart_reason)
                self._journal.kept = None

    def _apply_staleness_policy(self) -> None:
        """Apply the run's staleness policy to a trajectory that is complete or was stopped for staleness.

        With MASK and FINISH, a complete trajectory keeps its stop reason and its reward.
        """
        is_stopped = self._outcome.stop_reason is StopReason.STALE
        if self._guard is None or self._ctx is None or not (self._is_complete or is_stopped):
            return
        settled = [self._guard.settle(one.path) for one in self._ctx.contexts.values()]
        if OnStale.DROP in settled:
            self._outcome = _Outcome(
                StopReason.STALE, "dropped: its weight versions exceed the run's staleness limit", is_dropped=True
            )

    async def _score(self, scope: ToolScope) -> None:
        """Create the record with the scores of the loop, the tools and the task's reward function.

        The reward function receives the record with the other scores, and its result overrides them. A failed
        trajectory keeps only the metrics that its loop set.
        """
        if self._ctx is None or self._outcome.is_dropped:
            return
        record, base, problems = self._unscored_record(), episode_score(self._ctx.contexts), [self._tools_problem]
        try:
            base = base.joined(self._tools_score) if self._has_ended_well else Score(metrics=base.metrics)
            record = scored(record, base)
        except RewardError as error:
            problems.append(str(error))
        if self._reward_function is not None and self._has_ended_well:
            started = time.perf_counter()
            reward_score, problem = await self._run_reward(self._reward_function, record, scope)
            self._reward_s += time.perf_counter() - started
            problems.append(problem)
            # If the reward function fails, set no reward: those of the loop and the tools may have another scale.
            record = replace(record, reward=None) if reward_score is None else scored(record, reward_score)
        reward_error = "; ".join(problem for problem in problems if problem) or None
        self._record = judged(replace(record, reward_error=reward_error))

    async def _run_reward(
        self, function: RewardFunction, record: Trajectory, scope: ToolScope
    ) -> tuple[Score | None, str | None]:
        """Run the reward function. Returns its score, or None and the error."""
        try:
            tools = await scope.sessions() if takes(function, "tools") else {}
        except AgentLoopError as error:
            return None, str(error)
        timeout_s = self._task.limits.reward_timeout_s
        if isinstance(self._task.reward, Judge) or (isinstance(function, Weighted) and function.has_judge):
            timeout_s = max(timeout_s, JUDGE_TIMEOUT_S)
        models, environment = self._parts.models, scope.environment
        return await score(function, self._task, record, timeout_s, tools, models, environment)

    def _final_record(self) -> Trajectory:
        """Return the terminal record. The record of a dropped trajectory has no paths and no score."""
        return self._with_times(self._record or self._unscored_record())

    def _failure_record(self, error: BaseException) -> Trajectory:
        """Return a record without messages and paths, for a trajectory whose own record cannot be created."""
        self._outcome = _Outcome(StopReason.LOOP_FAILED, f"cannot create the record: {error_line(error)}")
        record = unmade_record(self._assignment, self._outcome.stop_reason, self._outcome.error or "", 0.0, "")
        return self._with_times(record)

    def _with_times(self, record: Trajectory) -> Trajectory:
        ctx = self._ctx
        stopwatch = ctx.stopwatch if ctx else self._stopwatch
        contexts = list(ctx.contexts.values()) if ctx else []
        calls = [call for one in contexts for call in one.tool_calls]
        times = TrajectoryTimes(
            began_at=stopwatch.began_at,
            ended_us=stopwatch(),
            worker=self._parts.reporter.process_id,
            tool_calls=tuple(sorted(calls, key=lambda call: call.begun_us)),
            moves=ctx.moves if ctx else (),
            lost_tokens=self._lost_tokens(),
        )
        timings = Timings(
            queue_s=self._assignment.queue_s,
            generate_s=sum(one.generate_s for one in contexts),
            tool_s=sum(one.tool_s for one in contexts),
            reward_s=self._reward_s,
            total_s=time.perf_counter() - self._started + (ctx.spent_before_s if ctx else 0.0),
            unavailable_s=ctx.deadline.unavailable_s if ctx else 0.0,
            engine_s=ctx.engine_s if ctx else 0.0,
        )
        return replace(record, timings=timings, times=times)

    def _lost_tokens(self) -> dict[LossCause, int]:
        """Return the number of discarded tokens of this and earlier attempts, by cause."""
        ctx = self._ctx
        lost = Counter(self._assignment.lost_tokens if ctx is None else ctx.lost_tokens)
        if ctx is not None:
            lost[LossCause.STALE] += ctx.budget.num_sampled_tokens if self._outcome.is_dropped else 0
        return dict(+lost)

    def _unscored_record(self) -> Trajectory:
        """Return the record without score and timings."""
        assignment, outcome, limit = self._assignment, self._outcome, self._assignment.staleness
        ctx = None if outcome.is_dropped else self._ctx
        paths = episode_paths(ctx.contexts) if ctx else ()
        contexts = list(ctx.contexts.values()) if ctx else []
        messages = ctx.messages if ctx else self._task.messages
        trajectory = Trajectory(
            task_id=self._task.task_id,
            group_id=assignment.group_id,
            sample_index=assignment.sample_index,
            paths=paths,
            task_messages=() if paths else messages,
            constraints={key: text for one in contexts for key, text in one.path.constraints.items()},
            stop_reason=outcome.stop_reason,
            is_complete=self._is_complete,
            error=outcome.error,
            num_tool_calls=ctx.budget.num_tool_calls if ctx else 0,
            num_tool_errors=sum(one.num_tool_errors for one in contexts),
            attempt=assignment.attempt,
            rollout_id=assignment.rollout_id,
            num_masked_tokens=sum(path.num_masked_tokens for path in paths),
            num_stale_attempts=assignment.num_stale_attempts,
            max_staleness=limit.max_staleness if limit is not None else None,
            num_resampled_turns=ctx.num_resampled_turns if ctx else 0,
            thinking=self._parts.renderer.facts.thinking,
            num_resumed_turns=ctx.num_resumed_turns if ctx else 0,
            loop=self._task.loop,
            traceparent=assignment.traceparent,
            trace_link=assignment.trace_link,
            adapter=assignment.adapter,
            end_reason=self._end_reason,
            credit=self._task.credit,
            restart_reason="" if self._journal is None else self._journal.restart_reason,
        )
        return ended(trajectory)

    @property
    def _end_reason(self) -> str:
        end = None if self._scope is None else self._scope.ended
        return "" if end is None else capped(str(end.reason), MAX_REASON_BYTES)[0]

    @property
    def _has_ended_well(self) -> bool:
        return self._outcome.stop_reason not in FAILURES | {StopReason.CANCELLED, StopReason.STALE}

    @property
    def _is_complete(self) -> bool:
        if self._ctx is None or any(one.has_lost_call for one in self._ctx.contexts.values()):
            return False
        return self._has_ended_well

    def _context(self, scope: ToolScope) -> LoopContext:
        shared, task, assignment = self._parts, self._task, self._assignment
        engine = LeasedEngine(
            shared.connect,
            self._lease,
            vocab_size=shared.vocab_size,
            max_attempts=shared.config.turn_attempts,
            newest=shared.newest[assignment.adapter],
            tally=shared.tally,
            adapter=assignment.adapter,
        )
        task = replace(task, top_k=task.top_k or shared.config.default_top_k)
        wanted = task.limits.max_context_tokens
        context = shared.max_context_tokens if wanted is None else min(wanted, shared.max_context_tokens)
        trajectory_id = f"{assignment.assignment_id}@{assignment.attempt}"
        return LoopContext(
            task,
            trajectory_id,
            engine=engine,
            reader=shared.reader,
            renderer=shared.renderer,
            tools=scope,
            budget=Budget(task.limits, context),
            kv_policy=shared.config.kv_policy,
            seed=None if task.seed is None else trajectory_seed(assignment),
            turn_timeout_s=shared.config.turn_timeout_s,
            guard=self._guard,
            placer=shared.placer,
            journal=self._journal,
            stopwatch=self._stopwatch,
            models=shared.models,
            lost_before=assignment.lost_tokens,
            trace_of=partial(turn_context, shared.config.traces, trajectory_id, assignment.traceparent),
        )

    async def _begin_journal(self) -> RunJournal | None:
        """Open the run's journal. Returns None without a journal, or if the loop cannot resume from one."""
        parts, task = self._parts, self._task
        scope = self._scope
        if parts.journal is None or scope is None or not isinstance(self._loop, ResumableLoop):
            return None
        journal = await parts.journal.begin(
            self._assignment,
            lambda: fingerprint(task, scope.definitions, parts.renderer),
        )
        self._assignment = replace(self._assignment, attempt=journal.attempt)
        return journal

    async def forget(self) -> None:
        """Schedule the removal of the journals of this run and of the sample's earlier runs."""
        if self._journal is not None:
            self._journal.forget()

    async def _run_loop(self, ctx: LoopContext) -> _Outcome:
        """Run the loop in a separate task and return its outcome."""
        if self._cancelled.done():
            return _Outcome(StopReason.CANCELLED)
        context, user_tasks = contextvars.copy_context(), self._parts.user_tasks
        name = f"loop {self._task.loop} of {self._assignment.assignment_id}"
        task = asyncio.create_task(self._loop_outcome(ctx), name=name, context=context)
        self._loop_task = task
        try:
            await self._until_over(task, ctx)
        except asyncio.CancelledError:  # shutdown: the coordinator assigns the trajectory to another worker
            if not self._cancelled.done():
                self._cancelled.set_result(None)  # so that `_loop_outcome` does not log a failed loop
            await user_tasks.stop([task], min(self._parts.config.grace_s, SHUTDOWN_GRACE_S))
            raise
        finally:
            ctx.close()
            user_tasks.abandon([task])
        # Take over the log fields that the loop's task has bound (turn, replica, version).
        bind_contextvars(**context.run(get_contextvars))
        if task.done():
            return task.result()
        stop_reason = StopReason.CANCELLED if self._cancelled.done() else StopReason.DEADLINE
        return _Outcome(
            stop_reason,
            f"the loop ignored its cancellation for {self._parts.config.grace_s:g} s and was abandoned: let "
            "CancelledError pass through",
        )

    async def _until_over(self, task: asyncio.Task[_Outcome], ctx: LoopContext) -> None:
        """Wait until the loop has ended or has ignored its cancellation for the grace period."""
        loop, grace_s = asyncio.get_running_loop(), self._parts.config.grace_s
        ends: tuple[asyncio.Future[Any], ...] = (task, self._cancelled)
        while not any(end.done() for end in ends):
            deadline_at = ctx.deadline.enforced_at  # moves: unavailable time does not count
            left_s = grace_s if deadline_at is None else deadline_at + grace_s - loop.time()
            if left_s <= 0:
                return
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=grace_s)

    async def _loop_outcome(self, ctx: LoopContext) -> _Outcome:
        """Run the loop and return its outcome. Raises nothing."""
        assert self._loop is not None, "not loaded"
        try:
            kept = None if self._journal is None else self._journal.kept
            # A resumed trajectory has only the rest of its deadline.
            left_s = None if kept is None else kept.left_s
            timeout_s = self._task.limits.timeout_s if left_s is None else left_s
            async with Deadline.moving(timeout_s, self._parts.config.max_unavailable_s) as ctx.deadline:
                if kept is not None and isinstance(self._loop, ResumableLoop):
                    ctx.resume(kept, self._assignment.num_sampled_before)
                    await self._loop.resume(self._task, ctx)
                else:
                    await self._loop.run(self._task, ctx)
        except LimitReached as limit:
            return _Outcome(limit.reason)
        except ToolLost as error:
            return _Outcome(StopReason.TOOL_FAILED, str(error))
        except ContextLengthExceeded as error:
            return _Outcome(StopReason.PROMPT_TOO_LONG, str(error))
        except BaseException as error:  # SystemExit or a CancelledError raised by user code must not leave the task
            if isinstance(error, EndEpisode) and self._scope is not None:  # raised by the loop or by a tool
                self._scope.end(error)
                return _Outcome(StopReason.COMPLETED)
            if isinstance(error, asyncio.CancelledError) and self._cancelled.done():
                return _Outcome(StopReason.CANCELLED)
            if isinstance(error, TimeoutError) and ctx.deadline.has_ended_task:
                return _Outcome(StopReason.DEADLINE)
            if isinstance(error, DeadlineExceeded) or (isinstance(error, AgentLoopError) and error.retryable):
                return _Outcome(StopReason.ENGINE_FAILED, f"{error.code}: {error}")
            self._log.error("loop_failed", error=error_line(error), exception=error_trace(error))
            return _Outcome(StopReason.LOOP_FAILED, error_line(error))
        return _Outcome(StopReason.COMPLETED)


def unmade_record(
    assignment: Assignment, stop_reason: StopReason, error: str, total_s: float, worker: str
) -> Trajectory:
    """Return a terminal record from the assignment alone, without turns."""
    return Trajectory(
        task_id=assignment.task.task_id,
        group_id=assignment.group_id,
        sample_index=assignment.sample_index,
        paths=(),
        task_messages=assignment.task.messages,
        stop_reason=stop_reason,
        is_complete=False,
        error=error,
        attempt=assignment.attempt,
        rollout_id=assignment.rollout_id,
        num_stale_attempts=assignment.num_stale_attempts,
        timings=Timings(queue_s=assignment.queue_s, total_s=total_s),
        times=TrajectoryTimes(time.time() - total_s, round(total_s * 1e6), worker),
        loop=assignment.task.loop,
        traceparent=assignment.traceparent,
        trace_link=assignment.trace_link,
        adapter=assignment.adapter,
    )


def trajectory_seed(assignment: Assignment) -> int:
    """Return the seed of a sample, derived from the task's id, its seed and the sample index.

    It differs between samples and is the same for all attempts at a sample.
    """
    name = f"{assignment.task.task_id}/{assignment.sample_index}/{assignment.task.seed}"
    return zlib.crc32(name.encode())
