"""A process that runs one trajectory at a time for a worker: `python -m agentloop_isolation.child FD PID`.

It has no keys and no addresses: it reaches engines and the coordinator only through its connection to the worker.
It dies with its worker.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson
from structlog.contextvars import bind_contextvars

from agentloop.api.coordinator import JournalPart, WorkerPort
from agentloop.concurrency.aio import tune_interpreter
from agentloop.engine.interface import Delta, OnProgress, TokenEngine
from agentloop.errors import AgentLoopError, UnsupportedParameter, from_wire
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.leases import LeaseReporter
from agentloop.generation.turn_reader import TurnReader
from agentloop.images import Image, ImageTokens
from agentloop.observability.logs import configure_logging
from agentloop.rollout.journal_homes import JournalFolder, StoredJournals
from agentloop.rollout.models import ModelCall
from agentloop.rollout.tool import load_tools
from agentloop.rollout.toolbox import Toolbox
from agentloop.rollout.trajectory_run import RunParts, TrajectoryRun
from agentloop.rollout.turn_journal import TurnJournal
from agentloop.types import GenerateRequest, Generation, Lease
from agentloop.values.capabilities import NO_NEEDS, Needs
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
from agentloop_servers.chat_format.load import load_chat_format
from agentloop_servers.config.service import ServiceConfig, model_sizes

T = TypeVar("T")

_OWN_TASKS = ("frames", "run", "turn-journal")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_OOM_SCORE = "900"  # maximum 1000: the kernel kills this process first if memory runs out (proc(5), oom_score_adj)


class WorkerLink:
    """The connection to the worker, which implements the trajectory's engine, coordinator and models."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[bytes], OnProgress | None]] = {}

    def send(self, value: Frame) -> None:
        self._writer.write(packed(value))

    def hear(self, frame: Answered | Refused | Heard) -> None:
        """Deliver an answer, an error or progress to the waiting call."""
        answer, on_progress = self._waiting.get(frame.call_id, (None, None))
        if answer is None or answer.done():
            return
        match frame:
            case Answered(body=body):
                answer.set_result(body)
            case Refused(error=error, http_status=status):
                answer.set_exception(from_wire(orjson.loads(error), status))
            case Heard(progress=progress) if on_progress is not None:
                try:
                    on_progress(progress)
                except AgentLoopError as error:  # an error of the callback ends the request and is raised by it
                    answer.set_exception(error)

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        """See `TokenEngine.generate`. Also raises EnginePaused, for a retry, while no replica has capacity."""
        return await self._ask(WorkerCall.GENERATE, request, Generation, on_progress)

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        """Raise UnsupportedParameter: streaming is only needed for stop strings, which loops do not use."""
        raise UnsupportedParameter(
            "streaming is not supported in isolated loops: do not use stop strings", param="stop"
        )
        yield  # makes this an async generator

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        return await self._ask(WorkerCall.IMAGE_TOKENS, tuple(images), tuple[ImageTokens, ...])

    async def abort(self, request_id: str) -> None:
        await self._ask(WorkerCall.ABORT, request_id, type(None))

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Return a new lease. `needs` is not sent, because the worker derives it from each request."""
        return await self._ask(WorkerCall.MOVE, is_failed, Lease)

    async def keep_turns(
        self, parts: tuple[JournalPart, ...], forgotten: tuple[tuple[str, str], ...]
    ) -> tuple[str, ...]:
        return await self._ask(WorkerCall.KEEP_TURNS, (parts, forgotten), tuple[str, ...])

    async def chat(self, call: ModelCall) -> str:
        return await self._ask(WorkerCall.CHAT, call, str)

    async def kept_turns(self, assignment_id: str) -> tuple[tuple[str, bytes], ...]:
        return await self._ask(WorkerCall.KEPT_TURNS, assignment_id, tuple[tuple[str, bytes], ...])

    async def _ask(
        self, call: WorkerCall, argument: Any, kind: type[T], on_progress: OnProgress | None = None
    ) -> T:
        call_id = next(self._ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer, on_progress
        self.send(Ask(call_id, call, encode(argument)))
        try:
            return decode(await answer, kind)
        finally:
            del self._waiting[call_id]
            if answer.cancelled() or (answer.done() and answer.exception() is not None):
                self.send(Drop(call_id))


def run_parts(setup: Setup, config: ServiceConfig, link: WorkerLink) -> RunParts:
    """Create the same RunParts as a worker, with `link` in place of the engine and the coordinator."""
    chat, sizes = load_chat_format(config.model_path(), config.chat), model_sizes(config)
    engine, coordinator, folder = cast(TokenEngine, link), cast(WorkerPort, link), setup.turns_folder
    home = JournalFolder(Path(folder)) if folder else StoredJournals(coordinator)
    return RunParts(
        coordinator=coordinator,
        connect=lambda url: engine,
        renderer=chat.renderer,
        reader=TurnReader(chat.renderer, chat.parser, chat.name),
        toolbox=Toolbox(load_tools(sorted(config.tools), config.tools)),
        config=setup.worker,
        max_context_tokens=sizes.max_context_tokens,
        vocab_size=sizes.vocab_size,
        placer=ImagePlacer(takes_images=setup.takes_images),
        reporter=LeaseReporter("", None),
        journal=None if folder is None else TurnJournal(home),
        models=link,
    )


async def serve(connection: socket.socket) -> None:
    """Run trajectories, one at a time, until the worker closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    link = WorkerLink(writer)
    setup = await next_frame(reader)
    if not isinstance(setup, Setup):
        return
    config = ServiceConfig.model_validate_json(setup.config)
    configure_logging(Path(setup.log_path) if setup.log_path else None)
    parts = run_parts(setup, config, link)
    tune_interpreter()
    link.send(Loaded())
    run: TrajectoryRun | None = None
    running: asyncio.Task[None] | None = None
    cast("asyncio.Task[None]", asyncio.current_task()).set_name("frames")
    while (frame := await next_frame(reader)) is not None:
        match frame:
            case Begin():
                parts.newest[frame.assignment.adapter].value = frame.newest_version
                run = TrajectoryRun(parts, frame.assignment)
                bind_contextvars(assignment=frame.assignment.assignment_id)
                running = asyncio.create_task(_hand_in(run, parts, link), name="run")
            case Cancel() if run is not None and running is not None and not running.done():
                run.cancel()
            case Answered() | Refused() | Heard():
                link.hear(frame)


async def _hand_in(run: TrajectoryRun, parts: RunParts, link: WorkerLink) -> None:
    record = await run.to_record()
    if parts.journal is not None:
        await parts.journal.flush()  # otherwise it may be written after the worker has deleted it
    await asyncio.sleep(0)  # let tasks that were just cancelled end
    num_left = parts.user_tasks.num_abandoned + parts.toolbox.num_abandoned
    left = [task for task in asyncio.all_tasks() if task.get_name() not in _OWN_TASKS]
    is_clean = num_left + len(left) == 0
    counted: Counter[str] = Counter()
    for sample in parts.tally.take().samples:
        counted[sample.name] += int(sample.value)
    problems = counted["malformed_calls_total"], counted["logprob_problems_total"]
    link.send(HandIn(record.value, run.is_dropped, is_clean, *problems))


def main() -> None:
    """Serve the connection whose descriptor the worker passed."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the worker died before prctl
        sys.exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    status = 1
    try:
        asyncio.run(serve(socket.socket(fileno=descriptor)))
        status = 0
    except SystemExit as error:  # raised by user code in its own task
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(status)  # without waiting for threads of user code


if __name__ == "__main__":
    main()
