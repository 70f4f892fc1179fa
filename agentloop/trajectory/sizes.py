"""What values of a session's memory take up, in bytes: an estimate that counts every string, array and object."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from sys import getsizeof

from agentloop.trajectory.node import Node
from agentloop.types import JSON, Message, ToolCall

# Of CPython 3.11 on 64 bits: our objects with slots, and the header of an array.
_MESSAGE, _CALL, _NODE, _REPLY, _SPLIT, _ARRAY = 80, 96, 104, 120, 56, 112
_SMALL_INT, _FLOAT, _PAIR = 28, 24, 56
_SPAN = 56 + 2 * _SMALL_INT


def node_bytes(node: Node) -> int:
    """The memory of a node with all that it holds."""
    reply = node.reply
    arrays = (node.observed_ids, reply.token_ids, reply.logprobs)
    total = _NODE + _REPLY + sum(_ARRAY + array.nbytes for array in arrays)
    total += sum(map(_own, (node.node_id, node.call_id, node.tools_key, reply.stop_text, node.observed)))
    total += sum(map(message_bytes, node.observed)) + message_bytes(reply.message)
    total += len(reply.weight_versions) * _SPAN
    total += sum(getsizeof(top) + len(top) * (_PAIR + _SMALL_INT + _FLOAT) for top in reply.top_logprobs)
    total += _own(reply.top_logprobs)
    if node.split is not None:
        total += _SPLIT + getsizeof(node.split.detail)
    return total


def message_bytes(message: Message) -> int:
    """The memory of one message."""
    parts = (message.content, message.reasoning, message.tool_call_id, message.name, message.tool_calls)
    return _MESSAGE + sum(map(_own, parts)) + sum(map(_call_bytes, message.tool_calls))


def _call_bytes(call: ToolCall) -> int:
    own = sum(map(_own, (call.id, call.name, call.error, call.text)))
    return _CALL + own + json_bytes(call.arguments) + 2 * _SMALL_INT


def json_bytes(value: JSON) -> int:
    """The memory of a JSON value."""
    total = getsizeof(value)
    if isinstance(value, Mapping):
        total += sum(getsizeof(key) + json_bytes(item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        total += sum(map(json_bytes, value))
    return total


def _own(value: Sized | None) -> int:
    """What one object takes up; Python has every empty one only once."""
    return getsizeof(value) if value else 0
