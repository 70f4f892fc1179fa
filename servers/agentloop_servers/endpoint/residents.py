"""The sessions in memory: which, how large, how long unused, and which of them to drop.

Ownership: the process's only `Session` objects. At most one exists for an id: one that was dropped while somebody
still has it is found again, never made twice. A session with open calls is not dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

from agentloop.sessions import Session

_ENTRY_BYTES = 4096  # of a session without turns, as measured: its objects, and its place in the tables here

# What the process grows by for a byte of live objects, the rest being holes that the allocators keep. Measured with
# `tests/benchmarks/endpoint.py`'s load, 300 sessions x 50 turns, less what the caches of the process grew by: 1.1
# with 8 calls at a time, 1.26 with 64. What calls need while they are open is not in it: it goes by their number.
_HEAP_FACTOR = 1.25


class Residents:
    """Sessions by id, the longest unused first. Synchronous."""

    def __init__(self, now: Callable[[], float], max_bytes: int, idle_s: float) -> None:
        self._now = now
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._held: OrderedDict[str, Session] = OrderedDict()
        self._alive: WeakValueDictionary[str, Session] = WeakValueDictionary()
        self._used_at: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._changed: set[str] = set()
        self._num_bytes = 0
        self.num_spilled = 0  # so far

    def __len__(self) -> int:
        return len(self._held)

    @property
    def sessions(self) -> list[Session]:
        """Those in memory, and those that were dropped while somebody has them."""
        return list(self._alive.values())

    @property
    def num_bytes(self) -> int:
        """What the process has grown by for the sessions, as estimated."""
        for session_id in self._changed:
            session = self._held.get(session_id)
            if session is not None:
                size = int((session.num_bytes + _ENTRY_BYTES) * _HEAP_FACTOR)
                self._num_bytes += size - self._sizes.get(session_id, 0)
                self._sizes[session_id] = size
        self._changed.clear()
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Whether the quota is used up."""
        return self.num_bytes >= self._max_bytes

    def get(self, session_id: str) -> Session | None:
        """The session, if it is in memory; it counts as used now."""
        session = self._alive.get(session_id)
        if session is not None:
            self.add(session)
        return session

    def add(self, session: Session) -> None:
        """Hold a session; it counts as used now."""
        session_id = session.facts.session_id
        if self._held.get(session_id) is not session:
            self._held[session_id] = self._alive[session_id] = session
        self._held.move_to_end(session_id)
        self._used_at[session_id] = self._now()
        self._changed.add(session_id)

    def drop(self, session_id: str) -> None:
        """Hold it no more. Unknown ids: no-op."""
        if self._held.pop(session_id, None) is not None:
            del self._used_at[session_id]
            self._num_bytes -= self._sizes.pop(session_id, 0)

    def forget(self, session_id: str) -> None:
        """Drop a session that has ended for good: not even whoever has it finds it here again."""
        self.drop(session_id)
        self._alive.pop(session_id, None)

    def spill(self) -> list[str]:
        """Drop what is idle, and over the quota what is longest unused. Returns the ids."""
        idle_since = self._now() - self._idle_s
        spilled: list[str] = []
        for session_id in list(self._held):
            if self._used_at[session_id] > idle_since and not self.is_full:
                break
            if self._held[session_id].num_open_calls == 0:
                self.drop(session_id)
                spilled.append(session_id)
        self.num_spilled += len(spilled)
        return spilled
