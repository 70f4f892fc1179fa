"""Users, and the ids of their rollouts, sessions and adapters.

Ids are unique per owner. The service prefixes an id with its owner's name, `alice~step-1`, in every table, lease
and record; clients see only their own part, `step-1`. Without users, ids have no prefix. An adapter without an
owner is visible to all users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agentloop.errors import ModelNotFound

_MARK: Final = "~"  # not allowed in ids and names from users

OWN_ID_PATTERN: Final = r"^([A-Za-z0-9._\-]{1,128}~)?[A-Za-z0-9._\-]{1,128}$"
"""Ids in a URL path: a client's own id, or the complete one with the owner, as the status shows it to admins."""


@dataclass(frozen=True, slots=True)
class UserLimits:
    """Limits of one user over the entire service; None: only the service's limits apply.

    `share` is the user's weight in fair scheduling.
    """

    open_calls: int | None = None
    sessions: int | None = None
    live_trajectories: int | None = None
    tokens_per_minute: int | None = None  # prompt and sampled tokens, including those of rollouts
    share: float = 1.0


NO_LIMITS: Final = UserLimits()


@dataclass(frozen=True, slots=True)
class UserTable:
    """The users: the current name of each by all its names, and the limits by current name."""

    names: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, UserLimits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UserUsage:
    """The current usage of one user, in one process or in all."""

    name: str
    open_calls: int = 0
    sessions: int = 0  # open sessions
    live_trajectories: int = 0
    queued_trajectories: int = 0
    tokens_last_minute: int = 0  # prompt and sampled tokens
    waiting_calls: int = 0  # sessions and direct calls that wait for KV cache

    def without(self, own: UserUsage | None) -> UserUsage:
        """Return the calls and sessions of all processes except the one with the usage `own`.

        The tokens remain those of all processes.
        """
        if own is None:
            return self
        calls, sessions = max(0, self.open_calls - own.open_calls), max(0, self.sessions - own.sessions)
        return replace(self, open_calls=calls, sessions=sessions)


@dataclass(frozen=True, slots=True)
class UsersNews:
    """The usage of all users over all processes, and the generation of the current users' table."""

    generation: int
    usage: tuple[UserUsage, ...]


def own_id(owner: str, given: str) -> str:
    """Return the service's id for the id `given` of an owner."""
    return f"{owner}{_MARK}{given}" if owner else given


def possible_ids(given: str, user_names: Sequence[str] | None) -> Iterator[tuple[str, str | None]]:
    """Yield the service ids that a caller's id may refer to, each with its required owner (None: any owner).

    `user_names` are all names of the caller's user, the current one first; None: the caller may access all users.
    """
    if user_names is None:
        yield given, None
        return
    for name in user_names:
        yield own_id(name, given), name
    if (owner := owner_of(given)) and owner in user_names:  # the complete id, as the status shows it
        yield given, owner


def is_seen(name: str, user_names: Sequence[str] | None) -> bool:
    """Return True if an adapter belongs to the user or to no user. With `user_names` None all are visible."""
    return user_names is None or owner_of(name) in ("", *user_names)


def adapter_named(given: str, user_names: Sequence[str] | None, served: Iterable[str]) -> str:
    """Return the adapter that the user calls `given`. The user's own adapter precedes one without an owner.

    Raises ModelNotFound, with the adapters that are visible to the user.
    """
    visible = [name for name in served if is_seen(name, user_names)]
    for name in (*(own_id(user, given) for user in user_names or ()), given):
        if name in visible:
            return name
    known = ", ".join(repr(shown_id(name)) for name in visible) or "none"
    raise ModelNotFound(f"unknown adapter {given[:200]!r}; served adapters: {known}", param="model")


def is_own_id(given: str) -> bool:
    """Return True if an id includes an owner, such as `alice~step-1`."""
    return _MARK in given


def shown_id(own: str) -> str:
    """Return an id without its owner, as the owner's clients see it."""
    return own.rpartition(_MARK)[2]


def owner_of(holder_id: str) -> str:
    """Return the owner in the id of a rollout, session, assignment or lease holder; "" if it has no owner."""
    return holder_id.removeprefix("/").partition("/")[0].rpartition(_MARK)[0]
