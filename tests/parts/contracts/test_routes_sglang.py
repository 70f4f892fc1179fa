"""SGLang's native route over the real app, as slime and Miles call it: answers, streams, refusals, aborts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentloop.types import PauseMode
from agentloop_servers.http.auth import Keys
from tests.support.endpoint.chat_service import RENDERER, ChatService, chat_service
from tests.support.engine.policies import ScriptedPolicy

STOP = RENDERER.stop_token_ids[0]
NEVER = {str(STOP): -100}


def asked(*ids: int, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": [*ids], "return_logprob": True, "sampling_params": {"max_new_tokens": 4, **sampling}}


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path_factory.mktemp("service")) as service:
        yield service


async def generated(service: ChatService, body: dict[str, Any], **headers: str) -> Any:
    status, answer, _ = await service.call("POST", "/generate", json=body, headers=headers)
    assert status == 200, answer
    return answer


async def chunks_of(service: ChatService, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with service.http.post(f"{service.url}/generate", json={**body, "stream": True}) as answer:
        assert answer.status == 200
        events = (await answer.read()).decode().split("\n\n")
    data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [orjson.loads(one) for one in data[:-1]]


async def running(service: ChatService, num: int) -> None:
    async with asyncio.timeout(60):
        while service.engine.load().num_running < num:
            await asyncio.sleep(0.005)


async def test_an_answer_has_what_slime_reads(service: ChatService) -> None:
    answer = await generated(service, {**asked(5, 6, 7, logit_bias=NEVER), "rid": "mine", "top_logprobs_num": 2})
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert all(-100 < entry[0] <= 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert [len(row) for row in meta["output_top_logprobs"]] == [2] * 4
    assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 4})
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 0)
    versions = [meta[name] for name in ("weight_version", "weight_version_start", "weight_version_end")]
    assert versions == ["0"] * 3
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    assert meta["e2e_latency"] > 0
    plain = await generated(service, {"text": "hi", "sampling_params": {"max_new_tokens": 2}})
    assert "output_token_logprobs" not in plain["meta_info"]
    assert plain["meta_info"]["prompt_tokens"] == len(RENDERER.ids("hi"))


async def test_what_a_text_shows(tmp_path: Path) -> None:
    """The ids contain every sampled token, including those that the text omits."""
    ids, stop = [*RENDERER.ids("one two three")], RENDERER.decode([STOP])
    policy = ScriptedPolicy(lambda prompt: [*ids, STOP])
    async with chat_service(tmp_path, policy=policy) as service:
        slime = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
        for sampling, text, matched in (
            ({}, "one two three", STOP),
            ({"no_stop_trim": True}, "one two three", STOP),
            (slime, f"one two three{stop}", STOP),
            ({"stop": [" two"]}, "one", " two"),
            ({"stop": " two", "no_stop_trim": True}, "one two", " two"),
        ):
            body = asked(5, **{"max_new_tokens": 64, **sampling})
            answer = await generated(service, body)
            assert (answer["text"], answer["meta_info"]["finish_reason"]["matched"]) == (text, matched)
            assert answer["output_ids"] == ([*ids, STOP] if matched == STOP else ids[: len(answer["output_ids"])])
            assert (await chunks_of(service, body))[-1]["text"] == text
        named = await generated(service, {**asked(5), "return_text_in_logprobs": True})
        assert next(entry[2] for entry in named["meta_info"]["output_token_logprobs"]) == RENDERER.decode(ids[:1])


async def test_batches_and_choices(service: ChatService) -> None:
    body = {**asked(n=2, sampling_seed=7), "input_ids": [[5, 6], [7, 8, 9]], "rid": ["a", "b"]}
    answers = await generated(service, body)
    assert [one["meta_info"]["id"] for one in answers] == ["a_0", "a_1", "b_0", "b_1"]
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [2, 2, 3, 3]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    alone = await generated(service, asked(5, 6, n=2, sampling_seed=7))
    assert [one["output_ids"] for one in alone] == [one["output_ids"] for one in answers[:2]]
    equal = {**body, "sampling_params": [body["sampling_params"]] * 2, "return_logprob": [True, True]}
    assert [one["output_ids"] for one in await generated(service, equal)] == [one["output_ids"] for one in answers]
    [single] = await generated(service, {"text": ["hi"], "sampling_params": {"max_new_tokens": 1}, "rid": "c"})
    assert single["meta_info"]["id"] == "c_0"


async def test_a_stream_has_all_so_far_and_ends_as_the_whole(service: ChatService) -> None:
    body = {**asked(5, 6, max_new_tokens=40, sampling_seed=3, logit_bias=NEVER), "rid": "s", "top_logprobs_num": 1}
    whole, chunks = await generated(service, body), await chunks_of(service, body)
    for before, after in itertools.pairwise(chunks):
        num = before["meta_info"]["completion_tokens"]
        assert after["output_ids"][:num] == before["output_ids"]
        entries = after["meta_info"]["output_token_logprobs"]
        assert entries[:num] == before["meta_info"]["output_token_logprobs"]
        assert before["meta_info"]["finish_reason"] is None
        assert len(entries) == len(after["output_ids"]) == after["meta_info"]["completion_tokens"]
    last = chunks[-1]
    for answer in (whole, last):
        del answer["meta_info"]["e2e_latency"], answer["meta_info"]["cached_tokens"]
    assert last == whole
    ends = [one for one in await chunks_of(service, {**body, "input_ids": [[5, 6], [7]]}) if _has_ended(one)]
    assert sorted(one["index"] for one in ends) == [0, 1]
    assert {one["meta_info"]["id"] for one in ends} == {"s_0", "s_1"}


def _has_ended(chunk: dict[str, Any]) -> bool:
    return chunk["meta_info"]["finish_reason"] is not None


async def test_requests_of_one_routing_key_share_a_lease(tmp_path: Path) -> None:
    async with chat_service(tmp_path, keys=Keys.of(["user-1", "user-2"], "admin-1")) as service:
        for user in ("user-1", "user-1", "user-2"):
            headers = {"authorization": f"Bearer {user}", "X-SMG-Routing-Key": "sample-1"}
            await generated(service, {**asked(5), "input_ids": [[5], [6]]}, **headers)
        assert service.coordinator.num_leased == 2  # a key belongs to its user
        status, answer, _ = await service.call("POST", "/generate", json=asked(5))
        assert (status, answer["error"]["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"input_ids": [1 << 20]}, "input_ids", "invalid_request"),
        ({"input_ids": [5] * 4096}, "input_ids", "context_length_exceeded"),
        ({"input_ids": []}, "input_ids", "invalid_request"),
        ({"text": "both"}, "input_ids", "invalid_request"),
        ({"sampling": {"max_tokens": 4}}, "sampling", "invalid_request"),
        ({"sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens", "invalid_request"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens", "invalid_request"),
        ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "sampling_params.min_new_tokens", None),
        ({"sampling_params": {"stop_token_ids": [1 << 20]}}, "sampling_params.stop_token_ids", None),
        (
            {"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}},
            "sampling_params.custom_params",
            "",
        ),
        ({"sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params", "unsupported_parameter"),
        ({"return_logprob": [True, False]}, "return_logprob", "unsupported_parameter"),
        ({"logprob_start_len": 0, "stream": True}, "logprob_start_len", "unsupported_parameter"),
        ({"logprob_start_len": 1}, "logprob_start_len", "invalid_request"),
        ({"logprob_start_len": -2}, "logprob_start_len", "invalid_request"),
        ({"token_ids_logprob": [5]}, "token_ids_logprob", "unsupported_parameter"),
        ({"return_routed_experts": True}, "return_routed_experts", "unsupported_parameter"),
        ({"image_data": ["a.png"]}, "image_data", "unsupported_parameter"),
        ({"lora_path": "another"}, "model", "model_not_found"),
        ({"rid": ["a", "b"]}, "rid", "invalid_request"),
        ({"weight_version": {"min_version": 1, "exact_version": 0}}, "weight_version", "invalid_request"),
    ],
)
async def test_refusals_name_the_field(
    service: ChatService, changed: dict[str, Any], param: str, code: str | None
) -> None:
    status, answer, _ = await service.call("POST", "/generate", json={**asked(5), **changed})
    assert status in (400, 404)
    assert answer["error"]["param"] == param
    assert not code or answer["error"]["code"] == code
    nothing = {"logprob_start_len": -1, "token_ids_logprob": [], "image_data": None, "return_routed_experts": False}
    await generated(service, {**asked(5), **nothing, "lora_path": "tiny"})


async def test_token_ids_are_the_services_own_form(service: ChatService) -> None:
    answer = await generated(service, {"token_ids": [5], "sampling": {"max_tokens": 2}})
    assert "meta_info" not in answer
    assert answer["token_ids"]
    status, answer, _ = await service.call("POST", "/generate", json={"token_ids": [5], "input_ids": [5]})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    _, session, _ = await service.call("POST", "/sessions", json={})
    by_key = {"authorization": f"Bearer {session['api_key']}"}
    status, answer, _ = await service.call("POST", "/generate", json=asked(5), headers=by_key)
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")


async def test_a_version_that_is_not_served(service: ChatService) -> None:
    body = {**asked(5), "weight_version": {"min_version": 9}}
    status, answer, headers = await service.call("POST", "/generate", json=body)
    assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (
        409,
        "weight_version_not_served",
        True,
    )
    assert "retry-after" in headers


# Aborts


async def test_an_abort_keeps_the_tokens(tmp_path: Path) -> None:
    """An abort ends one call by name, or all of the caller's calls. A resent call continues from its tokens."""
    async with chat_service(tmp_path, keys=Keys.of(["user-1", "user-2"], "admin-1"), decode_s=0.01) as service:
        mine, other, admin = ({"authorization": f"Bearer {key}"} for key in ("user-1", "user-2", "admin-1"))
        body = asked(5, 6, max_new_tokens=1000, logit_bias=NEVER, n=2)
        calls = [
            asyncio.create_task(generated(service, {**body, "rid": rid}, **headers))
            for rid, headers in (("a", mine), ("b", mine), ("c", other))
        ]
        await running(service, 6)
        await asyncio.sleep(0.1)
        abort = partial(service.call, "POST", "/abort_request")
        assert (await abort(json={"rid": "b"}, headers=other))[1] == {"num_aborted": 0}
        assert (await abort(json={"rid": "b_0"}, headers=mine))[1] == {"num_aborted": 1}
        assert (await abort(json={"rid": "b"}, headers=mine))[1] == {"num_aborted": 2}
        [ended, one_more] = await calls[1]
        assert len(ended["output_ids"]) <= len(one_more["output_ids"])
        [load] = (await service.call("GET", "/v1/loads?include=core", headers=admin))[1]["loads"]
        assert load["num_total_reqs"] == 4
        assert (await abort(json={"abort_all": True}, headers=admin))[1] == {"num_aborted": 4}
        for answer in (ended, one_more, *(await calls[0]), *(await calls[2])):
            meta, ids = answer["meta_info"], answer["output_ids"]
            assert meta["finish_reason"]["type"] == "abort"
            assert 0 < len(ids) < 1000
            assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
            assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": len(ids)}]
        [load] = (await service.call("GET", "/v1/loads", headers=admin))[1]["loads"]
        assert load["num_total_reqs"] == 0
        status, answer, _ = await abort(json={}, headers=mine)
        assert (status, answer["error"]["param"]) == (400, "rid")


async def test_a_pause_that_aborts_ends_calls_with_their_tokens(tmp_path: Path) -> None:
    """Includes streamed calls. A call that waits for a paused engine ends empty, under the served version."""
    async with chat_service(tmp_path, decode_s=0.01) as service:
        body = {**asked(5, 6, max_new_tokens=1000, logit_bias=NEVER), "rid": "a"}
        whole = asyncio.create_task(generated(service, body))
        streamed = asyncio.create_task(chunks_of(service, body))
        await running(service, 2)
        await asyncio.sleep(0.1)
        await service.engine.pause(PauseMode.ABORT)
        for answer in (await whole, (await streamed)[-1]):
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert 0 < len(answer["output_ids"]) < 1000
        waiting = asyncio.create_task(generated(service, {**body, "rid": "w"}))
        async with asyncio.timeout(60):
            while not (await service.call("GET", "/v1/loads"))[1]["loads"][0]["num_total_reqs"]:
                await asyncio.sleep(0.01)
        aborts = (service.call("POST", "/abort_request", json=one) for one in ({"rid": "w"}, {"abort_all": True}))
        await asyncio.gather(*aborts)
        answer = await waiting
        assert (answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]) == ([], "abort")
        await service.engine.resume()


async def test_workers_are_this_service(service: ChatService) -> None:
    [worker] = (await service.call("GET", "/workers"))[1]["workers"]
    assert worker["url"] == service.url


async def test_an_abort_of_sglangs_dialect_ends_a_score(tmp_path: Path) -> None:
    async with chat_service(tmp_path) as service:
        await service.engine.pause(PauseMode.KEEP)
        body = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0, "rid": "mine"}
        scored = {**body, "sampling_params": {"max_new_tokens": 0}}
        waiting = asyncio.create_task(generated(service, scored))
        while service.engine.load().num_waiting == 0:
            await asyncio.sleep(0.01)
        _, answer, _ = await service.call("POST", "/abort_request", json={"rid": "mine"})
        assert answer == {"num_aborted": 1}
        meta = (await waiting)["meta_info"]
        assert (meta["finish_reason"]["type"], meta["input_token_logprobs"]) == ("abort", [[None, 5, None]])
