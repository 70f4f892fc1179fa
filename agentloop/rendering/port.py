"""The renderer protocols: messages to token ids, the bridge between turns, and token ids to text.

Implementations: `TemplateRenderer` (the model folder's chat template), a class given by import path, and adapters
over libraries. Methods may be called from several threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentloop.parsers.base import DecodedText
from agentloop.rendering.tokenizer import TextDecoder
from agentloop.types import JSON, Message, Thinking

NO_KWARGS: Mapping[str, JSON] = {}
# Roles whose messages may have a `name`; tool results always have one.
NAMED_ROLES = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The state at the end of a sampled turn, from which a bridge continues."""

    stop_id: int | None = None  # the sampled stop token; None if the turn was truncated
    is_thinking: bool = False  # the turn was truncated inside its reasoning
    written_ids: tuple[tuple[str, str], ...] = ()  # per call: the id that we assigned, the id that the policy wrote
    num_calls: int = 0  # calls in the conversation before this turn: some templates number tool results
    # The text that completes a turn which was stopped after its first call: the rest of the call and the end of the
    # section of calls. None for all other turns.
    closing: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of one model's chat format, used to choose a parser and in reports.

    `tool_turns`, `user_turns` and `plain_turns` give the reason why a turn cannot be bridged exactly; None if it
    can.
    """

    template_source: str  # empty if no template is used
    template_arguments: frozenset[str]  # names of the additional arguments that the template reads
    literals: frozenset[str]  # the added tokens that are delimiters: control tokens and markup such as `<think>`
    stop_tokens: tuple[str, ...]
    tools_objection: str | None  # why tools cannot be shown or calls cannot be parsed; None if both work
    strips_thinking: bool  # the template's own rendering drops reasoning before the last user turn
    tool_turns: str | None = None  # turns followed by tool results
    user_turns: str | None = None  # turns followed by a user message, in a conversation with tools
    plain_turns: str | None = None  # turns followed by a user message, in a conversation without tools
    thinking: Thinking = Thinking.KEEP
    shown_names: frozenset[str] = NAMED_ROLES  # the roles whose messages' `name` is shown to the policy
    shows_calls: bool = True  # false: a complete rendering shows earlier calls as the text that the policy wrote

    @property
    def supports_tools(self) -> bool:
        """True if conversations may have tools, calls and tool results."""
        return self.tools_objection is None


class TokenText(Protocol):
    """One tokenizer: ids to text and back, exactly."""

    @property
    def vocab_size(self) -> int:
        """The upper bound (exclusive) of sampled ids: the larger of the model's and the tokenizer's sizes."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn, the ids that the model folder declares first. Never empty."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that the tokenizer flags as special, which `skip_special_tokens` removes."""

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are spelled out. No BOS or EOS token is added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens, without stripping."""

    def decode_with_offsets(self, ids: Sequence[int]) -> DecodedText:
        """Return `decode(ids)`, with the number of characters complete after each id, in linear time."""

    def decoder(self) -> TextDecoder:
        """Return a new incremental decoder."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text. They may be part of a character."""


class Renderer(TokenText, Protocol):
    """One model's renderer of messages to ids, on top of its tokenizer."""

    @property
    def facts(self) -> ModelFacts:
        """Properties of the model's chat format with the renderer's own template arguments."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        template_kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        is_open: bool = False,
    ) -> list[int]:
        """Return the ids of the complete prompt with its generation prompt, in time linear in its text.

        With `is_open`, the last message is the beginning of the reply, and the prompt ends with its content. Raises
        InvalidRequest for messages that no template can render, and TemplateError for messages that this template
        refuses.
        """

    def bridge(
        self,
        appended: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        end: TurnEnd,
        template_kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        is_open: bool = False,
    ) -> list[int]:
        """Return the ids between the sampled ids of an assistant turn and those of the next turn.

        `is_open` as in `render`. Raises the errors of `render`, and TemplateNotPrefixStable if the appended
        messages cannot be shown as the model's own rendering would show them. The caller then renders the complete
        conversation and starts a new branch.
        """
