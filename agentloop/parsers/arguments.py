"""Argument syntaxes of tool calls: each parses arguments and builds the grammar that constrains a policy to them.

Invariants: nothing that a policy wrote is evaluated, and a call takes linear time: unbalanced brackets and values
without an end are searched once, or up to a limit.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import MAX_NAME_CHARS, MalformedCall, Tools
from agentloop.parsers.grammar import JSON_TOKEN, call_json, either, literal, loads, matching, sequence, tagged
from agentloop.parsers.json_schema import (
    ALL_TYPES,
    RULES,
    allowed_types,
    branches,
    first_allowed,
    listed_values,
    properties,
    property_schema,
)
from agentloop.types import JSON

ID, NAME, NUMBER, TYPE = "\0", "\1", "\2", "\3"
"""Placeholders in a format's literals: a call's id, a repetition of its name, its number, and a value's type."""

_STRINGS = r"""'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?"""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

# Keys that the parsers accept: unquoted keys of `Literals`, and keys of `TextParameters`.
_BARE_KEY = r"[^\W\d][\w.-]*+"
_TEXT_KEY = r"(?!\s)[^<>\n]{1,256}(?<!\s)"


@dataclass(frozen=True, slots=True)
class ObjectKeys:
    """Syntax of a call that is one JSON object, described by its keys."""

    name: str = "name"  # empty: the object's only key is the tool's name
    arguments: tuple[str, ...] = ("arguments",)  # the first is written, all are read
    id: str = ""  # the key of the call id; empty if the id is not read
    lead: str = ""  # text written before the name

    def read(
        self, written: str, names: Collection[str] | None, *, lenient: bool
    ) -> tuple[str, dict[str, JSON], str, str] | None:
        """Return name, arguments and id of a call, and a note on lenient parsing. Raises MalformedCall.

        With `names`, the tools' names, returns None for text or a JSON object that is not written as a call: it has
        no name and arguments, and it names none of these tools. A call to an unknown tool is returned.
        """
        if not written.strip():
            raise MalformedCall("the tool call is empty")
        try:
            call = loads(written.strip())
        except ValueError as error:
            if names is not None and re.match(self._named, written) is None:
                return None
            raise MalformedCall(f"the tool call is not valid JSON: {error}", *self._cut_call(written)) from error
        if not isinstance(call, dict):
            raise MalformedCall(f'the tool call must be a JSON object with "{self.name}" and "{self.arguments[0]}"')
        if not self.name:
            name, arguments = next(iter(call.items())) if len(call) == 1 else ("", None)
            key = name
        else:
            name, key = call.get(self.name), next((key for key in self.arguments if key in call), "")
            if names is not None and not (isinstance(name, str) and key) and name not in names:
                return None
            name = check_name(name)
            if not key and not lenient:
                raise MalformedCall(f'the tool call has no "{self.arguments[0]}"', name)
            arguments = call[key] if key else {}
        if isinstance(arguments, str):
            try:
                arguments = loads(arguments)
            except ValueError as error:
                raise MalformedCall(f'"{key}" is a string that is not valid JSON: {error}', name) from error
        if not isinstance(arguments, dict):
            raise MalformedCall(f'"{key}" must be a JSON object', name)
        written_id = call.get(self.id) if self.id else ""
        forgiven = "" if key else f"no {self.arguments[0]}"
        return check_name(name), arguments, written_id if isinstance(written_id, str) else "", forgiven

    def begun(self, name: str) -> str:
        """Return the beginning of a call of the tool `name`, up to the start of its arguments."""
        shown = json.dumps(name, ensure_ascii=False)
        return f'{{{self.lead}"{self.name}": {shown}, "{self.arguments[0]}": ' if self.name else f"{{{shown}: "

    def form(self, parameters: Mapping[str, JSON]) -> JSON:
        return call_json(parameters)

    def _cut_call(self, text: str) -> tuple[str, str]:
        """Return the name and the argument text of invalid JSON, or empty strings."""
        keys = "|".join(self.arguments)
        behind = rf',\s*+"(?:{keys})"\s*+:\s*+(.*)' if self.name else r":\s*+(.*)"
        match = re.match(rf'{self._named}("(?:[^"\\]|\\.)*+")\s*+(?:{behind})?', text, re.DOTALL)
        try:
            return ("", "") if match is None else (str(loads(match[1])), match[2] or "")
        except ValueError:
            return "", ""

    @property
    def _named(self) -> str:
        """A pattern that matches a call up to its name."""
        key = rf'(?:"\w+"\s*+:\s*+"[^"]*+"\s*+,\s*+)*?"{self.name}"\s*+:\s*+' if self.name else ""
        return rf"\s*+\{{\s*+{key}"


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments as a JSON object."""

    def read(self, text: str, position: int, limit: int, name: str, tools: Tools) -> tuple[dict[str, JSON], int]:
        end = value_end(text, position, limit)
        if end < 0:
            raise MalformedCall("the arguments have no end", name, text[position:limit].lstrip())
        return read_arguments(text[position:end], name), end

    def form(self, parameters: Mapping[str, JSON]) -> JSON:
        return call_json(parameters)


@dataclass(frozen=True, slots=True)
class Literals:
    """Keys and values between brackets: `(word='rook', limit=3)` or `{word:<|"|>rook<|"|>,limit:3}`.

    Values are Python literals, or strings between the delimiter `quote`. JSON values are accepted as well.
    """

    assign: str = "="
    separator: str = ", "
    quote: str = ""  # the delimiter of strings; empty: Python's quotes
    quotes_all: bool = False  # values other than strings have the delimiter too

    def read(self, text: str, position: int, limit: int, name: str, tools: Tools) -> tuple[dict[str, JSON], int]:
        token = re.compile(rf"{_strings(self.quote)}|([\[{{(])|([\]}})])", re.DOTALL)
        end = value_end(text, position, limit, token, depth=1)
        inner = "{" + literals_as_json(text[position : end - 1 if end >= 0 else limit], self.quote, self.assign)
        if end < 0:
            raise MalformedCall("the arguments have no end", name, inner)
        values = read_arguments(inner + "}", name)
        if self.quotes_all:
            parameters = tool_parameters(tools, name)
            try:
                for key, value in values.items():
                    if isinstance(value, str):
                        values[key] = typed_value(value, property_schema(parameters, key), parameters)
            except ValueError as error:
                raise MalformedCall(str(error), name) from error
        return values, end - 1

    def form(self, parameters: Mapping[str, JSON]) -> JSON:
        pieces = [
            (sequence(literal(key + self.assign), self._value(schema, parameters)), is_required)
            for key, schema, is_required in _parameters(parameters, _BARE_KEY)
        ]
        return _listed(pieces, self.separator)

    def _value(self, schema: JSON, root: JSON) -> JSON:
        """Return the grammar of one value. Values inside lists and objects are JSON."""
        types = allowed_types(schema, root)
        if self.quote and (types == {"string"} or self.quotes_all):
            return tagged(self.quote, _plain_form(schema, root), self.quote)
        json_form, rules = call_json(schema, root), branches(schema, root)
        if self.quote or types not in ({"string"}, {"boolean"}) or len(rules) != 1:
            return json_form
        rule = rules[0]
        if "pattern" in rule or "format" in rule:  # only the JSON grammar enforces these
            return json_form
        bounds = f"{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}"
        pattern = "True|False" if types == {"boolean"} else rf"'([^'\\\n]|\\['\\nt]){bounds}'"
        if (values := listed_values(rule)) is not None:
            pattern = "|".join(re.escape(repr(value)) for value in values)
        return either(matching(pattern), json_form)


@dataclass(frozen=True, slots=True)
class TextParameters:
    """A sequence of parameters, each written as `open KEY between VALUE close`.

    Values are not escaped: a value ends at the first `close`, and the tool's schema determines its type. A value
    that contains another parameter's delimiter, or a complete call, makes the call malformed.
    """

    open: str
    between: tuple[str, ...]  # before strings; the second, if present, before all other values
    close: str
    begin: str = ""  # begins the call
    tail: str = ""  # ends the call
    quote: tuple[str, str] = ("", "")  # around strings that contain delimiters

    def read(self, text: str, position: int, limit: int, name: str, tools: Tools) -> tuple[dict[str, JSON], int]:
        close, parameters = self.close.strip(), tool_parameters(tools, name)
        between = "|".join(map(loose, self.between))
        opening = re.compile(rf"\s*+{loose(self.open)}([^<>\n]{{1,256}}?)(?:{between})")
        tail = re.compile(loose(self.tail) or "(?!)")
        values: dict[str, JSON] = {}
        while (found := opening.match(text, position)) is not None:
            key, start = found[1].strip(), found.end()
            opened, closed = self.quote if text.startswith(self.quote[0], start) else ("", "")
            end = text.find(closed + close, start)
            until = end if end >= 0 else len(text)
            schema, inner, cut = property_schema(parameters, key), -1, None
            # A missing `close` would swallow the next parameter or call: look for their delimiters in the value.
            if not opened or end < 0:
                inner = self._inner(text, start, until)
                # A value may contain one delimiter, but not all.
                if inner >= 0 or len(delimiters_of(self.tail)) > 1:
                    cut = tail.search(text, start, inner if inner >= 0 else until)
            if inner >= 0 or cut is not None or end < 0:
                until = cut.start() if cut is not None else until
                value = text[start:until].removeprefix("\n")
                is_text = schema is None or "string" in allowed_types(schema, parameters)
                shown = begun_json(value) if is_text else value.strip()
                partial = f"{begun_json(values)}{', ' if values else ''}{json.dumps(key)}: {shown}"
                at = until if cut is not None or inner >= 0 or len(delimiters_of(self.tail)) > 1 else start
                is_inner = cut is None and inner >= 0
                error = f"another parameter or call before its {close}" if is_inner else f"no {close}"
                raise MalformedCall(f"parameter {key!r} has {error}", name, partial, at)
            value, position = text[start + len(opened) : end], end + len(closed + close)
            # Templates with multi-line values write one line break on each side of the value.
            if not opened and self.between[0].endswith("\n"):
                value = value.removeprefix("\n").removesuffix("\n")
            try:
                if key in values:
                    raise ValueError("it is repeated in the call")
                values[key] = typed_value(value, schema, parameters)
            except ValueError as error:
                raise MalformedCall(f"parameter {key!r}: {error}", name, begun_json(values), position) from error
        return values, position

    def form(self, parameters: Mapping[str, JSON]) -> JSON:
        pieces, ends = [], delimiters_of(self.tail)
        excluded = [*(ends[:1] if len(ends) > 1 else []), delimiters_of(self.open)[0]]
        for key, schema, is_required in _parameters(parameters, _TEXT_KEY):
            content = _plain_form(schema, parameters, excluded)
            is_text = content["type"] != "json_schema"
            types = allowed_types(schema, parameters)
            shown = "string" if is_text else "number" if "integer" in types else min(types, default="string")
            between = self.between[0 if is_text else -1]
            end = self.close.lstrip() if content["type"] == "any_text" else self.close
            pieces.append((tagged(f"{self.open}{key}{between.replace(TYPE, shown)}", content, end), is_required))
        return _listed(pieces, "")

    def _inner(self, text: str, start: int, end: int) -> int:
        """Return the position of another parameter or a complete call between `start` and `end`, or -1."""
        opening = delimiters_of(self.open)[0]
        if opening.startswith("<") and (position := text.find(opening, start, end)) >= 0:
            return position
        call = re.compile(loose(self.begin)).search(text, start, end) if self.begin else None
        if call is None or re.compile(loose(self.tail)).search(text, call.end(), end) is None:
            return -1
        return call.start()


Notation: TypeAlias = ObjectKeys | JsonArguments | Literals | TextParameters
"""The syntax of arguments: inside the call's JSON object (`ObjectKeys`), or after the call's name (the others).

After a name, `read` returns the arguments and their end. It raises MalformedCall with the position at which to
resume. `form` returns the structural tag of the arguments of a tool with these parameters.
"""


def _plain_form(schema: JSON, root: JSON, excluded: Sequence[str] = ()) -> dict[str, JSON]:
    """Return the structural tag of a value that `typed_value` parses: strings are unquoted, other values are JSON.

    Raises InvalidRequest for a string `format`, which only the JSON grammar can enforce.
    """
    types = allowed_types(schema, root)
    if "string" not in types or types == ALL_TYPES:
        return call_json(schema, root)
    forms: list[JSON] = []
    others: list[JSON] = []
    is_listed = True
    for rule in branches(schema, root):
        values = listed_values(rule)
        if "string" not in allowed_types(rule, root):
            others.append(rule)
        elif values is not None:
            forms += [literal(value) for value in values if isinstance(value, str)]
            if rest := [value for value in values if not isinstance(value, str)]:
                others.append({"enum": rest})
        elif "format" in rule:
            error = f"the string format {str(rule['format'])[:64]!r} cannot be enforced in this model's call format"
            raise InvalidRequest(error, param="tools")
        elif "pattern" in rule:
            is_listed = False
            forms.append(matching(rule["pattern"]))
        elif "minLength" in rule or "maxLength" in rule:
            is_listed = False
            forms.append(matching(f"[^<]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}"))
        else:
            return {"type": "any_text", "excludes": list(excluded)}
    if others and is_listed:
        forms.append(call_json({"anyOf": others}, root))
    elif "null" in types:  # any other value would be parsed as a string, which its rules may forbid
        forms.append(literal("null"))
    return either(*forms)


def _parameters(parameters: JSON, readable_key: str) -> list[tuple[str, JSON, bool]]:
    """Return a tool's parameters in order, as (key, schema, is required).

    Raises InvalidRequest for a rule on all parameters together, because each parameter has its own grammar, and for
    a key that does not match `readable_key`, because the parser would not recognize it.
    """
    rules = branches(parameters, parameters)
    keywords = {key for rule in rules for key in rule} & RULES - _SINGLE_PARAMETER_RULES
    if len(rules) != 1 or keywords:
        shown = f"{min(keywords)!r}" if keywords else "several schemas"
        error = f"{shown} of all parameters together cannot be enforced in this model's call format"
        raise InvalidRequest(error, param="tools")
    schemas = properties(parameters)
    if unreadable := [key for key in schemas if re.fullmatch(readable_key, key) is None]:
        error = f"a parameter named {unreadable[0][:64]!r} cannot be written in this model's call format"
        raise InvalidRequest(error, param="tools")
    required = rules[0].get("required", ())
    return [(key, schema, key in required) for key, schema in schemas.items()]


_SINGLE_PARAMETER_RULES = {
    *("type", "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties")
}


def _listed(pieces: Sequence[tuple[JSON, bool]], separator: str) -> JSON:
    """Return the structural tag of `pieces` in order. Pieces that are not required may be omitted."""
    following = []
    for piece, is_required in pieces:
        separated = sequence(literal(separator), piece) if separator else piece
        following.append(separated if is_required else {"type": "optional", "content": separated})
    if not separator or not pieces:
        return sequence(*(following or [literal("")]))
    num_first = next((at for at, (_, is_required) in enumerate(pieces, 1) if is_required), None)
    forms = either(*(sequence(piece, *following[at:]) for at, (piece, _) in enumerate(pieces[:num_first], 1)))
    return {"type": "optional", "content": forms} if num_first is None else forms


_PLACES = {NAME: r"[^\s<>]{1,256}?", NUMBER: r"[0-9]{1,9}", TYPE: r"\w{1,16}"}

# Delimiters in a literal: tags (also unterminated), Kimi-K3's tags of three tokens, brackets, and words between
# them.
MARK = re.compile(
    r"<\|(?:open|close)\|>[^<>\n]*(?:<\|sep\|>)?|<[^<>\n]*>?|\[[^\[\]<\n]*\]|[\[\](){}]|[^\s<\[\](){}]+"
)


def delimiters_of(written: str) -> list[str]:
    """Return the delimiters in a literal, in order, without the whitespace between them."""
    return [match[0] for match in MARK.finditer(written)]


def loose(written: str) -> str:
    """Return a pattern of a literal with any whitespace between its delimiters and optional Markdown fences."""
    escaped = (
        f"(?:{re.escape(mark)})?" if mark.startswith("```") else re.escape(mark) for mark in delimiters_of(written)
    )
    pattern = r"\s*+".join(escaped)
    return re.sub(f"[{NAME}{NUMBER}{TYPE}]", lambda place: _PLACES[place[0]], pattern)


def value_end(text: str, start: int, limit: int, token: re.Pattern[str] = JSON_TOKEN, *, depth: int = 0) -> int:
    """Return the end of the object or array at `start`; -1 if its closing bracket is not before `limit`.

    The text between the brackets may be malformed. `depth` is the number of brackets already open. Linear time.
    """
    for match in token.finditer(text, start, limit):
        opening, closing = match.groups()
        depth += (opening is not None) - (closing is not None)
        if depth <= 0:
            return match.end() if closing is not None else -1
    return -1


def _strings(quote: str) -> str:
    """Return the pattern of strings in Python's or JSON's syntax, or between `quote` delimiters."""
    own = re.escape(quote)
    return f"{own}(?:(?!{own}).)*+(?:{own})?|{_STRINGS}" if quote else _STRINGS


def literals_as_json(text: str, quote: str = "", assign: str = "") -> str:
    """Convert Python literals to JSON: strings (also between `quote`), constants, unquoted keys before `assign`.

    An unterminated string stays unterminated.
    """
    key = rf"(?P<key>{_BARE_KEY})\s*+{assign}" if assign else "(?P<key>(?!))"

    def as_json(match: re.Match[str]) -> str:
        written = match[0]
        if match["key"] is not None:
            return f'"{match["key"]}": '
        if written in _PYTHON_WORDS:
            return _PYTHON_WORDS[written]
        if not quote or not written.startswith(quote):
            return _python_string(written)
        inner = written.removeprefix(quote)
        if inner.endswith(quote):
            return json.dumps(inner.removesuffix(quote), ensure_ascii=False)
        return begun_json(inner)

    return re.sub(rf"{_strings(quote)}|{key}|\b(?:True|False|None)\b", as_json, text, flags=re.DOTALL)


def _python_string(written: str) -> str:
    """Convert a Python or JSON string to JSON. An unterminated string stays unterminated."""
    mark, is_whole = written[0], len(written) > 1 and written.endswith(written[0])
    for parse in (loads, ast.literal_eval):
        try:
            value = parse(written.replace("\n", "\\n") + ("" if is_whole else mark))
        except (SyntaxError, ValueError):
            continue
        return json.dumps(value, ensure_ascii=False) if is_whole else begun_json(value)
    return written


def begun_json(value: JSON) -> str:
    """Return an object or a string as JSON without its last character."""
    return json.dumps(value, ensure_ascii=False)[:-1]


def read_arguments(text: str, name: str) -> dict[str, JSON]:
    """Parse arguments written as JSON after the call's name. Raises MalformedCall."""
    text = text.lstrip()
    try:
        arguments = loads(text)
    except ValueError as error:
        raise MalformedCall(f"the arguments are not valid JSON: {error}", name, text) from error
    if not isinstance(arguments, dict):
        raise MalformedCall("the arguments must be a JSON object", name)
    return arguments


def check_name(name: JSON) -> str:
    """Return `name` if it is a valid tool name. Raises MalformedCall."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise MalformedCall(f'the tool call needs a "name" of 1 to {MAX_NAME_CHARS} characters')
    return name


def tool_parameters(tools: Tools, name: str) -> Mapping[str, JSON]:
    """Return the schema of a tool's parameters; an empty mapping for an unknown tool."""
    functions = (tool.get("function", tool) for tool in tools)
    return next((function.get("parameters") or {} for function in functions if function.get("name") == name), {})


def typed_value(value: str, schema: JSON, root: JSON) -> JSON:
    """Convert unquoted text to the first of null, string and other JSON that `schema` allows.

    Without a schema the value is a string. Raises ValueError if the schema allows no string and the text is not
    JSON.
    """
    if schema is None:
        return value
    types, bare = allowed_types(schema, root), value.strip()
    as_text: list[JSON] = [None, value, bare] if bare in ("null", "None") else [value, bare]
    if types != ALL_TYPES and (index := first_allowed(as_text, schema, root)) is not None:
        return as_text[index]
    try:
        try:
            parsed = loads(bare)
        except ValueError:
            parsed = loads(literals_as_json(bare))  # some templates print values in Python syntax
    except ValueError as error:
        if "string" in types:
            return value  # the tool, not the parser, rejects a string that its schema does not list
        raise ValueError(f"the value does not have a type that its schema allows: {error}") from error
    is_text = types != ALL_TYPES and "string" in types and first_allowed([parsed], schema, root) is None
    return value if is_text else parsed
