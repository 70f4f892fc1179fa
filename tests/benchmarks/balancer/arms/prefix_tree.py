"""sglang-router's `cache_aware` policy: one radix tree of request text (sgl-router/src/policies).

The text of a prompt is stood for by the names of its blocks, made equal over weight versions, since text does not
change with the weights. The tree learns of prompts only, as they are routed: it sees no outputs until the next
turn's prompt has them, no eviction and no flush.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter

from tests.benchmarks.balancer.arms.spread import Counting
from tests.benchmarks.balancer.policy import FleetShape, TurnAsk

_CHARACTERS_PER_TOKEN = 4  # of English text; the tree's bound is in characters
_MAX_CHARACTERS = 2**26
_EVICT_EVERY_S = 60.0


class _Node:
    """An edge's text and the tenants that were sent it, each with when it last was."""

    __slots__ = ("children", "parent", "tenants", "text")

    def __init__(self, text: array[int], parent: _Node | None, tenants: dict[int, float]) -> None:
        self.text = text
        self.parent = parent
        self.tenants = tenants
        self.children: dict[int, _Node] = {}


class RadixTree:
    """A radix tree of many tenants; `sizes` counts the blocks that each tenant has in it."""

    def __init__(self) -> None:
        self._root = _Node(array("Q"), None, {})
        self.sizes: Counter[int] = Counter()

    def match(self, text: array[int], now: float) -> tuple[int, int | None]:
        """Return how many blocks match, and the first tenant of the node where the match ends; touches its path."""
        node, num_matched = self._root, 0
        while num_matched < len(text):
            child = node.children.get(text[num_matched])
            if child is None:
                break
            num_shared = _num_shared(child.text, text, num_matched)
            num_matched += num_shared
            node = child
            if num_shared < len(child.text):
                break
        tenant = next(iter(node.tenants), None)
        on_path: _Node | None = node
        while tenant is not None and on_path is not None:
            on_path.tenants[tenant] = now
            on_path = on_path.parent
        return num_matched, tenant

    def insert(self, text: array[int], tenant: int, now: float) -> None:
        """Add a text that was sent to a tenant."""
        node, start = self._root, 0
        node.tenants[tenant] = now
        while start < len(text):
            child = node.children.get(text[start])
            if child is None:
                child = _Node(text[start:], node, {})
                node.children[text[start]] = child
            else:
                num_shared = _num_shared(child.text, text, start)
                if num_shared < len(child.text):
                    child = self._split(node, child, num_shared)
            if tenant not in child.tenants:
                self.sizes[tenant] += len(child.text)
            child.tenants[tenant] = now
            node = child
            start += len(child.text)

    def evict(self, max_size: int) -> None:
        """Take leaves from tenants with more than `max_size` blocks, least recently used first."""
        if all(size <= max_size for size in self.sizes.values()):
            return
        leaves: list[tuple[float, int, int, _Node]] = []
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for tenant, used_at in node.tenants.items():
                if self.sizes[tenant] > max_size and _is_leaf(node, tenant):
                    leaves.append((used_at, tenant, len(leaves), node))
        heapq.heapify(leaves)
        num_seen = len(leaves)
        while leaves:
            _, tenant, _, node = heapq.heappop(leaves)
            if self.sizes[tenant] <= max_size:
                continue
            self._leave(node, tenant)
            parent = node.parent
            if parent is not None and parent is not self._root and _is_leaf(parent, tenant):
                num_seen += 1
                heapq.heappush(leaves, (parent.tenants[tenant], tenant, num_seen, parent))

    def remove_tenant(self, tenant: int) -> None:
        """Forget a tenant."""
        self._root.tenants.pop(tenant, None)
        nodes, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            if tenant in node.tenants:
                nodes.append(node)
                stack.extend(node.children.values())
        for node in reversed(nodes):
            self._leave(node, tenant)
        del self.sizes[tenant]

    def _leave(self, node: _Node, tenant: int) -> None:
        del node.tenants[tenant]
        self.sizes[tenant] -= len(node.text)
        if not node.tenants and not node.children and node.parent is not None:
            del node.parent.children[node.text[0]]

    @staticmethod
    def _split(parent: _Node, child: _Node, num_kept: int) -> _Node:
        upper = _Node(child.text[:num_kept], parent, dict(child.tenants))
        child.text = child.text[num_kept:]
        child.parent = upper
        upper.children[child.text[0]] = child
        parent.children[upper.text[0]] = upper
        return upper


class Texts:
    """Texts of prompts: names of blocks that stay the same when new weights rename the blocks.

    Siblings' first prompts are equal, so the first name that a block of a group's prompt had is its name for good;
    a trajectory's later blocks keep the name that they had first.
    """

    def __init__(self) -> None:
        self._of_group: dict[int, array[int]] = {}
        self._of_trajectory: dict[int, array[int]] = {}
        self._first_names: dict[int, int] = {}  # later name of a block -> its first

    def of(self, turn: TurnAsk, block_size: int) -> array[int]:
        """Return a prompt's text; the caller may not change it."""
        num_blocks = turn.num_prompt_tokens // block_size
        text = self._of_trajectory.get(turn.trajectory)
        if text is None:
            text = array("Q", self._prompt_of_group(turn, num_blocks))
            self._of_trajectory[turn.trajectory] = text
        text.extend(turn.hashes[len(text) : num_blocks])
        return text if len(text) == num_blocks else text[:num_blocks]

    def forget(self, trajectory: int) -> None:
        self._of_trajectory.pop(trajectory, None)

    def _prompt_of_group(self, turn: TurnAsk, num_blocks: int) -> array[int]:
        names = turn.hashes[:num_blocks]
        prompt = self._of_group.get(turn.group)
        if prompt is None:
            prompt = array("Q", [self._first_names.get(name, name) for name in names])
            self._of_group[turn.group] = prompt
        elif prompt != names:
            self._first_names.update(zip(names, prompt, strict=False))
        return prompt


class PrefixTree(Counting):
    """The worker whose text matches best, unless loads differ too much or too little matches.

    Loads are imbalanced if max - min > `absolute` and max > `relative` x min; then the shortest queue. Otherwise,
    if more than `threshold` of the prompt matches, the match's worker; else the worker with the smallest tree, or
    with the fewest requests (`misses_to_least`, as smg does it).
    """

    def __init__(
        self,
        shape: FleetShape,
        seed: int,
        threshold: float = 0.3,
        absolute: int = 64,
        relative: float = 1.5,
        misses_to_least: bool = False,
        max_size_blocks: int | None = None,
    ) -> None:
        super().__init__(shape, seed)
        self._block_size = shape.block_size
        self._threshold = threshold
        self._absolute = absolute
        self._relative = relative
        self._misses_to_least = misses_to_least
        blocks_by_default = _MAX_CHARACTERS // _CHARACTERS_PER_TOKEN // shape.block_size
        self._max_size_blocks = blocks_by_default if max_size_blocks is None else max_size_blocks
        self._evicted_at = 0.0
        self._texts = Texts()
        self.tree = RadixTree()
        for replica in self.in_flight:
            self.tree.insert(array("Q"), replica, 0.0)

    def place(self, turn: TurnAsk, now: float) -> int:
        if now - self._evicted_at >= _EVICT_EVERY_S:
            self._evicted_at = now
            self.tree.evict(self._max_size_blocks)
        text = self._texts.of(turn, self._block_size)
        replica = self._choose(text, now)
        self.tree.insert(text, replica, now)
        return replica

    def finished(self, trajectory: int, now: float) -> None:
        self._texts.forget(trajectory)

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        self.tree.remove_tenant(replica)

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self.tree.insert(array("Q"), replica, now)

    def _choose(self, text: array[int], now: float) -> int:
        most, least = max(self.in_flight.values()), min(self.in_flight.values())
        if most - least > self._absolute and most > self._relative * least:
            return min(self.in_flight, key=self.in_flight.__getitem__)
        num_matched, tenant = self.tree.match(text, now)
        if tenant is not None and num_matched > self._threshold * len(text):
            return tenant
        if self._misses_to_least:
            return min(self.in_flight, key=self.in_flight.__getitem__)
        return min(self.in_flight, key=self.tree.sizes.__getitem__)


def _is_leaf(node: _Node, tenant: int) -> bool:
    return tenant in node.tenants and not any(tenant in child.tenants for child in node.children.values())


def _num_shared(edge: array[int], text: array[int], start: int) -> int:
    """Count the leading blocks of an edge that `text` has from `start` on."""
    num = min(len(edge), len(text) - start)
    if edge[:num] == text[start : start + num]:
        return num
    low, high = 0, num - 1  # names chain, so equal at i means equal before i
    while low < high:
        middle = (low + high + 1) // 2
        if edge[middle - 1] == text[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
