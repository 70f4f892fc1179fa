"""The turn journal: saves the finished turns of running trajectories, so that they survive the loss of a worker.

Each run of a trajectory (one attempt on one worker) has its own journal, and only that run writes to it. So a
worker that was wrongly considered lost cannot damage its successor's journal. A sample's journals are removed when
its record is durable. Turns older than `FLUSH_S`, of trajectories older than `YOUNG_S`, survive the process in a
storage backend (`journal_homes.py`): files or the run's store.

A journal is an append log. Each frame has a kind and one encoded value: first the run's header, then turns and tool
results. Data after a damaged or torn frame is dropped and logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import ParamSpec, Protocol, TypeAlias, TypeVar

import structlog

from agentloop.api.coordinator import JournalPart
from agentloop.concurrency.aio import OwnedTasks
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.rendering.port import Renderer
from agentloop.score import Score
from agentloop.storage.append_log import frame, read_frames
from agentloop.trajectory.node import Node
from agentloop.types import JSON, Assignment, LossCause, Move, RolloutTask, ToolCallTimes, ToolResult
from agentloop.values.codec import decode, encode

P = ParamSpec("P")
T = TypeVar("T")

FLUSH_S = 0.2  # between two writes
YOUNG_S = 2.0  # younger trajectories are not written: repeating them costs less than the writes

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The counters of a trajectory after a turn."""

    left_s: float | None  # until the deadline; None without one
    spent_s: float  # running time on all workers so far
    num_tool_calls: int
    num_tool_errors: int
    num_resampled_turns: int
    generate_s: float
    tool_s: float
    score: Score
    newest_version: int | None  # the newest weight version in the worker's responses
    max_tokens: int | None = None  # the loop's limit for the turn
    engine_s: float = 0.0
    began_at: float | None = None  # Unix time in seconds
    tool_calls: tuple[ToolCallTimes, ...] = ()  # since the previous turn
    moves: tuple[Move, ...] = ()  # so far
    lost_tokens: Mapping[LossCause, int] = field(default_factory=dict)  # so far


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A sampled turn with the messages observed before it and the counters after it."""

    node: Node
    progress: RunProgress


@dataclass(frozen=True, slots=True)
class ToolAnswers:
    """Results of a turn's calls, and the tools' snapshots after them; None for a session that was retired."""

    turn_id: str
    results: tuple[ToolResult, ...]
    states: Mapping[str, bytes | None]  # by tool
    left_s: float | None


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The first entry of a journal. Only a run with the same `fingerprint` may resume from the journal."""

    assignment_id: str
    attempt: int
    fingerprint: bytes


Entry: TypeAlias = RunHeader | FinishedTurn | ToolAnswers
_KINDS: dict[bytes, type[Entry]] = {b"R": RunHeader, b"T": FinishedTurn, b"A": ToolAnswers}
_KIND_OF = {kind: mark for mark, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class KeptTurns:
    """The journaled part of a trajectory of a lost worker, with at least one turn."""

    attempt: int
    turns: tuple[FinishedTurn, ...]
    answers: tuple[ToolResult, ...]  # results of calls of the last turn
    states: Mapping[str, bytes]  # snapshots after those results, by tool
    left_s: float | None
    frames: bytes = field(repr=False)  # the journal's bytes after its header

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens in the journal."""
        return sum(len(turn.node.reply.token_ids) for turn in self.turns)


class JournalHome(Protocol):
    """The storage backend of a worker's journals, such as `journal_homes.JournalFolder`.

    Callers serialize their writes.
    """

    async def write(
        self, parts: Callable[[], Sequence[JournalPart]], forgotten: Sequence[tuple[str, str]]
    ) -> Collection[str]:
        """Remove the journals in `forgotten`, then append `parts`.

        `forgotten` has pairs of assignment and run; the run "" means all runs of the assignment. `parts` is called
        in a thread. Returns the runs whose journals have ended: their samples have records, or writing failed,
        which is logged. Raises AgentLoopError; if it is retryable, the caller repeats the same call.
        """
        ...

    async def read(self, assignment_id: str) -> Sequence[tuple[str, bytes]]:
        """Return the journals of a sample as pairs of run and bytes. Raises OSError and AgentLoopError."""
        ...

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        """Remove the journals of all samples that `unfinished` does not return. Raises OSError."""
        ...

    def may_have(self, assignment_id: str) -> bool:
        """Return True if a lost worker may have left a journal of the sample."""
        ...

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work in the thread. The work finishes even if the caller is cancelled."""
        ...

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        ...


class RunJournal:
    """The journal of one attempt at a trajectory.

    `kept` are the turns of an earlier attempt that this attempt resumes from; None: it starts at the first turn.
    """

    def __init__(
        self, journal: TurnJournal, assignment: Assignment, name: str, fingerprint: Callable[[], bytes]
    ) -> None:
        self.kept: KeptTurns | None = None
        self.restart_reason = ""  # the reason for a restart from the first turn, if there was an earlier attempt
        self.assignment_id = assignment.assignment_id
        self.attempt = assignment.attempt  # greater than the attempts of earlier journals
        self.name = name
        self.earlier: tuple[str, ...] = ()  # the sample's earlier runs
        self.is_over = False
        self.is_kept = False  # written to the storage backend, or in a batch that is being written
        self.begun_at = asyncio.get_running_loop().time()
        self._journal = journal
        self._fingerprint = fingerprint
        self._num_parts = 0

    def append(self, entry: FinishedTurn | ToolAnswers) -> None:
        """Queue an entry for the writing thread, which encodes it. Takes microseconds."""
        if not self.is_over:
            self._journal.add(self, entry)

    def forget(self) -> None:
        """Schedule the removal of the sample's journals. Idempotent."""
        self.is_over = True
        self._journal.forget(self)

    def part(self, entries: Sequence[FinishedTurn | ToolAnswers]) -> JournalPart:
        """Encode the next entries, in the thread. The first part begins with the header and the resumed turns."""
        frames = [_frame(entry) for entry in entries]
        number, self._num_parts = self._num_parts, self._num_parts + 1
        if number == 0:
            header = RunHeader(self.assignment_id, self.attempt, self._fingerprint())
            frames[:0] = [_frame(header), b"" if self.kept is None else self.kept.frames]
        return JournalPart(self.assignment_id, self.name, number, b"".join(frames))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parts that are written together. A failed write is retried with the same bytes."""

    runs: tuple[RunJournal, ...]
    parts: Callable[[], Sequence[JournalPart]]
    forgotten: Sequence[tuple[str, str]]


class TurnJournal:
    """The journals of one worker process. `close` must be called; it also closes `home`."""

    def __init__(self, home: JournalHome, flush_s: float = FLUSH_S, young_s: float = YOUNG_S) -> None:
        self._home = home
        self._young_s = young_s
        self._flush_s = flush_s
        self._pending: dict[RunJournal, list[FinishedTurn | ToolAnswers]] = {}
        self._doomed: list[tuple[str, str]] = []  # journals to remove, as pairs of assignment and run
        self._unsent: _Batch | None = None
        self._writing = asyncio.Lock()
        self._tasks = OwnedTasks("turn-journal")
        self._flushing: asyncio.Task[None] | None = None
        self._is_failing = False

    async def begin(self, assignment: Assignment, fingerprint: Callable[[], bytes]) -> RunJournal:
        """Create the journal of a run. Nothing is written before its first entry.

        Reads the sample's journals of lost workers and resumes from the one with the most sampled tokens, of equal
        ones the latest. Ignores journals that cannot be read or that belong to another task or model.
        """
        name = assignment.assignment_id
        run_name = f"{mark_of(name)}.{time.time_ns():020d}.{os.urandom(3).hex()}"
        run = RunJournal(self, assignment, run_name, fingerprint)
        # A first attempt has no earlier journals, so do not read the storage.
        if assignment.attempt == 0 and not assignment.is_restored and not self._home.may_have(name):
            return run
        try:
            await self.flush()  # an earlier run of the sample in this process may have unwritten entries
            journals = await self._home.read(name)
            run.earlier = tuple(earlier for earlier, _ in journals)
            run.kept = await self._home.in_thread(_best, journals, name, fingerprint)
        except (OSError, AgentLoopError) as error:
            _log.error("journal_unreadable", error=repr(error))
        if (kept := run.kept) is not None:
            # A restarted coordinator may count fewer attempts than the journal.
            run.attempt = max(run.attempt, kept.attempt + 1)
            num_turns, num_tokens = len(kept.turns), kept.num_sampled
            _log.info("trajectory_resumes", num_turns=num_turns, num_tokens=num_tokens, of_attempt=kept.attempt)
        elif assignment.attempt > 0 or run.earlier:
            run.restart_reason = "no usable journal of an earlier attempt"
            _log.info("trajectory_begins_again", attempt=assignment.attempt, reason=run.restart_reason)
        return run

    def add(self, run: RunJournal, entry: FinishedTurn | ToolAnswers) -> None:
        """Write an entry with the next batch."""
        waiting = self._pending.setdefault(run, [])
        # The turn's node contains the earlier results as messages: only their snapshots are still needed.
        if isinstance(entry, FinishedTurn) and waiting:
            waiting[:] = [earlier for earlier in waiting if isinstance(earlier, FinishedTurn) or earlier.states]
        waiting.append(entry)
        self._flush_later()

    def forget(self, run: RunJournal) -> None:
        """Remove the journals of a run and of its sample's earlier runs with the next batch."""
        self._pending.pop(run, None)
        # A run that was never written has no journal to remove.
        doomed = [*run.earlier, run.name] if run.is_kept else run.earlier
        self._doomed += [(run.assignment_id, name) for name in doomed]
        run.earlier, run.is_kept = (), False
        if self._doomed:
            self._flush_later()

    async def flush(self, *, spares_young: bool = False) -> None:
        """Write pending entries and removals now. A retryable failure is logged and retried by a later flush.

        With `spares_young`, entries of trajectories younger than `young_s` stay pending.
        """
        await self._tasks.run(self._flush(spares_young=spares_young))

    async def forget_sample(self, assignment_id: str) -> None:
        """Remove the journals of all runs of a sample, including those of other processes."""
        self._doomed.append((assignment_id, ""))
        await self.flush()

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        """Remove the journals of lost workers, except those of samples that `unfinished` returns."""
        await self._home.sweep(unfinished)

    async def close(self) -> None:
        """Write pending entries and close the storage backend. Idempotent."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            self._flushing = None
            await self.flush()
        self._home.close()

    def _flush_later(self) -> None:
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush_soon(), name="turn-journal")

    async def _flush_soon(self) -> None:
        while self._pending or self._doomed or self._unsent is not None:
            await asyncio.sleep(self._flush_s)
            await self.flush(spares_young=True)

    async def _flush(self, *, spares_young: bool) -> None:
        async with self._writing:
            # Retry an unsent batch first, so that the entries of a run stay in order.
            if self._unsent is not None and not await self._is_sent(self._unsent):
                return
            born_by = asyncio.get_running_loop().time() - self._young_s if spares_young else math.inf
            batch = {run: waits for run, waits in self._pending.items() if run.is_kept or run.begun_at <= born_by}
            for run in batch:
                del self._pending[run]
                run.is_kept = True
            doomed, self._doomed = self._doomed, []
            if batch or doomed:
                # Cached: encoding counts the parts of each run, and a retry must write the same parts.
                self._unsent = _Batch(tuple(batch), cache(partial(_encoded, batch)), doomed)
                await self._is_sent(self._unsent)

    async def _is_sent(self, batch: _Batch) -> bool:
        """Write a batch. Returns False if it has to be retried."""
        try:
            over = await self._home.write(batch.parts, batch.forgotten)
        except AgentLoopError as error:
            if not self._is_failing:
                _log.error("journal_not_written", error=repr(error), is_tried_again=error.retryable)
            self._is_failing = True
            if error.retryable:
                return False
            # The runs continue without a journal.
            over = [run.name for run in batch.runs]
        else:
            self._is_failing = False
        self._unsent = None
        for run in batch.runs:
            run.is_over |= run.name in over
        return True


def fingerprint(task: RolloutTask, tools: Sequence[Mapping[str, JSON]], renderer: Renderer) -> bytes:
    """Return a digest of all inputs of a trajectory's tokens except the weights."""
    facts = renderer.facts
    parts = encode(
        (task, list(tools), renderer.vocab_size, facts.template_source, facts.stop_tokens, facts.thinking)
    )
    return hashlib.sha256(parts).digest()


# The functions below run in the thread of the storage backend.


def _frame(entry: Entry) -> bytes:
    return frame(_KIND_OF[type(entry)] + encode(entry))


def read_entries(data: bytes) -> Iterator[tuple[int, Entry]]:
    """Yield the entries before the first damaged or torn frame, each with the offset of its end."""
    at = 0
    for start, end, body in read_frames(data):
        kind = _KINDS.get(body[:1])
        if start != at or kind is None:
            return
        try:
            entry = decode(body[1:], kind)
        except InvalidRequest:  # written by another release
            return
        yield end, entry
        at = end


def mark_of(assignment_id: str) -> str:
    """Return the common prefix of the names of a sample's runs."""
    return hashlib.blake2b(assignment_id.encode(), digest_size=16).hexdigest()


def _encoded(batch: Mapping[RunJournal, Sequence[FinishedTurn | ToolAnswers]]) -> list[JournalPart]:
    return [run.part(entries) for run, entries in batch.items()]


def _best(
    journals: Sequence[tuple[str, bytes]], name: str, fingerprint_now: Callable[[], bytes]
) -> KeptTurns | None:
    """Return the journal with the most sampled tokens, of equal ones the latest attempt."""
    wanted = fingerprint_now()
    usable = [kept for _, data in journals if (kept := _kept(data, name, wanted)) is not None]
    return max(usable, key=lambda kept: (kept.num_sampled, kept.attempt), default=None)


def _kept(data: bytes, name: str, wanted: bytes) -> KeptTurns | None:
    """Read one journal. Returns None if it has no turn or belongs to another sample, task or model."""
    header: RunHeader | None = None
    turns: list[FinishedTurn] = []
    answers: list[ToolAnswers] = []
    states: dict[str, bytes | None] = {}
    left_s: float | None = None
    begins_at = ends_at = 0
    for ends_at, entry in read_entries(data):
        if isinstance(entry, RunHeader):
            header, begins_at = entry, ends_at
        elif isinstance(entry, FinishedTurn):
            turns.append(entry)
            left_s = entry.progress.left_s
        else:
            answers.append(entry)
            states.update(entry.states)
            left_s = entry.left_s
    if ends_at < len(data):
        _log.warning("journal_tail_dropped", assignment=name, num_bytes=len(data) - ends_at, num_turns=len(turns))
    if header is None or not turns:
        return None
    if (header.assignment_id, header.fingerprint) != (name, wanted):
        _log.warning("journal_of_another_task", assignment=name)
        return None
    last_turn = turns[-1].node.node_id
    return KeptTurns(
        attempt=header.attempt,
        turns=tuple(turns),
        answers=tuple(result for answer in answers if answer.turn_id == last_turn for result in answer.results),
        states={tool: state for tool, state in states.items() if state is not None},
        left_s=left_s,
        frames=data[begins_at:ends_at],
    )
