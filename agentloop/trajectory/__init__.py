"""Token-exact records: the turn graph, its paths, and how a history finds its place."""

from __future__ import annotations

from agentloop.trajectory.growing_path import GrowingPath
from agentloop.trajectory.message_key import message_key, tools_key
from agentloop.trajectory.node import CallRecord, ModelCallState, Node, Reply, Split, json_chars, message_chars
from agentloop.trajectory.token_paths import token_paths
from agentloop.trajectory.turn_graph import BYTES_PER_CHAR, BYTES_PER_TOKEN, Match, TurnGraph

__all__ = [
    "BYTES_PER_CHAR",
    "BYTES_PER_TOKEN",
    "CallRecord",
    "GrowingPath",
    "Match",
    "ModelCallState",
    "Node",
    "Reply",
    "Split",
    "TurnGraph",
    "json_chars",
    "message_chars",
    "message_key",
    "token_paths",
    "tools_key",
]
