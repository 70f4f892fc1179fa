"""Logprobs in the OpenAI shapes: tokens as text and bytes, and the likeliest alternatives.

Every sampled token has its entry, stop token and tool calls too, so that entries and `token_ids` have one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentloop.rendering.port import Renderer
from agentloop.types import TopLogprobs

_MAX_KNOWN = 1 << 16


def token_id_name(token_id: int) -> str:
    """Return the name of a token in vLLM's `return_tokens_as_token_ids` form."""
    return f"token_id:{token_id}"


class TokenTexts:
    """The texts of single tokens, in bounded memory. Several threads may use it; at worst they decode twice."""

    def __init__(self, renderer: Renderer, *, as_ids: bool = False) -> None:
        self._renderer = renderer
        self._as_ids = as_ids
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes; the text has U+FFFD if it is only a part of a character."""
        found = self._known.get(token_id)
        if found is None:
            octets = self._renderer.token_bytes(token_id)
            found = (octets.decode(errors="replace"), list(octets))
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[token_id] = found
        return (token_id_name(token_id), found[1]) if self._as_ids else found

    def written(self, *, as_ids: bool | None) -> TokenTexts:
        """Return these texts, or with `as_ids` the tokens' names (`token_id_name`), beside the same bytes."""
        if not as_ids:
            return self
        names = TokenTexts(self._renderer, as_ids=True)
        names._known = self._known
        return names

    def entries(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs
    ) -> list[dict[str, Any]]:
        """Return `choices[].logprobs.content` of a chat completion. `top` is empty or has one entry a token."""
        return [
            {
                **self._entry(token_id, logprob),
                "top_logprobs": [self._entry(*one) for one in top[index]] if top else [],
            }
            for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
        ]

    def columns(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], top: TopLogprobs, offset: int
    ) -> dict[str, Any]:
        """Return `choices[].logprobs` of a text completion; `offset` is the number of characters before.

        Without alternatives `top_logprobs` has the sampled tokens, as vLLM's.
        """
        texts = [self.of(token_id)[0] for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": [{self.of(one)[0]: logprob for one, logprob in row} for row in top]
            or [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, octets = self.of(token_id)
        return {"token": text, "logprob": logprob, "bytes": octets}
