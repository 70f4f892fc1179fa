"""A blocking interface to the service for the threads of a training process.

The link owns an event loop in a daemon thread, and a client on that loop. A push uses the version after the one
that the fleet serves, so that a restarted trainer continues the service's version numbers. Only one process may
push to a service at a time.
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

_CALL_GRACE_S = 150.0  # added to a call's own timeout: longer than the client's retries
_STATUS_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 10.0
_MAX_NAMED = 6  # sentences of `ServiceStatus.degraded` in a message; further ones are counted

_log = structlog.stdlib.get_logger(__name__)


class ServiceLink:
    """A connection to one service for all threads of this process. Call `open` first, and `close` at the end.

    `push_timeout_s` is the timeout of a push. `api_key`, `admin_key` and `listen_host` are those of
    `RolloutClient`.
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
        """The version of this process's last push."""
        self.last_push: UpdateReport | None = None
        self._keys = (api_key, admin_key)
        self._listen_host = listen_host
        self._push_timeout_s = push_timeout_s
        self._lock = threading.Lock()  # guards `_thread` and `_client`
        self._thread: LoopThread | None = None
        self._client: RolloutClient | None = None

    def open(self) -> None:
        """Create the connection, without waiting for the service. Idempotent."""
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("agentloop-trainer")
                api_key, admin_key = self._keys
                client = RolloutClient(
                    self.url, api_key=api_key, admin_key=admin_key, listen_host=self._listen_host
                )
                self._client = self._thread.run(client.__aenter__()).result(_CALL_GRACE_S)

    def close(self) -> None:
        """Close the connection and cancel running calls. Idempotent."""
        with self._lock:
            thread, client = self._thread, self._client
            self._thread = self._client = None
        if thread is not None and client is not None:
            try:
                thread.run(client.__aexit__()).result(_CLOSE_TIMEOUT_S)
            except Exception as error:  # a failure to close must not stop the trainer
                _log.warning("connection_not_closed", url=self.url, error=repr(error))
            thread.stop()

    def start(self, work: Callable[[RolloutClient], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Start `work` with the client on the link's event loop. Raises InvalidRequest if the link is not open."""
        with self._lock:
            if self._thread is None or self._client is None:
                raise InvalidRequest(f"the link to {self.url} is not open: call open() first")
            return self._thread.run(work(self._client))

    def call(self, work: Callable[[RolloutClient], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Run `work` and return its result. Blocks. Raises DeadlineExceeded and cancels it after `timeout_s`."""
        outcome = self.start(work)
        try:
            return outcome.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if outcome.done():  # a TimeoutError of `work` itself
                raise
            outcome.cancel()
            raise DeadlineExceeded(f"{self.url} did not respond within {timeout_s:g} s") from error

    def push(self, weights: Iterable[tuple[str, object]], *, version: int | None = None) -> UpdateReport:
        """Update the fleet to these tensors. Blocks until the fleet serves them.

        The version is `version`, or else the one after the fleet's. A `version` that is not greater is forced, so
        that a trainer can resume from an older checkpoint. Only this process calls it, not its other ranks. Raises
        the errors of `RolloutClient.update_weights`.
        """
        # Exhaust the iterator first: a trainer's generator may gather tensors over its ranks, and these collectives
        # must not interleave with those of the transfer.
        tensors = list(weights)

        async def send(client: RolloutClient) -> UpdateReport:
            served, number = (await client.status()).weight_version, version
            if number is None:
                number = max((known for known in (served, self.version) if known is not None), default=-1) + 1
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

    def unavailable(self) -> str:
        """Return the reason that the service makes no progress, with the names of affected parts. Never raises."""

        async def ask(client: RolloutClient) -> ServiceStatus:
            return await client.status()

        try:
            return describe_unavailability(self.call(ask, _STATUS_TIMEOUT_S))
        except (AgentLoopError, concurrent.futures.CancelledError) as error:
            return f"the status of the service is unavailable: {error}"


def describe_unavailability(status: ServiceStatus) -> str:
    """Return the reasons that a service makes no progress (update, queue, degraded parts) and its current load."""
    reasons = []
    if (update := status.update) is not None:
        failed = f", failed: {'; '.join(update.failures)}" if update.failures else ""
        reasons.append(f"the update to version {update.version} is {update.state}{failed}")
    if status.queue.reason:
        reasons.append(f"no trajectory starts: {status.queue.reason}")
    reasons += status.degraded[:_MAX_NAMED]
    if (num_more := len(status.degraded) - _MAX_NAMED) > 0:
        reasons.append(f"{num_more} more")
    running = sum(rollout.num_running for rollout in status.rollouts)
    held = sum(rollout.num_held for rollout in status.rollouts)
    if held:
        reasons.append(f"{held} trajectories wait for newer weights")
    return "; ".join([*reasons, f"{running} trajectories run, {status.queue.num_queued} are queued"])
