"""Calls of token ids that no session records, with leases that may outlive a call.

An affinity is a caller's name for calls that belong together, like the header `X-Session-ID` of vLLM's server. Its
calls share a lease, so that later turns reach the replica that has the KV cache of the earlier ones. Nothing is
stored on disk and no trajectory is recorded.

Invariants: an affinity releases its lease after `idle_s` without a call and gets one again at its next call; there
are at most `max_affinities`, and the least recently used idle one is dropped first; a call without an affinity
releases its lease on every path.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import xxhash

from agentloop.api.owners import own_id
from agentloop.chat.call import ChatCall
from agentloop.concurrency.aio import side_by_side
from agentloop.errors import DeadlineExceeded, InvalidRequest, Overloaded
from agentloop.generation.deadline import Deadline
from agentloop.generation.leased_engine import AbortSwitch, CallLeases, LeasedEngine
from agentloop.generation.turn_reader import Reading, TurnPiece
from agentloop.generation.turn_sampler import TurnRequest, sample_turn
from agentloop.sessions.prompts import SessionParts, prepare_call
from agentloop.trajectory.node import Reply
from agentloop.trajectory.turn_graph import TurnGraph
from agentloop.types import GenerateRequest, Generation, KVPolicy

Show: TypeAlias = Callable[[int, TurnPiece | Reply], None]
"""Receives the pieces of a choice, by its index, and at the end its reply."""


@dataclass(frozen=True, slots=True)
class TokenCallLimits:
    """Bounds of affinities, of the service's unavailability within one call, and of scores."""

    idle_s: float = 60.0  # without a call, until an affinity releases its lease
    max_affinities: int = 16_384
    max_unavailable_s: float = (
        3600.0  # time without a replica, paused or updating that does not count for a call's deadline
    )
    num_scores: int = 8  # concurrent scores: more prefills would not run faster, but use the engines' KV
    score_share: float = 1.0  # of the engines' time while other calls run; below 1, scores run one at a time


@dataclass(slots=True)
class _Affinity:
    """Calls that share a lease."""

    engine: LeasedEngine
    num_open: int = 0
    used_at: float = 0.0  # the loop's time at the end of its last call
    first_version: int | None = None  # the version of its first sampled token
    context: tuple[int, int] = (0, 0)  # length and digest of the last call's ids

    def num_known(self, prompt_ids: Sequence[int]) -> int:
        """Return the length of the last call's context if the prompt extends it; else 0."""
        length, digest = self.context
        is_known = 0 < length <= len(prompt_ids) and _digest(prompt_ids[:length]) == digest
        return length if is_known else 0


class TokenCalls:
    """The unrecorded calls of one process. The owner of `leases` closes them."""

    def __init__(
        self,
        parts: SessionParts,
        leases: CallLeases,
        limits: TokenCallLimits = TokenCallLimits(),
    ) -> None:
        self._parts = parts
        self._leases = leases
        self._limits = limits
        self._affinities: dict[str, _Affinity] = {}  # longest without a call first
        self._sweeping: asyncio.TimerHandle | None = None
        self._score_places = asyncio.Semaphore(limits.num_scores if limits.score_share == 1.0 else 1)
        self._next_score_at = 0.0  # the loop's time

    async def sample(
        self,
        chat_call: ChatCall,
        affinity: str | None,
        owner: str = "",
        *,
        prompt_param: str = "token_ids",
        switches: Sequence[AbortSwitch] = (),
        show: Show | None = None,
    ) -> list[Reply]:
        """Sample all choices of a raw prompt or a conversation concurrently: all succeed or the call fails.

        A choice with a switch can be ended early. With `show` the choices are streamed. Raises
        ContextLengthExceeded and InvalidRequest (naming `prompt_param`), Overloaded, DeadlineExceeded and the
        engine's errors.
        """
        with self._sharing(affinity, owner, prompt_param) as (name, shared):
            request = await self._request(chat_call, name, shared)
            replies = await self._sample(chat_call, request, shared, switches, show)
            if affinity is not None:  # without an affinity no later call can extend this one
                context = (*request.token_ids, *replies[0].token_ids.tolist())
                shared.context = len(context), _digest(context)
            return replies

    async def score(
        self,
        chat_call: ChatCall,
        affinity: str | None = None,
        owner: str = "",
        *,
        prompt_param: str = "token_ids",
        switch: AbortSwitch | None = None,
    ) -> Generation:
        """Score a prompt's tokens as the call's sampling parameters say; waits for a slot. Raises the errors of
        `sample`."""
        loop = asyncio.get_running_loop()
        async with self._deadline(chat_call.timeout_s) as deadline, self._score_places:
            await asyncio.sleep(self._next_score_at - loop.time())
            began_at = loop.time()
            with self._sharing(affinity, owner, prompt_param) as (name, shared):
                request = await self._request(chat_call, name, shared)
                generation = await shared.engine.generate(request, deadline=deadline, switch=switch)
            if generation.load.num_running:
                # Pause before the next score so that scores use at most their share of a busy engine's time.
                rest = 1 / self._limits.score_share - 1
                self._next_score_at = loop.time() + rest * (loop.time() - began_at)
            return generation

    @contextmanager
    def _sharing(self, affinity: str | None, owner: str, prompt_param: str) -> Iterator[tuple[str, _Affinity]]:
        """Within this context a call has its affinity's lease, or its own without an affinity."""
        name = affinity if affinity is not None else own_id(owner, f"direct-{uuid.uuid4().hex}")
        shared = self._taken(name)
        try:
            yield name, shared
        except InvalidRequest as error:
            if error.param != "prompt":
                raise
            raise type(error)(error.message, param=prompt_param) from error
        finally:
            shared.num_open -= 1
            shared.used_at = asyncio.get_running_loop().time()
            if affinity is None:
                self._affinities.pop(name, None)
                self._leases.end(name)
            else:
                self._sweep_later()

    def finish(self, affinity: str) -> bool:
        """Release an affinity's lease, unless a call is running. Returns True if it was released."""
        shared = self._affinities.get(affinity)
        if shared is None or shared.num_open:
            return False
        self._drop(affinity)
        return True

    async def _sample(
        self,
        chat_call: ChatCall,
        request: GenerateRequest,
        shared: _Affinity,
        switches: Sequence[AbortSwitch],
        show: Show | None,
    ) -> list[Reply]:
        reading = Reading((), 0, reads_calls=False, reads_reasoning=chat_call.prompt_ids is None)
        whole = TurnRequest(request, reading, chat_call.stop)
        choices = [
            replace(whole, choice_index=index, switch=switches[index] if switches else None)
            for index in range(chat_call.num_choices)
        ]
        replies = await side_by_side([self._choice(wanted, shared, show) for wanted in choices])
        spans = replies[0].weight_versions
        if shared.first_version is None and spans:
            shared.first_version = spans[0].version
        return replies

    async def _request(self, chat_call: ChatCall, name: str, shared: _Affinity) -> GenerateRequest:
        parts, request_id = self._parts, uuid.uuid4().hex
        prepared = await prepare_call(chat_call, TurnGraph(), parts, shared.engine, request_id)
        if prepared.overflow is not None:
            raise prepared.overflow
        keeps_kv = parts.kv_policy is KVPolicy.KEEP and chat_call.sampling.score_from is None
        return GenerateRequest(
            request_id=request_id,
            token_ids=prepared.prompt.ids,
            sampling=prepared.sampling,
            timeout_s=chat_call.timeout_s,
            trajectory_id=name,
            kv_version=shared.first_version if keeps_kv else None,
            keeps_kv=keeps_kv,
            traceparent=chat_call.traceparent,
            adapter=chat_call.adapter,
            num_known_tokens=shared.num_known(prepared.prompt.ids),
        )

    @asynccontextmanager
    async def _deadline(self, timeout_s: float) -> AsyncIterator[Deadline]:
        try:
            async with Deadline.moving(timeout_s, self._limits.max_unavailable_s) as deadline:
                yield deadline
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the call did not end within {timeout_s:g} s: raise its timeout, or lower max_tokens"
            ) from error

    async def _choice(self, wanted: TurnRequest, shared: _Affinity, show: Show | None) -> Reply:
        whole, index = wanted.request, wanted.choice_index
        request_id, sampling = f"{whole.request_id}:{index}", whole.sampling.of_choice(index)
        request = replace(whole, request_id=request_id, sampling=sampling)
        async with self._deadline(whole.timeout_s) as deadline:
            own = replace(wanted, request=request, deadline=deadline)
            show_piece = None if show is None else partial(show, index)
            reply = await sample_turn(shared.engine, self._parts.reader, own, show=show_piece)
            if show is not None:
                show(index, reply)
            return reply

    # Affinities

    def _taken(self, name: str) -> _Affinity:
        """Return an affinity with one more open call. Raises Overloaded if all affinities have open calls."""
        shared = self._affinities.pop(name, None)
        if shared is None:
            if len(self._affinities) >= self._limits.max_affinities:
                self._make_room()
            shared = _Affinity(self._leases.engine(name))
        self._affinities[name] = shared
        shared.num_open += 1
        return shared

    def _make_room(self) -> None:
        idle = next((name for name, one in self._affinities.items() if not one.num_open), None)
        if idle is None:
            raise Overloaded(f"all {len(self._affinities)} affinities have running calls: retry later")
        self._drop(idle)

    def _drop(self, name: str) -> None:
        del self._affinities[name]
        self._leases.release(name)  # keep its accounting: a later call gets a lease again

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(self._limits.idle_s, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        idle_since = asyncio.get_running_loop().time() - self._limits.idle_s
        idle = [name for name, one in self._affinities.items() if not one.num_open and one.used_at <= idle_since]
        for name in idle:
            self._drop(name)
        if self._affinities:
            self._sweep_later()


def _digest(token_ids: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(array("i", token_ids).tobytes())
