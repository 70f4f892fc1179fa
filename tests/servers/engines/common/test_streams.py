"""Streams of an engine in a separate process: a few streams receive every token as it comes, many are polled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from agentloop.engine.interface import Delta, EngineInfo
from agentloop.engine.request_watch import ReportPace
from agentloop.errors import AgentLoopError, EngineError, EngineLost
from agentloop.types import FinishReason, GenerateRequest, Generation, SamplingParams
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.common.calls import Call
from agentloop_servers.engines.common.engine import ProcessEngine
from agentloop_servers.engines.common.process import EngineStats

STEP_S = 0.002
NUM_TOKENS = 40


class Settings:
    drain_timeout_s, can_sleep, lora_rank = 10.0, True, None
    logprobs_mode, pace = LogprobsMode.SAMPLED, ReportPace()


class Process:
    """The part of an engine's process that streams use: the tokens sampled so far, and the aborted requests."""

    def __init__(self) -> None:
        self.num_sampled: dict[str, int] = {}
        self.aborted: list[str] = []

    def stats(self) -> EngineStats:
        return EngineStats()

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def check_health(self) -> None:
        raise EngineLost("its processes have ended")

    async def close(self) -> None:
        return


class Stepping(ProcessEngine):
    """Samples a token for each request every `STEP_S`: 7, 8, 9 and so on. Counts the outputs that it makes."""

    def __init__(self) -> None:
        self.process, self.num_outputs, self.fails_at = Process(), 0, -1
        super().__init__(Settings(), self.process, None)  # type: ignore[arg-type]
        self._info = EngineInfo("stepping", 1024, 512, 16, 1 << 20, 256)
        self._lifecycle.started(3)

    async def came_up(self) -> EngineInfo:
        raise AssertionError("it is up from the beginning")

    async def admitted(self, call: Call, prepared: Any, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        request_id, sampled = call.request.request_id, self.process.num_sampled
        sampled[request_id] = 0
        try:
            while sampled[request_id] < call.request.sampling.max_tokens:
                await self.next_step(request_id)
                sampled[request_id] += 1
                if sampled[request_id] == self.fails_at:
                    raise EngineLost("it died")
                if is_streamed or sampled[request_id] == call.request.sampling.max_tokens:
                    self.num_outputs += 1
                    yield sampled[request_id]
        except (GeneratorExit, asyncio.CancelledError):
            if sampled[request_id] < call.request.sampling.max_tokens:
                self.process.aborted.append(request_id)
            raise
        finally:
            del sampled[request_id]

    async def next_step(self, request_id: str) -> None:
        await asyncio.sleep(STEP_S)

    def add_so_far(self, sampled: SampledTokens, call: Call) -> None:
        self._grow(sampled, self.process.num_sampled.get(call.request.request_id, 0))

    def add_piece(self, sampled: SampledTokens, call: Call, output: Any) -> bool:
        self._grow(sampled, output)
        return True

    def finished(self, call: Call, output: Any, sampled: SampledTokens) -> Generation:
        self._grow(sampled, output or 0)
        reason = FinishReason.ABORT if output is None else FinishReason.LENGTH
        return sampled.generation(call.request.request_id, reason)

    def translated(self, error: Exception) -> AgentLoopError:
        return error if isinstance(error, AgentLoopError) else EngineError(str(error))

    def committed(self, version: int) -> None: ...

    @staticmethod
    def _grow(sampled: SampledTokens, num_tokens: int) -> None:
        for place in range(len(sampled), num_tokens):
            sampled.append(7 + place, -0.5, 3)


def ask(name: str) -> GenerateRequest:
    return GenerateRequest(name, (1, 2), SamplingParams(max_tokens=NUM_TOKENS))


async def read(engine: Stepping, name: str) -> list[Delta]:
    """Return the pieces of a stream, after comparing them with the complete generation."""
    deltas: list[Delta] = []
    async for piece in engine.stream(ask(name)):
        if isinstance(piece, Generation):
            told = tuple(token_id for delta in deltas for token_id in delta.token_ids)
            assert told == piece.token_ids == tuple(range(7, 7 + NUM_TOKENS))
            assert piece.finish_reason is FinishReason.LENGTH
            assert [span.version for span in piece.weight_versions] == [3]
            return deltas
        deltas.append(piece)
    raise AssertionError("a stream ended without its generation")


async def test_one_stream_has_each_token_as_it_comes() -> None:
    engine = Stepping()
    assert len(await read(engine, "alone")) == NUM_TOKENS == engine.num_outputs


async def test_many_streams_join_tokens_and_cost_an_output_each() -> None:
    engine, num_streams = Stepping(), 64
    found = await asyncio.gather(*(read(engine, f"r{index}") for index in range(num_streams)))
    num_unpaced = sum(engine.stream_pace.wait_s(number) == 0 for number in range(1, num_streams + 1))
    assert engine.num_outputs == num_unpaced * NUM_TOKENS + (num_streams - num_unpaced)
    assert max(map(len, found[num_unpaced:])) < NUM_TOKENS
    assert engine.load().num_running == 0


async def test_a_paced_stream_that_is_left_or_fails_ends_in_the_engine() -> None:
    engine = Stepping()
    others = [asyncio.create_task(read(engine, f"other{index}")) for index in range(16)]
    await asyncio.sleep(STEP_S)
    stream = engine.stream(ask("left"))
    await anext(stream)  # type: ignore[arg-type]
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine.process.aborted == ["left"]
    await asyncio.gather(*others)
    engine.fails_at = 5
    with pytest.raises(EngineLost, match="it died"):
        await asyncio.gather(*(read(engine, f"failing{index}") for index in range(16)))


async def test_an_engine_whose_processes_have_ended_needs_no_sleep() -> None:
    engine = Stepping()
    await engine.sleep(1)  # otherwise the process would receive a pause
    assert not engine.is_paused
