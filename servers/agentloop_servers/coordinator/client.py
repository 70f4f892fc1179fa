"""The client of the coordinator's HTTP port: typed ports with deadlines.

The methods of a port are made from its signatures; `coordinator/server.py` names the class that implements each.
The coordinator's URL is looked up once, and again if it is unreachable, because a restarted coordinator has
another port.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import aiohttp

from agentloop.api.coordinator import FrontPort, MetricsPort, ReplicaPort, WorkerPort
from agentloop.errors import AgentLoopError, ServiceUnavailable
from agentloop.values.codec import decode, encode
from agentloop_servers.coordinator.server import COMMANDS, CallType, calls_of
from agentloop_servers.private_http.client import NO_HEADERS, PrivateHttp
from agentloop_servers.private_http.fencing import NumberedCommands
from agentloop_servers.private_http.server import Misdirected
from agentloop_servers.private_http.trust import Trust

CALL_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 2400.0  # if the process sets none; longer than all steps of an update


class CoordinatorClient:
    """The ports of the coordinator for one process. Call `close` at the end.

    `server.py` names the class that implements each call: `Rollouts.submit` implements `front.submit`.
    """

    def __init__(
        self, find: Callable[[], Awaitable[str]], trust: Trust, *, command_timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        """`find` returns the coordinator's URL, or raises ServiceUnavailable.

        `command_timeout_s` bounds commands to the fleet.
        """
        self._find = find
        self._command_timeout_s = command_timeout_s
        self._http = PrivateHttp(trust, lost=ServiceUnavailable, late=ServiceUnavailable)
        # Identifies the caller; callers are not ordered among each other
        self._commands = NumberedCommands(secrets.randbits(63))
        self._url: str | None = None
        self._finding = asyncio.Lock()
        self.replicas = cast(ReplicaPort, _Port(ReplicaPort, self._call))
        self.workers = cast(WorkerPort, _Port(WorkerPort, self._call))
        self.front = cast(FrontPort, _Port(FrontPort, self._call))
        self.metrics = cast(MetricsPort, _Port(MetricsPort, self._call))

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.close()

    async def _call(self, call: CallType, *arguments: Any, **named: Any) -> Any:
        """Send a call. Raises the coordinator's errors, and ServiceUnavailable if it fails or does not answer."""
        arguments += tuple((call.defaults | named)[name] for name in call.parameters[len(arguments) :])
        # A repeated update joins the running one or gets its report; a repeated push with a version changes
        # nothing.
        is_numbered = call.name == "push_adapter" and arguments[0].version is not None
        is_repeatable = call.name not in COMMANDS or call.name == "update_weights" or is_numbered
        timeout_s = self._command_timeout_s if call.name in COMMANDS else CALL_TIMEOUT_S
        if "wait_s" in call.parameters:
            timeout_s += arguments[call.parameters.index("wait_s")]
        # A call whose connection breaks is sent once more, because calls are idempotent or have a key. Other
        # commands are sent again only if the coordinator cannot have received them.
        may_repeat, body = _was_cut if is_repeatable else _was_not_received, encode(arguments)
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._send(call, body)
                except AgentLoopError as error:
                    if not may_repeat(error):
                        raise
                return await self._send(call, body)
        except TimeoutError as error:
            raise ServiceUnavailable(
                f"the coordinator did not answer {call.name} within {timeout_s:g} s"
            ) from error

    async def _send(self, call: CallType, body: bytes) -> Any:
        url = await self._found_url()
        headers = self._commands.next_headers() if call.name in COMMANDS else NO_HEADERS
        try:
            async with self._http.open("POST", f"{url}/{call.name}", body, headers=headers) as opened:
                return decode(await opened.read(), call.answer)
        except AgentLoopError as error:
            if _was_cut(error) and self._url == url:
                self._url = None
            # An unexpected error in the coordinator, not one of its documented ones
            if type(error) is AgentLoopError:
                raise ServiceUnavailable(f"the coordinator failed while it handled {call.name}: {error}") from error
            raise

    async def _found_url(self) -> str:
        if self._url is None:
            async with self._finding:
                if self._url is None:
                    self._url = await self._find()
        return self._url


class _Port:
    """One port, with a method for each of its calls."""

    def __init__(self, port: type, ask: Callable[..., Awaitable[Any]]) -> None:
        for name, call in calls_of(port).items():
            setattr(self, name, partial(ask, call))


def _was_not_received(error: BaseException) -> bool:
    return isinstance(error.__cause__, Misdirected | aiohttp.ClientConnectorError)


def _was_cut(error: BaseException) -> bool:
    return _was_not_received(error) or isinstance(
        error.__cause__, aiohttp.ClientError | asyncio.IncompleteReadError
    )
