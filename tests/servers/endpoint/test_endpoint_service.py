"""The endpoint as `agentloop serve` runs it: two ingress processes on one public port, over simulated engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import aiohttp
import openai
import pytest

from agentloop.client.client import RolloutClient
from agentloop.types import Trajectory
from tests.servers.processes import stop_process
from tests.servers.shared_service import NUM_INGRESS, Service, body, of_length

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = of_length(3000)


@pytest.fixture
def service(shared_service: Service) -> Service:
    return shared_service


async def is_lost(call: asyncio.Task[int]) -> bool:
    """Return True if a call got no answer: an error, or a cut connection."""
    try:
        return await call >= 500
    except aiohttp.ClientError:
        return True


async def record_of(client: RolloutClient, session_id: str) -> Trajectory:
    page = await client.read("sessions", limit=256)
    [record] = [one for one in page.trajectories if one.group_id == session_id]
    return record


@pytest.mark.parametrize("way", ["public", "direct"])
@pytest.mark.parametrize("owner", range(NUM_INGRESS))
async def test_an_unmodified_client_has_a_recorded_conversation(service, way, owner):
    place = await service.open(owner)
    assert place["base_url"] == f"{service.url}/sessions/{place['session_id']}/v1"
    base_url = place["base_url"] if way == "public" else place["direct_url"]
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=place["api_key"], max_retries=0) as agent:
        reply = await agent.chat.completions.create(**body(messages=messages))
        assert re.fullmatch(r"[\w-]+", reply._request_id or "")
        messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
        chunks = await agent.chat.completions.create(**body(messages=messages, stream=True))
        assert [chunk.choices[0].finish_reason async for chunk in chunks][-1]
        with pytest.raises(openai.BadRequestError) as caught:
            await agent.chat.completions.create(**body(messages=messages), n=0)
        assert caught.value.param == "n"
    finish = f"{service.url}/sessions/{place['session_id']}/finish"
    control = {"authorization": f"Bearer {place['control_key']}"}
    async with service.http.post(finish, json={"reward": 0.5}, headers=control) as answer:
        [given] = await answer.json()
    record = await record_of(service.client, place["session_id"])
    assert (record.is_complete, record.reward, len(record.path.turns)) == (True, 0.5, 2)
    assert record.path.prompt_ids.tolist() == given["paths"][0]["prompt_ids"]


async def test_a_session_of_the_client_library(service):
    async with service.client.session() as session:
        assert session.base_url.startswith("http://127.0.0.1:")
        assert not session.base_url.startswith(service.url)  # it uses the direct URL
        await session.openai.chat.completions.create(**body())
        await session.reward(1.0)
    record = await record_of(service.client, session.session_id)
    assert (record.is_complete, record.reward, len(record.path.turns)) == (True, 1.0, 1)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("owner", range(NUM_INGRESS))
async def test_a_client_that_leaves_ends_the_call_in_the_engine_through_either_process(service, is_streamed, owner):
    place = await service.open(owner)
    given = body(stream=is_streamed, **LONG)
    call = asyncio.create_task(service.http.post(f"{place['base_url']}/chat/completions", json=given))
    await service.until_open(place["session_id"], 1)
    if is_streamed:
        answer = await call
        await answer.content.readany()
        answer.close()
    else:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    found = await service.until_open(place["session_id"], 0, timeout_s=5.0)
    assert (found["num_turns"], found["is_complete"]) == (0, False)
    await service.until_engines_idle()


async def test_a_stopped_ingress_process_holds_up_its_own_sessions_alone(service):
    others = await service.open(1)
    stopped = service.pid_of(0)
    stop_process(stopped)
    try:
        for _ in range(8):  # each with its own connection, accepted by the running process
            async with aiohttp.ClientSession() as http:
                given = body(max_tokens=4)
                async with http.post(f"{others['base_url']}/chat/completions", json=given) as answer:
                    assert answer.status == 200
    finally:
        os.kill(stopped, signal.SIGCONT)
    await service.call_with_retries(await service.open(0))


async def test_a_killed_ingress_process_loses_nothing_that_was_answered(service):
    kept, cut, healed, other = [await service.open(owner) for owner in (0, 0, 0, 1)]
    for place in (kept, cut, other):
        assert await service.call(place) == 200
    with_retries = asyncio.create_task(service.call_with_retries(healed, **of_length(600)))
    try:
        streamed = body(stream=True, **LONG)
        without = asyncio.create_task(service.call(cut, content="More?", **LONG))
        stream = await service.http.post(f"{cut['base_url']}/chat/completions", json=streamed)
        await service.until_open(cut["session_id"], 2)
        await service.until_open(healed["session_id"], 1)

        os.kill(service.pid_of(0), signal.SIGKILL)
        assert await is_lost(without)
        with pytest.raises(aiohttp.ClientError):
            await stream.read()
        await service.call_with_retries(other)  # its connection may have been to the killed process
        assert await with_retries in ("stop", "length")
    finally:
        with_retries.cancel()
    for place, num_turns, is_complete in ((kept, 1, True), (cut, 1, False), (healed, 1, True), (other, 2, True)):
        found = await service.facts(place["session_id"])
        assert (found["num_turns"], found["num_open_calls"], found["is_complete"]) == (num_turns, 0, is_complete)
        assert await service.call(place) == 200
    async with openai.AsyncOpenAI(base_url=kept["direct_url"], api_key=kept["api_key"]) as direct:
        await direct.chat.completions.create(**body())  # its URL and its key are still valid
    await service.until_engines_idle()
    for place, is_complete in ((kept, True), (cut, False), (healed, True), (other, True)):
        finish = f"{service.url}/sessions/{place['session_id']}/finish"
        control = {"authorization": f"Bearer {place['control_key']}"}
        async with service.http.post(finish, json={}, headers=control) as answer:
            assert answer.status == 200
        assert (await record_of(service.client, place["session_id"])).is_complete is is_complete
