"""The parts of a chat request: messages, tools, choices among them, and formats of the answer.

Unions are told apart by one field or by shape, so an error is about the one meant. Their tags begin with `~`, which
no field does: `bodies.read_body` leaves them out of what it tells a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, InstanceOf, JsonValue, Tag
from pydantic.json_schema import SkipJsonSchema

from agentloop.api import Body, Json
from agentloop.chat.body_cache import KnownMessage
from agentloop.chat.schemas import Schema

MAX_CONTENT_CHARS = 1 << 22
MAX_PARTS = 1024
MAX_TOOLS = 512
MAX_CALLS = 512  # of one message
MAX_DESCRIPTION_CHARS = 1 << 16

Text = Annotated[str, Field(max_length=MAX_CONTENT_CHARS)]
ShortText = Annotated[str, Field(max_length=1024)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/\-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


def by_shape(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~list"


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"~{kind}" if isinstance(kind, str) else None


def _role(value: Any) -> str | None:
    if isinstance(value, KnownMessage):
        return "~known"
    role = value.get("role") if isinstance(value, Mapping) else getattr(value, "role", None)
    return f"~{role}" if isinstance(role, str) else None


# --- messages ---------------------------------------------------------------------------------------------


class TextPart(Body):
    """Text. `cache_control` means nothing here: prefixes are always cached."""

    type: Literal["text"]
    text: Text
    cache_control: Json = None


class RefusalPart(Body):
    """An earlier refusal, in the history of another model."""

    type: Literal["refusal"]
    refusal: Text


Part = Annotated[Annotated[TextPart, Tag("~text")] | Annotated[RefusalPart, Tag("~refusal")], Discriminator(_kind)]
Content = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[list[TextPart], Field(max_length=MAX_PARTS), Tag("~list")],
    Discriminator(by_shape),
]
AssistantContent = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("~list")],
    Discriminator(by_shape),
]


class SystemMessage(Body):
    """Instructions; `developer` is another name of `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: ShortText | None = None


class UserMessage(Body):
    """What a person, or another program, says."""

    role: Literal["user"]
    content: Content
    name: ShortText | None = None


class CalledFunction(Body):
    """A call as it was made; `arguments` are JSON as text, kept as they are where they are none."""

    name: Annotated[str, Field(max_length=256)]
    arguments: Text


class CallBody(Body):
    """One tool call of an assistant's message."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams have it, and some clients echo it


class AssistantMessage(Body):
    """An earlier answer, echoed. Reasoning may come back under either of its two names."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    tool_calls: list[CallBody] | None = Field(default=None, max_length=MAX_CALLS)
    name: ShortText | None = None
    refusal: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    annotations: Json = None
    provider_specific_fields: Json = None
    audio: None = None
    function_call: None = None


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: CallId
    name: ShortText | None = None


Message = Annotated[
    Annotated[SystemMessage, Tag("~system")]
    | Annotated[SystemMessage, Tag("~developer")]
    | Annotated[UserMessage, Tag("~user")]
    | Annotated[AssistantMessage, Tag("~assistant")]
    | Annotated[ToolMessage, Tag("~tool")]
    | SkipJsonSchema[Annotated[InstanceOf[KnownMessage], Tag("~known")]],
    Discriminator(
        _role,
        custom_error_type="unknown_role",
        custom_error_message="a message has one of the roles system, developer, user, assistant and tool",
    ),
]


AnyPart: TypeAlias = TextPart | RefusalPart
NewMessage: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage
AnyMessage: TypeAlias = NewMessage | KnownMessage


# --- tools ------------------------------------------------------------------------------------------------


class FunctionBody(Body):
    """A function that the policy may call. `strict` changes nothing: a forced call always fits its schema."""

    name: ToolName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    parameters: Annotated[dict[str, JsonValue], Schema] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool definition."""

    type: Literal["function"]
    function: FunctionBody


class FunctionName(Body):
    """Which function is meant."""

    name: ToolName


class NamedTool(Body):
    """Exactly this tool is to be called; also an entry of `allowed_tools`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The tools of this turn: the others are not shown to the policy."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice(value: Any) -> str | None:
    return "~text" if isinstance(value, str) else _kind(value)


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~text")]
    | Annotated[NamedTool, Tag("~function")]
    | Annotated[AllowedToolsChoice, Tag("~allowed_tools")],
    Discriminator(
        _choice,
        custom_error_type="unknown_choice",
        custom_error_message="a tool choice is none, auto, required, a function or allowed_tools",
    ),
]


# --- response formats -------------------------------------------------------------------------------------


class TextFormat(Body):
    """Anything."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """One JSON object."""

    type: Literal["json_object"]


class JsonSchemaBody(Body):
    """A schema; the answer fits it whether `strict` or not. The wire's name of `schema_` is `schema`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    schema_: Annotated[dict[str, JsonValue], Schema] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """One JSON value that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaBody


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("~text")]
    | Annotated[JsonObjectFormat, Tag("~json_object")]
    | Annotated[JsonSchemaFormat, Tag("~json_schema")],
    Discriminator(
        _kind,
        custom_error_type="unknown_format",
        custom_error_message="a response format is text, json_object or json_schema",
    ),
]
