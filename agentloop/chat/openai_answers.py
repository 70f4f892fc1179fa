"""The answers in the OpenAI dialect, for the OpenAPI page. They are written without these models; tests hold the
two shapes equal."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from agentloop.api import SpanBody

Finish = Literal["stop", "length", "tool_calls"]


class CalledFunctionAnswer(BaseModel):
    """`arguments` are JSON as text; of a call that cannot be read, what the policy wrote."""

    name: str
    arguments: str


class CallAnswer(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class MessageAnswer(BaseModel):
    """What the policy says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallAnswer] = Field(default_factory=list)
    reasoning_content: str = ""


class TokenAnswer(BaseModel):
    """A token that was not sampled; `bytes` is null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class SampledTokenAnswer(TokenAnswer):
    """A sampled token."""

    top_logprobs: list[TokenAnswer]


class LogprobsAnswer(BaseModel):
    """One entry a sampled token, stop token included."""

    content: list[SampledTokenAnswer]
    refusal: None


class ChoiceAnswer(BaseModel):
    """One answer. `token_ids` only if asked for."""

    index: int
    message: MessageAnswer
    logprobs: LogprobsAnswer | None
    finish_reason: Finish
    weight_versions: list[SpanBody]
    token_ids: list[int] = Field(default_factory=list)


class PromptDetails(BaseModel):
    """Prompt tokens whose KV was reused."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Sampled tokens of the thought."""

    reasoning_tokens: int


class UsageAnswer(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CallFacts(BaseModel):
    """Where a tool call's tokens are among its choice's, and whether it could be read."""

    choice: int
    id: str
    status: Literal["ok", "malformed"]
    token_start: int
    token_end: int
    error: str | None


class SessionExtra(BaseModel):
    """What became of the call in its session."""

    session_id: str
    turn_ids: list[str]
    parent_turn_id: str | None
    split_reason: str | None
    split_detail: str | None
    tool_calls: list[CallFacts]


class AnswerBase(BaseModel):
    """What both kinds have. `system_fingerprint` is the weight version; `prompt_token_ids` only on demand."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: UsageAnswer
    session: SessionExtra
    prompt_token_ids: list[int] = Field(default_factory=list)


class ChatAnswer(AnswerBase):
    """The answer to `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChoiceAnswer]


class ColumnsAnswer(BaseModel):
    """Logprobs of a text completion, one entry a sampled token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoiceAnswer(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: ColumnsAnswer | None
    finish_reason: Literal["stop", "length"]
    weight_versions: list[SpanBody]
    token_ids: list[int] = Field(default_factory=list)


class CompletionAnswer(AnswerBase):
    """The answer to `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[TextChoiceAnswer]


class ModelAnswer(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelsAnswer(BaseModel):
    """The answer to `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelAnswer]


class PreviewAnswer(BaseModel):
    """The prompt of a call that was not made, and how its history was matched with the session's."""

    prompt_token_ids: list[int]
    prompt: str
    parent_turn_id: str | None
    split_reason: str | None
    split_detail: str | None


class TokenizeAnswer(BaseModel):
    """The ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    """The text of ids, control tokens included."""

    prompt: str


STREAMED: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
"""What a route that can stream answers besides JSON."""
