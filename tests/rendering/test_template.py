"""Chat templates as they come: stable or not, with and without tools, and broken folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.errors import TemplateError, TemplateNotPrefixStable
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.types import Message
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
