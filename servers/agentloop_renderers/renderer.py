"""Adapter for the renderers of the `renderers` package, which has a hand-written renderer per model family.

The package (Apache-2.0, https://pypi.org/project/renderers) renders, bridges and parses token ids without a
template. It gets our tokenizer and masked messages: it encodes through `Tokens.encode`, so content never becomes
control tokens. This module is imported only if a config names it; the extra `renderers` installs the package.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
from renderers import config_from_name, create_renderer, template_field_names
from renderers.base import MODEL_RENDERER_MAP

from agentloop.errors import (
    AgentLoopError,
    InvalidRequest,
    TemplateError,
    TemplateNotPrefixStable,
    UnsupportedParameter,
)
from agentloop.rendering.port import NO_KWARGS, ModelFacts, TurnEnd
from agentloop.rendering.prompt_text import ChatTemplate, PromptText, TemplateForm, masked_tool
from agentloop.rendering.renderer import HiddenMessages, ModelText, RenderSettings, model_text
from agentloop.rendering.template_check import examine
from agentloop.rendering.tokenizer import Tokens
from agentloop.types import JSON, Message, Thinking

T = TypeVar("T")

_UNUSABLE = {
    "default": "it only applies the chat template: use `renderer: template`",
    "custom": "use the renderer's own import path",
    "gpt-oss": "it encodes with a vocabulary that it downloads instead of the model's tokenizer",
}
_MAX_KWARGS = 64  # number of cached renderers, one for each set of template arguments
_TEXT = "one sampled turn"
_NUM_LAST = 16  # tokens
_QUESTION = Message("user", "one question")
# The delimiters of all supported families.
THINK_OPEN, THINK_CLOSE = ("<think>", "</think>")


def family_of(name: str, folder: Path) -> tuple[str, str]:
    """Return the library's name of a model family, and the published name of the model.

    `auto` looks up the folder's name, which must be the model's name. Raises InvalidRequest, naming the known
    families.
    """
    models = {model.rpartition("/")[2]: model for model in MODEL_RENDERER_MAP}
    model = models.get(folder.name, folder.name)
    families = ", ".join(sorted(set(MODEL_RENDERER_MAP.values()) - set(_UNUSABLE)))
    if name == "auto" and model not in MODEL_RENDERER_MAP:
        raise InvalidRequest(
            f"renderers:auto knows no model named {folder.name!r}: use renderers:FAMILY with one of {families}",
            param="renderer",
        )
    family = MODEL_RENDERER_MAP[model] if name == "auto" else name
    if (reason := _UNUSABLE.get(family)) is not None:
        raise InvalidRequest(f"renderers:{family} cannot be used: {reason}", param="renderer")
    return family, model


class LibraryTokenizer:
    """Our tokenizer with the interface that the library expects. It has no offsets, which only attribution
    needs."""

    unk_token_id = None

    def __init__(self, tokens: Tokens, model: str, eos_token_id: int) -> None:
        self._tokens = tokens
        self.name_or_path = model  # some renderers depend on the size of the model
        self.eos_token_id = eos_token_id

    def encode(self, text: str, **_: object) -> list[int]:
        """Encode a text with masked content, without adding special tokens."""
        return self._tokens.encode(text)

    def decode(self, token_ids: int | Sequence[int], **_: object) -> str:
        """Decode ids, including special tokens."""
        return self._tokens.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of a token or of each token in a sequence; None for unknown tokens."""
        id_of = self._tokens.id_of
        return id_of(tokens) if isinstance(tokens, str) else [id_of(token) for token in tokens]


class Library:
    """The library's renderer of one model family, with one cached instance per set of template arguments.
    Thread-safe."""

    def __init__(self, family: str, model: str, text: ModelText, settings: RenderSettings) -> None:
        """Raise InvalidRequest for a family or arguments that the library rejects, and for a tokenizer without the
        family's tokens."""
        self.family = family
        self._tokenizer = LibraryTokenizer(text.tokens, model, text.stop_token_ids[0])
        self._settings = settings
        self._made: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.arguments: frozenset[str] = template_field_names(self.under(NO_KWARGS).config)

    def under(self, kwargs: Mapping[str, JSON]) -> Any:
        """Return the library's renderer for template arguments, which take precedence over the service's own."""
        key = orjson.dumps(dict(kwargs), option=orjson.OPT_SORT_KEYS)
        with self._lock:
            renderer = self._made.pop(key, None)
            if renderer is None:
                renderer = self._make({**self._settings.kwargs, **kwargs})
            self._made[key] = renderer
            if len(self._made) > _MAX_KWARGS:
                self._made.popitem(last=False)
        return renderer

    def run(self, work: Callable[[], T]) -> T:
        """Run code of the library, which can raise any exception, and convert its exceptions to TemplateError."""
        try:
            return work()
        except AgentLoopError:
            raise
        except Exception as error:
            raise TemplateError(f"renderers:{self.family} failed: {error or type(error).__name__}") from error

    def _make(self, kwargs: Mapping[str, JSON]) -> Any:
        keeps = self._settings.thinking is Thinking.KEEP
        fields: dict[str, Any] = {"thinking_retention": "all"} if keeps else {}
        try:
            config = type(config_from_name(self.family))
            if "date_string" in config.model_fields:
                fields["date_string"] = f"{self._settings.date:%d %b %Y}"
            return create_renderer(self._tokenizer, config(**fields), chat_template_kwargs=kwargs)
        except Exception as error:
            raise InvalidRequest(f"renderers:{self.family} cannot be used: {error}", param="renderer") from error


class LibraryRenderer(ModelText):
    """Implements `agentloop.rendering.Renderer` with a renderer of the library."""

    def __init__(self, folder: Path, family: str, settings: RenderSettings) -> None:
        """`family` is the library's name, or `auto`. Raises InvalidRequest and TemplateError."""
        text = model_text(folder, settings.stop_tokens)
        super().__init__(text.tokens, stop_token_ids=text.stop_token_ids, vocab_size=text.vocab_size)
        self.library = Library(*family_of(family, folder), self, settings)
        self._prompts = PromptText(ChatTemplate("", {}), text.tokens, (), TemplateForm())  # used for `entries` only
        self._hidden = HiddenMessages(f"renderers:{self.library.family}")
        self._has_tools = True
        report = examine(lambda _: _Conversation(self), self.ids)
        self._has_tools = report.form.supports_tools
        self.facts = ModelFacts(
            template_source="",
            template_arguments=self.library.arguments,
            literals=self.tokens.literals,
            stop_tokens=tuple(self.decode([token_id]) for token_id in self.stop_token_ids),
            tools_objection=report.form.tools_objection,
            strips_thinking=report.strips_thinking,
            tool_turns=report.tool_turns,
            user_turns=report.user_turns,
            plain_turns=report.plain_turns,
            thinking=settings.thinking,
            shown_names=report.shown_names,
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        template_kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        is_open: bool = False,
    ) -> list[int]:
        """Implement `Renderer.render`."""
        if not messages:
            raise InvalidRequest("messages is empty: give at least one message", param="messages")
        self._refuse_open(is_open)
        definitions = self._definitions(tools)

        def write(conversation: Sequence[Message]) -> list[int]:
            return self.rendered(conversation, definitions, template_kwargs, adds_generation_prompt=True)

        ids = write(messages)
        kind = [bool(tools), template_kwargs]
        self._hidden.check_prompt(messages, kind, lambda outline: self.decode(write(outline)))
        return ids

    def bridge(
        self,
        appended: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        end: TurnEnd,
        template_kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        is_open: bool = False,
    ) -> list[int]:
        """Implement `Renderer.bridge`. The library decides which stop tokens close a turn."""
        if not appended or appended[0].role == "assistant":
            raise InvalidRequest(
                "the messages after a sampled turn must not be empty or start with an assistant message",
                param="messages",
            )
        self._refuse_open(is_open)
        definitions = self._definitions(tools)

        def write(messages: Sequence[Message]) -> list[int]:
            return self.bridged(messages, definitions, end, template_kwargs)

        ids = write(appended)
        kind = [bool(tools), template_kwargs]
        self._hidden.check_bridge(appended, kind, lambda outline: self.decode(write(outline)))
        return ids

    def _refuse_open(self, is_open: bool) -> None:
        if is_open:
            raise UnsupportedParameter(
                f"continue_final_message is unsupported in renderers:{self.library.family}: it closes all messages",
                param="continue_final_message",
            )

    def rendered(
        self,
        messages: Sequence[Message],
        definitions: Sequence[JSON],
        kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        adds_generation_prompt: bool,
    ) -> list[int]:
        """Render with masked tool definitions. Raises the errors of `render`."""
        if not self._has_tools and (definitions or any(m.role == "tool" or m.tool_calls for m in messages)):
            raise TemplateError(
                f"renderers:{self.library.family} does not support tools: remove the tools, or set chat.renderer to"
                " 'template'",
                param="tools",
            )
        renderer, entries = self.library.under(kwargs), self._prompts.entries(messages)
        return self.library.run(
            lambda: list(
                renderer.render_ids(
                    entries, tools=list(definitions) or None, add_generation_prompt=adds_generation_prompt
                )
            )
        )

    def bridged(
        self,
        appended: Sequence[Message],
        definitions: Sequence[JSON],
        end: TurnEnd,
        kwargs: Mapping[str, JSON] = NO_KWARGS,
    ) -> list[int]:
        """Bridge with masked tool definitions. Raises the errors of `bridge`."""
        # A turn that was cut gets the stop token with which the library itself would close it.
        if end.stop_id is None and (stop_id := self._own_stop(appended, definitions, kwargs)) is not None:
            closing = [*self.ids(THINK_CLOSE if end.is_thinking else end.closing or ""), stop_id]
            return closing + self.bridged(appended, definitions, TurnEnd(stop_id), kwargs)
        if not self._has_tools and any(message.role == "tool" for message in appended):
            raise TemplateError(
                f"renderers:{self.library.family} does not support tools: remove the tool results, or set"
                " chat.renderer to 'template'",
                param="tools",
            )
        # The library requires the preceding ids: give it a synthetic prompt and turn.
        prompt = self.rendered([_QUESTION], definitions, kwargs, adds_generation_prompt=True)
        is_open = self.decode(prompt[-_NUM_LAST:]).rstrip().endswith(THINK_OPEN)
        reasoning = ("" if is_open else THINK_OPEN) + ("" if end.is_thinking else THINK_CLOSE)
        turn = [*self.ids(reasoning + _TEXT), *([] if end.stop_id is None else [end.stop_id])]
        renderer, entries = self.library.under(kwargs), self._prompts.entries(appended)
        bridged = self.library.run(
            lambda: renderer.bridge_to_next_turn(prompt, turn, entries, tools=list(definitions) or None)
        )
        num_before = len(prompt) + len(turn)
        if bridged is None or bridged.token_ids[:num_before] != [*prompt, *turn]:
            raise TemplateNotPrefixStable(
                f"renderers:{self.library.family} cannot append these messages: it renders the conversation again",
                param="messages",
            )
        return list(bridged.token_ids[num_before:])

    def _own_stop(
        self, appended: Sequence[Message], definitions: Sequence[JSON], kwargs: Mapping[str, JSON]
    ) -> int | None:
        """Return the stop token between a turn and these messages in a complete rendering; None if there is no such
        token."""
        messages = [_QUESTION, Message("assistant", _TEXT), *appended]
        ids = self.rendered(messages, definitions, kwargs, adds_generation_prompt=True)
        decoded = self.decode_with_offsets(ids)
        _, turn_end = decoded.token_span(0, decoded.text.find(_TEXT) + len(_TEXT))
        return next((token_id for token_id in ids[turn_end:] if token_id in self.stop_token_ids), None)

    def _definitions(self, tools: Sequence[Mapping[str, JSON]]) -> list[JSON]:
        try:
            return [masked_tool(self.tokens, tool) for tool in tools]
        except RecursionError as error:
            raise InvalidRequest("tools are nested too deeply: flatten their schemas", param="tools") from error


class _Conversation:
    """Implements `RenderedConversation` with the library, for the template check of bridges."""

    def __init__(self, renderer: LibraryRenderer) -> None:
        self._renderer = renderer

    def text(
        self, messages: Sequence[Message], definitions: Sequence[JSON], *, adds_generation_prompt: bool = True
    ) -> str:
        """Implement `RenderedConversation.text`."""
        ids = self._renderer.rendered(messages, definitions, adds_generation_prompt=adds_generation_prompt)
        return self._renderer.decode(ids)

    def bridge(self, appended: Sequence[Message], definitions: Sequence[JSON], end: TurnEnd) -> str:
        """Implement `RenderedConversation.bridge`."""
        return self._renderer.decode(self._renderer.bridged(appended, definitions, end))
