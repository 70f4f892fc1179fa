"""A format of calls, derived from what a template writes of calls that it cannot know.

Two calls with names, ids, keys and values of our own are written as one turn. What stands alike before, between and
behind both is a call's; the rest is the section's around all of them. Nothing here is proof: the self-test reads
richer turns with the derived format before it is used.
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
    marks_of,
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
"""The notation, the text between name and arguments, and where each call begins and ends."""
Write = Callable[[Sequence[ToolCall]], str]
"""The turn of these calls as a policy would sample it, behind its thought. Raises TemplateError."""


class Underivable(Exception):
    """The reason why what a template writes is no format that can be read, in one line."""


def derive(write: Write) -> CallFormat:
    """Derive the format of calls. Raises Underivable, and TemplateError if not even one call can be written."""
    calls = PROBES
    try:
        text = write(calls)
    except TemplateError:
        text = ""
    if NAMES[1] not in text:  # one call is all that a turn shows
        text, calls = write(PROBES[:1]), PROBES[:1]
    for call in calls:
        text = text.replace(call.id, ID)
        if call.name not in text:
            raise Underivable(f"a call is not shown in its turn, which is {text[:80]!r}")
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
    is_named = NAME in next(iter(marks_of(begin)), "")  # by a word, which text may hold too
    is_bare = (is_named or not begin.strip()) and section[0].strip() in ("", "[")
    form = CallFormat(begin.lstrip(), end, notation, middle, section, separator, is_bare)
    literals = (*section, form.begin, form.middle, form.end, form.separator)
    if any(word in literal for word in (*NAMES, *_KEYS) for literal in literals):
        raise Underivable(f"a call shows its name or a key in more than one place: {text[:160]!r}")
    if form.outer[:1].isalnum() or not (form.outer or is_named or isinstance(notation, ObjectKeys)):
        raise Underivable(f"no mark tells a call from text: {text[:80]!r}")
    return form


def _objects(text: str, calls: Sequence[ToolCall]) -> _Found | None:
    """Find calls that are objects of JSON."""
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
    keys = {one: key for key, one in value.items() if isinstance(one, str)}  # of the name and of the id
    shown = (key for key, one in value.items() if arguments in (one, _decoded(str(one), 0)[0]))
    if (key := next(shown, None)) is None or call.name not in keys:
        raise Underivable(f"the object of a call does not show its arguments: {text[:160]!r}")
    shown_names = [text.index(f'"{keys[call.name]}"', start) for start, _ in spans]
    leads = [text[start + 1 : at] for (start, _), at in zip(spans, shown_names, strict=True)]
    lead = _numbered(*leads) if f'"{key}"' not in leads[0] else ""
    return ObjectKeys(keys[call.name], (key,), keys.get(ID, ""), lead), "", spans


def _named(text: str, calls: Sequence[ToolCall], write: Write) -> _Found:
    """Find calls whose name stands before their arguments."""
    places = [_places(text, call) for call in calls]
    starts = [text.rindex(call.name, 0, one[0][2]) for call, one in zip(calls, places, strict=True)]
    ends = [start + len(call.name) for start, call in zip(starts, calls, strict=True)]
    opened = [max(text.find("{", end), 0) for end in ends]
    found = [_decoded(text, at) for at in opened]
    if [value for value, _ in found] == [call.arguments for call in calls]:
        spans = [(start, end) for start, (_, end) in zip(starts, found, strict=True)]
        return JsonArguments(), text[ends[0] : opened[0]], spans
    (_, key_end, value, value_end), (other, *_, last) = places[0]
    before = _numbered(*(text[end : one[0][0]] for end, one in zip(ends, places, strict=True)))
    between, apart = text[key_end:value], text[value_end:other]
    lasts = [one[1][3] for one in places]
    if before.rstrip().endswith(("(", "{")) and between.strip():
        quote = between[1:]
        spans = [(start, end + len(quote)) for start, end in zip(starts, lasts, strict=True)]
        own = "" if quote in ("'", '"') else quote
        quotes_all = bool(own) and _around(write, _NUMBERS)[0].endswith(own)
        return Literals(between[0], apart.removeprefix(quote), own, quotes_all), before, spans
    middle, open_, close, blanks, _ = _framed(before, apart, text[last:])
    if not open_.strip() or not close.strip():
        raise Underivable(f"no marks stand around a parameter: {text[:160]!r}")
    if all(text.startswith(close + blanks, at) for at in lasts):
        close += blanks
    spans = [(start, at + len(close)) for start, at in zip(starts, lasts, strict=True)]
    (others, _), (quoted, behind) = (_around(write, call) for call in (_NUMBERS, _MARKED))
    marks = (quoted.removeprefix(between), behind.partition(close)[0]) if quoted != between else ("", "")
    if any(others == between.replace("string", kind) for kind in ("number", "integer")):
        between = others = between.replace("string", TYPE)
    return TextParameters(open_, tuple(dict.fromkeys((between, others))), close, quote=marks), middle, spans


def _places(text: str, call: ToolCall) -> list[tuple[int, int, int, int]]:
    """Return where each key of a call, and the value behind it, begins and ends."""
    at, places = text.index(call.name) + len(call.name), []
    for key, value in call.arguments.items():
        start = text.find(key, at)
        at = text.find(str(value), start)
        if start < 0 or at < 0:
            raise Underivable(f"a call does not show its arguments in their order: {text[:160]!r}")
        places.append((start, start + len(key), at, at := at + len(str(value))))
    return places


def _numbered(one: str, *others: str) -> str:
    """Return a text with places for its numbers, if that is all in which others differ."""
    texts = {re.sub("[0-9]+", NUMBER, text) for text in (one, *others)}
    return texts.pop() if {one} != {one, *others} and len(texts) == 1 else one


def _around(write: Write, call: ToolCall) -> tuple[str, str]:
    """Return what a turn of one call has between its first key and the value, and behind that."""
    text = write([call])
    _, key_end, start, end = _places(text, call)[0]
    return text[key_end:start], text[end:]


def _framed(before: str, between: str, behind: str) -> tuple[str, str, str, str, str]:
    """Tell what belongs to each of two things: text before both, before each, behind each, between, behind both."""
    first, middle, last = (list(MARK.finditer(text)) for text in (before, between, behind))
    num_end = _num_alike(middle, last)
    num_begin = _num_alike(first[::-1], middle[num_end:][::-1])
    end = between[: middle[num_end - 1].end()] if num_end else ""
    begun = middle[-num_begin].start() if num_begin else len(between)
    return (
        before[: first[-num_begin].start()] if num_begin else before,
        between[begun:],
        end,
        between[len(end) : begun],
        behind[last[num_end - 1].end() :] if num_end else behind,
    )


def _num_alike(one: Sequence[re.Match[str]], other: Sequence[re.Match[str]]) -> int:
    """Return how many marks two rows begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1][0], zip(one, other, strict=False)))


def _decoded(text: str, start: int) -> tuple[JSON, int]:
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, start)
    except ValueError:
        return None, start
