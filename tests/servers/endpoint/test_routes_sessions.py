"""The session routes over the real registry: their answers, and refusals that name the client's field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from agentloop.api.openapi import generation_answer
from agentloop.types import Generation
from agentloop.values import codec
from tests.support.endpoint.chat_service import SPEC, ChatService, chat_service

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": "hi"}
LOOKUP = {"name": "lookup", "parameters": SCHEMA}
COMMON = {"model": "tiny", "max_tokens": 5}


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    spec = replace(SPEC, can_constrain=False)
    async with chat_service(tmp_path_factory.mktemp("service"), spec=spec) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "v1/tokenize", {"prompt": "hi"}),
        ("POST", "tokenize", {"prompt": "hi"}),
        ("POST", "v1/detokenize", {"tokens": [5]}),
        ("GET", "v1/models", None),
    ],
)
async def test_every_route_of_a_session_is_its_own_keys(
    service: ChatService, method: str, path: str, body: dict[str, Any] | None
) -> None:
    keys = {}
    for name in ("mine", "theirs"):
        _, opened, _ = await service.call("POST", "/sessions", json={"session_id": name})
        keys[name] = {"Authorization": f"Bearer {opened['api_key']}"}
    asked = {} if body is None else {"json": body}
    assert (await service.call(method, f"/sessions/mine/{path}", headers=keys["mine"], **asked))[0] == 200
    status, answer, _ = await service.call(method, f"/sessions/theirs/{path}", headers=keys["mine"], **asked)
    assert (status, answer["error"]["code"]) == (404, "session_not_found")
    assert (await service.call(method, f"/sessions/nobodys/{path}", **asked))[0] == 404


@pytest.mark.parametrize("num_top", [0, 3])
async def test_generate_answers_what_was_asked(service: ChatService, num_top: int) -> None:
    await service.call("POST", "/sessions", json={"session_id": f"top{num_top}"})
    body = {"token_ids": [5, 6, 7], "sampling": {"max_tokens": 4, "num_top_logprobs": num_top}}
    status, answer, _ = await service.call("POST", f"/sessions/top{num_top}/generate", json=body)
    assert status == 200
    found = codec.from_builtins(answer, Generation)
    assert [len(row) for row in found.top_logprobs] == [num_top] * len(found.token_ids) * bool(num_top)
    [node] = (await service.sessions.find(f"top{num_top}", ("",))).graph.nodes
    assert [tuple(row) for row in found.top_logprobs] == list(node.reply.top_logprobs)
    assert answer.keys() == generation_answer(found).keys()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": LOOKUP}], "tool_choice": "required"},
            "tool_choice",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            "text.format",
        ),
        ("/v1/responses", {"tools": [{"type": "function", **LOOKUP}], "tool_choice": "required"}, "tool_choice"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format",
        ),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format"),
        (
            "/v1/messages",
            {"tools": [{"name": "lookup", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
    ],
)
async def test_what_cannot_be_constrained_names_the_field_of_the_dialect(
    service: ChatService, path: str, body: dict[str, Any], param: str
) -> None:
    asked = {**COMMON, "messages": [USER], **body}
    if path == "/v1/responses":
        asked = {"model": "tiny", "max_output_tokens": 5, "input": "hi", **body}
    status, answer, _ = await service.call("POST", path, json=asked)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_parameter", param)


async def test_a_raw_constraint_is_named_as_it_came(service: ChatService) -> None:
    await service.call("POST", "/sessions", json={"session_id": "raw"})
    body = {"token_ids": [5], "sampling": {"max_tokens": 4, "constraint": {"kind": "json_object"}}}
    status, answer, _ = await service.call("POST", "/sessions/raw/generate", json=body)
    assert (status, answer["error"]["param"]) == (400, "constraint")


async def control_of(service: ChatService, session_id: str) -> dict[str, str]:
    """Create the session, and return the headers that end it."""
    _, made, _ = await service.call("POST", "/sessions", json={"session_id": session_id})
    return {"authorization": f"Bearer {made['control_key']}"}


async def test_a_revoked_session_takes_no_calls_and_is_still_its_owners(service: ChatService) -> None:
    control = await control_of(service, "revoked")
    chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    path, retry = "/sessions/revoked/v1/chat/completions", {"x-stainless-retry-count": "1"}
    assert (await service.call("POST", path, json=chat))[0] == 200
    assert (await service.call("POST", "/sessions/revoked/revoke"))[0] == 403
    for _ in range(2):
        status, seen, _ = await service.call("POST", "/sessions/revoked/revoke", headers=control)
        assert (status, seen["is_revoked"], seen["state"]) == (200, True, "open")
    for headers in ({}, control, retry):
        status, answer, _ = await service.call("POST", path, json=chat, headers=headers)
        assert (status, answer["error"]["code"]) == (403, "forbidden")
    body = {"reward": 1.0}
    status, [record], _ = await service.call("POST", "/sessions/revoked/finish", json=body, headers=control)
    assert (status, record["reward"], record["is_complete"], len(record["paths"][0]["turns"])) == (
        200,
        1.0,
        True,
        1,
    )


async def test_a_score_is_posted_part_by_part_and_is_in_the_record(service: ChatService) -> None:
    control = await control_of(service, "scored")
    chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    _, answer, _ = await service.call("POST", "/sessions/scored/v1/chat/completions", json=chat)
    [turn_id] = answer["session"]["turn_ids"]
    status, seen, _ = await service.call(
        "POST", "/sessions/scored/reward", json={"components": {"form": 1}}, headers=control
    )
    assert (status, seen["reward"], seen["components"]) == (200, None, {"form": 1.0})
    path = {"reward": 2.0, "tokens": [0.5] * 4}
    body = {"reward": 1.0, "metrics": {"n": 3}, "turn_rewards": {turn_id: -1.0}, "paths": {turn_id: path}}
    status, [record], _ = await service.call("POST", "/sessions/scored/finish", json=body, headers=control)
    assert (status, record["reward"], record["components"], record["metrics"]) == (
        200,
        1.0,
        {"form": 1.0},
        {"n": 3.0},
    )
    [kept] = record["paths"]
    assert (kept["reward"], kept["token_rewards"], kept["turns"][0]["reward"]) == (2.0, [0.5] * 4, -1.0)
    assert (record["is_truncated"], kept["is_trainable"]) == (True, True)  # `max_tokens` cut its last turn


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"turn_rewards": {"no-such-turn": 1.0}},
        {"components": {"": 1.0}},
        {"reward": "1"},
        {"main": {"reward": 1}},
    ],
    ids=str,
)
async def test_what_is_no_score_is_refused(service: ChatService, body) -> None:
    control = await control_of(service, "unscored")
    status, answer, _ = await service.call("POST", "/sessions/unscored/reward", json=body, headers=control)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_failed_reward_is_in_the_record(service: ChatService) -> None:
    control = await control_of(service, "unrewarded")
    body = {"reward_error": "ZeroDivisionError: division by zero"}
    status, [record], _ = await service.call("POST", "/sessions/unrewarded/finish", json=body, headers=control)
    assert (status, record["reward"], record["reward_error"]) == (200, None, body["reward_error"])
    assert record["is_complete"]
    [kept] = [one for one in service.coordinator.finished["sessions"] if one.group_id == "unrewarded"]
    assert kept.reward_error == body["reward_error"]
