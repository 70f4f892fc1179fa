"""The `calculator` tool: evaluates one arithmetic expression of numbers, + - * / // % ** and parentheses.

Isolation: `ast` parses the expression, and only the node types listed here are evaluated, in this process; names,
calls, attributes and subscripts are refused. Powers and sizes are limited before they are computed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from agentloop.errors import ToolError
from agentloop.rollout.tool import tool

Number = int | float

MAX_EXPRESSION_CHARS = 512
MAX_BITS = 4096  # size of an integer result: about 1,200 digits

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@tool(timeout_s=2.0, max_output_bytes=2048)
async def calculator(
    expression: Annotated[str, Field(description="An arithmetic expression, such as 12 * (3 + 4)")],
) -> str:
    """Evaluate an arithmetic expression."""
    return evaluate(expression)


def evaluate(expression: str) -> str:
    """Return the value as text: integers exactly, other numbers with up to 10 significant digits.

    Raises ToolError for an invalid expression, a division by zero, or a result beyond the limits.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"expression longer than {MAX_EXPRESSION_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(f"not an arithmetic expression: {expression!r}. Use + - * / // % ** ( )") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("result too large") from error
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ToolError("result too large")
    return f"{value:.10g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes() | None):
            raise ValueError("not a number")
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
    raise ValueError("not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * max(exponent, 0) > MAX_BITS:
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("not a real number")
    return _bounded(value)


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    return value
