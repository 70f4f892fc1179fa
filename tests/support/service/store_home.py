"""The storage backend of a store, for tests of any backend."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from agentloop.storage.home import Home
from tests.support.service.postgres_server import PostgresServer


@dataclass(frozen=True)
class StoreHome:
    """A store's backend, and access to it that bypasses the store."""

    where: Path | Home
    folder: Path
    server: PostgresServer | None = None

    @property
    def is_file(self) -> bool:
        return self.server is None

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Execute a statement outside the store; returns the rows."""
        if self.server is not None:
            return self.server.execute(statement, self.where.name)
        with sqlite3.connect(self.where) as db:
            rows = db.execute(statement).fetchall()
        db.close()
        return rows
