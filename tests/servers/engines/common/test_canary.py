"""The canary check of an engine, in its own process: the tokens that leave the engine during and after it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from agentloop.engine.canary import CANARY_PREFIX
from agentloop.engine.interface import CommitReport, Delta, Progress, WeightUpdate
from agentloop.engine.request_watch import ReportPace, StreamPace
from agentloop.errors import EngineError, EngineUnusable, WeightsRefused, WeightUpdateFailed
from agentloop.types import FinishReason, GenerateRequest, Generation, KVPolicy, PauseMode, SamplingParams
from agentloop.values.sampled_tokens import SampledTokens
from agentloop_servers.engines.common import engine as process_engine
from agentloop_servers.engines.common.calls import Call
from agentloop_servers.engines.vllm.process import SchedulerStats
from tests.servers.engines.common.test_streams import STEP_S, Stepping

OLD, NEW = 3, 4
NUM_TOKENS = 60
UNIFORM = -math.log(512)


class Weights:
    """Accepts any staged version at once, and resumes the engine where the commit does."""

    staged_version: int | None = None

    def __init__(self, engine: Checking) -> None:
        self._engine = engine

    def take_staged(self) -> tuple[int, WeightUpdate]:
        assert self.staged_version is not None
        return 1, WeightUpdate(self.staged_version, directory="any")

    async def commit(self, staged: tuple[int, WeightUpdate], *, resumes: bool = False) -> CommitReport:
        if self._engine.commit_error is not None:
            raise self._engine.commit_error
        if resumes:
            assert self._engine.has_canary, "the canary request comes first"
            await self._engine.go_on()
        return CommitReport()


class Checking(Stepping):
    """Freezes and commits version `NEW`. `answer` is the logprob of the most likely token of the canary check."""

    is_one_call = False
    commit_error: Exception | None = None
    has_canary = False

    def __init__(self, answer: float) -> None:
        super().__init__()
        self._config.pace = ReportPace(interval_s=STEP_S)  # type: ignore[misc]
        self.answer, self.num_old = answer, 1 << 30
        self._served_weights = self.weights = Weights(self)  # type: ignore[assignment]
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
        """Stage and pause between two tokens of the single request in flight."""
        await self.pause(PauseMode.KEEP, KVPolicy.KEEP)
        self.num_old = max(self.process.num_sampled.values(), default=0)
        self.weights.staged_version = version

    async def switch(self, version: int = NEW) -> float:
        """Commit and resume, in one call or in two. Returns the duration of the canary check in seconds."""
        if self.is_one_call:
            return (await self.commit(version, resumes=True)).canary_ms / 1e3
        await self.commit(version)
        return await self.resume()

    async def admitted(self, call: Call, prepared: Any, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
        if not call.request.request_id.startswith(CANARY_PREFIX):
            async for output in super().admitted(call, prepared, is_streamed=is_streamed):
                yield output
            return
        self.has_canary = True
        await self.runs.wait()
        await self.may_answer.wait()
        yield 1

    async def next_step(self, request_id: str) -> None:
        """Return the next token. A frozen engine takes no step unless the request was aborted."""
        await super().next_step(request_id)
        while not self.runs.is_set() and request_id not in self.process.aborted:
            await asyncio.sleep(STEP_S)

    def finished(self, call: Call, output: Any, sampled: SampledTokens) -> Generation:
        if call.request.request_id.startswith(CANARY_PREFIX):
            sampled.append(1, self.answer, NEW, ((1, self.answer),))
            return sampled.generation(call.request.request_id, FinishReason.LENGTH)
        return super().finished(call, output, sampled)

    def _grow(self, sampled: SampledTokens, num_tokens: int) -> None:  # type: ignore[override]
        for place in range(len(sampled), num_tokens):
            sampled.append(7 + place, UNIFORM, OLD if place < self.num_old else NEW)


async def gather_stream(engine: Checking, heard: list[Delta | Generation]) -> None:
    async for piece in engine.stream(GenerateRequest("r", (1, 2), SamplingParams(max_tokens=NUM_TOKENS))):
        heard.append(piece)


def versions(heard: list[Delta | Generation]) -> set[int]:
    return {span.version for piece in heard for span in piece.weight_versions}


@pytest.fixture(params=["two calls", "one call"], autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checking, "is_one_call", request.param == "one call")


@pytest.fixture(params=["each token", "polled"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "each token":
        monkeypatch.setattr(Checking, "stream_pace", StreamPace(least_s=0.0, pieces_per_s=200.0))


async def begun(engine: Checking) -> tuple[list[Delta | Generation], asyncio.Task[None], asyncio.Task[float]]:
    """Return a stream across a commit and the resume, once it has sampled a token under the new weights."""
    heard: list[Delta | Generation] = []
    streaming = asyncio.create_task(gather_stream(engine, heard))
    while not heard:
        await asyncio.sleep(STEP_S)
    await engine.take()
    resuming = asyncio.create_task(engine.switch())
    await sampled_more(engine, resuming)
    assert versions(heard) == {OLD}
    return heard, streaming, resuming


async def sampled_more(engine: Checking, resuming: asyncio.Task[float]) -> None:
    while engine.process.num_sampled.get("r", NUM_TOKENS) <= engine.num_old and not resuming.done():
        await asyncio.sleep(STEP_S)


@pytest.mark.usefixtures("pace")
async def test_tokens_are_held_until_the_check_passes() -> None:
    engine = Checking(-0.5)
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
async def test_broken_weights_are_refused_and_none_of_their_tokens_leaves(answer: float) -> None:
    engine = Checking(answer)
    heard, streaming, resuming = await begun(engine)
    engine.may_answer.set()
    with pytest.raises(WeightsRefused, match="version 4: the logits of a fixed prompt are"):
        await resuming
    with pytest.raises(EngineUnusable):
        await streaming
    assert versions(heard) == {OLD}
    assert engine.is_paused
    assert not engine.is_usable
    assert engine.cleared == [False, True]  # none of its KV is left
    with pytest.raises(EngineUnusable):  # an engine without weights must not resume
        await engine.resume()


async def test_progress_reports_are_held_too() -> None:
    engine, told = Checking(UNIFORM), list[Progress]()
    request = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=NUM_TOKENS))
    asking = asyncio.create_task(engine.generate(request, told.append))
    while not any(one.tokens.token_ids for one in told):
        await asyncio.sleep(STEP_S)
    await engine.take()
    resuming = asyncio.create_task(engine.switch())
    await sampled_more(engine, resuming)
    engine.may_answer.set()
    ended = await asyncio.gather(resuming, asking, return_exceptions=True)
    assert [type(one) for one in ended] == [WeightsRefused, EngineUnusable]
    assert {span.version for one in told for span in one.tokens.weight_versions} == {OLD}


async def test_a_check_without_an_answer_releases_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "canary_deadline_s", lambda slow_step_s: 20 * STEP_S)
    engine = Checking(-0.5)
    heard, streaming, resuming = await begun(engine)
    with pytest.raises(WeightUpdateFailed, match="version 4: the canary check had no answer within") as failed:
        await resuming
    assert not isinstance(failed.value, WeightsRefused)
    with pytest.raises(EngineUnusable):
        await streaming
    assert versions(heard) == {OLD}


async def test_after_a_commit_that_fails_no_token_leaves_and_the_engine_is_frozen() -> None:
    engine = Checking(-0.5)
    heard = list[Delta | Generation]()
    streaming = asyncio.create_task(gather_stream(engine, heard))
    while not heard:
        await asyncio.sleep(STEP_S)
    await engine.take()
    engine.commit_error = EngineError("checksums differ")
    with pytest.raises(WeightUpdateFailed, match="version 4: checksums differ"):
        await engine.switch()
    with pytest.raises(EngineUnusable):
        await streaming
    assert (engine.is_paused, engine.is_usable, engine.runs.is_set()) == (True, False, False)
    assert versions(heard) == {OLD}
    engine.commit_error = None
    await engine.take(NEW + 1)
    engine.may_answer.set()
    await engine.switch(NEW + 1)
    assert (engine.weight_version, engine.is_paused) == (NEW + 1, False)


async def cut_short() -> tuple[Checking, list[Delta | Generation], asyncio.Task[None]]:
    engine = Checking(-0.5)
    heard, streaming, resuming = await begun(engine)
    resuming.cancel()
    await asyncio.gather(resuming, return_exceptions=True)
    assert (engine.is_paused, engine.weight_version, versions(heard)) == (True, NEW, {OLD})
    return engine, heard, streaming


async def test_a_cancelled_resume_leaves_the_check_to_the_next_one() -> None:
    engine, heard, streaming = await cut_short()
    engine.may_answer.set()
    assert await engine.resume() > 0
    await streaming
    assert versions(heard) == {OLD, NEW}


async def test_a_commit_discards_tokens_that_were_never_checked() -> None:
    engine, heard, streaming = await cut_short()
    engine.may_answer.set()
    await engine.take(NEW + 1)
    await engine.switch(NEW + 1)
    with pytest.raises(EngineUnusable):
        await streaming
    assert versions(heard) == {OLD}
    assert (engine.is_usable, engine.cleared[-1]) == (True, True)


def test_the_slowest_recent_step_leaves_out_idle_time_and_pauses() -> None:
    now = [0.0]
    stats = SchedulerStats(lambda: now[0])

    def step(at: float, num_running: int) -> float:
        now[0] = at
        waiting = {"num_waiting_reqs": 0, "num_skipped_waiting_reqs": 0, "kv_cache_usage": 0.0}
        stats.record(SimpleNamespace(num_running_reqs=num_running, **waiting))
        return round(stats.slow_step_s, 3)

    assert step(10.0, 4) == 0.0  # the first step has no start time
    assert step(13.0, 4) == 3.0
    assert step(13.1, 0) == 2.7  # the average decays
    assert step(50.0, 4) == 2.7  # nothing was running before
    stats.paused()
    assert step(90.0, 4) == 2.7
    assert step(95.0, 4) == 5.0
