"""The Engine interface over vLLM's AsyncLLM (0.32 and 0.33), on CPU and CUDA.

AsyncLLM starts the engine process. This object is its only client and lives on one event loop. vLLM is only paused
in mode "keep"; `engines/common/engine.py` implements the other modes. vLLM's version label is `str(version)` and
changes only during a pause.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from agentloop.engine.interface import Adapter, EngineInfo, StageReport
from agentloop.errors import AgentLoopError, EngineLost, MalformedEngineResponse
from agentloop.images import Image, ImageTokens
from agentloop.types import GenerateRequest, Generation
from agentloop.values.capabilities import Feature
from agentloop.values.checks import room_tokens
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.common.calls import Call
from agentloop_servers.engines.common.engine import ProcessEngine
from agentloop_servers.engines.vllm import convert as values
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.images import VllmImages
from agentloop_servers.engines.vllm.process import OtherHosts, VllmProcess
from agentloop_servers.engines.vllm.weights import LoraAdapters, vllm_weights


class VllmEngine(ProcessEngine[VllmConfig, VllmProcess]):
    """One vLLM engine. `start` takes 15 to 40 s on CPU; `close` ends its processes."""

    def __init__(self, config: VllmConfig, other_hosts: OtherHosts | None = None) -> None:
        process = VllmProcess(config, other_hosts)
        self._adapters = LoraAdapters(config, process) if config.lora_rank is not None else None
        self._images: VllmImages | None = None
        super().__init__(config, process, vllm_weights(config, process, self._adapters))

    async def came_up(self) -> EngineInfo:
        self._images = VllmImages(self._process.llm)
        info = self._process.describe()
        return replace(info, features=info.features | {Feature.IMAGES}) if self._images.takes_images else info

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        self._lifecycle.require_alive()
        if self._images is None:
            raise EngineLost("the engine is not started")
        return await self._images.tokens(images)

    async def prepared(self, request: GenerateRequest) -> Any:
        """Return vLLM's prompt for a request with images, otherwise None."""
        return None if self._images is None else await self._images.prompt(request)

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        if self._adapters is None or self.info.max_loras is None:
            return await super().load_adapter(adapter)
        self._lifecycle.check_stage()
        return await self._adapters.load(adapter)

    async def unload_adapter(self, name: str) -> None:
        self._lifecycle.require_alive()
        if self._adapters is not None:
            await self._adapters.unload(name)

    def admitted(self, call: Call, prepared: Any, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        if call.request.adapter and self._adapters is not None:
            return self._under_adapter(self._adapters, call, prepared, is_streamed=is_streamed)
        lora_request = None if self._adapters is None else self._adapters.request
        return self._sampled(call, prepared, lora_request, is_streamed=is_streamed)

    async def _under_adapter(
        self, adapters: LoraAdapters, call: Call, prepared: Any, *, is_streamed: bool
    ) -> AsyncGenerator[Any, None]:
        with adapters.pinned(call) as lora_request:
            async with aclosing(self._sampled(call, prepared, lora_request, is_streamed=is_streamed)) as outputs:
                async for output in outputs:
                    yield output

    def _sampled(
        self, call: Call, prepared: Any, lora_request: Any, *, is_streamed: bool
    ) -> AsyncGenerator[Any, None]:
        request = call.request
        requested = None if request.adapter else request.kv_version
        kv_version = self._lifecycle.kv_version(requested, self._lifecycle.require_usable())
        is_traced = request.traceparent and self._config.traces_url is not None  # vLLM warns if tracing is off
        generate = partial(
            self._process.llm.generate,
            values.tokens_prompt(request, kv_version, prepared),
            request_id=request.request_id,
            lora_request=lora_request,
            trace_headers={"traceparent": request.traceparent} if is_traced else None,
            priority=request.sampling.priority,
        )
        if request.sampling.score_from is not None:
            return self._scores(request, generate)
        sampling, top_k = request.sampling, self._config.sampling_mask_top_k
        if top_k is not None and not sampling.top_k:  # a probe: other requests have the service's `top_k`
            sampling = replace(sampling, top_k=top_k)
        params = values.sampling_params(
            sampling,
            room_tokens(request, self.info),
            is_streamed=is_streamed,
            eos_token_id=self._process.eos_token_id,
            logprobs_mode=self._config.logprobs_mode,
            can_bias=Feature.LOGIT_BIAS in self.info.features,
            routes_from=request.routes_from,
        )
        outputs: AsyncGenerator[Any, None] = generate(params)
        return outputs

    async def _scores(self, request: GenerateRequest, generate: Callable[..., Any]) -> AsyncGenerator[Any, None]:
        """Score a prompt with the prefix cache, or without it if the cache contains tokens that must be scored."""
        start, is_greedy = request.sampling.score_from or 0, Feature.GREEDY in self.info.features
        params = partial(values.scoring_params, request.sampling, is_greedy=is_greedy)
        outputs = [output async for output in generate(params(reads_cache=True))]
        if outputs and (outputs[-1].num_cached_tokens or 0) >= start:
            outputs = [output async for output in generate(params(reads_cache=False))]
        for output in outputs:
            yield output

    def add_so_far(self, sampled: SampledTokens, call: Call) -> None:
        values.add_so_far(sampled, self._process.llm, call.request, call.adapter_version)

    def add_piece(self, sampled: SampledTokens, call: Call, output: Any) -> bool:
        request, num_had = call.request, len(sampled)
        values.add_completion(sampled, output.outputs[0], request.sampling.num_top_logprobs)
        values.add_aux(sampled, request, output.outputs[0])
        if self._config.routed_experts:
            for state in values.states_of(self._process.llm, request.request_id):
                values.add_routes_so_far(sampled, request, state, num_had)
        spans = values.spans_so_far(
            self._process.llm, request.request_id, output, len(sampled), call.adapter_version
        )
        if spans is not None:
            values.stamp(sampled, spans)
        return spans is not None

    def finished(self, call: Call, output: Any, sampled: SampledTokens) -> Generation:
        request = call.request
        if request.sampling.score_from is not None:
            sampled = SampledTokens(LogprobsMode.RAW)
            if output is not None:
                values.add_scores(sampled, request, output, call.adapter_version)
        elif output is not None:
            if not sampled.token_ids:
                values.add_completion(sampled, output.outputs[0], request.sampling.num_top_logprobs)
            self._add_aux(sampled, request, output.outputs[0])
        return values.to_generation(request, output, sampled, self.load(), call.adapter_version)

    def _add_aux(self, sampled: SampledTokens, request: GenerateRequest, completion: Any) -> None:
        """Append the auxiliary rows of a request's last output. Raises MalformedEngineResponse if it lacks rows."""
        wanted = {
            "routed experts": (self._config.routed_experts, completion.routed_experts),
            "a sampling mask": (self._config.sampling_mask_top_k is not None, completion.sampling_mask),
        }
        for name, (is_on, rows) in wanted.items():
            if is_on and rows is None and completion.token_ids:
                raise MalformedEngineResponse(f"vLLM returned tokens without {name}")
        values.add_aux(sampled, request, completion)

    def translated(self, error: Exception) -> AgentLoopError:
        return values.translate(error)

    def committed(self, version: int) -> None:
        """Do nothing: vLLM stores the version label itself."""
