"""The weight updates of one vLLM engine: staged, committed, offered.

The bytes move in vLLM's worker processes (`weight_transfer/vllm_worker.py`), which this object drives by remote
calls; each returns at once while decoding goes on, except a commit, which only comes while generation is paused.
One stage at a time; a new one drops what the last one held.

Exactly one LoRA adapter is served, always under the same id, name and path. Every request carries the same
LoRARequest from the start, at first for an adapter that changes nothing. So a commit replaces the adapter's
tensors in place, and requests that are frozen meanwhile go on under the new ones, as new requests do. What that
rests on (vLLM 0.32):

- vLLM loads an adapter again wherever a worker does not have it (after it has reloaded base weights, say), from the
  path that some request carries. That path is a link here, switched before the adapter is loaded: it can only ever
  lead to the adapter of the last commit. That folder must stay in place while it is served.
- `load_inplace` makes vLLM read the files at every step of a request that carries it: the commit's request has it,
  the others have not.
- A prefix-cache key holds the adapter's name and path, which never change: only the salt that carries the weight
  version keeps KV of two adapters apart.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import structlog

from agentloop import codec
from agentloop.engine import CommitReport, HeldIn, PushSource, StageReport, TensorNames, WeightUpdate
from agentloop.errors import CheckpointUnreadable, EngineError, InvalidRequest, InvariantBroken
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.process import VllmProcess
from agentloop_servers.weight_transfer import (
    ADAPTER_ID,
    CheckedFolder,
    ServedForm,
    StageOrder,
    StageProgress,
    StageState,
    StagingSetup,
    check_adapter,
    inspect_checkpoint,
    merge_commit_reports,
    merge_stage_reports,
    read_through,
    write_zero_adapter,
)

ADAPTER_NAME = "adapter"

_log = structlog.stdlib.get_logger(__name__)


def lora_request(path: str, *, is_reload: bool = False) -> Any:
    """Make vLLM's LoRARequest for the adapter at `path`; `is_reload` reads its files although the id is known."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, path, load_inplace=is_reload)


class LoraAdapters:
    """The served adapter of an engine. `request` is what every request carries; valid after `start`."""

    def __init__(self, config: VllmConfig) -> None:
        if config.lora_rank is None:
            raise ValueError("the engine takes no adapters")
        self._model = config.model
        self._max_rank = config.lora_rank
        self._folder: Path | None = None  # ours: the link and the adapter that changes nothing
        self.request: Any = None

    async def start(self, llm: Any) -> None:
        """Serve the adapter that changes nothing. Call once, before the first request. Raises EngineError."""
        self._folder = folder = Path(tempfile.mkdtemp(prefix="agentloop-lora-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        zero = folder / "zero"
        zero.mkdir()
        await asyncio.to_thread(write_zero_adapter, self._model, str(zero))
        self._point_to(str(zero))
        self.request = lora_request(str(self._link))
        await self._load(llm)

    def check(self, directory: str) -> int:
        """Check an adapter and read it through, so that the commit reads memory; returns its bytes. Blocks.

        Raises CheckpointUnreadable.
        """
        has_weights = any(Path(self._model).glob("*.safetensors"))
        served = inspect_checkpoint(self._model).tensors if has_weights else None
        adapter = check_adapter(directory, self._max_rank, served)
        read_through(inspect_checkpoint(directory))
        return adapter.num_bytes

    async def commit(self, directory: str, process: VllmProcess) -> CommitReport:
        """Put the adapter in place of the served one, in all workers, and prove that it arrived.

        vLLM must be paused. Raises on any failure; then the adapter is of unknown state until a later commit.
        """
        started_at = time.perf_counter()
        self._point_to(directory)
        await self._load(process.llm)
        loaded_at = time.perf_counter()
        counts = await process.on_workers("weights_verify_adapter", str(self._link))
        verified_at = time.perf_counter()
        return CommitReport(
            swap_ms=(loaded_at - started_at) * 1e3,
            verify_ms=(verified_at - loaded_at) * 1e3,
            num_verified=min(counts),
        )

    def close(self) -> None:
        """Remove our files. Idempotent; also done when this object or the process ends."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _link(self) -> Path:
        if self._folder is None:
            raise EngineError("the engine is not started")
        return self._folder / "served"

    def _point_to(self, directory: str) -> None:
        following = self._link.with_name("next")
        following.unlink(missing_ok=True)
        following.symlink_to(Path(directory).resolve())
        following.replace(self._link)  # at once: a worker that looks now finds the one or the other

    async def _load(self, llm: Any) -> None:
        if not await llm.add_lora(lora_request(str(self._link), is_reload=True)):
            raise EngineError("vLLM did not load the adapter")


STAGE_POLL_S = 0.02  # each costs the engine a pass between two steps, some tens of microseconds

Staged: TypeAlias = tuple[int, WeightUpdate]
"""A staged update and its number at the workers."""


class VllmWeights:
    """The updates of one engine: staged, committed, offered."""

    def __init__(self, config: VllmConfig, process: VllmProcess) -> None:
        self._config = config
        self._process = process
        self._form: ServedForm | None = None
        self._lora = LoraAdapters(config) if config.lora_rank is not None else None
        self._committed: int | None = None  # the latest version
        self._numbers = itertools.count(1)
        self._staged: Staged | None = None
        self._stage_lock = asyncio.Lock()

    async def check(self) -> None:
        """Look at the model folder, before vLLM is started. Raises CheckpointUnreadable."""
        is_dummy = self._config.load_format == "dummy"
        self._form = await asyncio.to_thread(ServedForm, self._config.model, is_dummy=is_dummy)

    async def start(self) -> None:
        """Let the workers of a vLLM that is up get ready, and stamp the version that it was started with."""
        loaded = None
        if self._config.load_format != "dummy":
            loaded = CheckedFolder(self._config.model, self._served_form().tensors)
        setup = StagingSetup(loaded, self._config.weight_staging, self._config.stage_timeout_s)
        await self._process.on_workers("weights_prepare", codec.encode(setup))
        if self._lora is not None:
            await self._lora.start(self._process.llm)
        if self._config.initial_version is not None:
            await self._label(self._config.initial_version)
            self._committed = self._config.initial_version

    def close(self) -> None:
        """Idempotent; vLLM may be gone."""
        if self._lora is not None:
            self._lora.close()

    @property
    def lora_request(self) -> Any:
        """vLLM's LoRARequest that every request carries; None without adapters."""
        return self._lora.request if self._lora is not None else None

    async def stage(self, update: WeightUpdate) -> StageReport:
        """Have the workers receive and check `update`. Raises CheckpointUnreadable or EngineError."""
        async with self._stage_lock:
            self._staged = None
            number = next(self._numbers)
            if update.adapter is not None:
                report = await self._stage_adapter(update.adapter)
            else:
                order = await asyncio.to_thread(self._order, number, update)
                report = await self._stage_tensors(order)
            self._staged = (number, update)
            return report

    @property
    def staged_version(self) -> int | None:
        """The version that can be committed; None while nothing is staged."""
        return None if self._staged is None else self._staged[1].version

    def take_staged(self) -> Staged:
        """Return what is staged, for a commit: whatever is staged from now on does not touch it."""
        if self._staged is None:
            raise InvariantBroken("nothing is staged")
        staged, self._staged = self._staged, None
        return staged

    async def commit(self, staged: Staged) -> CommitReport:
        """Swap in what was staged, and stamp its version; vLLM must be paused. After an error the weights are of
        unknown state."""
        number, update = staged
        version = update.version
        async with asyncio.timeout(self._config.commit_timeout_s):
            # Side by side: the label counts from the next token on, and there is none before the resume.
            report, _ = await asyncio.gather(self._swap(number, update), self._label(version))
            if self._committed is not None and version <= self._committed:
                # KV under this version's salt, or that of a version in between, may be of other weights.
                await self._process.clear_cache()
        self._committed = version
        self._served_form().confirm()
        return report

    async def offer(self) -> PushSource | None:
        """Offer the workers' own parameters, for the workers of an equal engine. Their version must be known."""
        if self._lora is not None:
            return None
        token = secrets.token_hex(16)
        offers = await self._process.on_workers("weights_offer", token)
        if any(offer is None for offer in offers):
            return None
        sources = [codec.decode(offer, PushSource) for offer in offers]
        return replace(sources[0], addresses=tuple(source.addresses[0] for source in sources))

    async def release(self) -> None:
        """Give back all memory that is not vLLM's: what is staged, and the buffers of transfers."""
        async with self._stage_lock:
            self._staged = None
            await self._process.on_workers("weights_release")

    # --- inside ---

    def _served_form(self) -> ServedForm:
        if self._form is None:
            raise EngineError("the engine is not started")
        return self._form

    def _order(self, number: int, update: WeightUpdate) -> StageOrder:
        """Make the workers' order of an update, checked against the served model; blocks."""
        form = self._served_form()
        if self._lora is not None:
            raise CheckpointUnreadable("this engine serves adapters: push an adapter, not weights", param="adapter")
        if update.directory is not None:
            tensors = form.check_directory(update.directory)
            return StageOrder(number, folder=CheckedFolder(update.directory, tensors))
        if update.push is None:
            raise InvalidRequest("an update without a source", param="directory")
        if update.push.names is TensorNames.CHECKPOINT:
            form.check_push(update.push.tensors)
        return StageOrder(number, push=update.push)

    async def _stage_tensors(self, order: StageOrder) -> StageReport:
        is_held = False
        try:
            async with asyncio.timeout(self._config.stage_timeout_s):
                await self._process.on_workers("weights_stage", codec.encode(order))
                while True:
                    answers = await self._process.on_workers("weights_poll", order.number)
                    stages = [codec.decode(answer, StageProgress) for answer in answers]
                    failed = next((stage for stage in stages if stage.state is StageState.FAILED), None)
                    if failed is not None:
                        raise CheckpointUnreadable(failed.error, param="directory")
                    if all(stage.state is StageState.HELD for stage in stages):
                        is_held = True
                        return merge_stage_reports([stage.report for stage in stages if stage.report is not None])
                    await asyncio.sleep(STAGE_POLL_S)
        except TimeoutError as error:
            raise CheckpointUnreadable(f"not received within {self._config.stage_timeout_s:g} s") from error
        finally:
            if not is_held and self._process.llm is not None:
                await asyncio.shield(self._drop(order.number))

    async def _drop(self, number: int) -> None:
        """Have the workers give a stage up. A vLLM that does not answer holds no lock for it: the next order meets
        the same silence."""
        try:
            async with asyncio.timeout(self._config.control_timeout_s):
                await self._process.on_workers("weights_drop", number)
        except TimeoutError:
            _log.error("stage_not_dropped", number=number, waited_s=self._config.control_timeout_s)

    async def _stage_adapter(self, directory: str) -> StageReport:
        if self._lora is None:
            raise CheckpointUnreadable("this engine takes no adapters: set engine.lora_rank", param="adapter")
        num_bytes = await asyncio.to_thread(self._lora.check, directory)
        return StageReport(HeldIn.FILES, "adapter", num_bytes)

    async def _swap(self, number: int, update: WeightUpdate) -> CommitReport:
        if update.adapter is not None and self._lora is not None:
            return await self._lora.commit(update.adapter, self._process)
        answers = await self._process.on_workers("weights_commit", number)
        return merge_commit_reports([codec.decode(answer, CommitReport) for answer in answers])

    async def _label(self, version: int) -> None:
        await self._process.llm.update_weight_version(str(version))
