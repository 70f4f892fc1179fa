"""A Hugging Face chat template, and prompts and bridges that are rendered with it.

A template is foreign code: it runs sandboxed, and its exceptions become `TemplateError`. Rendering is a pure
function of its arguments; the date that a template may ask for is constant, so that prompts do not change at
midnight.

A bridge is the text between a sampled turn and the next prompt. It is the end of a rendering of a synthetic turn
and the messages that follow it, cut at a random mark in the synthetic turn, because the text of a turn may depend
on the messages after it. `trial.py` tests a template, and a `Renderer` refuses the templates that fail there.
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
from agentloop.parsers.base import THOUGHT_MARKS, ThoughtMarks
from agentloop.rendering.port import NO_KWARGS, TurnEnd
from agentloop.rendering.tokenizer import Tokens
from agentloop.types import JSON, Message, ToolCall, ToolCallStatus
from agentloop.values.vocabulary import TEKKEN, TEKKEN_NAMES, read_json, tekken_template

FROZEN_DATE = datetime.date(2025, 1, 1)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
).union(_SPECIAL_TOKENS)


def token_text(value: JSON) -> str | None:
    """Return a token of tokenizer_config.json, written as a string or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


class ChatTemplate:
    """A compiled template, and a folder's template for tools if there is one. Safe to use from several threads.

    Every rendering gets `special_tokens`, `kwargs`, and `date` as today's date.
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
        """Raises TemplateError if a source does not compile, and InvalidRequest for arguments that are not free."""
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
        """The names of the further arguments that it reads."""
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
        """Return the conversation as text; `kwargs` go before its own. Raises TemplateError with the objection."""
        values: dict[str, JSON] = {"documents": None, **self._special_tokens, **self._kwargs, **kwargs}
        values["messages"], values["add_generation_prompt"] = list(messages), add_generation_prompt
        template = self._tool_template if tools else self._template
        try:
            return _rendered(template, {**values, "tools": list(tools) if tools else None})
        except TemplateError:
            if tools:
                raise
        return _rendered(template, {**values, "tools": []})  # some go through the tools without asking for them


def _rendered(template: jinja2.Template, values: Mapping[str, JSON]) -> str:
    try:
        return template.render(values)
    except Exception as error:  # foreign code: it may raise anything, and all of it means the same
        raise TemplateError(f"the chat template failed: {error or type(error).__name__}") from error


def check_kwargs(kwargs: Mapping[str, JSON]) -> None:
    """Raises InvalidRequest for a template argument that the renderer itself sets."""
    for name in kwargs:
        if name in _OWN_KWARGS:
            raise InvalidRequest(f"the template argument {name} is not free", param="chat_template_kwargs")


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


def _sources(directory: Path, config: Mapping[str, JSON]) -> tuple[str, str | None]:
    """Return a folder's template, and the one for conversations with tools if it has two.

    Looks in files, as transformers writes them since 4.50, and in tokenizer_config.json, its earlier form.
    """
    path, tool_path = directory / "chat_template.jinja", directory / "additional_chat_templates" / "tool_use.jinja"
    source = config.get("chat_template")
    if source is None:  # a processor's
        source = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
    named = source if isinstance(source, dict) else {"default": source}
    if path.is_file():
        named = {"default": _text_of(path), **({"tool_use": _text_of(tool_path)} if tool_path.is_file() else {})}
    default, tool_use = named.get("default") or tekken_template(directory), named.get("tool_use")
    if not isinstance(default, str):
        raise TemplateError(f"{directory}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    return default, tool_use if isinstance(tool_use, str) else None


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
        default=list,  # what `map` gives
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for transformers' training masks; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_TRUSTED = frozenset({"system", "assistant"})  # their markup is markup; control tokens proper are text everywhere
_THOUGHT_KEYS = ("reasoning_content", "thinking")  # as Qwen's and most templates name it, and as gpt-oss's does
_CALL_ID = "call0000"  # with a digit nine letters and digits: some templates insist
_TOOL_KEYS = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum"}
)
_WANTS_NINE = re.compile(r"length\s*(?:!=|<)\s*9\b")  # what Mistral's templates say of a call's id
_NINE = re.compile(r"[A-Za-z0-9]{9}")


class ThoughtForm(StrEnum):
    """The place in a message where a template reads an earlier thought."""

    FIELD = "field"  # of its own, beside the content
    CHUNK = "chunk"  # a part of the content with a type of its own, as Magistral's
    TEXT = "text"  # within the content, between the model's marks


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """The form in which a template takes conversations, found by trial."""

    tools_objection: str | None = None  # why it cannot show tools; None: it can
    takes_text_arguments: bool = False  # a call's arguments as JSON text, not as an object
    max_calls: int = 2  # of one turn; more than one: any number
    takes_parts: bool = False  # content is a list of parts, never a text
    thoughts: ThoughtForm = ThoughtForm.FIELD
    shows_calls: bool = True  # false: of earlier turns it shows the content alone, so a call is text there
    numbers_results: bool = False  # over the whole conversation: a bridge needs the calls before it

    @property
    def supports_tools(self) -> bool:
        """True if the template shows tools and their answers to the policy."""
        return self.tools_objection is None


class PromptText:
    """One template with one tokenizer and one set of template arguments. Safe to use from several threads."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: Tokens,
        stops: Sequence[str],
        form: TemplateForm = TemplateForm(),
        kwargs: Mapping[str, JSON] = NO_KWARGS,
    ) -> None:
        """`kwargs` are a caller's: their strings become no control tokens."""
        self._template = template
        self._tokens = tokens
        self._stops = tuple(stops)
        self._form = form
        self._kwargs: Mapping[str, JSON] = masked(tokens, kwargs, "chat_template_kwargs")
        self._mark = f"turn{secrets.randbits(64)}"
        self._wants_nine = _WANTS_NINE.search(template.source) is not None
        self._thought_keys = [key for key in _THOUGHT_KEYS if key in template.source] or list(_THOUGHT_KEYS[:1])
        self._thought_marks = thought_marks(template.source, tokens.literals)

    def text(
        self,
        messages: Sequence[Message],
        definitions: Sequence[JSON],
        *,
        adds_generation_prompt: bool = True,
        written_ids: Sequence[tuple[str, str]] = (),
    ) -> str:
        """Return the whole prompt. `definitions` are masked tools. Raises InvalidRequest and TemplateError.

        Calls and their answers have the ids that the policy wrote, where `written_ids` or the calls tell them.
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
        """Return the prompt up to the end of the last message's content. Raises as `text`, and
        UnsupportedParameter."""
        *before, begun = messages
        mark = f"{self._mark}open"
        marked = [*before, replace(begun, content=begun.content + mark)]
        text = self.text(marked, definitions, adds_generation_prompt=False, written_ids=written_ids)
        text, found, _ = text.rpartition(mark)
        if not found or not text.endswith(self._tokens.mask(begun.content, keeps_markup=True).lstrip()):
            raise UnsupportedParameter(
                "this model's chat template does not show an assistant's message as it is written",
                param="continue_final_message",
            )
        return text

    def entries(
        self, messages: Sequence[Message], written_ids: Sequence[tuple[str, str]] = ()
    ) -> list[dict[str, JSON]]:
        """Return the messages as templates read them, every string masked. Raises InvalidRequest."""
        try:
            calls = (call for message in messages for call in message.tool_calls if call.written_id)
            ids = dict(written_ids) | {call.id: call.written_id for call in calls}
            return [self._entry(message, ids) for message in messages]
        except RecursionError as error:
            raise InvalidRequest("arguments are nested too deeply", param="messages") from error

    def bridge(
        self, appended: Sequence[Message], definitions: Sequence[JSON], end: TurnEnd, *, is_open: bool = False
    ) -> str:
        """Return the text between a sampled turn and the next: the turn's end, the messages, the generation prompt.

        `is_open`: no generation prompt, but the last message up to the end of its content. A turn that ended with
        the template's own stop token is closed; any other gets that token first. Raises as `text`, and
        TemplateNotPrefixStable if the template does not show where the turn ends.
        """
        before = self._numbered_calls(end.num_calls) if self._form.numbers_results else []
        turn = [*before, *self._synthetic_turn(appended), *appended]
        write = self.open_text if is_open else self.text
        text = write(turn, definitions, written_ids=end.written_ids)
        stop_start, stop = self._turn_end(text)
        if end.stop_id is not None and self._tokens.id_of(stop) == end.stop_id:
            return text[stop_start + len(stop) :]
        if end.closing is not None:  # the template may write blanks between calls and the end of their turn
            return end.closing.rstrip() + text[len(text[:stop_start].rstrip()) :]
        return (self._thought_end() if end.is_thinking else "") + text[stop_start:]

    def closing_special(self, definitions: Sequence[JSON] = ()) -> str | None:
        """Return the special token that ends an assistant's turn, with `definitions` a turn that calls a tool.

        None if the rendering shows none. Raises TemplateNotPrefixStable where special tokens follow an answer, and
        none of them is seen to be its end.
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
            return None  # the trial reports the refusal
        following, ending = (text.rpartition(self._mark)[2] if self._mark in text else "" for text in texts)
        following = following.partition(answer.content)[0]
        # What follows the turn in both renderings is its own; the rest may belong to the next message.
        pairs = zip(following, ending, strict=False)
        num_own = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        own, others = self._tokens.specials(following[:num_own]), self._tokens.specials(f"{following} {ending}")
        own_declared, declared = (
            next((one for one in found if one in self._stops), None) for found in (own, others)
        )
        last = own[-1] if own else None
        if definitions:
            # The last special token may close the call only, and the mark of the next role the turn, as GLM's does.
            # A token within the call, such as a quotation mark of Gemma's, ends nothing.
            after = following[num_own:].lstrip()
            ends_own = last if last is not None and following[:num_own].rstrip().endswith(last) else None
            next_role = next((one for one in self._tokens.specials(after) if after.startswith(one)), None)
            return own_declared or declared or ends_own or next_role
        closing = own_declared or last or declared  # a declared token after the turn's own may be a pad
        if closing is None and others:
            raise TemplateNotPrefixStable(
                f"the chat template writes no declared stop token ({' '.join(self._stops)}), and none of "
                f"{' '.join(dict.fromkeys(others))} is seen to end a turn: name it, as chat.stop_tokens"
            )
        return closing

    def _numbered_calls(self, num_calls: int) -> list[Message]:
        """A conversation with so many calls, each in a turn of its own, and their answers."""
        messages = [Message("user", "one question")] if num_calls else []
        for number in range(num_calls):
            call = ToolCall(f"{_CALL_ID}{number % 10}", "tool")
            messages += [Message("assistant", "", (call,)), Message("tool", "", tool_call_id=call.id, name="tool")]
        return [*messages, Message("assistant", "one answer")] if messages else []

    def _synthetic_turn(self, appended: Sequence[Message]) -> list[Message]:
        """A conversation of one assistant turn, with the calls that the first of `appended` answer."""
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
        """Find the stop token behind the synthetic turn: where it begins, and which."""
        if (at := text.rfind(self._mark)) < 0:
            raise TemplateNotPrefixStable("the template does not show the turn that is answered", param="messages")
        turn_end = at + len(self._mark)
        found = [(at, stop) for stop in self._stops if (at := text.find(stop, turn_end)) >= 0]
        if not found:
            raise TemplateNotPrefixStable(
                f"the template does not end an assistant turn with a stop token ({' '.join(self._stops)})",
                param="messages",
            )
        return min(found)

    def _thought_end(self) -> str:
        """The text with which the template ends a thought, where nothing but the turn's end follows it."""
        turn = Message("assistant", "", reasoning=self._mark)
        text = self.text([Message("user", "one question"), turn], (), adds_generation_prompt=False)
        if (at := text.rfind(self._mark)) >= 0:
            rest = text[at + len(self._mark) :]
            return rest[: min((rest.find(stop) for stop in self._stops if stop in rest), default=len(rest))]
        marks = self._thought_marks
        return marks.around(self._mark).rpartition(self._mark)[2] if marks.close in self._template.source else ""

    def _entry(self, message: Message, ids: Mapping[str, str]) -> dict[str, JSON]:
        """The message as templates read it, every string of it masked; `ids` are shown for the calls' own."""
        role = _ROLES.get(message.role)
        if role is None:
            raise InvalidRequest(f"no role {message.role[:32]!r}: there are {', '.join(_ROLES)}", param="messages")
        # No template shows a call that could not be read: it stays the text that the policy wrote.
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
        """The fields of a message that show a masked thought beside masked content."""
        match self._form.thoughts:
            case ThoughtForm.FIELD:
                return dict.fromkeys(self._thought_keys, thought)
            case ThoughtForm.CHUNK:
                parts = (
                    content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
                )
                return {"content": [{"type": "thinking", "thinking": thought}, *parts]}
            case ThoughtForm.TEXT:
                written = self._thought_marks.around(thought)
                if isinstance(content, list):
                    return {"content": [{"type": "text", "text": written}, *content]}
                return {"content": written + content}

    def _content(self, content: str, images: Sequence[ImageRef], *, keeps_markup: bool) -> JSON:
        """A text, or the parts of a message with images, as templates of models that see them read it."""
        if not images and not self._form.takes_parts:
            return masked(self._tokens, content, "messages", keeps_markup=keeps_markup)
        return [
            {"type": "image"}
            if isinstance(part, ImageRef)
            else {"type": "text", "text": masked(self._tokens, part, "messages", keeps_markup=keeps_markup)}
            for part in parts_of(content, images)
        ]

    def _shown_id(self, call_id: str, ids: Mapping[str, str]) -> str:
        """Return a call's id as the template shows it: some take nine letters and digits only."""
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
    """Return a conversation of the same roles, calls and images whose texts are probe words.

    Conversations that differ in their texts and names only have equal outlines.
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
    """Return the index of the first message with a text or image that `write` does not show, or nothing.

    A message is shown if another text, or one image more, changes the result: a template may trim, convert or
    encode a text. Assistants' messages may be left out: templates strip them on purpose.
    """
    text = write(outline)
    for index, message in enumerate(outline):
        if message.role == "assistant":
            continue
        others = [replace(message, images=(*message.images, ImageRef("")))] if message.images else []
        if message.content and message.content not in text:
            others.append(replace(message, content=f"other{index:06d}"))
        if any(write([*outline[:index], other, *outline[index + 1 :]]) == text for other in others):
            return (index,)
    return ()


def masked(tokens: Tokens, value: JSON, param: str, *, keeps_markup: bool = False) -> JSON:
    """Return a JSON value, every string and key of it masked. Raises InvalidRequest for what is no JSON or Unicode.

    `keeps_markup`, of a string: see `Tokens.mask`. Raises RecursionError where it is nested too deeply.
    """
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest("text with a lone surrogate is not Unicode", param=param) from error
        return tokens.mask(value, keeps_markup=keeps_markup)
    if isinstance(value, Mapping):
        return {masked(tokens, key, param): masked(tokens, item, param) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(tokens, item, param) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest("NaN and infinities are not JSON", param=param)
    return value


def thought_marks(template_source: str, literals: Collection[str]) -> ThoughtMarks:
    """Return the marks of thoughts in a template, or else in a tokenizer; by default those of most models."""
    known = (marks for place in (template_source, literals) for marks in THOUGHT_MARKS if marks.close in place)
    return next(known, ThoughtMarks())


def masked_tool(tokens: Tokens, value: JSON, *, names_parameters: bool = False) -> JSON:
    """Return a tool's definition masked but for the keys by which templates read it. Raises as `masked`.

    `names_parameters`: the value's own keys are names of parameters.
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
    """Return masked content with further texts behind it, each on a line of its own."""
    if isinstance(content, list):
        return [*content, *({"type": "text", "text": text} for text in texts)]
    return "\n".join(filter(None, [content, *texts]))


def _written(call: ToolCall) -> str:
    """Return what was written for a call that could not be read; a client's history may have its name apart."""
    return call.text if call.name in call.text else f"{call.name} {call.text}"
