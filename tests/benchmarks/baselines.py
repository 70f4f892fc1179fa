"""Baselines on an unmodified engine: its own blocking update path, and stop-the-world (abort, update, resend).

This module has vLLM's path, packed NCCL; `baselines_sglang.py` has SGLang's. The engine has the sizes of ours and
none of our code. Both ways send the tensors of the trainer process that our variants use. vLLM's NCCL wrapper needs
NCCL 2.29.7 or newer (VLLM_NCCL_SO_PATH) and silently delivers zeros on an older one: `delivered` compares greedy
tokens with those of an engine that had these weights.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentloop_servers.engines.vllm.config import VllmConfig, engine_arguments, prepare_environment
from agentloop_servers.local import free_port
from tests.benchmarks.streams import Flight, Piece
from tests.benchmarks.trainer import Call, NativeConnect, NativeSend, SetVersion, TrainerProcess

NATIVE_TIMEOUT_S = 60.0
MIN_AGREEMENT = 0.5  # share of equal greedy tokens: bf16 may flip a near tie, zeros flip nearly all


@dataclass(frozen=True, slots=True)
class PlainUpdate:
    """One update's times in milliseconds, and every request's gap."""

    stall_ms: float  # from the pause call to the resume answer
    pause_ms: float
    update_ms: float  # start, transfer and finish
    gaps_ms: tuple[float, ...]


class PlainEngine(ABC):
    """An unmodified engine with its own way of updating weights."""

    @abstractmethod
    async def start(self) -> None:
        """Start the engine."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine. Idempotent."""

    @abstractmethod
    async def connect(self, trainer: TrainerProcess) -> None:
        """Open the transport of its updates."""

    @abstractmethod
    def stream(self, request_id: str, prompt: tuple[int, ...]) -> AsyncIterator[Piece]:
        """Yield tokens as they arrive, until an abort or the end of the context."""

    @abstractmethod
    async def greedy(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[tuple[int, ...]]:
        """Return the greedy continuations."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Abort one request."""

    @abstractmethod
    async def pause(self, *, is_aborting: bool, is_cache_cleared: bool) -> None:
        """Freeze or abort all requests."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue the requests."""

    @abstractmethod
    async def transfer(self, trainer: TrainerProcess) -> None:
        """Receive the trainer's tensors while the engine is paused."""

    async def load(self, trainer: TrainerProcess, version: int) -> None:
        """Update the engine to `version` while it is idle."""
        await trainer.ask(SetVersion(version))
        await self.pause(is_aborting=False, is_cache_cleared=True)
        await self.transfer(trainer)
        await self.resume()

    async def update(self, trainer: TrainerProcess, flight: Flight, version: int) -> PlainUpdate:
        """Update in the documented way with requests in flight: pause in place, transfer, resume.

        Their KV is kept.
        """
        await trainer.ask(SetVersion(version))
        times = [time.perf_counter()]
        await self.pause(is_aborting=False, is_cache_cleared=False)
        times.append(time.perf_counter())
        await self.transfer(trainer)
        times.append(time.perf_counter())
        await self.resume()
        times.append(time.perf_counter())
        return await _measured(flight, times)

    async def update_by_resending(self, trainer: TrainerProcess, flight: Flight, version: int) -> PlainUpdate:
        """Stop the world: abort all requests, update, and resend each with its prompt and its tokens so far."""
        await trainer.ask(SetVersion(version))
        times = [time.perf_counter()]
        await self.pause(is_aborting=True, is_cache_cleared=True)
        times.append(time.perf_counter())
        await self.transfer(trainer)
        times.append(time.perf_counter())
        await self.resume()
        await flight.restart()
        times.append(time.perf_counter())
        return await _measured(flight, times)


class PlainVllm(PlainEngine):
    """An AsyncLLM with vLLM's own weight transfer."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._llm: Any = None

    async def start(self) -> None:
        self._llm = await asyncio.to_thread(self._construct)

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if llm.output_handler is not None:
            llm.output_handler.cancel()
            await asyncio.wait([llm.output_handler])
        await asyncio.to_thread(llm.shutdown)
        await asyncio.sleep(0)
        llm.shutdown = lambda *_: None  # its destructor calls it again, too late

    async def connect(self, trainer: TrainerProcess) -> None:
        """Open the NCCL group of the trainer and the engine's worker."""
        await trainer.ask(NativeConnect(free_port("127.0.0.1")), timeout_s=NATIVE_TIMEOUT_S, serve=self.serve)

    async def stream(self, request_id: str, prompt: tuple[int, ...]) -> AsyncIterator[Piece]:
        async for output in self._llm.generate(*self._request(request_id, prompt, None)):
            yield Piece(tuple(output.outputs[0].token_ids))

    async def greedy(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[tuple[int, ...]]:
        async def one(number: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
            request = self._request(f"greedy-{number}", prompt, num_tokens)
            return tuple(
                [token async for output in self._llm.generate(*request) for token in output.outputs[0].token_ids]
            )

        return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts))))

    async def abort(self, request_id: str) -> None:
        await self._llm.abort([request_id])

    async def pause(self, *, is_aborting: bool, is_cache_cleared: bool) -> None:
        mode = "abort" if is_aborting else "keep"
        await self._llm.pause_generation(mode=mode, clear_cache=is_cache_cleared)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def transfer(self, trainer: TrainerProcess) -> None:
        await trainer.ask(NativeSend(), timeout_s=NATIVE_TIMEOUT_S, serve=self.serve)

    async def serve(self, call: Call) -> None:
        """Execute a call from vLLM's trainer side on the engine."""
        from vllm.distributed.weight_transfer import base  # noqa: PLC0415

        match call.verb:
            case "init_weight_transfer_engine":
                await self._llm.init_weight_transfer_engine(base.WeightTransferInitRequest(call.payload))
            case "start_weight_update":
                await self._llm.start_weight_update()
            case "update_weights":
                await self._llm.update_weights(base.WeightTransferUpdateRequest(call.payload))
            case "finish_weight_update":
                await self._llm.finish_weight_update(call.payload)
            case _:
                raise ValueError(f"vLLM's trainer side called {call.verb}")

    def _construct(self) -> Any:
        prepare_environment(self._config)
        from vllm.config import WeightTransferConfig  # noqa: PLC0415
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        arguments = engine_arguments(self._config)
        del arguments["worker_extension_cls"]
        if self._config.device == "cuda":
            arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def _request(self, request_id: str, prompt: tuple[int, ...], num_greedy: int | None) -> tuple[Any, Any, str]:
        from vllm.inputs import tokens_input  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415

        params = SamplingParams(
            max_tokens=self._config.max_model_len - len(prompt) if num_greedy is None else num_greedy,
            temperature=1.0 if num_greedy is None else 0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
        )
        return tokens_input(list(prompt)), params, request_id


def agreement(some: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> float:
    """Return the share of equal continuations."""
    return sum(one == other for one, other in zip(some, others, strict=True)) / len(some)


def delivered(got: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> bool:
    """Return True if an engine that answers `got` has the weights of the engine that answered `wanted`."""
    return agreement(got, wanted) >= MIN_AGREEMENT


async def _measured(flight: Flight, times: Sequence[float]) -> PlainUpdate:
    started_at, paused_at, updated_at, resumed_at = times
    await flight.until(lambda stream: stream.arrivals[-1][0] > updated_at, timeout_s=60)
    gaps = flight.gaps_ms(started_at, lambda at, _: at > updated_at)
    return PlainUpdate(
        stall_ms=(resumed_at - started_at) * 1000,
        pause_ms=(paused_at - started_at) * 1000,
        update_ms=(updated_at - paused_at) * 1000,
        gaps_ms=tuple(gaps),
    )
