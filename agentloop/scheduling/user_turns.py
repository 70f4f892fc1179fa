"""Users, as the coordinator shares places among them: their names, limits, turns, and what they use.

Ownership: one object of the coordinator, which samples, sessions and direct calls all ask whose turn it is. The
table of users is read again when an order to do so comes; one that cannot be read leaves the one before.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable

from agentloop.api.owners import NO_LIMITS, UserLimits, UsersNews, UserTable, UserUsage
from agentloop.concurrency.clock import Clock, RealClock
from agentloop.concurrency.strides import Strides

_WINDOW_S = 60.0
_SLOT_S = 5.0  # of tokens counted together
_REPORT_COUNTS_S = 15.0  # without another one, a process is gone


class UserTurns:
    """The table of users, the order of their turns, and their use over all processes."""

    def __init__(self, read: Callable[[], UserTable] = UserTable, clock: Clock | None = None) -> None:
        """Raises what `read` does."""
        self._read = read
        self._clock = clock or RealClock()
        self._strides = Strides(lambda user: self.limits_of(user).share)
        self._tokens: dict[str, deque[tuple[float, int]]] = {}  # by user: a slot's beginning, and its tokens
        self._reports: dict[str, tuple[float, tuple[UserUsage, ...]]] = {}  # by process: when, and what it said
        self.read_again()

    def read_again(self) -> None:
        """Read the table anew. Raises what `read` does, and changes nothing then."""
        self.table = self._read()
        self.generation = secrets.randbits(62)

    def name_of(self, owner: str) -> str:
        """Return a user's present name; an unknown owner's own name."""
        return self.table.names.get(owner, owner)

    def limits_of(self, user: str) -> UserLimits:
        return self.table.limits.get(user, NO_LIMITS)

    def pass_of(self, user: str) -> float:
        """Return a user's pass: the least of those that wait is next."""
        return self._strides.pass_of(user)

    def took(self, user: str) -> None:
        """Note that a user was given a place."""
        self._strides.took(user)

    # --- use ---

    def count_tokens(self, user: str, num_tokens: int) -> None:
        """Count a turn's tokens, of its prompt and its answer."""
        slots, now = self._tokens.setdefault(user, deque()), self._clock.now()
        if not slots or now - slots[-1][0] >= _SLOT_S:
            slots.append((now, 0))
        slots[-1] = slots[-1][0], slots[-1][1] + num_tokens

    def tokens_of(self, user: str) -> int:
        """Return a user's tokens of the last minute."""
        slots = self._tokens.get(user, deque())
        while slots and self._clock.now() - slots[0][0] >= _WINDOW_S:
            slots.popleft()
        return sum(num_tokens for _, num_tokens in slots)

    def has_tokens(self, user: str) -> bool:
        """Tell if a user's minute has tokens left."""
        most = self.limits_of(user).tokens_per_minute
        return most is None or self.tokens_of(user) < most

    def report(self, process_id: str, usage: tuple[UserUsage, ...]) -> UsersNews:
        """Take the use of one process. Returns the use over all processes."""
        self._reports[process_id] = self._clock.now(), usage
        return UsersNews(self.generation, self.usage(Counter(), Counter(), Counter()))

    def usage(self, running: Counter[str], queued: Counter[str], waiting: Counter[str]) -> tuple[UserUsage, ...]:
        """Return the use of each user; `running` and `queued` are its trajectories, `waiting` its calls."""
        since = self._clock.now() - _REPORT_COUNTS_S
        self._reports = {name: one for name, one in self._reports.items() if one[0] >= since}
        calls, sessions = Counter[str](), Counter[str]()
        for _, reported in self._reports.values():
            for one in reported:
                calls[self.name_of(one.name)] += one.open_calls
                sessions[self.name_of(one.name)] += one.sessions
        names = {*self.table.limits, *calls, *sessions, *running, *queued, *waiting, *self._tokens} - {""}
        return tuple(
            UserUsage(
                name,
                calls[name],
                sessions[name],
                running[name],
                queued[name],
                self.tokens_of(name),
                waiting[name],
            )
            for name in sorted(names)
        )
