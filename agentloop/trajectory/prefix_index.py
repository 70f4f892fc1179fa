"""Ids of whole paths, concatenated from their turns, and an index of all paths by length and hash.

Paths are not stored as arrays: copies for every turn of all sessions would take more memory than the turns, and
concatenating a path takes little time compared with its prompt.

A path's hash is the number that its ids form, modulo a prime. It does not depend on the turns' boundaries, and is
extended in time proportional to the new ids. A match by hash is verified id by id.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from agentloop.trajectory.node import Node
from agentloop.types import IntArray

PathKey: TypeAlias = tuple[int, int]
"""The number of ids and their hash."""

_EMPTY: PathKey = (0, 0)
_PRIME = 2**128 - 159


@dataclass(frozen=True, slots=True)
class FoundPath:
    """The longest path that a prompt begins with, and the turn with the longest such prompt."""

    path_of: str | None
    prompt_of: str | None


class PrefixIndex:
    """An index of a graph's paths. Nodes are added in the order of their creation."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._keys: dict[str, PathKey] = {}
        self._paths: dict[PathKey, str] = {}  # the last node with these ids
        self._prompts: dict[PathKey, str] = {}
        self._lengths: list[int] = []  # lengths of paths and prompts, ascending, without duplicates

    def add(self, node: Node) -> PathKey:
        """Add a node after its parent, in time proportional to its own ids."""
        before = _EMPTY if node.parent_id is None else self._keys[node.parent_id]
        prompt = _extended(before, node.observed_ids)
        path = _extended(prompt, node.reply.token_ids)
        self._keys[node.node_id] = path
        self._prompts[prompt] = self._paths[path] = node.node_id
        for length in (prompt[0], path[0]):
            at = bisect_right(self._lengths, length)
            if at == 0 or self._lengths[at - 1] != length:
                insort(self._lengths, length)
        return path

    def path_key(self, node_id: str) -> PathKey:
        """Return the key of the node's path. Raises KeyError."""
        return self._keys[node_id]

    def find(self, prompt: IntArray) -> FoundPath:
        """Return the longest path, and the longest prompt of a turn, that `prompt` begins with; the last of equals.

        Linear in the prompt and in the number of different lengths of paths.
        """
        key = _EMPTY
        paths: list[str] = []
        prompts: list[str] = []
        for length in self._lengths[: bisect_right(self._lengths, len(prompt))]:
            key = _extended(key, prompt[key[0] : length])
            if (node_id := self._paths.get(key)) is not None:
                paths.append(node_id)
            if (node_id := self._prompts.get(key)) is not None:
                prompts.append(node_id)
        path_of = next((i for i in reversed(paths) if _begins(prompt, path_ids(self._nodes, i))), None)
        prompt_of = next((i for i in reversed(prompts) if _begins(prompt, self._prompt_ids(i))), None)
        return FoundPath(path_of, prompt_of)

    def _prompt_ids(self, node_id: str) -> IntArray:
        ids = path_ids(self._nodes, node_id)
        return ids[: len(ids) - len(self._nodes[node_id].reply.token_ids)]


def path_ids(nodes: Mapping[str, Node], node_id: str) -> IntArray:
    """Return a copy of the node's path, in time proportional to its length. Raises KeyError."""
    parts: list[IntArray] = []
    at: str | None = node_id
    while at is not None:
        node = nodes[at]
        parts += (node.reply.token_ids, node.observed_ids)
        at = node.parent_id
    return np.concatenate(parts[::-1])


def _extended(key: PathKey, ids: IntArray) -> PathKey:
    data = ids.astype("<i4", copy=False).tobytes()
    return key[0] + len(ids), (key[1] * pow(2, 8 * len(data), _PRIME) + int.from_bytes(data, "big")) % _PRIME


def _begins(prompt: IntArray, ids: IntArray) -> bool:
    return bool(np.array_equal(prompt[: len(ids)], ids))
