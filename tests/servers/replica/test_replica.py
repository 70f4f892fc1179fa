"""An engine behind its private port behaves like the engine: results, errors, cancellation and authentication."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import (
    ALL_MEMORY,
    Adapter,
    Delta,
    MemoryTag,
    OnProgress,
    Progress,
    StagingDevice,
    WeightUpdate,
)
from agentloop.engine.request_watch import ReportPace
from agentloop.errors import (
    AdapterInUse,
    CheckpointUnreadable,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineLost,
    EnginePaused,
    EngineUnreachable,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    ServiceUnavailable,
    WeightsRefused,
)
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import Faults, LatencyModel
from agentloop.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    KVPolicy,
    Load,
    PauseMode,
    SamplingParams,
    WeightVersionSpan,
)
from agentloop.values.codec import encode
from agentloop.values.sampled_tokens import SampledTokens
from agentloop_servers.private_http.client import Connector
from agentloop_servers.private_http.fencing import EPOCH_HEADER, ORDER_HEADER
from agentloop_servers.private_http.server import PrivateServer
from agentloop_servers.private_http.trust import Trust
from agentloop_servers.replica import client
from agentloop_servers.replica.client import EngineClients
from agentloop_servers.replica.protocol import FRAMES, PauseOrder, frame
from agentloop_servers.replica.server import DataPlaneServer, Replica, ReplicaConfig, StallWatch
from tests.support.fleet.directory import Directory
from tests.support.fleet.pushes import Sender, Wire

SPEC = SimulatedSpec(vocab_size=1000, max_context_tokens=512)
SLOW = SimulatedSpec(vocab_size=1000, max_context_tokens=4096, latency=LatencyModel(decode_s=0.002))


def request(request_id: str = "r", max_tokens: int = 20, **fields: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(request_id, tuple(range(1, 40)), sampling, **fields)  # type: ignore[arg-type]


class Plane:
    """A served engine and a client's view of it."""

    def __init__(self, spec: SimulatedSpec, engine: SimulatedEngine | None = None) -> None:
        self.wire = Wire(RealClock())
        receiver = self.wire.receiver()
        self.engine = receiver.engine = engine or SimulatedEngine(spec, faults=Faults(), weight_source=receiver)
        self.server = DataPlaneServer(self.engine, "replica-1", Trust("secret"))
        self.clients = EngineClients(Trust("secret"))

    async def __aenter__(self) -> "Plane":
        await self.engine.start()
        await self.server.start()
        self.remote = self.clients.connect(self.server.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.clients.close()
        await self.server.close()
        await self.engine.close()


async def test_a_generation_is_the_same_and_names_its_replica():
    async with Plane(SPEC) as plane:
        there = await plane.remote.generate(request())
        here = await plane.engine.generate(request("other"))
    assert there.token_ids == here.token_ids
    assert there.logprobs == pytest.approx(here.logprobs)
    assert there.weight_versions == here.weight_versions
    assert there.replica_id == "replica-1"
    assert there.load.kv_capacity_tokens > 0


async def test_a_stream_adds_up():
    async with Plane(SPEC) as plane:
        pieces = [piece async for piece in plane.remote.stream(request())]
    *deltas, last = pieces
    assert isinstance(last, Generation)
    assert all(isinstance(piece, Delta) for piece in deltas)
    assert tuple(token for piece in deltas for token in piece.token_ids) == last.token_ids


async def test_a_workers_key_generates_and_commands_nothing(tmp_path):
    workers = EngineClients(Trust("secret").of_workers)
    async with Plane(SPEC) as plane:
        remote = workers.connect(plane.server.url)
        try:
            assert (await remote.generate(request())).token_ids
            assert isinstance([piece async for piece in remote.stream(request("s"))][-1], Generation)
            await remote.abort("s")
            for refused in (
                remote.pause(PauseMode.KEEP),
                remote.resume(),
                remote.commit(1),
                remote.sleep(1),
                remote.stage(WeightUpdate(1, str(tmp_path))),
                remote.offer(),
            ):
                with pytest.raises(Forbidden):
                    await refused
            assert not plane.engine.is_paused
        finally:
            await workers.close()


class StubbornEngine(SimulatedEngine):
    """Sends one more piece to a disconnected caller before it receives the cancellation."""

    is_ended = False

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        piece = Delta((1,), (-0.5,), (WeightVersionSpan(0, 0, 1),))
        try:
            yield piece
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            yield piece
        finally:
            self.is_ended = True


async def test_a_stream_ends_at_once_where_writing_to_its_caller_fails():
    engine = StubbornEngine(SPEC)
    async with Plane(SPEC, engine) as plane:
        with capture_logs() as logs:
            stream = plane.remote.stream(request())
            await anext(stream)
            await stream.aclose()
            async with asyncio.timeout(60):
                while not engine.is_ended:
                    await asyncio.sleep(0.01)
    assert logs == []


async def test_control_verbs_reach_the_engine_and_bring_its_state(tmp_path):
    async with Plane(SPEC) as plane:
        await plane.remote.start()
        assert plane.remote.info == plane.engine.info
        await plane.remote.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        assert plane.engine.is_paused
        assert plane.remote.is_paused
        await plane.remote.resume()
        assert not plane.remote.is_paused
        assert plane.remote.weight_version == 0
        with pytest.raises(Conflict):
            await plane.remote.commit(7)
        with pytest.raises(CheckpointUnreadable):
            await plane.remote.stage(WeightUpdate(1, str(tmp_path / "missing")))
        await plane.remote.check_health()


async def test_reports_of_stage_and_commit_come_back(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    async with Plane(SPEC) as plane:
        staged = await plane.remote.stage(WeightUpdate(3, str(tmp_path)))
        assert (staged.staging_device, staged.transport, staged.num_bytes) == (StagingDevice.FILES, "directory", 10)
        await plane.remote.pause(PauseMode.KEEP)
        assert (await plane.remote.commit(3)).num_verified == 1
        assert plane.remote.weight_version == 3
        await plane.remote.resume()


async def test_adapters_are_loaded_and_unloaded_over_the_port(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    async with Plane(replace(SLOW, max_loras=2)) as plane:
        loaded = await plane.remote.load_adapter(Adapter("tools", 7, str(tmp_path)))
        assert (loaded.transport, loaded.num_bytes, plane.remote.info.max_loras) == ("adapter", 10, 2)
        generation = await plane.remote.generate(request(adapter="tools"))
        assert [span.version for span in generation.weight_versions] == [7]
        running = asyncio.create_task(plane.remote.generate(request(max_tokens=500, adapter="tools")))
        async with asyncio.timeout(60):
            while not plane.engine.load().num_running:
                await asyncio.sleep(0.01)
        with pytest.raises(AdapterInUse):
            await plane.remote.unload_adapter("tools")
        await plane.remote.abort("r")
        await running
        await plane.remote.unload_adapter("tools")
        with pytest.raises(ModelNotFound):
            await plane.remote.generate(request(adapter="tools"))


async def test_a_push_travels_whole_and_its_relay_too():
    async with Plane(SPEC) as plane:
        source = plane.wire.listen(Sender(5, is_one_phase=True))
        staged = await plane.remote.stage(WeightUpdate(5, push=replace(source, num_receivers=1)))
        assert staged.staging_device is StagingDevice.NOWHERE
        await plane.remote.pause(PauseMode.KEEP)
        assert (await plane.remote.commit(5)).transfer_ms >= 0.0
        await plane.remote.resume()
        offer = await plane.remote.offer()
        assert offer is not None
        assert plane.wire.problems == []


async def test_sleep_and_wake_bring_the_state():
    async with Plane(SPEC) as plane:
        await plane.remote.sleep(1)
        assert plane.remote.asleep == plane.engine.asleep == ALL_MEMORY
        assert plane.remote.is_paused
        with pytest.raises(Conflict):
            await plane.remote.resume()
        await plane.remote.wake(frozenset({MemoryTag.WEIGHTS}))
        assert plane.remote.asleep == {MemoryTag.KV_CACHE}
        await plane.remote.wake()
        assert plane.remote.asleep == frozenset()
        await plane.remote.resume()
        assert await plane.remote.generate(request())


def numbered(epoch: int, number: int) -> dict[str, str]:
    return {EPOCH_HEADER: str(epoch), ORDER_HEADER: str(number)}


async def test_orders_that_arrive_late_or_twice_or_unnumbered_are_refused():
    async with Plane(SPEC) as plane, aiohttp.ClientSession(connector=Connector(Trust("secret"))) as session:
        pause = encode(PauseOrder(PauseMode.KEEP, KVPolicy.KEEP))

        async def send(path: str, headers: dict[str, str], body: bytes | None = None) -> int:
            async with session.post(plane.server.url + path, headers=headers, data=body) as answer:
                return answer.status

        assert await send("/pause", numbered(7, 1), pause) == 200
        assert await send("/resume", numbered(7, 3)) == 200
        # a pause sent before the resume, a repeat, an order of an older coordinator
        for late in ((7, 2), (7, 3), (7, 1), (6, 99)):
            assert await send("/pause", numbered(*late), pause) == 409
        assert not plane.engine.is_paused
        assert await send("/pause", {}, pause) == 400
        assert await send("/pause", {**numbered(7, 9), ORDER_HEADER: "soon"}, pause) == 400
        assert not plane.engine.is_paused
        assert await send("/pause", numbered(8, 1), pause) == 200
        assert await send("/resume", numbered(7, 100)) == 409
        assert plane.engine.is_paused


async def test_a_new_process_outranks_the_one_before_it():
    async with Plane(SPEC) as plane:

        async def above(epoch):
            return epoch + 1

        async def taken_over(epoch):
            raise ServiceUnavailable("another coordinator")

        old = EngineClients(Trust("secret"), 1, taken_over)
        new = EngineClients(Trust("secret"), 2, above)
        forgetful = EngineClients(Trust("secret"), 1, above)  # it owns the store, which lost its counter
        try:
            await old.connect(plane.server.url).pause(PauseMode.KEEP)
            await new.connect(plane.server.url).resume()
            with pytest.raises(ServiceUnavailable):
                await old.connect(plane.server.url).pause(PauseMode.KEEP)
            assert not plane.engine.is_paused
            await forgetful.connect(plane.server.url).pause(PauseMode.KEEP)
            assert plane.engine.is_paused
            await forgetful.connect(plane.server.url).resume()
            assert not plane.engine.is_paused
        finally:
            for clients in (old, new, forgetful):
                await clients.close()


async def test_errors_arrive_as_themselves():
    async with Plane(SPEC) as plane:
        with pytest.raises(InvalidRequest):
            await plane.remote.generate(GenerateRequest("r", (5000,), SamplingParams(max_tokens=1)))
        with pytest.raises(ContextLengthExceeded):
            await plane.remote.generate(GenerateRequest("r", (1,) * 600, SamplingParams(max_tokens=1)))


async def test_a_caller_that_hangs_up_aborts_in_the_engine():
    async with Plane(SLOW) as plane, asyncio.timeout(20):
        call = asyncio.create_task(plane.remote.generate(request(max_tokens=4000)))
        while plane.engine.load().num_running == 0:
            await asyncio.sleep(0.005)
        call.cancel()
        while plane.engine.load().num_running:
            await asyncio.sleep(0.005)
    assert call.cancelled() or isinstance(call.exception(), BaseException)


async def test_abort_returns_what_there_is():
    async with Plane(SLOW) as plane, asyncio.timeout(20):
        call = asyncio.create_task(plane.remote.generate(request("long", max_tokens=4000)))
        while plane.engine.load().num_running == 0:
            await asyncio.sleep(0.005)
        await plane.remote.abort("long")
        assert (await call).finish_reason is FinishReason.ABORT


async def test_an_engine_that_is_gone_is_lost():
    async with Plane(SPEC) as plane:
        await plane.server.close()
        with pytest.raises(EngineUnreachable):
            await plane.remote.generate(request())


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_that_hangs_is_late(is_streamed):
    async with Plane(SPEC) as plane, asyncio.timeout(30):
        plane.engine.faults.num_hung = 1
        asked = request(timeout_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await (anext(plane.remote.stream(asked)) if is_streamed else plane.remote.generate(asked))


CHATTY = replace(SLOW, pace=ReportPace(interval_s=0.03))


async def test_an_answer_in_frames_whose_end_comes_late_leaves_its_connection_to_the_next_call():
    peers: set[tuple[str, int]] = set()

    async def answered(call: web.Request) -> web.StreamResponse:
        peers.add(call.transport.get_extra_info("peername"))
        stream = web.StreamResponse(headers={"content-type": FRAMES})
        await stream.prepare(call)
        await stream.write(frame(Generation("r", (), (), (), FinishReason.LENGTH)))
        await asyncio.sleep(0.02)
        return stream

    server = PrivateServer("replica-1", [web.post("/generate", answered)], Trust("secret"))
    clients = EngineClients(Trust("secret"))
    await server.start()
    async with asyncio.timeout(30):
        for _ in range(3):
            await clients.connect(server.url).generate(request())
        await clients.close()
        await server.close()
    assert len(peers) == 1


async def test_a_long_turn_is_told_in_parts_on_the_same_answer():
    told, heard = SampledTokens(), []

    def hear(progress: Progress) -> None:
        told.add(progress.tokens)
        heard.append(len(told))

    async with Plane(CHATTY) as plane, asyncio.timeout(30):
        generation = await plane.remote.generate(request(max_tokens=150), hear)
        quiet = []
        await plane.engine.generate(request("short", max_tokens=1), quiet.append)
    assert len(heard) > 3
    assert 0 < len(told) <= 150
    assert generation.token_ids[: len(told)] == tuple(told.token_ids)
    assert generation.logprobs[: len(told)] == tuple(told.logprobs)
    assert told.weight_versions == (WeightVersionSpan(0, 0, len(told)),)
    assert quiet == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_frozen_request_is_told_to_stand_still_and_is_not_late(is_streamed):
    heard = []
    async with Plane(CHATTY) as plane, asyncio.timeout(30):
        await plane.engine.pause(PauseMode.KEEP, KVPolicy.KEEP)
        asked = request(max_tokens=8, timeout_s=1.0)

        async def run() -> Generation:
            if not is_streamed:
                return await plane.remote.generate(asked, heard.append)
            return [piece async for piece in plane.remote.stream(asked, heard.append)][-1]

        running = asyncio.create_task(run())
        while not heard or heard[-1].unavailable_s < 1.2:
            await asyncio.sleep(0.01)
        await plane.engine.resume()
        generation = await running
    outages = [progress.unavailable_s for progress in heard]
    assert outages == sorted(outages)
    assert generation.unavailable_s >= outages[-1]
    assert len(generation.token_ids) == 8


async def test_an_error_after_the_first_report_arrives_as_itself():
    async with Plane(CHATTY) as plane, asyncio.timeout(30):
        running = asyncio.create_task(plane.remote.generate(request(max_tokens=4000)))
        await asyncio.sleep(0.1)
        plane.engine.kill("pulled the plug")
        with pytest.raises(EngineLost, match="pulled the plug"):
            await running


async def test_a_replica_that_falls_silent_is_lost(monkeypatch):
    monkeypatch.setattr(client, "SILENCE_S", 0.2)
    async with Plane(replace(SLOW, pace=ReportPace(interval_s=60.0))) as plane, asyncio.timeout(30):
        with pytest.raises(EngineLost, match="stopped sending data"):
            await plane.remote.generate(request(max_tokens=4000))
    async with Plane(CHATTY) as plane, asyncio.timeout(30):
        plane.engine.faults.num_hung = 1
        running = asyncio.create_task(plane.remote.generate(request()))
        await asyncio.sleep(0.5)
        assert not running.done(), "it said that it lives"
        running.cancel()


@pytest.mark.parametrize("headers", [{}, {"x-agentloop-secret": "secret"}, {"authorization": "Bearer secret"}])
async def test_only_the_runs_secret_opens_the_port(headers):
    async with Plane(SPEC) as plane, aiohttp.ClientSession() as session:
        for method, path in (("POST", "/generate"), ("POST", "/pause"), ("POST", "/state"), ("POST", "/commit")):
            async with session.request(method, plane.server.url + path, headers=headers) as answer:
                assert answer.status == 401
                assert (await answer.json())["error"]["code"] == "unauthorized"
        assert not plane.engine.is_paused


@pytest.mark.parametrize("body", [b"", b"\x80\x04\x95cos\nsystem", b"{}", b"\xff" * 100])
async def test_foreign_bytes_are_refused(body):
    async with Plane(SPEC) as plane, aiohttp.ClientSession(connector=Connector(Trust("secret"))) as session:
        async with session.post(plane.server.url + "/generate", data=body) as answer:
            assert answer.status == 400
        assert await plane.remote.generate(request())


async def test_a_version_beyond_63_bits_is_refused():
    async with Plane(SPEC) as plane, aiohttp.ClientSession(connector=Connector(Trust("secret"))) as session:
        body = encode({"version": 1 << 63, "directory": "/weights"})
        async with session.post(plane.server.url + "/stage", data=body, headers=numbered(1, 1)) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "version")
        assert await plane.remote.generate(request())


def load(num_steps, num_running=1):
    return Load(num_running=num_running, num_steps=num_steps)


def looked(watch, loads, interval_s=1.0, *, is_frozen=False):
    """Return the verdicts for these loads, observed every `interval_s`."""
    return [watch.observe(one, number * interval_s, is_frozen=is_frozen) for number, one in enumerate(loads)]


def test_an_engine_that_takes_no_step_hangs():
    watch = StallWatch(ReplicaConfig(stall_timeout_s=5.0))
    verdicts = looked(watch, [load(1), load(2), *[load(3)] * 7])
    assert verdicts == [None] * 7 + [5.0, 6.0]


@pytest.mark.parametrize(
    ("loads", "is_frozen"),
    [
        ([load(3, num_running=0)] * 20, False),  # no requests
        ([load(3)] * 20, True),  # paused, asleep or committing
        ([load(number) for number in range(1, 21)], False),  # a long prefill, in chunks
        ([load(0)] * 20, False),  # the engine compiles
    ],
)
def test_what_is_no_hang(loads, is_frozen):
    watch = StallWatch(ReplicaConfig(stall_timeout_s=5.0, first_step_timeout_s=50.0))
    assert set(looked(watch, loads, is_frozen=is_frozen)) == {None}


def test_the_time_in_which_the_replica_itself_stood_still_does_not_count():
    watch = StallWatch(ReplicaConfig(stall_timeout_s=5.0))
    assert set(looked(watch, [load(3)] * 5, interval_s=100.0)) == {None}


class SlowToStart(SimulatedEngine):
    """An engine that records the start and end of its startup."""

    def __init__(self, seen):
        super().__init__(SPEC, clock=RealClock())
        self._seen = seen

    async def start(self):
        self._seen.append("starts")
        await super().start()
        self._seen.append("has started")


async def test_the_start_of_the_engine_is_bounded_and_the_wait_before_it_is_not():
    seen, directory = [], Directory()

    @contextlib.contextmanager
    def starting():
        seen.append(f"bounded, {max(directory.num_waits, 0)} waits left")
        yield
        seen.append("unbounded")

    replica = Replica("r", SlowToStart(seen), directory, Trust("secret"), "127.0.0.1", starting=starting)
    assert directory.num_waits
    async with asyncio.timeout(30):
        await replica.start()
        await replica.close()
    assert seen == ["bounded, 0 waits left", "starts", "has started", "unbounded"]


async def test_a_hung_engine_is_ended_by_its_replica_and_its_requests_fail_as_lost():
    engine, directory = SimulatedEngine(SPEC, clock=RealClock()), Directory()
    config = ReplicaConfig(heartbeat_interval_s=0.02, stall_timeout_s=0.3)
    replica = Replica("r", engine, directory, Trust("secret"), "127.0.0.1", config=config)
    clients = EngineClients(Trust("secret"))
    async with asyncio.timeout(30):
        await replica.start()
        assert directory.num_waits < 0  # it requested a start and waited
        remote = clients.connect(replica.url)
        await remote.generate(request("good"))
        await replica.check_health()
        engine.faults.num_hung = 2
        calls = [asyncio.create_task(remote.generate(request(f"hung{number}"))) for number in range(2)]
        for call in calls:
            with pytest.raises(EngineLost):
                await call
        with pytest.raises(EngineLost, match="hung: no step for"):
            await replica.check_health()
        assert [reason.split(":")[0] for reason in directory.left] == ["the engine is hung"]
        assert directory.known == {}
        await replica.close()
        await clients.close()


async def test_a_pause_that_nobody_ends_refuses_new_requests_and_holds_those_it_has():
    engine, directory = SimulatedEngine(SPEC, clock=RealClock()), Directory()
    config = ReplicaConfig(heartbeat_interval_s=0.02, max_pause_s=0.2)
    replica = Replica("r", engine, directory, Trust("secret"), "127.0.0.1", config=config)
    clients = EngineClients(Trust("secret"))
    async with asyncio.timeout(30):
        await replica.start()
        remote = clients.connect(replica.url)
        await remote.pause(PauseMode.KEEP)
        held = asyncio.create_task(remote.generate(request("held")))
        while True:
            asked = asyncio.create_task(remote.generate(request("new")))
            done, _ = await asyncio.wait([asked], timeout=0.2)
            if done:
                break
            asked.cancel()
            await asyncio.wait([asked])
        with pytest.raises(EnginePaused):
            await asked
        assert not held.done()
        await remote.resume()
        await held
        while True:  # the next poll finds it awake
            with contextlib.suppress(EnginePaused):
                await remote.generate(request("after"))
                break
        await replica.close()
        await clients.close()


async def test_noise_is_refused_by_name_over_the_wire(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    async with Plane(SPEC) as plane:
        plane.engine.faults.noise_versions = frozenset({1})
        plane.engine.faults.canary_delay_s = 0.02
        for version in (1, 2):
            await plane.remote.stage(WeightUpdate(version, str(tmp_path)))
            await plane.remote.pause(PauseMode.KEEP)
            await plane.remote.commit(version)
            if version == 1:
                with pytest.raises(WeightsRefused, match="version 1 are broken"):
                    await plane.remote.resume()
        assert await plane.remote.resume() >= 0.02
        assert await plane.remote.resume() == 0.0
        assert (await plane.remote.generate(request())).weight_versions == (WeightVersionSpan(2, 0, 20),)


class Uniform:
    """A policy that gives every id the same probability."""

    def open(self, request: GenerateRequest) -> "Uniform":
        return self

    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        return state

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        return 7, -math.log(SPEC.vocab_size)


async def test_a_replica_whose_samples_stay_uniform_says_so():
    class Listening(Directory):
        async def heartbeat(self, replica_id, report):
            self.report = report
            return await super().heartbeat(replica_id, report)

    directory, engine = Listening(), SimulatedEngine(SPEC, policy=Uniform())
    config = ReplicaConfig(heartbeat_interval_s=0.01)
    replica = Replica("r", engine, directory, Trust("secret"), "127.0.0.1", config=config)
    clients = EngineClients(Trust("secret"))
    with capture_logs() as logs:
        await replica.start()
        try:
            for number in range(16):
                await asyncio.sleep(0.03)
                assert not directory.report.is_noise
                await clients.connect(replica.url).generate(request(f"r{number}"))
            while not directory.report.is_noise:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        finally:
            await clients.close()
            await replica.close()
    assert [entry["log_level"] for entry in logs if entry["event"] == "samples_noise"] == ["warning"]  # logged once
