"""An agent of a framework, here LangGraph, unmodified. In your environment: pip install langchain langchain-openai

agentloop rollout --agent examples.09_framework_agent:run
agentloop rollout --agent-command "python examples/09_framework_agent.py"

The second runs a process for each sample, which may have an environment of its own: write its python's whole path.
Of ours, neither way needs more than a base URL and a key; a process finds them where every OpenAI client looks.
"""

import json
import os
from typing import Annotated

from langchain.agents import create_agent  # a LangGraph graph
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MAX_STEPS = 16  # of the graph: a turn of the model or a round of tools is one


@tool
def calculator(expression: Annotated[str, "An arithmetic expression, such as 12 * (3 + 4)"]) -> str:
    """Evaluate an arithmetic expression."""
    if not set(expression) <= set("0123456789.+-*/() ") or "**" in expression:
        return f"Error: not an arithmetic expression: {expression!r}. Use + - * / ( )"
    try:
        return f"{eval(expression):.10g}"  # of digits and operators alone
    except (SyntaxError, ArithmeticError, TypeError) as error:
        return f"Error: {error}"


def solve(question: str, base_url: str, api_key: str) -> str:
    model = ChatOpenAI(model="default", base_url=base_url, api_key=api_key, max_tokens=256)
    agent = create_agent(model, [calculator])
    state = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": MAX_STEPS})
    return state["messages"][-1].content


def run(task, base_url, api_key):
    """Once for each sample, in a thread of its own. A number returned is the reward."""
    answer = solve(task.messages[-1].content, base_url, api_key)
    return 1.0 if answer.rstrip(".").endswith(str(task.reference)) else 0.0


if __name__ == "__main__":
    task = json.loads(os.environ["AGENTLOOP_TASK"])
    question = task["messages"][-1]["content"]
    print(solve(question, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
