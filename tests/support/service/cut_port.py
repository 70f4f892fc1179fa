"""The coordinator as seen by a process whose host may be cut off."""

from __future__ import annotations

from typing import Any

from agentloop.errors import ServiceUnavailable


class CutPort:
    """A coordinator's port that no longer answers once `is_cut`."""

    def __init__(self, port: Any) -> None:
        self._port = port
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            if self.is_cut:
                raise ServiceUnavailable("cut off")
            return await getattr(self._port, name)(*arguments, **named)

        return call
