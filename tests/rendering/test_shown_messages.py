"""Every system, developer, user and tool message is rendered for the model, or the call is refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import TemplateError
from agentloop.images import ImageRef
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.prompt_text import ChatTemplate
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer, model_text
from agentloop.types import Message, ToolCall
from tests.support.families.table import FAMILIES, write_family
from tests.support.records.model_folder import IGNORES_TOOLS, TEMPLATE, TOOLS, write_folder

FORK = RenderSettings(OnUnstable.FORK)
SYSTEM, DEVELOPER = Message("system", "You are a librarian."), Message("developer", 'Reminder: "7" tokens. ')
ASKED, AGAIN = Message("user", "What is a rook?\n"), Message("user", "And in chess?")
CALL = ToolCall("call00001", "calculator", {"expression": "6*7"})
TURN, CALLING = Message("assistant", "A bird."), Message("assistant", "", (CALL,))
RESULT = Message("tool", "It is 42.", tool_call_id=CALL.id, name=CALL.name)
# The messages before the sampled turn, the turn, and the messages after it.
CONVERSATIONS = {
    "a developer in mid-session": ([SYSTEM, ASKED], TURN, [DEVELOPER, AGAIN]),
    "a system message after a question": ([ASKED], TURN, [AGAIN, SYSTEM]),
    "a system message alone": ([ASKED], TURN, [SYSTEM]),
    "two system messages": ([SYSTEM, DEVELOPER, ASKED], TURN, [AGAIN]),
    "a developer first": ([DEVELOPER, SYSTEM, ASKED], TURN, [AGAIN]),
    "two questions": ([ASKED, AGAIN], TURN, [ASKED, AGAIN]),
    "a system message after a result": ([SYSTEM, ASKED], CALLING, [RESULT, DEVELOPER]),
    "a system message before a result": ([SYSTEM, ASKED], CALLING, [DEVELOPER, RESULT]),
    "a result without a name": ([ASKED], CALLING, [replace(RESULT, name=None)]),
    "a result of no call": ([ASKED], TURN, [replace(RESULT, tool_call_id=None, name=None), AGAIN]),
}


@pytest.fixture(scope="module", params=[family.name for family in FAMILIES])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer.from_directory(write_family(tmp_path_factory.mktemp("f") / "m", request.param), FORK)


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text))


def hidden(text: str, messages: Sequence[Message]) -> list[int]:
    """Return the messages by others whose words are missing in a prompt."""
    return [
        index
        for index, message in enumerate(messages)
        if message.role != "assistant" and words(message.content) not in words(text)
    ]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_message_is_shown_or_refused(renderer: TemplateRenderer, name: str):
    before, turn, appended = CONVERSATIONS[name]
    has_tools = any(message.role == "tool" for message in appended)
    if has_tools and not renderer.facts.supports_tools:
        return
    tools = TOOLS if has_tools else []
    try:
        bridge = renderer.bridge(appended, tools, TurnEnd())
    except TemplateError:  # the template cannot append them, or refuses the conversation
        pass
    else:
        assert hidden(renderer.decode(bridge), appended) == []
    messages = [*before, turn, *appended]
    try:
        whole = renderer.decode(renderer.render(messages, tools))
    except TemplateError as error:
        refused = error
    else:
        assert hidden(whole, messages) == []
        return
    if (found := re.search(r"does not show message (\d+) \(role '(\w+)'\)", refused.message)) is not None:
        assert messages[int(found[1])].role == found[2]
        assert (refused.param, refused.http_status) == (f"messages.{found[1]}", 400)


SKIPS = TEMPLATE.replace("{%- for message in messages %}", "{%- for message in messages %}{%- if CONDITION %}", 1)
SKIPS = SKIPS.replace("{%- endfor %}\n{%- if add", "{%- endif %}{%- endfor %}\n{%- if add")
LATER = "message.role != 'system' or loop.first"


@pytest.mark.parametrize(
    ("condition", "messages", "expected"),
    [
        (LATER, [SYSTEM, ASKED], None),
        (LATER, [SYSTEM, ASKED, TURN, DEVELOPER, AGAIN], (3, "developer")),
        (LATER, [SYSTEM, ASKED, TURN, Message("system", " \n"), AGAIN], None),  # the message has no text
        ("not loop.previtem or loop.previtem.role != message.role", [ASKED, AGAIN], (1, "user")),
        ("message.role != 'assistant'", [ASKED, TURN, AGAIN], None),
        ("message.content is string", [ASKED, Message("user", "", images=(ImageRef("0" * 64),))], (1, "user")),
    ],
)
def test_a_message_that_the_template_skips_is_named(
    tmp_path: Path, condition: str, messages: list[Message], expected: tuple[int, str] | None
):
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, SKIPS.replace("CONDITION", condition)), FORK)
    if expected is None:
        renderer.render(messages, [])
        return
    with pytest.raises(TemplateError, match=r"does not show message {} \(role '{}'\)".format(*expected)):
        renderer.render(messages, [])


@pytest.mark.parametrize("change", ["upper", "tojson | trim", "length"])
def test_a_text_that_the_template_converts_is_shown(tmp_path: Path, change: str):
    source = IGNORES_TOOLS.replace("message.content", f"(message.content | {change} | string)")
    renderer = TemplateRenderer.from_directory(write_folder(tmp_path, source), FORK)
    if change == "length":  # the template renders only the number of characters
        with pytest.raises(TemplateError, match="message 0"):
            renderer.render([ASKED], [])
    else:
        renderer.render([SYSTEM, ASKED, TURN, DEVELOPER, AGAIN], [])


class CountingTemplate(ChatTemplate):
    """A template that counts its renderings."""

    num_rendered = 0

    def render(self, *args: Any, **fields: Any) -> str:
        self.num_rendered += 1
        return super().render(*args, **fields)


def test_an_outline_is_tried_once(tmp_path: Path):
    text, template = model_text(write_folder(tmp_path)), CountingTemplate(TEMPLATE, {})
    renderer = TemplateRenderer(
        template, text.tokens, stop_token_ids=text.stop_token_ids, vocab_size=text.vocab_size
    )
    num_before = template.num_rendered
    for content in ("a", "b", "c"):
        renderer.bridge([Message("user", content)], [], TurnEnd())
        renderer.render([Message("system", content), Message("user", content)], [])
    assert template.num_rendered - num_before == 6 + 2
