"""Users, as the coordinator shares places among them: their names, limits and turns.

Ownership: one object of the coordinator, which samples, sessions and direct calls all ask whose turn it is.
"""

from __future__ import annotations

from agentloop.api import NO_LIMITS, UserLimits, UserTable
from agentloop.strides import Strides


class UserTurns:
    """The table of users, which may be replaced at any time, and the order of their turns."""

    def __init__(self) -> None:
        self.table = UserTable()
        self._strides = Strides(lambda user: self.limits_of(user).share)

    def name_of(self, owner: str) -> str:
        """Return a user's present name; an owner that no user's names have is one of its own."""
        return self.table.names.get(owner, owner)

    def limits_of(self, user: str) -> UserLimits:
        """Return a user's limits."""
        return self.table.limits.get(user, NO_LIMITS)

    def pass_of(self, user: str) -> float:
        """Return a user's pass: the least of those that wait is next."""
        return self._strides.pass_of(user)

    def took(self, user: str) -> None:
        """Note that a user was given a place."""
        self._strides.took(user)
