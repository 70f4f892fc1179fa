"""The Responses routes under the real openai client: whole answers, streams, tools, sessions and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from agentloop_servers.http.auth import Keys
from tests.support.endpoint.dialect_app import MODEL, DialectService, dialect_service
from tests.support.engine.scripted import call

LOOKUP: Any = {
    "type": "function",
    "name": "lookup",
    "description": "Look it up.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    "strict": False,
}
REPLIES = (
    "<think>Two facts.</think>I look.\n" + call("lookup", q="a") + call("lookup", q="b"),
    "It is five.",
    "Bye.",
)


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DialectService]:
    async with dialect_service(tmp_path_factory.mktemp("service"), *REPLIES) as running:
        yield running


def client_of(url: str, session: str | None = None, key: str = "none") -> AsyncOpenAI:
    place = f"{url}/sessions/{session}/v1" if session is not None else f"{url}/v1"
    return AsyncOpenAI(base_url=place, api_key=key, max_retries=0)


async def open_session(service: DialectService) -> str:
    async with AsyncOpenAI(base_url=service.url, api_key="none") as client:
        answer = await client.post("/sessions", body={}, cast_to=dict[str, Any])
    return str(answer["session_id"])


async def answered(client: AsyncOpenAI, items: list[Any], *, is_streaming: bool) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "input": items, "tools": [LOOKUP], "instructions": "Be brief."}
    if not is_streaming:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        return await stream.get_final_response()


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_an_agent_with_tools_is_one_path(service: DialectService, is_streaming: bool):
    session_id = await open_session(service)
    items: list[Any] = [{"role": "user", "content": "What is it?"}]
    async with client_of(service.url, session_id) as client:
        first = await answered(client, items, is_streaming=is_streaming)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output_text == "I look."
        assert [json.loads(item.arguments) for item in first.output[2:]] == [{"q": "a"}, {"q": "b"}]
        items += [item.model_dump(exclude_unset=True, exclude={"parsed_arguments"}) for item in first.output]
        for item in first.output[2:]:
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": "2"})
        second = await answered(client, items, is_streaming=is_streaming)
        assert (second.output_text, second.status) == ("It is five.", "completed")
        items += [item.model_dump(exclude_unset=True) for item in second.output]
        third = await answered(client, [*items, {"role": "user", "content": "ok"}], is_streaming=is_streaming)
        assert third.output_text == "Bye."
    trajectory = await service.trajectory(session_id)
    [path] = trajectory.paths
    assert (path.split_reason, len(path.turns), trajectory.is_complete) == (None, 3, True)
    sampled = [turn.end - turn.start for turn in path.turns]
    assert sampled == [answer.usage.output_tokens for answer in (first, second, third)]
    assert int(np.sum(path.response_mask)) == sum(sampled)


async def test_extras_ride_through_the_client(service: DialectService):
    async with client_of(service.url) as client:
        extra = {"return_token_ids": True, "session": "mine"}
        answer = await client.responses.create(model="default", input="hi", extra_body=extra)
        raw = await client.responses.with_raw_response.create(model="default", input="hi", extra_body=extra)
    extras = answer.model_extra
    assert extras is not None
    assert extras["session"]["session_id"] == "mine"
    assert len(extras["token_ids"]) == answer.usage.output_tokens  # type: ignore[union-attr]
    assert len(extras["prompt_token_ids"]) == answer.usage.input_tokens  # type: ignore[union-attr]
    assert extras["weight_versions"][0]["version"] == 0
    assert raw.headers["x-session-id"] == "mine"
    assert raw.headers["x-turn-id"]
    assert raw.headers["x-request-id"]


async def test_a_plain_stream_of_events(service: DialectService):
    async with client_of(service.url) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1]
    assert final.type == "response.completed"
    assert final.response.output_text == text


async def test_a_cut_answer_is_incomplete(service: DialectService):
    async with client_of(service.url) as client:
        answer = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
        stream = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2, stream=True)
        events = [event async for event in stream]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_refusals_are_errors_with_a_status(service: DialectService, is_streaming: bool):
    async with client_of(service.url) as client:
        with pytest.raises(openai.BadRequestError) as unsupported:
            await client.responses.create(
                model=MODEL, input="hi", previous_response_id="resp_1", stream=is_streaming
            )
        assert (unsupported.value.code, unsupported.value.param) == (
            "unsupported_parameter",
            "previous_response_id",
        )
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.responses.create(model=MODEL, input="word " * 20_000, stream=is_streaming)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="other", input="hi", stream=is_streaming)
        assert unknown.value.code == "model_not_found"
    async with client_of(service.url, "nobody") as client:
        with pytest.raises(openai.NotFoundError) as no_session:
            await client.responses.create(model=MODEL, input="hi", stream=is_streaming)
        assert no_session.value.code == "session_not_found"


async def test_keys(tmp_path: Path):
    async with dialect_service(tmp_path, "Hello.", keys=Keys.of(["good"])) as service:
        async with client_of(service.url, key="bad") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(model=MODEL, input="hi")
        async with client_of(service.url, key="good") as client:
            assert (await client.responses.create(model=MODEL, input="hi")).output_text == "Hello."
