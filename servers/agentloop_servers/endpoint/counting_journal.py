"""The journal as sessions write it: to the store, and so that the registry knows who is in use and how large."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentloop.sessions import SessionFacts
from agentloop.trajectory import CallRecord, Node
from agentloop_servers.endpoint.residents import Residents
from agentloop_servers.endpoint.session_store import SessionStore
from agentloop_servers.endpoint.session_values import not_found


class CountingJournal:
    """A `Journal`. Whoever writes is in memory, used now, and of a new size; who was thrown away begins nothing."""

    def __init__(self, store: SessionStore, residents: Residents, on_finished: Callable[[], None]) -> None:
        """`on_finished` is called once for each session that ends."""
        self._store = store
        self._residents = residents
        self._on_finished = on_finished

    def begin(self, session_id: str, call: CallRecord) -> None:
        if self._residents.get(session_id) is None:
            raise not_found(session_id)
        self._store.begin(session_id, call)

    async def end(self, session_id: str, call: CallRecord, nodes: Sequence[Node]) -> None:
        await self._store.end(session_id, call, nodes)
        self._residents.get(session_id)

    async def save(self, facts: SessionFacts) -> None:
        if await self._store.save(facts):
            self._on_finished()
