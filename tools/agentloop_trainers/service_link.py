"""A service as the threads of a training process use it: calls that block, pushes that number themselves, and the
reason why nothing comes.

A trainer is not asynchronous. The link owns one event loop in one daemon thread, and the client that lives on it.
Weight versions are the service's: a push brings the next one after what the fleet serves, so that a trainer which
starts again goes on counting. One process pushes to a service at a time.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import structlog

from agentloop.api.coordinator import ServiceStatus, UpdateReport
from agentloop.client.client import RolloutClient
from agentloop.concurrency.aio import LoopThread
from agentloop.errors import AgentLoopError, DeadlineExceeded, InvalidRequest

T = TypeVar("T")

_CALL_GRACE_S = 150.0  # beyond a call's own time: the client's repeats are over by then
_STATUS_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 10.0
_MAX_NAMED = 6  # sentences of what is degraded: more are counted

_log = structlog.stdlib.get_logger(__name__)


class ServiceLink:
    """One service, from any thread of this process. `open` before the first call; `close` lets go of it.

    A push that is not through after `push_timeout_s` fails. Engines fetch tensors from `listen_host`, as
    `RolloutClient` says; so are the keys its.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        listen_host: str | None = None,
        push_timeout_s: float = 900.0,
    ) -> None:
        self.url = url
        self.version: int | None = None
        """The version that the last push of this process brought."""
        self.last_push: UpdateReport | None = None
        self._keys = (api_key, admin_key)
        self._listen_host = listen_host
        self._push_timeout_s = push_timeout_s
        self._lock = threading.Lock()  # over the next two
        self._thread: LoopThread | None = None
        self._client: RolloutClient | None = None

    def open(self) -> None:
        """Connect. Idempotent; does not wait for the service."""
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("agentloop-trainer")
                api_key, admin_key = self._keys
                client = RolloutClient(
                    self.url, api_key=api_key, admin_key=admin_key, listen_host=self._listen_host
                )
                self._client = self._thread.run(client.__aenter__()).result(_CALL_GRACE_S)

    def close(self) -> None:
        """Let go of the connection; what still runs over it is cancelled. Idempotent."""
        with self._lock:
            thread, client = self._thread, self._client
            self._thread = self._client = None
        if thread is not None and client is not None:
            try:
                thread.run(client.__aexit__()).result(_CLOSE_TIMEOUT_S)
            except Exception as error:  # the process goes on without it
                _log.warning("connection_not_closed", url=self.url, error=repr(error))
            thread.stop()

    def start(self, work: Callable[[RolloutClient], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Begin `work` with the client on the link's loop. Raises InvalidRequest if the link is not open."""
        with self._lock:
            if self._thread is None or self._client is None:
                raise InvalidRequest("the link to the service is not open")
            return self._thread.run(work(self._client))

    def call(self, work: Callable[[RolloutClient], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Return what `work` returns; blocks. After `timeout_s` it is cancelled: DeadlineExceeded."""
        outcome = self.start(work)
        try:
            return outcome.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if outcome.done():  # its own
                raise
            outcome.cancel()
            raise DeadlineExceeded(f"{self.url} did not answer within {timeout_s:g} s") from error

    def push(self, weights: Iterable[tuple[str, object]], *, version: int | None = None) -> UpdateReport:
        """Bring the fleet to these tensors; blocks until it serves them.

        They become the version after the fleet's; or `version`, the trainer's own number, even where the fleet has
        a later one: a trainer goes on from an older checkpoint. All of `weights` are taken before anything is
        sent: a trainer's generator may gather each of them over its ranks, and such a collective must not
        interleave with the engines'. Only this process calls; its ranks do not. Raises WeightUpdateFailed and the
        other errors of `RolloutClient.update_weights`.
        """
        tensors = list(weights)

        async def send(client: RolloutClient) -> UpdateReport:
            served, number = (await client.status()).weight_version, version
            if number is None:
                number = max((one for one in (served, self.version) if one is not None), default=-1) + 1
            return await client.update_weights(
                tensors,
                version=number,
                timeout_s=self._push_timeout_s,
                all_ranks=False,
                force=version is not None and served is not None and version <= served,
            )

        report = self.call(send, self._push_timeout_s + _CALL_GRACE_S)
        self.version, self.last_push = report.version, report
        return report

    def standstill(self) -> str:
        """Say why the service may not answer, naming what hangs; never raises."""

        async def ask(client: RolloutClient) -> ServiceStatus:
            return await client.status()

        try:
            return describe_standstill(self.call(ask, _STATUS_TIMEOUT_S))
        except (AgentLoopError, concurrent.futures.CancelledError) as error:
            return f"the service does not say how it is: {error}"


def describe_standstill(status: ServiceStatus) -> str:
    """Return what holds a service up, by name: its update, its queue, what is degraded. Then what it is doing."""
    reasons = []
    if (update := status.update) is not None:
        failed = f", failed: {'; '.join(update.failures)}" if update.failures else ""
        reasons.append(f"the update to version {update.version} is {update.state}{failed}")
    if status.queue.reason:
        reasons.append(f"nothing begins: {status.queue.reason}")
    reasons += status.degraded[:_MAX_NAMED]
    if (num_more := len(status.degraded) - _MAX_NAMED) > 0:
        reasons.append(f"{num_more} more")
    running = sum(rollout.num_running for rollout in status.rollouts)
    held = sum(rollout.num_held for rollout in status.rollouts)
    if held:
        reasons.append(f"{held} trajectories wait for newer weights")
    return "; ".join([*reasons, f"{running} trajectories run, {status.queue.num_queued} are queued"])
