"""openai's typed helpers as an agent uses them: each answer is sent back as the object that was received."""

import sys

import openai
from pydantic import BaseModel


class lookup(BaseModel):
    """Look it up."""

    q: str


def ask(client: openai.OpenAI, messages: list, way: str):
    """Run one turn by `.parse()` or `.stream()`."""
    asked = {"model": "default", "messages": messages, "tools": [openai.pydantic_function_tool(lookup)]}
    if way == "parse":
        return client.chat.completions.parse(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as stream:
        return stream.get_final_completion().choices[0].message


def respond(client: openai.OpenAI, items: list, way: str):
    """Run one turn of the Responses API by `.parse()` or `.stream()`."""
    tools = [openai.pydantic_function_tool(lookup)["function"] | {"type": "function"}]
    if way == "parse":
        return client.responses.parse(model="default", input=items, tools=tools)
    with client.responses.stream(model="default", input=items, tools=tools) as stream:
        return stream.get_final_response()


def main(url: str, key: str, way: str) -> None:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    if way.startswith("responses-"):
        items: list = [{"role": "user", "content": "What is it?"}]
        while True:
            answer = respond(client, items, way.removeprefix("responses-"))
            items += answer.output
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            assert all(call.parsed_arguments is not None for call in calls)
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls]
        print(answer.output_text)
        return
    messages: list = [{"role": "user", "content": "What is it?"}]
    while True:
        message = ask(client, messages, way)
        messages.append(message)
        if not message.tool_calls:
            break
        assert message.tool_calls[0].function.parsed_arguments == lookup(q="a")
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
    print(message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
