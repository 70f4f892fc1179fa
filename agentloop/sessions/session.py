"""Session: the chat calls of one agent, answered token for token and remembered as a graph of turns.

A call's life: `_enter` decides whether it is new, joins one that runs, or has its answer already. A new one is run
by a task of the session's own (`session_runner.py`): it makes the prompt, writes the call's intent down, samples
every choice, writes the turns down, and only then lets the answer out. Whoever asked merely waits; the task ends
early when nobody does any more.

Ownership: the session owns its facts and, through its runner, the task of every call; `finish` and `close` wait for
all of them. What is in memory is what the journal has: a session can be made again from its facts, nodes and calls.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from agentloop.aio import run_to_end
from agentloop.chat import CallKey, ChatCall, ChatPiece, ChatResult
from agentloop.errors import AgentLoopError, InvalidRequest, SessionFinished
from agentloop.generation import LeasedEngine
from agentloop.sessions.calls import LiveCall, whole_pieces
from agentloop.sessions.facts import CallLimits, Journal, SessionFacts, SessionParts, SessionState
from agentloop.sessions.journal import JournalWriter
from agentloop.sessions.memory import SessionMemory
from agentloop.sessions.prompts import Prompt, make_prompt
from agentloop.sessions.runner import CallRunner
from agentloop.trajectory import CallRecord, ModelCallState, Node, TurnGraph
from agentloop.types import JSON, Message, StopReason, Trajectory

__all__ = ["CallLimits", "Journal", "Prompt", "Session", "SessionFacts", "SessionParts", "SessionState"]


class Session:
    """One agent's conversations. Calls may come at any time and side by side."""

    def __init__(
        self,
        facts: SessionFacts,
        *,
        parts: SessionParts,
        engine: LeasedEngine,
        journal: Journal,
        nodes: Iterable[Node] = (),
        calls: Iterable[CallRecord] = (),
    ) -> None:
        """`nodes` and `calls` are what the journal has of it, in its order: calls it has as open are lost."""
        self._facts = facts
        self._parts = parts
        self._memory = SessionMemory(nodes, calls)
        self._journal = JournalWriter(journal, facts.session_id, timeout_s=parts.limits.journal_timeout_s)
        self._runner = CallRunner(facts.session_id, parts, engine, self._memory, self._journal)
        self._saving = asyncio.Lock()
        self._finishing: asyncio.Task[None] | None = None
        self._closed: AgentLoopError | None = None
        self._record: Trajectory | None = None  # once it is finished
        self._last_used_at = parts.clock.now()

    @property
    def facts(self) -> SessionFacts:
        """What is known of it now."""
        return self._facts

    @property
    def graph(self) -> TurnGraph:
        """The turns so far. Not to be changed."""
        return self._memory.graph

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The calls that were begun, in that order."""
        return self._memory.table.records

    @property
    def num_turns(self) -> int:
        return self._memory.graph.num_turns

    @property
    def is_used(self) -> bool:
        """Whether a call ever began, or is about to."""
        return self._memory.table.num_calls > 0

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory it takes up."""
        return self._memory.num_bytes

    @property
    def num_open_calls(self) -> int:
        """Calls that run. While there are any, the session must stay in memory."""
        return len(self._memory.table.live)

    @property
    def last_used_at(self) -> float:
        """When a call last came or was answered, on the session's clock."""
        return self._last_used_at

    @property
    def is_complete(self) -> bool:
        """False while a call is open, once one is lost, and after a finish that says that the agent failed."""
        return self._memory.is_complete(self._facts)

    def touch(self) -> None:
        """Count as used now."""
        self._last_used_at = self._parts.clock.now()

    # --- calls --------------------------------------------------------------------------------------------

    async def call(self, chat: ChatCall, key: CallKey) -> ChatResult:
        """One answer; durable when this returns. Cancelling it gives the call up unless somebody else waits.

        Raises SessionFinished, Overloaded, InvalidRequest and its kinds for what cannot be served,
        DeadlineExceeded, ServiceUnavailable (the journal), and what the engine raised.
        """
        entered = self._enter(chat, key, is_streamed=False)
        if isinstance(entered, ChatResult):
            return entered
        try:
            return await entered.answer()
        finally:
            entered.leave()
            self.touch()

    async def stream(self, chat: ChatCall, key: CallKey) -> AsyncGenerator[ChatPiece | ChatResult, None]:
        """The same answer in pieces as they are sampled, the `ChatResult` last. Raises as `call`.

        Closing it leaves the call. A choice's last piece comes only when the answer is durable. A retry gets all
        pieces from the first on; an answer that was not streamed comes as one piece a choice.
        """
        entered = self._enter(chat, key, is_streamed=True)
        if isinstance(entered, ChatResult):
            for piece in whole_pieces(entered.choices):
                yield piece
            yield entered
            return
        try:
            async with aclosing(entered.read()) as items:
                async for item in items:
                    yield item
        finally:
            entered.leave()
            self.touch()

    async def preview(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> Prompt:
        """The prompt that these messages would make, and how it extends the session. Changes nothing."""
        return await make_prompt(messages, tools, self._memory.graph, self._parts.renderer)

    def _enter(self, chat: ChatCall, key: CallKey, *, is_streamed: bool) -> LiveCall | ChatResult:
        """What the call is: all of it decided without an await."""
        self.touch()
        if self._closed is not None:
            raise self._closed
        latest = self._memory.table.latest(key.digest) if key.retry_count > 0 else None
        if isinstance(latest, LiveCall) and latest.is_joinable:
            latest.join()
            return latest
        self._require_open("it takes no calls")
        if isinstance(latest, CallRecord) and latest.state is ModelCallState.COMMITTED and not latest.error:
            return self._memory.answer_again(latest, self._facts.session_id)
        return self._runner.start(chat, key, is_streamed=is_streamed)

    # --- its end ------------------------------------------------------------------------------------------

    async def set_reward(self, reward: float) -> None:
        """Keep the reward, durably; a later one replaces it. Raises SessionFinished and InvalidRequest."""
        _check_reward(reward)
        if self._closed is not None:
            raise self._closed
        self._require_open("its reward stays as it is")
        self.touch()
        await run_to_end(self._save(lambda facts: replace(facts, reward=reward)))

    async def finish(
        self,
        *,
        stop_reason: StopReason = StopReason.COMPLETED,
        error: str = "",
        reward: float | None = None,
        reward_error: str = "",
        wait_s: float = 0.0,
    ) -> Trajectory:
        """Take no more calls, give those that run `wait_s`, and return the record; durable on return.

        A call that is open then is lost. With an `error` the record is incomplete; a `reward_error` only says why
        there is no reward. Finishing again returns the same record and changes nothing. It goes on if its caller
        leaves. Raises ServiceUnavailable if the journal fails: the session is open again then.
        """
        if reward is not None:
            _check_reward(reward)
        if self._facts.state is SessionState.OPEN:
            if self._closed is not None:
                raise self._closed
            if self._finishing is None:
                outcome = _Outcome(stop_reason, error, reward, reward_error)
                ending = self._finish(outcome, wait_s)
                self._finishing = asyncio.create_task(ending, name=f"finish {self._facts.session_id}")
            await asyncio.shield(self._finishing)
        return self.trajectory()

    async def close(self, error: AgentLoopError) -> None:
        """Take no more calls, lose those that run, and return when nothing does. What comes later raises `error`.

        For a session that leaves memory: it is not finished by that.
        """
        self._closed = error
        await self._runner.end_calls(error, 0.0)
        if self._finishing is not None:
            await asyncio.wait([self._finishing])

    def trajectory(self) -> Trajectory:
        """The record of this moment; after `finish`, the record. Costs all the tokens there are."""
        if self._record is not None:
            return self._record
        facts = self.facts
        ended_at = facts.finished_at if facts.finished_at is not None else self._parts.unix_time()
        record = self._memory.trajectory(facts, total_s=ended_at - facts.created_at)
        if facts.state is SessionState.FINISHED:
            self._record = record
        return record

    async def _finish(self, outcome: _Outcome, wait_s: float) -> None:
        ended = SessionFinished(f"session {self._facts.session_id} was finished while this call ran")
        try:
            await self._runner.end_calls(ended, wait_s)
            await self._save(
                lambda facts: replace(
                    facts,
                    state=SessionState.FINISHED,
                    stop_reason=outcome.stop_reason,
                    error=outcome.error,
                    reward=facts.reward if outcome.reward is None else outcome.reward,
                    reward_error=outcome.reward_error,
                    finished_at=self._parts.unix_time(),
                )
            )
        finally:
            self._finishing = None

    async def _save(self, change: Callable[[SessionFacts], SessionFacts]) -> None:
        """Write changed facts down, then have them. One at a time."""
        async with self._saving:
            facts = change(self.facts)
            await self._journal.save(facts)
            self._facts = facts

    def _require_open(self, so: str) -> None:
        if self._finishing is not None or self._facts.state is SessionState.FINISHED:
            raise SessionFinished(f"session {self._facts.session_id} is finished: {so}")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What whoever finishes a session says of it."""

    stop_reason: StopReason
    error: str
    reward: float | None
    reward_error: str


def _check_reward(reward: float) -> None:
    if not math.isfinite(reward):
        raise InvalidRequest(f"a reward of {reward} is not a finite number", param="reward")
