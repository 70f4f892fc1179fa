"""The Responses routes under the real openai client: complete answers, streams, tools, sessions and errors."""

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
        with pytest.raises(openai.NotFoundError) as unmade:
            await client.responses.create(
                model=MODEL, input="hi", previous_response_id="resp_1", stream=is_streaming
            )
        assert (unmade.value.code, unmade.value.param) == ("response_not_found", "previous_response_id")
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


def outputs(answer: Any) -> list[Any]:
    calls = [item for item in answer.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": one.call_id, "output": "2"} for one in calls]


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("is_bare", [False, True])
async def test_the_id_of_a_response_continues_its_conversation(
    service: DialectService, is_bare: bool, is_streaming: bool
):
    session_id = None if is_bare else await open_session(service)
    asked: dict[str, Any] = {"tools": [LOOKUP], "instructions": "Be brief.", "is_streaming": is_streaming}

    async def ask(client: AsyncOpenAI, items: Any, previous: Any = None, **changed: Any) -> Any:
        given = {**asked, **changed}
        streaming = given.pop("is_streaming")
        if previous is not None:
            given["previous_response_id"] = previous.id
        if not streaming:
            return await client.responses.create(model=MODEL, input=items, **given)
        async with client.responses.stream(model=MODEL, input=items, **given) as stream:
            return await stream.get_final_response()

    async with client_of(service.url, session_id) as client:
        first = await ask(client, "What is it?")
        second = await ask(client, outputs(first), first)
        assert (second.output_text, second.previous_response_id) == ("It is five.", first.id)
        third = await ask(client, "ok", second)
        assert third.output_text == "Bye."
        own_id = first.model_extra["session"]["session_id"]
        assert third.model_extra["session"]["session_id"] == own_id
        [path] = (await service.trajectory(own_id)).paths
        assert (path.split_reason, len(path.turns)) == (None, 3)
        # Instructions are not inherited: the same turn without them starts a separate conversation.
        without = await ask(client, outputs(first), first, instructions=None)
        assert without.model_extra["session"]["split_reason"] is not None
        prompt = service.engine.served[-1][0]
        assert "Be brief." not in service.endpoint.renderer.decode(prompt)
        again = await ask(client, "ok", without, instructions=None)
        assert again.model_extra["session"]["parent_turn_id"] == without.model_extra["session"]["turn_ids"][0]
        # Vercel's client refers to each item of an answer; an item with only an id is the short form.
        user = {"role": "user", "content": "What is it?"}
        items = [{"type": "item_reference", "id": one.id} for one in first.output]
        referred = await ask(client, [user, *items, *outputs(first)])
        assert referred.model_extra["session"]["parent_turn_id"] == first.model_extra["session"]["turn_ids"][0]
        short = await ask(client, [user, *({"id": one.id} for one in first.output), *outputs(first)])
        assert short.model_extra["session"]["parent_turn_id"] == first.model_extra["session"]["turn_ids"][0]
    assert len({first.id, second.id, third.id, without.id}) == 4


async def test_an_id_that_continues_nothing_is_refused_by_name(service: DialectService, tmp_path: Path):
    session_id = await open_session(service)
    async with client_of(service.url, session_id) as client, client_of(service.url) as bare:
        mine = await client.responses.create(model=MODEL, input="hi", tools=[LOOKUP])
        other = await bare.responses.create(model=MODEL, input="hi")
        _, call_id, _, _ = mine.id.split("_", 3)
        unknown = mine.id.replace(call_id, "0" * 32)
        for given in (other.id, unknown, f"resp_{'0' * 32}_0_nobody", f"{mine.id}/x"):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.responses.create(model=MODEL, input="hi", previous_response_id=given)
            assert (refused.value.code, refused.value.param) == ("response_not_found", "previous_response_id")
            assert f"{given!r} was not found" in refused.value.message
            assert "expired" in refused.value.message
        item = {"type": "item_reference", "id": f"fc_{call_id}_9_{session_id}"}
        with pytest.raises(openai.NotFoundError) as no_item:
            await client.responses.create(model=MODEL, input=[item])  # type: ignore[list-item]
        assert no_item.value.param == "input.0.id"
        with pytest.raises(openai.BadRequestError) as two:
            await client.responses.create(
                model=MODEL, input="hi", previous_response_id=mine.id, conversation="conv_1"
            )
        assert two.value.param == "conversation"
        await service.sessions.delete(session_id, ("",))
        with pytest.raises(openai.NotFoundError) as deleted:
            await bare.responses.create(model=MODEL, input="hi", previous_response_id=mine.id)
        assert deleted.value.code == "response_not_found"


async def test_an_id_survives_a_restart_and_is_its_users_alone(tmp_path: Path):
    keys = Keys.of(["alice", "bob"])
    async with (
        dialect_service(tmp_path, *REPLIES, keys=keys) as service,
        client_of(service.url, key="alice") as client,
    ):
        first = await client.responses.create(model=MODEL, input="What is it?", tools=[LOOKUP])
    async with dialect_service(tmp_path, *REPLIES, keys=keys) as service:
        follow: dict[str, Any] = {"model": MODEL, "input": outputs(first), "previous_response_id": first.id}
        async with client_of(service.url, key="bob") as client:
            with pytest.raises(openai.NotFoundError) as foreign:
                await client.responses.create(**follow)
            assert (foreign.value.code, foreign.value.param) == ("response_not_found", "previous_response_id")
        async with client_of(service.url, key="alice") as client:
            second = await client.responses.create(**follow, tools=[LOOKUP])
        assert second.output_text == "It is five."
        place = second.model_extra["session"]  # type: ignore[index]
        assert place["parent_turn_id"] == first.model_extra["session"]["turn_ids"][0]  # type: ignore[index]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_logprobs_of_the_answers_text(service: DialectService, is_streaming: bool):
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "hi",
        "tools": [LOOKUP],
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    deltas: list[Any] = []
    async with client_of(service.url) as client:
        if is_streaming:
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            deltas = [
                one for event in events if event.type == "response.output_text.delta" for one in event.logprobs
            ]
            answer = events[-1].response
        else:
            answer = await client.responses.create(**asked)
    [message] = [item for item in answer.output if item.type == "message"]
    [part] = message.content
    assert part.text == "I look."
    shown = "".join(one.token for one in part.logprobs)
    assert shown.startswith("I look.")
    assert "tool_call" not in shown
    assert all(one.logprob <= 0 for one in part.logprobs)
    assert {one.token for one in deltas} >= {one.token for one in part.logprobs if is_streaming}
