"""A reader of whole turns by others' code: vLLM's tool parsers, and transformers with a `response_template`.

Text that it cannot read becomes content, marks included; time need not be linear, and calls cannot be forced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from agentloop.errors import UnsupportedParameter
from agentloop.parsers.arguments import read_arguments
from agentloop.parsers.base import (
    MAX_CALLS,
    DecodedText,
    MalformedCall,
    Marks,
    ParsedTurn,
    ThoughtMarks,
    Tools,
    TurnBuilder,
)
from agentloop.types import Constraint

_log = structlog.stdlib.get_logger(__name__)


class WholeTurnParser:
    """Any text may be a call to it, so that a stream waits for the turn's end."""

    def __init__(
        self, name: str, read: Callable[[str, Tools], tuple[str, list[tuple[str, str]]]], thoughts: ThoughtMarks
    ) -> None:
        """`read` returns the content of a text, and the names and arguments of its calls; it may raise anything."""
        self.marks = Marks(("",), thoughts=thoughts)
        self._name = name
        self._read = read

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. The place of a call is found again by its name."""
        try:
            content, calls = self._read(decoded.text, tools)
        except Exception as error:  # foreign code on a policy's text
            _log.warning("parser_failed", parser=self._name, error=f"{type(error).__name__}: {error}"[:300])
            return ParsedTurn(decoded.text.strip(), ())
        builder = TurnBuilder(decoded, turn_index)
        builder.add_content(content)
        spans = _spans(decoded.text, content, [name for name, _ in calls[:MAX_CALLS]])
        for (name, written), (start, end) in zip(calls, spans, strict=False):
            try:
                builder.add_call(start, end, name, read_arguments(written, name))
            except MalformedCall as malformed:
                builder.add_malformed(start, end, malformed)
        if len(calls) > MAX_CALLS:
            builder.add_rest(len(decoded.text), len(calls) - MAX_CALLS)
        return builder.finish()

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """Raise UnsupportedParameter: no such parser has a grammar of calls alone."""
        raise UnsupportedParameter(
            f"the parser {self._name} cannot force calls; agentloop's own can", param="tool_choice"
        )


def _spans(text: str, content: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return where calls of these names stand: from the mark before each name to the next one's, or the end.

    A call whose name is not in the text, or stands there escaped, has no characters of its own.
    """
    shown = content.strip()
    begin = len(text) - len(text[text.find(shown) + len(shown) :].lstrip())
    starts, position, mark = [], begin, None
    for name in names:
        place = text.find(name, position) if name else -1
        if place < 0:
            starts.append(position)
            continue
        if mark is None:
            mark = text[begin:place]  # what opens the first call opens the others
        start = text.rfind(mark, position, place)
        starts.append(start if start >= 0 else place)
        position = place + len(name)
    return list(zip(starts, [*starts[1:], len(text)], strict=False))
