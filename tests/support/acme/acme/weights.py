"""A weight source with one version, defined by its settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from agentloop.engine.interface import PublishedSource


class Shelf:
    class Settings(BaseModel, extra="forbid"):
        version: int

    def __init__(self, source: PublishedSource, folder: Path, settings: Settings) -> None:
        self._version = settings.version

    async def latest(self) -> int:
        return self._version
