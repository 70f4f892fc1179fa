"""The simulated engine beyond the contract: time, preemption, the KV behind each token, faults."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import CommitReport, Delta, PushSource, StageReport, StagingDevice, WeightUpdate
from agentloop.engine.request_watch import StreamPace
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    EngineLost,
    EngineUnusable,
    InvalidRequest,
    MalformedEngineResponse,
    UnsupportedParameter,
    WeightUpdateFailed,
)
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import Faults, HashPolicy, LatencyModel, Malformation
from agentloop.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    Generation,
    KVPolicy,
    PauseMode,
    SamplingParams,
)
from agentloop.values.capabilities import CONSTRAINTS
from agentloop.values.checks import check_generation
from agentloop.values.sampling import LogprobsMode
from tests.contract.simulated_case import write_checkpoint
from tests.support.engine.policies import ScriptedPolicy, continuation
from tests.support.fleet.pushes import Sender, Wire

STEP_S = LatencyModel(decode_s=0.01)
TINY = SimulatedSpec(vocab_size=50, max_context_tokens=32, block_size=4, num_blocks=8, max_running=6)

_numbers = itertools.count()


def ask(token_ids: Sequence[int], max_tokens: int, **sampling: object) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(f"r{next(_numbers)}", tuple(token_ids), params)


# Time


def test_an_hour_of_decoding_is_instant() -> None:
    clock = VirtualClock()
    latency = LatencyModel(decode_s=1.0, prefill_s=1.0)
    engine = SimulatedEngine(SimulatedSpec(latency=latency), clock=clock)

    async def main() -> Generation:
        await engine.start()
        generation = await engine.generate(replace(ask([1, 2, 3], 3600), timeout_s=4000.0))
        await engine.close()
        return generation

    started_s = time.monotonic()
    assert len(clock.run(main()).token_ids) == 3600
    assert clock.now() == pytest.approx(3600)
    assert time.monotonic() - started_s < 20


def test_a_step_takes_what_the_latency_model_says() -> None:
    clock = VirtualClock()
    latency = LatencyModel(1.0, 0.5, 10.0, 2.0, 0.25)
    engine = SimulatedEngine(SimulatedSpec(block_size=4, latency=latency), clock=clock)

    async def main() -> tuple[float, float, int]:
        await engine.start()
        await engine.generate(ask(range(8), 3))
        first_s = clock.now()
        again = await engine.generate(ask(range(8), 1))
        await engine.close()
        return first_s, clock.now() - first_s, again.cached_tokens

    first_s, again_s, cached_tokens = clock.run(main())
    # The prompt's 8 tokens give the first token; two decode steps follow, with 8 and 9 tokens of KV.
    assert first_s == pytest.approx((1.0 + 0.5 * 8) + (10 + 2 + 0.25 * 8) + (10 + 2 + 0.25 * 9))
    assert cached_tokens == 4
    assert again_s == pytest.approx(1.0 + 0.5 * 4)


def _simulation(seed: int) -> list[tuple[float, Generation]]:
    clock = VirtualClock()
    spec = SimulatedSpec(num_blocks=300, latency=LatencyModel(0.01, 1e-4, 0.005, 1e-4, 1e-6), seed=seed)
    engine = SimulatedEngine(spec, clock=clock)
    ended: list[tuple[float, Generation]] = []

    async def one(index: int) -> None:
        await clock.sleep(index * 0.003)
        request = GenerateRequest(f"s{index}", tuple(range(index, index + 100)), SamplingParams(max_tokens=50))
        ended.append((clock.now(), await engine.generate(request)))

    async def main() -> None:
        await engine.start()
        async with asyncio.TaskGroup() as group:
            for index in range(40):
                group.create_task(one(index))
        await engine.close()

    clock.run(main())
    return ended


def test_a_simulation_repeats_by_its_seed() -> None:
    first = _simulation(1)
    assert _simulation(1) == first
    assert [g.token_ids for _, g in _simulation(2)] != [g.token_ids for _, g in first]


async def test_zero_latency_lets_other_tasks_run() -> None:
    engine = SimulatedEngine(SimulatedSpec(max_running=1000, num_blocks=100_000))
    await engine.start()
    gaps_s: list[float] = []

    async def watch() -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0)
            gaps_s.append(time.monotonic() - before_s)

    watcher = asyncio.create_task(watch())
    calls = [engine.generate(ask([index, *range(99)], 50)) for index in range(1000)]
    generations = await asyncio.gather(*calls)
    watcher.cancel()
    await asyncio.wait([watcher])
    await engine.close()
    assert sum(len(generation.token_ids) for generation in generations) == 50_000
    assert len(gaps_s) >= 50_000 / 256


# Tokens depend on their KV


small_requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 12)), min_size=1, max_size=12
)


@pytest.mark.slow
@given(small_requests, st.booleans())
@settings(max_examples=150)
def test_batching_reuse_and_preemption_change_no_token(
    asked: list[tuple[list[int], int]], has_latency: bool
) -> None:
    """Six requests at a time in eight blocks: they share prefixes, and evict and preempt each other."""
    clock = VirtualClock()
    latency = STEP_S if has_latency else LatencyModel()
    engine = SimulatedEngine(replace(TINY, latency=latency), clock=clock)

    async def main() -> list[Generation]:
        await engine.start()
        requests = [ask(prompt, max_tokens) for prompt, max_tokens in asked]
        generations = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert engine.load().kv_used_tokens == 0
        await engine.close()
        return generations

    policy = HashPolicy(50)
    for (prompt, max_tokens), generation in zip(asked, clock.run(main()), strict=True):
        assert generation.token_ids == continuation(policy, prompt, 0, max_tokens)
        assert generation.cached_tokens < len(prompt)


def test_preemption_happens_and_is_counted() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(replace(TINY, latency=STEP_S), clock=clock)

    async def main() -> None:
        await engine.start()
        await asyncio.gather(*(engine.generate(ask([index] * 8, 20)) for index in range(4)))
        await engine.close()

    clock.run(main())
    assert engine.load().num_preemptions > 0


@pytest.mark.parametrize("kv_policy", list(KVPolicy))
def test_after_an_update_tokens_come_from_the_kv_the_policy_names(kv_policy: KVPolicy, tmp_path: Path) -> None:
    """The expected tokens follow from the policy's arithmetic: the version that read each id."""
    clock = VirtualClock()
    engine = SimulatedEngine(SimulatedSpec(latency=STEP_S), clock=clock)
    directory = write_checkpoint(tmp_path / "weights")
    prompt = tuple(range(40))

    async def main() -> Generation:
        await engine.start()
        call = asyncio.create_task(engine.generate(ask(prompt, 60)))
        await clock.sleep(0.205)
        await engine.stage(WeightUpdate(1, directory))
        await engine.pause(PauseMode.KEEP, kv_policy)
        await engine.commit(1)
        await engine.resume()
        generation = await call
        await engine.close()
        return generation

    generation = clock.run(main())
    swap = generation.weight_versions[0].end
    assert 10 < swap < 50
    ids = prompt + generation.token_ids[:swap]
    policy = HashPolicy(32_000)
    stream = policy.open(ask(prompt, 60))
    if kv_policy is KVPolicy.RECOMPUTE:
        state = stream.advance(0, ids, 1)
        assert engine.load().num_preemptions == 1
    else:  # all ids except the last were read under the old weights
        state = stream.advance(stream.advance(0, ids[:-1], 0), ids[-1:], 1)
        assert engine.load().num_preemptions == 0
    for token_id in generation.token_ids[swap:]:
        assert stream.sample(state, 1)[0] == token_id
        state = stream.advance(state, (token_id,), 1)


def test_hash_policy_samples_its_distribution() -> None:
    policy = HashPolicy(1000)
    weights = [math.exp(-k / 0.7) for k in range(4)]
    counts: dict[float, int] = {}
    for seed in range(4000):
        stream = policy.open(ask([1, 2], 1, temperature=0.7, seed=seed))
        _, logprob = stream.sample(stream.advance(0, (1, 2), 0), 0)
        counts[logprob] = counts.get(logprob, 0) + 1
    assert len(counts) == 4
    for logprob, count in counts.items():
        assert count / 4000 == pytest.approx(math.exp(logprob), abs=0.04)
    assert max(counts) == pytest.approx(math.log(weights[0] / sum(weights)))


@pytest.mark.parametrize(("sampling", "num_ids"), [({"top_k": 2}, 2), ({"top_p": 0.7}, 2), ({"top_p": 0.1}, 1)])
def test_hash_policy_cuts_its_distribution(sampling: dict[str, float], num_ids: int) -> None:
    policy = HashPolicy(1000)
    drawn = {policy.open(ask([1], 1, temperature=1.0, seed=s, **sampling)).sample(9, 0) for s in range(200)}
    assert len({token_id for token_id, _ in drawn}) == num_ids
    assert sum(math.exp(logprob) for logprob in {p for _, p in drawn}) == pytest.approx(1)


# Scripts and stop conditions


async def test_a_script_answers_prompts() -> None:
    def script(prompt: Sequence[int]) -> Sequence[int]:
        return [7, 8, 9] if prompt[-1] == 1 else [5]

    engine = SimulatedEngine(policy=ScriptedPolicy(script))
    await engine.start()
    first = await engine.generate(ask([3, 1], 10, stop_token_ids=(2,)))
    second = await engine.generate(ask([3, 4], 3))
    inside = await engine.generate(ask([3, 1], 10, stop_token_ids=(8,)))
    late = await engine.generate(ask([3, 1], 10, stop_token_ids=(8,), min_tokens=4))
    await engine.close()
    assert (first.token_ids, first.finish_reason) == ((7, 8, 9, 2), FinishReason.STOP)
    assert (second.token_ids, second.finish_reason) == ((5, 5, 5), FinishReason.LENGTH)
    assert inside.token_ids == (7, 8)
    assert late.token_ids == (7, 8, 9, 8, 8)  # `min_tokens` are sampled before the stop token


async def test_a_script_is_trusted_with_a_constraint_where_the_spec_says_so() -> None:
    constraint = Constraint(ConstraintKind.JSON_OBJECT)
    request = ask([1], 4, constraint=constraint, stop_token_ids=(2,), num_top_logprobs=3)
    for can_constrain in (False, True):
        spec = SimulatedSpec(can_constrain=can_constrain)
        engine = SimulatedEngine(spec, policy=ScriptedPolicy(lambda prompt: (7, 8)))
        await engine.start()
        assert (engine.info.features >= CONSTRAINTS) is can_constrain
        if can_constrain:
            answer = await engine.generate(request)
            assert answer.token_ids == (7, 8, 2)
            pairs = zip(answer.token_ids, answer.logprobs, strict=True)
            assert answer.top_logprobs == tuple((pair,) for pair in pairs)
        else:
            with pytest.raises(UnsupportedParameter):
                await engine.generate(request)
        await engine.close()


async def test_alternatives_are_the_four_candidates_and_follow_bias_and_top_k() -> None:
    engine = SimulatedEngine()
    await engine.start()
    answer = await engine.generate(ask([1, 2], 6, num_top_logprobs=20, seed=1, temperature=1.0))
    assert [len(top) for top in answer.top_logprobs] == [4] * 6
    for token_id, logprob, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        assert dict(top)[token_id] == logprob
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1)
    best = answer.top_logprobs[0][0][0]
    banned = await engine.generate(ask([1, 2], 1, num_top_logprobs=1, seed=1, logit_bias=((best, -100.0),)))
    assert banned.top_logprobs[0][0][0] != best
    cut = await engine.generate(ask([1, 2], 6, num_top_logprobs=20, seed=1, temperature=1.0, top_k=2))
    assert [len(top) for top in cut.top_logprobs] == [2] * 6
    await engine.close()


async def test_a_failing_script_fails_its_own_call() -> None:
    def script(prompt: Sequence[int]) -> Sequence[int]:
        raise InvalidRequest("no reply for this prompt")

    engine = SimulatedEngine(policy=ScriptedPolicy(script))
    await engine.start()
    with pytest.raises(InvalidRequest):
        await engine.generate(ask([1], 1))
    await engine.check_health()
    await engine.close()


class _BrokenStream:
    def advance(self, state: int, token_ids: Sequence[int], weight_version: int) -> int:
        return 0

    def sample(self, state: int, weight_version: int) -> tuple[int, float]:
        raise ZeroDivisionError


class _BrokenPolicy:
    def open(self, request: GenerateRequest) -> _BrokenStream:
        return _BrokenStream()


async def test_a_failing_step_is_heard_by_every_caller() -> None:
    engine = SimulatedEngine(policy=_BrokenPolicy())
    await engine.start()
    outcomes = await asyncio.gather(*(engine.generate(ask([1], 1)) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(outcome, EngineLost) for outcome in outcomes)
    with pytest.raises(EngineLost, match="ZeroDivisionError"):
        await engine.check_health()
    await engine.close()


# States


async def test_dummy_weights_take_no_traffic_before_a_commit(tmp_path: Path) -> None:
    engine = SimulatedEngine(SimulatedSpec(initial_version=None))
    await engine.start()
    assert not engine.is_usable
    assert engine.weight_version is None
    with pytest.raises(EngineUnusable):
        await engine.generate(ask([1], 1))
    await engine.stage(WeightUpdate(0, write_checkpoint(tmp_path / "weights")))
    await engine.pause(PauseMode.KEEP)
    await engine.commit(0)
    await engine.resume()
    assert engine.is_usable
    assert (await engine.generate(ask([1], 1))).weight_versions[0].version == 0
    await engine.close()


async def test_an_engine_answers_only_between_start_and_close() -> None:
    engine = SimulatedEngine()
    with pytest.raises(EngineLost):
        await engine.generate(ask([1], 1))
    await engine.start()
    await engine.pause(PauseMode.KEEP)
    call = asyncio.create_task(engine.generate(ask([1], 1)))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineLost):
        await call
    with pytest.raises(EngineLost):
        await engine.check_health()
    assert not engine.is_usable


async def test_a_killed_engine_fails_generate_and_stream() -> None:
    engine = SimulatedEngine(SimulatedSpec(latency=LatencyModel(decode_s=0.001)))
    await engine.start()
    call = asyncio.create_task(engine.generate(ask([1], 4000)))
    stream = engine.stream(ask([2], 4000))
    await anext(stream)
    engine.kill()
    with pytest.raises(EngineLost):
        await call
    with pytest.raises(EngineLost):
        _ = [piece async for piece in stream]
    await engine.sleep(1)  # its memory is released
    with pytest.raises(EngineLost):
        await engine.wake()
    await engine.close()


async def test_a_resume_ends_a_waiting_pause() -> None:
    engine = SimulatedEngine(faults=Faults(num_hung=1))
    await engine.start()
    hung = asyncio.create_task(engine.generate(ask([1], 4)))
    await asyncio.sleep(0)
    pause = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    assert not engine.is_paused
    await engine.resume()
    with pytest.raises(Conflict):
        await pause
    assert len((await engine.generate(ask([1], 4))).token_ids) == 4
    hung.cancel()
    await engine.close()


def test_a_pause_inside_a_step_samples_nothing_more() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(SimulatedSpec(latency=STEP_S), clock=clock)
    request = ask([1], 50)

    async def main() -> tuple[int, Generation]:
        await engine.start()
        stream = engine.stream(request)
        num_before = 0
        while num_before < 5:
            piece = await anext(stream)
            assert isinstance(piece, Delta)
            num_before += len(piece.token_ids)
        await clock.sleep(STEP_S.decode_s / 2)
        await engine.pause(PauseMode.KEEP)
        await clock.sleep(1)
        await engine.abort(request.request_id)
        last = await anext(stream)
        await engine.close()
        assert isinstance(last, Generation)
        return num_before, last

    num_before, partial = clock.run(main())
    assert len(partial.token_ids) == num_before
    assert partial.finish_reason is FinishReason.ABORT


def test_a_draining_engine_starts_nothing_new() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(SimulatedSpec(latency=STEP_S), clock=clock)

    async def main() -> tuple[bool, bool]:
        await engine.start()
        early = asyncio.create_task(engine.generate(ask([1], 50)))
        await clock.sleep(0.1)
        pause = asyncio.create_task(engine.pause(PauseMode.WAIT))
        await clock.sleep(0.1)
        late = asyncio.create_task(engine.generate(ask([2], 1)))
        await pause
        await clock.sleep(1)
        seen = early.done(), late.done()
        await engine.resume()
        await late
        await engine.close()
        return seen

    assert clock.run(main()) == (True, False)


def test_a_resume_waits_for_a_slow_commit(tmp_path: Path) -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(clock=clock, faults=Faults(commit_delay_s=5.0))
    directory = write_checkpoint(tmp_path / "weights")

    async def main() -> Generation:
        await engine.start()
        await engine.stage(WeightUpdate(1, directory))
        await engine.pause(PauseMode.KEEP)
        commit = asyncio.create_task(engine.commit(1))
        await clock.sleep(1)
        call = asyncio.create_task(engine.generate(ask([1], 3)))
        await engine.resume()
        assert clock.now() == pytest.approx(5.0)
        await commit
        generation = await call
        await engine.close()
        return generation

    assert [span.version for span in clock.run(main()).weight_versions] == [1]


def test_a_cancelled_commit_leaves_unknown_weights(tmp_path: Path) -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(clock=clock, faults=Faults(commit_delay_s=5.0))
    directory = write_checkpoint(tmp_path / "weights")

    async def main() -> None:
        await engine.start()
        await engine.stage(WeightUpdate(1, directory))
        await engine.pause(PauseMode.KEEP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.commit(1), 1.0)
        assert not engine.is_usable
        await engine.close()

    clock.run(main())


# Pushed weights and sleep


async def test_without_a_wire_a_push_is_refused() -> None:
    engine = SimulatedEngine()
    await engine.start()
    with pytest.raises(InvalidRequest, match="from a directory"):
        await engine.stage(WeightUpdate(1, push=PushSource(("host:1",), "token", ())))
    assert await engine.offer() is None
    assert engine.is_usable
    await engine.close()


@pytest.mark.parametrize("is_one_phase", [False, True])
def test_pushed_weights_take_their_time(is_one_phase: bool) -> None:
    """With staging, decoding continues during the transfer; in a blocking update it pauses."""
    clock = VirtualClock()
    wire = Wire(clock)
    spec = SimulatedSpec(latency=STEP_S)
    engine = SimulatedEngine(spec, clock=clock, weight_source=wire.receiver())

    async def main() -> tuple[StageReport, CommitReport, float]:
        await engine.start()
        reading = asyncio.create_task(engine.generate(ask([1], 100)))  # a second of decoding
        source = replace(wire.listen(Sender(1, 2.0, is_one_phase=is_one_phase)), num_receivers=1)
        staged = await engine.stage(WeightUpdate(1, push=source))
        await engine.pause(PauseMode.KEEP)
        committed = await engine.commit(1)
        await engine.resume()
        await reading
        finished_s = clock.now()
        await engine.close()
        return staged, committed, finished_s

    staged, committed, finished_s = clock.run(main())
    assert (staged.staging_device is StagingDevice.NOWHERE) == is_one_phase
    assert staged.transfer_ms + committed.transfer_ms == pytest.approx(2000.0)
    assert (committed.transfer_ms > 0) == is_one_phase
    assert finished_s == pytest.approx(3.0 if is_one_phase else 2.0, abs=0.1)
    assert engine.weight_version == 1
    assert wire.problems == []


@pytest.mark.parametrize("is_one_phase", [False, True])
def test_a_sender_that_dies_on_the_way_is_noticed(is_one_phase: bool) -> None:
    clock = VirtualClock()
    wire = Wire(clock)
    engine = SimulatedEngine(clock=clock, weight_source=wire.receiver())

    async def main() -> None:
        await engine.start()
        source = wire.listen(Sender(1, 2.0, is_one_phase=is_one_phase, dies_at=1.0))
        update = WeightUpdate(1, push=replace(source, num_receivers=1))
        await engine.pause(PauseMode.KEEP)
        if is_one_phase:
            await engine.stage(update)
            with pytest.raises(WeightUpdateFailed, match=r"the transfer of version .* failed"):
                await engine.commit(1)
            assert not engine.is_usable
        else:
            with pytest.raises(CheckpointUnreadable):
                await engine.stage(update)
            with pytest.raises(Conflict):
                await engine.commit(1)
            assert engine.weight_version == 0
        assert clock.now() == pytest.approx(1.0)
        await engine.close()

    clock.run(main())


def test_of_two_stages_at_a_time_the_later_one_counts(tmp_path: Path) -> None:
    clock = VirtualClock()
    wire = Wire(clock)
    engine = SimulatedEngine(clock=clock, weight_source=wire.receiver())
    directory = write_checkpoint(tmp_path / "weights")

    async def main() -> None:
        await engine.start()
        await engine.pause(PauseMode.KEEP)
        source = replace(wire.listen(Sender(1, 2.0)), num_receivers=1)
        slow = asyncio.create_task(engine.stage(WeightUpdate(1, push=source)))
        await clock.sleep(1.0)
        await engine.stage(WeightUpdate(2, directory))
        with pytest.raises(Conflict):
            await slow
        await engine.commit(2)
        await engine.close()

    clock.run(main())


async def test_a_sleep_drops_what_was_staged_and_all_kv(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "weights")
    engine = SimulatedEngine()
    await engine.start()
    prompt = list(range(40))
    await engine.generate(ask(prompt, 1))
    await engine.stage(WeightUpdate(1, directory))
    with pytest.raises(InvalidRequest):
        await engine.sleep(0)
    await engine.sleep(1)
    assert engine.load().kv_used_tokens == 0
    await engine.wake()
    with pytest.raises(Conflict, match="nothing is staged"):
        await engine.commit(1)
    await engine.resume()
    assert (await engine.generate(ask(prompt, 1))).cached_tokens == 0
    await engine.close()


async def test_a_spec_without_sleep() -> None:
    engine = SimulatedEngine(SimulatedSpec(can_sleep=False, num_workers=4))
    await engine.start()
    assert (engine.info.can_sleep, engine.info.num_workers, engine.info.weight_dtype) == (False, 4, None)
    with pytest.raises(InvalidRequest):
        await engine.sleep(1)
    assert not engine.is_paused
    await engine.close()


# Faults


async def test_faults_happen_once_each(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "weights")
    engine = SimulatedEngine(faults=Faults(num_lost=1, num_failed_stages=1, num_failed_commits=1))
    await engine.start()
    with pytest.raises(EngineLost):
        await engine.generate(ask([1], 1))
    await engine.generate(ask([1], 1))
    with pytest.raises(CheckpointUnreadable):
        await engine.stage(WeightUpdate(1, directory))
    await engine.stage(WeightUpdate(1, directory))
    await engine.pause(PauseMode.KEEP)
    with pytest.raises(WeightUpdateFailed):
        await engine.commit(1)
    with pytest.raises(Conflict):
        await engine.commit(1)
    await engine.stage(WeightUpdate(2, directory))
    await engine.commit(2)
    await engine.close()


@pytest.mark.parametrize("how", list(Malformation))
async def test_a_malformed_answer_is_caught_by_the_check(how: Malformation) -> None:
    engine = SimulatedEngine(SimulatedSpec(routed_experts=True, sampling_mask=True), faults=Faults(malformed=[how]))
    await engine.start()
    bad, good = ask([1], 4, num_top_logprobs=2, temperature=1.0), ask([1], 4, temperature=1.0)
    with pytest.raises(MalformedEngineResponse):
        check_generation(bad, await engine.generate(bad), engine.info.vocab_size)
    check_generation(good, await engine.generate(good), engine.info.vocab_size)
    await engine.close()


async def test_a_hung_request_ends_by_abort_and_by_cancellation() -> None:
    engine = SimulatedEngine(faults=Faults(num_hung=2))
    await engine.start()
    request = ask([1], 4)
    aborted = asyncio.create_task(engine.generate(request))
    left = asyncio.create_task(engine.generate(ask([2], 4)))
    await asyncio.sleep(0)  # both tasks send their requests
    await engine.generate(ask([3], 4))
    assert engine.load().num_running == 2
    assert not aborted.done()
    await engine.abort(request.request_id)
    assert (await aborted).finish_reason is FinishReason.ABORT
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(left, 0.01)
    assert engine.load().num_running == 0
    await engine.close()


async def test_an_id_in_use_is_refused() -> None:
    engine = SimulatedEngine()
    await engine.start()
    await engine.pause(PauseMode.KEEP)
    request = ask([1], 1)
    call = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0)
    with pytest.raises(Conflict):
        await engine.generate(request)
    await engine.resume()
    assert len((await call).token_ids) == 1
    await engine.close()


async def test_a_cache_smaller_than_a_context_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        SimulatedEngine(SimulatedSpec(max_context_tokens=100, block_size=4, num_blocks=24))


# Logprobs of both kinds


@pytest.mark.parametrize("policy", [None, ScriptedPolicy(lambda prompt: (7, 8))])
async def test_each_mode_gives_its_part_of_what_both_gives(policy: ScriptedPolicy | None) -> None:
    request = ask([1, 2], 6, temperature=0.5, seed=3, logit_bias=((9, 15.0),), num_top_logprobs=3)
    answers = {}
    for mode in LogprobsMode:
        engine = SimulatedEngine(SimulatedSpec(logprobs_mode=mode), policy=policy)
        await engine.start()
        assert engine.info.logprobs_mode is mode
        answers[mode] = await engine.generate(request)
        await engine.close()
    sampled, raw, both = answers[LogprobsMode.SAMPLED], answers[LogprobsMode.RAW], answers[LogprobsMode.BOTH]
    assert sampled.token_ids == raw.token_ids == both.token_ids
    assert (sampled.logprobs, sampled.top_logprobs) == (both.logprobs, both.top_logprobs)
    assert raw.logprobs == both.raw_logprobs
    assert (sampled.raw_logprobs, raw.raw_logprobs) == ((), ())
    for token_id, logprob, top in zip(raw.token_ids, raw.logprobs, raw.top_logprobs, strict=True):
        assert dict(top).get(token_id, logprob) == logprob


def test_hash_policy_gives_the_plain_softmax_whatever_is_asked_for() -> None:
    policy = HashPolicy(1000)
    stream = policy.open(ask([1], 1, temperature=0.5, logit_bias=((5, 100.0),), top_k=1))
    plain = policy.open(ask([1], 1, temperature=1.0))
    assert stream.alternatives(9, 0, is_raw=True) == plain.alternatives(9, 0)
    assert sum(math.exp(stream.raw_logprob(9, 0, token_id)) for token_id in range(1000)) == pytest.approx(
        1, abs=1e-4
    )


def test_streams_have_fewer_pieces_the_more_there_are_and_their_last_at_once() -> None:
    """64 streams of 40 tokens at 2 ms per step: a piece every 26 ms; a single stream has 40 pieces."""
    clock = VirtualClock()
    engine = SimulatedEngine(SimulatedSpec(latency=LatencyModel(decode_s=0.002)), clock=clock)

    async def read(request: GenerateRequest) -> tuple[list[Delta], Generation]:
        deltas: list[Delta] = []
        async for piece in engine.stream(request):
            if isinstance(piece, Generation):
                return deltas, piece
            deltas.append(piece)
        raise AssertionError("a stream ended without its generation")

    async def main() -> None:
        await engine.start()
        alone, _ = await read(ask([1, 2, 3], 40))
        assert len(alone) > 20
        found = await asyncio.gather(*(read(ask([index, 2, 3], 40)) for index in range(64)))
        await engine.close()
        for deltas, whole in found:
            assert tuple(token_id for delta in deltas for token_id in delta.token_ids) == whole.token_ids
            assert len(deltas) < 20
            assert len(deltas[0].token_ids) >= 1

    clock.run(main())


def test_the_pace_of_streams() -> None:
    pace = StreamPace(pieces_per_s=2500.0, least_s=0.005, most_s=0.25)
    assert [pace.wait_s(number) for number in (1, 12)] == [0.0, 0.0]
    assert [pace.wait_s(number) for number in (25, 500, 625, 10_000)] == pytest.approx([0.01, 0.2, 0.25, 0.25])
