"""The text of a turn, read into a message: reasoning, content and tool calls; and the pieces of a streamed turn.

Reasoning stands between two marks. The first mark is at the start of the turn, after a few blanks, or the prompt
ends with it; without the second mark the reasoning extends to the end of the turn. Delimiters of calls within the
reasoning are text, and marks of reasoning elsewhere are content. Nothing that a policy wrote is dropped except
these marks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import orjson

from agentloop.parsers.base import DecodedText, Delimiters, ParsedTurn, Parser, segments
from agentloop.rendering.port import Renderer, TurnEnd
from agentloop.rendering.tokenizer import TextDecoder
from agentloop.trajectory.node import Reply
from agentloop.types import (
    JSON,
    FinishReason,
    Message,
    ToolCall,
    ToolCallStatus,
    TopLogprobs,
    WeightVersionSpan,
    append_span,
)


class TurnFinish(StrEnum):
    """The reason why a turn ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one tool call: first its id and name, then its arguments as text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TurnPiece:
    """The next part of one choice of a streamed turn.

    Pieces concatenate to the reply: text to `message.content` and `message.reasoning`, ids to `token_ids`.
    """

    choice_index: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: TopLogprobs = ()
    weight_versions: tuple[WeightVersionSpan, ...] = ()  # offsets within this piece
    finish: TurnFinish | None = None  # in the last piece of the choice

    @property
    def is_empty(self) -> bool:
        """True if it shows nothing."""
        return not (self.content or self.reasoning or self.calls)


def joined(pieces: Sequence[TurnPiece]) -> Iterator[TurnPiece]:
    """Yield pieces with neighbours of one choice joined.

    Text after a call, and reasoning after content, begin another piece: some dialects keep that order.
    """
    waiting: list[TurnPiece] = []
    for piece in pieces:
        if waiting and not _follows(waiting, piece):
            yield _one_of(waiting)
            waiting = []
        waiting.append(piece)
    if waiting:
        yield _one_of(waiting)


def _follows(waiting: Sequence[TurnPiece], piece: TurnPiece) -> bool:
    last = waiting[-1]
    if last.choice_index != piece.choice_index or last.finish is not None:
        return False
    if (piece.content or piece.reasoning) and any(one.calls for one in waiting):
        return False
    return not (piece.reasoning and any(one.content for one in waiting))


def _one_of(pieces: Sequence[TurnPiece]) -> TurnPiece:
    """Return one piece for neighbours of one choice."""
    if len(pieces) == 1:
        return pieces[0]
    spans: list[WeightVersionSpan] = []
    num_tokens = 0
    for piece in pieces:
        for span in piece.weight_versions:
            append_span(spans, replace(span, start=num_tokens + span.start, end=num_tokens + span.end))
        num_tokens += len(piece.token_ids)
    return TurnPiece(
        pieces[0].choice_index,
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
        tuple(token_id for piece in pieces for token_id in piece.token_ids),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        tuple(row for piece in pieces for row in piece.top_logprobs),
        tuple(spans),
        pieces[-1].finish,
    )


def finish_of(reply: Reply) -> TurnFinish:
    """Return the reason why a reply ended, in the clients' terms."""
    if reply.finish_reason is FinishReason.LENGTH:
        return TurnFinish.LENGTH
    return TurnFinish.TOOL_CALLS if reply.message.tool_calls else TurnFinish.STOP


def arguments_text(call: ToolCall) -> str:
    """Write a call's arguments as text. A MALFORMED call has the text that the policy wrote.

    Of a call that was cut these are its partial arguments, of another malformed one the whole call.
    """
    if call.status is ToolCallStatus.OK:
        return orjson.dumps(call.arguments).decode()
    return call.text if call.partial_arguments is None else call.partial_arguments


MAX_BLANKS = 8  # characters before the first mark of reasoning: GLM-4.5 writes a line break
_PROMPT_TAIL = 48  # tokens: a mark has at most 30 characters, and few line breaks follow it
_PROMPT_END = 12  # tokens: nearly always enough, in a third of the time


@dataclass(frozen=True, slots=True)
class Reading:
    """Rules for reading one turn."""

    tools: Sequence[Mapping[str, JSON]]
    turn_index: int  # numbers its calls
    reads_calls: bool
    reads_reasoning: bool  # false for a raw completion: all of its text is content
    is_thinking: bool = False  # the prompt begins the reasoning
    shows_unread_calls: bool = False  # a call that cannot be read is content, unless the turn's end cut it


class TurnReader:
    """Reads the turns of a model: text to message. Stateless, so all calls share it."""

    def __init__(self, renderer: Renderer, parser: Parser, parser_name: str = "") -> None:
        self.parser_name = parser_name
        self._renderer = renderer
        self._parser = parser
        self._keeps_calls = not renderer.facts.shows_calls

    @property
    def delimiters(self) -> Delimiters:
        """The marks by which a turn is read while it is sampled."""
        return self._parser.delimiters

    def ends_turn(self, token_id: int) -> bool:
        """Return True if a stop token is the model's; a client's stop token leaves the turn open."""
        return token_id in self._renderer.stop_token_ids

    def decoder(self) -> TextDecoder:
        """A decoder for one turn."""
        return self._renderer.decoder()

    def decode(self, ids: Sequence[int]) -> DecodedText:
        """A turn's text at once."""
        return self._renderer.decode_with_offsets(ids)

    def is_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if the reply to a prompt begins within reasoning."""
        mark = self.delimiters.reasoning.open
        end = self._renderer.decode(prompt_ids[-_PROMPT_END:]).rstrip()
        if len(end) <= len(mark):
            end = self._renderer.decode(prompt_ids[-_PROMPT_TAIL:]).rstrip()
        return end.endswith(mark)

    def end_of(self, reply: Reply, before: Iterable[Message] = ()) -> TurnEnd:
        """Return the end of a turn for a bridge; `before` is the conversation up to the turn."""
        calls = [call for message in before for call in message.tool_calls]
        num_calls = sum(call.status is ToolCallStatus.OK for call in calls)
        num_ids = len(reply.token_ids)
        ids = tuple((call.id, call.written_id) for call in (*calls, *reply.message.tool_calls) if call.written_id)
        if reply.is_closed:
            return TurnEnd(int(reply.token_ids[-1]), written_ids=ids, num_calls=num_calls)
        is_thinking = 0 < num_ids == reply.num_reasoning_tokens
        last = self._renderer.decode(reply.token_ids[-_PROMPT_TAIL:].tolist()) if is_thinking else ""
        is_open = is_thinking and not last.rstrip().endswith(self.delimiters.reasoning.close)
        return TurnEnd(None, is_open, ids, num_calls, reply.closing)

    def parse(self, decoded: DecodedText, reading: Reading) -> ParsedTurn:
        """Return the content and calls of the text after the reasoning."""
        return self._parser.parse(decoded, reading.tools, reading.turn_index)

    def first_call(self, decoded: DecodedText, reading: Reading) -> tuple[DecodedText, str] | None:
        """Return the turn cut after its first complete call, and the end of its text that the kept tokens lack.

        Returns None if the turn has no complete call, or no text after it.
        """
        thought = self._thought(decoded.text, reading)
        text = decoded.text if thought is None else decoded.text[thought[2] :].lstrip()
        calls = self.parse(by_character(text), reading).calls
        call = next((call for call in calls if call.status is ToolCallStatus.OK), None)
        if call is None:
            return None
        rest = text[call.token_end :].strip()
        closing = self.parse(by_character(text[: call.token_end]), reading).closing
        if closing.strip().startswith(rest):  # an incomplete end of the section of calls
            return None
        end = len(decoded.text) - len(text) + call.token_end
        num_kept = bisect_left(decoded.ends, end)
        if num_kept < len(decoded.ends) and decoded.ends[num_kept] == end:
            num_kept += 1
        # A token across the end of the call, such as `}},`, is not kept, because it cannot be cut.
        whole = decoded.text[:end] + closing
        ends = decoded.ends[:num_kept]
        return DecodedText(whole, (*ends[:-1], len(whole))), whole[ends[-1] if ends else 0 :]

    def read(self, decoded: DecodedText, reading: Reading) -> tuple[Message, int]:
        """Return the turn as a message, and the number of tokens of its reasoning with its marks.

        `decoded` has neither the stop token nor a stop string.
        """
        thought = self._thought(decoded.text, reading)
        if thought is None:
            return self._message(decoded, reading, ""), 0
        start, end, after = thought
        text = decoded.text[after:].lstrip()
        num_before = len(decoded.text) - len(text)
        rest = DecodedText(text, tuple(max(num_chars - num_before, 0) for num_chars in decoded.ends))
        num_tokens = decoded.token_span(0, after)[1] if after else 0
        return self._message(rest, reading, decoded.text[start:end].strip()), num_tokens

    def _message(self, decoded: DecodedText, reading: Reading, reasoning: str) -> Message:
        if not reading.reads_calls:
            headers = self.delimiters.headers if reading.reads_reasoning else ()
            content = "\n".join(segments(decoded.text, headers)) if headers else decoded.text
            return Message("assistant", content, reasoning=reasoning)
        parsed = self.parse(decoded, reading)
        calls = parsed.calls
        if self._keeps_calls:
            calls = tuple(call if call.text else replace(call, text=_text_of(call, decoded)) for call in calls)
        thoughts = "\n".join(filter(None, (reasoning, parsed.reasoning)))
        return Message("assistant", parsed.content, calls, reasoning=thoughts)

    def _thought(self, text: str, reading: Reading) -> tuple[int, int, int] | None:
        """Return the characters `[start, end)` of the reasoning, and the position after its closing mark."""
        if not reading.reads_reasoning:
            return None
        marks, start = self.delimiters.reasoning, 0
        if not reading.is_thinking:
            start = len(text) - len(text[: MAX_BLANKS + 1].lstrip()) - len(text[MAX_BLANKS + 1 :])
            if start > MAX_BLANKS or not text.startswith(marks.open, start):
                return None
            start += len(marks.open)
        end = text.find(marks.close, start)
        return (start, len(text), len(text)) if end < 0 else (start, end, end + len(marks.close))


def by_character(text: str) -> DecodedText:
    """Return the text with one token per character, so that calls have character offsets."""
    return DecodedText(text, tuple(range(1, len(text) + 1)))


def _text_of(call: ToolCall, decoded: DecodedText) -> str:
    """Return the text of a call's tokens."""
    start = decoded.ends[call.token_start - 1] if call.token_start else 0
    return decoded.text[start : decoded.ends[call.token_end - 1]]
