"""The LoRA adapter of one vLLM engine, and the engine's weight updates.

Exactly one LoRA adapter is served, always under the same id, name and path. Every request carries the same
LoRARequest from the start, at first for an adapter of zeros. So a commit replaces the adapter's tensors in place,
and requests that are frozen meanwhile continue under the new ones, as new requests do. That rests on vLLM 0.32:

- vLLM loads an adapter again wherever a worker does not have it (after it has reloaded base weights, say), from the
  path that some request carries. That path is a link here, switched before the adapter is loaded: it can only ever
  lead to the adapter of the last commit. That folder must stay in place while it is served.
- `load_inplace` makes vLLM read the files at every step of a request that carries it: the load has it, requests
  have not.
- A prefix-cache key holds the adapter's name and path, which never change: only the salt that carries the weight
  version keeps KV of two adapters apart.
"""

from __future__ import annotations

import time
from typing import Any

from agentloop.engine import CommitReport
from agentloop_servers.engines.common.adapters import AdapterFolder
from agentloop_servers.engines.common.weights import EngineWeights
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.process import VllmProcess
from agentloop_servers.weight_transfer.lora import ADAPTER_ID, ADAPTER_NAME
from agentloop_servers.weight_transfer.worker_calls import WorkerMethod


class LoraAdapters:
    """The served adapter of an engine. Every request carries `request`, which is valid after `start`."""

    def __init__(self, config: VllmConfig, process: VllmProcess) -> None:
        if config.lora_rank is None:
            raise ValueError("the engine takes no adapters")
        self._process = process
        self._folder = AdapterFolder(config.model, config.lora_rank)
        self.request: Any = None

    async def start(self) -> None:
        """Serve an adapter of zeros. Call once, before the first request. Raises EngineError."""
        from vllm.lora.request import LoRARequest

        await self._folder.start()
        self.request = LoRARequest(ADAPTER_NAME, ADAPTER_ID, self._folder.path)
        await self._load()

    def check(self, directory: str) -> int:
        return self._folder.check(directory)

    async def commit(self, directory: str) -> CommitReport:
        """Replace the served adapter in all workers, and verify the new one. vLLM must be paused.

        After an error the adapter is of unknown state until a later commit.
        """
        started_at = time.perf_counter()
        self._folder.point_to(directory)
        await self._load()
        loaded_at = time.perf_counter()
        counts = await self._process.on_workers(WorkerMethod.VERIFY_ADAPTER, self._folder.path)
        verified_at = time.perf_counter()
        return CommitReport(
            swap_ms=(loaded_at - started_at) * 1e3,
            verify_ms=(verified_at - loaded_at) * 1e3,
            num_verified=min(counts),
        )

    def close(self) -> None:
        """Remove our files. Idempotent; also done when this object or the process ends."""
        self._folder.close()

    async def _load(self) -> None:
        await self._process.on_workers(WorkerMethod.LOAD_ADAPTER, self._folder.path)


def vllm_weights(config: VllmConfig, process: VllmProcess, adapters: LoraAdapters | None = None) -> EngineWeights:
    """Make the weight updates of a vLLM engine; `adapters` exactly where it serves one."""
    return EngineWeights(config, process, adapter=adapters, label=process.label)
