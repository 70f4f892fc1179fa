"""What the dialects share: sampling, the form of an answer, and what trainers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentloop.chat.answers import session_extra, versions_of
from agentloop.chat.call import ChatResult, ToolChoice
from agentloop.errors import InvalidRequest
from agentloop.parsers import Parser
from agentloop.types import JSON, Constraint, ConstraintKind, SamplingParams


def sampling_params(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    min_tokens: int | None,
    max_tokens: int | None,
) -> SamplingParams:
    """How to sample, None being the default; a `top_p` of 0 is the likeliest token. Raises InvalidRequest."""
    if max_tokens is not None and (min_tokens or 0) > max_tokens:
        raise InvalidRequest("min_tokens is above the maximum", param="min_tokens")
    return SamplingParams(
        max_tokens=1 if max_tokens is None else max_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=top_p or 1.0,
        top_k=1 if top_p == 0 else max(top_k or 0, 0),
        min_tokens=min_tokens or 0,
        seed=seed,
    )


def answer_constraint(
    wanted: Constraint | None,
    parser: Parser,
    tools: tuple[Mapping[str, JSON], ...],
    choice: ToolChoice,
    *,
    is_parallel: bool,
) -> Constraint | None:
    """What a turn must be whose answer, if it is one, must be as `wanted`; that of forced calls is not here."""
    if wanted is None or choice is ToolChoice.REQUIRED:
        return None
    if not tools or choice is ToolChoice.NONE:
        return wanted
    return _answer_or_calls(wanted, parser, tools, is_parallel=is_parallel)


def _answer_or_calls(
    answer: Constraint, parser: Parser, tools: Sequence[Mapping[str, JSON]], *, is_parallel: bool
) -> Constraint:
    """A turn that is an answer of a constrained form, or else calls of tools and nothing beside them."""
    calls = orjson.loads(parser.call_constraint(tools, forced=None, is_parallel=is_parallel).text)
    schema = orjson.loads(answer.text) if answer.kind is ConstraintKind.JSON_SCHEMA else {"type": "object"}
    either = {"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, calls["format"]]}
    tag = {"type": "structural_tag", "format": either}
    return Constraint(ConstraintKind.STRUCTURAL_TAG, orjson.dumps(tag).decode())


def capture_extras(result: ChatResult, *, with_token_ids: bool) -> dict[str, Any]:
    """What a trainer wants to know of an answer of one choice: session and versions, and the ids if asked for."""
    node = result.choices[0]
    extras: dict[str, Any] = {"session": session_extra(result), "weight_versions": versions_of(node)}
    if with_token_ids:
        extras["prompt_token_ids"] = list(result.prompt_ids)
        extras["token_ids"] = node.reply.token_ids.tolist()
    return extras
