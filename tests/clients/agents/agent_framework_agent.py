"""Microsoft's agent-framework with `OpenAIChatClient`, its default client: Responses by `previous_response_id`."""

import asyncio
import importlib
import sys

framework = importlib.import_module("agent_framework")
OpenAIChatClient = importlib.import_module("agent_framework.openai").OpenAIChatClient


def lookup(q: str) -> str:
    """Look it up."""
    return "2"


async def main(url: str, key: str) -> None:
    client = OpenAIChatClient(model="default", base_url=url, api_key=key)
    agent = framework.Agent(client=client, instructions="Be brief.", tools=[lookup])
    session = agent.create_session()
    for question in ("What is it?", "ok"):
        print((await agent.run(question, session=session)).text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
