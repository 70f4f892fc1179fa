"""The OpenAI SDK, versions 2.8 and 3.x: async, sync, streaming, tools, structured output, raw responses."""

import asyncio
import json
from typing import Literal

import openai
from pydantic import BaseModel
from support import QUESTION, Session, calculate, service_url

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "An arithmetic expression, such as 12 * (3 + 4)",
                    }
                },
                "required": ["expression"],
            },
        },
    }
]


class Fact(BaseModel):
    """The required type of the structured answer."""

    city: Literal["Paris", "Rome"]
    is_large: bool


def answers(message) -> list[dict]:
    """Return tool messages for an assistant message's calls."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": calculate(json.loads(call.function.arguments).get("expression", "")),
        }
        for call in message.tool_calls
    ]


def sync_tools(url: str) -> None:
    """Run a loop over `client.chat.completions.create` that echoes the SDK's own objects."""
    session = Session(url, "sync, tools")
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages, num_turns = [{"role": "user", "content": QUESTION}], 0
    served = []
    while num_turns < 5:
        answer = client.chat.completions.create(
            model="default",
            messages=messages,
            tools=TOOLS,
            tool_choice="required" if num_turns == 0 else "auto",
            temperature=0,
            max_completion_tokens=96,
            extra_body={"return_token_ids": True},
        )
        num_turns += 1
        choice = answer.choices[0]
        served.append([answer.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]])
        messages.append(choice.message)
        if not choice.message.tool_calls:
            break
        messages += answers(choice.message)
    session.report(num_turns, served=served)


async def async_turns(url: str) -> None:
    """Run two user turns on AsyncOpenAI."""
    session = Session(url, "async")
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = [{"role": "user", "content": "Hello"}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="default", messages=messages, max_tokens=24)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "And then?"})
    session.report(2)


async def streaming(url: str) -> None:
    """A stream and the same call without streaming: same seed, same text, calls and ids."""
    session = Session(url, "streaming", ["branch"])
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": TOOLS,
        "seed": 11,
        "max_completion_tokens": 64,
        "extra_body": {"return_token_ids": True},
    }
    text, calls, ids, usage = "", {}, [], None
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        async for chunk in await client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **body
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ids += (choice.model_extra or {}).get("token_ids") or []
                for call in choice.delta.tool_calls or []:
                    known = calls.setdefault(call.index, {"name": "", "arguments": ""})
                    known["name"] += call.function.name or ""
                    known["arguments"] += call.function.arguments or ""
        whole = await client.chat.completions.create(**body)
    message = whole.choices[0].message
    assert text == (message.content or ""), (text, message.content)
    assert ids == whole.choices[0].model_extra["token_ids"]
    sampled = [{"name": c.function.name, "arguments": c.function.arguments} for c in message.tool_calls or []]
    assert list(calls.values()) == sampled, (calls, sampled)
    assert usage.completion_tokens == whole.usage.completion_tokens == len(ids)
    session.report(2)


def structured(url: str) -> None:
    """`parse` into a pydantic model: decoding is constrained, so an untrained policy matches the schema too."""
    session = Session(url, "structured output")
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    answer = client.chat.completions.parse(
        model="default",
        messages=[{"role": "user", "content": "Name a city."}],
        response_format=Fact,
        seed=3,
        max_completion_tokens=200,
        extra_body={"logit_bias": {}},
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Fact)
    session.report(1)


def raw(url: str) -> None:
    """Check headers and body of `with_raw_response`."""
    session = Session(url, "raw response")
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    answer = client.chat.completions.with_raw_response.create(
        model="default", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
    )
    assert answer.headers["x-session-id"] == session.session_id
    assert answer.headers["x-request-id"]
    assert answer.parse().usage.completion_tokens > 0
    refusal = None
    try:
        client.chat.completions.create(model="default", messages=[], max_tokens=8)
    except openai.BadRequestError as error:
        refusal = error
    assert refusal is not None
    assert refusal.param == "messages"
    assert refusal.request_id
    assert [model.id for model in client.models.list()]
    session.report(1)


if __name__ == "__main__":
    sync_tools(service_url())
    asyncio.run(async_turns(service_url()))
    asyncio.run(streaming(service_url()))
    structured(service_url())
    raw(service_url())
