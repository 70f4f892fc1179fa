"""What every HTTP edge of ours shares: guards, bounds, errors, disconnects, event streams."""

from __future__ import annotations

from agentloop_servers.http.disconnect import unless_client_leaves
from agentloop_servers.http.guard import (
    HttpGuard,
    HttpLimits,
    Keys,
    add_error_handlers,
    body_schema,
    credential_of,
    envelope_of,
    error_response,
    json_body,
    read_json_body,
    speaks,
)
from agentloop_servers.http.openapi import describe_bodies
from agentloop_servers.http.sse import DONE, EventStream, sse

__all__ = [
    "DONE",
    "EventStream",
    "HttpGuard",
    "HttpLimits",
    "Keys",
    "add_error_handlers",
    "body_schema",
    "credential_of",
    "describe_bodies",
    "envelope_of",
    "error_response",
    "json_body",
    "read_json_body",
    "speaks",
    "sse",
    "unless_client_leaves",
]
