"""The engine contract for adapters by name: which adapter a call uses, and the effects and errors of a push.

The engine has slots for two names. Every test unloads its adapters and ends its calls.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentloop.engine.interface import Adapter, WeightUpdate
from agentloop.errors import (
    AdapterInUse,
    AdaptersFull,
    CheckpointUnreadable,
    DeadlineExceeded,
    ModelNotFound,
    WeightVersionNotServed,
)
from agentloop.types import FinishReason, GenerateRequest, Generation, PauseMode, VersionDemand, WeightVersionSpan
from tests.contract.cases import EngineCase
from tests.contract.driving import TIMEOUT_S, Reading, generated, is_idle, until

NAMES = ("one", "two")
CLOSE = 0.02  # between a sampled token's logprob and its score
SAME, DIFFERENT = 0.005, 0.03  # mean difference of logprobs, within one model and from another
VERSIONS: Iterator[int] = itertools.count(1)


@pytest.fixture
async def adapted(adapter_case: EngineCase) -> AsyncIterator[EngineCase]:
    yield adapter_case
    await adapter_case.engine.resume()
    await until(lambda: is_idle(adapter_case.engine))
    for name in NAMES:
        await adapter_case.engine.unload_adapter(name)


def under(
    case: EngineCase, name: str, prompt: tuple[int, ...], num_tokens: int = 24, **sampling: object
) -> GenerateRequest:
    return replace(case.request(prompt, num_tokens, **sampling), adapter=name)


async def push(case: EngineCase, name: str, seed: int, version: int | None = None) -> Adapter:
    adapter = Adapter(name, next(VERSIONS) if version is None else version, case.adapter(seed))
    await case.engine.load_adapter(adapter)
    return adapter


def is_alike(answer: Generation, other: Generation) -> bool:
    """Return True if an answer begins like another one. Both must clearly be from one model, or clearly not."""
    num_tokens = len(answer.token_ids)
    if answer.token_ids != other.token_ids[:num_tokens]:
        return False
    difference = np.abs(np.array(answer.logprobs) - np.array(other.logprobs[:num_tokens])).mean()
    assert not SAME <= difference <= DIFFERENT
    return bool(difference < SAME)


def versions_of(generation: Generation) -> list[int]:
    return [span.version for span in generation.weight_versions]


async def test_calls_of_two_adapters_and_the_base_at_once_have_what_each_has_alone(adapted: EngineCase) -> None:
    """All calls have one prompt: KV left by one of them would change another's tokens."""
    one, two = [await push(adapted, name, seed) for seed, name in enumerate(NAMES, start=1)]
    versions = {"": adapted.engine.weight_version, "one": one.version, "two": two.version}
    prompt = adapted.prompt()
    alone = {name: await generated(adapted, under(adapted, name, prompt)) for name in versions}
    assert [answer.cached_tokens for answer in alone.values()] == [0, 0, 0]
    assert not any(is_alike(answer, other) for answer, other in itertools.combinations(alone.values(), 2))
    names = [name for name in versions for _ in range(4)]
    answers = await asyncio.gather(*(generated(adapted, under(adapted, name, prompt)) for name in names))
    for name, answer in zip(names, answers, strict=True):
        assert is_alike(answer, alone[name])
        assert answer.weight_versions == (WeightVersionSpan(versions[name] or 0, 0, 24),)
        assert answer.cached_tokens > 0


async def test_logprobs_are_those_of_an_independent_model(adapted: EngineCase) -> None:
    if adapted.adapted_logprobs is None:
        pytest.skip("no independent model")
    folders = [(await push(adapted, name, seed)).directory for seed, name in enumerate(NAMES, start=1)]
    prompt = adapted.prompt()
    for name, folder in (("", None), *zip(NAMES, folders, strict=True)):
        answer = await generated(adapted, under(adapted, name, prompt, temperature=1.0, seed=3))
        for other in (None, *folders):
            expected = adapted.adapted_logprobs(other, prompt, answer.token_ids)
            difference = float(np.abs(expected - np.array(answer.logprobs)).mean())
            assert difference < SAME if other == folder else difference > DIFFERENT


@pytest.mark.parametrize("num_streams", [1, 16])  # in pieces from the engine, and polled
async def test_calls_in_flight_end_under_the_version_they_began_with(adapted: EngineCase, num_streams: int) -> None:
    engine, num_tokens = adapted.engine, adapted.long_tokens
    old = await push(adapted, "one", seed=1)
    prompts = [adapted.prompt() for _ in range(num_streams)]
    before = [await generated(adapted, under(adapted, "one", prompt, num_tokens)) for prompt in prompts[:2]]
    base = await generated(adapted, under(adapted, "", prompts[0], num_tokens))
    readings = [Reading(adapted, under(adapted, "one", prompt, num_tokens)) for prompt in prompts]
    of_base = Reading(adapted, under(adapted, "", prompts[0], num_tokens))
    for reading in (*readings, of_base):
        await reading.middle()
    new = await push(adapted, "one", seed=2)
    assert not any(reading.is_done for reading in readings), "raise the case's long_tokens"
    after = await asyncio.gather(*(generated(adapted, under(adapted, "one", prompt)) for prompt in prompts))
    for reading in readings:
        whole = await reading.end()
        assert whole.weight_versions == (WeightVersionSpan(old.version, 0, num_tokens),)
        assert {span.version for delta in reading.deltas for span in delta.weight_versions} == {old.version}
    assert is_alike(await of_base.end(), base)
    await engine.unload_adapter("one")
    await engine.load_adapter(new)  # it is the only load now
    for prompt, reading, old_answer, answer in zip(prompts, readings, before, after, strict=False):
        assert is_alike(await reading.end(), old_answer)
        again = await generated(adapted, under(adapted, "one", prompt))
        assert is_alike(again, answer)
        assert not is_alike(answer, old_answer)
        assert versions_of(again) == versions_of(answer) == [new.version]
        assert again.cached_tokens == 0


async def test_a_call_that_a_pause_holds_has_the_version_of_its_beginning(adapted: EngineCase) -> None:
    await push(adapted, "one", seed=1)
    await adapted.engine.pause(PauseMode.KEEP)
    held = asyncio.create_task(generated(adapted, under(adapted, "one", adapted.prompt())))
    lost = asyncio.create_task(generated(adapted, under(adapted, "two", adapted.prompt())))
    await until(lambda: adapted.engine.load().num_waiting == 2)
    new = await push(adapted, "one", seed=2)
    await adapted.engine.resume()
    assert versions_of(await held) == [new.version]
    with pytest.raises(ModelNotFound):
        await lost


async def test_a_push_is_idempotent_for_the_version_that_is_served(adapted: EngineCase) -> None:
    one = await push(adapted, "one", seed=1)
    reports = [await adapted.engine.load_adapter(replace(one, directory="nowhere")) for _ in range(6)]
    assert {report.num_bytes for report in reports} == {0}
    assert versions_of(await generated(adapted, under(adapted, "one", adapted.prompt()))) == [one.version]


@pytest.mark.parametrize("how", ["its end", "abort", "leave", "deadline"])
async def test_an_adapter_in_use_is_not_unloaded_until_its_calls_ended(adapted: EngineCase, how: str) -> None:
    engine = adapted.engine
    await push(adapted, "one", seed=1)
    num_tokens = 800 if how == "deadline" else adapted.long_tokens
    request = under(adapted, "one", adapted.prompt(), num_tokens)
    reading = Reading(adapted, replace(request, timeout_s=0.25 if how == "deadline" else TIMEOUT_S))
    await reading.middle(1)
    with pytest.raises(AdapterInUse):
        await engine.unload_adapter("one")
    match how:
        case "abort":
            await engine.abort(request.request_id)
            assert (await reading.end()).finish_reason is FinishReason.ABORT
        case "leave":
            await reading.leave()
        case "deadline":
            with pytest.raises(DeadlineExceeded):
                await reading.end()
        case _:
            await push(adapted, "one", seed=2)  # the call uses an older version
            with pytest.raises(AdapterInUse):
                await engine.unload_adapter("one")
            await reading.end()
    await engine.unload_adapter("one")
    await engine.unload_adapter("one")
    with pytest.raises(ModelNotFound) as caught:
        await engine.generate(under(adapted, "one", adapted.prompt()))
    assert caught.value.param == "model"


async def test_places_are_full_of_names_or_of_versions_that_calls_pin(adapted: EngineCase) -> None:
    engine = adapted.engine
    assert engine.info.max_loras == 2
    readings = []
    for seed in (1, 2, 3):
        await push(adapted, "one", seed)
        readings.append(Reading(adapted, under(adapted, "one", adapted.prompt(), adapted.long_tokens)))
        await readings[-1].middle(1)
    await push(adapted, "two", seed=1)
    with pytest.raises(AdaptersFull, match="at most 2 adapters"):
        await push(adapted, "three", seed=1)
    with pytest.raises(AdaptersFull, match="in flight"):
        await push(adapted, "one", seed=4)
    wholes = [await reading.end() for reading in readings]
    assert len({version for whole in wholes for version in versions_of(whole)}) == 3
    last = await push(adapted, "one", seed=4)
    assert versions_of(await generated(adapted, under(adapted, "one", adapted.prompt()))) == [last.version]


async def test_an_adapter_that_does_not_fit_is_refused_and_the_served_one_stays(adapted: EngineCase) -> None:
    one, prompt = await push(adapted, "one", seed=1), adapted.prompt()
    before = await generated(adapted, under(adapted, "one", prompt))
    for what, folder in adapted.unfit_adapters.items():
        with pytest.raises(CheckpointUnreadable, match=what):
            await adapted.engine.load_adapter(Adapter("one", next(VERSIONS), folder))
        with pytest.raises(CheckpointUnreadable):
            await adapted.engine.load_adapter(Adapter("two", next(VERSIONS), folder))
    after = await generated(adapted, under(adapted, "one", prompt))
    assert is_alike(after, before)
    assert versions_of(after) == [one.version]
    with pytest.raises(ModelNotFound):
        await adapted.engine.generate(under(adapted, "two", prompt))


async def test_the_folder_of_a_push_may_go_at_once(adapted: EngineCase, tmp_path: Path) -> None:
    folders = [str(shutil.copytree(adapted.adapter(seed), tmp_path / str(seed))) for seed in (1, 2)]
    prompt, found = adapted.prompt(), []
    for name, folder in zip(NAMES, folders, strict=True):
        await adapted.engine.load_adapter(Adapter(name, next(VERSIONS), folder))
        shutil.rmtree(folder)
        found.append(await generated(adapted, under(adapted, name, prompt)))
    for _ in range(8):  # older versions are loaded and unloaded next to it
        await push(adapted, "two", seed=3)
    assert is_alike(await generated(adapted, under(adapted, "one", prompt)), found[0])


async def test_a_score_is_under_the_adapter(adapted: EngineCase) -> None:
    one, prompt = await push(adapted, "one", seed=1), adapted.prompt()
    whole = await generated(adapted, under(adapted, "one", prompt, temperature=1.0, seed=5))
    ids = prompt + whole.token_ids
    found = await generated(adapted, under(adapted, "one", ids, 1, score_from=len(prompt)))
    assert found.logprobs == pytest.approx(whole.raw_logprobs, abs=CLOSE)
    assert versions_of(found) == [one.version]
    of_base = await generated(adapted, under(adapted, "", ids, 1, score_from=len(prompt)))
    assert of_base.logprobs != pytest.approx(whole.raw_logprobs, abs=CLOSE)


async def test_a_demand_is_for_the_adapters_version(adapted: EngineCase) -> None:
    one = await push(adapted, "one", seed=1, version=1 << 40)
    accepted = under(adapted, "one", adapted.prompt(), weight_version=VersionDemand(min_version=1 << 40))
    assert versions_of(await generated(adapted, accepted)) == [one.version]
    with pytest.raises(WeightVersionNotServed) as caught:
        await adapted.engine.generate(
            under(adapted, "one", adapted.prompt(), weight_version=VersionDemand(exact_version=7))
        )
    assert caught.value.details == {"served": [one.version]}


async def test_the_base_weights_stay(adapted: EngineCase) -> None:
    version, folder = adapted.engine.weight_version, adapted.adapter(1)
    for update in (WeightUpdate(1000, adapted.checkpoints[0]), WeightUpdate(1000, adapter=folder)):
        with pytest.raises(CheckpointUnreadable):
            await adapted.engine.stage(update)
    assert adapted.engine.weight_version == version


async def test_an_engine_without_names_says_so(case: EngineCase) -> None:
    with pytest.raises(CheckpointUnreadable):
        await case.engine.load_adapter(Adapter("one", 1, case.checkpoints[0]))
    await case.engine.unload_adapter("one")
    with pytest.raises(ModelNotFound):
        await case.engine.generate(under(case, "one", case.prompt()))
