"""Sampled ids to what a client sees: text, the thought at its beginning, content and tool calls.

Invariants: text that `TextDecoder` gave out never changes, however the ids were cut; nothing that a policy wrote
vanishes. A thought is what stands between `<think>`, at the very start of the turn or left open by the prompt, and
the next `</think>`, or the turn's end; marks of calls inside it are no calls, and `<think>` elsewhere is content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentloop.parsers import DecodedText, ParsedTurn, Parser
from agentloop.rendering import Renderer
from agentloop.types import JSON, Message

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_PROMPT_TAIL = 16  # tokens: `<think>` is seven characters, and few line breaks follow it
_CONTEXT = 4  # tokens that are decoded again before new ones: what some decoders write depends on those before
_MAX_OPEN_BYTES = 3  # of a character whose last one is missing; a token has at least one, or no text
_MAX_OPEN_CHARS = 64  # so many are given out, whatever the tokenizer makes of the next id
_MAX_HELD = 12  # further tokens, before those without any text are sorted out
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Reading:
    """How one turn is to be read."""

    tools: tuple[Mapping[str, JSON], ...]
    turn_index: int  # numbers its calls
    reads_calls: bool
    reads_thoughts: bool
    is_thinking: bool  # the prompt ends inside a thought


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn as a message. `num_reasoning_tokens` are those up to the thought's last mark."""

    message: Message
    num_reasoning_tokens: int


class TurnReader:
    """One model's way from a turn's text to a message. Without state: one serves all calls."""

    def __init__(self, renderer: Renderer, parser: Parser) -> None:
        self._renderer = renderer
        self._parser = parser

    @property
    def vocab_size(self) -> int:
        """Ids an engine can sample are below this."""
        return self._renderer.vocab_size

    @property
    def openings(self) -> tuple[str, ...]:
        """The marks a call may begin with."""
        return self._parser.openings

    @property
    def closing(self) -> str | None:
        """The mark that ends a call for good; None if its syntax has none."""
        opening = self._parser.opening
        return f"</{opening[1:]}" if opening.startswith("<") else None

    def decoder(self) -> TextDecoder:
        """A decoder for one turn."""
        return TextDecoder(self._renderer)

    def is_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt leaves a thought open: the reply then begins inside it."""
        return self._renderer.decode(prompt_ids[-_PROMPT_TAIL:]).rstrip().endswith(THINK_OPEN)

    def parse(self, decoded: DecodedText, reading: Reading) -> ParsedTurn:
        """Content and calls of a text behind the thought."""
        return self._parser.parse(decoded, reading.tools, reading.turn_index)

    def read(self, decoded: DecodedText, reading: Reading) -> ReadTurn:
        """The turn as a message; `decoded` holds neither the stop token nor a stop string."""
        thought = _thought(decoded.text, reading)
        if thought is None:
            return ReadTurn(self._message(decoded, reading, ""), 0)
        start, end, after = thought
        text = decoded.text[after:].lstrip()
        num_before = len(decoded.text) - len(text)
        rest = DecodedText(text, tuple(max(num_chars - num_before, 0) for num_chars in decoded.ends))
        num_tokens = decoded.token_span(0, after)[1] if after else 0
        return ReadTurn(self._message(rest, reading, decoded.text[start:end].strip()), num_tokens)

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


class TextDecoder:
    """Ids to text as they come: only characters that no later id can change, until `finish`.

    For tokenizers that make any text of bytes (byte-level ones, and those that fall back to bytes) text and offsets
    are those of `Renderer.decode_with_offsets` on all ids at once. Time is linear in the ids.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._window: list[int] = []  # the ids whose text may still change, and a few before them
        self._num_final = 0  # ids of the window whose text was given out
        self._num_seen = 0  # characters of it

    def add(self, ids: Sequence[int]) -> DecodedText:
        """The characters that are certain now; `ends` count within them, and lack those of the last few ids."""
        if not ids:
            return DecodedText("", ())
        self._window.extend(ids)
        num_ids = len(self._window)
        for num_final in range(num_ids, max(num_ids - _MAX_OPEN_BYTES, self._num_final) - 1, -1):
            decoded = self._renderer.decode_with_offsets(self._window[:num_final])
            if not decoded.text.endswith(_REPLACEMENT):
                return self._give_whole(decoded)
        return self._give_broken(self._renderer.decode_with_offsets(self._window))

    def finish(self) -> DecodedText:
        """The characters that were not certain, and the ends that were lacking."""
        return self._give(self._renderer.decode_with_offsets(self._window), None, len(self._window))

    def _give_whole(self, decoded: DecodedText) -> DecodedText:
        """`decoded` ends with a whole character: all it holds is certain."""
        num_final = len(decoded.ends)
        given = self._give(decoded, None, num_final)
        for start in range(num_final - _CONTEXT, num_final - _CONTEXT - _MAX_OPEN_BYTES - 1, -1):
            if start <= 0:
                break
            context = self._renderer.decode_with_offsets(self._window[start:num_final])
            if not context.text.startswith(_REPLACEMENT):  # it does not begin within a character
                self._window, self._num_final = self._window[start:], num_final - start
                self._num_seen = len(context.text)
                break
        return given

    def _give_broken(self, decoded: DecodedText) -> DecodedText:
        """Bytes that are no UTF-8: certain is what was so before the last id, which may begin a character."""
        num_certain = max(decoded.ends[-2], self._num_seen) if len(decoded.ends) > 1 else 0
        num_open = len(decoded.text) - num_certain
        if num_open > _MAX_OPEN_CHARS:
            return self._give_whole(decoded)
        given = self._give(decoded, num_certain, len(decoded.ends) - 1)
        if len(self._window) > _CONTEXT + num_open + _MAX_HELD:
            *before, last = self._window
            before = [token_id for token_id in before if self._has_text(token_id)][-_CONTEXT - num_open :]
            self._window, self._num_final = [*before, last], len(before)
            self._num_seen = max(len(self._renderer.decode_with_offsets(self._window).text) - num_open, 0)
        return given

    def _give(self, decoded: DecodedText, num_certain: int | None, num_final: int) -> DecodedText:
        seen = self._num_seen
        given = DecodedText(
            decoded.text[seen:num_certain],
            tuple(max(end - seen, 0) for end in decoded.ends[self._num_final : num_final]),
        )
        self._num_seen, self._num_final = seen + len(given.text), num_final
        return given

    def _has_text(self, token_id: int) -> bool:
        mark = self._renderer.stop_token_ids[0]
        return self._renderer.decode((mark, token_id)) != self._renderer.decode((mark,))
