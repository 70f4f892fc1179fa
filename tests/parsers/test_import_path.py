"""A user's parser by import path: an instance, or a class or function that makes one. Anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from agentloop.errors import InvalidRequest
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.base import DecodedText, Delimiters, ParsedTurn
from agentloop.parsers.by_name import get_parser
from agentloop.types import JSON, Constraint, ToolCall
from tests.support.engine.scripted import RENDERER


class ShoutParser:
    """A parser of calls written `!name!`, without arguments."""

    delimiters = Delimiters(("!",))

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        before, _, rest = decoded.text.partition("!")
        name = rest.partition("!")[0]
        calls = (ToolCall(f"call_{turn_index}_0", name),) if name else ()
        return ParsedTurn(before.strip(), calls)

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        raise InvalidRequest("cannot force calls", param="tool_choice")


class WithoutDelimiters(ShoutParser):
    delimiters = None  # type: ignore[assignment]


def make() -> ShoutParser:
    return ShoutParser()


def fail() -> ShoutParser:
    raise RuntimeError("no such folder")


INSTANCE = ShoutParser()


@pytest.mark.parametrize("attribute", ["ShoutParser", "make", "INSTANCE"])
def test_a_parser_class_function_or_instance_is_taken(attribute: str) -> None:
    reader = TurnReader(RENDERER, get_parser(f"{__name__}:{attribute}"))
    decoded = DecodedText("Well. !now!", tuple(range(1, 12)))
    message, _ = reader.read(decoded, Reading((), 2, True, True, False))
    assert (message.content, [(call.id, call.name) for call in message.tool_calls]) == (
        "Well.",
        [("call_2_0", "now")],
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (f"{__name__}:WithoutDelimiters", "is not a parser"),
        (f"{__name__}:fail", "RuntimeError: no such folder"),
        (f"{__name__}:Sequence", "failed on an empty turn"),
        (f"{__name__}:missing", "no attribute"),
        ("no_such_package.mod:Parser", "no module"),
        ("vllm:", "not an import path"),
        ("shout", "expected one of hermes"),
    ],
)
def test_what_is_no_parser_is_refused(path: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        get_parser(path)
    assert caught.value.param == "parser"
