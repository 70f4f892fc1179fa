"""Traces sent to a real OTLP/HTTP receiver: of a whole service, of an old run, and to a port without a listener."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientSession, web
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from structlog.testing import capture_logs

from agentloop.client.client import RolloutClient
from agentloop.engine.interface import Engine
from agentloop.rollout.context import LoopContext
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader
from agentloop.types import Message, RolloutTask, StopReason, Timings, ToolCall, Trajectory
from agentloop_servers.config.service import ServiceConfig, TracingSettings
from agentloop_servers.processes.engine_parts import build_engine
from agentloop_traces.sink import MAX_REQUEST_BYTES, Tracing, batches
from agentloop_traces.spans import Trace
from agentloop_view.export import export_records
from tests.parts.traces.test_spans import attributes_of, check_tree, spans_of
from tests.support.engine.recording import RecordingEngine
from tests.support.records.samples import make_trajectory
from tests.support.service.whole_service import simulated_config, whole_service

ROOT = Path(__file__).parents[3]
DEAD = "http://127.0.0.1:9"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LATER = "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203332-01"  # the context of another call of the same session


class Receiver:
    """An OTLP receiver that stores its requests. It answers while `answers` is set."""

    def __init__(self) -> None:
        self.url, self.answers = "", asyncio.Event()
        self.answers.set()
        self.spans: list[Span] = []
        self.headers: list[Mapping[str, str]] = []

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        assert request.content_type == "application/x-protobuf"
        assert len(body) <= MAX_REQUEST_BYTES
        self.headers.append(request.headers)
        self.spans += spans_of(body)
        await self.answers.wait()
        return web.Response(content_type="application/x-protobuf")

    @property
    def num_traces(self) -> int:
        return len({span.trace_id for span in self.spans})

    @property
    def traces(self) -> dict[str, list[Span]]:
        """Return the spans by conversation; the spans of one conversation must have one trace id."""
        found = defaultdict(list)
        for span in self.spans:
            found[str(attributes_of(span)["gen_ai.conversation.id"])].append(span)
        return dict(found)


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver, server = Receiver(), web.Application(client_max_size=2 * MAX_REQUEST_BYTES)
    server.router.add_post("/otel/v1/traces", receiver.take)
    runner = web.AppRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/otel"
    try:
        yield receiver
    finally:
        await runner.cleanup()


class Works:
    """A loop that samples a turn, calls a tool and samples another turn."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=16)
        await ctx.run_tools([ToolCall("c", "calculator", {"expression": "2 + 3"})])
        await ctx.sample(max_tokens=16)


class Fails:
    """A loop that fails in its first turn."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        raise ValueError("no turn")


def id_of(record: Trajectory) -> str:
    return f"{record.rollout_id}/{record.group_id}/{record.sample_index}"


@pytest.mark.slow
async def test_each_trajectory_of_a_service_is_one_trace_live_and_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b,x-other=c")
    task = RolloutTask("t", (Message("user", "Hi"),), ("calculator",), f"{__name__}:Works", "exact_match", "5")
    said = [{"role": "user", "content": "Hi"}]
    chat, asked = {"model": "policy", "messages": said, "max_tokens": 4}, {"task_id": "t", "messages": said}
    async with receiving() as receiver:
        tracing = {"endpoint": receiver.url, "sample": 1.0, "engine": True}
        config = simulated_config(mode="standalone", workers={"allowed_imports": [__name__]}, tracing=tracing)
        engines: list[RecordingEngine] = []

        def build(config: ServiceConfig) -> Engine:
            engines.append(RecordingEngine(build_engine(config)))
            return cast(Engine, engines[-1])

        service = whole_service(config, tmp_path, build)
        async with service as url, RolloutClient(url) as client, ClientSession() as http:

            async def post(path: str, body: dict[str, Any], **headers: str) -> Any:
                async with http.post(f"{url}{path}", json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    return await answer.json() if "json" in answer.content_type else await answer.text()

            rollout = await client.submit([task, replace(task, loop=f"{__name__}:Fails")], num_samples=3)
            assert len([record async for record in rollout]) == 6
            for context in (CALLER, CALLER, LATER):
                body = {**chat, "stream": context == LATER}
                await post("/v1/chat/completions", body, traceparent=context, **{"x-session-id": "at-first-use"})
            await post("/sessions/at-first-use/finish", {})
            made = await post("/sessions", {"session_id": "made"}, traceparent=CALLER)
            await post("/sessions/made/finish", {}, authorization=f"Bearer {made['control_key']}")
            for name, tasks in (("one", [asked]), ("two", [asked, asked])):
                await post("/rollouts", {"rollout_id": name, "tasks": tasks}, traceparent=CALLER)
            ids = {"token_ids": [1, 2], "sampling": {"max_tokens": 1}}
            await post("/generate", ids, traceparent=LATER)
            await client.update_weights(ROOT / "examples" / "tiny_policy" / "v1", version=1)
            async with asyncio.timeout(60):
                of_submits = {"one/one-000000/0", "two/two-000000/0", "two/two-000001/0"}
                while not {"weights/1", *of_submits} <= set(receiver.traces):
                    await asyncio.sleep(0.05)
        reader = TrajectoryReader(tmp_path / STORE_NAME)
        stored = list(reader.trajectories())
        reader.close()
        told = defaultdict(set)
        for request in (one for engine in engines for one in engine.requests):
            told[request.request_id.partition("-")[0]].add(request.traceparent)
        assert (told.pop("direct"), told.pop("canary", {""})) == ({LATER}, {""})
        live, receiver.spans = receiver.traces, []
        assert {record.loop for record in stored} == {f"{__name__}:Works", f"{__name__}:Fails", "tool_loop", ""}
        callers = {record.group_id: record.traceparent for record in stored if record.traceparent}
        assert callers == dict.fromkeys(("at-first-use", "made", "one-000000"), CALLER)
        await asyncio.to_thread(export_records, str(tmp_path), "otlp", endpoint=receiver.url)
        assert f"{len(stored) + 1} traces sent" in capsys.readouterr().out
        sent = receiver.traces
        for traces in (live, sent):
            update = traces.pop("weights/1")
            steps = [span.name for span in check_tree(update).values()]
            assert steps.count("stage") == steps.count("stall") == config.num_replicas
            assert set(traces) == {id_of(record) for record in stored}
            given = {f"00-{one.trace_id.hex()}-{one.span_id.hex()}-01" for one in chats(traces)}
            assert set().union(*told.values()) == given
            linked = [link.trace_id for one in chats(traces) for link in one.links]
            of_calls = [one.hex() for one in linked if one != update[0].trace_id]  # an update may have cut turns
            assert of_calls == [LATER.split("-")[1]]
            for record in stored:
                _, trace_id, caller, _ = (record.traceparent or "---").split("-")
                spans = check_tree(traces[id_of(record)], bytes.fromhex(caller)).values()
                assert trace_id in ("", traces[id_of(record)][0].trace_id.hex())
                (root,) = [span for span in spans if span.name.startswith("invoke_agent")]
                of_batch = [CALLER.split("-")[2]] if record.rollout_id == "two" else []
                assert [link.span_id.hex() for link in root.links] == of_batch
                names = [span.name.partition(" ")[0] for span in spans if span.name not in ("queue", "reward")]
                num_turns = sum(len(path.own_turns) for path in record.paths)
                calls = ["execute_tool"] * len(record.times.tool_calls if record.times else ())
                assert sorted(names) == sorted(["invoke_agent", *["chat"] * num_turns, *calls])
        span_ids = [{span.span_id for spans in traces.values() for span in spans} for traces in (live, sent)]
        assert span_ids[0] == span_ids[1]
        assert {(one["x-key"], one["x-other"]) for one in receiver.headers} == {("a b", "c")}


def chats(traces: Mapping[str, list[Span]]) -> list[Span]:
    return [span for spans in traces.values() for span in spans if span.name.startswith("chat")]


def settings(url: str, **changed: Any) -> TracingSettings:
    return TracingSettings.model_validate({"endpoint": url, "sample": 0.0, **changed})


def ended(index: int, seconds: float = 1.0, stop_reason: StopReason = StopReason.COMPLETED) -> Trajectory:
    record = make_trajectory(sample_index=index, stop_reason=stop_reason)
    return replace(record, timings=Timings(total_s=seconds))


async def test_failed_and_slowest_trajectories_are_kept():
    async with receiving() as receiver:
        tracing = Tracing(settings(receiver.url), "run", "policy")
        for index in range(1500):
            tracing.give(ended(index, seconds=1.0 + index % 7))
        tracing.give(ended(1500, stop_reason=StopReason.LOOP_FAILED))
        tracing.give(ended(1501, seconds=9.0))
        await asyncio.to_thread(tracing.close)
        assert set(receiver.traces) == {"r/g-0/1500", "r/g-0/1501"}
        none = Tracing(settings(receiver.url, keep=[]), "run", "policy")
        for index in range(200, 400):
            none.give(ended(index, seconds=index, stop_reason=StopReason.LOOP_FAILED))
        await asyncio.to_thread(none.close)
        assert len(receiver.traces) == 2


@pytest.mark.slow
async def test_a_burst_comes_through_and_what_a_silent_receiver_leaves_is_bounded_and_counted(monkeypatch):
    monkeypatch.setattr("agentloop_traces.sink._SEND_TIMEOUT_S", 100.0)
    async with receiving() as receiver:
        for url, num, all_come in ((receiver.url, 2000, True), (receiver.url, 6000, False), (DEAD, 100, False)):
            receiver.spans, receiver.headers = [], []
            receiver.answers.clear()
            with capture_logs() as logged:
                tracing = Tracing(settings(url, sample=1.0), "run", "policy")
                records = [ended(index) for index in range(num)]
                tracing.give(records[0])
                # the thread waits for the response to its batch
                while url == receiver.url and not receiver.headers:
                    await asyncio.sleep(0.01)
                begun = time.thread_time()
                for one in records[1:]:
                    tracing.give(one)
                spent_s = time.thread_time() - begun
                receiver.answers.set()
                async with asyncio.timeout(60):
                    while not logged and receiver.num_traces < num:
                        await asyncio.sleep(0.1)
                await asyncio.to_thread(tracing.close)
            num_dropped = sum(one["num"] for one in logged if one["event"] == "traces_dropped")
            assert (num_dropped == 0) == all_come, logged
            if url == receiver.url:  # otherwise the receiver still gets spans of the previous exporter
                assert num_dropped <= num - receiver.num_traces
            assert spent_s < num * 0.0005


def test_requests_are_bounded_and_end_where_nothing_came():
    half, span = MAX_REQUEST_BYTES // 2, ReadableSpan("s")
    few, large, without = Trace([span], 1), Trace([span], half), Trace([], 0)
    traces = [few, few, None, None, large, few, large, without, few, None, few]
    sizes = [[trace.num_bytes for trace in batch] for batch in batches(traces)]
    assert sizes == [[1, 1], [half, 1], [half, 1], [1]]
