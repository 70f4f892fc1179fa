"""vLLM 0.32's tool parsers behind the port: what they read agrees with what our own read of well-written calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.parsers.base import DecodedText, ParsedTurn, Parser
from agentloop.parsers.by_name import get_parser
from agentloop.types import ToolCallStatus
from agentloop_servers.engines.vllm.parsers import vllm_parser
from tests.parsers.writing import WRITE, dumps
from tests.support.families.table import write_family

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # vLLM's import

PROPERTIES = {"text": {"type": "string"}, "count": {"type": "integer"}, "items": {"type": "array"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("look_up", "now")
]
CALLS = [("look_up", {"text": 'né "q" 日本 {x}', "count": -3, "items": [1, {"a": [None, True]}]}), ("now", {})]
PAIRS = [  # of ours and vLLM's, with a family whose tokenizer has the tokens
    ("hermes", "hermes", "qwen3", 2),
    ("qwen3_xml", "qwen3_coder", "qwen3_coder", 2),
    ("llama3_json", "llama3_json", "llama3_1", 1),
    ("glm45", "glm45", "glm4_5", 2),
    ("deepseek_v3", "deepseek_v3", "deepseek_v3_1", 2),
    ("deepseek_v31", "deepseek_v31", "deepseek_v3_1", 2),
    ("kimi_k2", "kimi_k2", "kimi_k2", 2),
    ("mistral", "mistral", "mistral_small_3_2", 2),
]


def parse(parser: Parser, text: str) -> ParsedTurn:
    return parser.parse(DecodedText(text, tuple(range(1, len(text) + 1))), TOOLS, 3)


def made(turn: ParsedTurn) -> list[tuple[str, str, dict[str, Any]]]:
    return [(call.id, call.name, dict(call.arguments)) for call in turn.calls]


def test_the_version_is_the_one_they_were_tried_with() -> None:
    assert pytest.importorskip("vllm").__version__.startswith("0.32.")


@pytest.mark.parametrize(("ours", "theirs", "family", "num_calls"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_well_written_calls_are_read_alike(
    ours: str, theirs: str, family: str, num_calls: int, tmp_path: Path
) -> None:
    adapter: Parser = vllm_parser(f"vllm:{theirs}", write_family(tmp_path, family))
    before = "" if ours == "llama3_json" else "Let me see.\n"
    for calls in (CALLS[:num_calls], CALLS[:1], CALLS[1:]):
        written = WRITE[ours](calls)
        expected, found = parse(get_parser(ours), before + written), parse(adapter, before + written)
        assert made(found) == made(expected) == [(f"call_3_{i}", *call) for i, call in enumerate(calls)]
        assert found.content == expected.content == before.strip()
        spans = [(call.token_start, call.token_end) for call in found.calls]
        assert spans[0][0] == len(before)
        assert spans[-1][1] == len(before + written)
        for call, (start, end) in zip(found.calls, spans, strict=True):
            assert call.name in (before + written)[start:end]
    assert parse(adapter, " Just text. ") == ParsedTurn("Just text.", ())


def test_what_cannot_be_read_falls_back_to_content(tmp_path: Path) -> None:
    adapter = vllm_parser("vllm:hermes", write_family(tmp_path, "qwen3"))
    text = '<tool_call>{"name": "now", "arguments": {</tool_call>'
    assert parse(adapter, text) == ParsedTurn(text, ())
    turn = parse(adapter, f"<tool_call>{dumps({'name': 'now', 'arguments': [1]})}</tool_call>")
    assert [(call.name, call.status) for call in turn.calls] == [("now", ToolCallStatus.MALFORMED)]


def test_a_stream_waits_and_calls_cannot_be_forced(tmp_path: Path) -> None:
    adapter = vllm_parser("vllm:hermes+qwen3", write_family(tmp_path, "qwen3"))
    assert (adapter.marks.openings, adapter.marks.thoughts.open) == (("",), "<think>")
    with pytest.raises(UnsupportedParameter) as caught:
        adapter.call_constraint(TOOLS, forced=None, is_parallel=True)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["vllm:nonsense", "vllm:hermes+nonsense", "vllm:deepseek_v3"])
def test_an_unknown_parser_or_one_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        vllm_parser(name, write_family(tmp_path, "llama3_1"))
    assert caught.value.param == "parser"
