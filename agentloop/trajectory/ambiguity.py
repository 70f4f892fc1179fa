"""Which of several turns a client means that said the same in other tokens: its echo of ids and reasoning tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentloop.trajectory.node import Node
from agentloop.types import Message


@dataclass(slots=True)
class _Candidate:
    turn: Node
    at: Node | None  # the ancestor that is looked at, the turn itself first; None before the root
    end: int  # messages of the path up to its reply
    is_supported: bool = False


def told_apart(
    turns: Sequence[Node], num_matched: int, messages: Sequence[Message], nodes: Mapping[str, Node]
) -> list[Node]:
    """The turns that the echo allows; all of them if it supports none.

    A turn is out if the echo contradicts a call id or the reasoning of any reply that is not common to all. The one
    that is left counts only if something speaks for it: a client that echoes neither leaves the question open.
    """
    left = [_Candidate(turn, turn, num_matched) for turn in turns]
    while left and any(candidate.at is not left[0].at for candidate in left):
        deepest = max(candidate.end for candidate in left)
        left = [
            candidate for candidate in left if candidate.end < deepest or _is_allowed(candidate, messages, nodes)
        ]
    supported = [candidate.turn for candidate in left if candidate.is_supported]
    return supported if len(supported) == len(left) > 0 else list(turns)


def _is_allowed(candidate: _Candidate, messages: Sequence[Message], nodes: Mapping[str, Node]) -> bool:
    """Look at one reply and step to the one before it. False if the echo contradicts it."""
    node = candidate.at
    if node is None:
        return True
    said, echoed = node.reply.message, messages[candidate.end - 1]
    pairs = [(call.id, echo.id) for call, echo in zip(said.tool_calls, echoed.tool_calls, strict=True)]
    pairs.append((said.reasoning.strip(), echoed.reasoning.strip()))
    if any(echo and echo != mine for mine, echo in pairs):
        return False
    candidate.is_supported |= any(echo for _, echo in pairs)
    candidate.end -= len(node.observed) + 1
    candidate.at = None if node.parent_id is None else nodes[node.parent_id]
    return True
