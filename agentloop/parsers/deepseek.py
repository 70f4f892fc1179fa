"""Calls as DeepSeek-V3 (and R1-0528) and DeepSeek-V3.1 write them, in a section of special tokens.

V3: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line break, the arguments in a fenced block of JSON, and
`<｜tool▁call▁end｜>`. V3.1: the name stands before the separator, and the bare arguments behind it. Both are
published in the models' chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentloop.parsers.base import DecodedText, MalformedCall, ParsedTurn
from agentloop.parsers.grammar import CallSyntax, TurnSyntax, constraint_of_calls
from agentloop.parsers.json_call import check_name, read_arguments
from agentloop.parsers.tagged import Tags
from agentloop.types import JSON, Constraint

_TAGS = Tags("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_KIND = "function"
_FENCE = "```"


class DeepSeekV3Parser:
    """Arguments in a fenced block. A missing fence is forgiven."""

    marks = _TAGS.marks

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. `tools` are not needed: JSON carries its types."""
        return _TAGS.read(decoded, turn_index, _read_fenced)

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`."""
        turn = TurnSyntax(_TAGS.section_open, "\n", _TAGS.section_close)
        return constraint_of_calls(tools, _fenced_syntax, turn, forced=forced, is_parallel=is_parallel)


class DeepSeekV31Parser:
    """A name, a separator and arguments."""

    marks = _TAGS.marks

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. `tools` are not needed: JSON carries its types."""
        return _TAGS.read(decoded, turn_index, _read_bare)

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`."""
        turn = TurnSyntax(_TAGS.section_open, "", _TAGS.section_close)
        return constraint_of_calls(tools, _bare_syntax, turn, forced=forced, is_parallel=is_parallel)


def _read_fenced(body: str) -> tuple[str, dict[str, JSON]]:
    kind, separator, rest = body.partition(_SEPARATOR)
    if not separator or kind.strip() != _KIND:
        raise MalformedCall(f"the tool call does not begin with {_KIND}{_SEPARATOR}")
    written, line_break, block = rest.partition("\n")
    if not line_break:
        raise MalformedCall("the tool call has no line break behind its name")
    name = check_name(written.strip())
    block = block.lstrip().removeprefix(f"{_FENCE}json").removeprefix(_FENCE)
    if block.rstrip().endswith(_FENCE):
        block = block.rstrip().removesuffix(_FENCE)
    return name, read_arguments(block, name)


def _read_bare(body: str) -> tuple[str, dict[str, JSON]]:
    written, separator, arguments = body.partition(_SEPARATOR)
    if not separator:
        raise MalformedCall(f"the tool call has no {_SEPARATOR} behind its name")
    name = check_name(written.strip())
    return name, read_arguments(arguments, name)


def _fenced_syntax(name: str) -> CallSyntax:
    return CallSyntax(f"{_TAGS.open}{_KIND}{_SEPARATOR}{name}\n{_FENCE}json\n", f"\n{_FENCE}{_TAGS.close}")


def _bare_syntax(name: str) -> CallSyntax:
    return CallSyntax(f"{_TAGS.open}{name}{_SEPARATOR}", _TAGS.close)
