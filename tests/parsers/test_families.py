"""Turns rendered by every family's template and parsed back: reasoning, content, calls; complete, cut, streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import PARSER_NAMES, choose_parser, get_parser
from agentloop.rendering.prompt_text import ChatTemplate
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.trajectory.node import Reply
from agentloop.types import FinishReason, Message, ToolCall, ToolCallStatus
from tests.parsers.writing import made, read_streamed, reads
from tests.support.engine.scripted import RENDERER
from tests.support.families.table import FAMILIES, FAMILY, Family, write_family

REASONING, ANSWER = (
    "Two parts: é and 日本.\nI <tool_call> nothing {here}.",
    'It is 42.\n\nDone — {"a": 1} and `x < y`.',
)
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "items": {"type": "array"},
    "options": {"type": "object"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in ("look_up", "now")
]
CALLS = (
    ToolCall("functio:0", "look_up", {"text": 'né "q" 日本\n{x}', "count": -3, "items": [1, {"a": [None, True]}]}),
    ToolCall("functio:1", "now", {}),
)
NESTED = ToolCall("call00002", "look_up", {"options": {"é": {"b": [[], {"c": "</x>"}]}}, "text": ""})
WITH_CALLS = [family for family in FAMILIES if family.calls is not None]


@pytest.fixture(scope="module", params=WITH_CALLS, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    chosen = request.param
    assert isinstance(chosen, Family)
    return chosen


@pytest.fixture(scope="module")
def template(family: Family, tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.from_directory(write_family(tmp_path_factory.mktemp("family"), family.name))


def entry(family: Family, calls: tuple[ToolCall, ...], *, thought: str = "", content: str = "") -> dict[str, Any]:
    """Return an assistant message as templates read it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["thinking" if family.calls == "harmony" else "reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def sampled(family: Family, template: ChatTemplate, message: dict[str, Any]) -> tuple[str, bool]:
    """Return the message as the model samples it, without stop token, and whether the prompt opens reasoning."""
    user = {"role": "user", "content": "Well?"}
    prompt = template.render([user], TOOLS, add_generation_prompt=True)
    whole = template.render([user, message], TOOLS, add_generation_prompt=False)
    pairs = enumerate(zip(prompt, whole, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(whole)))
    turn = whole[shared:]
    stops = [place for stop in {*family.stops, family.eos} if (place := turn.find(stop)) >= 0]
    open_mark = family.think[0] if family.think is not None else "<think>"
    return turn[: min(stops, default=len(turn))], whole[:shared].rstrip().endswith(open_mark)


def read(family: Family, text: str, *, is_thinking: bool) -> Message:
    """Read with one token per character, so that spans are offsets into the text. The streamed turn is the same."""
    reader = TurnReader(RENDERER, get_parser(family.calls or "hermes"))
    cuts = ([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 7))
    return read_streamed(reader, text, Reading(TOOLS, 0, True, True, is_thinking), *cuts)


def thinks(family: Family) -> bool:
    return (family.think is not None or family.calls == "harmony") and family.name != "deepseek_v3_1"


def test_the_parser_is_chosen_by_the_template(family: Family) -> None:
    chosen, reason = choose_parser(family.template, {*family.special, *family.markup})
    assert chosen == family.calls, reason
    assert "\n" not in reason


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.calls is None])
def test_a_template_without_tools_has_none_or_the_parser_of_what_it_writes(name: str) -> None:
    chosen, reason = choose_parser(FAMILY[name].template, ())
    assert chosen == ("deepseek_v3" if name == "deepseek_r1" else None)
    assert reason


def test_calls_and_the_thought_before_them_are_read(family: Family, template: ChatTemplate) -> None:
    for calls in ((CALLS[0],), (CALLS[1],), (NESTED,), CALLS[: family.num_parallel]):
        thought = REASONING if thinks(family) else ""
        text, is_thinking = sampled(family, template, entry(family, calls, thought=thought))
        message = read(family, text, is_thinking=is_thinking)
        assert [call.error for call in message.tool_calls] == [None] * len(calls)
        assert made(message) == [(call.name, call.arguments) for call in calls]
        assert (message.reasoning, message.content) == (thought, "")
        behind = text[message.tool_calls[0].token_start :]
        readers = {name for name in PARSER_NAMES if reads(name, behind, calls, TOOLS)}
        assert readers == ({"qwen3_xml", "qwen3_coder"} if family.calls == "qwen3_xml" else {family.calls})


def test_text_before_calls_is_content(family: Family, template: ChatTemplate) -> None:
    text, is_thinking = sampled(family, template, entry(family, CALLS[:1], content="Let me see."))
    message = read(family, text, is_thinking=is_thinking)
    assert made(message) == [(CALLS[0].name, CALLS[0].arguments)]
    shown = "Let me see." if "Let me see." in text else ""
    assert message.content + message.reasoning == shown
    assert (shown == "") == (family.calls in ("llama3_json", "mistral"))  # their templates drop the content


def test_an_answer_and_its_thought_are_read(family: Family, template: ChatTemplate) -> None:
    thought = REASONING if thinks(family) else ""
    text, is_thinking = sampled(family, template, entry(family, (), thought=thought, content=ANSWER))
    message = read(family, text, is_thinking=is_thinking)
    assert message == Message("assistant", ANSWER, reasoning=thought)
    for reads_calls in (True, False):
        reader = TurnReader(RENDERER, get_parser(family.calls or ""))
        reading = Reading((), 0, reads_calls, True, is_thinking)
        plain, _ = reader.read(DecodedText(text, tuple(range(1, len(text) + 1))), reading)
        assert plain.content.strip() == ANSWER


def test_a_turn_cut_anywhere_has_no_call_that_was_not_written(family: Family, template: ChatTemplate) -> None:
    text, is_thinking = sampled(family, template, entry(family, CALLS[: family.num_parallel]))
    expected = [(call.name, call.arguments) for call in CALLS]
    for end in range(len(text)):
        message = read(family, text[:end], is_thinking=is_thinking)
        whole = [call for call in message.tool_calls if call.status is ToolCallStatus.OK]
        assert [(call.name, call.arguments) for call in whole] == expected[: len(whole)]
        for call in message.tool_calls[len(whole) :]:
            assert call.partial_arguments is None or call.name in ("look_up", "now")


def test_calls_inside_a_thought_are_thoughts(family: Family, template: ChatTemplate) -> None:
    text, is_thinking = sampled(family, template, entry(family, CALLS[:1]))
    marks = get_parser(family.calls or "").delimiters.reasoning
    call = text[read(family, text, is_thinking=is_thinking).tool_calls[0].token_start :]
    if marks.close not in call:
        message = read(family, f"{marks.open}I could write {call}{marks.close}", is_thinking=False)
        assert (message.tool_calls, message.content) == ((), "")
        assert message.reasoning == f"I could write {call}".strip()


@pytest.mark.parametrize(
    ("name", "written", "shown"),
    [
        ("mistral_small_3_2", "[TOOL_CALLS]now[CALL_ID]x7Yq2Kp9Z[ARGS]{}", "x7Yq2Kp9Z"),
        ("mistral_small_3_2", "[TOOL_CALLS]now[ARGS]{}", "g4brokwos"),
        ("mistral_small_3_2", "[TOOL_CALLS]now[CALL_ID]not one[ARGS]{}", "g4brokwos"),
        ("mistral_small_3_1", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "x7Yq2Kp9Z"}]', "x7Yq2Kp9Z"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            "functions.now:3",
        ),
        ("qwen3", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', ""),
    ],
)
def test_answers_name_the_calls_as_the_policy_and_its_template_do(
    name: str, written: str, shown: str, tmp_path: Path
) -> None:
    renderer = TemplateRenderer.from_directory(
        write_family(tmp_path, name), RenderSettings(on_unstable=OnUnstable.FORK)
    )
    reader = TurnReader(renderer, get_parser(FAMILY[name].calls or ""))
    ids = renderer.ids(written)
    message, _ = reader.read(renderer.decode_with_offsets(ids), Reading(TOOLS, 4, True, True, False))
    (call,) = message.tool_calls
    assert (call.id, call.name, call.written_id) == ("call_4_0", "now", "" if shown == "g4brokwos" else shown)
    cut = Reply(message, np.array(ids, np.int32), np.zeros(len(ids), np.float32), (), FinishReason.LENGTH, False)
    answer = Message("tool", "noon", tool_call_id="call_4_0", name="now")
    if name != "mistral_small_3_1":  # no bridge: the template moves its tools to the last user message
        bridge = renderer.decode(renderer.bridge([answer], TOOLS, reader.end_of(cut)))
        assert shown in bridge
        assert "call_4_0" not in bridge
    whole = renderer.decode(renderer.render([Message("user", "?"), message, answer], TOOLS))
    assert shown in whole[whole.index("noon") - 40 :]
    assert "call_4_0" not in whole
