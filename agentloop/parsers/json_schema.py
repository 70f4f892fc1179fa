"""JSON Schema helpers: reference resolution, the values that a schema allows, and keywords that grammars enforce.

Parsers convert values with these schemas, and grammars are built from them. At most `MAX_REFERENCES` references are
followed without a step into the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

from agentloop.types import JSON

MAX_REFERENCES: Final = 63
ALL_TYPES: Final = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
INT64: Final = {"minimum": -(2**63), "maximum": 2**63 - 1}
"""The integers that the parsers accept."""

_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_LISTS = (*_BRANCHES, "prefixItems")
_SINGLE = (
    *("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames"),
    *("contains", "not", "if", "then", "else"),
)
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const", "multipleOf"}

_LEAP = "(0[48]|[2468][048]|[13579][26])"  # 04, 08 ... 96
_DATE = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|(\d\d{_LEAP}|(00|{_LEAP})00)-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",  # without leap seconds, which many libraries reject
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
}
"""Patterns of formats for which xgrammar's own rules accept invalid values, such as 2026-02-31."""

# References


def resolve(reference: str, root: JSON) -> JSON:
    """Return the schema at a JSON pointer such as `#/$defs/Color`. Raises ValueError if there is no schema."""
    shown = f"$ref {reference[:200]!r}"
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"{shown} does not point into the same schema: it must begin with '#/'")
    target: Any = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and re.fullmatch("[0-9]{1,6}", key) and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, Mapping) and key in target:
            target = target[key]
        else:
            raise ValueError(f"{shown} has no target in the schema")
    if not isinstance(target, Mapping | bool):
        raise ValueError(f"{shown} does not point to a schema")
    return target


def check_references(root: JSON) -> None:
    """Raise ValueError for a reference without a target, in a cycle, or in a chain that is too long."""
    schemas = {id(schema): schema for _, schema in _reachable(root)}
    following = {key: {id(node) for node in _same_value(schema, root)} for key, schema in schemas.items()}
    remaining = set(schemas)  # after n rounds: the schemas from which n steps are possible
    for _ in range(MAX_REFERENCES + 1):
        remaining = {key for key in remaining if not remaining.isdisjoint(following[key])}
    if remaining:
        reference = next((schemas[key]["$ref"] for key in remaining if "$ref" in schemas[key]), None)
        raise ValueError(
            f"$ref {str(reference)[:200]!r} is in a cycle or in a chain of more than {MAX_REFERENCES} references"
        )


def bundled(schema: JSON, root: JSON) -> JSON:
    """Return part of a schema as a self-contained schema that xgrammar accepts.

    Every reference becomes `#/$defs/NAME`, integers without bounds are limited to 64 bits, arrays without a rule
    for items allow any items, and the formats in `_PATTERNS` become patterns. Raises ValueError for a reference
    without a target.
    """
    names: dict[int, str] = {}
    definitions: dict[str, JSON] = {}
    pending: list[tuple[str, JSON]] = []

    def copy(node: JSON) -> JSON:
        if not isinstance(node, Mapping):
            return node
        result = {key: value for key, value in node.items() if key not in _DEFINITIONS}
        for key in (*_MAPS, *_LISTS, *_SINGLE):
            if key in _MAPS and isinstance(value := result.get(key), Mapping):
                result[key] = {name: copy(item) for name, item in value.items()}
            elif isinstance(value := result.get(key), list | tuple) and key in _LISTS:
                result[key] = [copy(item) for item in value]
            elif key in _SINGLE and key in result:
                result[key] = copy(result[key])
        if isinstance(reference := node.get("$ref"), str):
            target = resolve(reference, root)
            if id(target) not in names:
                name = base = re.sub(r"\W", "_", reference.rpartition("/")[2]).strip("_") or "root"
                while name in names.values():
                    name = f"{base}_{len(names)}"
                names[id(target)] = name
                pending.append((name, target))
            result["$ref"] = f"#/$defs/{names[id(target)]}"
        if node.get("type") == "integer" and not _BOUNDS & node.keys():
            result |= INT64
        pattern = _PATTERNS.get(str(node.get("format")))
        if pattern is not None and "string" in _declared(node) and not node.keys() & _NOT_WITH_FORMAT:
            result["pattern"] = pattern
            del result["format"]
        if "array" in _declared(node) and not node.keys() & {"items", "prefixItems", "unevaluatedItems"}:
            result["items"] = True  # without it, xgrammar allows no items next to minItems or maxItems
        return result

    whole = copy(schema)
    while pending:  # without recursion: the definitions may form a long chain
        name, target = pending.pop()
        definitions[name] = copy(target)
    return {**whole, "$defs": definitions} if definitions else whole


def _reachable(root: JSON) -> Iterator[tuple[str, Mapping[str, JSON]]]:
    """Yield a schema, its subschemas and the targets of its references, each once with its path."""
    pending, seen = [("", root)], set()
    while pending:
        path, schema = pending.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield path, schema
        below = [
            (f"{key}.{name}", subschema)
            for key in (*_MAPS, *_DEFINITIONS)
            for name, subschema in _map(schema, key).items()
        ]
        below += [
            (f"{key}.{index}", subschema) for key in _LISTS for index, subschema in enumerate(_list(schema, key))
        ]
        below += [(key, schema[key]) for key in _SINGLE if key in schema]
        pending += [(f"{path}.{step}" if path else step, subschema) for step, subschema in below]
        if isinstance(reference := schema.get("$ref"), str):
            pending.append((reference, resolve(reference, root)))


def _same_value(schema: Mapping[str, JSON], root: JSON, keywords: Sequence[str] = _BRANCHES) -> Iterator[JSON]:
    """Yield the schemas that apply to the same value: the reference's target and the branches of `keywords`."""
    if isinstance(reference := schema.get("$ref"), str):
        yield _target(reference, root)
    for key in keywords:
        yield from _list(schema, key)


def _map(schema: Mapping[str, JSON], key: str) -> Mapping[str, JSON]:
    return value if isinstance(value := schema.get(key), Mapping) else {}


def _list(schema: Mapping[str, JSON], key: str) -> Sequence[JSON]:
    return value if isinstance(value := schema.get(key), list | tuple) else ()


# Values that a schema allows


def allowed_types(schema: JSON, root: JSON) -> frozenset[str]:
    """Return the JSON types that a schema allows; `ALL_TYPES` if it has no such rule."""

    def own(node: Mapping[str, JSON]) -> frozenset[str]:
        types = _declared(node) if "type" in node else ALL_TYPES
        if (values := listed_values(node)) is not None:
            types &= frozenset(map(_type_of, values))
        return types

    return _folded(schema, root, own, ALL_TYPES, {}, 0)


def first_allowed(values: Sequence[JSON], schema: JSON, root: JSON) -> int | None:
    """Return the index of the first value that a schema's types, `enum` and `const` allow; None if none is."""

    def own(node: Mapping[str, JSON]) -> frozenset[int]:
        listed, types = listed_values(node), _declared(node) if "type" in node else ALL_TYPES
        return frozenset(
            index
            for index, value in enumerate(values)
            if _type_of(value) in types
            and (listed is None or any(_is_same(value, candidate) for candidate in listed))
        )

    return min(_folded(schema, root, own, frozenset(range(len(values))), {}, 0), default=None)


def property_schema(parameters: JSON, key: str) -> JSON:
    """Return the schema of one key of an object; None if nothing describes it."""
    levels = list(_levels(parameters, parameters))
    always = {id(node) for node in _levels(parameters, parameters, ("allOf",))}
    matches = [(_map(node, "properties")[key], node) for node in levels if key in _map(node, "properties")]
    if not matches:
        patterns = (
            (pattern, subschema, node)
            for node in levels
            for pattern, subschema in _map(node, "patternProperties").items()
        )
        matches = [(subschema, node) for pattern, subschema, node in patterns if _may_match(pattern, key)]
    if not matches:
        matches = [(node["additionalProperties"], node) for node in levels if _map(node, "additionalProperties")]
    parts = [subschema for subschema, node in matches if id(node) in always]
    if len(choices := [subschema for subschema, node in matches if id(node) not in always]) > 1:
        choices = [{"anyOf": choices}]
    parts += choices
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else None


def properties(parameters: JSON) -> dict[str, JSON]:
    """Return the properties that an object's schema defines, in order, with their schemas."""
    levels = _levels(parameters, parameters)
    return {key: property_schema(parameters, key) for node in levels for key in _map(node, "properties")}


def branches(schema: JSON, root: JSON) -> list[Mapping[str, JSON]]:
    """Return the leaf schemas reached through references, `allOf`, `anyOf` and `oneOf`."""
    return [node for node in _levels(schema, root) if not node.keys() & {"$ref", *_BRANCHES}]


def listed_values(node: Mapping[str, JSON]) -> Sequence[JSON] | None:
    """Return the values of `const` or `enum`; None if the schema lists none."""
    return [node["const"]] if "const" in node else _list(node, "enum") or None


def loosened(parameters: JSON) -> JSON:
    """Return the schema of an object with the same keys and types, and no other rules."""
    types = {key: allowed_types(schema, parameters) & ALL_TYPES for key, schema in properties(parameters).items()}
    loose = {
        key: {"type": sorted(allowed)} if allowed and allowed != ALL_TYPES else {} for key, allowed in types.items()
    }
    return {"type": "object", "properties": loose, "additionalProperties": True}


def _folded(
    schema: JSON,
    root: JSON,
    own: Callable[[Mapping[str, JSON]], frozenset[Any]],
    everything: frozenset[Any],
    known: dict[int, frozenset[Any]],
    depth: int,
) -> frozenset[Any]:
    """Return the members of `everything` that a schema allows. `own` evaluates a schema's own keywords.

    A reference without a target, in a cycle or in a chain that is too long allows everything. `known` caches
    results by schema, which makes the time linear.
    """
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return everything if schema is not False else frozenset()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = everything
    allowed = own(schema)

    def of(one: JSON) -> frozenset[Any]:
        return _folded(one, root, own, everything, known, depth + 1)

    if isinstance(reference := schema.get("$ref"), str):
        allowed &= of(_target(reference, root))
    for key in _BRANCHES:
        if parts := [of(one) for one in _list(schema, key)]:
            allowed &= frozenset.intersection(*parts) if key == "allOf" else frozenset.union(*parts)
    known[id(schema)] = allowed
    return allowed


def _levels(schema: JSON, root: JSON, keywords: Sequence[str] = _BRANCHES) -> Iterator[Mapping[str, JSON]]:
    """Yield a schema and all schemas that apply to the same value through `keywords`, in order, each once."""
    pending, seen = [schema], set()
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping) and id(node) not in seen:
            seen.add(id(node))
            yield node
            pending += reversed(list(_same_value(node, root, keywords)))


def _target(reference: str, root: JSON) -> JSON:
    try:
        return resolve(reference, root)
    except ValueError:
        return True


def _declared(node: Mapping[str, JSON]) -> frozenset[str]:
    names = {str(name) for name in ([node["type"]] if isinstance(node.get("type"), str) else _list(node, "type"))}
    names |= {"null"} if node.get("nullable") is True else set()  # OpenAPI's form
    return frozenset(names | {"integer"} if "number" in names else names)


def _type_of(value: JSON) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _is_same(one: JSON, other: JSON) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _may_match(pattern: str, key: str) -> bool:
    """Return True if the pattern matches `key` or cannot be evaluated."""
    # A pattern with several quantifiers may backtrack exponentially: do not run it.
    if sum(map(pattern.count, "*+?{")) > (0 if "(" in pattern else 2):
        return True
    try:
        return re.search(pattern, key) is not None
    except (re.error, RecursionError):
        return True


# Keywords that a grammar enforces

_NEVER = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "additionalItems"}
    | {"contains", "minContains", "maxContains", "multipleOf", "propertyNames", "$dynamicRef", "$recursiveRef"}
)
_OF_TYPE = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        *("patternProperties", "unevaluatedProperties"),
    ),
}
RULES = _NEVER.union(("type", "enum", "const", "$ref", *_BRANCHES), *_OF_TYPE.values()) - {"format"}
_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NOT_WITH_FORMAT = frozenset({"pattern", "minLength", "maxLength", *_FORMS})
_FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"}
    | {"uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
)


def unenforced(root: JSON) -> str:
    """Return a message about the first keyword that xgrammar 0.2 accepts but does not enforce; empty if none.

    Also returns the error of a reference that cannot be resolved. `tests/parsers/test_json_schema.py` compares
    these lists with the behavior of xgrammar.
    """
    try:
        check_references(root)
        for path, node in _reachable(root):
            if problem := _unenforced_here(node, root):
                return f"{problem}{f' at {path[:200]!r}' if path else ''} cannot be enforced"
    except ValueError as error:
        return str(error)
    except TypeError:  # for example, an object as the value of `type`
        return "the schema is invalid: a keyword has a value of the wrong type"
    return ""


def _unenforced_here(node: Mapping[str, JSON], root: JSON) -> str:
    used = RULES & node.keys()
    if node.get("uniqueItems", False) is not False:
        return "'uniqueItems'"
    if unknown := used & _NEVER:
        return f"'{min(unknown)}'"
    form = next((key for key in _FORMS if key in used), None)
    # xgrammar enforces formats only of declared strings; formats of numbers, such as 'int64', are annotations.
    if "format" in node and form not in ("const", "enum") and "string" in allowed_types(node, root):
        if form is not None:
            return f"'format' next to '{form}'"
        if "type" not in node:
            return "'format' without a 'type'"
    if form is not None:  # xgrammar evaluates this keyword and ignores the keywords next to it
        others = used - {form}
        if "type" in others and allowed_types({form: node[form]}, root) <= _declared(node):
            others -= {"type"}
        if others:
            return f"'{min(others)}' next to '{form}'"
        if form == "allOf" and len(_list(node, form)) != 1:
            return "'allOf' of several schemas"
        if form == "oneOf" and not all(_are_disjoint(*pair, root) for pair in combinations(_list(node, form), 2)):
            return "'oneOf' of schemas that overlap (use 'anyOf')"
        return ""
    types = _declared(node)
    if "type" not in node and used:  # xgrammar infers two of the types
        inferred = {"object": {"properties", "additionalProperties"}, "array": {"items", "prefixItems"}}
        types = frozenset(name for name, keys in inferred.items() if used & keys)
    if used and not types:
        return f"'{min(used)}' without a 'type'"
    return ("string" in types and _unenforced_text(node)) or ("object" in types and _unenforced_keys(node)) or ""


def _unenforced_text(node: Mapping[str, JSON]) -> str:
    """Return the string rule that is not enforced: xgrammar enforces one of pattern, format and length."""
    lengths = [key for key in ("minLength", "maxLength") if key in node]
    rules = [key for key in ("pattern", "format") if key in node] + lengths[:1]
    if len(rules) > 1:
        return f"'{rules[1]}' next to '{rules[0]}'"
    if str(node.get("format", "date")) not in _FORMATS:
        return f"'format' {str(node['format'])[:64]!r}"
    return ""


def _unenforced_keys(node: Mapping[str, JSON]) -> str:
    """Return the rule on an object's keys that is not enforced because it overlaps with another rule."""
    named, patterns = _map(node, "properties"), _map(node, "patternProperties")
    if missing := [key for key in _list(node, "required") if key not in named]:
        return f"'required' of {str(missing[0])[:64]!r}, which 'properties' does not describe,"
    if len(patterns) > 1 or (patterns and named):
        return "'patternProperties' next to 'properties' or another pattern"
    return ""


def _are_disjoint(one: JSON, other: JSON, root: JSON, depth: int = 0) -> bool:
    """Return True if types, listed values or a property that both require show that no value matches both."""
    if not allowed_types(one, root) & allowed_types(other, root):
        return True
    (first, *more), (second, *others) = branches(one, root) or [{}], branches(other, root) or [{}]
    if more or others or depth > MAX_REFERENCES:
        return False
    for left, right in [(first, second), (second, first)]:
        if (values := listed_values(left)) is not None and first_allowed(values, right, root) is None:
            return True
    required = {*_list(first, "required")} & {*_list(second, "required")}
    pairs = ((_map(first, "properties").get(key), _map(second, "properties").get(key)) for key in required)
    return any(_are_disjoint(*pair, root, depth + 1) for pair in pairs)
