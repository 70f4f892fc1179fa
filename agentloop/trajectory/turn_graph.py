"""TurnGraph: the turns of a trajectory as a graph, which finds the turn that a request continues.

The graph owns the nodes of a session or a rollout, and is used by one thread. Invariants, checked when a node is
added (InvariantBroken otherwise): its parent exists; one logprob per sampled id; spans tile the ids. Nodes are
never changed or removed. Requests are matched by messages, or by ids for raw completions, and nothing is tokenized
again. A match takes time proportional to the request. New nodes are indexed at the next match, so rollouts, which
match nothing, have no index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentloop.errors import InvalidRequest, InvariantBroken
from agentloop.images import ImageSpan, shifted_images
from agentloop.trajectory.diff import MAX_DETAIL_CHARS, Decode, message_difference, token_difference
from agentloop.trajectory.history_match import HistoryIndex, ToolSets, Walk, disambiguate, opening_of
from agentloop.trajectory.node import Node, Reply, Split, message_chars
from agentloop.trajectory.node import tools_key as key_of_tools
from agentloop.trajectory.prefix_index import PrefixIndex, path_ids
from agentloop.types import JSON, IntArray, Message, SplitReason, tiling_problem
from agentloop.values.aux_rows import routes_from
from agentloop.values.sampling import shared

# The memory of a graph, measured by `tests/trajectory/test_prefix_index.py`.
BYTES_PER_TOKEN = 8  # an id, and a logprob for sampled tokens
BYTES_PER_RAW_LOGPROB = 4
BYTES_PER_ALTERNATIVE = 120  # a pair of two numbers
BYTES_PER_CHAR = 2
BYTES_PER_TURN = 2000  # the node, its arrays and index entries

_MAX_OTHER_TOOLS = 4  # the latest tool sets, searched to find that only the tools changed


@dataclass(frozen=True, slots=True)
class Match:
    """The turn that a request extends (`parent`, with the messages `appended`); None for a new root.

    `echoed` is the turn whose history a new root repeats with other tools.
    """

    parent: Node | None
    appended: tuple[Message, ...]
    split: Split | None
    tools_key: bytes = b""  # the request's
    echoed: Node | None = None


class TurnGraph:
    """The turns of a session or a rollout. `add` takes nodes in the order of their commits."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._last_child: dict[str, str] = {}
        self._num_path_tokens: dict[str, int] = {}  # by node: tokens of its path, with its reply
        self._num_aux_bytes = 0
        self._num_tokens = self._num_chars = self._num_alternatives = self._num_raw = 0
        self._constraints: dict[str, str] = {}
        self.parent_agents: dict[str, str] = {}  # declared, by agent; read-only for other classes
        self._not_indexed: list[Node] = []  # added since the last match
        self._prefixes = PrefixIndex(self._nodes)
        self._num_messages: dict[str, int] = {}  # on a node's path, with its reply
        self._loose = HistoryIndex(is_strict=False)
        self._strict: HistoryIndex | None = None  # created by the first strict call
        self._tool_sets = ToolSets()

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes in the order of their addition, as a copy."""
        return tuple(self._nodes.values())

    @property
    def num_turns(self) -> int:
        return len(self._nodes)

    @property
    def last(self) -> Node | None:
        return self._nodes[next(reversed(self._nodes))] if self._nodes else None

    @property
    def num_tokens(self) -> int:
        """The number of observed and sampled tokens of all nodes, each counted once."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """A rough upper estimate of the graph's memory in bytes, with its indexes."""
        return (
            self._num_tokens * BYTES_PER_TOKEN
            + self._num_alternatives * BYTES_PER_ALTERNATIVE
            + self._num_raw * BYTES_PER_RAW_LOGPROB
            + self._num_aux_bytes
            + self._num_chars * BYTES_PER_CHAR
            + len(self._nodes) * BYTES_PER_TURN
        )

    @property
    def constraints(self) -> Mapping[str, str]:
        """The long constraints of the turns, by their digests."""
        return self._constraints

    def told_once(self, reply: Reply) -> Reply:
        """Return the reply, without its constraint if an earlier turn has it."""
        if reply.constraint and reply.sampling and reply.sampling.constraint_digest in self._constraints:
            return replace(reply, constraint="")
        return reply

    def has_turn(self, node_id: object) -> bool:
        return node_id in self._nodes

    def node(self, node_id: str) -> Node:
        """Return the node of this id. Raises KeyError."""
        return self._nodes[node_id]

    def context_ids(self, node_id: str) -> tuple[int, ...]:
        """Return the ids up to the end of the node's reply, with which the next prompt begins. Raises KeyError."""
        return tuple(path_ids(self._nodes, node_id).tolist())

    def context_images(self, node_id: str) -> tuple[ImageSpan, ...]:
        """Return the images of the node's path; offsets are into `context_ids`. Raises KeyError."""
        spans: list[ImageSpan] = []
        num_ids = 0
        for node in self.path_of(node_id):
            spans += shifted_images(node.images, num_ids)
            num_ids += len(node.observed_ids) + len(node.reply.token_ids)
        return tuple(spans)

    def add(self, node: Node) -> None:
        """Add a turn. Raises InvariantBroken for an unknown parent, a known id, and arrays that are not aligned."""
        if node.node_id in self._nodes:
            raise InvariantBroken(f"there is a turn {node.node_id} already")
        if node.parent_id is not None and node.parent_id not in self._nodes:
            raise InvariantBroken(f"turn {node.node_id} follows {node.parent_id}, which is not there")
        num_known = 0 if node.parent_id is None else self._num_path_tokens[node.parent_id]
        num_prompt = num_known + len(node.observed_ids)
        check_reply(node.reply, node.node_id, num_known, num_prompt)
        self._num_path_tokens[node.node_id] = num_prompt + len(node.reply.token_ids)
        sampling = node.reply.sampling
        if sampling is not None and shared(sampling) is not sampling:  # the node was read from disk
            node = replace(node, reply=replace(node.reply, sampling=shared(sampling)))
        self._nodes[node.node_id] = node
        if node.parent_id is not None:
            self._last_child[node.parent_id] = node.node_id
        reply = node.reply
        self._num_tokens += len(node.observed_ids) + len(reply.token_ids)
        self._num_alternatives += sum(map(len, reply.top_logprobs))
        self._num_raw += 0 if reply.raw_logprobs is None else len(reply.raw_logprobs)
        self._num_aux_bytes += sum(len(rows.frame) for rows in (reply.aux or {}).values())
        self._num_chars += sum(map(message_chars, node.messages))
        if reply.constraint and reply.sampling is not None:
            self._num_chars += len(reply.constraint)
            self._constraints[reply.sampling.constraint_digest] = reply.constraint
        if node.declaration is not None and node.declaration.parent_agent is not None:
            self.parent_agents[node.declaration.agent] = node.declaration.parent_agent
        self._not_indexed.append(node)

    def match(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        *,
        is_strict: bool = False,
        keys: Sequence[bytes] = (),
        tools_key: bytes | None = None,
    ) -> Match:
        """Find the deepest turn whose whole history a request echoes under the same tools.

        `keys` are the messages' loose keys and `tools_key` the tools' key, if the caller has them. Does not affect
        later matches. Raises InvalidRequest for no messages, and for arguments that are nested too deeply.
        """
        if not messages:
            raise InvalidRequest("'messages' is empty: send at least one message", param="messages")
        known_tools = key_of_tools(tools) if tools_key is None else tools_key
        self._tool_sets.note(known_tools, tools)
        if not self._nodes:
            return Match(None, tuple(messages), None, known_tools)
        index = self._index(is_strict)
        if is_strict or len(keys) != len(messages):
            keys = index.keys(messages)
        walk = index.walk(known_tools, keys, messages)
        if walk is None or not walk.turns:
            split = self._split_of_root(index, known_tools, keys, messages, walk)
            echoed = None
            if split.reason is SplitReason.TOOLS_CHANGED and split.from_node is not None:
                echoed = self._echoed(index, split.from_node, keys)
            return Match(None, tuple(messages), split, known_tools, echoed)
        turns = [self._nodes[turn] for turn in walk.turns]
        if len(turns) > 1:
            turns = disambiguate(turns, walk.num_matched, messages, self._nodes)
        if len(turns) > 1:
            names = " and ".join(turn.node_id for turn in turns[-2:])
            detail = (
                f"messages[:{walk.num_matched}] match turns {names}, whose text is equal and whose tokens differ"
            )
            split = Split(SplitReason.AMBIGUOUS, turns[-1].node_id, detail[:MAX_DETAIL_CHARS])
            return Match(None, tuple(messages), split, known_tools)
        appended = tuple(messages[walk.num_matched :])
        child_split = self._split_of_child(index, turns[0], appended, messages, walk)
        return Match(turns[0], appended, child_split, known_tools)

    def match_ids(
        self, prompt_ids: Sequence[int], *, decode: Decode | None = None
    ) -> tuple[Node | None, tuple[int, ...], Split | None]:
        """Find the turn that a prompt of token ids extends. Returns (turn, new ids, split).

        A prompt extends a turn if it begins with all tokens of the conversation through the end of that turn.
        Returns the turn with the most tokens, or None if the prompt extends no turn. The split is the reason for a
        new branch or root, with the text of the first difference if `decode` is given; None if the prompt extends
        the end of a branch. All ids must be below 2**31.
        """
        if not self._nodes:
            return None, tuple(prompt_ids), None
        self._index_new_nodes()
        prompt = np.array(prompt_ids, dtype=np.int32)
        found = self._prefixes.find(prompt)
        if found.path_of is not None:
            num_shared = self._prefixes.path_key(found.path_of)[0]
            child = self._last_child.get(found.path_of)
            split = None
            if child is not None:
                split = self._token_split(SplitReason.BRANCH, found.path_of, child, prompt, decode)
            return self._nodes[found.path_of], tuple(prompt_ids[num_shared:]), split
        if found.prompt_of is None:
            latest = next(reversed(self._nodes))
            detail = token_difference(path_ids(self._nodes, latest), prompt, decode)
            return None, tuple(prompt_ids), Split(SplitReason.NEW_CONVERSATION, None, detail)
        num_prompt = self._prefixes.path_key(found.prompt_of)[0] - len(self._nodes[found.prompt_of].reply.token_ids)
        reason = SplitReason.BRANCH if num_prompt == len(prompt) else SplitReason.HISTORY_EDIT
        split = self._token_split(reason, found.prompt_of, found.prompt_of, prompt, decode)
        return None, tuple(prompt_ids), split

    def mark_template_split(
        self, parent_id: str, prompt_ids: Sequence[int], decode: Decode | None = None, *, cause: str = ""
    ) -> Split | None:
        """Return the split of a whole prompt rendered after `parent_id`; None if it begins with the parent's path.

        `cause` is the reason for rendering the whole prompt. The graph does not change.
        """
        prompt = np.array(prompt_ids, dtype=np.int32)
        path = path_ids(self._nodes, parent_id)
        if np.array_equal(prompt[: len(path)], path):
            return None
        return self._token_split(SplitReason.TEMPLATE, parent_id, parent_id, prompt, decode, cause)

    def path_of(self, node_id: str) -> list[Node]:
        """Return the nodes from the root to `node_id`. Raises KeyError."""
        path = [self._nodes[node_id]]
        while (parent_id := path[-1].parent_id) is not None:
            path.append(self._nodes[parent_id])
        return path[::-1]

    def has_children(self, node_id: str) -> bool:
        """Return True if the turn `node_id` has child turns."""
        return node_id in self._last_child

    def _index(self, is_strict: bool) -> HistoryIndex:
        self._index_new_nodes()
        if not is_strict:
            return self._loose
        if self._strict is None:
            self._strict = HistoryIndex(is_strict=True)
            for node in self._nodes.values():
                self._strict.add(node, self._prefixes.path_key(node.node_id))
        return self._strict

    def _index_new_nodes(self) -> None:
        for node in self._not_indexed:
            path_key = self._prefixes.add(node)
            before = 0 if node.parent_id is None else self._num_messages[node.parent_id]
            self._num_messages[node.node_id] = before + len(node.observed) + 1
            self._loose.add(node, path_key)
            if self._strict is not None:
                self._strict.add(node, path_key)
        self._not_indexed.clear()

    def _split_of_child(
        self,
        index: HistoryIndex,
        parent: Node,
        appended: Sequence[Message],
        messages: Sequence[Message],
        walk: Walk,
    ) -> Split | None:
        child = self._last_child.get(parent.node_id)
        if child is None:
            return None
        # An assistant message that the session did not sample means that the client has rewritten the history.
        is_edited = any(message.role == "assistant" for message in appended)
        nearest = index.latest_at(walk.place) if walk.num_known > walk.num_matched else child
        detail = self._difference(index, nearest, walk.num_known, messages)
        reason = SplitReason.HISTORY_EDIT if is_edited else SplitReason.BRANCH
        return Split(reason, parent.node_id, detail)

    def _split_of_root(
        self,
        index: HistoryIndex,
        tools: bytes,
        keys: Sequence[bytes],
        messages: Sequence[Message],
        walk: Walk | None,
    ) -> Split:
        """Return the reason why a request starts a new root; the graph is not empty."""
        opening = opening_of(messages)
        num_known = 0 if walk is None else walk.num_known
        if walk is not None and num_known == len(messages):
            # All messages are known: the request is repeated, or it ends with a known reply.
            is_answered = messages[-1].role == "assistant"
            nearest = index.latest_at(walk.place)
            detail = self._difference(index, nearest, num_known, messages)
            return Split(SplitReason.HISTORY_EDIT if is_answered else SplitReason.BRANCH, nearest, detail)
        if (other := self._under_other_tools(index, tools, keys, messages)) is not None:
            known_tools = self._root_of(other).tools_key
            return Split(SplitReason.TOOLS_CHANGED, other, self._tool_sets.difference(known_tools, tools))
        if walk is not None and opening is not None and num_known > opening:
            nearest = index.latest_at(walk.place)
            return Split(SplitReason.HISTORY_EDIT, nearest, self._difference(index, nearest, num_known, messages))
        echoes = (keys[at] for at in range(len(messages) - 1, -1, -1) if messages[at].role == "assistant")
        echoed = next((turn for key in echoes if (turn := index.replies.get(key)) is not None), None)
        if opening is not None and (root := index.openings.get(keys[opening])) is not None:
            # Several conversations may have this opening: the one of an echoed reply is continued.
            if echoed is not None and self._opening_key(index, echoed) == keys[opening]:
                root = echoed
            differs_at = self._num_common(index, root, keys)
            reason = SplitReason.SYSTEM_CHANGED if differs_at <= opening else SplitReason.HISTORY_EDIT
            return Split(reason, root, self._difference(index, root, differs_at, messages))
        if echoed is not None:
            differs_at = self._num_common(index, echoed, keys)
            return Split(SplitReason.HISTORY_EDIT, echoed, self._difference(index, echoed, differs_at, messages))
        latest = next(reversed(self._nodes))
        differs_at = self._num_common(index, latest, keys)
        return Split(SplitReason.NEW_CONVERSATION, None, self._difference(index, latest, differs_at, messages))

    def _under_other_tools(
        self, index: HistoryIndex, tools: bytes, keys: Sequence[bytes], messages: Sequence[Message]
    ) -> str | None:
        """Return a turn that the request would continue or repeat if its tools were equal."""
        others = [known for known in index.tools if known != tools][-_MAX_OTHER_TOOLS:]
        for other in reversed(others):
            walk = index.walk(other, keys, messages)
            if walk is not None and walk.turns:
                return walk.turns[-1]
            if walk is not None and walk.num_known == len(messages):
                return index.latest_at(walk.place)
        return None

    def _echoed(self, index: HistoryIndex, node_id: str, keys: Sequence[bytes]) -> Node | None:
        """Return the node if a request with other tools contains its whole path."""
        num_path = self._num_messages[node_id]
        return self._nodes[node_id] if self._num_common(index, node_id, keys[:num_path]) == num_path else None

    def _difference(self, index: HistoryIndex, node_id: str, at: int, messages: Sequence[Message]) -> str:
        there = self._message_at(node_id, at)
        came = messages[at] if at < len(messages) else None
        if there is None and came is None:
            return f"messages[{at - 1}]: a reply was echoed, and nothing that answers it"
        return message_difference(at, there, came, is_strict=index.is_strict)

    def _message_at(self, node_id: str, at: int) -> Message | None:
        """Return message `at` of the node's path, or the first message after the path."""
        if at >= self._num_messages[node_id]:
            child = self._last_child.get(node_id)
            return None if child is None else self._nodes[child].messages[0]
        node = self._nodes[node_id]
        while (start := self._num_messages[node.node_id] - len(node.observed) - 1) > at and node.parent_id:
            node = self._nodes[node.parent_id]
        return node.messages[at - start]

    def _num_common(self, index: HistoryIndex, node_id: str, keys: Sequence[bytes]) -> int:
        """Return the number of first messages that the request and the node's path share."""
        num_common = 0
        for node in self.path_of(node_id):
            for key in index.keys(node.messages):
                if num_common == len(keys) or keys[num_common] != key:
                    return num_common
                num_common += 1
        return num_common

    def _token_split(
        self,
        reason: SplitReason,
        from_node: str,
        nearest: str,
        prompt: IntArray,
        decode: Decode | None,
        cause: str = "",
    ) -> Split:
        return Split(reason, from_node, token_difference(path_ids(self._nodes, nearest), prompt, decode, cause))

    def _opening_key(self, index: HistoryIndex, node_id: str) -> bytes | None:
        observed = self._root_of(node_id).observed
        opening = opening_of(observed)
        return None if opening is None else index.keys([observed[opening]])[0]

    def _root_of(self, node_id: str) -> Node:
        return self.path_of(node_id)[0]


def check_reply(reply: Reply, node_id: str, num_known: int, num_prompt: int) -> None:
    """Raise InvariantBroken if a node's reply is not aligned.

    `num_prompt` is the number of tokens before the reply, of which the first `num_known` are those of its parent's
    path.
    """
    num_ids = len(reply.token_ids)
    if len(reply.logprobs) != num_ids:
        raise InvariantBroken(f"turn {node_id} has {len(reply.logprobs)} logprobs for {num_ids} ids")
    if reply.raw_logprobs is not None and len(reply.raw_logprobs) != num_ids:
        raise InvariantBroken(f"turn {node_id} has {len(reply.raw_logprobs)} raw logprobs for {num_ids} ids")
    if reply.top_logprobs and len(reply.top_logprobs) != num_ids:
        raise InvariantBroken(f"turn {node_id} has alternatives for {len(reply.top_logprobs)} of {num_ids} ids")
    if (problem := tiling_problem(reply.weight_versions, num_ids)) is not None:
        raise InvariantBroken(f"turn {node_id}: {problem}")
    for kind, rows in (reply.aux or {}).items():
        first, end = kind.span(routes_from(num_known), num_prompt, num_ids)
        if (rows.start, rows.end) != (first, end):
            raise InvariantBroken(
                f"turn {node_id}: {kind} has the positions [{rows.start}, {rows.end}) and not [{first}, {end})"
            )
