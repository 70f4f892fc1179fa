"""Calls as Llama 3.1 and 3.2 write them: a turn that is `{"name": ..., "parameters": {...}}`, bare JSON.

Such an object is a call at the beginning of a turn, behind another call (`;` or a line break between), and behind
`<|python_tag|>` anywhere; elsewhere it is content, and so is an object without those keys. Published in the models'
chat templates and in Meta's prompt formats (llama-models, `prompt_format.md` of each model). Calls of the built-in
tools, `NAME.call(...)`, are not read: templates write them only for tools that no client can define.

Linear: an object ends with the bracket that closes its first; it is looked for up to the fourth `<|python_tag|>`
that follows, so each character is read a bounded number of times.
"""

from __future__ import annotations

import json
import re

from agentloop.parsers.base import MalformedCall, Marks, TurnBuilder
from agentloop.parsers.grammar import CallSyntax, loads
from agentloop.parsers.json_call import call_of_object, cut_call, json_end, limit_of, next_mark
from agentloop.parsers.marked import MarkedParser, Tools
from agentloop.types import JSON

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_FIRST = re.compile(r"\s*+(?=\{)")
_FOLLOWING = re.compile(r"\s*+;?\s*+(?=\{)")
_SAYS_NAME = re.compile(r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:')


class Llama3JsonParser(MarkedParser):
    """The parser of bare JSON. It reads several calls of a turn, although the template writes one and refuses more.

    An object without parameters is a call if its name is a tool's.
    """

    marks = Marks((_TAG,), leading=("{",))
    opening = re.compile(re.escape(_TAG))
    writes_one = True

    def syntax(self, name: str) -> CallSyntax:
        return CallSyntax(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ', "}")

    def read_leading(self, builder: TurnBuilder, tools: Tools) -> int:
        first = _FIRST.match(builder.text)
        return 0 if first is None else _objects(builder, first.end(), first.end(), tools, is_marked=False)

    def read_call(self, builder: TurnBuilder, found: re.Match[str], tools: Tools) -> int:
        body = _FIRST.match(builder.text, found.end())
        if body is not None:
            return _objects(builder, found.start(), body.end(), tools, is_marked=True)
        end = next_mark(builder.text, found.end(), _TAG)
        error = f'behind {_TAG} stands no {{"name": ..., "parameters": ...}}'
        builder.add_malformed(found.start(), end, MalformedCall(error))
        return end


def _objects(builder: TurnBuilder, start: int, begin: int, tools: Tools, *, is_marked: bool) -> int:
    """Add the calls from `begin` on, the first with the text from `start`; return where the last one ends."""
    text, limit = builder.text, limit_of(builder.text, begin, _TAG)
    names = {str(tool.get("function", tool).get("name")) for tool in tools}
    while True:
        end = json_end(text, begin, limit)
        until = end if end >= 0 else next_mark(text, begin, _TAG)
        try:
            call = _read_object(text[begin:until], names, is_marked=is_marked)
        except MalformedCall as malformed:
            builder.add_malformed(start, until, malformed, is_cut=end < 0 and until == len(text))
        else:
            if call is None:
                return start
            builder.add_call(start, until, *call)
        following = _FOLLOWING.match(text, until) if end >= 0 else None
        if following is None:
            return until
        if builder.is_full:
            builder.add_rest(until, '"name"')
            return len(text)
        start, begin, is_marked = until, following.end(), False


def _read_object(written: str, names: set[str], *, is_marked: bool) -> tuple[str, dict[str, JSON]] | None:
    """Read an object; None if it is no call. Raises MalformedCall."""
    try:
        value = loads(written)
    except ValueError as error:
        if is_marked or _SAYS_NAME.match(written) is not None:
            raise MalformedCall(f"the tool call is not valid JSON: {error}", *cut_call(written)) from error
        return None
    name = value.get("name")
    is_whole = isinstance(name, str) and any(key in value for key in _KEYS)
    if is_marked or is_whole or name in names:
        return call_of_object(value, *_KEYS)
    return None
