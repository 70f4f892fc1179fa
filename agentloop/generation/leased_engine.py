"""One trajectory's way to an engine: its lease, and another one when the replica fails.

Ownership: the lease of one trajectory. Of a worker's modules only this one asks for another lease and retries an
engine call; the endpoint's sessions have `agentloop_servers/endpoint/leases.py`, with the same pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from structlog.contextvars import bind_contextvars
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from agentloop.api import WorkerPort
from agentloop.checks import check_generation
from agentloop.engine import TokenEngine
from agentloop.errors import AgentLoopError, DeadlineExceeded, EnginePaused
from agentloop.types import Assignment, GenerateRequest, Generation

Connect = Callable[[str], TokenEngine]


def retrying(
    is_worth_retrying: Callable[[BaseException], bool],
    stop: Callable[[RetryCallState], bool],
    before_sleep: Callable[[RetryCallState], Awaitable[None] | None] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncRetrying:
    """Attempts of one engine call with random pauses that grow; in the end the last error comes as it is."""
    return AsyncRetrying(
        retry=retry_if_exception(is_worth_retrying),
        stop=stop,
        wait=wait_random_exponential(multiplier=0.1, max=5.0),
        before_sleep=before_sleep,
        sleep=sleep,
        reraise=True,
    )


class NewestVersion:
    """The newest weight version that a worker has heard of: from every generation, whoever asked for it."""

    def __init__(self) -> None:
        self.value: int | None = None

    def see(self, generation: Generation) -> None:
        """Learn from a replica's load and from the spans, which may be newer than the load's snapshot."""
        heard = [span.version for span in generation.weight_versions]
        if generation.load.weight_version is not None:
            heard.append(generation.load.weight_version)
        if self.value is not None:
            heard.append(self.value)
        self.value = max(heard, default=None)


class LeasedEngine:
    """Generates under one assignment's lease; tells `newest` what it hears of the fleet's version."""

    def __init__(
        self,
        coordinator: WorkerPort,
        connect: Connect,
        assignment: Assignment,
        newest: NewestVersion,
        *,
        max_attempts: int,
        vocab_size: int,
    ) -> None:
        """`max_attempts` are of one generation, on as many replicas."""
        self._coordinator = coordinator
        self._connect = connect
        self._assignment_id = assignment.assignment_id
        self._lease = assignment.lease
        self._newest = newest
        self._max_attempts = max_attempts
        self._vocab_size = vocab_size
        self._log = structlog.get_logger("worker")

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate on the leased replica; on a retryable failure, again with the same ids, elsewhere if it is
        the replica's. Raises the last error when the attempts are used up."""
        turn, _, _ = request.request_id.rpartition(":")[2].partition(".")
        bind_contextvars(turn=int(turn), replica=self._lease.replica_id)
        attempts = retrying(_is_worth_retrying, stop_after_attempt(self._max_attempts), self._change_replica)
        return await attempts(self._generate_once, request)

    async def _generate_once(self, request: GenerateRequest) -> Generation:
        generation = await self._connect(self._lease.url).generate(request)
        check_generation(request, generation, self._vocab_size)
        self._newest.see(generation)
        if generation.weight_versions:
            bind_contextvars(version=generation.weight_versions[-1].version)
        return generation

    async def _change_replica(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, EnginePaused):
            return  # the same replica goes on after its resume
        self._log.warning("turn_retried", error=str(error))
        try:
            self._lease = await self._coordinator.move(self._assignment_id, self._lease, True)
            bind_contextvars(replica=self._lease.replica_id)
        except AgentLoopError as none_now:
            self._log.warning("no_other_replica", error=str(none_now))  # the next attempt asks again


def _is_worth_retrying(error: BaseException) -> bool:
    return isinstance(error, AgentLoopError) and (error.retryable or isinstance(error, DeadlineExceeded))
