"""A service's side of its store: the pointer for the coordinator, and the folders that engines stage from."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

from agentloop.aio import in_daemon_thread
from agentloop.engine import PublishedSource, WeightUpdate
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_store.local_versions import LocalVersions
from agentloop_servers.weight_store.store import VersionStore


class ServedVersions:
    """The versions of one run, as the processes of one host have them."""

    def __init__(self, source: PublishedSource, folder: Path) -> None:
        """`folder`: of this host, for all its replicas. Raises InvalidRequest for a store that cannot be."""
        self._store = VersionStore(source.store, source.run)
        self._local = LocalVersions(folder)

    async def latest(self) -> int:
        """Return the version that the pointer names. Raises what `VersionStore.latest` does."""
        latest: int = await in_daemon_thread(self._store.latest)
        return latest

    async def located(self, update: WeightUpdate) -> WeightUpdate:
        """Return an update of a published version as one of this host's folder, which is made first if need be."""
        if update.published is None:
            return update
        is_given_up = threading.Event()

        def check() -> None:
            if is_given_up.is_set():
                raise CheckpointUnreadable("the update was given up")

        try:
            folder = await in_daemon_thread(self._local.folder, self._store, update.version, check)
        except asyncio.CancelledError:
            is_given_up.set()
            raise
        return replace(update, published=None, directory=str(folder))
