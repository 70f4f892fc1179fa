"""Routed experts and sampling masks as vLLM's and SGLang's clients read them, and where they are left out."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentloop.api.sessions import decode_trajectories
from agentloop.simulation.policy import ROUTES_SHAPE, routed_experts
from agentloop.values.codec import MSGPACK
from tests.support.endpoint.chat_service import MODEL, RENDERER, SPEC, ChatService, chat_service

STOP = RENDERER.stop_token_ids[0]
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    spec = replace(SPEC, routed_experts=True, sampling_mask=True)
    async with chat_service(tmp_path_factory.mktemp("service"), spec=spec) as service:
        yield service


async def posted(service: ChatService, path: str, body: dict[str, Any]) -> Any:
    status, answer, _ = await service.call("POST", path, json=body)
    assert status == 200, answer
    return answer


def vllm_body(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": prompt, "sampling_params": {"max_tokens": 4, "logit_bias": {str(STOP): -100}, **sampling}}


def read(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


@pytest.mark.parametrize("start", [0, 3, 7])
async def test_vllms_clients_read_numpys_format_and_lists_of_ids(service: ChatService, start: int) -> None:
    body = vllm_body(PROMPT, routed_experts_prompt_start=start)
    [choice] = (await posted(service, "/inference/v1/generate", body))["choices"]
    context = [*PROMPT, *choice["token_ids"]]
    experts = read(choice["routed_experts"])
    assert experts.dtype == np.uint8
    assert np.array_equal(experts, routed_experts(context, start, len(context) - 1).table)
    assert len(choice["sampling_mask"]) == 4
    assert all(one in kept for one, kept in zip(choice["token_ids"], choice["sampling_mask"], strict=True))


async def test_sglangs_clients_read_int32_values(service: ChatService) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_routed_experts": True}
    answer = await posted(service, "/generate", body)
    context = [*PROMPT, *answer["output_ids"]]
    values = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
    shape = (len(context) - 1, *ROUTES_SHAPE)
    assert np.array_equal(values.reshape(shape), routed_experts(context, 0, len(context) - 1).table)
    assert (
        "routed_experts"
        not in (await posted(service, "/generate", {**body, "return_routed_experts": False}))["meta_info"]
    )


async def test_a_session_records_each_row_once_and_in_binary_form_only(service: ChatService) -> None:
    session = (await posted(service, "/sessions", {}))["session_id"]
    path = f"/sessions/{session}/inference/v1/generate"
    [first] = (await posted(service, path, vllm_body(PROMPT)))["choices"]
    context = [*PROMPT, *first["token_ids"], 9]
    num_known = len(context) - 1
    [second] = (await posted(service, path, vllm_body(context)))["choices"]
    assert second["routed_experts"] is None, "the record has the experts of the first turn"
    [third] = (await posted(service, path, vllm_body(context, routed_experts_prompt_start=num_known - 1)))[
        "choices"
    ]
    whole = [*context, *third["token_ids"]]
    expected = routed_experts(whole, num_known - 1, len(whole) - 1).table
    assert np.array_equal(read(third["routed_experts"]), expected)

    path = f"/sessions/{session}/trajectories"
    status, shown, _ = await service.call("GET", path)
    assert status == 200
    assert {one["aux"] for one in shown[0]["paths"]} == {None}
    async with service.http.get(
        f"{service.url}/sessions/{session}/trajectories", headers={"accept": MSGPACK}
    ) as answer:
        [record] = decode_trajectories(await answer.read())
    assert len(record.paths) == 2
    for one in record.paths:
        ids = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
        assert one.routed_experts is not None
        assert np.array_equal(one.routed_experts, routed_experts(ids, 0, len(ids) - 1).table)


async def test_temperature_0_is_refused_by_name(service: ChatService) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    tokens = vllm_body(PROMPT, temperature=0.0)
    for path, body in (("/v1/chat/completions", chat), ("/inference/v1/generate", tokens)):
        status, answer, _ = await service.call("POST", path, json=body)
        assert (status, answer["error"]["param"]) == (400, "temperature"), answer
        assert "temperature 0" in answer["error"]["message"]
        assert "sampling_mask_top_k" in answer["error"]["message"]
