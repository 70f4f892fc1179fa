"""openai-agents over both of its APIs: chat completions and responses (its default)."""

import asyncio
import importlib

from openai import AsyncOpenAI
from support import QUESTION, Expression, Session, calculate, service_url

agents = importlib.import_module("agents")  # the package has the same name as this folder
agents.set_tracing_disabled(True)


@agents.function_tool
def calculator(expression: Expression) -> str:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


async def run(url: str, label: str, model_class: type) -> None:
    """One agent run with a tool, until its final answer."""
    session = Session(url, label)
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    agent = agents.Agent(
        name="calculator",
        instructions="Use the calculator.",
        tools=[calculator],
        model=model_class(model="default", openai_client=client),
        model_settings=agents.ModelSettings(temperature=0, max_tokens=96, tool_choice="required"),
    )
    result = await agents.Runner.run(agent, QUESTION, max_turns=5)
    session.report(len(result.raw_responses))


async def main() -> None:
    await run(service_url(), "openai-agents, chat", agents.OpenAIChatCompletionsModel)
    await run(service_url(), "openai-agents, responses", agents.OpenAIResponsesModel)


if __name__ == "__main__":
    asyncio.run(main())
