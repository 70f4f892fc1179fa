"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, strict, every list bounded.

What only concerns Anthropic's own service is declared and ignored; what would change the answer and is not possible
here is refused by its name. Content blocks are echoes of earlier answers, of this service or another: their further
fields (cache marks, signatures, callers) say nothing that the prompt could show, and are let through.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from agentloop.api.requests import Body, Json
from agentloop.chat.dialect import is_hosted_search, refuse_hosted, refuse_types, type_tag
from agentloop.chat.openai_bodies import (
    MAX_CHAT_TOOLS,
    MAX_MODEL_CHARS,
    MAX_PARTS,
    CallId,
    Description,
    Echo,
    HostedSearch,
    ShortText,
    Stop,
    Text,
    ToolName,
    by_shape,
)
from agentloop.chat.sampling import Effort, MaxTokens, SampledBody, TemplateBody
from agentloop.chat.schemas import Schema

MAX_TURNS = 8192
MAX_STOP_SEQUENCES = 16
MAX_ARGUMENTS = 256

_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class TextBlock(Echo):
    """Text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Echo):
    """The thoughts of an assistant."""

    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(Echo):
    """Thoughts that another service encrypted: ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Echo):
    """A call that an assistant made."""

    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(max_length=256)]  # of a call that could not be read it may be empty
    input: Annotated[dict[str, Json], Field(max_length=MAX_ARGUMENTS)]


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS)]
TextContent: TypeAlias = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[TextBlocks, Tag("~list")], Discriminator(by_shape)
]


class ToolResultBlock(Echo):
    """The answer of a tool. `is_error` is not shown: the content says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextContent | None = None
    is_error: bool | None = None


ContentBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedBlock, Tag("~redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")],
    Discriminator(type_tag),
]
ContentBlocks = Annotated[list[ContentBlock], Field(max_length=MAX_PARTS)]
TurnContent: TypeAlias = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[ContentBlocks, Tag("~list")], Discriminator(by_shape)
]


class HistoryTurn(Echo):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: TurnContent


class CustomTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Description | None = None
    input_schema: Annotated[dict[str, JsonValue], Schema]
    strict: bool | None = None
    cache_control: Json | None = None
    eager_input_streaming: bool | None = None
    input_examples: Json | None = None
    defer_loading: bool | None = None
    allowed_callers: Json | None = None


def _tool_tag(value: Any) -> str:
    return "~search" if is_hosted_search((type_tag(value) or "~")[1:]) else "~custom"


Tool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("~custom")] | Annotated[HostedSearch, Tag("~search")], Discriminator(_tool_tag)
]


class ToolChoiceBody(Body):
    """The choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Schema] = Field(alias="schema")


class OutputConfig(Body):
    """Wishes about the answer. `effort` is an argument of the chat template where that reads one."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class ContextEdit(Echo):
    """One edit of the history that the service is asked to make."""

    type: ShortText


class ContextManagement(Echo):
    """Edits of the history. Those of thoughts are accepted: no thought is part of what history is matched by."""

    edits: list[ContextEdit] | None = Field(default=None, max_length=64)


class ThinkingConfig(Echo):
    """The wish to think, or not to: an argument of the chat template where that reads one."""

    type: ShortText

    @property
    def is_thinking(self) -> bool:
        """False where no thought is wanted."""
        return self.type != "disabled"


class CountTokensBody(TemplateBody):
    """The body of `POST /v1/messages/count_tokens`, and the part of `MessagesBody` that makes the prompt."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    messages: list[HistoryTurn] = Field(min_length=1, max_length=MAX_TURNS, fail_fast=True)
    system: TextContent | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_CHAT_TOOLS, fail_fast=True)
    tool_choice: ToolChoiceBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of `output_config.format`

    thinking: ThinkingConfig | None = None

    # Ignored: they concern the service that Anthropic runs.
    cache_control: Json | None = None
    speed: ShortText | None = None
    user_profile_id: ShortText | None = None
    workspace_id: ShortText | None = None
    betas: Json | None = None
    billing_policy: Json | None = None
    fallbacks: Json | None = None
    fallback_credit_token: Json | None = None

    # Refused by name, unless they ask for nothing.
    compaction: Json | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Json | None = None
    thread: Json | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, value: Any) -> Any:
        if isinstance(value, dict):
            refuse_hosted(value.get("tools"), ("custom",), "tools")
            refuse_types(value.get("system"), ("text",), "system")
            turns = value.get("messages")
            for index, turn in enumerate(turns if isinstance(turns, list) else ()):
                _refuse_blocks(turn, f"messages.{index}.content")
        return value


class MessagesBody(CountTokensBody, SampledBody):
    """The body of `POST /v1/messages`."""

    max_tokens: MaxTokens
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOP_SEQUENCES)] = Field(default_factory=list)

    # Ignored, as above.
    metadata: Json | None = None
    service_tier: ShortText | None = None
    inference_geo: ShortText | None = None
    diagnostics: Json | None = None

    # Refused by name.
    container: Json | None = None

    strict_history: bool | None = None  # beyond Anthropic


def _refuse_blocks(turn: Any, param: str) -> None:
    blocks = turn.get("content") if isinstance(turn, dict) else None
    refuse_types(blocks, _BLOCKS, param)
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            refuse_types(block.get("content"), ("text",), f"{param}.{index}.content")
