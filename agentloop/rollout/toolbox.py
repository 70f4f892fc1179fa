"""The tool runtime: declared tools only, under deadlines, caps and bounds; every failure is a result.

Ownership: a `Toolbox` belongs to a worker process and holds one object and one semaphore a tool. A `ToolScope`
belongs to one trajectory and holds its sessions, made at a tool's first call or by `open`, and closed by `close`.

Invariants: a session that was made is closed once, in whatever way its trajectory ends. A call gives exactly one
result, in call order, and no failure of a tool leaves `run`, but that it is lost, which ends the trajectory. A tool
that outlives its timeout is cancelled; one that ignores that for `grace_s` is abandoned: its slot is free, its
session is replaced, and the toolbox keeps its task (until it ends) so that it is neither lost nor unseen. The wait
for a slot is not part of a call's timeout; it is bounded because every holder's time is.

The tools of an environment have one session, the environment's. Their calls run one after the other, and one that
is late leaves a state that nobody knows: the environment is lost with it, and not replaced.
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
REACTION = "react"  # in place of a call's id, of what an environment's user said

KeepAnswers: TypeAlias = Callable[[tuple[ToolResult, ...], Mapping[str, bytes | None]], None]
"""Takes answers that are final, and the states by tool that go with them."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _OpenSession:
    """A session in use. Retired (after a timeout) it takes no new calls and is closed when the last one ends."""

    session: ToolSession
    num_running: int = 0
    is_retired: bool = False
    opening: asyncio.Task[InvalidRequest | ToolLost | None] | None = None  # of its `open`; its result: what failed


@dataclass(frozen=True, slots=True)
class _Failed:
    """The failure of user code as a value: what it raised, or that it was late."""

    error: BaseException
    is_late: bool = False

    @property
    def line(self) -> str:
        """One line of it for a record."""
        return self.error.message if isinstance(self.error, AgentLoopError) else error_line(self.error)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a call, before the cap."""

    content: str
    outcome: ToolOutcome = ToolOutcome.OK


class Toolbox:
    """All tools of one worker process. Needs a running event loop only when a scope runs."""

    def __init__(self, tools: Iterable[Tool], *, grace_s: float = 1.0, close_timeout_s: float = 5.0) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.spec.name in self._tools:
                raise InvalidRequest(f"two tools are named {tool.spec.name!r}", param="tools")
            self._tools[tool.spec.name] = tool
        self._slots: dict[tuple[str, str], asyncio.Semaphore] = {}  # by environment and name
        self._grace_s = grace_s
        self._close_timeout_s = close_timeout_s
        self._scopes: set[ToolScope] = set()
        self._user_tasks = UserTasks("tool")
        self._closing: asyncio.Task[None] | None = None

    @property
    def num_abandoned(self) -> int:
        """Calls and closes that still run and are awaited no more; threads are counted for the whole process."""
        return self._user_tasks.num_abandoned + num_abandoned_threads()

    def definitions(self, names: Sequence[str]) -> list[dict[str, JSON]]:
        """The tools' canonical definitions, in the order of `names`. Raises InvalidRequest for an unknown one."""
        return [tool.spec.definition() for tool in self._declared(names, None).values()]

    def own_s(self, names: Sequence[str]) -> float:
        """Return the seconds that these tools may take to open, score and close, beside a trajectory's own time."""
        specs = [self._tools[name].spec for name in names if name in self._tools]
        lives = [[spec.open_timeout_s, spec.score_timeout_s, spec.close_timeout_s] for spec in specs]
        return sum(max((life[phase] or 0.0 for life in lives), default=0.0) for phase in range(3))

    def open(
        self, names: Sequence[str], trajectory_id: str, seed: int, environment: LoadedEnvironment | None = None
    ) -> ToolScope:
        """Return the tools of one trajectory, to be closed. Raises InvalidRequest for an unknown name."""
        if self._closing is not None:
            raise InvariantBroken("the toolbox is closed")
        scope = ToolScope(self, self._declared(names, environment), trajectory_id, seed, environment)
        self._scopes.add(scope)
        return scope

    async def close(self) -> None:
        """Close every scope and every tool, each within a deadline. Idempotent; finishes even if cancelled."""
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
                raise InvalidRequest(f"tool {name!r} is named twice", param="tools")
        declared = {name: self._tools[name] for name in names}
        for tool in () if environment is None else environment.methods.values():
            if declared.setdefault(tool.spec.name, tool) is not tool:
                raise InvalidRequest(f"the environment has a tool {tool.spec.name!r} too", param="tools")
        return declared

    # --- for ToolScope ------------------------------------------------------------------------------------

    def slot(self, spec: ToolSpec) -> asyncio.Semaphore:
        """The tool's concurrency bound over all trajectories."""
        key = spec.environment, spec.name
        if key not in self._slots:
            self._slots[key] = asyncio.Semaphore(spec.max_concurrency)
        return self._slots[key]

    def forget(self, scope: ToolScope) -> None:
        """Take out a scope that is closed."""
        self._scopes.discard(scope)

    async def stop(self, tasks: Sequence[asyncio.Task[Any]], **about: str) -> None:
        """Cancel tasks, give them the grace period, and abandon what still runs."""
        await self._user_tasks.stop(tasks, self._grace_s, **about)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task that is awaited no more until it ends."""
        self._user_tasks.keep(task)

    async def bounded_close(
        self, close: Callable[[], Awaitable[None]], timeout_s: float | None, **about: str
    ) -> None:
        """Await a close within its deadline (None: ours); a failing or hanging one is logged, never raised."""

        async def attempt() -> None:
            try:
                await close()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # user code raises anything, and an exit would stop the event loop
                _log.warning("tool_close_failed", error=error_line(error), **about)

        task = asyncio.create_task(attempt(), name="tool-close")
        try:
            await asyncio.wait({task}, timeout=self._close_timeout_s if timeout_s is None else timeout_s)
        finally:
            self.keep(task)
        if not task.done():
            await self.stop([task], during="close", **about)


class ToolScope:
    """One trajectory's tools. `run` may be called turn after turn; `close` must be called, on every path."""

    def __init__(
        self,
        toolbox: Toolbox,
        tools: Mapping[str, Tool],
        trajectory_id: str,
        seed: int,
        environment: LoadedEnvironment | None = None,
    ) -> None:
        self.ended: EndEpisode | None = None  # by a tool, the user or the loop
        self._toolbox = toolbox
        self._tools = tools
        self._environment = environment
        self._owners = {name: tool for name, tool in tools.items() if not tool.spec.environment}  # of sessions
        if environment is not None:
            self._owners[environment.spec.name] = environment
        self._turn = asyncio.Lock()  # of the environment's calls
        self._trajectory_id = trajectory_id
        self._seed = seed
        self._task: RolloutTask | None = None  # that sessions are opened for
        self._sessions: dict[str, _OpenSession] = {}
        self._can_resume = True
        self._lost: ToolLost | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._calls: dict[str, tuple[str, float]] = {}  # that run: their tools, and since when
        self._closing: asyncio.Task[None] | None = None

    @property
    def longest_call(self) -> tuple[str, float] | None:
        """The tool that runs for longest, and the seconds; None if none runs."""
        if not self._calls:
            return None
        name, since = min(self._calls.values(), key=lambda one: one[1])
        return name, time.monotonic() - since

    @property
    def has_openings(self) -> bool:
        """True if `open` has something to do."""
        return any(tool.spec.open_timeout_s is not None for tool in self._owners.values())

    @property
    def definitions(self) -> list[dict[str, JSON]]:
        """The tools' canonical definitions, the environment's last."""
        return [tool.spec.definition() for tool in self._tools.values()]

    @property
    def environment(self) -> Any:
        """The author's environment; None without one."""
        open_ = self._sessions.get(self._environment.spec.name) if self._environment is not None else None
        return open_.session.environment if open_ and isinstance(open_.session, OpenEnvironment) else None

    @property
    def can_resume(self) -> bool:
        """False once a session without a portable state was opened."""
        return self._can_resume

    async def open(self, task: RolloutTask) -> None:
        """Open the sessions that have an `open`, side by side, each within its deadline. Called before the loop.

        Raises InvalidRequest for a task that one of them refuses, and ToolLost if one cannot be opened.
        """
        self._task = task
        tools = [tool for tool in self._owners.values() if tool.spec.open_timeout_s is not None]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._opened_in_turn(tool)) for tool in tools]
        for opened in tasks:
            if (error := opened.result()) is not None:
                raise error

    async def sessions(self) -> dict[str, ToolSession]:
        """Return the sessions of tools by name, opened where they were never called; the environment's has none.

        Raises InvalidRequest and ToolLost.
        """
        found: dict[str, ToolSession] = {}
        for name, tool in self._owners.items():
            open_ = self._made(tool)
            error = open_ if isinstance(open_, ToolLost) else await self._opened(tool, open_)
            if error is not None:
                raise error
            if tool is not self._environment:
                found[name] = self._sessions[name].session
        return found

    async def run(
        self,
        calls: Sequence[ToolCall],
        max_response_bytes: int,
        keep: KeepAnswers | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> list[ToolResult]:
        """Run all calls at once; one result a call, in call order. `stopwatch` tells when each was begun.

        `keep` is given each answer as soon as it is final: those of a tool that has state with its state after all
        of them, the others one by one.

        A tool's failure, timeout or absence is a result with `is_error` and the content `Error: <message>`; only a
        cancellation leaves, after which the calls in flight are cancelled too. Raises ToolLost, when all calls have
        ended, if one of the tools is lost for this trajectory. If one ends the episode, `ended` is set.
        """
        if self._closing is not None:
            raise InvariantBroken("the tool scope is closed")
        async with asyncio.TaskGroup() as group:
            results_of = (self._result(call, max_response_bytes, keep, stopwatch) for call in calls)
            tasks = [group.create_task(result) for result in results_of]
        results = [task.result() for task in tasks]
        if self._lost is not None:
            raise self._lost
        if keep is not None and self.ended is None:  # or the call that ended it would not run again elsewhere
            await self._keep_states(results, keep)
        return results

    async def react(self, messages: Sequence[Message], keep: KeepAnswers | None = None) -> str | None:
        """Return what the environment's user says next; None without one, and at the episode's end.

        `keep` is given it as the answer REACTION, with the state after it. Raises EndEpisode, and ToolLost for an
        environment that fails or is late.
        """
        if (owner := self._environment) is None:
            return None
        async with self._turn:
            if isinstance(open_ := self._made(owner), ToolLost):
                raise open_
            session = cast(OpenEnvironment, open_.session)
            said = await self._bounded(owner, lambda: session.react(messages), owner.kind.react_timeout_s)
            if isinstance(said, _Failed) and isinstance(said.error, EndEpisode):
                raise self.end(said.error)
            if isinstance(said, _Failed) or not isinstance(said, str | None):
                problem = said.line if isinstance(said, _Failed) else f"it said a {type(said).__name__}"
                raise ToolLost(f"react of {owner.spec.name!r}: {problem}")
            if keep is not None and said is not None:
                await self._keep_state(owner, (ToolResult(REACTION, owner.spec.name, said),), keep)
            return cast("str | None", said)

    def end(self, by: EndEpisode) -> EndEpisode:
        """Note the end of the episode; the first one counts."""
        self.ended = by if self.ended is None else self.ended
        return self.ended

    async def restore(self, states: Mapping[str, bytes]) -> None:
        """Bring sessions to these states, by tool.

        Raises ToolError, in whatever way it fails: all sessions are new ones then, opened again. Raises as `open`
        does, too.
        """
        try:
            for name, state in states.items():
                await self._restore(self._owners[name], state)
        except ToolError:
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
        """Return the score of the episode's end, or of the sessions that score, joined; and the problem.

        They are asked side by side, each within its deadline.
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
        for tool, found in zip(scoring, tasks, strict=True):
            said = found.result()
            try:
                if isinstance(said, RewardError):
                    raise said
                joined = joined.joined(said)
            except RewardError as error:
                problem = problem or f"tool {tool.spec.name!r}: {error}"
        return joined, problem

    async def close(self) -> None:
        """End calls in flight and close every session. Idempotent; finishes even if the caller is cancelled."""
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
        made, self._sessions = self._sessions, {}
        await asyncio.gather(*(self._close_session(name, open_) for name, open_ in made.items()))

    async def _opened_in_turn(self, tool: Tool) -> InvalidRequest | ToolLost | None:
        async with self._toolbox.slot(tool.spec):
            open_ = self._made(tool)
            return open_ if isinstance(open_, ToolLost) else await self._opened(tool, open_)

    async def _opened(self, tool: Tool, open_: _OpenSession) -> InvalidRequest | ToolLost | None:
        """Wait until a session is open; the first caller opens it. Returns the failure, or None."""
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
            return ToolLost(f"tool {name!r} cannot be opened: a {type(session).__name__} has no open()")
        done = await self._bounded(tool, lambda: session.open(task), timeout_s)
        if not isinstance(done, _Failed):
            return None
        if isinstance(done.error, InvalidRequest):
            return InvalidRequest(f"tool {name!r}: {done.error.message}", param="tool_setup")
        return ToolLost(f"tool {name!r} cannot be opened: {done.line}")

    async def _score_of(
        self, tool: Tool, task: RolloutTask, messages: Sequence[Message], timeout_s: float
    ) -> Score | RewardError:
        """Return what one tool's session says, or why it says nothing: raising would end the others' scores."""

        async def asked() -> Score:
            open_ = self._session(tool)
            if (error := await self._opened(tool, open_)) is not None:
                raise RewardError(error.message)
            if isinstance(open_.session, OpenEnvironment):
                return score_of(await open_.session.score_of(task, messages))
            if not isinstance(open_.session, ScoringSession):
                raise RewardError(f"a {type(open_.session).__name__} has no score()")
            return score_of(await open_.session.score(task))

        async with self._toolbox.slot(tool.spec):
            said = await self._bounded(tool, asked, timeout_s, late="no score within", during="score")
        if not isinstance(said, _Failed):
            return cast(Score, said)
        return RewardError(said.line)

    def _has_state(self, name: str) -> bool:
        return name in self._tools and self._tools[name].spec.has_state

    async def _keep_states(self, results: Sequence[ToolResult], keep: KeepAnswers) -> None:
        """Keep the answers of tools that have state, with it; None is that of a session that was replaced."""
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
        """Return a session's state; None if there is none to be had."""
        if not isinstance(session, SnapshotSession):
            return None
        state = await self._bounded(tool, session.snapshot, tool.spec.timeout_s)
        if isinstance(state, bytes) and len(state) <= MAX_SNAPSHOT_BYTES:
            return state
        reason = state.line if isinstance(state, _Failed) else f"{type(state).__name__} of any size"
        _log.warning("no_snapshot", tool=tool.spec.name, trajectory_id=self._trajectory_id, error=reason)
        return None

    def _made(self, tool: Tool) -> _OpenSession | ToolLost:
        try:
            return self._session(tool)
        except BaseException as error:  # synchronous: a cancellation, too, is the tool's own
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
        """Return what user code returns within its time, or `_Failed`. Nothing but our own cancellation is raised.

        Late code is cancelled, and abandoned if it ignores that.
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
            if not task.done():  # we were cancelled, or it was abandoned
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
            unknown = f"unknown tool {call.name!r}. Available: {_listed(self._tools)}"
            answer = _Answer(unknown, ToolOutcome.UNKNOWN)
        else:
            max_bytes = min(max_bytes, tool.spec.max_output_bytes)
            turn = self._turn if tool.spec.environment else nullcontext()
            async with turn, self._toolbox.slot(tool.spec):
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
        if keep is not None and not self._has_state(call.name) and not is_lost:
            keep((result,), {})
        return result

    async def _run_tool(self, tool: Tool, call: ToolCall) -> _Answer:
        spec = tool.spec
        if self._closing is not None:
            return _Answer("cancelled", ToolOutcome.ERROR)  # the scope closed while this call waited for its slot
        if spec.environment and self.ended is not None:
            return _Answer("the episode has ended", ToolOutcome.ERROR)
        if spec.environment and self._lost is not None:
            return _Answer(self._lost.message, ToolOutcome.LOST)
        owner = self._owner(tool)
        try:
            open_ = self._session(owner)
        except BaseException as error:  # synchronous: a cancellation, too, is the tool's own
            return self._failure(spec, error)
        open_.num_running += 1
        try:
            if (failed := await self._opened(owner, open_)) is not None:  # in place of one that was too late
                return _Answer(failed.message, ToolOutcome.LOST)
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
            if open_.is_retired and open_.num_running == 0:
                await _shielded(self._close_session(owner.spec.name, open_), self._toolbox)
        if isinstance(content, _Failed) and content.is_late and spec.environment:
            return self._failure(spec, ToolLost(content.line))
        if isinstance(content, _Failed):
            return self._failure(spec, content.error, ToolOutcome.TIMEOUT if content.is_late else ToolOutcome.ERROR)
        if not isinstance(content, str):
            return self._failure(spec, TypeError(f"a tool answers text, not {type(content).__name__}"))
        return _Answer(content)

    def _failure(self, spec: ToolSpec, error: BaseException, outcome: ToolOutcome = ToolOutcome.ERROR) -> _Answer:
        if isinstance(error, EndEpisode):
            return _Answer(str(self.end(error).reason) or "The episode has ended.")
        if isinstance(error, ToolLost):
            return _Answer(f"tool {spec.name!r} is lost: {error.message}", ToolOutcome.LOST)
        if isinstance(error, ToolError):
            return _Answer(error.message, outcome)
        # The policy learns the kind only: a message of unknown origin may hold paths, keys or other internals.
        _log.debug("tool_failed", tool=spec.name, trajectory_id=self._trajectory_id, exception=error_trace(error))
        return _Answer(type(error).__name__, outcome)

    def _owner(self, tool: Tool) -> Tool:
        """Return the tool whose session answers this one."""
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
    """Return what user code returns, or `_Failed`: raised in a task, an exit would stop the event loop."""
    try:
        return await work()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return _Failed(error)


async def _shielded(work: Coroutine[Any, Any, None], keeper: Toolbox) -> None:
    """Finish `work` even if the caller is cancelled meanwhile."""
    task = asyncio.create_task(work, name="tool-close")
    keeper.keep(task)
    await asyncio.shield(task)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def capped(text: str, max_bytes: int) -> tuple[str, bool]:
    """The text as valid UTF-8 of at most `max_bytes`, and whether it was cut.

    A cut ends with `...[truncated N bytes]`, which counts; where not even the mark fits, the mark alone is the
    text. Lone surrogates become U+FFFD. Only what may be kept is encoded: in a text of more than
    MAX_COUNTED_CHARS a character counts as one byte, however many it has.
    """
    size = len(text) if text.isascii() or len(text) > MAX_COUNTED_CHARS else None  # of all of it, in bytes
    read = text if size is None else text[: max_bytes + 1]
    try:
        encoded = read.encode()
    except UnicodeEncodeError:
        text = read = read.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        encoded = read.encode()
    if len(encoded) <= max_bytes:
        return read, False
    size = max(size or 0, len(encoded))
    room = max(0, max_bytes - len(_mark(size)))
    head = encoded[:room].decode(errors="ignore")
    return head + _mark(size - len(head.encode())), True


def _mark(num_bytes: int) -> str:
    return f"...[truncated {num_bytes} bytes]"
