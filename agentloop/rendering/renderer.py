"""Messages to token ids with a model folder's chat template: complete prompts, and bridges between turns.

A `TemplateRenderer` owns one model folder's tokenizer and chat template. Invariants: sampled ids are never
re-tokenized; a bridge takes time linear in the new text and the tool definitions; content never becomes a control
token (`tokenizer.py`); a bridge is refused if the template check (`trial.py`) found that it differs from the
template's own rendering. The check runs once per set of template arguments, on first use.
"""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

import orjson
import structlog
from tokenizers import Tokenizer

from agentloop.errors import InvalidRequest, TemplateError, TemplateNotPrefixStable
from agentloop.parsers.base import DecodedText
from agentloop.rendering.port import NO_KWARGS, ModelFacts, TurnEnd
from agentloop.rendering.prompt_text import (
    FROZEN_DATE,
    ChatTemplate,
    PromptText,
    TemplateForm,
    check_kwargs,
    first_hidden,
    masked_tool,
    outline_of,
    token_text,
)
from agentloop.rendering.template_check import TOOLS, BridgeReport, examine
from agentloop.rendering.tokenizer import TextDecoder, Tokens
from agentloop.types import JSON, Message, Thinking
from agentloop.values.vocabulary import read_json, tokenizer_json

T = TypeVar("T")

_LONG_RENDER_CHARS = 20_000  # about 5 ms of template and tokenizer: longer texts go to a thread
_MAX_REMEMBERED = 128  # tool sets, and sets of template arguments
_MAX_OUTLINES = 4096  # outlines of checked conversations, about 1 KB each

_log = structlog.get_logger(__name__)


async def off_loop(num_chars: int, work: Callable[[], T]) -> T:
    """Run `work`, which renders or tokenizes `num_chars` of text, in a thread if the text is long."""
    return await asyncio.to_thread(work) if num_chars > _LONG_RENDER_CHARS else work()


class OnUnstable(StrEnum):
    """The action taken for a template with turns that cannot be bridged."""

    RAISE = "raise"  # refuse the template
    FORK = (
        "fork"  # accept it: if a bridge is refused, the caller renders the conversation again and starts a branch
    )


@dataclass(frozen=True, slots=True)
class RenderSettings:
    """Rendering settings of one model."""

    on_unstable: OnUnstable = OnUnstable.RAISE
    template_file: Path | None = None  # replaces the folder's template
    kwargs: Mapping[str, JSON] = field(default_factory=dict)  # template arguments; a request's own override them
    date: datetime.date = FROZEN_DATE  # the date that `strftime_now` formats
    thinking: Thinking = Thinking.KEEP
    stop_tokens: tuple[str, ...] = ()  # replaces the stop tokens that the folder declares


class ModelText:
    """A `TokenText` that combines one model's tokenizer with its stop tokens."""

    def __init__(self, tokens: Tokens, *, stop_token_ids: Sequence[int], vocab_size: int) -> None:
        """Raises TemplateError if no stop token is in the vocabulary."""
        self.tokens = tokens
        self._vocab_size = vocab_size
        self._stop_token_ids = tuple(stop_token_ids)
        if not any(tokens.literal_of(token_id) for token_id in self._stop_token_ids):
            raise TemplateError(
                "no stop token: generation_config.json, config.json and tokenizer_config.json declare none that is "
                "in the vocabulary"
            )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_token_ids

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return self.tokens.special_ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokens.decode(ids)

    def decode_with_offsets(self, ids: Sequence[int]) -> DecodedText:
        return self.tokens.decode_with_offsets(ids)

    def decoder(self) -> TextDecoder:
        return TextDecoder(self.tokens, self._stop_token_ids[0])

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens.token_bytes(token_id)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are spelled out, or of a masked text."""
        return self.tokens.encode(text)


def model_text(folder: Path, stop_tokens: Sequence[str] = ()) -> ModelText:
    """Read the tokenizer of a model folder. `stop_tokens` replaces the stop tokens that the folder declares.

    Raises TemplateError with the file name.
    """
    tokens = _tokens_of(folder)
    config = read_json(folder / "config.json")
    if isinstance(text_config := config.get("text_config"), dict):  # multimodal models nest the text model's config
        config = text_config | config
    return ModelText(
        tokens,
        stop_token_ids=_stop_token_ids(folder, config, tokens, stop_tokens),
        vocab_size=max(tokens.num_ids, _int_or(config.get("vocab_size"), 0)),
    )


class TextOnlyRenderer(ModelText):
    """A model without a chat template, such as a base model: it completes text and tokens, and refuses messages."""

    objection = (
        "this model has no chat template: use /generate or /v1/completions, or set chat.template.file to a template"
        " for its messages"
    )

    @classmethod
    def from_directory(cls, directory: Path, settings: RenderSettings = RenderSettings()) -> TextOnlyRenderer:
        """Create the renderer of a Hugging Face model folder. Raises TemplateError with the file name."""
        text = model_text(directory, settings.stop_tokens)
        return cls(text.tokens, stop_token_ids=text.stop_token_ids, vocab_size=text.vocab_size)

    @property
    def facts(self) -> ModelFacts:
        """Properties of a model without a chat format."""
        return ModelFacts(
            template_source="",
            template_arguments=frozenset(),
            literals=self.tokens.literals,
            stop_tokens=tuple(text for i in self.stop_token_ids if (text := self.tokens.literal_of(i))),
            tools_objection=self.objection,
            strips_thinking=False,
            shows_calls=False,
        )

    def render(self, *_: object, **__: object) -> list[int]:
        """Raise TemplateError."""
        raise TemplateError(self.objection, param="messages")

    bridge = render


class HiddenMessages:
    """Refuses messages that a renderer would drop silently.

    The set of dropped messages depends only on the conversation's outline, so each outline is checked once.
    """

    def __init__(self, renderer: str) -> None:
        """`renderer` is the renderer's name in error messages."""
        self._renderer = renderer
        self._known: _Remembered[tuple[int, ...]] = _Remembered(_MAX_OUTLINES)

    def check_prompt(
        self, messages: Sequence[Message], kind: list[JSON], write: Callable[[Sequence[Message]], str]
    ) -> None:
        """Raise TemplateError with the index of a message that `write` does not show.

        `kind` holds all other values that the prompt depends on.
        """
        for index in self._first_of(messages, ["prompt", *kind], write):
            raise TemplateError(
                f"{self._renderer} does not show message {index} (role {messages[index].role!r}) of this "
                "conversation to the model: move its text to a message that is shown",
                param=f"messages.{index}",
            )

    def check_bridge(
        self, appended: Sequence[Message], kind: list[JSON], write: Callable[[Sequence[Message]], str]
    ) -> None:
        """Raise TemplateNotPrefixStable for an appended message that `write` does not show after the turn."""
        for index in self._first_of(appended, ["bridge", *kind], write):
            raise TemplateNotPrefixStable(
                f"{self._renderer} does not show a {appended[index].role} message directly after a turn",
                param="messages",
            )

    def _first_of(
        self, messages: Sequence[Message], kind: list[JSON], write: Callable[[Sequence[Message]], str]
    ) -> tuple[int, ...]:
        outline = outline_of(messages)
        return self._known.get([kind, outline], "messages", lambda: first_hidden(outline, write))


class TemplateRenderer(ModelText):
    """Renders messages to ids and back with one model folder's template and tokenizer. See `from_directory`."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: Tokens,
        *,
        stop_token_ids: Sequence[int],
        vocab_size: int,
        settings: RenderSettings = RenderSettings(),
    ) -> None:
        """Check the template. Raises TemplateError, and TemplateNotPrefixStable with `OnUnstable.RAISE`.

        Only `on_unstable`, `thinking` and `stop_tokens` of `settings` are read: `template` holds the others.
        """
        super().__init__(tokens, stop_token_ids=stop_token_ids, vocab_size=vocab_size)
        self._template = template
        self._thinking = settings.thinking
        self._stops = [text for i in self._stop_token_ids if (text := tokens.literal_of(i))]
        self._definitions_of: _Remembered[list[JSON]] = _Remembered()
        if not settings.stop_tokens:
            self._adopt_stops()
        self._tried: _Remembered[tuple[PromptText, BridgeReport]] = _Remembered()
        self._hidden = HiddenMessages("the chat template")
        self._report = self._under(NO_KWARGS)[1]
        if self._report.difference is not None and settings.on_unstable is OnUnstable.RAISE:
            difference = tokens.unmask(self._report.difference)
            raise TemplateNotPrefixStable(
                f"the chat template is not prefix-stable: {difference}. To accept it, set "
                "chat.on_unstable_template to 'fork'"
            )

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        settings: RenderSettings = RenderSettings(),
    ) -> TemplateRenderer:
        """Create the renderer of a Hugging Face model folder. Raises TemplateError with the file name."""
        folder = Path(directory)
        text = model_text(folder, settings.stop_tokens)
        template = ChatTemplate.from_directory(
            folder, file=settings.template_file, kwargs=settings.kwargs, date=settings.date
        )
        return cls(
            template,
            text.tokens,
            stop_token_ids=text.stop_token_ids,
            vocab_size=text.vocab_size,
            settings=settings,
        )

    @property
    def facts(self) -> ModelFacts:
        """Properties of the folder's chat format with the renderer's own template arguments."""
        report = self._report
        return ModelFacts(
            template_source=self._template.source,
            template_arguments=self._template.arguments,
            literals=self.tokens.literals,
            stop_tokens=tuple(self._stops),
            tools_objection=self._unmasked(report.form.tools_objection),
            strips_thinking=report.strips_thinking,
            tool_turns=self._unmasked(report.tool_turns),
            user_turns=self._unmasked(report.user_turns),
            plain_turns=self._unmasked(report.plain_turns),
            thinking=self._thinking,
            shown_names=report.shown_names,
            shows_calls=report.form.shows_calls,
        )

    def _unmasked(self, problem: str | None) -> str | None:
        return None if problem is None else self.tokens.unmask(problem)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        template_kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        is_open: bool = False,
    ) -> list[int]:
        return self.tokens.encode(self.text(messages, tools, template_kwargs, is_open=is_open))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        template_kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        is_open: bool = False,
    ) -> str:
        """Return the complete prompt as masked text, which `ids` tokenizes.

        Raises TemplateError with the index of a message that the template does not show.
        """
        if not messages:
            raise InvalidRequest("there are no messages: send at least one", param="messages")
        prompts, definitions = self._under(template_kwargs)[0], self._definitions(tools)
        write = prompts.open_text if is_open else prompts.text
        text = write(messages, definitions)
        kind = [is_open, bool(tools), template_kwargs]
        self._hidden.check_prompt(messages, kind, lambda outline: write(outline, definitions))
        return text

    def bridge(
        self,
        appended: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        end: TurnEnd,
        template_kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        is_open: bool = False,
    ) -> list[int]:
        """See `Renderer.bridge`. The bridge begins with the template's stop token unless the turn ended with it."""
        if not appended or appended[0].role == "assistant":
            raise InvalidRequest(
                "a sampled turn must be followed by at least one message that is not an assistant message",
                param="messages",
            )
        text, report = self._under(template_kwargs)
        answers = appended[:-1] if is_open else appended
        if (problem := self._problem(report, answers, has_tools=bool(tools))) is not None:
            raise TemplateNotPrefixStable(problem, param="messages")
        definitions = self._definitions(tools)
        bridge = text.bridge(appended, definitions, end, is_open=is_open)
        # The check renders an outline, whose result depends on these arguments but not on the end of the turn.
        kind = [is_open, bool(tools), template_kwargs]
        self._hidden.check_bridge(
            appended, kind, lambda outline: text.bridge(outline, definitions, TurnEnd(), is_open=is_open)
        )
        return self.tokens.encode(bridge)

    def _under(self, template_kwargs: Mapping[str, JSON]) -> tuple[PromptText, BridgeReport]:
        """Return the template with a call's arguments, and the report of its check."""
        return self._tried.get(template_kwargs, "chat_template_kwargs", lambda: self._try(template_kwargs))

    def _try(self, template_kwargs: Mapping[str, JSON]) -> tuple[PromptText, BridgeReport]:
        check_kwargs(template_kwargs)

        def make(form: TemplateForm) -> PromptText:
            return PromptText(self._template, self.tokens, self._stops, form, template_kwargs)

        report = examine(make, self.tokens.encode)
        return make(report.form), report

    def _definitions(self, tools: Sequence[Mapping[str, JSON]]) -> list[JSON]:
        def make() -> list[JSON]:
            return [masked_tool(self.tokens, tool) for tool in tools]

        return self._definitions_of.get(list(tools), "tools", make) if tools else []

    def _problem(self, report: BridgeReport, appended: Sequence[Message], *, has_tools: bool) -> str | None:
        """Return the reason why these messages cannot be appended exactly; None if they can."""
        shown = "the chat template cannot append {} to a turn: {}".format
        if appended[0].role == "tool" and report.tool_turns is not None:
            return shown("a tool result", self.tokens.unmask(report.tool_turns))
        if report.strips_in_cycle and self._thinking is Thinking.TEMPLATE:
            return "'thinking' follows the chat template, which drops empty reasoning"
        if all(message.role == "tool" for message in appended):
            return None
        problem = report.user_turns if has_tools else report.plain_turns
        if problem is not None:
            return shown("a user message", self.tokens.unmask(problem))
        if report.strips_thinking and self._thinking is Thinking.TEMPLATE:
            return "'thinking' follows the chat template, which drops earlier reasoning at a user message"
        return None

    def _adopt_stops(self) -> None:
        """Add the special tokens that end rendered turns if no declared stop token does."""
        # Folders of base models declare a different token than the template writes, and some folders of gpt-oss
        # declare the end of answers but not the end of calls.
        for tools in ((), TOOLS):
            prompts = PromptText(self._template, self.tokens, self._stops)
            closing = prompts.closing_special(self._definitions(tools))
            token_id = None if closing is None or closing in self._stops else self.tokens.id_of(closing)
            if closing is not None and token_id is not None:
                _log.info(
                    "added a stop token that the chat template writes and the model folder does not declare",
                    stop_token=closing,
                )
                self._stop_token_ids = (*self._stop_token_ids, token_id)
                self._stops.append(closing)


class _Remembered(Generic[T]):
    """An LRU cache of `max_values` values derived from JSON. Thread-safe."""

    def __init__(self, max_values: int = _MAX_REMEMBERED) -> None:
        self._max_values = max_values
        self._values: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, value: object, param: str, make: Callable[[], T]) -> T:
        """Return the result cached for `value`, or call `make` and cache it.

        Raises InvalidRequest if `value` is not JSON or too deeply nested.
        """
        try:
            key = orjson.dumps(value)
        except TypeError as error:
            raise InvalidRequest(f"{param} must be JSON: {error}", param=param) from error
        with self._lock:
            if (cached := self._values.get(key)) is not None:
                self._values.move_to_end(key)
                return cached
        try:
            result = make()  # without the lock: a template check takes milliseconds
        except RecursionError as error:
            raise InvalidRequest(f"{param} are nested too deeply", param=param) from error
        with self._lock:
            self._values[key] = result
            if len(self._values) > self._max_values:
                self._values.popitem(last=False)
        return result


def _tokens_of(folder: Path) -> Tokens:
    try:
        return Tokens(Tokenizer.from_buffer(tokenizer_json(folder)))
    except TemplateError:
        raise
    except Exception as error:  # the Rust library raises bare Exception
        raise TemplateError(f"{folder / 'tokenizer.json'}: {error}") from error


def _stop_token_ids(folder: Path, config: Mapping[str, JSON], tokens: Tokens, chosen: Sequence[str]) -> list[int]:
    if chosen:
        ids = [tokens.id_of(text) for text in chosen]
        if None in ids:
            raise TemplateError(
                f"stop token {chosen[ids.index(None)]!r} is not in the tokenizer's vocabulary: "
                "change chat.stop_tokens"
            )
        return list(dict.fromkeys(i for i in ids if i is not None))
    declared = read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = config.get("eos_token_id")
    candidates = list(declared) if isinstance(declared, list) else [declared]
    text = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    candidates.append(tokens.id_of(text) if text is not None else None)
    return list(dict.fromkeys(i for i in candidates if isinstance(i, int)))


def _int_or(value: JSON, default: int) -> int:
    return value if isinstance(value, int) else default
