"""One reader and one grammar for all formats of calls that are data: marks, and the notation of arguments.

A format is written by hand (`by_name.py`) or derived from what a template writes (`derive.py`). The reader forgives
blanks between marks, and missing marks behind a whole object; whatever else is wrong makes a call malformed, up to
the next mark. Linear: a turn has at most `MAX_CALLS` calls, and an object's end is looked for up to the fourth mark
that follows (a mark may stand inside a string), so each character is read a bounded number of times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from agentloop.errors import InvalidRequest
from agentloop.parsers.arguments import (
    JsonArguments,
    Notation,
    ObjectKeys,
    TextParameters,
    Tools,
    check_name,
    loose,
    marks_of,
    value_end,
)
from agentloop.parsers.base import MalformedCall, Marks, ThoughtMarks, TurnBuilder
from agentloop.parsers.grammar import NO_PARAMETERS, TurnSyntax, constraint_of_calls, either_constraint
from agentloop.parsers.marked import MarkedParser
from agentloop.types import JSON, Constraint

ID = "\0"
"""The place of a call's id in a format's literals."""

_MAX_MARKS_INSIDE = 4
_TOOL_NAME = r"""[^\s<>{}\[\]()"'=][^<>{}\[\]()"'=\n]{0,255}?"""
_NUMBERED = re.compile(r"(?:functions\.)?(.*?)(:[0-9]+)?")
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

_Call: TypeAlias = tuple[str, Mapping[str, JSON], str, int, str | None]
"""Name, arguments, the id that was written, where the call ends, and what was forgiven."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around calls: `section begin NAME middle ARGUMENTS end separator begin ... end section`."""

    begin: str
    end: str
    arguments: ObjectKeys | Notation
    middle: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = "\n"
    is_bare: bool = False  # calls may begin a turn without a mark, one a turn
    is_numbered: bool = False  # the name is written as `functions.NAME:NUMBER`, which is the call's id

    @property
    def outer(self) -> str:
        """The mark of a turn's first call; empty if it has none."""
        marks = marks_of(self.section[0]) or marks_of(self.begin.partition(ID)[0])
        return marks[0] if marks and len(marks[0]) > 1 else ""

    @property
    def inner(self) -> str:
        """The mark of each call; empty if the section's alone begins calls. It counts without the outer one."""
        marks = marks_of(self.begin.partition(ID)[0])
        open_ones = [
            mark for mark in marks if not mark.endswith((">", "]"))
        ]  # `<function=` of `<tool_call><function=`
        return "" if not marks else marks[0] if self.section[0].strip() or not open_ones else open_ones[0]

    @property
    def is_listed(self) -> bool:
        """True if what ends a call does not tell: another may follow, up to the section's end."""
        return not self.begin.strip() or bool(self.separator.strip())


class FormatParser(MarkedParser):
    """The reader of one format, or of two with the same first mark, told apart call by call."""

    def __init__(
        self, thoughts: ThoughtMarks, form: CallFormat, *others: CallFormat, lenient: bool = False
    ) -> None:
        """`lenient` reads as vLLM and SGLang do: objects without arguments, and a list where one object stands."""
        self.form, self._others = form, others
        outer, inner, ends, last = form.outer, form.inner, marks_of(form.end), marks_of(form.section[1])
        self.counted = inner or outer or '"name"'
        self.writes_one = form.is_bare
        openings = tuple(dict.fromkeys(filter(None, (outer, inner))))
        is_certain = bool(ends) and len(last) < 2 and not (form.is_listed or others)
        leading = (form.section[0].strip() or "{",) if not outer else ("{",)
        self.marks = Marks(
            openings,
            ends[-1] if is_certain else None,
            leading=leading if form.is_bare else (),
            trailing="".join(last) if is_certain else "",
            thoughts=thoughts,
        )
        first, each = re.escape(outer), re.escape(inner)
        either = f"(?:{first}\\s*+)?{each}|{first}" if inner and inner != outer else first
        self.opening = re.compile(either if openings else "(?!)")
        self._readers = [_CallReader(one, self.opening, self.counted, lenient) for one in (form, *others)]
        self._writers = tuple(self._readers)
        if lenient and isinstance(form.arguments, ObjectKeys) and form.begin.strip():
            listed = replace(form, begin="", end="", section=(f"{form.begin}[", f"]{form.end}"), separator=", ")
            self._readers.append(_CallReader(listed, self.opening, self.counted, lenient, "a list of calls"))

    def lenient(self) -> FormatParser:
        """Return the lenient reader of the same formats, whose grammar is the same."""
        return FormatParser(self.marks.thoughts, self.form, *self._others, lenient=True)

    def read_call(self, builder: TurnBuilder, found: re.Match[str], tools: Tools) -> int:
        begun = (one for one in self._readers if one.begins(builder.text, found.start()))
        return next(begun, self._readers[0]).read(builder, *found.span(), tools, is_marked=True)

    def read_leading(self, builder: TurnBuilder, tools: Tools) -> int:
        reader = self._readers[0]
        if not self.form.is_bare or not reader.begins(builder.text, 0):
            return 0
        return reader.read(builder, 0, 0, tools, is_marked=False)

    def call_constraint(self, tools: Tools, *, forced: str | None, is_parallel: bool) -> Constraint:
        """See `Parser.call_constraint`. Of two formats the policy chooses, at the first character that differs."""
        is_parallel = is_parallel and not self.writes_one
        constraints = [
            constraint_of_calls(tools, one.tag, one.turn, forced=forced, is_parallel=is_parallel)
            for one in self._writers
        ]
        return constraints[0] if len(constraints) == 1 else either_constraint(*constraints)


class _CallReader:
    """Reads and writes the calls of one format."""

    def __init__(
        self, form: CallFormat, opening: re.Pattern[str], counted: str, lenient: bool, note: str | None = None
    ) -> None:
        """`note` is what every call of this format is forgiven."""
        self.form, self._opening, self._counted, self._lenient, self._note = form, opening, counted, lenient, note
        notation = form.arguments
        self._keys = notation if isinstance(notation, ObjectKeys) else None
        has_tag = bool(form.outer) and form.is_bare
        self.turn = TurnSyntax("" if has_tag else form.section[0], form.separator, form.section[1])
        section, begin, ends = loose(form.section[0]), _literal(form.begin), marks_of(form.end)
        if not section and form.inner != form.outer:
            section, begin = loose(form.outer), _literal(form.begin[form.begin.index(form.inner) :])
        body = ""
        if self._keys is None:
            middle, is_there, behind = form.middle.partition(ID)
            middle = loose(middle)
            if is_there:
                middle = rf"(?:{middle}\s*+(?P<id>[^\[\]{{}}\n<]{{0,64}}?))?\s*+(?:{loose(behind)})?"
            follows = [*(marks_of(notation.open)[:1] if isinstance(notation, TextParameters) else ()), *ends[:1]]
            ahead = r"\{" if isinstance(notation, JsonArguments) else "|".join(map(re.escape, follows))
            body = rf"(?P<name>{_TOOL_NAME})\s*+{middle}\s*+" + (
                f"(?={ahead})" if form.middle.strip() == "" or ahead == r"\{" else ""
            )
        is_free = bool(begin) or has_tag
        first = rf"\s*+(?:{section}\s*+){'?' if is_free else ''}" if section else r"\s*+"
        self._first = re.compile(rf"{first}{begin}\s*+{body}")
        self._begins = re.compile(rf"{first}{begin}\s*+{body or '(?={)'}")
        self._element = re.compile(rf"{begin}\s*+{body}")
        closes = rf"(?:\s*+{loose(form.section[1])})?" if form.section[1].strip() else ""
        needed = next((mark for mark in ends if not mark.startswith("```")), "")
        written = "".join(rf"\s*+{loose(one)}" if one == needed else rf"(?:\s*+{loose(one)})?" for one in ends)
        self._end = re.compile(written + closes)
        self._forgiven = re.compile(rf"\s*+(?:\Z|{opening.pattern}|{loose(form.section[1]) or '(?!)'})")
        separator = loose(form.separator)
        is_loose = not separator or form.is_bare
        after = rf"\s*+(?:{separator})?\s*+(?=\{{)" if is_loose else rf"\s*+{separator}\s*+"
        self._next = re.compile(after if form.is_listed else "(?!)")
        self._closings = [mark for mark in (*ends[-1:], *marks_of(form.section[1])[-1:]) if len(mark) > 2]
        shown = marks_of(f"{form.section[0]}{form.begin}{'{' if self._keys else '...'}{form.middle}")
        self._shown = "".join(shown).replace(ID, "ID")

    def begins(self, text: str, start: int) -> bool:
        """Tell if a call of this format begins there."""
        return self._begins.match(text, start) is not None

    def read(self, builder: TurnBuilder, start: int, position: int, tools: Tools, *, is_marked: bool) -> int:
        """Add the calls from `start` on, the mark of the first up to `position`; return where the last one ends."""
        text, limit = builder.text, self._limit(builder.text, position)
        head = self._first.match(text, start)
        while True:
            try:
                if head is None:
                    raise MalformedCall(f"the tool call does not begin with {self._shown}")
                call = self._call(text, head, limit, tools, is_marked=is_marked)
            except MalformedCall as malformed:
                begun = max(position, malformed.at, head.end() if head is not None else 0)
                until, end = self._ends(text, begun)
                builder.add_malformed(start, end, malformed, is_cut=until == len(text))
                return end
            if call is None:
                return start
            name, arguments, written_id, end, note = call
            builder.add_call(start, end, name, arguments, written_id, note)
            if (following := self._next.match(text, end)) is None:
                return end
            if builder.is_full:
                builder.add_rest(end, '"name"' if self._keys is not None else self._counted)
                return len(text)
            start, position, is_marked = end, following.end(), is_marked and not self.form.is_bare
            head = self._element.match(text, position)

    def _call(self, text: str, head: re.Match[str], limit: int, tools: Tools, *, is_marked: bool) -> _Call | None:
        """Read one call; None if an object without a mark is none. Raises MalformedCall."""
        if self._keys is not None:
            return self._object(text, head.end(), limit, tools, is_marked=is_marked)
        written, notation = head["name"].strip(), self.form.arguments
        assert not isinstance(notation, ObjectKeys)
        found = _NUMBERED.fullmatch(written) if self.form.is_numbered else None
        name = check_name(found[1] if found is not None else written)
        call_id = written if found is not None and found[2] else head.groupdict().get("id") or ""
        arguments, end = notation.read(text, head.end(), limit, name, tools)
        closed = self._end.match(text, end)
        if closed is None and not (isinstance(notation, JsonArguments) and self._forgiven.match(text, end)):
            expected = notation.expects + "".join(marks_of(self.form.end))
            error = f"the tool call has something else where {expected} must stand"
            raise MalformedCall(error, name, json.dumps(arguments, ensure_ascii=False)[:-1], end)
        call_id = call_id if _ID.fullmatch(call_id) else ""
        return name, arguments, call_id, end if closed is None else closed.end(), None

    def _object(self, text: str, start: int, limit: int, tools: Tools, *, is_marked: bool) -> _Call | None:
        assert self._keys is not None
        end = value_end(text, start, limit) if text.startswith("{", start) else -1
        closed = self._end.match(text, end) if end >= 0 else None
        if end < 0 or (closed is None and self._forgiven.match(text, end) is None):
            end = self._ends(text, start)[0]
        names = None if is_marked else {str(tool.get("function", tool).get("name")) for tool in tools}
        found = self._keys.read(text[start:end], names, lenient=self._lenient)
        if found is None:
            return None
        name, arguments, written_id, note = found
        return name, arguments, written_id, end if closed is None else closed.end(), note or self._note

    def _ends(self, text: str, start: int) -> tuple[int, int]:
        """Return where what cannot be read from `start` on ends: before a mark, and behind it if it ends a call."""
        following = self._opening.search(text, start)
        until = following.start() if following is not None else len(text)
        places = [(at, at + len(mark)) for mark in self._closings if (at := text.find(mark, start, until)) >= 0]
        at, end = min(places, default=(until, until))
        after = self._end.match(text, at) if places else None
        return at, max(end, after.end()) if after is not None else end

    def _limit(self, text: str, position: int) -> int:
        """Return the limit of values: a later mark than the next, which they may hold."""
        mark = self._counted if self._opening.pattern != "(?!)" else ""
        for _ in range(_MAX_MARKS_INSIDE + 1 if mark else 0):
            if (position := text.find(mark, position)) < 0:
                return len(text)
            position += len(mark)
        return position - len(mark) if mark else len(text)

    def tag(self, function: Mapping[str, JSON]) -> JSON:
        """Return the structural tag of one call. Raises InvalidRequest if its tool cannot be written."""
        form, name = self.form, str(function.get("name"))
        parameters = function.get("parameters") or NO_PARAMETERS
        notation, begin, middle = form.arguments, form.begin, form.middle.rpartition(ID)[2]
        if isinstance(notation, ObjectKeys):
            begun = notation.begun(name)
            return {
                "type": "tag",
                "begin": begin + begun,
                "content": notation.form(parameters),
                "end": "}" + form.end,
            }
        if re.fullmatch(_TOOL_NAME, name) is None or name != name.strip():
            raise InvalidRequest(f"a call of {name[:64]!r} cannot be written in this model's format", param="tools")
        before, is_there, behind = begin.partition(ID)
        written = [behind + name + middle]
        if form.is_numbered:
            before, is_there, written = f"{begin}functions.{name}:", "1", [middle]
        content = notation.form(parameters)
        if is_there:
            pattern = "[0-9]{1,4}" if form.is_numbered else "[a-zA-Z0-9]{9}"
            parts: list[JSON] = [{"type": "regex", "pattern": pattern}]
            parts += [{"type": "const_string", "value": one} for one in written if one]
            content = {"type": "sequence", "elements": [*parts, content]}
        return {
            "type": "tag",
            "begin": before if is_there else before + written[0],
            "content": content,
            "end": form.end,
        }


def _literal(text: str) -> str:
    before, is_there, behind = text.partition(ID)
    return rf"{loose(before)}\s*+(?P<id>[^\s<\[]{{1,64}}?)\s*+{loose(behind)}" if is_there else loose(text)
