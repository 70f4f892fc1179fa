"""The request bodies of chat completions and completions, with every cap on them.

Strict, as those of `api/requests.py`: no number as text, no bool as number, unknown fields refused by name. null is
absent, as the OpenAI API has it. What would change the meaning of an answer and is not implemented is
`UnsupportedParameter`; what is harmless is accepted and ignored.

Unions are told apart by one field or by shape, so an error is about the one meant. Their tags begin with `~`, which
no field does: `read_body`, the way in, leaves them out of the places that it tells a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    InstanceOf,
    JsonValue,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import from_json, to_json

from agentloop.api.requests import (
    MAX_PROMPT_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    Body,
    ImagePart,
    Json,
    TokenId,
    invalid_request,
    untagged,
)
from agentloop.chat.body_cache import CachedMessage
from agentloop.chat.dialect import HOSTED_SEARCH, type_tag
from agentloop.chat.sampling import Effort, MaxTokens, SampledBody, SamplingFields, TemplateBody, Whole
from agentloop.chat.schemas import Schema
from agentloop.checks import MAX_BIAS, MAX_CONSTRAINT_CHARS, MAX_LOGIT_BIASES, MAX_PENALTY, MAX_TOP_LOGPROBS
from agentloop.errors import InvalidRequest, UnsupportedParameter

B = TypeVar("B", bound=BaseModel)

MAX_CHAT_CONTENT_CHARS = 1 << 22
MAX_PARTS = 1024
MAX_CHAT_TOOLS = 512
MAX_MESSAGE_CALLS = 512  # of one message
MAX_DESCRIPTION_CHARS = 1 << 16
MAX_CHAT_MESSAGES = 8192
MAX_CHOICES = 128
MAX_ANSWERS = 512  # texts that an answer may be
MAX_MODEL_CHARS = 256
MAX_CALL_PRIORITY = (1 << 31) - 1
MAX_TOOL_NAME_CHARS = 128

_UNSUPPORTED_PARTS = frozenset({"image", "input_audio", "audio", "file", "video_url", "video"})
_UNSUPPORTED_CHAT = ("audio", "prediction", "functions", "function_call", "web_search_options")
_UNSUPPORTED_COMPLETION = ("best_of", "echo", "suffix")

Text = Annotated[str, Field(max_length=MAX_CHAT_CONTENT_CHARS)]
ShortText = Annotated[str, Field(max_length=1024)]
Description = Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)]
ToolName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.:/\-]{{1,{MAX_TOOL_NAME_CHARS}}}$")]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


def by_shape(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~list"


def _role(value: Any) -> str | None:
    if isinstance(value, CachedMessage):
        return "~cached"
    role = value.get("role") if isinstance(value, Mapping) else getattr(value, "role", None)
    return f"~{role}" if isinstance(role, str) else None


class Echo(Body):
    """Base of what stands in a history: fields beyond the declared ones are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class HostedSearch(Echo):
    """A search of the web that the provider of an API runs itself: the policy does not see it."""

    type: Annotated[str, Field(pattern=f"^{HOSTED_SEARCH}")]


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


Part = Annotated[
    Annotated[TextPart, Tag("~text")] | Annotated[RefusalPart, Tag("~refusal")], Discriminator(type_tag)
]
Content = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[list[TextPart], Field(max_length=MAX_PARTS), Tag("~list")],
    Discriminator(by_shape),
]
ShownPart = Annotated[
    Annotated[TextPart, Tag("~text")] | Annotated[ImagePart, Tag("~image_url")], Discriminator(type_tag)
]
ShownContent = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[list[ShownPart], Field(max_length=MAX_PARTS), Tag("~list")],
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
    """The words of a person, or another program, and what they show."""

    role: Literal["user"]
    content: ShownContent
    name: ShortText | None = None


def _as_text(value: Any) -> Any:
    return to_json(value).decode() if isinstance(value, dict) else value


class CalledFunction(Body):
    """A call as it was made; `arguments` are JSON as text, kept as they are where they are none, or an object."""

    name: Annotated[str, Field(max_length=256)]
    arguments: Annotated[Text, BeforeValidator(_as_text)]


class CallBody(Body):
    """One tool call of an assistant's message."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Whole] | None = None  # streams have it, and some clients echo it


class AssistantMessage(Body):
    """An earlier answer, echoed. Reasoning may come back under either of its two names."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    tool_calls: list[CallBody] | None = Field(default=None, max_length=MAX_MESSAGE_CALLS)
    name: ShortText | None = None
    refusal: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    annotations: Json = None
    provider_specific_fields: Json = None
    audio: None = None
    function_call: None = None


class ToolMessage(Body):
    """The answer of a tool."""

    role: Literal["tool"]
    content: ShownContent
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
        custom_error_message="a message has one of the roles system, developer, user, assistant and tool",
    ),
]


NewMessage: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage
AnyMessage: TypeAlias = NewMessage | CachedMessage


# --- tools ------------------------------------------------------------------------------------------------


class FunctionBody(Body):
    """A function that the policy may call. `strict` changes nothing: a forced call always fits its schema."""

    name: ToolName
    description: Description | None = None
    parameters: Annotated[dict[str, JsonValue], Schema] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool definition."""

    type: Literal["function"]
    function: FunctionBody


class FunctionName(Body):
    """The name of the function that is meant."""

    name: ToolName


class NamedTool(Body):
    """Exactly this tool is to be called; also an entry of `allowed_tools`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The tools of this turn: the others are not shown to the policy."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_CHAT_TOOLS)


class AllowedToolsChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice(value: Any) -> str | None:
    return "~text" if isinstance(value, str) else type_tag(value)


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
    description: Description | None = None
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
        type_tag,
        custom_error_type="unknown_format",
        custom_error_message="a response format is text, json_object or json_schema",
    ),
]


# --- requests ---------------------------------------------------------------------------------------------


def _as_object(value: Any) -> Any:
    return read_json(value.encode()) if isinstance(value, str) else value


class StructuredOutputs(Body):
    """vLLM's name for the form of an answer: one of these, or none."""

    model_config = ConfigDict(json_schema_extra={"maxProperties": 1})

    json_: Annotated[dict[str, JsonValue], BeforeValidator(_as_object), Schema] | None = Field(
        default=None, alias="json"
    )
    regex: Annotated[str, Field(min_length=1, max_length=MAX_CONSTRAINT_CHARS)] | None = None
    choice: Annotated[list[Stop], Field(min_length=1, max_length=MAX_ANSWERS)] | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str, Field(min_length=1, max_length=MAX_CONSTRAINT_CHARS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("grammar") is not None:
            raise UnsupportedParameter("grammars are not supported", param="structured_outputs.grammar")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = (self.json_, self.regex, self.choice, self.json_object or None, self.structural_tag)
        if sum(one is not None for one in given) > 1:
            raise InvalidRequest(
                "give one of json, regex, choice, json_object and structural_tag", param="structured_outputs"
            )
        return self


class StreamOptions(Body):
    """`include_obfuscation` is accepted: nothing is obfuscated here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChoiceFields(SamplingFields):
    """Fields that chat completions, completions and vLLM's token route share: the choices, and what ends them."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), Whole] | None = None
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
        dict[
            Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")],
            Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)],
        ]
        | None
    ) = Field(default=None, max_length=MAX_LOGIT_BIASES)


class CallBase(SampledBody, ChoiceFields):
    """The fields that chat completions and completions share; `user` and `metadata` are ignored.

    `priority` is vLLM's: of the requests that wait in an engine, those of lower numbers go first.
    `return_tokens_as_token_ids`: logprobs name tokens as `token_id:N`, whatever their text.
    """

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_CALL_PRIORITY, le=MAX_CALL_PRIORITY), Whole] | None = None
    stream_options: StreamOptions | None = None
    user: ShortText | None = None
    metadata: Json = None

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class ChatBody(CallBase, TemplateBody):
    """The body of `POST /v1/chat/completions`.

    `strict_history`: an echoed answer must equal what was sampled, call ids and outer whitespace too, to be taken
    for it.
    """

    messages: list[Message] = Field(min_length=1, max_length=MAX_CHAT_MESSAGES, fail_fast=True)
    tools: list[ToolBody] | None = Field(default=None, max_length=MAX_CHAT_TOOLS, fail_fast=True)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: MaxTokens | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Whole] | None = None
    strict_history: bool | None = None
    store: bool | None = None
    service_tier: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Json = None
    prompt_cache_options: Json = None
    verbosity: Json = None
    moderation: Json = None
    reasoning_effort: Effort | None = None
    modalities: list[Literal["text"]] | None = Field(default=None, max_length=8)

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = _without_unsupported(value, _UNSUPPORTED_CHAT)
        modalities = kept.get("modalities")
        if isinstance(modalities, list) and any(isinstance(one, str) and one != "text" for one in modalities):
            raise UnsupportedParameter("only text is answered", param="modalities")
        if isinstance(messages := kept.get("messages"), list):
            _refuse_parts(messages)
        if isinstance(tools := kept.get("tools"), list):
            for index, tool in enumerate(tools):
                if isinstance(tool, dict) and tool.get("type") == "custom":
                    raise UnsupportedParameter("custom tools are not supported", param=f"tools.{index}.type")
        choice = kept.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "custom":
            raise UnsupportedParameter("custom tools are not supported", param="tool_choice.type")
        return kept

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.add_generation_prompt not in (None, not self.continue_final_message):
            raise InvalidRequest(
                "add_generation_prompt is false with continue_final_message, and true without",
                param="add_generation_prompt",
            )
        if self.structured_outputs is not None and self.response_format is not None:
            raise InvalidRequest(
                "response_format and structured_outputs exclude each other", param="structured_outputs"
            )
        return self


class CompletionBody(CallBase):
    """The body of `POST /v1/completions`: one prompt, as text or as token ids."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_CHAT_CONTENT_CHARS), Tag("~text")]
        | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True), Tag("~list")],
        Discriminator(by_shape),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Whole] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        prompt = value.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            raise UnsupportedParameter("one prompt a request", param="prompt")
        return _without_unsupported(value, _UNSUPPORTED_COMPLETION)


class TokenizeBody(TemplateBody):
    """The body of `POST /tokenize`: a text as it is, or a conversation for the chat template."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)] | None = None
    prompt: Annotated[str, Field(max_length=MAX_CHAT_CONTENT_CHARS)] | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_CHAT_MESSAGES, fail_fast=True)
    tools: list[ToolBody] | None = Field(default=None, max_length=MAX_CHAT_TOOLS, fail_fast=True)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        return self


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)] | None = None
    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)


def _without_unsupported(value: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """`value` without these parameters, which mean nothing as null or false. Raises UnsupportedParameter."""
    present = [name for name in names if name in value]
    for name in present:
        # `best_of: 1` and `suffix: ""` ask for nothing either.
        if value[name] not in (None, False, "", []) and not (name == "best_of" and value[name] == 1):
            raise UnsupportedParameter(f"{name} is not supported", param=name)
    return {key: item for key, item in value.items() if key not in present} if present else value


def _refuse_parts(messages: list[Any]) -> None:
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        takes_images = message.get("role") in ("user", "tool")
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and (kind in _UNSUPPORTED_PARTS or (kind == "image_url" and not takes_images)):
                raise UnsupportedParameter(
                    f"content parts of type {kind!r} are not supported here",
                    param=f"messages.{index}.content.{place}",
                )


def read_body(data: bytes, kind: type[B]) -> B:
    """Read the body that `data` holds. Raises InvalidRequest with at most ten problems, and UnsupportedParameter.

    The parser refuses lone surrogates, nesting beyond 200 and integers beyond 4,300 digits by itself.
    """
    return checked(read_json(data), kind)


def read_json(data: bytes) -> Any:
    """Read the JSON value that `data` holds. Raises InvalidRequest."""
    try:
        return from_json(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def checked(value: Any, kind: type[B]) -> B:
    """Check that a JSON value is a body. Raises as `read_body`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        found = [(untagged(problem["loc"]), problem["msg"]) for problem in problems]
        raise invalid_request(found) from error
