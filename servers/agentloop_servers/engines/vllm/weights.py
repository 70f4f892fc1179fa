"""The LoRA adapters of one vLLM engine, and the engine's weight updates.

Without `max_loras` exactly one LoRA adapter is served, always under the same id, name and path. Every request
carries the same LoRARequest from the start, at first for an adapter of zeros. So a commit replaces the adapter's
tensors in place, and requests that are frozen meanwhile continue under the new ones, as new requests do. With
`max_loras` each version of each adapter has a number, a slot in the workers and a copy of its files, from its load
until it is replaced or unloaded and no call is in flight under it. That rests on vLLM 0.32:

- vLLM loads an adapter again wherever a worker does not have it (after it has reloaded base weights, say), from the
  path that some request carries. That path is a link here, switched before the adapter is loaded: it can only ever
  lead to the adapter of the last commit. That folder must stay in place while it is served.
- `load_inplace` makes vLLM read the files at every step of a request that carries it: the load has it, requests
  have not.
- A prefix-cache key holds the adapter's name and path. Those of the one adapter never change: only the salt that
  carries the weight version keeps KV of two versions apart. Those of adapters by name are each version's own.
- vLLM loads adapters within a step where it has to, and a failure there ends it. So files outlive the calls, and
  there is a slot for every version: none leaves a worker on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agentloop.engine.adapters import HeldAdapter, HeldAdapters
from agentloop.engine.interface import Adapter, CommitReport, HeldIn, StageReport
from agentloop.engine.weight_digest import FolderContents, check_digest
from agentloop.errors import AgentLoopError, CheckpointUnreadable, EngineError
from agentloop_servers.engines.common.adapters import AdapterFolder
from agentloop_servers.engines.common.calls import Call
from agentloop_servers.engines.common.process import one_line
from agentloop_servers.engines.common.weights import EngineWeights
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.process import VllmProcess
from agentloop_servers.weight_transfer.worker_calls import WorkerMethod

_POLICY = 1  # vLLM's id of the one adapter


class LoraAdapters:
    """The served adapter of an engine, which every request carries (`request`), or those that it serves by name."""

    def __init__(self, config: VllmConfig, process: VllmProcess) -> None:
        if config.lora_rank is None:
            raise ValueError("the engine takes no adapters")
        self._process = process
        self._folder = AdapterFolder(config.model, config.lora_rank)
        self._has_names = config.max_loras is not None
        self._held = HeldAdapters(config.max_loras or 0)
        self._changing = asyncio.Lock()  # loads and unloads, one at a time
        self.request: Any = None  # None: a request without an adapter's name has the base weights

    async def start(self) -> None:
        """Serve an adapter of zeros, or none by name. Call once, before the first request. Raises EngineError."""
        self._folder.start()
        if not self._has_names:
            await self._folder.link_zeros()
            self.request = _lora_request(_POLICY, self._folder.path)
            await self._load(_POLICY, self._folder.path)

    # --- by name ---

    async def load(self, adapter: Adapter) -> StageReport:
        """As `load_adapter` of the port."""
        async with self._changing:
            if (served := self._held.serving(adapter)) is not None:
                return StageReport(HeldIn.DEVICE, "adapter", digest=served.digest)
            await self._free_unused()
            held = self._held.new(adapter)
            contents = await asyncio.to_thread(self._folder.check, adapter.directory)
            check_digest(adapter.digest, contents.digest, adapter.directory)
            held.adapter = replace(adapter, digest=contents.digest)
            started_at = time.perf_counter()
            try:
                await asyncio.to_thread(self._folder.copy, adapter.directory, held.number, contents)
                await self._load(held.number, self._folder.copy_of(held.number))
                await self._verify(held.number, self._folder.copy_of(held.number))
            except BaseException as error:
                with contextlib.suppress(AgentLoopError):  # the caller has an error already
                    await asyncio.shield(self._free(held))
                if isinstance(error, OSError) or type(error) is EngineError:  # a worker's, which serves on
                    raise CheckpointUnreadable(
                        f"adapter: not loaded: {one_line(error)}", param="directory"
                    ) from error
                raise
            self._held.serve(held)
            load_ms = (time.perf_counter() - started_at) * 1e3
            return StageReport(HeldIn.DEVICE, "adapter", contents.num_bytes, load_ms, contents.digest)

    async def unload(self, name: str) -> None:
        """As `unload_adapter` of the port."""
        async with self._changing:
            self._held.retire(name)
            await self._free_unused()

    @contextlib.contextmanager
    def pinned(self, call: Call) -> Iterator[Any]:
        """Give the request of a call that is admitted its adapter's served version, until the block's end.

        Raises ModelNotFound or WeightVersionNotServed.
        """
        held = self._held.pin(call.request)
        call.adapter_version = held.adapter.version
        try:
            yield _lora_request(held.number, self._folder.copy_of(held.number))
        finally:
            held.num_calls -= 1

    async def _free_unused(self) -> None:
        for held in self._held.take_unused():
            await self._free(held)

    async def _free(self, held: HeldAdapter) -> None:
        await self._process.on_workers(WorkerMethod.REMOVE_ADAPTER, held.number)
        await asyncio.to_thread(self._folder.remove, held.number)

    # --- the one that is the policy ---

    def check(self, directory: str) -> FolderContents:
        return self._folder.check(directory)

    @property
    def is_policy(self) -> bool:
        return not self._has_names

    async def commit(self, directory: str) -> CommitReport:
        """Replace the served adapter in all workers, and verify the new one. vLLM must be paused.

        After an error the adapter is of unknown state until a later commit.
        """
        started_at = time.perf_counter()
        self._folder.point_to(directory)
        await self._load(_POLICY, self._folder.path)
        loaded_at = time.perf_counter()
        num_verified = await self._verify(_POLICY, self._folder.path)
        verified_at = time.perf_counter()
        return CommitReport(
            swap_ms=(loaded_at - started_at) * 1e3,
            verify_ms=(verified_at - loaded_at) * 1e3,
            num_verified=num_verified,
        )

    def close(self) -> None:
        """Remove our files. Idempotent; also done when this object or the process ends."""
        self._folder.close()

    async def _load(self, number: int, path: str) -> None:
        await self._process.on_workers(WorkerMethod.LOAD_ADAPTER, number, path)

    async def _verify(self, number: int, path: str) -> int:
        counts: list[int] = await self._process.on_workers(WorkerMethod.VERIFY_ADAPTER, number, path)
        return min(counts)


def _lora_request(number: int, path: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(str(number), number, path)


def vllm_weights(config: VllmConfig, process: VllmProcess, adapters: LoraAdapters | None = None) -> EngineWeights:
    """Make the weight updates of a vLLM engine; `adapters` exactly where it serves one."""
    return EngineWeights(config, process, adapter=adapters, label=process.label)
