"""The Engine interface over SGLang (0.5.17 and 0.5.23), on CUDA.

SGLang starts the scheduler processes. This object is their only client and lives on one event loop. Features that
SGLang lacks are in `engines/common/engine.py` and in our code in the schedulers:

- A pause is a call to every scheduler, which returns when no work is running on the device (`process.py`). KEEP
  freezes
  requests in place; RECOMPUTE requeues them and drops all KV.
- A pause returns the number of tokens of each request. After a commit, later tokens have the new version, so
  version
  spans are exact although SGLang does not record them.
- Tokens are sampled according to `SamplingParams` (`scheduler.py`, `sampler.py`).
- A start ends with a few sampled tokens, so that kernels compiled at first use (for Triton half a minute on an H100
  without graphs) do not delay a turn.
- Without streaming, an output is returned at the end of a request, and every `progress_tokens` tokens SGLang
  updates
  its request state, from which progress reports are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from agentloop.engine.interface import EngineInfo
from agentloop.errors import AgentLoopError
from agentloop.types import GenerateRequest, Generation
from agentloop.values.checks import room_tokens
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import SamplingParams
from agentloop_servers.engines.common.calls import Call
from agentloop_servers.engines.common.engine import ProcessEngine
from agentloop_servers.engines.common.weights import EngineWeights
from agentloop_sglang import convert as values
from agentloop_sglang.config import SglangConfig
from agentloop_sglang.process import SglangProcess, sglang_call

WARM_UP_TIMEOUT_S = 300.0
WARM_UP_TOKENS = 4  # prompt tokens, and sampled tokens: less than a block, so that no KV remains in the cache


class SglangEngine(ProcessEngine[SglangConfig, SglangProcess]):
    """One SGLang engine. `start` takes 20 to 60 s; `close` ends its processes."""

    def __init__(self, config: SglangConfig) -> None:
        process = SglangProcess(config)
        super().__init__(config, process, EngineWeights(config, process))

    async def came_up(self) -> EngineInfo:
        await self._warm_up()
        return self._process.describe()

    async def _warm_up(self) -> None:
        sampling = SamplingParams(max_tokens=WARM_UP_TOKENS)
        request = GenerateRequest("warm-up", tuple(range(WARM_UP_TOKENS)), sampling)
        made = values.generate_input(
            request, WARM_UP_TOKENS, 0, is_streamed=False, logprobs_mode=self._config.logprobs_mode
        )
        async with (
            sglang_call("warm-up", WARM_UP_TIMEOUT_S),
            contextlib.aclosing(self._process.outputs(made)) as outputs,
        ):
            async for _ in outputs:
                pass

    async def admitted(self, call: Call, prepared: Any, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        request, version = call.request, self._lifecycle.require_usable()
        made = values.generate_input(
            request,
            room_tokens(request, self.info),
            self._lifecycle.kv_version(request.kv_version, version),
            is_streamed=is_streamed,
            logprobs_mode=self._config.logprobs_mode,
        )
        call.version_starts = [(version, 0)]
        async with contextlib.aclosing(self._process.outputs(made)) as outputs:
            async for output in outputs:
                yield output

    def add_so_far(self, sampled: SampledTokens, call: Call) -> None:
        if (state := self._process.state(call.request.request_id)) is not None:
            values.add_so_far(sampled, state, call.request.sampling.num_top_logprobs)
            values.stamp(sampled, call.version_starts)

    def add_piece(self, sampled: SampledTokens, call: Call, output: Any) -> bool:
        values.add_output(sampled, output, call.request.sampling.num_top_logprobs)
        values.stamp(sampled, call.version_starts)
        return True

    def finished(self, call: Call, output: Any, sampled: SampledTokens) -> Generation:
        if output is not None:
            values.add_output(sampled, output, call.request.sampling.num_top_logprobs)
        values.stamp(sampled, call.version_starts)
        return values.to_generation(call.request, output, sampled, self.load())

    def translated(self, error: Exception) -> AgentLoopError:
        return values.translate(error)

    def committed(self, version: int) -> None:
        num_output_ids = self._process.num_output_ids
        for call in self._calls.all():
            # A missing request has ended: all its tokens are of older versions, even if they were not read yet.
            if (num_tokens := num_output_ids.get(call.request.request_id)) is not None:
                values.start_version(call.version_starts, version, num_tokens)
