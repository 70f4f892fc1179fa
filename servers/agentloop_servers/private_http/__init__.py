"""HTTP between the processes of one run: servers, clients, fencing, and TCP keep-alive."""

from __future__ import annotations

from agentloop_servers.private_http.client import NO_HEADERS, PrivateHttp, keep_alive_connector
from agentloop_servers.private_http.fencing import (
    EPOCH_HEADER,
    ORDER_HEADER,
    CommandKind,
    FencingGuard,
    FencingToken,
    NumberedCommands,
)
from agentloop_servers.private_http.server import (
    SECRET_HEADER,
    SERVER_HEADER,
    Misdirected,
    PrivateServer,
    answer,
    listening_socket,
    token_of,
)

__all__ = [
    "EPOCH_HEADER",
    "NO_HEADERS",
    "ORDER_HEADER",
    "SECRET_HEADER",
    "SERVER_HEADER",
    "CommandKind",
    "FencingGuard",
    "FencingToken",
    "Misdirected",
    "NumberedCommands",
    "PrivateHttp",
    "PrivateServer",
    "answer",
    "keep_alive_connector",
    "listening_socket",
    "token_of",
]
