"""The worker's side of isolated trajectories: process pool, calls made by the processes, and records.

Invariants: a process runs one trajectory at a time, and is not reused after a failure. However a process ends, its
trajectory gets a record with the signal or exit status, and other trajectories are unaffected. A discarded process
is killed with its process group. A process samples turns only for its own trajectory, under the lease that the
worker holds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import structlog

from agentloop.api.coordinator import JournalPart, WorkerPort
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.flight import Doing, Flight
from agentloop.engine.interface import Progress, TokenEngine
from agentloop.errors import (
    AgentLoopError,
    Conflict,
    EnginePaused,
    Forbidden,
    InvalidRequest,
    NoHealthyReplica,
    error_line,
)
from agentloop.generation.leased_engine import Connect, NewestVersion, NewestVersions
from agentloop.generation.leases import LeaseHolder, LeaseReporter
from agentloop.images import Image
from agentloop.observability.metrics import MetricsTally, count_record
from agentloop.rollout.environment import MAX_LIFE_S
from agentloop.rollout.models import ModelCall, ModelsPort, NoModels
from agentloop.rollout.trajectory_run import WorkerConfig, unmade_record
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.types import FAILURES, Assignment, GenerateRequest, Generation, Lease, StopReason, Trajectory
from agentloop.values.capabilities import Capabilities, needs_of
from agentloop.values.codec import decode, encode
from agentloop_isolation.frames import (
    Answered,
    Ask,
    Begin,
    Cancel,
    Drop,
    Frame,
    HandIn,
    Heard,
    Loaded,
    Refused,
    Setup,
    WorkerCall,
    next_frame,
    packed,
)
from agentloop_servers.config.service import ServiceConfig

CHILD_MODULE = "agentloop_isolation.child"
MAX_CALLS_AT_ONCE = 64  # concurrent calls of one trajectory; a loop never makes more

_log = structlog.stdlib.get_logger("isolation")


@dataclass(frozen=True, slots=True)
class IsolationConfig:
    """Limits of processes."""

    start_timeout_s: float = 120.0
    max_starts: int = 4  # concurrent starts: each uses a core for more than a second
    max_idle: int = 32  # idle processes kept for later trajectories
    check_interval_s: float = 1.0  # interval between two checks of a process' deadlines
    cancel_grace_s: float = 15.0  # time from a cancellation until the process is killed
    # Time for loading and closing; a silent process is killed after this and its deadlines.
    allowance_s: float = 240.0


class ProcessEnded(AgentLoopError):
    """Raised if a process ended, or was killed, before its trajectory ended."""

    code = "process_ended"


class _Child:
    """One process and its connection."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.reader = reader
        self._writer = writer

    def send(self, value: Frame) -> None:
        """Send a frame. The unread data of a process is bounded by its number of calls."""
        if not self._writer.is_closing():
            self._writer.write(packed(value))

    async def end(self) -> str:
        """Kill the process and its group, and return a description of its exit status or signal."""
        try:
            if self.reader.at_eof():  # the process is exiting: wait for its own status
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self.process.wait()
        finally:
            # The group includes processes that user code has started.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._writer.close()
        return _ending(await self.process.wait())


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return f"signal {-status} ({signal.Signals(-status).name})"
    return f"signal {-status}"


def _blank(lease: Lease) -> Lease:
    """Return a lease without its address, for a trajectory's process."""
    return replace(lease, url="", can=Capabilities())


class IsolatedRuns:
    """The processes of one worker. Pass `begin` to the worker, and call `close` after closing the worker."""

    @classmethod
    def of_worker(
        cls,
        config: ServiceConfig,
        run_dir: Path,
        limits: WorkerConfig,
        coordinator: WorkerPort,
        connect: Connect,
        reporter: LeaseReporter,
        *,
        takes_images: bool,
        stores_turns: bool,
        **more: Any,
    ) -> IsolatedRuns:
        """Return the processes of a service's worker. `more` are additional arguments of the constructor."""
        setup = Setup.of(config, run_dir, limits, takes_images=takes_images, stores_turns=stores_turns)
        return cls(setup, coordinator, connect, reporter, **more)

    def __init__(
        self,
        setup: Setup,
        coordinator: WorkerPort,
        connect: Connect,
        reporter: LeaseReporter,
        config: IsolationConfig = IsolationConfig(),
        *,
        journal: TurnJournal | None = None,
        own_s: Callable[[Sequence[str]], float] = lambda tools: 0.0,
        tally: MetricsTally | None = None,
        parser_name: str = "",
        models: ModelsPort = NoModels(),  # noqa: B008 - it has no state
    ) -> None:
        """`journal` uses the folder in `setup`, and `reporter` is the worker's.

        `own_s` returns the seconds that tools may take in addition to a trajectory's own time.
        """
        self.config = config
        self.own_s = own_s
        self.tally = MetricsTally() if tally is None else tally
        self.parser_name = parser_name
        self.models = models
        self.coordinator = coordinator
        self.connect = connect
        self.reporter = reporter
        self.journal = journal
        self.newest: NewestVersions = defaultdict(NewestVersion)
        self.num_started = 0
        self._setup = setup
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._starting = asyncio.Semaphore(config.max_starts)

    @property
    def num_processes(self) -> int:
        """The number of running processes."""
        return len(self._idle) + len(self._busy)

    def begin(self, assignment: Assignment) -> ProcessRun:
        """Return the run of an assignment. It starts when `to_record` is called."""
        return ProcessRun(self, assignment)

    async def take(self) -> _Child:
        """Return a loaded process. Raises ProcessEnded if no process can be started."""
        while self._idle:
            child = self._idle.pop()
            self._busy.add(child)
            if child.process.returncode is None and not child.reader.at_eof():
                return child
            await self.discard(child)  # it died while it was idle
        async with self._starting:
            return await self._start()

    def give_back(self, child: _Child) -> bool:
        """Keep a process for a later trajectory. Returns False if enough are idle, and it must be discarded."""
        if len(self._idle) >= self.config.max_idle:
            return False
        self._busy.discard(child)
        self._idle.append(child)
        return True

    async def discard(self, child: _Child) -> str:
        """Kill a process. Returns a description of its exit status or signal."""
        try:
            return await child.end()
        finally:
            self._busy.discard(child)

    async def close(self) -> None:
        """End all processes. Idempotent."""
        children, self._idle = [*self._idle, *self._busy], []
        await asyncio.gather(*(self.discard(child) for child in children))

    async def _start(self) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", CHILD_MODULE, str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        child = _Child(process, reader, writer)
        self._busy.add(child)
        self.num_started += 1
        child.send(self._setup)
        ready = None
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                ready = await next_frame(reader)
        except (TimeoutError, AgentLoopError) as error:
            _log.warning("process_not_started", error=error_line(error))
        finally:
            if not isinstance(ready, Loaded):
                ending = await self.discard(child)
        if not isinstance(ready, Loaded):
            raise ProcessEnded(f"the trajectory's process did not start: {ending}")
        return child


class ProcessRun:
    """The `AssignedRun` of a trajectory in a separate process."""

    def __init__(self, runs: IsolatedRuns, assignment: Assignment) -> None:
        self.is_dropped = False
        self.num_sampled_tokens = 0
        self._runs = runs
        self._assignment = assignment
        self._lease = LeaseHolder(runs.reporter, runs.coordinator, assignment.assignment_id, assignment.lease)
        self._started = time.perf_counter()
        self._child: _Child | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._active_at = 0.0  # event loop time of the last frame, or of the end of the last call
        self._cancelled_at: float | None = None

    @property
    def flight(self) -> Flight:
        loop_s, age_s = asyncio.get_running_loop().time(), time.perf_counter() - self._started
        doing = Doing.LOAD if self._child is None else Doing.DECODE if self._calls else Doing.LOOP
        for_s = age_s if self._child is None else max(loop_s - self._active_at, 0.0)
        return Flight(doing, for_s, age_s, num_tokens=self.num_sampled_tokens)

    def cancel(self) -> None:
        if self._cancelled_at is None:
            self._cancelled_at = asyncio.get_running_loop().time()
            if self._child is not None:
                self._child.send(Cancel())

    async def to_record(self) -> EncodedRecord:
        try:
            child = await self._runs.take()
        except AgentLoopError as error:
            self._lease.close()
            return self._unmade(StopReason.LOOP_FAILED, str(error))
        is_reusable, reason = False, ""
        try:
            self._child = child
            done = await self._serve(child)
            trajectory = self._own(decode(done.record, Trajectory))
            record = EncodedRecord.of(trajectory)
            # After a failure, user code may have left the process in any state.
            is_reusable = done.is_clean and record.stop_reason not in FAILURES and self._runs.give_back(child)
            self.is_dropped = done.is_dropped
            tally, name = self._runs.tally, self._runs.parser_name
            tally.count("malformed_calls_total", name, by=max(done.num_malformed_calls, 0))
            tally.count("logprob_problems_total", by=max(done.num_logprob_problems, 0))
            if not self.is_dropped:
                count_record(tally, trajectory, "rollout")
            return record
        except AgentLoopError as error:
            reason = error.message
        finally:
            for call in self._calls.values():
                call.cancel()
            self._child = None
            self._lease.close()
            ending = "" if is_reusable else await self._runs.discard(child)
        if self._cancelled_at is not None:
            return self._unmade(StopReason.CANCELLED, reason)
        _log.warning("process_ended", assignment=self._assignment.assignment_id, ending=ending, reason=reason)
        return self._unmade(StopReason.LOOP_FAILED, f"{reason or 'its process ended'}: {ending}")

    async def forget(self) -> None:
        if self._runs.journal is not None:
            await self._runs.journal.forget_sample(self._assignment.assignment_id)

    async def _serve(self, child: _Child) -> HandIn:
        """Serve the process until it submits its record. Raises AgentLoopError if it ends before that."""
        blank = replace(self._assignment, lease=_blank(self._assignment.lease))
        child.send(Begin(blank, self._runs.newest[self._assignment.adapter].value))
        if self._cancelled_at is not None:
            child.send(Cancel())
        while True:
            frame = await self._next(child)
            match frame:
                case HandIn():
                    return frame
                case Ask(call_id=call_id) if len(self._calls) < MAX_CALLS_AT_ONCE and call_id not in self._calls:
                    self._calls[call_id] = asyncio.create_task(
                        self._answer(child, frame), name=f"call {frame.call}"
                    )
                case Drop(call_id=call_id) if call_id in self._calls:
                    self._calls[call_id].cancel()
                case Drop():
                    pass  # the call was answered before
                case None:
                    raise ProcessEnded("its process ended")
                case _:
                    raise InvalidRequest(f"unexpected {type(frame).__name__} frame from the trajectory's process")

    async def _next(self, child: _Child) -> Frame | None:
        """Return the next frame. Raises ProcessEnded if the process exceeded a deadline and must be killed."""
        loop, config = asyncio.get_running_loop(), self._runs.config
        task, limits = self._assignment.task, self._assignment.task.limits
        own_s = self._runs.own_s(task.tools) + (0.0 if task.environment is None else MAX_LIFE_S)
        silence_s = limits.timeout_s + limits.reward_timeout_s + own_s + config.allowance_s
        self._active_at = loop.time()
        reading = asyncio.create_task(next_frame(child.reader), name="frame")
        try:
            while not reading.done():
                await asyncio.wait(
                    {reading}, timeout=config.check_interval_s if self._cancelled_at is None else 0.25
                )
                if reading.done():
                    break
                if self._cancelled_at is not None and loop.time() > self._cancelled_at + config.cancel_grace_s:
                    raise ProcessEnded(f"it did not end within {config.cancel_grace_s:g} s after its cancellation")
                # A process that waits for one of its calls is not silent.
                if not self._calls and loop.time() > self._active_at + silence_s:
                    raise ProcessEnded(f"it made no call for {silence_s:g} s")
            return reading.result()
        finally:
            reading.cancel()

    async def _answer(self, child: _Child, ask: Ask) -> None:
        """Perform a call, and send its result or error."""
        try:
            child.send(Answered(ask.call_id, await self._perform(child, ask)))
        except Exception as error:
            ours = error if isinstance(error, AgentLoopError) else AgentLoopError(error_line(error))
            child.send(Refused(ask.call_id, orjson.dumps(ours.to_wire()), ours.http_status))
        finally:
            self._active_at = asyncio.get_running_loop().time()
            self._calls.pop(ask.call_id, None)

    async def _perform(self, child: _Child, ask: Ask) -> bytes:
        match ask.call:
            case WorkerCall.GENERATE:
                return await self._generate(ask, lambda progress: child.send(Heard(ask.call_id, progress)))
            case WorkerCall.IMAGE_TOKENS:
                return encode(await self._engine.image_tokens(decode(ask.body, tuple[Image, ...])))
            case WorkerCall.ABORT:
                request_id = decode(ask.body, str)
                self._check(request_id)
                await self._engine.abort(request_id)
                return encode(None)
            case WorkerCall.MOVE:
                if decode(ask.body, bool):
                    await self._lease.failed(self._held)
                return encode(_blank(await self._lease.ask()))
            case WorkerCall.KEEP_TURNS:
                parts, forgotten = decode(ask.body, tuple[tuple[JournalPart, ...], tuple[tuple[str, str], ...]])
                for assignment_id in (*(part.assignment_id for part in parts), *(name for name, _ in forgotten)):
                    self._check_own(assignment_id)
                return encode(await self._runs.coordinator.keep_turns(parts, forgotten))
            case WorkerCall.CHAT:
                call = decode(ask.body, ModelCall)
                return encode(await self._runs.models.chat(replace(call, affinity=self._assignment.assignment_id)))
            case WorkerCall.KEPT_TURNS:
                self._check_own(assignment_id := decode(ask.body, str))
                return encode(await self._runs.coordinator.kept_turns(assignment_id))

    @property
    def _engine(self) -> TokenEngine:
        return self._runs.connect(self._held.url)

    @property
    def _held(self) -> Lease:
        """The current or failed lease."""
        if self._lease.lease is None:
            raise Conflict(f"trajectory {self._assignment.assignment_id} has ended")
        return self._lease.lease

    async def _generate(self, ask: Ask, on_progress: Callable[[Progress], None]) -> bytes:
        adapter = self._assignment.adapter
        request = replace(decode(ask.body, GenerateRequest), adapter=adapter)  # do not trust the process' value
        self._check(request.request_id)
        holder, lease = self._lease, None
        generation: Generation | None = None
        holder.enter()
        try:
            lease = await self._place(request)
            holder.begin()
            generation = await self._engine.generate(request, on_progress)
        finally:
            holder.leave(lease, request, generation)
        self._runs.newest[adapter].see(generation, is_adapters=bool(adapter))
        self.num_sampled_tokens += len(generation.token_ids)
        return encode(generation)

    async def _place(self, request: GenerateRequest) -> Lease:
        """Return the lease for a request. Raises EnginePaused if no replica has capacity."""
        # On EnginePaused the process retries, and the time does not count towards the turn's deadline.
        try:
            has_images, num_tokens = bool(request.images), len(request.token_ids)
            needs = needs_of(request.sampling, num_tokens, has_images=has_images, adapter=request.adapter)
            return await self._lease.ask((), needs)
        except NoHealthyReplica as error:
            raise EnginePaused(f"the turn waits for capacity: {error.message}") from error

    def _check(self, request_id: str) -> None:
        """Raise Forbidden for a request of another trajectory."""
        if not request_id.startswith(f"{self._assignment.assignment_id}@"):
            raise Forbidden(f"{request_id!r} is not a request of trajectory {self._assignment.assignment_id}")

    def _check_own(self, assignment_id: str) -> None:
        if assignment_id != self._assignment.assignment_id:
            raise Forbidden(f"trajectory {assignment_id!r} is not this process' {self._assignment.assignment_id}")

    def _own(self, record: Trajectory) -> Trajectory:
        """Return the record with this trajectory's identity, which the process is not trusted to set."""
        assignment = self._assignment
        return replace(
            record,
            task_id=assignment.task.task_id,
            group_id=assignment.group_id,
            sample_index=assignment.sample_index,
            rollout_id=assignment.rollout_id,
            # The journal may have more attempts than a new coordinator.
            attempt=max(record.attempt, assignment.attempt),
            num_stale_attempts=assignment.num_stale_attempts,
            adapter=assignment.adapter,
            times=None if record.times is None else record.times._replace(worker=self._runs.reporter.process_id),
        )

    def _unmade(self, stop_reason: StopReason, text: str) -> EncodedRecord:
        total_s = time.perf_counter() - self._started
        record = unmade_record(self._assignment, stop_reason, text, total_s, self._runs.reporter.process_id)
        count_record(self._runs.tally, record, "rollout")
        return EncodedRecord.of(record)
