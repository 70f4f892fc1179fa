"""Writers of chat completion and completion answers, as a whole or as chunks, with logprobs.

Answers are dicts for `orjson` with the fields of `openai.types` and additional fields for trainers. Invariants: the
chunks of a stream concatenate to the complete answer; the finish chunk is sent after the turn is recorded; logprobs
entries and `token_ids` have the same length, because stop tokens and tokens of tool calls have entries too.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from agentloop.chat.call import Answer, ChatResult, session_extra, version_range, versions_of
from agentloop.chat.openai_bodies import CallBase
from agentloop.generation.turn_reader import TurnPiece, finish_of
from agentloop.rendering.port import Renderer
from agentloop.trajectory.node import Reply
from agentloop.types import TopLogprobs

_MAX_KNOWN = 1 << 16


def token_id_name(token_id: int) -> str:
    """Return a token's name in the form of vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


class TokenTexts:
    """A bounded cache of the texts of single tokens. Thread-safe; concurrent threads may decode a token twice."""

    def __init__(self, renderer: Renderer, *, as_ids: bool = False) -> None:
        self._renderer = renderer
        self._as_ids = as_ids
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes. The text has U+FFFD in place of an incomplete character."""
        entry = self._known.get(token_id)
        if entry is None:
            octets = self._renderer.token_bytes(token_id)
            entry = (octets.decode(errors="replace"), list(octets))
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[token_id] = entry
        return (token_id_name(token_id), entry[1]) if self._as_ids else entry

    def written(self, *, as_ids: bool | None) -> TokenTexts:
        """Return this cache; with `as_ids`, a view that returns `token_id_name` in place of each text."""
        if not as_ids:
            return self
        names = TokenTexts(self._renderer, as_ids=True)
        names._known = self._known
        return names

    def entries(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs
    ) -> list[dict[str, Any]]:
        """Return `choices[].logprobs.content` of a chat completion. `top` is empty or has one entry per token."""
        return [
            {
                **self._entry(token_id, logprob),
                "top_logprobs": [self._entry(*alternative) for alternative in top[index]] if top else [],
            }
            for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
        ]

    def columns(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], top: TopLogprobs, offset: int
    ) -> dict[str, Any]:
        """Return `choices[].logprobs` of a text completion. `offset` is the number of preceding characters.

        If `top` is empty, `top_logprobs` holds the sampled tokens, as in vLLM.
        """
        texts = [self.of(token_id)[0] for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": [{self.of(token_id)[0]: logprob for token_id, logprob in row} for row in top]
            or [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, octets = self.of(token_id)
        return {"token": text, "logprob": logprob, "bytes": octets}


class ChoiceWriter(ABC):
    """Writes one answer. A `part` holds the dialect's own fields of a choice (message, delta or text)."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    opening: ClassVar[Answer | None] = None  # the part of a choice's opening chunk; None if there is no such chunk
    empty: ClassVar[Answer]  # the part of a chunk without text

    def __init__(self, body: CallBase, texts: TokenTexts, created_at: int, *, shows_logprobs: bool) -> None:
        """`created_at` is the Unix time in a stream's chunks."""
        self.texts = texts.written(as_ids=body.return_tokens_as_token_ids)
        self._body = body
        self._shows_logprobs = shows_logprobs
        self._chunk_head = self._head(uuid.uuid4().hex, self.chunk_object, created_at, None)
        self._usage: Answer = {"usage": None} if body.includes_usage else {}
        self._opened: set[int] = set()  # the choices whose opening chunk was sent

    @abstractmethod
    def parts(self, piece: TurnPiece) -> list[Answer]:
        """Return the parts of a piece, one per chunk."""

    @abstractmethod
    def whole_part(self, reply: Reply) -> Answer:
        """Return the part of a complete choice."""

    @abstractmethod
    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs) -> Answer:
        """Return the logprobs of a choice's next tokens."""

    def finish(self, reply: Reply) -> str:
        """Return a reply's `finish_reason`."""
        return finish_of(reply).value

    def whole(self, result: ChatResult) -> Answer:
        """Return the answer of a call without streaming."""
        choices = []
        for node in result.choices:
            index, reply = node.choice_index, node.reply
            choice = _choice(index, self.whole_part(reply), self.finish(reply))
            choice["weight_versions"] = versions_of(node)
            token_ids = reply.token_ids.tolist()
            if self._shows_logprobs:
                choice["logprobs"] = self.logprobs(index, token_ids, reply.logprobs.tolist(), reply.top_logprobs)
            if self._body.return_token_ids:
                choice["token_ids"] = token_ids
            choices.append(choice)
        head = self._head(result.call_id, self.whole_object, result.created_at, _fingerprint(result))
        return {**head, "choices": choices, "usage": usage_of(result), **self._extras(result)}

    def chunks(self, piece: TurnPiece | ChatResult) -> Iterator[Answer]:
        """Yield the chunks of a stream's next item. The caller writes `[DONE]` after the last chunk."""
        return self._ended(piece) if isinstance(piece, ChatResult) else self._added(piece)

    def _added(self, piece: TurnPiece) -> Iterator[Answer]:
        """Yield the chunks of one piece, if it has any requested content."""
        index = piece.choice_index
        if piece.weight_versions:
            self._chunk_head["system_fingerprint"] = f"v{piece.weight_versions[-1].version}"
        yield from self._opening(index)
        shows_tokens = bool(piece.token_ids) and (self._shows_logprobs or self._body.return_token_ids)
        for position, part in enumerate(self.parts(piece) or ([self.empty] if shows_tokens else [])):
            choice = _choice(index, part)
            if position == 0:  # the first chunk holds all tokens of the piece
                if self._shows_logprobs and piece.token_ids:
                    choice["logprobs"] = self.logprobs(index, piece.token_ids, piece.logprobs, piece.top_logprobs)
                if self._body.return_token_ids:
                    choice["token_ids"] = list(piece.token_ids)
            yield self._chunk([choice])

    def _ended(self, result: ChatResult) -> Iterator[Answer]:
        """Yield the finish chunks, which hold the fields of the complete answer, and the usage if requested."""
        self._chunk_head["system_fingerprint"] = _fingerprint(result)
        for node in result.choices:
            yield from self._opening(node.choice_index)
            choice = _choice(node.choice_index, self.empty, self.finish(node.reply))
            choice["weight_versions"] = versions_of(node)
            yield self._chunk([choice]) | (self._extras(result) if node is result.choices[-1] else {})
        if self._body.includes_usage:
            yield self._chunk([]) | {"usage": usage_of(result)}

    def _opening(self, index: int) -> Iterator[Answer]:
        if self.opening is not None and index not in self._opened:
            self._opened.add(index)
            yield self._chunk([_choice(index, self.opening)])

    def _chunk(self, choices: list[Answer]) -> Answer:
        return {**self._chunk_head, "choices": choices, **self._usage}

    def _head(self, call_id: str, kind: str, created_at: int, fingerprint: str | None) -> Answer:
        return {
            "id": f"{self.id_prefix}-{call_id}",
            "object": kind,
            "created": created_at,
            "model": self._body.model,
            "system_fingerprint": fingerprint,
        }

    def _extras(self, result: ChatResult) -> Answer:
        extras: Answer = {"session": session_extra(result), **version_range(node.reply for node in result.choices)}
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = list(result.prompt_ids)
        return extras


def _choice(index: int, part: Answer, finish: str | None = None) -> Answer:
    return {"index": index, **part, "logprobs": None, "finish_reason": finish}


def usage_of(result: ChatResult) -> Answer:
    """Return the token counts. The prompt is counted once, independent of the number of choices."""
    num_prompt = len(result.prompt_ids)
    num_sampled = sum(len(node.reply.token_ids) for node in result.choices)
    num_reasoning = sum(node.reply.num_reasoning_tokens for node in result.choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": result.choices[0].reply.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def _fingerprint(result: ChatResult) -> str | None:
    """Return the weight version of the answer's last token as `v{version}`."""
    spans = result.choices[0].reply.weight_versions
    return f"v{spans[-1].version}" if spans else None
