"""SGLang's native route, `POST /generate` with `input_ids` or `text`: conversion of bodies and responses.

The wire format is that of SGLang 0.5 (`GenerateReqInput`, `SamplingParams`, and the responses of its tokenizer
manager), with two differences. Unknown fields are rejected by name, and so are SGLang fields that this service does
not support, unless they have their default value. A batch has one set of options: a list of equal options is
accepted, a list of different options is rejected.

The text of a response omits the stop token, the text from a stop string on (`no_stop_trim`) and special tokens
(`skip_special_tokens`); the ids are all sampled tokens. Weight versions are strings.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

import numpy as np
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from agentloop.api.requests import MAX_PROMPT_TOKENS, Body, Json, VersionDemandBody
from agentloop.chat.call import Answer, ChatCall, ChatModel
from agentloop.chat.choices import TokenTexts
from agentloop.chat.fields import Ignored, Model, Refused, by_shape, refused, unsupported
from agentloop.chat.openai import sampling_of, stops_of
from agentloop.chat.openai_bodies import ChoiceFields, PromptIds, PromptText
from agentloop.chat.scores import score_call
from agentloop.engine.interface import Delta
from agentloop.errors import AgentLoopError, InvalidRequest, UnsupportedParameter
from agentloop.generation.turn_reader import TurnPiece
from agentloop.rendering.port import TokenText
from agentloop.rendering.tokenizer import TextDecoder
from agentloop.trajectory.node import Reply
from agentloop.types import FinishReason, Generation, Message
from agentloop.values.aux_rows import AuxKind
from agentloop.values.checks import MAX_ALTERNATIVES, MAX_SEED, check_num_top
from agentloop.values.sampled_tokens import SampledTokens

MAX_BATCH = 1024
MAX_RID_CHARS = 256
_DEFAULT_NEW_TOKENS = 128

_PARAMS = {"min_tokens": "min_new_tokens"}  # SGLang's names for the `param` of errors


_ONE_ANSWER = {
    "type": "object",
    "required": ["text", "output_ids", "meta_info"],
    "properties": {
        "text": {"type": "string"},
        "output_ids": {"type": "array", "items": {"type": "integer"}},
        "meta_info": {"type": "object"},
    },
}
ANSWER_SCHEMA = {"anyOf": [_ONE_ANSWER, {"type": "array", "items": _ONE_ANSWER}]}
"""The JSON schema of the response: a list for a batch or for several samples."""


def _one_for_all(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, list):
        return value
    if any(item != value[0] for item in value[1:]):
        raise unsupported(f"different values of `{info.field_name}` within a batch are not supported")
    return value[0] if value else None


_Shared = BeforeValidator(_one_for_all)
"""Annotates an option of a batch that clients may repeat for each prompt."""


class SglangSampling(ChoiceFields):
    """SGLang's `SamplingParams`, with its names and defaults."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_PROMPT_TOKENS)] | None = Field(
        default=_DEFAULT_NEW_TOKENS, alias="max_new_tokens"
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_PROMPT_TOKENS)] | None = Field(
        default=None, alias="min_new_tokens"
    )
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = Field(default=None, alias="sampling_seed")
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: Ignored = None
    stream_interval: Ignored = None

    custom_params: Refused = None
    ebnf: Refused = None
    json_schema: Refused = None
    regex: Refused = None
    stop_regex: Refused = None
    structural_tag: Refused = None


Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]


def _by_depth(value: Any) -> str:
    return "~batch" if isinstance(value, list) and value and isinstance(value[0], list) else "~ids"


class SglangBody(Body):
    """The body of `POST /generate` in SGLang's dialect: one prompt or a batch, as ids or as text.

    `extra_key` is accepted and ignored: `kv_policy` determines which KV a request can use.
    """

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["input_ids"]}, {"required": ["text"]}]})

    input_ids: (
        Annotated[
            Annotated[PromptIds, Tag("~ids")]
            | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_BATCH), Tag("~batch")],
            Discriminator(_by_depth),
        ]
        | None
    ) = None
    text: (
        Annotated[
            Annotated[PromptText, Tag("~text")]
            | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_BATCH), Tag("~list")],
            Discriminator(by_shape),
        ]
        | None
    ) = None
    sampling_params: Annotated[SglangSampling, _Shared] = SglangSampling()
    return_logprob: Annotated[bool | None, _Shared] = None
    top_logprobs_num: Annotated[Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None, _Shared] = None
    logprob_start_len: Annotated[Annotated[int, Field(ge=-1, le=MAX_PROMPT_TOKENS)] | None, _Shared] = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    rid: (
        Annotated[
            Annotated[Rid, Tag("~text")] | Annotated[list[Rid], Field(max_length=MAX_BATCH), Tag("~list")],
            Discriminator(by_shape),
        ]
        | None
    ) = None
    stream: bool | None = None
    lora_path: Annotated[Model | None, _Shared] = None
    weight_version: VersionDemandBody | None = None
    extra_key: Ignored = None
    log_metrics: Ignored = None
    modalities: Ignored = None
    no_logs: Ignored = None

    audio_data: Refused = None
    custom_logit_processor: Refused = None
    image_data: Annotated[Json, refused(hint=": send images with chat completions")] = None
    input_embeds: Refused = None
    priority: Annotated[Json, refused(unless=0)] = None
    return_hidden_states: Refused = None
    return_indexer_topk: Refused = None
    return_sampling_mask: Refused = None
    session_params: Refused = None
    token_ids_logprob: Annotated[Json, refused(), _Shared] = None
    video_data: Refused = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.input_ids is None) == (self.text is None):
            raise InvalidRequest("give either input_ids or text", param="input_ids")
        if isinstance(self.rid, list) and (
            len(set(self.rid)) != len(self.rid) or len(self.rid) != self.num_prompts
        ):
            raise InvalidRequest(
                f"rid must have one unique name for each of the {self.num_prompts} prompts: it has {len(self.rid)},"
                f" of which {len(set(self.rid))} differ",
                param="rid",
            )
        if self.sampling_params.max_tokens == 0 and self.scores_after is None:
            raise InvalidRequest(
                "max_new_tokens 0 requires scores of the prompt: set return_logprob and logprob_start_len, or a"
                " larger max_new_tokens",
                param="sampling_params.max_new_tokens",
            )
        if self.stream and self.scores_after is not None:
            raise UnsupportedParameter(
                "prompt scores cannot be streamed: remove stream, or logprob_start_len", param="logprob_start_len"
            )
        return self

    @property
    def scores_after(self) -> int | None:
        """The index in each prompt after which the prompt's tokens are scored; None if they are not scored."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    @property
    def num_top(self) -> int:
        """The number of alternatives for each token."""
        return self.top_logprobs_num or 0 if self.return_logprob else 0

    @property
    def is_batch(self) -> bool:
        """True if the prompts are a list; the response is then a list for any number of choices."""
        return isinstance(self.text, list) or _by_depth(self.input_ids) == "~batch"

    @property
    def num_prompts(self) -> int:
        """The number of prompts in the batch; 1 for a single prompt."""
        prompts = self.text if self.input_ids is None else self.input_ids
        return len(prompts) if self.is_batch and prompts is not None else 1

    @property
    def num_choices(self) -> int:
        """The number of samples for each prompt."""
        return self.sampling_params.n or 1

    def rids(self, default: str) -> list[str]:
        """Return a request name for each prompt, made from `default` if the body has none."""
        if isinstance(self.rid, list):
            return self.rid
        name = self.rid or default
        return [f"{name}_{index}" for index in range(self.num_prompts)] if self.is_batch else [name]

    def prompts(self, tokens: TokenText) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt. Tokenizing takes time linear in the text."""
        if self.input_ids is not None:
            batch: Any = self.input_ids if self.is_batch else [self.input_ids]
            return list(map(tuple, batch))
        texts = self.text if isinstance(self.text, list) else [self.text or ""]
        return [tuple(tokens.ids(text)) for text in texts]


def error_body(error: AgentLoopError) -> Answer:
    """Return an error body in SGLang's format, with `retryable` and the fields of this service's errors."""
    wire = error.to_wire()
    return {"error": {**wire["error"], "retryable": error.retryable}}


def to_call(body: SglangBody, prompt_ids: tuple[int, ...], model: ChatModel) -> ChatCall:
    """Return the call that samples one prompt. Raises InvalidRequest naming a field of the body."""
    if body.return_routed_experts and not model.has_routed_experts:
        raise UnsupportedParameter(
            "the engines do not return routed experts: set engine.routed_experts", param="return_routed_experts"
        )
    params = body.sampling_params
    check_num_top(body.num_top, model.max_logprobs, "top_logprobs_num")
    try:
        sampling = sampling_of(params, params.max_tokens, model.vocab_size, body.num_top)
    except InvalidRequest as error:
        name = _PARAMS.get(error.param or "", error.param)
        raise type(error)(error.message, param=f"sampling_params.{name}") from error
    if body.weight_version is not None:
        sampling = replace(sampling, weight_version=body.weight_version.to_demand())
    return ChatCall(
        messages=(),
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_tokens=params.max_tokens,
        num_choices=body.num_choices,
        stop=stops_of(params),
        timeout_s=model.timeout_s,
    )


def prompt_call(body: SglangBody, prompt_ids: tuple[int, ...], model: ChatModel) -> ChatCall | None:
    """Return the call that scores a prompt; None if the body requests no scores or there is no token to score."""
    if body.scores_after is None:
        return None
    start, demand = body.scores_after + 1, body.weight_version
    names = {"param": "logprob_start_len", "top_param": "top_logprobs_num"}
    return score_call(prompt_ids, start, body.num_top, model, demand, **names)


def unsampled(score: Generation | None) -> Reply:
    """Return the reply of a call that only scores its prompt, with the finish reason of the score."""
    nothing, reason = np.empty(0, np.float32), FinishReason.LENGTH if score is None else score.finish_reason
    cached = 0 if score is None else score.cached_tokens
    return Reply(
        Message("assistant"), nothing.astype(np.int32), nothing, (), reason, is_closed=False, cached_tokens=cached
    )


# Responses


@dataclass(slots=True)
class ShownChoice:
    """A choice of a streamed call, with its tokens and text so far."""

    decoder: TextDecoder
    sampled: SampledTokens = field(default_factory=SampledTokens)
    text: str = ""


class SglangWriter:
    """Formats the responses to one body."""

    def __init__(self, body: SglangBody, tokens: TokenText, texts: TokenTexts) -> None:
        self._body = body
        self._tokens = tokens
        self._texts = texts
        self._hidden = (
            tokens.special_ids if body.sampling_params.skip_special_tokens is not False else frozenset[int]()
        )

    def whole(self, rid: str, num_prompt: int, reply: Reply, served: int | None, latency_s: float) -> Answer:
        """Return the complete response for a reply. `served` is the weight version for a reply without tokens."""
        ids = reply.token_ids.tolist()
        answer = self._answer(rid, num_prompt, reply, ids, self.text_of(reply, ids), served)
        facts = {"finish_reason": finish_reason(reply, ids), "cached_tokens": reply.cached_tokens}
        answer["meta_info"] |= {**facts, "e2e_latency": latency_s}
        if self._body.return_routed_experts:
            answer["meta_info"]["routed_experts"] = _experts_of(reply)
        return answer

    def add_scores(self, answer: Answer, prompt_ids: Sequence[int], score: Generation | None) -> None:
        """Add the prompt's logprobs to a response, if the body requests them. The first token has none (null)."""
        after = self._body.scores_after
        if after is None:
            return
        meta, ids, rows = answer["meta_info"], [prompt_ids[after]], list[Any]()
        logprobs: list[float | None] = [None]
        if score is not None and score.token_ids:
            ids += score.token_ids
            logprobs += score.logprobs
            rows += score.top_logprobs
            version = _text(score.weight_versions[0].version)
            meta |= {"weight_version_start": version}
            meta |= {} if answer["output_ids"] else {"weight_version": version, "weight_version_end": version}
        meta["input_token_logprobs"] = list(map(self._entry, ids, logprobs))
        if self._body.num_top:
            meta["input_top_logprobs"] = [None, *([self._entry(*pair) for pair in row] for row in rows)]

    def text_of(self, reply: Reply, ids: list[int]) -> str:
        """Return a reply's text, without stop texts and special tokens unless the body requests them."""
        is_trimmed = not self._body.sampling_params.no_stop_trim
        if is_trimmed and reply.finish_reason is FinishReason.STOP and not reply.stop_text:
            ids = ids[:-1]
        text = self._tokens.decode([token_id for token_id in ids if token_id not in self._hidden])
        stop_at = text.find(reply.stop_text) if reply.stop_text else -1
        if stop_at < 0:
            return text
        return text[:stop_at] if is_trimmed else text[: stop_at + len(reply.stop_text)]

    def shown(self) -> ShownChoice:
        """Return a new choice of a streamed call."""
        return ShownChoice(self._tokens.decoder())

    def add(self, choice: ShownChoice, piece: TurnPiece) -> None:
        """Append the next piece to a choice."""
        ids, spans = piece.token_ids, piece.weight_versions
        choice.sampled.add(Delta(ids, piece.logprobs, spans, piece.top_logprobs))
        choice.text += choice.decoder.add([token_id for token_id in ids if token_id not in self._hidden]).text

    def part(self, rid: str, num_prompt: int, choice: ShownChoice) -> Answer:
        """Return a chunk, which has all tokens and text of a choice so far."""
        sampled = choice.sampled
        answer = self._answer(rid, num_prompt, sampled, sampled.token_ids, choice.text, None)
        answer["meta_info"] |= {"finish_reason": None, "cached_tokens": 0}
        return answer

    def _answer(
        self,
        rid: str,
        num_prompt: int,
        sampled: Reply | SampledTokens,
        ids: list[int],
        text: str,
        served: int | None,
    ) -> Answer:
        spans = sampled.weight_versions
        first, last = (spans[0].version, spans[-1].version) if spans else (served, served)
        meta: Answer = {
            "id": rid,
            "prompt_tokens": num_prompt,
            "completion_tokens": len(ids),
            "weight_version": _text(last),
            "weight_version_start": _text(first),
            "weight_version_end": _text(last),
            "weight_versions": [{"version": str(s.version), "start": s.start, "end": s.end} for s in spans],
        }
        if self._body.return_logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = list(map(self._entry, ids, map(float, sampled.logprobs)))
            meta["output_token_logprobs_length"] = len(ids)
            if self._body.top_logprobs_num:
                meta["output_top_logprobs"] = [[self._entry(*pair) for pair in row] for row in sampled.top_logprobs]
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _entry(self, token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        return logprob, token_id, self._texts.of(token_id)[0] if self._body.return_text_in_logprobs else None


def finish_reason(reply: Reply, ids: Sequence[int]) -> Answer:
    """Return a reply's finish reason in SGLang's format."""
    if reply.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(ids)}
    if reply.finish_reason is FinishReason.STOP:
        return {"type": "stop", "matched": reply.stop_text or ids[-1]}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _experts_of(reply: Reply) -> str | None:
    """Return the experts as SGLang writes them: int32 `[tokens - 1, layers, experts per token]` in base64."""
    rows = (reply.aux or {}).get(AuxKind.ROUTED_EXPERTS)
    if rows is None:
        return None
    return base64.b64encode(rows.unpacked().values.astype("<i4").tobytes()).decode("ascii")


def _text(version: int | None) -> str | None:
    return None if version is None else str(version)
