"""Keys of messages: what clients may change in a history that they echo, and what they may not.

Clients re-serialise tool arguments, send null for empty content, trim text, drop reasoning and call ids. None of
that is a change of history, so none of it is in a loose key. A strict key has call ids and the exact text. The
reasoning and a tool message's name are in neither: the chat format has no field that clients would echo them in. A
name that the policy is not shown does not come here: the reader of a request drops it (`chat/openai.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import orjson

from agentloop.errors import InvalidRequest
from agentloop.types import JSON, Message, ToolCall, ToolCallStatus

_KEY_BYTES = 16
_MAX_WHOLE_FLOAT = 2.0**63  # above it, whole floats stay floats: nobody writes them out as integers
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_SIMPLE = {str, int, bool, type(None)}  # what needs no other form
_FLOAT = re.compile(rb"[0-9][.e]")  # every float that orjson writes has this; so may a string
_big_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def canonical_role(role: str) -> str:
    """Return the role as templates know it: a developer's message is a system message."""
    return "system" if role == "developer" else role


def canonical_json(value: JSON) -> str:
    """One line of JSON text, equal for JSON-equal values: keys sorted, 2.0 and 2e0 as 2; true is not 1.

    Raises InvalidRequest if it is nested too deeply.
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        if _FLOAT.search(text) is None:  # it is plain already
            return text.decode()
    except orjson.JSONEncodeError:
        pass  # the long way knows what to do
    try:
        plain = _plain(value)
        try:
            return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS).decode()
        except orjson.JSONEncodeError:  # integers of more than 64 bits, lone surrogates, hundreds of levels
            return _big_encoder.encode(plain)
    except RecursionError as error:
        raise InvalidRequest("arguments or tools are nested too deeply", param="messages") from error


def message_key(message: Message, *, is_strict: bool = False) -> bytes:
    """Return a digest that is equal, in any process, for messages that are the same turn of a conversation."""
    role = canonical_role(message.role)
    name = None if role == "tool" else message.name
    call_id = message.tool_call_id if is_strict else None
    text = message.content if is_strict else message.content.strip()
    if not message.tool_calls and name is None and call_id is None and not message.images and role in _ROLES:
        head = role
    else:
        parts = [role, name, [_call(call, is_strict) for call in message.tool_calls], call_id]
        head = canonical_json([*parts, _images(message, text)] if message.images else parts)
    # The head has no line end, so that no text can be read as part of it.
    return blake2b(f"{head}\n{text}".encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()


def tools_key(tools: Sequence[Mapping[str, JSON]]) -> bytes:
    """Return a digest of tool definitions, in their order; empty for none."""
    if not tools:
        return b""
    return blake2b(canonical_json(list(tools)).encode(), digest_size=_KEY_BYTES).digest()


def _images(message: Message, text: str) -> list[JSON]:
    """Return the images, each with its place in `text`: the message's content, or that without its outer spaces."""
    start = 0 if text == message.content else len(message.content) - len(message.content.lstrip())
    return [[image.sha256, min(max(image.at - start, 0), len(text))] for image in message.images]


def _call(call: ToolCall, is_strict: bool) -> list[JSON]:
    entry: list[JSON]
    if call.status is ToolCallStatus.MALFORMED and (arguments := _whole_arguments(call)) is not None:
        entry = [call.name, arguments]
    elif call.status is ToolCallStatus.MALFORMED:
        written = call.text if call.partial_arguments is None else call.partial_arguments
        entry = [written if is_strict else written.strip()]
    else:
        entry = [call.name, call.arguments]
    return [*entry, call.id] if is_strict else entry


def _whole_arguments(call: ToolCall) -> dict[str, JSON] | None:
    """Return the arguments of a call that was cut, if all of them were written: its echo can be read."""
    if call.partial_arguments is None:
        return None
    if not call.partial_arguments.strip():
        return {}
    try:
        read = orjson.loads(call.partial_arguments)
    except orjson.JSONDecodeError:
        return None
    return read if isinstance(read, dict) else None


def _plain(value: JSON) -> JSON:
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE_FLOAT else value
    if isinstance(value, Mapping):
        return {key: item if type(item) in _SIMPLE else _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in _SIMPLE else _plain(item) for item in value]
    return value
