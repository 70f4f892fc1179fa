"""A turn's text to a message: the thought at its beginning, content and tool calls, for loops and sessions alike.

Invariant: nothing that a policy wrote vanishes. A thought is what stands between `<think>`, at the very start of
the turn or left open by the prompt, and the next `</think>`, or the turn's end; marks of calls inside it are no
calls, and `<think>` elsewhere is content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentloop.parsers import DecodedText, ParsedTurn, Parser
from agentloop.rendering import Renderer, TextDecoder
from agentloop.types import JSON, Message

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_PROMPT_TAIL = 16  # tokens: `<think>` is seven characters, and few line breaks follow it


@dataclass(frozen=True, slots=True)
class Reading:
    """The rules by which one turn is read."""

    tools: Sequence[Mapping[str, JSON]]
    turn_index: int  # numbers its calls
    reads_calls: bool
    reads_thoughts: bool
    is_thinking: bool  # the prompt ends inside a thought


class TurnReader:
    """One model's way from a turn's text to a message. Without state: one serves all calls."""

    def __init__(self, renderer: Renderer, parser: Parser) -> None:
        self._renderer = renderer
        self._parser = parser

    @property
    def openings(self) -> tuple[str, ...]:
        """The marks a call may begin with."""
        return self._parser.openings

    @property
    def closing(self) -> str | None:
        """The mark that ends a call for good; None if its syntax has none."""
        opening = self._parser.opening
        return f"</{opening[1:]}" if opening.startswith("<") else None

    def ends_turn(self, token_id: int) -> bool:
        """Tell whether a stop token is the model's own: one of a client's own leaves the turn open."""
        return token_id in self._renderer.stop_token_ids

    def decoder(self) -> TextDecoder:
        """A decoder for one turn."""
        return self._renderer.decoder()

    def decode(self, ids: Sequence[int]) -> DecodedText:
        """A turn's text at once."""
        return self._renderer.decode_with_offsets(ids)

    def is_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt leaves a thought open: the reply then begins inside it."""
        return self._renderer.decode(prompt_ids[-_PROMPT_TAIL:]).rstrip().endswith(THINK_OPEN)

    def parse(self, decoded: DecodedText, reading: Reading) -> ParsedTurn:
        """Content and calls of a text behind the thought."""
        return self._parser.parse(decoded, reading.tools, reading.turn_index)

    def read(self, decoded: DecodedText, reading: Reading) -> tuple[Message, int]:
        """Return the turn as a message, and how many tokens its thought has, up to its last mark.

        `decoded` holds neither the stop token nor a stop string.
        """
        thought = _thought(decoded.text, reading)
        if thought is None:
            return self._message(decoded, reading, ""), 0
        start, end, after = thought
        text = decoded.text[after:].lstrip()
        num_before = len(decoded.text) - len(text)
        rest = DecodedText(text, tuple(max(num_chars - num_before, 0) for num_chars in decoded.ends))
        num_tokens = decoded.token_span(0, after)[1] if after else 0
        return self._message(rest, reading, decoded.text[start:end].strip()), num_tokens

    def _message(self, decoded: DecodedText, reading: Reading, reasoning: str) -> Message:
        if not reading.reads_calls:
            return Message("assistant", decoded.text, reasoning=reasoning)
        parsed = self.parse(decoded, reading)
        return Message("assistant", parsed.content, parsed.calls, reasoning=reasoning)


def _thought(text: str, reading: Reading) -> tuple[int, int, int] | None:
    """The thought's characters `[start, end)`, and where what follows its mark begins."""
    if not reading.reads_thoughts or not (reading.is_thinking or text.startswith(THINK_OPEN)):
        return None
    start = 0 if reading.is_thinking else len(THINK_OPEN)
    end = text.find(THINK_CLOSE, start)
    return (start, len(text), len(text)) if end < 0 else (start, end, end + len(THINK_CLOSE))
