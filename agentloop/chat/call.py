"""A chat call and its result, whatever dialect it came in. Values only.

A dialect (`openai.py`, `anthropic.py`, ...) turns its body into a `ChatCall` and a `ChatResult` (or the
`TurnPiece`s of a stream) into its answer; a `Session` does what is between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agentloop.images import Image
from agentloop.parsers.base import Parser
from agentloop.trajectory.node import Node
from agentloop.types import JSON, Message, SamplingParams


class ToolChoice(StrEnum):
    """The policy's freedom to call tools."""

    AUTO = "auto"
    NONE = "none"  # it must not
    REQUIRED = "required"  # at least one call; decoding is constrained to it


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One checked call, with either `messages` or `prompt_ids`.

    `sampling.max_tokens` is ignored: `max_tokens` counts, or the context's room if it is None. The session adds the
    renderer's stop tokens and the constraint of `tool_choice`; a response format's is in `sampling` already.
    `template_kwargs` has only what the model's template reads. `constraint_param` names the client's field of the
    constraint, for errors. `sampling.seed` is that of choice 0, and seed + i that of choice i.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams
    keys: tuple[bytes, ...] = ()  # the loose canonical keys of `messages`, from a dialect that has them already
    tools_key: bytes | None = None  # that of `tools`, likewise
    tools: tuple[Mapping[str, JSON], ...] = ()  # definitions in the OpenAI function format
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str | None = None  # with REQUIRED: this one and no other
    is_parallel: bool = True  # false: the turn ends after its first complete call
    max_tokens: int | None = None
    num_choices: int = 1
    stop: tuple[str, ...] = ()  # stop strings; the reply's content ends before the first that occurs
    stop_in_reasoning: bool = True  # false: they count in the answer only
    prompt_ids: tuple[int, ...] | None = None  # of a raw completion
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)  # arguments of the chat template
    is_strict: bool = False  # history must be echoed exactly: call ids and outer whitespace too
    timeout_s: float = 600.0
    constraint_param: str = "constraint"
    images: tuple[Image, ...] = ()  # all that `messages` show, each once
    traceparent: str = ""  # the W3C trace context of its caller; empty: none
    adapter: str = ""  # of a call outside a session, which has its own; empty: the base weights
    continues: bool = False  # the last of `messages` is the beginning of the reply

    @property
    def begun(self) -> str:
        """The text that the reply begins with."""
        return self.messages[-1].content if self.continues else ""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The facts of the model that dialects need to make a call."""

    parser: Parser
    vocab_size: int
    template_arguments: frozenset[str] = frozenset()  # the names that its chat template reads
    timeout_s: float = 600.0  # of a call that names no shorter one
    takes_images: bool = False


@dataclass(frozen=True, slots=True)
class CallKey:
    """The identity of a call: a retry has the digest of an earlier call, and a count above 0."""

    digest: bytes
    retry_count: int = 0
    is_unique: bool = True  # the digest names one client's call; False: other clients may send equal calls
    was_refused: bool = False  # an equal call was refused before its session recorded it


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The answer. `choices` are the session's new nodes, in the order of their `choice_index`."""

    call_id: str  # unique over all sessions
    created_at: int  # seconds since 1970
    session_id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Node, ...]
    is_overflow: bool = False  # the prompt left no room: the choices are empty, and no turns of the session
