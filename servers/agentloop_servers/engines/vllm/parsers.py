"""vLLM's tool parsers behind the Parser port, for families that agentloop has no parser of its own for.

They read whole turns. They know no tokens and, being made for streams, keep state, so that one is made for each
turn. Importing them takes some 20 s on two cores.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import ThoughtMarks
from agentloop.parsers.whole_turn import WholeTurnParser
from agentloop.types import JSON

VLLM_PARSERS = "vllm:"
"""The beginning of the names of all of them."""


def vllm_parser(name: str, folder: Path) -> WholeTurnParser:
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
    return WholeTurnParser(f"{VLLM_PARSERS}{tools}", functools.partial(_extracted, parser_class, tokenizer), marks)


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


def _extracted(
    parser_class: Any, tokenizer: Any, text: str, tools: Sequence[Mapping[str, JSON]]
) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of a text, and the names and arguments of its calls."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

    definitions = [ChatCompletionToolsParam.model_validate(_definition(tool)) for tool in tools]
    request = ChatCompletionRequest(
        messages=[], tools=definitions or None, tool_choice="auto" if definitions else None
    )
    parser = parser_class(tokenizer, definitions or None)
    if hasattr(parser, "skip_reasoning_parsing"):
        parser.skip_reasoning_parsing = True  # thoughts are cut off before
    found = parser.extract_tool_calls(text, request)
    if not found.tools_called:
        return text if found.content is None else found.content, []
    return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]


def _definition(tool: Mapping[str, JSON]) -> Mapping[str, JSON]:
    return tool if "function" in tool else {"type": "function", "function": tool}
