"""Runs a session's calls, each in a task of its own: prompt, intent, sampling, turns, and then the answer.

Ownership: the task of every call that runs. Invariants: a node is in memory exactly if its call is COMMITTED in
the journal, and it is there before the answer leaves; a call that began ends COMMITTED or FAILED, whatever is
cancelled; one that was refused before it began leaves no trace. An engine that refuses what a client asked has
sampled nothing: such a call ends COMMITTED, without nodes and with an error.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from agentloop.aio import run_to_end
from agentloop.chat import CallKey, ChatCall, ChatResult
from agentloop.errors import AgentLoopError, InvalidRequest, InvariantBroken, Overloaded, ServiceUnavailable
from agentloop.generation import LeasedEngine, TurnRequest, sample_turn, stream_turn
from agentloop.sessions.calls import LiveCall, record_of
from agentloop.sessions.facts import SessionParts
from agentloop.sessions.journal import JournalWriter
from agentloop.sessions.memory import SessionMemory
from agentloop.sessions.prompts import Prompt, Question, as_asked, make_question
from agentloop.trajectory import ModelCallState, Node, Reply
from agentloop.types import KVPolicy

_log = structlog.stdlib.get_logger(__name__)


class CallRunner:
    """The calls of one session that run."""

    def __init__(
        self,
        session_id: str,
        parts: SessionParts,
        engine: LeasedEngine,
        memory: SessionMemory,
        journal: JournalWriter,
    ) -> None:
        self._session_id = session_id
        self._parts = parts
        self._engine = engine
        self._memory = memory
        self._table = memory.table
        self._journal = journal

    def start(self, chat: ChatCall, key: CallKey, *, is_streamed: bool) -> LiveCall:
        """Begin a call; the caller waits for it. Raises Overloaded, or InvalidRequest if the session is full."""
        self._check_room(chat)
        created_at = int(self._parts.unix_time())
        live = LiveCall(uuid.uuid4().hex, chat, key, created_at=created_at, is_streamed=is_streamed)
        # Numbers the tool calls: unique within the history that the client shows, whoever made it.
        num_replies = sum(message.role == "assistant" for message in chat.messages)
        turn_index = max(self._table.num_calls, num_replies)
        live.join()
        self._table.enter(live)
        live.task = asyncio.create_task(self._run(live, turn_index), name=f"call {live.call_id}")
        live.task.add_done_callback(lambda _: self._settle(live, _cut_off()))  # it may be cancelled before it runs
        return live

    async def end_calls(self, error: AgentLoopError, wait_s: float) -> None:
        """Wait for the calls that run, and end with `error` those that still do; their last writes are bounded."""
        if (tasks := self._tasks()) and wait_s > 0:
            await asyncio.wait(tasks, timeout=wait_s)
        for live in self._table.live.values():
            live.give_up(error)
        if tasks := self._tasks():
            await asyncio.wait(tasks)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [live.task for live in self._table.live.values() if live.task is not None]

    def _check_room(self, chat: ChatCall) -> None:
        limits, live_calls = self._parts.limits, self._table.live.values()
        if len(live_calls) >= limits.max_open_calls:
            raise Overloaded(f"the session has {limits.max_open_calls} open calls, the most it may have")
        num_nodes = (
            self._memory.graph.num_turns + sum(live.chat.num_choices for live in live_calls) + chat.num_choices
        )
        if num_nodes > limits.max_nodes:
            raise InvalidRequest(f"the session would have {num_nodes} turns; it may have {limits.max_nodes}")

    async def _run(self, live: LiveCall, turn_index: int) -> None:
        """A call from its prompt to its outcome. Raises nothing but its own cancellation."""
        failure: BaseException = _cut_off()
        try:
            await self._drive(live, turn_index)
        except asyncio.CancelledError:
            live.lost = live.lost or failure
            raise
        except Exception as error:
            failure = as_asked(_first_cause(error), live.chat)
            if not isinstance(failure, AgentLoopError):
                _log.error("call_broke", session=self._session_id, call=live.call_id, exc_info=failure)
            live.lost = live.lost or failure  # no retry joins it from here on
        finally:
            try:
                if live.result is None and live.is_begun:
                    await run_to_end(self._fail(live, failure))
            finally:
                self._settle(live, failure)

    async def _drive(self, live: LiveCall, turn_index: int) -> None:
        async with live.interruptible():
            question = await make_question(live.chat, self._memory.graph, self._parts)
            self._check_tokens(live, question.prompt)
            if live.lost is not None:
                raise live.lost  # given up in the moment its prompt was made: it leaves no trace
            self._journal.begin(record_of(live, ModelCallState.OPEN))
            self._table.begin(live)
            started = self._parts.clock.now()
            try:
                replies = await self._sample(live, question, turn_index)
            finally:
                live.generate_s = self._parts.clock.now() - started
        live.is_settling = True
        await run_to_end(self._commit(live, question.prompt, replies))

    def _check_tokens(self, live: LiveCall, prompt: Prompt) -> None:
        """Hold room for what the prompt adds. Raises InvalidRequest if there is none."""
        max_tokens = self._parts.limits.max_tokens
        live.num_new_tokens, live.num_prompt_tokens = len(prompt.observed_ids), len(prompt.ids)
        num_tokens = self._memory.graph.num_tokens + sum(
            other.num_new_tokens for other in self._table.live.values()
        )
        if num_tokens >= max_tokens:
            raise InvalidRequest(f"the session would hold {num_tokens} tokens and more; it may hold {max_tokens}")

    async def _sample(self, live: LiveCall, question: Question, turn_index: int) -> list[Reply]:
        """All choices side by side: all of them or none."""
        choices = range(live.chat.num_choices)
        turns = [self._turn_request(live, question, turn_index, choice_index) for choice_index in choices]
        if len(turns) == 1:
            return [await self._sample_choice(live, turns[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._sample_choice(live, wanted)) for wanted in turns]
        return [task.result() for task in tasks]

    def _turn_request(self, live: LiveCall, question: Question, turn_index: int, choice_index: int) -> TurnRequest:
        chat, sampling = live.chat, question.sampling
        if sampling.seed is not None and choice_index:
            sampling = replace(sampling, seed=sampling.seed + choice_index)
        keeps_kv = self._parts.kv_policy is KVPolicy.KEEP
        return TurnRequest(
            request_id=f"{live.call_id}:{choice_index}",
            prompt_ids=question.prompt.ids,
            sampling=sampling,
            turn_index=turn_index,
            choice_index=choice_index,
            stop=chat.stop,
            tools=chat.tools,
            reads_calls=question.reads_calls,
            reads_thoughts=chat.prompt_ids is None,
            timeout_s=chat.timeout_s,
            deadline_at=live.deadline_at,
            trajectory_id=self._session_id,
            keeps_kv=keeps_kv,
            kv_version=self._memory.first_version if keeps_kv else None,
        )

    async def _sample_choice(self, live: LiveCall, wanted: TurnRequest) -> Reply:
        reader = self._parts.reader
        if not live.is_streamed:
            return await sample_turn(self._engine, reader, wanted)
        async with aclosing(stream_turn(self._engine, reader, wanted)) as items:
            async for item in items:
                if isinstance(item, Reply):
                    return item
                live.add_piece(item)
        raise InvariantBroken("a stream ended without its reply")

    async def _commit(self, live: LiveCall, prompt: Prompt, replies: Sequence[Reply]) -> None:
        """Write the turns down, then have them: from `live.result` on the answer may leave."""
        nodes = tuple(
            Node(
                node_id=f"{live.call_id}.{choice_index}",
                call_id=live.call_id,
                choice_index=choice_index,
                parent_id=prompt.parent_id,
                observed=prompt.observed,
                observed_ids=prompt.observed_ids,
                reply=reply,
                tools_key=prompt.tools_key,
                split=prompt.split,
            )
            for choice_index, reply in enumerate(replies)
        )
        record = record_of(live, ModelCallState.COMMITTED)
        await self._journal.end(record, nodes)
        for node in nodes:
            self._memory.take(node)
        self._table.settle(record)
        live.result = ChatResult(live.call_id, live.created_at, self._session_id, prompt.ids, nodes)

    async def _fail(self, live: LiveCall, failure: BaseException) -> None:
        """Write down that a call which began has no answer. Its client hears of `failure`, not of this write's."""
        # An engine that refuses a request has sampled nothing, so nothing is lost.
        state = ModelCallState.COMMITTED if isinstance(failure, InvalidRequest) else ModelCallState.FAILED
        record = record_of(live, state, error=str(failure) or repr(failure))
        self._table.settle(record)
        try:
            await self._journal.end(record, ())
        except AgentLoopError as error:
            # It stays open in the journal: whoever restores the session finds it lost.
            _log.warning("failure_not_written", session=self._session_id, call=live.call_id, error=str(error))

    def _settle(self, live: LiveCall, failure: BaseException) -> None:
        """Let the outcome out. Idempotent."""
        if live.call_id not in self._table.live:
            return
        if live.result is None and not live.is_begun:
            self._table.forget(live)
        self._table.leave(live)
        if live.result is not None:
            live.succeed(live.result)
        else:
            live.fail(failure)


def _cut_off() -> ServiceUnavailable:
    return ServiceUnavailable("the call was cut off by the end of its process")


def _first_cause(error: BaseException) -> BaseException:
    """What broke first where several choices broke."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
