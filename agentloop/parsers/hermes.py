"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Linear: a region ends at its first close tag; at most `MAX_CLOSE_TAGS` further ones are tried (the tag may stand
inside a JSON string), so each character is read a bounded number of times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentloop.parsers.base import MAX_NAME_CHARS, DecodedText, MalformedCall, ParsedTurn, TurnBuilder
from agentloop.parsers.grammar import CallSyntax, constraint_of_calls, loads
from agentloop.types import JSON, Constraint

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CLOSE_TAGS = 4


class HermesParser:
    """JSON between tags. A missing close tag is forgiven if the JSON before the next call is complete."""

    opening = OPEN
    openings = (OPEN,)

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. `tools` are not needed: JSON carries its types."""
        text = decoded.text
        builder = TurnBuilder(decoded, turn_index)
        position = 0
        while (start := text.find(OPEN, position)) >= 0:
            builder.add_content(text[position:start])
            position = _read_region(text, start, builder)
        builder.add_content(text[position:])
        return builder.finish()

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`."""
        return constraint_of_calls(tools, _syntax, forced=forced, is_parallel=is_parallel)


def _syntax(name: str) -> CallSyntax:
    written = json.dumps(name, ensure_ascii=False)
    return CallSyntax(f'{OPEN}\n{{"name": {written}, "arguments": ', f"}}\n{CLOSE}", style="json")


def _read_region(text: str, start: int, builder: TurnBuilder) -> int:
    """Add what `[start, first close tag]` holds; return where it ends."""
    if builder.is_full:
        builder.add_rest(start, OPEN)
        return len(text)
    body_start = start + len(OPEN)
    first_close = text.find(CLOSE, body_start)
    close = first_close
    for _ in range(1 + MAX_CLOSE_TAGS):
        until = close if close >= 0 else len(text)
        try:
            name, arguments = _read_call(text[body_start:until])
        except MalformedCall:
            if close < 0 or (close := text.find(CLOSE, close + len(CLOSE))) < 0:
                break
        else:
            end = until + len(CLOSE) if close >= 0 else until
            builder.add_call(start, end, name, arguments)
            return end
    if first_close < 0:
        return _read_pieces(text, start, len(text), len(text), builder)
    return _read_pieces(text, start, first_close, first_close + len(CLOSE), builder)


def _read_pieces(text: str, start: int, body_end: int, end: int, builder: TurnBuilder) -> int:
    """The region is not one call: every open tag in it starts one of its own. Returns where the last one ends."""
    while start >= 0:
        if builder.is_full:
            builder.add_rest(start, OPEN)
            return len(text)
        body_start = start + len(OPEN)
        following = text.find(OPEN, body_start, body_end)
        until, piece_end = (following, following) if following >= 0 else (body_end, end)
        try:
            name, arguments = _read_call(text[body_start:until])
        except MalformedCall as malformed:
            builder.add_malformed(start, piece_end, malformed.error, malformed.name)
        else:
            builder.add_call(start, piece_end, name, arguments)
        start = following
    return end


def _read_call(body: str) -> tuple[str, dict[str, JSON]]:
    if not (body := body.strip()):
        raise MalformedCall("the tool call is empty")
    try:
        call = loads(body)
    except ValueError as error:
        raise MalformedCall(f"the tool call is not valid JSON: {error}") from error
    if not isinstance(call, dict):
        raise MalformedCall('the tool call is not a JSON object with "name" and "arguments"')
    name = call.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise MalformedCall('the tool call has no "name", or one that is not a short string')
    if "arguments" not in call:
        raise MalformedCall('the tool call has no "arguments"', name)
    arguments = call["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except ValueError as error:
            raise MalformedCall(f'"arguments" is a string that is not valid JSON: {error}', name) from error
    if not isinstance(arguments, dict):
        raise MalformedCall('"arguments" is not a JSON object', name)
    return name, arguments
