"""Routed prefixes: the replicas to which prompts with an equal beginning were sent.

Keys are a group's id, for its samples' common prompt, and hashes of a prompt's first tokens (`api.prefixes_of`) or
of a task's first message. Nothing is asked of the engines: a replica that was sent a prefix is taken to hold it
until new weights come, or the prefix is the least recently routed of `max_prefixes`.

Ownership: the Balancer. Reader: `Balancer._homes`, for a trajectory, session or call without a lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class RoutedPrefixes:
    """The index, in order of use."""

    def __init__(self, max_prefixes: int = 32768) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[str, set[str]] = OrderedDict()

    def note(self, prefixes: Iterable[tuple[str, float]], replica_id: str) -> None:
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

    def clear(self, adapter: str) -> None:
        """Forget the prefixes under an adapter, or with "" all: no engine holds KV that new prompts share."""
        for key in [key for key in self._replicas if not adapter or key.startswith(f"{adapter} ")]:
            del self._replicas[key]
