"""litellm: a tool loop over its OpenAI and its Anthropic provider, with and without streaming."""

import json

import litellm
from support import QUESTION, Session, calculate, service_url

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "enum": ["655 * 49", "655 * 49 + 249"]}},
                "required": ["expression"],
            },
        },
    }
]


def answered(session: Session, messages: list, provider: str, choice: str, *, streaming: bool) -> litellm.Message:
    """Return one turn, assembled from its chunks if it is streamed."""
    base_url = session.base_url if provider == "openai" else session.base_url.removesuffix("/v1")
    answer = litellm.completion(
        model=f"{provider}/default",
        api_base=base_url,
        api_key=session.api_key,
        messages=messages,
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=96,
        temperature=0,
        stream=streaming,
    )
    if streaming:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


def run(url: str, provider: str, *, streaming: bool) -> None:
    """Run a loop that echoes litellm's own messages; the first call is forced."""
    session = Session(url, f"litellm, {provider}{', streaming' if streaming else ''}")
    messages: list = [{"role": "user", "content": QUESTION}]
    num_turns = 0
    while num_turns < 4:
        message = answered(session, messages, provider, "auto" if num_turns else "required", streaming=streaming)
        num_turns += 1
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            expression = json.loads(call.function.arguments).get("expression", "")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(expression)})
    assert num_turns >= 2
    session.report(num_turns)


if __name__ == "__main__":
    run(service_url(), "openai", streaming=False)
    run(service_url(), "openai", streaming=True)
    run(service_url(), "anthropic", streaming=False)
