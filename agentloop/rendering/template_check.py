"""The template check: which conversations a template accepts, and whether bridges equal its own rendering.

Invariants that a template must satisfy. Within one tool cycle, for turns sampled as the template writes them
(reasoning included): prompt + sampled turn + bridge equals the complete rendering, in text and ids. Before a user
message: the complete rendering ends with the bridge, and only reasoning changed before it, which a bridge keeps.
Templates differ in the conversations that they accept (a system message, tools, several calls in a turn), so each
is checked with the richest conversation that it renders.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Protocol

from agentloop.errors import TemplateError
from agentloop.parsers.base import THOUGHT_MARKS
from agentloop.rendering.port import NAMED_ROLES, TurnEnd
from agentloop.rendering.prompt_text import ReasoningForm, TemplateForm
from agentloop.types import JSON, Message, ToolCall

_WINDOW_CHARS = 48
TOOL_NAME = "look_up"
_SHOWN_TOOL = "Look a word up in the great dictionary."
TOOLS: tuple[Mapping[str, JSON], ...] = (
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": _SHOWN_TOOL,
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["word"],
            },
        },
    },
)
QUESTION, _NEXT_QUESTION = "What is a rook?", "And in chess?"
OPENED, CLOSED = ("|".join(map(re.escape, marks)) for marks in zip(*map(astuple, THOUGHT_MARKS), strict=True))
_OPEN_THOUGHT = re.compile(rf"({OPENED})\s*$")
_EMPTY_THOUGHT = re.compile(rf"({OPENED})\s*({CLOSED})\s*")
_CHUNK_AS_TEXT = re.compile(r"""['"]thinking['"]: ?['"]""")  # a content part printed as JSON instead of rendered


class RenderedConversation(Protocol):
    """A template in one form, as the template check uses it. Its texts are masked."""

    def text(
        self, messages: Sequence[Message], definitions: Sequence[JSON], *, adds_generation_prompt: bool = True
    ) -> str:
        """Return the complete prompt. Raises TemplateError."""

    def bridge(self, appended: Sequence[Message], definitions: Sequence[JSON], end: TurnEnd) -> str:
        """Return the text between an assistant turn and the next one. Raises TemplateError."""


@dataclass(frozen=True, slots=True)
class BridgeReport:
    """The results of a template check. The last four fields are documented in `ModelFacts`."""

    form: TemplateForm
    strips_thinking: bool
    strips_in_cycle: bool  # the template drops reasoning, at least empty reasoning, even within a tool cycle
    shown_names: frozenset[str]
    tool_turns: str | None
    user_turns: str | None
    plain_turns: str | None

    @property
    def difference(self) -> str | None:
        """The first reason why turns cannot be bridged; None if all can."""
        return self.tool_turns or self.user_turns or self.plain_turns


@dataclass(frozen=True, slots=True)
class _Style:
    """The optional parts of the conversation with which `examine` checks a template."""

    num_calls: int
    has_reasoning: bool
    has_content: bool  # turns with calls also have content
    has_system: bool


def examine(make: Callable[[TemplateForm], RenderedConversation], ids: Callable[[str], list[int]]) -> BridgeReport:
    """Check a template with the richest conversations that it renders. Raises TemplateError if it renders none.

    `make` returns the template in one form; `ids` tokenizes masked text.
    """
    form, style = _richest(make)
    trial = _Trial(make(form), ids)
    tool_turns = user_turns = None
    if form.supports_tools:
        cycle = _conversation(style)
        # Turns sampled after such a prompt have no reasoning, so the check must not have any either.
        if trial.closes_reasoning(cycle):
            cycle = _without_reasoning(cycle)
        tool_turns = trial.tool_turns(cycle)
        if tool_turns is not None:
            # Some templates number tool results across the conversation: try again with the earlier calls rendered.
            numbering = replace(form, numbers_results=True)
            numbered = _Trial(make(numbering), ids)
            if numbered.tool_turns(cycle) is None:
                form, trial, tool_turns = numbering, numbered, None
        user_turns = trial.user_turns(cycle, TOOLS)
    plain = _conversation(_plain_style(trial, style))
    plain_turns = trial.user_turns(plain, ())
    names = trial.shown_names(plain)
    return BridgeReport(
        form, trial.strips_thinking, trial.strips_in_cycle, names, tool_turns, user_turns, plain_turns
    )


def show_difference(expected: str, actual: str) -> str:
    """Return the position of the first difference between two texts, with an excerpt of each."""
    at = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), -1)
    if at < 0:
        at = min(len(expected), len(actual))
    start = max(0, at - _WINDOW_CHARS)
    before, after = expected[start : at + _WINDOW_CHARS], actual[start : at + _WINDOW_CHARS]
    return f"at character {at}: {before!r} became {after!r}"


class _Trial:
    """Checks one template in one form. Methods that return `str | None` return the problem, or None."""

    def __init__(self, subject: RenderedConversation, ids: Callable[[str], list[int]]) -> None:
        self._subject = subject
        self._ids = ids
        self.strips_thinking = False
        self.strips_in_cycle = False

    def objection(self, messages: Sequence[Message], tools: Sequence[JSON] = ()) -> TemplateError | None:
        """Return the template's error for these messages; None if it renders them."""
        try:
            self._subject.text(messages, tools)
        except TemplateError as error:
            return error
        return None

    def shown_names(self, messages: Sequence[Message]) -> frozenset[str]:
        """Return the roles whose messages are refused, or rendered differently, if they have a name."""
        asked = [*messages, Message("user", _NEXT_QUESTION)]
        plain = self._subject.text(asked, ())
        named = {
            role: [replace(message, name="rook") if message.role == role else message for message in asked]
            for role in NAMED_ROLES
        }
        return frozenset(
            role
            for role, variant in named.items()
            if self.objection(variant) or self._subject.text(variant, ()) != plain
        )

    def closes_reasoning(self, messages: Sequence[Message]) -> bool:
        """Return True if the generation prompt ends with empty reasoning, so that turns have no reasoning."""
        prompt = self._subject.text(messages[: _turns(messages)[0]], TOOLS)
        return any(match.end() == len(prompt) for match in _EMPTY_THOUGHT.finditer(prompt))

    def tool_turns(self, messages: Sequence[Message]) -> str | None:
        """Check the bridges within one tool cycle: prompt + turn + bridge must equal the complete rendering."""
        for turn, following in pairwise(_turns(messages)):
            prompt, complete = (self._subject.text(messages[:end], TOOLS) for end in (turn, following))
            appended = messages[turn + 1 : following]
            try:
                bridge = self._subject.bridge(appended, TOOLS, TurnEnd(num_calls=_num_calls(messages[:turn])))
            except TemplateError as error:
                return error.message
            if (problem := self._ending_problem(complete, bridge, appended)) is not None:
                return problem
            if not complete.startswith(prompt):
                plain = _without_reasoning(messages[:following])
                earlier, later = (self._without_any_reasoning(plain[:end], TOOLS) for end in (turn, following))
                if not later.startswith(earlier):
                    return f"earlier text changes {show_difference(prompt, complete)}"
                self.strips_in_cycle = self.strips_thinking = True
            elif len(prompt) + len(bridge) > len(complete):
                return f"the turns do not join {show_difference(bridge, complete[-len(bridge) :])}"
            if (problem := self._content_problem(messages[:following], turn)) is not None:
                return problem
        return None

    def _content_problem(self, messages: Sequence[Message], turn: int) -> str | None:
        """Check that the content of a turn with calls is either shown or omitted without other effects."""
        plain = _without_reasoning(messages)
        complete = self._subject.text(plain, TOOLS)
        if plain[turn].content in complete:
            return None
        plain[turn] = replace(plain[turn], content="")
        dropped = self._subject.text(plain, TOOLS)
        return None if complete == dropped else f"the turn's text changes {show_difference(dropped, complete)}"

    def user_turns(self, messages: Sequence[Message], tools: Sequence[JSON]) -> str | None:
        """Check the bridges to a user message: after an assistant's answer, and directly after tool results."""
        turns = _turns(messages)
        asked = Message("user", _NEXT_QUESTION)
        cuts = [len(messages), *([turns[-1]] if messages[turns[-1] - 1].role == "tool" else [])]
        for turn, cut in zip(reversed(turns), cuts, strict=False):
            if self.objection([*messages[:cut], asked], tools) is not None:
                continue  # the template refuses this conversation, so it needs no bridge
            try:
                if (problem := self._user_turn([*messages[:cut], asked], turn, tools)) is not None:
                    return problem
            except TemplateError as error:
                return error.message
        return None

    def _user_turn(self, messages: Sequence[Message], turn: int, tools: Sequence[JSON]) -> str | None:
        prompt, complete = self._subject.text(messages[:turn], tools), self._subject.text(messages, tools)
        before = self._subject.text(messages[:-1], tools, adds_generation_prompt=False)
        appended = messages[turn + 1 :]
        bridge = self._subject.bridge(appended, tools, TurnEnd(num_calls=_num_calls(messages[:turn])))
        if (problem := self._ending_problem(complete, bridge, appended)) is not None:
            return problem
        if (problem := self._earlier_problem(messages, turn, tools)) is not None:
            return problem
        thoughts = [message.reasoning for message in messages if message.reasoning]
        is_open = _OPEN_THOUGHT.search(prompt) is not None
        lost = any((thought in before or is_open) and thought not in complete for thought in thoughts)
        self.strips_thinking |= lost or not complete.startswith(prompt)
        return None

    def _earlier_problem(self, messages: Sequence[Message], turn: int, tools: Sequence[JSON]) -> str | None:
        """Check that only reasoning changed before the last turn: a bridge keeps reasoning."""
        plain = _without_reasoning(messages)
        prompt, complete = (self._without_any_reasoning(part, tools) for part in (plain[:turn], plain))
        observed = prompt[: prompt.rfind(plain[turn - 1].content) + len(plain[turn - 1].content)]
        if not complete.startswith(observed):
            return f"earlier text changes {show_difference(observed, complete)}"
        if prompt.find(_SHOWN_TOOL) != complete.find(_SHOWN_TOOL):
            return f"the tools move {show_difference(prompt, complete)}"
        if plain[turn].content not in complete:
            return self._content_problem(messages, turn)
        return None

    def _without_any_reasoning(self, messages: Sequence[Message], tools: Sequence[JSON]) -> str:
        """Return the prompt without empty reasoning, and without an opening delimiter at its end."""
        return _OPEN_THOUGHT.sub("", _EMPTY_THOUGHT.sub("", self._subject.text(messages, tools)))

    def _ending_problem(self, whole: str, bridge: str, appended: Sequence[Message]) -> str | None:
        """Check that the complete rendering ends with the bridge, in text and ids."""
        if not whole.endswith(bridge):
            return f"the turns do not join {show_difference(bridge, whole[-len(bridge) :])}"
        if any(message.content not in bridge for message in appended):
            return "the template writes the stop token of an assistant turn after the messages that follow the turn"
        if self._ids(whole[: -len(bridge)]) + self._ids(bridge) != self._ids(whole):
            return f"the token ids of {bridge[:_WINDOW_CHARS]!r} depend on the text before it"
        return None


def _richest(make: Callable[[TemplateForm], RenderedConversation]) -> tuple[TemplateForm, _Style]:
    """Return the form and style of the richest conversation that renders; without tools if none with tools does."""
    thoughts = [(True, True), (True, False), (False, True)]
    objections: list[str] = []
    takes_parts = _takes_parts(make)
    for shows_calls, max_calls, takes_text in itertools.product((True, False), (2, 1), (False, True)):
        form = TemplateForm(None, takes_text, max_calls, takes_parts, shows_calls=shows_calls)
        subject = make(form)
        for (has_reasoning, has_content), has_system in itertools.product(thoughts, (True, False)):
            style = _Style(max_calls, has_reasoning, has_content, has_system)
            try:
                if _shows_tools(subject, _conversation(style), shows_calls=shows_calls):
                    return _with_reasoning(form, make, _conversation(style), TOOLS), style
                objections.insert(0, "it does not show tool definitions, calls or tool results")
            except TemplateError as error:
                objections.append(error.message)
    form, style = (
        TemplateForm(objections[0], max_calls=0, takes_parts=takes_parts),
        _Style(0, True, True, has_system=False),
    )
    return _with_reasoning(form, make, _conversation(style), ()), style


def _takes_parts(make: Callable[[TemplateForm], RenderedConversation]) -> bool:
    """Return True if the template shows content only as a list of parts, like those of some multimodal models."""
    for takes_parts in (False, True):
        try:
            text = make(TemplateForm(takes_parts=takes_parts)).text([Message("user", QUESTION)], ())
        except TemplateError:
            continue
        if QUESTION in text:
            return takes_parts
    return False


def _with_reasoning(
    form: TemplateForm,
    make: Callable[[TemplateForm], RenderedConversation],
    messages: Sequence[Message],
    tools: Sequence[JSON],
) -> TemplateForm:
    """Return the form whose `ReasoningForm` shows reasoning; `form` unchanged if none does."""
    thoughts = [message.reasoning for message in messages if message.reasoning]
    for reasoning_form in ReasoningForm:
        candidate = replace(form, reasoning=reasoning_form)
        try:
            text = make(candidate).text(messages, tools, adds_generation_prompt=False)
        except TemplateError:
            continue
        if any(thought in text for thought in thoughts) and _CHUNK_AS_TEXT.search(text) is None:
            return candidate
    return form


def _shows_tools(subject: RenderedConversation, messages: Sequence[Message], *, shows_calls: bool) -> bool:
    """Return True if the template shows tools, tool results and (with `shows_calls`) calls."""
    text = subject.text(messages, TOOLS)
    first_prompt = subject.text(messages[: _turns(messages)[0]], TOOLS)
    answers = [message.content for message in messages if message.role == "tool"]
    arguments = [call.arguments for message in messages for call in message.tool_calls]
    shown = (*answers, *(values["word"] for values in arguments)) if shows_calls else answers
    # A dict printed in Python syntax means that the template expects arguments as JSON text.
    is_printed = any(str(values) in text for values in arguments)
    return TOOL_NAME in first_prompt and all(text.count(each) == 1 for each in shown) and not is_printed


def _plain_style(trial: _Trial, style: _Style) -> _Style:
    """Return a style without tools that renders. Raises TemplateError if the template renders none."""
    objection: TemplateError | None = None
    for has_system in (True, False):
        plain = replace(style, num_calls=0, has_system=has_system)
        objection = trial.objection([*_conversation(plain), Message("user", _NEXT_QUESTION)])
        if objection is None:
            return plain
    raise TemplateError(f"the chat template does not render a conversation without tools: {objection}")


def _conversation(style: _Style) -> list[Message]:
    """Return one tool cycle up to its answer, in which all texts are different."""
    messages = [Message("system", "You look words up.")] if style.has_system else []
    messages.append(Message("user", QUESTION))
    thought = iter(["A bird or a piece?", "I know one of them.", "So I can answer."])
    if not style.num_calls:
        messages += [
            Message("assistant", "It is a piece.", reasoning=next(thought) if style.has_reasoning else ""),
            Message("user", "Is it not a bird?"),
        ]
    for turn, count in enumerate((1, style.num_calls) if style.num_calls else ()):
        calls = [
            ToolCall(f"call{turn}{i:04d}", TOOL_NAME, {"word": f"rook {turn}.{i}"}, text=f"{TOOL_NAME}: {turn}.{i}")
            for i in range(count)
        ]
        content = f"I look it up {turn}." if style.has_content else ""
        reasoning = next(thought) if style.has_reasoning else ""
        messages.append(Message("assistant", content, tool_calls=tuple(calls), reasoning=reasoning))
        messages += [Message("tool", f"It is {call.id}.", tool_call_id=call.id, name=TOOL_NAME) for call in calls]
    messages.append(Message("assistant", "A bird.", reasoning=next(thought) if style.has_reasoning else ""))
    return messages


def _turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def _num_calls(messages: Sequence[Message]) -> int:
    return sum(len(message.tool_calls) for message in messages)


def _without_reasoning(messages: Sequence[Message]) -> list[Message]:
    return [replace(message, reasoning="") for message in messages]
