"""JSON calls of every family that writes them: an object's name and arguments, or the reason why there is none."""

from __future__ import annotations

import re

from agentloop.parsers.base import MAX_NAME_CHARS, MalformedCall
from agentloop.parsers.grammar import loads
from agentloop.types import JSON

_MAX_MARKS_INSIDE = 4

# Strings and brackets of any text, in linear time: a string without its end runs to the text's end.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)
_CUT_CALL = re.compile(
    r'\s*+\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+("(?:[^"\\]|\\.)*+")\s*+'
    r'(?:,\s*+"(?:arguments|parameters)"\s*+:\s*+(.*))?',
    re.DOTALL,
)


def json_end(text: str, start: int, limit: int) -> int:
    """Return the end of the object or array at `start`; -1 if its last bracket is not before `limit`.

    The text between the brackets need not be JSON. Takes linear time.
    """
    depth = 0
    for found in _TOKEN.finditer(text, start, limit):
        opening, closing = found.groups()
        depth += (opening is not None) - (closing is not None)
        if depth <= 0:
            return found.end() if closing is not None else -1
    return -1


def next_mark(text: str, position: int, mark: str) -> int:
    """Return the place of the next mark, or the text's end."""
    found = text.find(mark, position)
    return found if found >= 0 else len(text)


def limit_of(text: str, position: int, mark: str) -> int:
    """Return the limit of a value that begins there: a later mark than the next, which it may hold."""
    for _ in range(_MAX_MARKS_INSIDE + 1):
        position = next_mark(text, position, mark) + len(mark)
    return min(position - len(mark), len(text))


def cut_call(text: str) -> tuple[str, str]:
    """Return the name and the argument text of an invalid JSON call, as far as they are there."""
    found = _CUT_CALL.match(text)
    if found is None:
        return "", ""
    try:
        name = loads(found[1])
    except ValueError:
        return "", ""
    return str(name), found[2] or ""


def read_json_call(body: str, *keys: str) -> tuple[str, dict[str, JSON]]:
    """Read `{"name": ..., KEY: {...}}`, where KEY is one of `keys`. Raises MalformedCall."""
    if not (body := body.lstrip()):
        raise MalformedCall("the tool call is empty")
    try:
        call = loads(body)
    except ValueError as error:
        raise MalformedCall(f"the tool call is not valid JSON: {error}", *cut_call(body)) from error
    return call_of_object(call, *keys)


def call_of_object(call: JSON, *keys: str) -> tuple[str, dict[str, JSON]]:
    """Return name and arguments of a call that was valid JSON. Raises MalformedCall."""
    if not isinstance(call, dict):
        raise MalformedCall(f'the tool call is not a JSON object with "name" and "{keys[0]}"')
    name = check_name(call.get("name"))
    key = next((key for key in keys if key in call), None)
    if key is None:
        raise MalformedCall(f'the tool call has no "{keys[0]}"', name)
    arguments = call[key]
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except ValueError as error:
            raise MalformedCall(f'"{key}" is a string that is not valid JSON: {error}', name) from error
    if not isinstance(arguments, dict):
        raise MalformedCall(f'"{key}" is not a JSON object', name)
    return name, arguments


def read_arguments(text: str, name: str) -> dict[str, JSON]:
    """Read the arguments of a call whose name stands before them. Raises MalformedCall."""
    text = text.lstrip()
    try:
        arguments = loads(text)
    except ValueError as error:
        raise MalformedCall(f"the arguments are not valid JSON: {error}", name, text) from error
    if not isinstance(arguments, dict):
        raise MalformedCall("the arguments are not a JSON object", name)
    return arguments


def check_name(name: JSON) -> str:
    """Return a name that a tool may have. Raises MalformedCall."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise MalformedCall('the tool call has no "name", or one that is not a short string')
    return name
