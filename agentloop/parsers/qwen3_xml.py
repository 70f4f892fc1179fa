"""Calls as Qwen3-Coder writes them: `<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`.

One position moves through the text and never back, so time is linear. Values are not escaped in this format: a
value runs to the first `</parameter>`, and may hold any tag but a whole call's end, which shows that the
parameter was never closed. Values get their type from the tool's schema, by JSON: nothing is evaluated.
"""

from __future__ import annotations

import re

from agentloop.parsers.base import MalformedCall, Marks, TurnBuilder
from agentloop.parsers.grammar import CallSyntax
from agentloop.parsers.marked import MarkedParser, Tools
from agentloop.parsers.typed_text import TextArguments, parameter_schemas
from agentloop.types import JSON

_CALL_OR_END = re.compile(r"</?tool_call>")
_NAME = re.compile(r"[^<>\n]{1,256}")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")
_VALUE_END = re.compile(r"</parameter>|(</function>\s*</tool_call>)")
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_END = re.compile(r"\s*</tool_call>")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Qwen3XmlParser(MarkedParser):
    """XML-like tags. A missing `<tool_call>` or `</tool_call>` is forgiven, any other missing tag is not."""

    marks = Marks((_OPEN, "<function="), _CLOSE)
    opening = re.compile(r"<tool_call>|<function=")

    def read_call(self, builder: TurnBuilder, found: re.Match[str], tools: Tools) -> int:
        start, reader = found.start(), _CallReader(builder.text, found.start())
        try:
            name, arguments = reader.read(tools)
        except MalformedCall as malformed:
            is_cut = reader.recover()
            builder.add_malformed(start, reader.position, malformed, is_cut=is_cut)
        else:
            builder.add_call(start, reader.position, name, arguments)
        return reader.position

    def syntax(self, name: str) -> CallSyntax | None:
        if _NAME.fullmatch(name) is None or name != name.strip():
            return None
        return CallSyntax(f"{_OPEN}\n<function={name}>\n", "</function>\n</tool_call>", style="qwen_xml")


class _CallReader:
    """Reads one call; `position` is where what it has read ends."""

    def __init__(self, text: str, start: int) -> None:
        self.position = start
        self._text = text

    def read(self, tools: Tools) -> tuple[str, dict[str, JSON]]:
        """The call's name and arguments. Raises MalformedCall; then `recover` must follow."""
        if self._text.startswith(_OPEN, self.position):
            self.position += len(_OPEN)
        name = self._name()
        arguments = TextArguments(name, parameter_schemas(tools, name))
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
