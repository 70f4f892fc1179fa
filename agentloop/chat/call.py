"""The dialect-independent chat call and result, and functions that the dialects share.

A dialect (`openai.py`, `anthropic.py`, ...) converts its body to a `ChatCall`, and a `ChatResult` or the
`TurnPiece`s of a stream to its answer. Invariant: a malformed call keeps its text, so that it matches the turn that
produced it when the client resends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

import orjson

from agentloop.api.requests import read_parts
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.images import Image, ImageRef, each_once, shown
from agentloop.parsers.base import Parser
from agentloop.parsers.grammar import constraint_of, format_of, loads
from agentloop.parsers.json_schema import loosened
from agentloop.trajectory.node import Declaration, Node, Reply
from agentloop.types import (
    JSON,
    Constraint,
    ConstraintKind,
    Generation,
    Message,
    SamplingParams,
    ToolCall,
    ToolCallStatus,
)
from agentloop.values.checks import MAX_TOP_LOGPROBS


class ToolChoice(StrEnum):
    """The rule for tool calls in a turn."""

    AUTO = "auto"
    NONE = "none"  # no calls
    REQUIRED = "required"  # one or more calls, enforced by constrained decoding


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One validated call, with either `messages` or `prompt_ids`.

    `sampling.max_tokens` is ignored in favor of `max_tokens`. `sampling.constraint` holds the constraint of a
    response format; the session adds the constraint of `tool_choice` and the renderer's stop tokens.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams  # choice i is sampled with `sampling.seed` + i
    keys: tuple[bytes, ...] = ()  # the loose canonical keys of `messages`, if the dialect has computed them
    tools_key: bytes | None = None  # the canonical key of `tools`, if the dialect has computed it
    tools: tuple[Mapping[str, JSON], ...] = ()  # definitions in the OpenAI function format
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str | None = None  # the only tool that may be called; requires REQUIRED
    is_parallel: bool = True  # false: the turn ends after its first complete call
    max_tokens: int | None = None  # None: up to the context length
    num_choices: int = 1
    stop: tuple[str, ...] = ()  # stop strings; the reply's content ends before the first one that occurs
    stop_in_reasoning: bool = True  # false: stop strings apply only to the answer
    prompt_ids: tuple[int, ...] | None = None  # the prompt of a raw completion
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)  # only arguments that the template reads
    is_strict: bool = False  # history matches only if call ids and outer whitespace are equal too
    timeout_s: float = 600.0
    constraint_param: str = "constraint"  # the name of the constraint's field in the dialect, for errors
    images: tuple[Image, ...] = ()  # the images in `messages`, without duplicates
    traceparent: str = ""  # the caller's W3C trace context, or empty
    adapter: str = ""  # the adapter of a call outside a session; empty for the base weights
    affinity: str = ""  # a key of calls that belong together, for the choice of a replica; empty: none
    declaration: Declaration | None = None  # the place in the lineage that the client declares
    continues: bool = False  # the last of `messages` is the beginning of the reply

    @property
    def begun(self) -> str:
        """The given beginning of the reply."""
        return self.messages[-1].content if self.continues else ""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The properties of the model that dialects need to create a call."""

    parser: Parser
    vocab_size: int
    template_arguments: frozenset[str] = frozenset()  # argument names that the chat template reads
    timeout_s: float = 600.0  # default and upper limit of a call's timeout
    takes_images: bool = False
    has_priority: bool = False  # an engine orders waiting requests by priority
    has_routed_experts: bool = False  # the engines return them
    max_logprobs: int = MAX_TOP_LOGPROBS  # alternatives per token


@dataclass(frozen=True, slots=True)
class CallKey:
    """The identity of a call. A retry has the digest of an earlier call and a `retry_count` above 0."""

    digest: bytes
    retry_count: int = 0
    is_unique: bool = True  # the digest identifies one client's call; False: other clients may send equal calls
    num_refused: int = 0  # equal first attempts that were rejected before their session received them


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The result of a call. `choices` are the session's new nodes, in order of their `choice_index`."""

    call_id: str  # unique across sessions
    created_at: int  # Unix time in seconds
    session_id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Node, ...]
    is_overflow: bool = False  # the prompt fills the context: the choices are empty and not part of the session


Answer: TypeAlias = dict[str, Any]
"""A JSON object of an answer, for `orjson`."""

_INVALID_JSON: Final = "INVALID_JSON"
"""The only key of the object in which pydantic-ai resends arguments that it could not parse."""

# Requests


def read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Parse a tool call of the history: MALFORMED if its arguments are not a JSON object; empty text means `{}`."""
    if not arguments.strip():
        return ToolCall(call_id, name)
    try:
        parsed = loads(arguments)
    except ValueError as error:
        return ToolCall(call_id, name, {}, ToolCallStatus.MALFORMED, f"not valid JSON: {error}", text=arguments)
    if not isinstance(parsed, dict):
        return ToolCall(call_id, name, {}, ToolCallStatus.MALFORMED, "not a JSON object", text=arguments)
    written = parsed.get(_INVALID_JSON) if len(parsed) == 1 else None
    if isinstance(written, str):
        return ToolCall(call_id, name, {}, ToolCallStatus.MALFORMED, "not valid JSON", text=written)
    return ToolCall(call_id, name, parsed)


def function_definition(
    name: str, description: str | None, parameters: Mapping[str, JSON] | None
) -> dict[str, JSON]:
    """Return a tool in the OpenAI function format, without null fields."""
    function: dict[str, JSON] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def check_tool_choice(choice: ToolChoice, forced: str | None, tools: Sequence[Mapping[str, JSON]]) -> None:
    """Raise InvalidRequest if the tools cannot satisfy the choice."""
    if choice is ToolChoice.REQUIRED and not tools:
        raise InvalidRequest(
            "'tool_choice' requires a tool call, but the request has no tools", param="tool_choice"
        )
    if forced is not None and all(tool["function"]["name"] != forced for tool in tools):
        raise InvalidRequest(
            f"'tool_choice' names the tool {forced[:64]!r}, which is not in 'tools'", param="tool_choice"
        )


def check_tool_names(tools: Sequence[Mapping[str, JSON]]) -> None:
    """Raise InvalidRequest if two tools have the same name."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise InvalidRequest("two tools have the same name", param="tools")


def allowed_tools(
    tools: Sequence[dict[str, JSON]], names: Collection[str], param: str
) -> tuple[dict[str, JSON], ...]:
    """Return the tools with these names. Raises InvalidRequest for an unknown name."""
    if unknown := set(names) - {tool["function"]["name"] for tool in tools}:
        raise InvalidRequest(f"unknown tool {min(unknown)!r}: it is not in 'tools'", param=param)
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def joined_text(texts: Iterable[str], role: str) -> str:
    """Join text parts: an assistant's without separator, as parts of one reply, and others with line breaks."""
    return ("" if role == "assistant" else "\n").join(texts)


def read_content(
    content: str | Sequence[Any] | None, role: str, param: str, *, first: int = 0
) -> tuple[str, list[Image], list[ImageRef]]:
    """Return the text, the images and the image positions of a message's content.

    Text parts are joined by `joined_text`, or without separator if the content has images. Raises the errors of
    `read_parts`.
    """
    if content is None or isinstance(content, str):
        return content or "", [], []
    parts = read_parts(content, (), param, first=first)
    images = [part for part in parts if isinstance(part, Image)]
    if not images:
        return joined_text((part for part in parts if isinstance(part, str)), role), [], []
    text, refs = shown(parts)
    return text, images, list(refs)


def shown_images(images: Iterable[Image], model: ChatModel, param: str) -> tuple[Image, ...]:
    """Return the images of a call without duplicates. Raises UnsupportedParameter for a model without images."""
    unique = each_once(images)
    if unique and not model.takes_images:
        raise UnsupportedParameter("this service's model takes no images", param=param)
    return unique


def schema_constraint(schema: Mapping[str, JSON] | None, param: str) -> Constraint:
    """Return the constraint to a JSON value that matches the schema. Raises InvalidRequest if `schema` is None."""
    if schema is None:
        raise InvalidRequest(
            'a format of type json_schema requires a `schema`; for any JSON object use {"type": "json_object"}',
            param=param,
        )
    return Constraint(ConstraintKind.JSON_SCHEMA, orjson.dumps(schema).decode())


def with_tool_names(
    messages: Iterable[Message], named: Callable[[int, str | None], Message] | None = None
) -> tuple[Message, ...]:
    """Return the messages with tool names added to tool results, if the history has the call.

    `named` returns the message at an index with a name; the default creates a copy.
    """
    names: dict[str, str] = {}
    named_messages = []
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            names[call.id] = call.name
        if message.role == "tool" and message.name is None and message.tool_call_id is not None:
            name = names.get(message.tool_call_id)
            message = with_name(message, name) if named is None else named(index, name)
        named_messages.append(message)
    return tuple(named_messages)


def with_name(message: Message, name: str | None) -> Message:
    """Return a tool result with the tool's name."""
    # `dataclasses.replace` takes five times as long.
    return Message("tool", message.content, tool_call_id=message.tool_call_id, name=name, images=message.images)


def answer_constraint(
    wanted: Constraint | None,
    parser: Parser,
    tools: tuple[Mapping[str, JSON], ...],
    choice: ToolChoice,
    *,
    is_parallel: bool,
) -> Constraint | None:
    """Return the constraint that allows an answer as `wanted`, or tool calls; None if calls are forced."""
    if wanted is None or choice is ToolChoice.REQUIRED:
        return None
    if not tools or choice is ToolChoice.NONE:
        return wanted
    return _answer_or_calls(wanted, parser, tools, is_parallel=is_parallel)


def _answer_or_calls(
    answer: Constraint, parser: Parser, tools: Sequence[Mapping[str, JSON]], *, is_parallel: bool
) -> Constraint:
    """Return the constraint that allows either an answer with the constraint `answer`, or only tool calls."""
    # Calls are optional here, so a tool schema that cannot be enforced must not fail the request: use loose
    # schemas.
    functions = [tool["function"] for tool in tools]
    loose = [{**function, "parameters": loosened(function.get("parameters") or {})} for function in functions]
    calls = parser.call_constraint(loose, forced=None, is_parallel=is_parallel)
    return constraint_of(format_of(answer), format_of(calls))


# Answers


def strict_report(strict_tools: Iterable[str], choice: ToolChoice) -> Answer:
    """Return the answer field that lists the tools with `strict: true` whose schemas were not enforced."""
    names = list(strict_tools)
    # A grammar enforces the schemas of forced calls, with or without `strict`, and of no other calls.
    return {"strict_not_enforced": names} if names and choice is not ToolChoice.REQUIRED else {}


def versions_of(node: Node) -> list[Answer]:
    """Return the spans of weight versions over the choice's `token_ids`."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in node.reply.weight_versions]


def version_range(replies: Iterable[Reply | Generation]) -> Answer:
    """Return the oldest and the newest weight version of an answer's tokens; null for an answer without tokens."""
    versions = [span.version for reply in replies for span in reply.weight_versions]
    return {"weight_version_start": min(versions, default=None), "weight_version_end": max(versions, default=None)}


def session_extra(result: ChatResult) -> Answer:
    """Return the answer's `session` field: turn ids, the result of history matching, token spans of tool calls."""
    first = result.choices[0]
    calls = [
        {
            "choice": index,
            "id": call.id,
            "status": call.status.value,
            "token_start": call.token_start,
            "token_end": call.token_end,
            "error": call.error,
        }
        for index, node in enumerate(result.choices)
        for call in (*node.reply.message.tool_calls, *node.reply.unread_calls)
    ]
    return {
        "session_id": result.session_id,
        "turn_ids": [] if result.is_overflow else [node.node_id for node in result.choices],
        "is_overflow": result.is_overflow,
        "parent_turn_id": first.parent_id,
        "split_reason": None if first.split is None else first.split.reason.value,
        "split_detail": None if first.split is None else first.split.detail,
        "tool_calls": calls,
    }


def capture_extras(result: ChatResult, *, with_token_ids: bool) -> dict[str, Any]:
    """Return an answer's additional fields for a trainer: session, weight versions and optionally token ids."""
    node = result.choices[0]
    extras: dict[str, Any] = {"session": session_extra(result), "weight_versions": versions_of(node)}
    extras |= version_range([node.reply])
    if with_token_ids:
        extras["prompt_token_ids"] = list(result.prompt_ids)
        extras["token_ids"] = node.reply.token_ids.tolist()
    return extras
