"""A sink that keeps records and updates."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

received: list[tuple[str, Any]] = []


class Kept:
    class Settings(BaseModel, extra="forbid"):
        prefix: str

    def __init__(self, settings: Settings, run: str, model: str) -> None:
        self._name = f"{settings.prefix}/{run}"

    def give(self, ended: Any) -> None:
        received.append((self._name, ended))

    def close(self) -> None:
        received.append((self._name, "closed"))
