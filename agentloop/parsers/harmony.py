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
from collections.abc import Mapping, Sequence

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText, MalformedCall, Marks, ParsedTurn, ThoughtMarks, TurnBuilder
from agentloop.parsers.grammar import CallSyntax, constraint_of_calls
from agentloop.parsers.json_call import check_name, read_arguments
from agentloop.types import JSON, Constraint

_START, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_CALL_STOP = "<|call|>"

_BEGIN = re.compile(r"<\|start\|>|<\|channel\|>")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?([^<]*+)(?:<\|channel\|>([^<]*+))?(?:<\|constrain\|>([^<]*+))?<\|message\|>"
)
_CUT_HEADER = re.compile(r"(?:<\|start\|>assistant)?([^<]*+)(?:<\|channel\|>([^<]*+))?(?:<\|constrain\|>[^<]*+)?\Z")
_BODY_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>|<\|channel\|>)|\Z")
_RECIPIENT = re.compile(r"(?:\s|\A)to=(\S++)")
_LEADING_RECIPIENT = re.compile(r"\s*+to=")


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

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. `tools` are not needed: JSON carries its types."""
        text = decoded.text
        builder = TurnBuilder(decoded, turn_index)
        position = 0
        start: int | None = 0 if _LEADING_RECIPIENT.match(text) is not None else _next_begin(text, 0)
        while start is not None:
            builder.add_content(text[position:start])
            if builder.is_full:
                builder.add_rest(start, "to=")
                return builder.finish()
            position = _read_message(text, start, builder)
            start = _next_begin(text, position)
        builder.add_content(text[position:])
        return builder.finish()

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`. Always one call: the model's turn ends with it."""
        return constraint_of_calls(tools, _syntax, forced=forced, is_parallel=False)


def _syntax(name: str) -> CallSyntax:
    if re.fullmatch(r"[^\s<>]{1,256}", name) is None:
        raise InvalidRequest(f"a call of {name[:64]!r} cannot be written in this model's format", param="tools")
    return CallSyntax(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", _CALL_STOP)


def _next_begin(text: str, position: int) -> int | None:
    found = _BEGIN.search(text, position)
    return None if found is None else found.start()


def _read_message(text: str, start: int, builder: TurnBuilder) -> int:
    """Add the message that begins there; return where it ends. A mark that begins none is content."""
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
