"""Authentication, and the name of the session that a request means.

A session is named by the URL path, by a session key, by the header `X-Session-ID`, or by a body field. One that the
path or a key names must exist; by header or body it is created on its first use; without any name the call gets a
session of its own. Names that disagree are refused: nobody's data may land in a session by accident. But beside a
path the header says nothing: clients of vLLM send one of their own with every call, which a router is to read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from fastapi import Request

from agentloop.api import ID_PATTERN
from agentloop.checks import is_loopback
from agentloop.errors import Forbidden, InvalidRequest, SessionNotFound, Unauthorized

SESSION_HEADER: Final = "x-session-id"

_SESSION_KEY_PREFIX = "sk-agentloop-"
_SESSION_KEY_PURPOSE = b"agentloop session key\0"  # the run's secret has other uses, whose digests are no keys
_SESSION_ID = re.compile(ID_PATTERN)
_BEARER = re.compile(r"Bearer ([\x21-\x7e]{1,512})")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a service, kept as hashes, sent as a bearer or as `x-api-key`.

    Without user keys the user routes are open, to this machine alone: so the guard asks for a loopback Host. The
    admin key is a user key too. With user keys but no admin key, nobody may use the admin routes; without any, the
    peers on this machine may.
    """

    users: tuple[bytes, ...] = ()
    admin: bytes | None = None

    @classmethod
    def of(cls, user_keys: Iterable[str] = (), admin_key: str | None = None) -> Keys:
        """Make keys from their texts. Raises InvalidRequest for one that no header can carry."""
        texts = list(user_keys)
        for text in [*texts, *([admin_key] if admin_key is not None else [])]:
            if _BEARER.fullmatch(f"Bearer {text}") is None:
                raise InvalidRequest("a key is 1 to 512 printable ASCII characters without spaces")
        return cls(tuple(map(_digest, texts)), _digest(admin_key) if admin_key is not None else None)

    @classmethod
    def from_environment(cls, user_keys_name: str, admin_key_name: str) -> Keys:
        """Make keys from two environment variables; several user keys stand between commas."""
        users = [key for key in os.environ.get(user_keys_name, "").split(",") if key]
        return cls.of(users, os.environ.get(admin_key_name) or None)

    def check_bind(self, host: str) -> None:
        """Raises InvalidRequest if a service on `host` would be open to other machines without keys."""
        if not is_loopback(host) and (not self.users or self.admin is None):
            raise InvalidRequest(f"a service on {host} needs a user key and an admin key", param="host")

    async def require_user(self, request: Request) -> None:
        """Route dependency: raises Unauthorized without a good key."""
        if self.users:
            self._role(request)

    async def require_admin(self, request: Request) -> None:
        """Route dependency: raises Unauthorized without a good key, Forbidden with a user's."""
        if not self.users and self.admin is None:
            if request.client is None or not is_loopback(request.client.host):
                raise Forbidden("without an admin key this is only for callers on the service's own machine")
        elif not self._role(request):
            raise Forbidden("this needs the admin key")

    def owner_of(self, request: Request) -> str:
        """Return the digest of the caller's key, or "" where user routes are open. Raises Unauthorized."""
        if not self.users:
            if len(_credentials(request)) > 1:  # one may be a session's, whose record would lack the call
                raise InvalidRequest("the request carries two different keys", param="authorization")
            return ""
        self._role(request)
        return _digest(credential_of(request) or "").hex()

    def reach_of(self, request: Request) -> str | None:
        """Return the owner whose rollouts the caller may see; None, for the admin and without user keys: all.

        Raises Unauthorized.
        """
        return None if not self.users or self._role(request) else self.owner_of(request)

    def _role(self, request: Request) -> bool:
        """Tell whether the caller is the admin. Compares with every key, so that time tells nothing."""
        credential = credential_of(request)
        digest = _digest(credential or "")
        is_user = sum(hmac.compare_digest(digest, known) for known in self.users) > 0
        is_admin = self.admin is not None and hmac.compare_digest(digest, self.admin)
        if credential is None or not (is_user or is_admin):
            raise Unauthorized(
                "send one header `Authorization: Bearer <key>` or `x-api-key: <key>` with a known key"
            )
        return is_admin


def credential_of(request: Request) -> str | None:
    """Return the key a request carries; None without one, with a malformed one, and with several that differ."""
    if len(request.headers.getlist("authorization")) > 1 or len(request.headers.getlist("x-api-key")) > 1:
        return None
    found = _credentials(request)
    return found.pop() if len(found) == 1 else None


def _credentials(request: Request) -> set[str | None]:
    """Return the keys a request carries; None among them stands for malformed ones."""
    texts = [
        *request.headers.getlist("authorization"),
        *(f"Bearer {key}" for key in request.headers.getlist("x-api-key")),
    ]
    return {match[1] if (match := _BEARER.fullmatch(text)) else None for text in texts}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class SessionKeys:
    """The keys of one run's sessions: each opens one session, and is checked without a table.

    A key is `sk-agentloop-{session id}.{HMAC-SHA256 of the id under the run's secret}`. It ends with its session:
    ids are never used twice.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def key_of(self, session_id: str) -> str:
        """Return the key that opens this session."""
        return f"{_SESSION_KEY_PREFIX}{session_id}.{self._digest(session_id)}"

    def session_of(self, key: str) -> str | None:
        """Return the session that `key` opens; None for what is no key of this run."""
        if not key.startswith(_SESSION_KEY_PREFIX):
            return None
        session_id, _, digest = key[len(_SESSION_KEY_PREFIX) :].rpartition(".")
        # In bytes: `compare_digest` takes no text beyond ASCII, and clients send what they like.
        expected = self._digest(session_id).encode()
        return session_id if hmac.compare_digest(digest.encode(errors="replace"), expected) else None

    def _digest(self, session_id: str) -> str:
        return hmac.digest(self._secret, _SESSION_KEY_PURPOSE + session_id.encode(errors="replace"), "sha256").hex()


# --- callers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the owner that a user key makes ("" without keys), or a session key's holder."""

    owner: str = ""
    session_id: str | None = None  # of the session key

    @property
    def reaches(self) -> str | None:
        """The owner whose sessions it may use; None: that of its key, whoever owns it."""
        return self.owner if self.session_id is None else None


def admit(keys: Keys, session_of_key: Callable[[str], str | None]) -> Callable[[Request], Awaitable[None]]:
    """Make a route dependency: raises Unauthorized unless a user key or a session key of this run is given."""

    async def check(request: Request) -> None:
        credential = credential_of(request)
        if credential is not None and credential.startswith(_SESSION_KEY_PREFIX):
            session_id = session_of_key(credential)
            if session_id is None:  # where no keys are asked for, too: its calls would land in other sessions
                raise Unauthorized("this session key is none of this service")
            caller = Caller(session_id=session_id)
        else:
            caller = Caller(keys.owner_of(request))
        request.scope["state"]["caller"] = caller

    return check


def caller_of(request: Request) -> Caller:
    """Return who sent a request, after `admit`."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def require_owner(request: Request) -> str:
    """Return the owner, where a session key is not enough. Raises Forbidden."""
    caller = caller_of(request)
    if caller.session_id is not None:
        raise Forbidden("a session key opens only its own session")
    return caller.owner


# --- names of sessions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionName:
    """The session that a request means; `session_id` None: one of its own."""

    session_id: str | None
    must_exist: bool
    owner: str | None  # None: a session key proved the right to the session


def session_name(request: Request, body_session_id: str | None) -> SessionName:
    """Return the name of the session that a request means.

    Raises InvalidRequest for names that disagree, and SessionNotFound for a path with another session's key.
    """
    caller = caller_of(request)
    in_path = session_in_path(request) if "session_id" in request.path_params else None
    named = in_path if in_path is not None else caller.session_id
    offered = _offered(request if in_path is None else None, body_session_id)
    if named is not None and offered is not None and named != offered:
        raise InvalidRequest(f"the request names two sessions, {named!r} and {offered!r}", param=SESSION_HEADER)
    return SessionName(offered if named is None else named, named is not None, caller.reaches)


def session_in_path(request: Request) -> str:
    """Return the session that the path names. Raises SessionNotFound if it is no id, or not the key's."""
    session_id: str = request.path_params["session_id"]
    if _SESSION_ID.fullmatch(session_id) is None or caller_of(request).session_id not in (None, session_id):
        raise SessionNotFound(f"there is no session {session_id[:128]!r}", param="session_id")
    return session_id


def names_session(request: Request) -> bool:
    """Tell whether the URL, the key or the header names a session."""
    named = "session_id" in request.path_params or SESSION_HEADER in request.headers
    return named or caller_of(request).session_id is not None


def _offered(request: Request | None, body_session_id: str | None) -> str | None:
    """Return the session that header and body name, if any."""
    names = set() if request is None else {*request.headers.getlist(SESSION_HEADER)}
    if body_session_id is not None:
        names.add(body_session_id)
    if len(names) > 1:
        raise InvalidRequest("header and body name different sessions", param=SESSION_HEADER)
    for name in names:
        if _SESSION_ID.fullmatch(name) is None:
            raise InvalidRequest("a session id is 1 to 128 letters, digits, `.`, `_` or `-`", param=SESSION_HEADER)
        return name
    return None
