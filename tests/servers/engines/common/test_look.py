"""The look at new weights of an engine in a process of its own: what leaves it meanwhile, and after a refusal."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from agentloop.engine import CommitReport, Delta, Progress, WeightUpdate
from agentloop.errors import EngineUnusable, WeightsRefused, WeightUpdateFailed
from agentloop.request_watch import ReportPace, StreamPace
from agentloop.sampled_tokens import SampledTokens
from agentloop.types import FinishReason, GenerateRequest, Generation, KVPolicy, PauseMode, SamplingParams
from agentloop_servers.engines.common import engine as process_engine
from agentloop_servers.engines.common.calls import Call
from tests.servers.engines.common.test_streams import STEP_S, Stepping

OLD, NEW = 3, 4
NUM_TOKENS = 60
UNIFORM = -math.log(512)


class Weights:
    """Takes any version that was staged, at once."""

    staged_version: int | None = None

    def take_staged(self) -> tuple[int, WeightUpdate]:
        assert self.staged_version is not None
        return 1, WeightUpdate(self.staged_version, directory="any")

    async def commit(self, staged: tuple[int, WeightUpdate]) -> CommitReport:
        return CommitReport()


class Looking(Stepping):
    """Freezes, and takes version `NEW`, whose fixed prompt has `answer` as the logprob of the likeliest id."""

    def __init__(self, answer: float) -> None:
        super().__init__()
        self._config.pace = ReportPace(interval_s=STEP_S)  # type: ignore[misc]
        self.answer, self.num_old = answer, 1 << 30
        self._served_weights = self.weights = Weights()  # type: ignore[assignment]
        process: Any = self.process
        process.pause, process.resume, process.unbegun = self.freeze, self.go_on, self.unbegun
        process.clear_cache = self.clear_cache
        self.runs, self.may_answer = asyncio.Event(), asyncio.Event()
        self.runs.set()
        self.cleared: list[bool] = []

    async def freeze(self, *, is_cache_cleared: bool) -> None:
        self.runs.clear()
        self.cleared.append(is_cache_cleared)

    async def go_on(self) -> None:
        self.runs.set()

    async def clear_cache(self) -> None:
        self.cleared.append(True)

    async def unbegun(self, request_ids: list[str]) -> list[str]:
        return []

    async def take(self, version: int = NEW) -> None:
        """Pause and commit, between two tokens of the one request in flight."""
        await self.pause(PauseMode.KEEP, KVPolicy.KEEP)
        self.num_old = max(self.process.num_sampled.values(), default=0)
        self.weights.staged_version = version
        await self.commit(version)

    async def admitted(self, call: Call, prepared: Any, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        if call.request.request_id.startswith("look-"):
            await self.runs.wait()
            await self.may_answer.wait()
            yield 1
            return
        async for output in super().admitted(call, prepared, is_streamed=is_streamed):
            while not self.runs.is_set() and call.request.request_id not in self.process.aborted:
                await asyncio.sleep(STEP_S)
            yield output

    def finished(self, call: Call, output: Any, sampled: SampledTokens) -> Generation:
        if call.request.request_id.startswith("look-"):
            sampled.append(1, self.answer, NEW, ((1, self.answer),))
            return sampled.generation(call.request.request_id, FinishReason.LENGTH)
        return super().finished(call, output, sampled)

    def _grow(self, sampled: SampledTokens, num_tokens: int) -> None:  # type: ignore[override]
        for place in range(len(sampled), num_tokens):
            sampled.append(7 + place, UNIFORM, OLD if place < self.num_old else NEW)


async def gather_stream(engine: Looking, heard: list[Delta | Generation]) -> None:
    async for piece in engine.stream(GenerateRequest("r", (1, 2), SamplingParams(max_tokens=NUM_TOKENS))):
        heard.append(piece)


def versions(heard: list[Delta | Generation]) -> set[int]:
    return {span.version for piece in heard for span in piece.weight_versions}


@pytest.fixture(params=["each token", "looked at now and then"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "each token":
        monkeypatch.setattr(Looking, "stream_pace", StreamPace(least_s=0.0, pieces_per_s=200.0))


async def begun(engine: Looking) -> tuple[list[Delta | Generation], asyncio.Task[None], asyncio.Task[float]]:
    """A stream over a commit, and the resume that looks, a few steps later."""
    heard: list[Delta | Generation] = []
    streaming = asyncio.create_task(gather_stream(engine, heard))
    while not heard:
        await asyncio.sleep(STEP_S)
    await engine.take()
    resuming = asyncio.create_task(engine.resume())
    await asyncio.sleep(10 * STEP_S)
    assert engine.process.num_sampled.get("r", NUM_TOKENS) > engine.num_old, "it samples under the new weights"
    assert versions(heard) == {OLD}
    return heard, streaming, resuming


@pytest.mark.usefixtures("pace")
async def test_tokens_wait_for_the_answer() -> None:
    engine = Looking(-0.5)
    heard, streaming, resuming = await begun(engine)
    engine.may_answer.set()
    assert await resuming > 0
    await streaming
    assert versions(heard) == {OLD, NEW}
    assert isinstance(heard[-1], Generation)
    assert heard[-1].token_ids == tuple(range(7, 7 + NUM_TOKENS))
    assert await engine.resume() == 0.0


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("answer", [UNIFORM, math.nan])
async def test_noise_is_refused_and_none_of_its_tokens_leaves(answer: float) -> None:
    engine = Looking(answer)
    heard, streaming, resuming = await begun(engine)
    engine.may_answer.set()
    with pytest.raises(WeightsRefused, match="version 4: the logits of a fixed prompt are"):
        await resuming
    with pytest.raises(EngineUnusable):
        await streaming
    assert versions(heard) == {OLD}
    assert engine.is_paused
    assert not engine.is_usable
    assert engine.cleared == [False, True]  # no KV of it is left
    with pytest.raises(EngineUnusable):  # it is not asked to go on without weights
        await engine.resume()


async def test_what_is_reported_of_a_request_waits_too() -> None:
    engine, told = Looking(UNIFORM), list[Progress]()
    request = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=NUM_TOKENS))
    asking = asyncio.create_task(engine.generate(request, told.append))
    while not any(one.tokens.token_ids for one in told):
        await asyncio.sleep(STEP_S)
    await engine.take()
    resuming = asyncio.create_task(engine.resume())
    await asyncio.sleep(10 * STEP_S)
    engine.may_answer.set()
    ended = await asyncio.gather(resuming, asking, return_exceptions=True)
    assert [type(one) for one in ended] == [WeightsRefused, EngineUnusable]
    assert {span.version for one in told for span in one.tokens.weight_versions} == {OLD}


async def test_without_an_answer_the_tokens_are_not_given_out_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "LOOK_TIMEOUT_S", 20 * STEP_S)
    engine = Looking(-0.5)
    heard, streaming, resuming = await begun(engine)
    with pytest.raises(WeightUpdateFailed, match="version 4: no answer within") as failed:
        await resuming
    assert not isinstance(failed.value, WeightsRefused)
    with pytest.raises(EngineUnusable):
        await streaming
    assert versions(heard) == {OLD}


async def cut_short() -> tuple[Looking, list[Delta | Generation], asyncio.Task[None]]:
    engine = Looking(-0.5)
    heard, streaming, resuming = await begun(engine)
    resuming.cancel()
    await asyncio.gather(resuming, return_exceptions=True)
    assert (engine.is_paused, engine.weight_version, versions(heard)) == (True, NEW, {OLD})
    return engine, heard, streaming


async def test_after_a_resume_that_was_cut_short_the_next_one_looks() -> None:
    engine, heard, streaming = await cut_short()
    engine.may_answer.set()
    assert await engine.resume() > 0
    await streaming
    assert versions(heard) == {OLD, NEW}


async def test_what_was_never_looked_at_ends_with_the_next_commit() -> None:
    engine, heard, streaming = await cut_short()
    engine.may_answer.set()
    await engine.take(NEW + 1)
    await engine.resume()
    with pytest.raises(EngineUnusable):
        await streaming
    assert versions(heard) == {OLD}
    assert (engine.is_usable, engine.cleared[-1]) == (True, True)
