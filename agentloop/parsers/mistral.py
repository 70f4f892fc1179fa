"""Calls as Mistral's models write them behind `[TOOL_CALLS]`: a list of objects, or a name and its arguments.

List: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` (tokenizers to version 7). Named, from version 11 on:
`[TOOL_CALLS]NAME[ARGS]{...}` for each call, with `[CALL_ID]...` between where the model writes one. Published in
mistral-common (`InstructTokenizer` of each version).

Linear: arguments end with the bracket that closes their first; it is looked for up to the fourth mark that follows
(the mark may stand inside a string), so each character is read a bounded number of times.
"""

from __future__ import annotations

import json
import re

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import MalformedCall, Marks, ThoughtMarks, TurnBuilder
from agentloop.parsers.grammar import CallSyntax, TurnSyntax, constraint_of_calls, either_constraint, loads
from agentloop.parsers.json_call import json_end, limit_of, next_mark, read_arguments, read_json_call
from agentloop.parsers.marked import MarkedParser, Tools
from agentloop.types import JSON, Constraint

_CALLS = "[TOOL_CALLS]"
_THOUGHTS = ThoughtMarks("[THINK]", "[/THINK]")
_LIST = re.compile(r"\s*+\[")
_NAMED = re.compile(
    r"\s*+([^\[\]{}\s][^\[\]{}\n]{0,255})(?:\[CALL_ID\]([^\[\]{}\n]{0,64}))?(?:\[ARGS\])?\s*+(?=\{)"
)
_NAME_ONLY = re.compile(r"\s*+([^\[\]{}\s][^\[\]{}\n]{0,255})\[")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_OBJECT = re.compile(r"\s*+(?=\{)")
_NEXT = re.compile(r"\s*+(?:(,)|(\]))")


class MistralParser(MarkedParser):
    """Both forms, told apart call by call. A list without its last bracket is forgiven if its objects are whole."""

    def __init__(self, mark: str = _CALLS, thoughts: ThoughtMarks = _THOUGHTS) -> None:
        """`mark` stands before calls; of Granite's it is another one, and only lists are written."""
        self._mark = mark
        self.marks = Marks((mark,), thoughts=thoughts)
        self.opening = re.compile(re.escape(mark))
        self.turn = TurnSyntax(f"{mark} [" if mark == _CALLS else f"{mark}[", ", ", "]")

    def read_call(self, builder: TurnBuilder, found: re.Match[str], tools: Tools) -> int:
        start, body = found.span()
        opening = _LIST.match(builder.text, body)
        if opening is not None:
            return _read_list(builder.text, start, opening.end(), builder, self._mark)
        return _read_named(builder.text, start, body, builder, self._mark)

    def syntax(self, name: str) -> CallSyntax:
        """See `MarkedParser.syntax`: an object of a list."""
        return CallSyntax(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}")

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """See `Parser.call_constraint`. The policy chooses the form, at the first character behind the mark."""
        listed = super().call_constraint(tools, forced=forced, is_parallel=is_parallel)
        if self._mark != _CALLS:
            return listed
        turn = TurnSyntax(separator="")
        named = constraint_of_calls(tools, _named_syntax, turn, forced=forced, is_parallel=is_parallel)
        return either_constraint(named, listed)


def _named_syntax(name: str) -> CallSyntax:
    found = _NAMED.match(f"{name}[ARGS]{{")
    if found is None or found[1] != name:
        raise InvalidRequest(f"a call of {name[:64]!r} cannot be written in this model's format", param="tools")
    return CallSyntax(f"{_CALLS}{name}[ARGS]", "")


def _read_named(text: str, start: int, body: int, builder: TurnBuilder, mark: str) -> int:
    """Add one call; return where it ends."""
    found = _NAMED.match(text, body)
    if found is None:
        named = _NAME_ONLY.match(text, body)
        name = named[1].strip() if named is not None else ""
        error = f"behind {mark} stands neither a list of calls nor a name with its arguments"
        return _add_malformed(text, start, body, MalformedCall(error, name), builder, mark)
    name, begin = found[1].strip(), found.end()
    end = json_end(text, begin, limit_of(text, begin, mark))
    try:
        if end < 0:
            raise MalformedCall("the arguments have no end", name, text[begin : next_mark(text, begin, mark)])
        arguments = read_arguments(text[begin:end], name)
    except MalformedCall as malformed:
        return _add_malformed(text, start, begin, malformed, builder, mark)
    builder.add_call(start, end, name, arguments, _call_id(found[2]))
    return end


def _read_list(text: str, start: int, position: int, builder: TurnBuilder, mark: str) -> int:
    """Add the calls of one list, each with what stands before it; return where the last one ends."""
    limit = limit_of(text, position, mark)
    while True:
        if builder.is_full:
            builder.add_rest(start, '"name"')
            return len(text)
        opening = _OBJECT.match(text, position)
        if opening is None:
            error = MalformedCall("the list of tool calls has something else where an object must stand")
            return _add_malformed(text, start, position, error, builder, mark)
        begin = opening.end()
        end = json_end(text, begin, limit)
        try:
            written = text[begin : end if end >= 0 else next_mark(text, begin, mark)]
            name, arguments = read_json_call(written, "arguments")
        except MalformedCall as malformed:
            return _add_malformed(text, start, begin, malformed, builder, mark)
        following = _NEXT.match(text, end)
        is_last = following is None or following[1] is None
        after = end if following is None else following.end()
        builder.add_call(start, after, name, arguments, _call_id(loads(written).get("id")))
        if is_last:
            return after
        start = position = after


def _call_id(written: JSON) -> str:
    """Return the call's id if it is one: templates refuse any other."""
    return written if isinstance(written, str) and _ID.fullmatch(written) is not None else ""


def _add_malformed(
    text: str, start: int, body: int, malformed: MalformedCall, builder: TurnBuilder, mark: str
) -> int:
    """Report what stands before the next mark; return where that is."""
    end = next_mark(text, body, mark)
    builder.add_malformed(start, end, malformed, is_cut=end == len(text))
    return end
