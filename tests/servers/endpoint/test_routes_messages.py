"""The Messages routes under the real anthropic client: complete answers, streams, tools, sessions and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from agentloop_servers.http.auth import Keys
from tests.support.endpoint.dialect_app import MODEL, DialectService, dialect_service
from tests.support.engine.scripted import call

LOOKUP = {
    "name": "lookup",
    "description": "Look it up.",
    "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
}
REPLIES = (
    "<think>Two facts.</think>I look.\n" + call("lookup", q="a") + call("lookup", q="b"),
    "It is five.",
    "Bye.",
)
HI = {"role": "user", "content": "hi"}
CACHED = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DialectService]:
    async with dialect_service(tmp_path_factory.mktemp("service"), *REPLIES) as running:
        yield running


def sdk() -> Any:
    """The anthropic package. Its import takes more than a second, so only the process of these tests imports it."""
    return pytest.importorskip("anthropic")


def client_of(url: str, session: str | None = None, **fields: Any) -> Any:
    place = f"{url}/sessions/{session}" if session is not None else url
    return sdk().AsyncAnthropic(base_url=place, max_retries=0, **{"api_key": "none", **fields})


async def open_session(service: DialectService) -> str:
    async with client_of(service.url) as client:
        answer = await client.post("/sessions", body={}, cast_to=dict[str, Any])
    return str(answer["session_id"])


async def answered(client: Any, messages: list[Any], *, is_streaming: bool) -> Any:
    asked = {"model": MODEL, "messages": messages, "tools": [LOOKUP], "system": "Be brief.", "max_tokens": 200}
    if not is_streaming:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_an_agent_with_tools_is_one_path(service: DialectService, is_streaming: bool):
    session_id = await open_session(service)
    messages: list[Any] = [{"role": "user", "content": "What is it?"}]
    async with client_of(service.url, session_id) as client:
        first = await answered(client, messages, is_streaming=is_streaming)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (first.content[1].text, first.stop_reason) == ("I look.", "tool_use")
        uses = first.content[2:]
        assert [block.input for block in uses] == [{"q": "a"}, {"q": "b"}]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "2"} for block in uses]
        messages += [first.to_param(), {"role": "user", "content": results}]
        second = await answered(client, messages, is_streaming=is_streaming)
        assert (second.content[0].text, second.stop_reason) == ("It is five.", "end_turn")
        messages += [second.to_param(), {"role": "user", "content": "ok"}]
        third = await answered(client, messages, is_streaming=is_streaming)
        assert third.content[0].text == "Bye."
    trajectory = await service.trajectory(session_id)
    [path] = trajectory.paths
    assert (path.split_reason, len(path.turns), trajectory.is_complete) == (None, 3, True)
    sampled = [turn.end - turn.start for turn in path.turns]
    assert sampled == [answer.usage.output_tokens for answer in (first, second, third)]
    assert int(np.sum(path.response_mask)) == sum(sampled)


async def test_the_beta_client_of_claude_code(service: DialectService):
    async with client_of(service.url) as client:
        stream = await client.beta.messages.create(
            model=MODEL,
            max_tokens=50,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
                }
            ],
            thinking={"type": "enabled", "budget_tokens": 1024},
            betas=["interleaved-thinking-2025-05-14"],
            stream=True,
        )
        kinds = [event.type async for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_extras_ride_through_the_client(service: DialectService):
    async with client_of(service.url) as client:
        extra = {"return_token_ids": True, "session": "mine"}
        asked: dict[str, Any] = {"model": "default", "max_tokens": 50, "messages": [HI], "extra_body": extra}
        answer = await client.messages.create(**asked)
        raw = await client.messages.with_raw_response.create(**asked)
    assert answer.model_extra["session"]["session_id"] == "mine"
    assert len(answer.model_extra["token_ids"]) == answer.usage.output_tokens
    usage = answer.usage
    assert len(answer.model_extra["prompt_token_ids"]) == usage.input_tokens + usage.cache_read_input_tokens
    assert raw.headers["x-session-id"] == "mine"
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert raw.headers["x-turn-id"]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_stop_sequence(tmp_path: Path, is_streaming: bool):
    async with dialect_service(tmp_path, "one two three") as service, client_of(service.url) as client:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": [HI], "stop_sequences": [" two"]}
        if is_streaming:
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one", "stop_sequence", " two")


async def test_a_cut_answer(service: DialectService):
    async with client_of(service.url) as client:
        answer = await client.messages.create(model=MODEL, max_tokens=2, messages=[HI])
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)


async def test_counts_are_those_of_the_prompt(service: DialectService):
    session_id = await open_session(service)
    asked: dict[str, Any] = {"model": MODEL, "messages": [HI], "system": "Be brief.", "tools": [LOOKUP]}
    async with client_of(service.url) as client, client_of(service.url, session_id) as in_session:
        counted = await client.messages.count_tokens(**asked)
        first = await in_session.messages.create(**asked, max_tokens=200)
        assert counted.input_tokens == first.usage.input_tokens + first.usage.cache_read_input_tokens
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "2"} for block in first.content[2:]]
        asked["messages"] = [HI, first.to_param(), {"role": "user", "content": results}]
        counted = await in_session.messages.count_tokens(**asked)
        second = await in_session.messages.create(**asked, max_tokens=200)
        assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens
    assert len((await service.trajectory(session_id)).paths[0].turns) == 2


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_refusals_have_anthropics_shape(service: DialectService, is_streaming: bool):
    async def refused(kind: type[Exception], session: str | None = None, **fields: Any) -> Any:
        asked = {"model": MODEL, "max_tokens": 50, "messages": [HI], **fields}
        async with client_of(service.url, session) as client:
            with pytest.raises(kind) as found:
                await client.messages.create(**asked, stream=is_streaming)
        body = found.value.body
        assert (body["type"], bool(body["request_id"])) == ("error", True)
        assert found.value.request_id == body["request_id"] == found.value.response.headers["x-request-id"]
        return body["error"]

    unsupported = await refused(sdk().BadRequestError, container="c")
    assert (unsupported["type"], unsupported["code"]) == ("invalid_request_error", "unsupported_parameter")
    unknown = await refused(sdk().BadRequestError, extra_body={"max_token": 1})
    assert unknown["param"] == "max_token"
    too_long = await refused(sdk().BadRequestError, messages=[{**HI, "content": "word " * 20_000}])
    assert too_long["code"] == "context_length_exceeded"
    assert (await refused(sdk().NotFoundError, model="other"))["type"] == "not_found_error"
    assert (await refused(sdk().NotFoundError, "nobody"))["code"] == "session_not_found"


async def test_keys_of_both_forms(tmp_path: Path):
    async with dialect_service(tmp_path, "Hello.", keys=Keys.of(["good"])) as service:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": [HI]}
        for fields in ({"api_key": "good"}, {"api_key": None, "auth_token": "good"}):
            async with client_of(service.url, **fields) as client:
                assert (await client.messages.create(**asked)).content[0].text == "Hello."
        async with client_of(service.url, api_key="bad") as client:
            with pytest.raises(sdk().AuthenticationError) as refused:
                await client.messages.create(**asked)
        assert refused.value.body["error"]["type"] == "authentication_error"
        assert refused.value.request_id == refused.value.body["request_id"]


async def test_models_in_the_form_of_the_client_that_asks(service: DialectService):
    service.endpoint.name_adapter("first")
    service.endpoint.name_adapter("second")
    async with client_of(service.url, _strict_response_validation=True) as client:
        names = [one.id async for one in client.models.list(limit=1)]
        assert names == [MODEL, "first", "second"]
        one = await client.models.retrieve(MODEL)
        assert (one.display_name, one.max_input_tokens, one.created_at.year) == (MODEL, 8192, 1970)
        with pytest.raises(sdk().NotFoundError) as unknown:
            await client.models.retrieve("nobody")
        assert unknown.value.body["type"] == "error"
    async with aiohttp.ClientSession() as http, http.get(f"{service.url}/v1/models") as answer:
        assert (await answer.json())["object"] == "list"
