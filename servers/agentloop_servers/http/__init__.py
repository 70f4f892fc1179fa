"""The public HTTP edge's tools: guard, authentication, answers, event streams and the OpenAPI document."""

from __future__ import annotations

from agentloop_servers.http.auth import (
    SESSION_HEADER,
    Keys,
    SessionKeys,
    User,
    admit,
    caller_of,
    names_session,
    require_control,
    require_owner,
    session_in_path,
    session_name,
)
from agentloop_servers.http.connections import BoundedHttp, ConnectionLimits, Connections
from agentloop_servers.http.docs_page import add_docs_page
from agentloop_servers.http.guard import (
    HttpGuard,
    HttpLimits,
    add_error_handlers,
    envelope_of,
    error_response,
    json_body,
    read_json_body,
    speaks,
)
from agentloop_servers.http.openapi import ERROR_SCHEMA, STREAMED, add_route, answered, describe, errors, takes
from agentloop_servers.http.responses import (
    in_time,
    json_response,
    long_response,
    unless_client_leaves,
    unread_response,
)
from agentloop_servers.http.sse import DONE, EventStream, sse

__all__ = [
    "DONE",
    "ERROR_SCHEMA",
    "SESSION_HEADER",
    "STREAMED",
    "BoundedHttp",
    "ConnectionLimits",
    "Connections",
    "EventStream",
    "HttpGuard",
    "HttpLimits",
    "Keys",
    "SessionKeys",
    "User",
    "add_docs_page",
    "add_error_handlers",
    "add_route",
    "admit",
    "answered",
    "caller_of",
    "describe",
    "envelope_of",
    "error_response",
    "errors",
    "in_time",
    "json_body",
    "json_response",
    "long_response",
    "names_session",
    "read_json_body",
    "require_control",
    "require_owner",
    "session_in_path",
    "session_name",
    "speaks",
    "sse",
    "takes",
    "unless_client_leaves",
    "unread_response",
]
