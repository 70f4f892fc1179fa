"""Messages to token ids, exactly: whole prompts, and the bridge from one sampled turn to the next.

Ownership: a `Renderer` holds one model folder's tokenizer and chat template; it is the only way from messages to
ids. Invariants: sampled ids are never made again from text; a bridge costs time in proportion to the new text
(and the tool definitions); content never becomes a control token (`tokenization.py`). All methods may be called
from several threads.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import orjson
from tokenizers import Tokenizer

from agentloop.errors import InvalidRequest, TemplateError, TemplateNotPrefixStable
from agentloop.images import ImageRef, parts_of
from agentloop.parsers import DecodedText
from agentloop.rendering.template import (
    ChatTemplate,
    StabilityReport,
    examine,
    read_json,
    show_difference,
    token_text,
)
from agentloop.rendering.tokenizer import TextDecoder, Tokens
from agentloop.types import JSON, Message, ToolCall, ToolCallStatus

T = TypeVar("T")

_LONG_RENDER_CHARS = 20_000  # about 5 ms of template and tokenizer: longer texts go to a thread
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_MARK = "one sampled turn"
_REPLY = "one observation"
_CALL_ID = "call00000"  # nine letters and digits: some templates insist
_MAX_BOUNDARIES = 128


async def off_loop(num_chars: int, work: Callable[[], T]) -> T:
    """Render or tokenise a text of `num_chars`, in a thread if it is long."""
    return await asyncio.to_thread(work) if num_chars > _LONG_RENDER_CHARS else work()


class OnUnstable(StrEnum):
    """Answers to a template whose later turns do not extend earlier ones."""

    RAISE = "raise"  # refuse it
    FORK = "fork"  # accept it: the caller renders every turn whole, and forks the path


@dataclass(frozen=True, slots=True)
class _Boundary:
    """A synthetic conversation as every bridge with these tools continues it.

    `prefix` ends after the stop token of its assistant turn, which starts at `stop_start`.
    """

    prefix: str
    stop_start: int
    definitions: Sequence[JSON]  # the tools, masked


class Renderer:
    """One model folder's way from messages to ids and back. `from_directory` makes one."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: Tokens,
        *,
        stop_token_ids: Sequence[int],
        vocab_size: int,
        on_unstable: OnUnstable = OnUnstable.RAISE,
    ) -> None:
        """Tests the template. Raises TemplateError, and TemplateNotPrefixStable unless told to fork."""
        self._template = template
        self._tokens = tokens
        self._stop_token_ids = tuple(stop_token_ids)
        self._stops = [text for i in self._stop_token_ids if (text := tokens.literal_of(i))]
        self._vocab_size = vocab_size
        self._boundaries: OrderedDict[tuple[bytes, str | None], _Boundary] = OrderedDict()
        self._boundaries_lock = threading.Lock()
        if not self._stops:
            raise TemplateError(
                "no stop token: neither generation_config.json, config.json nor the tokenizer has one"
            )
        self._report = StabilityReport(supports_tools=True, difference=None, strips_thinking=False)
        self._report = examine(self)
        if self._report.difference is not None and on_unstable is OnUnstable.RAISE:
            raise TemplateNotPrefixStable(self._unstable())

    @classmethod
    def from_directory(cls, directory: str | Path, *, on_unstable: OnUnstable = OnUnstable.RAISE) -> Renderer:
        """The renderer of a Hugging Face model folder. Reads files only; raises TemplateError naming the file."""
        folder = Path(directory)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TemplateError(f"{path}: no such file; a model folder has its tokenizer there")
        try:
            tokens = Tokens(Tokenizer.from_file(str(path)))
        except TemplateError:
            raise
        except Exception as error:  # the Rust library raises bare Exception
            raise TemplateError(f"{path}: {error}") from error
        config = read_json(folder / "config.json")
        if isinstance(text_config := config.get("text_config"), dict):  # of a model that also sees
            config = text_config | config
        return cls(
            ChatTemplate.from_directory(folder),
            tokens,
            stop_token_ids=_stop_token_ids(folder, config, tokens),
            vocab_size=max(tokens.num_ids, _int_or(config.get("vocab_size"), 0)),
            on_unstable=on_unstable,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn, the model's own first. Never empty."""
        return self._stop_token_ids

    @property
    def vocab_size(self) -> int:
        """Ids an engine can sample are below this: the model's size, padding included, or the tokenizer's."""
        return self._vocab_size

    @property
    def is_prefix_stable(self) -> bool:
        """True if `bridge` can be used. If not, render every turn whole and fork the path."""
        return self._report.difference is None

    @property
    def template_arguments(self) -> frozenset[str]:
        """The names of the further arguments that the chat template reads."""
        return self._template.arguments

    @property
    def supports_tools(self) -> bool:
        """True if the template shows tools and their answers to the policy."""
        return self._report.supports_tools

    @property
    def strips_thinking(self) -> bool:
        """True if a whole rendering drops `<think>` blocks before the last user turn; a bridge never does."""
        return self._report.strips_thinking

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> list[int]:
        """The ids of the whole prompt, generation prompt included. Time grows with all of the text.

        Raises InvalidRequest for what cannot be rendered by any template, TemplateError for what this one refuses.
        """
        return self.ids(self.text(messages, tools))

    def bridge(
        self, appended: Sequence[Message], tools: Sequence[Mapping[str, JSON]], *, is_closed: bool
    ) -> list[int]:
        """The ids between an assistant turn's sampled ids and the next turn's; none of them are sampled.

        `is_closed`: the turn's last sampled id is a stop token; otherwise the template's own comes first.
        Raises as `render`, and TemplateNotPrefixStable if this template or these messages cannot be appended.
        """
        if not self.is_prefix_stable:
            raise TemplateNotPrefixStable(self._unstable())
        return self.ids(self.bridge_text(appended, tools, is_closed=is_closed))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included, nothing stripped."""
        return self._tokens.decode(ids)

    def decode_with_offsets(self, ids: Sequence[int]) -> DecodedText:
        """`decode(ids)` with the number of characters complete after each id. Takes linear time."""
        return self._tokens.decode_with_offsets(ids)

    def decoder(self) -> TextDecoder:
        """Make a decoder for ids that come in pieces."""
        return TextDecoder(self._tokens, self._stop_token_ids[0])

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text: it may be a part of a character."""
        return self._tokens.token_bytes(token_id)

    def ids(self, text: str) -> list[int]:
        """The ids of what `text` or `bridge_text` returned."""
        return self._tokens.encode(text)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> str:
        """The whole prompt as masked text: content that spells a control token is hidden until `ids`."""
        if not messages:
            raise InvalidRequest("there are no messages", param="messages")
        return self._text(messages, tools)

    def bridge_text(
        self, appended: Sequence[Message], tools: Sequence[Mapping[str, JSON]], *, is_closed: bool
    ) -> str:
        """`bridge` before it is tokenised: what a rendering adds to a synthetic conversation of one turn."""
        if not appended or appended[0].role == "assistant":
            raise InvalidRequest("after a sampled turn come the messages that answer it", param="messages")
        first = appended[0]
        tool_name = (first.name or "tool") if first.role == "tool" else None
        boundary = self._boundary(tools, tool_name)
        text = self._rendered([*_synthetic_turn(tool_name), *appended], boundary.definitions)
        if not text.startswith(boundary.prefix):
            shown = show_difference(self._tokens.unmask(boundary.prefix), self._tokens.unmask(text))
            raise TemplateNotPrefixStable(f"appended messages change earlier text {shown}", param="messages")
        return text[len(boundary.prefix) if is_closed else boundary.stop_start :]

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> str:
        return self._rendered(messages, self._definitions(tools))

    def _definitions(self, tools: Sequence[Mapping[str, JSON]]) -> list[JSON]:
        try:
            return [self._masked(tool, "tools", is_sampled=False) for tool in tools]
        except RecursionError as error:
            raise InvalidRequest("tools are nested too deeply", param="tools") from error

    def _rendered(self, messages: Sequence[Message], definitions: Sequence[JSON]) -> str:
        if not self.supports_tools and (definitions or any(m.role == "tool" or m.tool_calls for m in messages)):
            raise TemplateError("this model's chat template does not support tools", param="tools")
        try:
            entries = [self._entry(message) for message in messages]
        except RecursionError as error:
            raise InvalidRequest("arguments are nested too deeply", param="messages") from error
        return self._template.render(entries, definitions, add_generation_prompt=True)

    def _entry(self, message: Message) -> dict[str, JSON]:
        """The message as templates read it, every string of it masked."""
        role = _ROLES.get(message.role)
        if role is None:
            raise InvalidRequest(f"no role {message.role[:32]!r}: there are {', '.join(_ROLES)}", param="messages")
        is_sampled = role == "assistant"
        entry: dict[str, JSON] = {
            "role": role,
            "content": self._content(message, is_sampled=is_sampled),
        }
        if message.tool_calls:
            entry["tool_calls"] = [self._call_entry(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = self._masked(message.tool_call_id, "messages", is_sampled=False)
        if message.name is not None:
            entry["name"] = self._masked(message.name, "messages", is_sampled=False)
        if message.reasoning:
            entry["reasoning_content"] = self._masked(message.reasoning, "messages", is_sampled=True)
        return entry

    def _content(self, message: Message, *, is_sampled: bool) -> JSON:
        """A text, or the parts of a message with images, as templates of models that see them read it."""
        if not message.images:
            return self._masked(message.content, "messages", is_sampled=is_sampled)
        return [
            {"type": "image"}
            if isinstance(part, ImageRef)
            else {"type": "text", "text": self._masked(part, "messages", is_sampled=is_sampled)}
            for part in parts_of(message.content, message.images)
        ]

    def _call_entry(self, call: ToolCall) -> dict[str, JSON]:
        arguments = call.arguments if call.status is ToolCallStatus.OK else call.text
        function = {"name": call.name, "arguments": arguments}
        entry = {"id": call.id, "type": "function", "function": function}
        return {key: self._masked(value, "messages", is_sampled=False) for key, value in entry.items()}

    def _masked(self, value: JSON, param: str, *, is_sampled: bool) -> JSON:
        if isinstance(value, str):
            if not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    raise InvalidRequest("text with a lone surrogate is not Unicode", param=param) from error
            return self._tokens.mask(value, is_sampled=is_sampled)
        if isinstance(value, Mapping):
            return {
                self._masked(key, param, is_sampled=False): self._masked(item, param, is_sampled=False)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._masked(item, param, is_sampled=False) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest("NaN and infinities are not JSON", param=param)
        return value

    def _boundary(self, tools: Sequence[Mapping[str, JSON]], tool_name: str | None) -> _Boundary:
        try:
            key = orjson.dumps(list(tools)), tool_name
        except TypeError as error:
            raise InvalidRequest(f"tools are not JSON: {error}", param="tools") from error
        with self._boundaries_lock:
            if (found := self._boundaries.get(key)) is not None:
                self._boundaries.move_to_end(key)
                return found
        made = self._make_boundary(tools, tool_name)
        with self._boundaries_lock:
            self._boundaries[key] = made
            if len(self._boundaries) > _MAX_BOUNDARIES:
                self._boundaries.popitem(last=False)
        return made

    def _make_boundary(self, tools: Sequence[Mapping[str, JSON]], tool_name: str | None) -> _Boundary:
        role = "user" if tool_name is None else "tool"
        reply = Message(role, _REPLY, tool_call_id=_CALL_ID if tool_name else None, name=tool_name)
        definitions = self._definitions(tools)
        text = self._rendered([*_synthetic_turn(tool_name), reply], definitions)
        turn_end = text.rfind(_MARK) + len(_MARK)
        found = [(at, stop) for stop in self._stops if (at := text.find(stop, turn_end)) >= 0]
        stop_start, stop = min(found, default=(len(text), ""))
        if not turn_end < stop_start + len(stop) <= text.rfind(_REPLY):
            raise TemplateNotPrefixStable("the template does not end an assistant turn with one of its stop tokens")
        return _Boundary(text[: stop_start + len(stop)], stop_start, definitions)

    def _unstable(self) -> str:
        difference = self._tokens.unmask(self._report.difference or "")
        return f"the chat template is not prefix-stable: {difference}"


def _synthetic_turn(tool_name: str | None) -> list[Message]:
    """A conversation of one assistant turn, without a call or with one for `tool_name`."""
    calls = () if tool_name is None else (ToolCall(_CALL_ID, tool_name, {"text": _MARK}),)
    return [Message("user", "one question"), Message("assistant", _MARK, tool_calls=calls)]


def _stop_token_ids(folder: Path, config: Mapping[str, JSON], tokens: Tokens) -> list[int]:
    declared = read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = config.get("eos_token_id")
    ids = list(declared) if isinstance(declared, list) else [declared]
    text = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    ids.append(tokens.id_of(text) if text is not None else None)
    return list(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _int_or(value: JSON, default: int) -> int:
    return value if isinstance(value, int) else default
