"""One call per turn and stop strings outside the reasoning, in the three chat dialects, streamed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.support.endpoint.dialect_app import MODEL, DialectService, dialect_service
from tests.support.engine.scripted import RENDERER, call

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTION = {"name": "lookup", "parameters": SCHEMA}
USER = {"role": "user", "content": "What is it?"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False},
    RESPONSES: {"input": [USER], "tools": [{"type": "function", **FUNCTION}], "parallel_tool_calls": False},
    MESSAGES: {
        "messages": [USER],
        "tools": [{"name": "lookup", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "max_tokens": 400,
    },
}
TWO_CALLS = f"I look.\n{call('lookup', q='a')}\n{call('lookup', q='b')}"
REASONED = "<think>\nThe task says Question: what? 42.\n</think>\n\n42.\nQuestion: next"


async def asked(service: DialectService, session_id: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer, or the events of a stream."""
    url = f"{service.url}/sessions/{session_id}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json={"model": MODEL, **body}) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    if not body["stream"]:
        return [orjson.loads(text)]
    return [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def opened(service: DialectService) -> str:
    async with aiohttp.ClientSession() as http, http.post(f"{service.url}/sessions", json={}) as answer:
        return str((await answer.json())["session_id"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_turn_of_one_call_is_extended_by_its_answer(tmp_path: Path, path: str, stream: bool) -> None:
    body, echoed = {**BODIES[path], "stream": stream}, '{"q":"a"}'
    if path == RESPONSES:
        turns = [
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "x", "name": "lookup", "arguments": echoed},
            {"type": "function_call_output", "call_id": "x", "output": "2"},
        ]
    elif path == MESSAGES:
        use = {"type": "tool_use", "id": "x", "name": "lookup", "input": {"q": "a"}}
        turns = [
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "2"}]},
        ]
    else:
        made = {"id": "x", "type": "function", "function": {"name": "lookup", "arguments": echoed}}
        turns = [
            {"role": "assistant", "content": "I look.", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "x", "content": "2"},
        ]
    async with dialect_service(tmp_path, TWO_CALLS, "It is two.") as service:
        session_id = await opened(service)
        shown = orjson.dumps(await asked(service, session_id, path, body)).decode()
        assert "lookup" in shown
        assert '\\"b\\"' not in shown
        assert '"b"' not in shown
        field = "input" if path == RESPONSES else "messages"
        await asked(service, session_id, path, {**body, field: [USER, *turns]})
        trajectory = await service.trajectory(session_id)
    [one] = trajectory.paths
    first, second = one.turns
    assert one.split_reason is None
    ids = one.response_ids.tolist()
    assert RENDERER.decode(ids[first.start : first.end]) == f"I look.\n{call('lookup', q='a')}"
    assert RENDERER.decode(ids[first.end : second.start]).startswith("<|im_end|>\n<|im_start|>user")
    assert sum(one.response_mask.tolist()) == first.end - first.start + second.end - second.start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop_in_reasoning", [None, False, True])
@pytest.mark.parametrize(("path", "field"), [(CHAT, "stop"), (MESSAGES, "stop_sequences")])
async def test_stop_strings_count_in_the_reasoning_only_if_asked(
    tmp_path: Path, path: str, field: str, stop_in_reasoning: bool | None, stream: bool
) -> None:
    body = {"messages": [USER], "max_tokens": 400, field: ["Question:"], "stream": stream}
    body |= {} if stop_in_reasoning is None else {"stop_in_reasoning": stop_in_reasoning}
    async with dialect_service(tmp_path, REASONED) as service:
        session_id = await opened(service)
        await asked(service, session_id, path, body)
        trajectory = await service.trajectory(session_id)
    [one] = trajectory.paths
    text = RENDERER.decode(one.response_ids.tolist()[one.turns[0].start :])
    assert text.rstrip() == REASONED.removesuffix(
        " next" if not stop_in_reasoning else REASONED[REASONED.index(" what?") :]
    )


async def test_the_responses_api_takes_the_field_too(tmp_path: Path) -> None:
    async with dialect_service(tmp_path, "Hi.") as service:
        body = {"input": "hi", "stop_in_reasoning": False, "stream": False}
        await asked(service, await opened(service), RESPONSES, body)
