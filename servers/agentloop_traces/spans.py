"""OpenTelemetry spans of trajectories and weight updates, created from their records after their end.

    invoke_agent LOOP      from the queue to the end; the LOOP of a session is `session`
      queue, reward
      move                 to another replica (no duration)
      chat MODEL           a turn until its calls have results; the event `sampled` is the time of its last token
        llm_request        created by the engine if its traces are enabled, not here
        execute_tool TOOL
    weight_update
      stage, stall, canary   per replica; turns interrupted by the update link to it

Names follow the GenAI semantic conventions in the version of `SCHEMA`; they are not stable, so all of them are in
this module. Our own names begin with `agentloop.`. Ids are derived from the run and the trajectory, so a repeated
export has the same ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agentloop import __version__
from agentloop.api.coordinator import UpdateReport, assignment_id_of
from agentloop.observability.trace_context import TraceIds, turn_key
from agentloop.types import Message, SplitReason, TokenPath, ToolCallTimes, ToolOutcome, Trajectory, Turn, TurnTimes
from agentloop.values import codec

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"

MAX_SPANS = 500
"""Maximum number of spans per trace. The trace of a longer trajectory has only its first turns."""

_SCOPE = InstrumentationScope("agentloop", __version__, SCHEMA)

_SPAN_BYTES = 1000  # maximum size of a span without messages, in practice
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_MAX_NAME_CHARS = 64  # tool names are truncated: the policy may write any name
_MAX_TEXT_BYTES = 3 << 20  # messages per trace; later turns have no messages

Value: TypeAlias = str | float | tuple[str, ...] | tuple[int, ...]
About: TypeAlias = dict[str, Value | None]


class SpanMaker:
    """Creates a run's traces. `model` is the served model name or empty; `content` adds messages to the spans."""

    def __init__(self, run: str, model: str, *, content: bool = False) -> None:
        self._run = run
        self._model = model
        self._content = content
        self._resource = Resource(
            {"service.name": "agentloop", "service.version": __version__, "agentloop.run": run}
        )

    def is_sampled(self, record: Trajectory, share: float) -> bool:
        """Return True if the record is in the sample of size `share`, or its caller's trace is recorded."""
        return self._ids_of(record).is_sampled(share)

    def trace(self, ended: Trajectory | UpdateReport) -> Trace:
        """Return the trace of a record or an update. It has no spans for a record without times."""
        return self._of_update(ended) if isinstance(ended, UpdateReport) else self._of_record(ended)

    def _ids_of(self, record: Trajectory) -> TraceIds:
        return TraceIds(f"{self._run}/{_name_of(record)}@{record.attempt}", record.traceparent)

    def _ids_of_update(self, version: int) -> TraceIds:
        return TraceIds(f"{self._run}/weights/{version}")

    def _of_record(self, record: Trajectory) -> Trace:
        times, loop = record.times, record.loop or "session"
        if times is None:
            return Trace([], 0)
        trace = _TraceMaker(self._resource, self._ids_of(record), _name_of(record), times.began_at)
        queue_us, reward_us = round(record.timings.queue_s * 1e6), round(record.timings.reward_s * 1e6)
        if queue_us:
            trace.add("queue", "queue", -queue_us, 0, {})
        if reward_us:
            trace.add("reward", "reward", times.ended_us - reward_us, times.ended_us, {})
        for index, move in enumerate(times.moves[: MAX_SPANS // 10]):
            trace.add(f"move {index}", "move", move.at_us, move.at_us, {"agentloop.replica": move.replica_id})
        num_left_out = self._add_turns(trace, record.paths, times.tool_calls)
        about: About = {
            "gen_ai.agent.name": loop,
            "gen_ai.provider.name": "agentloop",
            "gen_ai.request.model": self._model or None,
            "error.type": record.failure,
            "agentloop.task": record.task_id,
            "agentloop.stop_reason": record.stop_reason,
            "agentloop.reward": record.reward,
            "agentloop.weight_versions": record.versions,
            "agentloop.staleness": record.staleness,
            "agentloop.worker": times.worker,
            "agentloop.turns_left_out": num_left_out,
        }
        root = trace.add_root(f"invoke_agent {loop}", times.ended_us, about)
        _link_caller(root, record.trace_link)
        if self._content:  # the error may have the policy's text
            root.error = record.error or record.reward_error or ""
        return trace.made()

    def _add_turns(
        self, trace: _TraceMaker, paths: Sequence[TokenPath], tool_calls: Sequence[ToolCallTimes]
    ) -> int:
        """Add turns with their calls up to `MAX_SPANS`. Returns the number of omitted turns."""
        num_turns, calls = sum(len(path.own_turns) for path in paths), deque(tool_calls)
        chats = sorted((chat for path in paths for chat in _chats(path)), key=lambda chat: chat.times.begun_us)
        for number, chat in enumerate(chats):
            ran: list[ToolCallTimes] = []
            while calls and (number + 1 == len(chats) or calls[0].begun_us < chats[number + 1].times.begun_us):
                ran.append(calls.popleft())
            if len(trace.spans) + 1 + len(ran) >= MAX_SPANS:  # reserve one span for the root
                return num_turns - number
            span = self._add_chat(trace, chat)
            ids = [call.id for message in chat.messages[-1:] for call in message.tool_calls]
            for index, (call, call_id) in enumerate(zip_longest(ran, ids[: len(ran)])):
                error, name = None if call.outcome is ToolOutcome.OK else call.outcome, call.name[:_MAX_NAME_CHARS]
                about: About = {"gen_ai.tool.name": name, "gen_ai.tool.call.id": call_id, "error.type": error}
                key, ended_us = f"tool {chat.turn.turn_id} {index}", call.begun_us + call.duration_us
                trace.add(key, f"execute_tool {name}", call.begun_us, ended_us, about, span.span_id)
                span.ended_us = max(span.ended_us, ended_us)
        return num_turns - len(chats)

    def _add_chat(self, trace: _TraceMaker, chat: _Chat) -> _TraceSpan:
        turn, times = chat.turn, chat.times
        about: About = {
            "gen_ai.provider.name": turn.engine or "agentloop",
            "gen_ai.request.model": self._model or None,
            "gen_ai.usage.input_tokens": turn.prompt_len,
            "gen_ai.usage.output_tokens": turn.end - turn.start,
            "gen_ai.response.finish_reasons": (turn.finish_reason,),
            "agentloop.turn": turn.turn_id,
            "agentloop.replica": turn.replica_id,
            "agentloop.cached_tokens": turn.cached_tokens,
            "agentloop.weight_versions": chat.versions,
            "agentloop.queue_s": times.queue_us / 1e6,
            "agentloop.unavailable_s": times.unavailable_us / 1e6,
            "agentloop.split_reason": chat.split_reason,
        }
        span = trace.add(
            turn_key(turn.turn_id), f"chat {self._model}".rstrip(), times.begun_us, times.ended_us, about
        )
        if self._content and chat.messages:
            *observed, answer = map(_parts, chat.messages)
            texts = orjson.dumps(observed), orjson.dumps([answer | {"finish_reason": turn.finish_reason}])
            trace.text_room -= sum(map(len, texts))
            for key, text in zip(("gen_ai.input.messages", "gen_ai.output.messages"), texts, strict=True):
                if trace.text_room >= 0:
                    span.about[key] = text.decode()
        events = {"first_token": times.first_token_us, "sampled": times.ended_us}
        span.events += [(event, at_us) for event, at_us in events.items() if at_us is not None]
        updates = map(self._ids_of_update, chat.versions[1:])
        span.links += [(update.trace_id, update.root_id) for update in updates]
        if turn.traceparent != trace.ids.traceparent:
            _link_caller(span, turn.traceparent)
        return span

    def _of_update(self, report: UpdateReport) -> Trace:
        ids = self._ids_of_update(report.version)
        trace = _TraceMaker(self._resource, ids, f"weights/{report.version}", report.began_at)
        for replica in report.replicas[: MAX_SPANS // 3 - 1]:
            paused_at_ms, resumed_at_ms = replica.paused_at_ms, replica.paused_at_ms + replica.stall_ms
            begins = {"stage": 0.0, "stall": paused_at_ms, "canary": resumed_at_ms}
            durations = replica.stage_ms, replica.stall_ms, replica.canary_ms
            for (step, begun_ms), ms in zip(begins.items(), durations, strict=True):
                error = replica.error and "update_failed"
                about: About = {"agentloop.replica": replica.replica_id, "error.type": error}
                begun_us, ended_us = round(begun_ms * 1e3), round((begun_ms + ms) * 1e3)
                if ms:
                    trace.add(f"{step} {replica.replica_id}", step, begun_us, ended_us, about)
        about = {"agentloop.weight_versions": (report.version,), "agentloop.kv_policy": report.kv_policy}
        trace.add_root("weight_update", round(report.total_ms * 1e3), about)
        return trace.made()


class Trace(NamedTuple):
    """The spans of one trace, and their approximate size in a request."""

    spans: list[ReadableSpan]
    num_bytes: int


@dataclass(slots=True)
class _TraceSpan:
    """A span under construction. Times are microseconds since the beginning of the trace."""

    span_id: bytes
    parent_id: bytes
    name: str
    begun_us: int
    ended_us: int
    about: About
    error: str = ""
    events: list[tuple[str, int]] = field(default_factory=list)
    links: list[tuple[bytes, bytes]] = field(default_factory=list)  # (trace id, span id)


class _TraceMaker:
    """A trace under construction. `began_at` is a Unix time in seconds."""

    def __init__(self, resource: Resource, ids: TraceIds, name: str, began_at: float) -> None:
        self.ids = ids
        self.spans: list[_TraceSpan] = []
        self.text_room = _MAX_TEXT_BYTES
        self._resource = resource
        self._name = name
        self._began_ns = round(began_at * 1e9)

    def add(
        self, key: str, name: str, begun_us: int, ended_us: int, about: About, parent_id: bytes | None = None
    ) -> _TraceSpan:
        """Add a span below the root or `parent_id`. `key` is unique; the operation is the name's first word."""
        ids: About = {"gen_ai.operation.name": name.partition(" ")[0], "gen_ai.conversation.id": self._name}
        attributes: About = {key: value for key, value in (ids | about).items() if value is not None}
        parent_id = self.ids.root_id if parent_id is None else parent_id
        self.spans.append(_TraceSpan(self.ids.span_id(key), parent_id, name, begun_us, ended_us, attributes))
        return self.spans[-1]

    def add_root(self, name: str, ended_us: int, about: About) -> _TraceSpan:
        """Add the root span, which covers all other spans."""
        root = self.add("", name, 0, ended_us, about, self.ids.caller_id)
        root.begun_us = min(span.begun_us for span in self.spans)
        root.ended_us = max(span.ended_us for span in self.spans)
        return root

    def made(self) -> Trace:
        num_text_bytes = _MAX_TEXT_BYTES - max(0, self.text_room)
        return Trace(list(map(self._readable, self.spans)), num_text_bytes + _SPAN_BYTES * len(self.spans))

    def _readable(self, span: _TraceSpan) -> ReadableSpan:
        is_failed = "error.type" in span.about
        return ReadableSpan(
            span.name,
            _context(self.ids.trace_id, span.span_id),
            _context(self.ids.trace_id, span.parent_id) if span.parent_id else None,
            self._resource,
            span.about,
            [Event(name, timestamp=self._at(at_us)) for name, at_us in span.events],
            [Link(_context(*link)) for link in span.links],
            SpanKind.CLIENT if span.about["gen_ai.operation.name"] == "chat" else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if is_failed else Status(),
            start_time=self._at(span.begun_us),
            end_time=self._at(span.ended_us),
            instrumentation_scope=_SCOPE,
        )

    def _at(self, microseconds: int) -> int:
        return self._began_ns + 1000 * microseconds


def _context(trace_id: bytes, span_id: bytes) -> SpanContext:
    return SpanContext(int.from_bytes(trace_id), int.from_bytes(span_id), is_remote=False, trace_flags=_SAMPLED)


def _name_of(record: Trajectory) -> str:
    return assignment_id_of(record.rollout_id, record.group_id, record.sample_index)


class _Chat(NamedTuple):
    """A turn with its messages and versions."""

    turn: Turn
    times: TurnTimes
    messages: Sequence[Message]  # the messages since the previous turn, and the answer; empty if unknown
    versions: tuple[int, ...]  # weight versions of its tokens, in order
    split_reason: SplitReason | None  # the path's split reason, for the path's first turn


def _chats(path: TokenPath) -> Iterator[_Chat]:
    """Yield a path's own turns that have times. The path's last assistant messages are the turns' answers."""
    num_turns, num_shared = len(path.turns), len(path.turns) - len(path.own_turns)
    answers = [position for position, message in enumerate(path.messages, 1) if message.role == "assistant"]
    ends = ([0] * (num_turns + 1) + answers)[-num_turns - 1 :]  # the first entry is the end of earlier messages
    ends[0] = 0
    for number, turn in enumerate(path.turns):
        if number >= num_shared and turn.times is not None:
            first = bisect_right(path.weight_versions, turn.start, key=lambda span: span.end)
            last = bisect_right(path.weight_versions, turn.end - 1, lo=first, key=lambda span: span.start)
            versions = tuple(span.version for span in path.weight_versions[first:last])
            reason = path.split_reason if number == num_shared else None
            yield _Chat(turn, turn.times, path.messages[ends[number] : ends[number + 1]], versions, reason)


def _link_caller(span: _TraceSpan, traceparent: str) -> None:
    """Link a span to its caller's span in another trace, unless `traceparent` is empty."""
    if traceparent:
        caller = TraceIds("", traceparent)
        span.links.append((caller.trace_id, caller.caller_id))


def _parts(message: Message) -> dict[str, Any]:
    """Return a message in the form of the semantic conventions: a role with parts."""
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.role == "tool":
        parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": message.content})
    elif message.content:
        parts.append({"type": "text", "content": message.content})
    for call in message.tool_calls:
        arguments = codec.to_builtins(call.arguments)
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments})
    return {"role": message.role, "parts": parts}
