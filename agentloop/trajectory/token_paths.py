"""Token paths of a graph, as a trainer takes them: one a leaf, every sampled token in the mask of exactly one.

A path's first tokens may be another's: they are there, out of the mask, because the first path that has them trains
them. What a path shares is decided by the graph alone; a node's `Split` only says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from agentloop.trajectory.diff import message_difference
from agentloop.trajectory.node import Node, Split
from agentloop.trajectory.turn_graph import TurnGraph
from agentloop.types import Message, SplitReason, TokenPath, Turn, WeightVersionSpan, append_span, shifted_spans


@dataclass(frozen=True, slots=True)
class _Line:
    """The nodes of one path; the first `num_shared` of them belong to path `parent`."""

    nodes: list[Node]
    parent: int | None
    num_shared: int


def token_paths(graph: TurnGraph) -> tuple[TokenPath, ...]:
    """All paths from a root to a leaf, in the order of the leaves' creation.

    A path's `parent` is the first that has the shared tokens, or that has the turn its root was split from: then it
    may come later, if its leaf was sampled later.
    """
    lines: list[_Line] = []
    owner: dict[str, int] = {}  # the first path that has a node
    for leaf in graph.nodes:
        if not graph.has_children(leaf.node_id):
            nodes = graph.path_of(leaf.node_id)
            num_shared = sum(node.node_id in owner for node in nodes)  # they are the first: ancestors are owned too
            parent = owner[nodes[num_shared - 1].node_id] if num_shared else None
            for node in nodes[num_shared:]:
                owner[node.node_id] = len(lines)
            lines.append(_Line(nodes, parent, num_shared))
    splits = _Splits(graph)
    return tuple(_path(line, *_origin(line, lines, splits, owner)) for line in lines)


def messages_of(graph: TurnGraph, node_id: str) -> tuple[Message, ...]:
    """The conversation from the root to the node's reply. Raises KeyError."""
    return tuple(chain.from_iterable((*node.observed, node.reply.message) for node in graph.path_of(node_id)))


class _Splits:
    """The split of every root. Roots that began at the same time know nothing of each other: they are told here."""

    def __init__(self, graph: TurnGraph) -> None:
        self._of_root: dict[str, Split | None] = {}
        first_with: dict[tuple[bytes, bytes], str] = {}
        for node in graph.nodes:
            if node.parent_id is None:
                prompt = node.tools_key, node.observed_ids.tobytes()
                twin = first_with.setdefault(prompt, node.node_id)
                split = node.split
                if split is None and twin != node.node_id:
                    split = Split(SplitReason.BRANCH, twin, "the same prompt was sampled more than once")
                elif split is None and self._of_root:
                    split = Split(SplitReason.NEW_CONVERSATION, None, "it began beside another conversation")
                self._of_root[node.node_id] = split

    def of(self, root: Node) -> Split | None:
        return self._of_root[root.node_id]


def _origin(
    line: _Line, lines: list[_Line], splits: _Splits, owner: dict[str, int]
) -> tuple[int | None, Split | None]:
    """The path that this one was split from, and why."""
    if line.parent is None:
        split = splits.of(line.nodes[0])
        from_node = None if split is None else split.from_node
        return (None if from_node is None else owner.get(from_node)), split
    first = line.nodes[line.num_shared]
    if first.split is not None:
        return line.parent, first.split
    # A sibling that was sampled at the same time, or that went on first and ended last.
    shared = line.nodes[: line.num_shared]
    theirs = lines[line.parent].nodes[line.num_shared]
    at = sum(len(node.observed) + 1 for node in shared)
    detail = _sibling_difference(at, theirs, first)
    return line.parent, Split(SplitReason.BRANCH, shared[-1].node_id, detail)


def _sibling_difference(at: int, theirs: Node, mine: Node) -> str:
    there, came = (*theirs.observed, theirs.reply.message), (*mine.observed, mine.reply.message)
    num_both = min(len(there), len(came))
    differs_at = next((i for i in range(num_both) if there[i] != came[i]), num_both - 1)
    return message_difference(at + differs_at, there[differs_at], came[differs_at])


def _path(line: _Line, parent: int | None, split: Split | None) -> TokenPath:
    root = line.nodes[0]
    num_prompt = len(root.observed_ids)
    ids, masks, logprobs = [], [], []
    spans: list[WeightVersionSpan] = []
    turns: list[Turn] = []
    at = num_shared_ids = 0  # offsets into the response
    for index, node in enumerate(line.nodes):
        reply = node.reply
        if index:
            ids.append(node.observed_ids)
            masks.append(np.zeros(len(node.observed_ids), np.bool_))
            logprobs.append(np.zeros(len(node.observed_ids), np.float32))
            at += len(node.observed_ids)
        end = at + len(reply.token_ids)
        ids.append(reply.token_ids)
        masks.append(np.full(end - at, index >= line.num_shared, np.bool_))
        logprobs.append(reply.logprobs)
        for span in shifted_spans(reply.weight_versions, at):
            append_span(spans, span)
        turns.append(Turn(num_prompt + at, at, end, reply.finish_reason, reply.replica_id, reply.cached_tokens))
        at = end
        if index < line.num_shared:
            num_shared_ids = num_prompt + end
    return TokenPath(
        prompt_ids=root.observed_ids,
        response_ids=np.concatenate(ids),
        response_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs),
        weight_versions=tuple(spans),
        turns=tuple(turns),
        split_reason=None if split is None else split.reason.value,
        parent=parent,
        num_shared=num_shared_ids,
        split_detail=None if split is None else split.detail,
    )
