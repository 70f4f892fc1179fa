"""The weights of a simulated engine: what it holds, what is staged, what memory it has given back.

Owned here: the version, the staged update and the sleeping memory. Directories and adapters are read as far as
their form goes; pushed weights come from a `WeightSource`, which a test or a simulation brings along.
"""

from __future__ import annotations

from typing import Protocol

from agentloop.checks import check_checkpoint
from agentloop.clock import Clock
from agentloop.engine import ALL_MEMORY, CommitReport, HeldIn, MemoryTag, PushSource, StageReport, WeightUpdate
from agentloop.errors import AgentLoopError, CheckpointUnreadable, Conflict, InvalidRequest, WeightUpdateFailed
from agentloop.simulation.policy import Faults


class WeightSource(Protocol):
    """The wire by which one simulated engine gets pushed weights, and gives its own."""

    async def stage(self, update: WeightUpdate) -> StageReport:
        """Receive them; with HeldIn.NOWHERE they come in `transfer`. Raises CheckpointUnreadable."""

    async def transfer(self, update: WeightUpdate) -> float:
        """One phase: receive them now. Returns the milliseconds it took; any error fails the commit."""

    async def offer(self, version: int) -> PushSource | None:
        """The weights of `version`, which the engine serves."""


class NoPushes:
    """A WeightSource for an engine that takes weights from directories only."""

    async def stage(self, update: WeightUpdate) -> StageReport:
        raise InvalidRequest("a simulated engine takes weights from a directory", param="push")

    async def transfer(self, update: WeightUpdate) -> float:
        raise InvalidRequest("a simulated engine takes weights from a directory", param="push")

    async def offer(self, version: int) -> PushSource | None:
        return None


class SimulatedWeights:
    """`version` is None while nobody knows what the weights are: before the first commit, after a failed one, and
    when they were discarded."""

    def __init__(self, version: int | None, clock: Clock, faults: Faults, source: WeightSource) -> None:
        self.version = version
        self.asleep: frozenset[MemoryTag] = frozenset()
        self._clock = clock
        self._faults = faults
        self._source = source
        self._staged: tuple[WeightUpdate, StageReport] | None = None
        self._num_stages = 0

    async def stage(self, update: WeightUpdate) -> StageReport:
        """As the port says. Raises Conflict also if another stage began meanwhile."""
        self._require_awake()
        self._num_stages += 1
        number, self._staged = self._num_stages, None
        if self._faults.num_failed_stages:
            self._faults.num_failed_stages -= 1
            raise CheckpointUnreadable("injected: the weights do not fit the model", param="directory")
        report = await self._source.stage(update) if update.push is not None else _read_files(update)
        if number != self._num_stages:
            raise Conflict(f"another stage began before that of version {update.version} had ended")
        self._staged = (update, report)
        return report

    async def commit(self, version: int) -> CommitReport:
        """As the port says, for an engine that is paused. A commit that does not finish leaves no version."""
        self._require_awake()
        if self._staged is None or self._staged[0].version != version:
            held = "nothing" if self._staged is None else f"version {self._staged[0].version}"
            raise Conflict(f"version {version} cannot be committed: {held} is staged")
        (update, staged), self._staged = self._staged, None
        try:
            if self._faults.commit_delay_s:
                await self._clock.sleep(self._faults.commit_delay_s)
            if self._faults.num_failed_commits:
                self._faults.num_failed_commits -= 1
                raise WeightUpdateFailed(f"injected: version {version} could not be loaded")
            transfer_ms = await self._transfer(update) if staged.held_in is HeldIn.NOWHERE else 0.0
        except BaseException:  # cancelled too: the weights are half written
            self.version = None
            raise
        self.version = version
        return CommitReport(self._faults.commit_delay_s * 1000.0, num_verified=1, transfer_ms=transfer_ms)

    async def offer(self) -> PushSource | None:
        """As the port says."""
        if self.version is None or MemoryTag.WEIGHTS in self.asleep:
            return None
        return await self._source.offer(self.version)

    def give_back(self, level: int) -> None:
        """All memory, and with level 2 the weights; what was staged goes too."""
        self.asleep = ALL_MEMORY
        self._staged, self._num_stages = None, self._num_stages + 1
        if level == 2:
            self.version = None

    def take_back(self, tags: frozenset[MemoryTag]) -> None:
        """Raises Conflict for the KV cache while nobody knows the weights: no real engine can fill it then."""
        if MemoryTag.KV_CACHE in self.asleep & tags and self.version is None:
            raise Conflict("weights are committed before the KV cache wakes: these are unknown")
        self.asleep -= tags

    async def _transfer(self, update: WeightUpdate) -> float:
        try:
            return await self._source.transfer(update)
        except AgentLoopError as error:
            raise WeightUpdateFailed(f"version {update.version} did not arrive: {error.message}") from error

    def _require_awake(self) -> None:
        if MemoryTag.WEIGHTS in self.asleep:
            raise Conflict("the memory of the weights is asleep")


def _read_files(update: WeightUpdate) -> StageReport:
    """Check a directory's or an adapter's form. Raises CheckpointUnreadable."""
    files = check_checkpoint(update.directory or update.adapter or "")
    num_bytes = sum(file.stat().st_size for file in files)
    return StageReport(HeldIn.FILES, "directory" if update.adapter is None else "adapter", num_bytes)
