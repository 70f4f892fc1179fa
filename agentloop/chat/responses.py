"""The Responses dialect: its body as a `ChatCall`, and results and pieces as response objects and events.

Pure. The items of one assistant turn (reasoning, message, calls) are one Message, whether its results came after
all of them or in between. A response is not kept under its id: `previous_response_id` is refused, and history comes
with every request. Events: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentloop.chat.blocks import Block, BlockKind, BlockWriter
from agentloop.chat.call import ChatCall, ChatModel, ChatResult, ToolChoice
from agentloop.chat.dialect import (
    Answer,
    allowed_tools,
    answer_constraint,
    capture_extras,
    check_tool_choice,
    check_tool_names,
    function_definition,
    joined_text,
    read_call,
    schema_constraint,
    with_tool_names,
)
from agentloop.chat.fields import HostedSearch, RefusalPart
from agentloop.chat.responses_bodies import (
    CallItem,
    Content,
    Item,
    MessageItem,
    NamespaceTool,
    OutputItem,
    ReasoningItem,
    ResponsesAllowedTools,
    ResponsesBody,
    ResponsesFunctionTool,
    ResponsesNamedTool,
    ResponsesTextFormat,
)
from agentloop.chat.sampling import sampling_params, template_kwargs
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.generation.turn_piece import TurnFinish, finish_of
from agentloop.types import JSON, Constraint, ConstraintKind, Message, ToolCall

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})_\d{1,6}")

# --- the request ------------------------------------------------------------------------------------------


def to_call(body: ResponsesBody, model: ChatModel) -> ChatCall:
    """Return a body's `ChatCall`. Raises InvalidRequest, and UnsupportedParameter for what would change the
    answer."""
    tools = _tools(body)
    choice, forced = _tool_choice(body)
    check_tool_choice(choice, forced, tools)
    is_parallel = body.parallel_tool_calls is not False
    wanted = _wanted(body.text.format if body.text is not None else None)
    constraint = answer_constraint(wanted, model.parser, tools, choice, is_parallel=is_parallel)
    effort = body.reasoning.effort if body.reasoning is not None else None
    return ChatCall(
        messages=_messages(body),
        sampling=sampling_params(body, body.max_output_tokens, model.vocab_size, constraint),
        tools=tools,
        tool_choice=choice,
        forced_tool=forced,
        is_parallel=is_parallel,
        max_tokens=body.max_output_tokens,
        template_kwargs=template_kwargs(body, model.template_arguments, effort),
        is_strict=body.strict_history is True,
        timeout_s=model.timeout_s,
        constraint_param="text.format",
    )


def _tools(body: ResponsesBody) -> tuple[Mapping[str, JSON], ...]:
    """The definitions, without those that the choice of this call leaves out."""
    tools = [
        function_definition(_full_name(namespace, tool.name), tool.description, tool.parameters)
        for namespace, tool in _functions(body)
    ]
    check_tool_names(tools)
    if isinstance(body.tool_choice, ResponsesAllowedTools):
        names = {_full_name(tool.namespace, tool.name) for tool in body.tool_choice.tools}
        return allowed_tools(tools, names, "tool_choice.tools")
    return tuple(tools)


def _functions(body: ResponsesBody) -> Iterator[tuple[str | None, ResponsesFunctionTool]]:
    """Yield the functions that the policy may call, each with its namespace."""
    for tool in body.tools or ():
        if isinstance(tool, NamespaceTool):
            yield from ((tool.name, one) for one in tool.tools)
        elif isinstance(tool, ResponsesFunctionTool):
            yield None, tool


def _full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the policy knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def _tool_choice(body: ResponsesBody) -> tuple[ToolChoice, str | None]:
    if isinstance(body.tool_choice, ResponsesNamedTool):
        return ToolChoice.REQUIRED, _full_name(body.tool_choice.namespace, body.tool_choice.name)
    if isinstance(body.tool_choice, ResponsesAllowedTools):
        return ToolChoice(body.tool_choice.mode), None
    return ToolChoice(body.tool_choice or "auto"), None


def _wanted(wanted: ResponsesTextFormat | None) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT)
    if wanted.schema_ is None:
        raise InvalidRequest("a format of type json_schema needs a schema", param="text.format.schema")
    return schema_constraint(wanted.schema_)


def _messages(body: ResponsesBody) -> tuple[Message, ...]:
    history = _History()
    if body.instructions:
        history.add_message(Message("system", body.instructions))
    if isinstance(body.input, str):
        history.add_message(Message("user", body.input))
    else:
        for item in body.input:
            history.add(item)
    return with_tool_names(history.messages())


@dataclass(slots=True)
class _AssistantTurn:
    """An assistant turn that is being put together from items."""

    source: str | None  # the response it came from, if its ids tell
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        thoughts = "".join(self.thoughts)
        return Message("assistant", joined_text(self.texts, "assistant"), tuple(self.calls), reasoning=thoughts)


class _History:
    """Items as messages. What one assistant turn said is one message."""

    def __init__(self) -> None:
        self._entries: list[Message | _AssistantTurn] = []
        self._turn: _AssistantTurn | None = None  # the last one, as long as only tool results came after it

    def add(self, item: Item) -> None:
        if isinstance(item, OutputItem):
            text = _text(item.output, "tool")
            self._entries.append(Message("tool", text, tool_call_id=item.call_id))
        elif isinstance(item, ReasoningItem):
            parts = item.content if item.content else item.summary
            self._assistant(item.id, is_opening=True).thoughts.append(_text(parts, "assistant"))
        elif isinstance(item, CallItem):
            name = _full_name(item.namespace, item.name)
            self._assistant(item.id).calls.append(read_call(item.call_id, name, item.arguments))
        elif item.role == "assistant":
            self._assistant(item.id).texts.append(_text(item.content, "assistant"))
        else:
            self.add_message(_observed(item))

    def add_message(self, message: Message) -> None:
        self._entries.append(message)
        self._turn = None

    def messages(self) -> list[Message]:
        return [entry.message() if isinstance(entry, _AssistantTurn) else entry for entry in self._entries]

    def _assistant(self, item_id: str | None, *, is_opening: bool = False) -> _AssistantTurn:
        """The turn that an item belongs to; where ids do not tell, the one that it directly follows."""
        match = _ITEM_ID.fullmatch(item_id) if item_id is not None else None
        source = match[1] if match else None
        turn = self._turn
        if turn is not None:
            if source is not None and turn.source is not None:
                is_same = source == turn.source
            else:
                is_same = self._entries[-1] is turn and not (is_opening and bool(turn.texts or turn.calls))
            if is_same:
                turn.source = turn.source or source
                return turn
        self._turn = _AssistantTurn(source)
        self._entries.append(self._turn)
        return self._turn


def _observed(item: MessageItem) -> Message:
    role = "system" if item.role == "developer" else item.role
    return Message(role, _text(item.content, role))


def _text(content: Content, role: str) -> str:
    if isinstance(content, str):
        return content
    return joined_text((part.refusal if isinstance(part, RefusalPart) else part.text for part in content), role)


# --- the answer -------------------------------------------------------------------------------------------


class ResponseWriter(BlockWriter):
    """Writes one response, whole or as events; `response_key` is 32 hex digits, new for each response."""

    def __init__(self, body: ResponsesBody, response_key: str, created_at: int) -> None:
        super().__init__()
        self._body = body
        self._key = response_key
        self._created_at = created_at
        self._num_events = 0
        self._places = {_full_name(space, tool.name): (space, tool.name) for space, tool in _functions(body)}

    def error_event(self, error: AgentLoopError) -> Answer:
        """Return the event of a failure amid a stream; its nested envelope makes the client library raise."""
        return self._event("error", code=error.code, message=error.message, param=error.param, **error.to_wire())

    def _begun(self) -> Iterator[Answer]:
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))

    def _opened(self, block: Block) -> Iterator[Answer]:
        place: Answer = {"output_index": block.index}
        yield self._event("response.output_item.added", **place, item=self._item(block, "in_progress"))
        if block.kind is not BlockKind.CALL:
            place |= {"item_id": self._item_id(block), "content_index": 0}
            yield self._event("response.content_part.added", **place, part=_part(block))

    def _grown(self, block: Block, text: str) -> Iterator[Answer]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind is BlockKind.CALL:
            yield self._event("response.function_call_arguments.delta", **place, delta=text)
        elif block.kind is BlockKind.REASONING:
            yield self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        else:
            yield self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=[])

    def _closed(self, block: Block, finish: TurnFinish | None) -> Iterator[Answer]:
        yield from self._done(block)
        item = self._item(block, _item_status(finish))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _ended(self, result: ChatResult, blocks: list[Block]) -> Iterator[Answer]:
        final = self._answer(result, blocks)
        yield self._event(f"response.{final['status']}", response=final)

    def _done(self, block: Block) -> Iterator[Answer]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind is BlockKind.CALL:
            _, name = self._places.get(block.name, (None, block.name))
            yield self._event("response.function_call_arguments.done", **place, name=name, arguments=block.text)
            return
        place["content_index"] = 0
        if block.kind is BlockKind.REASONING:
            yield self._event("response.reasoning_text.done", **place, text=block.text)
        else:
            yield self._event("response.output_text.done", **place, text=block.text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(block))

    def _event(self, kind: str, **fields: Any) -> Answer:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _answer(self, result: ChatResult, blocks: list[Block]) -> Answer:
        reply = result.choices[0].reply
        finish = finish_of(reply)
        is_cut = finish is TurnFinish.LENGTH
        items = [
            self._item(block, _item_status(finish if index == len(blocks) - 1 else None))
            for index, block in enumerate(blocks)
        ]
        response = self._response("incomplete" if is_cut else "completed", items)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["usage"] = _usage(result)
        return response | capture_extras(result, with_token_ids=self._body.return_token_ids is True)

    def _response(self, status: str, items: list[Answer]) -> Answer:
        body = self._body
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {key: value for key, value in (body.metadata or {}).items() if value is not None},
            "model": body.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": _echo(body.text.format if body.text is not None else None),
            "tool_choice": _echoed_choice(body),
            "tools": [_echoed_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedSearch)],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._key}_{block.index}"

    def _item(self, block: Block, status: str) -> Answer:
        """The output item of a block; one that is in progress has no content yet."""
        item: Answer = {"id": self._item_id(block), "status": status}
        parts = [] if status == "in_progress" else [_part(block)]
        if block.kind is BlockKind.CALL:
            namespace, name = self._places.get(block.name, (None, block.name))
            place = {} if namespace is None else {"namespace": namespace}
            call = {"call_id": block.call_id, "name": name, "arguments": block.text}
            return {**item, "type": "function_call", **call, **place}
        if block.kind is BlockKind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        return {**item, "type": "message", "role": "assistant", "content": parts}


def _item_status(finish: TurnFinish | None) -> str:
    return "incomplete" if finish is TurnFinish.LENGTH else "completed"


def _part(block: Block) -> dict[str, JSON]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _echo(wanted: ResponsesTextFormat | None) -> dict[str, JSON]:
    if wanted is None:
        return {"format": {"type": "text"}}
    return {"format": wanted.model_dump(by_alias=True, exclude_none=True)}


def _echoed_choice(body: ResponsesBody) -> JSON:
    choice = body.tool_choice
    return (
        choice.model_dump() if isinstance(choice, ResponsesNamedTool | ResponsesAllowedTools) else choice or "auto"
    )


def _echoed_tool(tool: ResponsesFunctionTool | NamespaceTool) -> dict[str, JSON]:
    if isinstance(tool, NamespaceTool):
        tools = [_echoed_tool(one) for one in tool.tools]
        return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": tools}
    return tool.model_dump(include={"type", "name", "description", "parameters", "strict"})


def _usage(result: ChatResult) -> dict[str, JSON]:
    reply = result.choices[0].reply
    num_input, num_output = len(result.prompt_ids), len(reply.token_ids)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": reply.num_reasoning_tokens},
        "total_tokens": num_input + num_output,
    }
