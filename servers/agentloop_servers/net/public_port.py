"""The public port of a service on one host: one listening socket from which all ingress processes accept.

Ownership: a `PortKeeper`, a separate actor, owns the socket and passes it to each ingress process; a connection
goes to the process that accepts it first. A stopped, hung or restarting process delays no caller while another
process accepts. Without a process, for example during a redeploy, connections wait for the next process, and no
other service can bind the port. A restarted keeper receives the socket from a process. The keeper exits some time
after the last process.

SO_REUSEPORT does not replace the keeper: the kernel gives new connections to a stopped process too. In two runs of
150 calls of the OpenAI client to a minimal uvicorn application, with one of two processes stopped for 6 s, 11 and
28 calls timed out after 3 s (2 and 3 with one socket); with the client's retries, 11 and 24 calls were recorded
twice (1 and 2 with one socket).

Protocol on the keeper's Unix socket, in a folder that only its user can access: a process sends `take` and receives
`ok` with the socket, or `no` and a reason; or it sends `give` with the socket. It stays connected while it uses the
port.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import ray
import structlog
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentloop.errors import AgentLoopError, ServiceUnavailable
from agentloop_servers.net.tcp import listening_socket

PORT_LINGER_S = 30.0
"""The time that connections wait for a new process after the last process has disconnected."""

_START_TIMEOUT_S = 60.0
_TALK_TIMEOUT_S = 5.0
_KEEPER_RETRY_S = 0.5
_NAMESPACE = "agentloop"

_log = structlog.stdlib.get_logger(__name__)


class PortKeeper:
    """Owns the listening socket of one application's port until `linger_s` after its last process.

    `on_end` is called once, from the keeper's thread.
    """

    def __init__(
        self, host: str, port: int, app_name: str, on_end: Callable[[], None], linger_s: float = PORT_LINGER_S
    ) -> None:
        self._address = (host, port)
        self._app_name = app_name
        self._on_end = on_end
        self._linger_s = linger_s
        self.processes: set[socket.socket] = set()  # connections; read-only
        self._listener: socket.socket | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="agentloop-port-"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._folder / "keeper"))
        self._server.listen()
        threading.Thread(target=self._serve, name="port keeper", daemon=True).start()

    def path(self, app_name: str) -> str | None:
        """Return the path of the Unix socket; None if the port is another application's."""
        return str(self._folder / "keeper") if app_name == self._app_name else None

    def _serve(self) -> None:
        alone_since = time.monotonic()
        with selectors.DefaultSelector() as ready:
            ready.register(self._server, selectors.EVENT_READ)
            while self.processes or time.monotonic() - alone_since < self._linger_s:
                for key, _ in ready.select(min(1.0, self._linger_s)):
                    if key.fileobj is self._server:
                        process, _ = self._server.accept()
                        process.settimeout(_TALK_TIMEOUT_S)
                        self.processes.add(process)
                        ready.register(process, selectors.EVENT_READ)
                        continue
                    process = key.fileobj  # type: ignore[assignment]
                    if not self._answered(process):
                        ready.unregister(process)
                        self.processes.remove(process)
                        process.close()
                        alone_since = time.monotonic()
        self._server.close()
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._on_end()

    def _answered(self, process: socket.socket) -> bool:
        """Answer one message; return False if the process has disconnected."""
        try:
            message, descriptors, _, _ = socket.recv_fds(process, 16, 1)
            for descriptor in descriptors:
                listener = socket.socket(fileno=descriptor)
                if self._listener is None:
                    self._listener = listener
                else:
                    listener.close()
            if message == b"take":
                self._give(process)
            return bool(message)
        except OSError:
            return False

    def _give(self, process: socket.socket) -> None:
        if self._listener is None:
            try:
                self._listener = listening_socket(*self._address)
            except OSError as error:
                process.sendall(f"no {error.strerror}".encode())
                return
        socket.send_fds(process, [b"ok"], [self._listener.fileno()])


class PublicPort:
    """The public port of one ingress process, until `close`. `find_keeper` returns the path of the keeper's
    socket."""

    def __init__(self, name: str, find_keeper: Callable[[], Awaitable[str]]) -> None:
        self._name = name
        self._find_keeper = find_keeper
        self._keeper: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._watching: asyncio.Task[None] | None = None

    async def take(self, timeout_s: float = 10.0) -> socket.socket:
        """Return the listening socket, which the caller must close. Raises ServiceUnavailable if the port is in
        use."""
        loop = asyncio.get_running_loop()
        deadline_at = loop.time() + timeout_s
        while self._listener is None:
            keeper = await self._connected()
            listener, reason = await asyncio.to_thread(_taken, keeper)
            if listener is not None:
                self._keeper, self._listener = keeper, listener
                break
            keeper.close()
            # Retry: a restarted keeper cannot bind the port, but receives the socket from another process.
            if loop.time() >= deadline_at:
                raise ServiceUnavailable(
                    f"cannot listen on the service's port {self._name}: {reason}; stop the other process, or change"
                    " `port`"
                )
            await asyncio.sleep(_KEEPER_RETRY_S)
        self._watching = asyncio.create_task(self._keep_kept(), name="public port")
        return self._listener.dup()

    def check_health(self) -> None:
        """Raise the error that ended the task watching the keeper, if it has ended."""
        if self._watching is not None and self._watching.done():
            self._watching.result()

    async def close(self) -> None:
        """Disconnect from the keeper and close the socket. Idempotent."""
        if self._watching is not None:
            watching, self._watching = self._watching, None
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for open_socket in (self._keeper, self._listener):
            if open_socket is not None:
                open_socket.close()
        self._keeper = self._listener = None

    async def _connected(self) -> socket.socket:
        keeper = socket.socket(socket.AF_UNIX)
        keeper.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(keeper, await self._find_keeper())
        except OSError as error:
            keeper.close()
            raise ServiceUnavailable(f"cannot connect to the keeper of the service's port ({error})") from error
        except BaseException:
            keeper.close()
            raise
        return keeper

    async def _keep_kept(self) -> None:
        """Pass the socket to a new keeper whenever the connection to the previous keeper is lost."""
        loop = asyncio.get_running_loop()
        while True:
            assert self._keeper is not None
            assert self._listener is not None
            try:
                self._keeper.setblocking(False)
                while await loop.sock_recv(self._keeper, 16):
                    pass  # the keeper sends nothing on its own, so a read returns only when it is lost
            except OSError:
                pass  # the connection is lost
            await asyncio.sleep(_KEEPER_RETRY_S)
            try:
                keeper = await self._connected()
            except AgentLoopError as error:
                _log.warning("port_keeper_away", port=self._name, reason=error.message)
                continue
            self._keeper.close()
            self._keeper = keeper
            socket.send_fds(keeper, [b"give"], [self._listener.fileno()])


def keeper_finder(host: str, port: int, app_name: str) -> Callable[[], Awaitable[str]]:
    """Return a function that finds or starts the keeper of an application's port on this node."""

    def found() -> str | None:
        node_id = ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        keeper = (
            ray.remote(PortKeeper)
            .options(
                name=f"agentloop-port-{host}-{port}-{node_id}",
                namespace=_NAMESPACE,
                lifetime="detached",  # it must outlive the processes that a redeploy replaces
                get_if_exists=True,
                num_cpus=0,
                scheduling_strategy=here,
            )
            .remote(host, port, app_name, end_this_actor)
        )
        path: str | None = ray.get(keeper.path.remote(app_name), timeout=_START_TIMEOUT_S)
        return path

    async def find() -> str:
        try:
            path = await asyncio.to_thread(found)
        except (RayError, ValueError) as error:  # Ray raises ValueError for the name of an actor that is exiting
            raise ServiceUnavailable(
                f"the keeper of port {host}:{port} did not start ({type(error).__name__})"
            ) from error
        if path is None:
            raise ServiceUnavailable(
                f"another application of this Ray cluster uses {host}:{port}: stop it, or change `port`"
            )
        return path

    return find


def warn_of_open_ray() -> None:
    """Log a warning if this process's Ray cluster does not require a token."""
    if os.environ.get("RAY_AUTH_MODE") != "token":  # Ray sets it in the processes of a cluster with a token
        _log.warning(
            "ray_without_token",
            because="anyone who can connect to Ray's ports can run code here: see docs/guides/operations.md",
        )


def end_this_actor() -> None:
    """Kill the keeper's process after its service has ended."""
    ray.kill(ray.get_runtime_context().current_actor)


def _taken(keeper: socket.socket) -> tuple[socket.socket | None, str]:
    """Request the socket from a keeper. Return the socket and "", or None and the reason."""
    keeper.settimeout(_TALK_TIMEOUT_S)
    try:
        keeper.sendall(b"take")
        message, descriptors, _, _ = socket.recv_fds(keeper, 200, 1)
    except OSError as error:
        return None, f"the keeper does not answer ({error})"
    if descriptors:
        return socket.socket(fileno=descriptors[0]), ""
    return None, message.removeprefix(b"no ").decode(errors="replace")
