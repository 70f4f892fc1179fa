"""Published chat templates: stable or not, with and without tools, and broken folders."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.errors import InvalidRequest, TemplateError, TemplateNotPrefixStable
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.types import Message, ToolCall, ToolCallStatus
from tests.support.families.table import write_family
from tests.support.records.model_folder import (
    FORGETS_EARLIER,
    IGNORES_TOOLS,
    NO_STOP,
    STRIPS_THINKING,
    TEMPLATE,
    TOOLS,
    WITHOUT_TOOLS,
    call,
    grown,
    write_folder,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> TemplateRenderer:
    return TemplateRenderer.from_directory(folder)


def test_a_template_that_forgets_is_refused_with_the_difference(tmp_path: Path):
    write_folder(tmp_path, FORGETS_EARLIER)
    with pytest.raises(TemplateNotPrefixStable, match=r"became.*omitted"):
        TemplateRenderer.from_directory(tmp_path)


def test_a_template_that_forgets_can_fork(tmp_path: Path):
    renderer = TemplateRenderer.from_directory(
        write_folder(tmp_path, FORGETS_EARLIER), RenderSettings(on_unstable=OnUnstable.FORK)
    )
    assert renderer.facts.tool_turns is not None
    assert "Hi" in renderer.decode(renderer.render([Message("user", "Hi")], TOOLS))
    with pytest.raises(TemplateNotPrefixStable, match="omitted"):
        renderer.bridge([Message("user", "x")], [], TurnEnd(renderer.stop_token_ids[0]))


def test_stripped_thinking_is_known_and_bridges_keep_it(tmp_path: Path):
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, STRIPS_THINKING))
    assert renderer.facts.user_turns is None
    assert renderer.facts.strips_thinking
    messages = [
        Message("user", "What is 3 * 4?"),
        Message("assistant", "<think>\nI ask.\n</think>\n\n", tool_calls=(call("3 * 4"),)),
        Message("tool", "12", tool_call_id="call_0_0", name="calculator"),
    ]
    assert grown(renderer, messages, TOOLS) == renderer.render(messages, TOOLS)
    assert "I ask." in renderer.decode(renderer.render(messages, TOOLS))


@pytest.mark.parametrize("template", [WITHOUT_TOOLS, IGNORES_TOOLS])
def test_a_template_without_tools_serves_conversations_without_them(tmp_path: Path, template: str):
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, template))
    assert renderer.facts.user_turns is None
    assert not renderer.facts.supports_tools
    messages = [Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "Bye")]
    assert grown(renderer, messages, []) == renderer.render(messages, [])
    with pytest.raises(TemplateError, match="does not support tools"):
        renderer.render(messages, TOOLS)
    with pytest.raises(TemplateError, match="does not support tools"):
        renderer.bridge([Message("tool", "5")], [], TurnEnd(renderer.stop_token_ids[0]))


def test_what_a_template_objects_to_is_said(tmp_path: Path):
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, WITHOUT_TOOLS))
    with pytest.raises(TemplateError, match="must alternate"):
        renderer.render([Message("user", "a"), Message("user", "b")], [])


def test_turns_without_a_stop_token_are_unstable(tmp_path: Path):
    with pytest.raises(TemplateNotPrefixStable, match="stop token"):
        TemplateRenderer.from_directory(write_folder(tmp_path, NO_STOP))


def test_the_date_is_frozen_and_generation_marks_vanish(tmp_path: Path):
    template = "{{- strftime_now('%d %b %Y') + '\\n' }}" + WITHOUT_TOOLS.replace(
        "message.content +", "message.content }}{% generation %}{% endgeneration %}{{-"
    )
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, template))
    assert renderer.decode(renderer.render([Message("user", "Hi")], [])) == (
        "01 Jan 2025\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_in_the_tokenizers_configuration_is_found(tmp_path: Path, renderer: TemplateRenderer):
    write_folder(tmp_path, template=None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for source in (TEMPLATE, [{"name": "default", "template": TEMPLATE}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
        found = TemplateRenderer.from_directory(tmp_path)
        assert found.render([Message("user", "Hi")], TOOLS) == renderer.render([Message("user", "Hi")], TOOLS)


def test_arguments_reach_the_template_those_of_a_call_before_those_of_all(tmp_path: Path):
    template = "{{- (tone | default('plain')) + ' ' + (size | default(1) | string) + '\\n' }}" + TEMPLATE
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, template), RenderSettings(kwargs={"size": 0}))
    asked = [Message("user", "Hi")]
    assert renderer.facts.template_arguments == {"tone", "size"}
    for kwargs, head in (({}, "plain 0"), ({"tone": "<|im_end|>"}, "<|im_end|> 0"), ({"size": 2}, "plain 2")):
        ids = renderer.render(asked, [], kwargs)
        assert renderer.decode(ids).startswith(f"{head}\n<|im_start|>")
        assert ids.count(renderer.stop_token_ids[0]) == 1
    for kwargs in ({"messages": []}, {"eos_token": "x"}, {"add_generation_prompt": False}):
        with pytest.raises(InvalidRequest, match="is reserved"):
            renderer.render(asked, [], kwargs)
    with pytest.raises(InvalidRequest, match="must be JSON"):
        renderer.render(asked, [], {"tone": object()})


def test_a_template_file_and_a_date_take_the_place_of_the_folders(tmp_path: Path):
    file = tmp_path / "dated.jinja"
    file.write_text("{{- strftime_now('%d %b %Y') + '\\n' }}" + TEMPLATE)
    settings = RenderSettings(template_file=file, date=datetime.date(2026, 2, 3))
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path / "model"), settings)
    assert renderer.decode(renderer.render([Message("user", "Hi")], [])).startswith("03 Feb 2026\n<|im_start|>user")
    with pytest.raises(TemplateError, match=r"none.jinja"):
        TemplateRenderer.from_directory(tmp_path / "model", RenderSettings(template_file=tmp_path / "none.jinja"))


@pytest.mark.parametrize("is_named", [True, False])
def test_a_template_of_its_own_for_tools_is_used_with_tools(tmp_path: Path, is_named: bool):
    folder = write_folder(tmp_path, WITHOUT_TOOLS)
    if is_named:  # as transformers 4 wrote several templates
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = [{"name": "default", "template": WITHOUT_TOOLS}, {"name": "tool_use", "template": TEMPLATE}]
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    renderer = TemplateRenderer.from_directory(folder)
    assert renderer.facts.supports_tools
    assert "Tools:" in renderer.decode(renderer.render([Message("user", "Hi")], TOOLS))
    with pytest.raises(TemplateError, match="must alternate"):  # as the default template says
        renderer.render([Message("user", "a"), Message("user", "b")], [])


def test_a_template_that_wants_arguments_as_text_gets_text(tmp_path: Path):
    """The first DeepSeek templates concatenated the arguments with other text."""
    template = TEMPLATE.replace("(call.function.arguments | tojson)", "call.function.arguments")
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, template))
    assert renderer.facts.supports_tools
    messages = [Message("user", "Hi"), Message("assistant", "", (call("é"),)), Message("tool", "5")]
    assert '"arguments": {"expression": "é"}}' in renderer.decode(renderer.render(messages, TOOLS))


def test_a_template_that_asks_for_no_tools_may_go_through_them(tmp_path: Path):
    template = TEMPLATE.replace("{%- if tools %}", "{%- if tools | map(attribute='function') | tojson != '[]' %}")
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, template))
    assert renderer.facts.supports_tools
    plain = TemplateRenderer.from_directory(write_folder(tmp_path / "plain", TEMPLATE))
    for tools in ((), TOOLS):
        assert renderer.render([Message("user", "Hi")], tools) == plain.render([Message("user", "Hi")], tools)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4_5", "llama3_1", "kimi_k2"])
def test_a_call_that_cannot_be_read_stays_the_text_it_is(tmp_path: Path, name: str):
    """Templates that iterate over a call's arguments would fail on it."""
    written = "<tool_call>\n<function=calculator>\n<parameter=expr"
    bad = ToolCall("call00000", "calculator", {}, ToolCallStatus.MALFORMED, "no end", text=written)
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, name))
    messages = [Message("user", "Hi"), Message("assistant", "I ask.", (bad,)), Message("user", "And?")]
    assert f"I ask.\n{written}" in renderer.decode(renderer.render(messages, TOOLS))


def test_a_template_that_reads_content_as_parts_gets_parts(tmp_path: Path):
    """Templates of some vision models expect this: text is an item of a list, next to images."""
    template = IGNORES_TOOLS.replace("message.content", "message.content[0].text")
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, template))
    messages = [Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "Bye")]
    assert grown(renderer, messages, []) == renderer.render(messages, [])
    assert "user\nBye<|im_end|>" in renderer.decode(renderer.render(messages, []))


def broken_folders(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    yield tmp_path / "nowhere", "tokenizer.json"
    yield write_folder(tmp_path / "a", template=None), "no chat_template.jinja"
    yield write_folder(tmp_path / "b", "{% if %}"), "does not compile"
    yield write_folder(tmp_path / "c", "{{ raise_exception('never') }}"), "never"
    yield write_folder(tmp_path / "d", "{{ messages.append(1) }}"), "chat template"  # the sandbox is immutable
    for name in ("tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"):
        folder = write_folder(tmp_path / name.removesuffix(".json"))
        (folder / name).write_text("{")
        yield folder, name
    unstoppable = write_folder(tmp_path / "e")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (unstoppable / name).write_text("{}")
    yield unstoppable, "no stop token"


def test_a_broken_folder_is_refused_with_the_reason(tmp_path: Path):
    for folder, reason in broken_folders(tmp_path):
        with pytest.raises(TemplateError) as caught:
            TemplateRenderer.from_directory(folder)
        assert reason in str(caught.value)
        shutil.rmtree(folder, ignore_errors=True)
