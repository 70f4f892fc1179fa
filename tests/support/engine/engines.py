"""Engines without a model, with configurable faults: for the fleet, for the HTTP app, and under a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentloop.api.coordinator import ReplicaRegistration, ReplicaReport
from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import (
    ALL_MEMORY,
    CommitReport,
    EngineInfo,
    MemoryTag,
    OnProgress,
    PushSource,
    StageReport,
    StagingDevice,
    TokenEngine,
    TrainerOrder,
    WeightUpdate,
)
from agentloop.errors import AgentLoopError, CheckpointUnreadable, Conflict, WeightUpdateFailed
from agentloop.generation.leased_engine import LeasedEngine
from agentloop.generation.leases import LeaseHolder, LeaseReporter
from agentloop.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    KVPolicy,
    Lease,
    Load,
    PauseMode,
    WeightVersionSpan,
)
from agentloop.values.capabilities import NO_NEEDS, Needs

FOR_EVER_S = 1e6
INFO = EngineInfo("fake", 4096, 1000, 16, 1_000_000, 8)
SLEEPER = EngineInfo("fake", 4096, 1000, 16, 10_000, 8, num_workers=2, weight_dtype="bfloat16", can_sleep=True)


class FakeEngine:
    """Records every call. `failures` and `hangs` name verbs; `num_failures` bounds how often they fail."""

    def __init__(self, clock: Clock, url: str, version: int | None = 0, info: EngineInfo = INFO) -> None:
        self.clock = clock
        self.url = url
        self.info = info
        self.weight_version = version
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.staging_device = StagingDevice.DEVICE
        self.offered: PushSource | None = None
        self.unreadable: set[str] = set()  # directories
        self.on_commit: Callable[[], None] = lambda: None
        self.updates: list[WeightUpdate] = []
        self.orders: list[TrainerOrder] = []  # orders that were followed
        self.is_paused = False
        self.is_usable = version is not None
        self.staged: int | None = None
        self.calls: list[str] = []
        self.called_at: list[tuple[str, float]] = []
        self.failures: dict[str, Exception] = {}
        self.num_failures = 1_000_000
        self.num_good = 0
        self.hangs: set[str] = set()
        self.seconds: dict[str, float] = {}

    @property
    def replica_id(self) -> str:
        return self.url.removeprefix("fake://")

    def registration(self) -> ReplicaRegistration:
        return ReplicaRegistration(
            self.replica_id, self.url, self.info, self.weight_version, self.is_paused, self.asleep
        )

    def report(self) -> ReplicaReport:
        load = Load(weight_version=self.weight_version)
        return ReplicaReport(load, self.is_usable, self.is_paused, self.asleep)

    async def follow_trainer(self, order: TrainerOrder) -> None:
        await self._called("follow")
        self.orders.append(order)

    async def stage(self, update: WeightUpdate) -> StageReport:
        if MemoryTag.WEIGHTS in self.asleep:
            raise Conflict("asleep")
        self.updates.append(update)
        await self._called("stage")
        if update.directory in self.unreadable:
            raise CheckpointUnreadable(f"no such directory: {update.directory}", param="directory")
        if update.transfer is not None and self.failures.get("follow") is not None:
            raise CheckpointUnreadable("a part has not come")
        self.staged = update.version
        is_one_phase = self.staging_device is StagingDevice.NOWHERE
        return StageReport(self.staging_device, "nccl", 1000, transfer_ms=0.0 if is_one_phase else 30.0)

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        await self._called("pause", f"{mode}:{kv_policy}")
        self.is_paused = True

    async def drain_pinned(self, version: int, grace_s: float) -> None:
        """Do nothing: no request of this engine requires a version."""

    async def commit(self, version: int, *, resumes: bool = False) -> CommitReport:
        if not self.is_paused or self.staged != version or MemoryTag.WEIGHTS in self.asleep:
            raise Conflict("not paused, asleep, or another version staged")
        self.is_usable, self.weight_version = False, None
        await self._called("commit", "resumes" if resumes else "")
        self.is_usable, self.weight_version, self.staged = True, version, None
        self.on_commit()
        if resumes:
            await self.resume()
        is_one_phase = self.staging_device is StagingDevice.NOWHERE
        return CommitReport(5.0, 2.0, num_verified=7, transfer_ms=40.0 if is_one_phase else 0.0)

    async def resume(self) -> float:
        if self.asleep:
            raise Conflict("asleep")
        await self._called("resume")
        self.is_paused = False
        return 0.0

    async def offer(self) -> PushSource | None:
        await self._called("offer")
        return self.offered

    async def sleep(self, level: int) -> None:
        await self._called("sleep", str(level))
        self.is_paused, self.asleep, self.staged = True, ALL_MEMORY, None
        if level == 2:
            self.weight_version, self.is_usable = None, False

    async def wake(self, tags: frozenset[MemoryTag] = ALL_MEMORY) -> None:
        if MemoryTag.KV_CACHE in self.asleep & tags and self.weight_version is None:
            raise Conflict("weights are committed before the KV cache wakes")
        await self._called("wake", "+".join(sorted(tags)))
        self.asleep -= tags

    async def check_health(self) -> None:
        await self._called("check_health")

    async def sample(self) -> None:
        await self._called("sample")

    async def _called(self, verb: str, detail: str = "") -> None:
        self.calls.append(f"{verb}:{detail}" if detail else verb)
        self.called_at.append((verb, self.clock.now()))
        if verb in self.hangs:
            await self.clock.sleep(FOR_EVER_S)
        await self.clock.sleep(self.seconds.get(verb, 0.0))
        if verb in self.failures and self.num_good:
            self.num_good -= 1
        elif verb in self.failures and self.num_failures > 0:
            self.num_failures -= 1
            raise self.failures[verb]

    def fail(self, verb: str, times: int = 1_000_000, after: int = 0) -> None:
        """Fail the next `times` calls of `verb`, after `after` good ones, with a real engine's error."""
        kinds = {"stage": CheckpointUnreadable, "commit": WeightUpdateFailed}
        self.failures = {verb: kinds.get(verb, ConnectionResetError)(f"injected into {verb}")}
        self.num_failures, self.num_good = times, after


class ReversingEngine:
    """Answers with the prompt backwards; `errors` are raised first, and `is_hanging` never answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.errors: list[AgentLoopError] = []
        self.is_hanging = False
        self.num_cancelled = 0
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    def connect(self, url: str) -> ReversingConnection:
        return ReversingConnection(self, url)


class ReversingConnection:
    """The part of the Engine port that the HTTP app uses."""

    def __init__(self, engine: ReversingEngine, url: str) -> None:
        self._engine = engine
        self._url = url

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        engine = self._engine
        engine.requests.append((self._url, request))
        engine.started.set()
        if engine.errors:
            raise engine.errors.pop(0)
        if engine.is_hanging:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                engine.num_cancelled += 1
                engine.cancelled.set()
                raise
        ids = request.token_ids[::-1][: request.sampling.max_tokens]
        spans = (WeightVersionSpan(0, 0, len(ids)),)
        return Generation(
            request.request_id,
            ids,
            (-0.5,) * len(ids),
            spans,
            FinishReason.LENGTH,
            min(3, len(request.token_ids)),
            self._url,
        )


class OneReplica:
    """The coordinator of a fleet with only one replica."""

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        return lease


def leased(engine: TokenEngine, *, vocab_size: int = 1 << 31, max_attempts: int = 1) -> LeasedEngine:
    """Return the engine under a lease; with one attempt its errors are raised unchanged."""
    holder = LeaseHolder(
        LeaseReporter("test", None),
        OneReplica(),  # type: ignore[arg-type] # its move alone
        "r/g/0",
        Lease("lease-1", "replica-1", "url-1"),
    )
    return LeasedEngine(lambda url: engine, holder, vocab_size=vocab_size, max_attempts=max_attempts)
