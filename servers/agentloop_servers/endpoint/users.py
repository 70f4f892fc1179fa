"""The users of one ingress process: their open calls and sessions, and their limits.

The counts of other processes are from the last report, about a second old. With several processes a limit can
therefore be exceeded by calls and sessions that start within that second. The coordinator signals when users must
be read again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog

from agentloop.api.coordinator import FrontPort
from agentloop.api.owners import NO_LIMITS, UserLimits, UserUsage
from agentloop.errors import AgentLoopError, InvalidRequest, Overloaded
from agentloop_servers.http.auth import Keys, User

_REPORT_S = 1.0

_log = structlog.stdlib.get_logger(__name__)


class ServedUsers:
    """The users of one process with their open calls and sessions. Call `start` and `close`."""

    def __init__(
        self,
        keys: Keys,
        coordinator: FrontPort,
        read: Callable[[], tuple[User, ...]] | None,
        count_sessions: Callable[[], Awaitable[Mapping[str, int]]],
    ) -> None:
        """`read` reads the users' file again; None if users come from the environment and never change."""
        self._keys = keys
        self._coordinator = coordinator
        self._read = read
        self._count_sessions = count_sessions
        self._process_id = uuid.uuid4().hex
        self._generation: int | None = None
        self._calls: Counter[str] = Counter()
        self._sessions: Counter[str] = Counter()  # the last count, plus sessions created since
        self._elsewhere: dict[str, UserUsage] = {}  # use in other processes; its tokens include this process's
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Report the users' use periodically until `close`."""
        if not self._keys.is_open:
            self._reporting = asyncio.create_task(self._report_for_ever(), name="users")

    async def close(self) -> None:
        """Stop reporting. Idempotent."""
        if self._reporting is not None:
            reporting, self._reporting = self._reporting, None
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)

    @property
    def has_file(self) -> bool:
        """True if the users come from a file and can be read again."""
        return self._read is not None

    @property
    def num_users(self) -> int:
        return len(self._keys.users)

    def check_health(self) -> None:
        """Raise the error that ended the reports, if they have ended."""
        if self._reporting is not None and self._reporting.done():
            self._reporting.result()

    @contextmanager
    def call(self, owner: str) -> Iterator[None]:
        """Hold one of a user's call slots. Raises Overloaded if all are in use or the user's token limit is
        reached."""
        name, limits, elsewhere = self._known(owner)
        if limits.open_calls is not None and self._calls[name] + elsewhere.open_calls >= limits.open_calls:
            raise Overloaded(f"user {name!r} has {limits.open_calls} open calls, the maximum: retry later")
        if limits.tokens_per_minute is not None and elsewhere.tokens_last_minute >= limits.tokens_per_minute:
            raise Overloaded(
                f"user {name!r} has used its {limits.tokens_per_minute} tokens per minute: retry later"
            )
        self._calls[name] += 1
        try:
            yield
        finally:
            self._calls[name] -= 1

    def add_session(self, owner: str) -> None:
        """Count a session that is about to be created. Raises Overloaded if its user has the maximum."""
        name, limits, elsewhere = self._known(owner)
        if limits.sessions is not None and self._sessions[name] + elsewhere.sessions >= limits.sessions:
            raise Overloaded(f"user {name!r} has {limits.sessions} open sessions, the maximum: finish one")
        self._sessions[name] += 1

    async def read_again(self) -> None:
        """Make all processes read the users again. Raises InvalidRequest if the file is invalid; nothing changes
        then."""
        await self._report(reads_again=True)

    def _known(self, owner: str) -> tuple[str, UserLimits, UserUsage]:
        user = self._keys.named(owner)
        name = owner if user is None else user.name
        return name, NO_LIMITS if user is None else user.limits, self._elsewhere.get(name, UserUsage(name))

    async def _report_for_ever(self) -> None:
        while True:
            try:
                await self._report()
            except AgentLoopError as error:
                _log.warning("users_not_reported", code=error.code, error=str(error))
            await asyncio.sleep(_REPORT_S)

    async def _report(self, *, reads_again: bool = False) -> None:
        sessions = Counter[str]()
        counted = await self._count_sessions()
        for owner, number in counted.items():
            sessions[self._known(owner)[0]] += number
        self._sessions = sessions
        own = {name: UserUsage(name, self._calls[name], sessions[name]) for name in {*self._calls, *sessions}}
        news = await self._coordinator.report_users(self._process_id, tuple(own.values()), reads_again)
        self._elsewhere = {one.name: one.without(own.get(one.name)) for one in news.usage}
        if self._read is not None and news.generation != self._generation:
            try:
                self._keys.learn(self._read())
            except InvalidRequest as error:  # the file changed after the coordinator read it
                _log.error("users_not_read", error=str(error))
            self._generation = news.generation
            for owner, number in counted.items():
                # Their keys are refused, so only an admin can end the sessions.
                if owner and self._keys.named(owner) is None:
                    _log.warning("open_sessions_without_a_user", user=owner, num_sessions=number)
