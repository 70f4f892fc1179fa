"""A tool for tests: arithmetic, without the limits of the shipped tool."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentloop.rollout.tool import tool


@tool(timeout_s=2.0, max_output_bytes=2048)
async def calculator(
    expression: Annotated[str, Field(description="An arithmetic expression, such as 12 * (3 + 4)")],
) -> str:
    """Evaluate an arithmetic expression."""
    return evaluate(expression)


def evaluate(expression: str) -> str:
    """Return the value as text."""
    return str(eval(expression, {"__builtins__": {}}))
