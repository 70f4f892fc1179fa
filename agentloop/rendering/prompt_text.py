"""Prompts and bridges rendered with a Hugging Face chat template.

A template is untrusted code: it runs in a sandbox, and its exceptions become `TemplateError`. Rendering is a pure
function of its arguments. A bridge is the text between a sampled turn and the next generation. `PromptText` renders
a synthetic turn with the appended messages and cuts the result at a random marker inside the synthetic turn,
because the text of a turn may depend on the messages after it. `trial.py` checks each template.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import itertools
import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentloop.errors import InvalidRequest, TemplateError, TemplateNotPrefixStable, UnsupportedParameter
from agentloop.images import ImageRef, parts_of
from agentloop.parsers.base import THOUGHT_MARKS, ReasoningDelimiters
from agentloop.rendering.port import NO_KWARGS, TurnEnd
from agentloop.rendering.tokenizer import Tokens
from agentloop.types import JSON, Message, ToolCall, ToolCallStatus
from agentloop.values.vocabulary import TEKKEN, TEKKEN_NAMES, read_json, tekken_template

FROZEN_DATE = datetime.date(2025, 1, 1)  # constant: prompts that print the date must not change at midnight
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
).union(_SPECIAL_TOKENS)


def token_text(value: JSON) -> str | None:
    """Return a token of tokenizer_config.json, written as a string or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


class ChatTemplate:
    """A compiled chat template, with the folder's separate template for tools if it has one. Thread-safe.

    Every rendering receives `special_tokens`, `kwargs`, and `date` as the current date.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        kwargs: Mapping[str, JSON] = NO_KWARGS,
        date: datetime.date = FROZEN_DATE,
    ) -> None:
        """Raises TemplateError if a source does not compile, and InvalidRequest if `kwargs` has a reserved name."""
        environment = _environment(date)
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        self._template = _compiled(environment, source)
        self._tool_template = self._template if tool_source is None else _compiled(environment, tool_source)
        self._environment = environment
        self._special_tokens = dict(special_tokens)
        check_kwargs(kwargs)
        self._kwargs = dict(kwargs)

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        file: Path | None = None,
        kwargs: Mapping[str, JSON] = NO_KWARGS,
        date: datetime.date = FROZEN_DATE,
    ) -> ChatTemplate:
        """Read the template of a model folder, or of `file` with the folder's special tokens.

        Raises TemplateError if the template is missing or does not compile.
        """
        config = read_json(directory / "tokenizer_config.json")
        own = TEKKEN_NAMES if (directory / TEKKEN).is_file() else {}
        named = {**own, **read_json(directory / "special_tokens_map.json"), **config}
        tokens = {name: text for name in _SPECIAL_TOKENS if (text := token_text(named.get(name))) is not None}
        source, tool_source = (_text_of(file), None) if file is not None else _sources(directory, config)
        return cls(source, tokens, tool_source=tool_source, kwargs=kwargs, date=date)

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """Names of the variables that the template reads in addition to those that every rendering sets."""
        names = jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))
        return frozenset(names) - _OWN_KWARGS - {"documents", *self._environment.globals}

    def render(
        self,
        messages: Sequence[JSON],
        tools: Sequence[JSON] | None,
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, JSON] = NO_KWARGS,
    ) -> str:
        """Return the conversation as text. `kwargs` override the template's own. Raises TemplateError."""
        values: dict[str, JSON] = {"documents": None, **self._special_tokens, **self._kwargs, **kwargs}
        values["messages"], values["add_generation_prompt"] = list(messages), add_generation_prompt
        template = self._tool_template if tools else self._template
        try:
            return _rendered(template, {**values, "tools": list(tools) if tools else None})
        except TemplateError:
            if tools:
                raise
        return _rendered(template, {**values, "tools": []})  # some templates iterate over tools without a check


def _rendered(template: jinja2.Template, values: Mapping[str, JSON]) -> str:
    try:
        return template.render(values)
    except Exception as error:  # a template may raise anything
        raise TemplateError(f"the chat template failed: {error or type(error).__name__}") from error


def check_kwargs(kwargs: Mapping[str, JSON]) -> None:
    """Raise InvalidRequest for a template argument that the renderer sets."""
    for name in kwargs:
        if name in _OWN_KWARGS:
            raise InvalidRequest(
                f"the template argument {name!r} is reserved: the renderer sets it", param="chat_template_kwargs"
            )


def _environment(date: datetime.date) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.datetime.combine(date, datetime.time()).strftime
    return environment


def _compiled(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template does not compile: {error}") from error


def has_template(directory: Path) -> bool:
    """Return True if a model folder has a chat template; base models have none. Raises TemplateError."""
    return isinstance(
        _named_templates(directory, read_json(directory / "tokenizer_config.json")).get("default"), str
    )


def _sources(directory: Path, config: Mapping[str, JSON]) -> tuple[str, str | None]:
    """Return a folder's template, and its separate template for conversations with tools or None."""
    named = _named_templates(directory, config)
    default, tool_use = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        raise TemplateError(
            f"{directory}: no chat_template.jinja and no chat_template in tokenizer_config.json; set "
            "chat.template.file"
        )
    return default, tool_use if isinstance(tool_use, str) else None


def _named_templates(directory: Path, config: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a folder's templates by name.

    transformers writes templates to their own files since 4.50, and wrote them to tokenizer_config.json before.
    """
    path, tool_path = directory / "chat_template.jinja", directory / "additional_chat_templates" / "tool_use.jinja"
    source = config.get("chat_template")
    if source is None:  # multimodal folders store the processor's template here
        source = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
    named = source if isinstance(source, dict) else {"default": source}
    if path.is_file():
        named = {"default": _text_of(path), **({"tool_use": _text_of(tool_path)} if tool_path.is_file() else {})}
    return {**named, "default": named.get("default") or tekken_template(directory)}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: {error}") from error


def _tojson(
    value: JSON,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which changes the text the policy reads.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=list,  # jinja's `map` filter returns a generator
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(jinja2.ext.Extension):
    """Replaces `{% generation %}`, which marks assistant text for transformers' training masks, by its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
# Markup such as `<think>` in these roles' content becomes tokens. Special tokens are text in every role's content.
_TRUSTED = frozenset({"system", "assistant"})
_THOUGHT_KEYS = ("reasoning_content", "thinking")  # the first in Qwen's and most templates, the second in gpt-oss's
_CALL_ID = "call0000"  # followed by one digit: some templates require ids of nine letters and digits
_TOOL_KEYS = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum"}
)
_WANTS_NINE = re.compile(r"length\s*(?:!=|<)\s*9\b")  # the check of call ids in Mistral's templates
_NINE = re.compile(r"[A-Za-z0-9]{9}")


class ReasoningForm(StrEnum):
    """The part of a message in which a template expects the reasoning of an earlier turn."""

    FIELD = "field"  # a field next to the content
    CHUNK = "chunk"  # a content part with its own type, as in Magistral's template
    TEXT = "text"  # inside the content, between the model's delimiters


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """The features of a chat template, as determined by the template check: tools, calls, parts, reasoning."""

    tools_objection: str | None = None  # why the template cannot show tools; None if it can
    takes_text_arguments: bool = False  # a call's arguments are JSON text, not an object
    max_calls: int = 2  # calls in one turn; a value above 1 means any number
    takes_parts: bool = False  # content is a list of parts, never a string
    reasoning: ReasoningForm = ReasoningForm.FIELD
    shows_calls: bool = (
        True  # false: the template shows only the content of earlier turns, so calls go there as text
    )
    numbers_results: bool = False  # tool results are numbered across the conversation, so bridges need `num_calls`

    @property
    def supports_tools(self) -> bool:
        """True if the template shows tools and tool results to the policy."""
        return self.tools_objection is None


class PromptText:
    """Renders prompts and bridges with one template, tokenizer and set of template arguments. Thread-safe."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: Tokens,
        stops: Sequence[str],
        form: TemplateForm = TemplateForm(),
        kwargs: Mapping[str, JSON] = NO_KWARGS,
    ) -> None:
        """`kwargs` come from a request: control tokens spelled in their strings stay text."""
        self._template = template
        self._tokens = tokens
        self._stops = tuple(stops)
        self._form = form
        self._kwargs: Mapping[str, JSON] = masked(tokens, kwargs, "chat_template_kwargs")
        self._mark = f"turn{secrets.randbits(64)}"
        self._wants_nine = _WANTS_NINE.search(template.source) is not None
        self._reasoning_keys = [key for key in _THOUGHT_KEYS if key in template.source] or list(_THOUGHT_KEYS[:1])
        self._reasoning_delimiters = reasoning_delimiters(template.source, tokens.literals)

    def text(
        self,
        messages: Sequence[Message],
        definitions: Sequence[JSON],
        *,
        adds_generation_prompt: bool = True,
        written_ids: Sequence[tuple[str, str]] = (),
    ) -> str:
        """Return the complete prompt. `definitions` are masked tools. Raises InvalidRequest and TemplateError.

        Calls and tool results are shown with the ids that the policy wrote, if `written_ids` or the calls have
        them.
        """
        objection = self._form.tools_objection
        if objection is not None and (definitions or any(m.role == "tool" or m.tool_calls for m in messages)):
            raise TemplateError(f"this model's chat template does not support tools: {objection}", param="tools")
        return self._template.render(
            self.entries(messages, written_ids),
            definitions,
            add_generation_prompt=adds_generation_prompt,
            kwargs=self._kwargs,
        )

    def open_text(
        self,
        messages: Sequence[Message],
        definitions: Sequence[JSON],
        *,
        written_ids: Sequence[tuple[str, str]] = (),
    ) -> str:
        """Return the prompt up to the end of the last message's content.

        Raises the errors of `text`, and UnsupportedParameter if the template changes that content.
        """
        *before, prefix = messages
        mark = f"{self._mark}open"
        marked = [*before, replace(prefix, content=prefix.content + mark)]
        text = self.text(marked, definitions, adds_generation_prompt=False, written_ids=written_ids)
        text, separator, _ = text.rpartition(mark)
        if not separator or not text.endswith(self._tokens.mask(prefix.content, keeps_markup=True).lstrip()):
            raise UnsupportedParameter(
                "this model's chat template changes the content of an assistant message, so a final message cannot "
                "be continued",
                param="continue_final_message",
            )
        return text

    def entries(
        self, messages: Sequence[Message], written_ids: Sequence[tuple[str, str]] = ()
    ) -> list[dict[str, JSON]]:
        """Return the messages as the dicts that templates read, with every string masked. Raises InvalidRequest."""
        try:
            calls = (call for message in messages for call in message.tool_calls if call.written_id)
            ids = dict(written_ids) | {call.id: call.written_id for call in calls}
            return [self._entry(message, ids) for message in messages]
        except RecursionError as error:
            raise InvalidRequest("arguments are nested too deeply", param="messages") from error

    def bridge(
        self, appended: Sequence[Message], definitions: Sequence[JSON], end: TurnEnd, *, is_open: bool = False
    ) -> str:
        """Return the text between a sampled turn and the next: end of the turn, messages, generation prompt.

        With `is_open`, the text ends with the last message's content and has no generation prompt. If the turn did
        not end with the template's stop token, the bridge begins with that token. Raises the errors of `text`, and
        TemplateNotPrefixStable if the end of the turn cannot be located in the rendered text.
        """
        before = self._numbered_calls(end.num_calls) if self._form.numbers_results else []
        turn = [*before, *self._synthetic_turn(appended), *appended]
        write = self.open_text if is_open else self.text
        text = write(turn, definitions, written_ids=end.written_ids)
        stop_start, stop = self._turn_end(text)
        # 1. The turn ended with the template's stop token: continue after it.
        if end.stop_id is not None and self._tokens.id_of(stop) == end.stop_id:
            return text[stop_start + len(stop) :]
        # 2. The turn was stopped after its first call: complete the call, and keep the whitespace that the template
        #    writes between calls and the stop token.
        if end.closing is not None:
            return end.closing.rstrip() + text[len(text[:stop_start].rstrip()) :]
        # 3. The turn was truncated or ended with another token: close open reasoning and add the stop token.
        return (self._reasoning_end() if end.is_thinking else "") + text[stop_start:]

    def closing_special(self, definitions: Sequence[JSON] = ()) -> str | None:
        """Return the special token that ends an assistant turn; with `definitions`, a turn that calls a tool.

        Returns None if the rendering has no such token. Raises TemplateNotPrefixStable if special tokens follow the
        turn but none of them can be identified as its end.
        """
        call = ToolCall(f"{_CALL_ID}0", "tool", {"text": self._mark})
        turn, answer = Message("assistant", self._mark), Message("user", "one answer")
        if definitions:
            turn = Message("assistant", "", (call,))
            answer = Message("tool", answer.content, tool_call_id=call.id, name=call.name)
        asked = Message("user", "one question")
        try:
            texts = (
                self.text([asked, turn, answer], definitions),
                self.text([asked, turn], definitions, adds_generation_prompt=False),
            )
        except TemplateError:
            return None  # the template check reports the refusal
        following, ending = (text.rpartition(self._mark)[2] if self._mark in text else "" for text in texts)
        following = following.partition(answer.content)[0]
        # Text that follows the turn in both renderings belongs to the turn; the rest may belong to the next
        # message.
        pairs = zip(following, ending, strict=False)
        num_own = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        own, others = self._tokens.specials(following[:num_own]), self._tokens.specials(f"{following} {ending}")
        own_declared, declared = (
            next((special for special in specials if special in self._stops), None) for specials in (own, others)
        )
        last = own[-1] if own else None
        if definitions:
            # The last special token may close only the call, and the next role's token the turn, as in GLM.
            # A token inside the call, such as Gemma's quotation mark, does not end the turn.
            after = following[num_own:].lstrip()
            ends_own = last if last is not None and following[:num_own].rstrip().endswith(last) else None
            next_role = next((token for token in self._tokens.specials(after) if after.startswith(token)), None)
            return own_declared or declared or ends_own or next_role
        closing = own_declared or last or declared  # a declared token after the turn's own token may be padding
        if closing is None and others:
            raise TemplateNotPrefixStable(
                f"the chat template writes none of the declared stop tokens ({' '.join(self._stops)}), and none of "
                f"{' '.join(dict.fromkeys(others))} is recognized as the end of a turn: set chat.stop_tokens"
            )
        return closing

    def _numbered_calls(self, num_calls: int) -> list[Message]:
        """Return a conversation with `num_calls` calls, each in its own turn, and their results."""
        messages = [Message("user", "one question")] if num_calls else []
        for number in range(num_calls):
            call = ToolCall(f"{_CALL_ID}{number % 10}", "tool")
            messages += [Message("assistant", "", (call,)), Message("tool", "", tool_call_id=call.id, name="tool")]
        return [*messages, Message("assistant", "one answer")] if messages else []

    def _synthetic_turn(self, appended: Sequence[Message]) -> list[Message]:
        """Return a conversation with one assistant turn whose calls match the first tool results in `appended`."""
        num_answers = next((i for i, message in enumerate(appended) if message.role != "tool"), len(appended))
        calls = tuple(
            ToolCall(
                answer.tool_call_id or f"{_CALL_ID}{i % 10}",
                answer.name or "tool",
                {"text": self._mark},
                text=self._mark,
            )
            for i, answer in enumerate(appended[: num_answers if self._form.max_calls > 1 else min(num_answers, 1)])
        )
        return [Message("user", "one question"), Message("assistant", self._mark, tool_calls=calls)]

    def _turn_end(self, text: str) -> tuple[int, str]:
        """Return the position of the first stop token after the synthetic turn, and the token."""
        if (at := text.rfind(self._mark)) < 0:
            raise TemplateNotPrefixStable(
                "the chat template does not show the assistant turn that these messages follow", param="messages"
            )
        turn_end = at + len(self._mark)
        stops = [(at, stop) for stop in self._stops if (at := text.find(stop, turn_end)) >= 0]
        if not stops:
            raise TemplateNotPrefixStable(
                f"the chat template does not end an assistant turn with a stop token ({' '.join(self._stops)})",
                param="messages",
            )
        return min(stops)

    def _reasoning_end(self) -> str:
        """Return the text that the template writes after reasoning if the turn has no content."""
        turn = Message("assistant", "", reasoning=self._mark)
        text = self.text([Message("user", "one question"), turn], (), adds_generation_prompt=False)
        if (at := text.rfind(self._mark)) >= 0:
            rest = text[at + len(self._mark) :]
            return rest[: min((rest.find(stop) for stop in self._stops if stop in rest), default=len(rest))]
        marks = self._reasoning_delimiters
        return marks.around(self._mark).rpartition(self._mark)[2] if marks.close in self._template.source else ""

    def _entry(self, message: Message, ids: Mapping[str, str]) -> dict[str, JSON]:
        """Return the message as templates read it, with every string masked. `ids` replaces call ids."""
        role = _ROLES.get(message.role)
        if role is None:
            raise InvalidRequest(
                f"unknown role {message.role[:32]!r}: expected one of {', '.join(_ROLES)}", param="messages"
            )
        # A template can show only parsed calls: a malformed call stays in the content as the policy wrote it.
        unread = [_written(call) for call in message.tool_calls if call.status is ToolCallStatus.MALFORMED]
        content = "\n".join(filter(None, [message.content, *unread])) if unread else message.content
        calls = [call for call in message.tool_calls if call.status is ToolCallStatus.OK]
        tokens = self._tokens
        entry: dict[str, JSON] = {
            "role": role,
            "content": self._content(content, message.images, keeps_markup=role in _TRUSTED),
        }
        if calls and not self._form.shows_calls:
            texts = [tokens.mask_within(call.text) for call in calls if call.text]
            calls = [call for call in calls if not call.text]
            entry["content"] = _with_texts(entry["content"], texts)
        if calls:
            entry["tool_calls"] = [self._call_entry(call, ids) for call in calls]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = masked(tokens, self._shown_id(message.tool_call_id, ids), "messages")
        if message.name is not None:
            entry["name"] = masked(tokens, message.name, "messages")
        if message.reasoning:
            thought = masked(tokens, message.reasoning, "messages", keeps_markup=True)
            entry |= self._thought(thought, entry["content"])
        return entry

    def _thought(self, thought: str, content: JSON) -> dict[str, JSON]:
        """Return the message fields that show masked reasoning together with masked content."""
        match self._form.reasoning:
            case ReasoningForm.FIELD:
                return dict.fromkeys(self._reasoning_keys, thought)
            case ReasoningForm.CHUNK:
                parts = (
                    content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
                )
                return {"content": [{"type": "thinking", "thinking": thought}, *parts]}
            case ReasoningForm.TEXT:
                text = self._reasoning_delimiters.around(thought)
                if isinstance(content, list):
                    return {"content": [{"type": "text", "text": text}, *content]}
                return {"content": text + content}

    def _content(self, content: str, images: Sequence[ImageRef], *, keeps_markup: bool) -> JSON:
        """Return the content as masked text, or as a list of parts if the message has images."""
        if not images and not self._form.takes_parts:
            return masked(self._tokens, content, "messages", keeps_markup=keeps_markup)
        return [
            {"type": "image"}
            if isinstance(part, ImageRef)
            else {"type": "text", "text": masked(self._tokens, part, "messages", keeps_markup=keeps_markup)}
            for part in parts_of(content, images)
        ]

    def _shown_id(self, call_id: str, ids: Mapping[str, str]) -> str:
        """Return the call id to render. If the template requires nine letters and digits, hash any other id."""
        shown = ids.get(call_id, call_id)
        if not self._wants_nine or _NINE.fullmatch(shown) is not None:
            return shown
        digest = hashlib.blake2b(shown.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return base64.b32encode(digest).decode().lower()[:9]

    def _call_entry(self, call: ToolCall, ids: Mapping[str, str]) -> dict[str, JSON]:
        arguments: JSON = call.arguments
        if self._form.takes_text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        tokens = self._tokens
        return {
            "id": masked(tokens, self._shown_id(call.id, ids), "messages"),
            "type": "function",
            "function": {
                "name": masked(tokens, call.name, "messages"),
                "arguments": masked(tokens, arguments, "messages"),
            },
        }


def outline_of(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation with the same roles, calls and images, and with probe words as its texts.

    Conversations that differ only in texts and names have equal outlines.
    """
    ids: dict[str | None, str] = {}
    outline = []
    for index, message in enumerate(messages):
        for call_id in (*(call.id for call in message.tool_calls), message.tool_call_id):
            ids.setdefault(call_id, f"call{len(ids):05d}")  # nine letters and digits
        calls = [ToolCall(ids[c.id], "tool") for c in message.tool_calls if c.status is ToolCallStatus.OK]
        has_text = bool(message.content.strip()) or len(calls) < len(message.tool_calls)
        outline.append(
            Message(
                message.role,
                f"probe{index:06d}" if has_text else "",
                tuple(calls),
                None if message.tool_call_id is None else ids[message.tool_call_id],
                None if message.name is None else "tool",
                "thought" if message.reasoning else "",
                tuple(ImageRef("") for _ in message.images),
            )
        )
    return outline


def first_hidden(outline: Sequence[Message], write: Callable[[Sequence[Message]], str]) -> tuple[int, ...]:
    """Return the index of the first message with a text or image that `write` does not show, else an empty tuple.

    A message counts as shown if a different text, or an additional image, changes the result: a template may trim,
    convert or encode text.
    """
    text = write(outline)
    for index, message in enumerate(outline):
        if message.role == "assistant":  # templates omit earlier assistant text on purpose
            continue
        others = [replace(message, images=(*message.images, ImageRef("")))] if message.images else []
        if message.content and message.content not in text:
            others.append(replace(message, content=f"other{index:06d}"))
        if any(write([*outline[:index], other, *outline[index + 1 :]]) == text for other in others):
            return (index,)
    return ()


def masked(tokens: Tokens, value: JSON, param: str, *, keeps_markup: bool = False) -> JSON:
    """Return a JSON value with every string and key masked.

    `keeps_markup` applies to a string: see `Tokens.mask`. Raises InvalidRequest for values that are not JSON or not
    Unicode, and RecursionError for values that are nested too deeply.
    """
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    "the text is not valid Unicode: it has a lone surrogate", param=param
                ) from error
        return tokens.mask(value, keeps_markup=keeps_markup)
    if isinstance(value, Mapping):
        return {masked(tokens, key, param): masked(tokens, item, param) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(tokens, item, param) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest("NaN and infinities are not valid JSON", param=param)
    return value


def reasoning_delimiters(template_source: str, literals: Collection[str]) -> ReasoningDelimiters:
    """Return the reasoning delimiters in a template, else those in a tokenizer, else `<think>` and `</think>`."""
    known = (marks for source in (template_source, literals) for marks in THOUGHT_MARKS if marks.close in source)
    return next(known, ReasoningDelimiters())


def masked_tool(tokens: Tokens, value: JSON, *, names_parameters: bool = False) -> JSON:
    """Return a tool's definition with everything masked except the keys that templates read.

    With `names_parameters`, the keys of `value` are parameter names and are masked. Raises the errors of `masked`.
    """
    if isinstance(value, Mapping):
        return {
            key if key in _TOOL_KEYS and not names_parameters else masked(tokens, key, "tools"): masked_tool(
                tokens, item, names_parameters=key == "properties" and not names_parameters
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked_tool(tokens, item) for item in value]
    return masked(tokens, value, "tools")


def _with_texts(content: JSON, texts: Sequence[str]) -> JSON:
    """Return masked content followed by further texts, each on its own line."""
    if isinstance(content, list):
        return [*content, *({"type": "text", "text": text} for text in texts)]
    return "\n".join(filter(None, [content, *texts]))


def _written(call: ToolCall) -> str:
    """Return the written text of a malformed call."""
    # In a client's history the name is a separate field, and `text` has only the arguments.
    return call.text if call.name in call.text else f"{call.name} {call.text}"
