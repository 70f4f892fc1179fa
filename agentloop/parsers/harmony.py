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
from agentloop.parsers.arguments import check_name, read_arguments
from agentloop.parsers.base import DecodedText, MalformedCall, Marks, ParsedTurn, ThoughtMarks, Tools, TurnBuilder
from agentloop.parsers.grammar import NO_PARAMETERS, call_json, calls_of, constraint_of, tagged
from agentloop.types import JSON, Constraint

_START, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_CALL_STOP = "<|call|>"

_OPENING = re.compile(r"\A(?=\s*+to=)|<\|start\|>|<\|channel\|>")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?([^<]*+)(?:<\|channel\|>([^<]*+))?(?:<\|constrain\|>[^<]*+)?(<\|message\|>|\Z)"
)
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
        return constraint_of(calls_of(tools, _tag, forced=forced, is_parallel=False))


def _tag(function: Mapping[str, JSON]) -> JSON:
    if re.fullmatch(r"[^\s<>]{1,256}", name := str(function.get("name"))) is None:
        raise InvalidRequest(f"a call of {name[:64]!r} cannot be written in this model's format", param="tools")
    begin = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return tagged(begin, call_json(function.get("parameters") or NO_PARAMETERS), _CALL_STOP)


def _read_message(builder: TurnBuilder, found: re.Match[str]) -> int:
    """Add the message that begins there; return where it ends. A mark that begins none is content."""
    text, start = builder.text, found.start()
    header = _HEADER.match(text, start)
    recipient = header and (_RECIPIENT.search(header[1]) or _RECIPIENT.search(header[2] or ""))
    if header is None or not (header[3] or recipient):
        end = found.end() if found[0] else len(text)
        builder.add_content(text[start:end])
        return end
    ending = next(_BODY_END.finditer(text, header.end()))
    body, end = text[header.end() : ending.start()], ending.end()
    if recipient is None:
        is_thought = (header[2] or "").split(maxsplit=1)[:1] == ["analysis"]
        (builder.add_reasoning if is_thought else builder.add_content)(body)
        return end
    name = recipient[1].removeprefix("functions.")
    try:
        if not header[3]:  # the turn's end cut the header, and maybe the name
            is_whole = not text.endswith(recipient[0])
            raise MalformedCall("the tool call has no arguments", name if is_whole else "")
        builder.add_call(start, end, check_name(name), read_arguments(body, name))
    except MalformedCall as malformed:
        builder.add_malformed(start, end, malformed, is_cut=ending.start() == len(text))
    return end
