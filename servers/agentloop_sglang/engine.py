"""The Engine port over SGLang (0.5.17 and 0.5.23), on CUDA.

The schedulers are processes that SGLang starts; this object is their only client and lives on one event loop. What
SGLang leaves to its caller is done in `engines/common/engine.py`, and in our code in the schedulers:

- A pause is a call into every scheduler, answered once nothing is under way on the device (`process.py`). KEEP
  freezes in place; under RECOMPUTE requests are put back into the queue and all KV is dropped.
- The answer says how many tokens each request has. After a commit the next ones are of the new version; so spans
  are exact, although SGLang has none.
- Tokens are sampled as `SamplingParams` says (`scheduler.py`, `sampler.py`).
- A start ends with a few sampled tokens: so kernels that are compiled at their first use (Triton's: half a minute
  on an H100 without graphs) delay no turn.
- An output that is not streamed comes at its end, and every `progress_tokens` tokens to SGLang's own record, which
  reports are read from.
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
WARM_UP_TOKENS = 4  # of the prompt and sampled: together less than any block, so that no KV of it stays


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
            # One that is not there has ended: what it has is of older versions, though it may not have been read.
            if (num_tokens := num_output_ids.get(call.request.request_id)) is not None:
                values.start_version(call.version_starts, version, num_tokens)
