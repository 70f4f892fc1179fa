"""The values of a streamed turn, whatever shows them: text, tool calls and tokens, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import orjson

from agentloop.trajectory import Reply
from agentloop.types import FinishReason, ToolCall, ToolCallStatus, TopLogprobs, WeightVersionSpan


class TurnFinish(StrEnum):
    """Why a turn ended, as OpenAI says it."""

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


def finish_of(reply: Reply) -> TurnFinish:
    """Return why a reply ended, as clients are told."""
    if reply.finish_reason is FinishReason.LENGTH:
        return TurnFinish.LENGTH
    return TurnFinish.TOOL_CALLS if reply.message.tool_calls else TurnFinish.STOP


def arguments_text(call: ToolCall) -> str:
    """Write a call's arguments as text: those of a MALFORMED call are what the policy wrote.

    Of a call that was cut they are what there is of them, of another one the whole call.
    """
    if call.status is ToolCallStatus.OK:
        return orjson.dumps(call.arguments).decode()
    return call.text if call.partial_arguments is None else call.partial_arguments
