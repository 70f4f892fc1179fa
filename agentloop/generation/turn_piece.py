"""The values of a streamed turn, whatever shows them: text, tool calls and tokens, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import orjson

from agentloop.trajectory.node import Reply
from agentloop.types import FinishReason, ToolCall, ToolCallStatus, TopLogprobs, WeightVersionSpan, append_span


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

    Text behind a call, and a thought behind content, begin another piece: some dialects keep that order.
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
    """Return the reason why a reply ended, as clients are told."""
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
