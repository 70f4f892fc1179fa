"""Calls as Qwen3-Coder writes them: `<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`.

One position moves through the text and never back, so time is linear. Values are not escaped in this format: a
value runs to the first `</parameter>`, and may hold any tag but a whole call's end, which shows that the
parameter was never closed. Values get their type from the tool's schema, by JSON: nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText, MalformedCall, Marks, ParsedTurn, TurnBuilder
from agentloop.parsers.grammar import CallSyntax, constraint_of_calls
from agentloop.parsers.typed_text import TextArguments, parameter_schemas
from agentloop.types import JSON, Constraint

_CALL = re.compile(r"<tool_call>|<function=")
_CALL_OR_END = re.compile(r"</?tool_call>")
_NAME = re.compile(r"[^<>\n]{1,256}")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")
_VALUE_END = re.compile(r"</parameter>|(</function>\s*</tool_call>)")
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_END = re.compile(r"\s*</tool_call>")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Qwen3XmlParser:
    """XML-like tags. A missing `<tool_call>` or `</tool_call>` is forgiven, any other missing tag is not."""

    marks = Marks((_OPEN, "<function="), _CLOSE)

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`."""
        text = decoded.text
        builder = TurnBuilder(decoded, turn_index)
        schemas = parameter_schemas(tools)
        position = 0
        while (found := _CALL.search(text, position)) is not None:
            start = found.start()
            builder.add_content(text[position:start])
            if builder.is_full:
                builder.add_rest(start, found[0])
                return builder.finish()
            reader = _CallReader(text, start)
            try:
                name, arguments = reader.read(schemas)
            except MalformedCall as malformed:
                is_cut = reader.recover()
                builder.add_malformed(start, reader.position, malformed, is_cut=is_cut)
            else:
                builder.add_call(start, reader.position, name, arguments)
            position = reader.position
        builder.add_content(text[position:])
        return builder.finish()

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`."""
        return constraint_of_calls(tools, _syntax, forced=forced, is_parallel=is_parallel)


def _syntax(name: str) -> CallSyntax:
    if _NAME.fullmatch(name) is None or name != name.strip():
        raise InvalidRequest(f"a call of {name[:64]!r} cannot be written in this model's format", param="tools")
    return CallSyntax(f"{_OPEN}\n<function={name}>\n", "</function>\n</tool_call>", style="qwen_xml")


class _CallReader:
    """Reads one call; `position` is where what it has read ends."""

    def __init__(self, text: str, start: int) -> None:
        self.position = start
        self._text = text

    def read(self, schemas: Mapping[str, Mapping[str, JSON]]) -> tuple[str, dict[str, JSON]]:
        """The call's name and arguments. Raises MalformedCall; then `recover` must follow."""
        if self._text.startswith(_OPEN, self.position):
            self.position += len(_OPEN)
        name = self._name()
        arguments = TextArguments(name, schemas.get(name, {}))
        while (opening := self._take(_PARAMETER)) is not None:
            key = opening[1].strip()
            arguments.add(key, self._value(key, arguments))
        if self._take(_FUNCTION_END) is None:
            error = "the tool call has something else where <parameter=...> or </function> must stand"
            raise arguments.malformed(error)
        self._take(_CALL_END)
        return name, arguments.values

    def recover(self) -> bool:
        """Move past what cannot be read: through the next call end, or up to a call. Tell if nothing ended it."""
        found = _CALL_OR_END.search(self._text, self.position)
        if found is None:
            self.position = len(self._text)
        else:
            self.position = found.start() if found[0] == _OPEN else found.end()
        return found is None

    def _name(self) -> str:
        opening = self._take(_FUNCTION)
        if opening is None:
            raise MalformedCall("the tool call has no <function=...>")
        if not (name := opening[1].strip()):
            raise MalformedCall("the tool call has an empty function name")
        return name

    def _value(self, key: str, arguments: TextArguments) -> str:
        """The text up to the parameter's end; the template puts a line break before and after it."""
        start = self.position
        found = _VALUE_END.search(self._text, start)
        if found is None:
            self.position = len(self._text)  # all that follows is inside the value
        elif found[1] is None:
            self.position = found.end()
            return self._text[start : found.start()].removeprefix("\n").removesuffix("\n")
        else:
            self.position = found.start()
        value = self._text[start : self.position].removeprefix("\n")
        raise arguments.malformed(f"parameter {key!r} has no </parameter>", (key, value))

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self.position)
        if found is not None:
            self.position = found.end()
        return found
