"""The lineage of a trajectory's token paths, which determines the paths that its reward is for.

Paths that continue each other's history are one conversation. A conversation has a parent if the client declared
one, or if a prompt quotes a sampled reply of another conversation whole (`quotes`). Any other conversation is
unrelated to the final answer. docs/guides/lineage.md describes the rules and their limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from agentloop.trajectory.node import Declaration, Node
from agentloop.trajectory.quotes import Quote, find_quotes
from agentloop.types import Lineage, Message, PathKind, SplitReason, TokenPath

_NOT_DECLARED = Declaration()


def with_lineage(
    paths: Sequence[TokenPath], nodes: Sequence[Node], task_messages: Sequence[Message] = ()
) -> tuple[TokenPath, ...]:
    """Return the paths with their `lineage`. `nodes` are the turns of the trajectory in the order of their commits.

    The main conversation begins with `task_messages`, if there are any. Otherwise it is the one without a parent
    that has, together with the conversations that compact it, the most turns, then the most sampled tokens, then
    the first start.
    """
    if len(paths) < 2:
        return tuple(paths)
    return _Lineages(paths, nodes).linked_paths(task_messages)


@dataclass(slots=True, eq=False)
class _AgentPaths:
    """Paths that continue each other. Turns are numbered in the order of their commits."""

    places: list[int]  # indices of its paths
    begin: int  # the path with which it begins
    first: int  # number of its first turn
    last: int  # number of its last turn
    is_single_turn: bool
    declaration: Declaration = _NOT_DECLARED
    link: Lineage | None = None


class _Lineages:
    """The conversations of one trajectory and their links."""

    def __init__(self, paths: Sequence[TokenPath], nodes: Sequence[Node]) -> None:
        self._paths = paths
        self._nodes = nodes
        self._number = {node.node_id: number for number, node in enumerate(nodes)}
        self._owner = {turn.turn_id: place for place, path in enumerate(paths) for turn in path.own_turns}
        self._conversations = sorted(self._joined(), key=lambda one: one.first)
        self._of_place = {place: one for one in self._conversations for place in one.places}

    @cached_property
    def _quotes(self) -> dict[str, list[Quote]]:
        """The quotes in the prompt of each turn, by its id."""
        quotes: dict[str, list[Quote]] = {}
        for quote in find_quotes(self._nodes):
            quotes.setdefault(self._nodes[quote.prompt].node_id, []).append(quote)
        return quotes

    @cached_property
    def _uses(self) -> dict[int, list[Quote]]:
        """The quotes of each conversation's replies in other conversations, by its `begin`."""
        uses: dict[int, list[Quote]] = {}
        for quotes in self._quotes.values():
            for quote in quotes:
                if (used := self._conversation(quote.reply)) is not self._conversation(quote.prompt):
                    uses.setdefault(used.begin, []).append(quote)
        return uses

    @cached_property
    def _num_samples(self) -> Counter[tuple[str | None, bytes, bytes]]:
        """The number of samples of each prompt."""
        return Counter(map(_prompt_of, self._nodes))

    def linked_paths(self, task_messages: Sequence[Message]) -> tuple[TokenPath, ...]:
        for conversation in self._conversations:
            conversation.link = (
                self._declared(conversation) or self._delegated(conversation) or self._compacted(conversation)
            )
        for conversation in self._conversations:
            conversation.link = conversation.link or self._used_later(conversation)
        main = self._main(task_messages)
        main.link = None
        lineages: list[Lineage | None] = [None] * len(self._paths)
        for conversation in self._conversations:
            for place in conversation.places:
                if place != conversation.begin:
                    lineages[place] = self._continued(place)
                elif conversation is not main:
                    lineages[place] = conversation.link or Lineage(PathKind.UNRELATED)
        return tuple(replace(path, lineage=lineage) for path, lineage in zip(self._paths, lineages, strict=True))

    # Conversations

    def _joined(self) -> Iterator[_AgentPaths]:
        """Join the paths to conversations. Every conversation begins with exactly one path."""
        children: dict[int | None, list[int]] = {}
        for place, path in enumerate(self._paths):
            children.setdefault(None if self._begins(place) else path.parent, []).append(place)
        for begin in children.get(None, ()):
            places = [begin]
            for place in places:  # grows
                places += children.get(place, ())
            turns = [
                self._number.get(turn.turn_id, len(self._nodes))  # the last turn of a loop is not a node yet
                for place in places
                for turn in self._paths[place].own_turns
            ] or [len(self._nodes)]
            is_single_turn = max(len(self._paths[place].turns) for place in places) < 2
            declaration = _declaration(self._first_own(begin))
            yield _AgentPaths(sorted(places), begin, min(turns), max(turns), is_single_turn, declaration)

    def _begins(self, place: int) -> bool:
        """Return True if a path does not continue another path's conversation."""
        path = self._paths[place]
        if path.split_reason in (None, SplitReason.NEW_CONVERSATION) or path.parent is None:
            return True
        # A client that declares another agent or a parent turn knows better than the comparison of histories.
        mine, parents = _declaration(self._first_own(place)), _declaration(self._first_own(path.parent))
        if mine.parent_agent is not None and mine.agent != parents.agent:
            return True  # also if it inherits the history of the agent that started it
        if path.num_shared:
            return False
        if mine.parent_turn:
            return True
        if path.split_reason in (SplitReason.SYSTEM_CHANGED, SplitReason.TOOLS_CHANGED):
            # A call for a title, for example, repeats only the user's text: only an echoed turn is a continuation.
            return sum(message.role == "assistant" for message in path.messages) <= len(path.turns)
        return False

    def _first_own(self, place: int) -> Node | None:
        """Return the first turn that a path does not share; None for the last turn of a loop."""
        own = self._paths[place].own_turns
        number = self._number.get(own[0].turn_id) if own else None
        return None if number is None else self._nodes[number]

    def _place(self, number: int) -> int:
        """Return the path that owns a turn."""
        return self._owner[self._nodes[number].node_id]

    def _conversation(self, number: int) -> _AgentPaths:
        return self._of_place[self._place(number)]

    # Links

    def _declared(self, conversation: _AgentPaths) -> Lineage | None:
        mine = conversation.declaration
        if mine.parent_turn:
            parent = self._of_place[self._owner[mine.parent_turn]]
            # If the parent takes more turns it waited for this conversation, otherwise it was replaced.
            kind = PathKind.DELEGATES if parent.last > conversation.first else PathKind.COMPACTS
            evidence = f"the client named turn {mine.parent_turn} as the parent"
            return Lineage(kind, self._owner[mine.parent_turn], evidence, is_declared=True)
        if mine.parent_agent is None:
            return None
        earlier = [
            number
            for number, node in enumerate(self._nodes[: conversation.first])
            if self._of_place[self._owner[node.node_id]].declaration.agent == mine.parent_agent
        ]
        if not earlier:
            return None
        evidence = f"the client named agent {mine.parent_agent or 'main'} as the parent of agent {mine.agent}"
        return Lineage(PathKind.DELEGATES, self._place(earlier[-1]), evidence, is_declared=True)

    def _delegated(self, conversation: _AgentPaths) -> Lineage | None:
        """Link a conversation to an earlier one that uses one of its replies."""
        for quote in self._uses.get(conversation.begin, ()):
            if self._conversation(quote.prompt).first < conversation.first:
                return Lineage(PathKind.DELEGATES, self._place(quote.prompt), self._evidence(quote))
        return None

    def _compacted(self, conversation: _AgentPaths) -> Lineage | None:
        """Link a conversation to an ended one that its first prompt quotes."""
        # A single call whose reply nothing uses leads nowhere: it asks for a title or a commit message.
        root = self._first_own(conversation.begin)
        if root is None or (conversation.is_single_turn and conversation.begin not in self._uses):
            return None
        sources = [
            (source.first, -quote.reply, quote)
            for quote in self._quotes.get(root.node_id, ())
            if (source := self._conversation(quote.reply)).last < conversation.first
        ]
        if not sources:
            return None
        # The earliest of several is the agent itself: the others are sub-agents whose results the summary contains.
        quote = min(sources)[2]
        return Lineage(PathKind.COMPACTS, self._place(quote.reply), self._evidence(quote))

    def _used_later(self, conversation: _AgentPaths) -> Lineage | None:
        """Link a conversation to a later one that uses its reply and has another parent."""
        for quote in self._uses.get(conversation.begin, ()):
            user = self._conversation(quote.prompt)
            # A user without a parent is a side call that quotes the agent, not a caller of it.
            if user.link is not None and conversation not in self._ancestry(user):
                return Lineage(PathKind.DELEGATES, self._place(quote.prompt), self._evidence(quote))
        return None

    def _ancestry(self, conversation: _AgentPaths) -> list[_AgentPaths]:
        """Return the conversation, its parent, the parent's parent, and so on."""
        ancestry = [conversation]
        while (link := ancestry[-1].link) is not None and link.parent is not None:
            ancestry.append(self._of_place[link.parent])
        return ancestry

    def _main(self, task_messages: Sequence[Message]) -> _AgentPaths:
        task = _opening(task_messages)
        sizes: dict[int, tuple[int, int]] = {}
        for conversation in self._conversations:
            head = conversation
            while head.link is not None and head.link.kind is PathKind.COMPACTS and head.link.parent is not None:
                head = self._of_place[head.link.parent]
            own = [self._paths[place] for place in conversation.places]
            num_turns, num_tokens = sizes.get(head.begin, (0, 0))
            sizes[head.begin] = (
                num_turns + sum(len(path.own_turns) for path in own),
                num_tokens + sum(path.num_own_sampled_tokens for path in own),
            )

        def weight(conversation: _AgentPaths) -> tuple[bool, bool, tuple[int, int], int]:
            openings = (_opening(self._paths[place].messages) for place in conversation.places)
            is_task = bool(task) and any(opening[: len(task)] == task for opening in openings)
            is_head = conversation.link is None
            return is_task, is_head, sizes.get(conversation.begin, (0, 0)), -conversation.first

        return max(self._conversations, key=weight)

    def _continued(self, place: int) -> Lineage:
        """Return the lineage of a path that is not the first of its conversation."""
        path, first = self._paths[place], self._first_own(place)
        if path.split_reason is SplitReason.COMPACTED:
            return Lineage(PathKind.COMPACTS, path.parent, "the loop replaced its history", is_declared=True)
        if first is None:
            return Lineage(PathKind.CONTINUES, path.parent)
        if path.split_reason is SplitReason.BRANCH and self._num_samples[_prompt_of(first)] > 1:
            return Lineage(PathKind.RETRIES, path.parent)
        if path.split_reason is SplitReason.HISTORY_EDIT and path.num_shared == 0:
            quotes = self._quotes.get(first.node_id, ())
            mine = [quote for quote in quotes if self._conversation(quote.reply) is self._of_place[place]]
            if mine:
                return Lineage(PathKind.COMPACTS, path.parent, self._evidence(mine[-1]))
        return Lineage(PathKind.CONTINUES, path.parent)

    def _evidence(self, quote: Quote) -> str:
        prompt, reply = self._nodes[quote.prompt].node_id, self._nodes[quote.reply].node_id
        return f"the prompt of turn {prompt} quotes turn {reply} ({quote.num_chars} characters)"


def _declaration(root: Node | None) -> Declaration:
    return (None if root is None else root.declaration) or _NOT_DECLARED


def _prompt_of(node: Node) -> tuple[str | None, bytes, bytes]:
    return node.parent_id, node.tools_key, node.observed_ids.tobytes()


def _opening(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return roles and contents without instructions, and without white space at the ends."""
    return [(one.role, one.content.strip()) for one in messages if one.role not in ("system", "developer")]
