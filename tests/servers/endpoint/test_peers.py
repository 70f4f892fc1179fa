"""Three ingress processes of one service in one event loop: a session's owner answers requests to each of them."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from yarl import URL

from agentloop.api.coordinator import EndpointTable
from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest, ServiceUnavailable, SessionLost
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.types import Message, RolloutTask
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.endpoint.shards import HOP_HEADER, HeldElsewhere, ShardRouter, take_shard_lock
from agentloop_servers.http.auth import SessionKey
from agentloop_servers.http.guard import HttpGuard, HttpLimits
from tests.support.endpoint.chat_service import RENDERER
from tests.support.endpoint.front_door import serving
from tests.support.service.whole_service import ServiceSite, simulated_config, whole_site

NUM = 3
FRAMING = {"connection", "content-length", "date", "server", "transfer-encoding", "x-request-id", "request-id"}

engines: list[SimulatedEngine] = []


def build(config: ServiceConfig) -> SimulatedEngine:
    """Build an engine that takes about two seconds for 1,000 tokens."""
    spec = SimulatedSpec(RENDERER.vocab_size, 4096, num_blocks=64_000, latency=LatencyModel(decode_s=0.002))
    engines.append(SimulatedEngine(spec))
    return engines[-1]


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServiceSite]:
    engines.clear()
    run_dir = tmp_path_factory.mktemp("run")
    async with whole_site(simulated_config(replicas=1, ingress_replicas=NUM), run_dir, build) as started:
        yield started


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def id_of(owner: int, prefix: str) -> str:
    """Return a client-chosen session id that belongs to process `owner`."""
    names = (f"{prefix}-{number}" for number in range(1000))
    return next(name for name in names if zlib.crc32(name.encode()) % NUM == owner)


def body(**changed: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **changed}


def ended(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """Return the headers that do not concern a single connection."""
    return {name.lower(): value for name, value in answer.headers.items() if name.lower() not in FRAMING}


async def until_idle(timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while engines[0].load().num_running:
            await asyncio.sleep(0.01)


async def until_running() -> None:
    async with asyncio.timeout(60):
        while not engines[0].load().num_running:
            await asyncio.sleep(0.005)


async def facts(http: aiohttp.ClientSession, url: str, session_id: str) -> dict[str, Any]:
    async with http.get(f"{url}/sessions/{session_id}") as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def test_a_service_on_ipv6_is_whole(tmp_path, http):
    config = simulated_config(replicas=1, ingress_replicas=NUM, host="::1")
    async with whole_site(config, tmp_path, build) as site:
        place = {}
        for number, process in enumerate(site.ingresses):
            assert process.direct_url.startswith("http://[::1]:")
            async with http.post(
                f"{process.direct_url}/sessions", json={"session_id": id_of(0, f"v6-{number}")}
            ) as made:
                place = await made.json()
                assert place["base_url"].startswith(f"{site.urls[0]}/")
                assert place["direct_url"].startswith("http://[::1]:")
            async with http.post(f"{place['base_url']}/chat/completions", json=body()) as answer:
                assert answer.status == 200, await answer.text()
        async with RolloutClient(site.ingresses[0].direct_url) as client:
            async with client.session() as session:
                await session.openai.chat.completions.create(**body())
            rollout = await client.submit([RolloutTask("t", (Message("user", "Hi"),))])
            async with asyncio.timeout(60):
                assert [one.is_complete async for one in rollout] == [True]


@pytest.mark.parametrize("owner", range(NUM))
@pytest.mark.parametrize("carrier", ["path", "header", "body", "key"])
async def test_a_session_is_reached_through_any_process_by_any_carrier(site, http, carrier, owner):
    session_id = id_of(owner, f"by-{carrier}")
    async with http.post(f"{site.urls[0]}/sessions", json={"session_id": session_id}) as answer:
        key = (await answer.json())["api_key"]
    for number, url in enumerate(site.urls):
        path, headers, given = "/v1/chat/completions", {"x-request-id": f"r{number}"}, body()
        if carrier == "path":
            path = f"/sessions/{session_id}{path}"
        elif carrier == "header":
            headers["X-Session-ID"] = session_id
        elif carrier == "body":
            given["session"] = session_id
        else:
            headers["authorization"] = f"Bearer {key}"
        async with http.post(url + path, json=given, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["x-session-id"] == session_id
            assert answer.headers.getall("x-request-id") == [f"r{number}"]
            assert answer.headers["x-turn-id"]
        assert (await facts(http, url, session_id))["num_turns"] == number + 1


async def test_a_one_off_stays_where_it_was_asked_and_can_go_on_anywhere(site, http):
    names = []
    for url in site.urls:
        async with http.post(f"{url}/v1/chat/completions", json=body()) as answer:
            names.append(answer.headers["x-session-id"])
    assert [int(name.split("-")[1], 16) for name in names] == list(range(NUM))
    for url in site.urls:
        assert [(await facts(http, url, name))["num_turns"] for name in names] == [1] * NUM


async def test_the_id_of_a_response_finds_its_session_through_any_process(site, http):
    previous, turns = None, []
    for url in (*site.urls, site.urls[0]):
        asked = {"model": "default", "input": "Hi", "max_output_tokens": 8, "previous_response_id": previous}
        async with http.post(f"{url}/v1/responses", json=asked) as answer:
            assert answer.status == 200, await answer.text()
            response = await answer.json()
        previous = response["id"]
        turns.append(response["session"])
    assert len({turn["session_id"] for turn in turns}) == 1
    assert (await facts(http, site.urls[1], turns[0]["session_id"]))["num_turns"] == len(turns)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_repeat_through_another_process_is_the_same_answer_byte_for_byte(site, http, is_streamed):
    session_id = id_of(1, f"bytes-{is_streamed}")
    given = orjson.dumps(body(session=session_id, stream=is_streamed, logprobs=True, seed=1))
    seen = []
    for count, url in enumerate((*site.urls, site.ingresses[1].direct_url)):
        headers = {"content-type": "application/json", "x-stainless-retry-count": str(count)}
        async with http.post(f"{url}/v1/chat/completions", data=given, headers=headers) as answer:
            assert answer.status == 200
            content = await answer.read()
            if is_streamed:  # each stream has its own id and time
                content = re.sub(rb'"id":"chatcmpl-\w+"|"created":\d+', b"", content)
            seen.append((content, ended(answer)))
    _first, second, third, fourth = seen  # the stream of a repeat may be cut differently
    assert second == third == fourth
    assert content.endswith(b"data: [DONE]\n\n") is is_streamed
    assert (await facts(http, site.urls[0], session_id))["num_turns"] == 1


async def test_records_are_the_same_bytes_through_any_process(site, http):
    session_id = id_of(2, "records")
    async with http.post(f"{site.urls[2]}/v1/chat/completions", json=body(session=session_id)) as answer:
        assert answer.status == 200
    async with http.post(f"{site.urls[0]}/sessions/{session_id}/finish", json={}) as answer:
        assert answer.status == 200
    for accept in ("application/json", "application/msgpack"):
        seen = set()
        for url in site.urls:
            # An escaped spelling: the target is forwarded unchanged.
            path = f"/sessions/{session_id.replace('-', '%2D')}/trajectories"
            async with http.get(URL(url + path, encoded=True), headers={"accept": accept}) as answer:
                assert (answer.status, answer.content_type) == (200, accept)
                seen.add(await answer.read())
        assert len(seen) == 1


async def test_a_stream_is_passed_on_as_it_comes(site, http):
    session_id = id_of(1, "stream")
    url = site.urls[0]
    given = body(session=session_id, stream=True, max_tokens=500, min_tokens=500)
    async with http.post(f"{url}/v1/chat/completions", json=given) as answer:
        assert answer.content_type == "text/event-stream"
        first = await answer.content.readany()
        assert first.startswith(b"data: ")
        assert (await facts(http, url, session_id))["num_open_calls"] == 1
        rest = await answer.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_unmodified_client_through_the_wrong_process(site):
    session_id = id_of(2, "sdk")
    async with openai.AsyncOpenAI(base_url=f"{site.urls[0]}/sessions/{session_id}/v1", api_key="x") as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(**body())
        assert caught.value.code == "session_not_found"
        async with RolloutClient(site.urls[1]) as owner, owner.session(session_id=session_id) as session:
            messages: list[Any] = [{"role": "user", "content": "Hi"}]
            reply = await client.chat.completions.create(**body(messages=messages))
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "?"}]
            stream = await client.chat.completions.create(**body(messages=messages, stream=True))
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            await session.reward(0.5)
        with pytest.raises(openai.ConflictError) as finished:
            await client.chat.completions.create(**body())
        assert finished.value.code == "session_finished"
        assert finished.value.response.headers["x-should-retry"] == "false"
    async with RolloutClient(site.urls[0]) as reader:
        records = [record async for record in reader.finished_sessions(idle_s=0)]
    [record] = [record for record in records if record.group_id == session_id]
    assert (record.is_complete, record.reward, len(record.path.turns)) == (True, 0.5, 2)


async def test_refusals_of_the_owner_keep_their_dialect(site, http):
    session_id = id_of(1, "never-made")
    given = {**body(), "messages": [{"role": "user", "content": "Hi"}]}
    for path, is_ours in (("/v1/chat/completions", True), ("/v1/messages", False)):
        seen = []
        for url in (site.urls[0], site.urls[1]):
            async with http.post(f"{url}/sessions/{session_id}{path}", json=given) as answer:
                assert answer.status == 404
                refusal = await answer.json()
                assert ("type" in refusal) is not is_ours
                seen.append((refusal["error"], ended(answer)))
        assert seen[0] == seen[1]


async def test_a_session_of_ones_own_id_is_made_by_its_owner(site, http):
    for owner in range(NUM):
        session_id = id_of(owner, "own")
        for url in site.urls:
            async with http.post(f"{url}/sessions", json={"session_id": session_id}) as answer:
                place = await answer.json()
            assert place["session_id"] == session_id
            # the public port of the process that created it
            assert place["base_url"] == f"{site.urls[owner]}/sessions/{session_id}/v1"
            assert place["direct_url"] == f"{site.ingresses[owner].direct_url}/sessions/{session_id}/v1"


async def test_a_session_without_an_id_belongs_to_whom_was_asked(site, http):
    for process, url in zip(site.ingresses, site.urls, strict=True):
        async with http.post(f"{url}/sessions", json={}) as answer:
            place = await answer.json()
        assert place["direct_url"] == f"{process.direct_url}/sessions/{place['session_id']}/v1"
        assert process.sessions.keys.opened_by(place["api_key"]) == SessionKey(place["session_id"])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_the_wrong_process_ends_the_call_in_the_engine(site, http, is_streamed):
    session_id = id_of(1, f"leave-{is_streamed}")
    given = body(session=session_id, stream=is_streamed, max_tokens=3000, min_tokens=3000)
    call = asyncio.create_task(http.post(f"{site.urls[0]}/v1/chat/completions", json=given))
    await until_running()
    if is_streamed:
        answer = await call
        await answer.content.readany()
        answer.close()
    else:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await until_idle()
    while (found := await facts(http, site.urls[2], session_id))["num_open_calls"]:
        await asyncio.sleep(0.01)  # the engine ends the request before the session closes the call
    assert (found["num_turns"], found["is_complete"]) == (0, False)


async def test_a_request_is_never_passed_on_twice(site, http):
    given = body(session=id_of(1, "hop"))
    async with http.post(f"{site.urls[0]}/v1/chat/completions", json=given, headers={HOP_HEADER: "1"}) as answer:
        assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")


@pytest.mark.slow
async def test_an_owner_that_is_away_is_a_retryable_503_until_it_is_back(tmp_path):
    config = simulated_config(replicas=1, ingress_replicas=2)
    async with whole_site(config, tmp_path, holder_wait_s=2.0) as site, aiohttp.ClientSession() as http:
        session_id = next(name for name in map(str, range(99)) if zlib.crc32(name.encode()) % 2 == 1)
        call = f"{site.urls[0]}/sessions/{session_id}/v1"
        async with http.post(f"{site.urls[0]}/sessions", json={"session_id": session_id}) as answer:
            direct_url = (await answer.json())["direct_url"]
        async with http.post(f"{call}/chat/completions", json=body()) as answer:
            assert answer.status == 200
        await site.ingresses[1].close()

        for path in ("/chat/completions", "/messages"):
            async with http.post(f"{call}{path}", json=body()) as answer:
                assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")
                assert int(answer.headers["retry-after"]) >= 1
                refusal = await answer.json()
                assert ("type" in refusal) is (path == "/messages")
                assert refusal["error"]["code"] == "service_unavailable"

        waiting = asyncio.create_task(http.post(f"{call}/chat/completions", json=body()))
        again = site.ingress()
        try:
            await again.start(first_shard=0)  # as Serve may number it; partition 0 is taken
            async with await waiting as answer:
                assert answer.status == 200
            async with http.get(f"{direct_url.removesuffix('/v1')}/trajectories") as answer:  # the same port
                [record] = await answer.json()
            assert sum(len(path["turns"]) for path in record["paths"]) == 2
            assert record["is_complete"]
        finally:
            await again.close()


class OnePeer:
    """A directory that knows the URL of process 1."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def join_endpoint(self, number: int, url: str, public_url: str) -> EndpointTable:
        return EndpointTable({0: url, 1: self.url})


@asynccontextmanager
async def passing_on_to(
    owner: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Return an app that forwards every session to `owner`, which serves a bare connection."""
    server = await asyncio.start_server(owner, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    router = ShardRouter(OnePeer(f"http://127.0.0.1:{port}"), 0, 2, holder_wait_s=0.5)
    await router.start("unused")

    async def pass_on(request: Request, error: Exception) -> Response:
        return await router.forward(request, 1)

    async def call(request: Request) -> Response:
        raise HeldElsewhere(1)

    app = FastAPI()
    app.add_exception_handler(HeldElsewhere, pass_on)
    app.add_api_route("/{path:path}", call, methods=["POST"])
    app.add_middleware(HttpGuard, limits=HttpLimits())
    try:
        async with server, serving(app) as url:
            yield url
    finally:
        await router.close()
        await router.close()


@pytest.mark.parametrize(
    "sent",
    [b"Content-Length: 10\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"],
    ids=["whole", "chunked"],
)
async def test_an_owner_lost_within_its_answer_cuts_it(http, sent):
    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + sent)
        await writer.drain()
        writer.close()

    async with passing_on_to(owner) as url, http.post(url) as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_an_owner_that_hangs_up_without_an_answer_is_a_503(http):
    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with passing_on_to(owner) as url, http.post(url) as answer:
        assert answer.status == 503


async def test_what_goes_on_is_what_came(http):
    seen = []

    async def owner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(4))
        writer.write(b"HTTP/1.1 418 x\r\nContent-Length: 2\r\nX-A: 1\r\nX-A: 2\r\nConnection: close\r\n\r\nno")
        await writer.drain()
        writer.close()

    async with passing_on_to(owner) as url:
        headers = [("x-b", "1"), ("x-b", "2"), ("x-request-id", "mine"), ("host", "front.example:80")]
        target = URL(f"{url}/a%2Fb//c?q=%20&q=+", encoded=True)
        async with http.post(target, data=b"\0\xff{}", headers=headers) as answer:
            assert (answer.status, await answer.read()) == (418, b"no")
            assert answer.headers.getall("x-a") == ["1", "2"]
            assert answer.headers["x-request-id"] == "mine"
    head, _, content = seen[0].partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert content == b"\0\xff{}"
    assert head.startswith(b"POST /a%2Fb//c?q=%20&q=+ HTTP/1.1")
    for line in (b"x-b: 1", b"x-b: 2", b"x-request-id: mine", b"host: front.example:80", b"x-agentloop-hop: 1"):
        assert lines.count(line) == 1
    assert lines.count(b"content-length: 4") == 1


async def test_each_shard_is_taken_once_and_keeps_its_port(tmp_path):
    number, first = await take_shard_lock(tmp_path, (0, 1), first=1)
    other, second = await take_shard_lock(tmp_path, (0, 1), first=1)
    assert (number, other, first.text) == (1, 0, "")
    with pytest.raises(ServiceUnavailable):
        await take_shard_lock(tmp_path, (0, 1), timeout_s=0.2)
    first.set_text("65535")
    first.set_text("4711")
    waiting = asyncio.create_task(take_shard_lock(tmp_path, (0, 1)))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    first.release()
    first.release()
    async with asyncio.timeout(60):
        number, third = await waiting
    assert (number, third.text) == (1, "4711")
    third.release()
    second.release()


async def test_a_rank_beyond_the_number_of_processes_is_refused():
    with pytest.raises(InvalidRequest):
        ShardRouter(OnePeer(""), 2, 2)


class Places:
    """A coordinator of several hosts whose partition map is set by the test."""

    def __init__(self, **table: object) -> None:
        self.table = EndpointTable({}, **table)
        self.is_away = False
        self.num_joined = 0

    async def join_endpoint(self, number: int, url: str, public_url: str) -> EndpointTable:
        if self.is_away:
            raise ServiceUnavailable("cut off")
        self.num_joined += 1
        return replace(self.table, urls={number: url})


@asynccontextmanager
async def router_over_hosts(places: Places, number: int = 0) -> AsyncIterator[ShardRouter]:
    router = ShardRouter(places, number, None)
    await router.start("http://here", "http://public")
    try:
        async with asyncio.timeout(60):
            while not places.num_joined:
                await asyncio.sleep(0.01)
        yield router
    finally:
        await router.close()


def made_by(number: int) -> str:
    return ShardRouter(OnePeer(""), number, None).new_id()


async def test_over_hosts_the_services_own_ids_name_their_process_and_others_a_slot():
    async with router_over_hosts(Places(holders=(0, 1))) as router:
        router.check_is_here(router.new_id())
        with pytest.raises(HeldElsewhere) as elsewhere:
            router.check_is_here(f"alice~{made_by(17)}")
        assert elsewhere.value.rank == 17
        found = set()
        for name in map(str, range(20)):
            try:
                router.check_is_here(name)
                found.add(0)
            except HeldElsewhere as error:
                found.add(error.rank)
        assert found == {0, 1}


async def test_over_hosts_nobody_guesses_before_slots_are_given_out():
    async with router_over_hosts(Places()) as router:
        router.check_is_here(router.new_id())
        with pytest.raises(ServiceUnavailable):
            router.check_is_here("mine")


async def test_sessions_of_a_lost_host_are_lost_and_its_slots_go_on():
    async with router_over_hosts(Places(holders=(0,), lost=frozenset({2}), inherited=frozenset({0}))) as router:
        with pytest.raises(SessionLost) as lost:
            router.check_is_here(made_by(2))
        assert (lost.value.code, lost.value.http_status) == ("session_lost", 410)
        router.check_is_here("mine")
        assert router.is_inherited("mine")
        assert not router.is_inherited(router.new_id())


async def test_a_process_that_is_cut_off_records_nothing_that_may_be_anothers(monkeypatch):
    places = Places(holders=(0,))
    async with router_over_hosts(places) as router:
        router.check_may_record("mine")
        places.is_away = True
        monkeypatch.setattr("agentloop_servers.endpoint.shards.FRESH_S", 0.0)
        with pytest.raises(ServiceUnavailable):
            router.check_may_record("mine")
        monkeypatch.undo()
        places.is_away, places.table, seen = False, EndpointTable({}, (1,)), places.num_joined
        async with asyncio.timeout(60):
            while places.num_joined < seen + 2:
                await asyncio.sleep(0.01)
        with pytest.raises(SessionLost):
            router.check_may_record("mine")
        router.check_may_record(router.new_id())
