"""Turns as nodes of a graph, the model calls that made them, and the keys by which histories are compared.

A client that echoes a history may serialize tool arguments again, send null for empty content, trim text, and drop
reasoning and call ids. These are not changes of the history, so a loose key leaves them out. A strict key has call
ids and the exact text. Neither key has the reasoning or a tool message's name, for which the chat format has no
field.

Nodes are stored by `codec`. Their size is counted in tokens and characters; `num_chars` bounds memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

import orjson

from agentloop.errors import InvalidRequest
from agentloop.images import ImageSpan
from agentloop.types import (
    JSON,
    FinishReason,
    FloatArray,
    IntArray,
    Message,
    PathKind,
    SplitReason,
    ToolCall,
    ToolCallStatus,
    TopLogprobs,
    TurnTimes,
    WeightVersionSpan,
)
from agentloop.values.aux_rows import PackedAux
from agentloop.values.sampling import TurnSampling

_KEY_BYTES = 16
_MAX_WHOLE_FLOAT = 2.0**63  # whole floats above it stay floats: no client writes them as integers
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_SIMPLE = {str, int, bool, type(None)}  # types that are canonical already
_FLOAT = re.compile(rb"[0-9][.e]")  # every float that orjson writes has this; so may a string
_big_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def canonical_role(role: str) -> str:
    """Return the role in templates: a developer message is a system message."""
    return "system" if role == "developer" else role


def canonical_json(value: JSON) -> str:
    """Return one line of JSON, equal for JSON-equal values: keys sorted, 2.0 and 2e0 as 2; true is not 1.

    Raises InvalidRequest if it is nested too deeply.
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        if _FLOAT.search(text) is None:  # it is canonical already
            return text.decode()
    except orjson.JSONEncodeError:
        pass  # the slow way below handles it
    try:
        plain = _plain(value)
        try:
            return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS).decode()
        except orjson.JSONEncodeError:  # integers of more than 64 bits, lone surrogates, hundreds of levels
            return _big_encoder.encode(plain)
    except RecursionError as error:
        raise InvalidRequest("arguments or tools are nested too deeply", param="messages") from error


def message_key(message: Message, *, is_strict: bool = False) -> bytes:
    """Return a digest that is equal, in all processes, for messages that are the same turn."""
    role = canonical_role(message.role)
    name = None if role == "tool" else message.name
    call_id = message.tool_call_id if is_strict else None
    text = message.content if is_strict else message.content.strip()
    if not message.tool_calls and name is None and call_id is None and not message.images and role in _ROLES:
        head = role
    else:
        parts = [role, name, [_call(call, is_strict) for call in message.tool_calls], call_id]
        head = canonical_json([*parts, _images(message, text)] if message.images else parts)
    # The head has no line feed, so no text can be taken for a part of it.
    return blake2b(f"{head}\n{text}".encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()


def tools_key(tools: Sequence[Mapping[str, JSON]]) -> bytes:
    """Return a digest of tool definitions in their order; empty for none."""
    if not tools:
        return b""
    return blake2b(canonical_json(list(tools)).encode(), digest_size=_KEY_BYTES).digest()


def _images(message: Message, text: str) -> list[JSON]:
    """Return the images with their positions in `text`, which is the message's content, possibly stripped."""
    start = 0 if text == message.content else len(message.content) - len(message.content.lstrip())
    return [[image.sha256, min(max(image.at - start, 0), len(text))] for image in message.images]


def _call(call: ToolCall, is_strict: bool) -> list[JSON]:
    entry: list[JSON]
    if call.status is ToolCallStatus.MALFORMED and (arguments := _whole_arguments(call)) is not None:
        entry = [call.name, arguments]
    elif call.status is ToolCallStatus.MALFORMED:
        written = call.text if call.partial_arguments is None else call.partial_arguments
        entry = [written if is_strict else written.strip()]
    else:
        entry = [call.name, call.arguments]
    return [*entry, call.id] if is_strict else entry


def _whole_arguments(call: ToolCall) -> dict[str, JSON] | None:
    """Return the arguments of a call that was cut, if they are complete: a client can echo them."""
    if call.partial_arguments is None:
        return None
    if not call.partial_arguments.strip():
        return {}
    try:
        read = orjson.loads(call.partial_arguments)
    except orjson.JSONDecodeError:
        return None
    return read if isinstance(read, dict) else None


def _plain(value: JSON) -> JSON:
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE_FLOAT else value
    if isinstance(value, Mapping):
        return {key: item if type(item) in _SIMPLE else _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in _SIMPLE else _plain(item) for item in value]
    return value


_OBJECT_CHARS = 64  # memory of a message, a call or a JSON value, without its text


@dataclass(frozen=True, slots=True)
class Split:
    """The reason why a prompt could not extend a path. `detail` shows the first difference."""

    reason: SplitReason
    from_node: str | None = None  # the turn with the most similar history
    detail: str = ""


PARENT_TURN_HEADER = "x-parent-turn"
PARENT_KIND_HEADER = "x-parent-kind"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The client's declaration of a conversation's place in the lineage, from the headers of its calls."""

    parent_turn: str = ""  # the turn that the conversation follows; empty: not declared
    agent: str = ""  # the client's id of the agent that makes the call; empty: the main agent, or not declared
    parent_agent: str | None = (
        None  # the id of the agent that started it, "" for the main agent; None: not declared
    )
    kind: PathKind | None = None  # the relation to `parent_turn`; None: not declared
    parent_header: str = ""  # the header that names the parent agent, for errors


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled turn. All arrays have the same length; `weight_versions` tile `[0, n)`.

    `message` is the clients' view: its content ends before a stop string. The ids end with the token that completed
    the stop string (`stop_text`), with a stop token (`is_closed`: the model's own), or where `max_tokens` cut them.
    """

    message: Message
    token_ids: IntArray
    logprobs: FloatArray
    weight_versions: tuple[WeightVersionSpan, ...]
    finish_reason: FinishReason  # ABORT only if the turn was not continued after an abort
    is_closed: bool
    stop_text: str = ""
    num_reasoning_tokens: int = 0
    cached_tokens: int = 0
    replica_id: str = ""
    top_logprobs: TopLogprobs = ()
    raw_logprobs: FloatArray | None = None  # under the plain softmax; None unless the engine gave both
    sampling: TurnSampling | None = None  # None in records that lack it
    seed: int | None = None
    unread_calls: tuple[ToolCall, ...] = ()  # malformed calls that are in the content, without their text
    engine: str = ""  # the replica's, as in `Generation`
    times: TurnTimes | None = None
    traceparent: str = ""  # the W3C trace context of its call; empty: none
    constraint: str = ""  # the text of a constraint that `sampling` has as a digest; in the first turn with it
    quantization: str = ""  # as in `Generation`
    closing: str | None = (
        None  # if the turn was ended after its first call: the rest of its text, for the next prompt
    )
    aux: PackedAux | None = None  # positions are those of its path; None: the engine returned none

    @property
    def content(self) -> str:
        """The message's text, without reasoning and calls."""
        return self.message.content

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the message, with malformed ones: `LoopContext.run_tools` answers all."""
        return self.message.tool_calls

    @property
    def has_unread_call(self) -> bool:
        """True if a call cannot be parsed, also if it is shown as content."""
        return bool(self.unread_calls) or any(call.status is ToolCallStatus.MALFORMED for call in self.calls)


@dataclass(frozen=True, slots=True)
class Node:
    """A turn and the tokens observed before it. Its path: its parent's path, `observed_ids`, the reply's ids.

    A root has the whole prompt in `observed` and `observed_ids`. A reply that the client began (`begun`) has that
    text's tokens at the end of `observed_ids`; its own message is the sampled one.
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
    declaration: Declaration | None = None

    @property
    def message(self) -> Message:
        """The assistant's message, as clients echo it."""
        said = self.reply.message
        return replace(said, content=self.begun + said.content) if self.begun else said

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that it adds to its path."""
        return (*self.observed, self.message)


class ModelCallState(StrEnum):
    """The state of an accepted model call."""

    OPEN = "open"
    COMMITTED = "committed"
    FAILED = "failed"  # its client disconnected, or the engine failed: its tokens are lost unless a retry commits


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One accepted call; its nodes are those with its `call_id`."""

    call_id: str
    digest: bytes
    created_at: int
    state: ModelCallState
    error: str = ""
    generate_s: float = 0.0  # seconds of sampling, also if it failed


def message_chars(message: Message) -> int:
    """Return the size of a message in characters, with an amount for each of its objects."""
    texts = (message.content, message.reasoning, message.tool_call_id or "", message.name or "")
    num_objects = 1 + 2 * len(message.images)  # an image's reference, and its hash
    return num_objects * _OBJECT_CHARS + sum(map(len, texts)) + sum(map(_call_chars, message.tool_calls))


def json_chars(value: JSON) -> int:
    """Return the size of a JSON value in characters, with an amount for each inner value."""
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
