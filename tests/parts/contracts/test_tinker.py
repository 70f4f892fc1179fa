"""Tinker's sampling routes over the real app. `make test-contracts` runs its published client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from agentloop.client.client import RolloutClient
from agentloop_contracts.tinker import PROTOBUF, REFUSED
from agentloop_servers.http.auth import Keys
from tests.support.endpoint.chat_service import MODEL, ChatService, chat_service
from tests.support.service.whole_service import simulated_config, whole_site

IDS = [5, 6, 7, 8]
Fields = dict[int, list[Any]]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path) as service:
        yield service


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def decoded(data: bytes) -> Fields:
    """Decode a protobuf message: the values of each field, numbers or bytes."""
    fields, at = Fields(), 0
    while at < len(data):
        tag, at = varint(data, at)
        value, at = varint(data, at)
        if tag & 7 == 2:
            fields.setdefault(tag >> 3, []).append(data[at : at + value])
            at += value
        else:
            assert tag & 7 == 0
            fields.setdefault(tag >> 3, []).append(value)
    return fields


async def sampler(service: ChatService, **named: str) -> str:
    body = named or {"base_model": MODEL}
    status, answer, _ = await service.call("POST", "/api/v1/create_sampling_session", json=body)
    assert status == 200, answer
    return str(answer["sampling_session_id"])


def asked(sampler_id: str, seq_id: int = 0, **fields: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS[:2]}, {"type": "encoded_text", "tokens": IDS[2:]}]}
    params = {"max_tokens": 6, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 3}
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": prompt,
        "sampling_params": params,
        **fields,
    }


async def begun(service: ChatService, sampler_id: str, **fields: Any) -> dict[str, Any]:
    status, answer, _ = await service.call("POST", "/api/v1/asample", json=asked(sampler_id, **fields))
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


async def retrieved(service: ChatService, request_id: str) -> Fields:
    url = f"{service.url}/api/v1/retrieve_future"
    async with service.http.post(url, json={"request_id": request_id}) as answer:
        data = await answer.read()
        assert (answer.status, answer.content_type) == (200, PROTOBUF), data
        return decoded(data)


async def failure(service: ChatService, request_id: str) -> dict[str, str]:
    status, answer, _ = await service.call("POST", "/api/v1/retrieve_future", json={"request_id": request_id})
    assert status == 200
    assert isinstance(answer, dict)
    return answer


async def test_a_sample_has_the_ids_and_logprobs_of_the_token_route(service: ChatService) -> None:
    name = await sampler(service)
    future = await begun(service, name, num_samples=2, topk_sample_logprobs=2)
    assert len(future["sample_sequence_ids"]) == 2
    sequences = [decoded(one) for one in (await retrieved(service, future["request_id"]))[1]]
    params = {"max_tokens": 6, "seed": 3, "n": 2, "logprobs": 2}
    body = {"token_ids": IDS, "sampling_params": params}
    status, answer, _ = await service.call("POST", "/inference/v1/generate", json=body)
    assert status == 200, answer
    for sequence, choice in zip(sequences, answer["choices"], strict=True):
        entries = choice["logprobs"]["content"]
        assert np.frombuffer(sequence[2][0], "<i4").tolist() == choice["token_ids"]
        assert np.frombuffer(sequence[3][0], "<f4").tolist() == [one["logprob"] for one in entries]
        assert sequence[1] == [1 if choice["finish_reason"] == "length" else 0]
        top = decoded(sequence[4][0])
        assert (top[3], top[4]) == ([2], [len(entries)])
        ids = np.frombuffer(top[1][0], "<i4").reshape(-1, 2)
        for row, entry in zip(ids.tolist(), entries, strict=True):
            assert {one["token_id"] for one in entry["top_logprobs"]} <= {*row, entry["token_id"]}


async def test_prompt_logprobs_are_the_scores_of_the_prompt(service: ChatService) -> None:
    async with RolloutClient(service.url) as client:
        [expected] = await client.score([IDS])
    name = await sampler(service)
    for last_n, num_scored in ((None, 3), (2, 2)):
        fields = {} if last_n is None else {"prompt_logprobs_last_n": last_n}
        future = await begun(service, name, seq_id=num_scored, prompt_logprobs=True, **fields)
        values = np.frombuffer((await retrieved(service, future["request_id"]))[2][0], "<f4")
        assert values[4 - num_scored :].tolist() == np.float32(expected.logprobs)[3 - num_scored :].tolist()
        assert np.isnan(values[: 4 - num_scored]).all()
    future = await begun(service, name, seq_id=9, topk_prompt_logprobs=2)
    top = decoded((await retrieved(service, future["request_id"]))[3][0])
    assert (top[3], top[4]) == ([2], [4])
    assert np.frombuffer(top[2][0], "<f4")[:2].tolist() == [-99999.0] * 2  # the first token has no logprob


async def test_a_repeated_request_returns_the_first_future(service: ChatService) -> None:
    name = await sampler(service)
    futures = [await begun(service, name, seq_id=seq_id) for seq_id in (0, 0, 1)]
    assert futures[0] == futures[1] != futures[2]
    assert len({str(await retrieved(service, one["request_id"])) for one in futures}) == 1  # they have one seed
    assert await retrieved(service, futures[0]["request_id"]) == await retrieved(service, futures[0]["request_id"])


async def test_stops(service: ChatService) -> None:
    name = await sampler(service)
    params = asked(name)["sampling_params"]
    [whole] = (await retrieved(service, (await begun(service, name))["request_id"]))[1]
    ids = np.frombuffer(decoded(whole)[2][0], "<i4").tolist()
    stopped = await begun(service, name, seq_id=1, sampling_params={**params, "stop": [ids[2]]})
    [sequence] = (await retrieved(service, stopped["request_id"]))[1]
    first = ids.index(ids[2]) + 1
    assert np.frombuffer(decoded(sequence)[2][0], "<i4").tolist() == ids[:first]
    assert decoded(sequence)[1] == [0]
    endless = await begun(service, name, seq_id=2, sampling_params={**params, "stop": []})
    [sequence] = (await retrieved(service, endless["request_id"]))[1]
    assert len(np.frombuffer(decoded(sequence)[2][0], "<i4")) == 6


async def test_a_sampler_of_one_weight_version(service: ChatService) -> None:
    name = await sampler(service, model_path=f"tinker://{MODEL}/versions/0")
    await retrieved(service, (await begun(service, name))["request_id"])
    status, answer, _ = await service.call("GET", f"/api/v1/samplers/{name}")
    assert (status, answer["base_model"], answer["model_path"]) == (200, MODEL, f"tinker://{MODEL}/versions/0")
    later = await sampler(service, model_path=f"tinker://{MODEL}/versions/7")
    failed = await failure(service, (await begun(service, later))["request_id"])
    assert failed["category"] == "user"
    assert failed["error"].startswith("weight_version_not_served: ")


async def test_what_is_refused(service: ChatService) -> None:
    name = await sampler(service)

    async def refused(path: str, body: dict[str, Any], status: int, param: str | None) -> str:
        found, answer, _ = await service.call("POST", f"/api/v1/{path}", json=body)
        assert (found, answer["error"]["param"]) == (status, param), answer
        return str(answer["error"]["message"])

    create = "create_sampling_session"
    assert "'nothing'" in await refused(create, {"base_model": "nothing"}, 404, "model")
    assert "tinker://NAME" in await refused(create, {"model_path": "tinker://a b"}, 400, "model_path")
    await refused(create, {}, 400, "base_model")
    await refused("asample", asked("elsewhere"), 404, "sampling_session_id")
    await refused("asample", asked(name, prompt_alt_tokens_k=2), 400, "prompt_alt_tokens_k")
    await refused("asample", asked(name, sampling_params={"temperature": -1.0}), 400, "sampling_params.temperature")
    image = {"chunks": [{"type": "image", "data": "", "format": "png"}]}
    await refused("asample", asked(name, prompt=image), 400, "prompt.chunks.0.type")
    gone = name.partition("~")[0] + "~5"
    assert "sample again" in await refused("retrieve_future", {"request_id": gone}, 410, None)
    for path in REFUSED:
        assert "push its weights" in await refused(path.removeprefix("/api/v1/"), {}, 400, None)


async def test_a_cancelled_sample_frees_its_slot(tmp_path: Path) -> None:
    async with chat_service(tmp_path, decode_s=0.05) as service:
        name = await sampler(service)
        params = {**asked(name)["sampling_params"], "max_tokens": 2000, "stop": []}
        future = await begun(service, name, sampling_params=params)

        async def until(num_running: int) -> None:
            async with asyncio.timeout(10):
                while service.engine.load().num_running != num_running:
                    await asyncio.sleep(0.01)

        await until(1)
        wanted = {"request_id": future["request_id"]}
        assert (await service.call("POST", "/api/v1/cancel_future", json=wanted))[0] == 200
        assert (await failure(service, future["request_id"]))["error"].startswith("cancelled: ")
        await until(0)


async def test_a_sample_belongs_to_its_user(tmp_path: Path) -> None:
    async with chat_service(tmp_path, keys=Keys.of(["tml-one", "tml-two"], "tml-admin")) as service:
        one, two = ({"x-api-key": f"tml-{name}"} for name in ("one", "two"))
        path = "/api/v1/create_sampling_session"
        assert (await service.call("POST", path, json={"base_model": MODEL}))[0] == 401
        _, made, _ = await service.call("POST", path, json={"base_model": MODEL}, headers=one)
        body = asked(made["sampling_session_id"])
        _, future, _ = await service.call("POST", "/api/v1/asample", json=body, headers=one)
        wanted = {"request_id": future["request_id"]}
        assert (await service.call("POST", "/api/v1/retrieve_future", json=wanted, headers=two))[0] == 410
        async with service.http.post(f"{service.url}/api/v1/retrieve_future", json=wanted, headers=one) as answer:
            assert answer.status == 200


async def test_what_has_no_effect(service: ChatService) -> None:
    for path in ("session_heartbeat", "sessions/x/finish", "telemetry"):
        status, answer, _ = await service.call("POST", f"/api/v1/{path}", json={"events": []})
        assert (status, answer["status"]) == (200, "accepted")
    status, config, _ = await service.call("POST", "/api/v1/client/config", json={"sdk_version": "0.38.0"})
    assert (status, config["pjwt_auth_enabled"]) == (200, False)
    status, shown, _ = await service.call("GET", "/api/v1/get_server_capabilities")
    assert [one["model_name"] for one in shown["supported_models"]] == [MODEL]


async def test_every_ingress_process_serves_a_sampler_that_another_one_made(tmp_path: Path) -> None:
    async with (
        whole_site(simulated_config(ingress_replicas=2), tmp_path) as site,
        aiohttp.ClientSession() as http,
    ):

        async def post(url: str, path: str, body: dict[str, Any]) -> bytes:
            async with http.post(f"{url}/api/v1/{path}", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.read()

        for made_by, used in (site.urls, site.urls[::-1]):
            made = await post(made_by, "create_sampling_session", {"base_model": "default"})
            body = asked(orjson.loads(made)["sampling_session_id"])
            future = orjson.loads(await post(used, "asample", body))
            [sequence] = decoded(await post(used, "retrieve_future", {"request_id": future["request_id"]}))[1]
            assert len(decoded(sequence)[2][0]) == 6 * 4
