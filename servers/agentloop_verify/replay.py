"""Re-execution of a recorded trajectory, up to the first difference and its cause.

The task's own loop runs again in this process. An engine samples each turn with the recorded seed, under the
recorded weight version. Tool results come from the record, or from the tools. Every prompt, seed and generation is
compared with the record before the loop continues, so the first difference is found where it arises.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

import numpy as np

from agentloop.api.coordinator import WorkerPort, assignment_id_of
from agentloop.concurrency.clock import Stopwatch
from agentloop.engine.interface import Delta, Engine, OnProgress, TokenEngine, WeightUpdate
from agentloop.errors import AgentLoopError
from agentloop.generation.image_prompts import ImagePlacer
from agentloop.generation.leases import LeaseReporter
from agentloop.generation.turn_reader import TurnReader
from agentloop.rollout.budget import LimitReached
from agentloop.rollout.context import LoopContext
from agentloop.rollout.environment import LoadedEnvironment
from agentloop.rollout.tool import Tool
from agentloop.rollout.toolbox import KeepAnswers, Toolbox, ToolScope
from agentloop.rollout.trajectory_run import RunParts, TrajectoryRun, WorkerConfig
from agentloop.score import Score
from agentloop.trajectory.diff import message_difference, token_difference
from agentloop.trajectory.node import message_key
from agentloop.types import (
    Assignment,
    FloatArray,
    GenerateRequest,
    Generation,
    IntArray,
    Lease,
    Message,
    PauseMode,
    RolloutTask,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    clip_spans,
)
from agentloop.values.checks import MAX_TOP_LOGPROBS
from agentloop.values.sampling import turn_sampling
from agentloop_servers.chat_format.load import ChatFormat

MAX_DISTANCE = 1e-4
"""The largest distance of two logprobs (nats) that counts as rounding, in float32."""

MAX_HALF_DISTANCE = 0.05
"""The same in bfloat16 and float16, for engines whose results depend on the batch."""

_SHOWN_CHARS = 40
_MAX_EXPECTED_FLIPS = 0.01  # by rounding; with fewer, another sampled token means another seed


class DifferenceCause(StrEnum):
    """The cause of the first difference between a record and its replay."""

    TEMPLATE = "template"  # the chat template, the tokenizer or the parser
    TOOL = "tool"  # the result of a tool call
    SEED = "seed"  # the same distribution, and another sample of it
    WEIGHTS = "weights"  # another distribution after the same tokens
    ENGINE = "engine"  # another kind of engine, or arithmetic that does not repeat its results
    LOOP = "loop"  # the loop, the environment or the task


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference. `token` is its index among the turn's sampled tokens; None: it is before them."""

    turn: int  # from 1, in the order of sampling
    cause: DifferenceCause
    detail: str
    token: int | None = None
    distance: float | None = None  # distance of the logprobs in nats; None: unknown


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay. It is identical to the record if `difference` is None."""

    num_turns: int  # identical turns
    num_tokens: int  # sampled tokens in them
    max_distance: float  # largest distance of their logprobs, in nats
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn of a record, with its tokens."""

    number: int  # from 1, in the order of sampling
    turn: Turn
    versions: tuple[int, ...]
    prompt_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray
    messages: tuple[Message, ...]  # its path's conversation


def recorded_turns(record: Trajectory) -> dict[str, RecordedTurn]:
    """Return the turns of a record by their ids, in the order of sampling."""
    found: dict[str, RecordedTurn] = {}
    for path in record.paths:
        ids = np.concatenate([path.prompt_ids, path.response_ids])
        for turn in path.turns:
            versions = tuple(span.version for span in clip_spans(path.weight_versions, turn.start, turn.end))
            sampled = slice(turn.start, turn.end)
            tokens = ids[: turn.prompt_len], path.response_ids[sampled], path.logprobs[sampled]
            found.setdefault(turn.turn_id, RecordedTurn(0, turn, versions, *tokens, path.messages))
    ordered = sorted(found.values(), key=lambda one: 0 if one.turn.times is None else one.turn.times.begun_us)
    return {one.turn.turn_id: replace(one, number=number) for number, one in enumerate(ordered, 1)}


def obstacles(
    record: Trajectory, task: RolloutTask | None, turns: Sequence[RecordedTurn], folders: Mapping[int, Path]
) -> list[str]:
    """Return the reasons why these turns cannot be replayed; empty if they can."""
    missing = []
    if not record.loop:
        missing.append("it was captured from a session, which only its own agent can repeat")
    elif task is None:
        missing.append("its task is no longer in the store")
    if not turns:
        missing.append("it has no sampled turn")
    if record.adapter:
        missing.append(f"the versions of the adapter {record.adapter!r} are not stored")
    if any(path.images for path in record.paths):
        missing.append("it has images, which a replay does not support")
    for one in turns:
        at, turn = f"turn {one.number}", one.turn
        if not len(one.token_ids) or not len(one.prompt_ids):
            missing.append(f"{at} has no token ids")
        elif turn.sampling is None:
            missing.append(f"{at} has no sampling parameters")
        elif turn.seed is None and turn.sampling.temperature > 0:
            missing.append(f"{at} has no seed: set `seed` in the task before the rollout")
        if len(one.versions) > 1:
            before = f": use --to-turn {one.number - 1}" if one.number > 1 else ""
            shown = " and ".join(map(str, one.versions))
            missing.append(f"the weights changed during {at} (versions {shown}), which cannot be repeated{before}")
    for version in sorted({version for one in turns for version in one.versions} - {*folders}):
        missing.append(
            f"the weights of version {version} are not stored: give their checkpoint, --model-version {version}=DIR"
        )
    return missing


class _RecordedTools(Toolbox):
    """Tools whose results come from a record. With `is_live`, they run; in both cases they give no reward."""

    def __init__(self, tools: Sequence[Tool], record: Trajectory, *, is_live: bool) -> None:
        super().__init__(tools)
        messages = [message for path in record.paths for message in path.messages]
        self.results = {message.tool_call_id: message for message in messages if message.role == "tool"}
        self.paths, self.is_live = record.paths, is_live

    def open(
        self, names: Sequence[str], trajectory_id: str, seed: int, environment: LoadedEnvironment | None = None
    ) -> ToolScope:
        kind = _Scope if self.is_live else _RecordedScope
        return kind(self, self._declared(names, environment), trajectory_id, seed, environment)


class _Scope(ToolScope):
    async def score(self, task: RolloutTask, messages: Sequence[Message]) -> tuple[Score, str | None]:
        return Score(), None


class _RecordedScope(_Scope):
    """Answers each call with the recorded result. No session is opened."""

    @property
    def has_openings(self) -> bool:
        return False

    async def run(
        self,
        calls: Sequence[ToolCall],
        max_response_bytes: int,
        keep: KeepAnswers | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> list[ToolResult]:
        recorded = cast(_RecordedTools, self._toolbox).results
        if any(call.id not in recorded for call in calls):  # the recorded trajectory ended before their results
            raise LimitReached(StopReason.CANCELLED)
        texts = [recorded[call.id].content for call in calls]
        # A worker begins the text of every failed call with "Error: ".
        return [
            ToolResult(call.id, call.name, text, is_error=text.startswith("Error: "))
            for call, text in zip(calls, texts, strict=True)
        ]

    async def react(self, messages: Sequence[Message], keep: KeepAnswers | None = None) -> str | None:
        if self._environment is None:
            return None
        for path in cast(_RecordedTools, self._toolbox).paths:
            if path.messages[: len(messages)] == tuple(messages) and len(path.messages) > len(messages):
                reply = path.messages[len(messages)]
                return reply.content if reply.role == "user" else None
        return None


@dataclass(slots=True)
class Replay:
    """The replay of one trajectory's `turns`, which have no `obstacles`. It also is the loop's engine."""

    record: Trajectory
    task: RolloutTask
    turns: Mapping[str, RecordedTurn]
    engine: Engine
    chat: ChatFormat
    max_context_tokens: int
    folders: Mapping[int, Path]  # checkpoints by weight version
    served: tuple[int, Path] | None  # version and checkpoint that the engine serves; None: dummy weights
    worker: WorkerConfig  # the settings of the service's workers
    tools: Sequence[Tool] = ()
    runs_tools: bool = False
    num_turns: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    max_distance: float = field(default=0.0, init=False)
    difference: Difference | None = field(default=None, init=False)
    error: AgentLoopError | None = field(default=None, init=False)
    _run: TrajectoryRun | None = field(default=None, init=False)

    async def run(self) -> ReplayReport:
        """Re-execute the trajectory. Raises the engine's errors."""
        record, chat = self.record, self.chat
        toolbox = _RecordedTools(self.tools, record, is_live=self.runs_tools)
        parts = RunParts(
            coordinator=cast(WorkerPort, None),  # not used, because the lease never moves
            connect=lambda url: cast(TokenEngine, self),
            renderer=chat.renderer,
            reader=TurnReader(chat.renderer, chat.parser, chat.name),
            toolbox=toolbox,
            config=self.worker,
            max_context_tokens=self.max_context_tokens,
            vocab_size=chat.renderer.vocab_size,
            placer=ImagePlacer(takes_images=False),
            reporter=LeaseReporter("", None),
        )
        name = assignment_id_of(record.rollout_id, record.group_id, record.sample_index)
        lease, task = Lease("", "replay", ""), replace(self.task, reward=None)
        self._run = TrajectoryRun(
            parts, Assignment(name, record.group_id, record.sample_index, task, lease, rollout_id=record.rollout_id)
        )
        try:
            replayed = (await self._run.to_record()).decoded()
        finally:
            await toolbox.close()
        if self.error is not None:
            raise self.error
        if self.difference is None and self.num_turns < len(self.turns):
            reason = f"{replayed.stop_reason}{f': {replayed.error}' if replayed.error else ''}"
            detail = f"the loop ended ({reason}); the record has {len(self.turns)} turns"
            self.difference = Difference(self.num_turns + 1, DifferenceCause.LOOP, detail)
        return ReplayReport(self.num_turns, self.num_tokens, self.max_distance, self.difference)

    # The engine of the replayed loop

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        """Sample a turn again and compare it. Raises LimitReached, which ends the loop, after a difference."""
        assert self._run is not None
        assert self._run.ctx is not None, "the loop is running"
        [ctx] = [one for one in self._run.ctx.contexts.values() if one.trajectory_id == request.trajectory_id]
        recorded = self.turns.get(ctx.path.next_turn_id)
        if recorded is None or self.difference is not None:
            raise LimitReached(StopReason.CANCELLED)
        try:
            self.difference = self._input_difference(recorded, request, ctx)
            if self.difference is None:
                # The recorded length also repeats a turn that a stop string or its deadline cut.
                sampling = replace(request.sampling, max_tokens=len(recorded.token_ids))
                request = replace(request, sampling=sampling)
                await self._serve(recorded.versions[0])
                generation = await self.engine.generate(request)
                self.difference = await self._output_difference(recorded, request, generation)
        except AgentLoopError as error:
            self.error = error
        if self.difference is not None or self.error is not None:
            raise LimitReached(StopReason.CANCELLED)
        self.num_turns += 1
        self.num_tokens += len(recorded.token_ids)
        return generation

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        """Yield the whole turn as one piece: stop strings count at the same place."""
        whole = await self.generate(request)
        yield Delta(
            whole.token_ids, whole.logprobs, whole.weight_versions, (), whole.raw_logprobs, whole.logprobs_mode
        )
        yield whole

    async def abort(self, request_id: str) -> None:
        """Do nothing: cancelling `generate` ends the turn."""

    async def _serve(self, version: int) -> None:
        """Commit a version unless it is served. Raises the errors of `stage` and `commit`."""
        wanted = version, self.folders[version]
        if wanted != self.served:
            await self.engine.stage(WeightUpdate(version, str(wanted[1])))
            await self.engine.pause(PauseMode.KEEP, self.worker.kv_policy)
            await self.engine.commit(version, resumes=True)
            self.served = wanted

    # Differences

    @property
    def _rounding(self) -> float:
        return MAX_DISTANCE if self.engine.info.weight_dtype in (None, "float32") else MAX_HALF_DISTANCE

    def _input_difference(
        self, recorded: RecordedTurn, request: GenerateRequest, ctx: LoopContext
    ) -> Difference | None:
        """Compare a turn's prompt, sampling parameters and seed with the record."""
        turn, number = recorded.turn, recorded.number
        if request.token_ids != tuple(recorded.prompt_ids.tolist()):
            return Difference(number, *self._prompt_difference(recorded, request, ctx))
        assert turn.sampling is not None, "one of the `obstacles`"
        sampling = turn_sampling(request.sampling, turn.sampling.logprobs_mode)
        if sampling != turn.sampling:
            is_stop = replace(sampling, stop_token_ids=()) == replace(turn.sampling, stop_token_ids=())
            detail = f"the sampling parameters were {turn.sampling}, and are now {sampling}"
            return Difference(number, DifferenceCause.TEMPLATE if is_stop else DifferenceCause.LOOP, detail)
        if request.sampling.seed != turn.seed:
            detail = f"the record has the seed {turn.seed}, and its task gives {request.sampling.seed}"
            return Difference(number, DifferenceCause.SEED, detail)
        return None

    def _prompt_difference(
        self, recorded: RecordedTurn, request: GenerateRequest, ctx: LoopContext
    ) -> tuple[DifferenceCause, str]:
        """Return the cause of a different prompt: a message, or its tokens."""
        for index, came in enumerate(ctx.messages):
            there = recorded.messages[index] if index < len(recorded.messages) else None
            if there is None or message_key(there, is_strict=True) != message_key(came, is_strict=True):
                by_role = {"tool": DifferenceCause.TOOL, "assistant": DifferenceCause.TEMPLATE}
                detail = message_difference(index, there, came, is_strict=True)
                return by_role.get(came.role, DifferenceCause.LOOP), detail
        decode = self.chat.renderer.decode
        old, new = decode(recorded.prompt_ids.tolist()), decode(request.token_ids)
        results = (message.content for message in ctx.messages if message.role == "tool" and message.content)
        if (at := _difference_within(old, new, results)) is not None:
            shown = f"{old[at : at + _SHOWN_CHARS]!r} in the recorded tokens, {new[at : at + _SHOWN_CHARS]!r}"
            detail = f"a recorded tool result is not the text of its tokens: {shown} in its text"
            return DifferenceCause.TOOL, detail
        came_ids = np.array(request.token_ids, np.int32)
        return DifferenceCause.TEMPLATE, token_difference(recorded.prompt_ids, came_ids, decode)

    async def _output_difference(
        self, recorded: RecordedTurn, request: GenerateRequest, generation: Generation
    ) -> Difference | None:
        """Compare a generation's ids and logprobs with the record."""
        ids, logprobs = np.array(generation.token_ids), np.array(generation.logprobs, np.float32)
        num = min(len(ids), len(recorded.token_ids))
        unequal = np.flatnonzero(ids[:num] != recorded.token_ids[:num])
        place = int(unequal[0]) if len(unequal) else num
        distances = np.abs(logprobs[:place] - recorded.logprobs[:place])
        distance = float(distances.max(initial=0.0))
        far = np.flatnonzero(distances > self._rounding)
        if len(far):
            shown = f"logprob {recorded.logprobs[far[0]]:.6f} in the record, {logprobs[far[0]]:.6f} now"
            return self._other_distribution(recorded, int(far[0]), shown, distance)
        self.max_distance = max(self.max_distance, distance)
        if place == len(ids) == len(recorded.token_ids):
            return None
        return await self._other_sample(recorded, request, generation, place, distance)

    async def _other_sample(
        self, recorded: RecordedTurn, request: GenerateRequest, generation: Generation, place: int, distance: float
    ) -> Difference:
        """Return the cause of another sampled token after tokens with equal logprobs.

        The turn is sampled once more, with alternatives: they have the recorded token's logprob now.
        """
        num_top = min(MAX_TOP_LOGPROBS, self.engine.info.max_logprobs)
        sampling = replace(request.sampling, num_top_logprobs=num_top, max_tokens=place + 1)
        again = await self.engine.generate(replace(request, request_id=f"{request.request_id}?", sampling=sampling))
        old = [int(token) for token in recorded.token_ids[place : place + 1]]
        decode = self.chat.renderer.decode
        shown = f"{decode(old)!r} was sampled, and now {decode(generation.token_ids[place : place + 1])!r}"
        if again.token_ids != generation.token_ids[: place + 1]:
            shown += "; the engine samples other tokens each time"
            return Difference(recorded.number, DifferenceCause.ENGINE, shown, place, distance)
        likely = dict(again.top_logprobs[place]) if place < len(again.top_logprobs) else {}
        if old and likely:
            # A token that is not among the most likely ones is at most as likely as the last of them.
            then, now = recorded.logprobs[place], np.float32(likely.get(old[0], min(likely.values())))
            distance = max(distance, float(abs(then - now) if old[0] in likely else then - now))
        if distance > self._rounding:
            return self._other_distribution(recorded, place, shown, distance)
        is_greedy = request.sampling.temperature == 0
        is_rounding = is_greedy or distance * (self.num_tokens + place + 1) > _MAX_EXPECTED_FLIPS
        cause = DifferenceCause.ENGINE if is_rounding else DifferenceCause.SEED
        return Difference(recorded.number, cause, shown, place, distance)

    def _other_distribution(self, recorded: RecordedTurn, place: int, shown: str, distance: float) -> Difference:
        info, turn = self.engine.info, recorded.turn
        if (info.name, info.quantization) != (turn.engine or info.name, turn.quantization):
            there, here = f"{turn.engine} {turn.quantization}".strip(), f"{info.name} {info.quantization}".strip()
            detail = f"sampled by {there}, replayed by {here}: {shown}"
            return Difference(recorded.number, DifferenceCause.ENGINE, detail, place, distance)
        return Difference(recorded.number, DifferenceCause.WEIGHTS, shown, place, distance)


def _difference_within(old: str, new: str, contents: Iterable[str]) -> int | None:
    """Return the place of the first difference if the texts differ only inside one of `contents`, else None."""
    num_common = min(len(old), len(new))
    start = next((at for at in range(num_common) if old[at] != new[at]), num_common)
    tail = next((at for at in range(num_common - start) if old[-1 - at] != new[-1 - at]), num_common - start)
    for content in contents:
        at = new.find(content, max(0, len(new) - tail - len(content)))
        if 0 <= at <= start:
            return start
    return None
