"""Scores of prompts in vLLM's and SGLang's dialects equal those of `POST /score`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentloop.client.client import RolloutClient
from tests.servers.endpoint.test_routes_scores import IDS, NEVER, posted, sampled_ids
from tests.support.endpoint.chat_service import RENDERER, ChatService, chat_service


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
async def client(service: ChatService) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(service.url) as client:
        yield client


async def test_both_dialects_give_the_same_scores(service: ChatService, client: RolloutClient) -> None:
    ids = await sampled_ids(client)
    [expected] = await client.score([ids], top_k=2)
    rows = [dict(row) for row in expected.top_logprobs]

    body = {"input_ids": [*ids], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    none = {"max_new_tokens": 0, "temperature": 0}
    answer = await posted(service, "/generate", {**body, "sampling_params": none, "return_text_in_logprobs": True})
    meta = answer["meta_info"]
    texts = [RENDERER.token_bytes(one).decode(errors="replace") for one in ids]
    assert meta["input_token_logprobs"][0] == [None, ids[0], texts[0]]
    assert [tuple(one) for one in meta["input_token_logprobs"][1:]] == list(
        zip(expected.logprobs, ids[1:], texts[1:], strict=True)
    )
    assert meta["input_top_logprobs"][0] is None
    assert [{one[1]: one[0] for one in row} for row in meta["input_top_logprobs"][1:]] == rows
    assert (answer["text"], answer["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert (meta["finish_reason"], meta["weight_version"]) == ({"type": "length", "length": 0}, "0")

    asked = {"token_ids": [*ids], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2}}
    places = (await posted(service, "/inference/v1/generate", asked))["prompt_logprobs"]
    assert places[0] is None
    for place, token_id, logprob, row in zip(places[1:], ids[1:], expected.logprobs, rows, strict=True):
        assert {int(one): found["logprob"] for one, found in place.items()} == {token_id: logprob, **row}
        assert all(place[str(one)]["rank"] == rank for rank, one in enumerate(row, 1))
    assert service.sessions.num_open == 0


async def test_a_prompt_is_scored_and_then_sampled_from(service: ChatService, client: RolloutClient) -> None:
    [expected] = await client.score([IDS], start=5)
    body = {"return_logprob": True, "logprob_start_len": 4, "sampling_params": {"max_new_tokens": 3, "n": 2}}
    body["sampling_params"] |= {"logit_bias": NEVER}
    answers = await posted(service, "/generate", {**body, "input_ids": [[*IDS], [*IDS[:5]]]})
    assert [len(one["output_ids"]) for one in answers] == [3] * 4
    found = [one["meta_info"]["input_token_logprobs"] for one in answers]
    assert found[:2] == [[[None, IDS[4], None], [expected.logprobs[0], IDS[5], None]]] * 2
    assert found[2:] == [[[None, IDS[4], None]]] * 2  # no token follows it


async def test_what_has_nothing_to_score(service: ChatService) -> None:
    none = {"max_new_tokens": 0}
    body = {"input_ids": [5], "return_logprob": True, "logprob_start_len": 0, "sampling_params": none}
    assert (await posted(service, "/generate", body))["meta_info"]["input_token_logprobs"] == [[None, 5, None]]
    asked = {"token_ids": [5], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    assert (await posted(service, "/inference/v1/generate", asked))["prompt_logprobs"] == [None]


async def test_a_sessions_key_opens_no_scores_and_no_control_verb(service: ChatService) -> None:
    _, session, _ = await service.call("POST", "/sessions", json={})
    by_key = {"authorization": f"Bearer {session['api_key']}"}
    tokens = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    status, _, _ = await service.call("POST", "/inference/v1/generate", json=tokens, headers=by_key)
    assert status == 400
    for key in (session["api_key"], session["control_key"]):
        for method, path in (("POST", "/pause"), ("POST", "/update_weights"), ("GET", "/is_paused")):
            given = {"authorization": f"Bearer {key}"}
            assert (await service.call(method, path, json={"weight_dir": "/x"}, headers=given))[0] == 403
