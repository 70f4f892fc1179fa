"""vLLM's token route, `POST /inference/v1/generate`: conversion of bodies and responses.

The wire format is that of vLLM 0.32 (`entrypoints/scale_out/token_in_token_out/protocol.py` and `SamplingParams`),
with two differences. Unknown fields are rejected by name, and vLLM fields that this service does not support raise
`UnsupportedParameter`, unless they have their default value. A logprob entry names its token both as `token_id`,
which vLLM writes, and as `token: "token_id:N"`, which vLLM's clients read.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import FailFast, Field

from agentloop.api.requests import MAX_PROMPT_TOKENS, Body, Json, TokenId, VersionDemandBody
from agentloop.chat.call import ChatCall, ChatModel, version_range
from agentloop.chat.choices import token_id_name
from agentloop.chat.fields import Ignored, Model, Refused, refused
from agentloop.chat.openai import sampling_of, stops_of
from agentloop.chat.openai_bodies import ChoiceFields
from agentloop.chat.scores import score_call
from agentloop.errors import InvalidRequest
from agentloop.trajectory.node import Reply
from agentloop.types import FinishReason, Generation
from agentloop.values.aux_rows import AuxKind
from agentloop.values.checks import MAX_ALTERNATIVES, check_num_top

MAX_REQUEST_ID_CHARS = 256
MAX_SALT_CHARS = 1024

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class VllmSamplingBody(ChoiceFields):
    """vLLM's `SamplingParams`, with its defaults. The default `max_tokens` fills the context.

    Options about text and about vLLM's output kind are accepted and ignored: the response is complete, without
    text. `logprobs` is the number of entries per position; 0 and 1 return only the sampled token. `prompt_logprobs`
    also scores the tokens of the prompt. `routed_experts` begin at `routed_experts_prompt_start`; in a session,
    which has the experts of earlier turns, they are null if it is before the last token of those turns.
    """

    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0, le=MAX_PROMPT_TOKENS)] = 0
    detokenize: Ignored = None
    flat_logprobs: Ignored = None
    include_stop_str_in_output: Ignored = None
    output_kind: Ignored = None
    skip_clone: Ignored = None
    skip_special_tokens: Ignored = None
    spaces_between_special_tokens: Ignored = None
    stream_interval: Ignored = None

    allowed_token_ids: Refused = None
    bad_words: Refused = None
    extra_args: Refused = None
    logprob_token_ids: Refused = None
    prompt_logprob_start: Annotated[Json, refused(unless=0)] = None
    repetition_detection: Refused = None
    skip_reading_prefix_cache: Refused = None
    structured_outputs: Refused = None
    thinking_token_budget: Refused = None
    trace_decode_token_ids: Refused = None
    watermarking: Refused = None


class TokensBody(Body):
    """The body of `POST /inference/v1/generate`.

    `cache_salt` is accepted and ignored: `kv_policy` determines which KV a request can use. `return_token_ids` adds
    the prompt's ids to the response.
    """

    token_ids: Annotated[list[TokenId], FailFast()] = Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
    sampling_params: VllmSamplingBody
    model: Model | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)] | None = None
    return_token_ids: bool | None = None
    weight_version: VersionDemandBody | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    token_offsets: Ignored = None
    stream_options: Ignored = None
    reasoning_ended: Ignored = None
    reasoning_parser_kwargs: Ignored = None

    content_parts: Refused = None
    ec_transfer_params: Refused = None
    features: Refused = None
    kv_transfer_params: Refused = None
    output_mode: Annotated[Json, refused(unless="tokens")] = None
    priority: Annotated[Json, refused(unless=0)] = None
    stream: Refused = None


def to_call(body: TokensBody, model: ChatModel) -> ChatCall:
    """Convert a body to a `ChatCall`. Raises InvalidRequest naming a field of the body."""
    params = body.sampling_params
    num_top = params.logprobs if params.logprobs is not None and params.logprobs > 1 else 0
    check_num_top(num_top, model.max_logprobs, "sampling_params.logprobs")
    try:
        sampling = sampling_of(params, params.max_tokens, model.vocab_size, num_top)
    except InvalidRequest as error:
        raise type(error)(error.message, param=f"sampling_params.{error.param}") from error
    if body.weight_version is not None:
        sampling = replace(sampling, weight_version=body.weight_version.to_demand())
    return ChatCall(
        messages=(),
        prompt_ids=tuple(body.token_ids),
        sampling=sampling,
        max_tokens=params.max_tokens,
        num_choices=params.n or 1,
        stop=stops_of(params),
        timeout_s=model.timeout_s,
    )


def prompt_call(body: TokensBody, model: ChatModel) -> ChatCall | None:
    """Return the call that scores the prompt; None if the body requests no scores or there is no token to score."""
    num_top, ids = body.sampling_params.prompt_logprobs, tuple(body.token_ids)
    if num_top is None:
        return None
    param = "sampling_params.prompt_logprobs"
    return score_call(ids, 1, num_top, model, body.weight_version, param=param, top_param=param)


def render_tokens(
    replies: Sequence[Reply],
    score: Generation | None,
    body: TokensBody,
    *,
    request_id: str,
    created_at: int,
    model: str,
) -> dict[str, Any]:
    """Return the response for the replies, in the order of their choices. Versions are strings, like vLLM's."""
    num_prompt, num_sampled = len(body.token_ids), sum(len(reply.token_ids) for reply in replies)
    return {
        "request_id": request_id,
        "model": model,
        "created": created_at,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
        },
        "output_mode": "tokens",
        **version_range(replies if score is None else (*replies, score)),
        "choices": [_choice(index, reply, body.sampling_params) for index, reply in enumerate(replies)],
        "prompt_logprobs": None if body.sampling_params.prompt_logprobs is None else _prompt_logprobs(score),
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _prompt_logprobs(score: Generation | None) -> list[dict[str, Any] | None]:
    """Return an entry for each token of the prompt; the first is None, because it has no logprob."""
    entries: list[dict[str, Any] | None] = [None]
    if score is not None:
        tops = score.top_logprobs or [()] * len(score.token_ids)
        for token_id, logprob, row in zip(score.token_ids, score.logprobs, tops, strict=True):
            ranks = {top_id: rank for rank, (top_id, _) in enumerate(row, 1)}
            entries.append(
                {
                    str(entry_id): {"logprob": value, "rank": ranks.get(entry_id), "decoded_token": None}
                    for entry_id, value in {token_id: logprob, **dict(row)}.items()
                }
            )
    return entries


def _choice(index: int, reply: Reply, params: VllmSamplingBody) -> dict[str, Any]:
    token_ids = reply.token_ids.tolist()
    return {
        "index": index,
        "token_ids": token_ids,
        "logprobs": None if params.logprobs is None else {"content": _entries(reply, token_ids, params.logprobs)},
        "finish_reason": _FINISH.get(reply.finish_reason, "abort"),
        "stop_reason": _stop_reason(reply, token_ids, params),
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end} for span in reply.weight_versions
        ],
        **_aux(reply, params.routed_experts_prompt_start),
    }


def _aux(reply: Reply, start: int) -> dict[str, Any]:
    """Return the auxiliary rows as vLLM writes them: an array in NumPy's format in base64, and lists of ids."""
    aux = reply.aux or {}
    experts, mask = aux.get(AuxKind.ROUTED_EXPERTS), aux.get(AuxKind.SAMPLING_MASK)
    encoded = None
    if experts is not None and experts.start <= start <= experts.end:
        file = io.BytesIO()
        np.save(file, experts.unpacked().cut(start, experts.end).table, allow_pickle=False)
        encoded = base64.b64encode(file.getbuffer()).decode("ascii")
    kept = None if mask is None else [row.tolist() for row in mask.unpacked().rows()]
    return {"routed_experts": encoded, "sampling_mask": kept}


def _entries(reply: Reply, token_ids: list[int], num_top: int) -> list[dict[str, Any]]:
    logprobs, tops = reply.logprobs.tolist(), reply.top_logprobs
    entries = []
    for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        others = [pair for pair in tops[place] if pair[0] != token_id] if tops else []
        shown = [(token_id, logprob), *others][: max(num_top, 1)]
        entries.append({**_entry(token_id, logprob), "top_logprobs": [_entry(*pair) for pair in shown]})
    return entries


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": token_id_name(token_id), "token_id": token_id, "logprob": logprob, "rank": None, "bytes": None}


def _stop_reason(reply: Reply, token_ids: list[int], params: VllmSamplingBody) -> int | str | None:
    """Return the stop string, or the stop token of the request, that ended a reply; None for any other reason.

    A stop token of the model counts if the request names it, too.
    """
    if reply.stop_text:
        return reply.stop_text
    if (
        reply.finish_reason is FinishReason.STOP
        and token_ids[-1:]
        and token_ids[-1] in (params.stop_token_ids or ())
    ):
        return int(token_ids[-1])
    return None
