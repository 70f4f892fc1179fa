"""The renderer as its users see it: messages to ids, the bridge between turns, and ids to text.

There are three sources of renderers: our own, by the model folder's chat template (`TemplateRenderer`); an import
path; and adapters over libraries. All have these two protocols; methods may be called from several threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentloop.parsers.base import DecodedText
from agentloop.rendering.tokenizer import TextDecoder
from agentloop.types import JSON, Message, Thinking

NO_KWARGS: Mapping[str, JSON] = {}
NAMED_ROLES = frozenset(
    {"system", "user", "assistant"}
)  # of messages that may have a `name`, beside tools' answers


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of a sampled turn, from which a bridge continues.

    `stop_id` is the stop token that was sampled last, None for a turn that was cut. `is_thinking`: it was cut
    inside a thought. `written_ids` are pairs of the ids of its calls: ours, and the policy's. `num_calls` are those
    of the conversation before it: some templates number results. `closing` is the text that completes a turn which
    was ended after its first call: the rest of the call, and the end of a section of calls. None for other turns.
    """

    stop_id: int | None = None
    is_thinking: bool = False
    written_ids: tuple[tuple[str, str], ...] = ()
    num_calls: int = 0
    closing: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of one model's chat format, for the choice of a parser and for reports.

    The three `*_turns` say why turns that tools answer, that a user answers under tools, and that a user answers
    without tools cannot be bridged; None: they can, exactly.
    """

    template_source: str  # empty where no template is used
    template_arguments: frozenset[str]  # the names of the further arguments that it reads
    literals: frozenset[str]  # the added tokens that are marks: control tokens and markup such as `<think>`
    stop_tokens: tuple[str, ...]
    tools_objection: str | None  # why tools cannot be shown, or their calls not be read; None: they can
    strips_thinking: bool  # its own rendering drops thoughts before the last user turn
    tool_turns: str | None = None
    user_turns: str | None = None
    plain_turns: str | None = None
    thinking: Thinking = Thinking.KEEP
    shown_names: frozenset[str] = NAMED_ROLES  # the roles whose messages' `name` is shown to the policy
    shows_calls: bool = True  # false: a whole rendering has earlier calls as the text that the policy wrote

    @property
    def supports_tools(self) -> bool:
        """True if conversations may have tools, calls and their answers."""
        return self.tools_objection is None


class TokenText(Protocol):
    """One tokenizer: ids to text and back, exactly."""

    @property
    def vocab_size(self) -> int:
        """Ids an engine can sample are below this: the model's size, padding included, or the tokenizer's."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn, the model's own first. Never empty."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that the tokenizer itself calls special, as `skip_special_tokens` means it."""

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are spelled out; nothing is added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included, nothing stripped."""

    def decode_with_offsets(self, ids: Sequence[int]) -> DecodedText:
        """Return `decode(ids)`, with the number of characters complete after each id, in linear time."""

    def decoder(self) -> TextDecoder:
        """Make a decoder for ids that come in pieces."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text: they may be a part of a character."""


class Renderer(TokenText, Protocol):
    """One model's renderer of messages to ids, on top of its tokenizer."""

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model's chat format, under the renderer's own template arguments."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]],
        template_kwargs: Mapping[str, JSON] = NO_KWARGS,
        *,
        is_open: bool = False,
    ) -> list[int]:
        """Return the ids of the whole prompt, generation prompt included. Time grows with all of the text.

        `is_open`: the last message is the beginning of the reply, and the prompt ends with its content. Raises
        InvalidRequest for what cannot be rendered by any template, TemplateError for what this one refuses.
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
        """Return the ids between an assistant turn's sampled ids and the next turn's; none of them are sampled.

        `is_open` as for `render`. Raises as `render`, and TemplateNotPrefixStable where these messages cannot be
        appended as the model's own rendering would show them: the caller then renders the whole conversation, and
        forks.
        """
