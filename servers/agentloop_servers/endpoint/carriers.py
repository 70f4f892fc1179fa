"""Who calls, and which session a request means.

A session is named by the URL path, by a session key, by the header `X-Session-ID`, or by a body field. One that the
path or a key names must exist; by header or body it is created on its first use; without any name the call gets a
session of its own. Names that disagree are refused: nobody's data may land in a session by accident.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from agentloop.api import ID_PATTERN
from agentloop.errors import DeadlineExceeded, Forbidden, InvalidRequest, SessionNotFound, Unauthorized
from agentloop_servers.endpoint.endpoint import CallableSession, Endpoint, SessionRegistry
from agentloop_servers.http import Keys, credential_of

SESSION_HEADER = "x-session-id"
SESSION_KEY_PREFIX = "sk-agentloop-"
SECURED: dict[str, Any] = {"security": [{"bearer": []}, {"x-api-key": []}]}
"""What the OpenAPI document says of routes behind `admit`."""

_SESSION_ID = re.compile(ID_PATTERN)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the owner that a user key makes ("" without keys), or the holder of a session key."""

    owner: str = ""
    session_id: str | None = None  # of the session key

    @property
    def reaches(self) -> str | None:
        """The owner whose sessions it may use; None: that of its key, whoever owns it."""
        return self.owner if self.session_id is None else None


def admit(keys: Keys, sessions: SessionRegistry) -> Callable[[Request], Awaitable[None]]:
    """A route dependency: raises Unauthorized unless a user key or a session key of this run is given."""

    async def check(request: Request) -> None:
        credential = credential_of(request)
        if credential is not None and credential.startswith(SESSION_KEY_PREFIX):
            session_id = sessions.session_of_key(credential)
            if session_id is None:  # where no keys are asked for, too: its calls would land in other sessions
                raise Unauthorized("this session key is none of this service")
            caller = Caller(session_id=session_id)
        else:
            caller = Caller(keys.owner_of(request))
        request.scope["state"]["caller"] = caller

    return check


def caller_of(request: Request) -> Caller:
    """Who sent it, after `admit`."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def require_owner(request: Request) -> str:
    """The owner, where a session key is not enough. Raises Forbidden."""
    caller = caller_of(request)
    if caller.session_id is not None:
        raise Forbidden("a session key opens only its own session")
    return caller.owner


async def session_of(request: Request, endpoint: Endpoint, body_session_id: str | None) -> CallableSession:
    """The session that a request means; from here on its answer has `x-session-id`.

    Raises InvalidRequest for names that disagree, SessionNotFound, Gone, and Elsewhere.
    """
    caller = caller_of(request)
    in_path = request.path_params.get("session_id")
    if in_path is not None and caller.session_id not in (None, in_path):
        raise SessionNotFound(f"there is no session {in_path!r}", param="session_id")
    named = in_path if in_path is not None else caller.session_id
    offered = _offered(request, body_session_id)
    if named is not None and offered is not None and named != offered:
        raise InvalidRequest(f"the request names two sessions, {named!r} and {offered!r}", param=SESSION_HEADER)
    known = named if named is not None else offered
    if known is not None:
        endpoint.check_own(known)
    reaches = caller.reaches if named is not None else caller.owner
    found: CallableSession | None = None if known is None else endpoint.sessions.resident(known, reaches)
    if found is None:
        found = await _found(endpoint, named, offered, caller)
    request.scope["state"]["session_id"] = found.facts.session_id
    return found


async def _found(endpoint: Endpoint, named: str | None, offered: str | None, caller: Caller) -> CallableSession:
    """The session from where it is, or a new one."""
    sessions = endpoint.sessions
    try:
        async with asyncio.timeout(endpoint.limits.registry_timeout_s):
            if named is None:
                return await sessions.find_or_create(offered, caller.owner)
            return await sessions.find(named, caller.reaches)
    except TimeoutError as error:
        raise DeadlineExceeded("the session could not be had in time") from error


def names_session(request: Request) -> bool:
    """Whether the URL, the key or the header names a session."""
    named = "session_id" in request.path_params or SESSION_HEADER in request.headers
    return named or caller_of(request).session_id is not None


def _offered(request: Request, body_session_id: str | None) -> str | None:
    """The session that header and body name, if any."""
    names = {*request.headers.getlist(SESSION_HEADER)}
    if body_session_id is not None:
        names.add(body_session_id)
    if len(names) > 1:
        raise InvalidRequest("header and body name different sessions", param=SESSION_HEADER)
    for name in names:
        if _SESSION_ID.fullmatch(name) is None:
            raise InvalidRequest("a session id is 1 to 128 letters, digits, `.`, `_` or `-`", param=SESSION_HEADER)
        return name
    return None
