"""One seeded schedule: a coordinator, simulated engines, workers, a trainer and an operator, and their faults.

Everything happens in virtual time and follows from the seed. After `trouble_s` of faults, the faults and updates
stop, and the operator resumes the service; all accepted work must then end without further action.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from logging import CRITICAL
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agentloop.api.coordinator import ReplicaRegistration, ReplicaReport, UpdateReport
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import ALL_MEMORY, MemoryTag, WeightUpdate
from agentloop.engine.weight_digest import FolderContents, read_files
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    EngineLost,
    InvalidRequest,
    NoHealthyReplica,
    ServiceUnavailable,
    StorageFull,
    WeightsRefused,
    WeightUpdateFailed,
)
from agentloop.fleet.registry import FleetConfig
from agentloop.fleet.replica_steps import WeightConfig
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import HashPolicy, LatencyModel, TokenPolicy
from agentloop.types import GenerateRequest, KVPolicy, PauseMode, SamplingParams
from agentloop_servers.coordinator.coordinator import Coordinator
from agentloop_servers.coordinator.replicas import CoordinatorConfig
from agentloop_servers.private_http.fencing import FencingToken
from tests.support.fleet.faulty_link import Caller, FaultyLink, Network, Stall, StallingClock
from tests.support.fleet.memory_store import MemoryStore
from tests.support.fleet.pushes import Sender, Wire

T = TypeVar("T")

HEARTBEAT_S = 0.25
POLICY = HashPolicy(1000)
LATENCY = LatencyModel(prefill_s=0.02, decode_s=0.04)
CONFIG = CoordinatorConfig(
    heartbeat_interval_s=HEARTBEAT_S,
    worker_timeout_s=10.0,
    placement_wait_s=1.0,
    probe_interval_s=0.5,
    probe_timeout_s=0.5,
    restart_grace_s=1.0,  # workers poll twice in this time
    fleet=FleetConfig(suspect_after_s=0.8, dead_after_s=2.0),
    weights=WeightConfig(
        stage_timeout_s=1.0,
        pause_timeout_s=0.5,
        commit_timeout_s=1.0,
        resume_timeout_s=0.5,
        sleep_timeout_s=0.5,
        wake_timeout_s=0.5,
        offer_timeout_s=0.5,
        operator_pause_timeout_s=2.0,
        straggler_grace_s=0.3,
        exact_grace_s=0.2,
        settle_s=0.6,
        max_catch_up_attempts=3,
        backoff_s=0.1,
        max_backoff_s=0.5,
        catch_up_pause_s=2.0,
    ),
)
NOISE = frozenset(range(3, 10_000, 7))  # versions with broken weights
LOOK_S = 0.2
REFUSALS = (
    Conflict,
    InvalidRequest,
    NoHealthyReplica,
    WeightUpdateFailed,
    ServiceUnavailable,
    StorageFull,
    OSError,
)
_SILENT = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))


@dataclass(slots=True)
class Process:
    """One process of a replica: an engine under a URL that no other process ever has."""

    replica_id: str
    url: str
    engine: SimulatedEngine
    link: FaultyLink
    stall: Stall
    is_alive: bool = True
    is_heard: bool = True  # its heartbeats; the process may outlive its engine
    silent_until: float = 0.0

    def registration(self) -> ReplicaRegistration:
        engine = self.engine
        digest = engine.weight_digest
        return ReplicaRegistration(
            self.replica_id, self.url, engine.info, engine.weight_version, weight_digest=digest
        )


@dataclass(slots=True)
class History:
    """Requests and their results, for the checks."""

    counts: Counter[str] = field(default_factory=Counter)
    pushed: set[int] = field(default_factory=set)
    reports: list[UpdateReport] = field(default_factory=list)
    served: list[int] = field(default_factory=list)  # each observed change of the fleet's version
    is_operator_paused: bool = False


class World:
    """The complete state of one schedule. Construct it, `await run()`, then check."""

    policy: TokenPolicy = POLICY
    make_engine: type[SimulatedEngine] = SimulatedEngine

    def __init__(self, seed: int, clock: VirtualClock, checkpoint: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = clock
        self.checkpoint = str(checkpoint)
        self.kv_policy = rng.choice((KVPolicy.RECOMPUTE, KVPolicy.RECOMPUTE, KVPolicy.KEEP, KVPolicy.FRESH))
        self.trouble_s = rng.uniform(2.0, 5.0)
        self.update_gap_s = rng.choice((0.05, 0.2, 0.6, 2.0))
        self.network = Network(
            clock, rng, fault_rate=rng.choice((0.0, 0.03, 0.1, 0.25, 0.4)), max_delay_s=rng.choice((0.5, 1.5, 6.0))
        )
        self.wire = Wire(clock, can_relay=rng.random() < 0.7, relay_s=rng.choice((0.0, 0.2, 0.6)))
        self.push_share = rng.choice((0.0, 0.5, 1.0))  # share of pushed updates; the others are directories
        self.initial_version = rng.choice((0, 0, None))
        has_initial = self.initial_version == 0 and rng.random() < 0.5
        initial_weights = WeightUpdate(0, self.checkpoint) if has_initial else None
        self.config = replace(CONFIG, kv_policy=self.kv_policy, initial_weights=initial_weights)
        self.store = MemoryStore()
        self.history = History()
        self.processes: dict[str, Process] = {}  # the latest process of each replica
        self.links: dict[str, FaultyLink] = {}
        self.num_processes = 0
        self.num_probes = 0
        self._num_coordinators = 0
        self.sleep_levels = (1, 1, 2)
        # possible versions of a process that replaces another one
        self.boot_versions: tuple[int | None, ...] = (0, None)
        self.is_healed = False
        self._is_down = False
        self._calls: dict[asyncio.Task[Any], None] = {}
        self._next_version = 1

    # Service

    async def start(self) -> None:
        await self.start_coordinator()
        for number in range(self.rng.randint(2, 4)):
            await self.boot(f"r{number}", self.initial_version)

    async def start_coordinator(self) -> None:
        self._num_coordinators += 1
        orders = map(partial(FencingToken, self._num_coordinators), count())

        def connect(url: str) -> Caller:
            return Caller(self.links[url], lambda: next(orders))

        self.stall = Stall(self.clock)
        clock = StallingClock(self.clock, self.stall)
        store = self.open_store()
        self.coordinator = Coordinator(store, connect, self.config, clock, log=_SILENT, probe=self.probe)
        await self.coordinator.start()

    def open_store(self) -> Any:
        """Return the store of a starting coordinator: a TrajectoryStore or an equivalent."""
        return self.store

    async def crash_coordinator(self) -> None:
        """Kill the process: its callers get no answers, its tasks stop at once; a new process starts."""
        if self._is_down:
            return
        await self.coordinator.check_health()
        self._is_down = True
        for call in tuple(self._calls):
            call.cancel()
        await self.coordinator.close()
        await self.clock.sleep(self.rng.uniform(0.0, 0.5))
        served = self.coordinator.replicas.sync.desired.weights.served_version
        await self.start_coordinator()
        restored = self.coordinator.replicas.fleet.weight_version
        is_settling = self.coordinator.replicas.sync.desired.weights.pending is not None
        # A served version that no update made came with the replicas, and will come with them again.
        if served and not (restored is None and is_settling):
            assert (-1 if restored is None else restored) >= served, f"{served} before the crash, then {restored}"
        if restored is None:  # replicas with the newest version decide, and may die before they report it
            self.history.served.clear()
            self.history.reports.clear()
        self._is_down = False

    async def boot(self, replica_id: str, version: int | None) -> None:
        """Start a new process in place of the current one."""
        self.num_processes += 1
        receiver, stall = self.wire.receiver(), Stall(self.clock)
        clock = StallingClock(self.clock, stall)
        parts = {"weight_source": receiver, "read_folder": self.read_folder}
        engine = self.make_engine(self.spec(version), clock=clock, policy=self.policy, **parts)
        receiver.engine = engine
        engine.faults.noise_versions, engine.faults.canary_delay_s = NOISE, LOOK_S
        await engine.start()
        link = FaultyLink(engine, self.network, stall)
        url = f"sim://{replica_id}/{self.num_processes}"
        self.links[url] = link
        self.processes[replica_id] = Process(replica_id, url, engine, link, stall)

    def spec(self, version: int | None) -> SimulatedSpec:
        """Return the size of every engine."""
        return SimulatedSpec(1000, 512, 8, 200, 8, LATENCY, initial_version=version)

    async def read_folder(self, directory: str) -> FolderContents:
        """Return the weights in a folder, as an engine reads them."""
        return await read_files(directory)

    async def probe(self, url: str) -> None:
        """Sample one token on a replica, for the coordinator."""
        name = f"probe-{self.num_probes}"
        self.num_probes += 1
        await self.links[url].generate(GenerateRequest(name, (1,), SamplingParams(max_tokens=1), 0.5))

    def connect(self, url: str) -> FaultyLink:
        """Return the engine for a client's calls."""
        return self.links[url]

    async def ask(self, call: Callable[[Coordinator], Coroutine[Any, Any, T]]) -> T:
        """Call the coordinator. Raises ServiceUnavailable if it is down or dies during the call."""
        await self.stall.passed()
        if self._is_down:
            raise ServiceUnavailable("no coordinator")
        task = asyncio.create_task(call(self.coordinator), name="coordinator call")
        self._calls[task] = None
        try:
            await asyncio.wait([task])
        finally:
            del self._calls[task]
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            elif not task.cancelled():
                task.exception()  # marks the exception as retrieved, even without a caller
        if task.cancelled():
            raise ServiceUnavailable("the coordinator died")
        await self.stall.passed()
        return task.result()

    async def heartbeat(self) -> None:
        """Send the heartbeats of all replicas, in one task."""
        known: dict[str, Coordinator] = {}
        while True:
            self.watch()
            for process in tuple(self.processes.values()):
                silent_until = max(process.silent_until, process.stall.until, self.stall.until)
                if self._is_down or not process.is_heard or self.clock.now() < silent_until:
                    continue
                coordinator, engine = self.coordinator, process.engine
                if known.get(process.url) is coordinator and await coordinator.replicas.heartbeat(
                    process.replica_id,
                    ReplicaReport(engine.load(), engine.is_usable, engine.is_paused, engine.asleep),
                ):
                    continue
                await coordinator.replicas.register(process.registration())
                known[process.url] = coordinator
            version = (await self.coordinator.status()).weight_version
            if version is not None and version not in self.history.served[-1:]:
                self.history.served.append(version)
            await self.clock.sleep(HEARTBEAT_S)

    def placeable(self) -> list[Process]:
        """Return the living processes that take traffic."""
        urls = {replica.url for replica in self.coordinator.replicas.fleet.placeable()}
        return [process for process in self.processes.values() if process.is_alive and process.url in urls]

    def watch(self) -> None:
        """Check the invariants that must hold at every moment. Raises AssertionError."""
        desk = self.coordinator.replicas
        desk.balancer.check()
        for process in self.placeable():
            engine = process.engine
            holds, replica = engine.weight_version, desk.fleet.get(process.replica_id)
            served = replica.weight_version if replica and replica.held_by else desk.fleet.weight_version
            assert holds == served, f"{process.url} holds {holds} where {served} is served"
            assert not engine.asleep, f"{process.url} takes traffic and is asleep"
            if self.network.is_perfect and not self.history.is_operator_paused:
                assert not engine.is_paused, f"{process.url} takes traffic and is paused"
        blind = [url for url, link in self.links.items() if link.num_blind_resumes]
        assert not blind, f"{blind} were resumed on unknown weights"

    # Sources of faults

    async def train(self) -> None:
        """Push every few tokens: sometimes twice at once, sometimes with a sender that dies midway."""
        async with asyncio.TaskGroup() as group:
            while await self._goes_on(self.update_gap_s):
                for _ in range(self.rng.choice((1, 1, 1, 2))):
                    group.create_task(self._push_until_dead(), name="push")

    async def _push_until_dead(self) -> None:
        lives_s = self.rng.uniform(0.0, 1.0) if self.rng.random() < 0.15 else 1e6
        try:
            async with asyncio.timeout(lives_s):
                await self.push(self.rng.random() >= 0.1)
        except TimeoutError:
            self.history.counts["trainer died"] += 1
        except CheckpointUnreadable:
            self.history.counts["unreadable"] += 1
        except REFUSALS as error:
            self.history.counts[type(error).__name__] += 1

    async def push(self, is_readable: bool = True) -> None:
        version = self._next_version
        if self.rng.random() < 0.05:
            version //= 2  # a trainer that was reset
        elif self.rng.random() < 0.9:
            self._next_version += self.rng.choice((1, 1, 3))
        if is_readable:
            self.history.pushed.add(version)
        update, sender = self._source(version, is_readable)
        was_asleep = bool(self.coordinator.replicas.sync.desired.orders.asleep)
        try:
            report = await self.ask(lambda c: c.replicas.update_weights(update, self.kv_policy))
        finally:
            if sender is not None:  # its process ends in any case
                sender.dies_at = min(sender.dies_at, self.clock.now())
        self.history.reports.append(report)
        self.history.counts["update"] += 1
        self.history.counts["woken by new weights"] += was_asleep
        self.history.counts["replica failed"] += any(one.error for one in report.replicas)

    def _source(self, version: int, is_readable: bool) -> tuple[WeightUpdate, Sender | None]:
        """Return a source of weights: a directory, or a process that may die while it sends."""
        rng = self.rng
        if rng.random() >= self.push_share:
            return WeightUpdate(
                version, self.folder_of(version) if is_readable else self.checkpoint + "-missing"
            ), None
        sender = Sender(version, rng.choice((0.0, 0.05, 0.3, 0.8)), is_one_phase=rng.random() < 0.3)
        if not is_readable:
            sender.dies_at = self.clock.now()
        elif not self.is_healed and rng.random() < 0.2:
            sender.dies_at = self.clock.now() + rng.uniform(0.0, 1.0)
        return WeightUpdate(version, push=self.wire.listen(sender)), sender

    def folder_of(self, version: int) -> str:
        """Return the folder of a version's weights."""
        return self.checkpoint

    async def operate(self) -> None:
        """Pause and resume as an operator, or put the fleet to sleep, and retry failed calls."""
        while await self._goes_on(2.0):
            if self.rng.random() < 0.4:
                await self._sleep_and_wake()
                continue
            self.history.is_operator_paused, paused = True, self.coordinator
            try:
                await self.ask(lambda c: c.replicas.pause(self.rng.choice(tuple(PauseMode))))
                self.history.counts["operator paused"] += 1
            except (EngineLost, ServiceUnavailable, StorageFull):
                paused = None  # it affects only the others, or was not saved
            for _ in range(self.rng.randint(0, 8)):
                await self.clock.sleep(0.1)
                if paused is self.coordinator and self.network.is_perfect:  # a coordinator loses it in a crash
                    running = [one.url for one in self.placeable() if not one.engine.is_paused]
                    assert not running, f"{running} run while the operator has paused"
            await self.resume()

    async def _sleep_and_wake(self) -> None:
        level = self.rng.choice(self.sleep_levels)
        try:
            await self.ask(lambda c: c.replicas.sleep(level))
            self.history.counts[f"slept {level}"] += 1
        except (EngineLost, ServiceUnavailable, StorageFull):
            self.history.counts["sleep failed"] += 1
        await self.clock.sleep(self.rng.uniform(0.0, 1.0))
        if self.rng.random() < 0.3:
            await self.wake(frozenset({self.rng.choice(tuple(MemoryTag))}))
        if self.rng.random() < 0.8:  # otherwise an update or the end of the faults does it
            await self.wake(ALL_MEMORY)

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Retry until it is done, or only new weights can do it."""
        for _ in range(100):
            try:
                await self.ask(lambda c: c.replicas.wake(tags))
            except (Conflict, CheckpointUnreadable):
                self.history.counts["wake needs new weights"] += 1
                return
            except (*REFUSALS, EngineLost) as error:
                self.history.counts[f"wake: {type(error).__name__}"] += 1
                await self.clock.sleep(0.2)
            else:
                self.history.counts["woke"] += 1
                return
        raise AssertionError("the fleet could not be woken")

    async def resume(self) -> None:
        for _ in range(100):
            try:
                await self.ask(lambda c: c.replicas.resume())
            except (EngineLost, ServiceUnavailable, StorageFull, WeightsRefused):
                await self.clock.sleep(0.2)
            else:
                self.history.is_operator_paused = False
                return
        raise AssertionError("the operator could not resume")

    async def befall(self) -> None:
        """Let replicas and coordinators fail."""
        plagues: tuple[Callable[[Process], Awaitable[None]], ...] = (
            self._kill,
            self._break_weights,
            self._slow_down,
            self._fall_silent,
            self._leave,
            self._crash,
        )
        gap_s = self.rng.choice((0.4, 1.0, 3.0))
        while await self._goes_on(gap_s):
            plague = self.rng.choice(plagues)
            self.history.counts[plague.__name__] += 1
            await plague(self.rng.choice(tuple(self.processes.values())))

    async def _goes_on(self, mean_gap_s: float) -> bool:
        """Wait a while. Returns False when the faults are over."""
        await self.clock.sleep(self.rng.expovariate(1 / mean_gap_s))
        return not self.is_healed

    async def _kill(self, process: Process) -> None:
        process.engine.kill()
        process.is_alive = False
        process.is_heard = self.rng.random() < 0.3
        await self.clock.sleep(self.rng.choice((0.0, 0.3, 3.0)))
        if self.rng.random() < 0.8 or not any(other.is_alive for other in self.processes.values()):
            await self.boot(process.replica_id, self.rng.choice(self.boot_versions))

    async def _break_weights(self, process: Process) -> None:
        faults, rng = process.engine.faults, self.rng
        faults.num_failed_stages += rng.choice((0, 1))
        faults.num_failed_commits += rng.choice((0, 1, 2))
        faults.commit_delay_s = rng.choice((0.0, 0.1, 0.7, 3.0))

    async def _slow_down(self, process: Process) -> None:
        process.link.slowness_s = self.rng.choice((0.0, 0.1, 0.4, 0.7))

    async def _fall_silent(self, process: Process) -> None:
        process.silent_until = self.clock.now() + self.rng.choice((1.0, 3.0))

    async def _leave(self, process: Process) -> None:
        await self.coordinator.replicas.deregister(process.replica_id)

    async def _crash(self, process: Process) -> None:
        if self.rng.random() < 0.3:
            await self.crash_coordinator()
        self.store.is_broken = self.rng.random() < 0.2

    async def heal(self) -> None:
        """Stop the faults, and make sure that at least one replica is alive."""
        self.is_healed = True
        self.network.heal()
        self.store.is_broken = False
        for process in self.processes.values():
            faults = process.engine.faults
            faults.num_failed_stages = faults.num_failed_commits = 0
            faults.commit_delay_s = process.link.slowness_s = process.silent_until = 0.0

    async def needs_a_push(self) -> bool:
        """Return True if the controller has no version to which it could bring a replica."""
        sync = self.coordinator.replicas.sync
        served = sync.served_source()
        if served is None or sync.desired.orders.asleep or served.version in NOISE:
            return True
        has_peer = any(one.engine.weight_version == served.version for one in self.placeable())
        return not served.update.is_repeatable and not (self.wire.can_relay and has_peer)

    async def push_until_done(self) -> None:
        """Push until an update succeeds."""
        for _ in range(100):
            try:
                await self.push()
            except REFUSALS:
                await self.clock.sleep(0.5)
            else:
                return
        raise AssertionError("no push went through")

    def counts(self) -> Counter[str]:
        """Return the counts of events."""
        wire = self.wire
        wired = {"transfers": wire.num_transfers, "relayed": wire.num_relayed, "broken transfers": wire.num_broken}
        wired |= {"one phase": wire.num_one_phase}
        return self.history.counts + self.network.counts + Counter(wired)

    async def close(self) -> None:
        await self.coordinator.check_health()
        await self.coordinator.close()
        await self.network.close()
        for link in self.links.values():
            await link.engine.close()
