"""One turn sampled from an engine, whole or as a stream: for agent loops and for the chat endpoint.

Invariants: a stream's pieces concatenate exactly to its reply, and the reply is that of the whole turn under the
same seed; an engine's abort is continued, never shown; no engine request outlives the call that made it.

Stop strings apply to all text that the policy writes, thoughts and tool calls included, but not to the stop token.
The ids end with the token that completes the first of them; what the engine sampled beyond is dropped. The first
stop string that is complete ends the text; of several complete at the same character the longest, which began
first. What is found does not depend on how the text is cut, and time is linear in the text (Knuth, Morris and
Pratt), however the strings repeat themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from agentloop.errors import EnginePaused, InvalidRequest, InvariantBroken
from agentloop.generation.deadline import Deadline
from agentloop.generation.leased_engine import LeasedEngine, continued
from agentloop.generation.stream_splitter import TurnSplitter
from agentloop.generation.turn_piece import TurnFinish, TurnPiece, finish_of
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.images import Image, ImageSpan
from agentloop.parsers.base import DecodedText
from agentloop.sampled_tokens import SampledTokens
from agentloop.sampling import long_constraint, turn_sampling
from agentloop.trajectory.node import Reply
from agentloop.types import (
    JSON,
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    SamplingParams,
    ToolCall,
    ToolCallStatus,
    TopLogprobs,
)

MAX_CONTINUATIONS = 32  # in a row of a turn that engine-side aborts keep cutting before it has a token more

GoesOn: TypeAlias = Callable[[SampledTokens], bool]
"""Whether a turn with these tokens goes on."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn to sample. `sampling` is complete: room, stop tokens, constraint and the choice's own seed.

    `timeout_s` bounds each engine request. At `deadline` the caller ends the turn by itself; without one each
    engine request has `timeout_s`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    turn_index: int  # numbers the turn's tool calls
    choice_index: int = 0
    stop: tuple[str, ...] = ()
    tools: Sequence[Mapping[str, JSON]] = ()
    reads_calls: bool = False
    shows_unread_calls: bool = False  # a call that cannot be read is content, unless the turn's end cut it
    reads_thoughts: bool = True  # false for a raw completion: all of its text is content
    timeout_s: float = 600.0
    deadline: Deadline | None = None
    keeps_late: bool = False  # a turn whose time is over is what it has by then; only for whole turns without stops
    trajectory_id: str | None = None
    keeps_kv: bool = False  # the trajectory goes on with the KV of the version it began under
    kv_version: int | None = None  # that version; None before its first token
    images: tuple[ImageSpan, ...] = ()  # of `prompt_ids`
    image_data: tuple[Image, ...] = ()  # all that they name


async def sample_turn(
    engine: LeasedEngine, reader: TurnReader, wanted: TurnRequest, goes_on: GoesOn | None = None
) -> Reply:
    """Sample the whole turn. Raises what the engine raises.

    `goes_on` is asked with the turn's tokens after an engine-side abort: if it says no, the turn ends with
    FinishReason.ABORT. A turn that a pause cut, and that no engine can take up in the middle, is sampled again:
    nobody has seen it.
    """
    attempt, num_cut = wanted, 0
    while True:
        turn = _Turn(reader, attempt, goes_on=goes_on)
        try:
            if attempt.stop:
                async with aclosing(_streamed(engine, turn, attempt.deadline)) as pieces:
                    async for _ in pieces:
                        pass
            else:
                while (request := turn.next_request()) is not None:
                    generation = await engine.generate(request, deadline=attempt.deadline)
                    turn.sampled.add(generation)
                    turn.end(generation)
            return turn.finish()
        except EnginePaused:
            num_cut += 1
            if not turn.sampled.token_ids or num_cut == MAX_CONTINUATIONS:
                raise
        attempt = replace(wanted, request_id=f"{wanted.request_id}~{num_cut}")


async def stream_turn(
    engine: LeasedEngine, reader: TurnReader, wanted: TurnRequest
) -> AsyncGenerator[TurnPiece | Reply, None]:
    """Sample the turn in pieces as they come; the last item is the reply. Close it to end the request.

    Raises as `sample_turn`, and EnginePaused if an abort cut a turn that `looks_back`: no engine can take up a
    grammar in the middle, and what was given out cannot be taken back.
    """
    turn = _Turn(reader, wanted, is_streamed=True)
    async with aclosing(_streamed(engine, turn, wanted.deadline)) as pieces:
        async for piece in pieces:
            yield piece
    reply = turn.finish()
    yield turn.last_piece(reply)
    yield reply


async def _streamed(
    engine: LeasedEngine, turn: _Turn, deadline: Deadline | None
) -> AsyncGenerator[TurnPiece, None]:
    """Stream a turn's tokens into it, up to its end or its first stop string."""
    while (request := turn.next_request()) is not None:
        async with aclosing(engine.stream(request, turn.sampled, deadline=deadline)) as items:
            async for item in items:
                if isinstance(item, Generation):
                    turn.end(item)
                    continue
                piece = turn.read()
                if turn.is_stopped:
                    return
                if piece is not None:
                    yield piece


class _Turn:
    """A turn in the making: engine requests out, tokens in, pieces out, a reply at the end."""

    def __init__(
        self, reader: TurnReader, wanted: TurnRequest, *, goes_on: GoesOn | None = None, is_streamed: bool = False
    ) -> None:
        """`is_streamed`: `read` returns pieces."""
        self.sampled = SampledTokens()
        self._wanted = wanted
        self._goes_on = goes_on
        self._reader = reader
        self._reading = Reading(
            wanted.tools,
            wanted.turn_index,
            wanted.reads_calls,
            wanted.reads_thoughts,
            wanted.reads_thoughts and reader.is_thinking(wanted.prompt_ids),
        )
        self._stop_ids = wanted.sampling.stop_token_ids
        self._first: Generation | None = None  # how the first engine request ended
        self._last: Generation | None = None
        self._num_requests = 0
        self._num_before = self._num_idle = 0  # tokens before the last request; requests since a token came
        self._is_left = False  # cut by an abort, and not to go on
        self._text = _GrowingText(reader, wanted.stop)
        self._splitter = TurnSplitter(reader, self._reading, wanted.choice_index) if is_streamed else None
        self._held = ""  # text that may begin a stop string
        self._num_given = 0  # tokens that pieces had

    @property
    def is_stopped(self) -> bool:
        """True once a stop string is complete: nothing may be added any more."""
        return self._text.match is not None

    def next_request(self) -> GenerateRequest | None:
        """Return what the engine is to be asked now; None if the turn has ended. Raises EnginePaused."""
        wanted, sampled = self._wanted, self.sampled
        if self._last is not None and not self._is_cut():
            return None
        if sampled.token_ids and wanted.sampling.looks_back:
            raise EnginePaused("a pause cut a reply under a constraint or penalties: it must be sampled again")
        self._num_idle = self._num_idle + 1 if len(sampled) == self._num_before else 0
        self._num_before = len(sampled)
        if self._num_idle > MAX_CONTINUATIONS:
            raise InvariantBroken(f"a turn was aborted {MAX_CONTINUATIONS} times without a token")
        timeout_s = wanted.timeout_s
        if wanted.deadline is not None:
            timeout_s = max(min(timeout_s, wanted.deadline.left_s), 0.001)
        whole = GenerateRequest(
            request_id=f"{wanted.request_id}.{self._num_requests}",
            token_ids=wanted.prompt_ids,
            sampling=wanted.sampling,
            timeout_s=timeout_s,
            trajectory_id=wanted.trajectory_id,
            kv_version=wanted.kv_version,
            images=wanted.images,
            image_data=wanted.image_data,
            keeps_late=wanted.keeps_late,
            keeps_kv=wanted.keeps_kv,
        )
        self._num_requests += 1
        return continued(whole, sampled.since(0)) if sampled.token_ids else whole

    def _is_cut(self) -> bool:
        """Tell whether an abort cut the turn, and it goes on."""
        wanted, last = self._wanted, self._last
        is_aborted = last is not None and last.finish_reason is FinishReason.ABORT
        if not is_aborted or len(self.sampled) >= wanted.sampling.max_tokens:
            return False
        self._is_left = self._goes_on is not None and not self._goes_on(self.sampled)
        return not self._is_left

    def read(self) -> TurnPiece | None:
        """Read the tokens that came. Returns what a client can be shown of them, if there is anything."""
        if self.is_stopped:
            raise InvariantBroken("tokens after a stop string")
        # A stop token is the turn's end and no text, unless something follows it.
        ids = self.sampled.token_ids
        text = self._text.read(ids, len(ids) - 1 if ids and ids[-1] in self._stop_ids else len(ids))
        if self.is_stopped:
            self.sampled.cut(self._text.num_kept)
        if self._splitter is None or self.is_stopped:
            return None
        text = self._held + text
        num_free = len(text) - self._text.num_held
        self._held = text[num_free:]
        shown = self._splitter.add(text[:num_free])
        return None if shown.is_empty else self._piece(shown, len(self._text.ends))

    def end(self, generation: Generation) -> None:
        """Note how an engine request ended; its tokens were added."""
        self._first = self._first or generation
        self._last = generation

    def finish(self) -> Reply:
        """Read what is left, and return the reply."""
        first, last, stopped_at = self._first, self._last, self._text.match
        has_stop_token = last is not None and last.finish_reason is FinishReason.STOP
        if stopped_at is None:
            num_ids = len(self.sampled)
            self._text.finish(self.sampled.token_ids, num_ids - 1 if has_stop_token else num_ids)
            stopped_at = self._text.match  # the last characters may complete a stop string
            if stopped_at is not None:
                self.sampled.cut(self._text.num_kept)
        has_stop_token = has_stop_token and stopped_at is None
        message, num_reasoning_tokens = self._reader.read(self._text.shown, self._reading)
        unread: tuple[ToolCall, ...] = ()
        if self._wanted.shows_unread_calls:
            message, unread = with_unread_calls_as_content(message, self._wanted.turn_index)
        finish_reason = FinishReason.ABORT if self._is_left else FinishReason.LENGTH
        if last is not None and last.finish_reason is FinishReason.DEADLINE:
            finish_reason = FinishReason.DEADLINE
        raw_logprobs = self.sampled.raw_logprobs
        return Reply(
            message=message,
            token_ids=np.array(self.sampled.token_ids, np.int32),
            logprobs=np.array(self.sampled.logprobs, np.float32),
            weight_versions=self.sampled.weight_versions,
            finish_reason=FinishReason.STOP if has_stop_token or stopped_at is not None else finish_reason,
            is_closed=has_stop_token and self._reader.ends_turn(self.sampled.token_ids[-1]),
            stop_text=stopped_at.text if stopped_at is not None else "",
            num_reasoning_tokens=num_reasoning_tokens,
            cached_tokens=first.cached_tokens if first is not None else 0,
            replica_id=last.replica_id if last is not None else "",
            engine=last.engine if last is not None else "",
            top_logprobs=_rounded(self.sampled.top_logprobs),
            raw_logprobs=np.array(raw_logprobs, np.float32) if raw_logprobs else None,
            sampling=turn_sampling(self._wanted.sampling, self.sampled.logprobs_mode),
            seed=self._wanted.sampling.seed,
            unread_calls=unread,
            constraint=long_constraint(self._wanted.sampling),
        )

    def last_piece(self, reply: Reply) -> TurnPiece:
        """Return what the reply has more than the pieces so far, and how it ended."""
        if self._splitter is None:
            raise InvariantBroken("the last piece of a turn that is not streamed")
        return self._piece(self._splitter.finish(reply.message), len(self.sampled), finish_of(reply))

    def _piece(self, shown: TurnPiece, num_tokens: int, finish: TurnFinish | None = None) -> TurnPiece:
        """Add the tokens up to there that no earlier piece had: those that no stop string can cut.

        Logprobs are rounded as the reply stores them.
        """
        tokens, self._num_given = self.sampled.since(self._num_given, num_tokens), num_tokens
        return TurnPiece(
            shown.choice_index,
            shown.content,
            shown.reasoning,
            shown.calls,
            tokens.token_ids,
            tuple(np.asarray(tokens.logprobs, np.float32).tolist()),
            _rounded(tokens.top_logprobs),
            tokens.weight_versions,
            finish,
        )


def with_unread_calls_as_content(message: Message, turn_index: int) -> tuple[Message, tuple[ToolCall, ...]]:
    """Return the message with its malformed calls behind its content, as they were written, and those calls.

    A call that the turn's end cut behind its name stays one, as OpenAI serves it. The calls that stay are numbered
    anew, so that those which a stream has given out keep their ids.
    """
    unread = [call for call in message.tool_calls if _is_unread(call)]
    if not unread:
        return message, ()
    kept = (call for call in message.tool_calls if not _is_unread(call))
    calls = tuple(replace(call, id=f"call_{turn_index}_{place}") for place, call in enumerate(kept))
    content = "\n".join(text for text in (message.content, *(call.text for call in unread)) if text)
    return replace(message, content=content, tool_calls=calls), tuple(replace(call, text="") for call in unread)


def _is_unread(call: ToolCall) -> bool:
    return call.status is ToolCallStatus.MALFORMED and call.partial_arguments is None


class _GrowingText:
    """A turn's text as its ids come, up to the first stop string."""

    def __init__(self, reader: TurnReader, stops: Sequence[str]) -> None:
        self.ends: list[int] = []  # of the tokens whose text is certain, as `DecodedText.ends`
        self.match: StopMatch | None = None
        self.num_kept = 0  # tokens up to the one that completes the match
        self._reader = reader
        self._decoder = reader.decoder()
        self._stops = StopFinder(stops)
        self._text: list[str] = []
        self._num_chars = 0
        self._num_read = 0  # tokens that the decoder has

    @property
    def num_held(self) -> int:
        """Characters at the end that may begin a stop string."""
        return self._stops.num_held

    @property
    def shown(self) -> DecodedText:
        """The text that the turn shows: nothing from a stop string on."""
        num_chars = self._num_chars if self.match is None else self.match.start
        return DecodedText("".join(self._text)[:num_chars], tuple(min(end, num_chars) for end in self.ends))

    def read(self, ids: Sequence[int], num_ids: int) -> str:
        """Decode the ids up to there, and return the text that is new. A found stop string cuts `ends`."""
        decoded = self._decoder.add(ids[self._num_read : num_ids])
        self._num_read = num_ids
        return self._append(decoded)

    def finish(self, ids: Sequence[int], num_ids: int) -> None:
        """Decode the rest, and what was not certain."""
        if self._num_read == 0:  # nothing was read in pieces
            self._append(self._reader.decode(ids[:num_ids]))
            return
        self.read(ids, num_ids)
        if self.match is None:
            self._append(self._decoder.finish())

    def _append(self, decoded: DecodedText) -> str:
        self.ends.extend(self._num_chars + end for end in decoded.ends)
        self._num_chars += len(decoded.text)
        self._text.append(decoded.text)
        self.match = self._stops.add(decoded.text)
        if self.match is not None:
            self.num_kept = bisect_left(self.ends, self.match.end) + 1
            del self.ends[self.num_kept :]
        return decoded.text


def _rounded(tops: Sequence[tuple[tuple[int, float], ...]]) -> TopLogprobs:
    """Return alternatives with logprobs as float32 has them."""
    return tuple(tuple((token_id, float(np.float32(logprob))) for token_id, logprob in top) for top in tops)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string's characters `[start, end)` in the whole text."""

    text: str
    start: int
    end: int


class StopFinder:
    """Reads a text from left to right, until the first match."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty stop string: it would end every text at once."""
        if not all(stops):
            raise InvalidRequest("a stop string is empty", param="stop")
        self._progress = [_Progress(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._num_read = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of what was read that may begin a stop string."""
        return max((progress.num_matched for progress in self._progress), default=0)

    def add(self, text: str) -> StopMatch | None:
        """The first match that `text` completes; nothing may be added after one."""
        ends = [(end, place) for place, one in enumerate(self._progress) if (end := one.read(text)) is not None]
        if not ends:
            self._num_read += len(text)
            return None
        end, place = min(ends)
        stop = self._progress[place].stop
        return StopMatch(stop, self._num_read + end - len(stop), self._num_read + end)


class _Progress:
    """The length of one stop string that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = _borders(stop)

    def read(self, text: str) -> int | None:
        """Return where in `text` the string is first complete; None if it is not."""
        stop, shorter, matched = self.stop, self._shorter, self.num_matched
        place = 0
        while place < len(text):
            if not matched and (place := text.find(stop[0], place)) < 0:
                break
            char = text[place]
            while matched and char != stop[matched]:
                matched = shorter[matched - 1]
            matched += char == stop[matched]
            place += 1
            if matched == len(stop):
                return place
        self.num_matched = matched
        return None


def _borders(stop: str) -> list[int]:
    """For every prefix, how long the longest of its own beginnings is that it ends with."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders
