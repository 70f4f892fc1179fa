"""An engine that keeps what went in and what came out: what a capture is compared with."""

from __future__ import annotations

from collections.abc import AsyncIterator

from agentloop.engine import Delta, Engine
from agentloop.types import GenerateRequest, Generation

Served = tuple[tuple[int, ...], tuple[int, ...]]
"""(prompt ids, sampled ids) of one request."""


class RecordingEngine:
    """Stands before another engine; everything but `generate` and `stream` is the other's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.served: list[Served] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await self._engine.generate(request)
        self.served.append((request.token_ids, generation.token_ids))
        return generation

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Generation]:
        sampled: list[int] = []
        try:
            async for piece in self._engine.stream(request):
                if isinstance(piece, Delta):
                    sampled += piece.token_ids
                yield piece
        finally:
            self.served.append((request.token_ids, tuple(sampled)))  # also what was streamed until a stop string
