"""The engine contract (`agentloop/engine/interface.py`), proved for every engine by the same tests.

To act in the middle of a generation, a test requests many tokens without a stop id and reads a stream until some
have arrived. Tests do not sleep for a fixed time to get there.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from agentloop.engine.interface import ALL_MEMORY, MemoryTag, Progress, PushSource, StagingDevice
from agentloop.engine.request_watch import StreamPace
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    EngineLost,
    EnginePaused,
    EngineUnusable,
    InvalidRequest,
    WeightUpdateFailed,
    WeightVersionNotServed,
)
from agentloop.types import (
    FinishReason,
    Generation,
    KVPolicy,
    PauseMode,
    VersionDemand,
    WeightVersionSpan,
    clip_spans,
)
from agentloop.values.capabilities import Feature
from agentloop.values.checks import check_checkpoint, check_generation
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode
from tests.contract.cases import EngineCase
from tests.contract.driving import SOME_TOKENS, TIMEOUT_S, Reading, commit_next, generated, is_idle, merged, until

# Ids, logprobs, ends


async def test_greedy_ids_continue_their_own_prefix(case: EngineCase) -> None:
    prompt = case.prompt()
    whole = await generated(case, case.request(prompt, 24))
    rest = await generated(case, case.request(prompt + whole.token_ids[:9], 15))
    assert whole.finish_reason is FinishReason.LENGTH
    assert len(whole.token_ids) == 24
    assert rest.token_ids == whole.token_ids[9:]


async def test_every_prompt_id_counts(case: EngineCase) -> None:
    prompt = case.prompt()
    other = (case.prompt()[0], *prompt[1:])
    assert other != prompt
    request = case.request(prompt, 8, temperature=1.0, seed=5)
    first = await generated(case, request)
    second = await generated(case, replace(request, request_id="changed", token_ids=other))
    assert (first.token_ids, first.logprobs) != (second.token_ids, second.logprobs)


async def test_the_stop_token_is_the_last_id(case: EngineCase) -> None:
    prompt = case.prompt()
    free = await generated(case, case.request(prompt, 32))
    stop = free.token_ids[-1]
    end = free.token_ids.index(stop) + 1
    stopped = await generated(case, case.request(prompt, 64, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.finish_reason is FinishReason.STOP


async def test_logprobs_are_under_the_temperature(case: EngineCase) -> None:
    """For two ids of one distribution, log p(a) - log p(b) at temperature 1/2 is twice that at 1."""
    prompts = [case.prompt() for _ in range(4)]

    async def one_token(prompt: tuple[int, ...], temperature: float, seed: int) -> tuple[int, float]:
        generation = await generated(case, case.request(prompt, 1, temperature=temperature, seed=seed))
        return generation.token_ids[0], generation.logprobs[0]

    num_compared = 0
    for prompt in prompts:
        drawn = await asyncio.gather(*(one_token(prompt, t, seed) for t in (1.0, 0.5) for seed in range(24)))
        warm, cool = dict(drawn[:24]), dict(drawn[24:])
        for a, b in combinations(sorted(warm.keys() & cool.keys()), 2):
            assert cool[a] - cool[b] == pytest.approx(2 * (warm[a] - warm[b]), abs=0.05)
            num_compared += abs(warm[a] - warm[b]) > 0.2
    assert num_compared > 0, "no prompt gave two common ids of clearly different probability"


async def test_a_seed_repeats_and_seeds_differ(case: EngineCase) -> None:
    case.require(Feature.SEED)
    prompt = case.prompt()

    async def sampled(seed: int) -> Generation:
        return await generated(case, case.request(prompt, 24, temperature=1.0, seed=seed))

    first, again = await sampled(1), await sampled(1)
    others = [await sampled(seed) for seed in (2, 3, 4)]
    assert again.token_ids == first.token_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-3)
    assert {other.token_ids for other in others} != {first.token_ids}


async def test_of_waiting_requests_those_of_lower_priority_numbers_go_first(case: EngineCase) -> None:
    assert Feature.PRIORITY in case.engine.info.features
    num_seats, ended = case.engine.info.max_running, list[int]()

    async def one(priority: int, num_tokens: int) -> None:
        await generated(case, case.request(case.prompt(num_tokens=8), num_tokens, priority=priority))
        ended.append(priority)

    # Slots become free one after another; every waiting request then gets a slot for two steps.
    async with asyncio.TaskGroup() as running:
        for seat in range(num_seats):
            running.create_task(one(0, 48 + 3 * seat))
        await until(lambda: case.engine.load().num_running == num_seats)
        for priority in (7, 7, 1, -4, 7, -4):
            running.create_task(one(priority, 2))
    assert [priority for priority in ended if priority] == [-4, -4, 1, 7, 7, 7]


async def test_stream_pieces_concatenate_to_the_generation(case: EngineCase) -> None:
    prompt = case.prompt()
    reading = Reading(case, case.request(prompt, 48))
    whole = await reading.end()
    unstreamed = await generated(case, case.request(prompt, 48))
    assert len(reading.deltas) > 1
    assert tuple(i for delta in reading.deltas for i in delta.token_ids) == whole.token_ids == unstreamed.token_ids
    assert tuple(p for delta in reading.deltas for p in delta.logprobs) == whole.logprobs


async def test_pieces_of_many_streams_join_tokens_and_leave_none_out(case: EngineCase) -> None:
    pace, num_streams, num_tokens = StreamPace(), 24, 96
    num_unpaced = sum(pace.wait_s(number) == 0 for number in range(1, num_streams + 1))
    assert 0 < num_unpaced < num_streams
    requests = [
        case.request(case.prompt(), num_tokens, temperature=1.0, seed=seed, num_top_logprobs=2)
        for seed in range(num_streams)
    ]
    begun_at = time.monotonic()
    readings = [Reading(case, request) for request in requests]
    wholes = await asyncio.gather(*(reading.end() for reading in readings))
    token_s = (time.monotonic() - begun_at) / num_tokens
    for reading, whole in zip(readings, wholes, strict=True):
        told = SampledTokens(whole.logprobs_mode)
        for delta in reading.deltas:
            told.add(delta)
        assert (tuple(told.token_ids), tuple(told.logprobs)) == (whole.token_ids, whole.logprobs)
        assert (tuple(told.top_logprobs), told.weight_versions) == (whole.top_logprobs, whole.weight_versions)
        assert len(whole.token_ids) == num_tokens
    if token_s < pace.wait_s(num_streams) / 2:  # otherwise the engine is slower than the polling of its streams
        assert max(len(reading.deltas) for reading in readings[num_unpaced:]) < num_tokens
    assert is_idle(case.engine)


async def test_reports_are_what_the_generation_begins_with(case: EngineCase) -> None:
    told, num_reports = SampledTokens(LogprobsMode.BOTH), 0

    def hear(progress: Progress) -> None:
        nonlocal num_reports
        num_reports += 1
        told.add(progress.tokens)

    request = case.request(case.prompt(), case.long_tokens, temperature=1.0, seed=3, num_top_logprobs=2)
    generating = asyncio.create_task(case.engine.generate(request, hear))
    await until(lambda: len(told) > 0)
    before = case.engine.weight_version
    update = await commit_next(case, KVPolicy.KEEP)
    generation = await asyncio.wait_for(generating, TIMEOUT_S)
    check_generation(request, generation, case.engine.info.vocab_size)
    assert num_reports > 1
    num_told = len(told)
    assert tuple(told.token_ids) == generation.token_ids[:num_told]
    assert tuple(told.logprobs) == generation.logprobs[:num_told]
    assert tuple(told.raw_logprobs) == generation.raw_logprobs[:num_told]
    assert tuple(told.top_logprobs) == generation.top_logprobs[:num_told]
    assert told.weight_versions == clip_spans(generation.weight_versions, 0, num_told)
    assert [span.version for span in generation.weight_versions] == [before, update.version]
    assert generation.unavailable_s > 0


async def test_frozen_time_is_no_time_of_a_request(case: EngineCase) -> None:
    request = replace(case.request(case.prompt(), 8), timeout_s=5.0)
    outages: list[float] = []
    await case.engine.pause(PauseMode.KEEP)
    generating = asyncio.create_task(
        case.engine.generate(request, lambda progress: outages.append(progress.unavailable_s))
    )
    await until(lambda: bool(outages) and outages[-1] > 0.5)
    await case.engine.resume()
    generation = await asyncio.wait_for(generating, TIMEOUT_S)
    assert generation.unavailable_s >= outages[-1]
    assert len(generation.token_ids) == 8


async def test_a_request_whose_time_is_over_is_late_or_kept(case: EngineCase) -> None:
    request = replace(case.request(case.prompt(), case.long_tokens), timeout_s=0.03)
    with pytest.raises(DeadlineExceeded):
        await case.engine.generate(request)
    request = replace(case.request(case.prompt(), case.long_tokens), timeout_s=0.03, keeps_late=True)
    generation = await case.engine.generate(request)
    check_generation(request, generation, case.engine.info.vocab_size)
    assert generation.finish_reason is FinishReason.DEADLINE
    assert len(generation.token_ids) < case.long_tokens
    with pytest.raises(EngineLost, match="heard"):
        await case.engine.generate(case.request(case.prompt(), case.long_tokens), _raising)


def _raising(progress: Progress) -> None:
    raise EngineLost("who heard this is gone")


async def test_an_undisturbed_generation_has_one_span(case: EngineCase) -> None:
    version = case.engine.weight_version
    assert version is not None
    generation = await generated(case, case.request(case.prompt(), 16))
    assert generation.weight_versions == (WeightVersionSpan(version, 0, 16),)
    assert generation.load.weight_version == version


async def test_max_tokens_is_cut_to_the_context(case: EngineCase) -> None:
    prompt = case.prompt(num_tokens=case.engine.info.max_context_tokens - 4)
    generation = await generated(case, case.request(prompt, 100))
    assert len(generation.token_ids) == 4
    assert generation.finish_reason is FinishReason.LENGTH


# Bad requests


async def test_a_prompt_without_room_is_refused(case: EngineCase) -> None:
    prompt = case.prompt(num_tokens=case.engine.info.max_context_tokens)
    with pytest.raises(ContextLengthExceeded):
        await case.engine.generate(case.request(prompt, 1))


@pytest.mark.parametrize("kind", ["empty", "negative", "too large", "no tokens", "bad temperature", "bad top_p"])
async def test_a_bad_request_is_refused_and_disturbs_nobody(case: EngineCase, kind: str) -> None:
    prompt = case.prompt()
    good = case.request(prompt, case.long_tokens)
    bad = {
        "empty": case.request((), 4),
        "negative": case.request((*prompt, -1), 4),
        "too large": case.request((*prompt, case.engine.info.vocab_size), 4),
        "no tokens": case.request(prompt, 0),
        "bad temperature": case.request(prompt, 4, temperature=float("nan")),
        "bad top_p": case.request(prompt, 4, top_p=0.0),
    }[kind]
    reading = Reading(case, good)
    await reading.middle()
    with pytest.raises(InvalidRequest):
        await case.engine.generate(bad)
    assert len((await reading.end()).token_ids) == case.long_tokens


# Pause and resume


@pytest.mark.parametrize("kv_policy", list(KVPolicy))
async def test_a_kept_pause_changes_no_token(case: EngineCase, kv_policy: KVPolicy) -> None:
    prompt = case.prompt()
    unpaused = await generated(case, case.request(prompt, case.long_tokens))
    reading = Reading(case, case.request(prompt, case.long_tokens))
    waiting = asyncio.create_task(generated(case, case.request(prompt, case.long_tokens)))
    for num_tokens in (SOME_TOKENS, 3 * SOME_TOKENS):
        await reading.middle(num_tokens)
        await case.engine.pause(PauseMode.KEEP, kv_policy)
        assert case.engine.is_paused
        await case.engine.check_health()
        await case.engine.resume()
        assert not case.engine.is_paused
    assert (await reading.end()).token_ids == unpaused.token_ids
    assert (await waiting).token_ids == unpaused.token_ids


async def test_no_token_is_sampled_during_a_pause(case: EngineCase) -> None:
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    await case.engine.pause(PauseMode.KEEP)
    # Tokens sampled before the pause may still be in transit to the reader; after that nothing may arrive.
    await asyncio.sleep(0.1)
    num_before = reading.num_tokens
    await asyncio.sleep(0.2)
    assert reading.num_tokens == num_before
    assert not reading.is_done
    await case.engine.resume()
    await reading.end()


async def test_pause_and_resume_are_idempotent(case: EngineCase) -> None:
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    await case.engine.resume()
    for _ in range(3):
        await case.engine.pause(PauseMode.KEEP)
    assert case.engine.is_paused
    for _ in range(3):
        await case.engine.resume()
    assert not case.engine.is_paused
    assert len((await reading.end()).token_ids) == case.long_tokens


@pytest.mark.parametrize("first", list(PauseMode))
@pytest.mark.parametrize("second", list(PauseMode))
async def test_a_second_pause_of_another_mode(case: EngineCase, first: PauseMode, second: PauseMode) -> None:
    prompt = case.prompt()
    reading = Reading(case, case.request(prompt, case.long_tokens))
    await reading.middle()
    await asyncio.wait_for(case.engine.pause(first), TIMEOUT_S)
    await asyncio.wait_for(case.engine.pause(second), TIMEOUT_S)
    assert case.engine.is_paused
    await case.engine.resume()
    generation = await reading.end()
    is_whole = len(generation.token_ids) == case.long_tokens
    assert is_whole == (generation.finish_reason is FinishReason.LENGTH)
    assert is_whole or PauseMode.ABORT in (first, second)


async def test_pause_abort_gives_the_tokens_so_far(case: EngineCase) -> None:
    prompt = case.prompt()
    whole = await generated(case, case.request(prompt, case.long_tokens))
    reading = Reading(case, case.request(prompt, case.long_tokens))
    await reading.middle()
    await case.engine.pause(PauseMode.ABORT)
    partial = await reading.end()  # before the resume: it has ended now
    assert partial.finish_reason is FinishReason.ABORT
    assert SOME_TOKENS <= len(partial.token_ids) < case.long_tokens
    assert partial.token_ids == whole.token_ids[: len(partial.token_ids)]


async def test_pause_wait_lets_them_finish(case: EngineCase) -> None:
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    await asyncio.wait_for(case.engine.pause(PauseMode.WAIT), TIMEOUT_S)
    assert case.engine.is_paused
    whole = await reading.end()  # before the resume
    assert whole.finish_reason is FinishReason.LENGTH
    assert len(whole.token_ids) == case.long_tokens


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_request_sent_while_paused_is_never_lost(case: EngineCase, mode: PauseMode) -> None:
    prompt = case.prompt()
    expected = await generated(case, case.request(prompt, 8))
    await case.engine.pause(mode)
    call = asyncio.create_task(case.engine.generate(case.request(prompt, 8)))
    await asyncio.wait([call], timeout=0.2)
    if call.done():
        assert isinstance(call.exception(), EnginePaused)
        await case.engine.resume()
        answer = await generated(case, case.request(prompt, 8))
    else:
        await case.engine.resume()
        answer = await asyncio.wait_for(call, TIMEOUT_S)
    assert answer.token_ids == expected.token_ids


# Abort and cancellation


@pytest.mark.parametrize("is_paused", [False, True])
async def test_abort_gives_the_tokens_so_far(case: EngineCase, is_paused: bool) -> None:
    prompt = case.prompt()
    whole = await generated(case, case.request(prompt, case.long_tokens))
    target = Reading(case, case.request(prompt, case.long_tokens))
    neighbour = Reading(case, case.request(prompt, case.long_tokens))
    await target.middle()
    if is_paused:
        await case.engine.pause(PauseMode.KEEP)
    await case.engine.abort(target.request.request_id)
    partial = await target.end()  # also while paused
    await case.engine.resume()
    assert partial.finish_reason is FinishReason.ABORT
    assert SOME_TOKENS <= len(partial.token_ids) < case.long_tokens
    assert partial.token_ids == whole.token_ids[: len(partial.token_ids)]
    assert (await neighbour.end()).token_ids == whole.token_ids


async def test_abort_of_an_unknown_id_changes_nothing(case: EngineCase) -> None:
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    await case.engine.abort("nobody")
    await case.engine.abort(reading.request.request_id[:-1])  # ids are not prefixes
    assert (await reading.end()).finish_reason is FinishReason.LENGTH


async def leaves_only(case: EngineCase, neighbour: Reading) -> None:
    """Check that the engine runs only `neighbour`, before `neighbour` ends.

    `neighbour` has far fewer remaining tokens than the cancelled requests, so these did not simply run to their
    end.
    """
    await until(lambda: neighbour.is_done or case.engine.load().num_running == 1)
    assert not neighbour.is_done
    await neighbour.end()


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_cancelled_generate_aborts_in_the_engine(case: EngineCase, is_paused: bool) -> None:
    requests = [case.request(case.prompt(), 2 * case.long_tokens) for _ in range(4)]
    calls = [asyncio.create_task(case.engine.generate(request)) for request in requests]
    await until(lambda: case.engine.load().num_running == len(calls))
    if is_paused:
        await case.engine.pause(PauseMode.KEEP)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    neighbour = Reading(case, case.request(case.prompt(), case.long_tokens))
    await case.engine.resume()
    await neighbour.middle()
    await leaves_only(case, neighbour)


async def test_a_stream_left_aborts_in_the_engine(case: EngineCase) -> None:
    reading = Reading(case, case.request(case.prompt(), 2 * case.long_tokens))
    await reading.middle()
    await reading.leave()
    assert reading.num_tokens < case.long_tokens
    neighbour = Reading(case, case.request(case.prompt(), case.long_tokens))
    await neighbour.middle()
    await leaves_only(case, neighbour)


# Weight updates


@pytest.mark.parametrize("kv_policy", list(KVPolicy))
async def test_a_commit_in_the_middle_opens_a_second_span(case: EngineCase, kv_policy: KVPolicy) -> None:
    prompt = case.prompt()
    old_version = case.engine.weight_version
    old = await generated(case, case.request(prompt, case.long_tokens))
    readings = [Reading(case, case.request(prompt, case.long_tokens)) for _ in range(2)]
    for reading in readings:
        await reading.middle()
    update = await commit_next(case, kv_policy)
    assert case.engine.weight_version == update.version
    for reading in readings:
        both = await reading.end()
        first, second = both.weight_versions
        assert (first.version, second.version) == (old_version, update.version)
        assert first.end >= SOME_TOKENS
        assert both.token_ids[: first.end] == old.token_ids[: first.end]
        assert len(both.token_ids) == case.long_tokens
        streamed: list[WeightVersionSpan] = []
        start = 0
        for delta in reading.deltas:
            assert delta.weight_versions[0].start == 0
            assert delta.weight_versions[-1].end == len(delta.token_ids)
            streamed += [
                WeightVersionSpan(s.version, s.start + start, s.end + start) for s in delta.weight_versions
            ]
            start += len(delta.token_ids)
        assert merged(streamed) == both.weight_versions


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_commit_ends_what_does_not_accept_its_version_and_nothing_else(
    case: EngineCase, resumes: bool
) -> None:
    """A drain waits only for requests that do not accept the new version; refused requests never run."""
    update, served = case.next_update(), case.engine.weight_version
    assert served is not None
    short, long = case.long_tokens // 4, case.long_tokens
    demand = VersionDemand(exact_version=served)
    await case.engine.stage(update)
    others = Reading(case, case.request(case.prompt(), long))
    drained = Reading(case, case.request(case.prompt(), short, weight_version=demand))
    await drained.middle()
    await case.engine.drain_pinned(update.version, TIMEOUT_S)
    assert (await drained.end()).weight_versions == (WeightVersionSpan(served, 0, short),)
    pinned = Reading(case, case.request(case.prompt(), long, weight_version=demand))
    await pinned.middle()
    await case.engine.drain_pinned(update.version, 0.0)
    await case.engine.pause(PauseMode.KEEP)
    await case.engine.commit(update.version, resumes=resumes)
    cut = await pinned.end()  # before its resume
    assert (cut.finish_reason, 0 < len(cut.token_ids) < long) == (FinishReason.REPLACED, True)
    assert [span.version for span in cut.weight_versions] == [served]
    await case.engine.resume()
    with pytest.raises(WeightVersionNotServed):
        await case.engine.generate(case.request(case.prompt(), 4, weight_version=demand))
    newer = case.request(case.prompt(), 4, weight_version=VersionDemand(min_version=update.version))
    assert [span.version for span in (await generated(case, newer)).weight_versions] == [update.version]
    assert len((await others.end()).token_ids) == long


@pytest.mark.parametrize("is_paused_before", [False, True], ids=["running", "paused by somebody else before"])
async def test_recompute_goes_on_as_the_new_weights_would(case: EngineCase, is_paused_before: bool) -> None:
    prompt = case.prompt()
    reading = Reading(case, case.request(prompt, case.long_tokens))
    await reading.middle()
    if is_paused_before:
        await case.engine.pause(PauseMode.KEEP, KVPolicy.KEEP)
    update = await commit_next(case, KVPolicy.RECOMPUTE)
    both = await reading.end()
    swap = both.weight_versions[0].end
    prefix = prompt + both.token_ids[:swap]
    rest = await generated(case, case.request(prefix, case.long_tokens - swap))
    assert 0 < swap < case.long_tokens
    assert both.token_ids[swap:] == rest.token_ids
    if case.fresh is not None:
        other = await case.fresh(update)
        fresh = await other.generate(case.request(prefix, case.long_tokens - swap))
        await other.close()
        assert both.token_ids[swap:] == fresh.token_ids


async def test_the_two_checkpoints_answer_differently(case: EngineCase) -> None:
    prompt = case.prompt()
    answers = []
    for _ in range(2):
        await commit_next(case, KVPolicy.RECOMPUTE)
        answers.append(await generated(case, case.request(prompt, 48)))
    assert answers[0].token_ids != answers[1].token_ids


async def test_staging_disturbs_nothing(case: EngineCase) -> None:
    prompt = case.prompt()
    version = case.engine.weight_version
    whole = await generated(case, case.request(prompt, case.long_tokens))
    reading = Reading(case, case.request(prompt, case.long_tokens))
    await reading.middle()
    await case.engine.stage(case.next_update())
    assert case.engine.weight_version == version
    staged = await reading.end()
    assert staged.token_ids == whole.token_ids
    assert len(staged.weight_versions) == 1


@pytest.mark.parametrize("kind", ["missing", "empty", "garbage", "cut off", "a file"])
async def test_an_unreadable_checkpoint_is_refused(case: EngineCase, kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "weights"
    if kind == "a file":
        directory.write_bytes(b"")
    elif kind != "missing":
        directory.mkdir()
    if kind == "garbage":
        (directory / "model.safetensors").write_bytes(b"this is no safetensors file at all")
    if kind == "cut off":
        good = check_checkpoint(case.checkpoints[0])[0]
        (directory / "model.safetensors").write_bytes(good.read_bytes()[:-2])
    version = case.engine.weight_version
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    with pytest.raises(CheckpointUnreadable):
        await case.engine.stage(replace(case.next_update(), directory=str(directory)))
    assert (await reading.end()).finish_reason is FinishReason.LENGTH
    assert case.engine.is_usable
    assert case.engine.weight_version == version


async def test_weights_that_are_not_numbers_are_refused_before_anything_pauses(case: EngineCase) -> None:
    if case.poisoned is None:
        pytest.skip("this engine's weights are no numbers")
    version = case.engine.weight_version
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    with pytest.raises(CheckpointUnreadable, match="not finite numbers"):
        await case.engine.stage(replace(case.next_update(), directory=case.poisoned))
    assert not case.engine.is_paused
    assert (await reading.end()).weight_versions[-1].version == version
    await case.engine.pause(PauseMode.KEEP)
    with pytest.raises(Conflict):
        await case.engine.commit(version + 1 if version is not None else 1)
    await case.engine.resume()
    assert case.engine.is_usable
    assert case.engine.weight_version == version


async def test_a_commit_needs_a_pause_and_its_own_stage(case: EngineCase) -> None:
    before = case.engine.weight_version
    update = case.next_update()
    await case.engine.stage(update)
    with pytest.raises(Conflict):
        await case.engine.commit(update.version)
    await case.engine.pause(PauseMode.KEEP)
    with pytest.raises(Conflict):
        await case.engine.commit(update.version + 1_000_000)
    assert case.engine.weight_version == before
    assert case.engine.is_usable
    await case.engine.commit(update.version)
    assert case.engine.weight_version == update.version
    with pytest.raises(Conflict):
        await case.engine.commit(update.version)  # the staged weights are consumed
    await case.engine.resume()
    assert (await generated(case, case.request(case.prompt(), 4))).weight_versions[0].version == update.version


async def test_stage_and_commit_report_what_they_did(case: EngineCase) -> None:
    update = case.next_update()
    staged = await case.engine.stage(update)
    assert staged.transport == "directory"
    assert staged.staging_device is not StagingDevice.NOWHERE
    assert staged.num_bytes > 0
    await case.engine.pause(PauseMode.KEEP)
    committed = await case.engine.commit(update.version)
    assert committed.num_verified > 0
    assert min(staged.transfer_ms, committed.swap_ms, committed.verify_ms, committed.transfer_ms) >= 0.0


async def test_a_second_stage_takes_the_place_of_the_first_even_if_it_fails(
    case: EngineCase, tmp_path: Path
) -> None:
    before = case.engine.weight_version
    first, second, third = case.next_update(), case.next_update(), case.next_update()
    await case.engine.stage(first)
    await case.engine.stage(second)
    await case.engine.pause(PauseMode.KEEP)
    with pytest.raises(Conflict):
        await case.engine.commit(first.version)
    with pytest.raises(CheckpointUnreadable):
        await case.engine.stage(replace(third, directory=str(tmp_path / "missing")))
    for update in (second, third):
        with pytest.raises(Conflict):
            await case.engine.commit(update.version)
    assert case.engine.weight_version == before
    assert case.engine.is_usable


async def test_an_offer_disturbs_nothing(case: EngineCase) -> None:
    prompt = case.prompt()
    whole = await generated(case, case.request(prompt, case.long_tokens))
    reading = Reading(case, case.request(prompt, case.long_tokens))
    await reading.middle()
    offer = await case.engine.offer()
    if offer is not None:
        assert isinstance(offer, PushSource)
        assert offer.addresses
        assert offer.token
    assert (await reading.end()).token_ids == whole.token_ids
    assert (await commit_next(case, KVPolicy.KEEP)).version == case.engine.weight_version


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_failed_commit_makes_unusable_until_a_good_one(case: EngineCase, resumes: bool) -> None:
    if case.failing_checkpoint is None:
        pytest.skip("this engine has no checkpoint that passes stage and fails commit")
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    update = replace(case.next_update(), directory=case.failing_checkpoint())
    await case.engine.stage(update)
    if case.spoil is not None and update.directory is not None:
        case.spoil(update.directory)
    await case.engine.pause(PauseMode.KEEP)
    with pytest.raises(WeightUpdateFailed):
        await case.engine.commit(update.version, resumes=resumes)
    assert (case.engine.is_usable, case.engine.is_paused) == (False, True)
    with pytest.raises(EngineUnusable):
        await case.engine.generate(case.request(case.prompt(), 4))
    good = await commit_next(case, KVPolicy.RECOMPUTE)
    assert case.engine.is_usable
    # The request in flight failed, or continued under the good weights; it saw no half-written weights.
    (outcome,) = await asyncio.gather(reading.end(), return_exceptions=True)
    if isinstance(outcome, Generation):
        assert update.version not in {span.version for span in outcome.weight_versions}
    else:
        assert isinstance(outcome, EngineError)
        assert outcome.retryable
    after = await generated(case, case.request(case.prompt(), 4))
    assert after.weight_versions[0].version == good.version


async def test_many_requests_across_an_update_are_all_whole(case: EngineCase) -> None:
    num_tokens = min(case.long_tokens, 128)
    before = case.engine.weight_version
    marker = Reading(case, case.request(case.prompt(), case.long_tokens))
    requests = [case.request(case.prompt(), num_tokens, temperature=1.0, seed=seed) for seed in range(64)]
    calls = [asyncio.create_task(generated(case, request)) for request in requests]
    await marker.middle()
    await until(lambda: case.engine.load().num_running > 8)
    update = await commit_next(case, KVPolicy.RECOMPUTE)
    generations = await asyncio.gather(*calls)
    await marker.end()
    for generation in generations:
        assert len(generation.token_ids) == num_tokens
        assert {span.version for span in generation.weight_versions} <= {before, update.version}
        assert all(a.version < b.version for a, b in pairwise(generation.weight_versions))
    assert any(len(generation.weight_versions) == 2 for generation in generations)


@pytest.mark.parametrize("kv_policy", [KVPolicy.KEEP, KVPolicy.RECOMPUTE])
async def test_a_push_with_every_slot_taken_succeeds_and_every_request_continues(
    case: EngineCase, kv_policy: KVPolicy
) -> None:
    num_slots = min(case.engine.info.max_running, 64)
    readings = [Reading(case, case.request(case.prompt(num_tokens=160), 800)) for _ in range(num_slots)]
    for reading in readings:
        await reading.middle(1)
    update = await commit_next(case, kv_policy)  # the canary check needs one more slot
    # Under RECOMPUTE they need more than one step of prefill: one of them is prefilled in two chunks.
    await until(
        lambda: all(reading.deltas[-1].weight_versions[-1].version == update.version for reading in readings)
    )
    assert not any(reading.is_done for reading in readings), "a request waited for the end of another"
    for reading in readings:
        await reading.leave()


# Sleep and wake

WEIGHTS = frozenset({MemoryTag.WEIGHTS})
KV_CACHE = frozenset({MemoryTag.KV_CACHE})


@pytest.fixture
def sleeper(case: EngineCase) -> EngineCase:
    if not case.engine.info.can_sleep:
        pytest.skip("this engine cannot sleep")
    return case


async def test_an_engine_that_cannot_sleep_says_so(case: EngineCase) -> None:
    if case.engine.info.can_sleep:
        pytest.skip("this engine can sleep")
    with pytest.raises(InvalidRequest):
        await case.engine.sleep(1)
    assert case.engine.asleep == frozenset()
    assert not case.engine.is_paused


@pytest.mark.parametrize("tags", [(ALL_MEMORY,), (WEIGHTS, KV_CACHE), (KV_CACHE, WEIGHTS)])
async def test_a_sleep_loses_no_request_and_changes_no_token(
    sleeper: EngineCase, tags: tuple[frozenset[MemoryTag], ...]
) -> None:
    case, engine = sleeper, sleeper.engine
    prompt = case.prompt()
    whole = await generated(case, case.request(prompt, case.long_tokens))
    reading = Reading(case, case.request(prompt, case.long_tokens))
    await reading.middle()
    for _ in range(2):  # idempotent
        await engine.sleep(1)
        assert engine.asleep == ALL_MEMORY
        assert engine.is_paused
    late = asyncio.create_task(generated(case, case.request(prompt, case.long_tokens)))
    await asyncio.sleep(0.1)  # tokens sampled before may still be in transit to the reader
    num_before = reading.num_tokens
    await asyncio.sleep(0.1)
    with pytest.raises(Conflict):
        await engine.resume()
    asleep = ALL_MEMORY
    for some in tags:
        await engine.wake(some)
        asleep -= some
        assert engine.asleep == asleep
        await engine.wake(some)
    assert engine.is_paused
    assert (reading.num_tokens, late.done()) == (num_before, False)
    await engine.resume()
    both = await reading.end()
    assert both.token_ids == whole.token_ids
    assert len(both.weight_versions) == 1
    assert (await late).token_ids == whole.token_ids


async def test_abort_works_while_asleep(sleeper: EngineCase) -> None:
    prompt = sleeper.prompt()
    whole = await generated(sleeper, sleeper.request(prompt, sleeper.long_tokens))
    reading = Reading(sleeper, sleeper.request(prompt, sleeper.long_tokens))
    await reading.middle()
    await sleeper.engine.sleep(1)
    await sleeper.engine.abort(reading.request.request_id)
    partial = await reading.end()
    assert partial.finish_reason is FinishReason.ABORT
    assert partial.token_ids == whole.token_ids[: len(partial.token_ids)]


async def test_a_sleep_of_an_engine_that_is_paused_already_ends_paused(sleeper: EngineCase) -> None:
    await sleeper.engine.pause(PauseMode.KEEP)
    await sleeper.engine.sleep(1)
    await sleeper.engine.pause(PauseMode.KEEP)
    assert sleeper.engine.asleep == ALL_MEMORY
    await sleeper.engine.wake()
    assert sleeper.engine.is_paused
    await sleeper.engine.resume()
    assert len((await generated(sleeper, sleeper.request(sleeper.prompt(), 8))).token_ids) == 8


async def test_weights_are_staged_and_committed_when_their_memory_is_awake(sleeper: EngineCase) -> None:
    engine, update = sleeper.engine, sleeper.next_update()
    await engine.sleep(1)
    with pytest.raises(Conflict):
        await engine.stage(update)
    await engine.wake(WEIGHTS)
    await engine.stage(update)
    await engine.commit(update.version)
    assert engine.weight_version == update.version
    await engine.wake(KV_CACHE)
    await engine.resume()
    after = await generated(sleeper, sleeper.request(sleeper.prompt(), 8))
    assert after.weight_versions[0].version == update.version


async def test_discarded_weights_are_unusable_until_a_commit_and_no_request_is_lost(sleeper: EngineCase) -> None:
    case, engine = sleeper, sleeper.engine
    old_version = engine.weight_version
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    await engine.sleep(2)
    assert not engine.is_usable
    assert engine.weight_version is None
    with pytest.raises(EngineUnusable):
        await engine.generate(case.request(case.prompt(), 4))
    update = case.next_update()
    await engine.wake(WEIGHTS)
    assert not engine.is_usable
    with pytest.raises(Conflict):
        await engine.wake(KV_CACHE)  # no weights exist that could fill the cache
    await engine.stage(update)
    await engine.commit(update.version)
    await engine.wake(KV_CACHE)
    assert engine.is_usable
    await engine.resume()
    both = await reading.end()
    assert len(both.token_ids) == case.long_tokens
    assert [span.version for span in both.weight_versions] == [old_version, update.version]


async def test_an_engine_with_discarded_weights_sleeps_again(sleeper: EngineCase) -> None:
    case, engine = sleeper, sleeper.engine
    reading = Reading(case, case.request(case.prompt(), case.long_tokens))
    await reading.middle()
    await engine.sleep(2)
    await engine.wake(WEIGHTS)
    await engine.sleep(1)
    assert engine.asleep == ALL_MEMORY
    with pytest.raises(EngineUnusable):
        await reading.end()
    update = case.next_update()
    await engine.wake(WEIGHTS)
    await engine.stage(update)
    await engine.commit(update.version)
    await engine.wake(KV_CACHE)
    await engine.resume()
    after = await generated(case, case.request(case.prompt(), 8))
    assert after.weight_versions[0].version == update.version


# KV reuse and its events


async def test_a_repeated_prompt_reuses_kv(case: EngineCase) -> None:
    prompt = case.prompt()
    first = await generated(case, case.request(prompt, 4))
    second = await generated(case, case.request(prompt, 4))
    assert first.cached_tokens == 0
    assert 0 < second.cached_tokens < len(prompt)


@pytest.mark.parametrize("kv_policy", list(KVPolicy))
async def test_an_update_ends_reuse(case: EngineCase, kv_policy: KVPolicy) -> None:
    prompt = case.prompt()
    await generated(case, case.request(prompt, 4))
    await commit_next(case, kv_policy)
    assert (await generated(case, case.request(prompt, 4))).cached_tokens == 0
    assert (await generated(case, case.request(prompt, 4))).cached_tokens > 0


async def test_a_trajectory_may_ask_for_its_older_kv(case: EngineCase) -> None:
    prompt = case.prompt()
    version = case.engine.weight_version
    await generated(case, case.request(prompt, 4))
    await commit_next(case, KVPolicy.KEEP)
    older = await generated(case, replace(case.request(prompt, 4), kv_version=version))
    newer = await generated(case, case.request(prompt, 4))
    assert older.cached_tokens > 0
    assert newer.cached_tokens == 0


@pytest.mark.parametrize("kv_policy", [KVPolicy.FRESH, KVPolicy.RECOMPUTE])
async def test_no_trajectory_gets_kv_that_an_update_has_ended(case: EngineCase, kv_policy: KVPolicy) -> None:
    prompt = case.prompt()
    version = case.engine.weight_version
    await generated(case, case.request(prompt, 4))
    await commit_next(case, kv_policy)
    asking = replace(case.request(prompt, 4), kv_version=version)
    assert (await generated(case, asking)).cached_tokens == 0
    await commit_next(case, KVPolicy.KEEP)  # it ends no request
    again = replace(case.request(prompt, 4), kv_version=version)
    assert (await generated(case, again)).cached_tokens > 0


async def test_load_shows_the_prompts_that_wait_for_a_token(case: EngineCase) -> None:
    prompts = [case.prompt() for _ in range(3)]
    await case.engine.pause(PauseMode.KEEP)
    readings = [Reading(case, case.request(prompt, case.long_tokens)) for prompt in prompts]
    await until(lambda: case.engine.load().num_prefill_tokens == sum(map(len, prompts)))
    await case.engine.resume()
    for reading in readings:
        await reading.middle()
    assert case.engine.load().num_prefill_tokens == 0
    for reading in readings:
        await reading.end()


async def test_load_counts_preemptions(case: EngineCase) -> None:
    readings = [Reading(case, case.request(case.prompt(), case.long_tokens)) for _ in range(3)]
    for reading in readings:
        await reading.middle()
    num_before = case.engine.load().num_preemptions
    await case.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
    await case.engine.resume()
    for reading in readings:
        await reading.end()
    assert case.engine.load().num_preemptions == num_before + 3


async def test_load_shows_requests_and_capacity(case: EngineCase) -> None:
    readings = [Reading(case, case.request(case.prompt(), case.long_tokens)) for _ in range(3)]
    for reading in readings:
        await reading.middle()
    await until(lambda: case.engine.load().num_running == 3)
    load = case.engine.load()
    assert load.weight_version == case.engine.weight_version
    assert load.kv_capacity_tokens == case.engine.info.kv_capacity_tokens
    for reading in readings:
        await reading.end()
