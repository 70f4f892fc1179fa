"""Affinity names of unrecorded calls: any header of the table names the lease, and Dynamo's last call ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentloop_servers.endpoint.calls import AFFINITY_HEADERS, FINAL_HEADER
from tests.support.endpoint.chat_service import ChatService, chat_service

CALLS: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}},
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}},
}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path) as service:
        yield service


async def called(service: ChatService, path: str, **headers: str) -> dict[str, str]:
    status, answer, headers_back = await service.call("POST", path, json=CALLS[path], headers=headers)
    assert status == 200, answer
    return {name.lower(): value for name, value in headers_back.items()}


async def test_all_headers_of_both_dialects_name_one_lease(service: ChatService) -> None:
    for path in CALLS:
        for header in AFFINITY_HEADERS:
            assert "x-affinity-source" not in await called(service, path, **{header: "rollout 1"})
    assert service.coordinator.num_leased == 1


@pytest.mark.parametrize("path", CALLS)
async def test_the_first_of_different_names_counts(service: ChatService, path: str) -> None:
    await called(service, path, **{"x-smg-routing-key": "a"})
    answer = await called(service, path, **{"x-dynamo-session-id": "b", "x-smg-routing-key": "a"})
    assert answer["x-affinity-source"] == "x-smg-routing-key"
    assert service.coordinator.num_leased == 1


async def is_held(service: ChatService, name: str) -> bool:
    """Return True if the affinity had a lease, which is released now."""
    _, answer, _ = await service.call("POST", "/finish_session", params={"session_id": name})
    return bool(answer["finished"])


@pytest.mark.parametrize("path", CALLS)
async def test_the_last_call_of_a_dynamo_session_ends_its_lease(service: ChatService, path: str) -> None:
    name = {"x-dynamo-session-id": "a"}
    await called(service, path, **name, **{FINAL_HEADER: "false"})
    assert await is_held(service, "a")
    await called(service, path, **name, **{FINAL_HEADER: "true"})
    assert not await is_held(service, "a")


async def test_the_end_of_a_stream_ends_the_lease_too(service: ChatService) -> None:
    body = {**CALLS["/generate"], "stream": True}
    for final in ("false", "true"):
        headers = {"x-dynamo-session-id": "a", FINAL_HEADER: final}
        async with service.http.post(f"{service.url}/generate", json=body, headers=headers) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await is_held(service, "a") == (final == "false")
