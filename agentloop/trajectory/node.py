"""The values of a session's memory: turns as nodes of a graph, and the calls that made them. They go to disk
through `codec`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agentloop.types import FinishReason, FloatArray, IntArray, Message, TopLogprobs, WeightVersionSpan


class SplitReason(StrEnum):
    """Why a prompt could not extend what the session has, token for token."""

    BRANCH = "branch"  # it does extend an earlier turn, which has gone on otherwise: a sibling, a rollback
    NEW_CONVERSATION = "new_conversation"  # nothing in common: a sub-agent
    SYSTEM_CHANGED = "system_changed"  # another system message before the same conversation
    TOOLS_CHANGED = "tools_changed"  # other tool definitions
    HISTORY_EDIT = "history_edit"  # a message differs, is missing or was put in: compaction, rewriting
    AMBIGUOUS = "ambiguous"  # the history fits several turns of different tokens
    TEMPLATE = "template"  # the chat template renders earlier messages otherwise than before


@dataclass(frozen=True, slots=True)
class Split:
    """One split. `detail` shows the first difference: what the session has and what came instead."""

    reason: SplitReason
    from_node: str | None = None  # the turn whose history is nearest
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled turn. Arrays have one length; `weight_versions` tile `[0, n)`.

    `message` is as clients see it: content ends before a stop string. The ids end with the token that completed the
    stop string (`stop_text`), with a stop token (`is_closed`), or where `max_tokens` cut them.
    """

    message: Message
    token_ids: IntArray
    logprobs: FloatArray
    weight_versions: tuple[WeightVersionSpan, ...]
    finish_reason: FinishReason  # STOP or LENGTH
    is_closed: bool
    stop_text: str = ""
    num_reasoning_tokens: int = 0
    cached_tokens: int = 0
    replica_id: str = ""
    top_logprobs: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class Node:
    """A turn and what was observed before it. Its path: that of its parent, then `observed_ids`, then the reply's.

    A root has the whole prompt in `observed` and `observed_ids`.
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


class ModelCallState(StrEnum):
    """What became of a call that was accepted."""

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
