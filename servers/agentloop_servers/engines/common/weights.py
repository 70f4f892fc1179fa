"""The weight updates of one engine: stage, commit, and offer as a transfer source. Shared by all engines.

The engine's worker processes transfer the bytes (`weight_transfer/staging.py`); this module controls them by remote
calls (`WorkerMethod`). A call returns immediately while decoding continues, except a commit, which requires a
paused engine. There is one stage at a time, and a new one drops the update that was staged before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import structlog

from agentloop.engine.interface import (
    CommitReport,
    GroupInit,
    LeaveGroup,
    PushSource,
    StageReport,
    StagingDevice,
    TensorInfo,
    TensorNames,
    TrainerOrder,
    TransferPart,
    WeightUpdate,
)
from agentloop.engine.weight_digest import (
    FileStamp,
    FolderContents,
    FolderDigests,
    check_digest,
    check_unchanged,
    read_files,
)
from agentloop.errors import CheckpointUnreadable, EngineError, InvalidRequest, InvariantBroken
from agentloop.values import codec
from agentloop_servers.engines.common.config import ProcessEngineConfig
from agentloop_servers.weight_transfer.checkpoint import ServedForm
from agentloop_servers.weight_transfer.worker_calls import (
    CheckedFolder,
    StageOrder,
    StageProgress,
    StageState,
    StagingSetup,
    WorkerMethod,
    merge_commit_reports,
    merge_stage_reports,
)

STAGE_POLL_S = 0.02  # each poll costs the engine some tens of microseconds between two steps

Staged: TypeAlias = tuple[int, WeightUpdate, tuple[FileStamp, ...]]
"""A staged update: its number in the workers, the update with its digest, and the stamps of an adapter's files,
which the commit reads again."""

_log = structlog.stdlib.get_logger(__name__)


class Workers(Protocol):
    """An engine's processes that hold its weights."""

    @property
    def is_up(self) -> bool:
        """True from the start of the processes until their end."""

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a `WorkerMethod` in every worker between two steps. Return the results in rank order."""

    async def commit(self, number: int, version: int, *, resumes: bool) -> list[bytes]:
        """Commit stage `number` in all workers of the paused engine, and set the engine's version label.

        With `resumes`, also end the pause, unless a worker has failed. Returns the workers' reports.
        """

    async def resume(self) -> None:
        """End a pause."""

    async def clear_cache(self) -> None:
        """Drop all KV of the paused engine; frozen requests are prefilled again."""


class ServedAdapter(Protocol):
    """The LoRA adapter that an engine serves, on top of constant base weights."""

    async def start(self) -> None:
        """Serve an adapter of zeros. Call before the first request. Raises EngineError."""

    @property
    def is_policy(self) -> bool:
        """True if the single adapter is the policy; False if adapters are served by name."""

    def check(self, directory: str) -> FolderContents:
        """Validate an adapter and read all its bytes. Blocks. Raises CheckpointUnreadable."""

    async def commit(self, directory: str) -> CommitReport:
        """Replace the served adapter, and verify the new one. After an error the adapter is in an unknown state."""

    def close(self) -> None:
        """Remove temporary files. Idempotent."""


async def no_label(version: int) -> None:
    """Do nothing, for engines that do not store a version label."""


@dataclass(frozen=True, slots=True)
class _IncomingTransfer:
    """A transfer from a trainer's group that is being received as stage `number`, and its tensors so far."""

    transfer_id: str
    number: int
    num_parts: int = 0
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


class EngineWeights:
    """The weight updates of one engine. `label` is called with each new version, while no token is sampled."""

    def __init__(
        self,
        config: ProcessEngineConfig,
        workers: Workers,
        *,
        adapter: ServedAdapter | None = None,
        label: Callable[[int], Awaitable[None]] = no_label,
    ) -> None:
        self._config = config
        self._workers = workers
        self._adapter = adapter
        self._label = label
        self._form: ServedForm | None = None
        self._committed: int | None = None  # the latest committed version
        self._numbers = itertools.count(1)
        self._folders = FolderDigests()
        self._loaded: FolderContents | None = (
            None  # contents of the model folder that the engine loads at its start
        )
        self.digest = ""  # digest of the weights that were committed last
        self._staged: Staged | None = None
        self._transfer: _IncomingTransfer | None = None
        self._stage_lock = asyncio.Lock()

    async def check(self) -> None:
        """Check the model folder. Call before the engine is started. Raises CheckpointUnreadable."""
        is_dummy = self._config.initial_version is None
        self._form = await asyncio.to_thread(ServedForm, self._config.model, is_dummy=is_dummy)
        if not is_dummy:  # reading the files here also fills the page cache, from which the engine loads them
            self._loaded = await read_files(self._config.model)

    async def start(self) -> None:
        """Prepare the workers of a started engine, and label its initial version."""
        version = self._config.initial_version
        loaded = None if version is None else CheckedFolder(self._config.model, self._served_form().tensors)
        setup = StagingSetup(loaded, self._config.weight_staging, self._config.stage_timeout_s)
        await self._workers.on_workers(WorkerMethod.PREPARE, codec.encode(setup))
        if self._adapter is not None:
            await self._adapter.start()
        if version is not None:
            await self._label(version)
            self._committed = version
        if self._loaded is not None:
            check_unchanged(self._config.model, self._loaded.stamps)
            self.digest = self._loaded.digest

    def close(self) -> None:
        """Remove the adapter's temporary files, if any. Idempotent; the engine may have exited."""
        if self._adapter is not None:
            self._adapter.close()

    async def stage(self, update: WeightUpdate) -> StageReport:
        """Receive and validate `update` in all workers. Raises CheckpointUnreadable or EngineError."""
        if update.is_probe:
            directory = update.adapter or update.directory or ""
            contents = self._folders.get(directory) or (await self._read(update))[1]
            return StageReport(StagingDevice.FILES, "directory", contents.num_bytes, digest=contents.digest)
        async with self._stage_lock:
            self._staged, transfer, self._transfer = None, self._transfer, None
            stamps: tuple[FileStamp, ...] = ()
            if update.transfer is not None:
                number, report = await self._end_transfer(update.transfer, transfer)
            elif update.adapter is not None:
                if self._adapter is not None and not self._adapter.is_policy:
                    raise CheckpointUnreadable(
                        "this engine serves adapters by name: push the adapter with a name", param="adapter"
                    )
                number, (_, contents) = next(self._numbers), await self._read(update)
                stamps = contents.stamps
                report = StageReport(StagingDevice.FILES, "adapter", contents.num_bytes, digest=contents.digest)
            else:
                number = next(self._numbers)
                report = await self._stage_tensors(number, update)
            self._staged = (number, replace(update, digest=report.digest), stamps)
            return report

    async def follow_trainer(self, order: TrainerOrder) -> None:
        """Join a trainer's process group, receive a part of a transfer, or leave the group.

        Raises CheckpointUnreadable or EngineError.
        """
        match order:
            case GroupInit():
                await self._workers.on_workers(WorkerMethod.FOLLOW, codec.encode(order))
                async with self._in_time("master_address"):
                    await self._polled(WorkerMethod.POLL_GROUP, order.name, _is_held, "master_address")
            case TransferPart():
                async with self._stage_lock:
                    await self._receive_part(order)
            case LeaveGroup():
                await self._workers.on_workers(WorkerMethod.FOLLOW, codec.encode(order))

    @property
    def staged_version(self) -> int | None:
        """The version of the staged update; None if no update is staged."""
        return None if self._staged is None else self._staged[1].version

    def take_staged(self) -> Staged:
        """Remove and return the staged update for its commit, so that later stages do not drop it."""
        if self._staged is None:
            raise InvariantBroken("no update is staged")
        staged, self._staged = self._staged, None
        return staged

    async def commit(self, staged: Staged, *, resumes: bool = False) -> CommitReport:
        """Swap in a staged update and set the version label. The engine must be paused; `resumes` also resumes it.

        After an error the weights are in an unknown state, and the engine may be running.
        """
        number, update, stamps = staged
        version, self.digest = update.version, ""
        async with asyncio.timeout(self._config.commit_timeout_s):
            if self._committed is not None and version <= self._committed:
                # A version that is not new: KV with its salt, or with a salt in between, may be of other weights.
                await self._workers.clear_cache()
            if update.adapter is not None and self._adapter is not None:
                report = await self._adapter.commit(update.adapter)
                check_unchanged(update.adapter, stamps)
                await self._label(version)
                if resumes:
                    await self._workers.resume()
            else:
                answers = await self._workers.commit(number, version, resumes=resumes)
                report = merge_commit_reports([codec.decode(answer, CommitReport) for answer in answers])
        self._committed, self.digest = version, update.digest
        self._served_form().confirm()
        return report

    async def offer(self) -> PushSource | None:
        """Offer the served weights as a source for another engine of the same pool.

        Returns None if an adapter is the policy, or if the workers cannot read the weights back. The caller ensures
        that the version is known.
        """
        if self._adapter is not None:
            return None
        token = secrets.token_hex(16)
        answers = await self._workers.on_workers(WorkerMethod.OFFER, token)
        if any(answer is None for answer in answers):
            return None
        pushes = [codec.decode(answer, PushSource) for answer in answers]
        return replace(
            pushes[0],
            addresses=tuple(push.addresses[0] for push in pushes),
            certificates=tuple(certificate for push in pushes for certificate in push.certificates),
        )

    async def release(self) -> None:
        """Free the memory of staged weights and of transfer buffers."""
        async with self._stage_lock:
            self._staged = self._transfer = None
            await self._workers.on_workers(WorkerMethod.RELEASE)

    def _served_form(self) -> ServedForm:
        if self._form is None:
            raise EngineError("the engine is not started: call start() first")
        return self._form

    async def _read(self, update: WeightUpdate) -> tuple[tuple[TensorInfo, ...], FolderContents]:
        """Validate and read a folder of weights or of an adapter. Return its tensors (none for an adapter) and
        contents.

        Raises CheckpointUnreadable, also if the digest differs from the update's.
        """
        directory = update.adapter or update.directory or ""
        tensors: tuple[TensorInfo, ...] = ()
        if update.adapter is None:
            tensors, contents = await asyncio.to_thread(self._served_form().check_directory, directory)
        elif self._adapter is None:
            raise CheckpointUnreadable(
                "this engine does not support adapters: set engine.lora_rank", param="adapter"
            )
        else:
            contents = await asyncio.to_thread(self._adapter.check, directory)
        self._folders.add(directory, contents)
        check_digest(update.digest, contents.digest, directory)
        return tensors, contents

    async def _order(self, number: int, update: WeightUpdate) -> tuple[StageOrder, FolderContents | None]:
        """Validate an update against the served model, and make the workers' order from it."""
        form = self._served_form()
        if self._adapter is not None:
            raise CheckpointUnreadable("this engine serves adapters: push an adapter, not weights", param="adapter")
        if update.directory is not None:
            tensors, contents = await self._read(update)
            return StageOrder(number, folder=CheckedFolder(update.directory, tensors)), contents
        if update.push is None:
            raise InvalidRequest(
                "the update has no source: give a directory, a push, a transfer or an adapter", param="directory"
            )
        has_names = update.push.names is TensorNames.CHECKPOINT
        if has_names:
            form.check_push(update.push.tensors)
        return StageOrder(number, push=update.push, is_tied=form.is_tied and has_names), None

    async def _stage_tensors(self, number: int, update: WeightUpdate) -> StageReport:
        order, contents = await self._order(number, update)
        param = "directory" if contents is not None else "push"
        async with self._dropping(number), self._in_time(param):
            await self._workers.on_workers(WorkerMethod.STAGE, codec.encode(order))
            report = _merged(await self._polled(WorkerMethod.POLL, number, _is_held, param))
            if contents is None:  # if a peer sends the weights, the update has the digest that the peer holds
                return replace(report, digest=update.digest or report.digest)
            check_unchanged(update.directory or "", contents.stamps)  # the files may change while the workers read
            return replace(report, digest=contents.digest)

    async def _receive_part(self, part: TransferPart) -> None:
        """Validate and receive a part of a transfer. The first part starts the stage."""
        transfer = self._transfer
        if transfer is None or transfer.transfer_id != part.transfer_id:
            transfer = _IncomingTransfer(part.transfer_id, next(self._numbers))
            self._staged = self._transfer = None
            if self._adapter is not None:
                raise CheckpointUnreadable(
                    "this engine serves adapters: push an adapter, not the weights of a trainer's group"
                )
            form = self._served_form()
            order = StageOrder(transfer.number, transfer=form.tensors or part.tensors, is_tied=form.is_tied)
            await self._workers.on_workers(WorkerMethod.STAGE, codec.encode(order))
        self._transfer, num_parts = None, transfer.num_parts + 1
        async with self._dropping(transfer.number), self._in_time("update_info"):
            self._served_form().check_part(part.tensors, transfer.tensors)
            await self._workers.on_workers(WorkerMethod.FOLLOW, codec.encode(part))
            await self._polled(
                WorkerMethod.POLL, transfer.number, lambda stage: stage.num_parts == num_parts, "update_info"
            )
        transfer.tensors.update((tensor.name, tensor) for tensor in part.tensors)
        self._transfer = replace(transfer, num_parts=num_parts)

    async def _end_transfer(self, transfer_id: str, transfer: _IncomingTransfer | None) -> tuple[int, StageReport]:
        """Check that all tensors have arrived, and finish the stage of a transfer."""
        if transfer is None or transfer.transfer_id != transfer_id:
            raise CheckpointUnreadable(
                f"no complete part of transfer {transfer_id!r} has arrived: send all parts again",
                param="update_info",
            )
        async with self._dropping(transfer.number), self._in_time("update_info"):
            self._served_form().check_push(tuple(transfer.tensors.values()))
            await self._workers.on_workers(WorkerMethod.FOLLOW, codec.encode(TransferPart("", ())))
            held = await self._polled(WorkerMethod.POLL, transfer.number, _is_held, "update_info")
        return transfer.number, _merged(held)

    async def _polled(
        self, method: WorkerMethod, of: int | str, is_reached: Callable[[StageProgress], bool], param: str
    ) -> list[StageProgress]:
        """Poll all workers until `is_reached` is true for each. Raises CheckpointUnreadable if a worker has
        failed."""
        while True:
            answers = await self._workers.on_workers(method, of)
            stages = [codec.decode(answer, StageProgress) for answer in answers]
            failed = next((stage for stage in stages if stage.state is StageState.FAILED), None)
            if failed is not None:
                raise CheckpointUnreadable(failed.error, param=param)
            if all(map(is_reached, stages)):
                return stages
            await asyncio.sleep(STAGE_POLL_S)

    @contextlib.asynccontextmanager
    async def _in_time(self, param: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._config.stage_timeout_s):
                yield
        except TimeoutError as error:
            problem = f"the weights were not received within {self._config.stage_timeout_s:g} s"
            raise CheckpointUnreadable(problem, param=param) from error

    @contextlib.asynccontextmanager
    async def _dropping(self, number: int) -> AsyncIterator[None]:
        """Drop stage `number` in all workers if the block fails."""
        try:
            yield
        except BaseException:
            if self._workers.is_up:
                await asyncio.shield(self._drop(number))
            raise

    async def _drop(self, number: int) -> None:
        """Drop a stage in all workers. The timeout is short, because a hung engine must not hold the stage lock."""
        try:
            async with asyncio.timeout(self._config.control_timeout_s):
                await self._workers.on_workers(WorkerMethod.DROP, number)
        except TimeoutError:
            _log.error("stage_not_dropped", number=number, waited_s=self._config.control_timeout_s)


def _is_held(stage: StageProgress) -> bool:
    return stage.state is StageState.HELD


def _merged(stages: Sequence[StageProgress]) -> StageReport:
    return merge_stage_reports([stage.report for stage in stages if stage.report is not None])
