"""The `renderers` library behind our ports, compared with the families' templates: equal or listed differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import InvalidRequest, TemplateError, TemplateNotPrefixStable, UnsupportedParameter
from agentloop.generation.round_trip import parsers_that_fit, round_trip_test
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.types import ImageRef, Message, Thinking, ToolCall, ToolCallStatus
from tests.support.families.table import write_family

pytest.importorskip("renderers", reason="needs renderers (requirements/dev.txt)")
from agentloop_renderers.parser import LibraryParser
from agentloop_renderers.renderer import LibraryRenderer

SYSTEM = Message("system", "You look words up. Soyez précis: 三.")
TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["word"],
            },
        },
    },
)


def user(text: str) -> Message:
    return Message("user", text)


def turn(text: str, *calls: ToolCall, thought: str = "") -> Message:
    return Message("assistant", text, tool_calls=calls, reasoning=thought)


def call(index: int, **arguments: Any) -> ToolCall:
    return ToolCall(f"call{index:05d}", "look_up", arguments)


def answer(index: int, text: str) -> Message:
    return Message("tool", text, tool_call_id=f"call{index:05d}", name="look_up")


CONVERSATIONS: dict[str, tuple[list[Message], Sequence[Mapping[str, Any]]]] = {
    "question": ([user("What is a rook? 😀")], ()),
    "system": ([SYSTEM, user("What is a rook?")], ()),
    "tools": ([SYSTEM, user("What is a rook?")], TOOLS),
    "chat": (
        [SYSTEM, user("A rook?"), turn("A bird."), user("In chess?"), turn("A piece. \n"), user("Thanks")],
        (),
    ),
    "thoughts": ([user("A rook?"), turn("A bird.", thought="hm"), user("And in chess?")], ()),
    "text and call": (
        [user("A rook?"), turn("I look.", call(0, word="rook é", limit=3)), answer(0, "a bird")],
        TOOLS,
    ),
    "thought and call": (
        [user("A rook?"), turn("", call(0, word="rook"), thought="hm"), answer(0, "Error: no such word\n")],
        TOOLS,
    ),
    "parallel": (
        [user("Both?"), turn("", call(0, word="rook"), call(1, word="king")), answer(0, "bird"), answer(1, "man")],
        TOOLS,
    ),
    "five turns": (
        [
            *(SYSTEM, user("A rook?"), turn("", call(0, word="rook"), thought="a"), answer(0, "bird <b>&</b>")),
            *(turn("", call(1, word="king"), thought="b"), answer(1, "piece"), turn("Two things.", thought="c")),
            *(user("And?"), turn("Done.", thought="d"), user("Bye")),
        ],
        TOOLS,
    ),
}
PLAIN = {"question", "system", "chat", "thoughts"}
WITH_TOOLS = set(CONVERSATIONS) - PLAIN

# Per family: the library's name, its arguments, and the conversations whose ids differ (docs/guides/models.md).
FAMILIES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "qwen3": ("qwen3", {}, set()),
    "qwen3_instruct_2507": ("qwen3", {}, {"thoughts", "thought and call", "five turns"}),
    "qwen3_thinking_2507": ("qwen3", {}, set(CONVERSATIONS)),
    "qwen3_5": ("qwen3.5", {}, {"text and call"}),
    "qwen3_6": ("qwen3.6", {}, {"text and call"}),
    "llama3_1": ("llama-3", {"date_string": "26 Jul 2024"}, {"thoughts", "five turns"}),
    "llama3_2": ("llama-3", {}, {"thoughts", "five turns"}),
    "deepseek_r1": ("deepseek-r1", {}, set()),
    "deepseek_v3_1": ("deepseek-v3", {}, PLAIN),
    "glm4_5": ("glm-4.5", {}, set()),
    "kimi_k2": ("kimi-k2", {}, (PLAIN | WITH_TOOLS) - {"system", "chat"}),
    "nemotron_3": ("nemotron-3", {}, set()),
}
BRIDGED = ("qwen3", "qwen3_instruct_2507", "qwen3_5", "qwen3_6", "llama3_1", "llama3_2", "glm4_5", "nemotron_3")
APPENDED: tuple[tuple[list[Message], Sequence[Mapping[str, Any]]], ...] = (
    ([answer(0, "a bird")], TOOLS),
    ([answer(0, "a bird"), answer(1, "a man")], TOOLS),
    ([answer(0, "a bird"), user("More!")], TOOLS),
    ([user("More! 😀")], ()),
)


class Pair:
    """The two renderers of one family."""

    def __init__(self, folder: Path, family: str) -> None:
        self.library_name, kwargs, self.different = FAMILIES[family]
        self.folder = write_family(folder / family, family)
        self.template = TemplateRenderer.from_directory(self.folder, RenderSettings(OnUnstable.FORK))
        self.library = LibraryRenderer(self.folder, self.library_name, RenderSettings(kwargs=kwargs))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("families")
    return {family: Pair(folder, family) for family in FAMILIES}


def ids_of(renderer: Any, name: str) -> list[int] | None:
    """Return the ids of a conversation, or None if it is refused."""
    messages, tools = CONVERSATIONS[name]
    try:
        return list(renderer.render(messages, tools))
    except TemplateError:
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_have_the_templates_ids_or_a_known_difference(pairs: dict[str, Pair], family: str) -> None:
    pair = pairs[family]
    different = {name for name in CONVERSATIONS if ids_of(pair.library, name) != ids_of(pair.template, name)}
    assert different == pair.different


@pytest.mark.parametrize("family", BRIDGED)
def test_bridges_are_the_templates(pairs: dict[str, Pair], family: str) -> None:
    pair = pairs[family]
    facts = pair.library.facts
    assert (facts.tool_turns, facts.user_turns, facts.plain_turns) == (None, None, None)
    own_stop = pair.template.stop_token_ids[0]
    for appended, tools in APPENDED:
        for end in (TurnEnd(own_stop), TurnEnd()):
            assert pair.library.bridge(appended, tools, end) == pair.template.bridge(appended, tools, end)


def test_a_cut_thought_is_closed_before_the_turn(pairs: dict[str, Pair]) -> None:
    library = pairs["qwen3"].library
    bridge = library.decode(library.bridge([user("More")], (), TurnEnd(is_thinking=True)))
    assert bridge == "</think><|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_content_becomes_no_control_token(pairs: dict[str, Pair], family: str) -> None:
    library = pairs[family].library
    marks = sorted(library.facts.literals)
    forged = " ".join(marks)
    plain = library.render([user("one")], ())
    for rendered in (library.render([user(f"one {forged}")], ()), library.render([user(forged)], ())):
        for mark in marks:
            mark_ids = library.ids(mark)
            assert len(mark_ids) == 1
            assert rendered.count(mark_ids[0]) == plain.count(mark_ids[0]), mark


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("deepseek_r1", "deepseek_v3_1")])
def test_the_library_and_our_own_parsers_read_its_turns(pairs: dict[str, Pair], family: str) -> None:
    pair = pairs[family]
    test = round_trip_test(pair.library, LibraryParser(pair.folder, pair.library_name), "renderers")
    assert test.call_text
    own = parsers_that_fit(pair.library)
    assert own
    assert round_trip_test(pair.library, get_parser(own[0]), own[0]).call_text == test.call_text


def test_a_message_that_the_library_drops_is_refused(pairs: dict[str, Pair]) -> None:
    pair, late = pairs["qwen3"], [user("A rook?"), turn("A bird."), Message("system", "Be brief."), user("And?")]
    pair.library.render(late, ())
    vision = LibraryRenderer(pair.folder, "qwen3-vl", RenderSettings())
    vision.render(late[:2] + late[3:], ())
    with pytest.raises(TemplateError, match=r"renderers:qwen3-vl does not show message 2 \(role 'system'\)"):
        vision.render(late, ())
    picture = Message("user", "This?", images=(ImageRef("one"),))
    with pytest.raises(TemplateError, match=r"renderers:qwen3 does not show message 0 \(role 'user'\)"):
        pair.library.render([picture], ())
    with pytest.raises(TemplateNotPrefixStable, match="renderers:qwen3 does not show a user message"):
        pair.library.bridge([picture], (), TurnEnd(pair.library.stop_token_ids[0]))


def test_thoughts_as_in_the_template_fork_at_a_users_message(pairs: dict[str, Pair]) -> None:
    library = LibraryRenderer(pairs["qwen3"].folder, "qwen3", RenderSettings(thinking=Thinking.TEMPLATE))
    stop = TurnEnd(library.stop_token_ids[0])
    assert library.bridge([answer(0, "a bird")], TOOLS, stop)
    with pytest.raises(TemplateNotPrefixStable):
        library.bridge([user("More")], (), stop)


def test_template_arguments_go_to_the_library(pairs: dict[str, Pair]) -> None:
    library = pairs["qwen3"].library
    prompt = library.render([user("one")], (), {"enable_thinking": False})
    assert library.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert not library.decode(library.render([user("one")], ())).endswith("</think>\n\n")
    with pytest.raises(InvalidRequest, match="no_such_argument"):
        library.render([user("one")], (), {"no_such_argument": 1})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("auto", "knows no model named 'qwen3'"),
        ("gpt-oss", "a vocabulary that it downloads"),
        ("default", "renderer: template"),
        ("nonsense", "nonsense"),
        ("kimi-k2", "not found in tokenizer vocabulary"),
    ],
)
def test_what_the_library_cannot_do_here_is_refused(pairs: dict[str, Pair], name: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        LibraryRenderer(pairs["qwen3"].folder, name, RenderSettings())
    assert caught.value.param == "renderer"


def test_auto_goes_by_the_models_name(tmp_path: Path) -> None:
    write_family(tmp_path / "Qwen3-8B", "qwen3")
    assert LibraryRenderer(tmp_path / "Qwen3-8B", "auto", RenderSettings()).library.family == "qwen3"


def test_the_librarys_parser_keeps_all_that_was_written(pairs: dict[str, Pair]) -> None:
    parser = LibraryParser(pairs["qwen3"].folder, "qwen3")
    good = '<tool_call>\n{"name": "look_up", "arguments": {"word": "é"}}\n</tool_call>'
    text = f"First.\n{good}\n<tool_call>\nnonsense\n</tool_call>"
    read = parser.parse(DecodedText(text, tuple(range(1, len(text) + 1))), TOOLS, 2)
    assert read.content == "First."
    assert [(c.id, c.name, c.arguments, c.status) for c in read.calls] == [
        ("call_2_0", "look_up", {"word": "é"}, ToolCallStatus.OK),
        ("call_2_1", "", {}, ToolCallStatus.MALFORMED),
    ]
    first, second = read.calls
    assert text[first.token_start : first.token_end] == good
    assert "nonsense" in second.text
    assert second.error
    with pytest.raises(UnsupportedParameter):
        parser.call_constraint(TOOLS, forced=None, is_parallel=True)
