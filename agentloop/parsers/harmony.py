"""Turns as gpt-oss writes them, in the harmony format: messages with a channel, and a recipient where they call.

`<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer`; a call is a
message whose header names its recipient, `to=functions.NAME`, before or behind the channel, and whose body is JSON.
The prompt ends with `<|start|>assistant`; `<|return|>` and `<|call|>` end a turn. Published at
https://cookbook.openai.com/articles/openai-harmony. Messages on the channel `analysis` are thoughts, those without
a recipient on any other are content.

Linear: one pattern reads a message from its first mark to its last, and never looks back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentloop.errors import InvalidRequest
from agentloop.parsers.arguments import Tools, check_name, read_arguments
from agentloop.parsers.base import DecodedText, MalformedCall, Marks, ParsedTurn, ThoughtMarks, TurnBuilder
from agentloop.parsers.grammar import NO_PARAMETERS, call_json, constraint_of_calls, tagged
from agentloop.types import JSON, Constraint

_START, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_CALL_STOP = "<|call|>"

_BEGIN = re.compile(r"<\|start\|>|<\|channel\|>")
_OPENING = re.compile(r"\A(?=\s*+to=)|<\|start\|>|<\|channel\|>")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?([^<]*+)(?:<\|channel\|>([^<]*+))?(?:<\|constrain\|>([^<]*+))?<\|message\|>"
)
_CUT_HEADER = re.compile(r"(?:<\|start\|>assistant)?([^<]*+)(?:<\|channel\|>([^<]*+))?(?:<\|constrain\|>[^<]*+)?\Z")
_BODY_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>|<\|channel\|>)|\Z")
_RECIPIENT = re.compile(r"(?:\s|\A)to=(\S++)")


class HarmonyParser:
    """Messages of the harmony format. The thought at the turn's beginning is read before, by its marks."""

    marks = Marks(
        openings=(
            *("<|channel|>commentary to=functions.", "<|start|>", "<|channel|>", "<|end|>", "<|message|>"),
            *("<|constrain|>", _CALL_STOP, "<|return|>"),
        ),
        leading=("to=",),
        headers=(_FINAL, _START + _FINAL, _PREAMBLE, _START + _PREAMBLE),
        thoughts=ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>"),
    )

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        return TurnBuilder(decoded, turn_index).read(_OPENING, _read_message, "to=")

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """See `Parser.call_constraint`: one call, as it ends the model's turn."""
        return constraint_of_calls(tools, _tag, forced=forced, is_parallel=False)


def _tag(function: Mapping[str, JSON]) -> JSON:
    if re.fullmatch(r"[^\s<>]{1,256}", name := str(function.get("name"))) is None:
        raise InvalidRequest(f"a call of {name[:64]!r} cannot be written in this model's format", param="tools")
    begin = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return tagged(begin, call_json(function.get("parameters") or NO_PARAMETERS), _CALL_STOP)


def _read_message(builder: TurnBuilder, found: re.Match[str]) -> int:
    """Add the message that begins there; return where it ends. A mark that begins none is content."""
    text, start = builder.text, found.start()
    header = _HEADER.match(text, start)
    if header is None:
        return _read_cut_header(text, start, builder)
    between, channel = header[1], header[2] or ""
    ending = _BODY_END.search(text, header.end())
    body_end, end = (ending.start(), ending.end()) if ending is not None else (len(text), len(text))
    body = text[header.end() : body_end]
    recipient = _RECIPIENT.search(between) or _RECIPIENT.search(channel)
    if recipient is None:
        is_thought = channel.split(maxsplit=1)[:1] == ["analysis"]
        (builder.add_reasoning if is_thought else builder.add_content)(body)
        return end
    try:
        name = check_name(recipient[1].removeprefix("functions."))
        arguments = read_arguments(body, name)
    except MalformedCall as malformed:
        builder.add_malformed(start, end, malformed, is_cut=body_end == len(text))
    else:
        builder.add_call(start, end, name, arguments)
    return end


def _read_cut_header(text: str, start: int, builder: TurnBuilder) -> int:
    """Add a call whose header the turn's end cut, or the mark alone as content; return where it ends."""
    found = _CUT_HEADER.match(text, start)
    recipient = found and (_RECIPIENT.search(found[1]) or _RECIPIENT.search(found[2] or ""))
    if not recipient:
        opening = _BEGIN.match(text, start)
        end = opening.end() if opening is not None else len(text)
        builder.add_content(text[start:end])
        return end
    is_whole = not text.endswith(recipient[0])
    name = recipient[1].removeprefix("functions.") if is_whole else ""
    builder.add_malformed(start, len(text), MalformedCall("the tool call has no arguments", name), is_cut=True)
    return len(text)
