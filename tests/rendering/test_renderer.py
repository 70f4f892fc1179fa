"""Messages to ids, exactly: compared with transformers, and turn by turn with complete renderings."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentloop.errors import InvalidRequest
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.types import Message
from tests.support.records.model_folder import (
    BACKUP_STOP,
    MARKUP,
    SPECIAL,
    STOP,
    TOOLS,
    call,
    grown,
    trained_tokenizer,
    write_folder,
)

SHIPPED = Path(__file__).parents[2] / "examples" / "tiny_policy" / "v0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> TemplateRenderer:
    return TemplateRenderer.from_directory(folder)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer()


def as_openai(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: not any(literal in text for literal in SPECIAL + MARKUP)
)
# The text of a turn whose ids after the generation prompt equal its ids alone.
sampled_text = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 .,+*?!\n]{0,20}", fullmatch=True)
calls = st.lists(plain_text, min_size=1, max_size=3).map(lambda ts: tuple(call(t, i) for i, t in enumerate(ts)))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Return a conversation that ends with a message for the policy to answer."""
    messages = [Message("system", draw(plain_text))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(plain_text)))
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            made = draw(calls)
            messages.append(Message("assistant", draw(sampled_text | st.just("")), tool_calls=made))
            messages += [Message("tool", draw(plain_text), tool_call_id=c.id, name=c.name) for c in made]
        else:
            messages += [Message("assistant", draw(sampled_text)), Message("user", draw(plain_text))]
    return messages


# Complete prompts


@pytest.fixture(scope="module", params=["own", "shipped"])
def both_ways(request: pytest.FixtureRequest, folder: Path) -> tuple[TemplateRenderer, Any]:
    chosen = folder if request.param == "own" else SHIPPED
    return TemplateRenderer.from_directory(chosen), transformers.AutoTokenizer.from_pretrained(chosen)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations(), st.booleans())
def test_render_equals_transformers(
    both_ways: tuple[TemplateRenderer, Any], messages: list[Message], has_tools: bool
):
    renderer, reference = both_ways
    tools = TOOLS if has_tools else []
    expected = reference.apply_chat_template(
        [as_openai(message) for message in messages],
        tools=tools or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert renderer.render(messages, tools) == expected


def test_stop_ids_and_vocabulary_come_from_the_folder(renderer: TemplateRenderer, tokenizer: Tokenizer):
    assert renderer.stop_token_ids == (tokenizer.token_to_id(STOP), tokenizer.token_to_id(BACKUP_STOP))
    assert renderer.vocab_size == 512
    assert renderer.facts.user_turns is None
    assert renderer.facts.supports_tools


def test_stop_ids_without_a_generation_config(tmp_path: Path, tokenizer: Tokenizer):
    (write_folder(tmp_path) / "generation_config.json").unlink()
    renderer = TemplateRenderer.from_directory(tmp_path)
    assert renderer.stop_token_ids == (tokenizer.token_to_id(BACKUP_STOP), tokenizer.token_to_id(STOP))


def test_the_developer_role_is_the_system_role(renderer: TemplateRenderer):
    as_developer = [Message("developer", "Be brief."), Message("user", "Hi")]
    assert renderer.render(as_developer, []) == renderer.render(
        [Message("system", "Be brief."), Message("user", "Hi")], []
    )


# Bridges


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations(), st.booleans())
def test_bridges_grow_to_the_whole_rendering(renderer: TemplateRenderer, messages: list[Message], has_tools: bool):
    tools = TOOLS if has_tools else []
    assert grown(renderer, messages, tools) == renderer.render(messages, tools)


def test_a_bridge_starts_with_the_templates_boundary(renderer: TemplateRenderer):
    answer = [Message("tool", "449", tool_call_id="call_0_0", name="calculator")]
    text = "\n<|im_start|>user\n<tool_response>\n449\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(renderer.bridge(answer, TOOLS, TurnEnd(renderer.stop_token_ids[0]))) == text
    assert renderer.decode(renderer.bridge(answer, TOOLS, TurnEnd())) == STOP + text


def test_a_bridge_costs_the_new_text_only(folder: Path):
    renderer = TemplateRenderer.from_directory(folder)
    answer = [Message("tool", "449", tool_call_id="call_0_0", name="calculator")]
    long = [Message("user", "What is 37 * 12 + 5? " * 2_000)]
    renderer.bridge(answer, TOOLS, TurnEnd(renderer.stop_token_ids[0]))

    def cpu_s(work: Any) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    whole = min(cpu_s(lambda: renderer.render(long, TOOLS)) for _ in range(3))
    bridge = min(
        cpu_s(lambda: renderer.bridge(answer, TOOLS, TurnEnd(renderer.stop_token_ids[0]))) for _ in range(3)
    )
    assert bridge * 10 < whole


@pytest.mark.parametrize("appended", [[], [Message("assistant", "I go on.")]])
def test_only_answers_can_be_appended(renderer: TemplateRenderer, appended: list[Message]):
    with pytest.raises(InvalidRequest):
        renderer.bridge(appended, [], TurnEnd(renderer.stop_token_ids[0]))


def test_threads_share_a_renderer(renderer: TemplateRenderer):
    messages = [Message("user", "What is 37 * 12? <|im_end|>" * 50)]
    expected = (
        renderer.render(messages, TOOLS),
        renderer.bridge(messages, TOOLS, TurnEnd(renderer.stop_token_ids[0])),
    )
    seen: list[bool] = []

    def work(index: int) -> None:
        tools = [*TOOLS, {"type": "function", "function": {"name": f"tool{index}", "parameters": {}}}]
        for _ in range(20):
            renderer.bridge(messages, tools, TurnEnd(renderer.stop_token_ids[0]))
            got = (
                renderer.render(messages, TOOLS),
                renderer.bridge(messages, TOOLS, TurnEnd(renderer.stop_token_ids[0])),
            )
            seen.append(got == expected and renderer.decode_with_offsets(got[0]).text == renderer.decode(got[0]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 80
