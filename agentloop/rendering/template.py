"""A Hugging Face chat template: message dicts to text, as transformers renders them.

Ownership: this module knows jinja and the files that describe a template; it knows no tokens. A template is
foreign code, so it runs sandboxed, and whatever it raises is a `TemplateError`. Rendering is a pure function
of its arguments: the date a template may ask for is frozen, or prompts would change at midnight.

`examine` tests once, when a renderer is made, that a conversation grows without changing the tokens it
already has: on a synthetic one with calls, tool answers and several user turns. Templates differ in what they
accept (a system message, tools, several calls in a turn), so the richest conversation that this one renders is the
one it is judged by.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentloop.errors import TemplateError
from agentloop.types import JSON, Message, ToolCall

FROZEN_DATE = datetime.datetime(2025, 1, 1)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, JSON]:
    """A JSON object from a file; an absent file is an empty one. Raises TemplateError if it cannot be read."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise TemplateError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TemplateError(f"{path}: not a JSON object")
    return value


def token_text(value: JSON) -> str | None:
    """A token as tokenizer_config.json writes one: a string, or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


class ChatTemplate:
    """A compiled template and the special tokens it may name. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TemplateError if `source` does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = FROZEN_DATE.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        given = {"messages", "tools", "documents", "add_generation_prompt", *_SPECIAL_TOKENS}
        self.arguments = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)) - given)

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """The template of a model folder. Raises TemplateError if it has none, or one that does not compile."""
        config = read_json(directory / "tokenizer_config.json")
        named = read_json(directory / "special_tokens_map.json") | config
        tokens = {name: text for name in _SPECIAL_TOKENS if (text := token_text(named.get(name))) is not None}
        return cls(_source(directory, config), tokens)

    def render(self, messages: Sequence[JSON], tools: Sequence[JSON] | None, *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises TemplateError with what the template objected to."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # foreign code: it may raise anything, and all of it means the same
            raise TemplateError(f"the chat template failed: {error or type(error).__name__}") from error


def _source(directory: Path, config: Mapping[str, JSON]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"{path}: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates, the form of transformers 4
        source = {str(entry.get("name")): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str):
        raise TemplateError(f"{directory}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    return source


def _tojson(
    value: JSON,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which changes the text the policy reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for transformers' training masks; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
