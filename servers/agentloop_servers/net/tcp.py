"""TCP sockets that notice a peer's death.

Sockets have keep-alive at both ends: a host that loses power or its link sends no reset, and a call in flight to it
would wait for its own deadline, minutes for a generation. The system's default is two hours.
"""

from __future__ import annotations

import socket

KEEP_ALIVE_IDLE_S = 5
KEEP_ALIVE_INTERVAL_S = 3
NUM_KEEP_ALIVE_PROBES = 3
USER_TIMEOUT_MS = 15_000  # for sent data that nobody acknowledges; probes alone do not watch over it
BACKLOG = 2048

ADDRESS_VARIABLE = "AGENTLOOP_NODE_ADDRESS"
"""The environment variable by which an engine's own processes know the address at which other nodes reach them."""

ENCRYPT_VARIABLE = "AGENTLOOP_ENCRYPT_WEIGHTS"
"""The environment variable by which they know that weights between hosts are encrypted, if it is set."""


def listening_socket(host: str, port: int = 0, backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that listens; port 0 is one that the system chooses. What it accepts inherits its options."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), backlog=backlog, family=family)
    # asyncio sets this only on sockets that say they are TCP; without it each answer waits 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(listener)
    return listener


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Return the base URL of a server on a host's port."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def url_of_socket(listener: socket.socket, scheme: str) -> str | None:
    """Return the base URL of a listening socket; None if it listens on all addresses, of which each has its own."""
    host, port, *_ = listener.getsockname()
    return None if host in ("0.0.0.0", "::") else url_of(host, port, scheme)


def keep_alive(one: socket.socket) -> None:
    """Have a socket notice within about 15 s that its peer has vanished."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_KEEP_ALIVE_PROBES)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
