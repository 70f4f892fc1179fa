"""Models of an OpenAI-compatible server, as the policy and as the other models of an episode."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson
from openai import APIError, AsyncOpenAI, omit

from agentloop.errors import InvalidRequest
from agentloop.rollout.models import ModelCall
from agentloop.types import JSON, Message, ToolCall, ToolCallStatus


class OpenAIPolicy:
    """A `Policy` and a `ModelsPort`. The API key is read from OPENAI_API_KEY."""

    has_ids = False

    def __init__(self, base_url: str, model: str) -> None:
        self.name = f"openai:{model}"
        self._model = model
        self._base_url = base_url

    async def turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> Message:
        answer = await self._asked(self._model, messages, tools=list(tools) or omit)
        calls = tuple(_call(index, call.function) for index, call in enumerate(answer.tool_calls or ()))
        return Message("assistant", answer.content or "", calls)

    async def chat(self, call: ModelCall) -> str:
        answer = await self._asked(
            call.model, call.messages, max_tokens=call.max_tokens, temperature=call.temperature
        )
        return cast(str, answer.content or "")

    async def _asked(self, model: str, messages: Sequence[Message], **options: Any) -> Any:
        bodies: Any = [_written(message) for message in messages]
        key = os.environ.get("OPENAI_API_KEY") or "none"
        try:
            async with AsyncOpenAI(base_url=self._base_url, api_key=key) as client:
                completion = await client.chat.completions.create(model=model, messages=bodies, **options)
        except APIError as error:
            raise InvalidRequest(f"{self.name}: {error.message}", param="policy") from error
        return completion.choices[0].message


def _call(index: int, function: Any) -> ToolCall:
    try:
        return ToolCall(f"call_{index}", function.name, dict(orjson.loads(function.arguments or "{}")))
    except (ValueError, TypeError):
        text = f'<tool_call>\n{{"name": "{function.name}", "arguments": {function.arguments}}}\n</tool_call>'
        return ToolCall(f"call_{index}", function.name, status=ToolCallStatus.MALFORMED, text=text)


def _written(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": orjson.dumps(dict(call.arguments)).decode()},
            }
            for call in message.tool_calls
        ]
    return body
