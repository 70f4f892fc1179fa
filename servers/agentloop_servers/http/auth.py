"""Authentication of requests, and resolution of the session that a request names.

The URL path, a session key, the header `X-Session-ID` or a body field names the session. A session named by the
path or by a key must exist; one named by header or body is created on first use; a call without a name gets a new
session. Conflicting names are rejected, so that no call is recorded in the wrong session. If the path names the
session, the header is ignored: vLLM clients send their own `X-Session-ID` with every call, as a hint for a router.
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
_SESSION_KEY_PURPOSE = (
    b"agentloop session key\0"  # domain separation: other digests of the run's secret are not keys
)
_CONTROL_KEY_PURPOSE = b"agentloop control key\0"
_SESSION_ID = re.compile(ID_PATTERN)
_OWN_ID = re.compile(OWN_ID_PATTERN)
_BEARER = re.compile(r"Bearer ([\x21-\x7e]{1,512})")


@dataclass(frozen=True, slots=True)
class User:
    """A user's name and the SHA-256 digests of its keys. `retired` keys no longer authenticate."""

    name: str
    keys: tuple[bytes, ...]
    retired: tuple[bytes, ...] = ()
    is_admin: bool = False
    limits: UserLimits = NO_LIMITS
    pushes_adapters: bool = False  # may push adapters by name, for its own calls

    @classmethod
    def of_key(cls, key: str, *, is_admin: bool = False) -> User:
        """Make a user from the text of a key; its name is derived from the key."""
        digest = key_digest(key)
        return cls(_name_of(digest), (digest,), is_admin=is_admin)

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which a store may hold the user's data, the current name first. Without a user file every
        key is a user named after the key, so records from then have these names."""
        return tuple(dict.fromkeys((self.name, *map(_name_of, (*self.keys, *self.retired)))))


class Keys:
    """The users of a service and their keys, which clients send as a bearer token or as `x-api-key`.

    Without user keys (`is_open`) the user routes need no key, but only this machine can call them: the guard
    requires a loopback Host. An admin key is also a user key. With users but no admin, the admin routes are closed;
    without either, they accept peers on this machine. An agent's session key gives access to its session only.
    """

    users: tuple[User, ...]
    metrics_digest: bytes | None = None  # digest of the key that gives access to the metrics only

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
        """Make keys from their texts. Raises InvalidRequest for a key that an HTTP header cannot carry."""
        texts = list(user_keys)
        for text in [*texts, *([admin_key] if admin_key is not None else [])]:
            if _BEARER.fullmatch(f"Bearer {text}") is None:
                raise InvalidRequest(
                    f"a key of {len(text)} characters is malformed: a key is 1 to 512 printable ASCII characters"
                    " without spaces"
                )
        users = {text: User.of_key(text) for text in texts}
        if admin_key is not None:
            users[admin_key] = User.of_key(admin_key, is_admin=True)
        return cls(users.values(), is_open=not texts)

    @classmethod
    def from_environment(cls, user_keys_name: str, admin_key_name: str) -> Keys:
        """Make keys from two environment variables. User keys are separated by commas."""
        users = [key for key in os.environ.get(user_keys_name, "").split(",") if key]
        return cls.of(users, os.environ.get(admin_key_name) or None)

    @property
    def notice(self) -> str | None:
        """The warning to log when the service starts without an admin key; None if there is one."""
        if self.has_admin or not self.is_open:
            return None
        return (
            "no keys are configured: any request from this machine can pause, update and cancel, including one"
            " that an agent sends without its key; if agents are not trusted, set AGENTLOOP_KEY and"
            " AGENTLOOP_ADMIN_KEY, or `users`"
        )

    def named(self, owner: str) -> User | None:
        """Return the user with this current or former name."""
        return self._by_name.get(owner)

    @property
    def has_admin(self) -> bool:
        return any(user.is_admin for user in self.users)

    def check_bind(self, host: str) -> None:
        """Raise InvalidRequest if a service on `host` would accept other machines without keys."""
        if not is_loopback(host) and (self.is_open or not self.has_admin):
            raise InvalidRequest(
                f"a service on {host} needs a user key and an admin key: other machines can reach this address;"
                " set AGENTLOOP_KEY and AGENTLOOP_ADMIN_KEY, or listen on 127.0.0.1",
                param="host",
            )

    def turn_user(self, headers: Headers, opened_by: Callable[[str], SessionKey | None]) -> str:
        """Return the name of the user that fair scheduling charges for a request; "" for callers without a valid
        key. A session key is charged to the owner of the session."""
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
        """Route dependency: raise Unauthorized without a valid key, Forbidden with a session key."""
        if self.is_open:
            _refuse_session_keys(request)
        else:
            self.user_of(request)

    async def require_admin(self, request: Request) -> None:
        """Route dependency: raise Unauthorized without a valid key, Forbidden with a user's or session's key."""
        if self.is_open and not self.has_admin:
            _refuse_session_keys(request)
            if request.client is None or not is_loopback(request.client.host):
                raise Forbidden(
                    "this route needs an admin key: the service has none, so it accepts only callers on its own"
                    " machine; set AGENTLOOP_ADMIN_KEY"
                )
        elif not self.user_of(request).is_admin:
            raise Forbidden("this route needs the admin key, and the request carries another user's key")

    async def require_owner(self, request: Request) -> None:
        """Route dependency: like `require_user`, but like `require_admin` in a service without user keys."""
        await (self.require_admin if self.is_open else self.require_user)(request)

    def sees(self, request: Request) -> tuple[str, ...] | None:
        """Return the names of the user whose records an authenticated caller may read; None for all users'
        records."""
        user = None if self.is_open else self.user_of(request)
        return None if user is None or user.is_admin else user.names

    async def require_metrics(self, request: Request) -> None:
        """Route dependency: like `require_admin`, but also accepts the metrics key."""
        credential = credential_of(request)
        if credential is None or key_digest(credential) != self.metrics_digest:
            await self.require_admin(request)

    def sees_as(self, caller: Caller) -> tuple[str, ...] | None:
        """Return the names of the user whose adapters a caller may use, also with a session key; None for all."""
        user = self.named(caller.owner)
        is_admin = caller.key is None and user is not None and user.is_admin
        return None if self.is_open or is_admin else caller.names if caller.key is None else (caller.owner,)

    async def require_pusher(self, request: Request) -> None:
        """Route dependency: like `require_admin`, but also accepts users that may push their own adapters."""
        if self.is_open or not self.user_of(request).pushes_adapters:
            await self.require_admin(request)

    def caller(self, request: Request) -> Caller:
        """Return the caller as a user; its name is "" if the user routes are open. Raises Unauthorized."""
        if self.is_open:
            # If one of them is a session key, ignoring it would record the call outside its session.
            if len(_credentials(request)) > 1:
                raise InvalidRequest(
                    "the request carries two different keys: send one, as `Authorization` or as `x-api-key`",
                    param="authorization",
                )
            return Caller()
        user = self.user_of(request)
        return Caller(user.names, is_admin=user.is_admin)

    def user_of(self, request: Request) -> User:
        """Return the user whose key a request carries. Raises Unauthorized.

        Keys are looked up by digest, so the duration of the lookup reveals nothing about them.
        """
        credential = credential_of(request)
        user = self._by_key.get(key_digest(credential)) if credential is not None else None
        if user is None:
            raise Unauthorized(
                "send one header `Authorization: Bearer <key>` or `x-api-key: <key>` with a known key"
            )
        return user


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of a key, the only stored form."""
    return hashlib.sha256(key.encode()).digest()


def metrics_digest(name: str) -> bytes | None:
    """Return the digest of the metrics key in the environment variable `name`; None if it is not set."""
    key = os.environ.get(name)
    return key_digest(key) if key else None


def _name_of(digest: bytes) -> str:
    """Return the name of a user whose key comes from the environment, which has no user names."""
    return f"key-{digest.hex()[:12]}"


def credential_of(request: Request) -> str | None:
    """Return the key of a request; None if it has no key, a malformed key or several different keys."""
    if len(request.headers.getlist("authorization")) > 1 or len(request.headers.getlist("x-api-key")) > 1:
        return None
    credentials = _credentials(request)
    return credentials.pop() if len(credentials) == 1 else None


def _credentials(request: Request) -> set[str | None]:
    """Return the keys of a request, with None for the malformed ones."""
    texts = [
        *request.headers.getlist("authorization"),
        *(f"Bearer {key}" for key in request.headers.getlist("x-api-key")),
    ]
    return {match[1] if (match := _BEARER.fullmatch(text)) else None for text in texts}


def _refuse_session_keys(request: Request) -> None:
    for credential in _credentials(request):
        if credential is not None and credential.startswith(_SESSION_KEY_PREFIXES):
            raise Forbidden("a session key opens only its own session: this route needs a user key")


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The permissions of a session key: model calls, and with `is_control` also to reward and end the session."""

    session_id: str
    is_control: bool = False


class SessionKeys:
    """Makes and checks the two keys of each session of a run: the agent's key and the owner's control key.

    A key consists of a prefix for its kind, the session id, a dot, and the HMAC-SHA256 of kind and id under the
    run's secret, so checking it needs no table. It expires with its session, because session ids are never reused.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def agent_key(self, session_id: str) -> str:
        """Return the key for model calls in this session."""
        return self._key(SessionKey(session_id))

    def control_key(self, session_id: str) -> str:
        """Return the key that can also reward, finish, revoke and delete this session."""
        return self._key(SessionKey(session_id, is_control=True))

    def opened_by(self, key: str) -> SessionKey | None:
        """Return the permissions of `key`; None if it is not a key of this run."""
        session_id, _, _ = key.partition("-agentloop-")[2].rpartition(".")
        opened = SessionKey(session_id, key.startswith(_CONTROL_KEY_PREFIX))
        # Compare bytes: `compare_digest` raises for non-ASCII text, and clients can send any text.
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


# Callers


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: a user with all its names ("" in a service without users), or a session key."""

    names: tuple[str, ...] = ("",)
    key: SessionKey | None = None
    is_admin: bool = False  # may use the sessions of all users

    @property
    def owner(self) -> str:
        """The current name of the user, or of the owner of the key's session."""
        return self.names[0] if self.key is None else owner_of(self.key.session_id)

    @property
    def session_id(self) -> str | None:
        """The internal id of the key's session, which includes the owner."""
        return None if self.key is None else self.key.session_id

    @property
    def user_names(self) -> tuple[str, ...] | None:
        """The names of the user whose sessions the caller may use; None if a session key names the only session."""
        return self.names if self.key is None else None


def authenticate(
    keys: Keys, opened_by: Callable[[str], SessionKey | None], *, takes_agents: bool = True
) -> Callable[[Request], Awaitable[None]]:
    """Make a route dependency that sets the request's `Caller` from a user key or from a session key of this run.
    It raises Unauthorized without a valid key, and Forbidden for an agent's key unless the route `takes_agents`."""

    async def check(request: Request) -> None:
        credential, passed_on = credential_of(request), request.scope["state"].get("passed_on")
        if passed_on is not None:
            caller = passed_on
        elif credential is not None and credential.startswith(_SESSION_KEY_PREFIXES):
            key = opened_by(credential)
            # Also in a service without keys: the calls would otherwise be recorded in other sessions.
            if key is None:
                raise Unauthorized(
                    "the session key is not valid in this run: its session belongs to another run, or the key is"
                    " damaged; create a session and use its key"
                )
            owner = owner_of(key.session_id)
            if owner and keys.named(owner) is None:
                raise Unauthorized(
                    f"this session key belongs to {owner!r}, which is not a user of this service: add the "
                    "user, or create a session with another key"
                )
            if not (key.is_control or takes_agents):
                raise Forbidden(
                    "an agent's key permits model calls only: this route needs the session's control key, or the"
                    " owner's key"
                )
            caller = Caller(key=key)
        else:
            caller = keys.caller(request)
        request.scope["state"]["caller"] = caller

    return check


def caller_of(request: Request) -> Caller:
    """Return the sender of a request that passed `authenticate`."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def require_user(request: Request) -> Caller:
    """Return the caller. Raises Forbidden if it uses a session key."""
    caller = caller_of(request)
    if caller.key is not None:
        raise Forbidden("a session key opens only its own session: this route needs a user key")
    return caller


def require_control(request: Request, *, has_control_key: bool) -> None:
    """Raise Forbidden for a caller without a key if the creator of the session received a control key."""
    if has_control_key and caller_of(request).names == ("",) and caller_of(request).key is None:
        raise Forbidden("this needs the session's control key: send the one that `POST /sessions` returned")


# Session names


def session_name(request: Request, body_session_id: str | None) -> tuple[str | None, bool]:
    """Return the id of the session that a request names (None if it names no session), and True if it must exist.

    Raises InvalidRequest for conflicting names, and SessionNotFound if the key belongs to another session than the
    path.
    """
    in_path = session_in_path(request) if "session_id" in request.path_params else None
    named = in_path if in_path is not None else caller_of(request).session_id
    offered = set() if in_path is not None else {*request.headers.getlist(SESSION_HEADER)}
    if body_session_id is not None:
        offered.add(body_session_id)
    if len(offered) > 1:
        raise InvalidRequest(
            f"header and body name different sessions: {', '.join(sorted(name[:128] for name in offered))}",
            param=SESSION_HEADER,
        )
    for name in offered:
        if _SESSION_ID.fullmatch(name) is None:
            raise InvalidRequest(
                f"malformed session id {name[:128]!r}: a session id is 1 to 128 letters, digits, `.`, `_` or `-`",
                param=SESSION_HEADER,
            )
        if named is not None and shown_id(named) != name:
            raise InvalidRequest(
                f"the request names two sessions, {shown_id(named)!r} and {name!r}: name one", param=SESSION_HEADER
            )
        return named or name, named is not None
    return named, named is not None


def session_in_path(request: Request) -> str:
    """Return the session id in the path; with a session key, the internal id of the key's session.

    An admin can name another user's session by its full id, for example `alice~step-1`. Raises SessionNotFound if
    the path has no valid id, or not that of the key's session.
    """
    session_id: str = request.path_params["session_id"]
    caller = caller_of(request)
    of_key, pattern = caller.session_id, _OWN_ID if caller.is_admin else _SESSION_ID
    if pattern.fullmatch(session_id) is None or (of_key is not None and shown_id(of_key) != session_id):
        # The same text as for a missing session: a key of another session must not reveal which sessions exist.
        raise SessionNotFound(f"there is no session {session_id[:128]!r}", param="session_id")
    return session_id if of_key is None else of_key


def names_session(request: Request) -> bool:
    """Return True if the URL, the key or the header names a session."""
    named = "session_id" in request.path_params or SESSION_HEADER in request.headers
    return named or caller_of(request).session_id is not None
