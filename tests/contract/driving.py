"""Helpers with which the contract suite drives an engine: complete or interrupted requests, whole updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentloop.engine.interface import Delta, Engine, WeightUpdate
from agentloop.types import GenerateRequest, Generation, KVPolicy, PauseMode, WeightVersionSpan
from agentloop.values.checks import check_generation
from tests.contract.cases import EngineCase

TIMEOUT_S = 240.0  # a hang; engines on a busy host take more than a minute
SOME_TOKENS = 6


def is_idle(engine: Engine) -> bool:
    load = engine.load()
    return load.num_running == 0 and load.num_waiting == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)


async def generated(case: EngineCase, request: GenerateRequest) -> Generation:
    """Run one call to its end, and apply the checks of every caller."""
    generation = await asyncio.wait_for(case.engine.generate(request), TIMEOUT_S)
    check_generation(request, generation, case.engine.info.vocab_size)
    return generation


class Reading:
    """A streamed request that a task reads, so that a test can act while it runs."""

    def __init__(self, case: EngineCase, request: GenerateRequest) -> None:
        self.request = request
        self.deltas: list[Delta] = []
        self._vocab_size = case.engine.info.vocab_size
        self._task = asyncio.create_task(self._read(case.engine))

    async def _read(self, engine: Engine) -> Generation:
        last: Generation | None = None
        async for piece in engine.stream(self.request):
            assert last is None, "the whole Generation is the last item"
            if isinstance(piece, Delta):
                self.deltas.append(piece)
            else:
                last = piece
        assert last is not None
        return last

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    @property
    def is_done(self) -> bool:
        return self._task.done()

    async def middle(self, num_tokens: int = SOME_TOKENS) -> None:
        """Wait until some tokens have arrived; fail if the request ended before."""
        await until(lambda: self._task.done() or self.num_tokens >= num_tokens)
        assert not self._task.done(), "the generation ended before its middle: raise the case's long_tokens"

    async def end(self) -> Generation:
        generation = await asyncio.wait_for(self._task, TIMEOUT_S)
        check_generation(self.request, generation, self._vocab_size)
        return generation

    async def leave(self) -> None:
        """Stop reading, like a client that disconnects."""
        self._task.cancel()
        await asyncio.wait([self._task])


async def commit_next(case: EngineCase, kv_policy: KVPolicy) -> WeightUpdate:
    """Run one whole weight update, whose commit resumes the engine."""
    update = case.next_update()
    await case.engine.stage(update)
    await case.engine.pause(PauseMode.KEEP, kv_policy)
    report = await case.engine.commit(update.version, resumes=True)
    assert not case.engine.is_paused
    assert report.canary_ms >= 0.0
    return update


def merged(spans: list[WeightVersionSpan]) -> tuple[WeightVersionSpan, ...]:
    joined: list[WeightVersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version and joined[-1].end == span.start:
            joined[-1] = WeightVersionSpan(span.version, joined[-1].start, span.end)
        else:
            joined.append(span)
    return tuple(joined)
