"""Adapter for the parsers of the `renderers` package: `parser: renderers:NAME`.

They parse token ids, so a turn's text is encoded again for them. They do not guarantee linear time, return nothing
before the end of a turn, and have no grammars, so calls cannot be forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from renderers import ParsedToolCall, ToolCallParseStatus

from agentloop.errors import TemplateError, UnsupportedParameter
from agentloop.parsers.base import MAX_CALLS, DecodedText, Delimiters, MalformedCall, ParsedTurn, Tools, TurnBuilder
from agentloop.parsers.grammar import loads
from agentloop.rendering.port import NO_KWARGS
from agentloop.rendering.renderer import RenderSettings, model_text
from agentloop.types import JSON, Constraint
from agentloop_renderers.renderer import THINK_CLOSE, THINK_OPEN, Library, family_of

_READ = frozenset({ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL})  # the toolbox rejects unknown tools


class LibraryParser:
    """The parser of one model family of the library, with the tokenizer of a model folder."""

    # Any text may be part of a call until the library has parsed the complete turn.
    delimiters = Delimiters(openings=("",))

    def __init__(self, folder: Path, family: str) -> None:
        """`family` is the library's name of the model family; `auto` derives it from the folder's name.

        Raises InvalidRequest and TemplateError.
        """
        self._text = model_text(folder)
        self._library = Library(*family_of(family, folder), self._text, RenderSettings())
        # The text has no reasoning, but some of these parsers expect it at the start: prepend an empty one.
        has_delimiters = all(self._text.tokens.id_of(mark) is not None for mark in (THINK_OPEN, THINK_CLOSE))
        self._no_reasoning = THINK_OPEN + THINK_CLOSE if has_delimiters else ""

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        """Implement `Parser.parse`. If the library fails, the text is returned as content."""
        ids = self._text.ids(self._no_reasoning + decoded.text)
        reader = self._library.under(NO_KWARGS)
        try:
            parsed = self._library.run(lambda: reader.parse_response(ids, tools=list(tools) or None))
        except TemplateError:
            return ParsedTurn(decoded.text.strip(), ())
        num_before = len(self._no_reasoning)
        ends = [max(end - num_before, 0) for end in self._text.decode_with_offsets(ids).ends]
        builder = TurnBuilder(decoded, turn_index)
        builder.add_content(parsed.content)
        builder.add_reasoning(parsed.reasoning_content or "")
        spans = [_chars(call, ends, len(decoded.text)) for call in parsed.tool_calls]
        for call, (start, end) in zip(parsed.tool_calls[:MAX_CALLS], spans, strict=False):
            try:
                builder.add_call(start, end, call.name or "", _arguments(call))
            except MalformedCall as malformed:
                builder.add_malformed(start, end, malformed)
        if len(spans) > MAX_CALLS:
            error = f"{len(spans) - MAX_CALLS} tool calls after the first {MAX_CALLS} were not parsed"
            builder.add_malformed(spans[MAX_CALLS][0], spans[-1][1], MalformedCall(error))
        return builder.finish()

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """Raise UnsupportedParameter, because the library has no grammars."""
        raise UnsupportedParameter(
            f"the parser renderers:{self._library.family} cannot force calls: use tool_choice 'auto'",
            param="tool_choice",
        )


def _chars(call: ParsedToolCall, ends: Sequence[int], num_chars: int) -> tuple[int, int]:
    """Return the character range of a call; the range of the complete turn if the library returns no range."""
    if call.token_span is None:
        return 0, num_chars
    first, last = call.token_span
    return (ends[first - 1] if first > 0 else 0), (ends[last - 1] if 0 < last <= len(ends) else num_chars)


def _arguments(call: ParsedToolCall) -> dict[str, JSON]:
    """Return the arguments of a call that the library parsed. Raises MalformedCall."""
    error = MalformedCall(f"the tool call cannot be parsed: {call.status.value}", call.name or "")
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except ValueError:
            raise error from None
    if call.status not in _READ or not call.name or not isinstance(arguments, dict):
        raise error
    return arguments
