"""The endpoint as its routes see it, and its limits. `processes/endpoint.py` makes the process's only `Endpoint`.

`registry.py` owns sessions and `agentloop/sessions/session.py` conversations; routes keep neither.
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
from agentloop.values.checks import MAX_TOP_LOGPROBS
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.endpoint.registry import Sessions
from agentloop_servers.endpoint.shards import ShardRouter
from agentloop_servers.endpoint.users import ServedUsers
from agentloop_servers.http.responses import in_time

DEFAULT_MODEL = "default"
"""A name of the model that every service accepts."""

MAX_ADAPTERS = 64

_MAX_REFUSED = 4096  # refused calls remembered for one user; an SDK retries within a minute


class ServedBeside(Exception):
    """The call names another model of the service. `ingress/app.py` passes it to that model's app."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """Limits of the endpoint's HTTP side. Those of bodies are defined with the bodies."""

    max_open_calls: int = 4096  # concurrent model calls; the next one gets 429
    score_share: float = 1.0  # share of the engines' time for scores while other calls run
    timeout_s: float = 600.0  # default timeout of a call
    keep_alive_s: float = 5.0  # a silent stream sends a comment after so long
    send_timeout_s: float = 30.0  # a client may leave sent data unread for so long
    registry_timeout_s: float = 60.0  # for work that touches only the registry
    status_timeout_s: float = 5.0  # for a request to the coordinator


@dataclass(slots=True)
class Endpoint:
    """The OpenAI-compatible endpoint of one process, over one model."""

    sessions: Sessions
    renderer: Renderer
    parser: Parser
    model_name: str
    max_model_len: int
    limits: EndpointLimits = EndpointLimits()
    created_at: int = 0  # seconds since 1970, shown by `GET /v1/models`
    unix_time: Callable[[], float] = time.time
    shards: ShardRouter | None = None  # routes to the endpoint's other processes, if there are any
    path: str = ""  # path prefix of its routes within the service
    public_url: str | None = None  # the service's URL for clients; None: the address of the connection
    direct_url: str | None = None  # this process's URL on this host; None with a single process
    live_version: Callable[[], Awaitable[int | None]] | None = None  # requests the version from the coordinator
    users: ServedUsers | None = None
    takes_images: bool = False
    has_priority: bool = False  # an engine orders waiting requests by priority
    has_routed_experts: bool = False
    max_logprobs: int = MAX_TOP_LOGPROBS  # alternatives per token
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED
    # Adapter names that mean the served policy, oldest first.
    adapters: dict[str, None] = field(default_factory=dict)
    by_name: Callable[[], Awaitable[tuple[NamedAdapter, ...]]] | None = None
    """Requests the adapters served by name from the coordinator; None if adapters have no names."""
    others: Mapping[str, Endpoint] = field(default_factory=dict)  # by name, the models next to this one
    num_open_calls: int = field(default=0, init=False)
    _num_refused: dict[str, dict[tuple[str, bytes], int]] = field(default_factory=dict, init=False)

    @property
    def chat_model(self) -> ChatModel:
        """The model's facts that dialects need."""
        renderer = self.renderer
        return ChatModel(
            self.parser,
            renderer.vocab_size,
            renderer.facts.template_arguments,
            timeout_s=self.limits.timeout_s,
            takes_images=self.takes_images,
            has_priority=self.has_priority,
            has_routed_experts=self.has_routed_experts,
            max_logprobs=self.max_logprobs,
        )

    async def weight_version(self) -> int | None:
        """Return the served weight version; None without one, or if the coordinator does not answer."""
        if self.live_version is None:
            return None
        try:
            return await in_time(self.live_version(), self.limits.status_timeout_s, "no answer in time")
        except AgentLoopError:
            return None

    def has_model(self, name: str) -> bool:
        """Return True if `name` is the policy's name or that of a model next to it."""
        return name in (self.model_name, DEFAULT_MODEL, *self.others)

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound if `name` is not served, and ServedBeside if it is another model's."""
        if name in self.others:
            raise ServedBeside(name)
        if name not in (self.model_name, DEFAULT_MODEL) and name not in self.adapters:
            names = ", ".join(map(repr, (self.model_name, *self.adapters, *self.others)))
            raise ModelNotFound(f"the model {name[:200]!r} is not served; this service has {names}", param="model")

    async def served_adapters(self) -> tuple[NamedAdapter, ...]:
        """Return the adapters that are served by name. Raises DeadlineExceeded and the coordinator's errors."""
        if self.by_name is None:
            return ()
        return await in_time(
            self.by_name(), self.limits.status_timeout_s, "the coordinator did not answer in time; retry"
        )

    async def adapter_of(self, name: str, user_names: Sequence[str]) -> str:
        """Return the adapter that a user names as a model; "" for the policy. Raises the errors of
        `check_model`."""
        if self.by_name is None or self.has_model(name):
            self.check_model(name)
            return ""
        names = [one.name for one in await self.served_adapters()]
        try:
            return adapter_named(name, user_names, names)
        except ModelNotFound as error:
            models = ", ".join(map(repr, (self.model_name, *self.others)))
            raise ModelNotFound(f"{error.message}; this service's models are {models}", param="model") from error

    def name_adapter(self, name: str) -> None:
        """Accept an adapter's name for the policy. Beyond `MAX_ADAPTERS` the oldest name is dropped."""
        self.adapters.pop(name, None)
        self.adapters[name] = None
        if len(self.adapters) > MAX_ADAPTERS:
            del self.adapters[next(iter(self.adapters))]

    def check_is_here(self, session_id: str) -> None:
        """Raise HeldElsewhere if another process of the endpoint holds the session."""
        if self.shards is not None:
            self.shards.check_is_here(session_id)

    def num_refused(self, owner: str, session_id: str | None, digest: bytes) -> int:
        """Return the number of a session's equal first attempts that were rejected (`noting_refusal`)."""
        return 0 if session_id is None else self._num_refused.get(owner, {}).get((session_id, digest), 0)

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
        """Hold a slot for a call. Raises Overloaded if all slots, or all of the user's, are in use."""
        if self.num_open_calls >= self.limits.max_open_calls:
            raise Overloaded(f"{self.limits.max_open_calls} calls are running, the maximum: retry later")
        self.num_open_calls += 1
        try:
            with nullcontext() if self.users is None else self.users.call(owner):
                yield
        finally:
            self.num_open_calls -= 1
