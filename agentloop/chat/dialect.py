"""The work that the dialects share: tool calls to and from text, history, sampling, and a reply as blocks.

Pure. Invariants: a call that cannot be read keeps its text, so that its echo matches the turn that made it; the
blocks of a streamed reply concatenate to those of the same reply answered whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

import orjson

from agentloop.chat.call import ChatResult, ToolChoice
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.generation.turn_piece import CallDelta, TurnPiece, arguments_text
from agentloop.parsers.base import Parser
from agentloop.parsers.grammar import format_of, loads
from agentloop.trajectory.node import Node
from agentloop.types import (
    JSON,
    Constraint,
    ConstraintKind,
    Message,
    ToolCall,
    ToolCallStatus,
)

Answer: TypeAlias = dict[str, Any]
"""A part of an answer, for `orjson`."""

_INVALID_JSON: Final = "INVALID_JSON"
"""The one key under which pydantic-ai echoes arguments that it could not read."""

HOSTED_SEARCH: Final = "web_search"
"""The beginning of the types of OpenAI's and Anthropic's own search tools."""

# --- requests ---------------------------------------------------------------------------------------------


def type_tag(value: Any) -> str | None:
    """Return the tag of a union whose members have a `type`; `read_body` leaves tags out of the places it tells."""
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"~{kind}" if isinstance(kind, str) else None


def refuse_types(values: Any, known: Collection[str], param: str) -> None:
    """Raises UnsupportedParameter if one of a list of unchecked objects has a `type` that is not known."""
    for index, value in enumerate(values if isinstance(values, list) else ()):
        refuse_type(value, known, f"{param}.{index}.type")


def refuse_type(value: Any, known: Collection[str], param: str) -> None:
    """Raises UnsupportedParameter if an unchecked object has a `type` that is not known."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in known:
        raise UnsupportedParameter(f"the type {kind[:64]!r} is not supported", param=param)


def refuse_hosted(values: Any, known: Collection[str], param: str) -> None:
    """Raises UnsupportedParameter for tools that the provider of an API runs itself, but for a search of the web.

    A search that nobody runs is a tool that is never called, so it is left out of the prompt, unless it is all that
    there is: then the call is for it.
    """
    tools = values if isinstance(values, list) else []
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    is_search = [is_hosted_search(kind) for kind in kinds]
    for index, kind in enumerate(kinds):
        if isinstance(kind, str) and kind not in known and not (is_search[index] and not all(is_search)):
            raise UnsupportedParameter(
                f"the type {kind[:64]!r} is not supported: tools are functions that the client runs",
                param=f"{param}.{index}.type",
            )


def is_hosted_search(kind: Any) -> bool:
    """Tell whether a tool's type is that of a provider's search of the web, of whatever date."""
    return isinstance(kind, str) and kind.startswith(HOSTED_SEARCH)


def read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Read a tool call of the history: MALFORMED if its arguments are no JSON object. No text: `{}`."""
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
    """Raises InvalidRequest for a choice that the tools cannot meet."""
    if choice is ToolChoice.REQUIRED and not tools:
        raise InvalidRequest("a tool must be called, but there are none", param="tool_choice")
    if forced is not None and all(tool["function"]["name"] != forced for tool in tools):
        raise InvalidRequest(f"there is no tool {forced[:64]!r} to call", param="tool_choice")


def check_tool_names(tools: Sequence[Mapping[str, JSON]]) -> None:
    """Raises InvalidRequest for two tools of one name."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise InvalidRequest("two tools have the same name", param="tools")


def joined_text(texts: Iterable[str], role: str) -> str:
    """Join text parts. An assistant's are pieces of one reply, those of others are separate."""
    return ("" if role == "assistant" else "\n").join(texts)


def schema_constraint(schema: Mapping[str, JSON]) -> Constraint:
    """Return the constraint to one JSON value that fits the schema."""
    return Constraint(ConstraintKind.JSON_SCHEMA, orjson.dumps(schema).decode())


def with_tool_names(
    messages: Iterable[Message], named: Callable[[int, str | None], Message] | None = None
) -> tuple[Message, ...]:
    """Return the messages, each tool result with the name of the tool that it answers, where the history tells.

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
    """Return the constraint of a turn whose answer, if it is one, must be as `wanted`; not that of forced calls."""
    if wanted is None or choice is ToolChoice.REQUIRED:
        return None
    if not tools or choice is ToolChoice.NONE:
        return wanted
    return _answer_or_calls(wanted, parser, tools, is_parallel=is_parallel)


def _answer_or_calls(
    answer: Constraint, parser: Parser, tools: Sequence[Mapping[str, JSON]], *, is_parallel: bool
) -> Constraint:
    """Allow an answer of a constrained form, or else calls of tools and nothing beside them."""
    calls = orjson.loads(parser.call_constraint(tools, forced=None, is_parallel=is_parallel).text)
    if answer.kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT):
        schema = orjson.loads(answer.text) if answer.kind is ConstraintKind.JSON_SCHEMA else {"type": "object"}
        form: JSON = {"type": "json_schema", "json_schema": schema}
    else:
        form = format_of(answer)
    either = {"type": "or", "elements": [form, calls["format"]]}
    tag = {"type": "structural_tag", "format": either}
    return Constraint(ConstraintKind.STRUCTURAL_TAG, orjson.dumps(tag).decode())


# --- answers ----------------------------------------------------------------------------------------------


def versions_of(node: Node) -> list[Answer]:
    """Return the spans of weight versions, over the choice's `token_ids`."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in node.reply.weight_versions]


def session_extra(result: ChatResult) -> Answer:
    """Return what became of the call in its session: turns, how history was matched, the calls' tokens."""
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
    """Return what a trainer wants of an answer of one choice: session and versions, and the ids if asked for."""
    node = result.choices[0]
    extras: dict[str, Any] = {"session": session_extra(result), "weight_versions": versions_of(node)}
    if with_token_ids:
        extras["prompt_token_ids"] = list(result.prompt_ids)
        extras["token_ids"] = node.reply.token_ids.tolist()
    return extras


# --- blocks -----------------------------------------------------------------------------------------------


class BlockKind(StrEnum):
    """The content of a block of a reply."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a reply that clients see as one thing. `text` of a CALL is its arguments."""

    index: int
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""


def blocks_of(message: Message) -> tuple[Block, ...]:
    """Return the blocks of a whole reply: reasoning, text, calls. Never none: an empty turn is an empty text."""
    blocks: list[Block] = []
    if message.reasoning:
        blocks.append(Block(0, BlockKind.REASONING, message.reasoning))
    if message.content or not (blocks or message.tool_calls):
        blocks.append(Block(len(blocks), BlockKind.TEXT, message.content))
    for call in message.tool_calls:
        blocks.append(Block(len(blocks), BlockKind.CALL, arguments_text(call), call.id, call.name))
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A block opens; `block.text` is empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """More of the open block."""

    block: Block  # as it was opened
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """A block closes; `block` is whole."""

    block: Block


BlockStep: TypeAlias = BlockStart | BlockDelta | BlockEnd


class BlockReader:
    """The pieces of one choice as blocks, one open at a time. Text after a call is a block of its own."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._call_index: int | None = None  # of the open block, if it is a call
        self._parts: list[str] = []
        self._done: list[Block] = []

    @property
    def blocks(self) -> Sequence[Block]:
        """Those that are closed."""
        return self._done

    def feed(self, piece: TurnPiece) -> Iterator[BlockStep]:
        """Yield the steps that a piece adds."""
        if piece.reasoning:
            yield from self._text(BlockKind.REASONING, piece.reasoning)
        if piece.content:
            yield from self._text(BlockKind.TEXT, piece.content)
        for delta in piece.calls:
            yield from self._call(delta)

    def finish(self) -> Iterator[BlockStep]:
        """Close what is open, after the last piece."""
        if self._open is None and not self._done:
            yield from self._start(BlockKind.TEXT)
        yield from self._end()

    def _text(self, kind: BlockKind, text: str) -> Iterator[BlockStep]:
        if self._open is None or self._open.kind is not kind:
            yield from self._start(kind)
        yield self._add(text)

    def _call(self, delta: CallDelta) -> Iterator[BlockStep]:
        if self._call_index != delta.index:
            yield from self._start(BlockKind.CALL, delta.id or "", delta.name or "")
            self._call_index = delta.index
        if delta.arguments:
            yield self._add(delta.arguments)

    def _start(self, kind: BlockKind, call_id: str = "", name: str = "") -> Iterator[BlockStep]:
        yield from self._end()
        self._open = Block(len(self._done), kind, "", call_id, name)
        yield BlockStart(self._open)

    def _add(self, text: str) -> BlockDelta:
        assert self._open is not None
        self._parts.append(text)
        return BlockDelta(self._open, text)

    def _end(self) -> Iterator[BlockStep]:
        if self._open is None:
            return
        block = replace(self._open, text="".join(self._parts))
        self._done.append(block)
        self._open, self._call_index, self._parts = None, None, []
        yield BlockEnd(block)
