"""LoRA adapters of one vLLM engine: exactly one is served, always under the same id, name and path.

Every request carries the same LoRARequest from the start, at first for an adapter that changes nothing. So a commit
replaces the adapter's tensors in place, and requests that are frozen meanwhile go on under the new ones, as new
requests do. What that rests on (vLLM 0.32):

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
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

from agentloop.engine import CommitReport
from agentloop.errors import EngineError
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.process import VllmProcess
from agentloop_servers.weight_transfer import (
    ADAPTER_ID,
    check_adapter,
    inspect_checkpoint,
    read_through,
    write_zero_adapter,
)

ADAPTER_NAME = "adapter"


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
