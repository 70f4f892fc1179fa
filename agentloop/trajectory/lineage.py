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

    The main conversation begins with `task_messages`. Without task messages, or if no conversation begins with
    them, it is the conversation without a parent that has, together with the conversations that compact it, the
    most turns, then the most sampled tokens, then the first start.
    """
    if len(paths) < 2:
        return tuple(paths)
    return _Lineages(paths, nodes).linked_paths(task_messages)


@dataclass(slots=True, eq=False)
class _Talk:
    """A conversation: paths that continue each other. Turns are numbered in the order of their commits."""

    places: list[int]  # indices of its paths
    first_path: int  # the path with which it begins
    first_turn: int
    last_turn: int
    num_turns: int
    depth: int  # turns of its longest path
    declaration: Declaration = _NOT_DECLARED
    link: Lineage | None = None


class _Lineages:
    """The conversations of one trajectory and their links."""

    def __init__(self, paths: Sequence[TokenPath], nodes: Sequence[Node]) -> None:
        self._paths = paths
        self._nodes = nodes
        self._number = {node.node_id: number for number, node in enumerate(nodes)}
        self._owner = {turn.turn_id: place for place, path in enumerate(paths) for turn in path.own_turns}
        self._talks = sorted(self._joined(), key=lambda talk: talk.first_turn)
        self._of_place = {place: talk for talk in self._talks for place in talk.places}

    @cached_property
    def _quotes(self) -> dict[str, list[Quote]]:
        """The quotes in the prompt of each turn, by its id."""
        quotes: dict[str, list[Quote]] = {}
        for quote in find_quotes(self._nodes):
            quotes.setdefault(self._nodes[quote.prompt].node_id, []).append(quote)
        return quotes

    @cached_property
    def _quoted_by(self) -> dict[int, list[Quote]]:
        """For each conversation, by its first path, the later prompts of other conversations that quote it."""
        quoted_by: dict[int, list[Quote]] = {}
        for quotes in self._quotes.values():
            for quote in quotes:
                if (quoted := self._talk_of(quote.reply)) is not self._talk_of(quote.prompt):
                    quoted_by.setdefault(quoted.first_path, []).append(quote)
        return quoted_by

    @cached_property
    def _num_samples(self) -> Counter[tuple[str | None, bytes, bytes]]:
        """The number of samples of each prompt."""
        return Counter(map(_prompt_of, self._nodes))

    def linked_paths(self, task_messages: Sequence[Message]) -> tuple[TokenPath, ...]:
        # Compactions first: they determine the sizes of the conversations, and with them the main one.
        for talk in self._talks:
            talk.link = self._declared(talk) or self._compacted(talk)
        main = self._main(task_messages)
        main.link = None
        self._link_users(main)
        lineages: list[Lineage | None] = [None] * len(self._paths)
        for talk in self._talks:
            for place in talk.places:
                if place != talk.first_path:
                    lineages[place] = self._continued(place)
                elif talk is not main:
                    lineages[place] = talk.link or Lineage(PathKind.UNRELATED)
        return tuple(replace(path, lineage=lineage) for path, lineage in zip(self._paths, lineages, strict=True))

    # Conversations

    def _joined(self) -> Iterator[_Talk]:
        """Join the paths to conversations. Every conversation begins with exactly one path."""
        children: dict[int | None, list[int]] = {}
        for place, path in enumerate(self._paths):
            children.setdefault(None if self._begins(place) else path.parent, []).append(place)
        for first_path in children.get(None, ()):
            places = [first_path]
            for place in places:  # grows
                places += children.get(place, ())
            turns = [
                self._number.get(turn.turn_id, len(self._nodes))  # the last turn of a loop is not a node yet
                for place in places
                for turn in self._paths[place].own_turns
            ]
            first, last = min(turns, default=len(self._nodes)), max(turns, default=len(self._nodes))
            depth = max(len(self._paths[place].turns) for place in places)
            declaration = _declaration(self._first_own(first_path))
            yield _Talk(sorted(places), first_path, first, last, len(turns), depth, declaration)

    def _begins(self, place: int) -> bool:
        """Return True if a path does not continue another path's conversation."""
        path = self._paths[place]
        if path.split_reason in (None, SplitReason.NEW_CONVERSATION) or path.parent is None:
            return True
        # A declaration of another agent or of a parent turn takes precedence over the comparison of histories.
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

    def _place_of(self, number: int) -> int:
        """Return the path that owns a turn."""
        return self._owner[self._nodes[number].node_id]

    def _talk_of(self, number: int) -> _Talk:
        """Return the conversation that has a turn."""
        return self._of_place[self._place_of(number)]

    # Links

    def _declared(self, talk: _Talk) -> Lineage | None:
        mine = talk.declaration
        if mine.parent_turn:
            place = self._owner[mine.parent_turn]
            # Unless the client declares it: a parent with later turns waited for this conversation.
            is_over = self._of_place[place].last_turn < talk.first_turn
            kind = mine.kind or (PathKind.COMPACTS if is_over else PathKind.DELEGATES)
            return Lineage(kind, place, f"the client named turn {mine.parent_turn} as the parent", is_declared=True)
        if mine.parent_agent is None:
            return None
        earlier = [
            number
            for number in range(min(talk.first_turn, len(self._nodes)))
            if self._talk_of(number).declaration.agent == mine.parent_agent
        ]
        if not earlier:
            return None
        evidence = f"the client named agent {mine.parent_agent or 'main'} as the parent of agent {mine.agent}"
        return Lineage(PathKind.DELEGATES, self._place_of(earlier[-1]), evidence, is_declared=True)

    def _compacted(self, talk: _Talk) -> Lineage | None:
        """Link a conversation to an earlier one that its first prompt quotes and that it replaces."""
        # A single call whose reply no prompt quotes leads nowhere: it asks for a title or a commit message.
        root, uses = self._first_own(talk.first_path), self._quoted_by.get(talk.first_path, ())
        if root is None or (talk.depth < 2 and not uses):
            return None
        quoted = {
            self._talk_of(quote.reply).first_path: quote
            for quote in self._quotes.get(root.node_id, ())
            if self._is_replaced(self._talk_of(quote.reply), talk)
        }
        # A conversation that uses the result did not end: this one is its sub-agent.
        quoted = {
            place: quote
            for place, quote in quoted.items()
            if all(self._talk_of(use.prompt).first_path != place for use in uses)
        }
        if not quoted:
            return None
        # The earliest is the agent itself, and others are sub-agents whose results the summary contains, except
        # conversations that compact the agent's earlier ones.
        place = min(quoted, key=lambda first_path: self._of_place[first_path].first_turn)
        for other in self._talks:
            link = other.link if other.first_path in quoted else None
            if link is not None and link.kind is PathKind.COMPACTS and link.parent in self._of_place[place].places:
                place = other.first_path
        quote = quoted[place]
        return Lineage(PathKind.COMPACTS, self._place_of(quote.reply), self._evidence(quote))

    def _is_replaced(self, earlier: _Talk, talk: _Talk) -> bool:
        """Return True if a conversation ended before another one, except for fewer turns than that one has.

        A side call on the old history may come late: it extracts memories, for example.
        """
        num_later = sum(
            self._number.get(turn.turn_id, len(self._nodes)) > talk.first_turn
            for place in earlier.places
            for turn in self._paths[place].own_turns
        )
        return earlier.first_turn < talk.first_turn and num_later < talk.num_turns

    def _link_users(self, main: _Talk) -> None:
        """Link conversations whose replies the main conversation used, directly or through others."""
        heads = {talk.first_path: self._head(talk) for talk in self._talks}
        linked = [talk for talk in self._talks if self._leads_to(talk, main)]
        for user in linked:  # grows
            for talk in self._talks:
                head = heads[talk.first_path]
                if talk in linked or head.link is not None or head is main:
                    continue
                uses = (
                    use for use in self._quoted_by.get(talk.first_path, ()) if self._talk_of(use.prompt) is user
                )
                if (use := next(uses, None)) is not None:
                    head.link = Lineage(PathKind.DELEGATES, self._place_of(use.prompt), self._evidence(use))
                    linked += [other for other in self._talks if heads[other.first_path] is head]

    def _head(self, talk: _Talk) -> _Talk:
        """Return the first of the conversations that compact each other."""
        while talk.link is not None and talk.link.kind is PathKind.COMPACTS and talk.link.parent is not None:
            talk = self._of_place[talk.link.parent]
        return talk

    def _leads_to(self, talk: _Talk, main: _Talk) -> bool:
        while talk is not main and talk.link is not None and talk.link.parent is not None:
            talk = self._of_place[talk.link.parent]
        return talk is main

    def _main(self, task_messages: Sequence[Message]) -> _Talk:
        task = _opening(task_messages)
        sizes = Counter[tuple[int, str]]()
        for talk in self._talks:
            head = self._head(talk).first_path
            sizes[head, "turns"] += talk.num_turns
            sizes[head, "tokens"] += sum(self._paths[place].num_own_sampled_tokens for place in talk.places)

        # Quoted by a conversation that began earlier: probably its sub-agent.
        used = {
            self._head(talk).first_path
            for talk in self._talks
            for use in self._quoted_by.get(talk.first_path, ())
            if self._head(self._talk_of(use.prompt)).first_turn < self._head(talk).first_turn
        }

        def weight(talk: _Talk) -> tuple[bool, bool, bool, int, int, int]:
            openings = (_opening(self._paths[place].messages) for place in talk.places)
            is_task = bool(task) and any(opening[: len(task)] == task for opening in openings)
            size = sizes[talk.first_path, "turns"], sizes[talk.first_path, "tokens"]
            return is_task, talk.link is None, talk.first_path not in used, *size, -talk.first_turn

        return max(self._talks, key=weight)

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
            mine = [quote for quote in quotes if self._talk_of(quote.reply) is self._of_place[place]]
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
