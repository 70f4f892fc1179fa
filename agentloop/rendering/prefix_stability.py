"""Test whether a chat template lets a conversation grow without changing the tokens it already has.

Asked once, when a renderer is made, of a synthetic conversation with calls, tool answers and several user turns.
Templates differ in what they accept (a system message, tools, several calls in a turn), so the richest
conversation that this one renders is the one it is judged by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from agentloop.errors import TemplateError
from agentloop.types import JSON, Message, ToolCall

_WINDOW_CHARS = 48
_TOOL_NAME = "look_up"
_ANSWER = "the answer of the tool"
_TOOLS: tuple[Mapping[str, JSON], ...] = (
    {
        "type": "function",
        "function": {
            "name": _TOOL_NAME,
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
)


class RenderedConversation(Protocol):
    """The renderer as the test asks it. Texts are masked: only `ids` makes tokens of them."""

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> str:
        """The whole prompt with its generation prompt. Raises TemplateError."""

    def bridge_text(
        self, appended: Sequence[Message], tools: Sequence[Mapping[str, JSON]], *, is_closed: bool
    ) -> str:
        """Return what follows an assistant turn up to the next one. Raises TemplateError."""

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""


@dataclass(frozen=True, slots=True)
class StabilityReport:
    """Findings of the test. `difference` is None for a stable template, else names and shows the first one."""

    supports_tools: bool
    difference: str | None
    strips_thinking: bool  # a later user turn removes earlier `<think>` blocks


def examine(subject: RenderedConversation) -> StabilityReport:
    """Judge a template by the richest conversation it renders. Raises TemplateError if it renders none."""
    messages, tools = _richest_conversation(subject)
    return StabilityReport(bool(tools), _first_difference(subject, messages, tools), _strips_thinking(subject))


def show_difference(expected: str, actual: str) -> str:
    """Show where two texts part, with what stands there in each."""
    at = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), -1)
    if at < 0:
        at = min(len(expected), len(actual))
    start = max(0, at - _WINDOW_CHARS)
    before, after = expected[start : at + _WINDOW_CHARS], actual[start : at + _WINDOW_CHARS]
    return f"at character {at}: {before!r} became {after!r}"


def _richest_conversation(
    subject: RenderedConversation,
) -> tuple[list[Message], tuple[Mapping[str, JSON], ...]]:
    failure: TemplateError | None = None
    for num_calls in (2, 1, 0):
        for has_system in (True, False):
            messages = _conversation(num_calls, has_system)
            tools = _TOOLS if num_calls else ()
            try:
                text = subject.text(messages, tools)
            except TemplateError as error:
                failure = error
                continue
            # A template without tools often leaves them out in silence.
            first_prompt = subject.text(messages[: 1 + has_system], tools)
            if not num_calls or (_TOOL_NAME in first_prompt and text.count(_ANSWER) == 1 + num_calls):
                return messages, tools
    raise TemplateError(f"the chat template renders no plain conversation: {failure}")


def _conversation(num_calls: int, has_system: bool) -> list[Message]:
    messages = [Message("system", "You look words up.")] if has_system else []
    messages.append(Message("user", "What is a rook?"))
    if num_calls:
        for turn, count in enumerate((1, num_calls)):
            calls = [ToolCall(f"call{turn}{i:04d}", _TOOL_NAME, {"word": f"rook {i}"}) for i in range(count)]
            messages.append(Message("assistant", f"I look it up {turn}.", tool_calls=tuple(calls)))
            messages += [Message("tool", _ANSWER, tool_call_id=call.id, name=_TOOL_NAME) for call in calls]
    messages.append(Message("assistant", "A bird."))
    messages.append(Message("user", "And in chess?"))
    messages.append(Message("assistant", "A piece that moves straight."))
    messages.append(Message("user", "Thank you."))
    return messages


def _first_difference(
    subject: RenderedConversation, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]
) -> str | None:
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    for turn, following in pairwise([*turns, len(messages)]):
        prompt, extended = subject.text(messages[:turn], tools), subject.text(messages[:following], tools)
        where = f"message {turn + 1} of {following}"
        if not extended.startswith(prompt):
            return f"{where}: earlier text changes {show_difference(prompt, extended)}"
        try:
            bridge = subject.bridge_text(messages[turn + 1 : following], tools, is_closed=False)
        except TemplateError as error:
            return f"{where}: {error}"
        sampled = extended[len(prompt) : len(extended) - len(bridge)]
        if not extended.endswith(bridge) or len(prompt) + len(bridge) > len(extended):
            return f"{where}: the turns do not join {show_difference(bridge, extended[-len(bridge) :])}"
        # Some templates write a turn's calls and drop its text; that loses nothing that was sampled.
        if not messages[turn].tool_calls and not sampled.lstrip().startswith(messages[turn].content):
            return f"{where}: the turn's text changes {show_difference(messages[turn].content, sampled)}"
        if subject.ids(prompt + sampled) + subject.ids(bridge) != subject.ids(extended):
            return f"{where}: the tokens around {bridge[:_WINDOW_CHARS]!r} depend on what stands before it"
    return None


def _strips_thinking(subject: RenderedConversation) -> bool:
    thought = "a rook may be two things"
    messages = [
        Message("user", "What is a rook?"),
        Message("assistant", f"<think>\n{thought}\n</think>\n\nA bird."),
        Message("user", "Thank you."),
    ]
    return thought not in subject.text(messages, ())
