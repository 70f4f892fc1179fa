"""The LoRA adapters of one vLLM engine, and the engine's weight updates.

Without `max_loras`, exactly one LoRA adapter is served, always with the same id, name and path. Every request has
the same LoRARequest, initially for an adapter of zeros. A commit replaces the adapter's tensors in place, so frozen
and new requests continue with the new tensors. With `max_loras`, each version of each adapter has a number, a slot
in the workers and a copy of its files, from its load until it is replaced or unloaded and no running call uses it.
This depends on vLLM 0.32's behavior:

- vLLM reloads an adapter that a worker is missing (for example after it reloaded base weights) from the path in a
  request. Here that path is a symbolic link, which is switched before the adapter is loaded, so it always leads to
  the adapter of the last commit. That folder must stay in place while it is served.
- `load_inplace` makes vLLM read the files in every step of a request that sets it. Only the load sets it, not
  requests.
- A prefix-cache key contains the adapter's name and path. The policy adapter's never change, so only the cache salt
  separates the KV of two versions. Adapters served by name have a different name and path for each version.
- vLLM may load an adapter within a step, and a failure there ends the engine. The files therefore outlive the
  calls,
  and every version has a slot, so that vLLM never evicts an adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agentloop.engine.adapters import HeldAdapter, HeldAdapters
from agentloop.engine.interface import Adapter, CommitReport, StageReport, StagingDevice
from agentloop.engine.weight_digest import FolderContents, check_digest
from agentloop.errors import AgentLoopError, CheckpointUnreadable, EngineError
from agentloop_servers.engines.common.adapters import AdapterFolder
from agentloop_servers.engines.common.calls import Call
from agentloop_servers.engines.common.process import one_line
from agentloop_servers.engines.common.weights import EngineWeights
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.process import VllmProcess
from agentloop_servers.weight_transfer.worker_calls import WorkerMethod

_POLICY = 1  # vLLM's id of the policy adapter


class LoraAdapters:
    """The policy adapter of an engine, which all requests use (`request`), or the adapters that it serves by
    name."""

    def __init__(self, config: VllmConfig, process: VllmProcess) -> None:
        if config.lora_rank is None:
            raise ValueError("lora_rank is None: the engine does not support adapters")
        self._process = process
        self._folder = AdapterFolder(config.model, config.lora_rank)
        self._has_names = config.max_loras is not None
        self._held = HeldAdapters(config.max_loras or 0)
        self._changing = asyncio.Lock()  # serializes loads and unloads
        self.request: Any = None  # None: a request without an adapter name uses the base weights

    async def start(self) -> None:
        """Serve an adapter of zeros as the policy, unless adapters are served by name.

        Call once, before the first request. Raises EngineError.
        """
        self._folder.start()
        if not self._has_names:
            await self._folder.link_zeros()
            self.request = _lora_request(_POLICY, self._folder.path)
            await self._load(_POLICY, self._folder.path)

    # Adapters served by name

    async def load(self, adapter: Adapter) -> StageReport:
        """Implement `Engine.load_adapter`."""
        async with self._changing:
            if (served := self._held.serving(adapter)) is not None:
                return StageReport(StagingDevice.DEVICE, "adapter", digest=served.digest)
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
                with contextlib.suppress(AgentLoopError):  # the original error is raised below
                    await asyncio.shield(self._free(held))
                # A plain EngineError comes from a worker that continues to serve; its subclasses mean a lost
                # engine.
                if isinstance(error, OSError) or type(error) is EngineError:
                    raise CheckpointUnreadable(
                        f"adapter {adapter.name!r} was not loaded: {one_line(error)}", param="directory"
                    ) from error
                raise
            self._held.serve(held)
            load_ms = (time.perf_counter() - started_at) * 1e3
            return StageReport(StagingDevice.DEVICE, "adapter", contents.num_bytes, load_ms, contents.digest)

    async def unload(self, name: str) -> None:
        """Implement `Engine.unload_adapter`."""
        async with self._changing:
            self._held.retire(name)
            await self._free_unused()

    @contextlib.contextmanager
    def pinned(self, call: Call) -> Iterator[Any]:
        """Pin the served version of an admitted call's adapter during the block. Yields vLLM's LoRARequest.

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

    # The policy adapter

    def check(self, directory: str) -> FolderContents:
        return self._folder.check(directory)

    @property
    def is_policy(self) -> bool:
        return not self._has_names

    async def commit(self, directory: str) -> CommitReport:
        """Replace the served adapter in all workers, and verify the new one. vLLM must be paused.

        After an error the adapter is in an unknown state until a later commit.
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
        """Remove the temporary folder. Idempotent; also called at garbage collection and process exit."""
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
    """Make the weight updates of a vLLM engine. Give `adapters` if and only if the engine supports adapters."""
    return EngineWeights(config, process, adapter=adapters, label=process.label)
