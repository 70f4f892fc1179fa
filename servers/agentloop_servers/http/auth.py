"""Authentication, and the name of the session that a request means.

A session is named by the URL path, by a session key, by the header `X-Session-ID`, or by a body field. One that the
path or a key names must exist; by header or body it is created on its first use; without any name the call gets a
session of its own. Names that disagree are refused: no data may land in a session by accident. But beside a
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
from starlette.datastructures import Headers

from agentloop.api.owners import NO_LIMITS, OWN_ID_PATTERN, UserLimits, owner_of, shown_id
from agentloop.api.requests import ID_PATTERN
from agentloop.errors import Forbidden, InvalidRequest, SessionNotFound, Unauthorized
from agentloop.values.checks import is_loopback

SESSION_HEADER: Final = "x-session-id"

_SESSION_KEY_PREFIX = "sk-agentloop-"
_CONTROL_KEY_PREFIX = "ck-agentloop-"
_SESSION_KEY_PREFIXES = _SESSION_KEY_PREFIX, _CONTROL_KEY_PREFIX
_SESSION_KEY_PURPOSE = b"agentloop session key\0"  # the run's secret has other uses, whose digests are no keys
_CONTROL_KEY_PURPOSE = b"agentloop control key\0"
_SESSION_ID = re.compile(ID_PATTERN)
_OWN_ID = re.compile(OWN_ID_PATTERN)
_BEARER = re.compile(r"Bearer ([\x21-\x7e]{1,512})")


@dataclass(frozen=True, slots=True)
class User:
    """A user: a name, and the SHA-256 digests of its keys. `retired` keys open nothing any more."""

    name: str
    keys: tuple[bytes, ...]
    retired: tuple[bytes, ...] = ()
    is_admin: bool = False
    limits: UserLimits = NO_LIMITS
    pushes_adapters: bool = False  # by name, for its own calls

    @classmethod
    def of_key(cls, key: str, *, is_admin: bool = False) -> User:
        """Return the user of a key in the environment."""
        digest = key_digest(key)
        return cls(_name_of(digest), (digest,), is_admin=is_admin)

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which a store may have the user's data, the present one first: without a file of users
        each key is a user with its own name."""
        return tuple(dict.fromkeys((self.name, *map(_name_of, (*self.keys, *self.retired)))))


class Keys:
    """The users of a service and their keys, sent as a bearer or as `x-api-key`.

    Without user keys (`is_open`) the user routes are open, to this machine alone: the guard asks for a loopback
    Host. An admin's key is a user key too. With users but no admin, the admin routes are closed; without either,
    they are open to peers on this machine. An agent's key never opens more than its session.
    """

    users: tuple[User, ...]
    metrics_digest: bytes | None = None  # of the key that opens the metrics alone

    def __init__(self, users: Iterable[User] = (), *, is_open: bool | None = None) -> None:
        self.learn(users)
        self.is_open = all(user.is_admin for user in self.users) if is_open is None else is_open

    def learn(self, users: Iterable[User]) -> None:
        """Replace the users."""
        self.users = tuple(users)
        self._by_name = {name: user for user in reversed(self.users) for name in user.names}
        self._by_key: dict[bytes, User] = {digest: user for user in self.users for digest in user.keys}

    @classmethod
    def of(cls, user_keys: Iterable[str] = (), admin_key: str | None = None) -> Keys:
        """Make keys from their texts. Raises InvalidRequest for one that no header can carry."""
        texts = list(user_keys)
        for text in [*texts, *([admin_key] if admin_key is not None else [])]:
            if _BEARER.fullmatch(f"Bearer {text}") is None:
                raise InvalidRequest("a key is 1 to 512 printable ASCII characters without spaces")
        users = {text: User.of_key(text) for text in texts}
        if admin_key is not None:
            users[admin_key] = User.of_key(admin_key, is_admin=True)
        return cls(users.values(), is_open=not texts)

    @classmethod
    def from_environment(cls, user_keys_name: str, admin_key_name: str) -> Keys:
        """Make keys from two environment variables; several user keys stand between commas."""
        users = [key for key in os.environ.get(user_keys_name, "").split(",") if key]
        return cls.of(users, os.environ.get(admin_key_name) or None)

    @property
    def notice(self) -> str | None:
        """The warning at the start of a service without an admin's key; None with one."""
        if self.has_admin or not self.is_open:
            return None
        return (
            "without keys any request from this machine may pause, update and cancel, an agent's too if it leaves"
            " its key away; set AGENTLOOP_KEY and AGENTLOOP_ADMIN_KEY, or `users`, where agents are not trusted"
        )

    def named(self, owner: str) -> User | None:
        """Return the user with this name, present or earlier."""
        return self._by_name.get(owner)

    @property
    def has_admin(self) -> bool:
        return any(user.is_admin for user in self.users)

    def check_bind(self, host: str) -> None:
        """Raises InvalidRequest if a service on `host` would be open to other machines without keys."""
        if not is_loopback(host) and (self.is_open or not self.has_admin):
            raise InvalidRequest(f"a service on {host} needs a user key and an admin key", param="host")

    def turn_user(self, headers: Headers, opened_by: Callable[[str], SessionKey | None]) -> str:
        """Return the user whose turn a request takes; "" for all callers without a valid key. A session's key takes
        the turn of the session's owner."""
        texts = headers.getlist("authorization")[:1], headers.getlist("x-api-key")[:1]
        for credential in (*(text.removeprefix("Bearer ") for text in texts[0]), *texts[1]):
            if credential.startswith(_SESSION_KEY_PREFIXES):
                # A forged key may name any user, so its name counts only with a valid signature.
                key = opened_by(credential)
                user = None if key is None else self.named(owner_of(key.session_id))
            else:
                user = self._by_key.get(key_digest(credential))
            if user is not None:
                return user.name
        return ""

    async def require_user(self, request: Request) -> None:
        """Route dependency: raises Unauthorized without a good key, Forbidden with a session's."""
        if self.is_open:
            _refuse_session_keys(request)
        else:
            self.user_of(request)

    async def require_admin(self, request: Request) -> None:
        """Route dependency: raises Unauthorized without a good key, Forbidden with a user's or a session's."""
        if self.is_open and not self.has_admin:
            _refuse_session_keys(request)
            if request.client is None or not is_loopback(request.client.host):
                raise Forbidden("without an admin key this is only for callers on the service's own machine")
        elif not self.user_of(request).is_admin:
            raise Forbidden("this needs the admin key")

    async def require_owner(self, request: Request) -> None:
        """Route dependency: raises as `require_user` does, in a service without user keys as `require_admin`."""
        await (self.require_admin if self.is_open else self.require_user)(request)

    def sees(self, request: Request) -> tuple[str, ...] | None:
        """Return the names of the user whose records an admitted caller sees; None: those of all users."""
        user = None if self.is_open else self.user_of(request)
        return None if user is None or user.is_admin else user.names

    async def require_metrics(self, request: Request) -> None:
        """Route dependency: raises as `require_admin` does, unless the request carries the metrics' key."""
        credential = credential_of(request)
        if credential is None or key_digest(credential) != self.metrics_digest:
            await self.require_admin(request)

    def sees_as(self, caller: Caller) -> tuple[str, ...] | None:
        """Return as `sees` whose adapters a caller sees, which may have a session's key."""
        user = self.named(caller.owner)
        is_admin = caller.key is None and user is not None and user.is_admin
        return None if self.is_open or is_admin else caller.names if caller.key is None else (caller.owner,)

    async def require_pusher(self, request: Request) -> None:
        """Route dependency: raises as `require_admin` does, but for users that may push adapters of their own."""
        if self.is_open or not self.user_of(request).pushes_adapters:
            await self.require_admin(request)

    def caller(self, request: Request) -> Caller:
        """Return the caller as a user, without a name where user routes are open. Raises Unauthorized."""
        if self.is_open:
            if len(_credentials(request)) > 1:  # one may be a session's, whose record would lack the call
                raise InvalidRequest("the request carries two different keys", param="authorization")
            return Caller()
        user = self.user_of(request)
        return Caller(user.names, is_admin=user.is_admin)

    def user_of(self, request: Request) -> User:
        """Return the user whose key a request carries. Raises Unauthorized.

        Keys are looked up by their digests, so the time that this takes tells nothing of them.
        """
        credential = credential_of(request)
        user = self._by_key.get(key_digest(credential)) if credential is not None else None
        if user is None:
            raise Unauthorized(
                "send one header `Authorization: Bearer <key>` or `x-api-key: <key>` with a known key"
            )
        return user


def key_digest(key: str) -> bytes:
    """Return the stored form of a key."""
    return hashlib.sha256(key.encode()).digest()


def metrics_digest(name: str) -> bytes | None:
    """Return the digest of the metrics' key in an environment variable; None without one."""
    key = os.environ.get(name)
    return key_digest(key) if key else None


def _name_of(digest: bytes) -> str:
    """Return the name of a user whom the environment gives a key and no name."""
    return f"key-{digest.hex()[:12]}"


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


def _refuse_session_keys(request: Request) -> None:
    """Raises Forbidden for a request that carries a session's key."""
    for credential in _credentials(request):
        if credential is not None and credential.startswith(_SESSION_KEY_PREFIXES):
            raise Forbidden("a session key opens only its own session")


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The rights of a session's key: reward and end too with `is_control`, else calls alone."""

    session_id: str
    is_control: bool = False


class SessionKeys:
    """The keys of one run's sessions, two each, checked without a table: an agent's, and its owner's control key.

    A key is its kind's prefix, the session's id, a dot, and the HMAC-SHA256 of kind and id under the run's secret.
    It ends with its session: ids are never used twice.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def agent_key(self, session_id: str) -> str:
        """Return the key for calls of this session."""
        return self._key(SessionKey(session_id))

    def control_key(self, session_id: str) -> str:
        """Return the key that rewards, finishes, revokes and deletes this session too."""
        return self._key(SessionKey(session_id, is_control=True))

    def opened_by(self, key: str) -> SessionKey | None:
        """Return the rights of `key`; None if it is no key of this run."""
        session_id, _, _ = key.partition("-agentloop-")[2].rpartition(".")
        opened = SessionKey(session_id, key.startswith(_CONTROL_KEY_PREFIX))
        # In bytes: `compare_digest` takes no text beyond ASCII, and clients send what they like.
        is_good = hmac.compare_digest(key.encode(errors="replace"), self._key(opened).encode(errors="replace"))
        return opened if is_good else None

    def _key(self, opens: SessionKey) -> str:
        prefix, purpose = (
            (_CONTROL_KEY_PREFIX, _CONTROL_KEY_PURPOSE)
            if opens.is_control
            else (_SESSION_KEY_PREFIX, _SESSION_KEY_PURPOSE)
        )
        signed = hmac.digest(self._secret, purpose + opens.session_id.encode(errors="replace"), "sha256")
        return f"{prefix}{opens.session_id}.{signed.hex()}"


# --- callers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: a user, by all its names ("" without users), or a session's key."""

    names: tuple[str, ...] = ("",)
    key: SessionKey | None = None
    is_admin: bool = False  # it may use the sessions of all users

    @property
    def owner(self) -> str:
        """The present name of the user, or of the owner of the key's session."""
        return self.names[0] if self.key is None else owner_of(self.key.session_id)

    @property
    def session_id(self) -> str | None:
        """The service's own id of the key's session."""
        return None if self.key is None else self.key.session_id

    @property
    def user_names(self) -> tuple[str, ...] | None:
        """The names of the user whose sessions it may use; None: its key names the one session."""
        return self.names if self.key is None else None


def authenticate(
    keys: Keys, opened_by: Callable[[str], SessionKey | None], *, takes_agents: bool = True
) -> Callable[[Request], Awaitable[None]]:
    """Make a route dependency that sets the request's `Caller`, by a user key or a session's key of this run.
    Raises Unauthorized without one, and Forbidden for an agent's key unless the route `takes_agents`."""

    async def check(request: Request) -> None:
        credential, passed_on = credential_of(request), request.scope["state"].get("passed_on")
        if passed_on is not None:
            caller = passed_on
        elif credential is not None and credential.startswith(_SESSION_KEY_PREFIXES):
            key = opened_by(credential)
            if key is None:  # where no keys are asked for, too: its calls would land in other sessions
                raise Unauthorized("this session key is none of this service")
            owner = owner_of(key.session_id)
            if owner and keys.named(owner) is None:
                raise Unauthorized(f"this session key belongs to {owner!r}, which is not a user of this service")
            if not (key.is_control or takes_agents):
                raise Forbidden("an agent's key is for calls: this needs the session's control key, or its owner's")
            caller = Caller(key=key)
        else:
            caller = keys.caller(request)
        request.scope["state"]["caller"] = caller

    return check


def caller_of(request: Request) -> Caller:
    """Return the sender of a request, as `authenticate` has found it."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def require_user(request: Request) -> Caller:
    """Return the caller. Raises Forbidden if it has a session's key."""
    caller = caller_of(request)
    if caller.key is not None:
        raise Forbidden("a session key opens only its own session")
    return caller


def require_control(request: Request, *, has_control_key: bool) -> None:
    """Raises Forbidden for a caller without keys, of a session whose control key its maker was given."""
    if has_control_key and caller_of(request).names == ("",) and caller_of(request).key is None:
        raise Forbidden("this needs the session's control key, as `POST /sessions` gave it")


# --- names of sessions ------------------------------------------------------------------------------------


def session_name(request: Request, body_session_id: str | None) -> tuple[str | None, bool]:
    """Return the id of the session that a request names, and if it must exist. None: it names none.

    Raises InvalidRequest for names that disagree, and SessionNotFound for a path with another session's key.
    """
    in_path = session_in_path(request) if "session_id" in request.path_params else None
    named = in_path if in_path is not None else caller_of(request).session_id
    offered = set() if in_path is not None else {*request.headers.getlist(SESSION_HEADER)}
    if body_session_id is not None:
        offered.add(body_session_id)
    if len(offered) > 1:
        raise InvalidRequest("header and body name different sessions", param=SESSION_HEADER)
    for name in offered:
        if _SESSION_ID.fullmatch(name) is None:
            raise InvalidRequest("a session id is 1 to 128 letters, digits, `.`, `_` or `-`", param=SESSION_HEADER)
        if named is not None and shown_id(named) != name:
            raise InvalidRequest(
                f"the request names two sessions, {shown_id(named)!r} and {name!r}", param=SESSION_HEADER
            )
        return named or name, named is not None
    return named, named is not None


def session_in_path(request: Request) -> str:
    """Return the session in the path; with a session's key, its own id in the service.

    An admin may name another user's session by its whole id, `alice~step-1`. Raises SessionNotFound if it is no
    id, or not the key's.
    """
    session_id: str = request.path_params["session_id"]
    caller = caller_of(request)
    of_key, pattern = caller.session_id, _OWN_ID if caller.is_admin else _SESSION_ID
    if pattern.fullmatch(session_id) is None or (of_key is not None and shown_id(of_key) != session_id):
        raise SessionNotFound(f"there is no session {session_id[:128]!r}", param="session_id")
    return session_id if of_key is None else of_key


def names_session(request: Request) -> bool:
    """Tell whether the URL, the key or the header names a session."""
    named = "session_id" in request.path_params or SESSION_HEADER in request.headers
    return named or caller_of(request).session_id is not None
