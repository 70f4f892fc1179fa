"""The turn journal: the finished turns of running trajectories, in files that a worker which dies leaves behind.

Ownership: each run of a trajectory (one attempt on one worker) writes one file of its own, in its sample's folder;
nobody else ever writes to it, so a worker that was given up for lost cannot spoil what its successor writes. The
folder goes when the sample's record is durable. What is older than `FLUSH_S` survives the end of the process, in
whatever way; not a power cut, since nothing is synced.

A file is a list of frames: length, CRC-32, a kind, and the codec's bytes of one value; first the run's header, then
its turns and the answers of tools. What follows a damaged or torn frame is dropped, counted and logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

import structlog

from agentloop.codec import decode, encode
from agentloop.errors import InvalidRequest
from agentloop.rendering import Renderer
from agentloop.score import Score
from agentloop.trajectory import Node
from agentloop.types import JSON, Assignment, RolloutTask, ToolResult

P = ParamSpec("P")
T = TypeVar("T")

TURNS_FOLDER = "turns"
FLUSH_S = 0.05  # between two writes: a trajectory that ends within that is never written
MAX_NAMES_A_CALL = 1000
MAX_HEADER_BYTES = 4096
STRAY_AFTER_S = 3600.0  # a folder without a readable file goes at this age

_FRAME = struct.Struct("<II")
_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A trajectory's counts at one moment, beside its turns."""

    left_s: float | None  # of its deadline; None without one
    spent_s: float  # on workers
    num_tool_calls: int
    num_tool_errors: int
    num_resampled_turns: int
    generate_s: float
    tool_s: float
    score: Score
    newest_version: int | None  # that the worker had heard of


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A sampled turn with what was observed before it, and the counts as of then."""

    node: Node
    progress: RunProgress


@dataclass(frozen=True, slots=True)
class ToolAnswers:
    """Answers to calls of a turn, and the states of environments after them: None for one that was replaced."""

    turn_id: str
    results: tuple[ToolResult, ...]
    states: Mapping[str, bytes | None]  # by tool
    left_s: float | None


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The run that a file is of. Only runs of one fingerprint can go on from each other."""

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
    """The journal of one run. `kept` is what it goes on from; None: it begins at the start."""

    def __init__(self, journal: TurnJournal, folder: Path, header: Callable[[], RunHeader]) -> None:
        self.kept: KeptTurns | None = None
        self.is_over = False
        self.is_on_disk = os.path.isdir(folder)  # it, or an earlier run of its sample
        self.folder = folder
        self._journal = journal
        self._header = header
        self._path = folder / f"{time.time_ns():020d}-{os.urandom(4).hex()}"
        self._is_made = False

    def append(self, entry: FinishedTurn | ToolAnswers) -> None:
        """Keep an entry, soon. Of microseconds: it is encoded and written by a thread."""
        if not self.is_over:
            self._journal.add(self, entry)

    def drop(self) -> None:
        """End the journal before its run: a lost worker's trajectory begins at the start again. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self._journal.drop(self)

    async def forget(self) -> None:
        """Remove all that was journalled of the sample: nobody may go on from it any more."""
        self.is_over = True
        await self._journal.forget(self)

    # --- the thread's side ---

    def write(self, entries: Sequence[FinishedTurn | ToolAnswers]) -> None:
        """Append entries to the file, which is made for the first ones. Raises OSError."""
        frames = [_frame(entry) for entry in entries]
        if not self._is_made:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            frames[:0] = [_frame(self._header()), b"" if self.kept is None else self.kept.frames]
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        made = 0 if self._is_made else os.O_CREAT | os.O_EXCL  # one that is gone later was removed with its sample
        fd = os.open(self._path, flags | made, 0o600)
        self._is_made = True
        try:
            data = b"".join(frames)
            if os.write(fd, data) != len(data):
                raise OSError("the disk is full")
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class TurnJournal:
    """The journals of one worker process. Close it in the end."""

    def __init__(self, folder: Path, flush_s: float = FLUSH_S, executor: Executor | None = None) -> None:
        """`executor` runs one call at a time; a thread of its own by default."""
        self._folder = folder
        self._flush_s = flush_s
        self._pending: dict[RunJournal, list[FinishedTurn | ToolAnswers]] = {}
        self._thread = executor or ThreadPoolExecutor(1, thread_name_prefix="turn-journal")
        self._flushing: asyncio.Task[None] | None = None
        self._is_failing = False

    async def begin(self, assignment: Assignment, fingerprint: Callable[[], bytes]) -> RunJournal:
        """Begin the journal of a run; nothing is on disk before its first entry.

        Finds what lost workers left of the trajectory: of several runs the one with the most sampled tokens, the
        latest of equals. A file that cannot be read, or is of another task or model, counts for nothing.
        """
        name, folder = assignment.assignment_id, self._folder_of(assignment.assignment_id)

        def header() -> RunHeader:
            return RunHeader(name, assignment.attempt, fingerprint())

        run = RunJournal(self, folder, header)
        if run.is_on_disk:
            try:
                run.kept = await self._in_thread(_found, folder, name, fingerprint)
            except OSError as error:
                _log.error("journal_unreadable", assignment=name, error=repr(error))
        if (kept := run.kept) is not None:
            num_turns, num_tokens = len(kept.turns), kept.num_sampled
            _log.info("trajectory_resumes", num_turns=num_turns, num_tokens=num_tokens, of_attempt=kept.attempt)
        elif run.is_on_disk or assignment.attempt:
            _log.info("trajectory_begins_again", attempt=assignment.attempt, reason="no usable journal here")
        return run

    def add(self, run: RunJournal, entry: FinishedTurn | ToolAnswers) -> None:
        """Write an entry with the next batch."""
        self._pending.setdefault(run, []).append(entry)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush_soon(), name="turn-journal")

    def drop(self, run: RunJournal) -> None:
        """Take back what a run has written."""
        self._pending.pop(run, None)
        if run.is_on_disk:
            self._thread.submit(_quietly, run.remove)

    async def flush(self) -> None:
        """Write what waits. Failures are logged, and end the journals that they are of."""
        batch, self._pending = self._pending, {}
        if batch:
            for run in batch:
                run.is_on_disk = True
            failed = await self._in_thread(_write_all, list(batch.items()))
            for run, error in failed:
                run.is_over = True
                if not isinstance(error, FileNotFoundError) and not self._is_failing:  # that one's sample has ended
                    _log.error(
                        "journal_not_written", error=repr(error), consequence="lost workers' work begins anew"
                    )
            self._is_failing = bool(failed)

    async def forget(self, run: RunJournal) -> None:
        """Remove what a run and the earlier ones of its sample have written."""
        self._pending.pop(run, None)
        if run.is_on_disk:
            await self._in_thread(shutil.rmtree, run.folder, True)

    async def forget_sample(self, assignment_id: str) -> None:
        """Remove what runs of a sample have written, in whatever process."""
        await self._in_thread(shutil.rmtree, self._folder_of(assignment_id), True)

    async def sweep(self, unfinished: Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]) -> None:
        """Remove what dead workers left of samples that have their records. `unfinished` says which have none."""
        found = await self._in_thread(_names, self._folder)
        names = list(found)
        for start in range(0, len(names), MAX_NAMES_A_CALL):
            some = tuple(names[start : start + MAX_NAMES_A_CALL])
            for name in set(some) - set(await unfinished(some)):
                await self._in_thread(shutil.rmtree, found[name], True)

    async def close(self) -> None:
        """Write what waits, and end the thread. Idempotent."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            self._flushing = None
            await self.flush()
        self._thread.shutdown(wait=False)

    async def _flush_soon(self) -> None:
        while self._pending:
            await asyncio.sleep(self._flush_s)
            await self.flush()

    def _folder_of(self, assignment_id: str) -> Path:
        return self._folder / hashlib.blake2b(assignment_id.encode(), digest_size=16).hexdigest()

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))


def fingerprint(task: RolloutTask, tools: Sequence[Mapping[str, JSON]], renderer: Renderer) -> bytes:
    """Return a digest of what a trajectory's tokens depend on beside the weights."""
    facts = renderer.facts
    parts = encode(
        (task, list(tools), renderer.vocab_size, facts.template_source, facts.stop_tokens, facts.thinking)
    )
    return hashlib.sha256(parts).digest()


# --- the thread's side ---


def _frame(entry: Entry) -> bytes:
    body = _KIND_OF[type(entry)] + encode(entry)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def _entries(data: bytes) -> Iterator[tuple[int, Entry]]:
    """Yield the entries of a file, each with the offset behind it, up to the first that is damaged or torn."""
    end = 0
    while len(data) >= (start := end + _FRAME.size):
        size, crc = _FRAME.unpack_from(data, end)
        body = data[start : start + size]
        if size < 1 or len(body) != size or zlib.crc32(body) != crc:
            return
        kind = _KINDS.get(body[:1])
        if kind is None:
            return
        try:
            entry = decode(body[1:], kind)
        except InvalidRequest:  # of another release
            return
        end = start + size
        yield end, entry


def _write_all(
    batch: Sequence[tuple[RunJournal, Sequence[FinishedTurn | ToolAnswers]]],
) -> list[tuple[RunJournal, OSError]]:
    """Write each run's entries. Returns those that failed."""
    failed = []
    for run, entries in batch:
        try:
            run.write(entries)
        except OSError as error:
            failed.append((run, error))
    return failed


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        _log.warning("journal_not_removed", error=repr(error))


def _found(folder: Path, name: str, fingerprint_now: Callable[[], bytes]) -> KeptTurns | None:
    """Return the best that lost workers left of a sample. Raises OSError."""
    wanted = fingerprint_now()
    kept = [found for path in sorted(folder.iterdir()) if (found := _kept(path, name, wanted)) is not None]
    return max(reversed(kept), key=lambda found: found.num_sampled, default=None)


def _kept(path: Path, name: str, wanted: bytes) -> KeptTurns | None:
    """Read one file; None if it is not of this sample, or holds no turn. Raises OSError."""
    data = path.read_bytes()
    header: RunHeader | None = None
    turns: list[FinishedTurn] = []
    answers: list[ToolAnswers] = []
    states: dict[str, bytes | None] = {}
    left_s: float | None = None
    begins_at = ends_at = 0
    for ends_at, entry in _entries(data):
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


def _names(folder: Path) -> dict[str, Path]:
    """Return the folders of samples by the ids of the assignments. One that nobody can read goes when it is old."""
    found: dict[str, Path] = {}
    for sample in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # its record became durable meanwhile
            headers = (_header(path) for path in sample.iterdir())
            name = next((header.assignment_id for header in headers if header is not None), None)
            if name is not None:
                found[name] = sample
            elif time.time() - sample.stat().st_mtime > STRAY_AFTER_S:
                shutil.rmtree(sample, ignore_errors=True)
    return found


def _header(path: Path) -> RunHeader | None:
    with path.open("rb") as file:
        _, header = next(_entries(file.read(MAX_HEADER_BYTES)), (0, None))
    return header if isinstance(header, RunHeader) else None
