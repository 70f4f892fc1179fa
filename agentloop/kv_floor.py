"""Which weight version's KV a request may use, after updates that end the use of older KV. Every engine has one."""

from __future__ import annotations

from agentloop.types import KVPolicy


class KVFloor:
    """Told of an engine's pauses, commits and resumes."""

    def __init__(self) -> None:
        self._oldest: int | None = None
        self._is_rising = False

    @property
    def is_rising(self) -> bool:
        """Whether the commit that this pause may see ends the use of older KV."""
        return self._is_rising

    def paused(self, kv_policy: KVPolicy) -> None:
        """Of several pauses before a resume the strictest counts."""
        self._is_rising = self._is_rising or kv_policy is not KVPolicy.KEEP

    def committed(self, version: int) -> None:
        if self._is_rising:
            self._oldest = version

    def resumed(self) -> None:
        """What a pause ordered and no commit used is void."""
        self._is_rising = False

    def version_for(self, asked: int | None, served: int) -> int:
        """The version whose KV a request uses that asked for `asked` (None: for the served one)."""
        version = served if asked is None else asked
        return version if self._oldest is None else max(version, self._oldest)
