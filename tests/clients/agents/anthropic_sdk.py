"""The Anthropic SDK on `/v1/messages`: a tool loop, a stream, and the SDK's own loop, which requests a thread."""

import anthropic
from support import QUESTION, Expression, Session, calculate, service_url

TOOLS = [
    {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "input_schema": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    }
]


def client_of(session: Session) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key)


def tools(url: str) -> None:
    """Call a tool and echo its result as the SDK's own blocks."""
    session = Session(url, "anthropic, tools")
    client = client_of(session)
    messages, num_turns = [{"role": "user", "content": QUESTION}], 0
    while num_turns < 5:
        answer = client.messages.create(
            model="default",
            max_tokens=96,
            messages=messages,
            tools=TOOLS,
            tool_choice={"type": "any" if num_turns == 0 else "auto"},
        )
        num_turns += 1
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            break
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": calculate(use.input["expression"])}
            for use in uses
        ]
        messages.append({"role": "user", "content": results})
    session.report(num_turns)


def streaming(url: str) -> None:
    """Run two turns through the SDK's stream helper."""
    session = Session(url, "anthropic, streaming")
    client = client_of(session)
    messages = [{"role": "user", "content": "Hello"}]
    for _ in range(2):
        with client.messages.stream(model="default", max_tokens=24, messages=messages) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "".join(block.text for block in final.content if block.type == "text")
        messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": "And then?"}]
    session.report(2)


@anthropic.beta_tool
def calculator(expression: Expression) -> str:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


def tool_runner(url: str) -> None:
    """The SDK sends `thread` first; after our refusal it continues with whole histories."""
    session = Session(url, "anthropic, tool runner")
    runner = client_of(session).beta.messages.tool_runner(
        model="default",
        max_tokens=96,
        max_iterations=2,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[calculator],
        tool_choice={"type": "any"},
    )
    answers = list(runner)
    assert [block.type for answer in answers for block in answer.content] == ["tool_use", "tool_use"]
    session.report(2)


if __name__ == "__main__":
    tools(service_url())
    tool_runner(service_url())
    streaming(service_url())
