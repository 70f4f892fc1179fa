"""Values of a trajectory in the making: turns as nodes of a graph, and the model calls that made them.

They go to disk through `codec`. Their size is counted in tokens and characters: `num_chars` is a bound for memory,
not a count of what is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from agentloop.images import ImageSpan
from agentloop.types import (
    JSON,
    FinishReason,
    FloatArray,
    IntArray,
    Message,
    SplitReason,
    ToolCall,
    ToolCallStatus,
    TopLogprobs,
    TurnTimes,
    WeightVersionSpan,
)
from agentloop.values.sampling import TurnSampling

_OBJECT_CHARS = 64  # a message, a call, or a JSON value of any kind: what it takes up beside its text


@dataclass(frozen=True, slots=True)
class Split:
    """The place where a prompt could not extend a path. `detail` shows the first difference."""

    reason: SplitReason
    from_node: str | None = None  # the turn whose history is nearest
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled turn. Arrays have one length; `weight_versions` tile `[0, n)`.

    `message` is as clients see it: content ends before a stop string. The ids end with the token that completed the
    stop string (`stop_text`), with a stop token (`is_closed`: the model's own), or where `max_tokens` cut them.
    """

    message: Message
    token_ids: IntArray
    logprobs: FloatArray
    weight_versions: tuple[WeightVersionSpan, ...]
    finish_reason: FinishReason  # ABORT only where a turn was not to go on after one
    is_closed: bool
    stop_text: str = ""
    num_reasoning_tokens: int = 0
    cached_tokens: int = 0
    replica_id: str = ""
    top_logprobs: TopLogprobs = ()
    raw_logprobs: FloatArray | None = None  # under the plain softmax; None unless the engine gave both
    sampling: TurnSampling | None = None  # None where an earlier service wrote it down
    seed: int | None = None
    unread_calls: tuple[ToolCall, ...] = ()  # malformed ones that stand in the content, without their text
    engine: str = ""  # the replica's, as in `Generation`
    times: TurnTimes | None = None
    traceparent: str = ""  # the W3C trace context of the call that asked for it; empty: none
    constraint: str = ""  # a text that `sampling` has by its digest alone; of the graph's first turn under it
    quantization: str = ""  # as in `Generation`
    closing: str | None = (
        None  # of a turn ended after its first call: the rest of its text, which the next prompt has
    )

    @property
    def content(self) -> str:
        """The message's text, without thoughts and calls."""
        return self.message.content

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the message, malformed ones too: `LoopContext.run_tools` answers them."""
        return self.message.tool_calls

    @property
    def has_unread_call(self) -> bool:
        """True if a call in it cannot be read, however clients see it."""
        return bool(self.unread_calls) or any(call.status is ToolCallStatus.MALFORMED for call in self.calls)


@dataclass(frozen=True, slots=True)
class Node:
    """A turn and what was observed before it. Its path: that of its parent, then `observed_ids`, then the reply's.

    A root has the whole prompt in `observed` and `observed_ids`. A reply that the client began (`begun`) has that
    text's tokens at the end of `observed_ids`; its own message is what was sampled.
    """

    node_id: str  # unique within the session
    call_id: str
    choice_index: int
    parent_id: str | None
    observed: tuple[Message, ...]
    observed_ids: IntArray
    reply: Reply
    tools_key: bytes = b""  # a digest of the tool definitions
    split: Split | None = None
    images: tuple[ImageSpan, ...] = ()  # offsets into `observed_ids`
    begun: str = ""

    @property
    def message(self) -> Message:
        """The assistant's whole message, as clients echo it."""
        said = self.reply.message
        return replace(said, content=self.begun + said.content) if self.begun else said

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that it adds to its path."""
        return (*self.observed, self.message)


class ModelCallState(StrEnum):
    """The state of a model call that was accepted."""

    OPEN = "open"
    COMMITTED = "committed"
    FAILED = "failed"  # its client left, or the engine gave up: tokens are lost unless a retry commits


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One accepted call; its nodes are those with its `call_id`."""

    call_id: str
    digest: bytes
    created_at: int
    state: ModelCallState
    error: str = ""
    generate_s: float = 0.0  # spent on sampling, whatever came of it


def message_chars(message: Message) -> int:
    """Return the characters of a message, with a share for each object that it is made of."""
    texts = (message.content, message.reasoning, message.tool_call_id or "", message.name or "")
    num_objects = 1 + 2 * len(message.images)  # an image's reference, and its hash
    return num_objects * _OBJECT_CHARS + sum(map(len, texts)) + sum(map(_call_chars, message.tool_calls))


def json_chars(value: JSON) -> int:
    """Return the characters of a JSON value, with a share for each value within it."""
    if isinstance(value, str):
        return _OBJECT_CHARS + len(value)
    if isinstance(value, Mapping):
        return _OBJECT_CHARS + sum(_OBJECT_CHARS + len(key) + json_chars(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return _OBJECT_CHARS + sum(map(json_chars, value))
    return _OBJECT_CHARS


def _call_chars(call: ToolCall) -> int:
    texts = (call.id, call.name, call.text, call.error or "")
    return _OBJECT_CHARS + sum(map(len, texts)) + json_chars(call.arguments)
