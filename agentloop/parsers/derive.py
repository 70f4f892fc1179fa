"""Derivation of a call format from a template's output.

The template writes one turn with two probe calls. Text that is equal around both calls belongs to each call; the
rest belongs to the section around them. The result is a hypothesis: the round-trip test parses richer turns with
the derived format before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from agentloop.errors import TemplateError
from agentloop.parsers.arguments import (
    ID,
    MARK,
    NAME,
    NUMBER,
    TYPE,
    JsonArguments,
    Literals,
    Notation,
    ObjectKeys,
    TextParameters,
    delimiters_of,
)
from agentloop.parsers.call_format import CallFormat
from agentloop.types import JSON, ToolCall

NAMES, _KEYS = ("zebrafinch", "yellowtail"), ("kaolin", "saffron")
_VALUES = (("vermilion", "ultramarine"), ("celadon", "gamboge"))
PROBES = tuple(
    ToolCall(f"prb4x000{index}", name, dict(zip(_KEYS, values, strict=True)))
    for index, (name, values) in enumerate(zip(NAMES, _VALUES, strict=True))
)
_NUMBERS = ToolCall("prb4x0003", NAMES[0], {_KEYS[0]: 731946, _KEYS[1]: 602758})
_MARKED = ToolCall("prb4x0008", NAMES[0], {_KEYS[0]: 'a <b> "c"\nd'})

_Span = tuple[int, int]
_Found = tuple[Notation, str, list[_Span]]
"""The argument syntax, the text between name and arguments, and the span of each call."""
Write = Callable[[Sequence[ToolCall]], str]
"""Returns the turn with these calls as a policy would sample it, without its reasoning. Raises TemplateError."""


class Underivable(Exception):
    """Raised if no format can be derived from a template's output. The message is one line."""


def derive(write: Write) -> CallFormat:
    """Derive the call format. Raises Underivable, and TemplateError if the template cannot write a single call."""
    calls = PROBES
    try:
        text = write(calls)
    except TemplateError:
        text = ""
    if NAMES[1] not in text:  # the template shows at most one call per turn
        text, calls = write(PROBES[:1]), PROBES[:1]
    for call in calls:
        text = text.replace(call.id, ID)
        if call.name not in text:
            raise Underivable(f"the template omits the call from the assistant turn: {text[:80]!r}")
    notation, middle, spans = _objects(text, calls) or _named(text, calls, write)
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    pieces = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    for call in calls:
        pieces = [piece.replace(call.name, NAME) for piece in pieces]
    alone = ("", pieces[0], pieces[-1], "\n", "")
    before, begin, end, separator, behind = _framed(*pieces) if len(pieces) == 3 else alone
    section, end = (before.lstrip(), behind.rstrip()), end if behind.strip() else end.rstrip()
    if isinstance(notation, TextParameters):
        notation = replace(notation, begin=begin, tail=end)
    separator = separator or begin[: len(begin) - len(begin.lstrip())]
    # The call begins with its name, a word that text may contain.
    is_named = NAME in next(iter(delimiters_of(begin)), "")
    is_bare = (is_named or not begin.strip()) and section[0].strip() in ("", "[")
    form = CallFormat(begin.lstrip(), end, notation, middle, section, separator, is_bare)
    literals = (*section, form.begin, form.middle, form.end, form.separator)
    if any(word in literal for word in (*NAMES, *_KEYS) for literal in literals):
        raise Underivable(f"the call's delimiters contain the tool name or an argument name: {text[:160]!r}")
    if form.outer[:1].isalnum() or not (form.outer or is_named or isinstance(notation, ObjectKeys)):
        raise Underivable(f"no delimiter distinguishes a call from text: {text[:80]!r}")
    return form


def _objects(text: str, calls: Sequence[ToolCall]) -> _Found | None:
    """Locate calls that are JSON objects; None if they are not."""
    spans: list[_Span] = []
    for call in calls:
        start = at = text.index(call.name)
        value: JSON = None
        while not isinstance(value, dict) or call.name not in (*value, *map(str, value.values())):
            if (start := text.rfind("{", 0, start)) < 0:
                return None
            value, end = _decoded(text, start)
        if end < at:
            return None
        spans.append((start, end))
    arguments = dict(call.arguments)
    if value == {call.name: arguments}:
        return ObjectKeys("", ("",)), "", spans
    keys = {member: key for key, member in value.items() if isinstance(member, str)}  # keys of the name and the id
    shown = (key for key, member in value.items() if arguments in (member, _decoded(str(member), 0)[0]))
    if (key := next(shown, None)) is None or call.name not in keys:
        raise Underivable(f"the JSON object of the call does not show its arguments: {text[:160]!r}")
    shown_names = [text.index(f'"{keys[call.name]}"', start) for start, _ in spans]
    leads = [text[start + 1 : at] for (start, _), at in zip(spans, shown_names, strict=True)]
    lead = _numbered(*leads) if f'"{key}"' not in leads[0] else ""
    return ObjectKeys(keys[call.name], (key,), keys.get(ID, ""), lead), "", spans


def _named(text: str, calls: Sequence[ToolCall], write: Write) -> _Found:
    """Locate calls whose name is written before their arguments."""
    positions = [_places(text, call) for call in calls]
    starts = [text.rindex(call.name, 0, one[0][2]) for call, one in zip(calls, positions, strict=True)]
    ends = [start + len(call.name) for start, call in zip(starts, calls, strict=True)]
    opened = [max(text.find("{", end), 0) for end in ends]
    decoded = [_decoded(text, at) for at in opened]
    if [value for value, _ in decoded] == [call.arguments for call in calls]:
        spans = [(start, end) for start, (_, end) in zip(starts, decoded, strict=True)]
        return JsonArguments(), text[ends[0] : opened[0]], spans
    (_, key_end, value, value_end), (other, *_, last) = positions[0]
    before = _numbered(*(text[end : one[0][0]] for end, one in zip(ends, positions, strict=True)))
    between, apart = text[key_end:value], text[value_end:other]
    lasts = [one[1][3] for one in positions]
    if before.rstrip().endswith(("(", "{")) and between.strip():
        quote = between[1:]
        spans = [(start, end + len(quote)) for start, end in zip(starts, lasts, strict=True)]
        own = "" if quote in ("'", '"') else quote
        quotes_all = bool(own) and _around(write, _NUMBERS)[0].endswith(own)
        return Literals(between[0], apart.removeprefix(quote), own, quotes_all), before, spans
    middle, open_, close, blanks, _ = _framed(before, apart, text[last:])
    if not open_.strip() or not close.strip():
        raise Underivable(f"a parameter has no delimiters: {text[:160]!r}")
    if all(text.startswith(close + blanks, at) for at in lasts):
        close += blanks
    spans = [(start, at + len(close)) for start, at in zip(starts, lasts, strict=True)]
    (others, _), (quoted, behind) = (_around(write, call) for call in (_NUMBERS, _MARKED))
    marks = (quoted.removeprefix(between), behind.partition(close)[0]) if quoted != between else ("", "")
    if any(others == between.replace("string", kind) for kind in ("number", "integer")):
        between = others = between.replace("string", TYPE)
    return TextParameters(open_, tuple(dict.fromkeys((between, others))), close, quote=marks), middle, spans


def _places(text: str, call: ToolCall) -> list[tuple[int, int, int, int]]:
    """Return per parameter: start of key, end of key, start of value, end of value."""
    at, places = text.index(call.name) + len(call.name), []
    for key, value in call.arguments.items():
        start = text.find(key, at)
        at = text.find(str(value), start)
        if start < 0 or at < 0:
            raise Underivable(f"the call does not show its arguments in order: {text[:160]!r}")
        places.append((start, start + len(key), at, at := at + len(str(value))))
    return places


def _numbered(one: str, *others: str) -> str:
    """Return the text with `NUMBER` in place of its numbers if the texts differ only in numbers."""
    texts = {re.sub("[0-9]+", NUMBER, text) for text in (one, *others)}
    return texts.pop() if {one} != {one, *others} and len(texts) == 1 else one


def _around(write: Write, call: ToolCall) -> tuple[str, str]:
    """Return the text between the first key and its value, and the text after the value, in a turn of one call."""
    text = write([call])
    _, key_end, start, end = _places(text, call)[0]
    return text[key_end:start], text[end:]


def _framed(before: str, between: str, behind: str) -> tuple[str, str, str, str, str]:
    """Split the text around two items: before both, before each, after each, between them, after both."""
    first, middle, last = (list(MARK.finditer(text)) for text in (before, between, behind))
    num_end = _num_alike(middle, last)
    num_begin = _num_alike(first[::-1], middle[num_end:][::-1])
    end = between[: middle[num_end - 1].end()] if num_end else ""
    begin_start = middle[-num_begin].start() if num_begin else len(between)
    return (
        before[: first[-num_begin].start()] if num_begin else before,
        between[begin_start:],
        end,
        between[len(end) : begin_start],
        behind[last[num_end - 1].end() :] if num_end else behind,
    )


def _num_alike(one: Sequence[re.Match[str]], other: Sequence[re.Match[str]]) -> int:
    """Return the number of equal delimiters at the beginning of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1][0], zip(one, other, strict=False)))


def _decoded(text: str, start: int) -> tuple[JSON, int]:
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, start)
    except ValueError:
        return None, start
