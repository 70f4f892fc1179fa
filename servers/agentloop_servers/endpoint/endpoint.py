"""The endpoint as its routes see it, and its bounds. `app.py` makes the one `Endpoint` of a process.

Ownership: sessions belong to `registry.py`, conversations to `agentloop/sessions/session.py`; routes hold neither.
The Protocols say what routes ask of them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from agentloop.chat import CallKey, ChatCall, ChatPiece, ChatResult
from agentloop.errors import ModelNotFound, Overloaded
from agentloop.parsers import Parser
from agentloop.rendering import Renderer
from agentloop.sessions import Prompt, SessionFacts
from agentloop.types import JSON, Message, StopReason, Trajectory
from agentloop_servers.endpoint.peers import Peers
from agentloop_servers.endpoint.session_values import NewSession

DEFAULT_MODEL = "default"
"""The name under which every service's model is known, whatever it is."""


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """Every bound of the endpoint's HTTP side; those of bodies stand beside the bodies."""

    max_open_calls: int = 4096  # model calls at once; the next one gets 429
    timeout_s: float = 600.0  # of one call that names no shorter one
    keep_alive_s: float = 5.0  # silence of a stream until a comment is sent
    send_timeout_s: float = 30.0  # how long a client may leave what was sent unread
    registry_timeout_s: float = 60.0  # of what only touches the registry


class CallableSession(Protocol):
    """A session, as a model call uses it: `agentloop.sessions.session.Session`."""

    @property
    def facts(self) -> SessionFacts: ...

    async def call(self, chat: ChatCall, key: CallKey) -> ChatResult:
        """One answer. Raises SessionFinished, and whatever the call's fault is."""

    def stream(self, chat: ChatCall, key: CallKey) -> AsyncIterator[ChatPiece | ChatResult]:
        """The same answer in pieces, the whole last."""

    async def preview(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> Prompt:
        """The prompt that a call would have; nothing is kept."""


class RecordedSession(CallableSession, Protocol):
    """A session, as its own routes use it."""

    @property
    def num_turns(self) -> int: ...

    @property
    def num_open_calls(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_complete(self) -> bool: ...

    def trajectory(self) -> Trajectory:
        """Return what is recorded by now."""

    async def set_reward(self, reward: float) -> None:
        """Durable on return. Raises SessionFinished."""


class SessionRegistry(Protocol):
    """The registry of sessions: `registry.Sessions`, whose docstrings say what each method raises.

    `owner` is "" where the service asks for no keys, and None where a session key proved the right to the session.
    """

    async def create(self, wanted: NewSession, owner: str) -> RecordedSession: ...

    def resident(self, session_id: str, owner: str | None) -> RecordedSession | None: ...

    async def find(self, session_id: str, owner: str | None) -> RecordedSession: ...

    async def find_or_create(self, session_id: str | None, owner: str) -> RecordedSession: ...

    async def finish(
        self,
        session_id: str,
        owner: str | None,
        *,
        stop_reason: StopReason,
        error: str,
        reward: float | None,
        reward_error: str,
        wait_s: float,
    ) -> Trajectory: ...

    async def delete(self, session_id: str, owner: str | None) -> None: ...

    def api_key(self, session_id: str) -> str: ...

    def session_of_key(self, key: str) -> str | None: ...


@dataclass(slots=True)
class Endpoint:
    """The OpenAI-compatible endpoint of one process, over one model."""

    sessions: SessionRegistry
    renderer: Renderer
    parser: Parser
    model_name: str
    max_model_len: int
    limits: EndpointLimits = EndpointLimits()
    created_at: int = 0  # seconds since 1970, as `GET /v1/models` tells
    unix_time: Callable[[], float] = time.time
    peers: Peers | None = None  # the endpoint's other processes, if there are any
    direct_url: str | None = None  # this process's own, where this host reaches it without a proxy
    num_open_calls: int = field(default=0, init=False)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound for a name that this service does not serve."""
        if name not in (self.model_name, DEFAULT_MODEL):
            raise ModelNotFound(
                f"the model {name[:200]!r} does not exist; there is {self.model_name!r}", param="model"
            )

    def check_own(self, session_id: str) -> None:
        """Raises Elsewhere if another process of the endpoint has the session."""
        if self.peers is not None:
            self.peers.check_own(session_id)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold one of the places for calls. Raises Overloaded if all are taken."""
        if self.num_open_calls >= self.limits.max_open_calls:
            raise Overloaded(f"{self.limits.max_open_calls} calls are running")
        self.num_open_calls += 1
        try:
            yield
        finally:
            self.num_open_calls -= 1
