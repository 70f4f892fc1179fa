"""Parser of the harmony format of gpt-oss: messages with a channel, and with a recipient if they are calls.

Example: `<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer`. A call
is a message with JSON as its body whose header has a recipient, `to=functions.NAME`, before or after the channel.
Messages on the channel `analysis` are reasoning; messages without recipient on any other channel are content. A
malformed header with a recipient, such as one with a repeated token, makes a malformed call. Parsing takes linear
time: one pattern matches a header without backtracking.
Specification: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentloop.errors import InvalidRequest
from agentloop.parsers.arguments import check_name, read_arguments
from agentloop.parsers.base import (
    DecodedText,
    Delimiters,
    MalformedCall,
    ParsedTurn,
    ReasoningDelimiters,
    Tools,
    TurnBuilder,
)
from agentloop.parsers.grammar import NO_PARAMETERS, call_json, calls_of, constraint_of, tagged
from agentloop.types import JSON, Constraint

_START, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_CALL_STOP = "<|call|>"

_OPENING = re.compile(
    r"\A(?=\s*+(?:assistant\s*+)*+to=|\s*+(?:assistant\s*+)++<\|(?:channel|start)\|>)|<\|(?:start|channel|constrain)\|>"
)
# Header tokens in any order and number. A token that ends messages is part of a header if other text follows it.
_ANY_HEADER = re.compile(
    r"(?:[^<]|<(?!\|)|<\|start\|>(?=assistant)|<\|(?:channel|constrain)\|>|"
    r"<\|(?:call|end|return)\|>(?!\s*+(?:<\|(?:start|channel)\|>|\Z)))*+"
    r"(<\|message\|>)?"
)
_CALL_HEADER = re.compile(
    r"\s*+(?:<\|start\|>assistant)?(?!assistant)[^<]*+(?:<\|channel\|>[^<]*+)?(?:<\|constrain\|>(?!.*to=)[^<]*+)?"
    r"<\|message\|>"
)
_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w*+)")
_BODY_END = re.compile(
    r"<\|(?:end|call|return)\|>(?:\s*+<\|(?:end|call|return)\|>)*+|(?=<\|start\|>|<\|channel\|>)|\Z"
)
_RECIPIENT = re.compile(r"(?:[\s>]|\A)to=\s*+([^\s<]++)")


class HarmonyParser:
    """Parses harmony messages. The caller has removed the reasoning at the beginning of the turn."""

    delimiters = Delimiters(
        openings=(
            *("<|channel|>commentary to=functions.", "<|start|>", "<|channel|>", "<|end|>", "<|message|>"),
            *("<|constrain|>", _CALL_STOP, "<|return|>"),
        ),
        leading=("to=", "assistant"),
        headers=(_FINAL, _START + _FINAL, _PREAMBLE, _START + _PREAMBLE),
        reasoning=ReasoningDelimiters("<|channel|>analysis<|message|>", "<|end|>"),
    )

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        return TurnBuilder(decoded, turn_index).read(_OPENING, _read_message, "to=")

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """See `Parser.call_constraint`. Allows one call, because a call ends the model's turn."""
        return constraint_of(calls_of(tools, _tag, forced=forced, is_parallel=False))


def _tag_begin(name: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


def _tag(function: Mapping[str, JSON]) -> JSON:
    if re.fullmatch(r"[^\s<>]{1,256}", name := str(function.get("name"))) is None:
        raise InvalidRequest(
            f"the tool name {name[:64]!r} cannot be written in this model's call format: rename the tool",
            param="tools",
        )
    return tagged(_tag_begin(name), call_json(function.get("parameters") or NO_PARAMETERS), _CALL_STOP)


def _read_message(builder: TurnBuilder, found: re.Match[str]) -> int:
    """Add the message at `found` and return its end. A header token without a message is content."""
    text, start = builder.text, found.start()
    header = _ANY_HEADER.match(text, start)
    assert header is not None  # it matches the empty text
    recipients = _RECIPIENT.findall(header[0])
    if not recipients and header[1] is None:  # skip all scanned text: scanning it again would take quadratic time
        end = max(header.end(), found.end())
        for piece in re.split(r"(<\|(?:start|channel|constrain)\|>)", text[start:end]):
            builder.add_content(piece)
        return end
    ending = next(_BODY_END.finditer(text, header.end()))
    body, end = text[header.end() : ending.start()], ending.end()
    if not recipients:
        is_reasoning = _CHANNEL.findall(header[0])[-1:] == ["analysis"]
        (builder.add_reasoning if is_reasoning else builder.add_content)(body)
        return end
    name = recipients[0].removeprefix("functions.")
    try:
        if header[1] is None:  # the turn was truncated inside the header, possibly inside the name
            is_complete = not text.endswith(f"to={recipients[0]}")
            raise MalformedCall("the tool call has no arguments", name if is_complete else "")
        if len(recipients) > 1 or _CALL_HEADER.fullmatch(header[0]) is None:
            raise MalformedCall(f"the header of the tool call must be {_tag_begin('NAME')}", name)
        builder.add_call(start, end, check_name(name), read_arguments(body, name))
    except MalformedCall as malformed:
        builder.add_malformed(start, end, malformed, is_cut=ending.start() == len(text))
    return end
