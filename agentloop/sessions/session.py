"""Sessions: the chat calls of one agent, with exact tokens, stored as a graph of turns.

`Session._enter` decides if a call is new, joins a running call, or is answered already. A task owned by the session
runs a new call: it creates the prompt, opens the call in the journal, samples all choices, commits the turns to the
journal, and then delivers the answer to the waiting clients. The task is cancelled when no client waits.
Invariants: memory never holds more than the journal, so a session can be restored from its record, nodes and calls.
A node is in memory only after its call is COMMITTED in the journal, and before the answer is delivered. An opened
call ends COMMITTED or FAILED, even if it is cancelled; a call refused before that has no effect.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import structlog

from agentloop.api.coordinator import assignment_id_of
from agentloop.api.owners import shown_id
from agentloop.chat.call import CallKey, ChatCall, ChatResult
from agentloop.concurrency.aio import OwnedTasks, run_to_end, side_by_side
from agentloop.concurrency.clock import Stopwatch
from agentloop.errors import (
    AgentLoopError,
    ContextLengthExceeded,
    Forbidden,
    InvalidRequest,
    InvariantBroken,
    NotFound,
    Overloaded,
    RewardError,
    ServiceUnavailable,
    SessionFinished,
    first_cause,
)
from agentloop.generation.leased_engine import LeasedEngine
from agentloop.generation.turn_reader import Reading, TurnPiece
from agentloop.generation.turn_sampler import TurnRequest, sample_turn
from agentloop.observability.trace_context import turn_context
from agentloop.score import Score, checked, ended, judged, scored_or_told
from agentloop.sessions.calls import (
    CallTable,
    Journal,
    LiveCall,
    SessionEnd,
    SessionRecord,
    SessionState,
    record_of,
    whole_pieces,
    write,
    write_failure,
)
from agentloop.sessions.prompts import (
    PreparedCall,
    Prompt,
    SessionParts,
    make_prompt,
    own_messages,
    prepare_call,
    with_client_param,
)
from agentloop.trajectory.node import CallRecord, ModelCallState, Node, Reply
from agentloop.trajectory.token_paths import token_paths
from agentloop.trajectory.turn_graph import TurnGraph
from agentloop.types import (
    FAILURES,
    FinishReason,
    GenerateRequest,
    KVPolicy,
    Message,
    StopReason,
    Timings,
    TokenPath,
    Trajectory,
    TrajectoryTimes,
)
from agentloop.values.aux_rows import routes_from

_MAX_ERROR_CHARS = 500

_log = structlog.stdlib.get_logger(__name__)


class Session:
    """The conversations of one agent. Calls may run concurrently."""

    def __init__(
        self,
        record: SessionRecord,
        *,
        parts: SessionParts,
        engine: LeasedEngine,
        journal: Journal,
        nodes: Iterable[Node] = (),
        calls: Iterable[CallRecord] = (),
    ) -> None:
        """`nodes` and `calls` are the journal's contents in order. Calls that are open in the journal were lost."""
        self._record = record
        self._parts = parts
        self._engine = engine
        self._journal = journal
        self.graph = TurnGraph()  # read-only for other classes
        self._table = CallTable(calls)
        self._stopwatch = Stopwatch(record.created_at, parts.unix_time, parts.clock.now)
        self._first_version: int | None = None  # the weight version of the first sampled token
        self._num_tool_calls = 0
        self._num_numbered = self._table.num_calls  # the minimum of the next turn's number
        self._saving = asyncio.Lock()
        self._finishing: asyncio.Task[None] | None = None
        self._closed: AgentLoopError | None = None
        self._trajectory: Trajectory | None = None  # set once the session is finished
        for node in nodes:
            self._take(node)
            self._num_numbered += node.choice_index > 0

    @property
    def session_id(self) -> str:
        return self._record.session_id

    @property
    def shown_id(self) -> str:  # without the owner's prefix
        return shown_id(self._record.session_id)

    @property
    def record(self) -> SessionRecord:
        """The current record of the session, which does not contain its calls."""
        return self._record

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The opened calls, in order of opening."""
        return self._table.records

    @property
    def num_turns(self) -> int:
        return self.graph.num_turns

    @property
    def num_bytes(self) -> int:
        """The estimated memory usage in bytes."""
        return self.graph.num_bytes + self._table.num_bytes

    @property
    def num_open_calls(self) -> int:
        """The number of running calls. If it is not 0, the session must stay in memory."""
        return len(self._table.live)

    @property
    def policy_failure(self) -> StopReason | None:
        """The stop reason if the agent failed now because of the policy; None if the policy is not the cause.

        MAX_CONTEXT if the last prompt filled the context; else the failure of the last turn: a limit truncated it,
        or it has a malformed call.
        """
        last = self.graph.last
        if last is None:
            return None
        return StopReason.MAX_CONTEXT if self._is_overflown else self._failure_of(last)

    @property
    def _is_overflown(self) -> bool:
        return self._record.overflow_at == self.graph.num_turns

    def _failure_of(self, node: Node) -> StopReason | None:
        reply = node.reply
        if reply.finish_reason is FinishReason.LENGTH:
            is_full = len(self.graph.context_ids(node.node_id)) >= self._parts.max_context_tokens
            return StopReason.MAX_CONTEXT if is_full else StopReason.MAX_TOKENS_PER_TURN
        return StopReason.MALFORMED_CALL if reply.has_unread_call else None

    def _stop_reason(self, main: TokenPath | None) -> StopReason:
        """Return the stop reason: the agent's, unless a failure of the policy ended the agent."""
        reported = self._record.stop_reason or StopReason.COMPLETED
        if reported is StopReason.LOOP_FAILED:
            return self.policy_failure or reported
        if reported is not StopReason.COMPLETED or main is None:
            return reported
        if self._is_overflown:
            return StopReason.MAX_CONTEXT
        # The agent may have used a truncated turn as its answer, but it cannot have used a malformed call.
        failure = self._failure_of(self.graph.node(main.turns[-1].turn_id))
        return StopReason.MALFORMED_CALL if failure is StopReason.MALFORMED_CALL else reported

    @property
    def is_complete(self) -> bool:
        """True if all calls are answered, and the agent ended without an error or failed because of the policy."""
        record = self._record
        is_ended_well = record.stop_reason not in FAILURES | {StopReason.CANCELLED} and not record.error
        if record.stop_reason is StopReason.LOOP_FAILED:
            is_ended_well = self.policy_failure is not None
        return is_ended_well and not self._table.live and not self._table.unhealed_failures()

    # Calls

    async def call(
        self, chat_call: ChatCall, key: CallKey, begin: Callable[[str, str], None] | None = None
    ) -> ChatResult:
        """Answer a call; durable on return. `begin` gets the ids of the session and the call once it is accepted.

        If the last waiting caller is cancelled, the call is given up. Raises SessionFinished, Overloaded,
        InvalidRequest and its subclasses for a call that cannot be served, DeadlineExceeded, ServiceUnavailable
        (the journal), and the errors of the engine.
        """
        entered = self._enter(chat_call, key, is_streamed=False)
        if begin is not None:
            begin(self.shown_id, entered.call_id)
        if isinstance(entered, ChatResult):
            return entered
        is_answered = False
        try:
            result = await entered.answer()
            is_answered = True
            return result
        finally:
            self._table.leave(entered, is_answered=is_answered)

    async def stream(
        self, chat_call: ChatCall, key: CallKey, begin: Callable[[str, str], None] | None = None
    ) -> AsyncGenerator[TurnPiece | ChatResult, None]:
        """Yield the answer in pieces as they are sampled, then the `ChatResult`. Raises the errors of `call`.

        Closing the generator is like cancelling `call`. A choice's last piece is yielded after the answer is
        durable. A retry receives all pieces from the beginning; an answer that was not streamed has one piece per
        choice. `begin` is called with the ids of the session and the call before the first piece.
        """
        entered = self._enter(chat_call, key, is_streamed=True)
        if begin is not None:
            begin(self.shown_id, entered.call_id)
        if isinstance(entered, ChatResult):
            for piece in whole_pieces(entered.choices):
                yield piece
            yield entered
            return
        is_answered = False
        try:
            async with aclosing(entered.read()) as items:
                async for item in items:
                    yield item
            is_answered = True
        finally:
            self._table.leave(entered, is_answered=is_answered)

    def conversation_to(self, call_id: str) -> list[Message]:
        """Return the conversation up to and including the reply to a call. Raises NotFound for an unknown turn."""
        turn_id = f"{call_id}.0"
        if not self.graph.has_turn(turn_id):
            raise NotFound(f"session {self.shown_id} has no turn {turn_id[:128]!r}")
        return own_messages(self.graph, self.graph.node(turn_id))

    async def preview(self, chat_call: ChatCall) -> Prompt:
        """Return the prompt that a call would have, without changing the session."""
        return await make_prompt(chat_call, self.graph, self._parts, self._engine, f"{self.session_id}:preview")

    def _enter(self, chat_call: ChatCall, key: CallKey, *, is_streamed: bool) -> LiveCall | ChatResult:
        """Join a running call, return the result of a committed call, or start a new call.

        Synchronous, so that no other call changes the table in between.
        """
        if self._closed is not None:
            raise self._closed
        # A client retries a call whose answer it did not receive: join it, or return its answer, instead of
        # sampling a second time. A retry may join even while the session finishes.
        earlier = self._table.continued_by(key) if key.retry_count > 0 else None
        is_restart = key.retry_count > 0 and earlier is None and self._table.num_unanswered(key) > 0
        if earlier is not None or is_restart:
            self._parts.tally.count("calls_repeated_total")
        if isinstance(earlier, LiveCall):
            earlier.join()
            self._table.note_client(earlier.call_id, key)
            return earlier
        self._require_open("it accepts no calls")
        if self._record.is_revoked:
            raise Forbidden(f"session {self.shown_id} was revoked: it accepts no calls")
        if earlier is not None:
            self._table.note_client(earlier.call_id, key)
            return self._answer_again(earlier)
        live = self._start(chat_call, key, is_streamed=is_streamed)
        if is_restart:
            self._table.note_restart(key)
        self._table.note_client(live.call_id, key)
        return live

    # End of the session

    async def set_score(self, score: Score) -> None:
        """Store a score durably. It replaces earlier values for the same rewards and turns.

        Raises SessionFinished, and InvalidRequest for invalid numbers and unknown turns.
        """
        self._check_score(score)
        if self._closed is not None:
            raise self._closed
        self._require_open("its score cannot be changed")
        await run_to_end(self._save(lambda record: replace(record, score=record.score.updated(score))))

    async def revoke(self) -> None:
        """Refuse new calls, durably. Open calls continue. Idempotent. Raises SessionFinished."""
        self._require_open("it accepts no calls")
        await run_to_end(self._save(lambda record: replace(record, is_revoked=True)))

    async def finish(self, end: SessionEnd = SessionEnd()) -> Trajectory:  # noqa: B008 - frozen
        """Refuse new calls, wait up to `end.wait_s` seconds for open ones, and return the durable trajectory.

        Calls that are still open then fail. Idempotent: a repeated call returns the same trajectory. If the caller
        is cancelled, the session still finishes. Raises ServiceUnavailable if the journal fails; the session is
        then open again.
        """
        self._check_score(end.score)
        if self._record.state is SessionState.OPEN:
            if self._closed is not None:
                raise self._closed
            if self._finishing is None:
                self._finishing = OwnedTasks(f"finish {self.session_id}").start(self._finish(end))
            await asyncio.shield(self._finishing)  # a cancelled caller must not cancel the finish
        return self.trajectory()

    async def close(self, error: AgentLoopError) -> None:
        """Fail all running calls with `error`, wait for them, and make later calls raise it.

        Used to remove the session from memory; does not finish it.
        """
        self._closed = error
        await self._end_calls(error, 0.0)
        if self._finishing is not None:
            await asyncio.wait([self._finishing])

    def trajectory(self) -> Trajectory:
        """Return the current trajectory; after `finish`, the final one. Takes time linear in all tokens."""
        if self._trajectory is not None:
            return self._trajectory
        record = self._record
        ended_at = record.finished_at if record.finished_at is not None else self._parts.unix_time()
        times = record.times if record.state is SessionState.FINISHED else self._times(ended_at)
        paths = token_paths(self.graph, task_messages=record.task_messages)
        trajectory = Trajectory(
            task_id=record.task_id,
            group_id=record.group_id or self.shown_id,
            sample_index=record.sample_index,
            paths=paths,
            stop_reason=StopReason.COMPLETED,
            is_complete=self.is_complete,
            reward_error=record.reward_error or None,
            error=self._error(),
            num_tool_calls=self._num_tool_calls,
            num_resampled_turns=self._table.num_healed,
            thinking=self._parts.renderer.facts.thinking,
            timings=Timings(
                generate_s=sum(call.generate_s for call in self._table.records),
                total_s=max(ended_at - record.created_at, 0.0),
            ),
            times=times,
            rollout_id=record.rollout_id,
            task_messages=record.task_messages,
            constraints=dict(self.graph.constraints),
            traceparent=record.traceparent,
            adapter=record.adapter,
            credit=record.credit,
        )
        # The stop reason depends on the main path, which the trajectory selects.
        stop_reason = self._stop_reason(trajectory.path if paths else None)
        trajectory = scored_or_told(ended(replace(trajectory, stop_reason=stop_reason)), record.score)
        if record.state is SessionState.FINISHED:
            self._trajectory = trajectory = judged(trajectory)
        return trajectory

    def _times(self, ended_at: float) -> TrajectoryTimes:
        """Return the session's times, with the moves and lost tokens that this process has observed."""
        began_at, engine = self._record.created_at, self._engine
        ended_us = round(max(ended_at - began_at, 0.0) * 1e6)
        moves, lost_tokens = tuple(engine.moves), dict(engine.lost_tokens)
        return TrajectoryTimes(began_at, ended_us, engine.process_id, moves=moves, lost_tokens=lost_tokens)

    def _error(self) -> str | None:
        """Return a one-line description of the errors, or None."""
        table, parts = self._table, [self._record.error]
        if table.live:
            parts.append(f"{len(table.live)} calls are open")
        if unhealed := table.unhealed_failures():
            parts.append(f"{len(unhealed)} of {len(table.records)} calls were lost, the first: {unhealed[0].error}")
        line = " ".join("; ".join(part for part in parts if part).split())
        return line[:_MAX_ERROR_CHARS] or None

    async def _finish(self, end: SessionEnd) -> None:
        ended = SessionFinished(f"session {self.shown_id} was finished while this call ran")
        try:
            await self._end_calls(ended, end.wait_s)
            finished_at = self._parts.unix_time()
            await self._save(
                lambda record: replace(
                    record,
                    state=SessionState.FINISHED,
                    stop_reason=end.stop_reason,
                    error=end.error,
                    score=record.score.updated(end.score),
                    reward_error=end.reward_error,
                    finished_at=finished_at,
                    times=self._times(finished_at),
                )
            )
        finally:
            self._finishing = None

    async def _save(self, change: Callable[[SessionRecord], SessionRecord]) -> None:
        """Write a changed record to the journal, then to memory. Changes are serialized and not cancelled."""
        async with self._saving:
            record = change(self._record)
            saving = self._journal.save(record)
            await run_to_end(write(saving, self.session_id, self._parts.limits.journal_timeout_s))
            self._record = record

    def _check_score(self, score: Score) -> None:
        """Raise InvalidRequest for an invalid score. Path lengths can still grow and are checked at the end."""
        try:
            checked(score)
        except RewardError as error:
            raise InvalidRequest(str(error), param="reward") from error
        for turn_id in (*score.turn_rewards, *score.untrainable_turns, *score.paths):
            if not self.graph.has_turn(turn_id):
                raise InvalidRequest(
                    f"unknown turn {str(turn_id)[:128]!r}: this session has {self.graph.num_turns} turns",
                    param="reward",
                )

    def _require_open(self, consequence: str) -> None:
        if self._finishing is not None or self._record.state is SessionState.FINISHED:
            raise SessionFinished(f"session {self.shown_id} is finished: {consequence}")

    # Running calls

    def _start(self, chat_call: ChatCall, key: CallKey, *, is_streamed: bool) -> LiveCall:
        """Start a call with its first client. Raises Overloaded, or InvalidRequest at the turn limit."""
        self._check_room(chat_call)
        created_at = int(self._parts.unix_time())
        live = LiveCall(uuid.uuid4().hex, chat_call, key, created_at=created_at, is_streamed=is_streamed)
        live.join()
        self._table.live[live.call_id] = live
        live.task = asyncio.create_task(self._run(live), name=f"call {live.call_id}")
        # A task that is cancelled before its first step runs no `finally`, so deliver its failure here.
        live.task.add_done_callback(lambda _: self._deliver(live, _cut_off()))
        return live

    async def _end_calls(self, error: AgentLoopError, wait_s: float) -> None:
        """Wait up to `wait_s` for running calls, then fail the others with `error` and wait for their writes."""
        if (tasks := self._tasks()) and wait_s > 0:
            await asyncio.wait(tasks, timeout=wait_s)
        for live in self._table.live.values():
            live.give_up(error)
        if tasks := self._tasks():
            await asyncio.wait(tasks)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [live.task for live in self._table.live.values() if live.task is not None]

    def _check_room(self, chat_call: ChatCall) -> None:
        limits, live_calls = self._parts.limits, self._table.live.values()
        if len(live_calls) >= limits.max_open_calls:
            raise Overloaded(f"the session has {limits.max_open_calls} open calls, which is the limit: retry later")
        num_nodes = (
            self.graph.num_turns + sum(live.chat_call.num_choices for live in live_calls) + chat_call.num_choices
        )
        if num_nodes > limits.max_nodes:
            raise InvalidRequest(
                f"the session would have {num_nodes} turns, more than its limit {limits.max_nodes}"
            )

    async def _run(self, live: LiveCall) -> None:
        """Run a call from its prompt to its result or failure. Raises only CancelledError."""
        failure: BaseException = _cut_off()
        try:
            await self._drive(live)
        except asyncio.CancelledError:
            live.failure = live.failure or failure
            raise
        except Exception as error:
            failure = with_client_param(first_cause(error), live.chat_call)
            if not isinstance(failure, AgentLoopError):
                _log.error("call_broke", session=self.session_id, call=live.call_id, exc_info=failure)
            live.failure = live.failure or failure  # from here on, retries do not join this call
        finally:
            try:
                # An opened call must be closed in the journal, even if this task is cancelled again.
                if live.result is None and live.is_begun:
                    await run_to_end(self._fail(live, failure))
            finally:
                self._deliver(live, failure)

    async def _drive(self, live: LiveCall) -> None:
        async with live.interruptible():
            prepared = await prepare_call(live.chat_call, self.graph, self._parts, self._engine, live.call_id)
            await self._parts.keep_images(live.chat_call.images)  # before a record refers to them
            self._check_tokens(live, prepared.prompt)
            if live.failure is not None:
                raise live.failure  # abandoned while its prompt was created, before it was opened in the journal
            if prepared.overflow is not None:
                await self._answer_overflow(live, prepared.prompt, prepared.overflow)
                return
            self._open_call(live)
            started = self._parts.clock.now()
            try:
                replies = await self._sample(live, prepared, self._next_number(live.chat_call))
            finally:
                live.generate_s = self._parts.clock.now() - started
        # From here on the turns are written even if all clients leave: the tokens are sampled.
        live.is_past_giving_up = True
        await run_to_end(self._commit(live, prepared.prompt, replies))

    def _next_number(self, chat_call: ChatCall) -> int:
        """Return the turn number of choice 0, which is above those of earlier turns in session and history."""
        # The number is part of tool call ids, which distinguish turns with equal texts.
        number = max(self._num_numbered, sum(message.role == "assistant" for message in chat_call.messages))
        self._num_numbered = number + chat_call.num_choices
        return number

    async def _answer_overflow(self, live: LiveCall, prompt: Prompt, overflow: ContextLengthExceeded) -> None:
        """Answer a call whose prompt fills the context with empty choices and the finish reason LENGTH.

        Raises `overflow` if the session refuses such answers, for raw prompts, and before the policy's first turn.
        The prompt is in no path, and a retry is processed again.
        """
        num_turns = self.graph.num_turns
        if live.chat_call.prompt_ids is not None or not num_turns:
            raise overflow
        # The overflow determines the session's stop reason, so it is recorded even if the answer is an error.
        await run_to_end(self._save(lambda record: replace(record, overflow_at=num_turns)))
        if self._record.refuses_overflow:
            raise overflow
        none = np.empty(0, np.float32)
        reply = Reply(Message("assistant"), none.astype(np.int32), none, (), FinishReason.LENGTH, is_closed=False)
        nodes = self._nodes_of(live, prompt, [reply] * live.chat_call.num_choices)
        if live.is_streamed:
            for piece in whole_pieces(nodes):
                live.add_piece(piece)
        live.result = ChatResult(live.call_id, live.created_at, self.shown_id, prompt.ids, nodes, is_overflow=True)

    def _check_tokens(self, live: LiveCall, prompt: Prompt) -> None:
        """Reserve the prompt's new tokens. Raises InvalidRequest at the session's token limit."""
        max_tokens = self._parts.limits.max_tokens
        live.num_new_tokens = len(prompt.observed_ids)
        num_tokens = self.graph.num_tokens + sum(other.num_new_tokens for other in self._table.live.values())
        if num_tokens >= max_tokens:
            raise InvalidRequest(f"the session would have {num_tokens} tokens, and its limit is {max_tokens}")

    async def _sample(self, live: LiveCall, prepared: PreparedCall, number: int) -> list[Reply]:
        """Sample all choices concurrently; if one fails, all fail. `number` is the turn number of choice 0."""
        choices = range(live.chat_call.num_choices)
        turns = [self._turn_request(live, prepared, number, choice_index) for choice_index in choices]
        reader, show = self._parts.reader, live.add_piece if live.is_streamed else None
        return await side_by_side([sample_turn(self._engine, reader, turn, show=show) for turn in turns])

    def _turn_request(self, live: LiveCall, prepared: PreparedCall, number: int, choice_index: int) -> TurnRequest:
        chat_call, sampling = live.chat_call, prepared.sampling.of_choice(choice_index)
        num_known = len(prepared.prompt.ids) - len(prepared.prompt.observed_ids)
        if sampling.weight_version is None:
            sampling = replace(sampling, weight_version=self._record.weight_version)
        keeps_kv = self._parts.kv_policy is KVPolicy.KEEP
        return TurnRequest(
            GenerateRequest(
                request_id=f"{live.call_id}:{choice_index}",
                token_ids=prepared.prompt.ids,
                sampling=sampling,
                timeout_s=chat_call.timeout_s,
                trajectory_id=self.session_id,
                kv_version=self._first_version if keeps_kv else None,
                images=prepared.prompt.images,
                image_data=chat_call.images,
                keeps_kv=keeps_kv,
                traceparent=self._trace_of(live.turn_id(choice_index)),
                adapter=self._record.adapter,
                affinity=chat_call.affinity,
                num_known_tokens=num_known,
                routes_from=routes_from(num_known),
            ),
            Reading(
                chat_call.tools,
                number + choice_index,
                reads_calls=prepared.reads_calls,
                reads_reasoning=chat_call.prompt_ids is None and not chat_call.continues,
                shows_unread_calls=not self._record.gives_unread_calls,
            ),
            stop=chat_call.stop,
            stop_in_reasoning=chat_call.stop_in_reasoning,
            is_parallel=chat_call.is_parallel,
            choice_index=choice_index,
            deadline=live.deadline,
            stopwatch=self._stopwatch,
        )

    def _trace_of(self, turn_id: str) -> str:
        record = self._record
        name = assignment_id_of(record.rollout_id, record.group_id or self.shown_id, record.sample_index)
        return turn_context(self._parts.traces, f"{name}@0", record.traceparent, turn_id)

    async def _commit(self, live: LiveCall, prompt: Prompt, replies: Sequence[Reply]) -> None:
        """Write the turns to the journal, then add them to the graph and set the result."""
        nodes = self._nodes_of(live, prompt, replies)
        call_record = record_of(live, ModelCallState.COMMITTED)
        await self._close_call(call_record, nodes)
        # Without an await until the result is set, so that no other call sees half of the turns.
        for node in nodes:
            self._take(node)
        self._table.note(call_record)
        live.result = ChatResult(live.call_id, live.created_at, self.shown_id, prompt.ids, nodes)

    def _nodes_of(self, live: LiveCall, prompt: Prompt, replies: Sequence[Reply]) -> tuple[Node, ...]:
        return tuple(
            Node(
                node_id=live.turn_id(choice_index),
                call_id=live.call_id,
                choice_index=choice_index,
                parent_id=prompt.parent_id,
                observed=prompt.observed,
                observed_ids=prompt.observed_ids,
                reply=self.graph.told_once(
                    replace(
                        reply,
                        constraint="" if choice_index else reply.constraint,
                        traceparent=live.chat_call.traceparent,
                    )
                ),
                tools_key=prompt.tools_key,
                split=prompt.split,
                images=prompt.observed_images,
                begun=live.chat_call.begun,
                declaration=live.chat_call.declaration,
            )
            for choice_index, reply in enumerate(replies)
        )

    async def _fail(self, live: LiveCall, failure: BaseException) -> None:
        """Close an opened call without an answer. Errors of this write are logged: the client gets `failure`."""
        # If the engine refused the request, nothing was sampled, so the call counts as committed and not as lost.
        state = ModelCallState.COMMITTED if isinstance(failure, InvalidRequest) else ModelCallState.FAILED
        call_record = record_of(live, state, error=str(failure) or repr(failure))
        self._table.note(call_record)
        try:
            await self._close_call(call_record, ())
        except AgentLoopError as error:
            # The call stays open in the journal; a process that restores the session treats it as lost.
            _log.warning("failure_not_written", session=self.session_id, call=live.call_id, error=str(error))

    def _deliver(self, live: LiveCall, failure: BaseException) -> None:
        """Deliver the result or failure to the waiting clients. Idempotent."""
        if self._table.live.pop(live.call_id, None) is None:
            return
        if live.result is not None:
            live.succeed(live.result)
            return
        if not live.is_begun:
            self._table.note_unrecorded(live)
        live.fail(failure)

    def _open_call(self, live: LiveCall) -> None:
        """Open a call in the journal, then in memory. If this raises, the call has no effect."""
        call_record = record_of(live, ModelCallState.OPEN)
        try:
            self._journal.open_call(self.session_id, call_record)
        except AgentLoopError:
            raise
        except Exception as error:
            raise write_failure(self.session_id, error) from error
        live.is_begun = True
        self._table.note(call_record)

    async def _close_call(self, call_record: CallRecord, nodes: Sequence[Node]) -> None:
        writing = self._journal.close_call(self.session_id, call_record, nodes)
        await write(writing, self.session_id, self._parts.limits.journal_timeout_s)

    def _take(self, node: Node) -> None:
        """Add a node that is in the journal. Raises InvariantBroken if it does not fit the graph."""
        self.graph.add(node)
        self._num_tool_calls += len(node.reply.calls) + len(node.reply.unread_calls)
        if self._first_version is None and node.reply.weight_versions:
            self._first_version = node.reply.weight_versions[0].version

    def _answer_again(self, call_record: CallRecord) -> ChatResult:
        """Return the answer of a committed call."""
        # A scan of all turns: retries are rare, and an index would cost memory for every call.
        nodes = tuple(node for node in self.graph.nodes if node.call_id == call_record.call_id)
        if not nodes:
            raise InvariantBroken(f"call {call_record.call_id} is committed but has no turn")
        first = nodes[0]
        prompt_ids = () if first.parent_id is None else self.graph.context_ids(first.parent_id)
        prompt_ids = (*prompt_ids, *first.observed_ids.tolist())
        return ChatResult(call_record.call_id, call_record.created_at, self.shown_id, prompt_ids, nodes)


def _cut_off() -> ServiceUnavailable:
    return ServiceUnavailable("the call was interrupted by the end of its process: retry it")
