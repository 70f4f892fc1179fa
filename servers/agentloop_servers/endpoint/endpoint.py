"""The endpoint as its routes see it, and its bounds. `processes/endpoint.py` makes the one `Endpoint` of a process.

Ownership: sessions belong to `registry.py`, conversations to `agentloop/sessions/session.py`; routes hold neither.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from agentloop.api.coordinator import NamedAdapter
from agentloop.api.owners import adapter_named
from agentloop.chat.call import CallKey, ChatModel
from agentloop.errors import AgentLoopError, ModelNotFound, Overloaded
from agentloop.parsers.base import Parser
from agentloop.rendering.port import Renderer
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.endpoint.registry import Sessions
from agentloop_servers.endpoint.shards import ShardRouter
from agentloop_servers.endpoint.users import ServedUsers
from agentloop_servers.http.responses import in_time

DEFAULT_MODEL = "default"
"""The name under which every service's model is known, whatever it is."""

MAX_ADAPTERS = 64

_MAX_REFUSED = 4096  # calls of one user that are remembered as refused; an SDK's retry follows within a minute


class ServedBeside(Exception):
    """The call is for another model of the service, whose app answers it: `ingress/app.py`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """Every bound of the endpoint's HTTP side; those of bodies stand beside the bodies."""

    max_open_calls: int = 4096  # model calls at once; the next one gets 429
    score_share: float = 1.0  # of the engines' time while other calls run
    timeout_s: float = 600.0  # of one call that names no shorter one
    keep_alive_s: float = 5.0  # silence of a stream until a comment is sent
    send_timeout_s: float = 30.0  # how long a client may leave what was sent unread
    registry_timeout_s: float = 60.0  # of what only touches the registry
    status_timeout_s: float = 5.0  # of a question to the coordinator


@dataclass(slots=True)
class Endpoint:
    """The OpenAI-compatible endpoint of one process, over one model."""

    sessions: Sessions
    renderer: Renderer
    parser: Parser
    model_name: str
    max_model_len: int
    limits: EndpointLimits = EndpointLimits()
    created_at: int = 0  # seconds since 1970, as `GET /v1/models` tells
    unix_time: Callable[[], float] = time.time
    shards: ShardRouter | None = None  # to the endpoint's other processes, if there are any
    path: str = ""  # below which its routes are, within the service
    public_url: str | None = None  # as others reach the service; None: the address that a connection came in on
    direct_url: str | None = None  # this process's own, on this host; None if there is but one
    live_version: Callable[[], Awaitable[int | None]] | None = None  # asks the coordinator
    users: ServedUsers | None = None
    takes_images: bool = False
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    adapters: dict[str, None] = field(default_factory=dict)  # names of adapters, each the policy that is served now
    by_name: Callable[[], Awaitable[tuple[NamedAdapter, ...]]] | None = None
    """Asks the coordinator for the adapters that are served by name; None: none can be."""
    others: Mapping[str, Endpoint] = field(default_factory=dict)  # of the models beside this one, by name
    num_open_calls: int = field(default=0, init=False)
    _num_refused: dict[str, dict[tuple[str, bytes], int]] = field(default_factory=dict, init=False)

    @property
    def chat_model(self) -> ChatModel:
        """The model, as far as dialects must know it."""
        renderer = self.renderer
        return ChatModel(
            self.parser,
            renderer.vocab_size,
            renderer.facts.template_arguments,
            timeout_s=self.limits.timeout_s,
            takes_images=self.takes_images,
        )

    async def weight_version(self) -> int | None:
        """Return the served weight version; None if there is none, or the coordinator does not answer."""
        if self.live_version is None:
            return None
        try:
            return await in_time(self.live_version(), self.limits.status_timeout_s, "no answer in time")
        except AgentLoopError:
            return None

    def has_model(self, name: str) -> bool:
        """Tell if a name is a model's: the policy's, or that of one beside it."""
        return name in (self.model_name, DEFAULT_MODEL, *self.others)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound for a name that is not served, and ServedBeside for another model's."""
        if name in self.others:
            raise ServedBeside(name)
        if name not in (self.model_name, DEFAULT_MODEL) and name not in self.adapters:
            names = ", ".join(map(repr, (self.model_name, *self.adapters, *self.others)))
            raise ModelNotFound(f"the model {name[:200]!r} does not exist; there is {names}", param="model")

    async def served_adapters(self) -> tuple[NamedAdapter, ...]:
        """Return the adapters that are served by name. Raises what a coordinator's answer raises."""
        if self.by_name is None:
            return ()
        return await in_time(
            self.by_name(), self.limits.status_timeout_s, "the coordinator does not answer in time"
        )

    async def adapter_of(self, name: str, user_names: Sequence[str]) -> str:
        """Return the adapter that a user names as a model; "" for the policy. Raises as `check_model`."""
        if self.by_name is None or self.has_model(name):
            self.check_model(name)
            return ""
        names = [one.name for one in await self.served_adapters()]
        try:
            return adapter_named(name, user_names, names)
        except ModelNotFound as error:
            models = ", ".join(map(repr, (self.model_name, *self.others)))
            raise ModelNotFound(f"{error.message}; the models are {models}", param="model") from error

    def name_adapter(self, name: str) -> None:
        """Accept an adapter's name for the policy, too; beyond `MAX_ADAPTERS` the oldest is dropped."""
        self.adapters.pop(name, None)
        self.adapters[name] = None
        if len(self.adapters) > MAX_ADAPTERS:
            del self.adapters[next(iter(self.adapters))]

    def check_is_here(self, session_id: str) -> None:
        """Raises HeldElsewhere if another process of the endpoint has the session."""
        if self.shards is not None:
            self.shards.check_is_here(session_id)

    def num_refused(self, owner: str, session_id: str, digest: bytes) -> int:
        """Return the number of a session's equal first attempts that were rejected (`noting_refusal`)."""
        return self._num_refused.get(owner, {}).get((session_id, digest), 0)

    @contextmanager
    def noting_refusal(
        self, owner: str, session_id: str | None, key: CallKey
    ) -> Iterator[Callable[[str, str], None]]:
        """Count a first attempt whose block fails before the session accepts it, in memory. Yields the function to
        call with the ids of the session and of the call when the session accepts it.

        Such an attempt may precede its session and has no record in it, but the client's retry must not get the
        answer of another client's equal call (`CallTable.continued_by`).
        """
        accepted: list[str] = []
        try:
            yield lambda _, call_id: accepted.append(call_id)
        except BaseException:
            # A rejected retry adds no client: its first attempt is counted here or recorded by the session.
            if session_id is not None and not accepted and key.retry_count == 0:
                counts = self._num_refused.setdefault(owner, {})
                counts[session_id, key.digest] = counts.pop((session_id, key.digest), 0) + 1
                if len(counts) > _MAX_REFUSED:
                    del counts[next(iter(counts))]
            raise

    @contextmanager
    def hold_call_place(self, owner: str) -> Iterator[None]:
        """Hold a place for a call. Raises Overloaded if all, or all of its user's, are taken."""
        if self.num_open_calls >= self.limits.max_open_calls:
            raise Overloaded(f"{self.limits.max_open_calls} calls are running")
        self.num_open_calls += 1
        try:
            with nullcontext() if self.users is None else self.users.call(owner):
                yield
        finally:
            self.num_open_calls -= 1
