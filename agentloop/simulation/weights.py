"""Weight updates of a simulated engine: stage, commit, and transfer to peers.

Directories and adapters are read for their digest. Pushed weights are received by a `WeightSource`, which a test or
a simulation provides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, TypeAlias

from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import (
    CommitReport,
    PushSource,
    StageReport,
    StagingDevice,
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
"""A function that reads and validates a folder. Raises CheckpointUnreadable."""


class WeightSource(TrainerFollower, Protocol):
    """Receives pushed weights for one simulated engine, and sends the engine's weights to peers."""

    async def stage(self, update: WeightUpdate) -> StageReport:
        """Receive the weights; with NOWHERE, `transfer` receives them. Raises CheckpointUnreadable."""

    async def transfer(self, update: WeightUpdate) -> float:
        """Receive the weights of a blocking update. Returns the milliseconds; any error fails the commit."""

    async def offer(self, version: int) -> PushSource | None:
        """Return a peer source of the weights of the served `version`."""


class NoPushes:
    """A WeightSource for an engine that accepts weights only from directories."""

    async def follow_trainer(self, order: TrainerOrder) -> None:
        raise InvalidRequest("this simulated engine accepts weights only from a directory")

    async def stage(self, update: WeightUpdate) -> StageReport:
        raise InvalidRequest("this simulated engine accepts weights only from a directory", param="push")

    async def transfer(self, update: WeightUpdate) -> float:
        raise InvalidRequest("this simulated engine accepts weights only from a directory", param="push")

    async def offer(self, version: int) -> PushSource | None:
        return None


class SimulatedWeights:
    """Stages and commits the weight updates of one engine."""

    def __init__(
        self, clock: Clock, faults: Faults, source: WeightSource, read_folder: ReadFolder = read_files
    ) -> None:
        self._clock = clock
        self._faults = faults
        self._source = source
        self._read_folder = read_folder
        self._folders = FolderDigests()
        self.digest = ""  # digest of the weights committed last
        self._staged: tuple[WeightUpdate, StageReport] | None = None
        self._num_stages = 0

    @property
    def staged_version(self) -> int | None:
        """The version that can be committed; None while nothing is staged."""
        return None if self._staged is None else self._staged[0].version

    @property
    def is_forced(self) -> bool:
        """True if the staged update skips the canary check."""
        return self._staged is not None and self._staged[0].is_forced

    async def start(self, model: str) -> None:
        """Read the folder of the initial weights."""
        self.digest = (await read_files(model)).digest

    async def stage(self, update: WeightUpdate) -> StageReport:
        """See `EngineControl.stage`. Raises Conflict if another `stage` call began in between."""
        if update.is_probe:
            return await self._read(update)
        self._num_stages += 1
        number, self._staged = self._num_stages, None
        if self._faults.num_failed_stages:
            self._faults.num_failed_stages -= 1
            raise CheckpointUnreadable("injected fault: the weights do not match the model", param="directory")
        report = await self._read(update)
        if number != self._num_stages:
            raise Conflict(f"another update was staged while version {update.version} was being staged")
        self._staged = (update, report)
        return report

    async def commit(self) -> CommitReport:
        """Swap in the staged weights. After a WeightUpdateFailed the state of the weights is unknown."""
        if self._staged is None:
            raise InvariantBroken("commit without a staged update")
        (update, staged), self._staged = self._staged, None
        if self._faults.commit_delay_s:
            await self._clock.sleep(self._faults.commit_delay_s)
        if self._faults.num_failed_commits:
            self._faults.num_failed_commits -= 1
            raise WeightUpdateFailed(f"injected fault: version {update.version} could not be loaded")
        transfer_ms = await self._transfer(update) if staged.staging_device is StagingDevice.NOWHERE else 0.0
        self.digest = staged.digest
        return CommitReport(self._faults.commit_delay_s * 1000.0, num_verified=1, transfer_ms=transfer_ms)

    def release(self) -> None:
        """Drop the staged update, and any update that is being staged."""
        self._staged, self._num_stages = None, self._num_stages + 1

    async def _read(self, update: WeightUpdate) -> StageReport:
        if not update.is_repeatable:
            report = await self._source.stage(update)
            return replace(report, digest=update.digest or report.digest)
        directory = update.adapter or update.directory or ""
        contents = await self.contents(directory, is_known_enough=update.is_probe)
        check_digest(update.digest, contents.digest, directory)
        transport = "directory" if update.adapter is None else "adapter"
        return StageReport(StagingDevice.FILES, transport, contents.num_bytes, digest=contents.digest)

    async def contents(self, directory: str, *, is_known_enough: bool = False) -> FolderContents:
        """Read a folder. With `is_known_enough`, use the cached contents if the files are unchanged."""
        contents = self._folders.get(directory) if is_known_enough else None
        if contents is None:
            contents = await self._read_folder(directory)
            self._folders.add(directory, contents)
        return contents

    async def _transfer(self, update: WeightUpdate) -> float:
        try:
            return await self._source.transfer(update)
        except AgentLoopError as error:
            raise WeightUpdateFailed(f"the transfer of version {update.version} failed: {error.message}") from error
