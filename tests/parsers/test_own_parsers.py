"""All built-in parsers: valid calls are parsed, malformed ones reported, no text is lost, and time is linear."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.base import MAX_CALLS
from agentloop.parsers.by_name import PARSER_NAMES, get_parser
from agentloop.types import ToolCall, ToolCallStatus
from tests.parsers.writing import (
    COMMON_FRAGMENTS,
    FRAGMENTS,
    WRITE,
    mistral_list,
    parse,
    read_streamed,
    reads,
    repeated,
)
from tests.support.families.derived import derived_chat

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "items": {"type": "array"},
    "options": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("look_up", "now", "f")
]
ARGUMENTS = {
    "text": 'né "quoted" 日本\n{x}',
    "count": 3,
    "items": [1, {"a": [None, True]}],
    "options": {"é": {"b": "</x>"}},
}
HOSTILE_CHARS = 100_000


def test_every_parser_is_tested():
    assert set(WRITE) == set(FRAGMENTS) == set(PARSER_NAMES) - {"qwen3_coder"}


@pytest.mark.parametrize("name", WRITE)
def test_parallel_calls_with_unicode_nesting_and_no_arguments_are_read(name: str):
    calls = [("look_up", ARGUMENTS), ("now", {}), ("look_up", {"text": ""})]
    written = WRITE[name](calls)
    before = "" if name == "llama3_json" else "Let me see.\n"
    turn = parse(name, before + written, TOOLS, 7)
    assert [call.error for call in turn.calls] == [None] * 3
    assert [(call.name, dict(call.arguments)) for call in turn.calls] == calls
    assert [call.id for call in turn.calls] == ["call_7_0", "call_7_1", "call_7_2"]
    assert turn.content == before.strip()
    spans = [(call.token_start, call.token_end) for call in turn.calls]
    assert all(start < end <= following for (start, end), (following, _) in pairwise(spans))
    assert (spans[0][0], spans[-1][1]) == (len(before), len(before + written))


def test_both_forms_of_mistral_are_read():
    calls = [("look_up", ARGUMENTS), ("now", {})]
    turn = parse("mistral", f"Well. {mistral_list(calls)}", TOOLS)
    assert [(call.name, dict(call.arguments)) for call in turn.calls] == calls
    with_id = '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{} [TOOL_CALLS]look_up{"count": 1}'
    assert [(c.name, dict(c.arguments)) for c in parse("mistral", with_id).calls] == [
        ("now", {}),
        ("look_up", {"count": 1}),
    ]


def test_llama_reads_calls_where_they_may_stand():
    call = '{"name": "now", "parameters": {}}'
    for text, num_calls, content in (
        (f"\n {call}", 1, ""),
        (f"<|python_tag|>{call}", 1, ""),
        (f"Well. <|python_tag|>{call}", 1, "Well."),
        (f'{{"type": "function", {call[1:]}', 1, ""),
        (f"{call}\n{call};{call} end", 3, "end"),
        (f"I would write {call}", 0, f"I would write {call}"),
        ('{"answer": 4}', 0, '{"answer": 4}'),
        ('{"name": "Ann", "age": 5}', 0, '{"name": "Ann", "age": 5}'),
        (f'{call} {{"answer": 4}}', 1, '{"answer": 4}'),
        ("{not json", 0, "{not json"),
    ):
        turn = parse("llama3_json", text, TOOLS)
        assert ([call.status for call in turn.calls], turn.content) == ([ToolCallStatus.OK] * num_calls, content)
    for text in (
        '{"name": "now"}',
        '<|python_tag|>now.call(text="a")',
        '{"name": "now", "parameters": {"a": NaN}}',
    ):
        assert [call.status for call in parse("llama3_json", text, TOOLS).calls] == [ToolCallStatus.MALFORMED]


def test_gpt_oss_channels_are_told_apart():
    text = (
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"count": 1}'
    )
    turn = parse("harmony", text, TOOLS)
    assert (turn.content, turn.reasoning) == ("I look it up.", "Hm.")
    assert [(call.name, dict(call.arguments)) for call in turn.calls] == [("f", {"count": 1})]
    for leading in (" to=functions.now<|channel|>commentary json<|message|>{}", "to=now <|message|>{}<|call|>"):
        assert [(call.name, call.status) for call in parse("harmony", leading).calls] == [
            ("now", ToolCallStatus.OK)
        ]
    assert parse("harmony", "<|channel|>final<|message|> Four. ").content == "Four."
    assert parse("harmony", "<|start|>user<|message|>x").content == "<|start|>\nuser<|message|>x"


HEADER, BODY = "<|channel|>commentary to=functions.add", '<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    "written",
    [
        f"{HEADER}<|channel|>commentary <|constrain|>json{BODY}",
        f"{HEADER} <|constrain|>json<|constrain|>json{BODY}",
        f"<|channel|>commentary <|constrain|>json to=functions.add{BODY}",
        f"<|constrain|>json{HEADER}{BODY}",
        f"{HEADER} to=functions.add{BODY}",
        f"{HEADER}<|call|>",
        f"{HEADER}<|call|>{BODY}",
        f"{HEADER} <|constrain|>json<|call|>{{}}<|call|>",
        f"{HEADER} <|constrain|>json<|end|>{{}}<|call|>",
        f"{HEADER} <|constrain|>json<|message|>{BODY}",
        f"<|start|>assistant<|start|>assistant{HEADER}{BODY}",
        f"<|start|>assistantassistant{HEADER}{BODY}",
        f"assistant{HEADER}{BODY}",
        f"assistant to=functions.add<|channel|>commentary json{BODY}",
    ],
)
def test_a_header_with_a_recipient_that_is_written_otherwise_is_one_malformed_call(written: str):
    reader, reading = TurnReader(derived_chat("seed_oss")[0], get_parser("harmony")), Reading(TOOLS, 0, True, False)
    before = (
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    )
    for lead, content in (("", ""), (f"{before}<|start|>assistant", "I add.")):
        if not lead or not written.startswith(("assistant", "<|start|>")):
            text = lead + written
            message = read_streamed(reader, text, reading, list(text), [text[:40], text[40:]])
            assert message.content == content
            assert [(call.name, call.status) for call in message.tool_calls] == [("add", ToolCallStatus.MALFORMED)]


def test_what_is_doubled_in_a_header_without_a_recipient_is_no_content():
    for header in (
        "assistant",
        "assistantassistant",
        "assistant assistant",
        "<|start|>assistant<|start|>assistant",
        "<|start|>assistantassistant",
        "<|channel|>final",
    ):
        assert parse("harmony", f"{header}<|channel|>final<|message|>Four.").content == "Four."
    assert parse("harmony", f"{HEADER} <|constrain|>json{BODY}<|call|>").content == ""
    assert parse("harmony", "<|start|>x").content == "<|start|>\nx"  # the parser's loop advances past it
    (call,) = parse(
        "harmony", f"<|channel|>commentary to= functions.add <|constrain|>json{BODY}<|call|>", TOOLS
    ).calls
    assert (call.name, call.status) == ("add", ToolCallStatus.OK)


@pytest.mark.parametrize("name", WRITE)
def test_a_call_that_the_turns_end_cut_keeps_its_name_and_partial_arguments(name: str):
    whole = WRITE[name]([("look_up", {"text": "one two", "count": 3})])
    end = whole.index("two")
    (call,) = parse(name, whole[:end], TOOLS).calls
    assert (call.status, call.name) == (ToolCallStatus.MALFORMED, "look_up")
    assert call.partial_arguments == '{"text": "one '
    assert call.text == whole[:end]
    for end in range(len(whole)):
        for call in parse(name, whole[:end], TOOLS).calls:
            assert call.partial_arguments is None or call.name == "look_up"
            assert call.status is ToolCallStatus.MALFORMED or call.arguments == {"text": "one two", "count": 3}


@pytest.mark.parametrize("name", WRITE)
def test_a_broken_call_is_no_cut_one_and_hides_no_other(name: str):
    broken, whole = WRITE[name]([("f", {"items": 1})]).replace("1", "[1", 1), WRITE[name]([("now", {})])
    if name == "llama3_json":
        broken, whole = f"<|python_tag|>{broken}", f"<|python_tag|>{whole}"
    turn = parse(name, f"{broken}\n{whole}", TOOLS)
    assert [(c.name, c.status) for c in turn.calls] == [("f", ToolCallStatus.MALFORMED), ("now", ToolCallStatus.OK)]
    assert turn.calls[0].partial_arguments is None
    assert turn.calls[0].error is not None
    assert "\n" not in turn.calls[0].error


def test_calls_beyond_the_cap_are_reported_as_one():
    for name, write in WRITE.items():
        text = "\n".join(write([("f", {})]) for _ in range(MAX_CALLS + 50))
        turn = parse(name, text)
        assert [call.status for call in turn.calls[:MAX_CALLS]] == [ToolCallStatus.OK] * MAX_CALLS, name
        assert turn.calls[MAX_CALLS].status is ToolCallStatus.MALFORMED
        assert len(turn.calls) == MAX_CALLS + 1, name


def test_the_marks_of_other_families_are_content():
    readers = {
        name: tuple(
            one
            for one in PARSER_NAMES
            if reads(one, write([("look_up", ARGUMENTS)]), (ToolCall("", "look_up", ARGUMENTS),), TOOLS)
        )
        for name, write in WRITE.items()
    }
    assert readers == {**{name: (name,) for name in WRITE}, "qwen3_xml": ("qwen3_xml", "qwen3_coder")}


@pytest.mark.parametrize("name", WRITE)
@settings(max_examples=30)
@given(data=st.data())
def test_any_arguments_come_back(name: str, data: st.DataObject):
    values = st.text(st.characters(exclude_categories=["Cs"])).filter(
        lambda value: not {"</", "<|"} & {value[at : at + 2] for at in range(len(value))}
    )
    typed = {"text": values, "count": st.integers(-(2**63), 2**63 - 1), "items": st.lists(values, max_size=3)}
    arguments = data.draw(st.fixed_dictionaries({}, optional=typed))
    (call,) = parse(name, WRITE[name]([("f", arguments)]), TOOLS).calls
    assert (call.error, dict(call.arguments)) == (None, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITE)
@given(data=st.data())
def test_no_text_raises_and_nothing_vanishes(name: str, data: st.DataObject):
    parts = st.sampled_from(FRAGMENTS[name] + COMMON_FRAGMENTS) | st.text(max_size=4)
    text = data.draw(st.lists(parts, max_size=30).map("".join))
    turn = parse(name, text, TOOLS)
    position, outside = 0, ""
    for call in turn.calls:
        assert position <= call.token_start < call.token_end
        assert call.status is ToolCallStatus.OK or call.text == text[call.token_start : call.token_end]
        outside += text[position : call.token_start]
        position = call.token_end
    outside += text[position:]
    if name == "harmony":  # harmony headers are not content
        assert all(part in text for part in (turn.content + "\n" + turn.reasoning).split("\n"))
        if "<|message|>" not in text:
            assert "".join(turn.content.split()) == "".join(outside.split())
    else:
        assert "".join(turn.content.split()) == "".join(outside.split())


HOSTILE = [
    (name, head, unit)
    for name, fragments in FRAGMENTS.items()
    for head in ("", get_parser(name).delimiters.openings[0])
    for unit in (
        *fragments,
        "".join(fragments),
        WRITE[name]([("f", {})]),
        '"',
        '"\\',
        "[",
        "{",
        " ",
        "\n",
        '{"name":"',
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITE)
def test_hostile_text_takes_linear_time(name: str):
    def cpu_s(head: str, unit: str, num_chars: int) -> float:
        text = head + repeated(unit, num_chars)
        started = time.process_time()
        turn = parse(name, text, TOOLS)
        assert len(turn.calls) <= MAX_CALLS + 1
        return time.process_time() - started

    for of, head, unit in HOSTILE:
        if of == name:
            assert cpu_s(head, unit, HOSTILE_CHARS) < 1.5, (head, unit)  # quadratic code takes much longer


def test_linear_time_of_json_without_an_end():
    for name in WRITE:
        opening = WRITE[name]([("f", {"a": 1})]).split("1")[0]
        started = time.process_time()
        parse(name, opening * (HOSTILE_CHARS // len(opening)))
        assert time.process_time() - started < 1.5, name
