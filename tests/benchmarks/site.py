"""Our engine with its `ReplicaSync` in this process, a trainer in another, and vLLM's own counters.

The controller calls the engine directly (no HTTP), so that times are those of the engine and the transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil

from agentloop.api.coordinator import ReplicaRegistration, ReplicaUpdate
from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import Delta, StageReport, WeightUpdate
from agentloop.fleet.registry import Fleet
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.types import FinishReason, GenerateRequest, Generation, KVPolicy, SamplingParams
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.engines.vllm.process import SchedulerStats
from agentloop_sglang.config import SglangConfig
from agentloop_sglang.engine import SglangEngine
from tests.benchmarks.streams import Flight, Piece
from tests.benchmarks.trainer import MeasureMemory, Offer, Send, SetVersion, TrainerProcess

SEND_TIMEOUT_S = 100.0
REQUEST_TIMEOUT_S = 600.0
FREEZING = ("pause", "commit", "resume")


class UpdateFailed(Exception):
    """The replica rejected an update, or failed to apply it."""


@dataclass(frozen=True, slots=True)
class PrefillCounts:
    """vLLM's counters since its start.

    `num_preempted` is the sum of IterationStats.num_preempted_reqs; `num_prefilled_again` that of
    PrefixCacheStats.preempted_queries minus preempted_hits: tokens of requests that had been preempted and were
    scheduled from their first token again. `num_prompt_computed`: PromptTokenStats.computed, new requests only.
    """

    num_preempted: int = 0
    num_prefilled_again: int = 0
    num_prompt_computed: int = 0

    def __sub__(self, other: PrefillCounts) -> PrefillCounts:
        return PrefillCounts(
            self.num_preempted - other.num_preempted,
            self.num_prefilled_again - other.num_prefilled_again,
            self.num_prompt_computed - other.num_prompt_computed,
        )


class Counters(SchedulerStats):
    """A vLLM stat logger that sums the relevant statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = PrefillCounts()

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *others: Any, **named: Any) -> None:
        super().record(scheduler_stats, iteration_stats, *others, **named)
        counts = self.counts
        if scheduler_stats is not None:
            cache = scheduler_stats.prefix_cache_stats
            again = cache.preempted_queries - cache.preempted_hits
            counts = replace(counts, num_prefilled_again=counts.num_prefilled_again + again)
        if iteration_stats is not None:
            computed = counts.num_prompt_computed + iteration_stats.prompt_token_stats.computed
            preempted = counts.num_preempted + iteration_stats.num_preempted_reqs
            counts = replace(counts, num_prompt_computed=computed, num_preempted=preempted)
        self.counts = counts


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use: on every GPU, by all processes; resident, of this process and its children."""

    gpus: tuple[int, ...]
    resident: int


@dataclass(frozen=True, slots=True)
class TimedUpdate:
    """One update through the controller: its report, its version, and the times at which the call began and ended.

    `calls`: the start and end time of each of the controller's engine calls, by name.
    """

    report: ReplicaUpdate
    version: int
    started_at: float
    ended_at: float
    calls: Mapping[str, tuple[float, float]]


class TimedControl:
    """An engine as its controller sees it, with the times of the last calls that pause it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: dict[str, tuple[float, float]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return partial(self._timed, name, found) if name in FREEZING else found

    async def _timed(self, name: str, call: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:
        began_at = time.perf_counter()
        try:
            return await call(*arguments, **named)
        finally:
            self.calls[name] = (began_at, time.perf_counter())


class EngineSite:
    """One engine under its controller. `version` only grows; the first update replaces the dummy weights."""

    def __init__(self, engine: VllmEngine | SglangEngine, trainer: TrainerProcess, counters: Counters) -> None:
        self.engine = engine
        self.trainer = trainer
        self.version = 0
        self.finals: dict[str, Generation] = {}
        self._counters = counters
        fleet = Fleet()
        fleet.register(ReplicaRegistration("engine", "local", engine.info, engine.weight_version), now=0.0)
        self._control = TimedControl(engine)
        self._sync = ReplicaSync(fleet, lambda _: self._control, RealClock())

    @property
    def counts(self) -> PrefillCounts:
        return self._counters.counts

    async def update(self, kv_policy: KVPolicy = KVPolicy.KEEP) -> TimedUpdate:
        """Update to a new version from the trainer. Raises UpdateFailed."""
        self.version += 1
        await self.trainer.ask(SetVersion(self.version))
        source = await self.trainer.ask(Offer())
        started_at = time.perf_counter()
        self._control.calls = {}
        async with asyncio.TaskGroup() as group:
            group.create_task(self.trainer.ask(Send(SEND_TIMEOUT_S), timeout_s=SEND_TIMEOUT_S + 10))
            report = await self._sync.update_weights(WeightUpdate(self.version, push=source), kv_policy)
        ended_at = time.perf_counter()
        (replica,) = report.replicas
        if replica.error is not None:
            raise UpdateFailed(replica.error)
        return TimedUpdate(replica, self.version, started_at, ended_at, self._control.calls)

    async def stage(self) -> tuple[StageReport, float, float]:
        """Stage the trainer's weights as a new version that is never committed; returns the start and end time."""
        self.version += 1
        source = await self.trainer.ask(Offer())
        update = WeightUpdate(self.version, push=replace(source, num_receivers=self.engine.info.num_workers))
        async with asyncio.TaskGroup() as group:
            group.create_task(self.trainer.ask(Send(SEND_TIMEOUT_S), timeout_s=SEND_TIMEOUT_S + 10))
            started_at = time.perf_counter()
            report = await self.engine.stage(update)
            ended_at = time.perf_counter()
        return report, started_at, ended_at

    async def stream(self, request_id: str, prompt: tuple[int, ...]) -> AsyncIterator[Piece]:
        """Yield tokens as they arrive, until an abort or the context's end; `finals` then has the full answer."""
        async with contextlib.aclosing(self.engine.stream(self._request(request_id, prompt))) as items:  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Delta):
                    yield Piece(item.token_ids, item.weight_versions[-1].version)
                else:
                    self.finals[request_id] = item

    async def generate(self, request_id: str, prompt: tuple[int, ...]) -> None:
        """Run the same request without streaming."""
        self.finals[request_id] = await self.engine.generate(self._request(request_id, prompt))

    async def greedy(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[tuple[int, ...]]:
        """Return the greedy continuations."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        requests = [GenerateRequest(f"greedy-{n}", prompt, sampling) for n, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        return [answer.token_ids for answer in answers]

    async def memory(self) -> Memory:
        gpus = await self.trainer.ask(MeasureMemory())
        process = psutil.Process()
        family = [process, *process.children(recursive=True)]
        return Memory(tuple(gpus), sum(member.memory_info().rss for member in family if member.is_running()))

    def num_lost(self, flight: Flight) -> int:
        """Count the flight's requests that ended before their abort, or whose answer differs from their stream."""
        requests = (*flight.streams, *flight.others)
        return sum(not self._is_whole(request.request_id, request.token_ids) for request in requests)

    def _request(self, request_id: str, prompt: tuple[int, ...]) -> GenerateRequest:
        room = self.engine.info.max_context_tokens - len(prompt)
        return GenerateRequest(request_id, prompt, SamplingParams(max_tokens=room), timeout_s=REQUEST_TIMEOUT_S)

    def _is_whole(self, request_id: str, streamed: Sequence[int]) -> bool:
        final = self.finals.get(request_id)
        if final is None or final.finish_reason is not FinishReason.ABORT:
            return False
        ends = [0, *(span.end for span in final.weight_versions)]
        starts = [*(span.start for span in final.weight_versions), len(final.token_ids)]
        versions = [span.version for span in final.weight_versions]
        return (
            final.token_ids[: len(streamed)] == tuple(streamed) and starts == ends and versions == sorted(versions)
        )


@contextlib.asynccontextmanager
async def running_site(config: VllmConfig | SglangConfig, trainer: TrainerProcess) -> AsyncIterator[EngineSite]:
    """Start an engine with dummy weights, update it to its first version, and close it at the end.

    SGLang has no counters of prefills: they stay zero.
    """
    counters = Counters()
    engine: VllmEngine | SglangEngine
    if isinstance(config, SglangConfig):
        engine = SglangEngine(config)
    else:
        engine = VllmEngine(config)
        engine._process.scheduler_stats = counters  # vLLM reports to this object; the port has no counters
    async with asyncio.TaskGroup() as group:
        group.create_task(trainer.started())
        group.create_task(engine.start())
    try:
        site = EngineSite(engine, trainer, counters)
        await site.update()
        yield site
    finally:
        await engine.close()
