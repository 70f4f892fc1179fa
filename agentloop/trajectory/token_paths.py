"""The token paths of a graph for a trainer: one per leaf, each sampled token in the mask of exactly one path.

Paths may share their first tokens. These are masked in all paths but the first, which trains them. The graph
determines which tokens are shared; a node's `Split` only has the reason. The graph of a rollout has a sequence of
paths, and its last turn may be open: the `Tail`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentloop.images import ImageSpan, shifted_images
from agentloop.trajectory.diff import message_difference
from agentloop.trajectory.lineage import with_lineage
from agentloop.trajectory.node import Node, Reply, Split
from agentloop.trajectory.turn_graph import TurnGraph
from agentloop.types import (
    FloatArray,
    IntArray,
    Message,
    SplitReason,
    TokenPath,
    Turn,
    WeightVersionSpan,
    append_span,
    shifted_spans,
)
from agentloop.values.aux_rows import AuxKind, PackedRows, has_gap


@dataclass(frozen=True, slots=True)
class Tail:
    """The part of a conversation after the last node, or a root that is not a node yet.

    `observed_ids` come first, then the reply's ids. `messages` may hold more than the tokens: those after which
    nothing was sampled. `reply` is None if nothing was sampled; its message counts only if it is among `messages`.
    """

    parent_id: str | None
    messages: tuple[Message, ...]
    observed_ids: IntArray
    reply: Reply | None
    split: Split | None = None
    turn_id: str = ""  # the reply's
    images: tuple[ImageSpan, ...] = ()  # offsets into `observed_ids`


@dataclass(frozen=True, slots=True)
class _Line:
    """The nodes of a path and its tail; the first `num_shared` nodes belong to path `parent`."""

    nodes: list[Node]
    parent: int | None = None
    num_shared: int = 0
    tail: Tail | None = None

    @property
    def turns(self) -> list[tuple[str, IntArray, Reply | None]]:
        """Yield each turn's id, the ids observed before it, and the turn."""
        turns: list[tuple[str, IntArray, Reply | None]] = [
            (node.node_id, node.observed_ids, node.reply) for node in self.nodes
        ]
        return (
            turns if self.tail is None else [*turns, (self.tail.turn_id, self.tail.observed_ids, self.tail.reply)]
        )


def token_paths(
    graph: TurnGraph, tail: Tail | None = None, task_messages: Sequence[Message] = ()
) -> tuple[TokenPath, ...]:
    """Return all paths from a root to a leaf, in the order of the leaves, with their lineage.

    A path's `parent` is the first that has the shared tokens, or that has the turn its root was split from: then it
    may come later, if its leaf was sampled later. `tail` follows a leaf, or is another root. The main conversation
    begins with `task_messages`, if there are any.
    """
    lines: list[_Line] = []
    owner: dict[str, int] = {}  # the first path that has a node
    for leaf in graph.nodes:
        if not graph.has_children(leaf.node_id):
            nodes = graph.path_of(leaf.node_id)
            # These are the first nodes, because their ancestors are owned too.
            num_shared = sum(node.node_id in owner for node in nodes)
            parent = owner[nodes[num_shared - 1].node_id] if num_shared else None
            for node in nodes[num_shared:]:
                owner[node.node_id] = len(lines)
            is_continued = tail is not None and tail.parent_id == leaf.node_id
            lines.append(_Line(nodes, parent, num_shared, tail if is_continued else None))
    if tail is not None and tail.parent_id is None:
        lines.append(_Line([], tail=tail))
    splits = _Splits(graph)
    paths = [_path(line, *_origin(line, lines, splits, owner)) for line in lines]
    return with_lineage(paths, graph.nodes, task_messages)


def masked(path: TokenPath, is_out: Callable[[int], bool]) -> TokenPath:
    """Return the path with the tokens of some weight versions masked; ids, logprobs and spans stay."""
    mask = path.response_mask.copy()
    for span in path.weight_versions:
        if is_out(span.version):
            mask[span.start : span.end] = False
    return replace(path, response_mask=mask)


class _Splits:
    """The split of every root. Concurrent roots were created without a reference to each other; it is set here."""

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

    def of(self, line: _Line) -> Split | None:
        if line.nodes:
            return self._of_root[line.nodes[0].node_id]
        return None if line.tail is None else line.tail.split


def _origin(
    line: _Line, lines: list[_Line], splits: _Splits, owner: dict[str, int]
) -> tuple[int | None, Split | None]:
    """Return the path that this path branches from, and the reason."""
    if line.parent is None:
        split = splits.of(line)
        from_node = None if split is None else split.from_node
        return (None if from_node is None else owner.get(from_node)), split
    first = line.nodes[line.num_shared]
    if first.split is not None:
        return line.parent, first.split
    # A concurrent sibling, or one that continued first and ended last.
    shared = line.nodes[: line.num_shared]
    theirs = lines[line.parent].nodes[line.num_shared]
    at = sum(len(node.observed) + 1 for node in shared)
    detail = _sibling_difference(at, theirs, first)
    return line.parent, Split(SplitReason.BRANCH, shared[-1].node_id, detail)


def _sibling_difference(at: int, theirs: Node, mine: Node) -> str:
    there, came = theirs.messages, mine.messages
    num_both = min(len(there), len(came))
    differs_at = next((i for i in range(num_both) if there[i] != came[i]), num_both - 1)
    return message_difference(at + differs_at, there[differs_at], came[differs_at])


def _path(line: _Line, parent: int | None, split: Split | None) -> TokenPath:
    _, prompt_ids, _ = line.turns[0]
    num_prompt = len(prompt_ids)
    ids: list[IntArray] = [np.empty(0, np.int32)]  # the response's, possibly empty
    masks, logprobs = [np.empty(0, np.bool_)], [np.empty(0, np.float32)]
    spans: list[WeightVersionSpan] = []
    turns: list[Turn] = []
    at = num_shared_ids = 0  # offsets into the response
    for index, (turn_id, observed_ids, reply) in enumerate(line.turns):
        if index:
            ids.append(observed_ids)
            masks.append(np.zeros(len(observed_ids), np.bool_))
            logprobs.append(np.zeros(len(observed_ids), np.float32))
            at += len(observed_ids)
        if reply is None:
            break
        end = at + len(reply.token_ids)
        ids.append(reply.token_ids)
        masks.append(np.full(end - at, index >= line.num_shared, np.bool_))
        logprobs.append(reply.logprobs)
        for span in shifted_spans(reply.weight_versions, at):
            append_span(spans, span)
        turns.append(_turn(turn_id, reply, num_prompt + at, at))
        at = end
        if index < line.num_shared:
            num_shared_ids = num_prompt + end
    response_ids = np.concatenate(ids)
    return TokenPath(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs),
        weight_versions=tuple(spans),
        turns=tuple(turns),
        split_reason=None if split is None else split.reason,
        parent=parent,
        num_shared=num_shared_ids,
        split_detail=None if split is None else split.detail,
        messages=_messages(line),
        images=_images(line),
        raw_logprobs=_raw_logprobs(line, turns, len(response_ids)),
        aux=_aux(line),
    )


def _images(line: _Line) -> tuple[ImageSpan, ...]:
    images = [node.images for node in line.nodes] + ([] if line.tail is None else [line.tail.images])
    if not any(images):
        return ()
    found: list[ImageSpan] = []
    num_ids = 0
    for spans, (_, observed_ids, reply) in zip(images, line.turns, strict=True):
        found += shifted_images(spans, num_ids)
        num_ids += len(observed_ids) + (0 if reply is None else len(reply.token_ids))
    return tuple(found)


def _turn(turn_id: str, reply: Reply, prompt_len: int, start: int) -> Turn:
    return Turn(
        prompt_len,
        start,
        start + len(reply.token_ids),
        reply.finish_reason,
        reply.replica_id,
        reply.cached_tokens,
        turn_id,
        sampling=reply.sampling,
        seed=reply.seed,
        engine=reply.engine,
        times=reply.times,
        traceparent=reply.traceparent,
        quantization=reply.quantization,
    )


def _raw_logprobs(line: _Line, turns: Sequence[Turn], num_tokens: int) -> FloatArray | None:
    """Return `TokenPath.raw_logprobs` of a response."""
    replies = [reply for _, _, reply in line.turns if reply is not None]
    if all(reply.raw_logprobs is None for reply in replies):
        return None
    raw_logprobs = np.zeros(num_tokens, np.float32)
    for turn, reply in zip(turns, replies, strict=True):
        raw_logprobs[turn.start : turn.end] = np.nan if reply.raw_logprobs is None else reply.raw_logprobs
    return raw_logprobs


def _aux(line: _Line) -> dict[AuxKind, tuple[PackedRows, ...]] | None:
    """Return `TokenPath.aux` of a response."""
    replies = [reply for _, _, reply in line.turns if reply is not None and len(reply.token_ids)]
    found = {}
    for kind in AuxKind:
        rows = [reply.aux[kind] for reply in replies if reply.aux is not None and kind in reply.aux]
        # A session's first turns may be older than the engine's setting: a gap makes the kind absent, not zero.
        is_complete = kind is not AuxKind.ROUTED_EXPERTS or not has_gap(rows)
        if rows and len(rows) == len(replies) and is_complete:
            found[kind] = tuple(rows)
    return found or None


def _messages(line: _Line) -> tuple[Message, ...]:
    messages = [message for node in line.nodes for message in node.messages]
    return tuple(messages) if line.tail is None else (*messages, *line.tail.messages)
