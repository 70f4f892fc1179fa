"""The calculator: exact values, one-line errors, and nothing but arithmetic, even for hostile texts."""

from __future__ import annotations

import pytest

from agentloop.errors import ToolError
from agentloop_tools.calculator import calculator, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37 * 12 + 5", "449"),
        ("  12 * (3 + 4)\n", "84"),
        ("-3 ** 2", "-9"),
        ("2 ** -2", "0.25"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("1 / 3", "0.3333333333"),
        ("6 / 3", "2"),
        ("0.1 + 0.2", "0.3"),
        ("+5", "5"),
        ("--5", "5"),
        ("1_000 * 2", "2000"),
        ("0x10", "16"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("(2 ** 100) - (2 ** 100) + 1", "1"),
        ("1e3", "1000"),
        ("0 ** 0", "1"),
        ("1 ** 4096", "1"),
        ("-" * 500 + "1", "1"),
        ("0 ** 99999", "0"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize("expression", ["1 / 0", "1 // 0", "1 % 0", "0 ** -1", "1.5 % 0"])
def test_division_by_zero(expression: str) -> None:
    with pytest.raises(ToolError, match=r"^division by zero$"):
        evaluate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "10 ** 10 ** 8",
        "10 ** 100000",
        "(10 ** 1000) * (10 ** 1000)",
        "9.9 ** 999999",
        "1e308 * 10",
        "1e999",
        "-1e999",
        "1e999 - 1e999",
        "10 ** 400 / 0.5",
        "2 ** 99999999999999999999",
        "(-2) ** 99999999",
    ],
)
def test_results_beyond_the_bounds(expression: str) -> None:
    with pytest.raises(ToolError, match=r"^result too large$"):
        evaluate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "   ",
        "2 +",
        "2 + + *",
        "x + 1",
        "__import__('os')",
        "abs(-1)",
        "(1).real",
        "[1][0]",
        "'a' * 3",
        "'a' * 10 ** 9",
        "b'a'",
        "f'{1}'",
        "True + 1",
        "None",
        "...",
        "1j",
        "(-8) ** 0.5",
        "1 if 1 else 2",
        "1 < 2",
        "1 and 2",
        "not 1",
        "~1",
        "1 << 9",
        "1 | 2",
        "1 @ 2",
        "lambda: 1",
        "(a := 1)",
        "1, 2",
        "1; 2",
        "1\n2",
        "x = 1",
        "[i for i in (1,)]",
        "\u0661 + 1 \u2212 2",
        "2 \u00d7 3",
        "\ud800",
        "1\x00+1",
        "0777",
        "1__0",
        "(" * 250 + "1" + ")" * 250,
        "+".join("1" * 256) + ")",
        "\uff11+\uff11 x",
    ],
)
def test_what_is_no_arithmetic_is_refused_in_one_short_line(expression: str) -> None:
    with pytest.raises(ToolError) as caught:
        evaluate(expression)
    message = str(caught.value)
    assert message.startswith("not an arithmetic expression: ")
    assert "\n" not in message
    message.encode()  # valid UTF-8 for any input


def test_a_long_sum_within_the_length_limit_works() -> None:
    assert evaluate("+".join("1" * 256)) == "256"


def test_length_is_bounded() -> None:
    with pytest.raises(ToolError, match="longer than 512 characters"):
        evaluate("1+" * 256 + "1")


def test_an_integer_beyond_the_floats_still_divides_or_says_so() -> None:
    with pytest.raises(ToolError, match="result too large"):
        evaluate("10 ** 1000 / 3")


async def test_the_tool_validates_its_argument() -> None:
    session = calculator.open_session("t", 0)
    assert await session.call({"expression": "1 + 1"}) == "2"
    with pytest.raises(ToolError, match=r"^invalid arguments: expression: Field required"):
        await session.call({"expr": "1"})
    with pytest.raises(ToolError, match="expression: Input should be a valid string"):
        await session.call({"expression": 1})


def test_the_definition_is_the_one_the_shipped_policy_was_trained_on() -> None:
    assert calculator.spec.definition() == {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "An arithmetic expression, such as 12 * (3 + 4)",
                    }
                },
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    }
