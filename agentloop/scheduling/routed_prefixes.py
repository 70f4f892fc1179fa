"""Routed prefixes: the replicas to which prompts with an equal beginning were sent.

Keys are a group's id, for its samples' common prompt, and hashes of a prompt's first tokens or characters
(`prefix_keys`). Nothing is asked of the engines: a replica that was sent a prefix is taken to hold it until its KV
is flushed or the prefix is the least recently routed of `max_prefixes`.

Ownership: the Balancer. Reader: `Balancer._choose`, for a trajectory, session or call without a lease.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Prefix: TypeAlias = tuple[str, int]
"""A key, and the tokens that all prompts of this key begin with."""

_LENGTHS = (8192, 2048, 512)  # tokens


class RoutedPrefixes:
    """The index, in order of use."""

    def __init__(self, max_prefixes: int = 8192) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[str, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def note(self, prefixes: Iterable[Prefix], replica_id: str) -> None:
        """Note that a prompt with these prefixes goes to a replica."""
        for key, _ in prefixes:
            self._replicas.setdefault(key, set()).add(replica_id)
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)

    def replicas(self, key: str) -> Iterable[str]:
        """Return the replicas that a prefix went to."""
        return self._replicas.get(key, ())

    def forget(self, replica_id: str) -> None:
        """Drop a replica that is lost, or whose KV is."""
        for key in [key for key, replicas in self._replicas.items() if replica_id in replicas]:
            self._replicas[key].discard(replica_id)
            if not self._replicas[key]:
                del self._replicas[key]

    def clear(self) -> None:
        """Forget everything: no engine holds KV that new prompts share."""
        self._replicas.clear()


def prefix_keys(token_ids: Sequence[int]) -> tuple[Prefix, ...]:
    """Return the prefixes of a prompt's tokens, the longest first."""
    lengths = [length for length in _LENGTHS if length <= len(token_ids)]
    return tuple((f"ids-{zlib.crc32(repr(token_ids[:length]).encode()):x}-{length}", length) for length in lengths)
