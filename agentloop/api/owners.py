"""Users by their names: what is whose, and the ids by which the service tells apart what users call alike.

An id is unique within its owner. Inside the service it stands behind the owner's name, `alice~step-1`, in every
table, lease and record; a client sees its own part of it. Without users ids are what clients say. An adapter's name
is such an id; one without an owner is all users'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agentloop.errors import ModelNotFound

_MARK: Final = "~"  # in no id and no name that anybody may give

OWN_ID_PATTERN: Final = r"^([A-Za-z0-9._\-]{1,128}~)?[A-Za-z0-9._\-]{1,128}$"
"""Ids in a path: a client's own, or a whole one, as the admin reads it in the status."""


@dataclass(frozen=True, slots=True)
class UserLimits:
    """Bounds of one user over the whole service; None: those of the service alone. `share` weighs its turns."""

    open_calls: int | None = None
    sessions: int | None = None
    live_trajectories: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers, rollouts' too
    share: float = 1.0


NO_LIMITS: Final = UserLimits()


@dataclass(frozen=True, slots=True)
class UserTable:
    """The users: the present name of each by all its names, and limits by present names."""

    names: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, UserLimits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UserUsage:
    """The use of one user at one moment, in one process or in all."""

    name: str
    open_calls: int = 0
    sessions: int = 0  # open ones
    live_trajectories: int = 0
    queued_trajectories: int = 0
    tokens_last_minute: int = 0  # of prompts and answers
    waiting_calls: int = 0  # sessions and direct calls that wait for KV

    def without(self, own: UserUsage | None) -> UserUsage:
        """Return the use in other processes than `own`; tokens are those of all."""
        if own is None:
            return self
        calls, sessions = max(0, self.open_calls - own.open_calls), max(0, self.sessions - own.sessions)
        return replace(self, open_calls=calls, sessions=sessions)


@dataclass(frozen=True, slots=True)
class UsersNews:
    """The use of all users over all processes, and the number of the users' table in force."""

    generation: int
    usage: tuple[UserUsage, ...]


def own_id(owner: str, given: str) -> str:
    """Return the service's id for an owner's id `given`."""
    return f"{owner}{_MARK}{given}" if owner else given


def possible_ids(given: str, user_names: Sequence[str] | None) -> Iterator[tuple[str, str | None]]:
    """Iterate over the ids that a caller may mean, each with the owner that it must have; None: any owner.

    `user_names` are all names of the caller's user, the present one first; None: the caller may use any user's.
    """
    if user_names is None:
        yield given, None
        return
    for name in user_names:
        yield own_id(name, given), name
    if (owner := owner_of(given)) and owner in user_names:  # the whole id, as the status of a service shows it
        yield given, owner


def is_seen(name: str, user_names: Sequence[str] | None) -> bool:
    """Tell if a user sees an adapter: one of its own, or one of all users. `user_names` None: any."""
    return user_names is None or owner_of(name) in ("", *user_names)


def adapter_named(given: str, user_names: Sequence[str] | None, served: Iterable[str]) -> str:
    """Return the adapter that a user calls `given`: its own, before one of all users.

    Raises ModelNotFound, which tells those that the user sees.
    """
    seen = [name for name in served if is_seen(name, user_names)]
    for name in (*(own_id(one, given) for one in user_names or ()), given):
        if name in seen:
            return name
    known = ", ".join(repr(shown_id(name)) for name in seen) or "none"
    raise ModelNotFound(f"no adapter {given[:200]!r} is served; there is {known}", param="model")


def is_own_id(given: str) -> bool:
    """Return True for the service's id of an owner's, `alice~step-1`."""
    return _MARK in given


def shown_id(own: str) -> str:
    """Return an id as its owner knows it."""
    return own.rpartition(_MARK)[2]


def owner_of(holder_id: str) -> str:
    """Return the owner in the id of a rollout, session, assignment or lease holder; "" without one."""
    return holder_id.removeprefix("/").partition("/")[0].rpartition(_MARK)[0]
