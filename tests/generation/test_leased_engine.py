"""A session's engine: one lease, a new one after a failure, and streams that continue from tokens already sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import Delta, OnProgress, Progress
from agentloop.errors import (
    AgentLoopError,
    DeadlineExceeded,
    EngineLost,
    EnginePaused,
    EngineUnreachable,
    EngineUnusable,
    InvalidRequest,
    MalformedEngineResponse,
    NoHealthyReplica,
    ServiceUnavailable,
    SessionFinished,
    WeightVersionNotServed,
)
from agentloop.generation.deadline import Deadline
from agentloop.generation.leased_engine import TURN_GRACE_S, CallLeases, LeasedEngine, continued
from agentloop.generation.leases import LeaseConfig, LeaseReporter
from agentloop.images import Image, ImageTokens
from agentloop.simulation.policy import routed_experts
from agentloop.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    Generation,
    Lease,
    LossCause,
    SamplingParams,
    VersionDemand,
    WeightVersionSpan,
)
from agentloop.values.aux_rows import AuxKind
from agentloop.values.checks import check_generation
from agentloop.values.sampled_tokens import SampledTokens
from tests.support.engine.engines import leased
from tests.support.fleet.fake_coordinator import FakeCoordinator

VOCAB_SIZE = 1000
STOP_ID = 999


@dataclass
class Script:
    """The behavior of the replicas. Token n after a prompt of m tokens depends on m + n only (greedy decoding)."""

    cut_after: list[int | None] = field(default_factory=list)  # per attempt: the number of tokens before it fails
    errors: list[AgentLoopError] = field(default_factory=list)  # one per failing attempt
    stop_at: int | None = None  # the context length at which the stop token is sampled
    versions: list[int] = field(default_factory=list)  # per attempt
    seconds_per_token: float = 0.0
    requests: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    num_aborted: int = 0
    is_reporting: bool = False  # a generation reports its tokens one by one
    has_routes: bool = False  # a generation has routed experts, its pieces do not
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
            if self._script.is_reporting and on_progress is not None:
                on_progress(Progress(piece))
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
        context = (*request.token_ids, *ids)
        routes = routed_experts(context, request.routes_from, len(context) - 1)
        yield Generation(
            request.request_id,
            tuple(ids),
            tuple(-length / 1000 for length in range(start, start + len(ids))),
            (WeightVersionSpan(version, 0, len(ids)),),
            FinishReason.STOP if ids[-1] == STOP_ID else FinishReason.LENGTH,
            cached_tokens=len(request.token_ids) - 1,
            replica_id=self._url,
            top_logprobs=tuple(((one, -0.5),) for one in ids) if request.sampling.num_top_logprobs else (),
            aux={AuxKind.ROUTED_EXPERTS: routes} if script.has_routes else None,
        )


@dataclass
class LeaseSite:
    clock: VirtualClock
    script: Script
    coordinator: FakeCoordinator
    leases: CallLeases
    engine: LeasedEngine


Test = Callable[[LeaseSite], Coroutine[Any, Any, None]]


def virtually(test: Test) -> Callable[[], None]:
    """Run a test of one session's engine in virtual time, and check that no lease is left."""

    def run() -> None:
        clock = VirtualClock()

        async def main() -> None:
            coordinator, script = FakeCoordinator(), Script()
            config = LeaseConfig(coordinator_timeout_s=20.0)
            reporter = LeaseReporter("test", coordinator.report_leases)
            leases = CallLeases(coordinator, script.connect, reporter, vocab_size=VOCAB_SIZE, config=config)
            await test(LeaseSite(clock, script, coordinator, leases, leases.engine("s")))
            coordinator.next_errors.clear()
            await leases.close()
            await reporter.close()
            assert coordinator.leases == {}

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
    site.leases.release("s")
    await site.engine.generate(request())  # the release has not been reported yet
    assert site.coordinator.num_leased == 2
    await site.clock.sleep(1.0)
    assert len(site.coordinator.leases) == 1


@virtually
async def test_a_place_is_asked_for_once_the_coordinator_knows_what_was_given_back(site: LeaseSite) -> None:
    await site.engine.generate(request())
    site.leases.release("s")
    site.coordinator.report_delay_s = 2.0
    await site.clock.sleep(1.0)  # the report is on its way
    await site.engine.generate(request())
    assert [url for url, _ in site.script.requests] == ["url-1", "url-2"]


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


def served(version: int) -> WeightVersionNotServed:
    return WeightVersionNotServed("not these", param="weight_version", details={"served": [version]})


@virtually
async def test_a_call_waits_for_the_version_that_it_demands_and_no_longer(site: LeaseSite) -> None:
    asked = request(weight_version=VersionDemand(min_version=3, wait_s=7.0))
    site.coordinator.next_errors = [served(2) for _ in range(5)]
    site.script.versions = [3]
    assert [span.version for span in (await site.engine.generate(asked)).weight_versions] == [3]
    assert 0 < site.clock.now() < 3.0
    for wait_s in (0.0, 7.0):
        engine, began_at = site.leases.engine(f"another {wait_s}"), site.clock.now()
        site.coordinator.next_errors = [served(2) for _ in range(1000)]
        with pytest.raises(WeightVersionNotServed) as raised:
            await engine.generate(request(weight_version=VersionDemand(min_version=3, wait_s=wait_s)))
        assert raised.value.details == {"served": [2]}
        assert site.clock.now() - began_at == pytest.approx(wait_s)
        site.coordinator.next_errors = []
        site.leases.end(f"another {wait_s}")


@virtually
async def test_a_reply_that_new_weights_cut_goes_on_elsewhere_or_ends_with_its_tokens(site: LeaseSite) -> None:
    """A token that an engine samples under other weights is never appended to the reply."""
    asked = request(weight_version=VersionDemand(exact_version=3))
    site.script.cut_after, site.script.errors = [4], [served(4)]
    site.script.versions = [3, 3]
    _, whole = await streamed(site.engine, asked)
    assert [span.version for span in whole.weight_versions] == [3]
    assert [url for url, _ in site.script.requests] == ["url-1", "url-2"]
    site.script.requests.clear()
    site.script.cut_after, site.script.errors, site.script.versions = [], [], [4, 4, 4, 4, 4, 4]
    with pytest.raises(WeightVersionNotServed):
        await site.engine.generate(asked)
    for name in ("s2", "s3"):
        await site.leases.engine(name).generate(request())
    site.script.requests.clear()
    site.script.cut_after, site.script.versions = [4], [3]
    site.script.errors, site.coordinator.next_errors = [served(4)], [served(4)]
    with pytest.raises(WeightVersionNotServed) as raised:
        async for _ in site.leases.engine("s2").stream(asked):
            pass
    details = raised.value.details
    assert details is not None
    assert (details["token_ids"], details["served"]) == ([10, 11, 12, 13], [4])
    assert details["weight_versions"] == [{"version": 3, "start": 0, "end": 4}]
    site.script.requests.clear()
    site.script.is_reporting = True
    site.script.errors, site.coordinator.next_errors = [served(4)], [served(4)]
    cut = await site.leases.engine("s3").generate(replace(asked, keeps_late=True))
    assert (cut.finish_reason, len(cut.token_ids)) == (FinishReason.ABORT, 4)


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
async def test_a_turn_whose_weights_no_replica_has_any_more_is_sampled_again(site: LeaseSite) -> None:
    site.script.is_reporting = True
    site.script.cut_after, site.script.versions = [3], [5]
    generation = await site.engine.generate(request(timeout_s=600.0))
    assert generation.weight_versions == (WeightVersionSpan(0, 0, 8),)
    assert (site.engine.num_resampled, site.engine.lost_tokens[LossCause.RESAMPLE]) == (1, 3)
    site.script.requests.clear()
    # tokens that were sent cannot be withdrawn
    with pytest.raises(EngineUnusable, match="weight version 0 after 5"):
        await streamed(site.engine, request(timeout_s=600.0))
    assert site.clock.now() < 200.0


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

    async def slow(*asked: object) -> Lease:
        await gate.wait()
        return await grant(*asked)

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
    async def silent(*asked: object) -> Lease:
        await asyncio.Event().wait()
        raise AssertionError

    site.coordinator.lease = silent  # type: ignore[method-assign]
    with pytest.raises(ServiceUnavailable):
        await site.engine.generate(request(timeout_s=500.0))
    assert site.script.requests == []


# Continued generations


@pytest.mark.parametrize("cuts", [[1], [7], [3, 2], [0, 5, 1], [4, 0, 4]])
def test_a_cut_generation_goes_on_from_what_was_reported(cuts: list[int]) -> None:
    @virtually
    async def run(site: LeaseSite) -> None:
        whole = await site.engine.generate(request(num_top_logprobs=1))
        site.script.requests.clear()
        site.script.is_reporting, site.script.cut_after = True, [*cuts]
        site.script.versions = [3, 4, 5, 6][: len(cuts) + 1]
        asked = request(num_top_logprobs=1, min_tokens=6)
        joined = await site.engine.generate(asked)
        check_generation(asked, joined, VOCAB_SIZE)
        assert (joined.token_ids, joined.logprobs) == (whole.token_ids, whole.logprobs)
        assert joined.top_logprobs == whole.top_logprobs
        versions = [span.version for span in joined.weight_versions]
        assert versions == sorted(set(versions))
        for number, (_, sent) in enumerate(site.script.requests):
            num_had = sum(cuts[:number])
            assert sent.token_ids == tuple(range(10 + num_had))
            assert (sent.sampling.max_tokens, sent.sampling.min_tokens) == (8 - num_had, max(0, 6 - num_had))
        assert len({sent.request_id for _, sent in site.script.requests}) == len(site.script.requests)
        assert site.engine.num_resampled == (cuts[0] == 0)

    run()


@virtually
async def test_a_generation_that_lost_only_its_last_word_asks_nobody_again(site: LeaseSite) -> None:
    site.script.is_reporting, site.script.cut_after = True, [8]
    generation = await site.engine.generate(request())
    assert (len(generation.token_ids), generation.finish_reason) == (8, FinishReason.LENGTH)
    assert len(site.script.requests) == 1


@virtually
async def test_a_generation_that_looks_back_is_sampled_anew(site: LeaseSite) -> None:
    site.script.is_reporting, site.script.cut_after = True, [3, None]
    generation = await site.engine.generate(request(presence_penalty=0.5))
    assert generation.token_ids == tuple(range(10, 18))
    assert [sent.token_ids for _, sent in site.script.requests] == [tuple(range(10))] * 2
    assert site.engine.num_resampled == 1


@virtually
async def test_a_stream_that_looks_back_and_is_not_shown_is_sampled_anew(site: LeaseSite) -> None:
    site.script.cut_after, sampled = [3, None], SampledTokens()
    async for item in site.engine.stream(request(presence_penalty=0.5), sampled, is_shown=False):
        last = item
    assert isinstance(last, Generation)
    assert list(last.token_ids) == sampled.token_ids == list(range(10, 18))
    assert [sent.token_ids for _, sent in site.script.requests] == [tuple(range(10))] * 2


def test_a_continuation_has_another_seed_for_every_place_and_the_policy_of_its_kv() -> None:
    def after(num_tokens: int, seed: int | None, **fields: Any) -> GenerateRequest:
        spans = (WeightVersionSpan(3, 0, 1), WeightVersionSpan(4, 1, num_tokens))
        sampled = Delta(tuple(range(num_tokens)), (-0.5,) * num_tokens, spans)
        return continued(replace(request(max_tokens=100, seed=seed), **fields), sampled)

    seeds = [after(place, seed).sampling.seed for place in (2, 3, 4) for seed in (0, 1, 5, (1 << 63) - 1)]
    assert len(set(seeds)) == len(seeds)
    assert not {0, 1, 5, (1 << 63) - 1} & set(seeds)
    assert all(seed is not None and 0 <= seed < 1 << 63 for seed in seeds)
    assert after(3, 5).sampling.seed == after(3, 5).sampling.seed
    assert after(3, None).sampling.seed is None
    assert after(3, 5).kv_version is None
    assert after(3, 5, keeps_kv=True).kv_version == 3
    assert after(3, 5, keeps_kv=True, kv_version=1).kv_version == 1


@virtually
async def test_experts_of_a_lost_round_come_from_the_next_prefill(site: LeaseSite) -> None:
    site.script.has_routes = site.script.is_reporting = True
    site.script.cut_after = [3, 2, None]
    made = await site.engine.generate(replace(request(), routes_from=4))
    assert [sent.routes_from for _, sent in site.script.requests] == [4, 4, 4]
    context = (*range(10), *made.token_ids)
    assert made.aux is not None
    rows = made.aux[AuxKind.ROUTED_EXPERTS]
    assert (rows.start, rows.end) == (4, len(context) - 1)
    assert rows.values.tolist() == routed_experts(context, 4, len(context) - 1).values.tolist()


def test_a_continuation_asks_for_the_experts_after_those_that_it_has() -> None:
    sampled = SampledTokens(num_prompt=10)
    context = tuple(range(13))
    aux = {AuxKind.ROUTED_EXPERTS: routed_experts(context, 4, 12)}
    sampled.add(Delta((10, 11, 12), (-0.5,) * 3, (WeightVersionSpan(0, 0, 3),), aux=aux))
    assert continued(replace(request(), routes_from=4), sampled.since(0)).routes_from == 12


# Waiting


@virtually
async def test_a_call_waits_for_a_replica_as_long_as_its_deadline(site: LeaseSite) -> None:
    polls = LongPolls(site, back_at=250.0)
    assert len((await site.engine.generate(request(timeout_s=300.0))).token_ids) == 8
    assert site.clock.now() == pytest.approx(250.0, abs=6.0)
    assert polls.num_asked < 20, "it polls, and does not storm"
    site.leases.release("s")
    await site.clock.sleep(1.0)
    polls.back_at = 10_000.0
    with pytest.raises(NoHealthyReplica, match="for 30 s"):
        await site.engine.generate(request(timeout_s=30.0))
    with pytest.raises(NoHealthyReplica):
        await streamed(site.engine, request(timeout_s=30.0))
    assert site.clock.now() == pytest.approx(310.0, abs=7.0)


class LongPolls:
    """The coordinator of a fleet without replicas: each lease request waits for a while and is then refused."""

    def __init__(self, site: LeaseSite, back_at: float) -> None:
        self._site, self.back_at = site, back_at
        self._grant = site.coordinator.lease
        self.num_asked = 0
        site.coordinator.lease = self._lease  # type: ignore[method-assign] # the fake's own hook

    async def _lease(self, *asked: object) -> Lease:
        self.num_asked += 1
        away_s = self.back_at - self._site.clock.now()
        await self._site.clock.sleep(min(max(away_s, 0.0), 15.0))
        if away_s > 15.0:
            raise NoHealthyReplica("no replica takes traffic now")
        return await self._grant(*asked)


@virtually
async def test_time_without_a_replica_moves_a_deadline_that_can_move(site: LeaseSite) -> None:
    LongPolls(site, back_at=2000.0)
    async with Deadline.moving(60.0, max_unavailable_s=3600.0) as deadline:
        await site.engine.generate(request(timeout_s=10.0), deadline=deadline)
        assert deadline.unavailable_s == pytest.approx(site.clock.now(), abs=0.1)
        assert deadline.at == deadline.enforced_at == pytest.approx(60.0 + deadline.unavailable_s)
    assert site.clock.now() > 1999.0


@virtually
async def test_a_standstill_has_an_end(site: LeaseSite) -> None:
    LongPolls(site, back_at=10_000.0)
    async with Deadline.moving(60.0, max_unavailable_s=3600.0) as deadline:
        with pytest.raises(NoHealthyReplica, match="for 3600 s"):
            await site.engine.generate(request(), deadline=deadline)
    assert site.clock.now() == pytest.approx(3600.0)


class FrozenReplica:
    """Unavailable for `frozen_s`, reported every two seconds. Then it is lost on the first request, or answers."""

    def __init__(self, frozen_s: float, *, is_lost: bool = False) -> None:
        self.frozen_s, self.is_lost, self.num_asked = frozen_s, is_lost, 0

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        assert on_progress is not None
        self.num_asked += 1
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        while (stood_still_s := loop.time() - began_at) < self.frozen_s:
            await asyncio.sleep(2.0)
            on_progress(Progress(Delta((), (), ()), stood_still_s + 2.0))
        if self.is_lost and self.num_asked == 1:
            await asyncio.sleep(15.0)
            raise EngineLost("silent")
        spans = (WeightVersionSpan(0, 0, 1),)
        return Generation(
            request.request_id, (7,), (-0.5,), spans, FinishReason.LENGTH, unavailable_s=stood_still_s
        )


@pytest.mark.parametrize("is_lost", [False, True])
def test_time_in_which_a_request_is_frozen_or_its_replica_silent_does_not_count(is_lost: bool) -> None:
    @virtually
    async def run(site: LeaseSite) -> None:
        engine = leased(FrozenReplica(500.0, is_lost=is_lost), max_attempts=5)
        async with Deadline.moving(10.0, max_unavailable_s=3600.0) as deadline:
            with deadline.grace(TURN_GRACE_S):
                await engine.generate(request(timeout_s=10.0), deadline=deadline)
            assert deadline.at == pytest.approx(10.0 + site.clock.now())

    run()


@virtually
async def test_a_request_that_is_frozen_for_ever_ends_with_a_reason(site: LeaseSite) -> None:
    engine = leased(FrozenReplica(1e6), max_attempts=5)
    async with Deadline.moving(10.0, max_unavailable_s=900.0) as deadline:
        with deadline.grace(5.0), pytest.raises(DeadlineExceeded, match="unavailable for 900 s"):
            await engine.generate(request(timeout_s=10.0), deadline=deadline)


# Failures of the request itself


@virtually
async def test_replicas_that_never_had_a_request_are_no_failures_of_it(site: LeaseSite) -> None:
    site.script.cut_after = [0] * 20
    site.script.errors = [EngineUnreachable("refused"), EngineUnusable("a failed commit")] * 10
    assert len((await site.engine.generate(request(timeout_s=600.0))).token_ids) == 8
    assert len(site.script.requests) == 21
    assert len(site.coordinator.moved) == 20


@virtually
async def test_a_request_that_kills_all_that_have_it_ends_and_one_that_gets_on_does_not(site: LeaseSite) -> None:
    site.script.is_reporting = True
    site.script.cut_after = [1] * 7  # seven replicas die, each after one more reported token
    assert len((await site.engine.generate(request(timeout_s=600.0))).token_ids) == 8
    site.script.requests.clear()
    site.script.cut_after = [3, *[0] * 20]
    with pytest.raises(EngineLost):
        await site.engine.generate(request(timeout_s=600.0))
    assert len(site.script.requests) == 4


# Turns that take too long


class LateReplica:
    """A replica whose first requests use up their timeout; later requests are answered at once.

    `ends` has one item per slow request: the number of ids that it returns, or None if it raises DeadlineExceeded.
    """

    def __init__(self, *ends: int | None) -> None:
        self.ends = list(ends)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        self.requests.append(request)
        if len(self.requests) > len(self.ends):
            return self._answer(request, 8, FinishReason.LENGTH)
        await asyncio.sleep(request.timeout_s)
        num_ids = self.ends[len(self.requests) - 1]
        if num_ids is None:
            raise DeadlineExceeded("the engine's own")
        return self._answer(request, num_ids, FinishReason.DEADLINE)

    def _answer(self, request: GenerateRequest, num_ids: int, reason: FinishReason) -> Generation:
        spans = (WeightVersionSpan(0, 0, num_ids),) if num_ids else ()
        return Generation(request.request_id, (7,) * num_ids, (-0.5,) * num_ids, spans, reason)


@virtually
async def test_a_late_turn_is_kept(site: LeaseSite) -> None:
    engine = leased(replica := LateReplica(3), max_attempts=5)
    generation = await engine.generate(request(timeout_s=20.0), deadline=Deadline(40.0))
    assert (generation.token_ids, generation.finish_reason) == ((7, 7, 7), FinishReason.DEADLINE)
    assert (len(replica.requests), engine.num_resampled) == (1, 0)


@pytest.mark.parametrize("ends", [0, None], ids=["no id", "an error"])
def test_what_has_no_token_by_then_is_asked_for_again_and_counted(ends: int | None) -> None:
    @virtually
    async def run(site: LeaseSite) -> None:
        engine = leased(replica := LateReplica(ends), max_attempts=5)
        generation = await engine.generate(request(timeout_s=20.0), deadline=Deadline(1000.0))
        assert (len(generation.token_ids), generation.finish_reason) == (8, FinishReason.LENGTH)
        assert site.clock.now() == pytest.approx(20.0, abs=0.2)
        assert (len(replica.requests), engine.num_resampled) == (2, 1)

    run()


@virtually
async def test_when_the_call_is_over_nothing_is_asked_again(site: LeaseSite) -> None:
    none = await leased(LateReplica(0)).generate(request(timeout_s=20.0), deadline=Deadline(20.0))
    assert (none.token_ids, none.finish_reason) == ((), FinishReason.DEADLINE)
    failing = leased(LateReplica(None), max_attempts=5)
    with pytest.raises(DeadlineExceeded):
        await failing.generate(request(timeout_s=20.0), deadline=Deadline(40.0))
    assert (site.clock.now(), failing.num_resampled) == (pytest.approx(40.0), 0)


@pytest.mark.parametrize("ends_by", ["the engine's own deadline", "its caller", "a stream's caller"])
def test_a_replica_that_is_silent_until_the_deadline_is_told_of_and_the_session_moves(ends_by: str) -> None:
    @virtually
    async def run(site: LeaseSite) -> None:
        script, asked = site.script, request(timeout_s=30.0)
        script.seconds_per_token = 1e6
        deadline = (
            None if ends_by == "the engine's own deadline" else Deadline(asyncio.get_running_loop().time() + 30.0)
        )

        async def call() -> None:
            async with asyncio.timeout(None if deadline is None else 30.0):
                if ends_by == "a stream's caller":
                    async for _ in site.engine.stream(asked, deadline=deadline):
                        pass
                await site.engine.generate(asked, deadline=deadline)

        with pytest.raises((DeadlineExceeded, TimeoutError)):
            await call()
        script.seconds_per_token = 0.0
        await site.engine.generate(asked)
        assert [url for url, _ in script.requests] == ["url-1", "url-2"]
        assert [(lease.url, is_failed) for _, lease, is_failed in site.coordinator.moved] == [("url-1", True)]

    run()


@virtually
async def test_neither_a_slow_turn_nor_a_client_that_leaves_is_the_replicas_silence(site: LeaseSite) -> None:
    site.script.seconds_per_token = 7.0
    with pytest.raises(DeadlineExceeded):
        await streamed(site.engine, request(max_tokens=100, timeout_s=30.0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.0):
            await site.engine.generate(request(max_tokens=100, timeout_s=300.0))
    assert site.coordinator.moved == []


@virtually
async def test_a_pause_for_which_engines_hold_nothing_is_raised_before_the_deadline(site: LeaseSite) -> None:
    site.script.cut_after = [0] * 999
    site.script.errors = [EnginePaused("for an hour") for _ in range(999)]
    with pytest.raises(EnginePaused):
        await site.engine.generate(request(timeout_s=600.0))
    assert 60.0 < site.clock.now() < 70.0
