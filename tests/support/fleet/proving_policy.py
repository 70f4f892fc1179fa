"""A policy whose every token proves under which weights, and after which tokens, it was sampled.

Its replies follow a script that depends on the conversation alone, so a turn that is cut and continued, on any
replica, continues unchanged. Each logprob is a hash of the tokens before it, of the version under which each was
read, and of the version under which it is sampled. A token under a wrong version, after a lost or a duplicated
token, or from a stale cache has a different logprob.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import lru_cache

import xxhash

from agentloop.simulation.policy import HashPolicy, TokenStream
from agentloop.types import GenerateRequest, Message, SamplingParams
from tests.support.engine.scripted import RENDERER, ids

_pack = struct.Struct("<QQQ").pack
_HEADER = tuple(RENDERER.render([Message("user", "?")], [])[-3:])  # a turn begins after these ids
_STOP = RENDERER.stop_token_ids[0]
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "and", "so", "it")
_HASHES = HashPolicy(RENDERER.vocab_size)


class ProvingPolicy:
    """A TokenPolicy for the shipped tokenizer. Turns differ in length; every other one calls the tool `note`."""

    def open(self, request: GenerateRequest) -> TokenStream:
        return _Stream(_reply(request.token_ids), _HASHES.open(request))


def logprobs_of(token_ids: Sequence[int], start: int, end: int, version: int, adapter: str = "") -> list[float]:
    """Return the logprobs of `token_ids[start:end]` if all tokens before the end were read under one version."""
    stream = _HASHES.open(GenerateRequest("", (1,), SamplingParams(1), 1.0, adapter=adapter))
    state = stream.advance(0, token_ids[:start], version)
    found = []
    for token_id in token_ids[start:end]:
        found.append(_logprob(state, version, token_id))
        state = stream.advance(state, (token_id,), version)
    return found


def kept_with(token_id: int) -> tuple[int, ...]:
    """Return the ids, ascending, from which a token was sampled: their number and values depend on the token."""
    others = (token_id * 7 + place * 13 for place in range(1, 2 + token_id % 3))
    return tuple(sorted({token_id, *(one % RENDERER.vocab_size for one in others)}))


class _Stream:
    __slots__ = ("_num_sampled", "_reader", "_reply")

    def __init__(self, reply: Sequence[int], reader: TokenStream) -> None:
        self._reply = reply
        self._reader = reader
        self._num_sampled = 0

    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        return self._reader.advance(state, token_ids, weight_version)

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        token_id = self._reply[self._num_sampled] if self._num_sampled < len(self._reply) else _STOP
        self._num_sampled += 1
        return token_id, _logprob(state, weight_version, token_id)

    def alternatives(
        self, state: int, weight_version: int, *, is_raw: bool = False
    ) -> tuple[tuple[int, float], ...]:
        token_id = self._reply[self._num_sampled] if self._num_sampled < len(self._reply) else _STOP
        return tuple((one, 0.0) for one in kept_with(token_id))

    def raw_logprob(self, state: int, weight_version: int, token_id: int) -> float:
        return _logprob(state, weight_version, token_id)


def _logprob(state: int, version: int, token_id: int) -> float:
    """Return a number in [-1, 0) that float32 represents exactly."""
    return -(1 + xxhash.xxh3_64_intdigest(_pack(state, version, token_id)) % 2**20) / 2**20


def _reply(prompt_ids: Sequence[int]) -> Sequence[int]:
    """Return the rest of the last turn's reply, without the part that the prompt already has."""
    prompt = tuple(prompt_ids)
    at = next((n for n in range(len(prompt) - 3, -1, -1) if prompt[n : n + 3] == _HEADER), None)
    if at is None:
        return ()
    head = at + 3
    return _whole_reply(xxhash.xxh3_64_intdigest(struct.pack(f"<{head}I", *prompt[:head])))[len(prompt) - head :]


@lru_cache(maxsize=4096)
def _whole_reply(digest: int) -> tuple[int, ...]:
    num_words = 2 + digest % 23
    text = " ".join(_WORDS[(digest >> n) % len(_WORDS)] for n in range(num_words))
    if digest >> 32 & 1:
        arguments = {"key": f"{digest:016x}"}
        text += "\n<tool_call>\n" + json.dumps({"name": "note", "arguments": arguments}) + "\n</tool_call>"
    return (*ids(text), _STOP)
