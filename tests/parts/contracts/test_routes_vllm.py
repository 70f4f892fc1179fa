"""vLLM's token route over the real app, as its clients call it: answers, leases, records, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.chat.call import ChatCall, ChatModel
from agentloop.generation.leased_engine import CallLeases
from agentloop.generation.leases import LeaseReporter
from agentloop.types import GenerateRequest, Generation
from agentloop_contracts import vllm_tokens
from agentloop_contracts.vllm_tokens import TokensBody
from agentloop_servers.endpoint.endpoint import EndpointLimits
from agentloop_servers.endpoint.token_calls import TokenCallLimits, TokenCalls
from agentloop_servers.http.auth import Keys
from tests.servers.endpoint.test_client_habits import check_demands
from tests.support.endpoint.chat_service import MODEL, PARSER, RENDERER, SPEC, Bounds, ChatService, chat_service
from tests.support.engine.policies import ScriptedPolicy

GENERATE = "/inference/v1/generate"
STOP = RENDERER.stop_token_ids[0]


def asked(*token_ids: int, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": [*token_ids], "sampling_params": {"max_tokens": 4, "logprobs": 1, **sampling}}


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
async def fresh(tmp_path: Path) -> AsyncIterator[ChatService]:
    """A service whose leases belong to one test."""
    async with chat_service(tmp_path) as service:
        yield service


async def generated(service: ChatService, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    status, answer, _ = await service.call("POST", GENERATE, json=body, headers=headers)
    assert status == 200, answer
    return answer


async def test_an_answer_has_what_clients_of_vllm_read(service: ChatService) -> None:
    body = {**asked(5, 6, 7), "model": MODEL, "request_id": "mine", "return_token_ids": True, "cache_salt": "v1"}
    answer = await generated(service, body)
    assert (answer["request_id"], answer["model"], answer["prompt_token_ids"]) == ("mine", MODEL, [5, 6, 7])
    [choice] = answer["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    assert 1 <= len(ids) <= 4
    assert [entry["token"] for entry in content] == [f"token_id:{one}" for one in ids]
    assert [entry["token_id"] for entry in content] == ids
    assert all(-100 < entry["logprob"] <= 0 for entry in content)
    assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(ids)
    assert choice["finish_reason"] == ("stop" if ids[-1] == STOP else "length")
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(ids)}]
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}


async def test_what_is_not_asked_for_is_null(service: ChatService) -> None:
    answer = await generated(service, {"token_ids": [5], "sampling_params": {"max_tokens": 1}})
    assert answer["prompt_token_ids"] is None
    assert answer["choices"][0]["logprobs"] is None
    assert answer["model"] == MODEL


@pytest.mark.parametrize(("num_top", "num_shown"), [(0, 1), (1, 1), (3, 3)])
async def test_alternatives_are_counted_as_vllm_does(service: ChatService, num_top: int, num_shown: int) -> None:
    [choice] = (await generated(service, asked(5, 6, logprobs=num_top)))["choices"]
    for entry in choice["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == num_shown
        first = entry["top_logprobs"][0]
        assert (first["token_id"], first["logprob"]) == (entry["token_id"], entry["logprob"])
        assert len({one["token"] for one in entry["top_logprobs"]}) == num_shown


async def test_choices_have_seeds_of_their_own_and_repeat(service: ChatService) -> None:
    body = asked(5, 6, n=3, seed=7, max_tokens=8)
    first, again = await generated(service, body), await generated(service, body)
    ids = [choice["token_ids"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert ids == [choice["token_ids"] for choice in again["choices"]]
    assert len({*map(tuple, ids)}) == 3


async def test_without_a_maximum_the_context_bounds_a_reply(service: ChatService) -> None:
    body = {"token_ids": [5] * (SPEC.max_context_tokens - 3), "sampling_params": {"logit_bias": {str(STOP): -100}}}
    [choice] = (await generated(service, body))["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")


async def test_stop_reasons(tmp_path: Path) -> None:
    text = RENDERER.ids("one two three")
    async with chat_service(tmp_path, policy=ScriptedPolicy(lambda ids: [*text, STOP])) as service:
        [choice] = (await generated(service, asked(5, max_tokens=64)))["choices"]
        assert (choice["token_ids"], choice["stop_reason"]) == ([*text, STOP], None)
        [choice] = (await generated(service, asked(6, max_tokens=64, stop_token_ids=[text[1]])))["choices"]
        assert (choice["token_ids"], choice["stop_reason"]) == ([*text[:2]], text[1])
        [choice] = (await generated(service, asked(7, max_tokens=64, stop=[" two"])))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " two")
        assert RENDERER.decode(choice["token_ids"]).startswith("one two")


async def test_calls_of_one_session_header_share_a_lease_and_leave_no_session(fresh: ChatService) -> None:
    coordinator, before = fresh.coordinator, fresh.sessions.num_open
    for _ in range(3):
        await generated(fresh, asked(5, 6), **{"X-Session-ID": "rollout 1/é"})
    await generated(fresh, asked(5, 6), **{"X-Session-ID": "another"})
    assert coordinator.num_leased == 2
    await generated(fresh, asked(5, 6))
    await generated(fresh, asked(5, 6))
    assert coordinator.num_leased == 4  # each call without a name has its own lease
    assert fresh.sessions.num_open == before
    names = [name for name in coordinator.held if name.startswith("tokens-")]
    assert len(names) == 2
    status, answer, _ = await fresh.call("POST", "/finish_session", params={"session_id": "another"})
    assert (status, answer) == (200, {"finished": True})
    status, answer, _ = await fresh.call("POST", "/finish_session", params={"session_id": "another"})
    assert (status, answer) == (200, {"finished": False})


async def test_calls_of_one_session_header_report_the_context_that_they_extend(
    fresh: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, generate = [], fresh.engine.generate

    async def recorded(request: GenerateRequest, *args: Any) -> Generation:
        requests.append(request)
        return await generate(request, *args)

    monkeypatch.setattr(fresh.engine, "generate", recorded)
    name, ids = {"X-Session-ID": "one"}, [5, 6]
    for _ in range(2):
        [choice] = (await generated(fresh, asked(*ids), **name))["choices"]
        ids = [*ids, *choice["token_ids"], 9]
    await generated(fresh, asked(7, *ids[1:]), **name)
    await generated(fresh, asked(*ids))
    assert [one.num_known_tokens for one in requests] == [0, len(requests[1].token_ids) - 1, 0, 0]


async def test_in_a_session_a_call_is_recorded_as_its_turn(service: ChatService) -> None:
    _, session, _ = await service.call("POST", "/sessions", json={"session_id": "mine"})
    path, other = f"/sessions/mine{GENERATE}", {"X-Session-ID": "a trace of the client's own"}
    status, first, _ = await service.call("POST", path, json={**asked(5, 6), "model": "any"}, headers=other)
    assert status == 200, first
    ids = [5, 6, *first["choices"][0]["token_ids"], 9]
    by_key = {"authorization": f"Bearer {session['api_key']}"}
    status, second, _ = await service.call("POST", GENERATE, json=asked(*ids), headers=by_key)
    assert status == 200, second
    [record] = (await service.call("GET", "/sessions/mine/trajectories"))[1]
    [recorded] = record["paths"]
    assert [*recorded["prompt_ids"], *recorded["response_ids"]] == [*ids, *second["choices"][0]["token_ids"]]
    assert len(recorded["turns"]) == 2


class CountingCalls(TokenCalls):
    @property
    def num_affinities(self) -> int:
        return len(self._affinities)


async def test_a_long_wait_gives_places_back_and_takes_them_again(fresh: ChatService) -> None:
    reporter = LeaseReporter("process", fresh.coordinator.report_leases)
    leases = CallLeases(fresh.coordinator, lambda url: fresh.engine, reporter)
    calls = CountingCalls(fresh.sessions.parts, leases, TokenCallLimits(idle_s=0.05, max_affinities=2))
    chat = _call(5, 6)
    await calls.sample(chat, "a")
    assert (calls.num_affinities, len(fresh.coordinator.leases)) == (1, 1)
    async with asyncio.timeout(60):
        while fresh.coordinator.leases:
            await asyncio.sleep(0.01)
    assert calls.num_affinities == 0
    await calls.sample(chat, "a")
    for name in "bcd":
        await calls.sample(chat, name)
    assert calls.num_affinities <= 2
    await leases.close()
    await reporter.close()


async def test_keys(tmp_path: Path) -> None:
    async with chat_service(tmp_path, keys=Keys.of(["user-1", "user-2"], "admin-1")) as service:
        status, answer, _ = await service.call("POST", GENERATE, json=asked(5))
        assert (status, answer["error"]["code"]) == (401, "unauthorized")
        for user in ("user-1", "user-2"):
            headers = {"authorization": f"Bearer {user}", "X-Session-ID": "same"}
            assert (await service.call("POST", GENERATE, json=asked(5), headers=headers))[0] == 200
        assert service.coordinator.num_leased == 2  # a name belongs to its user


async def test_bounds(tmp_path: Path) -> None:
    bounds = Bounds(endpoint=EndpointLimits(max_open_calls=1))
    async with chat_service(tmp_path, bounds=bounds, decode_s=0.05) as service:
        body = asked(5, max_tokens=64, logit_bias={str(STOP): -100})
        running = asyncio.create_task(service.call("POST", GENERATE, json=body))
        async with asyncio.timeout(60):
            while not service.engine.load().num_running:
                await asyncio.sleep(0.005)
        status, answer, headers = await service.call("POST", GENERATE, json=asked(5))
        assert (status, answer["error"]["code"], "retry-after" in headers) == (429, "overloaded", True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(60):
            while service.engine.load().num_running:  # a disconnected client aborts its call
                await asyncio.sleep(0.005)


async def test_logprobs_of_chat_and_completions_name_tokens_by_id(service: ChatService) -> None:
    named: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 4}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    _, answer, _ = await service.call("POST", "/v1/chat/completions", json={**chat, **named})
    [choice] = answer["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(one["token"].startswith("token_id:") for one in choice["logprobs"]["content"][0]["top_logprobs"])
    text = {"model": MODEL, "prompt": [5, 6], "logprobs": 2}
    _, answer, _ = await service.call("POST", "/v1/completions", json={**text, **named})
    [choice] = answer["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    _, answer, _ = await service.call("POST", "/v1/completions", json={**text, "max_tokens": 4})
    assert not answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


def _call(*token_ids: int) -> ChatCall:
    body = TokensBody.model_validate(asked(*token_ids))
    return vllm_tokens.to_call(body, ChatModel(PARSER, RENDERER.vocab_size))


async def test_a_call_may_demand_a_weight_version(tmp_path: Path) -> None:
    async with chat_service(tmp_path) as service:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}
        await check_demands(service, "/inference/v1/generate", body)
