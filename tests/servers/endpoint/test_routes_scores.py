"""Scores of given tokens over the real app: the numbers in the client's and every other dialect are the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from agentloop.chat.call import ChatCall
from agentloop.client.client import RolloutClient
from agentloop.engine.interface import WeightUpdate
from agentloop.errors import ContextLengthExceeded, InvalidRequest, NotFound, WeightVersionNotServed
from agentloop.generation.leased_engine import CallLeases
from agentloop.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    KVPolicy,
    Load,
    PauseMode,
    SamplingParams,
    TokenScores,
    VersionDemand,
)
from agentloop.values import codec
from agentloop_servers.endpoint.token_calls import TokenCallLimits, TokenCalls
from tests.contract.simulated_case import write_checkpoint
from tests.support.endpoint.chat_service import RENDERER, SPEC, ChatService, chat_service

IDS = (5, 6, 7, 8, 9, 10)
NEVER = {str(RENDERER.stop_token_ids[0]): -100}


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
async def client(service: ChatService) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(service.url) as client:
        yield client


async def posted(service: ChatService, path: str, body: dict[str, Any]) -> Any:
    status, answer, _ = await service.call("POST", path, json=body)
    assert status == 200, answer
    return answer


async def sampled_ids(client: RolloutClient) -> tuple[int, ...]:
    """Return ids of which the policy might have sampled the last."""
    return IDS + (await client.generate(IDS, max_tokens=8, stop_token_ids=[])).token_ids


async def test_scores_of_a_batch(client: RolloutClient) -> None:
    reply = await client.generate(IDS, max_tokens=8)
    ids = IDS + reply.token_ids
    one, whole, short = await client.score([ids, ids, (5, 6)], start=[len(IDS), 1, 1], top_k=2)
    assert one == TokenScores(reply.token_ids, reply.logprobs, 0, one.top_logprobs)
    assert whole.token_ids == ids[1:]
    assert whole.logprobs[len(IDS) - 1 :] == one.logprobs
    assert [len(row) for row in whole.top_logprobs] == [2] * len(ids[1:])
    assert (short.token_ids, short.weight_version) == ((6,), 0)
    assert await client.score([]) == []
    many = await client.score([(5, 6 + number % 3) for number in range(600)])
    assert [found.token_ids for found in many] == [(6 + number % 3,) for number in range(600)]


async def test_an_echo_gives_the_same_scores(service: ChatService, client: RolloutClient) -> None:
    ids = await sampled_ids(client)
    [expected] = await client.score([ids], top_k=2)
    texts = [RENDERER.token_bytes(one).decode(errors="replace") for one in ids]
    text = {"model": "default", "prompt": [*ids], "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = await posted(service, "/v1/completions", text)
    [choice] = answer["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, *expected.logprobs]
    assert choice["logprobs"]["tokens"] == texts
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["text"] == RENDERER.decode(ids)
    assert (answer["usage"]["completion_tokens"], answer["weight_version_end"]) == (0, 0)
    assert service.sessions.num_open == 0


async def test_an_echo_of_one_token_has_nothing_to_score(service: ChatService) -> None:
    text = {"model": "default", "prompt": [5], "max_tokens": 0, "echo": True, "logprobs": 0}
    [choice] = (await posted(service, "/v1/completions", text))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]


async def test_a_score_is_in_no_sessions_record(service: ChatService) -> None:
    _, session, _ = await service.call("POST", "/sessions", json={})
    by_key = {"authorization": f"Bearer {session['api_key']}"}
    text = {"model": "default", "prompt": [5, 6], "max_tokens": 0, "echo": True, "logprobs": 0}
    for path, body in (
        ("/v1/completions", text),
        ("/score", {"prompts": [{"token_ids": [5, 6]}]}),
    ):
        status, _, _ = await service.call("POST", path, json=body, headers=by_key)
        assert status in (400, 403), path


async def test_typed_errors(client: RolloutClient) -> None:
    for batch, start in (([()], 1), ([(5,)], 1), ([IDS], 0), ([IDS], len(IDS)), ([IDS, IDS], [1])):
        with pytest.raises(InvalidRequest):
            await client.score(batch, start=start)
    with pytest.raises(InvalidRequest):
        await client.score([(5, SPEC.vocab_size)])
    with pytest.raises(InvalidRequest):
        await client.score([IDS], top_k=21)
    with pytest.raises(ContextLengthExceeded):
        await client.score([(5,) * SPEC.max_context_tokens])
    with pytest.raises(NotFound):
        await client.score([IDS], model="a judge")


async def test_alternatives_are_bounded_by_the_engines_key(tmp_path: Path) -> None:
    bodies: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("/score", {"prompts": [{"token_ids": [*IDS]}], "top_k": 4}, "top_k"),
        (
            "/inference/v1/generate",
            {"token_ids": [*IDS], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 4}},
            "sampling_params.prompt_logprobs",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [*IDS], "sampling_params": {"max_tokens": 1, "logprobs": 4}},
            "sampling_params.logprobs",
        ),
        ("/generate", {"input_ids": [*IDS], "return_logprob": True, "top_logprobs_num": 4}, "top_logprobs_num"),
    )
    (tmp_path / "three").mkdir()
    (tmp_path / "more").mkdir()
    async with chat_service(tmp_path / "three", spec=replace(SPEC, max_logprobs=3)) as service:
        for path, body, param in bodies:
            status, answer, _ = await service.call("POST", path, json=body)
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert "engine.max_logprobs" in answer["error"]["message"]
    async with chat_service(tmp_path / "more", spec=replace(SPEC, max_logprobs=256)) as service:
        for path, body, _ in bodies:
            await posted(service, path, body)
        async with RolloutClient(service.url) as client:
            [score] = await client.score([IDS], top_k=256)
            assert [len(row) for row in score.top_logprobs] == [4] * 5, "the simulated engine has four alternatives"


async def test_a_long_sequence_is_scored_in_parts(client: RolloutClient, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tuple(range(5, 40))
    whole = await client.score([ids, IDS, ids], start=[1, 2, 30], top_k=2)
    sizes: list[int] = []
    score = TokenCalls.score

    async def counted(calls: TokenCalls, chat_call: ChatCall, *rest: Any, **options: Any) -> Generation:
        sizes.append(len(chat_call.prompt_ids or ()) - (chat_call.sampling.score_from or 0))
        return await score(calls, chat_call, *rest, **options)

    monkeypatch.setattr(TokenCalls, "score", counted)
    monkeypatch.setattr("agentloop.client.client.MAX_SCORES", 24)
    assert await client.score([ids, IDS, ids], start=[1, 2, 30], top_k=2) == whole
    assert sorted(sizes) == [2, 4, 5, 8, 8, 8, 8]


async def test_the_parts_of_a_sequence_have_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update between two parts: all parts are scored again, under the new version."""
    monkeypatch.setattr("agentloop.client.client.MAX_SCORES", 2)
    async with chat_service(tmp_path) as service, RolloutClient(service.url) as client:
        engine, score, num_scored = service.engine, TokenCalls.score, 0

        async def updating(calls: TokenCalls, chat_call: ChatCall, *rest: Any, **options: Any) -> Generation:
            nonlocal num_scored
            num_scored += 1
            if num_scored == 2:
                await engine.stage(WeightUpdate(1, write_checkpoint(tmp_path / "v1")))
                await engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
                await engine.commit(1)
                await engine.resume()
            return await score(calls, chat_call, *rest, **options)

        monkeypatch.setattr(TokenCalls, "score", updating)
        [found] = await client.score([IDS])
        monkeypatch.setattr(TokenCalls, "score", score)
        monkeypatch.setattr("agentloop.client.client.MAX_SCORES", 100)
        assert [found] == await client.score([IDS])
        assert (found.weight_version, num_scored) == (1, 6)


async def test_scores_in_json_and_in_binary_form_are_equal(service: ChatService, client: RolloutClient) -> None:
    [binary] = await client.score([IDS], top_k=3)
    shown = await posted(service, "/score", {"prompts": [{"token_ids": [*IDS]}], "top_k": 3})
    assert codec.from_builtins(shown, list[TokenScores]) == [binary]


async def test_a_score_is_of_the_version_that_is_demanded(tmp_path: Path) -> None:
    async with chat_service(tmp_path) as service, RolloutClient(service.url) as client:
        for demand in (VersionDemand(min_version=1), VersionDemand(exact_version=1)):
            with pytest.raises(WeightVersionNotServed):
                await client.score([IDS], weight_version=demand)
        ids = await sampled_ids(client)
        [old] = await client.score([ids], start=len(IDS))
        engine, directory = service.engine, tmp_path / "weights"
        await engine.pause(PauseMode.KEEP)
        waiting = asyncio.create_task(client.score([ids], start=len(IDS)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await _commit(engine, directory)
        [new] = await waiting
        assert (old.weight_version, new.weight_version) == (0, 1)
        assert np.abs(np.subtract(old.logprobs, new.logprobs)).max() > 0.1
        exact = VersionDemand(exact_version=1)
        assert await client.score([ids], start=len(IDS), weight_version=exact) == [new]


async def _commit(engine: Any, directory: Path) -> None:
    await engine.stage(WeightUpdate(1, write_checkpoint(directory)))
    await engine.pause(PauseMode.ABORT, KVPolicy.KEEP)  # the waiting score is computed again
    await engine.commit(1)
    await engine.resume()


async def test_a_score_that_its_replica_lost_is_made_at_another(tmp_path: Path) -> None:
    async with chat_service(tmp_path) as service, RolloutClient(service.url) as client:
        [expected] = await client.score([IDS])
        service.engine.faults.num_lost = 1
        assert await client.score([IDS]) == [expected]
        assert service.engine.faults.num_lost == 0


@dataclass
class SlowEngine:
    """An engine that takes some time for a score, concurrently with other calls or alone."""

    num_running: int
    # the start and end of each score, in the loop's time
    spans: list[tuple[float, float]] = field(default_factory=list)
    num_now: int = 0
    num_most: int = 0

    async def generate(self, request: GenerateRequest, **_: object) -> Generation:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        began_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.02)
        self.num_now -= 1
        self.spans.append((began_at, asyncio.get_running_loop().time()))
        load = Load(num_running=self.num_running)
        return Generation(request.request_id, (6,), (-1.0,), FinishReason.LENGTH, (), load=load)


@dataclass
class Leases:
    """Leases that all refer to one engine."""

    one: SlowEngine

    def engine(self, name: str) -> SlowEngine:
        return self.one

    def end(self, name: str) -> None: ...


async def paced(service: ChatService, engine: SlowEngine, share: float, num_scores: int) -> None:
    calls = TokenCalls(service.sessions.parts, cast(CallLeases, Leases(engine)), TokenCallLimits(score_share=share))
    call = ChatCall((), SamplingParams(max_tokens=1, score_from=1), max_tokens=1, prompt_ids=IDS, timeout_s=60.0)
    await asyncio.gather(*(calls.score(call) for _ in range(num_scores)))


async def test_few_scores_run_at_a_time(service: ChatService) -> None:
    engine = SlowEngine(num_running=2)
    await paced(service, engine, 1.0, 20)
    assert engine.num_most == TokenCallLimits().num_scores < 20


@pytest.mark.parametrize(("num_running", "rest"), [(2, 3.0), (0, 0.0)])
async def test_scores_rest_while_others_run(service: ChatService, num_running: int, rest: float) -> None:
    engine = SlowEngine(num_running)
    await paced(service, engine, 0.25, 4)
    assert engine.num_most == 1
    for (begun, ended), (next_begun, _) in pairwise(engine.spans):
        assert next_begun - ended >= 0.95 * rest * (ended - begun)
    if not rest:
        lasted = engine.spans[-1][1] - engine.spans[0][0]
        assert lasted < 4 * sum(ended - begun for begun, ended in engine.spans)
