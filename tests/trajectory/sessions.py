"""A manually driven session: an agent's requests against a graph, with sampled ids that identify turns."""

from collections.abc import Sequence

import numpy as np

from agentloop.trajectory.node import Node, Reply, tools_key
from agentloop.trajectory.turn_graph import Match, TurnGraph
from agentloop.types import FinishReason, Message, ToolCall, WeightVersionSpan


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", text, calls, reasoning=reasoning)


def tool(text: str, call_id: str | None = "call_0_0", name: str | None = None) -> Message:
    return Message("tool", text, tool_call_id=call_id, name=name)


def call(name: str = "add", arguments: dict | None = None, call_id: str = "call_0_0") -> ToolCall:
    return ToolCall(call_id, name, {"x": 1} if arguments is None else arguments)


def definition(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def reply_of(message: Message, ids: Sequence[int], *, stop_text: str = "", spans=None, **fields) -> Reply:
    return Reply(
        message=message,
        token_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        weight_versions=(WeightVersionSpan(0, 0, len(ids)),) if spans is None else spans,
        finish_reason=FinishReason.STOP,
        is_closed=not stop_text,
        stop_text=stop_text,
        replica_id="a",
        **fields,
    )


def messages_of(graph: TurnGraph, node_id: str) -> tuple[Message, ...]:
    """Return the conversation from the root to the node's reply."""
    return tuple(message for node in graph.path_of(node_id) for message in (*node.observed, node.reply.message))


class Played:
    """One session. Every turn gets new ids: `ask` matches, and `turn` commits the match with a reply."""

    def __init__(self) -> None:
        self.graph = TurnGraph()
        self._next_id = 1

    def ids(self, num: int) -> list[int]:
        self._next_id += num
        return list(range(self._next_id - num, self._next_id))

    def ask(self, *messages: Message, tools=(), is_strict: bool = False) -> Match:
        return self.graph.match(messages, tools, is_strict=is_strict)

    def turn(self, reply: Message, *messages: Message, tools=(), **given) -> Node:
        return self.commit(self.ask(*messages, tools=tools), reply, tools=tools, **given)

    def commit(
        self, match: Match, reply: Message, *, tools=(), ids=None, observed_ids=None, declaration=None, **fields
    ) -> Node:
        """Commit a reply; `fields` are its fields (see `reply_of`)."""
        num = len(self.graph.nodes)
        node = Node(
            node_id=f"n{num}",
            call_id=f"c{num}",
            choice_index=0,
            parent_id=None if match.parent is None else match.parent.node_id,
            observed=match.appended,
            observed_ids=np.array(
                self.ids(2 * len(match.appended)) if observed_ids is None else observed_ids, np.int32
            ),
            reply=reply_of(reply, self.ids(3) if ids is None else ids, **fields),
            tools_key=tools_key(tools),
            split=match.split,
            declaration=declaration,
        )
        self.graph.add(node)
        return node
