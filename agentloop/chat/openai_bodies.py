"""The body models of chat completions, completions, tokenize and detokenize, with all limits on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, InstanceOf, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from agentloop.api.requests import MAX_PROMPT_TOKENS, MAX_STOPS, Body, ImagePart, ImageUrl, Json, TokenId
from agentloop.chat.body_cache import CachedMessage
from agentloop.chat.fields import (
    MAX_CHAT_CONTENT_CHARS,
    MAX_CHAT_TOOLS,
    UNSUPPORTED,
    Arguments,
    CalledName,
    CallId,
    Description,
    Echo,
    EchoedText,
    Ignored,
    Listed,
    Model,
    RefusalPart,
    Refused,
    SchemaObject,
    ShortText,
    Stop,
    Text,
    TextOr,
    TextPart,
    ToolName,
    by_shape,
    read_json,
    refused,
    type_tag,
)
from agentloop.chat.sampling import Effort, MaxTokens, SampledBody, SamplingFields, TemplateBody
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.values.checks import MAX_BIAS, MAX_CONSTRAINT_CHARS, MAX_LOGIT_BIASES, MAX_PENALTY, MAX_TOP_LOGPROBS

MAX_MESSAGE_CALLS = 512  # tool calls in one message
MAX_CHAT_MESSAGES = 8192
MAX_CHOICES = 128
MAX_PROMPTS = 1024  # prompts of one text completion
MAX_ANSWERS = 512  # texts in `structured_outputs.choice`
MAX_CALL_PRIORITY = (1 << 31) - 1

_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


def _role(value: Any) -> str | None:
    if isinstance(value, CachedMessage):
        return "~cached"
    role = value.get("role") if isinstance(value, Mapping) else getattr(value, "role", None)
    return f"~{role}" if isinstance(role, str) else None


# Messages


class ShownImageUrl(ImageUrl, Echo):
    """The URL of an image in a history."""


class ShownImage(ImagePart, Echo):
    """An image in a history."""

    image_url: ShownImageUrl


_BY_TYPE = Discriminator(
    lambda part: type_tag(part) or "~text",
    custom_error_type=UNSUPPORTED,
    custom_error_message="content parts of this type are not supported here: send 'text', 'refusal' from an"
    " assistant, and images as 'image_url' in user and tool messages",
)
Part = Annotated[Annotated[TextPart, Tag("~text")] | Annotated[RefusalPart, Tag("~refusal")], _BY_TYPE]
ShownPart = Annotated[Annotated[TextPart, Tag("~text")] | Annotated[ShownImage, Tag("~image_url")], _BY_TYPE]
Content = TextOr[Listed[Part]]
ShownContent = TextOr[Listed[ShownPart]]


class SystemMessage(Echo):
    """A system message; the role `developer` is an alias of `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: ShortText | None = None


class UserMessage(Echo):
    """A user message with text and images."""

    role: Literal["user"]
    content: ShownContent
    name: ShortText | None = None


class CalledFunction(Echo):
    """The function of a call in the history."""

    name: CalledName
    arguments: Arguments = ""


class CallBody(Echo):
    """A tool call of an assistant message."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Echo):
    """An assistant message. Reasoning may be in `reasoning` or `reasoning_content`."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[CallBody] | None = Field(default=None, max_length=MAX_MESSAGE_CALLS)
    name: ShortText | None = None
    refusal: Text | None = None
    reasoning: EchoedText = None
    reasoning_content: EchoedText = None
    audio: Annotated[Json, refused(hint=": send its transcript as `content`")] = None
    function_call: Annotated[Json, refused(hint=": use `tool_calls`, and `tool` messages for the results")] = None


class ToolMessage(Echo):
    """A tool result."""

    role: Literal["tool"]
    content: ShownContent | None = None
    tool_call_id: CallId
    name: ShortText | None = None


Message = Annotated[
    Annotated[SystemMessage, Tag("~system")]
    | Annotated[SystemMessage, Tag("~developer")]
    | Annotated[UserMessage, Tag("~user")]
    | Annotated[AssistantMessage, Tag("~assistant")]
    | Annotated[ToolMessage, Tag("~tool")]
    | SkipJsonSchema[Annotated[InstanceOf[CachedMessage], Tag("~cached")]],
    Discriminator(
        _role,
        custom_error_type="unknown_role",
        custom_error_message="expected an object with the role system, developer, user, assistant or tool",
    ),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_CHAT_MESSAGES, fail_fast=True)]
NewMessage: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage
AnyMessage: TypeAlias = NewMessage | CachedMessage


# Tools


class FunctionBody(Body):
    """A function that the policy may call.

    Schemas are enforced for forced calls. Other answers list the tools with `strict: true` in
    `strict_not_enforced`.
    """

    name: ToolName
    description: Description | None = None
    parameters: SchemaObject | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool definition."""

    type: Literal["function"]
    function: FunctionBody


Tools = Annotated[list[ToolBody], Field(max_length=MAX_CHAT_TOOLS, fail_fast=True)]


class FunctionName(Body):
    """The name of the function to call."""

    name: ToolName


class NamedTool(Body):
    """The tool that must be called, or an entry of `allowed_tools`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The tools of this turn. Other tools are not shown to the policy."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_CHAT_TOOLS)


class AllowedToolsChoice(Body):
    """Restricts the tools that may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice(value: Any) -> str | None:
    kind = "~text" if isinstance(value, str) else type_tag(value)
    if kind == "~custom":
        raise UnsupportedParameter("custom tools are not supported", param="tool_choice.type")
    return kind


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~text")]
    | Annotated[NamedTool, Tag("~function")]
    | Annotated[AllowedToolsChoice, Tag("~allowed_tools")],
    Discriminator(
        _choice,
        custom_error_type="unknown_choice",
        custom_error_message="expected none, auto, required, a function or allowed_tools",
    ),
]


# Response formats


class PlainFormat(Body):
    """Any text, or one JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaBody(Body):
    """A schema, which is enforced with or without `strict`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
    description: Description | None = None
    schema_: SchemaObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """One JSON value that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaBody


ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag("~text")]
    | Annotated[PlainFormat, Tag("~json_object")]
    | Annotated[JsonSchemaFormat, Tag("~json_schema")],
    Discriminator(
        type_tag,
        custom_error_type="unknown_format",
        custom_error_message="expected the type text, json_object or json_schema",
    ),
]


# Requests


def _as_object(value: Any) -> Any:
    return read_json(value.encode()) if isinstance(value, str) else value


class StructuredOutputs(Body):
    """vLLM's constraints on the answer. At most one field may be set."""

    model_config = ConfigDict(json_schema_extra={"maxProperties": 1})

    json_: Annotated[SchemaObject, BeforeValidator(_as_object)] | None = Field(default=None, alias="json")
    regex: Annotated[str, Field(min_length=1, max_length=MAX_CONSTRAINT_CHARS)] | None = None
    choice: Annotated[list[Stop], Field(min_length=1, max_length=MAX_ANSWERS)] | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str, Field(min_length=1, max_length=MAX_CONSTRAINT_CHARS)] | None = None
    grammar: Refused = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        constraints = (self.json_, self.regex, self.choice, self.json_object or None, self.structural_tag)
        if sum(constraint is not None for constraint in constraints) > 1:
            raise InvalidRequest(
                "set only one of json, regex, choice, json_object and structural_tag", param="structured_outputs"
            )
        return self


class StreamOptions(Body):
    """Options of a stream. `include_obfuscation` is accepted and has no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChoiceFields(SamplingFields):
    """Fields that chat completions, completions and vLLM's token route share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("~text")] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("~list")],
            Discriminator(by_shape),
        ]
        | None
    ) = None
    max_tokens: MaxTokens | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")],
                Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)],
            ],
            Field(json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = Field(default=None, max_length=MAX_LOGIT_BIASES)


class AgentHints(Body):
    """Dynamo's hints about a call. Requests with a higher `priority` come first; other hints are ignored."""

    model_config = ConfigDict(extra="ignore")

    priority: Annotated[int, Field(ge=-MAX_CALL_PRIORITY, le=MAX_CALL_PRIORITY)] | None = None


class NvidiaExtension(Body):
    """The field `nvext` of Dynamo's clients. Other fields than `agent_hints` are ignored."""

    model_config = ConfigDict(extra="ignore")

    agent_hints: AgentHints | None = None


class CallBase(SampledBody, ChoiceFields):
    """The fields that chat completions and completions share. `user` and `metadata` are ignored.

    `priority` is vLLM's: an engine schedules waiting requests with lower numbers first. It takes precedence over
    Dynamo's hint `nvext.agent_hints.priority`, for which higher numbers come first, and which is ignored if no
    engine has priorities. With `return_tokens_as_token_ids`, logprobs name tokens as `token_id:N` instead of by
    their text.
    """

    model: Model
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_CALL_PRIORITY, le=MAX_CALL_PRIORITY)] | None = None
    stream_options: StreamOptions | None = None
    user: ShortText | None = None
    metadata: Ignored = None
    nvext: NvidiaExtension | None = None

    def call_priority(self, *, has_priority: bool) -> int | None:
        """Return the priority of the call or None. `has_priority`: an engine orders waiting requests by it."""
        hints = None if self.nvext is None or not has_priority else self.nvext.agent_hints
        hinted = None if hints is None or hints.priority is None else -hints.priority
        return hinted if self.priority is None else self.priority

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class ChatBody(CallBase, TemplateBody):
    """The body of `POST /v1/chat/completions`.

    With `strict_history`, a resent answer matches the sampled turn only if call ids and outer whitespace are equal
    too. With `stop_in_reasoning`, stop strings apply to the reasoning as well as the answer.
    """

    messages: Messages
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: MaxTokens | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    strict_history: bool | None = None
    stop_in_reasoning: bool | None = None
    store: bool | None = None
    service_tier: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    verbosity: Ignored = None
    moderation: Ignored = None
    reasoning_effort: Effort | None = None
    audio: Refused = None
    function_call: Refused = None
    functions: Refused = None
    modalities: Annotated[Json, refused(unless=["text"])] = None
    prediction: Refused = None
    web_search_options: Refused = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            raise InvalidRequest(
                f"'max_tokens' ({limits[0]}) and 'max_completion_tokens' ({limits[1]}) differ: send one of them",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("'top_logprobs' requires 'logprobs': true", param="top_logprobs")
        if self.add_generation_prompt not in (None, not self.continue_final_message):
            raise InvalidRequest(
                "'add_generation_prompt' must be false with 'continue_final_message', and true without it",
                param="add_generation_prompt",
            )
        if self.structured_outputs is not None and self.response_format is not None:
            raise InvalidRequest(
                "'response_format' and 'structured_outputs' exclude each other: send one of them",
                param="structured_outputs",
            )
        return self


PromptText = Annotated[str, Field(min_length=1, max_length=MAX_CHAT_CONTENT_CHARS)]
PromptIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
_Prompt = Annotated[
    Annotated[PromptText, Tag("~text")] | Annotated[PromptIds, Tag("~list")], Discriminator(by_shape)
]


def _by_depth(value: Any) -> str:
    return "~batch" if isinstance(value, list) and value and isinstance(value[0], str | list) else "~one"


class CompletionBody(CallBase):
    """The body of `POST /v1/completions`: a prompt as text or token ids, or a list of prompts.

    With `echo` and a `max_tokens` of 0, nothing is sampled: the answer has each prompt with its logprobs.
    """

    prompt: Annotated[
        Annotated[_Prompt, Tag("~one")]
        | Annotated[list[_Prompt], Field(min_length=1, max_length=MAX_PROMPTS), Tag("~batch")],
        Discriminator(_by_depth),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    echo: bool | None = None
    best_of: Annotated[Json, refused(unless=1)] = None
    suffix: Refused = None

    @model_validator(mode="after")
    def _batch_is_whole(self) -> Self:
        if self.is_batch and (self.stream or self.named_session is not None):
            raise UnsupportedParameter(
                "a list of prompts is not supported with 'stream' or in a session: send one prompt per request",
                param="prompt",
            )
        return self

    @property
    def is_batch(self) -> bool:
        """True if `prompt` is a list of prompts, even of one prompt."""
        return _by_depth(self.prompt) == "~batch"

    @property
    def num_chars(self) -> int:
        """The number of characters or token ids in all prompts."""
        prompts: Any = self.prompt
        return sum(map(len, prompts)) if self.is_batch else len(prompts)

    @model_validator(mode="after")
    def _scores_or_samples(self) -> Self:
        if bool(self.echo) != (self.max_tokens == 0):
            raise UnsupportedParameter(
                "'echo' requires 'max_tokens': 0, and 'max_tokens': 0 requires 'echo'", param="echo"
            )
        if self.echo and (self.stream or (self.n or 1) > 1 or self.logprobs is None):
            raise UnsupportedParameter("'echo' requires 'logprobs', 'n': 1 and no 'stream'", param="echo")
        return self


class TokenizeBody(TemplateBody):
    """The body of `POST /tokenize`: a text without template, or a conversation to render with the chat template."""

    model: Model | None = None
    prompt: Annotated[str, Field(max_length=MAX_CHAT_CONTENT_CHARS)] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either 'prompt' or 'messages'", param="prompt")
        return self


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: Model | None = None
    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)
