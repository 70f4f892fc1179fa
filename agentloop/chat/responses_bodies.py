"""The body model of `POST /v1/responses`. Every list is bounded.

Input items may be copies of earlier answers of this or another service, so their undeclared fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator

from agentloop.api.requests import Body, ImagePart, Json
from agentloop.chat.fields import (
    MAX_CHAT_TOOLS,
    MAX_TOOL_NAME_CHARS,
    Arguments,
    CalledName,
    CallId,
    Description,
    Echo,
    EchoedText,
    HostedSearch,
    HostedTools,
    Ignored,
    Listed,
    Model,
    RefusalPart,
    SchemaObject,
    ShortText,
    Text,
    TextOr,
    ToolName,
    refused,
    type_tag,
    unsupported,
)
from agentloop.chat.openai_bodies import MAX_MESSAGE_CALLS, StreamOptions
from agentloop.chat.sampling import Effort, MaxTokens, SampledBody, TemplateBody
from agentloop.values.checks import MAX_TOP_LOGPROBS

MAX_ITEMS = 16_384

_TEXTS = ("~input_text", "~output_text", "~text", "~summary_text", "~reasoning_text")
_LOGPROBS = "message.output_text.logprobs"  # a value in `include`


class ResponsesTextPart(Echo):
    """A text part. Files and audio are not supported."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text


def _part_tag(value: Any) -> str | None:
    kind = type_tag(value)
    return "~text" if kind in _TEXTS else kind


_IMAGE_SCHEMA = WithJsonSchema(
    {
        "type": "object",
        "properties": {"type": {"const": "input_image"}, "image_url": {"type": "string"}},
        "required": ["type", "image_url"],
    }
)


def _image_part(value: Any) -> Any:
    """Convert an `input_image` to the form of a chat completion."""
    if not isinstance(value, dict):
        return value
    if value.get("image_url") is None or value.get("file_id") is not None:
        raise unsupported(
            "an image must be a data URL in `image_url`; uploaded files (`file_id`) are not supported"
        )
    return {"type": "image_url", "image_url": {"url": value["image_url"]}}


Parts = Listed[
    Annotated[
        Annotated[ResponsesTextPart, Tag("~text")]
        | Annotated[RefusalPart, Tag("~refusal")]
        | Annotated[ImagePart, BeforeValidator(_image_part), _IMAGE_SCHEMA, Tag("~input_image")],
        Discriminator(_part_tag),
    ]
]
Content: TypeAlias = TextOr[Parts]


class MessageItem(Echo):
    """A message item; the short form without `type` is accepted too."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content | None = None
    id: EchoedText = None


class CallItem(Echo):
    """An assistant's tool call."""

    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    namespace: CalledName | None = None
    arguments: Arguments = ""
    id: EchoedText = None


class OutputItem(Echo):
    """A tool result."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content | None = None


class ReasoningItem(Echo):
    """An assistant's reasoning. Reasoning encrypted by another service is ignored."""

    type: Literal["reasoning"]
    id: EchoedText = None
    summary: Parts | None = None
    content: Parts | None = None


class ItemReference(Echo):
    """A reference by id to an item of an earlier response of this service."""

    type: Literal["item_reference"] | None = None
    id: ShortText


def _item_tag(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("type") is not None:
        return type_tag(value)
    # The short form of a message and the reference may both omit `type`.
    return "~item_reference" if "id" in value and not {"role", "content"} & value.keys() else "~message"


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[OutputItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[ItemReference, Tag("~item_reference")],
    Discriminator(_item_tag),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class ResponsesFunctionTool(Body):
    """A function. Its schema is enforced for forced calls; in other answers `strict` is false.

    `defer_loading` has no effect: all tools are shown to the policy.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: SchemaObject | None = None
    strict: bool | None = None
    defer_loading: Ignored = None
    output_schema: Ignored = None
    allowed_callers: Ignored = None
    async_: Ignored = Field(default=None, alias="async")


class NamespaceTool(Body):
    """A group of functions. The policy is shown each function as `{namespace}.{name}`."""

    type: Literal["namespace"]
    name: ToolName
    description: Description | None = None
    tools: list[ResponsesFunctionTool] = Field(min_length=1, max_length=MAX_CHAT_TOOLS)

    @model_validator(mode="after")
    def _has_short_names(self) -> Self:
        if len(self.name) + 1 + max(len(tool.name) for tool in self.tools) > MAX_TOOL_NAME_CHARS:
            raise ValueError(
                f"'{{namespace}}.{{name}}' exceeds {MAX_TOOL_NAME_CHARS} characters for a tool of this namespace"
            )
        return self


Tool: TypeAlias = Annotated[
    Annotated[ResponsesFunctionTool, Tag("~function")]
    | Annotated[NamespaceTool, Tag("~namespace")]
    | Annotated[HostedSearch, Tag("~search")],
    Discriminator(type_tag),
]


class ResponsesNamedTool(Body):
    """The tool that must be called, or an entry of `allowed_tools`."""

    type: Literal["function"]
    name: ToolName
    namespace: ToolName | None = None


class ResponsesAllowedTools(Body):
    """Restricts the tools that may be called. Other tools are not shown to the policy."""

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
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: Description | None = None
    schema_: SchemaObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """The format of the answer's text. `verbosity` has no effect."""

    format: ResponsesTextFormat | None = None
    verbosity: Ignored = None


class ReasoningConfig(Body):
    """Options of reasoning. `effort` is passed to the chat template if the template reads it."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class ResponsesBody(SampledBody, TemplateBody):
    """The body of `POST /v1/responses`."""

    model: Model
    input: TextOr[Items]
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    tools: HostedTools[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, ShortText | None], Field(max_length=64)] | None = None
    include: Annotated[list[ShortText], Field(max_length=64)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    previous_response_id: ShortText | None = None
    max_tool_calls: Annotated[int, Field(ge=0, le=MAX_MESSAGE_CALLS)] | None = None  # limits OpenAI's hosted tools

    reasoning: ReasoningConfig | None = None
    user: ShortText | None = None
    strict_history: bool | None = None  # not in OpenAI's API
    stop_in_reasoning: bool | None = None  # not in OpenAI's API; no effect, because this API has no stop strings

    store: bool | None = None  # no effect: every response is kept as long as its session
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    moderation: Ignored = None
    client_metadata: Ignored = None
    access_programs: Ignored = None
    image: Ignored = None  # options of generated images, which are not supported

    background: Annotated[Json, refused(hint=": wait for the answer, or read it with `stream`")] = None
    background_options: Annotated[Json, refused(hint=": wait for the answer, or read it with `stream`")] = None
    context_management: Annotated[Json, refused(hint=": shorten `input` yourself")] = None
    conversation: Annotated[
        Json, refused(hint=": use `previous_response_id`, or send the whole history as `input`")
    ] = None
    prompt: Annotated[Json, refused(hint=": send its text as `instructions` and `input`")] = None
    truncation: Annotated[Json, refused(unless="disabled", hint=": shorten `input` yourself")] = None

    @property
    def shows_logprobs(self) -> bool:
        """True if the answer's texts include the logprobs of their tokens."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
