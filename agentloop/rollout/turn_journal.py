"""The turn journal: the finished turns of running trajectories, which a worker that dies leaves behind.

Ownership: each run of a trajectory (one attempt on one worker) writes one journal of its own; no other run ever
writes to it, so a worker that was given up for lost cannot spoil what its successor writes. The sample's journals
go when its record is durable. What is older than `FLUSH_S`, in a trajectory older than `YOUNG_S`, survives the end
of the process in whatever way, at the home of its journals (`journal_homes.py`): in files, or in the run's store.

A journal is an append log. A frame holds a kind and the codec's bytes of one value: first the run's header, then
its turns and the answers of tools. What follows a damaged or torn frame is dropped, counted and logged.
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
YOUNG_S = 2.0  # a trajectory younger than that is not written: it costs nothing, and would be little to lose

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A trajectory's counts at one moment. Its turns are kept apart."""

    left_s: float | None  # of its deadline; None without one
    spent_s: float  # on workers
    num_tool_calls: int
    num_tool_errors: int
    num_resampled_turns: int
    generate_s: float
    tool_s: float
    score: Score
    newest_version: int | None  # that the worker had heard of
    max_tokens: int | None = None  # that the loop asked of the turn
    engine_s: float = 0.0
    began_at: float | None = None  # seconds since 1970
    tool_calls: tuple[ToolCallTimes, ...] = ()  # between the turn before and this one
    moves: tuple[Move, ...] = ()  # so far
    lost_tokens: Mapping[LossCause, int] = field(default_factory=dict)  # so far


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A sampled turn with what was observed before it, and the counts as of then."""

    node: Node
    progress: RunProgress


@dataclass(frozen=True, slots=True)
class ToolAnswers:
    """Answers to a turn's calls, and the states of environments after them; None for a replaced environment."""

    turn_id: str
    results: tuple[ToolResult, ...]
    states: Mapping[str, bytes | None]  # by tool
    left_s: float | None


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The first entry of a journal: its run. Only a run of the same `fingerprint` continues it."""

    assignment_id: str
    attempt: int
    fingerprint: bytes


Entry: TypeAlias = RunHeader | FinishedTurn | ToolAnswers
_KINDS: dict[bytes, type[Entry]] = {b"R": RunHeader, b"T": FinishedTurn, b"A": ToolAnswers}
_KIND_OF = {kind: mark for mark, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class KeptTurns:
    """The part of a trajectory that a lost worker had finished: at least one turn."""

    attempt: int
    turns: tuple[FinishedTurn, ...]
    answers: tuple[ToolResult, ...]  # to calls of the last turn
    states: Mapping[str, bytes]  # of environments after those answers, by tool
    left_s: float | None
    frames: bytes = field(repr=False)  # of all that, as they were written

    @property
    def num_sampled(self) -> int:
        """Tokens that need not be sampled again."""
        return sum(len(turn.node.reply.token_ids) for turn in self.turns)


class JournalHome(Protocol):
    """The place of the journals of a worker's runs, as `journal_homes.JournalFolder`. Calls come one at a time."""

    async def write(
        self, parts: Callable[[], Sequence[JournalPart]], forgotten: Sequence[tuple[str, str]]
    ) -> Collection[str]:
        """Forget journals, by assignment and run, or all of an assignment's with the run "". Then append.

        `parts` is called in a thread. Returns the runs whose journals are over: their samples have ended, or they
        cannot be written, which is logged. Raises AgentLoopError, and is called again with the same then.
        """
        ...

    async def read(self, assignment_id: str) -> Sequence[tuple[str, bytes]]:
        """Return what there is of a sample, by run. Raises OSError, AgentLoopError."""
        ...

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        """Remove what dead workers left, but for samples that `unfinished` returns. Raises OSError."""
        ...

    def may_have(self, assignment_id: str) -> bool:
        """Tell if a dead worker may have left something of a sample that nothing else speaks of."""
        ...

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what takes long, to its end, also if the caller is cancelled."""
        ...

    def close(self) -> None:
        """End the thread. Idempotent."""
        ...


class RunJournal:
    """The finished turns of one attempt at a trajectory, for a later attempt.

    `kept` are the turns that this attempt continues from; None: it begins at the start.
    """

    def __init__(
        self, journal: TurnJournal, assignment: Assignment, name: str, fingerprint: Callable[[], bytes]
    ) -> None:
        self.kept: KeptTurns | None = None
        self.restart_reason = ""  # why the run starts from its first turn although an earlier one had begun
        self.assignment_id = assignment.assignment_id
        self.attempt = assignment.attempt  # the number of the run, after those that were found
        self.name = name
        self.earlier: tuple[str, ...] = ()  # the earlier runs of its sample
        self.is_over = False
        self.is_kept = False  # at its home, or on its way there
        self.begun_at = asyncio.get_running_loop().time()
        self._journal = journal
        self._fingerprint = fingerprint
        self._num_parts = 0

    def append(self, entry: FinishedTurn | ToolAnswers) -> None:
        """Give an entry to the writing thread, which encodes it. Takes microseconds."""
        if not self.is_over:
            self._journal.add(self, entry)

    def forget(self) -> None:
        """Have the journals of the sample removed. Idempotent."""
        self.is_over = True
        self._journal.forget(self)

    # --- the thread's side ---

    def part(self, entries: Sequence[FinishedTurn | ToolAnswers]) -> JournalPart:
        """Encode the entries that come next; before the first ones, the header and what the run goes on from."""
        frames = [_frame(entry) for entry in entries]
        number, self._num_parts = self._num_parts, self._num_parts + 1
        if number == 0:
            header = RunHeader(self.assignment_id, self.attempt, self._fingerprint())
            frames[:0] = [_frame(header), b"" if self.kept is None else self.kept.frames]
        return JournalPart(self.assignment_id, self.name, number, b"".join(frames))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parts that are written together, again and again with the same bytes until it has come through."""

    runs: tuple[RunJournal, ...]
    parts: Callable[[], Sequence[JournalPart]]
    forgotten: Sequence[tuple[str, str]]


class TurnJournal:
    """The journals of one worker process. Close it in the end."""

    def __init__(self, home: JournalHome, flush_s: float = FLUSH_S, young_s: float = YOUNG_S) -> None:
        """Closes `home` in the end."""
        self._home = home
        self._young_s = young_s
        self._flush_s = flush_s
        self._pending: dict[RunJournal, list[FinishedTurn | ToolAnswers]] = {}
        self._doomed: list[tuple[str, str]] = []  # assignments and runs
        self._unsent: _Batch | None = None
        self._writing = asyncio.Lock()
        self._tasks = OwnedTasks("turn-journal")
        self._flushing: asyncio.Task[None] | None = None
        self._is_failing = False

    async def begin(self, assignment: Assignment, fingerprint: Callable[[], bytes]) -> RunJournal:
        """Begin the journal of a run; nothing is written before its first entry.

        Finds what lost workers left of the sample: of several runs the one with the most sampled tokens, of equals
        the latest. What cannot be read, or is of another task or model, counts for nothing.
        """
        name = assignment.assignment_id
        run_name = f"{mark_of(name)}.{time.time_ns():020d}.{os.urandom(3).hex()}"
        run = RunJournal(self, assignment, run_name, fingerprint)
        if assignment.attempt == 0 and not assignment.is_restored and not self._home.may_have(name):
            return run
        try:
            await self.flush()  # an earlier run of ours may have ended this moment
            found = await self._home.read(name)
            run.earlier = tuple(earlier for earlier, _ in found)
            run.kept = await self._home.in_thread(_best, found, name, fingerprint)
        except (OSError, AgentLoopError) as error:
            _log.error("journal_unreadable", error=repr(error))
        if (kept := run.kept) is not None:
            # A coordinator that was restarted does not know of that attempt.
            run.attempt = max(run.attempt, kept.attempt + 1)
            num_turns, num_tokens = len(kept.turns), kept.num_sampled
            _log.info("trajectory_resumes", num_turns=num_turns, num_tokens=num_tokens, of_attempt=kept.attempt)
        elif assignment.attempt > 0 or run.earlier:
            run.restart_reason = "no usable journal here"
            _log.info("trajectory_begins_again", attempt=assignment.attempt, reason=run.restart_reason)
        return run

    def add(self, run: RunJournal, entry: FinishedTurn | ToolAnswers) -> None:
        """Write an entry with the next batch."""
        waiting = self._pending.setdefault(run, [])
        if isinstance(entry, FinishedTurn) and waiting:  # which has the answers that came before it
            waiting[:] = [one for one in waiting if isinstance(one, FinishedTurn) or one.states]
        waiting.append(entry)
        self._flush_later()

    def forget(self, run: RunJournal) -> None:
        """Remove the journals of a run and of the earlier ones of its sample with the next batch."""
        self._pending.pop(run, None)
        doomed = [*run.earlier, run.name] if run.is_kept else run.earlier
        self._doomed += [(run.assignment_id, name) for name in doomed]
        run.earlier, run.is_kept = (), False
        if self._doomed:
            self._flush_later()

    async def flush(self, *, spares_young: bool = False) -> None:
        """Write and remove what waits. A failure that may pass is logged, and what waits is written later."""
        await self._tasks.run(self._flush(spares_young=spares_young))

    async def forget_sample(self, assignment_id: str) -> None:
        """Remove the journals of a sample's runs, of whatever process."""
        self._doomed.append((assignment_id, ""))
        await self.flush()

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        """Remove the journals that dead workers left, but for samples that `unfinished` returns."""
        await self._home.sweep(unfinished)

    async def close(self) -> None:
        """Write what waits, and end the thread. Idempotent."""
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
            if self._unsent is not None and not await self._is_sent(self._unsent):
                return
            born_by = asyncio.get_running_loop().time() - self._young_s if spares_young else math.inf
            batch = {run: waits for run, waits in self._pending.items() if run.is_kept or run.begun_at <= born_by}
            for run in batch:
                del self._pending[run]
                run.is_kept = True
            doomed, self._doomed = self._doomed, []
            if batch or doomed:
                self._unsent = _Batch(tuple(batch), cache(partial(_encoded, batch)), doomed)
                await self._is_sent(self._unsent)

    async def _is_sent(self, batch: _Batch) -> bool:
        """Write a batch. False: it has to be written again."""
        try:
            over = await self._home.write(batch.parts, batch.forgotten)
        except AgentLoopError as error:
            if not self._is_failing:
                _log.error("journal_not_written", error=repr(error), is_tried_again=error.retryable)
            self._is_failing = True
            if error.retryable:
                return False
            over = [run.name for run in batch.runs]
        else:
            self._is_failing = False
        self._unsent = None
        for run in batch.runs:
            run.is_over |= run.name in over
        return True


def fingerprint(task: RolloutTask, tools: Sequence[Mapping[str, JSON]], renderer: Renderer) -> bytes:
    """Return a digest of all that a trajectory's tokens depend on, but for the weights."""
    facts = renderer.facts
    parts = encode(
        (task, list(tools), renderer.vocab_size, facts.template_source, facts.stop_tokens, facts.thinking)
    )
    return hashlib.sha256(parts).digest()


# --- the thread's side ---


def _frame(entry: Entry) -> bytes:
    return frame(_KIND_OF[type(entry)] + encode(entry))


def read_entries(data: bytes) -> Iterator[tuple[int, Entry]]:
    """Yield a file's entries up to the first damaged or torn one, each with the offset behind it."""
    at = 0
    for start, end, body in read_frames(data):
        kind = _KINDS.get(body[:1])
        if start != at or kind is None:
            return
        try:
            entry = decode(body[1:], kind)
        except InvalidRequest:  # of another release
            return
        yield end, entry
        at = end


def mark_of(assignment_id: str) -> str:
    """Return the beginning of the names of a sample's runs."""
    return hashlib.blake2b(assignment_id.encode(), digest_size=16).hexdigest()


def _encoded(batch: Mapping[RunJournal, Sequence[FinishedTurn | ToolAnswers]]) -> list[JournalPart]:
    return [run.part(entries) for run, entries in batch.items()]


def _best(found: Sequence[tuple[str, bytes]], name: str, fingerprint_now: Callable[[], bytes]) -> KeptTurns | None:
    """Return the best of what lost workers left of a sample."""
    wanted = fingerprint_now()
    kept = [one for _, data in found if (one := _kept(data, name, wanted)) is not None]
    return max(kept, key=lambda one: (one.num_sampled, one.attempt), default=None)


def _kept(data: bytes, name: str, wanted: bytes) -> KeptTurns | None:
    """Read one journal; None if it is not of this sample, or holds no turn."""
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
        answers=tuple(result for one in answers if one.turn_id == last_turn for result in one.results),
        states={tool: state for tool, state in states.items() if state is not None},
        left_s=left_s,
        frames=data[begins_at:ends_at],
    )
