"""Readable descriptions of the first difference of two histories, with bounded length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from agentloop.trajectory.node import canonical_json, canonical_role
from agentloop.types import JSON, IntArray, Message, ToolCall, ToolCallStatus

MAX_DETAIL_CHARS = 300
Decode = Callable[[Sequence[int]], str]

_CHARS_BEFORE, _CHARS_AFTER = 24, 48
_MAX_SHOWN_CHARS = 96  # per side, with quotes and escapes
_MAX_ROLE_CHARS = 12
_BLOCK_CHARS = 4096
_SHOWN_HASH_CHARS = 8
_TOKENS_BEFORE, _TOKENS_AFTER = 6, 12


def message_difference(index: int, there: Message | None, came: Message | None, *, is_strict: bool = False) -> str:
    """Describe the difference between message `index` in the session and in the request; None if they are equal."""
    old, new = _text(there, is_strict), _text(came, is_strict)
    if old == new and there is not None and came is not None:
        for name, was, now in _unshown_fields(there, came, is_strict):
            if was != now:
                sides = f"{_shown(repr(was))} was there, {_shown(repr(now))} came"
                return f"messages[{index}].{name}: {sides}"[:MAX_DETAIL_CHARS]
        return f"messages[{index}]: {_side(there, old, 0)} was there, and came again"[:MAX_DETAIL_CHARS]
    at = 0 if old == new else _first_difference(old, new)
    sides = f"{_side(there, old, at)} was there, {_side(came, new, at)} came"
    return f"messages[{index}]: {sides}"[:MAX_DETAIL_CHARS]


def token_difference(there: IntArray, came: IntArray, decode: Decode | None, cause: str = "") -> str:
    """Describe the first different token, decoded with its neighbors; without `decode` as ids.

    `cause` comes first; what stands there is shown in any case.
    """
    num_common = min(len(there), len(came))
    unequal = np.flatnonzero(there[:num_common] != came[:num_common])
    at = int(unequal[0]) if len(unequal) else num_common
    window = slice(max(0, at - _TOKENS_BEFORE), at + _TOKENS_AFTER)
    old, new = there[window].tolist(), came[window].tolist()
    old_shown = _shown(repr(old if decode is None else decode(old)))
    new_shown = _shown(repr(new if decode is None else decode(new)))
    shown = f"tokens[{at}]: {old_shown} was there, {new_shown} came"
    room = MAX_DETAIL_CHARS - len(shown) - len("; ")
    return f"{cause[:room]}; {shown}"[:MAX_DETAIL_CHARS] if cause and room > 0 else shown[:MAX_DETAIL_CHARS]


def _side(message: Message | None, text: str, at: int) -> str:
    if message is None:
        return "nothing"
    start, end = max(0, at - _CHARS_BEFORE), at + _CHARS_AFTER
    window = f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
    return f"{message.role[:_MAX_ROLE_CHARS]} {_shown(repr(window))}"


def _unshown_fields(there: Message, came: Message, is_strict: bool) -> Iterator[tuple[str, JSON, JSON]]:
    """Yield the different fields of two messages, except their texts."""
    yield "role", canonical_role(there.role), canonical_role(came.role)
    if came.role != "tool":
        yield "name", there.name, came.name
    if is_strict:
        yield "tool_call_id", there.tool_call_id, came.tool_call_id
    yield "images", [image.at for image in there.images], [image.at for image in came.images]


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 1]}…"


def _text(message: Message | None, is_strict: bool) -> str:
    if message is None:
        return ""
    content = message.content if is_strict else message.content.strip()
    if is_strict and message.tool_call_id is not None:
        content = f"[{message.tool_call_id}] {content}"
    images = (f"[image {image.sha256[:_SHOWN_HASH_CHARS]}]" for image in message.images)
    calls = (_call_text(call, is_strict) for call in message.tool_calls)
    return " ".join([*images, *([content] if content else []), *calls])


def _call_text(call: ToolCall, is_strict: bool) -> str:
    mark = f"[{call.id}] " if is_strict else ""
    if call.status is ToolCallStatus.MALFORMED:
        return f"{mark}{call.text}"
    return f"{mark}{call.name}({canonical_json(call.arguments)})"


def _first_difference(one: str, two: str) -> int:
    num_common = min(len(one), len(two))
    for start in range(0, num_common, _BLOCK_CHARS):
        end = min(start + _BLOCK_CHARS, num_common)
        if one[start:end] != two[start:end]:
            return next(i for i in range(start, end) if one[i] != two[i])
    return num_common
