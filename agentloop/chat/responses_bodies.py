"""The body of `POST /v1/responses`, strict: a field that nobody knows is refused, and every list has a bound.

What only concerns OpenAI's own service is declared and ignored; what would change the answer and is not possible
here is declared too, and refused by `responses.py` by its name. Items of the input are echoes of earlier answers,
of this service or another: their further fields say nothing that the prompt could show, and are let through.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator

from agentloop.api.requests import Body, Json
from agentloop.chat.dialect import (
    is_hosted_search,
    refuse_hosted,
    refuse_type,
    refuse_types,
    type_tag,
)
from agentloop.chat.openai_bodies import (
    MAX_CHAT_TOOLS,
    MAX_MESSAGE_CALLS,
    MAX_MODEL_CHARS,
    MAX_PARTS,
    MAX_TOOL_NAME_CHARS,
    CallId,
    Description,
    Echo,
    HostedSearch,
    ShortText,
    StreamOptions,
    Text,
    ToolName,
    by_shape,
)
from agentloop.chat.sampling import Effort, MaxTokens, SampledBody, TemplateBody, Whole
from agentloop.chat.schemas import Schema
from agentloop.checks import MAX_TOP_LOGPROBS

MAX_ITEMS = 16_384

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class ResponsesTextPart(Echo):
    """A part of a content list; the others (images, files, audio) cannot be shown to the policy."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text


class ResponsesRefusalPart(Echo):
    """An assistant's refusal, instead of an answer."""

    type: Literal["refusal"]
    refusal: Text


def _part_tag(value: Any) -> str | None:
    kind = type_tag(value)
    return "~text" if kind is not None and kind[1:] in _TEXTS else kind


Part: TypeAlias = Annotated[
    Annotated[ResponsesTextPart, Tag("~text")] | Annotated[ResponsesRefusalPart, Tag("~refusal")],
    Discriminator(_part_tag),
]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS)]
Content: TypeAlias = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[Parts, Tag("~list")], Discriminator(by_shape)
]


class MessageItem(Echo):
    """A message of either form, the easy one without a `type` too."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ShortText | None = None


class CallItem(Echo):
    """A call that an assistant made."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(max_length=256)]  # of a call that could not be read it may be empty
    namespace: Annotated[str, Field(max_length=256)] | None = None
    arguments: Text
    id: ShortText | None = None


class OutputItem(Echo):
    """The answer of a tool."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content


class ReasoningItem(Echo):
    """The thoughts of an assistant. Encrypted content is another service's."""

    type: Literal["reasoning"]
    id: ShortText | None = None
    summary: Parts = Field(default_factory=list)
    content: Parts | None = None


def _item_tag(value: Any) -> str | None:
    is_easy = isinstance(value, dict) and value.get("type") is None
    return "~message" if is_easy else type_tag(value)


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[OutputItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    Discriminator(_item_tag),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
Input: TypeAlias = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[Items, Tag("~list")], Discriminator(by_shape)
]


class ResponsesFunctionTool(Body):
    """A function. `strict` changes nothing: a forced call always fits its schema. None is loaded later."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: Annotated[dict[str, JsonValue], Schema] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: Json | None = None
    allowed_callers: Json | None = None
    async_: bool | None = Field(default=None, alias="async")


class NamespaceTool(Body):
    """Functions under a common name: the policy sees each as `{namespace}.{name}`."""

    type: Literal["namespace"]
    name: ToolName
    description: Description | None = None
    tools: list[ResponsesFunctionTool] = Field(min_length=1, max_length=MAX_CHAT_TOOLS)

    @model_validator(mode="after")
    def _has_short_names(self) -> Self:
        if len(self.name) + 1 + max(len(tool.name) for tool in self.tools) > MAX_TOOL_NAME_CHARS:
            raise ValueError(f"the names of a namespace and its tool have at most {MAX_TOOL_NAME_CHARS} characters")
        return self


def _tool_tag(value: Any) -> str | None:
    kind = type_tag(value)
    return "~search" if kind is not None and is_hosted_search(kind[1:]) else kind


Tool: TypeAlias = Annotated[
    Annotated[ResponsesFunctionTool, Tag("~function")]
    | Annotated[NamespaceTool, Tag("~namespace")]
    | Annotated[HostedSearch, Tag("~search")],
    Discriminator(_tool_tag),
]


class ResponsesNamedTool(Body):
    """The tool that must be called; also an entry of `allowed_tools`."""

    type: Literal["function"]
    name: ToolName
    namespace: ToolName | None = None


class ResponsesAllowedTools(Body):
    """A choice among some of the tools: the others are not shown to the policy."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponsesNamedTool] = Field(min_length=1, max_length=MAX_CHAT_TOOLS)


def _choice_tag(value: Any) -> str | None:
    return "~text" if isinstance(value, str) else type_tag(value)


Choice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("~text")]
    | Annotated[ResponsesNamedTool, Tag("~function")]
    | Annotated[ResponsesAllowedTools, Tag("~allowed_tools")],
    Discriminator(_choice_tag),
]


class ResponsesTextFormat(Body):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: Description | None = None
    schema_: Annotated[dict[str, JsonValue], Schema] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """The answer's text: its form, and a wish."""

    format: ResponsesTextFormat | None = None
    verbosity: ShortText | None = None  # ignored: a wish, not a promise


class ReasoningConfig(Body):
    """Wishes about thinking. `effort` is an argument of the chat template where that reads one."""

    effort: Effort | None = None
    summary: ShortText | None = None
    generate_summary: ShortText | None = None
    context: ShortText | None = None
    mode: ShortText | None = None


class ResponsesBody(SampledBody, TemplateBody):
    """The body of `POST /v1/responses`."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    input: Input
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_CHAT_TOOLS, fail_fast=True)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, ShortText | None], Field(max_length=64)] | None = None
    truncation: ShortText | None = None
    include: Annotated[list[ShortText], Field(max_length=64)] | None = None
    max_tool_calls: Annotated[int, Field(ge=0, le=MAX_MESSAGE_CALLS), Whole] | None = None  # of OpenAI's own tools

    # Ignored: they concern the service that OpenAI runs.
    user: ShortText | None = None
    store: bool | None = None
    service_tier: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: Json | None = None
    moderation: Json | None = None
    client_metadata: Json | None = None
    access_programs: Json | None = None
    image: Json | None = None  # of images that are answered: none here
    reasoning: ReasoningConfig | None = None

    # Refused by name, unless they ask for nothing.
    background: bool | None = None
    context_management: Json | None = None
    conversation: Json | None = None
    previous_response_id: Json | None = None
    prompt: Json | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Whole] | None = None

    strict_history: bool | None = None  # beyond OpenAI

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, value: Any) -> Any:
        if isinstance(value, dict):
            refuse_hosted(value.get("tools"), ("function", "namespace"), "tools")
            for index, tool in enumerate(tools if isinstance(tools := value.get("tools"), list) else ()):
                if isinstance(tool, dict) and tool.get("type") == "namespace":
                    refuse_hosted(tool.get("tools"), ("function",), f"tools.{index}.tools")
            refuse_type(value.get("tool_choice"), ("function", "allowed_tools"), "tool_choice.type")
            items = value.get("input")
            refuse_types(items, _ITEMS, "input")
            for index, item in enumerate(items if isinstance(items, list) else ()):
                content = item.get("content", item.get("output")) if isinstance(item, dict) else None
                refuse_types(content, (*_TEXTS, "refusal"), f"input.{index}.content")
        return value
