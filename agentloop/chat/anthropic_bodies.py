"""The body models of `POST /v1/messages` and `/v1/messages/count_tokens`. Every list is bounded.

Content blocks may be copies of earlier answers of this or another service, so their undeclared fields (cache
breakpoints, signatures, callers) are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from agentloop.api.requests import MAX_PROMPT_TOKENS, Body, ImagePart, Json
from agentloop.chat.fields import (
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
    Refused,
    SchemaObject,
    Stop,
    TextOr,
    TextPart,
    ToolName,
    refused,
    type_tag,
    unsupported,
)
from agentloop.chat.sampling import Effort, MaxTokens, SampledBody, TemplateBody

MAX_TURNS = 8192
MAX_STOP_SEQUENCES = 16
MAX_ARGUMENTS = 256


TextContent = TextOr[Listed[TextPart]]


def _image_part(value: Any) -> Any:
    """Convert an `image` block to the form of a chat completion."""
    if not isinstance(value, dict):
        return value
    source = value.get("source")
    match source if isinstance(source, dict) else {}:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            url = f"data:{media_type};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise unsupported("the `source` of an image must have type 'base64', `media_type` and `data`")
    return {"type": "image_url", "image_url": {"url": url}}


_SOURCE = {
    "type": "object",
    "properties": {"type": {"const": "base64"}, "media_type": {"type": "string"}, "data": {"type": "string"}},
    "required": ["type", "media_type", "data"],
}
_IMAGE_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "image"}, "source": _SOURCE},
    "required": ["type", "source"],
}
ImageBlock = Annotated[ImagePart, BeforeValidator(_image_part), WithJsonSchema(_IMAGE_SCHEMA), Tag("~image")]
ResultContent = TextOr[Listed[Annotated[Annotated[TextPart, Tag("~text")] | ImageBlock, Discriminator(type_tag)]]]


class ThinkingBlock(Echo):
    """An assistant's reasoning. Reasoning encrypted by another service is ignored."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: EchoedText = None


class ToolUseBlock(Echo):
    """An assistant's tool call."""

    type: Literal["tool_use"]
    id: CallId
    name: CalledName
    input: Annotated[dict[str, Json], Field(max_length=MAX_ARGUMENTS)]


class ToolResultBlock(Echo):
    """A tool result. With `is_error`, its text is prefixed with `Error: `."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: ResultContent | None = None
    is_error: bool | None = None


ContentBlock: TypeAlias = Annotated[
    Annotated[TextPart, Tag("~text")]
    | ImageBlock
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[ThinkingBlock, Tag("~redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")],
    Discriminator(type_tag),
]


class HistoryTurn(Echo):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Listed[ContentBlock]]
    output_config: Annotated[Json, refused(hint=" in a message: set it for the whole request")] = None
    clear_at: Annotated[Json, refused(hint=": remove the message yourself")] = None


class CustomTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Description | None = None
    input_schema: SchemaObject
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Annotated[list[dict[str, Json]], Field(max_length=64)] | None = None
    defer_loading: Ignored = None
    allowed_callers: Ignored = None


Tool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("~custom")] | Annotated[HostedSearch, Tag("~search")],
    Discriminator(lambda tool: type_tag(tool) or "~custom"),
]


class ToolChoiceBody(Body):
    """Selects whether and which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    schema_: SchemaObject = Field(alias="schema")


class OutputConfig(Body):
    """Options of the answer. `effort` is passed to the chat template if the template reads it."""

    effort: Effort | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[Json, refused(hint=": limit each answer with `max_tokens`")] = None


class ContextManagement(Echo):
    """Edits of the history. Edits of reasoning are accepted, because history is matched without its reasoning."""

    edits: Annotated[list[dict[str, Json]], Field(max_length=64)] | None = None


def _edits_reasoning_only(value: ContextManagement | None) -> ContextManagement | None:
    edits = (value.edits if value is not None else None) or []
    if any(not str(edit.get("type")).startswith("clear_thinking") for edit in edits):
        raise unsupported("edits of the history other than 'clear_thinking' are not supported: shorten `messages`")
    return value


class ThinkingConfig(Echo):
    """Switch and token budget of reasoning, passed to the chat template if the template reads them."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_PROMPT_TOKENS)] | None = None

    @property
    def is_thinking(self) -> bool:
        """False if reasoning is disabled."""
        return self.type != "disabled"


class CountTokensBody(TemplateBody):
    """The body of `POST /v1/messages/count_tokens`, and the part of `MessagesBody` that determines the prompt."""

    model: Model
    messages: list[HistoryTurn] = Field(min_length=1, max_length=MAX_TURNS, fail_fast=True)
    system: TextContent | None = None
    tools: HostedTools[Tool] | None = None
    tool_choice: ToolChoiceBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of `output_config.format`
    thinking: ThinkingConfig | None = None
    context_management: Annotated[ContextManagement | None, AfterValidator(_edits_reasoning_only)] = None

    cache_control: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    betas: Ignored = None
    billing_policy: Ignored = None
    fallbacks: Ignored = None
    fallback_credit_token: Ignored = None

    compaction: Annotated[Json, refused(hint=": shorten `messages` yourself")] = None
    mcp_servers: Annotated[Json, refused(hint=": connect to them yourself, and define their tools as 'custom'")] = (
        None
    )
    thread: Annotated[Json, refused(hint=": send the whole history as `messages`")] = None


class MessagesBody(CountTokensBody, SampledBody):
    """The body of `POST /v1/messages`."""

    max_tokens: MaxTokens
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOP_SEQUENCES)] = Field(default_factory=list)
    strict_history: bool | None = None  # not in Anthropic's API
    stop_in_reasoning: bool | None = None  # not in Anthropic's API

    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None

    container: Refused = None
