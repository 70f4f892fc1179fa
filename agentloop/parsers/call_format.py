"""Parser and grammar for call formats described by data: delimiters and an argument syntax.

A format is defined in `by_name.py` or derived from a template's output (`derive.py`). The parser accepts whitespace
between delimiters, and missing delimiters after a complete JSON object. Any other error makes a malformed call that
extends to the next delimiter. Invariant: time linear in the text, because a turn has at most `MAX_CALLS` calls and
the end of an object is searched only up to the fourth following delimiter (a delimiter may be inside a string).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from agentloop.errors import InvalidRequest
from agentloop.parsers.arguments import (
    ID,
    NAME,
    NUMBER,
    JsonArguments,
    Notation,
    ObjectKeys,
    TextParameters,
    begun_json,
    check_name,
    delimiters_of,
    loose,
    value_end,
)
from agentloop.parsers.base import (
    DecodedText,
    Delimiters,
    MalformedCall,
    ParsedTurn,
    ReasoningDelimiters,
    Tools,
    TurnBuilder,
)
from agentloop.parsers.grammar import NO_PARAMETERS, calls_of, constraint_of, literal, matching, sequence, tagged
from agentloop.types import JSON, Constraint

_MAX_MARKS_INSIDE = 4
_TOOL_NAME = r"""[^\s<>{}\[\]()"'=][^<>{}\[\]()"'=\n]{0,255}?"""
_NUMBERED = re.compile(r"(?:functions\.)?(.*?)(:[0-9]+)?")
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_NEVER = "(?!)"
_WRITTEN = {ID: "[a-zA-Z0-9]{9}", NUMBER: "[0-9]{1,4}"}

_Call: TypeAlias = tuple[int, str, Mapping[str, JSON], str, str]
"""End position, name, arguments, written id, and a note on lenient parsing."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A call format: `section[0] begin NAME middle ARGUMENTS end separator begin ... end section[1]`."""

    begin: str
    end: str
    arguments: Notation
    middle: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = "\n"
    is_bare: bool = False  # calls may begin a turn without a delimiter; with an empty `begin`, one call per turn
    is_numbered: bool = False  # the name is written as `functions.NAME:NUMBER`, which is also the call's id
    is_lenient: bool = False  # a JSON object without arguments is a call

    @property
    def outer(self) -> str:
        """The delimiter that begins a turn's first call; empty if the format has none."""
        marks = delimiters_of(self.section[0]) or self._own_delimiters
        return marks[0] if marks and len(marks[0]) > 1 else ""

    @property
    def inner(self) -> str:
        """The delimiter of each call, like `<function=` after `<tool_call>`; empty if only the section has one."""
        first = next(iter(self._own_delimiters), "")
        unterminated = (mark for mark in self._own_delimiters if mark.startswith("<") and not mark.endswith(">"))
        return first if self.section[0].strip() else next(unterminated, first)

    @property
    def _own_delimiters(self) -> list[str]:
        """The delimiters before the name, which distinguish a call from text."""
        return [] if self.is_bare else delimiters_of(self.begin.partition(ID)[0])

    @property
    def is_single(self) -> bool:
        """True if only one call per turn is parsed."""
        return self.is_bare and not self.begin

    @property
    def is_listed(self) -> bool:
        """True if the end of a call is ambiguous: another call may follow, until the end of the section."""
        return not self.begin.strip() or bool(self.separator.strip())


class FormatParser:
    """Parses one call format, or several that begin with the same delimiter and are distinguished per call."""

    def __init__(
        self, thoughts: ReasoningDelimiters, form: CallFormat, *others: CallFormat, headers: tuple[str, ...] = ()
    ) -> None:
        self.form, self._others = form, others
        ends, last, outer = delimiters_of(form.end), delimiters_of(form.section[1]), form.outer
        is_certain = bool(ends) and len(last) < 2 and not (form.is_listed or others)
        first = "{" if outer else (form.section[0] or form.begin.partition(NAME)[0]).strip() or "{"
        self.delimiters = Delimiters(
            tuple(dict.fromkeys(filter(None, (outer, form.inner)))),
            ends[-1] if is_certain else None,
            leading=(first,) if form.is_bare else (),
            trailing="".join(last) if is_certain else "",
            headers=headers,
            reasoning=thoughts,
        )
        self._counted = form.inner or outer or '"name"'
        each = f"(?:{re.escape(outer)}\\s*+)?{re.escape(form.inner)}|" if form.inner not in ("", outer) else ""
        self._opening = re.compile(each + (re.escape(outer) or _NEVER))
        self._writers = [_CallReader(each_form, self._opening, self._counted) for each_form in (form, *others)]
        self._readers = self._writers

    def lenient(self) -> FormatParser:
        """Return a parser with the same grammar that accepts the same deviations as vLLM and SGLang.

        These are objects without arguments, and a list of objects in place of one object.
        """
        form, *others = (replace(strict, is_lenient=True) for strict in (self.form, *self._others))
        parser = FormatParser(self.delimiters.reasoning, form, *others, headers=self.delimiters.headers)
        if isinstance(form.arguments, ObjectKeys) and form.begin.strip():
            listed = replace(form, begin="", end="", section=(f"{form.begin}[", f"]{form.end}"), separator=", ")
            forgiving = _CallReader(listed, self._opening, self._counted, "a list of calls")
            parser._readers = [*parser._writers, forgiving]
        return parser

    def parse(self, decoded: DecodedText, tools: Tools, turn_index: int) -> ParsedTurn:
        def read_call(builder: TurnBuilder, match: re.Match[str]) -> int:
            candidates = (reader for reader in self._readers if reader.begins.match(builder.text, match.start()))
            return next(candidates, self._readers[0]).read(builder, *match.span(), tools, is_marked=True)

        builder, first = TurnBuilder(decoded, turn_index, self.delimiters.headers), self._readers[0]
        has_header = decoded.text.lstrip().startswith(self.delimiters.headers)
        is_begun = self.form.is_bare and not has_header and first.begins.match(decoded.text)
        position = first.read(builder, 0, 0, tools, is_marked=False) if is_begun else 0
        return builder.read(self._opening, read_call, self._counted, position)

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """See `Parser.call_constraint`. With several formats, the policy may choose any of them."""
        several = is_parallel and not self.form.is_single
        calls = (
            calls_of(tools, writer.tag, writer.section, writer.form.separator, forced=forced, is_parallel=several)
            for writer in self._writers
        )
        return constraint_of(*calls)


class _CallReader:
    """Parses and constrains the calls of one format. `note` is the deviation recorded on every parsed call."""

    def __init__(self, form: CallFormat, opening: re.Pattern[str], counted: str, note: str = "") -> None:
        self.form, self._opening, self._counted, self._note = form, opening, counted, note
        self._bound = re.compile(_NEVER if opening.pattern == _NEVER else re.escape(counted))
        has_tag = bool(form.outer) and form.is_bare
        self.section = "" if has_tag else form.section[0], form.section[1]
        section, begin, ends = loose(form.section[0]), _literal(form.begin), delimiters_of(form.end)
        if not section and form.inner != form.outer:
            section, begin = loose(form.outer), _literal(form.begin[form.begin.index(form.inner) :])
        opened = rf"(?:{section}\s*+){'?' if begin or has_tag else ''}" if section else ""
        first, body = rf"\s*+{opened}{begin}\s*+", self._body()
        self._first = re.compile(first + body)  # the first call of a turn or section, up to its arguments
        self._element = re.compile(rf"{begin}\s*+{body}")  # a call after a separator, up to its arguments
        self.begins = re.compile(first + (body or r"(?=\{)"))  # distinguishes this format from another
        closes = rf"(?:\s*+{loose(form.section[1])})?" if form.section[1].strip() else ""
        needed = next((mark for mark in ends if not mark.startswith("```")), "")
        written = (rf"(?:\s*+{loose(mark)})" + ("" if mark == needed else "?") for mark in ends)
        self._end = re.compile("".join(written) + closes)
        # The text that may follow a complete JSON object in place of the call's closing delimiter.
        self._lenient = re.compile(rf"\s*+(?:\Z|{opening.pattern}|{loose(form.section[1]) or _NEVER})")
        separator = loose(form.separator)
        after = rf"{separator}\s*+" if separator and not form.is_single else rf"(?:{separator})?\s*+(?=\{{)"
        self._next = re.compile(rf"\s*+{after}" if form.is_listed else _NEVER)
        closings = (mark for mark in (*ends[-1:], *delimiters_of(form.section[1])[-1:]) if len(mark) > 2)
        self._closing = re.compile("|".join(map(re.escape, sorted(closings, key=len))) or _NEVER)

    def _body(self) -> str:
        """Return the pattern from the name to the arguments; empty if the name is inside the JSON object."""
        form, notation = self.form, self.form.arguments
        if isinstance(notation, ObjectKeys):
            return ""
        middle, is_there, behind = form.middle.partition(ID)
        pattern = loose(middle)
        if is_there:
            pattern = rf"(?:{pattern}\s*+(?P<id>[^\[\]{{}}\n<]{{0,64}}?))?\s*+(?:{loose(behind)})?"
        ahead = ""
        if isinstance(notation, JsonArguments):
            ahead = r"(?=\{)"
        elif isinstance(notation, TextParameters) and not middle.strip():  # the first parameter or the end follows
            behind_name = (*delimiters_of(notation.open)[:1], *delimiters_of(form.end)[:1])
            ahead = f"(?={'|'.join(map(re.escape, behind_name))})"
        return rf"(?P<name>{_TOOL_NAME})\s*+{pattern}\s*+{ahead}"

    def read(self, builder: TurnBuilder, start: int, position: int, tools: Tools, *, is_marked: bool) -> int:
        """Add the calls that begin at `start` and return the end of the last one.

        `position` is the end of the first call's opening delimiter.
        """
        text = builder.text
        # A value may contain delimiters; limit the search for its end so that it takes linear time.
        later = islice(self._bound.finditer(text, position), _MAX_MARKS_INSIDE, None)
        limit = next((mark.start() for mark in later), len(text))
        head = self._first.match(text, start)
        while True:
            try:
                call = self._call(text, head, limit, tools, is_marked=is_marked)
            except MalformedCall as malformed:
                resume = max(position, malformed.at, head.end() if head is not None else 0)
                until, end = self._ends(text, resume)
                builder.add_malformed(start, end, malformed, is_cut=until == len(text))
                return end
            if call is None:
                return start
            builder.add_call(start, *call)
            builder.closing = self._missing_end(text[start : call[0]].rstrip())
            if (following := self._next.match(text, end := call[0])) is None:
                return end
            if builder.is_full:
                builder.add_rest(end, text.count(self._counted if self.form.middle else '"name"', end))
                return len(text)
            start, position, is_marked = end, following.end(), is_marked and not self.form.is_single
            head = self._element.match(text, position)

    def _call(
        self, text: str, head: re.Match[str] | None, limit: int, tools: Tools, *, is_marked: bool
    ) -> _Call | None:
        """Parse one call; None if JSON without a delimiter is not a call. Raises MalformedCall."""
        form, notation = self.form, self.form.arguments
        if head is None:
            shown = delimiters_of(f"{form.section[0]}{form.begin}...{form.middle}")
            syntax = "".join(shown).translate({0: "ID", 1: "NAME", 2: "NUMBER"})
            raise MalformedCall(f"the tool call must begin with {syntax}")
        if isinstance(notation, ObjectKeys):
            names = None if is_marked else {str(tool.get("function", tool).get("name")) for tool in tools}
            return self._object(notation, text, head.end(), limit, names)
        name, call_id = head["name"].strip(), head.groupdict().get("id") or ""
        if form.is_numbered and (numbered := _NUMBERED.fullmatch(name)) is not None:
            name, call_id = numbered[1], name if numbered[2] else ""
        arguments, end = notation.read(text, head.end(), limit, check_name(name), tools)
        closed = self._end.match(text, end)
        if closed is None and not (isinstance(notation, JsonArguments) and self._lenient.match(text, end)):
            further = f"{notation.open}... or " if isinstance(notation, TextParameters) else ""
            error = f"expected {further}{''.join(delimiters_of(form.end))} after the arguments of the tool call"
            raise MalformedCall(error, name, begun_json(arguments), end)
        call_id = call_id if _ID.fullmatch(call_id) else ""
        return end if closed is None else closed.end(), name, arguments, call_id, ""

    def _object(self, keys: ObjectKeys, text: str, start: int, limit: int, names: set[str] | None) -> _Call | None:
        end = value_end(text, start, limit) if text.startswith("{", start) else -1
        closed = self._end.match(text, end) if end >= 0 else None
        if end < 0 or (closed is None and self._lenient.match(text, end) is None):
            end = self._ends(text, start)[0]
        call = keys.read(text[start:end], names, lenient=self.form.is_lenient)
        if call is None:
            return None
        return end if closed is None else closed.end(), *call[:3], call[3] or self._note

    def _missing_end(self, written: str) -> str:
        """Return the text that is missing after a parsed call if it is the last one of the turn."""
        end, section = self.form.end, self.form.section[1]
        if section.strip() and written.endswith(section.strip()):
            return ""
        return section if written.endswith(end.strip()) else end + section

    def _ends(self, text: str, start: int) -> tuple[int, int]:
        """Return the end of a malformed call: before the next delimiter, and after it if it closes a call."""
        following = self._opening.search(text, start)
        until = following.start() if following is not None else len(text)
        closing = self._closing.search(text, start, until)
        if closing is None:
            return until, until
        after = self._end.match(text, closing.start())
        return closing.start(), max(closing.end(), after.end() if after is not None else 0)

    def tag(self, function: Mapping[str, JSON]) -> JSON:
        """Return the structural tag of a call. Raises InvalidRequest if the format cannot express the name."""
        form, notation, name = self.form, self.form.arguments, str(function.get("name"))
        content = notation.form(function.get("parameters") or NO_PARAMETERS)
        if isinstance(notation, ObjectKeys):
            opened, end = form.begin + notation.begun(name), "}" + form.end
        elif re.fullmatch(_TOOL_NAME, name) is None or name != name.strip():
            raise InvalidRequest(
                f"the tool name {name[:64]!r} cannot be written in this model's call format: rename the tool",
                param="tools",
            )
        else:
            written_name = f"functions.{name}:{NUMBER}" if form.is_numbered else name
            opened, end = form.begin + written_name + form.middle.rpartition(ID)[2], form.end.replace(NAME, name)
        first, *parts = re.split(f"([{ID}{NUMBER}])", opened.replace(NAME, name))
        elements = [matching(_WRITTEN[part]) if part in _WRITTEN else literal(part) for part in parts if part]
        return tagged(first, sequence(*elements, content) if elements else content, end)


def _literal(text: str) -> str:
    """Return the `loose` pattern of a literal that may contain an id."""
    before, is_there, behind = text.partition(ID)
    return rf"{loose(before)}\s*+(?P<id>[^\s<\[]{{1,64}}?)\s*+{loose(behind)}" if is_there else loose(text)
