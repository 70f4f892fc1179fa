"""Answers of one choice, complete and in pieces of one character, for the dialects' writers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from agentloop.chat.call import ChatCall, ChatResult
from agentloop.generation.turn_reader import CallDelta, TurnPiece, arguments_text
from agentloop.trajectory.node import Node, Reply
from agentloop.trajectory.turn_graph import TurnGraph
from agentloop.types import FinishReason, Message, ToolCall, ToolCallStatus, WeightVersionSpan

KEY = "0123456789abcdef" * 2
CALLS = (ToolCall("call_0_0", "lookup", {"q": "a"}), ToolCall("call_0_1", "lookup", {"n": 1.5, "q": "é"}))
TURN = Message("assistant", "Looking.", CALLS, reasoning="They want a.")
MALFORMED = ToolCall("call_0_0", "", {}, ToolCallStatus.MALFORMED, "bad", text="<tool_call>{oops</tool_call>")
CUT = ToolCall(
    "call_0_0",
    "lookup",
    {},
    ToolCallStatus.MALFORMED,
    "cut",
    text='<tool_call>\n{"name": "lookup", "arguments": {"q": "a',
    partial_arguments='{"q": "a',
)
MESSAGES = {
    "all": TURN,
    "text": Message("assistant", "Just text, é."),
    "calls": Message("assistant", tool_calls=CALLS),
    "malformed": Message("assistant", "Hm.", (MALFORMED,)),
    "cut": Message("assistant", "Hm.", (CALLS[1], CUT)),
    "thought": Message("assistant", reasoning="Only a thought."),
    "empty": Message("assistant"),
}
Events = Callable[[TurnPiece | ChatResult], Iterator[dict[str, Any]]]


def result(message: Message, finish: FinishReason = FinishReason.STOP, stop_text: str = "") -> ChatResult:
    ids = np.arange(5, dtype=np.int32)
    spans = (WeightVersionSpan(3, 0, 5),)
    is_closed = finish is FinishReason.STOP and not stop_text
    reply = Reply(message, ids, np.full(5, -0.5, np.float32), spans, finish, is_closed, stop_text, 2, 4)
    node = Node("n1", "c1", 0, None, (Message("user", "hi"),), np.arange(7, dtype=np.int32), reply)
    return ChatResult("c1", 1_700_000_000, "s1", tuple(range(7)), (node,))


def pieces_of(message: Message) -> list[TurnPiece]:
    calls = [
        piece
        for index, call in enumerate(message.tool_calls)
        for piece in (CallDelta(index, call.id, call.name), CallDelta(index, arguments=arguments_text(call)))
    ]
    return [
        *(TurnPiece(0, reasoning=char) for char in message.reasoning),
        *(TurnPiece(0, content=char) for char in message.content),
        *(TurnPiece(0, calls=(call,)) for call in calls),
    ]


def written(events: Events, items: Sequence[TurnPiece | ChatResult]) -> list[dict[str, Any]]:
    return [event for item in items for event in events(item)]


def check_echo(answer: ChatResult, echo: ChatCall) -> None:
    """Check that a call that echoes the answer and adds a message extends the turn that made it."""
    graph = TurnGraph()
    graph.add(answer.choices[0])
    match = graph.match(echo.messages, ())
    assert match.parent is not None
    assert (match.parent.node_id, match.split) == ("n1", None)
    assert match.appended == (Message("user", "and?"),)
