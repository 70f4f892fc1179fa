"""Calls as Kimi-K2 writes them, in a section: `<|tool_call_begin|>ID<|tool_call_argument_begin|>{...}`.

The id is `functions.NAME:NUMBER`: it holds the tool's name, and the call's number within the conversation.
Published in the model's own guide to tool calls (`docs/tool_call_guidance.md` of its repository).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentloop.parsers.base import DecodedText, MalformedCall, ParsedTurn
from agentloop.parsers.grammar import CallSyntax, TurnSyntax, constraint_of_calls
from agentloop.parsers.json_call import check_name, read_arguments
from agentloop.parsers.tagged import Tags
from agentloop.types import JSON, Constraint

_TAGS = Tags(
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
)
_ARGUMENTS = "<|tool_call_argument_begin|>"
_NUMBER = re.compile(r":[0-9]+\Z")


class KimiK2Parser:
    """A call's id and its arguments. An id without a number is taken for the name."""

    marks = _TAGS.marks

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. `tools` are not needed: JSON carries its types."""
        return _TAGS.read(decoded, turn_index, _read_body, _read_id)

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`."""
        turn = TurnSyntax(_TAGS.section_open, "", _TAGS.section_close)
        return constraint_of_calls(tools, _syntax, turn, forced=forced, is_parallel=is_parallel)


def _read_body(body: str) -> tuple[str, dict[str, JSON]]:
    call_id, mark, arguments = body.partition(_ARGUMENTS)
    if not mark:
        raise MalformedCall(f"the tool call has no {_ARGUMENTS} behind its id")
    name = check_name(_NUMBER.sub("", call_id.strip()).removeprefix("functions."))
    return name, read_arguments(arguments, name)


def _read_id(body: str) -> str:
    call_id = body.partition(_ARGUMENTS)[0].strip()
    return call_id if _NUMBER.search(call_id) is not None else ""


def _syntax(name: str) -> CallSyntax:
    return CallSyntax(f"{_TAGS.open}functions.{name}:", _TAGS.close, numbered=_ARGUMENTS)
