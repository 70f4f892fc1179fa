"""The histories of a session as a tree of messages, which finds the turn that a request continues.

A place of the tree is a history: a list of messages with one set of tools. Each edge is a message, identified by
its canonical key. A reply that ended at a stop string has two edges, because some clients echo the stop string; so
a request may be at several places, though nearly always at one. Turns with equal messages end at the same place:
the client's echo of call ids distinguishes them, and if their tokens differ, so does its echo of reasoning.

A search takes one or two dict lookups per message, regardless of the number of turns. Turns without messages (raw
completions) and their descendants are not in the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from agentloop.trajectory.diff import MAX_DETAIL_CHARS
from agentloop.trajectory.node import Node, canonical_role, message_key, tools_key
from agentloop.trajectory.prefix_index import PathKey
from agentloop.types import JSON, Message

_NO_REPLY = Message("assistant")
_MAX_TOOL_SETS = 8  # kept per session, for the description of a change
_MAX_TOOL_NAMES = 4  # names per kind in a description
_MAX_TOOL_NAME_CHARS = 24
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Walk:
    """The known part of a request, and the turns that it can extend.

    `turns` are the turns at the deepest place that can be extended: the latest for each different path of ids.
    """

    num_known: int  # the first messages of the request that are in the index
    place: int  # the place after them
    num_matched: int = 0  # number of messages up to the turns' replies
    turns: tuple[str, ...] = ()


class HistoryIndex:
    """The histories of one graph, under loose or strict keys."""

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self._no_reply_key = message_key(_NO_REPLY, is_strict=is_strict)
        self._starts: dict[bytes, int] = {}  # by tools, in the order of their first use
        self._steps: dict[tuple[int, bytes], int] = {}
        self._echoes: dict[tuple[int, bytes], tuple[int, ...]] = {}  # edges with a stop string
        self._turns: dict[int, dict[PathKey, str]] = {}  # by place
        # By place at which turns with equal ids end: the turns by the digest of all call ids so far.
        self._by_calls: dict[int, dict[bytes, dict[PathKey, str]]] = {}
        self._calls_of: dict[str, bytes] = {}  # this digest of every turn
        self._place_of: dict[str, int] = {}
        self._latest: list[str] = []  # by place: the last node with an own message there
        # The latest root by the key of its first message that is not a system message.
        self.openings: dict[bytes, str] = {}
        self.replies: dict[bytes, str] = {}  # the latest turn by the key of its non-empty reply

    @property
    def tools(self) -> tuple[bytes, ...]:
        """The keys of all tool sets, in the order of their first use."""
        return tuple(self._starts)

    def add(self, node: Node, path_key: PathKey) -> None:
        """Add a node, after its parent."""
        if not node.observed or (node.parent_id is not None and node.parent_id not in self._place_of):
            return
        place = self._start(node) if node.parent_id is None else self._place_of[node.parent_id]
        keys = self.keys(node.observed)
        for key in keys:
            place = self._step(place, key, node.node_id)
        if node.parent_id is None and (opening := opening_of(node.observed)) is not None:
            self.openings[keys[opening]] = node.node_id
        reply = node.message
        reply_key = message_key(reply, is_strict=self.is_strict)
        before, place = place, self._step(place, reply_key, node.node_id)
        if reply_key != self._no_reply_key:
            self.replies[reply_key] = node.node_id
        if node.reply.stop_text:
            self._add_echo(before, place, reply_key, replace(reply, content=reply.content + node.reply.stop_text))
        self._place_of[node.node_id] = place
        before_calls = b"" if node.parent_id is None else self._calls_of[node.parent_id]
        self._calls_of[node.node_id] = _calls_digest(node.messages, before_calls)
        self._add_turn(node.node_id, place, path_key)

    def keys(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the messages' keys, for `walk`."""
        return [message_key(message, is_strict=self.is_strict) for message in messages]

    def walk(self, tools: bytes, keys: Sequence[bytes], messages: Sequence[Message]) -> Walk | None:
        """Follow a request's messages; returns None if no turn has these tools.

        A turn can be extended if the next message is not an assistant's: only other messages can follow a reply.
        """
        if tools not in self._starts:
            return None
        trail = self._trail(self._starts[tools], keys)
        num_known = len(trail) - 1
        for num_matched in range(min(num_known, len(messages) - 1), 0, -1):
            if canonical_role(messages[num_matched].role) != "assistant":
                turns: dict[PathKey, str] = {}
                for place in trail[num_matched]:
                    turns.update(self._turns.get(place, {}))
                if any(place in self._by_calls for place in trail[num_matched]):
                    turns = self._named_turns(trail[num_matched], messages[:num_matched]) or turns
                if turns:
                    return Walk(num_known, trail[-1][0], num_matched, tuple(turns.values()))
        return Walk(num_known, trail[-1][0])

    def latest_at(self, place: int) -> str:
        """Return the last node with an own message that ends at `place`, or at its root for a start."""
        return self._latest[place]

    def _start(self, node: Node) -> int:
        if node.tools_key not in self._starts:
            self._starts[node.tools_key] = len(self._latest)
            self._latest.append(node.node_id)
        start = self._starts[node.tools_key]
        self._latest[start] = node.node_id
        return start

    def _step(self, place: int, key: bytes, node_id: str) -> int:
        following = self._steps.get((place, key))
        if following is None:
            following = self._steps[place, key] = len(self._latest)
            self._latest.append(node_id)
        self._latest[following] = node_id
        return following

    def _add_turn(self, node_id: str, place: int, path_key: PathKey) -> None:
        turns = self._turns.setdefault(place, {})
        if path_key in turns and place not in self._by_calls:
            self._by_calls[place] = {}
            for known_key, known_id in turns.items():
                self._by_calls[place].setdefault(self._calls_of[known_id], {})[known_key] = known_id
        turns[path_key] = node_id
        if (by_calls := self._by_calls.get(place)) is not None:
            by_calls.setdefault(self._calls_of[node_id], {})[path_key] = node_id

    def _named_turns(self, places: Sequence[int], messages: Sequence[Message]) -> dict[PathKey, str]:
        """Return the turns at these places whose call ids are all echoed by the messages."""
        digest = _calls_digest(messages, b"")
        turns: dict[PathKey, str] = {}
        for place in places:
            turns.update(self._by_calls.get(place, {}).get(digest, {}))
        return turns

    def _add_echo(self, before: int, place: int, reply_key: bytes, echo: Message) -> None:
        key = message_key(echo, is_strict=self.is_strict)
        known = self._echoes.get((before, key), ())
        if key != reply_key and place not in known:
            self._echoes[before, key] = (*known, place)

    def _trail(self, start: int, keys: Sequence[bytes]) -> list[Sequence[int]]:
        """Return the places before and after each known message."""
        steps, has_echoes = self._steps, bool(self._echoes)
        places: Sequence[int] = (start,)
        trail = [places]
        for key in keys:
            if has_echoes:
                places = self._following(places, key)
            else:  # nearly always: one place, one edge
                place = steps.get((places[0], key))
                places = () if place is None else (place,)
            if not places:
                break
            trail.append(places)
        return trail

    def _following(self, places: Sequence[int], key: bytes) -> list[int]:
        found = []
        for place in places:
            if (following := self._steps.get((place, key))) is not None:
                found.append(following)
            if (echoed := self._echoes.get((place, key))) is not None:
                found += echoed
        return found


def _calls_digest(messages: Sequence[Message], before: bytes) -> bytes:
    """Return the digest of call ids, continued from the digest `before` of earlier messages."""
    for message in messages:
        if message.tool_calls:
            ids = "\n".join(call.id for call in message.tool_calls).encode("utf-8", "surrogatepass")
            before = blake2b(before + ids, digest_size=_DIGEST_BYTES).digest()
    return before


def opening_of(messages: Sequence[Message]) -> int | None:
    """Return the index of the first message that is not a system message, or None."""
    return next((i for i, message in enumerate(messages) if canonical_role(message.role) != "system"), None)


@dataclass(slots=True)
class _Candidate:
    turn: Node
    at: Node | None  # the compared ancestor, first the turn itself; None after the root
    end: int  # messages of the path up to its reply
    is_supported: bool = False


def disambiguate(
    turns: Sequence[Node], num_matched: int, messages: Sequence[Message], nodes: Mapping[str, Node]
) -> list[Node]:
    """Return the turns that agree with the client's echo of call ids and reasoning; all if it supports none.

    A turn is dropped if the echo contradicts a call id or the reasoning of a reply that not all turns share. The
    remaining turn counts only if the echo supports it: a client that echoes neither does not decide.
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
    """Compare one reply and step to the previous one. Returns False if the echo contradicts the reply."""
    node = candidate.at
    if node is None:
        return True
    said, echoed = node.message, messages[candidate.end - 1]
    pairs = [(call.id, echo.id) for call, echo in zip(said.tool_calls, echoed.tool_calls, strict=True)]
    pairs.append((said.reasoning.strip(), echoed.reasoning.strip()))
    if any(echo and echo != mine for mine, echo in pairs):
        return False
    candidate.is_supported |= any(echo for _, echo in pairs)
    candidate.end -= len(node.observed) + 1
    candidate.at = None if node.parent_id is None else nodes[node.parent_id]
    return True


class ToolSets:
    """The latest tool sets of requests, by their keys: for each tool its name and a digest.

    After a restore it is empty until requests name tools again.
    """

    def __init__(self) -> None:
        self._sets: OrderedDict[bytes, dict[str, bytes]] = OrderedDict()

    def note(self, key: bytes, tools: Sequence[Mapping[str, JSON]]) -> None:
        """Record a request's tool set; drops the least recently used set if there are too many."""
        if key in self._sets:
            self._sets.move_to_end(key)
            return
        self._sets[key] = {_tool_name(tool): tools_key([tool]) for tool in tools}
        if len(self._sets) > _MAX_TOOL_SETS:
            self._sets.popitem(last=False)

    def difference(self, there: bytes, came: bytes) -> str:
        """Describe the tools that only one of two sets has."""
        new = self._sets.get(came, {})
        if there not in self._sets and there:
            return f"tools: other definitions were there, {_listed(new)} came"[:MAX_DETAIL_CHARS]
        old = self._sets.get(there, {})
        changes = (
            ("added", [name for name in new if name not in old]),
            ("removed", [name for name in old if name not in new]),
            ("changed", [name for name in new if name in old and new[name] != old[name]]),
        )
        shown = [f"{_listed(names)} {change}" for change, names in changes if names]
        return f"tools: {', '.join(shown) or 'their order changed'}"[:MAX_DETAIL_CHARS]


def _tool_name(tool: Mapping[str, JSON]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
    return str(name)[:_MAX_TOOL_NAME_CHARS]


def _listed(names: Sequence[str] | Mapping[str, bytes]) -> str:
    shown = " ".join(list(names)[:_MAX_TOOL_NAMES]) or "none"
    return shown if len(names) <= _MAX_TOOL_NAMES else f"{shown} and {len(names) - _MAX_TOOL_NAMES} more"
