"""The OpenAI routes on a real socket, called by the openai package and by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from openai.types import Model

from agentloop.api.sessions import NewSessionAnswer, SessionAnswer, decode_trajectories
from agentloop.errors import EngineLost, InvalidRequest, Overloaded
from agentloop.types import Generation
from agentloop.values import codec
from agentloop_servers.endpoint.endpoint import EndpointLimits
from tests.support.endpoint.fake_endpoint import FakeRegistry, endpoint_app, raising, serving_endpoint

USER = {"role": "user", "content": "hi"}
CHAT = {"model": "tiny", "messages": [USER]}
LIMITS = EndpointLimits(max_open_calls=3, keep_alive_s=0.05)


@dataclass
class RouteSite:
    url: str
    registry: FakeRegistry
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        sent = {"content-type": "application/json", **sent}
        async with self.http.post(self.url + path, data=data, headers=sent) as answer:
            return answer.status, orjson.loads(await answer.read()), answer.headers

    async def lines(self, body: Any) -> list[str]:
        async with self.http.post(f"{self.url}/v1/chat/completions", json={**body, "stream": True}) as answer:
            assert answer.status == 200
            assert answer.headers["x-request-id"]
            assert answer.headers["x-session-id"]
            return [line for line in (await answer.text()).split("\n") if line]


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[tuple[str, FakeRegistry]]:
    registry = FakeRegistry()
    async with serving_endpoint(registry, limits=LIMITS) as url:
        yield url, registry


@pytest.fixture
async def site(served: tuple[str, FakeRegistry]) -> AsyncIterator[RouteSite]:
    url, registry = served
    registry.reset()
    async with aiohttp.ClientSession() as http:
        client = openai.AsyncOpenAI(
            api_key="none", base_url=f"{url}/v1", max_retries=0, _strict_response_validation=True
        )
        async with client:
            yield RouteSite(url, registry, http, client)


def hanging(at: int) -> Callable[[int], Awaitable[None]]:
    async def before(index: int) -> None:
        if index == at:
            await asyncio.Event().wait()

    return before


# Answers


async def test_the_openai_package_reads_what_we_write(site: RouteSite) -> None:
    raw = await site.openai.chat.completions.with_raw_response.create(model="tiny", messages=[USER])  # type: ignore[list-item]
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hello"
    assert answer.system_fingerprint == "v7"
    assert (raw.headers["x-turn-id"], answer._request_id) == ("n1", raw.headers["x-request-id"])
    completion = await site.openai.completions.create(model="default", prompt="hi")
    assert completion.choices[0].text == "Hello"
    models = await site.openai.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await site.openai.models.retrieve("default")).id == "default"


async def test_the_openai_package_reads_our_streams(site: RouteSite) -> None:
    stream = await site.openai.chat.completions.create(
        model="tiny",
        messages=[USER],  # type: ignore[list-item]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 6
    # The package's types have no chunk of a text completion without a finish; the OpenAI API writes null there too.
    async with openai.AsyncOpenAI(api_key="none", base_url=f"{site.url}/v1", max_retries=0) as lenient:
        texts = await lenient.completions.create(model="tiny", prompt=[1, 2], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in texts]) == "Hello"
    async with site.openai.chat.completions.stream(model="tiny", messages=[USER]) as events:  # type: ignore[list-item]
        assert (await events.get_final_completion()).choices[0].message.content == "Hello"


async def test_tokens(site: RouteSite) -> None:
    status, answer, _ = await site.post("/tokenize", {"prompt": "Hello", "return_token_strs": True})
    assert status == 200
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert "".join(answer["token_strs"]) == "Hello"
    back = (await site.post("/detokenize", {"tokens": answer["tokens"]}))[1]
    assert back == {"prompt": "Hello"}
    ids = (await site.post("/v1/tokenize", {"messages": [USER]}))[1]["tokens"]
    status, preview, headers = await site.post("/v1/chat/completions/render", CHAT)
    assert (status, preview["prompt_token_ids"]) == (200, ids)
    assert "x-session-id" not in headers
    assert (preview["parent_turn_id"], preview["split_reason"]) == (None, None)
    status, preview, headers = await site.post("/v1/chat/completions/render", CHAT, x_session_id="a")
    assert (preview["prompt_token_ids"], headers["x-session-id"]) == (ids, "a")
    assert site.registry.calls == []


async def test_answers_are_as_the_openapi_page_says(site: RouteSite) -> None:
    async with site.http.get(f"{site.url}/v1/models") as answer:
        [model] = (await answer.json())["data"]
        assert (Model.model_validate(model, strict=True).id, model["max_model_len"]) == ("tiny", 512)
    made = NewSessionAnswer.model_validate((await site.post("/sessions", {"session_id": "a"}))[1])
    control = {"authorization": f"Bearer {made.control_key}"}
    body = {"token_ids": [1], "sampling": {"max_tokens": 2}}
    codec.from_builtins((await site.post("/sessions/a/v1/generate", body))[1], Generation)
    SessionAnswer.model_validate((await site.post("/sessions/a/reward", {"reward": 1}, **control))[1])
    async with site.http.get(
        f"{site.url}/sessions/a/trajectories", headers={"accept": "application/msgpack"}
    ) as answer:
        assert [one.group_id for one in decode_trajectories(await answer.read())] == ["a"]
    async with site.http.get(f"{site.url}/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/sessions", "/tokenize"):
        assert path in paths


# Refusals


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        ({**CHAT, "model": "gpt-9"}, {}, 404, "model_not_found"),
        ({**CHAT, "n": "1"}, {}, 400, "invalid_request"),
        ({**CHAT, "audio": {"voice": "x"}}, {}, 400, "unsupported_parameter"),
        (b"{", {}, 400, "invalid_request"),
        (b"", {}, 400, "invalid_request"),
        (orjson.dumps(CHAT), {"content_type": "text/plain"}, 400, "invalid_request"),
        (orjson.dumps(CHAT), {"content_encoding": "gzip"}, 415, "unsupported_media_type"),
        ({**CHAT, "user": "x" * 900_000}, {}, 413, "body_too_large"),
    ],
)
async def test_refusals(site: RouteSite, body: Any, headers: dict[str, str], status: int, code: str) -> None:
    found, answer, answered = await site.post("/v1/chat/completions", body, **headers)
    assert found == status
    assert answered["x-request-id"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == code
    assert site.registry.sessions == {}  # a bad body creates no session


async def test_long_bodies_are_taken(site: RouteSite) -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "word " * 100}] * 1000}
    assert (await site.post("/v1/chat/completions", long))[0] == 200
    assert len(site.registry.calls[0][1].messages) == 1000


async def test_errors_as_the_openai_package_raises_them(site: RouteSite) -> None:
    for error, kind in (
        (EngineLost("gone"), openai.InternalServerError),
        (Overloaded("full"), openai.RateLimitError),
        (InvalidRequest("no", param="n"), openai.BadRequestError),
    ):
        site.registry.before = raising(error, 0)
        for is_streamed in (False, True):
            with pytest.raises(kind) as caught:
                await site.openai.chat.completions.create(
                    model="tiny",
                    messages=[USER],  # type: ignore[list-item]
                    stream=is_streamed,
                )
            assert caught.value.code == error.code  # type: ignore[attr-defined]
            assert caught.value.request_id


async def test_whether_a_retry_can_help_is_said(site: RouteSite) -> None:
    for error, told in ((EngineLost("gone"), "true"), (Overloaded("full"), "true"), (ValueError("bug"), "false")):
        site.registry.before = raising(error, 0)  # type: ignore[arg-type]
        _, _, headers = await site.post("/v1/chat/completions", CHAT)
        assert headers["x-should-retry"] == told
        assert headers["x-session-id"]


async def test_calls_beyond_the_bound_are_refused_and_their_places_come_back(site: RouteSite) -> None:
    site.registry.before = hanging(0)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(site.post("/v1/chat/completions", CHAT)) for _ in range(3)]
        while len(site.registry.calls) < 3:
            await asyncio.sleep(0.005)
        status, answer, headers = await site.post("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
        for task in running:
            task.cancel()
    async with asyncio.timeout(60):
        while any(session.num_open_calls for session in site.registry.sessions.values()):
            await asyncio.sleep(0.005)
    site.registry.before = raising(EngineLost("unused"), -1)
    assert (await site.post("/v1/chat/completions", CHAT))[0] == 200


# Streams


async def test_a_stream_as_it_is_on_the_wire(site: RouteSite) -> None:
    lines = await site.lines(CHAT)
    assert lines[-1] == "data: [DONE]"
    chunks = [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", *"Hello", None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["session"]["turn_ids"] == ["n1"]


async def test_silence_is_filled(site: RouteSite) -> None:
    async def before(index: int) -> None:
        if index in (0, 2):
            await asyncio.sleep(0.3)

    site.registry.before = before
    lines = await site.lines(CHAT)
    assert lines[0] == ": keep-alive"
    assert lines.count(": keep-alive") >= 4
    assert lines[-1] == "data: [DONE]"


async def test_a_failure_in_the_middle_is_an_error_event(site: RouteSite) -> None:
    site.registry.before = raising(EngineLost("gone"), 2)
    lines = await site.lines(CHAT)
    assert lines[-1] == "data: [DONE]"
    assert orjson.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "engine_lost"
    assert all("finish_reason" not in line or '"finish_reason":null' in line for line in lines)
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in await site.openai.chat.completions.create(model="tiny", messages=[USER], stream=True):  # type: ignore[list-item]
            pass


# Retries and deadlines


async def test_a_repeat_is_known_by_its_body_and_count(site: RouteSite) -> None:
    body = orjson.dumps(CHAT)
    for count, sent in (("0", body), ("1", body), ("2", body + b" "), ("x", body), ("-1", body)):
        await site.post("/v1/chat/completions", sent, x_session_id="a", x_stainless_retry_count=count)
    await site.post("/sessions/a/v1/chat/completions", body)
    keys = [key for _, _, key in site.registry.calls]
    assert [key.retry_count for key in keys] == [0, 1, 2, 0, 0, 0]
    same = keys[0].digest
    assert [key.digest == same for key in keys] == [True, True, False, True, True, False]


async def test_a_call_ends_when_its_client_stops_waiting(site: RouteSite) -> None:
    for hint, timeout_s in (("12.5", 12.5), ("None", 600.0), ("nan", 600.0), ("9999", 600.0), ("-1", 600.0)):
        await site.post("/v1/chat/completions", CHAT, x_stainless_read_timeout=hint)
        assert site.registry.calls[-1][1].timeout_s == timeout_s


def test_every_route_of_the_endpoint_asks_for_a_key() -> None:
    app, _ = endpoint_app(FakeRegistry())
    open_paths = {"/health", "/health_generate", "/openapi.json"}
    for route in app.routes:
        path = route.path  # type: ignore[attr-defined]
        if path not in open_paths and path.split("/")[1] != "ui":  # the viewer's files
            names = [one.call.__qualname__ for one in route.dependant.dependencies]  # type: ignore[attr-defined]
            assert any("require" in name or "authenticate" in name for name in names), route


# Real sessions
