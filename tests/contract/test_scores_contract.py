"""The engine contract for scores: logprobs of a prompt's own tokens, under one version."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agentloop.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter, WeightVersionNotServed
from agentloop.types import FinishReason, GenerateRequest, Generation, KVPolicy, PauseMode
from agentloop.values.capabilities import Feature
from agentloop.values.sampling import LogprobsMode, VersionDemand
from tests.contract.cases import EngineCase
from tests.contract.driving import commit_next, generated
from tests.contract.reference import log_softmax

CLOSE = 0.02


def scored(case: EngineCase, ids: tuple[int, ...], start: int, **sampling: object) -> GenerateRequest:
    return case.request(ids, 1, score_from=start, **sampling)


async def score(case: EngineCase, ids: tuple[int, ...], start: int, **sampling: object) -> Generation:
    return await generated(case, scored(case, ids, start, **sampling))


@pytest.fixture
def scorer(case: EngineCase) -> EngineCase:
    if Feature.SCORES not in case.engine.info.features:
        pytest.skip("it gives no scores")
    return case


async def test_an_engine_without_scores_says_so(case: EngineCase) -> None:
    if Feature.SCORES in case.engine.info.features:
        pytest.skip("it gives scores")
    with pytest.raises(UnsupportedParameter) as caught:
        await case.engine.generate(scored(case, case.prompt(), 1))
    assert caught.value.param == "score_from"


async def test_a_score_is_the_raw_logprob_of_what_was_sampled(scorer: EngineCase) -> None:
    case, prompt = scorer, scorer.prompt()
    whole = await generated(case, case.request(prompt, 24, temperature=1.0, seed=5))
    ids = prompt + whole.token_ids
    found = await score(case, ids, len(prompt), num_top_logprobs=3)
    assert (found.token_ids, found.finish_reason) == (whole.token_ids, FinishReason.LENGTH)
    assert found.logprobs_mode is LogprobsMode.RAW
    assert found.logprobs == pytest.approx(whole.raw_logprobs, abs=CLOSE)
    [span] = found.weight_versions
    assert (span.version, span.start, span.end) == (case.engine.weight_version, 0, 24)
    for token_id, logprob, row in zip(found.token_ids, found.logprobs, found.top_logprobs, strict=True):
        assert len(row) == 3
        assert dict(row).get(token_id, logprob) == logprob <= row[0][1]
    later = await score(case, ids, len(ids) - 5)
    assert later.token_ids == ids[-5:]
    assert later.logprobs == pytest.approx(found.logprobs[-5:], abs=1e-4)


async def test_scores_are_those_of_an_independent_model(scorer: EngineCase) -> None:
    """Ids that sampling would not produce, scored concurrently, in prompts longer than a window, with as many
    alternatives as the engine returns."""
    case, num_top = scorer, scorer.engine.info.max_logprobs
    if case.logits_of is None:
        pytest.skip("no independent model")
    prompts = [case.prompt(num_tokens=size) for size in (2, 255, 256, 257, 258, 700)]
    answers = await asyncio.gather(*(score(case, ids, 1, num_top_logprobs=num_top) for ids in prompts))
    prompts += [prompts[-1][:600] + case.prompt(num_tokens=size) for size in (8, 90)]  # prompts with cached KV
    answers += [await score(case, ids, 600, num_top_logprobs=num_top) for ids in prompts[-2:]]
    assert case.engine.info.name != "vllm" or answers[-1].cached_tokens > 500
    answers += [await score(case, prompts[-1], 1, num_top_logprobs=num_top)]  # scores a cached prompt too
    for ids, answer in zip([*prompts, prompts[-1]], answers, strict=True):
        start = len(ids) - len(answer.token_ids)
        expected = np.array([log_softmax(row) for row in case.logits_of(case.checkpoint, ids)[start - 1 : -1]])
        given = expected[np.arange(len(ids) - start), ids[start:]]
        assert answer.token_ids == ids[start:]
        assert np.abs(np.array(answer.logprobs) - given).max() < CLOSE
        tops = np.array(answer.top_logprobs)
        assert tops.shape == (len(answer.token_ids), num_top, 2)
        assert np.abs(tops[..., 1] - -np.sort(-expected, axis=1)[:, :num_top]).max() < CLOSE
        of_ids = np.take_along_axis(expected, tops[..., 0].astype(int), axis=1)
        assert np.abs(tops[..., 1] - of_ids).max() < CLOSE
        assert all(len({token_id for token_id, _ in row}) == num_top for row in answer.top_logprobs)


@pytest.mark.parametrize("kv_policy", list(KVPolicy))
async def test_scores_across_an_update_are_each_of_one_version(scorer: EngineCase, kv_policy: KVPolicy) -> None:
    case = scorer
    before = (await commit_next(case, KVPolicy.RECOMPUTE)).version
    prompts = [case.prompt(num_tokens=600) for _ in range(24)]
    replies = await asyncio.gather(*(generated(case, case.request(ids, 24)) for ids in prompts))
    prompts = [ids + reply.token_ids for ids, reply in zip(prompts, replies, strict=True)]
    running = [asyncio.create_task(score(case, ids, 1)) for ids in prompts]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    update = await commit_next(case, kv_policy)
    found = await asyncio.gather(*running)
    versions = [answer.weight_versions[0].version for answer in found]
    assert set(versions) <= {before, update.version}
    again = await asyncio.gather(*(score(case, ids, 1) for ids in prompts))
    for version, answer, fresh in zip(versions, found, again, strict=True):
        assert len(answer.weight_versions) == 1
        apart = np.abs(np.array(answer.logprobs) - fresh.logprobs).max()
        assert (apart < 1e-3) == (version == update.version)


async def test_a_score_is_of_a_version_that_it_accepts(scorer: EngineCase) -> None:
    case, version = scorer, scorer.engine.weight_version
    assert version is not None
    asked = scored(case, case.prompt(), 1, weight_version=VersionDemand(exact_version=version))
    assert (await generated(case, asked)).weight_versions[0].version == version
    with pytest.raises(WeightVersionNotServed):
        await score(case, case.prompt(), 1, weight_version=VersionDemand(min_version=version + 1))


async def test_an_aborted_score_has_nothing(scorer: EngineCase) -> None:
    case, asked = scorer, scored(scorer, scorer.prompt(), 1)
    await case.engine.pause(PauseMode.KEEP)
    waiting = asyncio.create_task(case.engine.generate(asked))
    await asyncio.sleep(0.05)
    await case.engine.abort(asked.request_id)
    answer = await waiting
    assert (answer.token_ids, answer.finish_reason) == ((), FinishReason.ABORT)
    await case.engine.resume()


async def test_bad_scores_are_refused(scorer: EngineCase) -> None:
    case, info = scorer, scorer.engine.info
    ids = case.prompt()
    for start in (0, -1, len(ids), len(ids) + 1):
        with pytest.raises(InvalidRequest) as caught:
            await case.engine.generate(scored(case, ids, start))
        assert caught.value.param == "start"
    for bad, param in (((), "token_ids"), ((1, info.vocab_size), "token_ids"), ((1, -1), "token_ids")):
        with pytest.raises(InvalidRequest) as caught:
            await case.engine.generate(scored(case, bad, 1))
        assert caught.value.param == param
    with pytest.raises(InvalidRequest) as caught:
        await case.engine.generate(scored(case, ids, 1, num_top_logprobs=info.max_logprobs + 1))
    assert caught.value.param == "num_top_logprobs"
    with pytest.raises(ContextLengthExceeded):
        await case.engine.generate(scored(case, case.prompt(num_tokens=info.max_context_tokens), 1))
    longest = case.prompt(num_tokens=info.max_context_tokens - 1)
    assert len((await score(case, longest, 1)).token_ids) == len(longest) - 1
