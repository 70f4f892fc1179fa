"""Protocols of a run's storage backend: SQLite files in the run directory, or a database server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

COORDINATOR_LEASE = "coordinator"
"""The name of the lease of the coordinator, which writes a run's records."""

LEASE_S = 10.0
"""Seconds after which the lease of an owner that does not renew it expires."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one kind of store."""

    kind: str  # the name in messages and logs, such as "trajectory store"
    version: int
    tables: str
    # SQLite in WAL mode: with NORMAL, commits survive a killed process, but a power failure may lose the last ones.
    # With FULL, each commit waits for an fsync.
    synchronous: str
    page_bytes: int = 4096  # the page size of a new SQLite file


class Rows(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """A database connection. Transactions are explicit.

    Statements use the SQL that SQLite and PostgreSQL have in common, with `?` as the placeholder of values.
    """

    @property
    def in_transaction(self) -> bool: ...
    @property
    def total_changes(self) -> int: ...
    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows: ...
    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Rows: ...
    def begin(self, *, writes: bool) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...

    def num_bytes(self) -> int:
        """Return the size in bytes, excluding the free space left by deleted rows."""
        ...

    def shrink(self) -> int:
        """Return some free space of deleted rows to the disk. Returns 0 if there is too little of it."""
        ...


class Ownership(Protocol):
    """A lease that grants one owner at a time the right to write. Each owner has a greater epoch than the last."""

    def take(self, db: Database, own: int | None, above: int) -> int:
        """Acquire the lease, or a new epoch for the owner `own`. Returns an epoch greater than `above`.

        Raises Conflict with the owner's name while another owner has the lease.
        """
        ...

    def newest(self, db: Database, own: int) -> int | None:
        """Return the epoch of the newest owner. If it is `own`, a writing transaction also renews the lease."""
        ...

    def release(self, db: Database, own: int) -> None:
        """Release the lease, so that another owner can acquire it immediately."""
        ...

    def revoke(self, db: Database) -> None:
        """End the current owner's lease: its later writes are refused."""
        ...


class Home(Protocol):
    """A storage backend outside the run directory, such as `postgres.PostgresRun`."""

    @property
    def folder(self) -> Path:
        """The run directory, which holds the run's files."""
        ...

    @property
    def failure(self) -> type[Exception]:
        """The base class of the database driver's errors."""
        ...

    def open(self, schema: Schema, *, is_read_only: bool = False) -> Database:
        """Connect to a store, and create it if it is new. Raises InvalidRequest."""
        ...

    def kept(self) -> dict[str, str]:
        """Return the contents of the run that are not in its stores, by name; empty if the run does not exist.

        Raises InvalidRequest, and Conflict while a coordinator owns the run.
        """
        ...

    def lease(self, name: str) -> Ownership:
        """Return a lease of this run without acquiring it."""
        ...

    def url_elsewhere(self) -> str:
        """Return a URL of the backend for other hosts. Raises InvalidRequest."""
        ...

    def is_reachable(self) -> bool:
        """Return True if the database's host responds, even if it refuses connections."""
        ...


def shown_url(url: str) -> str:
    """Return the URL of a backend without its user, password and options, which may be secret."""
    scheme, _, rest = url.partition("://")
    location, _, options = rest.partition("?")
    location = location.rpartition("@")[2]
    port = location.partition("/")[0].rpartition("]")[2].partition(":")[2]
    # In a malformed URL the end of the password is ambiguous: hide everything.
    is_ambiguous = rest.count("@") > 1 or "@" in options or (port and not port.isdigit())
    return f"{scheme}://{'…' if is_ambiguous else location}"
