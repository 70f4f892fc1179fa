"""The OpenAPI document of `POST /generate`, which has several body and response schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema

from agentloop_servers.http.auth import Keys
from tests.support.endpoint.chat_service import chat_service


async def test_a_batch_has_a_documented_answer(tmp_path: Path) -> None:
    async with chat_service(tmp_path, keys=Keys.of(["user-1"], "admin-1")) as service:
        _, document, _ = await service.call("GET", "/openapi.json")
        body = {"text": ["hi", "there"], "sampling_params": {"max_new_tokens": 2}}
        headers = {"authorization": "Bearer user-1"}
        status, answer, _ = await service.call("POST", "/generate", json=body, headers=headers)
    assert status == 200
    assert len(answer) == 2
    content: dict[str, Any] = document["paths"]["/generate"]["post"]["responses"]["200"]["content"]
    schema = content["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": document["components"]})
