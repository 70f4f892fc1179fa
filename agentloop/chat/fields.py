"""Field types of the dialects' bodies, body validation, and limits on JSON schemas.

A body model lists every field of its dialect: used, ignored because it has no effect here (`Ignored`), or refused
because it would change the answer (`Refused`, `refused`). An unlisted field or `type` is an error in a request; in
a history an unlisted field is another service's metadata and ignored (`Echo`). Bodies are strict, as in
`api/requests.py`: no conversion between strings, numbers and booleans; null means absent. Union members are
selected by a tag, so that errors describe the right member. Tags begin with `~`, unlike field names; `checked`
removes them from the field names in errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
)
from pydantic import ValidationInfo as Info
from pydantic_core import ErrorDetails, PydanticCustomError, from_json, to_json

from agentloop.api.requests import MAX_STOP_CHARS, Body, Json, invalid_request, untagged
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.parsers.json_schema import check_references
from agentloop.types import JSON

MAX_SCHEMA_BYTES = 1 << 18
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN_CHARS = 512


def check_schema(schema: Mapping[str, JSON]) -> None:
    """Check a client's JSON Schema against limits before it is compiled to a grammar. Takes linear time.

    Raises ValueError if the schema is too large or too deep, has a pattern that is too long, or has a `$ref` that
    is remote, has no target, or is in a cycle or a chain that is too long. The engine may still fail to compile it.
    """
    try:
        num_bytes = len(orjson.dumps(schema))
    except TypeError as error:
        raise ValueError(f"the schema is not JSON of 64-bit integers: {error}") from error
    if num_bytes > MAX_SCHEMA_BYTES:
        raise ValueError(f"the schema has {num_bytes} bytes, more than the limit of {MAX_SCHEMA_BYTES}")
    has_references = False
    level, depth = [schema], 0
    while level:
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                has_references = has_references or "$ref" in value
                pattern = value.get("pattern")
                if isinstance(pattern, str) and len(pattern) > MAX_PATTERN_CHARS:
                    raise ValueError(
                        f"a pattern has {len(pattern)} characters, more than the limit of {MAX_PATTERN_CHARS}"
                    )
                below.extend(item for item in value.values() if isinstance(item, dict | list))
            else:
                below.extend(item for item in value if isinstance(item, dict | list))
        level, depth = below, depth + 1
    if has_references:
        check_references(schema)


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    check_schema(schema)
    return schema


Schema = AfterValidator(_checked)
"""Annotates a field with a JSON Schema."""


B = TypeVar("B", bound=BaseModel)
L = TypeVar("L")

MAX_CHAT_CONTENT_CHARS = 1 << 22
MAX_PARTS = 1024
MAX_CHAT_TOOLS = 512
MAX_DESCRIPTION_CHARS = 1 << 16
MAX_MODEL_CHARS = 256
MAX_TOOL_NAME_CHARS = 128

_REQUIRED: Final = {
    "json_schema": "a `name` and a `schema`; for any JSON object use the type 'json_object'",
    "call_id": "the `call_id` of the function call that this output belongs to",
    "tool_call_id": "the `id` of the tool call that this message belongs to",
    "tool_use_id": "the `id` of the tool_use block that this result belongs to",
}
"""Descriptions of required fields, for errors."""

UNSUPPORTED: Final = "unsupported"
"""The pydantic error type that `checked` converts to an UnsupportedParameter."""

Text = Annotated[str, Field(max_length=MAX_CHAT_CONTENT_CHARS)]
ShortText = Annotated[str, Field(max_length=1024)]
Model = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
Description = Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)]
ToolName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.:/\-]{{1,{MAX_TOOL_NAME_CHARS}}}$")]
CalledName = Annotated[str, Field(max_length=256)]  # may be empty in a malformed call
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
SchemaObject: TypeAlias = Annotated[dict[str, JsonValue], Schema]
Ignored: TypeAlias = Json | None
"""The type of a field that has an effect only in the dialect's original service."""


def refused(unless: object = None, hint: str = "") -> AfterValidator:
    """Annotate a field that is refused unless its value is null, false, empty, or `unless`."""

    def check(value: JsonValue, info: Info) -> None:
        is_nothing = value is None or value is False or value in ("", [], {})
        if not is_nothing and not (type(value) is type(unless) and value == unless):
            raise unsupported(f"`{info.field_name}` is not supported{hint}")

    return AfterValidator(check)


def _as_text(value: Any) -> Any:
    if value is None:
        return ""
    return to_json(value).decode() if isinstance(value, dict) else value


Arguments = Annotated[Text, BeforeValidator(_as_text)]
"""The type of a call's arguments in a history: a JSON object or text. Text is not validated."""


def _text_or_none(value: Any) -> Any:
    return value if isinstance(value, str) else None


EchoedText = Annotated[Text | None, BeforeValidator(_text_or_none)]
"""The type of reasoning and ids in a history. A value that is not a string (another service's metadata) is None."""

Refused: TypeAlias = Annotated[Json, refused()]
"""The type of a field that would change the answer. Only null, false and empty values are accepted."""


def unsupported(message: str) -> PydanticCustomError:
    """Return the error that a validator raises for an unsupported field; `checked` converts it."""
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})


# Unions


def by_shape(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~list"


def type_tag(value: Any) -> str | None:
    """Return the union tag of a value with a `type`, or None."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if isinstance(kind, str) and kind.startswith(_HOSTED_SEARCH):
        return "~search"
    return f"~{kind}" if isinstance(kind, str) else None


Listed = Annotated[list[L], Field(max_length=MAX_PARTS)]
TextOr = Annotated[Annotated[Text, Tag("~text")] | Annotated[L, Tag("~list")], Discriminator(by_shape)]
"""The type of a field that holds a string or another type, usually a list of parts."""


# Models shared by several dialects


class Echo(Body):
    """Base of every part of a history. Undeclared fields (ids, parsed values, cache breakpoints) are ignored.

    Every field with content must be declared, so that it is rendered or refused.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class TextPart(Echo):
    """A text part. Cache breakpoints on it have no effect: prefixes are always cached."""

    type: Literal["text"]
    text: Text


class RefusalPart(Echo):
    """A refusal in the history."""

    type: Literal["refusal"]
    refusal: Text


_HOSTED_SEARCH: Final = "web_search"


class HostedSearch(Echo):
    """A web search hosted by the API provider, of any version. It is not shown to the policy."""

    type: Annotated[str, Field(pattern=f"^{_HOSTED_SEARCH}")]


def _not_only_searches(tools: list[L]) -> list[L]:
    # Next to other tools, a search that is never called does no harm. A request with nothing but searches needs
    # them.
    if tools and all(isinstance(tool, HostedSearch) for tool in tools):
        raise UnsupportedParameter(
            "hosted web search is not supported: define tools as functions that the client runs",
            param="tools.0.type",
        )
    return tools


HostedTools = Annotated[
    list[L], Field(max_length=MAX_CHAT_TOOLS, fail_fast=True), AfterValidator(_not_only_searches)
]
"""The type of tools that may include hosted web searches."""


# Parsing


def read_body(data: bytes, kind: type[B]) -> B:
    """Parse a body of type `kind`. Raises InvalidRequest with at most ten problems, and UnsupportedParameter.

    The JSON parser rejects lone surrogates, nesting above 200 levels and integers above 4,300 digits.
    """
    return checked(read_json(data), kind)


def read_json(data: bytes) -> Any:
    """Parse JSON. Raises InvalidRequest."""
    try:
        return from_json(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def checked(value: Any, kind: type[B]) -> B:
    """Validate a JSON value as a body. Raises the errors of `read_body`; an unsupported field takes precedence."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        for problem in problems:
            _raise_unsupported(problem)
        raise invalid_request([(untagged(problem["loc"]), _message(problem)) for problem in problems]) from error


def _message(problem: ErrorDetails) -> str:
    """Return the description of a problem in terms of the request instead of the pydantic models."""
    kind, value = problem["type"], problem["input"]
    if kind == "missing":
        hint = _REQUIRED.get(str(problem["loc"][-1]))
        return "this field is required" + (f": {hint}" if hint else "")
    if kind == "extra_forbidden":
        return "this field is unknown: remove it"
    if kind == "union_tag_not_found":
        return f"expected an object with a `type`, received {_shortened(value)}"
    if kind == "model_type":
        return f"expected an object, received {_shortened(value)}"
    return problem["msg"] if value is not None else f"{problem['msg']}, received null"


def _shortened(value: Any) -> str:
    return to_json(value, inf_nan_mode="constants").decode(errors="replace")[:64]


def _raise_unsupported(problem: ErrorDetails) -> None:
    path, message = untagged(problem["loc"]), problem["msg"]
    kind, context = None, problem.get("ctx", {})
    if problem["type"] == "union_tag_invalid":
        path, kind = (*path, "type"), problem["input"].get("type")
    elif problem["type"] == "literal_error" and path[-1] == "type":
        kind = problem["input"]
    if isinstance(kind, str):
        supported = str(context.get("expected_tags") or context["expected"])
        supported = supported.replace("~search", _HOSTED_SEARCH).replace("~", "")
        message = f"the type {kind[:64]!r} is not supported; supported here: {supported}"
        if path[0] == "tools":
            own = "custom" if "'custom'" in supported else "function"
            message += f". Define a tool that your client runs as a {own!r} tool with a schema of its input"
    elif problem["type"] != UNSUPPORTED:
        return
    raise UnsupportedParameter(message, param=".".join(map(str, path)))
