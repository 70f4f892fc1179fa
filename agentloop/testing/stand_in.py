"""Policies without a served model, and their engine, which turns messages into token ids, one per byte."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, cast

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentloop.engine.interface import OnProgress
from agentloop.rendering.prompt_text import ChatTemplate
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.rendering.tokenizer import Tokens
from agentloop.rollout.environment import ScriptedTurn
from agentloop.rollout.trajectory_run import TrajectoryRun
from agentloop.types import (
    JSON,
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    ToolCall,
    ToolCallStatus,
    WeightVersionSpan,
)

TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()
PARSER = "hermes"
_SPECIAL = ("<|im_start|>", "<|im_end|>")
_MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class Policy(Protocol):
    """A policy that receives and returns messages. One object plays one episode."""

    @property
    def name(self) -> str:
        """The policy's name, recorded as the engine of its turns."""

    @property
    def has_ids(self) -> bool:
        """True if the record may contain byte ids as the policy's tokens."""

    async def turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> Message:
        """Return the policy's next message of a conversation."""


class ScriptedTurns:
    """A policy that returns the given turns in order, and then repeats the last one."""

    def __init__(self, turns: Sequence[ScriptedTurn | Message], name: str = "scripted") -> None:
        self.name, self.has_ids = name, name == "scripted"
        self._left = deque(map(message_of, turns)) or deque([Message("assistant")])

    async def turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> Message:
        return self._left.popleft() if len(self._left) > 1 else self._left[0]


def message_of(turn: ScriptedTurn | Message) -> Message:
    """Return a scripted turn as an assistant message."""
    if isinstance(turn, Message):
        return turn
    if isinstance(turn, str):
        return Message("assistant", turn)
    return Message("assistant", tool_calls=(turn,) if isinstance(turn, ToolCall) else tuple(turn))


@cache
def byte_renderer() -> TemplateRenderer:
    """Return a renderer in the Hermes format whose tokens are bytes."""
    vocabulary = {char: token_id for token_id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKUP])
    stop = [cast(int, tokenizer.token_to_id(_SPECIAL[1]))]
    tokens = Tokens(tokenizer)
    return TemplateRenderer(ChatTemplate(TEMPLATE, {}), tokens, stop_token_ids=stop, vocab_size=tokens.num_ids)


class PolicyEngine:
    """An engine that samples turns from a policy, and calls `on_message` once per message of the conversation."""

    run: TrajectoryRun  # set before the first turn

    def __init__(self, policy: Policy, on_message: Callable[[Message], None]) -> None:
        self._policy = policy
        self._on_message = on_message
        self._num_told = 0

    def tell(self, messages: Sequence[Message]) -> None:
        """Call `on_message` for the new messages of a conversation."""
        for message in messages[self._num_told :]:
            self._on_message(message)
        self._num_told = len(messages)

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        ctx, renderer = self.run.ctx, byte_renderer()
        assert ctx is not None, "the loop is running"
        self.tell(ctx.messages)
        message = await self._policy.turn(ctx.messages, ctx.tool_definitions)
        ids = (*renderer.ids(_written(message)), *renderer.stop_token_ids)[: request.sampling.max_tokens]
        spans = (WeightVersionSpan(0, 0, len(ids)),)
        is_complete = ids[-1] in renderer.stop_token_ids
        reason = FinishReason.STOP if is_complete else FinishReason.LENGTH
        logprobs = (0.0,) * len(ids)
        return Generation(request.request_id, ids, logprobs, spans, reason, engine=self._policy.name)

    async def abort(self, request_id: str) -> None:
        """Do nothing: cancelling `generate` ends the turn."""


def _written(message: Message) -> str:
    """Return the text of a turn in the Hermes format."""
    return "\n".join(filter(None, (message.content, *map(_written_call, message.tool_calls))))


def _written_call(call: ToolCall) -> str:
    if call.status is ToolCallStatus.MALFORMED:
        return call.text
    body = orjson.dumps({"name": call.name, "arguments": dict(call.arguments)}).decode()
    return f"<tool_call>\n{body}\n</tool_call>"
