"""HTTP between the processes of one run: servers, clients, fencing, and TCP keep-alive."""

from __future__ import annotations

from agentloop_servers.private_http.client import NO_HEADERS, Connector, PrivateHttp
from agentloop_servers.private_http.fencing import CommandKind, Fenced, FencingGuard, NumberedCommands
from agentloop_servers.private_http.server import (
    SERVER_HEADER,
    Misdirected,
    PrivateServer,
    answer,
    token_of,
    worker_key,
)

__all__ = [
    "NO_HEADERS",
    "SERVER_HEADER",
    "CommandKind",
    "Connector",
    "Fenced",
    "FencingGuard",
    "Misdirected",
    "NumberedCommands",
    "PrivateHttp",
    "PrivateServer",
    "answer",
    "token_of",
    "worker_key",
]
