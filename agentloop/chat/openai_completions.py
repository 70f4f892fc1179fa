"""The OpenAI Completions dialect: converts a raw prompt (text or token ids) to a `ChatCall`, and writes the answer.

The prompt is not rendered with a template, and control tokens in its text become control tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from agentloop.chat.call import Answer, ChatCall, ChatModel, ChatResult, version_range
from agentloop.chat.choices import ChoiceWriter, TokenTexts
from agentloop.chat.openai import sampling_of, stops_of
from agentloop.chat.openai_bodies import CompletionBody
from agentloop.chat.scores import score_call
from agentloop.errors import InvalidRequest
from agentloop.generation.turn_reader import TurnFinish, TurnPiece, finish_of
from agentloop.rendering.port import Renderer
from agentloop.trajectory.node import Reply
from agentloop.types import Generation, TopLogprobs

DEFAULT_MAX_TOKENS = 16
"""The OpenAI API's default of `max_tokens` in completions."""


def prompts_of(body: CompletionBody, renderer: Renderer) -> list[tuple[int, ...]]:
    """Return the ids of each prompt, in time linear in its text. Raises InvalidRequest for an unknown token id."""
    prompts: Any = body.prompt if body.is_batch else [body.prompt]
    ids = [tuple(renderer.ids(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts]
    if (largest := max(map(max, filter(None, ids)), default=0)) >= renderer.vocab_size:
        raise InvalidRequest(f"token id {largest} is outside [0, {renderer.vocab_size})", param="prompt")
    return ids


def to_call(body: CompletionBody, prompt_ids: tuple[int, ...], model: ChatModel) -> ChatCall:
    """Convert one prompt of a body to a `ChatCall`. Raises InvalidRequest."""
    priority = body.call_priority(has_priority=model.has_priority)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return ChatCall(
        messages=(),
        prompt_ids=prompt_ids,
        sampling=sampling_of(body, max_tokens, model.vocab_size, body.logprobs or 0, priority=priority),
        max_tokens=max_tokens,
        num_choices=body.n or 1,
        stop=stops_of(body),
        timeout_s=model.timeout_s,
    )


def joined(answers: Sequence[Answer]) -> Answer:
    """Join the answers to a list of prompts. Fields that differ by prompt move into the choices."""
    of_one = ("session", "weight_version_start", "weight_version_end")
    choices = [
        {**choice, **{name: answer[name] for name in of_one if name in answer}}
        for answer in answers
        for choice in answer["choices"]
    ]
    counts = [answer["usage"] for answer in answers]
    usage = {
        name: sum(count[name] for count in counts) for name, value in counts[0].items() if isinstance(value, int)
    }
    whole = {name: value for name, value in answers[0].items() if name not in (*of_one, "prompt_token_ids")}
    indexed = [{**choice, "index": index} for index, choice in enumerate(choices)]
    return {**whole, "choices": indexed, "usage": usage}


def echo_call(body: CompletionBody, prompt_ids: tuple[int, ...], model: ChatModel) -> ChatCall | None:
    """Return the call that scores an echoed prompt; None if the prompt is one token. Raises InvalidRequest."""
    return score_call(
        prompt_ids, 1, body.logprobs or 0, model, body.weight_version, param="logprobs", top_param="logprobs"
    )


class CompletionWriter(ChoiceWriter):
    """Writes one completion."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    empty: ClassVar[Answer] = {"text": ""}

    def __init__(self, body: CompletionBody, texts: TokenTexts, created_at: int) -> None:
        super().__init__(body, texts, created_at, shows_logprobs=body.logprobs is not None)
        self._num_chars: dict[int, int] = {}  # characters of each choice's tokens so far

    def parts(self, piece: TurnPiece) -> list[Answer]:
        return [{"text": piece.content}] if piece.content else []

    def whole(self, result: ChatResult) -> Answer:
        """Return the answer of a call without streaming."""
        answer = super().whole(result)
        if "prompt_token_ids" in answer:  # vLLM returns the prompt's ids in each choice
            for choice in answer["choices"]:
                choice["prompt_token_ids"] = answer["prompt_token_ids"]
        return answer

    def whole_part(self, reply: Reply) -> Answer:
        return {"text": reply.message.content}

    def echoed(self, prompt_ids: tuple[int, ...], text: str, score: Generation | None, created_at: int) -> Answer:
        """Return the answer with a prompt and its logprobs; the first logprob is null."""
        logprobs = (None, *(() if score is None else score.logprobs))
        columns = self.texts.columns(prompt_ids, logprobs, ((), *score.top_logprobs) if score else (), 0)
        if columns["top_logprobs"] is not None:
            columns["top_logprobs"][0] = None
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": columns}
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(prompt_ids)
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": 0, "total_tokens": len(prompt_ids)}
        versions = version_range([] if score is None else [score])
        fingerprint = f"v{versions['weight_version_end']}" if score else None
        head = self._head(uuid.uuid4().hex, self.whole_object, created_at, fingerprint)
        return {**head, "choices": [choice], "usage": usage, **versions}

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs) -> Answer:
        before = self._num_chars.get(index, 0)
        columns = self.texts.columns(token_ids, logprobs, top, before)
        self._num_chars[index] = before + sum(map(len, columns["tokens"]))
        return columns

    def finish(self, reply: Reply) -> str:
        """Return a reply's `finish_reason`, "length" or "stop": this API does not parse tool calls."""
        return "length" if finish_of(reply) is TurnFinish.LENGTH else "stop"
