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
from collections.abc import Mapping, Sequence

from agentloop.parsers.base import DecodedText, MalformedCall, Marks, ParsedTurn, TurnBuilder
from agentloop.parsers.grammar import CallSyntax, constraint_of_calls, loads
from agentloop.parsers.json_call import call_of_object, cut_call, json_end
from agentloop.types import JSON, Constraint

_TAG = "<|python_tag|>"
_MAX_TAGS_INSIDE = 4
_KEYS = ("parameters", "arguments")
_FIRST = re.compile(r"\s*+(?=\{)")
_FOLLOWING = re.compile(r"\s*+;?\s*+(?=\{)")
_SAYS_NAME = re.compile(r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:')


class Llama3JsonParser:
    """Bare JSON. Several calls of a turn are read, although the template writes one."""

    marks = Marks((_TAG,), leading=("{",))

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. An object that is a call but for its parameters is one if its name is a tool's."""
        names = {str(tool.get("function", tool).get("name")) for tool in tools}
        return _LlamaReader(decoded, turn_index, names).read()

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """See `Parser.call_constraint`. Always one call: templates refuse a turn of several."""
        return constraint_of_calls(tools, _syntax, forced=forced, is_parallel=False)


def _syntax(name: str) -> CallSyntax:
    return CallSyntax(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ', "}")


class _LlamaReader:
    """One turn's way through `parse`."""

    def __init__(self, decoded: DecodedText, turn_index: int, names: set[str]) -> None:
        self._text = decoded.text
        self._names = names
        self._builder = TurnBuilder(decoded, turn_index)

    def read(self) -> ParsedTurn:
        text, builder = self._text, self._builder
        first = _FIRST.match(text)
        position = self._objects(first.end(), first.end(), is_marked=False) if first is not None else 0
        while (start := text.find(_TAG, position)) >= 0:
            builder.add_content(text[position:start])
            if builder.is_full:
                builder.add_rest(start, _TAG)
                return builder.finish()
            body = _FIRST.match(text, start + len(_TAG))
            if body is None:
                error = f'behind {_TAG} stands no {{"name": ..., "parameters": ...}}'
                position = self._next_tag(start + len(_TAG))
                builder.add_malformed(start, position, MalformedCall(error))
            else:
                position = self._objects(start, body.end(), is_marked=True)
        builder.add_content(text[position:])
        return builder.finish()

    def _objects(self, start: int, begin: int, *, is_marked: bool) -> int:
        """Add the calls from `begin` on, the first with the text from `start`; return where the last one ends."""
        text, limit = self._text, self._limit(begin)
        while True:
            end = json_end(text, begin, limit)
            until = end if end >= 0 else self._next_tag(begin)
            try:
                call = self._call(text[begin:until], is_marked=is_marked)
            except MalformedCall as malformed:
                self._builder.add_malformed(start, until, malformed, is_cut=end < 0 and until == len(text))
            else:
                if call is None:
                    return start
                self._builder.add_call(start, until, *call)
            following = _FOLLOWING.match(text, until) if end >= 0 else None
            if following is None:
                return until
            if self._builder.is_full:
                self._builder.add_rest(until, '"name"')
                return len(text)
            start, begin, is_marked = until, following.end(), False

    def _call(self, written: str, *, is_marked: bool) -> tuple[str, dict[str, JSON]] | None:
        """Read an object; None if it is no call. Raises MalformedCall."""
        try:
            value = loads(written)
        except ValueError as error:
            if is_marked or _SAYS_NAME.match(written) is not None:
                raise MalformedCall(f"the tool call is not valid JSON: {error}", *cut_call(written)) from error
            return None
        name = value.get("name")
        is_whole = isinstance(name, str) and any(key in value for key in _KEYS)
        if is_marked or is_whole or name in self._names:
            return call_of_object(value, *_KEYS)
        return None

    def _limit(self, position: int) -> int:
        """Return how far an object that begins there may reach."""
        for _ in range(_MAX_TAGS_INSIDE + 1):
            position = self._next_tag(position) + len(_TAG)
            if position >= len(self._text):
                return len(self._text)
        return position - len(_TAG)

    def _next_tag(self, position: int) -> int:
        found = self._text.find(_TAG, position)
        return found if found >= 0 else len(self._text)
