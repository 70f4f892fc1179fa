"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentloop.parsers.base import DecodedText, ParsedTurn
from agentloop.parsers.grammar import CallSyntax, constraint_of_calls
from agentloop.parsers.json_call import read_json_call
from agentloop.parsers.tagged import Tags
from agentloop.types import JSON, Constraint

_TAGS = Tags("<tool_call>", "</tool_call>")


class HermesParser:
    """JSON between tags. A missing close tag is forgiven if the JSON before the next call is complete."""

    marks = _TAGS.marks

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. `tools` are not needed: JSON carries its types."""
        return _TAGS.read(decoded, turn_index, _read_body)

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`."""
        return constraint_of_calls(tools, _syntax, forced=forced, is_parallel=is_parallel)


def _read_body(body: str) -> tuple[str, dict[str, JSON]]:
    return read_json_call(body, "arguments")


def _syntax(name: str) -> CallSyntax:
    written = json.dumps(name, ensure_ascii=False)
    return CallSyntax(f'{_TAGS.open}\n{{"name": {written}, "arguments": ', f"}}\n{_TAGS.close}")
