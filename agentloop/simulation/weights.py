"""The weight updates of a simulated engine: staged, committed, offered.

Directories and adapters are read for their digest; pushed weights come from a `WeightSource`, which a test or a
simulation provides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, TypeAlias

from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import (
    CommitReport,
    HeldIn,
    PushSource,
    StageReport,
    TrainerFollower,
    TrainerOrder,
    WeightUpdate,
)
from agentloop.engine.weight_digest import FolderContents, FolderDigests, check_digest, read_files
from agentloop.errors import (
    AgentLoopError,
    CheckpointUnreadable,
    Conflict,
    InvalidRequest,
    InvariantBroken,
    WeightUpdateFailed,
)
from agentloop.simulation.policy import Faults

ReadFolder: TypeAlias = Callable[[str], Awaitable[FolderContents]]
"""A function that reads a folder and checks it. Raises CheckpointUnreadable."""


class WeightSource(TrainerFollower, Protocol):
    """The way one simulated engine gets pushed weights, and gives its own."""

    async def stage(self, update: WeightUpdate) -> StageReport:
        """Receive them; with HeldIn.NOWHERE they come in `transfer`. Raises CheckpointUnreadable."""

    async def transfer(self, update: WeightUpdate) -> float:
        """One phase: receive them now. Returns the milliseconds it took; any error fails the commit."""

    async def offer(self, version: int) -> PushSource | None:
        """Offer the weights of `version`, which the engine serves."""


class NoPushes:
    """A WeightSource for an engine that takes weights from directories only."""

    async def follow_trainer(self, order: TrainerOrder) -> None:
        raise InvalidRequest("a simulated engine takes weights from a directory")

    async def stage(self, update: WeightUpdate) -> StageReport:
        raise InvalidRequest("a simulated engine takes weights from a directory", param="push")

    async def transfer(self, update: WeightUpdate) -> float:
        raise InvalidRequest("a simulated engine takes weights from a directory", param="push")

    async def offer(self, version: int) -> PushSource | None:
        return None


class SimulatedWeights:
    """The update that one engine has staged, and how it is committed."""

    def __init__(
        self, clock: Clock, faults: Faults, source: WeightSource, read_folder: ReadFolder = read_files
    ) -> None:
        self._clock = clock
        self._faults = faults
        self._source = source
        self._read_folder = read_folder
        self._folders = FolderDigests()
        self.digest = ""  # of the weights that were committed last
        self._staged: tuple[WeightUpdate, StageReport] | None = None
        self._num_stages = 0

    @property
    def staged_version(self) -> int | None:
        """The version that can be committed; None while nothing is staged."""
        return None if self._staged is None else self._staged[0].version

    @property
    def is_forced(self) -> bool:
        """True if what is staged is not looked at."""
        return self._staged is not None and self._staged[0].is_forced

    async def start(self, model: str) -> None:
        """Read the folder of the initial weights, whose form is the model's own."""
        self.digest = (await read_files(model)).digest

    async def stage(self, update: WeightUpdate) -> StageReport:
        """As the port says. Raises Conflict if another stage began meanwhile."""
        if update.is_probe:
            return await self._read(update)
        self._num_stages += 1
        number, self._staged = self._num_stages, None
        if self._faults.num_failed_stages:
            self._faults.num_failed_stages -= 1
            raise CheckpointUnreadable("injected: the weights do not fit the model", param="directory")
        report = await self._read(update)
        if number != self._num_stages:
            raise Conflict(f"another stage began before that of version {update.version} had ended")
        self._staged = (update, report)
        return report

    async def commit(self) -> CommitReport:
        """Swap in what is staged. Raises WeightUpdateFailed, and then the weights are of unknown state."""
        if self._staged is None:
            raise InvariantBroken("nothing is staged")
        (update, staged), self._staged = self._staged, None
        if self._faults.commit_delay_s:
            await self._clock.sleep(self._faults.commit_delay_s)
        if self._faults.num_failed_commits:
            self._faults.num_failed_commits -= 1
            raise WeightUpdateFailed(f"injected: version {update.version} could not be loaded")
        transfer_ms = await self._transfer(update) if staged.held_in is HeldIn.NOWHERE else 0.0
        self.digest = staged.digest
        return CommitReport(self._faults.commit_delay_s * 1000.0, num_verified=1, transfer_ms=transfer_ms)

    def release(self) -> None:
        """Drop what is staged, and what is being staged."""
        self._staged, self._num_stages = None, self._num_stages + 1

    async def _read(self, update: WeightUpdate) -> StageReport:
        if not update.is_repeatable:
            report = await self._source.stage(update)
            return replace(report, digest=update.digest or report.digest)
        directory = update.adapter or update.directory or ""
        contents = await self.contents(directory, is_known_enough=update.is_probe)
        check_digest(update.digest, contents.digest, directory)
        transport = "directory" if update.adapter is None else "adapter"
        return StageReport(HeldIn.FILES, transport, contents.num_bytes, digest=contents.digest)

    async def contents(self, directory: str, *, is_known_enough: bool = False) -> FolderContents:
        """Read a folder; with `is_known_enough` only if its files are not those that were read last."""
        known = self._folders.get(directory) if is_known_enough else None
        if known is None:
            known = await self._read_folder(directory)
            self._folders.add(directory, known)
        return known

    async def _transfer(self, update: WeightUpdate) -> float:
        try:
            return await self._source.transfer(update)
        except AgentLoopError as error:
            raise WeightUpdateFailed(f"version {update.version} did not arrive: {error.message}") from error
