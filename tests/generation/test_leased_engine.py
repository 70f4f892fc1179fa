"""A session's engine: one lease, another one after a failure, and streams that go on from what was given out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agentloop.checks import check_generation
from agentloop.clock import VirtualClock
from agentloop.engine import Delta, OnProgress
from agentloop.errors import (
    AgentLoopError,
    DeadlineExceeded,
    EngineLost,
    EnginePaused,
    InvalidRequest,
    MalformedEngineResponse,
    NoHealthyReplica,
    ServiceUnavailable,
    SessionFinished,
)
from agentloop.generation.leased_engine import LATE_GRACE_S, LeasedEngine
from agentloop.generation.leases import LeaseConfig, SessionLeases
from agentloop.images import Image, ImageTokens
from agentloop.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    Generation,
    Lease,
    SamplingParams,
    WeightVersionSpan,
)
from tests.support.engine.engines import leased
from tests.support.fleet.fake_coordinator import FakeCoordinator

VOCAB_SIZE = 1000
STOP_ID = 999


@dataclass
class Script:
    """What the replicas do. Token n after a prompt of m is a function of m + n alone, as of a greedy model."""

    cut_after: list[int | None] = field(default_factory=list)  # of each attempt: tokens before it fails
    errors: list[AgentLoopError] = field(default_factory=list)  # one for each failing attempt
    stop_at: int | None = None  # the context length at which the stop token is sampled
    versions: list[int] = field(default_factory=list)  # of each attempt
    seconds_per_token: float = 0.0
    requests: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    num_aborted: int = 0
    asked_for_images: list[str] = field(default_factory=list)  # the URLs, in order

    def connect(self, url: str) -> ScriptedReplica:
        return ScriptedReplica(self, url)


class ScriptedReplica:
    def __init__(self, script: Script, url: str) -> None:
        self._script, self._url = script, url

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        async for piece in self.stream(request):
            if isinstance(piece, Generation):
                return piece
        raise AssertionError

    async def image_tokens(self, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        self._script.asked_for_images.append(self._url)
        if self._script.errors:
            raise self._script.errors.pop(0)
        return tuple(ImageTokens(7, (7, len(image.data))) for image in images)

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncIterator[Delta | Generation]:
        script = self._script
        number = len(script.requests)
        script.requests.append((self._url, request))
        cut_after = script.cut_after[number] if number < len(script.cut_after) else None
        version = script.versions[number] if number < len(script.versions) else 0
        ids: list[int] = []
        try:
            for _ in range(request.sampling.max_tokens):
                if cut_after is not None and len(ids) >= cut_after:
                    raise script.errors.pop(0) if script.errors else EngineLost(f"{self._url} died")
                await asyncio.sleep(script.seconds_per_token)
                length = len(request.token_ids) + len(ids)
                ids.append(STOP_ID if length == script.stop_at else length % 900)
                top = (((ids[-1], -0.5),),) if request.sampling.num_top_logprobs else ()
                yield Delta((ids[-1],), (-length / 1000,), (WeightVersionSpan(version, 0, 1),), top)
                if ids[-1] == STOP_ID:
                    break
            if cut_after is not None and len(ids) >= cut_after:
                raise script.errors.pop(0) if script.errors else EngineLost(f"{self._url} died")
        except (asyncio.CancelledError, GeneratorExit):
            script.num_aborted += 1
            raise
        start = len(request.token_ids)
        yield Generation(
            request.request_id,
            tuple(ids),
            tuple(-length / 1000 for length in range(start, start + len(ids))),
            (WeightVersionSpan(version, 0, len(ids)),),
            FinishReason.STOP if ids[-1] == STOP_ID else FinishReason.LENGTH,
            cached_tokens=len(request.token_ids) - 1,
            replica_id=self._url,
            top_logprobs=tuple(((one, -0.5),) for one in ids) if request.sampling.num_top_logprobs else (),
        )


@dataclass
class LeaseSite:
    clock: VirtualClock
    script: Script
    coordinator: FakeCoordinator
    leases: SessionLeases
    engine: LeasedEngine


Test = Callable[[LeaseSite], Coroutine[Any, Any, None]]


def virtually(test: Test) -> Callable[[], None]:
    """Run a test over one session's engine in virtual time; in the end no lease is left."""

    def run() -> None:
        clock = VirtualClock()

        async def main() -> None:
            coordinator, script = FakeCoordinator(), Script()
            config = LeaseConfig(renew_after_s=100.0, coordinator_timeout_s=20.0)
            leases = SessionLeases(coordinator, script.connect, vocab_size=VOCAB_SIZE, clock=clock, config=config)
            await test(LeaseSite(clock, script, coordinator, leases, leases.engine("s")))
            coordinator.next_errors.clear()
            await leases.close()
            assert coordinator.leases == {}
            assert leases.num_held == 0

        clock.run(main())

    run.__name__ = test.__name__
    return run


def request(max_tokens: int = 8, timeout_s: float = 60.0, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_ID,), **sampling)
    return GenerateRequest("call-1:0", tuple(range(10)), params, timeout_s, "s")


async def streamed(engine: LeasedEngine, asked: GenerateRequest) -> tuple[list[Delta], Generation]:
    items = [item async for item in engine.stream(asked)]
    pieces = [item for item in items if isinstance(item, Delta)]
    assert len(pieces) == len(items) - 1
    last = items[-1]
    assert isinstance(last, Generation)
    check_generation(asked, last, VOCAB_SIZE)
    assert tuple(token_id for piece in pieces for token_id in piece.token_ids) == last.token_ids
    assert tuple(logprob for piece in pieces for logprob in piece.logprobs) == last.logprobs
    return pieces, last


@virtually
async def test_calls_share_one_lease_and_spilling_gives_it_back(site: LeaseSite) -> None:
    await asyncio.gather(*(site.engine.generate(request()) for _ in range(5)))
    assert site.coordinator.num_leased == 1
    assert {url for url, _ in site.script.requests} == {"url-1"}
    site.leases.release("s")
    await site.clock.sleep(1.0)
    assert site.coordinator.leases == {}
    await site.engine.generate(request())
    assert site.coordinator.num_leased == 2


@virtually
async def test_a_lease_is_renewed_before_it_expires(site: LeaseSite) -> None:
    await site.engine.generate(request())
    await site.clock.sleep(99.0)
    site.coordinator.next_errors = [NoHealthyReplica("would be raised if it were asked")]
    await site.engine.generate(request())
    site.coordinator.next_errors = []
    await site.clock.sleep(2.0)
    site.coordinator.leases.clear()  # it has expired over there
    await site.engine.generate(request())
    assert [url for url, _ in site.script.requests] == ["url-1", "url-1", "url-2"]


@virtually
async def test_without_a_coordinator_the_lease_at_hand_serves_on(site: LeaseSite) -> None:
    await site.engine.generate(request())
    await site.clock.sleep(101.0)
    site.coordinator.next_errors = [ServiceUnavailable("restarting"), ServiceUnavailable("restarting")]
    await site.engine.generate(request())
    await site.engine.generate(request())  # does not ask again at once
    assert len(site.coordinator.next_errors) == 1
    assert [url for url, _ in site.script.requests] == ["url-1"] * 3


@virtually
async def test_a_lost_replica_is_told_of_and_the_call_made_again_elsewhere(site: LeaseSite) -> None:
    site.script.cut_after = [3, 0, None]
    generation = await site.engine.generate(request())
    assert generation.request_id == "call-1:0"
    assert generation.token_ids == tuple(range(10, 18))
    assert [url for url, _ in site.script.requests] == ["url-1", "url-2", "url-3"]
    assert len({asked.request_id for _, asked in site.script.requests}) == 3
    assert {asked.token_ids for _, asked in site.script.requests} == {tuple(range(10))}
    assert [is_failed for _, _, is_failed in site.coordinator.moved] == [True, True]


@virtually
async def test_side_by_side_failures_move_the_session_once(site: LeaseSite) -> None:
    site.script.cut_after = [0, 0, 0]
    await asyncio.gather(*(site.engine.generate(request()) for _ in range(3)))
    assert len(site.coordinator.moved) == 1


@virtually
async def test_attempts_end(site: LeaseSite) -> None:
    site.script.cut_after = [0] * 10
    with pytest.raises(EngineLost):
        await site.engine.generate(request())
    assert len(site.script.requests) == 4
    site.script.requests.clear()
    with pytest.raises(EngineLost):
        await streamed(site.engine, request())
    assert len(site.script.requests) == 4


@virtually
async def test_what_no_replica_can_mend_is_raised_at_once(site: LeaseSite) -> None:
    site.script.cut_after, site.script.errors = [0], [InvalidRequest("bad ids")]
    with pytest.raises(InvalidRequest):
        await site.engine.generate(request())
    assert (len(site.script.requests), site.coordinator.moved) == (1, [])


@virtually
async def test_the_tokens_of_images_are_asked_for_under_the_lease_of_the_call(site: LeaseSite) -> None:
    images = (Image("a", b"xyz"), Image("b", b""))
    site.script.errors = [EngineLost("died")]
    assert await site.engine.image_tokens(request(), images) == (ImageTokens(7, (7, 3)), ImageTokens(7, (7, 0)))
    assert site.script.asked_for_images == ["url-1", "url-2"]
    await site.engine.generate(request())
    assert [url for url, _ in site.script.requests] == ["url-2"]
    site.script.errors = [InvalidRequest("no picture")]
    with pytest.raises(InvalidRequest):
        await site.engine.image_tokens(request(), images)
    site.script.errors = [EngineLost("died") for _ in range(9)]
    with pytest.raises(EngineLost):
        await site.engine.image_tokens(request(), images)


@virtually
async def test_a_pause_is_waited_out_on_the_same_replica(site: LeaseSite) -> None:
    site.script.cut_after = [0] * 12
    site.script.errors = [EnginePaused("an update") for _ in range(12)]
    asked = request(timeout_s=600.0)
    assert len((await site.engine.generate(asked)).token_ids) == 8
    assert {url for url, _ in site.script.requests} == {"url-1"}
    assert site.coordinator.moved == []
    site.script.requests.clear()
    site.script.cut_after = [2] * 3
    site.script.errors = [EnginePaused("an update") for _ in range(3)]
    pieces, _ = await streamed(site.engine, asked)
    assert len(pieces) == 8
    assert {url for url, _ in site.script.requests} == {"url-1"}


@virtually
async def test_a_pause_does_not_outlast_the_deadline(site: LeaseSite) -> None:
    site.script.cut_after = [0] * 1000
    site.script.errors = [EnginePaused("for ever") for _ in range(1000)]
    with pytest.raises(DeadlineExceeded):
        await site.engine.generate(request(timeout_s=30.0))
    assert site.clock.now() == pytest.approx(30.0)
    with pytest.raises(DeadlineExceeded):
        await streamed(site.engine, request(timeout_s=30.0))
    assert site.clock.now() == pytest.approx(60.0)


@virtually
async def test_a_hanging_stream_meets_its_deadline(site: LeaseSite) -> None:
    site.script.seconds_per_token = 7.0
    with pytest.raises(DeadlineExceeded):
        await streamed(site.engine, request(timeout_s=10.0))
    assert site.clock.now() == pytest.approx(10.0)
    assert site.script.num_aborted == 1


@pytest.mark.parametrize("cuts", [[1], [7], [3, 2], [0, 5, 1], [4, 0, 4]])
def test_a_cut_stream_goes_on_without_a_token_more_or_less(cuts: list[int]) -> None:
    @virtually
    async def run(site: LeaseSite) -> None:
        _, whole = await streamed(site.engine, request(num_top_logprobs=1))
        site.script.requests.clear()
        site.script.cut_after = [*cuts]
        site.script.versions = [3, 4, 5, 6][: len(cuts) + 1]
        _, joined = await streamed(site.engine, request(num_top_logprobs=1, min_tokens=6))
        assert joined.token_ids == whole.token_ids
        assert joined.logprobs == whole.logprobs
        assert joined.top_logprobs == whole.top_logprobs
        assert joined.request_id == "call-1:0"
        assert joined.cached_tokens <= 10
        versions = [span.version for span in joined.weight_versions]
        assert versions == sorted(set(versions))
        for number, (_, asked) in enumerate(site.script.requests):
            num_had = sum(cuts[:number])
            assert asked.token_ids == tuple(range(10 + num_had))
            assert asked.sampling.max_tokens == 8 - num_had
            assert asked.sampling.min_tokens == max(0, 6 - num_had)

    run()


@virtually
async def test_a_stream_that_lost_only_its_last_word_asks_nobody_again(site: LeaseSite) -> None:
    site.script.cut_after = [8]
    _, generation = await streamed(site.engine, request())
    assert (len(generation.token_ids), generation.finish_reason) == (8, FinishReason.LENGTH)
    assert len(site.script.requests) == 1
    site.script.requests.clear()
    site.script.cut_after, site.script.stop_at = [4], 13
    _, generation = await streamed(site.engine, request())
    assert generation.token_ids == (10, 11, 12, STOP_ID)
    assert generation.finish_reason is FinishReason.STOP
    assert len(site.script.requests) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"constraint": Constraint(ConstraintKind.JSON_OBJECT)},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
    ],
)
def test_a_reply_that_remembers_is_made_again_but_not_continued(sampling: dict[str, Any]) -> None:
    @virtually
    async def run(site: LeaseSite) -> None:
        site.script.cut_after = [0, None]
        pieces, _ = await streamed(site.engine, request(**sampling))
        assert len(pieces) == 8
        site.script.requests.clear()
        site.script.cut_after = [3]
        pieces = site.engine.stream(request(**sampling))
        for _ in range(3):
            await anext(pieces)
        with pytest.raises(EngineLost):
            await anext(pieces)

    run()


@virtually
async def test_a_continuation_never_goes_back_in_weight_versions(site: LeaseSite) -> None:
    site.script.cut_after, site.script.versions = [3], [5, 4, 5]
    _, generation = await streamed(site.engine, request())
    assert generation.weight_versions == (WeightVersionSpan(5, 0, 8),)
    assert len(site.script.requests) == 3


@virtually
async def test_malformed_pieces_are_never_given_out(site: LeaseSite) -> None:
    class Bad(ScriptedReplica):
        async def stream(
            self, asked: GenerateRequest, on_progress: OnProgress | None = None
        ) -> AsyncIterator[Delta | Generation]:
            async for item in super().stream(asked, on_progress):
                is_bad = isinstance(item, Delta) and item.token_ids[0] == 13 and len(site.script.requests) == 1
                yield replace(item, logprobs=(float("nan"),)) if is_bad else item

    site.engine.connect = lambda url: Bad(site.script, url)  # type: ignore[assignment,return-value]
    _, generation = await streamed(site.engine, request())
    assert generation.token_ids == tuple(range(10, 18))
    assert len(site.script.requests) == 2
    with pytest.raises(MalformedEngineResponse):
        check_generation(request(), replace(generation, logprobs=(float("nan"),) * 8), VOCAB_SIZE)


@virtually
async def test_leaving_a_stream_ends_it_in_the_engine(site: LeaseSite) -> None:
    async with aclosing(site.engine.stream(request())) as pieces:
        await anext(pieces)
    assert site.script.num_aborted == 1
    site.script.seconds_per_token = 100.0
    calling = asyncio.create_task(site.engine.generate(request(timeout_s=1000.0)))
    await site.clock.sleep(1.0)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    assert site.script.num_aborted == 2


@virtually
async def test_a_caller_that_leaves_while_a_lease_is_granted_leaves_none_behind(site: LeaseSite) -> None:
    gate = asyncio.Event()
    grant = site.coordinator.lease

    async def slow(session_id: str, num_tokens: int) -> Lease:
        await gate.wait()
        return await grant(session_id, num_tokens)

    site.coordinator.lease = slow  # type: ignore[method-assign] # the fake's own hook
    calling = asyncio.create_task(site.engine.generate(request()))
    await site.clock.sleep(1.0)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    site.leases.end("s")
    gate.set()
    await site.clock.sleep(1.0)
    assert (site.coordinator.num_leased, site.coordinator.leases) == (1, {})


@virtually
async def test_a_closed_session_takes_no_lease(site: LeaseSite) -> None:
    await site.engine.generate(request())
    site.leases.end("s")
    with pytest.raises(SessionFinished):
        await site.engine.generate(request())
    await site.clock.sleep(1.0)
    assert site.coordinator.leases == {}


@virtually
async def test_a_silent_coordinator_is_no_engine_failure(site: LeaseSite) -> None:
    async def silent(session_id: str, num_tokens: int) -> Lease:
        await asyncio.Event().wait()
        raise AssertionError

    site.coordinator.lease = silent  # type: ignore[method-assign]
    with pytest.raises(ServiceUnavailable):
        await site.engine.generate(request(timeout_s=500.0))
    assert site.script.requests == []


# --- turns that take too long -----------------------------------------------------------------------------


class SlowReplica:
    """A replica whose requests take for ever; what comes after them is answered at once.

    `ends` tells what an abort makes of each: a number of ids, or None for a replica that does not listen.
    """

    def __init__(self, *ends: int | None) -> None:
        self.ends = list(ends)
        self.requests: list[GenerateRequest] = []
        self._is_aborted = asyncio.Event()

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        self.requests.append(request)
        if len(self.requests) > len(self.ends):
            return self._answer(request, 8, FinishReason.LENGTH)
        num_ids = self.ends[len(self.requests) - 1]
        if num_ids is None:
            await asyncio.sleep(request.timeout_s)
            raise DeadlineExceeded("the engine's own")
        self._is_aborted.clear()
        await self._is_aborted.wait()
        return self._answer(request, num_ids, FinishReason.ABORT)

    async def abort(self, request_id: str) -> None:
        assert request_id == self.requests[-1].request_id
        self._is_aborted.set()

    def _answer(self, request: GenerateRequest, num_ids: int, reason: FinishReason) -> Generation:
        spans = (WeightVersionSpan(0, 0, num_ids),) if num_ids else ()
        return Generation(request.request_id, (7,) * num_ids, (-0.5,) * num_ids, spans, reason)


@pytest.mark.parametrize("deadline_s", [10.0, 40.0], ids=["the call's", "the attempt's"])
def test_a_late_turn_is_ended_and_kept(deadline_s: float) -> None:
    @virtually
    async def run(site: LeaseSite) -> None:
        engine = leased(replica := SlowReplica(3), max_attempts=5)
        asked = request(timeout_s=20.0)
        generation = await engine.generate(asked, deadline_at=site.clock.now() + deadline_s, keeps_late=True)
        assert (generation.token_ids, generation.finish_reason) == ((7, 7, 7), FinishReason.DEADLINE)
        assert site.clock.now() == pytest.approx(min(deadline_s, 20.0))
        assert (len(replica.requests), engine.num_resampled) == (1, 0)

    run()


@pytest.mark.parametrize(("ends", "after_s"), [((0,), 20.0), ((None,), 20.0 + LATE_GRACE_S)], ids=["no id", "deaf"])
def test_what_has_no_token_by_then_is_asked_for_again_and_counted(ends, after_s: float) -> None:
    @virtually
    async def run(site: LeaseSite) -> None:
        engine = leased(replica := SlowReplica(*ends), max_attempts=5)
        generation = await engine.generate(request(timeout_s=20.0), deadline_at=1000.0, keeps_late=True)
        assert (len(generation.token_ids), generation.finish_reason) == (8, FinishReason.LENGTH)
        assert site.clock.now() == pytest.approx(after_s, abs=0.2)
        assert (len(replica.requests), engine.num_resampled) == (2, 1)

    run()


@virtually
async def test_when_the_call_is_over_nothing_is_asked_again(site: LeaseSite) -> None:
    none = await leased(SlowReplica(0)).generate(request(timeout_s=20.0), deadline_at=5.0, keeps_late=True)
    assert (none.token_ids, none.finish_reason) == ((), FinishReason.DEADLINE)
    deaf = leased(SlowReplica(None), max_attempts=5)
    with pytest.raises(DeadlineExceeded):
        await deaf.generate(request(timeout_s=20.0), deadline_at=site.clock.now() + 5.0, keeps_late=True)
    assert site.clock.now() == pytest.approx(10.0 + LATE_GRACE_S)
    assert deaf.num_resampled == 0
