"""vLLM's scheduler as our engines run it, without an engine: each step samples token 7 for all of its requests."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from agentloop_servers.engines.vllm.config import VllmConfig, engine_arguments
from agentloop_servers.engines.vllm.scheduler import make_scheduler


class SchedulerAlone:
    """A scheduler with `num_blocks` KV blocks, of which vLLM keeps one and the canary check another."""

    def __init__(self, config: VllmConfig, num_blocks: int) -> None:
        self.config = AsyncEngineArgs(**engine_arguments(config)).create_engine_config()
        self.config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=config.block_size, num_kv_heads=1, head_size=16, dtype=torch.float32)
        self.scheduler = make_scheduler(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=config.block_size,
            hash_block_size=config.block_size,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(config.block_size, sha256)
        self._num_added = 0
        self.num_tokens: list[int] = []  # number of tokens of each step
        self.reported_ended: set[str] = set()  # to the workers

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def kv_use(self) -> float:
        return float(self.scheduler.get_kv_cache_usage())

    @property
    def names(self) -> set[str]:
        return set(self.scheduler.requests)

    def limit_step(self, num_tokens: int) -> None:
        """Limit a step to `num_tokens` tokens."""
        self.scheduler.max_num_scheduled_tokens = num_tokens
        self.config.scheduler_config.max_num_batched_tokens = num_tokens

    @property
    def has_work(self) -> bool:
        """Return True if the engine would run a step."""
        return bool(self.scheduler.has_requests())

    def add(self, name: str, num_tokens: int, *, max_tokens: int = 100) -> None:
        """Add a request whose prompt shares no prefix with another."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._num_added += 1
        prompt = [self._num_added] * num_tokens
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))

    def step(self) -> list[str]:
        """Run a step. Returns the names of its requests."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        self.num_tokens.append(output.total_num_scheduled_tokens)
        self.reported_ended |= output.finished_req_ids
        sampled = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, [[7] for _ in names])
        self.scheduler.update_from_output(output, sampled)
        return names

    def pause(self, *, is_cache_cleared: bool) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        if is_cache_cleared:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)  # raises if a block is not free

    def resume(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
