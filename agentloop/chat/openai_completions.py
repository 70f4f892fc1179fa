"""Text completions: a raw prompt, as text or ids, to a `ChatCall`, and its result to the answer.

The prompt goes to the policy as it is: no template, and control tokens that it spells are control tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from agentloop.chat.call import ChatCall, ChatModel, ChatResult
from agentloop.chat.dialect import Answer, session_extra, versions_of
from agentloop.chat.logprobs import TokenTexts
from agentloop.chat.openai import answer_of, fingerprint, sampling_of, stops_of, usage_of
from agentloop.chat.openai_bodies import CompletionBody
from agentloop.errors import InvalidRequest
from agentloop.generation.turn_piece import TurnFinish, TurnPiece, finish_of
from agentloop.rendering.port import Renderer
from agentloop.trajectory.node import Node

DEFAULT_MAX_TOKENS = 16
"""What the OpenAI API samples where a completion names no `max_tokens`."""


def prompt_ids_of(body: CompletionBody, renderer: Renderer) -> tuple[int, ...]:
    """The ids of the prompt. Takes time with a text's length. Raises InvalidRequest."""
    ids = renderer.ids(body.prompt) if isinstance(body.prompt, str) else body.prompt
    if max(ids, default=0) >= renderer.vocab_size:
        raise InvalidRequest(f"a token id is outside [0, {renderer.vocab_size})", param="prompt")
    return tuple(ids)


def to_call(body: CompletionBody, prompt_ids: tuple[int, ...], model: ChatModel) -> ChatCall:
    """The call that a body asks for. Raises InvalidRequest."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return ChatCall(
        messages=(),
        prompt_ids=prompt_ids,
        sampling=sampling_of(body, max_tokens, model.vocab_size, body.logprobs or 0, priority=body.priority),
        max_tokens=max_tokens,
        num_choices=body.n or 1,
        stop=stops_of(body),
        timeout_s=model.timeout_s,
    )


def render_completion(result: ChatResult, body: CompletionBody, texts: TokenTexts) -> Answer:
    """The whole answer."""
    texts = texts.written(as_ids=body.return_tokens_as_token_ids)
    choices = [_choice(node, body, texts) for node in result.choices]
    return answer_of(result, body, "cmpl", "text_completion", choices)


def _choice(node: Node, body: CompletionBody, texts: TokenTexts) -> Answer:
    reply = node.reply
    choice: Answer = {
        "index": node.choice_index,
        "text": reply.message.content,
        "logprobs": None,
        "finish_reason": _finish(node),
        "weight_versions": versions_of(node),
    }
    if body.logprobs is not None:
        ids, logprobs = reply.token_ids.tolist(), reply.logprobs.tolist()
        choice["logprobs"] = texts.columns(ids, logprobs, reply.top_logprobs, 0)
    if body.return_token_ids:
        choice["token_ids"] = reply.token_ids.tolist()
    return choice


def _finish(node: Node) -> str:
    return "length" if finish_of(node.reply) is TurnFinish.LENGTH else "stop"


async def completion_chunks(
    pieces: AsyncIterator[TurnPiece | ChatResult], body: CompletionBody, texts: TokenTexts, created_at: int
) -> AsyncIterator[Answer]:
    """The chunks of a stream; the finish reasons come after the turn is recorded."""
    texts = texts.written(as_ids=body.return_tokens_as_token_ids)
    head: Answer = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": created_at,
        "model": body.model,
        "system_fingerprint": None,
    }
    usage: Answer = {"usage": None} if body.includes_usage else {}
    shows_tokens = body.return_token_ids or body.logprobs is not None
    num_chars: dict[int, int] = {}
    async for piece in pieces:
        if isinstance(piece, ChatResult):
            head["system_fingerprint"] = fingerprint(piece)
            for node in piece.choices:
                choice = _piece_choice(node.choice_index, finish=_finish(node))
                choice["weight_versions"] = versions_of(node)
                last: dict[str, Any] = {"session": session_extra(piece)} if node is piece.choices[-1] else {}
                if last and body.return_token_ids:
                    last["prompt_token_ids"] = list(piece.prompt_ids)
                yield {**head, "choices": [choice], **usage, **last}
            if body.includes_usage:
                yield {**head, "choices": [], "usage": usage_of(piece)}
        elif piece.content or (piece.token_ids and shows_tokens):
            index = piece.choice_index
            choice = _piece_choice(index, piece.content)
            if body.logprobs is not None and piece.token_ids:
                before = num_chars.get(index, 0)
                columns = texts.columns(piece.token_ids, piece.logprobs, piece.top_logprobs, before)
                num_chars[index] = before + sum(map(len, columns["tokens"]))
                choice["logprobs"] = columns
            if body.return_token_ids:
                choice["token_ids"] = list(piece.token_ids)
            yield {**head, "choices": [choice], **usage}


def _piece_choice(index: int, text: str = "", finish: str | None = None) -> Answer:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
