"""Runs the tools of trajectories within deadlines, size limits and concurrency limits.

A `Toolbox` belongs to a worker process and holds one object and one semaphore per tool. A `ToolScope` belongs to
one trajectory and holds its sessions.

Invariants: every session is closed exactly once, however its trajectory ends. Every call has exactly one result, in
call order. Failures of tools are results; only ToolLost ends the trajectory. A timed-out call that ignores its
cancellation for `grace_s` is abandoned: its slot is released and its session is replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import structlog

from agentloop.concurrency.aio import UserTasks, num_abandoned_threads
from agentloop.concurrency.clock import Stopwatch
from agentloop.errors import (
    AgentLoopError,
    InvalidRequest,
    InvariantBroken,
    RewardError,
    ToolError,
    ToolLost,
    error_line,
    error_trace,
)
from agentloop.rollout.environment import LoadedEnvironment, OpenEnvironment
from agentloop.rollout.tool import (
    EndEpisode,
    OpeningSession,
    ScoringSession,
    SnapshotSession,
    Tool,
    ToolSession,
    ToolSpec,
)
from agentloop.score import Score, score_of
from agentloop.types import JSON, Message, RolloutTask, ToolCall, ToolCallStatus, ToolOutcome, ToolResult

MAX_COUNTED_CHARS = 1_000_000
MAX_SNAPSHOT_BYTES = 16 << 20
MAX_REASON_BYTES = 1024
REACTION = "react"  # the call id under which the reply of an environment's user is journaled

KeepAnswers: TypeAlias = Callable[[tuple[ToolResult, ...], Mapping[str, bytes | None]], None]
"""Receives final results to journal, and the snapshots by tool name that belong to them."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _OpenSession:
    """A session in use. After a timeout it is retired: it gets no new calls and is closed after its last one."""

    session: ToolSession
    num_running: int = 0
    is_retired: bool = False
    opening: asyncio.Task[InvalidRequest | ToolLost | None] | None = None  # runs `open`; its result is the error


@dataclass(frozen=True, slots=True)
class _Failed:
    """An exception or a timeout of user code, as a value."""

    error: BaseException
    is_late: bool = False

    @property
    def line(self) -> str:
        """The failure as one line for a record."""
        return self.error.message if isinstance(self.error, AgentLoopError) else error_line(self.error)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The result of a call before it is truncated."""

    content: str
    outcome: ToolOutcome = ToolOutcome.OK


class Toolbox:
    """All tools of one worker process."""

    def __init__(self, tools: Iterable[Tool], *, grace_s: float = 1.0, close_timeout_s: float = 5.0) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.spec.name in self._tools:
                raise InvalidRequest(f"two tools are named {tool.spec.name!r}: rename one of them", param="tools")
            self._tools[tool.spec.name] = tool
        self._slots: dict[tuple[str, str], asyncio.Semaphore] = {}  # by environment and name
        self._grace_s = grace_s
        self._close_timeout_s = close_timeout_s
        self._scopes: set[ToolScope] = set()
        self._user_tasks = UserTasks("tool")
        self._closing: asyncio.Task[None] | None = None

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned tool calls and closes that still run, plus the process's abandoned threads."""
        return self._user_tasks.num_abandoned + num_abandoned_threads()

    def definitions(self, names: Sequence[str]) -> list[dict[str, JSON]]:
        """Return the definitions of tools in the order of `names`. Raises InvalidRequest for an unknown name."""
        return [tool.spec.definition() for tool in self._declared(names, None).values()]

    def own_s(self, names: Sequence[str]) -> float:
        """Return the maximum seconds that these tools take to open, score and close, outside the loop's time."""
        # The tools open concurrently, then score concurrently, then close: each phase takes as long as its slowest.
        specs = [self._tools[name].spec for name in names if name in self._tools]
        lives = [[spec.open_timeout_s, spec.score_timeout_s, spec.close_timeout_s] for spec in specs]
        return sum(max((life[phase] or 0.0 for life in lives), default=0.0) for phase in range(3))

    def open(
        self, names: Sequence[str], trajectory_id: str, seed: int, environment: LoadedEnvironment | None = None
    ) -> ToolScope:
        """Return the tools of one trajectory.

        The caller must close them. Raises InvalidRequest for unknown names.
        """
        if self._closing is not None:
            raise InvariantBroken("the toolbox is closed")
        scope = ToolScope(self, self._declared(names, environment), trajectory_id, seed, environment)
        self._scopes.add(scope)
        return scope

    async def close(self) -> None:
        """Close all scopes and tools, each within a deadline.

        Idempotent. A cancelled call still finishes closing.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_all())
        await asyncio.shield(self._closing)

    async def _close_all(self) -> None:
        await asyncio.gather(*(scope.close() for scope in list(self._scopes)))
        closes = (self.bounded_close(tool.close, None, tool=name) for name, tool in self._tools.items())
        await asyncio.gather(*closes)
        await self._user_tasks.stop_kept(self._grace_s)

    def _declared(self, names: Sequence[str], environment: LoadedEnvironment | None) -> dict[str, Tool]:
        for index, name in enumerate(names):
            if name not in self._tools:
                raise InvalidRequest(f"unknown tool {name!r}. Available: {_listed(self._tools)}", param="tools")
            if name in names[:index]:
                raise InvalidRequest(f"tool {name!r} is listed twice in the task's tools", param="tools")
        declared = {name: self._tools[name] for name in names}
        for tool in () if environment is None else environment.tools().values():
            if declared.setdefault(tool.spec.name, tool) is not tool:
                raise InvalidRequest(
                    f"the task's tools and its environment both have a tool {tool.spec.name!r}: remove one of them",
                    param="tools",
                )
        return declared

    # The methods below are for ToolScope.

    def slot(self, spec: ToolSpec) -> asyncio.Semaphore:
        """Return the semaphore that limits the tool's concurrent calls over all trajectories."""
        key = spec.environment, spec.name
        if key not in self._slots:
            self._slots[key] = asyncio.Semaphore(spec.max_concurrency)
        return self._slots[key]

    def forget(self, scope: ToolScope) -> None:
        """Remove a closed scope."""
        self._scopes.discard(scope)

    async def stop(self, tasks: Sequence[asyncio.Task[Any]], **about: str) -> None:
        """Cancel tasks and abandon those that still run after the grace period."""
        await self._user_tasks.stop(tasks, self._grace_s, **about)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold an abandoned task until it ends, so that its exception is retrieved."""
        self._user_tasks.keep(task)

    async def bounded_close(
        self, close: Callable[[], Awaitable[None]], timeout_s: float | None, **about: str
    ) -> None:
        """Run `close` with a timeout (None: the toolbox's default). Errors and timeouts are logged, not raised."""

        async def attempt() -> None:
            try:
                await close()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # user code may raise SystemExit, which would stop the event loop
                _log.warning("tool_close_failed", error=error_line(error), **about)

        task = asyncio.create_task(attempt(), name="tool-close")
        try:
            await asyncio.wait({task}, timeout=self._close_timeout_s if timeout_s is None else timeout_s)
        finally:
            self.keep(task)
        if not task.done():
            await self.stop([task], during="close", **about)


class ToolScope:
    """The tools of one trajectory. `close` must be called, also after errors.

    The tools of an environment share one session, the environment's, and their calls run one at a time.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        tools: Mapping[str, Tool],
        trajectory_id: str,
        seed: int,
        environment: LoadedEnvironment | None = None,
    ) -> None:
        self.ended: EndEpisode | None = None  # raised by a tool, the user or the loop
        self._toolbox = toolbox
        self._tools = tools
        self._environment = environment
        self._owners = {name: tool for name, tool in tools.items() if not tool.spec.environment}
        if environment is not None:
            self._owners[environment.spec.name] = environment
        self._turn = asyncio.Lock()  # serializes the environment's calls
        self._trajectory_id = trajectory_id
        self._seed = seed
        self._task: RolloutTask | None = None  # the argument of the sessions' `open`
        self._sessions: dict[str, _OpenSession] = {}
        self._can_resume = True
        self._lost: ToolLost | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._calls: dict[str, tuple[str, float]] = {}  # running calls by id: the tool's name and the start time
        self._closing: asyncio.Task[None] | None = None

    @property
    def longest_call(self) -> tuple[str, float] | None:
        """The longest-running call as its tool's name and its seconds so far; None if no call runs."""
        if not self._calls:
            return None
        name, since = min(self._calls.values(), key=lambda running: running[1])
        return name, time.monotonic() - since

    @property
    def has_openings(self) -> bool:
        """True if any session has to be opened before the loop starts."""
        return any(tool.spec.open_timeout_s is not None for tool in self._owners.values())

    @property
    def definitions(self) -> list[dict[str, JSON]]:
        """The definitions of the tools that the prompt lists (`is_listed`), with the environment's tools last."""
        return [tool.spec.definition() for tool in self._tools.values() if tool.spec.is_listed]

    @property
    def environment(self) -> Any:
        """The environment instance; None if the task has no environment or it was not created yet."""
        open_ = self._sessions.get(self._environment.spec.name) if self._environment is not None else None
        return open_.session.environment if open_ and isinstance(open_.session, OpenEnvironment) else None

    @property
    def can_resume(self) -> bool:
        """False after the snapshot of a session has failed: another worker cannot continue this trajectory."""
        return self._can_resume

    async def open(self, task: RolloutTask) -> None:
        """Open the sessions that have an `open`, concurrently and each within its deadline, before the loop starts.

        Raises InvalidRequest if a session rejects the task, and ToolLost if a session cannot be opened.
        """
        self._task = task
        tools = [tool for tool in self._owners.values() if tool.spec.open_timeout_s is not None]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._opened_in_turn(tool)) for tool in tools]
        for opening in tasks:
            if (error := opening.result()) is not None:
                raise error

    async def sessions(self) -> dict[str, ToolSession]:
        """Return the tools' sessions by name, without the environment's. Sessions not used before are opened.

        Raises InvalidRequest and ToolLost.
        """
        sessions: dict[str, ToolSession] = {}
        for name, tool in self._owners.items():
            open_ = self._made(tool)
            error = open_ if isinstance(open_, ToolLost) else await self._opened(tool, open_)
            if error is not None:
                raise error
            if tool is not self._environment:
                sessions[name] = self._sessions[name].session
        return sessions

    async def run(
        self,
        calls: Sequence[ToolCall],
        max_response_bytes: int,
        keep: KeepAnswers | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> list[ToolResult]:
        """Run calls concurrently and return one result per call, in call order.

        A failed, timed-out or unknown call has a result with `is_error` and the content `Error: <message>`. A tool
        that ends the episode sets `ended`. Raises ToolLost, after all calls have ended, if a tool is lost for this
        trajectory; a cancellation cancels the running calls.

        `keep` receives results to journal: those of stateless tools one by one, those of a tool with state after
        the last of them, together with its snapshot. `stopwatch` gives the start times of the results.
        """
        if self._closing is not None:
            raise InvariantBroken("the tool scope is closed")
        async with asyncio.TaskGroup() as group:
            results_of = (self._result(call, max_response_bytes, keep, stopwatch) for call in calls)
            tasks = [group.create_task(result) for result in results_of]
        results = [task.result() for task in tasks]
        if self._lost is not None:  # only now, so that every call has its result first
            raise self._lost
        # Do not journal the call that ended the episode: after a resume it must run again to end it there too.
        if keep is not None and self.ended is None:
            await self._keep_states(results, keep)
        return results

    async def react(self, messages: Sequence[Message], keep: KeepAnswers | None = None) -> str | None:
        """Return the reply of the environment's user; None if it has no reply or there is no environment.

        `keep` receives the reply as a result with the call id REACTION, and the snapshot after it. Raises
        EndEpisode, and ToolLost if the environment fails or times out.
        """
        if (owner := self._environment) is None:
            return None
        async with self._turn:
            if isinstance(open_ := self._made(owner), ToolLost):
                raise open_
            session = cast(OpenEnvironment, open_.session)
            reply = await self._bounded(owner, lambda: session.react(messages), owner.kind.react_timeout_s)
            if isinstance(reply, _Failed) and isinstance(reply.error, EndEpisode):
                raise self.end(reply.error)
            if isinstance(reply, _Failed) or not isinstance(reply, str | None):
                problem = (
                    reply.line
                    if isinstance(reply, _Failed)
                    else f"it returned a {type(reply).__name__} instead of a str or None"
                )
                raise ToolLost(f"react of {owner.spec.name!r}: {problem}")
            if keep is not None and reply is not None:
                await self._keep_state(owner, (ToolResult(REACTION, owner.spec.name, reply),), keep)
            return cast("str | None", reply)

    def end(self, by: EndEpisode) -> EndEpisode:
        """Record the end of the episode. Returns the first one recorded."""
        self.ended = by if self.ended is None else self.ended
        return self.ended

    async def restore(self, states: Mapping[str, bytes]) -> None:
        """Restore sessions from snapshots by tool name.

        Raises ToolError if a snapshot cannot be restored; all sessions are then replaced by new, opened ones.
        Raises InvalidRequest and ToolLost if those cannot be opened.
        """
        try:
            for name, state in states.items():
                await self._restore(self._owners[name], state)
        except ToolError:
            # Some sessions may be restored already: replace all of them, so that none keeps the old state.
            await self._close_sessions()
            if self._task is not None:
                await self.open(self._task)
            raise

    async def _restore(self, tool: Tool, state: bytes) -> None:
        open_ = self._made(tool)
        if isinstance(open_, ToolLost):
            raise ToolError(open_.message)
        session = open_.session
        if not isinstance(session, SnapshotSession):
            raise ToolError(f"a {type(session).__name__} has no restore()")
        done = await self._bounded(tool, lambda: session.restore(state), tool.spec.timeout_s)
        if isinstance(done, _Failed):
            raise ToolError(done.line)

    async def score(self, task: RolloutTask, messages: Sequence[Message]) -> tuple[Score, str | None]:
        """Return the reward of the EndEpisode, or the joined scores of all scoring sessions, and the first problem.

        The sessions score concurrently, each within its deadline.
        """
        if self.ended is not None and self.ended.reward is not None:
            try:
                return score_of(self.ended.reward), None
            except RewardError as error:
                return Score(), f"EndEpisode: {error}"
        scoring = {tool: s for tool in self._owners.values() if (s := tool.spec.score_timeout_s) is not None}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._score_of(tool, task, messages, s)) for tool, s in scoring.items()]
        joined, problem = Score(), None
        for tool, scored in zip(scoring, tasks, strict=True):
            outcome = scored.result()
            try:
                if isinstance(outcome, RewardError):
                    raise outcome
                joined = joined.joined(outcome)
            except RewardError as error:
                problem = problem or f"tool {tool.spec.name!r}: {error}"
        return joined, problem

    async def close(self) -> None:
        """Stop running calls and close all sessions. Idempotent. A cancelled call still finishes closing."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_all())
        await asyncio.shield(self._closing)

    async def _close_all(self) -> None:
        try:
            await self._close_sessions()
        finally:
            self._toolbox.forget(self)

    async def _close_sessions(self) -> None:
        await self._toolbox.stop(list(self._running), trajectory_id=self._trajectory_id)
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(self._close_session(name, open_) for name, open_ in sessions.items()))

    async def _opened_in_turn(self, tool: Tool) -> InvalidRequest | ToolLost | None:
        async with self._toolbox.slot(tool.spec):
            open_ = self._made(tool)
            return open_ if isinstance(open_, ToolLost) else await self._opened(tool, open_)

    async def _opened(self, tool: Tool, open_: _OpenSession) -> InvalidRequest | ToolLost | None:
        """Open a session, once for all callers. Returns the error, or None when it is open."""
        if tool.spec.open_timeout_s is None:
            return None
        if open_.opening is None:
            opening = self._opening(tool, open_.session, tool.spec.open_timeout_s)
            open_.opening = asyncio.create_task(opening, name=f"open {tool.spec.name} {self._trajectory_id}")
            self._running.add(open_.opening)
            open_.opening.add_done_callback(self._running.discard)
        await asyncio.wait({open_.opening})
        return ToolLost("the trajectory ended") if open_.opening.cancelled() else open_.opening.result()

    async def _opening(
        self, tool: Tool, session: ToolSession, timeout_s: float
    ) -> InvalidRequest | ToolLost | None:
        name, task = tool.spec.name, self._task
        if task is None:
            raise InvariantBroken("the tool scope was not opened")
        if not isinstance(session, OpeningSession):
            return ToolLost(
                f"tool {name!r} cannot be opened: its session {type(session).__name__} has no open(), but the tool "
                "sets open_timeout_s"
            )
        result = await self._bounded(tool, lambda: session.open(task), timeout_s)
        if not isinstance(result, _Failed):
            return None
        if isinstance(result.error, InvalidRequest):
            return InvalidRequest(f"tool {name!r}: {result.error.message}", param="tool_setup")
        return ToolLost(f"tool {name!r} cannot be opened: {result.line}")

    async def _score_of(
        self, tool: Tool, task: RolloutTask, messages: Sequence[Message], timeout_s: float
    ) -> Score | RewardError:
        """Return the score of one tool's session, or the error: raising it would cancel the other tools' scores."""

        async def session_score() -> Score:
            open_ = self._session(tool)
            if (error := await self._opened(tool, open_)) is not None:
                raise RewardError(error.message)
            if isinstance(open_.session, OpenEnvironment):
                return score_of(await open_.session.score_of(task, messages))
            if not isinstance(open_.session, ScoringSession):
                raise RewardError(
                    f"its session {type(open_.session).__name__} has no score(), but the tool sets score_timeout_s"
                )
            return score_of(await open_.session.score(task))

        async with self._toolbox.slot(tool.spec):
            result = await self._bounded(tool, session_score, timeout_s, late="no score within", during="score")
        if not isinstance(result, _Failed):
            return cast(Score, result)
        return RewardError(result.line)

    def _has_state(self, name: str) -> bool:
        return name in self._tools and self._tools[name].spec.has_state

    async def _keep_states(self, results: Sequence[ToolResult], keep: KeepAnswers) -> None:
        """Journal the results of tools with state, with their snapshots; None for a session that was retired."""
        by_owner: dict[str, list[ToolResult]] = {}
        for result in results:
            if self._has_state(result.name):
                by_owner.setdefault(self._owner(self._tools[result.name]).spec.name, []).append(result)
        for name, answers in by_owner.items():
            await self._keep_state(self._owners[name], tuple(answers), keep)

    async def _keep_state(self, owner: Tool, answers: tuple[ToolResult, ...], keep: KeepAnswers) -> None:
        if not self._can_resume:
            return
        state: bytes | None = None
        if (open_ := self._sessions.get(owner.spec.name)) is not None:
            state = await self._snapshot(owner, open_.session)
            if state is None:
                self._can_resume = False
                return
        keep(answers, {owner.spec.name: state})

    async def _snapshot(self, tool: Tool, session: ToolSession) -> bytes | None:
        """Return a session's snapshot; None if it has no snapshot, or if taking one fails."""
        if not isinstance(session, SnapshotSession):
            return None
        state = await self._bounded(tool, session.snapshot, tool.spec.timeout_s)
        if isinstance(state, bytes) and len(state) <= MAX_SNAPSHOT_BYTES:
            return state
        reason = (
            state.line
            if isinstance(state, _Failed)
            else f"snapshot() returned {type(state).__name__}, expected at most {MAX_SNAPSHOT_BYTES} bytes"
        )
        _log.warning("no_snapshot", tool=tool.spec.name, trajectory_id=self._trajectory_id, error=reason)
        return None

    def _made(self, tool: Tool) -> _OpenSession | ToolLost:
        try:
            return self._session(tool)
        except BaseException as error:  # no await: even a CancelledError was raised by the tool's own code
            return ToolLost(f"tool {tool.spec.name!r} has no session: {error_line(error)}")

    async def _bounded(
        self,
        tool: Tool,
        work: Callable[[], Coroutine[Any, Any, Any]],
        timeout_s: float,
        *,
        late: str = "timed out after",
        on_late: Callable[[], None] = lambda: None,
        **about: str,
    ) -> Any:
        """Run user code with a timeout. Returns its result or `_Failed`; raises only our own cancellation.

        At the timeout, the code is cancelled, and abandoned if it ignores the cancellation.
        """
        name = tool.spec.name
        task = asyncio.create_task(_caught(work), name=f"{name} {self._trajectory_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            if task.done():
                return _Failed(ToolError("cancelled")) if task.cancelled() else task.result()
            on_late()
            await self._toolbox.stop([task], tool=name, trajectory_id=self._trajectory_id, **about)
            return _Failed(ToolError(f"{late} {timeout_s:g} s"), is_late=True)
        finally:
            if not task.done():  # this call was cancelled, or the code was abandoned
                task.cancel()
                self._toolbox.keep(task)

    async def _result(
        self, call: ToolCall, max_response_bytes: int, keep: KeepAnswers | None, stopwatch: Stopwatch | None
    ) -> ToolResult:
        started_s = time.monotonic()
        max_bytes = max_response_bytes
        if call.status is ToolCallStatus.MALFORMED:
            answer = _Answer(call.error or "malformed tool call", ToolOutcome.ERROR)
        elif (tool := self._tools.get(call.name)) is None:
            names = (name for name, tool in self._tools.items() if tool.spec.is_listed)
            unknown = f"unknown tool {call.name!r}. Available: {_listed(names)}"
            answer = _Answer(unknown, ToolOutcome.UNKNOWN)
        else:
            max_bytes = min(max_bytes, tool.spec.max_output_bytes)
            turn = self._turn if tool.spec.environment else nullcontext()
            async with turn, self._toolbox.slot(tool.spec):
                # The wait for the slot does not count. It is bounded, because each holder has a timeout.
                started_s = time.monotonic()
                self._calls[call.id] = call.name, started_s
                try:
                    answer = await self._run_tool(tool, call)
                finally:
                    self._calls.pop(call.id, None)
        is_error, is_lost = answer.outcome is not ToolOutcome.OK, answer.outcome is ToolOutcome.LOST
        if is_lost and self._lost is None:
            self._lost = ToolLost(answer.content)
        text = f"Error: {answer.content}" if is_error else answer.content
        content, is_truncated = capped(text, max_bytes)
        duration_s = time.monotonic() - started_s
        begun_us = 0 if stopwatch is None else stopwatch.at(started_s)
        result = ToolResult(
            call.id, call.name, content, is_error, is_truncated, duration_s, answer.outcome, begun_us
        )
        # Journal a stateless result immediately. Results of tools with state need the snapshot after the last call.
        if keep is not None and not self._has_state(call.name) and not is_lost:
            keep((result,), {})
        return result

    async def _run_tool(self, tool: Tool, call: ToolCall) -> _Answer:
        spec = tool.spec
        if self._closing is not None:
            return _Answer("cancelled", ToolOutcome.ERROR)  # the scope was closed during the wait for the slot
        if spec.environment and self.ended is not None:
            return _Answer("the episode has ended", ToolOutcome.ERROR)
        if spec.environment and self._lost is not None:
            return _Answer(self._lost.message, ToolOutcome.LOST)
        owner = self._owner(tool)
        try:
            open_ = self._session(owner)
        except BaseException as error:  # no await: even a CancelledError was raised by the tool's own code
            return self._failure(spec, error)
        open_.num_running += 1
        try:
            # A session that replaces a timed-out one is opened here.
            if (lost := await self._opened(owner, open_)) is not None:
                return _Answer(lost.message, ToolOutcome.LOST)
            if self._closing is not None:
                return _Answer("cancelled", ToolOutcome.ERROR)
            content = await self._bounded(
                tool,
                lambda: _called(open_.session, call),
                spec.timeout_s,
                on_late=lambda: self._retire(owner.spec.name, open_),
            )
        finally:
            open_.num_running -= 1
            # The last call of a retired session closes it, because the scope no longer refers to it.
            if open_.is_retired and open_.num_running == 0:
                await _shielded(self._close_session(owner.spec.name, open_), self._toolbox)
        # A late call leaves the environment in an unknown state, so the environment is not replaced but lost.
        if isinstance(content, _Failed) and content.is_late and spec.environment:
            return self._failure(spec, ToolLost(content.line))
        if isinstance(content, _Failed):
            return self._failure(spec, content.error, ToolOutcome.TIMEOUT if content.is_late else ToolOutcome.ERROR)
        if not isinstance(content, str):
            return self._failure(spec, TypeError(f"a tool must return a str, not {type(content).__name__}"))
        return _Answer(content)

    def _failure(self, spec: ToolSpec, error: BaseException, outcome: ToolOutcome = ToolOutcome.ERROR) -> _Answer:
        if isinstance(error, EndEpisode):
            return _Answer(str(self.end(error).reason) or "The episode has ended.")
        if isinstance(error, ToolLost):
            return _Answer(f"tool {spec.name!r} is lost: {error.message}", ToolOutcome.LOST)
        if isinstance(error, ToolError):
            return _Answer(error.message, outcome)
        # The policy sees only the exception type: an arbitrary message may contain paths, keys or other internals.
        _log.debug("tool_failed", tool=spec.name, trajectory_id=self._trajectory_id, exception=error_trace(error))
        return _Answer(type(error).__name__, outcome)

    def _owner(self, tool: Tool) -> Tool:
        """Return the tool or environment whose session answers this tool's calls."""
        return self._owners[tool.spec.environment or tool.spec.name]

    def _session(self, tool: Tool) -> _OpenSession:
        name = tool.spec.name
        if name not in self._sessions:
            self._sessions[name] = _OpenSession(tool.open_session(self._trajectory_id, self._seed))
        return self._sessions[name]

    def _retire(self, name: str, open_: _OpenSession) -> None:
        open_.is_retired = True
        if self._sessions.get(name) is open_:
            del self._sessions[name]

    async def _close_session(self, name: str, open_: _OpenSession) -> None:
        timeout_s = self._owners[name].spec.close_timeout_s
        close = open_.session.close
        await self._toolbox.bounded_close(close, timeout_s, tool=name, trajectory_id=self._trajectory_id)


def _called(session: ToolSession, call: ToolCall) -> Coroutine[Any, Any, str]:
    if isinstance(session, OpenEnvironment):
        return session.call_tool(call.name, call.arguments)
    return session.call(call.arguments)


async def _caught(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of user code, or `_Failed`: a SystemExit raised in a task would stop the event loop."""
    try:
        return await work()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return _Failed(error)


async def _shielded(work: Coroutine[Any, Any, None], keeper: Toolbox) -> None:
    """Finish `work` even if the caller is cancelled."""
    task = asyncio.create_task(work, name="tool-close")
    keeper.keep(task)
    await asyncio.shield(task)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def capped(text: str, max_bytes: int) -> tuple[str, bool]:
    """Truncate text to at most `max_bytes` of UTF-8. Returns the text and True if it was truncated.

    A truncated text ends with `...[truncated N bytes]`, which counts towards the limit; a limit shorter than this
    mark returns the mark alone. Lone surrogates become U+FFFD. In a text longer than MAX_COUNTED_CHARS every
    character counts as one byte, because the text beyond the limit is not encoded.
    """
    size = len(text) if text.isascii() or len(text) > MAX_COUNTED_CHARS else None  # bytes of the complete text
    prefix = text if size is None else text[: max_bytes + 1]
    try:
        encoded = prefix.encode()
    except UnicodeEncodeError:
        text = prefix = prefix.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        encoded = prefix.encode()
    if len(encoded) <= max_bytes:
        return prefix, False
    size = max(size or 0, len(encoded))
    room = max(0, max_bytes - len(_mark(size)))
    head = encoded[:room].decode(errors="ignore")
    return head + _mark(size - len(head.encode())), True


def _mark(num_bytes: int) -> str:
    return f"...[truncated {num_bytes} bytes]"
