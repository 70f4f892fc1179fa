"""An engine that records its input and output, as the reference for sessions and captures."""

from __future__ import annotations

from collections.abc import AsyncIterator

from agentloop.engine.interface import Delta, Engine, OnProgress
from agentloop.types import GenerateRequest, Generation

Served = tuple[tuple[int, ...], tuple[int, ...]]
"""(prompt ids, sampled ids) of one request."""


class RecordingEngine:
    """Wraps another engine; every method except `generate` and `stream` is the other engine's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.served: list[Served] = []
        self.requests: list[GenerateRequest] = []
        self.generations: list[Generation] = []  # results of `generate`

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        self.requests.append(request)
        generation = await self.engine.generate(request, on_progress)
        self.generations.append(generation)
        self.served.append((request.token_ids, generation.token_ids))
        return generation

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        self.requests.append(request)
        sampled: list[int] = []
        source = self.engine.stream(request, on_progress)
        try:
            async for piece in source:
                if isinstance(piece, Delta):
                    sampled += piece.token_ids
                yield piece
        finally:
            await source.aclose()  # type: ignore[attr-defined]
            self.served.append((request.token_ids, tuple(sampled)))  # includes tokens streamed before a stop string
