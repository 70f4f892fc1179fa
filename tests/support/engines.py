"""Remote engines without an engine: what the weight controller asks of one, with faults to order."""

from __future__ import annotations

from agentloop.clock import Clock
from agentloop.control import ReplicaRegistration
from agentloop.engine import EngineInfo, WeightUpdate
from agentloop.errors import CheckpointUnreadable, Conflict, WeightUpdateFailed
from agentloop.types import KVPolicy, PauseMode

FOR_EVER_S = 1e6
INFO = EngineInfo("fake", 4096, 1000, 16, 10_000, 8)


class FakeEngine:
    """Keeps every call it gets. `failures` and `hangs` name verbs; `num_failures` bounds how often they fail."""

    def __init__(self, clock: Clock, url: str, version: int | None = 0) -> None:
        self.clock = clock
        self.url = url
        self.weight_version = version
        self.is_paused = False
        self.is_usable = version is not None
        self.staged: int | None = None
        self.calls: list[str] = []
        self.called_at: list[tuple[str, float]] = []
        self.failures: dict[str, Exception] = {}
        self.num_failures = 1_000_000
        self.hangs: set[str] = set()
        self.seconds: dict[str, float] = {}

    @property
    def replica_id(self) -> str:
        return self.url.removeprefix("fake://")

    def registration(self) -> ReplicaRegistration:
        return ReplicaRegistration(self.replica_id, self.url, INFO, self.weight_version)

    async def stage(self, update: WeightUpdate) -> None:
        await self._called("stage")
        self.staged = update.version

    async def pause(self, mode: PauseMode, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
        await self._called("pause", f"{mode}:{kv_policy}")
        self.is_paused = True

    async def commit(self, version: int) -> None:
        if not self.is_paused or self.staged != version:
            raise Conflict("not paused, or another version staged")
        self.is_usable, self.weight_version = False, None
        await self._called("commit")
        self.is_usable, self.weight_version, self.staged = True, version, None

    async def resume(self) -> None:
        await self._called("resume")
        self.is_paused = False

    async def check_health(self) -> None:
        await self._called("check_health")

    async def _called(self, verb: str, detail: str = "") -> None:
        self.calls.append(f"{verb}:{detail}" if detail else verb)
        self.called_at.append((verb, self.clock.now()))
        if verb in self.hangs:
            await self.clock.sleep(FOR_EVER_S)
        await self.clock.sleep(self.seconds.get(verb, 0.0))
        if verb in self.failures and self.num_failures > 0:
            self.num_failures -= 1
            raise self.failures[verb]

    def fail(self, verb: str, times: int = 1_000_000) -> None:
        """The next so many calls of `verb` raise what a real engine would."""
        kinds = {"stage": CheckpointUnreadable, "commit": WeightUpdateFailed}
        self.failures = {verb: kinds.get(verb, ConnectionResetError)(f"injected into {verb}")}
        self.num_failures = times
