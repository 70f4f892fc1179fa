"""llama-index: a FunctionAgent, which streams by default and reads the first tool call entry of a chunk."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.agent.workflow.workflow_events import ToolCallResult
from llama_index.llms.openai_like import OpenAILike
from support import QUESTION, Expression, Session, calculate, service_url


def calculator(expression: Expression) -> str:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


async def run(url: str, label: str, *, streaming: bool) -> None:
    """Run the agent once. Its first call is forced, and the tool gets the arguments that the policy wrote."""
    session = Session(url, label)
    model = OpenAILike(
        model="default",
        api_base=session.base_url,
        api_key=session.api_key,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=96,
    )
    agent = FunctionAgent(tools=[calculator], llm=model, streaming=streaming, initial_tool_choice="required")
    handler = agent.run(QUESTION, max_iterations=5)
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    await handler
    first = results[0]
    assert first.tool_kwargs["expression"] in ("655 * 49", "655 * 49 + 249"), first
    assert str(first.tool_output.content) == calculate(first.tool_kwargs["expression"])
    session.report(2)


async def main() -> None:
    await run(service_url(), "llama-index, streaming", streaming=True)
    await run(service_url(), "llama-index", streaming=False)


if __name__ == "__main__":
    asyncio.run(main())
