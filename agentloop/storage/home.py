"""The home of a run's stores: SQLite files in its directory, or a database server. What a store asks of either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

COORDINATOR_LEASE = "coordinator"
"""The name of the lease of the one that writes a run's records."""

LEASE_S = 10.0
"""The time for which a silent owner keeps its lease."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one kind of store.

    In WAL mode a commit with `synchronous` NORMAL survives a killed process, but the last ones may go with the
    machine; with FULL each commit waits for the disk: one fsync a batch.
    """

    kind: str  # "trajectory store": as messages and logs name it
    version: int
    tables: str
    synchronous: str
    page_bytes: int = 4096  # of a new SQLite file


class Rows(Protocol):
    """The outcome of a statement."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """A connection to where rows are kept. Transactions are explicit.

    Statements are of the SQL that SQLite and PostgreSQL both have, with `?` for values.
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
        """Return the size of what is kept, without what deleted rows have left."""
        ...

    def shrink(self) -> int:
        """Give some of what deleted rows have left back to the disk, if it is much. 0: it is not."""
        ...


class Ownership(Protocol):
    """The right to write, which one owner has at a time, under a number that every later owner exceeds."""

    def take(self, db: Database, own: int | None, above: int) -> int:
        """Take it with a number greater than `above`, or get a greater one for `own`. Raises Conflict, naming the
        owner, while another has it."""
        ...

    def newest(self, db: Database, own: int) -> int | None:
        """Return the number of its newest owner. If that is `own`, a transaction that writes renews the lease."""
        ...

    def release(self, db: Database, own: int) -> None:
        """Leave it to the next owner at once."""
        ...

    def revoke(self, db: Database) -> None:
        """Take it from its owner, if it has one: what that writes from now on is refused."""
        ...


class Home(Protocol):
    """The place of a run's stores beyond its directory, as `postgres.PostgresRun`."""

    @property
    def folder(self) -> Path:
        """The run's directory, which has its files."""
        ...

    @property
    def failure(self) -> type[Exception]:
        """The base of the database's own errors."""
        ...

    def open(self, schema: Schema, *, is_read_only: bool = False) -> Database:
        """Connect to a store, and make it if it is new. Raises InvalidRequest."""
        ...

    def kept(self) -> dict[str, str]:
        """Return what the run keeps beside its stores, by name; empty without such a run.

        Raises InvalidRequest, and Conflict while a coordinator has the run.
        """
        ...

    def lease(self, name: str) -> Ownership:
        """Return a lease of this run, not taken."""
        ...

    def url_elsewhere(self) -> str:
        """Return a URL of it for other hosts. Raises InvalidRequest."""
        ...

    def is_reachable(self) -> bool:
        """Tell if the host of the database answers, be it that there is no database."""
        ...


def shown_url(url: str) -> str:
    """Return the URL of a home without what may be secret: user, password and options."""
    scheme, _, rest = url.partition("://")
    place, _, options = rest.partition("?")
    place = place.rpartition("@")[2]
    port = place.partition("/")[0].rpartition("]")[2].partition(":")[2]
    is_odd = rest.count("@") > 1 or "@" in options or (port and not port.isdigit())
    return f"{scheme}://{'…' if is_odd else place}"  # where a password ends is not sure then
