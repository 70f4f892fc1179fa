"""Parsers of the `renderers` package behind our port: `parser: renderers:NAME`.

They read token ids: a turn's text is encoded again for them, and for them alone. They promise no linear time, tell
nothing of a turn before its end, and know no grammars, so that calls cannot be forced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from renderers import ParsedToolCall, ToolCallParseStatus

from agentloop.errors import TemplateError, UnsupportedParameter
from agentloop.parsers.base import MAX_CALLS, DecodedText, Marks, ParsedTurn
from agentloop.parsers.grammar import loads
from agentloop.rendering.port import NO_KWARGS
from agentloop.rendering.renderer import RenderSettings, model_text
from agentloop.types import JSON, Constraint, ToolCall, ToolCallStatus
from agentloop_servers.chat_format.library_renderer import THINK_CLOSE, THINK_OPEN, Library, family_of

_READ = frozenset({ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL})  # unknown tools are for the toolbox


class LibraryParser:
    """The parser of one family of the library, with the tokenizer of a model folder."""

    marks = Marks(openings=("",))  # any text may be a call, until the library has read the whole turn

    def __init__(self, folder: Path, family: str) -> None:
        """`family` is the library's name, or `auto`. Raises InvalidRequest and TemplateError."""
        self._text = model_text(folder)
        self._library = Library(*family_of(family, folder), self._text, RenderSettings())
        # The text comes without its thought, which some of these parsers would look for at its beginning.
        has_marks = all(self._text.tokens.id_of(mark) is not None for mark in (THINK_OPEN, THINK_CLOSE))
        self._no_thought = THINK_OPEN + THINK_CLOSE if has_marks else ""

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. A text on which the library fails is content."""
        ids = self._text.ids(self._no_thought + decoded.text)
        reader = self._library.under(NO_KWARGS)
        try:
            parsed = self._library.run(lambda: reader.parse_response(ids, tools=list(tools) or None))
        except TemplateError:
            return ParsedTurn(decoded.text.strip(), ())
        num_before = len(self._no_thought)
        ends = [max(end - num_before, 0) for end in self._text.decode_with_offsets(ids).ends]
        spans = [_chars(call, ends, len(decoded.text)) for call in parsed.tool_calls]
        calls = [
            _call(call, decoded, spans[i], f"call_{turn_index}_{i}")
            for i, call in enumerate(parsed.tool_calls[:MAX_CALLS])
        ]
        if len(spans) > MAX_CALLS:
            calls.append(_rest(decoded, spans[MAX_CALLS:], f"call_{turn_index}_{MAX_CALLS}"))
        return ParsedTurn(parsed.content.strip(), tuple(calls), (parsed.reasoning_content or "").strip())

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """Raise UnsupportedParameter: the library has no grammars."""
        raise UnsupportedParameter(
            f"the parser renderers:{self._library.family} cannot force calls", param="tool_choice"
        )


def _chars(call: ParsedToolCall, ends: Sequence[int], num_chars: int) -> tuple[int, int]:
    """Return the characters of a call; those of the whole turn where the library does not tell."""
    if call.token_span is None:
        return 0, num_chars
    first, last = call.token_span
    return (ends[first - 1] if first > 0 else 0), (ends[last - 1] if 0 < last <= len(ends) else num_chars)


def _call(call: ParsedToolCall, decoded: DecodedText, chars: tuple[int, int], call_id: str) -> ToolCall:
    first, last = decoded.token_span(*chars)
    name, arguments = call.name or "", call.arguments
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except ValueError:
            arguments = None
    if call.status in _READ and name and isinstance(arguments, dict):
        return ToolCall(call_id, name, arguments, token_start=first, token_end=last)
    written = decoded.text[slice(*chars)]
    error = f"the tool call cannot be read: {call.status.value}"
    return ToolCall(call_id, name, {}, ToolCallStatus.MALFORMED, error, first, last, text=written)


def _rest(decoded: DecodedText, spans: Sequence[tuple[int, int]], call_id: str) -> ToolCall:
    """Report all calls behind the first `MAX_CALLS` as one."""
    start, end = spans[0][0], spans[-1][1]
    first, last = decoded.token_span(start, end)
    error = f"{len(spans)} tool calls after the first {MAX_CALLS} were not read"
    text = decoded.text[start:end]
    return ToolCall(call_id, "", {}, ToolCallStatus.MALFORMED, error, first, last, text=text)
