"""Traces made from records and update reports, decoded with the library's own messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from agentloop import types
from agentloop.api.coordinator import ReplicaUpdate, UpdateReport
from agentloop.types import Message, Move, ToolCall, Trajectory, TurnTimes
from agentloop_traces.sink import MAX_REQUEST_BYTES
from agentloop_traces.spans import MAX_SPANS, SpanMaker
from tests.support.records.samples import make_path, make_trajectory

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
BEGAN_NS = 1_700_000_000 * 10**9  # the start of the samples
MAKER = SpanMaker("run", "policy")


def encoded(maker: SpanMaker, ended: Trajectory | UpdateReport) -> bytes:
    """Return the trace as an OTLP request."""
    return bytes(encode_spans(maker.trace(ended).spans).SerializeToString())


def spans_of(request_bytes: bytes) -> list[Span]:
    """Return the spans of an OTLP request as a receiver decodes them."""
    request = ExportTraceServiceRequest.FromString(request_bytes)
    return [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]


def attributes_of(span: Span) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in span.attributes}


def check_tree(spans: Iterable[Span], caller: bytes = b"") -> dict[bytes, Span]:
    """Return the spans of one trace by id, after checking that they form a tree within their parents' times."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(list(spans))
    assert len({span.trace_id for span in by_id.values()}) == 1
    assert [span.parent_span_id for span in by_id.values()].count(caller) == 1
    for span in by_id.values():
        assert {"gen_ai.operation.name", "gen_ai.conversation.id"} <= set(attributes_of(span)), span.name
        parent = span if span.parent_span_id == caller else by_id[span.parent_span_id]
        at = parent.start_time_unix_nano, span.start_time_unix_nano, span.end_time_unix_nano
        assert sorted((*at, parent.end_time_unix_nano)) == [*at, parent.end_time_unix_nano], span.name
    return by_id


def record_of(**changed: Any) -> Trajectory:
    """Return a record of two turns (the first with two versions and a 150 µs call), a queue, a reward, a move."""
    record = make_trajectory(spans=((4, 0, 2), (5, 2, 3), (5, 5, 8)))
    assert record.times is not None
    times = record.times._replace(ended_us=2_000_000, moves=(Move(450, "replica-1"),))
    return replace(record, times=times, loop="tool_loop", staleness=1, **changed)


def named(record: Trajectory, name: str, maker: SpanMaker = MAKER) -> list[Span]:
    return [span for span in spans_of(encoded(maker, record)) if span.name == name]


def test_a_trajectory_is_one_tree_with_the_conventions_names():
    by_id = check_tree(spans_of(encoded(MAKER, record_of())))
    parents = [(one.name, by_id[one.parent_span_id].name) for one in by_id.values() if one.parent_span_id]
    of_root = [
        (name, "invoke_agent tool_loop") for name in ("queue", "reward", "move", "chat policy", "chat policy")
    ]
    assert sorted(parents) == sorted([*of_root, ("execute_tool calculator", "chat policy")])
    (root,), (first, *_) = named(record_of(), "invoke_agent tool_loop"), named(record_of(), "chat policy")
    (tool,) = named(record_of(), "execute_tool calculator")
    times = [
        (one.start_time_unix_nano - BEGAN_NS, one.end_time_unix_nano - BEGAN_NS) for one in (root, first, tool)
    ]
    assert times == [(-(10**8), 2 * 10**9), (0, 450_000), (300_000, 450_000)]
    common = {"gen_ai.conversation.id": "r/g-0/0"}
    assert attributes_of(root) == common | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "tool_loop",
        "gen_ai.provider.name": "agentloop",
        "gen_ai.request.model": "policy",
        "agentloop.task": "task-g-0",
        "agentloop.stop_reason": "completed",
        "agentloop.reward": 1.0,
        "agentloop.weight_versions": [4, 5],
        "agentloop.staleness": 1,
        "agentloop.worker": "worker-1",
        "agentloop.turns_left_out": 0,
    }
    assert attributes_of(first) == common | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentloop",
        "gen_ai.request.model": "policy",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
        "agentloop.turn": "0",
        "agentloop.replica": "replica-0",
        "agentloop.cached_tokens": 0,
        "agentloop.weight_versions": [4, 5],
        "agentloop.queue_s": 0.0,
        "agentloop.unavailable_s": 0.0,
    }
    assert attributes_of(tool) == common | {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "calculator",
        "gen_ai.tool.call.id": "call-1",
        "error.type": "timeout",
    }
    assert [one.status.code for one in (root, first, tool)] == [0, 0, Status.STATUS_CODE_ERROR]
    assert [(one.name, one.time_unix_nano - BEGAN_NS) for one in first.events] == [
        ("first_token", 100_000),
        ("sampled", 300_000),
    ]
    assert encoded(MAKER, replace(record_of(), times=None)) == b""


def test_ids_follow_from_the_run_and_the_trajectory():
    record = record_of()
    assert encoded(MAKER, record) == encoded(SpanMaker("run", "policy"), record)
    (trace_id,) = {span.trace_id for span in spans_of(encoded(MAKER, record))}
    others = [replace(record, sample_index=1), replace(record, group_id="g-1"), replace(record, rollout_id="r2")]
    ids = {span.trace_id for one in others for span in spans_of(encoded(MAKER, one))}
    assert len(ids | {trace_id, spans_of(encoded(SpanMaker("run-2", "policy"), record))[0].trace_id}) == 5
    again = spans_of(encoded(MAKER, replace(record, attempt=1)))
    assert trace_id not in {span.trace_id for span in again}  # the other trace contains the root
    assert not {span.span_id for span in again} & {span.span_id for span in spans_of(encoded(MAKER, record))}


def test_a_callers_trace_is_adopted_and_sampled_as_it_is():
    record, (_, trace_id, caller, _) = record_of(traceparent=CALLER), CALLER.split("-")
    by_id = check_tree(spans_of(encoded(MAKER, record)), bytes.fromhex(caller))
    assert {span.trace_id.hex() for span in by_id.values()} == {trace_id}
    assert not MAKER.is_sampled(record, 0.0)
    assert MAKER.is_sampled(replace(record, traceparent=f"{CALLER[:-2]}01"), 0.0)
    records = [record_of(sample_index=index) for index in range(2000)]
    assert not MAKER.is_sampled(replace(record, traceparent="", trace_link=f"{CALLER[:-2]}01"), 0.0)
    nums = [sum(MAKER.is_sampled(one, share) for one in records) for share in (0.0, 0.25, 1.0)]
    assert (nums[0], nums[2], 400 < nums[1] < 600) == (0, 2000, True)


def test_texts_are_there_only_if_asked_for():
    record = record_of(stop_reason=types.StopReason.LOOP_FAILED, is_complete=False, error="What is a secret?")
    bare, maker = encoded(MAKER, record), SpanMaker("run", "policy", content=True)
    assert not [text for text in (b"What is", b"2 + 3", "5 \u2713".encode()) if text in bare]
    about = [attributes_of(span) for span in named(record, "chat policy", maker)]
    texts = [json.loads(one[f"gen_ai.{way}.messages"]) for one in about for way in ("input", "output")]
    call = {"type": "tool_call", "id": "call-1", "name": "calculator", "arguments": {"expression": "2 + 3"}}
    answer = {"type": "tool_call_response", "id": "call-1", "response": "5"}
    assert texts == [
        [{"role": "user", "parts": [{"type": "text", "content": "What is 2 + 3?"}]}],
        [{"role": "assistant", "parts": [call], "finish_reason": "stop"}],
        [{"role": "tool", "parts": [answer]}],
        [{"role": "assistant", "parts": [{"type": "text", "content": "5 \u2713\n\x00"}], "finish_reason": "stop"}],
    ]
    (root,) = named(record, "invoke_agent tool_loop", maker)
    assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "What is a secret?")


def long_record(num_turns: int, num_chars: int = 10) -> Trajectory:
    """Return a record with one call per turn, which ends before the next turn; each turn has its own version."""
    turns, calls, messages = [], [], [Message("user", "go")]
    for number in range(num_turns):
        times = TurnTimes(1000 * number, None, 1000 * number + 400)
        stop, call = types.FinishReason.STOP, ToolCall(f"call-{number}", "look")
        turns.append(types.Turn(9, number, number + 1, stop, "a", 0, str(number), times=times))
        calls.append(types.ToolCallTimes("look", 1000 * number + 500, 300, types.ToolOutcome.OK))
        messages += [Message("assistant", "x" * num_chars, (call,)), Message("tool", "", tool_call_id=call.id)]
    versions = tuple(types.WeightVersionSpan(number, number, number + 1) for number in range(num_turns))
    path = replace(
        make_path(), response_mask=np.ones(num_turns, np.bool_), turns=tuple(turns), messages=tuple(messages)
    )
    record = record_of(paths=(replace(path, weight_versions=versions),))
    assert record.times is not None
    return replace(record, times=record.times._replace(tool_calls=tuple(calls)))


@pytest.mark.parametrize("num_turns", [248, 249, 1000])
def test_a_long_trace_says_what_it_leaves_out(num_turns):
    record = long_record(num_turns)
    assert len(check_tree(spans_of(encoded(MAKER, record)))) <= MAX_SPANS
    shown = [attributes_of(span) for span in named(record, "chat policy")]
    ids = [attributes_of(span)["gen_ai.tool.call.id"] for span in named(record, "execute_tool look")]
    num_shown = min(num_turns, 248)  # 496 with their calls; a root, a queue, a reward and a move are added
    assert [one["agentloop.weight_versions"] for one in shown] == [[number] for number in range(num_shown)]
    assert ids == [f"call-{number}" for number in range(num_shown)]
    (root,) = named(record, "invoke_agent tool_loop")
    assert attributes_of(root)["agentloop.turns_left_out"] == num_turns - num_shown


def test_a_trace_with_long_messages_fits_a_request():
    request = encoded(SpanMaker("run", "policy", content=True), long_record(100, num_chars=100_000))
    shown = [span for span in spans_of(request) if "gen_ai.output.messages" in attributes_of(span)]
    assert (20 < len(shown) < 40, len(request) <= MAX_REQUEST_BYTES) == (True, True)


def test_turns_of_branches_are_shown_once_and_name_their_split():
    first, reason = make_path(), types.SplitReason.HISTORY_EDIT
    turns = (first.turns[0], replace(first.turns[1], turn_id="2", times=TurnTimes(1500, None, 1600)))
    record = record_of(paths=(first, replace(first, turns=turns, parent=0, num_shared=15, split_reason=reason)))
    check_tree(spans_of(encoded(MAKER, record)))
    about = [attributes_of(span) for span in named(record, "chat policy")]
    shown = [(one["agentloop.turn"], one.get("agentloop.split_reason")) for one in about]
    assert shown == [("0", None), ("1", None), ("2", "history_edit")]


def test_an_update_is_a_trace_that_the_turns_it_cut_link_to():
    good = ReplicaUpdate("a", 800.0, 20.0, paused_at_ms=900.0, canary_ms=5.0)
    replicas = (good, ReplicaUpdate("b", 700.0, 0.0, error="lost"))
    report = UpdateReport(5, 4, types.KVPolicy.KEEP, replicas, 950.0, began_at=1.7e9)
    found, root = {}, Span()
    for span in check_tree(spans_of(encoded(MAKER, report))).values():
        at_ms = [(ns - BEGAN_NS) // 10**6 for ns in (span.start_time_unix_nano, span.end_time_unix_nano)]
        found[span.name, attributes_of(span).get("agentloop.replica")] = at_ms
        root = root if span.parent_span_id else span
    assert found == {
        ("stage", "a"): [0, 800],
        ("stall", "a"): [900, 920],
        ("canary", "a"): [920, 925],
        ("stage", "b"): [0, 700],
        ("weight_update", None): [0, 950],
    }
    links = [[(one.trace_id, one.span_id) for one in span.links] for span in named(record_of(), "chat policy")]
    assert links == [[(root.trace_id, root.span_id)], []]
