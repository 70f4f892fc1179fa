"""The turn journal: the finished turns of running trajectories, in files that a worker which dies leaves behind.

Ownership: each run of a trajectory (one attempt on one worker) writes one file of its own, named by its sample;
no other run ever writes to it, so a worker that was given up for lost cannot spoil what its successor writes. The
sample's files go when its record is durable. What is older than `FLUSH_S`, in a trajectory older than `YOUNG_S`,
survives the end of the process in whatever way; not a power cut, since nothing is synced.

A file is an append log. A frame holds a kind and the codec's bytes of one value: first the run's header, then its
turns and the answers of tools. What follows a damaged or torn frame is dropped, counted and logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

import structlog

from agentloop.append_log import append, frame, open_log, read_frames
from agentloop.codec import decode, encode
from agentloop.errors import InvalidRequest
from agentloop.rendering.port import Renderer
from agentloop.score import Score
from agentloop.trajectory.node import Node
from agentloop.types import JSON, Assignment, LossCause, Move, RolloutTask, ToolCallTimes, ToolResult

P = ParamSpec("P")
T = TypeVar("T")

TURNS_FOLDER = "turns"
FLUSH_S = 0.2  # between two writes
YOUNG_S = 2.0  # a trajectory younger than that is not written: it costs nothing, and would be little to lose
MAX_NAMES_A_CALL = 1000
MAX_HEADER_BYTES = 4096
STRAY_AFTER_S = 3600.0  # a file without a readable header goes at this age

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


class RunJournal:
    """The finished turns of one attempt at a trajectory, in a file for a later attempt.

    `kept` are the turns that this attempt continues from; None: it begins at the start.
    """

    def __init__(self, journal: TurnJournal, path: Path, header: Callable[[], RunHeader], attempt: int) -> None:
        self.kept: KeptTurns | None = None
        self.attempt = attempt  # the number of the run, after those that were found
        self.path = path
        self.earlier: tuple[Path, ...] = ()  # the files of earlier runs of its sample
        self.is_over = False
        self.is_on_disk = False  # or on its way there
        self.begun_at = asyncio.get_running_loop().time()
        self._journal = journal
        self._header = header
        self._is_made = False

    def append(self, entry: FinishedTurn | ToolAnswers) -> None:
        """Give an entry to the writing thread, which encodes it. Takes microseconds."""
        if not self.is_over:
            self._journal.add(self, entry)

    def forget(self) -> None:
        """Have the writing thread remove the journals of the sample. Idempotent."""
        self.is_over = True
        self._journal.forget(self)

    # --- the thread's side ---

    def write(self, entries: Sequence[FinishedTurn | ToolAnswers]) -> None:
        """Append entries to the file, which is made for the first ones. Raises OSError."""
        frames = [_frame(entry) for entry in entries]
        if not self._is_made:
            frames[:0] = [_frame(self._header()), b"" if self.kept is None else self.kept.frames]
        # A file that is gone later was removed with its sample.
        fd = open_log(self.path, is_new=not self._is_made)
        self._is_made = True
        try:
            append(fd, b"".join(frames))
        finally:
            os.close(fd)


class TurnJournal:
    """The journals of one worker process. Close it in the end."""

    def __init__(
        self,
        folder: Path,
        flush_s: float = FLUSH_S,
        young_s: float = YOUNG_S,
        executor: Executor | None = None,
    ) -> None:
        """`executor` runs one call at a time; a thread of its own by default."""
        self._folder = folder
        self._young_s = young_s
        self._flush_s = flush_s
        self._pending: dict[RunJournal, list[FinishedTurn | ToolAnswers]] = {}
        self._doomed: list[Path] = []
        self._left_behind: set[str] = set()  # marks of samples that other workers had a file of, at the last look
        self._thread = executor or ThreadPoolExecutor(1, thread_name_prefix="turn-journal")
        self._flushing: asyncio.Task[None] | None = None
        self._is_failing = False

    async def begin(self, assignment: Assignment, fingerprint: Callable[[], bytes]) -> RunJournal:
        """Begin the journal of a run; nothing is on disk before its first entry.

        Finds what lost workers left of the sample: of several runs the one with the most sampled tokens, of equals
        the latest. A file that cannot be read, or is of another task or model, counts for nothing.
        """
        name = assignment.assignment_id
        mark = _mark(name)

        def header() -> RunHeader:
            return RunHeader(name, run.attempt, fingerprint())

        path = self._folder / f"{mark}.{time.time_ns():020d}.{os.urandom(3).hex()}"
        run = RunJournal(self, path, header, assignment.attempt)
        if assignment.attempt == 0 and not assignment.is_restored and mark not in self._left_behind:
            return run
        try:
            await self.flush()  # an earlier run of ours may have ended this moment
            run.earlier, run.kept = await self._in_thread(_found, self._folder, mark, name, fingerprint)
        except OSError as error:
            _log.error("journal_unreadable", error=repr(error))
        if (kept := run.kept) is not None:
            # A coordinator that was restarted does not know of that attempt.
            run.attempt = max(run.attempt, kept.attempt + 1)
            num_turns, num_tokens = len(kept.turns), kept.num_sampled
            _log.info("trajectory_resumes", num_turns=num_turns, num_tokens=num_tokens, of_attempt=kept.attempt)
        elif assignment.attempt > 0 or run.earlier:
            _log.info("trajectory_begins_again", attempt=assignment.attempt, reason="no usable journal here")
        return run

    def add(self, run: RunJournal, entry: FinishedTurn | ToolAnswers) -> None:
        """Write an entry with the next batch."""
        waiting = self._pending.setdefault(run, [])
        if isinstance(entry, FinishedTurn) and waiting:  # which has the answers that came before it
            waiting[:] = [one for one in waiting if isinstance(one, FinishedTurn) or one.states]
        waiting.append(entry)
        self._flush_later()

    def forget(self, run: RunJournal) -> None:
        """Remove the files of a run and of the earlier ones of its sample with the next batch."""
        self._pending.pop(run, None)
        self._doomed += run.earlier
        if run.is_on_disk:
            self._doomed.append(run.path)
        run.earlier, run.is_on_disk = (), False
        if self._doomed:
            self._flush_later()

    async def flush(self, *, spares_young: bool = False) -> None:
        """Write and remove what waits. A failure is logged, and ends the journal that it concerns."""
        born_by = asyncio.get_running_loop().time() - self._young_s if spares_young else math.inf
        batch = {run: waits for run, waits in self._pending.items() if run.is_on_disk or run.begun_at <= born_by}
        for run in batch:
            del self._pending[run]
        doomed, self._doomed = self._doomed, []
        for run in batch:
            run.is_on_disk = True
        failed = await self._in_thread(_write_all, self._folder, list(batch.items()), doomed)
        for run, error in failed:
            run.is_over = True
            if not isinstance(error, FileNotFoundError) and not self._is_failing:  # that one's sample has ended
                _log.error("journal_not_written", error=repr(error), consequence="lost workers' work begins anew")
        self._is_failing = bool(failed)

    async def forget_sample(self, assignment_id: str) -> None:
        """Remove the journals of a sample's runs, of whatever process."""
        self._doomed += await self._in_thread(_files_of, self._folder, _mark(assignment_id))
        await self.flush()

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        """Remove the journals that dead workers left, but for samples that `unfinished` returns."""
        found = await self._in_thread(_names, self._folder)
        names = list(found)
        # Until the coordinator, which may have died with their workers, says which of them have their records.
        self._left_behind = {path.name.partition(".")[0] for paths in found.values() for path in paths}
        left_behind: set[str] = set()
        for start in range(0, len(names), MAX_NAMES_A_CALL):
            some = tuple(names[start : start + MAX_NAMES_A_CALL])
            owed = set(await unfinished(some))
            left_behind.update(path.name.partition(".")[0] for name in owed for path in found[name])
            self._doomed += [path for name in set(some) - owed for path in found[name]]
        self._left_behind = left_behind
        await self.flush()

    async def close(self) -> None:
        """Write what waits, and end the thread. Idempotent."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            self._flushing = None
            await self.flush()
        self._thread.shutdown(wait=False)

    def _flush_later(self) -> None:
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush_soon(), name="turn-journal")

    async def _flush_soon(self) -> None:
        while self._pending or self._doomed:
            await asyncio.sleep(self._flush_s)
            await self.flush(spares_young=True)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: a cancelled caller must not take back what the thread has yet to do and no list has any more.
        return await asyncio.shield(loop.run_in_executor(self._thread, lambda: work(*args, **kwargs)))


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


def _write_all(
    folder: Path, batch: Sequence[tuple[RunJournal, Sequence[FinishedTurn | ToolAnswers]]], doomed: Sequence[Path]
) -> list[tuple[RunJournal, OSError]]:
    """Write each run's entries, and remove files. Returns the runs that failed."""
    failed: list[tuple[RunJournal, OSError]] = []
    for path in doomed:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("journal_not_removed", error=repr(error))
    for run, entries in batch:
        try:
            try:
                run.write(entries)
            except FileNotFoundError:
                if folder.is_dir():
                    raise
                folder.mkdir(parents=True, exist_ok=True)
                run.write(entries)
        except OSError as error:
            failed.append((run, error))
    return failed


def _mark(name: str) -> str:
    """Return the beginning of the names of a sample's files."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _files_of(folder: Path, mark: str) -> list[Path]:
    files = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [folder / file for file in files if file.startswith(mark)]


def _found(
    folder: Path, mark: str, name: str, fingerprint_now: Callable[[], bytes]
) -> tuple[tuple[Path, ...], KeptTurns | None]:
    """Return the files that lost workers left of a sample, and the best of what is in them. Raises OSError."""
    paths = _files_of(folder, mark)
    wanted, best = fingerprint_now(), None
    for path in paths:
        try:
            kept = _kept(path, name, wanted)
        except OSError as error:
            _log.error("journal_unreadable", assignment=name, error=repr(error))
            continue
        if kept is not None and (best is None or kept.num_sampled >= best.num_sampled):
            best = kept
    return tuple(paths), best


def _kept(path: Path, name: str, wanted: bytes) -> KeptTurns | None:
    """Read one file; None if it is not of this sample, or holds no turn. Raises OSError."""
    data = path.read_bytes()
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


def _names(folder: Path) -> dict[str, list[Path]]:
    """Return the files by the ids of their assignments. An unreadable one goes when it is old."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # its record became durable meanwhile
            header = _header(path)
            if header is not None:
                found.setdefault(header.assignment_id, []).append(path)
            elif time.time() - path.stat().st_mtime > STRAY_AFTER_S:
                path.unlink()
    return found


def _header(path: Path) -> RunHeader | None:
    with path.open("rb") as file:
        _, header = next(read_entries(file.read(MAX_HEADER_BYTES)), (0, None))
    return header if isinstance(header, RunHeader) else None
