"""openai-agents: the first agent hands the conversation over to a specialist, who answers."""

import asyncio
import importlib
import sys

from openai import AsyncOpenAI

agents = importlib.import_module("agents")  # the package has the same name as this folder
agents.set_tracing_disabled(True)


async def main(base_url: str, api_key: str) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    model = agents.OpenAIResponsesModel(model="default", openai_client=client)
    specialist = agents.Agent(name="specialist", instructions="You count files.", model=model)
    first = agents.Agent(name="first", instructions="You hand over.", handoffs=[specialist], model=model)
    result = await agents.Runner.run(first, "How many files are there?", max_turns=5)
    print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
