"""A recorded session on the owner's side: a base URL and a key for an agent, and the resulting trajectory.

`RolloutClient.session` creates it. It is opened and finished over the client's connection; the agent uses its own
HTTP client. Leaving the context always finishes the session.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

import structlog
from pydantic import BaseModel, ValidationError

from agentloop.api.requests import check_body
from agentloop.api.sessions import (
    FinishBody,
    NewSessionAnswer,
    NewSessionBody,
    RewardBody,
    SessionAnswer,
    decode_trajectories,
    score_values,
)
from agentloop.client.transport import Transport
from agentloop.errors import AgentLoopError, InvalidRequest, error_line
from agentloop.score import Score, checked, resolved
from agentloop.types import Trajectory
from agentloop.values.checks import is_address, is_loopback
from agentloop.values.codec import MSGPACK

if TYPE_CHECKING:
    from openai import AsyncOpenAI

A = TypeVar("A", bound=BaseModel)

SessionEnd: TypeAlias = Literal["completed", "deadline", "cancelled", "loop_failed"]

MAX_ERROR_CHARS = 2000
_OPENING_TIMEOUT_S = 5.0  # after a cancellation; a session whose answer arrives later ends when it expires
_LEAVE_TIMEOUT_S = 30.0  # to finish the session while an exception propagates

_log = structlog.stdlib.get_logger(__name__)


class AgentSession:
    """One session. Use it as an async context manager. Its URL and key work with any OpenAI client in any process.

    An exception that leaves the context is recorded as the session's error, and the trajectory is incomplete.
    `openai` is a client for the session; if it retries an answered call, it receives the same answer and no second
    turn.
    """

    def __init__(self, transport: Transport, body: NewSessionBody, *, max_retries: int, timeout_s: float) -> None:
        assert body.session_id is not None
        self.session_id: str = body.session_id
        self._transport = transport
        self._body = body
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._place: NewSessionAnswer | None = None
        self._openai: AsyncOpenAI | None = None
        self._is_finished = False

    async def __aenter__(self) -> AgentSession:
        opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError as error:
            # The service may have opened the session although its answer has not arrived.
            with suppress(AgentLoopError, TimeoutError):
                async with asyncio.timeout(_OPENING_TIMEOUT_S):
                    await opening
            if self._place is not None:
                await self.__aexit__(type(error), error, None)
            raise
        return self

    async def _open(self) -> None:
        content = await self._transport.call("POST", "/sessions", body=self._body)
        self._place = _parse(content, NewSessionAnswer)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._is_finished:
                return
            if error is None:
                await self.finish()
                return
            try:
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self.finish(error=describe(error), stop_reason=_end_of(error))
            except (AgentLoopError, TimeoutError) as failure:
                # The caller must see the first error. The session ends as incomplete when it expires.
                _log.warning("session_not_finished", session=self.session_id, reason=str(failure))
        finally:
            if self._openai is not None:
                await self._openai.close()

    @property
    def base_url(self) -> str:
        """The base URL for an OpenAI client, ending with /v1."""
        place = self._opened
        if place.direct_url is not None and _may_bypass(self._transport.url, place.direct_url):
            return place.direct_url
        # Use the URL by which this client reaches the service, since a proxy may have a different address.
        return f"{self._transport.url}/sessions/{self.session_id}/v1"

    @property
    def api_key(self) -> str:
        """The key for the agent, which only allows calls in this session."""
        return self._opened.api_key

    @property
    def control_key(self) -> str:
        """The key that also allows to reward, finish and revoke the session. Do not pass it to the agent."""
        return self._opened.control_key

    @property
    def openai(self) -> AsyncOpenAI:
        """An OpenAI client for the session, created on first use and closed with the context."""
        if self._openai is None:
            from openai import AsyncOpenAI  # noqa: PLC0415 - the import takes a second

            self._openai = AsyncOpenAI(
                api_key=self.api_key,
                base_url=self.base_url,
                max_retries=self._max_retries,
                timeout=self._timeout_s,
            )
        return self._openai

    async def reward(self, reward: float | Score) -> None:
        """Set the reward, or the values of a `Score`. Later values replace earlier ones.

        Raises SessionFinished, InvalidRequest for a number that is not finite or an unknown turn, and RewardError
        for a score that does not fit the session's trajectory.
        """
        body = check_body(score_values(await self._resolved(reward)), RewardBody)
        await self._transport.call("POST", f"{self._path}/reward", body=body, key=self.control_key)

    async def revoke(self) -> None:
        """Refuse further calls in this session. It can still be rewarded and finished. Idempotent.

        Raises SessionFinished.
        """
        await self._transport.call("POST", f"{self._path}/revoke", key=self.control_key)

    async def status(self) -> SessionAnswer:
        """Return the current state of the session."""
        return _parse(await self._transport.call("GET", self._path), SessionAnswer)

    async def trajectories(self) -> list[Trajectory]:
        """Return the trajectories recorded so far; incomplete while calls are open."""
        content = await self._transport.call("GET", f"{self._path}/trajectories", accept=MSGPACK)
        return decode_trajectories(content)

    async def trajectory(self) -> Trajectory:
        """Return the only trajectory of the session."""
        return _only(await self.trajectories())

    async def finish(
        self,
        *,
        reward: float | Score | None = None,
        reward_error: str = "",
        error: str = "",
        stop_reason: SessionEnd | None = None,
        wait_s: float = 0.0,
    ) -> Trajectory:
        """Finish the session and return its durable record. With an `error`, the record is incomplete.

        `reward_error` is the reason that there is no reward. Open calls have `wait_s` to end, then they fail. A
        repeated call returns the same record.
        """
        values = {
            **score_values(Score() if reward is None else await self._resolved(reward)),
            "reward_error": reward_error[:MAX_ERROR_CHARS],
            "error": error[:MAX_ERROR_CHARS],
            "stop_reason": stop_reason,
            "wait_s": float(wait_s),
        }
        body = check_body(values, FinishBody)
        content = await self._transport.call(
            "POST",
            f"{self._path}/finish",
            body=body,
            accept=MSGPACK,
            extra_s=wait_s,
            key=self.control_key,
        )
        self._is_finished = True
        return _only(decode_trajectories(content))

    async def _resolved(self, reward: float | Score) -> Score:
        """Validate the score, and replace path indexes by turn ids with the help of the trajectory."""
        if not isinstance(reward, Score):
            return Score(float(reward))
        needs_paths = reward.main is not None or any(isinstance(name, int) for name in reward.paths)
        return resolved(reward, await self.trajectory()) if needs_paths else checked(reward)

    @property
    def _path(self) -> str:
        return f"/sessions/{self._opened.session_id}"

    @property
    def _opened(self) -> NewSessionAnswer:
        if self._place is None:
            raise InvalidRequest("use the session as a context manager: `async with client.session() as session`")
        return self._place


def _may_bypass(own_url: str, direct_url: str) -> bool:
    """Return True if the client can call the session's host directly.

    A client that uses a host name cannot, because the name may be a proxy's.
    """
    own, direct = (urlsplit(url).hostname or "" for url in (own_url, direct_url))
    return is_loopback(own) or (is_address(own) and not is_loopback(direct))


def describe(error: BaseException) -> str:
    """Return an error's type and the first line of its message, as one line for a record."""
    return error_line(error)[:MAX_ERROR_CHARS]


def _end_of(error: BaseException) -> SessionEnd:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return "deadline" if isinstance(error, TimeoutError) else "loop_failed"


def _only(records: list[Trajectory]) -> Trajectory:
    if len(records) != 1:
        raise AgentLoopError(
            f"the response has {len(records)} records of one session: check that the URL is an agentloop service"
        )
    return records[0]


def _parse(content: bytes, kind: type[A]) -> A:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise AgentLoopError("the response is not a session: check that the URL is an agentloop service") from error
