"""Locks by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class KeyedLocks:
    """A lock an id, for as long as somebody wants it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of `key`."""
        lock, num_users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, num_users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._locks.pop(key)
            if num_users > 1:
                self._locks[key] = (lock, num_users - 1)
