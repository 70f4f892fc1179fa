"""Prompts of chat calls: token ids, their parent turn in the session, and sampling parameters.

Functions here may refuse a call and do not change the session, so a refused call has no effect. Stored ids are
reused and only new messages are rendered; long texts are rendered outside the event loop. If the template cannot
append the new messages (it is not prefix-stable, or an assistant message follows the reply), the complete prompt is
rendered, and extends the stored ids only if it begins with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agentloop.chat.call import ChatCall, ToolChoice
from agentloop.concurrency.clock import Clock, RealClock
from agentloop.errors import (
    AgentLoopError,
    ContextLengthExceeded,
    InvalidRequest,
    ServiceUnavailable,
    TemplateNotPrefixStable,
    UnsupportedParameter,
)
from agentloop.generation.image_prompts import ImageAsker, ImagePlacer
from agentloop.generation.leased_engine import LeasedEngine
from agentloop.generation.turn_reader import TurnReader
from agentloop.images import Image, ImageSpan, shifted_images
from agentloop.observability.metrics import MetricsTally
from agentloop.observability.trace_context import EngineTraces
from agentloop.parsers.base import Parser
from agentloop.parsers.grammar import after_reasoning
from agentloop.rendering.port import Renderer
from agentloop.rendering.renderer import off_loop
from agentloop.trajectory.node import PARENT_TURN_HEADER, Declaration, Node, Split
from agentloop.trajectory.node import tools_key as key_of_tools
from agentloop.trajectory.turn_graph import Match, TurnGraph
from agentloop.types import JSON, Constraint, IntArray, KVPolicy, Message, SamplingParams
from agentloop.values.capabilities import CONSTRAINTS, SAMPLING, Feature, bits_of
from agentloop.values.checks import MAX_TOP_LOGPROBS, check_sampling

_BAN = -100.0  # the logit bias that excludes a token, as in OpenAI's API
_MAX_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one session's calls."""

    max_open_calls: int = 512  # more are refused with status 429
    max_nodes: int = 10_000
    max_tokens: int = 4_000_000  # stored tokens, observed and sampled
    journal_timeout_s: float = 30.0  # timeout of one write


@dataclass(frozen=True, slots=True)
class SessionParts:
    """The dependencies that the sessions of a process share. `reader` and `parser` belong to `renderer`'s model."""

    renderer: Renderer
    reader: TurnReader
    parser: Parser
    kv_policy: KVPolicy
    max_context_tokens: int
    vocab_size: int
    can_constrain: bool = False
    limits: CallLimits = CallLimits()
    clock: Clock = field(default_factory=RealClock)
    unix_time: Callable[[], float] = time.time
    tally: MetricsTally = field(default_factory=MetricsTally)
    placer: ImagePlacer = field(default_factory=lambda: ImagePlacer(takes_images=False))
    keep_image_files: Callable[[tuple[Image, ...]], Awaitable[None]] | None = None  # None: images are not stored
    traces: EngineTraces | None = None  # traces to which engines add spans
    max_logprobs: int = MAX_TOP_LOGPROBS
    default_top_k: int = 0  # for calls without one: engines with a sampling mask require it

    async def keep_images(self, images: Sequence[Image]) -> None:
        """Store a call's images before a record refers to them. Raises ServiceUnavailable."""
        if self.keep_image_files is None or not images:
            return
        try:
            async with asyncio.timeout(self.limits.journal_timeout_s):
                await self.keep_image_files(tuple(images))
        except (OSError, TimeoutError) as error:
            raise ServiceUnavailable(f"the images of the call could not be stored: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a call."""

    ids: tuple[int, ...]  # the complete prompt, including image tokens
    parent_id: str | None  # the turn that the prompt extends; None for a new root
    observed: tuple[Message, ...]  # the messages after the parent turn
    observed_ids: IntArray  # the ids after those of the parent's path
    tools_key: bytes
    split: Split | None
    images: tuple[ImageSpan, ...] = ()  # spans of `ids`

    @property
    def observed_images(self) -> tuple[ImageSpan, ...]:
        """The images as spans of `observed_ids`."""
        return shifted_images(self.images, len(self.observed_ids) - len(self.ids))


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A chat call that is ready to be sampled."""

    prompt: Prompt
    sampling: SamplingParams  # the parameters of choice 0; other choices differ in their seed
    reads_calls: bool
    overflow: ContextLengthExceeded | None = None  # the prompt fills the context, so nothing can be sampled


async def prepare_call(
    chat_call: ChatCall, graph: TurnGraph, parts: SessionParts, engine: LeasedEngine, request_id: str
) -> PreparedCall:
    """Match, render and validate a call.

    Raises InvalidRequest and its subclasses, TemplateError, and for new images the engine's errors.
    """
    sampling, reads_calls = _sampling(chat_call, parts)
    if chat_call.declaration is not None:
        _check_declaration(chat_call.declaration, graph)
    if chat_call.prompt_ids is not None:
        prompt = _given_prompt(chat_call.prompt_ids, graph, parts)
    else:
        prompt = await make_prompt(chat_call, graph, parts, engine, request_id)
    num_prompt = len(prompt.ids)
    room = parts.max_context_tokens - num_prompt
    if room <= 0:
        overflow = ContextLengthExceeded(
            f"a prompt of {num_prompt} tokens leaves no room in a context of {parts.max_context_tokens}",
            param="messages" if chat_call.prompt_ids is None else "prompt",
        )
        return PreparedCall(prompt, sampling, reads_calls, overflow)
    max_tokens = room if chat_call.max_tokens is None else min(chat_call.max_tokens, room)
    sampling = replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))
    # If the prompt opens reasoning, the policy must be able to finish it before the constrained answer.
    if sampling.constraint is not None and chat_call.prompt_ids is None and parts.reader.is_thinking(prompt.ids):
        constraint = after_reasoning(sampling.constraint, parts.parser.delimiters.reasoning)
        sampling = replace(sampling, constraint=constraint)
    # The prompt's ids need no check: they were rendered, stored, or checked above.
    supported = SAMPLING | {Feature.PRIORITY, Feature.SCORES}  # placement selects an engine with these features
    features = bits_of(supported | CONSTRAINTS if parts.can_constrain else supported)
    check_sampling(sampling, parts.vocab_size, features=features, engine="session", max_logprobs=parts.max_logprobs)
    return PreparedCall(prompt, sampling, reads_calls)


def _check_declaration(declaration: Declaration, graph: TurnGraph) -> None:
    """Raise InvalidRequest for an unknown parent turn, and for an agent that would be its own ancestor."""
    if declaration.parent_turn and not graph.has_turn(declaration.parent_turn):
        raise InvalidRequest(
            f"unknown turn {declaration.parent_turn[:128]!r}: expected an id that this session returned in "
            "`session.turn_ids`",
            param=PARENT_TURN_HEADER,
        )
    ancestors, ancestor = list[str](), declaration.parent_agent
    while ancestor is not None and ancestor not in ancestors:
        ancestors.append(ancestor)
        ancestor = graph.parent_agents.get(ancestor)
    if declaration.agent in ancestors:
        raise InvalidRequest(
            f"agent {declaration.agent[:128]!r} cannot have the parent {ancestors[0][:128]!r}, which is the same "
            "agent or was started by it",
            param=declaration.parent_header,
        )


async def make_prompt(
    chat_call: ChatCall, graph: TurnGraph, parts: SessionParts, engine: LeasedEngine, request_id: str
) -> Prompt:
    """Return the prompt of a call's messages as an extension of `graph`. Raises the errors of `prepare_call`.

    A prompt extends only a turn with the same tools and template arguments. With other tools, or if the turn cannot
    be bridged, the complete conversation is rendered, with the session's own messages (including reasoning) in
    place of the messages that the client resent.
    """
    num_messages = len(chat_call.messages) - chat_call.continues
    messages, reply_prefix = chat_call.messages[:num_messages], chat_call.messages[num_messages:]
    if not messages:
        raise InvalidRequest("there are no messages", param="messages")
    renderer, template_kwargs = parts.renderer, chat_call.template_kwargs
    asker = ImageAsker({image.sha256: image for image in chat_call.images}, engine, request_id)
    matched_tools, tools_key = chat_call.tools, chat_call.tools_key
    if template_kwargs:  # like tools, template arguments change the prompt, so they are part of the match
        own = key_of_tools(chat_call.tools) if tools_key is None else tools_key
        arguments = {"name": "template arguments", "arguments": template_kwargs}
        matched_tools, tools_key = (*chat_call.tools, arguments), key_of_tools([{"tools": own.hex()}, arguments])
    keys = chat_call.keys[:num_messages]
    match = graph.match(messages, matched_tools, is_strict=chat_call.is_strict, keys=keys, tools_key=tools_key)
    cause = ""
    if (known := match.parent or match.echoed) is not None:
        # Clients drop reasoning and change call ids, so the session's own messages replace the resent ones.
        known_messages = own_messages(graph, known)
        appended = _with_own_ids(known_messages, messages)
        messages = (*known_messages, *appended)
        if match.parent is not None:
            match = replace(match, appended=appended)
            prompt = await _bridged(known, match, known_messages, chat_call, graph, parts, asker)
            if isinstance(prompt, Prompt):
                return prompt
            cause = prompt
    shown = (*messages, *reply_prefix)
    rendered = await _rendered(
        shown,
        lambda: renderer.render(shown, chat_call.tools, template_kwargs, is_open=chat_call.continues),
        template_kwargs,
    )
    ids, images = await parts.placer.place(rendered, messages, asker)
    if match.parent is None:
        return _root(ids, images, messages, match.tools_key, match.split)
    # The complete rendering may still begin with the stored ids; only if it does not, it starts a new branch.
    parent_id = match.parent.node_id
    split = graph.mark_template_split(parent_id, ids, renderer.decode, cause=cause)
    if split is not None:
        return _root(ids, images, messages, match.tools_key, split)
    num_known = len(graph.context_ids(parent_id))
    observed_ids = _array(ids[num_known:])
    return Prompt(tuple(ids), parent_id, match.appended, observed_ids, match.tools_key, match.split, images)


async def _bridged(
    parent: Node,
    match: Match,
    known_messages: Sequence[Message],
    chat_call: ChatCall,
    graph: TurnGraph,
    parts: SessionParts,
    asker: ImageAsker,
) -> Prompt | str:
    """Return the prompt of the parent's ids and a bridge, or the reason why the template cannot append it."""
    appended, renderer, template_kwargs = match.appended, parts.renderer, chat_call.template_kwargs
    if not appended or appended[0].role == "assistant":
        return "an assistant message follows the reply"
    end = parts.reader.end_of(parent.reply, known_messages[:-1])
    num_messages = len(chat_call.messages) - chat_call.continues
    shown = (*appended, *chat_call.messages[num_messages:])
    try:
        rendered = await _rendered(
            shown,
            lambda: renderer.bridge(shown, chat_call.tools, end, template_kwargs, is_open=chat_call.continues),
            template_kwargs,
        )
    except TemplateNotPrefixStable as error:
        return error.message
    bridge, images = await parts.placer.place(rendered, appended, asker, first_index=num_messages - len(appended))
    context_ids = graph.context_ids(parent.node_id)
    images = (*graph.context_images(parent.node_id), *shifted_images(images, len(context_ids)))
    ids = (*context_ids, *bridge)
    return Prompt(ids, parent.node_id, appended, _array(bridge), match.tools_key, match.split, images)


def own_messages(graph: TurnGraph, node: Node) -> list[Message]:
    """Return the session's own messages up to and including the node's reply."""
    path = graph.path_of(node.node_id)
    return [message for turn in path for message in turn.messages]


def _with_own_ids(own: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages that follow the copies of `own`, with the session's call ids in tool results.

    A client may change call ids. The policy is shown its call with the original id, so the result must have it too.
    """
    ids = {
        echoed.id: call.id
        for mine, echo in zip(own, messages, strict=False)
        for call, echoed in zip(mine.tool_calls, echo.tool_calls, strict=False)
    }
    return tuple(
        replace(message, tool_call_id=ids[message.tool_call_id]) if message.tool_call_id in ids else message
        for message in messages[len(own) :]
    )


def _given_prompt(prompt_ids: tuple[int, ...], graph: TurnGraph, parts: SessionParts) -> Prompt:
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if min(prompt_ids) < 0 or max(prompt_ids) >= min(parts.vocab_size, _MAX_ID):
        bad = next(i for i in prompt_ids if not 0 <= i < parts.vocab_size)
        raise InvalidRequest(f"token id {bad} is outside [0, {parts.vocab_size})", param="prompt")
    parent, new_ids, split = graph.match_ids(prompt_ids, decode=parts.renderer.decode)
    parent_id = None if parent is None else parent.node_id
    if parent is not None and graph.context_images(parent.node_id):
        raise UnsupportedParameter("a raw prompt cannot continue a conversation with images", param="prompt")
    return Prompt(prompt_ids, parent_id, (), _array(new_ids), b"", split)


def _root(
    ids: Sequence[int],
    images: tuple[ImageSpan, ...],
    messages: Sequence[Message],
    tools_key: bytes,
    split: Split | None,
) -> Prompt:
    return Prompt(tuple(ids), None, tuple(messages), _array(ids), tools_key, split, images)


def _array(ids: Sequence[int]) -> IntArray:
    return np.array(ids, dtype=np.int32)


async def _rendered(
    messages: Sequence[Message], work: Callable[[], list[int]], template_kwargs: Mapping[str, JSON]
) -> list[int]:
    if template_kwargs:  # the template check of new arguments takes about 20 ms
        return await asyncio.to_thread(work)
    return await off_loop(sum(map(_num_chars, messages)), work)


def _num_chars(message: Message) -> int:
    """Estimate a message's number of characters. Of arguments it counts only strings at the first level."""
    values = (value for call in message.tool_calls for value in (call.text, *call.arguments.values()))
    nested = sum(len(value) if isinstance(value, str) else 1 for value in values)
    return len(message.content) + len(message.reasoning) + nested


# Sampling parameters


def _sampling(chat_call: ChatCall, parts: SessionParts) -> tuple[SamplingParams, bool]:
    """Return the sampling parameters without `max_tokens`, and True if the reply's calls are parsed."""
    if chat_call.max_tokens is not None and chat_call.max_tokens <= 0:
        raise InvalidRequest(f"max_tokens must be positive, received {chat_call.max_tokens}", param="max_tokens")
    if chat_call.num_choices <= 0:
        raise InvalidRequest(f"n must be positive, received {chat_call.num_choices}", param="n")
    requested = chat_call.sampling
    if requested.constraint is not None and not parts.can_constrain:
        raise UnsupportedParameter("this service's engine cannot constrain its output", param="constraint")
    own_stops = () if requested.ignore_eos else parts.renderer.stop_token_ids
    stops = tuple(dict.fromkeys((*own_stops, *requested.stop_token_ids)))
    sampling = replace(requested, stop_token_ids=stops, top_k=requested.top_k or parts.default_top_k)
    if chat_call.tool_choice is ToolChoice.REQUIRED:
        return replace(sampling, constraint=_call_constraint(chat_call, parts)), True
    if chat_call.tool_choice is ToolChoice.NONE:
        return replace(sampling, logit_bias=_bias_without_calls(chat_call, parts)), False
    return sampling, bool(chat_call.tools) and chat_call.prompt_ids is None


def _call_constraint(chat_call: ChatCall, parts: SessionParts) -> Constraint:
    if not parts.can_constrain:
        raise UnsupportedParameter(
            "this service's engine cannot constrain its output, so tool calls cannot be required",
            param="tool_choice",
        )
    if chat_call.sampling.constraint is not None:
        raise InvalidRequest(
            "a required tool call and a response format exclude each other: send one of them", param="tool_choice"
        )
    return parts.parser.call_constraint(
        chat_call.tools, forced=chat_call.forced_tool, is_parallel=chat_call.is_parallel
    )


def with_client_param(error: BaseException, chat_call: ChatCall) -> BaseException:
    """Return the error, with the client's field name in place of the `param` "constraint"."""
    if not isinstance(error, AgentLoopError) or error.param != "constraint":
        return error
    param = "tool_choice" if chat_call.tool_choice is ToolChoice.REQUIRED else chat_call.constraint_param
    return type(error)(error.message, param=param)


def _bias_without_calls(chat_call: ChatCall, parts: SessionParts) -> tuple[tuple[int, float], ...]:
    """Return the call's logit bias, extended by a ban of the token that opens a tool call, if there is one."""
    bias = chat_call.sampling.logit_bias
    if not chat_call.tools or not parts.parser.delimiters.openings:
        return bias
    opening = parts.renderer.ids(parts.parser.delimiters.openings[0])
    if len(opening) != 1:
        return bias
    return (*((token_id, value) for token_id, value in bias if token_id != opening[0]), (opening[0], _BAN))
