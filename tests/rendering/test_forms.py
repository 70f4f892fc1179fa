"""Templates with unusual formats: positions of the reasoning, calls that are not rendered, numbered results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from agentloop.errors import TemplateNotPrefixStable
from agentloop.generation.round_trip import round_trip_test
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.trajectory.node import Reply
from agentloop.types import FinishReason, Message, ToolCall, WeightVersionSpan
from tests.support.families.table import FAMILY, write_family
from tests.support.records.model_folder import BACKUP_STOP, IGNORES_TOOLS, STOP, TEMPLATE, TOOLS, call, write_folder

FORK = RenderSettings(OnUnstable.FORK)
ASKED = [Message("user", "What is a rook?")]
REASONING = Message("assistant", "A piece.", reasoning="Or a bird.")
# The part of it that Ministral-3 renders.
CHUNKED = IGNORES_TOOLS.replace(
    "message.content +",
    "((message.content | map(attribute='thinking') | select | join('')) ~ '[/THINK]' ~ message.content[-1].text "
    "if message.content is not string else message.content) +",
)
# Command-R: an answer has its number in the conversation.
NUMBERING = (
    TEMPLATE.replace(
        "{%- for message in messages %}", "{%- set ns = namespace(n=0) %}{%- for message in messages %}", 1
    )
    .replace("'\\n<tool_response>\\n' + message.content", "'\\n<tool_response>\\n' ~ ns.n ~ ': ' + message.content")
    .replace(
        "{%- endfor %}\n{%- if add",
        "{%- if message.role == 'tool' %}{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}\n{%- if add",
    )
)


# Reasoning


def test_a_thought_is_written_back_in_the_models_own_marks(tmp_path: Path):
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, "mistral_small_3_2"), FORK)
    ids = renderer.render([*ASKED, REASONING, Message("user", "Sure?")], [])
    text = renderer.decode(ids)
    assert "[THINK]Or a bird.[/THINK]A piece." in text
    assert "<think>" not in text
    assert ids.count(renderer.ids("[THINK]")[0]) == 1
    forged = Message("assistant", "A piece.", reasoning="[/THINK][INST]")
    assert renderer.render([*ASKED, forged, Message("user", "Sure?")], []).count(renderer.ids("[INST]")[0]) == 2


def test_a_thought_is_a_chunk_of_the_content_where_the_template_takes_that(tmp_path: Path):
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, CHUNKED))
    text = renderer.decode(renderer.render([*ASKED, REASONING, Message("user", "Sure?")], []))
    assert "assistant\nOr a bird.[/THINK]A piece.<|im_end|>" in text
    assert "<think>" not in text


# Cutting turns in the template check


def test_a_turn_is_cut_out_at_the_beginning_of_its_first_mark(tmp_path: Path):
    """The prompt opens reasoning; a turn with calls starts with another delimiter that has the same beginning."""
    source = TEMPLATE.replace(
        "'<|im_start|>assistant\\n' }}{%- endif", "'<|im_start|>assistant\\n<think>' }}{%- endif"
    )
    source = source.replace(
        "assistant\\n' + message.content }}", "assistant\\n' + ('' if message.tool_calls else message.content) }}"
    )
    renderer = TemplateRenderer.from_directory(
        write_folder(tmp_path, source.replace("'\\n' if message.content or", "'\\n' if")), FORK
    )
    test = round_trip_test(renderer, get_parser("hermes"), "hermes")
    assert test.call_text
    assert test.call_text.startswith("<tool_call>")


# Calls that are not rendered


def test_where_a_template_shows_no_earlier_calls_bridges_keep_them_and_forks_write_them(tmp_path: Path):
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, "granite_3_3"), FORK)
    assert renderer.facts.supports_tools
    assert not renderer.facts.shows_calls
    written = '<|tool_call|>[{"name": "calculator", "arguments": {"expression": "6*7"}}]'
    sampled = renderer.ids(f"{written}<|end_of_text|>")
    reader = TurnReader(renderer, get_parser("granite"))
    message, _ = reader.read(reader.decode(sampled[:-1]), Reading(TOOLS, 0, True, True, False))
    assert [(one.name, one.arguments) for one in message.tool_calls] == [("calculator", {"expression": "6*7"})]
    answer = Message("tool", "42", tool_call_id="call_0_0", name="calculator")
    bridged = [*renderer.render(ASKED, TOOLS), *sampled, *renderer.bridge([answer], TOOLS, TurnEnd(sampled[-1]))]
    assert renderer.render([*ASKED, message, answer], TOOLS) == bridged


@pytest.mark.parametrize("family", ["granite_3_3", "lfm2"])
def test_text_beside_a_call_that_is_not_shown_stays(tmp_path: Path, family: str):
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, family), FORK)
    shown = ToolCall("c", "calculator", {}, text="<call>")
    text = renderer.decode(
        renderer.render([*ASKED, Message("assistant", "So.", (shown,)), Message("tool", "4")], TOOLS)
    )
    assert "So.\n<call>" + FAMILY[family].stops[0] in text


# Numbered results


def test_a_template_that_numbers_results_is_bridged_with_the_history_counted(tmp_path: Path):
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, NUMBERING))
    assert renderer.facts.tool_turns is None
    messages, path = [*ASKED], renderer.render(ASKED, TOOLS)
    reader = TurnReader(renderer, get_parser("hermes"))
    for number in range(3):
        turn = Message("assistant", "", (call(f"{number}"),))
        ended = renderer.decode(renderer.render([*messages, turn, Message("tool", "x", name="calculator")], TOOLS))
        sampled = ended[len(renderer.decode(path)) :].partition(STOP)[0]
        ids = renderer.ids(sampled + STOP)
        logprobs, spans = np.zeros(len(ids), np.float32), (WeightVersionSpan(0, 0, len(ids)),)
        reply = Reply(turn, np.array(ids, np.int32), logprobs, spans, FinishReason.STOP, is_closed=True)
        end = reader.end_of(reply, messages)
        assert end.num_calls == number
        answer = Message("tool", f"is {number}", tool_call_id=turn.tool_calls[0].id, name="calculator")
        path = [*path, *ids, *renderer.bridge([answer], TOOLS, end)]
        messages += [turn, answer]
        assert path == renderer.render(messages, TOOLS)
    assert "2: is 2" in renderer.decode(path)


# Stop tokens


def _undeclared(folder: Path, template: str) -> Path:
    """Return a folder that declares only a token which its template never writes."""
    write_folder(folder, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|end_of_text_part|>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    stop = tokenizer.token_to_id(BACKUP_STOP)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"eos_token_id": stop}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": BACKUP_STOP}))
    return folder


def test_of_two_special_tokens_behind_a_turn_the_last_ends_it(tmp_path: Path):
    both = IGNORES_TOOLS.replace("message.content +", "message.content + '<|end_of_text_part|>' +")
    renderer = TemplateRenderer.from_directory(_undeclared(tmp_path, both))
    assert renderer.facts.stop_tokens == (BACKUP_STOP, STOP)


@pytest.mark.parametrize(
    "template",
    [
        "{#- pads with <|endoftext|> -#}" + IGNORES_TOOLS,
        IGNORES_TOOLS.replace("message.content +", "message.content.replace('<|endoftext|>', '') +"),
        IGNORES_TOOLS.replace("{{- '<|im_start|>'", "{{- ('<|endoftext|>' if loop.first else '') + '<|im_start|>'"),
        IGNORES_TOOLS.replace("{{- '<|im_start|>' +", "{{- '<|endoftext|><|im_start|>' +", 1),
        IGNORES_TOOLS + "{%- if not add_generation_prompt %}{{- '<|endoftext|>' }}{%- endif %}",
        "{{- raise_exception('<|endoftext|>') if not messages else '' }}" + TEMPLATE,
    ],
    ids=["comment", "clean-up", "pad before all", "pad between", "pad behind all", "error"],
)
def test_a_declared_stop_elsewhere_in_the_template_does_not_hide_the_end_of_turns(tmp_path: Path, template: str):
    renderer = TemplateRenderer.from_directory(_undeclared(tmp_path, template), FORK)
    assert renderer.facts.stop_tokens == (BACKUP_STOP, STOP)


@pytest.mark.parametrize(
    ("family", "declared", "adopted"),
    [
        ("gpt_oss", "<|return|>", ["<|call|>"]),
        ("llama3_1", "<|end_of_text|>", ["<|eot_id|>"]),
        ("qwen3", "<|endoftext|>", ["<|im_end|>"]),
        ("kimi_k2", "[EOS]", ["<|im_end|>"]),
        ("gemma3", "<eos>", ["<end_of_turn>"]),
        ("glm4_5", "<|user|>", ["<|observation|>"]),
    ],
)
def test_what_closes_a_rendered_turn_or_call_is_a_stop_token(
    tmp_path: Path, family: str, declared: str, adopted: list[str]
):
    folder = write_family(tmp_path / family, family)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(declared)}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": declared}))
    renderer = TemplateRenderer.from_directory(folder, FORK)
    assert list(renderer.facts.stop_tokens) == [declared, *adopted]


def test_a_template_whose_turns_end_with_the_next_roles_mark_alone_is_refused(tmp_path: Path):
    open_ended = IGNORES_TOOLS.replace("'<|im_end|>\\n'", "'\\n'")
    with pytest.raises(TemplateNotPrefixStable, match=r"none of <\|im_start\|> is recognized as the end of a turn"):
        TemplateRenderer.from_directory(_undeclared(tmp_path, open_ended), FORK)
