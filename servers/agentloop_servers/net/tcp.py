"""TCP sockets that detect a lost peer.

Both ends enable keep-alive: a host that loses power or its network sends no reset, so a running call to it would
wait for its own timeout, which is minutes for a generation. The system's default keep-alive time is two hours.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket

KEEP_ALIVE_IDLE_S = 5
KEEP_ALIVE_INTERVAL_S = 3
NUM_KEEP_ALIVE_PROBES = 3
USER_TIMEOUT_MS = 15_000  # for unacknowledged sent data, which keep-alive probes do not cover
BACKLOG = 2048
_UNASSIGNED_PORTS = range(20_000, 32_768)
_MAX_PORT_TRIES = 100

ADDRESS_VARIABLE = "AGENTLOOP_NODE_ADDRESS"
"""The environment variable with the node address on which other nodes reach an engine's processes."""

ENCRYPT_VARIABLE = "AGENTLOOP_ENCRYPT_WEIGHTS"
"""The environment variable that makes an engine's processes encrypt weight transfers between hosts, if it is
set."""


def listening_socket(host: str, port: int = 0, backlog: int = BACKLOG) -> socket.socket:
    """Return a listening socket; with port 0 the system chooses the port. Accepted sockets inherit its options."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), backlog=backlog, family=family)
    # asyncio sets TCP_NODELAY only on sockets with an explicit TCP protocol; without it each reply waits 40 ms for
    # an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(listener)
    return listener


def free_ports(number: int, host: str = "") -> list[int]:
    """Return ports on which no process listens now, for processes that bind them later. Raises OSError.

    They are below the range from which Linux takes the local ports of outgoing connections: such a connection could
    occupy a port before its process binds it.
    """
    ports: list[int] = []
    for port in random.sample(_UNASSIGNED_PORTS, _MAX_PORT_TRIES):
        if len(ports) == number:
            break
        with contextlib.suppress(OSError), listening_socket(host, port):
            ports.append(port)
    if len(ports) < number:
        raise OSError(errno.EADDRINUSE, f"fewer than {number} of {_MAX_PORT_TRIES} ports are free")
    return ports


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Return the base URL of a server on host and port."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def url_of_socket(listener: socket.socket, scheme: str) -> str | None:
    """Return the base URL of a listening socket; None if it listens on all addresses, so there is no single URL."""
    host, port, *_ = listener.getsockname()
    return None if host in ("0.0.0.0", "::") else url_of(host, port, scheme)


def keep_alive(connection: socket.socket) -> None:
    """Make a socket detect a lost peer within about 15 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_KEEP_ALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
