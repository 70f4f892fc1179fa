"""The trial of a template: what conversations it takes, and whether bridges write what its own rendering would.

What must hold is not that whole renderings grow, but that bridged ones are the template's own. Within one tool
cycle, for turns sampled as the template writes them, thoughts included: prompt + sampled + bridge is its whole
rendering, in text and ids. For a user's message: the bridge is exactly what the whole rendering ends with, and
nothing before it changed but thoughts, which a bridge keeps. Templates differ in what they accept (a system
message, tools, several calls in a turn), so each is judged by the richest conversation that it renders.
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
from agentloop.rendering.prompt_text import TemplateForm, ThoughtForm
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
_CHUNK_AS_TEXT = re.compile(r"""['"]thinking['"]: ?['"]""")  # of a template that writes any content as JSON


class RenderedConversation(Protocol):
    """A template in one form, as the trial uses it. Texts are masked: only `ids` makes tokens of them."""

    def text(
        self, messages: Sequence[Message], definitions: Sequence[JSON], *, adds_generation_prompt: bool = True
    ) -> str:
        """The whole prompt. Raises TemplateError."""

    def bridge(self, appended: Sequence[Message], definitions: Sequence[JSON], end: TurnEnd) -> str:
        """Return the text behind an assistant turn up to the next one. Raises TemplateError."""


@dataclass(frozen=True, slots=True)
class BridgeReport:
    """Findings of the trial. The three `*_turns` are as in `ModelFacts`.

    `strips_in_cycle`: even within a tool cycle thoughts are dropped, if only empty ones of the prompt.
    """

    form: TemplateForm
    strips_thinking: bool
    strips_in_cycle: bool
    shown_names: frozenset[str]  # as in `ModelFacts`
    tool_turns: str | None
    user_turns: str | None
    plain_turns: str | None

    @property
    def difference(self) -> str | None:
        """The first finding against the template."""
        return self.tool_turns or self.user_turns or self.plain_turns


@dataclass(frozen=True, slots=True)
class _Style:
    """A way to hold the trial's conversation."""

    num_calls: int
    has_thoughts: bool
    has_content: bool  # beside calls
    has_system: bool


def examine(make: Callable[[TemplateForm], RenderedConversation], ids: Callable[[str], list[int]]) -> BridgeReport:
    """Judge a template by the richest conversations it renders. Raises TemplateError if it renders none."""
    form, style = _richest(make)
    trial = _Trial(make(form), ids)
    tool_turns = user_turns = None
    if form.supports_tools:
        cycle = _conversation(style)
        if trial.closes_thought(cycle):
            cycle = _without_thoughts(cycle)
        tool_turns = trial.tool_turns(cycle)
        if tool_turns is not None:
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
    """Return the place where two texts part, with the text of each."""
    at = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), -1)
    if at < 0:
        at = min(len(expected), len(actual))
    start = max(0, at - _WINDOW_CHARS)
    before, after = expected[start : at + _WINDOW_CHARS], actual[start : at + _WINDOW_CHARS]
    return f"at character {at}: {before!r} became {after!r}"


class _Trial:
    """One template's verdicts. Each is None, or says what is wrong."""

    def __init__(self, subject: RenderedConversation, ids: Callable[[str], list[int]]) -> None:
        self._subject = subject
        self._ids = ids
        self.strips_thinking = False
        self.strips_in_cycle = False

    def objection(self, messages: Sequence[Message], tools: Sequence[JSON] = ()) -> TemplateError | None:
        """Return what the template has against these messages; None if it renders them."""
        try:
            self._subject.text(messages, tools)
        except TemplateError as error:
            return error
        return None

    def shown_names(self, messages: Sequence[Message]) -> frozenset[str]:
        """Return the roles of messages that are rendered otherwise with a name, or refused."""
        asked = [*messages, Message("user", _NEXT_QUESTION)]
        plain = self._subject.text(asked, ())
        named = {
            role: [replace(one, name="rook") if one.role == role else one for one in asked] for role in NAMED_ROLES
        }
        return frozenset(
            role for role, one in named.items() if self.objection(one) or self._subject.text(one, ()) != plain
        )

    def closes_thought(self, messages: Sequence[Message]) -> bool:
        """Tell whether the generation prompt writes an empty thought: turns then have none."""
        prompt = self._subject.text(messages[: _turns(messages)[0]], TOOLS)
        return any(found.end() == len(prompt) for found in _EMPTY_THOUGHT.finditer(prompt))

    def tool_turns(self, messages: Sequence[Message]) -> str | None:
        """Judge the bridges within one tool cycle: prompt, turn and bridge are the template's whole rendering."""
        for turn, following in pairwise(_turns(messages)):
            prompt, whole = (self._subject.text(messages[:end], TOOLS) for end in (turn, following))
            appended = messages[turn + 1 : following]
            try:
                bridge = self._subject.bridge(appended, TOOLS, TurnEnd(num_calls=_num_calls(messages[:turn])))
            except TemplateError as error:
                return error.message
            if (problem := self._ending_problem(whole, bridge, appended)) is not None:
                return problem
            if not whole.startswith(prompt):
                plain = _without_thoughts(messages[:following])
                kept, shown = (self._thoughtless(plain[:end], TOOLS) for end in (turn, following))
                if not shown.startswith(kept):
                    return f"earlier text changes {show_difference(prompt, whole)}"
                self.strips_in_cycle = self.strips_thinking = True
            elif len(prompt) + len(bridge) > len(whole):
                return f"the turns do not join {show_difference(bridge, whole[-len(bridge) :])}"
            if (problem := self._content_problem(messages[:following], turn)) is not None:
                return problem
        return None

    def _content_problem(self, messages: Sequence[Message], turn: int) -> str | None:
        """Say what is wrong if a turn's text beside its calls is neither shown nor simply left out."""
        plain = _without_thoughts(messages)
        whole = self._subject.text(plain, TOOLS)
        if plain[turn].content in whole:
            return None
        plain[turn] = replace(plain[turn], content="")
        dropped = self._subject.text(plain, TOOLS)
        return None if whole == dropped else f"the turn's text changes {show_difference(dropped, whole)}"

    def user_turns(self, messages: Sequence[Message], tools: Sequence[JSON]) -> str | None:
        """Judge the bridges to a user's message, behind an answer and straight behind the answers of tools."""
        turns = _turns(messages)
        asked = Message("user", _NEXT_QUESTION)
        cuts = [len(messages), *([turns[-1]] if messages[turns[-1] - 1].role == "tool" else [])]
        for turn, cut in zip(reversed(turns), cuts, strict=False):
            if self.objection([*messages[:cut], asked], tools) is not None:
                continue  # no such conversation is ever rendered
            try:
                if (problem := self._user_turn([*messages[:cut], asked], turn, tools)) is not None:
                    return problem
            except TemplateError as error:
                return error.message
        return None

    def _user_turn(self, messages: Sequence[Message], turn: int, tools: Sequence[JSON]) -> str | None:
        prompt, whole = self._subject.text(messages[:turn], tools), self._subject.text(messages, tools)
        before = self._subject.text(messages[:-1], tools, adds_generation_prompt=False)
        appended = messages[turn + 1 :]
        bridge = self._subject.bridge(appended, tools, TurnEnd(num_calls=_num_calls(messages[:turn])))
        if (problem := self._ending_problem(whole, bridge, appended)) is not None:
            return problem
        if (problem := self._earlier_problem(messages, turn, tools)) is not None:
            return problem
        thoughts = [message.reasoning for message in messages if message.reasoning]
        is_open = _OPEN_THOUGHT.search(prompt) is not None
        lost = any((thought in before or is_open) and thought not in whole for thought in thoughts)
        self.strips_thinking |= lost or not whole.startswith(prompt)
        return None

    def _earlier_problem(self, messages: Sequence[Message], turn: int, tools: Sequence[JSON]) -> str | None:
        """Say what changed before the last turn but thoughts, which a bridge keeps."""
        plain = _without_thoughts(messages)
        prompt, whole = (self._thoughtless(part, tools) for part in (plain[:turn], plain))
        observed = prompt[: prompt.rfind(plain[turn - 1].content) + len(plain[turn - 1].content)]
        if not whole.startswith(observed):
            return f"earlier text changes {show_difference(observed, whole)}"
        if prompt.find(_SHOWN_TOOL) != whole.find(_SHOWN_TOOL):
            return f"the tools move {show_difference(prompt, whole)}"
        if plain[turn].content not in whole:
            return self._content_problem(messages, turn)
        return None

    def _thoughtless(self, messages: Sequence[Message], tools: Sequence[JSON]) -> str:
        """The prompt without empty thoughts, and without one that it leaves open."""
        return _OPEN_THOUGHT.sub("", _EMPTY_THOUGHT.sub("", self._subject.text(messages, tools)))

    def _ending_problem(self, whole: str, bridge: str, appended: Sequence[Message]) -> str | None:
        """Say what is wrong if the whole rendering does not end with the bridge, in text or ids."""
        if not whole.endswith(bridge):
            return f"the turns do not join {show_difference(bridge, whole[-len(bridge) :])}"
        if any(message.content not in bridge for message in appended):
            return "the template ends an assistant turn only behind what answers it"
        if self._ids(whole[: -len(bridge)]) + self._ids(bridge) != self._ids(whole):
            return f"the tokens around {bridge[:_WINDOW_CHARS]!r} depend on what stands before it"
        return None


def _richest(make: Callable[[TemplateForm], RenderedConversation]) -> tuple[TemplateForm, _Style]:
    """Find the form and the style of the richest conversation; without tools if it takes none."""
    thoughts = [(True, True), (True, False), (False, True)]
    objections: list[str] = []
    takes_parts = _takes_parts(make)
    for shows_calls, max_calls, takes_text in itertools.product((True, False), (2, 1), (False, True)):
        form = TemplateForm(None, takes_text, max_calls, takes_parts, shows_calls=shows_calls)
        subject = make(form)
        for (has_thoughts, has_content), has_system in itertools.product(thoughts, (True, False)):
            style = _Style(max_calls, has_thoughts, has_content, has_system)
            try:
                if _shows_tools(subject, _conversation(style), shows_calls=shows_calls):
                    return _with_thoughts(form, make, _conversation(style), TOOLS), style
                objections.insert(0, "it leaves out tools, calls or answers")
            except TemplateError as error:
                objections.append(error.message)
    form, style = (
        TemplateForm(objections[0], max_calls=0, takes_parts=takes_parts),
        _Style(0, True, True, has_system=False),
    )
    return _with_thoughts(form, make, _conversation(style), ()), style


def _takes_parts(make: Callable[[TemplateForm], RenderedConversation]) -> bool:
    """Tell whether the template reads content as a list of parts alone, as those of some models that see do."""
    for takes_parts in (False, True):
        try:
            text = make(TemplateForm(takes_parts=takes_parts)).text([Message("user", QUESTION)], ())
        except TemplateError:
            continue
        if QUESTION in text:
            return takes_parts
    return False


def _with_thoughts(
    form: TemplateForm,
    make: Callable[[TemplateForm], RenderedConversation],
    messages: Sequence[Message],
    tools: Sequence[JSON],
) -> TemplateForm:
    """Return the form in which thoughts are shown, if there is one."""
    thoughts = [message.reasoning for message in messages if message.reasoning]
    for place in ThoughtForm:
        found = replace(form, thoughts=place)
        try:
            text = make(found).text(messages, tools, adds_generation_prompt=False)
        except TemplateError:
            continue
        if any(thought in text for thought in thoughts) and _CHUNK_AS_TEXT.search(text) is None:
            return found
    return form


def _shows_tools(subject: RenderedConversation, messages: Sequence[Message], *, shows_calls: bool) -> bool:
    """Tell whether a template shows tools, answers and calls; many leave them out. Raises TemplateError.

    Without `shows_calls` the calls need not be shown.
    """
    text = subject.text(messages, TOOLS)
    first_prompt = subject.text(messages[: _turns(messages)[0]], TOOLS)
    answers = [message.content for message in messages if message.role == "tool"]
    arguments = [call.arguments for message in messages for call in message.tool_calls]
    shown = (*answers, *(one["word"] for one in arguments)) if shows_calls else answers
    is_printed = any(str(one) in text for one in arguments)  # as Python prints an object: it wants text
    return TOOL_NAME in first_prompt and all(text.count(each) == 1 for each in shown) and not is_printed


def _plain_style(trial: _Trial, style: _Style) -> _Style:
    """Return the style of a conversation without tools. Raises TemplateError if the template renders none."""
    objection: TemplateError | None = None
    for has_system in (True, False):
        plain = replace(style, num_calls=0, has_system=has_system)
        objection = trial.objection([*_conversation(plain), Message("user", _NEXT_QUESTION)])
        if objection is None:
            return plain
    raise TemplateError(f"the chat template renders no plain conversation: {objection}")


def _conversation(style: _Style) -> list[Message]:
    """One tool cycle up to its answer: every text in it is unlike every other."""
    messages = [Message("system", "You look words up.")] if style.has_system else []
    messages.append(Message("user", QUESTION))
    thought = iter(["A bird or a piece?", "I know one of them.", "So I can answer."])
    if not style.num_calls:
        messages += [
            Message("assistant", "It is a piece.", reasoning=next(thought) if style.has_thoughts else ""),
            Message("user", "Is it not a bird?"),
        ]
    for turn, count in enumerate((1, style.num_calls) if style.num_calls else ()):
        calls = [
            ToolCall(f"call{turn}{i:04d}", TOOL_NAME, {"word": f"rook {turn}.{i}"}, text=f"{TOOL_NAME}: {turn}.{i}")
            for i in range(count)
        ]
        content = f"I look it up {turn}." if style.has_content else ""
        reasoning = next(thought) if style.has_thoughts else ""
        messages.append(Message("assistant", content, tool_calls=tuple(calls), reasoning=reasoning))
        messages += [Message("tool", f"It is {call.id}.", tool_call_id=call.id, name=TOOL_NAME) for call in calls]
    messages.append(Message("assistant", "A bird.", reasoning=next(thought) if style.has_thoughts else ""))
    return messages


def _turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def _num_calls(messages: Sequence[Message]) -> int:
    return sum(len(message.tool_calls) for message in messages)


def _without_thoughts(messages: Sequence[Message]) -> list[Message]:
    return [replace(message, reasoning="") for message in messages]
