"""A streamed reply that may take several engine requests: what has been given out, and what is still to be asked.

Invariant: the pieces added so far, in their order, are a prefix of the joined `Generation`'s ids and logprobs.
"""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import chain

from agentloop.checks import check_generation
from agentloop.engine import Delta
from agentloop.errors import MalformedEngineResponse
from agentloop.types import FinishReason, GenerateRequest, Generation, WeightVersionSpan


class Continuation:
    """One reply in the making. `request` is the caller's; each attempt asks `next_request`."""

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        self.request = request
        self._vocab_size = vocab_size
        self._deadline_at = asyncio.get_running_loop().time() + request.timeout_s
        self._asked = request
        self._num_attempts = 0
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self._spans: list[WeightVersionSpan] = []
        self._num_before = 0  # tokens of earlier attempts
        self._replica_id = ""

    @property
    def can_go_on(self) -> bool:
        """Whether another attempt gives the same reply, or one of the same distribution.

        A constraint and penalties look at what the reply already has; a new request takes that for its prompt.
        """
        sampling = self.request.sampling
        has_memory = sampling.constraint is not None or sampling.frequency_penalty or sampling.presence_penalty
        return not (self._token_ids and has_memory)

    def next_request(self) -> GenerateRequest:
        """What is still to be asked: the prompt with the ids so far, under an id of its own."""
        request, num_have = self.request, len(self._token_ids)
        if self._num_attempts == 0:
            self._num_attempts = 1
            return request
        sampling = dataclasses.replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - num_have,
            min_tokens=max(0, request.sampling.min_tokens - num_have),
        )
        self._asked = dataclasses.replace(
            request,
            request_id=f"{request.request_id}~{self._num_attempts}",  # an engine may still know the one before
            token_ids=(*request.token_ids, *self._token_ids) if num_have else request.token_ids,
            sampling=sampling,
            timeout_s=max(self._deadline_at - asyncio.get_running_loop().time(), 0.001),
        )
        self._num_attempts += 1
        self._num_before = num_have
        return self._asked

    def add(self, piece: Delta, replica_id: str) -> None:
        """Append a piece of the present attempt. Raises MalformedEngineResponse, and nothing is appended then."""
        self._check(piece)
        start = len(self._token_ids)
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._top_logprobs += piece.top_logprobs
        self._spans += [_shifted(span, start) for span in piece.weight_versions]
        self._replica_id = replica_id

    def finish(self, last: Generation) -> Generation:
        """The whole reply, from the last attempt's generation. Raises MalformedEngineResponse if that is not what
        its pieces were."""
        check_generation(self._asked, last, self._vocab_size)
        if last.token_ids != tuple(self._token_ids[self._num_before :]):
            raise MalformedEngineResponse(f"request {self._asked.request_id}: its pieces were other ids")
        if self._num_before == 0:
            return dataclasses.replace(last, request_id=self.request.request_id)
        return dataclasses.replace(
            self._joined(last.finish_reason),
            cached_tokens=min(last.cached_tokens, len(self.request.token_ids)),
            replica_id=last.replica_id,
            load=last.load,
        )

    def ended(self) -> Generation | None:
        """The whole reply, if the pieces so far are one: its generation alone was lost."""
        sampling = self.request.sampling
        if self._token_ids and self._token_ids[-1] in sampling.stop_token_ids:
            return self._joined(FinishReason.STOP)
        if len(self._token_ids) >= sampling.max_tokens:
            return self._joined(FinishReason.LENGTH)
        return None

    def _joined(self, finish_reason: FinishReason) -> Generation:
        return Generation(
            self.request.request_id,
            tuple(self._token_ids),
            tuple(self._logprobs),
            _merged(self._spans),
            finish_reason,
            replica_id=self._replica_id,
            top_logprobs=tuple(self._top_logprobs),
        )

    def _check(self, piece: Delta) -> None:
        partial = Generation(
            self._asked.request_id,
            piece.token_ids,
            piece.logprobs,
            piece.weight_versions,
            FinishReason.ABORT,
            top_logprobs=piece.top_logprobs,
        )
        check_generation(self._asked, partial, self._vocab_size)
        versions = [span.version for span in chain(self._spans[-1:], piece.weight_versions[:1])]
        if versions != sorted(versions):
            raise MalformedEngineResponse(
                f"request {self._asked.request_id}: weight version {versions[1]} after {versions[0]}"
            )


def _shifted(span: WeightVersionSpan, offset: int) -> WeightVersionSpan:
    return WeightVersionSpan(span.version, span.start + offset, span.end + offset)


def _merged(spans: list[WeightVersionSpan]) -> tuple[WeightVersionSpan, ...]:
    """The same tiling with neighbours of one version as one span."""
    merged: list[WeightVersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = WeightVersionSpan(span.version, merged[-1].start, span.end)
        else:
            merged.append(span)
    return tuple(merged)
