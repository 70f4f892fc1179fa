"""Your own agent, unmodified: plain OpenAI SDK code with a tool of its own. Every token it samples is recorded.

agentloop rollout --agent examples.08_openai_agent:run

`run` is called once for each sample, against a session of its own. Anywhere else the agent runs as it always did:
OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/08_openai_agent.py "What is 2 + 3?"
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI

from agentloop.errors import ToolError
from agentloop_tools.calculator import evaluate

MAX_TURNS = 8
EXPRESSION = {"description": "An arithmetic expression, such as 12 * (3 + 4)", "type": "string"}
PARAMETERS = {"additionalProperties": False, "properties": {"expression": EXPRESSION}, "required": ["expression"]}
CALCULATOR = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": {**PARAMETERS, "type": "object"},
}


def calculator(arguments: str) -> str:
    try:
        return evaluate(json.loads(arguments)["expression"])
    except (ToolError, ValueError, KeyError, TypeError) as error:
        return f"Error: {error}"


async def answer(client: AsyncOpenAI, question: str, model: str = "default") -> str:
    messages = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=[{"type": "function", "function": CALCULATOR}], max_tokens=256
        )
        reply = completion.choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            return reply.content or ""
        for call in reply.tool_calls:
            result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def run(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await answer(client, task.messages[-1].content)  # returns None: the task's own reward function scores it


if __name__ == "__main__":
    print(asyncio.run(answer(AsyncOpenAI(), sys.argv[1])))
