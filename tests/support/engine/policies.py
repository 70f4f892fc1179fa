"""Policies of simulated engines for tests: scripted replies, and the continuation of the hashed policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentloop.simulation.policy import HashPolicy, TokenStream
from agentloop.types import GenerateRequest, SamplingParams

_RAW_FACTOR = 2.0  # factor of the raw logprobs, which are made up


def continuation(policy: HashPolicy, token_ids: Sequence[int], version: int, num_tokens: int) -> tuple[int, ...]:
    """Return the greedy ids that follow `token_ids` if all KV and sampling is of one version."""
    greedy = SamplingParams(num_tokens, temperature=0.0)
    stream = policy.open(GenerateRequest("greedy", tuple(token_ids), greedy))
    state = stream.advance(0, token_ids, version)
    sampled = []
    for _ in range(num_tokens):
        token_id, _ = stream.sample(state, version)
        sampled.append(token_id)
        state = stream.advance(state, (token_id,), version)
    return tuple(sampled)


class ScriptedPolicy:
    """A policy with scripted replies: `script` maps a prompt's ids to the ids of its answer.

    After its last id, a reply continues with the request's first stop token (without a stop token, with its last
    id) until the request ends. Logprobs are made up and differ by position; a sampled token has no alternative. An
    empty reply needs a stop token. A script must honor the constraints of the requests that it answers.
    """

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._script = script

    def open(self, request: GenerateRequest) -> TokenStream:
        reply = tuple(self._script(request.token_ids))
        stops = request.sampling.stop_token_ids
        return _ScriptedStream(reply, stops[0] if stops else reply[-1])


class _ScriptedStream:
    __slots__ = ("_after", "_num_sampled", "_reply")

    def __init__(self, reply: tuple[int, ...], after: int) -> None:
        self._reply = reply
        self._after = after
        self._num_sampled = 0

    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        return 0

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        token_id, logprob = self._next()
        self._num_sampled += 1
        return token_id, logprob

    def alternatives(
        self, state: int, weight_version: int, *, is_raw: bool = False
    ) -> tuple[tuple[int, float], ...]:
        token_id, logprob = self._next()
        return ((token_id, logprob * (_RAW_FACTOR if is_raw else 1)),)

    def raw_logprob(self, state: int, weight_version: int, token_id: int) -> float:
        return _made_up(self._num_sampled - 1) * _RAW_FACTOR

    def _next(self) -> tuple[int, float]:
        position = self._num_sampled
        token_id = self._reply[position] if position < len(self._reply) else self._after
        return token_id, _made_up(position)


def _made_up(position: int) -> float:
    return -(1 + position % 7) / 8
