"""HistoryIndex: every history of a session as a tree of messages, to find what a request goes on from.

A place is a history: a list of messages under one set of tools. A step from place to place is one message, known by
its canonical key. A reply that a stop string cut leads to its place by two steps, one with the stop string, because
some clients echo it. So a request can stand at several places at once; nearly always it is one.

Invariants: finding takes a dict look-up or two a message, however many turns there are; turns whose messages are
not known (raw completions) are in no place, and neither is what follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentloop.trajectory.message_key import canonical_role, message_key
from agentloop.trajectory.node import Node
from agentloop.trajectory.prefix_index import PathKey
from agentloop.types import Message

_STEP_BYTES = 165  # a key, its tuple and number, and their share of a dict
_TURN_BYTES = 300  # a dict of one path, and two entries
_NAMED_BYTES = 45  # an entry; its key is a step's
_NO_REPLY = Message("assistant")


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a request's messages are known, and the turns that it can go on from.

    `turns` are those at its deepest extensible place: one for each different path of ids, the latest.
    """

    num_known: int  # messages of the request that stand in the index, from the first on
    place: int  # where they end
    num_matched: int = 0  # messages up to the turns' replies
    turns: tuple[str, ...] = ()


class HistoryIndex:
    """The histories of one graph, under loose or strict keys."""

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self._no_reply_key = message_key(_NO_REPLY, is_strict=is_strict)
        self._starts: dict[bytes, int] = {}  # by tools, in the order they came
        self._steps: dict[tuple[int, bytes], int] = {}
        self._echoes: dict[tuple[int, bytes], tuple[int, ...]] = {}  # steps with a stop string
        self._turns: dict[int, dict[PathKey, str]] = {}  # by place
        self._place_of: dict[str, int] = {}
        self._latest: list[str] = []  # by place: the last node one of whose own messages ends there
        self._openings: dict[bytes, str] = {}  # by a root's first message after the system's: the latest root
        self._replies: dict[bytes, str] = {}  # by what was replied: the latest turn that did

    @property
    def num_bytes(self) -> int:
        """What the index takes up, without the messages themselves."""
        steps = (len(self._steps) + len(self._echoes)) * _STEP_BYTES
        named = (len(self._replies) + len(self._openings)) * _NAMED_BYTES
        return steps + named + len(self._place_of) * _TURN_BYTES + len(self._latest) * 8

    @property
    def tools(self) -> tuple[bytes, ...]:
        """The keys of all tool sets, in the order they came."""
        return tuple(self._starts)

    def add(self, node: Node, path_key: PathKey) -> None:
        """Take a node in, after its parent."""
        if not node.observed or (node.parent_id is not None and node.parent_id not in self._place_of):
            return
        place = self._start(node) if node.parent_id is None else self._place_of[node.parent_id]
        keys = self.keys(node.observed)
        for key in keys:
            place = self._step(place, key, node.node_id)
        if node.parent_id is None and (opening := opening_of(node.observed)) is not None:
            self._openings[keys[opening]] = node.node_id
        reply = node.reply.message
        reply_key = message_key(reply, is_strict=self.is_strict)
        before, place = place, self._step(place, reply_key, node.node_id)
        if reply_key != self._no_reply_key:
            self._replies[reply_key] = node.node_id
        if node.reply.stop_text:
            self._add_echo(before, place, reply_key, replace(reply, content=reply.content + node.reply.stop_text))
        self._turns.setdefault(place, {})[path_key] = node.node_id
        self._place_of[node.node_id] = place

    def keys(self, messages: Sequence[Message]) -> list[bytes]:
        """The messages' keys, as `walk` takes them."""
        return [message_key(message, is_strict=self.is_strict) for message in messages]

    def walk(self, tools: bytes, keys: Sequence[bytes], messages: Sequence[Message]) -> Walk | None:
        """Follow a request; None if nothing was ever said under these tools.

        A turn can be extended if a message follows it that is no assistant's: only that can be rendered as one.
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
                if turns:
                    return Walk(num_known, trail[-1][0], num_matched, tuple(turns.values()))
        return Walk(num_known, trail[-1][0])

    def latest_at(self, place: int) -> str:
        """The last node one of whose own messages ends at `place`, or at its root for a start."""
        return self._latest[place]

    def root_opened_by(self, key: bytes) -> str | None:
        """The latest root with this message first after the system's."""
        return self._openings.get(key)

    def turn_that_replied(self, key: bytes) -> str | None:
        """The latest turn with this reply. Empty replies are nobody's."""
        return self._replies.get(key)

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

    def _add_echo(self, before: int, place: int, reply_key: bytes, echo: Message) -> None:
        key = message_key(echo, is_strict=self.is_strict)
        known = self._echoes.get((before, key), ())
        if key != reply_key and place not in known:
            self._echoes[before, key] = (*known, place)

    def _trail(self, start: int, keys: Sequence[bytes]) -> list[Sequence[int]]:
        """The places before and after each message, as far as they are known."""
        steps, has_echoes = self._steps, bool(self._echoes)
        places: Sequence[int] = (start,)
        trail = [places]
        for key in keys:
            if has_echoes:
                places = self._following(places, key)
            else:  # as nearly always: one place leads to one
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


def opening_of(messages: Sequence[Message]) -> int | None:
    """Where the first message stands that is no system message."""
    return next((i for i, message in enumerate(messages) if canonical_role(message.role) != "system"), None)
