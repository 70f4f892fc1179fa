"""`@tool`: schemas from type hints and docstrings, and validation messages for the policy."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from agentloop.errors import InvalidRequest, ToolError
from agentloop.rollout.tool import FunctionTool, tool


@tool
def search(query: str, limit: Annotated[int, Field(description="How many", ge=1)] = 3) -> list[str]:
    """Search the corpus.

    Case does not matter.
    """
    return [query] * limit


@tool(name="lookup", timeout_s=2.5, max_output_bytes=100, max_concurrency=7)
async def find(title: str, kind: Literal["book", "film"]) -> str:
    """Find one."""
    return f"{kind} {title}"


async def call(function_tool: FunctionTool, arguments: dict[str, object]) -> str:
    return await function_tool.open_session("t", 0).call(arguments)


def test_definition_comes_from_hints_and_docstring() -> None:
    assert search.spec.definition() == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the corpus.\n\nCase does not matter.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer", "description": "How many", "minimum": 1, "default": 3},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def test_the_decorator_sets_name_and_caps() -> None:
    spec = find.spec
    assert (spec.name, spec.timeout_s, spec.max_output_bytes, spec.max_concurrency) == ("lookup", 2.5, 100, 7)
    assert spec.parameters["properties"]["kind"]["enum"] == ["book", "film"]


def test_a_parameter_named_title_keeps_its_place_in_the_schema() -> None:
    assert find.spec.parameters["properties"]["title"] == {"type": "string"}


async def test_sync_and_async_functions_answer_text() -> None:
    assert await call(search, {"query": "a", "limit": 2}) == '["a","a"]'
    assert await call(find, {"title": "x", "kind": "film"}) == "film x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "invalid arguments: query: Field required"),
        ({"query": 3}, "invalid arguments: query: Input should be a valid string"),
        ({"query": "a", "limit": 0}, "invalid arguments: limit: Input should be greater than or equal to 1"),
        ({"query": "a", "x": 1}, "invalid arguments: x: Extra inputs are not permitted"),
    ],
)
async def test_invalid_arguments_are_named_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ToolError) as caught:
        await call(search, arguments)
    assert str(caught.value) == message


async def test_at_most_three_problems_are_told() -> None:
    with pytest.raises(ToolError) as caught:
        await call(search, {"query": "a", **dict.fromkeys("bcdefg", 1)})
    assert str(caught.value).count("Extra inputs") == 3


def test_an_unhinted_parameter_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="parameter b needs a type hint") as caught:

        @tool
        def bad(a: int, b) -> str:  # type: ignore[no-untyped-def]
            return ""

    assert caught.value.param == "b"


def test_variadic_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="parameter numbers has no JSON schema"):

        @tool
        def bad(*numbers: int) -> str:
            return ""
