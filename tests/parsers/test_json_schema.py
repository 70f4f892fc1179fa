"""JSON Schemas: references, types of text values, and the keywords that xgrammar enforces."""

from __future__ import annotations

import calendar
import datetime
import json
import re
from typing import Any

import jsonschema_rs
import pytest

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import get_parser
from agentloop.parsers.grammar import call_json, constraint_of
from agentloop.parsers.json_schema import (
    MAX_REFERENCES,
    allowed_types,
    bundled,
    loosened,
    property_schema,
    unenforced,
)
from agentloop.types import ToolCallStatus
from tests.parsers.test_call_constraint import allows, walk
from tests.parsers.writing import parse

INT, STR = {"type": "integer"}, {"type": "string"}
A, AB = {"a": INT}, {"a": INT, "b": INT}
OBJECT = {"type": "object"}
ENFORCED: list[Any] = [
    True,
    {"enum": [1, "a", None]},
    {"type": "string", "enum": ["a", "b"]},
    {"type": ["integer", "null"], "minimum": 3},
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 10},
    {"type": "number", "minimum": 2.5},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^a+$"},
    {"type": "string", "format": "date"},
    {"type": ["string", "null"], "format": "time"},
    {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "string", "format": "ipv4"}]},
    {"type": "array", "minItems": 2},
    {"type": "array", "items": INT, "maxItems": 2, "uniqueItems": False},
    {"type": "array", "prefixItems": [INT, STR], "items": False},
    OBJECT | {"properties": AB, "required": ["b"], "additionalProperties": False},
    OBJECT | {"properties": A, "additionalProperties": STR},
    OBJECT | {"properties": A, "unevaluatedProperties": False},
    OBJECT | {"properties": AB, "additionalProperties": False, "minProperties": 2},
    OBJECT | {"properties": AB, "maxProperties": 1},
    OBJECT | {"patternProperties": {"^x": INT}, "additionalProperties": False},
    {"anyOf": [INT, STR], "description": "d", "default": 3},
    {"type": "integer", "anyOf": [{"type": "integer", "minimum": 3}, {"const": 0}]},
    {"oneOf": [INT, STR]},
    {"oneOf": [OBJECT | {"properties": {"a": {"const": n}}, "required": ["a"]} for n in (3, 9)]},
    {"$defs": {"i": INT | {"minimum": 3}}, "allOf": [{"$ref": "#/$defs/i"}], "title": "t"},
    {"definitions": {"i": INT | {"minimum": 3}}, "items": {"$ref": "#/definitions/i"}},
    {"$defs": {"a/b%c~d": INT}, "$ref": "#/$defs/a~1b%25c~0d"},
    OBJECT | {"properties": {"a": {"anyOf": [INT]}, "b": {"$ref": "#/properties/a/anyOf/0"}}},
    OBJECT | {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
]
NOT_ENFORCED: list[tuple[str, Any]] = [
    ("type", {"type": "string", "enum": ["a", 1]}),
    ("maxLength", {"enum": ["a", "aaa"], "maxLength": 1}),
    ("minimum", {"minimum": 3}),
    ("pattern", {"pattern": "^a$"}),
    ("required", {"required": ["a"]}),
    ("required", OBJECT | {"properties": A, "required": ["b"]}),
    ("minItems", {"minItems": 2}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": INT}),
    ("contains", {"type": "array", "contains": INT, "minContains": 2}),
    ("maxLength", {"type": "string", "pattern": "^a+$", "maxLength": 2}),
    ("minLength", {"type": ["string", "null"], "pattern": "^a+$", "minLength": 2}),
    ("maxLength", {"type": "string", "format": "email", "maxLength": 2}),
    ("multipleOf", {"type": "number", "multipleOf": 3}),
    ("allOf", {"allOf": [INT | {"minimum": 3}, INT | {"maximum": 5}]}),
    ("minimum", {"type": "integer", "minimum": 3, "allOf": [{"type": "integer"}]}),
    ("minimum", {"$defs": {"i": INT}, "$ref": "#/$defs/i", "minimum": 3}),
    ("properties", OBJECT | {"properties": A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}),
    ("not", {"type": "integer", "not": {"const": 3}}),
    ("if", OBJECT | {"properties": AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("dependentRequired", OBJECT | {"properties": AB, "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", OBJECT | {"properties": AB, "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("oneOf", {"oneOf": [INT, {"type": "number"}]}),
    ("oneOf", {"oneOf": [{"const": 1}, {"enum": [1, 2]}]}),
    ("patternProperties", OBJECT | {"properties": A, "patternProperties": {"^a": INT | {"minimum": 3}}}),
    ("propertyNames", OBJECT | {"propertyNames": {"not": {"const": "a"}}}),
    ("propertyNames", OBJECT | {"propertyNames": {"pattern": "^a+$", "maxLength": 1}}),
]
VALUES: list[Any] = [
    *(0, 1, 3, 7, 10, 12, -1, 1.5, 2.5, True, None, "", "a", "aa", "aaa", "aaaa", "b", "x@y.zz", "2020-01-01"),
    *("2024-02-29", "2026-02-31", "2026-02-28T12:00:00Z", "2026-04-31T12:00:00Z", "2026-04-30T12:00:60Z"),
    *("12:00:00.5+01:00", "12:00:60Z", "1.2.3.4", "01.2.3.4"),
    *([], [1], [1, 1], [1, 2, 3], [3, 4], ["a"], [1, "a"], [1, "a", 2], [[1]]),
    *({}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": "x"}, {"a": 1, "c": 3}, {"c": "s"}),
    *({"x": 1}, {"x": "s"}, {"ab": 1}, {"aa": 1}, {"a": {"a": {}}}, {"a": {"b": 1}}, {"a": 3}, {"a": 9}),
]


def accepted(schema: Any) -> list[Any]:
    constraint = constraint_of(call_json(schema))
    return [value for value in VALUES if allows(constraint, json.dumps(value))]


@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_a_schema_that_passes_is_enforced(schema: Any) -> None:
    assert unenforced(schema) == ""
    values = accepted(schema)
    assert values
    valid = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert [value for value in values if not valid.is_valid(value)] == []


@pytest.mark.parametrize(("keyword", "schema"), NOT_ENFORCED, ids=json.dumps)
def test_a_keyword_that_xgrammar_ignores_is_named_wherever_it_is(keyword: str, schema: Any) -> None:
    valid = jsonschema_rs.validator_for(schema)
    assert [value for value in accepted(schema) if not valid.is_valid(value)]  # xgrammar does not enforce it
    within = {"$defs": {"one": schema}, "type": "array", "items": {"anyOf": [{"$ref": "#/$defs/one"}]}}
    for whole in (schema, within) if "$defs" not in schema else (schema,):
        assert f"'{keyword}'" in unenforced(whole)
    tools = [{"name": "f", "parameters": OBJECT | {"properties": {"p": schema}, **schema.get("$defs", {})}}]
    tools[0]["parameters"]["$defs"] = schema.get("$defs", {})
    for name in ("hermes", "qwen3_xml", "glm45", "lfm2", "harmony", "mistral"):
        with pytest.raises(InvalidRequest, match=keyword) as refused:
            get_parser(name).call_constraint(tools, forced="f", is_parallel=False)
        assert refused.value.param == "tools"


def chain(length: int) -> dict[str, Any]:
    links = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length - 1)}
    return {"$defs": {**links, f"d{length - 1}": INT}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (chain(MAX_REFERENCES), ""),
        (chain(MAX_REFERENCES + 1), "chain of more than"),
        (chain(3000), "chain of more than"),
        ({"$ref": "#"}, "'#' is in a cycle"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, INT]}}}, "'#/$defs/a' is in a cycle"),
        (OBJECT | {"properties": {"p": {"$ref": "#/$defs/gone"}}}, "'#/$defs/gone' has no target"),
        ({"$ref": "#/enum/0", "enum": [1]}, "does not point to a schema"),
        ({"$ref": "other.json"}, "does not point into the same schema"),
    ],
)
def test_a_reference_that_cannot_be_followed_has_a_clear_reason(schema: Any, reason: str) -> None:
    assert reason in unenforced(schema) if reason else unenforced(schema) == ""
    for name in ("hermes", "qwen3_xml"):  # a schema never makes parsing of a call fail
        tools = [{"name": "f", "parameters": OBJECT | schema | {"properties": {"p": schema}}}]
        text = {
            "hermes": '<tool_call>\n{"name": "f", "arguments": {"p": 7}}\n</tool_call>',
            "qwen3_xml": "<function=f>\n<parameter=p>\n7\n</parameter>\n</function>",
        }
        assert [call.status for call in parse(name, text[name], tools).calls] == [ToolCallStatus.OK]


DEFINITIONS = {
    "Color": {"type": "string", "enum": ["red", "7"]},
    "Chain": {"$ref": "#/$defs/Color"},
    "a/b%c~d": STR,
    "Int": INT,
}


@pytest.mark.parametrize("name", ["qwen3_xml", "glm45"])
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (
            {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
            {"red": "red", "7": "7", "null": None, "x": "x"},
        ),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "description": "d"}, {"red": "red", "7": "7"}),
        ({"$ref": "#/definitions/Color"}, {"red": "red", "7": "7"}),
        ({"$ref": "#/$defs/Chain"}, {"red": "red", "7": "7"}),
        ({"$ref": "#/$defs/a~1b%25c~0d"}, {"7": "7", "null": "null"}),
        ({"$ref": "#/properties/q/anyOf/0"}, {"7": 7}),
        ({"oneOf": [{"$ref": "#/$defs/Int"}, {"type": "null"}]}, {"7": 7, "null": None, "None": None}),
        ({"const": "7"}, {"7": "7"}),
        ({"const": 7}, {"7": 7}),
        ({"enum": ["7", 8, None]}, {"7": "7", "8": 8, "null": None}),
        ({"anyOf": [{"enum": ["red"]}, INT]}, {"red": "red", "7": 7}),
        ({"type": ["string", "null"]}, {"7": "7", "null": None}),
        ({"type": ["integer", "boolean"]}, {"7": 7, "true": True}),
        ({"type": "string", "nullable": True}, {"7": "7", "null": None}),
        ({"type": "array", "items": {"$ref": "#/$defs/Color"}}, {'["7"]': ["7"]}),
    ],
    ids=json.dumps,
)
def test_a_text_value_is_read_by_what_its_schema_allows(name: str, schema: Any, values: dict[str, Any]) -> None:
    shared = {"$defs": DEFINITIONS, "definitions": {"Color": DEFINITIONS["Color"]}}
    ways = [
        OBJECT | {"properties": {"p": schema, "q": {"anyOf": [INT]}}, **shared},
        {"$ref": "#/$defs/Args", **shared, "properties": {"q": {"anyOf": [INT]}}},
        OBJECT | {"patternProperties": {"^p": schema, "^n": STR}, "properties": {"q": {"anyOf": [INT]}}, **shared},
        OBJECT | {"additionalProperties": schema, "properties": {"q": {"anyOf": [INT]}}, **shared},
    ]
    ways[1]["$defs"] = DEFINITIONS | {"Args": OBJECT | {"properties": {"p": schema}}}
    for parameters in ways:
        for written, value in values.items():
            text = {
                "qwen3_xml": f"<function=f>\n<parameter=p>\n{written}\n</parameter>\n</function>",
                "glm45": f"<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
            }
            (call,) = parse(name, text[name], [{"name": "f", "parameters": parameters}]).calls
            assert call.error is None
            assert call.arguments == {"p": value}
            assert type(call.arguments["p"]) is type(value)


@pytest.mark.parametrize("name", ["qwen3_xml", "glm45", "lfm2", "hermes", "harmony"])
def test_a_forced_call_fits_its_schema(name: str) -> None:
    kinds: dict[str, Any] = {
        "color": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
        "either": {"anyOf": [{"enum": ["a"]}, {"type": "integer", "minimum": 3, "maximum": 5}]},
        "short": {"type": ["string", "null"], "maxLength": 3},
        "exact": {"type": "string", "pattern": "^[ab]{2,3}$"},
        "const": {"const": "7"},
        "mixed": {"enum": ["x", 2, None]},
        "long": {"type": "string", "minLength": 2, "maxLength": 5},
    }
    parameters = OBJECT | {
        "properties": kinds,
        "required": list(kinds),
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }
    tools = [{"name": "f", "parameters": {"$ref": "#/$defs/Args", "$defs": {"Args": parameters, **DEFINITIONS}}}]
    constraint = get_parser(name).call_constraint(tools, forced="f", is_parallel=False)
    for seed in range(20):
        text = walk(constraint, seed)
        (call,) = get_parser(name).parse(DecodedText(text, tuple(range(1, len(text) + 1))), tools, 0).calls
        assert call.error is None, text
        jsonschema_rs.validate(parameters, call.arguments)


def test_a_rule_that_single_parameters_cannot_be_held_to_is_refused_by_name() -> None:
    cases = {
        "minProperties": OBJECT | {"properties": AB, "minProperties": 1},
        "anyOf": {"anyOf": [OBJECT | {"properties": A}, OBJECT | {"properties": AB}]},
        "uri": OBJECT | {"properties": {"p": {"type": "string", "format": "uri"}}},
    }
    for parameters in cases.values():
        get_parser("hermes").call_constraint(
            [{"name": "f", "parameters": parameters}], forced="f", is_parallel=False
        )
    for keyword, parameters in cases.items():
        with pytest.raises(InvalidRequest, match=keyword if keyword != "anyOf" else "several"):
            get_parser("qwen3_xml").call_constraint(
                [{"name": "f", "parameters": parameters}], forced="f", is_parallel=False
            )


@pytest.mark.parametrize(
    "schema",
    [{}, {"anyOf": [STR, {"type": "null"}]}, {"allOf": [STR]}, {"$defs": {"s": STR}, "$ref": "#/$defs/s"}],
    ids=json.dumps,
)
def test_the_format_of_a_string_without_a_type_of_its_own_is_refused_by_name(schema: Any) -> None:
    assert unenforced(schema | {"format": "date"}).startswith("'format' ")
    assert "aaaa" in accepted(schema | {"format": "date"})  # xgrammar does not enforce it
    assert unenforced({**INT, "format": "int64"}) == unenforced({"anyOf": [INT], "format": "int64"}) == ""


def test_a_date_that_passes_is_a_day_of_the_calendar() -> None:
    pattern = bundled({"type": "string", "format": "date"}, None)["pattern"]
    for year in (1, 1900, 2000, 2023, 2024, 2096, 2100):
        days = {
            str(datetime.date(year, 1, 1) + datetime.timedelta(day)) for day in range(365 + calendar.isleap(year))
        }
        texts = {f"{year:04}-{month:02}-{day:02}" for month in range(14) for day in range(33)}
        assert {text for text in texts if re.search(pattern, text)} == days


def test_schemas_of_one_key_that_all_apply_narrow_its_type() -> None:
    parts: list[Any] = [OBJECT | {"properties": {"p": STR}}, {"properties": {"p": {"description": "d"}}}]
    both: list[Any] = [
        {"allOf": parts},
        {**parts[1], "allOf": parts[:1]},
        {**parts[1], "$ref": "#/$defs/s", "$defs": {"s": parts[0]}},
    ]
    for parameters in (*both, {"allOf": [{"allOf": parts[:1]}, parts[1]]}):
        assert allowed_types(property_schema(parameters, "p"), parameters) == {"string"}
    either: dict[str, Any] = {"properties": {"p": {"type": ["string", "integer", "null"]}}}
    branches = [OBJECT | {"properties": {"p": one}} for one in (STR, INT)]
    parameters = either | {"anyOf": branches}
    assert allowed_types(property_schema(parameters, "p"), parameters) == {"string", "integer"}


@pytest.mark.parametrize("name", ["qwen3_xml", "glm45", "lfm2"])
def test_a_key_that_the_parser_would_not_read_is_refused_by_name(name: str) -> None:
    def forced(parser: str, key: str) -> None:
        tool = {"name": "f", "parameters": OBJECT | {"properties": {key: INT}, "required": [key]}}
        get_parser(parser).call_constraint([tool], forced="f", is_parallel=False)

    forced(name, "a.b-c")
    for key in ("", "a<b", "a\nb", " a "):
        forced("hermes", key)
        with pytest.raises(InvalidRequest, match="a parameter named"):
            forced(name, key)


def test_a_schema_whose_rules_are_taken_off_keeps_its_keys_and_types() -> None:
    for _, schema in NOT_ENFORCED:
        parameters = OBJECT | {"properties": {"p": schema}, "$defs": schema.get("$defs", {})}
        assert unenforced(loosened(parameters)) == ""
    parameters = OBJECT | {"properties": {"p": STR | {"pattern": "(?=a)b"}, "q": {"$ref": "#/$defs/Int"}}}
    assert loosened(parameters | {"$defs": DEFINITIONS})["properties"] == {
        "p": {"type": ["string"]},
        "q": {"type": ["integer"]},
    }
