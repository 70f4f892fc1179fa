"""Client habits that the dialects do not specify: model names, retry keys, engine parameters."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentloop.errors import ServiceUnavailable
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.types import Message
from tests.support.endpoint.chat_service import MODEL, RENDERER, SHORT_CALLS, ChatService, chat_service
from tests.support.endpoint.dialect_app import dialect_service
from tests.support.engine.scripted import POLICY

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    **SHORT_CALLS,
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "hi"},
}


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path_factory.mktemp("service")) as running:
        yield running


async def session_of(service: ChatService) -> dict[str, Any]:
    return (await service.call("POST", "/sessions", json={}))[1]


@pytest.mark.parametrize("path", BODIES)
async def test_in_a_session_every_model_name_means_its_policy(service: ChatService, path: str) -> None:
    session, body = await session_of(service), {**BODIES[path], "model": "claude-opus-5-5"}
    assert (await service.call("POST", path, json=body))[1]["error"]["code"] == "model_not_found"
    named = {
        "path": (f"/sessions/{session['session_id']}{path}", {}),
        "key": (path, {"authorization": f"Bearer {session['api_key']}"}),
        "header": (path, {"x-session-id": session["session_id"]}),
    }
    for url, headers in named.values():
        status, answer, _ = await service.call("POST", url, json=body, headers=headers)
        assert status == 200, answer
        assert answer.get("model", body["model"]) == body["model"]
    assert (await service.call("GET", f"/sessions/{session['session_id']}/v1/models/gpt-9"))[1]["id"] == "gpt-9"
    assert (await service.call("GET", "/v1/models/gpt-9"))[0] == 404


async def test_the_list_of_models_names_the_live_weights(tmp_path: Path) -> None:
    async with dialect_service(tmp_path, "Hello.") as service:
        live: list[int] = []

        async def live_version() -> int | None:
            if not live:
                raise ServiceUnavailable("the coordinator is starting")
            return live[-1]

        async def listed() -> Any:
            async with aiohttp.ClientSession() as http, http.get(f"{service.url}/v1/models") as answer:
                [model] = (await answer.json())["data"]
                return model["weight_version"]

        assert await listed() is None
        service.endpoint.live_version = live_version
        assert await listed() is None
        for version in (0, 7):
            live.append(version)
            assert await listed() == version


async def test_an_idempotency_key_makes_a_repeat_a_retry(service: ChatService) -> None:
    session_id = (await session_of(service))["session_id"]
    url, body = f"/sessions/{session_id}{CHAT}", {"model": MODEL, "messages": [USER], "max_tokens": 8}

    async def asked(idempotency_key: str | None, **fields: Any) -> str:
        headers = {} if idempotency_key is None else {"idempotency-key": idempotency_key}
        status, answer, _ = await service.call("POST", url, json={**body, **fields}, headers=headers)
        assert status == 200
        return str(answer["id"])

    first = await asked("a")
    assert await asked("a") == first
    others = [await asked("b"), await asked(None), await asked(None), await asked("a", max_tokens=9)]
    assert len({first, *others}) == 5
    assert await asked("b") == others[0]
    described = (await service.call("GET", f"/sessions/{session_id}"))[1]
    assert described["num_turns"] == 5


async def test_a_stop_token_of_the_request_ends_a_turn_that_the_template_then_closes(service: ChatService) -> None:
    session_id = (await session_of(service))["session_id"]
    url = f"/sessions/{session_id}{CHAT}"
    asked = {"model": MODEL, "messages": [USER], "seed": 5, "max_tokens": 20, "return_token_ids": True}
    free = (await service.call("POST", CHAT, json=asked))[1]["choices"][0]["token_ids"]
    stop = next(token for token in free[2:] if token not in RENDERER.stop_token_ids)
    status, answer, _ = await service.call("POST", url, json={**asked, "stop_token_ids": [stop]})
    [choice] = answer["choices"]
    assert (status, choice["finish_reason"], choice["token_ids"]) == (200, "stop", free[: free.index(stop) + 1])
    assert choice["message"]["content"] == RENDERER.decode(choice["token_ids"][:-1]).strip()
    echo = {"role": "assistant", "content": choice["message"]["content"]}
    again = (await service.call("POST", url, json={**asked, "messages": [USER, echo, USER]}))[1]
    before = [*answer["prompt_token_ids"], *choice["token_ids"]]
    assert again["session"]["split_reason"] is None
    assert again["prompt_token_ids"][: len(before)] == before
    # The turn was not closed, so the template's own stop token comes first.
    assert again["prompt_token_ids"][len(before)] in RENDERER.stop_token_ids


async def test_a_turn_that_ignores_the_models_stop_tokens_has_all_its_tokens(service: ChatService) -> None:
    biased = {"model": MODEL, "messages": [USER], "max_tokens": 6, "return_token_ids": True}
    biased["logit_bias"] = {str(RENDERER.stop_token_ids[0]): 100}
    [stopped] = (await service.call("POST", CHAT, json=biased))[1]["choices"]
    assert (stopped["finish_reason"], len(stopped["token_ids"])) == ("stop", 1)
    [choice] = (await service.call("POST", CHAT, json={**biased, "ignore_eos": True}))[1]["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 6)
    assert RENDERER.stop_token_ids[0] in choice["token_ids"]


async def test_sampling_parameters_of_engines_reach_the_engine(service: ChatService) -> None:
    asked = {"model": MODEL, "messages": [USER], "max_tokens": 12.0, "seed": 3.0, "return_token_ids": True}
    plain = (await service.call("POST", CHAT, json=asked))[1]["choices"][0]["token_ids"]
    greedy = (await service.call("POST", CHAT, json={**asked, "min_p": 1.0}))[1]["choices"][0]["token_ids"]
    likeliest = (await service.call("POST", CHAT, json={**asked, "temperature": 0}))[1]["choices"][0]["token_ids"]
    assert greedy == likeliest != plain
    answered = await service.call("POST", CHAT, json={**asked, "repetition_penalty": 2.0})
    assert answered[0] == 200


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/completions"])
async def test_a_call_may_demand_a_weight_version(service: ChatService, path: str) -> None:
    await check_demands(service, path, {**BODIES[path], "model": MODEL})


async def check_demands(service: ChatService, path: str, body: dict[str, Any]) -> None:
    session = (await service.call("POST", "/sessions", json={"weight_version": {"exact_version": 3}}))[1]
    for url, headers, demand in (
        (path, {}, {"exact_version": 3, "wait_s": 0.1}),
        (path, {"x-weight-version": "min_version=3, wait_s=0.1"}, None),
        (f"/sessions/{session['session_id']}{path}", {}, None),
    ):
        asked = body if demand is None else {**body, "weight_version": demand}
        status, refused, headers = await service.call("POST", url, json=asked, headers=headers)
        assert (status, headers["x-should-retry"], headers["retry-after"]) == (409, "true", "1")
        assert refused["error"]["code"] == "weight_version_not_served"
        assert refused["error"]["details"] == {"served": [0]}
    served = {**body, "weight_version": {"min_version": 0}}
    status, answer, _ = await service.call("POST", path, json=served, headers={"x-weight-version": "min_version=3"})
    assert status == 200, answer
    assert (answer["weight_version_start"], answer["weight_version_end"]) == (0, 0)
    for wrong in ({"min_version": -1}, {"min_version": 4, "exact_version": 3}, {"version": 3}):
        assert (await service.call("POST", path, json={**body, "weight_version": wrong}))[0] == 400
    for text in ("3", "min_version=x", "version=3"):
        assert (await service.call("POST", path, json=body, headers={"x-weight-version": text}))[0] == 400


def write_thinking_model(folder: Path) -> TemplateRenderer:
    """Write the shipped policy with a template that can disable reasoning, like Qwen3's, and renders the effort."""
    shutil.copytree(POLICY, folder)
    template = folder / "chat_template.jinja"
    switch = (
        "{%- if reasoning_effort is defined %}{{- reasoning_effort }}{%- endif %}"
        "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}"
    )
    template.write_text(template.read_text().rstrip() + switch)
    return TemplateRenderer.from_directory(folder)


async def test_every_dialect_gives_arguments_to_the_template(tmp_path: Path) -> None:
    renderer = write_thinking_model(tmp_path / "model")
    quiet, effort = {"enable_thinking": False}, {"effort": "low"}
    asked: dict[str, list[dict[str, Any]]] = {
        CHAT: [quiet, {"chat_template_kwargs": quiet}, {"reasoning_effort": "low"}],
        RESPONSES: [quiet, {"chat_template_kwargs": quiet}, {"reasoning": effort}],
        MESSAGES: [quiet, {"thinking": {"type": "disabled"}}, {"output_config": effort}],
    }
    messages = [Message("user", "hi")]
    wanted = [renderer.render(messages, [], quiet)] * 2 + [
        renderer.render(messages, [], {"reasoning_effort": "low"})
    ]
    assert renderer.render(messages, []) not in wanted
    async with (
        dialect_service(tmp_path, "Hello.", "Bye.", renderer=renderer) as service,
        aiohttp.ClientSession(service.url) as http,
    ):

        async def posted(path: str, body: dict[str, Any]) -> dict[str, Any]:
            async with http.post(path, json={"model": MODEL, **body}) as answer:
                assert answer.status == 200, await answer.text()
                return dict(await answer.json())

        for path, fields in asked.items():
            bodies = [{**BODIES[path], **one, "return_token_ids": True} for one in fields]
            assert [(await posted(path, body))["prompt_token_ids"] for body in bodies] == wanted, path
        rendered = [await posted(f"{CHAT}/render", {**BODIES[CHAT], **one}) for one in asked[CHAT]]
        assert [one["prompt_token_ids"] for one in rendered] == wanted
        assert (await posted("/tokenize", {"messages": [USER], **quiet}))["tokens"] == wanted[0]
        counted = await posted("/v1/messages/count_tokens", {"messages": [USER], **asked[MESSAGES][1]})
        assert counted["input_tokens"] == len(wanted[0])
        # With the same arguments, a conversation is one path, whichever dialect continues it.
        session = {"session": "s", "return_token_ids": True}
        first = await posted(CHAT, {**BODIES[CHAT], **session, **quiet, "max_tokens": 40})
        echo = [USER, {"role": "assistant", "content": first["choices"][0]["message"]["content"]}, USER]
        for path, field in ((CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")):
            body = {**BODIES[path], **session, **quiet, field: echo}
            assert (await posted(path, body))["session"]["parent_turn_id"] == first["session"]["turn_ids"][0]
        other = await posted(CHAT, {**BODIES[CHAT], **session, "messages": echo})
        assert other["session"]["split_reason"] == "tools_changed"


async def test_an_unknown_path_is_named(service: ChatService) -> None:
    status, answer, _ = await service.call("POST", "/chat/completions", json={})
    assert status == 404
    assert "'/chat/completions'" in answer["error"]["message"]
    assert "/v1" in answer["error"]["message"]


async def test_a_thread_is_refused_as_anthropics_sdk_reads_it(service: ChatService) -> None:
    body = {"model": MODEL, "messages": [USER], "max_tokens": 4, "thread": {"type": "create"}}
    status, answer, _ = await service.call("POST", MESSAGES, json=body)
    assert (status, answer["type"]) == (400, "error")
    assert answer["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_a_list_of_prompts_is_answered_as_each_of_them(service: ChatService) -> None:
    """TRL's client of vLLM: each choice has its prompt's ids, and the sampled token next to its logprob."""
    prompts = [[5, 6, 7], [8, 9]]
    asked = {"model": MODEL, "max_tokens": 4, "seed": 3, "n": 2, "logprobs": 0, "return_token_ids": True}
    asked |= {"return_tokens_as_token_ids": True}
    status, answer, _ = await service.call("POST", "/v1/completions", json={**asked, "prompt": prompts})
    assert status == 200, answer
    alone = [
        (await service.call("POST", "/v1/completions", json={**asked, "prompt": one}))[1]["choices"]
        for one in prompts
    ]
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["session"]["session_id"] for choice in choices}) == 2
    for choice, one in zip(choices, [one for found in alone for one in found], strict=True):
        assert {**choice, "index": one["index"]}.items() >= one.items()
        assert choice["weight_version_start"] == choice["weight_version_end"] == 0
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        named = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in named]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert answer["usage"]["prompt_tokens"] == 5
    texts = {**asked, "prompt": ["hi", "hi"]}
    assert len((await service.call("POST", "/v1/completions", json=texts))[1]["choices"]) == 4
    url = f"/sessions/{(await session_of(service))['session_id']}/v1/completions"
    refused = (await service.call("POST", url, json=texts))[1]["error"]
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "prompt")
