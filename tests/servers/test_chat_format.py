"""Selection of a renderer and a parser from a model folder and chat settings, the template check and its log."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from structlog.testing import capture_logs

from agentloop.errors import (
    InvalidRequest,
    ParserMismatch,
    TemplateError,
    TemplateNotPrefixStable,
)
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.base import DecodedText, ReasoningDelimiters
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.port import Renderer, TurnEnd
from agentloop.rendering.renderer import RenderSettings, TemplateRenderer
from agentloop.types import Message, ToolCall, ToolCallStatus
from agentloop_servers.chat_format.load import ChatFormat, load_chat_format
from agentloop_servers.config.service import ChatSettings
from tests.support.families.table import FAMILY, write_family

HERE = __name__ if "." in __name__ else f"tests.servers.{__name__}"
HERMES = get_parser("hermes")
QUESTION = [Message("user", "What is a rook?")]
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": {}}}


class OwnParser:
    """A user's parser."""

    delimiters = HERMES.delimiters
    parse = HERMES.parse
    call_constraint = HERMES.call_constraint


def own_renderer(folder: Path, settings: RenderSettings) -> Renderer:
    """A user's renderer: the model's template with other arguments."""
    kwargs = {**settings.kwargs, "enable_thinking": False}
    return TemplateRenderer.from_directory(folder, RenderSettings(kwargs=kwargs))


def no_renderer(folder: Path, settings: RenderSettings) -> object:
    return object()


def loaded(folder: Path, family: str, **settings: Any) -> ChatFormat:
    return load_chat_format(write_family(folder, family), ChatSettings.model_validate(settings))


def prompt(chat: ChatFormat) -> str:
    return chat.renderer.decode(chat.renderer.render(QUESTION, ()))


def test_the_log_says_what_was_chosen_and_why(tmp_path: Path) -> None:
    with capture_logs() as logs:
        loaded(tmp_path, "qwen3_coder")
    assert [entry["event"] for entry in logs] == ["chat_format"]
    assert logs[0]["parser"] == "qwen3_xml"
    assert "<function=" in logs[0]["because"]
    assert logs[0]["tools"]
    assert "<|im_end|>" in logs[0]["stop_tokens"]


def test_the_log_says_where_paths_fork(tmp_path: Path) -> None:
    with capture_logs() as logs:
        loaded(tmp_path, "mistral_small_3_1")
    assert [entry["at"] for entry in logs if entry["event"] == "paths_fork"] == ["user_turns"]
    with pytest.raises(TemplateNotPrefixStable):
        loaded(tmp_path, "mistral_small_3_1", on_unstable_template="raise")


def test_a_parser_is_a_name_or_an_import_path(tmp_path: Path) -> None:
    assert isinstance(loaded(tmp_path, "qwen3", parser=f"{HERE}:OwnParser").parser, OwnParser)
    assert loaded(tmp_path, "qwen3", parser="hermes").parser is HERMES
    with pytest.raises(ParserMismatch, match="'llama3_json' does not read"):
        loaded(tmp_path, "qwen3", parser="llama3_json")


def test_a_model_whose_calls_no_parser_reads_is_served_without_tools(tmp_path: Path) -> None:
    with capture_logs() as logs:
        chat = loaded(tmp_path, "gemma4")
    told = [entry["because"] for entry in logs if entry["event"] == "tools_off"]
    assert len(told) == 1
    assert "no parser reads its calls" in told[0]
    assert next(entry for entry in logs if entry["event"] == "chat_format")["parser"] == "none"
    history = [*QUESTION, Message("assistant", "", (ToolCall("c", "f"),)), Message("tool", "x", tool_call_id="c")]
    for refused in (
        lambda: chat.renderer.render(QUESTION, [TOOL]),
        lambda: chat.renderer.render(history, ()),
        lambda: chat.renderer.bridge(history[2:], (), TurnEnd()),
    ):
        with pytest.raises(TemplateError, match="without tools: no parser reads its calls") as caught:
            refused()
        assert caught.value.param == "tools"
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<bos>"
    )
    reference.chat_template = FAMILY["gemma4"].template
    talk = [*QUESTION, Message("assistant", "A bird."), Message("user", "And in chess? ♜")]
    entries = [{"role": one.role, "content": one.content} for one in talk]
    expected = reference.apply_chat_template(entries, add_generation_prompt=True, tokenize=False)
    assert chat.renderer.render(talk, ()) == reference(expected, add_special_tokens=False)["input_ids"]


def test_thoughts_of_a_model_without_tools_are_read_by_its_own_marks(tmp_path: Path) -> None:
    chat = loaded(tmp_path, "gemma4")
    reader = TurnReader(chat.renderer, chat.parser)
    text = "<|channel>thought\nA bird?<channel|>It is a piece."
    decoded = DecodedText(text, tuple(range(1, len(text) + 1)))
    message, _ = reader.read(decoded, Reading((), 0, False, True, False))
    assert (message.reasoning, message.content) == ("A bird?", "It is a piece.")


def test_no_parser_may_be_asked_for(tmp_path: Path) -> None:
    chat = loaded(tmp_path, "qwen3", parser="none")
    with pytest.raises(TemplateError, match="it is configured"):
        chat.renderer.render(QUESTION, [TOOL])
    assert chat.parser.delimiters.reasoning == ReasoningDelimiters()
    assert prompt(chat) == prompt(loaded(tmp_path, "qwen3"))
    assert loaded(tmp_path, "qwen3").renderer.render(QUESTION, [TOOL])


def test_tools_are_offered_where_the_template_shows_them_and_answers_but_no_calls(tmp_path: Path) -> None:
    chat = loaded(tmp_path / "granite", "granite_3_3")
    assert "<|tool_call|>" in chat.parser.delimiters.openings
    assert "look_up" in chat.renderer.decode(chat.renderer.render(QUESTION, [TOOL]))
    own = loaded(tmp_path / "lfm2", "lfm2", parser=f"{HERE}:OwnParser")
    assert "look_up" in own.renderer.decode(own.renderer.render(QUESTION, [TOOL]))
    assert "<|tool_call_start|>" in loaded(tmp_path / "lfm2", "lfm2").parser.delimiters.openings


def test_a_derived_parser_is_named_and_may_be_lenient(tmp_path: Path) -> None:
    with capture_logs() as logs:
        chat = loaded(tmp_path, "xlam_qwen", lenient=True)
    assert (logs[0]["parser"], logs[0]["because"]) == ("derived", "it parses the calls that the renderer writes")
    text = '[{"name": "look_up"}]'
    for one, num_calls in ((chat, 1), (loaded(tmp_path / "strict", "xlam_qwen"), 0)):
        calls = one.parser.parse(DecodedText(text, tuple(range(1, len(text) + 1))), [TOOL], 0).calls
        assert sum(call.status is ToolCallStatus.OK for call in calls) == num_calls


def test_auto_finds_what_reads_calls_that_the_template_does_not_spell_out(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2_5")
    hidden = FAMILY["qwen2_5"].template.replace("'\\n<tool_call>\\n", "'\\n<tool' ~ '_call>\\n")
    hidden = hidden.replace("<tool_call>", "the marks")
    (folder / "chat_template.jinja").write_text(hidden)
    with capture_logs() as logs:
        chat = load_chat_format(folder, ChatSettings())
    assert chat.parser is HERMES
    assert logs[0]["because"] == "it parses the calls that the renderer writes"


def test_vllms_parsers_are_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="vLLM's parsers are not supported: use 'auto'"):
        load_chat_format(write_family(tmp_path, "qwen3"), ChatSettings(parser="vllm:hermes+qwen3"))


def test_a_renderer_is_an_import_path_too(tmp_path: Path) -> None:
    assert prompt(loaded(tmp_path, "qwen3", renderer=f"{HERE}:own_renderer")).endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("settings", "param", "said"),
    [
        ({"renderer": "nonsense"}, "renderer", "not an import path"),
        ({"renderer": f"{HERE}:no_renderer"}, "renderer", "did not return a renderer"),
        ({"renderer": f"{HERE}:HERE"}, "renderer", "is not callable"),
        ({"parser": "nonsense"}, "parser", "expected one of hermes"),
    ],
)
def test_what_names_nothing_is_refused(tmp_path: Path, settings: dict[str, str], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        loaded(tmp_path, "qwen3", **settings)
    assert caught.value.param == param


def without_reasoning(folder: Path) -> ChatFormat:
    return loaded(folder, "qwen3", template={"kwargs": {"enable_thinking": False}})


def with_a_date(folder: Path) -> ChatFormat:
    return loaded(folder, "llama3_2", template={"date": datetime.date(2026, 3, 9)})


def with_a_file(folder: Path) -> ChatFormat:
    folder.mkdir(exist_ok=True)
    (folder / "own.jinja").write_text("Of mine." + FAMILY["qwen3"].template)
    return loaded(folder, "qwen3", template={"file": str(folder / "own.jinja")})


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (without_reasoning, "<think>\n\n</think>\n\n"),
        (with_a_date, "Today Date: 09 Mar 2026"),
        (with_a_file, "Of mine."),
    ],
)
def test_template_settings_reach_the_prompt(tmp_path: Path, make: Callable[[Path], ChatFormat], shown: str) -> None:
    assert shown in prompt(make(tmp_path / "model"))


def test_stop_tokens_take_the_place_of_the_folders(tmp_path: Path) -> None:
    chat = loaded(tmp_path, "qwen3", stop_tokens=["<|im_end|>"])
    assert chat.renderer.facts.stop_tokens == ("<|im_end|>",)
    with pytest.raises(TemplateError, match="stop token '<nothing>' is not in"):
        loaded(tmp_path, "qwen3", stop_tokens=["<nothing>"])


def test_thoughts_are_kept_or_go_as_in_the_template(tmp_path: Path) -> None:
    question = Message("user", "And in chess?")
    for thinking, forks in (("keep", False), ("template", True)):
        renderer = loaded(tmp_path, "qwen3", thinking=thinking).renderer
        end = TurnEnd(renderer.stop_token_ids[0])
        if forks:
            with pytest.raises(TemplateNotPrefixStable):
                renderer.bridge([question], (), end)
        else:
            assert "And in chess?" in renderer.decode(renderer.bridge([question], (), end))
