"""Calls as each family's chat template writes them, and the units of its hostile texts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentloop.generation.stream_splitter import TurnSplitter
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.base import MAX_CALLS, DecodedText, ParsedTurn
from agentloop.parsers.by_name import get_parser
from agentloop.types import Message, ToolCall, ToolCallStatus

Arguments = Mapping[str, Any]
Call = tuple[str, Arguments]


def parse(parser: str, text: str, tools: Any = (), turn_index: int = 0) -> ParsedTurn:
    """Parse with one token per character, so that spans are offsets into the text."""
    return get_parser(parser).parse(DecodedText(text, tuple(range(1, len(text) + 1))), tools, turn_index)


def reads(name: str, text: str, calls: Sequence[ToolCall], tools: Any) -> bool:
    """Return True if a parser finds exactly these calls, names and arguments in a turn's text."""
    found = parse(name, text, tools).calls
    are_sound = all(call.status is ToolCallStatus.OK for call in found)
    return are_sound and [(c.name, dict(c.arguments)) for c in found] == [
        (c.name, dict(c.arguments)) for c in calls
    ]


def read_streamed(reader: TurnReader, text: str, reading: Reading, *cuts: Sequence[str]) -> Message:
    """Parse a turn with one token per character, and check that each cut of it streams to the same result."""
    message, _ = reader.read(DecodedText(text, tuple(range(1, len(text) + 1))), reading)
    for cut in cuts:
        splitter = TurnSplitter(reader, reading)
        pieces = [splitter.add(piece) for piece in cut]
        pieces.append(splitter.finish(message))
        assert "".join(piece.content for piece in pieces) == message.content
        assert "".join(piece.reasoning for piece in pieces) == message.reasoning
        names = [delta.name for piece in pieces for delta in piece.calls if delta.name is not None]
        assert names == [call.name for call in message.tool_calls]
    return message


def made(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and arguments of a turn's calls."""
    return [(call.name, dict(call.arguments)) for call in message.tool_calls]


def repeated(unit: str, num_chars: int) -> str:
    return (unit * (num_chars // len(unit) + 1))[:num_chars]


def check_linear_time(parser: str, head: str, unit: str, tail: str, tools: Any = ()) -> None:
    """Check that a hostile text of four times the length takes at most ten times the CPU time; best of three."""

    def cpu_s(num_chars: int) -> float:
        started = time.process_time()
        turn = parse(parser, head + repeated(unit, num_chars) + tail, tools)
        ended = time.process_time()
        assert turn.calls
        assert len(turn.calls) <= MAX_CALLS + 1
        return ended - started

    quarter = min(cpu_s(125_000) for _ in range(3))
    bound = min(10 * quarter + 0.05, 0.5)  # quadratic code takes seconds here
    assert any(cpu_s(500_000) < bound for _ in range(3))


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def _hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def _qwen3_xml(calls: list[Call]) -> str:
    def one(name: str, arguments: Arguments) -> str:
        inner = "".join(f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm45(calls: list[Call]) -> str:
    def one(name: str, arguments: Arguments) -> str:
        inner = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in arguments.items()
        )
        return f"<tool_call>{name}\n{inner}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _deepseek_v3(calls: list[Call]) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{chr(10).join(one.format(n, dumps(a)) for n, a in calls)}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: list[Call]) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{''.join(one.format(n, dumps(a)) for n, a in calls)}<｜tool▁calls▁end｜>"


def _kimi_k2(calls: list[Call]) -> str:
    one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    inner = "".join(one.format(name, index, dumps(a)) for index, (name, a) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def mistral_list(calls: list[Call], *, has_ids: bool = True) -> str:
    listed = [
        {"name": name, "arguments": arguments} | ({"id": f"call0000{index}"} if has_ids else {})
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"[TOOL_CALLS] {dumps(listed)}"


def _llama3_json(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": {dumps(name)}, "parameters": {dumps(a)}}}' for name, a in calls)


def _harmony(calls: list[Call]) -> str:
    one = "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{}"
    return "<|call|>".join(one.format(name, dumps(arguments)) for name, arguments in calls)


def _lfm2(calls: list[Call]) -> str:
    def value(one: Any) -> str:
        return dumps(one) if isinstance(one, dict | list) else repr(one)

    written = [f"{name}({', '.join(f'{key}={value(one)}' for key, one in a.items())})" for name, a in calls]
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


WRITE: dict[str, Callable[[list[Call]], str]] = {
    "hermes": _hermes,
    "qwen3_xml": _qwen3_xml,
    "llama3_json": _llama3_json,
    "glm45": _glm45,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi_k2,
    "mistral": _mistral,
    "harmony": _harmony,
    "lfm2": _lfm2,
    "granite": lambda calls: mistral_list(calls, has_ids=False).replace("[TOOL_CALLS] ", "<|tool_call|>"),
}

FRAGMENTS: dict[str, tuple[str, ...]] = {
    "hermes": (
        "<tool_call>",
        "</tool_call>",
        '{"name": "a", "arguments": {}}',
        '{"name": "',
        '{"name": "a", "arguments": {"b',
    ),
    "qwen3_xml": (
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=count>",
        "</parameter>",
        "1",
    ),
    "llama3_json": (
        "<|python_tag|>",
        '{"name": "a", "parameters": {}}',
        '{"name": "',
        '"}',
        ";",
        '{"a": 1}',
        '{"name": 1}',
    ),
    "glm45": ("<tool_call>", "</tool_call>", "f\n", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "1"),
    "deepseek_v3": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("function<｜tool▁sep｜>f\n", "```json\n", "\n```", "{}"),
    ),
    "deepseek_v31": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("f<｜tool▁sep｜>", "{}", '{"a": "'),
    ),
    "kimi_k2": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("functions.f:0<|tool_call_argument_begin|>", "{}", '{"a": "'),
    ),
    "mistral": (
        "[TOOL_CALLS]",
        "f[ARGS]",
        "{}",
        "[{",
        '[{"name": "f", "arguments": {}}',
        ", ",
        "]",
        "[CALL_ID]abc",
    ),
    "harmony": (
        *("<|start|>assistant", "<|channel|>", "<|channel|>final<|message|>", "<|message|>", "<|end|>", "<|call|>"),
        *(" to=functions.f", "<|channel|>analysis<|message|>", "<|channel|>commentary json<|message|>", "{}"),
        *("<|constrain|>", "<|start|>", "commentary"),
    ),
    "lfm2": ("<|tool_call_start|>[", "<|tool_call_end|>", "f(", "count=1", ")", "text='", "'", ", ", "]"),
    "granite": ("<|tool_call|>", "[{", '[{"name": "f", "arguments": {}}', "{}", ", ", "]"),
}
"""Parts of well-written and broken calls: any row of them is a text that a policy could write."""

COMMON_FRAGMENTS = ("\n", " ", "é", "x ", "\\", '"', "{", "}", "[", "]", "<", "<|", "</", "<think>", "</think>")
