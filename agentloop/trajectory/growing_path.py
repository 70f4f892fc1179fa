"""GrowingPath: the turn graph of a rollout, which grows only at its end.

Sampled ids are stored as the engine returned them and never encoded again. When the next prompt does not extend the
path exactly, a new root starts with the reason TEMPLATE, and the old path is complete.

Invariants, checked when tokens are added (InvariantBroken otherwise): one logprob per sampled id; version spans
tile the sampled ids; a turn's prompt equals the path so far. A turn becomes a node when a later message or prompt
follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from agentloop.errors import InvariantBroken
from agentloop.images import ImageSpan, shifted_images
from agentloop.trajectory.diff import Decode, token_difference
from agentloop.trajectory.node import Node, Reply, Split
from agentloop.trajectory.token_paths import Tail, masked, token_paths
from agentloop.trajectory.turn_graph import TurnGraph, check_reply
from agentloop.types import Message, SplitReason, TokenPath


@dataclass(slots=True)
class _OpenTurn:
    """The last turn of the path: the tokens observed before it, and its reply."""

    parent_id: str | None
    observed: tuple[Message, ...]
    observed_ids: list[int]
    split: Split | None = None
    reply: Reply | None = None
    images: tuple[ImageSpan, ...] = ()  # offsets into `observed_ids`
    node: Node | None = None  # its node, once it was created


class GrowingPath:
    """The conversation of a rollout and its tokens. Not shared between asyncio tasks."""

    def __init__(self, messages: Iterable[Message] = (), prefix: str = "") -> None:
        """`prefix` begins the turns' ids, so that they differ from those of the trajectory's other agents."""
        self.prefix = prefix
        self._graph = TurnGraph()
        self._messages = list(messages)
        self._pending: list[Message] = []  # observed, not yet rendered
        self._context_ids: list[int] = []
        self._context_images: tuple[ImageSpan, ...] = ()
        self._turn: _OpenTurn | None = None
        self._replaced: str | None = None  # the last turn of the history that the next root replaces
        self._versions: set[int] = set()
        self._is_masked: list[Callable[[int], bool]] = []

    @classmethod
    def restored(cls, nodes: Sequence[Node]) -> GrowingPath:
        """Return the path with these turns, at least one, in the order of their sampling.

        It has no pending messages: the caller observes the messages after the last turn again. Raises
        InvariantBroken if the nodes are not the turns of a path.
        """
        path, last = cls(), nodes[-1]
        for node in nodes[:-1]:
            path._graph.add(node)
            path._versions |= _versions_of(node.reply)
        parent_id = last.parent_id
        if last.node_id != path._next_id or (parent_id is not None and not path._graph.has_turn(parent_id)):
            raise InvariantBroken(f"turn {last.node_id} does not follow the {len(nodes) - 1} turns before it")
        if parent_id is not None:
            before = path._graph.path_of(parent_id)
            path._messages = [message for node in before for message in node.messages]
            path._context_ids = list(path._graph.context_ids(parent_id))
            path._context_images = path._graph.context_images(parent_id)
        observed_ids = last.observed_ids.tolist()
        path._turn = _OpenTurn(parent_id, last.observed, observed_ids, last.split, images=last.images)
        path._messages += last.observed
        path._context_images += shifted_images(last.images, len(path._context_ids))
        path._context_ids += observed_ids
        path.add_turn(last.reply)
        return path

    @property
    def last_turn(self) -> Node | None:
        """The last sampled turn; None before the first, and if a prompt follows it."""
        turn = self._turn
        return None if turn is None or turn.reply is None else self._node_of(turn)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        return tuple(self._messages)

    @property
    def pending(self) -> tuple[Message, ...]:
        """The messages observed since the last prompt."""
        return tuple(self._pending)

    @property
    def is_started(self) -> bool:
        """True after the first prompt of the current root."""
        return self._turn is not None

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens of the current path, which the next turn extends."""
        return len(self._context_ids)

    @property
    def num_known_tokens(self) -> int:
        """The number of tokens of the current path through the end of its last sampled turn; 0 if it has none."""
        turn = self._current()
        return len(self._context_ids) - (len(turn.observed_ids) if turn.reply is None else 0)

    @property
    def context_ids(self) -> tuple[int, ...]:
        """A copy of the current path's ids."""
        return tuple(self._context_ids)

    @property
    def last_turn_id(self) -> str | None:
        """The id of the last sampled turn: its number in the rollout, as text; None before the first."""
        return f"{self.prefix}{self.num_turns - 1}" if self.num_turns else None

    @property
    def num_turns(self) -> int:
        """The number of sampled turns."""
        return self._graph.num_turns + (self._turn is not None and self._turn.reply is not None)

    @property
    def next_turn_id(self) -> str:
        """The id of the turn that is sampled next."""
        return f"{self.prefix}{self.num_turns}"

    @property
    def context_images(self) -> tuple[ImageSpan, ...]:
        """The current path's images; offsets are into `context_ids`."""
        return self._context_images

    @property
    def constraints(self) -> dict[str, str]:
        """The long constraints of the turns, by their digests."""
        last = None if self._turn is None else self._turn.reply
        own = (
            {last.sampling.constraint_digest: last.constraint} if last and last.sampling and last.constraint else {}
        )
        return {**self._graph.constraints, **own}

    @property
    def versions(self) -> Set[int]:
        """The weight versions of all sampled tokens."""
        return self._versions

    def observe(self, *messages: Message) -> None:
        """Append messages that the policy did not sample; the next prompt adds their tokens."""
        self._messages += messages
        self._pending += messages

    def replace_history(self, messages: Iterable[Message]) -> None:
        """Replace the conversation: the next prompt is a new root with `messages`, which `start` adds.

        Raises InvariantBroken if no turn was sampled from the last prompt.
        """
        self._replaced, self._turn = self._end_node(self._current()), None
        self._messages = list(messages)
        self._pending.clear()
        self._context_ids, self._context_images = [], ()

    def start(self, prompt_ids: Sequence[int], images: tuple[ImageSpan, ...] = ()) -> None:
        """Add the first prompt of a root: the conversation so far. Raises InvariantBroken if there is a prompt.

        Here and below, the offsets of `images` are into the ids of the same call.
        """
        if self._turn is not None:
            raise InvariantBroken("a trajectory starts once; use extend_to")
        split = None if self._replaced is None else Split(SplitReason.COMPACTED, self._replaced)
        self._begin_root(prompt_ids, images, split)

    def add_observed(self, token_ids: Sequence[int], images: tuple[ImageSpan, ...] = ()) -> None:
        """Append the tokens of the pending messages."""
        turn = self._current()
        if turn.reply is None:  # no turn was sampled from the last prompt: extend it
            turn.observed += tuple(self._pending)
            turn.images += shifted_images(images, len(turn.observed_ids))
            turn.observed_ids += token_ids
        else:
            node_id = self._end_node(turn)
            self._turn = _OpenTurn(node_id, tuple(self._pending), list(token_ids), images=images)
        self._context_images += shifted_images(images, len(self._context_ids))
        self._context_ids += token_ids
        self._pending.clear()

    def extend_to(
        self,
        prompt_ids: Sequence[int],
        decode: Decode | None = None,
        images: tuple[ImageSpan, ...] = (),
        *,
        cause: str = "",
    ) -> None:
        """Make `prompt_ids` the next prompt: extend the path if they begin with it, or fork with a new root.

        The split's detail has text from `decode`, and `cause`, the reason why the whole prompt was rendered. After
        a fork no path has the tokens observed since the last turn.
        """
        turn, num_context = self._current(), len(self._context_ids)
        if list(prompt_ids[:num_context]) == self._context_ids:
            self.add_observed(prompt_ids[num_context:], shifted_images(images, -num_context))
            return
        parent_id = turn.parent_id if turn.reply is None else self._end_node(turn)
        if parent_id is None:  # no turn was sampled from the last prompt: replace it
            self._begin_root(prompt_ids, images, turn.split)
            return
        there, came = np.array(self._context_ids, np.int32), np.array(prompt_ids, np.int32)
        detail = token_difference(there, came, decode, cause)
        self._begin_root(prompt_ids, images, Split(SplitReason.TEMPLATE, parent_id, detail))

    def add_turn(self, reply: Reply) -> None:
        """Append a sampled turn. Raises InvariantBroken if its arrays are not aligned."""
        turn = self._current()
        if turn.reply is not None:
            turn = self._turn = _OpenTurn(self._end_node(turn), (), [])
        check_reply(reply, str(self._graph.num_turns), self.num_known_tokens, len(self._context_ids))
        turn.reply = self._graph.told_once(reply)
        self._context_ids += reply.token_ids.tolist()
        self._messages.append(reply.message)
        self._versions |= _versions_of(reply)

    def mask_older_than(self, version: int) -> None:
        """Mask tokens of versions before `version`; ids, logprobs and spans stay."""
        self._is_masked.append(lambda sampled_under: sampled_under < version)

    def mask_newer_than(self, version: int) -> None:
        """Mask tokens of versions after `version`; ids, logprobs and spans stay."""
        self._is_masked.append(lambda sampled_under: sampled_under > version)

    def paths(self) -> tuple[TokenPath, ...]:
        """Return all paths as arrays, in the order of their starts; the last path has all messages."""
        paths = token_paths(self._graph, tail=self._tail())
        return tuple(masked(path, self._is_out) for path in paths) if self._is_masked else paths

    def _is_out(self, version: int) -> bool:
        return any(is_masked(version) for is_masked in self._is_masked)

    def _current(self) -> _OpenTurn:
        if self._turn is None:
            raise InvariantBroken("nothing was rendered yet")
        return self._turn

    def _begin_root(self, prompt_ids: Sequence[int], images: tuple[ImageSpan, ...], split: Split | None) -> None:
        self._context_ids, self._context_images = list(prompt_ids), images
        self._turn = _OpenTurn(None, tuple(self._messages), list(prompt_ids), split, images=images)
        self._pending.clear()

    def _end_node(self, turn: _OpenTurn) -> str:
        """Add a sampled turn to the graph. Returns its id."""
        node = self._node_of(turn)
        self._graph.add(node)
        return node.node_id

    def _node_of(self, turn: _OpenTurn) -> Node:
        """Return the open turn as a node."""
        if turn.reply is None:
            raise InvariantBroken("a node of a turn that was not sampled")
        turn.node = turn.node or Node(
            node_id=self._next_id,
            call_id=self._next_id,
            choice_index=0,
            parent_id=turn.parent_id,
            observed=turn.observed,
            observed_ids=np.array(turn.observed_ids, np.int32),
            reply=turn.reply,
            split=turn.split,
            images=turn.images,
        )
        return turn.node

    @property
    def _next_id(self) -> str:
        """The id of the last turn: turns are numbered in the order of their sampling."""
        return f"{self.prefix}{self._graph.num_turns}"

    def _tail(self) -> Tail | None:
        turn = self._turn
        if turn is None:
            return None
        own = () if turn.reply is None else (turn.reply.message,)
        messages = (*turn.observed, *own, *self._pending)
        observed_ids = np.array(turn.observed_ids, np.int32)
        return Tail(turn.parent_id, messages, observed_ids, turn.reply, turn.split, self._next_id, turn.images)


def _versions_of(reply: Reply) -> set[int]:
    return {span.version for span in reply.weight_versions}
