"""The whole service in virtual time, with faults in each of its parts.

It has the fleet of `schedules.py`, real workers, sessions and stores, and clients of both. Everything follows from
the seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

from agentloop.api.coordinator import FrontPort, RolloutTerms, WorkerPort
from agentloop.chat.call import CallKey, ChatCall, ChatResult
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import WeightUpdate
from agentloop.engine.weight_digest import FolderContents
from agentloop.errors import (
    AgentLoopError,
    Conflict,
    Gone,
    InvalidRequest,
    ServiceUnavailable,
    WeightVersionNotServed,
)
from agentloop.generation.leases import LeaseConfig
from agentloop.generation.turn_reader import TurnReader
from agentloop.parsers.by_name import get_parser
from agentloop.rollout.journal_homes import JournalFolder
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.rollout.worker import Worker
from agentloop.sessions.prompts import CallLimits, SessionParts
from agentloop.sessions.session import Session
from agentloop.simulation.engine import SimulatedSpec
from agentloop.simulation.policy import Malformation
from agentloop.storage.retention import RetentionPolicy
from agentloop.storage.trajectory_store import TrajectoryReader, TrajectoryStore
from agentloop.trajectory.node import Declaration, Node
from agentloop.trajectory.quotes import MIN_QUOTE_CHARS
from agentloop.types import (
    Limits,
    Message,
    OnStale,
    RolloutGroup,
    RolloutTask,
    SamplingParams,
    StalenessLimit,
    Trajectory,
    VersionDemand,
)
from agentloop_servers.coordinator.server import calls_of
from agentloop_servers.endpoint.registry import NewSession, SessionLimits, Sessions
from tests.support.engine.scripted import RENDERER
from tests.support.fleet.disk import Disk, DiskThread, FaultyStore, damage
from tests.support.fleet.faulty_link import FaultyPort, Stall
from tests.support.fleet.poisons import POISONS, ChainTool, NoteTool
from tests.support.fleet.proving_policy import ProvingPolicy
from tests.support.fleet.schedules import LATENCY, NOISE, Process, World
from tests.support.fleet.weight_folders import WeightFolders

T = TypeVar("T")

CALLS = calls_of(WorkerPort) | calls_of(FrontPort)
EPOCH_S = 1e9
COMPACTED_CONTEXT = 600  # tokens: a quarter of it is a prompt and one turn
MAX_TRIES = 400  # tries of a client's call; a call that needs more is lost
MAX_OLD_S = 12.0  # time until the first journal, if there is one
OWNER = ("",)
BIG = "much to read " * 20_000  # in a record that includes its task's messages; no loop renders it
_PARSER = get_parser("hermes")


@dataclass(slots=True)
class WorkerProcess:
    """One worker, from its start to its death."""

    name: str
    worker: Worker
    port: FaultyPort
    stall: Stall
    tool: NoteTool
    toolbox: Toolbox
    journal: TurnJournal
    thread: DiskThread
    task: asyncio.Task[None]
    died_at: float = inf
    has_good_disk: bool = True  # for its whole life


@dataclass(slots=True)
class IngressProcess:
    """One process of the chat endpoint, from its start to its death."""

    sessions: Sessions
    port: FaultyPort
    path: Path
    calls: dict[asyncio.Task[Any], None] = field(default_factory=dict)


@dataclass(slots=True)
class Ledger:
    """Requests of clients, and their answers."""

    accepted: dict[str, tuple[RolloutGroup, ...]] = field(default_factory=dict)
    delivered: dict[str, list[Trajectory]] = field(default_factory=dict)
    answers: dict[str, list[ChatResult]] = field(default_factory=dict)  # by session, turn by turn
    parts: dict[str, str] = field(default_factory=dict)  # the last turn of sessions of several conversations
    alike: dict[str, list[ChatResult]] = field(default_factory=dict)  # by session with several clients
    finished: dict[str, Trajectory] = field(default_factory=dict)
    cancelling: set[str] = field(default_factory=set)  # since the first attempt
    cancelled: set[str] = field(default_factory=set)  # the answer was received
    acknowledging: set[str] = field(default_factory=set)
    skipped: dict[str, set[tuple[str, int]]] = field(default_factory=dict)  # acknowledged, whether or not read


class Word(StrEnum):
    """Optional client calls in addition to submit and read."""

    NONE = "none"
    CANCEL = "cancel"
    ACKNOWLEDGE = "acknowledge"
    REPEAT = "repeat"


class WholeWorld(World):
    """The complete state of one schedule. `folder` is empty and used only by it."""

    policy = ProvingPolicy()

    def __init__(
        self, seed: int, clock: VirtualClock, checkpoint: Path, folder: Path, *, has_words: bool = False
    ) -> None:
        """Without `words`, clients only submit and read, require no versions, and no two processes die at once."""
        super().__init__(seed, clock, checkpoint)
        self.seed = seed
        self.has_words = has_words
        self.models: tuple[World, ...] = (self,)  # fleets of the service
        # separate generator: without words, a seed gives the same schedule as before
        self.say = Random(f"words {seed}")
        retention = RetentionPolicy(deletes_acknowledged=True)
        self.config = replace(self.config, retention=retention, retention_interval_s=0.5)
        # The capacity of a dead ingress is released by then.
        self.config = replace(self.config, balancer=replace(self.config.balancer, lease_ttl_s=40.0))
        self.disk = Disk(folder)
        self._rewrites = Random(f"rewrites {seed}")
        self.folders = WeightFolders(folder / "weights", self._rewrites)
        self._is_rewriting = False
        self._tool_kind = self._rewrites.choice((NoteTool, ChainTool)) if has_words else NoteTool
        self.damaged_journals: set[str] = set()  # keys of their samples
        self._contents = dict[int, str]()  # version -> digest with which it was first served
        self.ledger = Ledger()
        self.wall_s = EPOCH_S
        self.workers: list[WorkerProcess] = []
        self.dead: list[WorkerProcess] = []
        self.ingress: IngressProcess | None = None
        self._num_workers_started = 0
        self.store_path = folder / "0" / "trajectories.sqlite"
        self.store_path.parent.mkdir()
        self.turns = folder / "turns"
        self.turns.mkdir()
        self._sessions_path = folder / "sessions" / "sessions.sqlite"
        self._sessions_path.parent.mkdir()
        self._closing: list[asyncio.Task[None]] = []
        self._plagues: tuple[Callable[[Process], Awaitable[None]], ...] = (
            *(self._hang, self._stand_still, self._malform, self._kill_worker, self._stall_worker),
            *(self._kill_ingress, self._stall_coordinator, self._jump, self._fill_disk, self._slow_disk),
        )

    # Service

    async def start(self) -> None:
        await super().start()
        await self.start_ingress(self._sessions_path)
        for _ in range(self.rng.randint(1, 3)):
            self.start_worker()

    def spec(self, version: int | None) -> SimulatedSpec:
        spec = SimulatedSpec(RENDERER.vocab_size, 2048, 32, 200, 8, LATENCY, initial_version=version)
        return replace(spec, routed_experts=True, sampling_mask=True)

    def open_store(self) -> TrajectoryStore:
        if self._num_coordinators > 1:
            self.store_path = self.disk.after_a_kill(self.store_path)
        self.disk.slowness_s, self.disk.is_full = 0.0, False  # it is opened at once
        self.run_store = FaultyStore(self.store_path, self.disk)
        return self.run_store

    def start_worker(self) -> None:
        self._num_workers_started += 1
        name, stall = f"w{self._num_workers_started}", Stall(self.clock)
        port = FaultyPort(self.network, CALLS, self._deliver, stall)
        tool = self._tool_kind(self.rng.choice((0.0, 0.05, 0.5)))
        toolbox, thread = Toolbox([tool]), self.disk.executor()
        journal = TurnJournal(JournalFolder(self.turns, thread))
        worker = Worker(
            name,
            cast(WorkerPort, port),
            self.connect,  # type: ignore[arg-type] # what workers use of an engine
            RENDERER,
            _PARSER,
            toolbox,
            WorkerConfig(
                self.rng.choice((2, 4, 8)),
                0.5,
                turn_timeout_s=4.0,
                turn_attempts=30,
                sweep_s=5.0,
                kv_policy=self.kv_policy,
            ),
            max_context_tokens=2048,
            vocab_size=RENDERER.vocab_size,
            journal=journal,
        )
        task = asyncio.create_task(worker.run(), name=name)
        self.workers.append(WorkerProcess(name, worker, port, stall, tool, toolbox, journal, thread, task))
        self._note_disk()

    async def start_ingress(self, path: Path) -> None:
        stall = Stall(self.clock)
        port = FaultyPort(self.network, CALLS, self._deliver, stall)
        parts = SessionParts(
            RENDERER,
            TurnReader(RENDERER, _PARSER),
            _PARSER,
            self.kv_policy,
            max_context_tokens=2048,
            vocab_size=RENDERER.vocab_size,
            limits=CallLimits(journal_timeout_s=5.0),
            clock=self.clock,
            unix_time=lambda: self.wall_s + self.clock.now(),
        )
        sessions = Sessions(
            path,
            parts=parts,
            coordinator=cast(FrontPort, port),
            connect=self.connect,  # type: ignore[arg-type] # what sessions use of an engine
            secret="run secret",
            limits=SessionLimits(max_sessions=20, idle_s=self.rng.choice((0.5, 60.0)), ttl_s=86_400.0),
            leases=LeaseConfig(max_attempts=30, coordinator_timeout_s=5.0),
            executor=self.disk.executor(),
        )
        await sessions.start()
        self.ingress = IngressProcess(sessions, port, path)

    async def _deliver(self, name: str, arguments: tuple[Any, ...]) -> Any:
        def call(coordinator: Any) -> Coroutine[Any, Any, Any]:
            return cast(Coroutine[Any, Any, Any], coordinator.answering(name)(*arguments))

        try:
            return await self.ask(call)
        except AgentLoopError:
            raise
        except Exception as error:  # as its server answers unexpected errors
            raise ServiceUnavailable(f"the coordinator failed while it handled {name}: {error!r}") from error

    async def ask_ingress(self, call: Callable[[Sessions], Coroutine[Any, Any, T]]) -> T:
        """Call the chat endpoint. Raises ServiceUnavailable if it is down or dies during the call."""
        ingress = self.ingress
        if ingress is None:
            raise ServiceUnavailable("no ingress")
        task = asyncio.create_task(call(ingress.sessions), name="ingress call")
        ingress.calls[task] = None
        try:
            await asyncio.wait([task])
        finally:
            del ingress.calls[task]
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            raise ServiceUnavailable("the ingress died")
        return task.result()

    async def read_folder(self, directory: str) -> FolderContents:
        try:
            return await self.folders.read(directory)
        except Exception as error:
            if not isinstance(error, AgentLoopError):
                self.network.errors.append(error)
            raise

    def folder_of(self, version: int) -> str:
        return self.folders.folder_of(f"version-{version}") if self.has_words else super().folder_of(version)

    async def push(self, is_readable: bool = True) -> None:
        """Push as a trainer that may also rewrite the folder of a version it has pushed, and push it again."""
        served = self.coordinator.replicas.sync.served_source()
        if served is not None and self.may_rewrite(directory := served.update.directory or ""):
            again = WeightUpdate(served.version, directory)
            update = self.ask(lambda c: c.replicas.update_weights(again, self.kv_policy))
            await self.push_rewritten(directory, update)
            return
        if is_readable:
            self.maybe_rewrite_during_read(self.folder_of(self._next_version))
        await super().push(is_readable)

    def may_rewrite(self, directory: str) -> bool:
        """Return True if a push is of this folder of served weights, which is rewritten before it."""
        is_ours = self.folders.has(directory) and not self.is_healed and not self._is_rewriting
        return is_ours and self._rewrites.random() < 0.2

    def maybe_rewrite_during_read(self, directory: str) -> None:
        if self.folders.has(directory) and not self.is_healed and self._rewrites.random() < 0.2:
            self.folders.rewrite_during_read(directory)

    async def push_rewritten(self, directory: str, again: Coroutine[Any, Any, object]) -> None:
        """Rewrite or damage a folder of served weights, and push it again."""
        self._is_rewriting = True
        self._rewrites.choice((self.folders.write, self.folders.damage))(directory)
        self.history.counts["folder rewritten"] += 1
        num_reads, was_steady = self.folders.num_reads[directory], self._is_steady()
        try:
            await again
            is_compared = self.folders.num_reads[directory] > num_reads and was_steady and self._is_steady()
            is_other = self.served_digest(directory) != (await self.folders.read(directory)).digest
            assert not (is_compared and is_other), (
                f"{directory} was rewritten, and is the served version all the same"
            )
        except Conflict as error:
            self.history.counts["rewritten folder refused"] += "is served with digest" in error.message
            raise
        finally:
            self._is_rewriting = False
            self.restore_folders()

    def _is_steady(self) -> bool:
        """Return True if folders are read only to compare a push, and no answer to the coordinator is lost."""
        is_complete = len(self.placeable()) == sum(one.is_alive for one in self.processes.values())
        return is_complete and self.coordinator.replicas.sync.progress is None and self.network.is_perfect

    def served_digest(self, directory: str) -> str:
        served = self.coordinator.replicas.sync.served_source()
        return served.update.digest if served is not None and served.update.directory == directory else ""

    def restore_folders(self) -> None:
        """Restore the served content in the folder of the served version."""
        served = self.coordinator.replicas.sync.served_source()
        if served is not None and served.update.directory is not None:
            self.folders.restore(served.update.directory, served.update.digest)

    async def needs_a_push(self) -> bool:
        self.restore_folders()
        return await super().needs_a_push()

    def watch(self) -> None:
        super().watch()
        for process in self.placeable() if self.has_words else ():
            version, digest = process.engine.weight_version, process.engine.weight_digest
            if not version or not digest:  # version 0 has no folder that is rewritten
                continue
            assert self.folders.is_known(digest), f"{process.url} serves {version} of a mix of contents"
            first = self._contents.setdefault(version, digest)
            assert digest == first, f"{process.url} serves {digest} as version {version}, which was {first}"
        for name in () if self._is_down else self.ledger.cancelled:
            status = self.coordinator.rollouts.queue.status(name)
            assert status is None or not status.num_queued, f"{name} was cancelled, and begins: {status}"

    # Clients

    async def roll_out(self, rollout_id: str, groups: tuple[RolloutGroup, ...]) -> None:
        """Submit, and read every record as it arrives, like the client's SDK."""
        if self.has_words and self.say.random() < 0.3:
            big = RolloutTask("big", (Message("user", BIG),), loop=POISONS[-1])
            groups = (*groups, replace(groups[0], group_id="big", task=big, num_samples=2, keep=None))
        demands = Random(f"demands of {rollout_id} {self.seed}")
        groups = tuple(
            replace(group, task=replace(group.task, weight_version=self._demand(demands, rollout_id)))
            for group in groups
        )
        front = cast(FrontPort, FaultyPort(self.network, CALLS, self._deliver, Stall(self.clock)))
        terms = RolloutTerms(adapter=self.adapter_of(rollout_id))
        await self.insist(lambda: front.submit(rollout_id, groups, terms))
        self.ledger.accepted[rollout_id] = groups
        delivered = self.ledger.delivered.setdefault(rollout_id, [])
        num_expected = sum(group.num_samples for group in groups)
        cursor = num_empty = 0
        word = self.say.choice(tuple(Word)) if self.has_words else Word.NONE
        self.ledger.cancelling |= {rollout_id} if word is Word.CANCEL else set()
        self.ledger.acknowledging |= {rollout_id} if word is Word.ACKNOWLEDGE else set()
        cancelling = asyncio.create_task(self._cancel(front, rollout_id)) if word is Word.CANCEL else None
        if word is Word.REPEAT:
            await self._repeat_with_other_work(front, rollout_id, groups)
        skipped = self.ledger.skipped.setdefault(rollout_id, set())
        while len({*map(_key, delivered)} | skipped) < num_expected:
            try:
                page = (await self.insist(partial(front.read, rollout_id, cursor, 8, 1.0))).decoded()
            except Gone:  # everything was acknowledged
                break
            delivered += page.trajectories
            cursor = page.cursor
            num_empty = 0 if page.trajectories else num_empty + 1
            assert num_empty < MAX_TRIES, f"{rollout_id} has a lost record: {page.status}"
            if word is Word.ACKNOWLEDGE:
                await self._acknowledge(front, rollout_id, cursor)
            if not page.status.is_done or page.trajectories:
                continue
            num_found = len({*map(_key, delivered)} | skipped)
            assert num_found == num_expected, f"{rollout_id} is done: {num_found} of {num_expected} were delivered"
        if cancelling is not None:
            await cancelling

    def adapter_of(self, name: str) -> str:
        """Return the adapter of a rollout or a session."""
        return ""

    def known_versions(self, adapter: str) -> set[int]:
        """The versions that may have sampled."""
        return self.history.pushed - NOISE | {0}

    def served_version(self, adapter: str) -> int | None:
        return self.coordinator.replicas.fleet.weight_version

    def _demand(self, rng: Random, name: str) -> VersionDemand | None:
        """Return a version requirement: current, future or outdated weights; mostly none."""
        served = self.served_version(self.adapter_of(name)) or 0
        if not self.has_words or rng.random() < 0.6:
            return None
        if held := self.coordinator.replicas.fleet.held_versions:
            served = rng.choice((served, *sorted(held)))
        version, wait_s = max(0, served + rng.choice((-1, 0, 0, 1))), rng.choice((0.0, 1.0))
        return rng.choice((VersionDemand(version, None, wait_s), VersionDemand(None, version, wait_s)))

    async def _cancel(self, front: FrontPort, rollout_id: str) -> None:
        """Cancel; nothing of the rollout may start after the answer."""
        await self.clock.sleep(self.say.uniform(0.0, 4.0))
        await self.insist(lambda: front.cancel(rollout_id))
        self.ledger.cancelled.add(rollout_id)
        self.history.counts["cancelled"] += 1

    async def _repeat_with_other_work(
        self, front: FrontPort, rollout_id: str, groups: tuple[RolloutGroup, ...]
    ) -> None:
        """Repeat a submission with as many samples of another task, which is a different submission."""
        messages = (Message("user", "Something else."),)
        others = (replace(groups[0], task=replace(groups[0].task, messages=messages)), *groups[1:])
        try:
            await self.insist(lambda: front.submit(rollout_id, others))
        except Conflict:
            self.history.counts["refused other work"] += 1
        else:
            raise AssertionError(f"{rollout_id} was accepted again with other work")

    async def _acknowledge(self, front: FrontPort, rollout_id: str, cursor: int) -> None:
        """Acknowledge all records read, or more.

        Every record that exists by then counts as read, and no later one.
        """
        try:
            if self.say.random() < 0.7:
                await self.insist(lambda: front.acknowledge(rollout_id, cursor))
                return
            self.history.counts["acknowledged beyond"] += 1
            await self.ask(lambda c: c.rollouts.acknowledge(rollout_id, cursor + 1000))
        except Gone:
            return
        except AgentLoopError:  # it may have taken effect
            while self._is_down:
                await self.clock.sleep(0.1)
        reader = TrajectoryReader(self.store_path)
        found = reader.acknowledged() or frozenset()
        reader.close()
        skipped = {(group, index) for name, group, index in found if name == rollout_id}
        with closing(sqlite3.connect(self.store_path)) as db:  # retention at this moment leaves only the name
            if db.execute("SELECT 1 FROM deleted_rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone():
                groups = self.ledger.accepted[rollout_id]
                skipped = {(one.group_id, index) for one in groups for index in range(one.num_samples)}
        self.ledger.skipped[rollout_id] |= skipped

    async def talk(self, session_id: str) -> None:
        """Run one agent in one session; it retries failed calls like an SDK."""
        rng, ledger = Random(session_id), self.ledger
        new = NewSession(session_id, adapter=self.adapter_of(session_id))
        await self.insist(lambda: self.ask_ingress(lambda s: s.create(new, OWNER)))
        history: tuple[Message, ...] = ()
        answers = ledger.answers.setdefault(session_id, [])
        for turn in range(rng.randint(1, 4)):
            history = (*history, Message("user", f"question {turn}"))
            demand = self._demand(Random(f"demand of {session_id} {turn} {self.seed}"), session_id)
            try:
                result = await self._said(session_id, history, rng, demand)
                spans = [span for node in result.choices for span in node.reply.weight_versions]
                outside = [one for one in spans if demand is not None and not demand.accepts(one.version)]
                assert not outside, f"{demand} was answered by {spans}"
                self.history.counts["demanded versions answered"] += demand is not None
            except WeightVersionNotServed as error:
                assert demand is not None, "refused for its version, and demanded none"
                served = (error.details or {})["served"]
                assert not any(map(demand.accepts, served)), f"{demand} was refused where {served} are served"
                self.history.counts["demanded versions refused"] += 1
                result = await self._said(session_id, history, rng)
            answers.append(result)
            message = result.choices[0].reply.message
            history = (
                *history,
                message,
                *(Message("tool", "ok", tool_call_id=one.id) for one in message.tool_calls),
            )
            await self.clock.sleep(rng.uniform(0.0, 1.0))
        ledger.finished[session_id] = await self.insist(
            lambda: self.ask_ingress(lambda s: s.finish(session_id, OWNER))
        )

    async def talk_in_parts(self, session_id: str) -> None:
        """Run an agent that uses a sub-agent's result, and then continues from a summary of its history.

        The sub-agent is declared by its id, and the summary by its parent turn, or only by the quote of a reply.
        """
        rng, parts = Random(f"{session_id} {self.seed}"), self.ledger.parts
        new = NewSession(session_id, adapter=self.adapter_of(session_id))
        await self.insist(lambda: self.ask_ingress(lambda s: s.create(new, OWNER)))

        async def say(
            history: tuple[Message, ...], text: str, declaration: Declaration | None = None
        ) -> tuple[tuple[Message, ...], Node]:
            history = (*history, Message("user", text))
            node = (await self._said(session_id, history, rng, declaration=declaration)).choices[0]
            message = node.reply.message
            results = (Message("tool", "ok", tool_call_id=one.id) for one in message.tool_calls)
            return (*history, message, *results), node

        main, _ = await say((), "start")
        mine = Declaration(agent="helper", parent_agent="")
        helper, _ = await say((), "help", mine)
        for _ in range(rng.randint(0, 2)):
            helper, _ = await say(helper, "continue", mine)
        main, last = await say(main, f"helped: {helper[-1].content}")
        is_quoted = len(last.reply.content) >= MIN_QUOTE_CHARS and rng.random() < 0.5
        self.history.counts["linked by a quote" if is_quoted else "linked by a header"] += 1
        follows = None if is_quoted else Declaration(parent_turn=last.node_id)
        after, _ = await say((), f"summary: {last.reply.content}", follows)
        after, final = await say(after, "finish")
        parts[session_id] = final.node_id
        self.ledger.finished[session_id] = await self.insist(
            lambda: self.ask_ingress(lambda s: s.finish(session_id, OWNER))
        )

    async def _said(
        self,
        session_id: str,
        history: tuple[Message, ...],
        rng: Random,
        demand: VersionDemand | None = None,
        declaration: Declaration | None = None,
    ) -> ChatResult:
        digest = hashlib.sha256(repr(history).encode()).digest()
        sampling = SamplingParams(1, weight_version=demand)
        chat = ChatCall(history, sampling, max_tokens=200, timeout_s=15.0, declaration=declaration)
        counts = iter(range(MAX_TRIES * 2))

        async def call(sessions: Sessions) -> ChatResult:
            session: Session = await sessions.find(session_id, OWNER)
            return await session.call(chat, CallKey(digest, next(counts)))

        async def once() -> ChatResult:
            fault = rng.random() if not self.is_healed else 1.0
            if fault < 0.2:  # the client disconnects, and retries
                async with asyncio.timeout(rng.uniform(0.0, 1.0)):
                    return await self.ask_ingress(call)
            if fault < 0.3:  # a proxy sends it twice
                first, second = await asyncio.gather(
                    self.ask_ingress(call), self.ask_ingress(call), return_exceptions=True
                )
                if isinstance(second, BaseException):
                    raise second
                if not isinstance(first, BaseException):
                    assert first.call_id == second.call_id, "one call was answered twice, differently"
                return second
            result = await self.ask_ingress(call)
            if fault < 0.4:
                raise ServiceUnavailable("injected: the answer was lost")
            return result

        return await self.insist(once)

    async def talk_alike(self, session_id: str) -> None:
        """Run two clients with equal calls in one session. No call answers both."""
        new = NewSession(session_id, adapter=self.adapter_of(session_id))
        await self.insist(lambda: self.ask_ingress(lambda s: s.create(new, OWNER)))
        self.ledger.alike[session_id] = answers = []
        for turn in range(3):
            both = (self._said_alike(session_id, turn, client) for client in range(2))
            answers += await asyncio.gather(*both)
        taken = [answer.call_id for answer in answers]
        assert len(set(taken)) == len(taken), f"one call answered two clients of {session_id}: {taken}"
        self.ledger.finished[session_id] = await self.insist(
            lambda: self.ask_ingress(lambda s: s.finish(session_id, OWNER))
        )

    async def _said_alike(self, session_id: str, turn: int, client: int) -> ChatResult:
        """Send a call as an SDK does, which counts its attempts, until an answer arrives.

        The session cannot distinguish a retry from another client's if that client's first attempt left no trace.
        So an attempt counts only if its session has recorded it: a refused connection does not raise the count.
        """
        rng, retry_count = Random(f"{session_id} {turn} {client} {self.seed}"), 0
        chat = ChatCall((Message("user", f"question {turn}"),), SamplingParams(1), max_tokens=40, timeout_s=15.0)
        digest = hashlib.sha256(f"{session_id} {turn}".encode()).digest()

        async def call(sessions: Sessions) -> ChatResult:
            nonlocal retry_count
            session: Session = await sessions.find(session_id, OWNER)
            key = CallKey(digest, retry_count, is_unique=False)
            retry_count += 1
            return await session.call(chat, key)

        async def once() -> ChatResult:
            fault = rng.random() if not self.is_healed else 1.0
            if fault < 0.3:  # the client disconnects, and retries
                async with asyncio.timeout(rng.uniform(0.0, 1.0)):
                    return await self.ask_ingress(call)
            result = await self.ask_ingress(call)
            if fault < 0.5:
                self.history.counts["alike: answer lost"] += 1
                raise ServiceUnavailable("injected: the answer was lost")
            self.history.counts["alike: retried"] += retry_count > 1
            return result

        await self.clock.sleep(rng.choice((0.0, 0.3)))
        return await self.insist(once)

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry calls that can succeed later."""
        for _ in range(MAX_TRIES):
            try:
                return await call()
            except TimeoutError:
                self.history.counts["client left"] += 1
            except AgentLoopError as error:
                if isinstance(error, InvalidRequest | Conflict | Gone):
                    raise
                self.history.counts[f"client: {error.code}"] += 1
            await self.clock.sleep(0.25)
        raise AssertionError("a client was refused for ever")

    # Faults

    async def befall(self) -> None:
        """Run the faults of the fleet, workers, ingress, disk and clocks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(super().befall())
            if self.has_words and self.say.random() < 0.5:
                group.create_task(self._kill_two())
            if self.has_words:
                group.create_task(self._trouble_the_database(Random(f"database {self.seed}")))
                group.create_task(self._kill_workers(Random(f"old workers {self.seed}")))
                group.create_task(self._hold_replicas(Random(f"holds {self.seed}")))
            gap_s = self.rng.choice((0.4, 1.0, 3.0))
            while await self._goes_on(gap_s):
                plague = self.rng.choice(self._plagues)
                self.history.counts[plague.__name__] += 1
                await plague(self.rng.choice(tuple(self.processes.values())))

    async def _hold_replicas(self, rng: Random) -> None:
        """In a third of the schedules hold replicas, as evaluators that release their hold, or die."""
        while rng.random() < 0.95 and not self.is_healed and self.seed % 3 == 0:
            await self.clock.sleep(rng.uniform(0.0, 0.6))
            limits = rng.randint(1, 2), rng.uniform(0.3, 3.0), rng.uniform(0.3, 2.0)
            name = f"hold {rng.random()}"
            try:
                await self.ask(lambda c, name=name, limits=limits: c.replicas.hold(name, *limits))  # type: ignore[misc]
                self.history.counts["held"] += 1
                await self.clock.sleep(rng.uniform(0.0, 2.0))
                if rng.random() < 0.5:
                    await self.ask(lambda c, name=name: c.replicas.renew_hold(name, 0.0))  # type: ignore[misc]
                    self.history.counts["hold released"] += 1
            except AgentLoopError as error:
                self.history.counts[f"hold: {error.code}"] += 1

    async def _trouble_the_database(self, rng: Random) -> None:
        """Let the database stall and recover, or lose the answers of its commits for a while."""
        gap_s = rng.choice((1.0, 3.0, 10.0))
        while not self.is_healed:
            await self.clock.sleep(rng.expovariate(1 / gap_s))
            if rng.random() < 0.3:
                self.disk.database_returns_at = self.clock.now() + rng.choice((0.5, 3.0, 8.0))
                self.history.counts["database stalled"] += 1
            else:
                self.disk.loses_answers = True
                await self.clock.sleep(rng.choice((0.1, 0.5, 2.0)))
                self.disk.loses_answers = False
                self.history.counts["commit answers lost"] += 1

    async def _hang(self, process: Process) -> None:
        process.engine.faults.num_hung += self.rng.randint(1, 3)

    async def _stand_still(self, process: Process) -> None:
        process.stall.until = self.clock.now() + self.rng.choice((0.5, 3.0, 8.0))

    async def _malform(self, process: Process) -> None:
        kinds = tuple(Malformation)
        # The schedules that found faults are older than auxiliary rows.
        process.engine.faults.malformed.append(self.rng.choice(kinds if self.has_words else kinds[:6]))

    async def _kill_worker(self, process: Process) -> None:
        if not self.workers:
            return
        victim = self.rng.choice(self.workers)
        self.workers.remove(victim)
        self.dead.append(victim)
        victim.port.is_dead = victim.thread.is_dead = True
        victim.died_at = self.clock.now()
        victim.task.cancel()
        await self.clock.sleep(self.rng.choice((0.0, 1.0, 4.0)))
        self.start_worker()

    async def _kill_workers(self, rng: Random) -> None:
        """Kill all workers once there are journals, some of which their successors find damaged."""
        ends_at = self.clock.now() + MAX_OLD_S
        while not (found := sorted(self.turns.iterdir())) and self.clock.now() < ends_at:
            await self.clock.sleep(0.2)
        await self.clock.sleep(rng.uniform(0.0, 1.0))
        for path in found if rng.random() < 0.5 else ():
            if path.exists() and path.stat().st_size:
                damage(path, rng)
                self.damaged_journals.add(path.name.partition(".")[0])
                self.history.counts["damaged a journal"] += 1
        await asyncio.gather(*map(self._kill_worker, [next(iter(self.processes.values()))] * len(self.workers)))

    async def _kill_two(self) -> None:
        """Kill the coordinator and a worker at the same time."""
        await self.clock.sleep(self.say.uniform(0.0, self.trouble_s))
        if self._is_down or not self.workers:
            return
        self.history.counts["killed two"] += 1
        await asyncio.gather(self.crash_coordinator(), self._kill_worker(next(iter(self.processes.values()))))

    async def _stall_worker(self, process: Process) -> None:
        if self.workers:
            self.rng.choice(self.workers).stall.until = self.clock.now() + self.rng.choice((1.0, 6.0, 15.0))

    async def _kill_ingress(self, process: Process) -> None:
        old, self.ingress = self.ingress, None
        if old is None:
            return
        path = self.disk.after_a_kill(old.path)
        old.port.is_dead = True
        for call in tuple(old.calls):
            call.cancel()
        self._closing.append(asyncio.create_task(old.sessions.close(), name="dead ingress"))
        await self.clock.sleep(self.rng.uniform(0.0, 1.0))
        while self.ingress is None:
            try:
                await self.start_ingress(path)
            except AgentLoopError:  # the disk is full: it is restarted repeatedly, as by Serve
                self.history.counts["ingress did not start"] += 1
                await self.clock.sleep(1.0)

    async def _stall_coordinator(self, process: Process) -> None:
        self.stall.until = self.clock.now() + self.rng.choice((0.5, 3.0))

    async def _jump(self, process: Process) -> None:
        self.wall_s += self.rng.choice((-3600.0, 3600.0))

    async def _fill_disk(self, process: Process) -> None:
        self.disk.is_full = self.rng.random() < 0.7
        self._note_disk()

    async def _slow_disk(self, process: Process) -> None:
        self.disk.slowness_s = self.rng.choice((0.0, 0.05, 0.7, 6.0))
        self._note_disk()

    def _note_disk(self) -> None:
        for worker in self.workers:
            worker.has_good_disk &= self.disk.is_good

    async def heal(self) -> None:
        await super().heal()
        self.disk.slowness_s, self.disk.is_full = 0.0, False
        self.disk.database_returns_at, self.disk.loses_answers = 0.0, False
        self.stall.until = 0.0
        for process in self.processes.values():
            process.stall.until = 0.0
            process.engine.faults.num_hung = 0
            process.engine.faults.malformed.clear()
        for worker in self.workers:
            worker.stall.until = 0.0
        while not self.workers:
            await self.clock.sleep(0.1)

    async def close(self) -> None:
        for process in self.workers:
            process.worker.close()
        for process in (*self.workers, *self.dead):
            await asyncio.gather(process.task, return_exceptions=True)
            await process.toolbox.close()
            await asyncio.gather(process.journal.close(), return_exceptions=process.thread.is_dead)
        if self.ingress is not None:
            self.ingress.sessions.check_health()
            await self.ingress.sessions.close()
        await asyncio.gather(*self._closing)
        await super().close()


def make_groups(
    rng: Random, rollout_id: str, poison_share: float, *, has_compactions: bool = False
) -> tuple[RolloutGroup, ...]:
    """Return groups of agents with a tool, of conversations, and of tasks that fail.

    With `has_compactions` the second group's agents compact their history.
    """
    limit = None
    if rng.random() < 0.4:
        limit = StalenessLimit(rng.randint(0, 3), rng.choice(tuple(OnStale)))

    def task(number: int) -> RolloutTask:
        limits = Limits(max_turns=rng.randint(1, 5), max_tokens_per_turn=rng.choice((12, 200)), timeout_s=600.0)
        messages = (Message("user", f"Task {number} of {rollout_id}, please."),)
        name = f"task-{number}"
        if rng.random() < poison_share:
            limits = Limits(max_turns=2, timeout_s=5.0)
            return RolloutTask(name, messages, loop=rng.choice(POISONS), limits=limits)
        if rng.random() < 0.3:
            return RolloutTask(name, messages, loop="tests.support.fleet.live_run:Talk", limits=limits)
        made = RolloutTask(name, messages, ("note",), limits=limits, seed=rng.choice((None, 7)))
        if has_compactions and number == 1:
            limits = replace(limits, max_turns=8, max_context_tokens=COMPACTED_CONTEXT)
            return replace(made, loop="tests.support.fleet.live_run:COMPACTING", limits=limits)
        return made

    def group(number: int) -> RolloutGroup:
        """Return a group; only half of three or more samples are kept."""
        made, num_samples = task(number), rng.randint(1, 4)
        keep = num_samples // 2 if num_samples > 2 else None
        return RolloutGroup(f"g{number}", made, num_samples, rollout_id, limit, keep)

    return tuple(group(number) for number in range(rng.randint(1, 4)))


def _key(record: Trajectory) -> tuple[str, int]:
    return record.group_id, record.sample_index
