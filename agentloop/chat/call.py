"""A chat call and its result in all dialects, and functions that the dialects share.

A dialect (`openai.py`, `anthropic.py`, ...) converts its body to a `ChatCall`, and a `ChatResult`, or the
`TurnPiece`s of a stream, to its answer. Invariant: a call that cannot be parsed keeps its text, so that its echo
matches the turn that made it.
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
from agentloop.trajectory.node import Node, Reply
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
    num_refused: int = 0  # equal first attempts that were rejected before their session received them


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The answer. `choices` are the session's new nodes, in the order of their `choice_index`."""

    call_id: str  # unique over all sessions
    created_at: int  # seconds since 1970
    session_id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Node, ...]
    is_overflow: bool = False  # the prompt left no room: the choices are empty, and no turns of the session


Answer: TypeAlias = dict[str, Any]
"""A part of an answer, for `orjson`."""

_INVALID_JSON: Final = "INVALID_JSON"
"""The one key under which pydantic-ai echoes arguments that it could not read."""

# Requests


def read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Read a tool call of the history, MALFORMED if its arguments are not a JSON object; empty text is `{}`."""
    if not arguments.strip():
        return ToolCall(call_id, name)
    try:
        read = loads(arguments)
    except ValueError as error:
        return ToolCall(call_id, name, {}, ToolCallStatus.MALFORMED, f"not valid JSON: {error}", text=arguments)
    if not isinstance(read, dict):
        return ToolCall(call_id, name, {}, ToolCallStatus.MALFORMED, "not a JSON object", text=arguments)
    written = read.get(_INVALID_JSON) if len(read) == 1 else None
    if isinstance(written, str):
        return ToolCall(call_id, name, {}, ToolCallStatus.MALFORMED, "not valid JSON", text=written)
    return ToolCall(call_id, name, read)


def function_definition(
    name: str, description: str | None, parameters: Mapping[str, JSON] | None
) -> dict[str, JSON]:
    """Return a tool in the OpenAI function format, without the fields that are null."""
    function: dict[str, JSON] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def check_tool_choice(choice: ToolChoice, forced: str | None, tools: Sequence[Mapping[str, JSON]]) -> None:
    """Raises InvalidRequest for a choice that these tools cannot meet."""
    if choice is ToolChoice.REQUIRED and not tools:
        raise InvalidRequest("a tool must be called, but the request has no tools", param="tool_choice")
    if forced is not None and all(tool["function"]["name"] != forced for tool in tools):
        raise InvalidRequest(f"there is no tool {forced[:64]!r} to call", param="tool_choice")


def check_tool_names(tools: Sequence[Mapping[str, JSON]]) -> None:
    """Raises InvalidRequest for two tools of one name."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise InvalidRequest("two tools have the same name", param="tools")


def allowed_tools(
    tools: Sequence[dict[str, JSON]], names: Collection[str], param: str
) -> tuple[dict[str, JSON], ...]:
    """Return the tools of these names. Raises InvalidRequest for a name that none has."""
    if unknown := set(names) - {tool["function"]["name"] for tool in tools}:
        raise InvalidRequest(f"there is no tool {min(unknown)!r} to allow", param=param)
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def joined_text(texts: Iterable[str], role: str) -> str:
    """Join text parts: an assistant's directly, as parts of one reply, those of others by line breaks."""
    return ("" if role == "assistant" else "\n").join(texts)


def read_content(
    content: str | Sequence[Any] | None, role: str, param: str, *, first: int = 0
) -> tuple[str, list[Image], list[ImageRef]]:
    """Return the text, the images and their positions of a content whose parts are texts, refusals and images.

    Without an image each text part is a line. With one, the texts are joined unchanged. Raises as `read_parts`.
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
    """Return the images of a call, each once. Raises UnsupportedParameter if the model takes none."""
    found = each_once(images)
    if found and not model.takes_images:
        raise UnsupportedParameter("this service's model takes no images", param=param)
    return found


def schema_constraint(schema: Mapping[str, JSON] | None, param: str) -> Constraint:
    """Return the constraint to one JSON value that fits the schema. Raises InvalidRequest naming `param` without a
    schema."""
    if schema is None:
        raise InvalidRequest(
            'a format of type json_schema needs a `schema`; for any JSON object use {"type": "json_object"}',
            param=param,
        )
    return Constraint(ConstraintKind.JSON_SCHEMA, orjson.dumps(schema).decode())


def with_tool_names(
    messages: Iterable[Message], named: Callable[[int, str | None], Message] | None = None
) -> tuple[Message, ...]:
    """Return the messages, each tool result with the name of its tool, if the history has it.

    `named` gives the message at an index with a name; by default a new one.
    """
    names: dict[str, str] = {}
    found = []
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            names[call.id] = call.name
        if message.role == "tool" and message.name is None and message.tool_call_id is not None:
            name = names.get(message.tool_call_id)
            message = with_name(message, name) if named is None else named(index, name)
        found.append(message)
    return tuple(found)


def with_name(message: Message, name: str | None) -> Message:
    """Return a tool's answer with the tool's name. Not `replace`: it takes five times as long."""
    return Message("tool", message.content, tool_call_id=message.tool_call_id, name=name, images=message.images)


def answer_constraint(
    wanted: Constraint | None,
    parser: Parser,
    tools: tuple[Mapping[str, JSON], ...],
    choice: ToolChoice,
    *,
    is_parallel: bool,
) -> Constraint | None:
    """Return the constraint by which a turn is an answer as `wanted`, or calls; None for forced calls."""
    if wanted is None or choice is ToolChoice.REQUIRED:
        return None
    if not tools or choice is ToolChoice.NONE:
        return wanted
    return _answer_or_calls(wanted, parser, tools, is_parallel=is_parallel)


def _answer_or_calls(
    answer: Constraint, parser: Parser, tools: Sequence[Mapping[str, JSON]], *, is_parallel: bool
) -> Constraint:
    """Allow an answer of a constrained form, or else calls of tools and nothing beside them."""
    # The model may choose whether it calls: a tool's schema never refuses the request, so none is enforced here.
    functions = [tool["function"] for tool in tools]
    loose = [{**function, "parameters": loosened(function.get("parameters") or {})} for function in functions]
    calls = parser.call_constraint(loose, forced=None, is_parallel=is_parallel)
    return constraint_of(format_of(answer), format_of(calls))


# Answers


def strict_report(strict_tools: Iterable[str], choice: ToolChoice) -> Answer:
    """Return the answer's field that names the tools of `strict: true` whose schemas were not enforced.

    A grammar enforces the schemas of forced calls, `strict` or not, and of no others.
    """
    names = list(strict_tools)
    return {"strict_not_enforced": names} if names and choice is not ToolChoice.REQUIRED else {}


def versions_of(node: Node) -> list[Answer]:
    """Return the spans of weight versions, over the choice's `token_ids`."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in node.reply.weight_versions]


def version_range(replies: Iterable[Reply | Generation]) -> Answer:
    """Return the oldest and the newest weight version of an answer's tokens; null where it has none."""
    found = [span.version for reply in replies for span in reply.weight_versions]
    return {"weight_version_start": min(found, default=None), "weight_version_end": max(found, default=None)}


def session_extra(result: ChatResult) -> Answer:
    """Return the call's place in its session: turns, how history was matched, the calls' tokens."""
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
    """Return an answer's fields for a trainer: session and versions, and the ids if asked for."""
    node = result.choices[0]
    extras: dict[str, Any] = {"session": session_extra(result), "weight_versions": versions_of(node)}
    extras |= version_range([node.reply])
    if with_token_ids:
        extras["prompt_token_ids"] = list(result.prompt_ids)
        extras["token_ids"] = node.reply.token_ids.tolist()
    return extras
