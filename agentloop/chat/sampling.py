"""Fields that the bodies of all dialects share: sampling parameters and chat template arguments.

Invariant: template arguments that the model's template does not read are dropped, so that they cannot split a
session's history.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Final, Self, TypeAlias

import orjson
from pydantic import AfterValidator, Field, model_validator

from agentloop.api.requests import (
    MAX_PROMPT_TOKENS,
    MAX_STOP_TOKEN_IDS,
    Body,
    Id,
    Json,
    TokenId,
    VersionDemandBody,
)
from agentloop.errors import InvalidRequest
from agentloop.types import JSON, Constraint, SamplingParams
from agentloop.values.checks import (
    MAX_CHAT_SEED,
    MAX_CHAT_TEMPERATURE,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)

MAX_TEMPLATE_ARGUMENTS = 32
MAX_TEMPLATE_ARGUMENT_BYTES = 4096  # the JSON of all arguments together

_RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"chat_template", "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}
)
_THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Template arguments that enable reasoning, in Qwen3, GLM and Nemotron, and in DeepSeek-V3.1 and Granite."""

_EFFORT: Final = "reasoning_effort"
_NO_EFFORT: Final = "none"


def _template_arguments(value: Mapping[str, JSON]) -> Mapping[str, JSON]:
    if reserved := _RESERVED & value.keys():
        raise ValueError(f"{min(reserved)!r} is reserved: the service sets it")
    if len(orjson.dumps(value)) > MAX_TEMPLATE_ARGUMENT_BYTES:
        raise ValueError(f"the arguments exceed {MAX_TEMPLATE_ARGUMENT_BYTES} bytes of JSON")
    return value


MaxTokens: TypeAlias = Annotated[int, Field(ge=1, le=MAX_PROMPT_TOKENS)]
Effort: TypeAlias = Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]


class NamesSession(Body):
    """Base of bodies that may name their session in `session` or `session_id`."""

    session: Id | None = None
    session_id: Id | None = None

    @property
    def named_session(self) -> str | None:
        """The session named in the body, or None."""
        return self.session if self.session is not None else self.session_id

    @model_validator(mode="after")
    def _names_one_session(self) -> Self:
        if self.session is not None and self.session_id is not None and self.session != self.session_id:
            raise ValueError("'session' and 'session_id' name different sessions: send one of them")
        return self


class SamplingFields(Body):
    """Sampling parameters. Fields that are not part of the dialect have vLLM's names.

    `min_p` and `repetition_penalty` change the distribution that the logprobs describe. `stop_token_ids` end the
    turn in addition to the model's stop tokens; with `ignore_eos`, the model's stop tokens do not end it.
    `weight_version` restricts the weight versions that may sample the turn (`VersionDemand`).
    """

    temperature: Annotated[float, Field(ge=0, le=MAX_CHAT_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    weight_version: VersionDemandBody | None = None


class SampledBody(NamesSession, SamplingFields):
    """Fields of every call."""

    return_token_ids: bool | None = None
    stream: bool | None = None


class TemplateBody(Body):
    """Chat template arguments, and the switch for reasoning, which templates name differently."""

    chat_template_kwargs: (
        Annotated[
            dict[str, Json],
            Field(max_length=MAX_TEMPLATE_ARGUMENTS),
            AfterValidator(_template_arguments),
        ]
        | None
    ) = None
    enable_thinking: bool | None = None


def sampling_params(
    body: SamplingFields, max_tokens: int | None, vocab_size: int, constraint: Constraint | None = None
) -> SamplingParams:
    """Return the sampling parameters of a body. A `top_p` of 0 means greedy sampling. Raises InvalidRequest."""
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({body.min_tokens}) is larger than the maximum ({max_tokens})", param="min_tokens"
        )
    stops = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if max(stops, default=0) >= vocab_size:
        raise InvalidRequest(f"token id {max(stops)} is outside [0, {vocab_size})", param="stop_token_ids")
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        max_tokens=1 if max_tokens is None else max_tokens,
        # Clients send tiny temperatures for greedy sampling; engines do not accept values below MIN_TEMPERATURE.
        temperature=0.0 if 0 < temperature < MIN_TEMPERATURE else temperature,
        top_p=body.top_p or 1.0,
        top_k=1 if body.top_p == 0 else max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        min_tokens=body.min_tokens or 0,
        seed=None if body.seed is None else body.seed % MAX_CHAT_SEED,
        stop_token_ids=stops,
        ignore_eos=body.ignore_eos is True,
        constraint=constraint,
        weight_version=None if body.weight_version is None else body.weight_version.to_demand(),
    )


def template_kwargs(
    body: TemplateBody,
    reads: Collection[str],
    effort: str | None = None,
    *,
    is_thinking: bool | None = None,
    own: Mapping[str, JSON] | None = None,
) -> dict[str, JSON]:
    """Return a body's template arguments whose names are in `reads`.

    `effort`, `is_thinking` and `own` come from fields of the dialect; `chat_template_kwargs` takes precedence. An
    effort of `none` disables reasoning.
    """
    if body.enable_thinking is not None:
        is_thinking = body.enable_thinking
    elif effort == _NO_EFFORT:
        is_thinking = False
    arguments: dict[str, JSON] = dict(own or {})
    if is_thinking is not None:
        arguments |= dict.fromkeys(_THINKING_SWITCHES, is_thinking)
    if effort is not None:
        arguments[_EFFORT] = effort
    arguments |= body.chat_template_kwargs or {}
    return {name: value for name, value in arguments.items() if name in reads}
