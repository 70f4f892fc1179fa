"""vLLM's tool parsers behind the Parser port, for families that agentloop has no parser of its own for.

They do not keep the promises of our own parsers: text that they cannot read becomes content, marks included; time
need not be linear; a call's place is found again by its name. They know no tokens and, being made for streams, keep
state, so that one is made for each turn. Importing them takes some 20 s on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.parsers.arguments import read_arguments
from agentloop.parsers.base import (
    MAX_CALLS,
    DecodedText,
    MalformedCall,
    Marks,
    ParsedTurn,
    ThoughtMarks,
    TurnBuilder,
)
from agentloop.types import JSON, Constraint

_log = structlog.stdlib.get_logger(__name__)

VLLM_PARSERS = "vllm:"
"""The beginning of the names of all of them."""


def vllm_parser(name: str, folder: Path) -> VllmToolParser:
    """Make the parser called `vllm:TOOLS`, or `vllm:TOOLS+THOUGHTS` with the marks of a reasoning parser.

    `folder` is the model's: its tokenizer.json is read. Raises InvalidRequest naming the known parsers.
    """
    from transformers import PreTrainedTokenizerFast
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tools, _, thoughts = name.removeprefix(VLLM_PARSERS).partition("+")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    parser_class = _registered(ToolParserManager.get_tool_parser, tools, ToolParserManager.list_registered())
    marks = ThoughtMarks()
    if thoughts:
        known = ReasoningParserManager.list_registered()
        reasoning = _made(
            _registered(ReasoningParserManager.get_reasoning_parser, thoughts, known), tokenizer, name
        )
        if not reasoning.reasoning_start_str or not reasoning.reasoning_end_str:
            raise InvalidRequest(f"vLLM's reasoning parser {thoughts!r} names no marks", param="parser")
        marks = ThoughtMarks(reasoning.reasoning_start_str, reasoning.reasoning_end_str)
    _made(parser_class, tokenizer, name)
    return VllmToolParser(tools, parser_class, tokenizer, marks)


def _registered(get: Any, name: str, known: Sequence[str]) -> Any:
    try:
        return get(name)
    except KeyError as error:
        shown = ", ".join(sorted(known))
        raise InvalidRequest(f"vLLM has no parser {name[:64]!r}: there are {shown}", param="parser") from error


def _made(parser_class: Any, tokenizer: Any, name: str) -> Any:
    try:
        return parser_class(tokenizer)
    except Exception as error:  # most want tokens that not every tokenizer has, and say so in their own ways
        raise InvalidRequest(f"{name} does not fit this model's tokenizer: {error}", param="parser") from error


class VllmToolParser:
    """One of vLLM's tool parsers. Any text may be a call to it, so that a stream waits for the turn's end."""

    def __init__(self, name: str, parser_class: Any, tokenizer: Any, thoughts: ThoughtMarks) -> None:
        self.marks = Marks(("",), thoughts=thoughts)
        self._name = name
        self._class = parser_class
        self._tokenizer = tokenizer

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. Text that vLLM's parser fails at is content, as it is when vLLM serves."""
        try:
            found = self._extract(decoded.text, tools)
        except Exception as error:  # foreign code on a policy's text
            _log.warning("parser_failed", parser=self._name, error=f"{type(error).__name__}: {error}"[:300])
            return ParsedTurn(decoded.text.strip(), ())
        if not found.tools_called:
            content = decoded.text if found.content is None else found.content
            return ParsedTurn(content.strip(), ())
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return turn_of(decoded, found.content or "", calls, turn_index)

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """Raise UnsupportedParameter: vLLM's own constraints allow text around calls."""
        raise UnsupportedParameter(
            f"the parser {VLLM_PARSERS}{self._name} cannot force calls; agentloop's own can", param="tool_choice"
        )

    def _extract(self, text: str, tools: Sequence[Mapping[str, JSON]]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        definitions = [ChatCompletionToolsParam.model_validate(_definition(tool)) for tool in tools]
        request = ChatCompletionRequest(
            messages=[], tools=definitions or None, tool_choice="auto" if definitions else None
        )
        parser = self._class(self._tokenizer, definitions or None)
        if hasattr(parser, "skip_reasoning_parsing"):
            parser.skip_reasoning_parsing = True  # thoughts are cut off before
        return parser.extract_tool_calls(text, request)


def _definition(tool: Mapping[str, JSON]) -> Mapping[str, JSON]:
    return tool if "function" in tool else {"type": "function", "function": tool}


def turn_of(decoded: DecodedText, content: str, calls: Sequence[tuple[str, str]], turn_index: int) -> ParsedTurn:
    """Return a turn of calls, names and JSON, whose places are found again by their names."""
    builder, num_chars = TurnBuilder(decoded, turn_index), len(decoded.text)
    builder.add_content(content)
    spans = _spans(decoded.text, content, [name for name, _ in calls[:MAX_CALLS]])
    for (name, written), (start, end) in zip(calls, spans, strict=False):
        try:
            builder.add_call(start, end, name, read_arguments(written, name))
        except MalformedCall as malformed:
            builder.add_malformed(start, end, malformed)
    if len(calls) > MAX_CALLS:
        error = f"{len(calls) - MAX_CALLS} tool calls after the first {MAX_CALLS} were not read"
        builder.add_malformed(num_chars, num_chars, MalformedCall(error))
    return builder.finish()


def _spans(text: str, content: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return where calls of these names stand: from the mark before each name to the next one's, or the end.

    A call whose name is not in the text, or stands there escaped, has no characters of its own.
    """
    begin = text.find(content.strip()) + len(content.strip()) if content.strip() else 0
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    starts, position, mark = [], begin, None
    for name in names:
        place = text.find(name, position) if name else -1
        if place < 0:
            starts.append(position)
            continue
        if mark is None:
            mark = text[begin:place]  # what opens the first call opens the others
        start = text.rfind(mark, position, place) if mark else place
        starts.append(start if start >= 0 else place)
        position = place + len(name)
    return list(zip(starts, [*starts[1:], len(text)], strict=True))
