"""The OpenAI Responses dialect: converts a body to a `ChatCall`, and results to response objects and stream events.

Pure functions. The items of one assistant turn (reasoning, message, calls) become one Message, even if tool results
are between them. Ids of responses and items contain their call and session, so any process of the endpoint resolves
an id as long as the session has the turn. Events:
https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from agentloop.chat.blocks import Block, BlockKind, BlockWriter
from agentloop.chat.call import (
    Answer,
    ChatCall,
    ChatModel,
    ChatResult,
    ToolChoice,
    allowed_tools,
    answer_constraint,
    capture_extras,
    check_tool_choice,
    check_tool_names,
    function_definition,
    joined_text,
    read_call,
    read_content,
    schema_constraint,
    shown_images,
    with_tool_names,
)
from agentloop.chat.choices import TokenTexts
from agentloop.chat.fields import HostedSearch
from agentloop.chat.responses_bodies import (
    CallItem,
    Item,
    ItemReference,
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
from agentloop.errors import AgentLoopError, InvalidRequest, NotFound, ResponseNotFound, UnsupportedParameter
from agentloop.generation.turn_reader import TurnFinish, TurnPiece, finish_of
from agentloop.images import Image
from agentloop.trajectory.node import Reply
from agentloop.types import JSON, Constraint, ConstraintKind, Message, ToolCall

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_RESPONSE_ID = re.compile(
    r"resp_(?P<call>[0-9a-f]{32})_(?P<has_instructions>[01])_(?P<session>[A-Za-z0-9._\-]{1,128})"
)
_ITEM_ID = re.compile(
    r"(?P<kind>rs|msg|fc)_(?P<call>[0-9a-f]{32})_(?P<number>\d{1,6})(?:_(?P<session>[A-Za-z0-9._\-]{1,128}))?"
)

Turns: TypeAlias = Callable[[str], Sequence[Message]]
"""Returns a session's conversation up to and including the reply to the call with this id. Raises NotFound."""

# Requests


def referenced_session(body: ResponsesBody) -> tuple[str, str, str] | None:
    """Return the session that the ids in a body refer to, and the first such field with its id; None without ids.

    Raises ResponseNotFound for an id that this service did not create, and InvalidRequest for ids of two sessions.
    """
    references = [] if body.previous_response_id is None else [("previous_response_id", body.previous_response_id)]
    if not isinstance(body.input, str):
        items = enumerate(body.input)
        references += [(f"input.{index}.id", item.id) for index, item in items if isinstance(item, ItemReference)]
    sessions: dict[str, tuple[str, str]] = {}
    for param, reference_id in references:
        match = (_RESPONSE_ID if param == "previous_response_id" else _ITEM_ID).fullmatch(reference_id)
        if match is None or match["session"] is None:
            raise not_found(reference_id, param)
        sessions.setdefault(match["session"], (param, reference_id))
    if len(sessions) > 1:
        raise InvalidRequest(
            f"the ids belong to different sessions, {' and '.join(map(repr, list(sessions)[:2]))}", param=param
        )
    return next(((session_id, *reference) for session_id, reference in sessions.items()), None)


def not_found(given: str, param: str) -> ResponseNotFound:
    """Return the error for an id that is not an id of the caller's responses and items."""
    return ResponseNotFound(
        f"{given[:200]!r} was not found: this user and session have no completed response with this id, or it was"
        " deleted or expired with its session; send the complete history as `input`",
        param=param,
    )


def to_call(body: ResponsesBody, model: ChatModel, turns: Turns | None = None) -> ChatCall:
    """Convert a body to a `ChatCall`. `turns` returns conversations of the session that the body refers to.

    Raises InvalidRequest, UnsupportedParameter for an unsupported field that would change the answer, and
    ResponseNotFound.
    """
    tools = _tools(body)
    choice, forced = _tool_choice(body)
    check_tool_choice(choice, forced, tools)
    is_parallel = body.parallel_tool_calls is not False
    text_constraint = _wanted(body.text.format if body.text is not None else None)
    constraint = answer_constraint(text_constraint, model.parser, tools, choice, is_parallel=is_parallel)
    effort = body.reasoning.effort if body.reasoning is not None else None
    history = _history(body, turns)
    sampling = sampling_params(body, body.max_output_tokens, model.vocab_size, constraint)
    return ChatCall(
        messages=with_tool_names(history.messages()),
        images=shown_images(history.images, model, "input"),
        sampling=replace(sampling, num_top_logprobs=body.top_logprobs or 0),
        tools=tools,
        tool_choice=choice,
        forced_tool=forced,
        is_parallel=is_parallel,
        max_tokens=body.max_output_tokens,
        template_kwargs=template_kwargs(body, model.template_arguments, effort),
        is_strict=body.strict_history is True,
        stop_in_reasoning=body.stop_in_reasoning is True,
        timeout_s=model.timeout_s,
        constraint_param="text.format",
        affinity=body.prompt_cache_key or "",
    )


def _tools(body: ResponsesBody) -> tuple[Mapping[str, JSON], ...]:
    """Return the tool definitions that `tool_choice` allows."""
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
            yield from ((tool.name, function) for function in tool.tools)
        elif isinstance(tool, ResponsesFunctionTool):
            yield None, tool


def _full_name(namespace: str | None, name: str) -> str:
    """Return the function name that is shown to the policy."""
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
    return schema_constraint(wanted.schema_, "text.format.schema")


def _history(body: ResponsesBody, turns: Turns | None) -> _History:
    history = _History(turns)
    if body.instructions:
        history.add_message(Message("system", body.instructions))
    if body.previous_response_id is not None:
        history.add_response(body.previous_response_id)
    if isinstance(body.input, str):
        history.add_message(Message("user", body.input))
    else:
        for index, item in enumerate(body.input):
            history.add(item, f"input.{index}")
    return history


@dataclass(slots=True)
class _AssistantTurn:
    """Collects the items of an assistant turn."""

    source: str | None  # the id of the call that sampled the turn, if the items' ids contain it
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        thoughts = "".join(self.reasoning)
        return Message("assistant", joined_text(self.texts, "assistant"), tuple(self.calls), reasoning=thoughts)


class _History:
    """Converts items to messages. The items of one assistant turn become one message."""

    def __init__(self, turns: Turns | None) -> None:
        self.images: list[Image] = []
        self._turns = turns
        self._entries: list[Message | _AssistantTurn] = []
        self._turn: _AssistantTurn | None = None  # the last turn, while only tool results have followed it

    def add(self, item: Item, param: str) -> None:
        """Add an item. `param` is its field name, for errors."""
        if isinstance(item, OutputItem):
            message = self._shown("tool", item.output, f"{param}.output")
            self._entries.append(replace(message, tool_call_id=item.call_id))
        elif isinstance(item, ReasoningItem):
            message = self._shown("assistant", item.content or item.summary, param)
            self._assistant(item.id, is_opening=True).reasoning.append(message.content)
        elif isinstance(item, CallItem):
            name = _full_name(item.namespace, item.name)
            self._assistant(item.id).calls.append(read_call(item.call_id, name, item.arguments))
        elif isinstance(item, ItemReference):
            self._add_reference(item.id, f"{param}.id")
        elif item.role == "assistant":
            message = self._shown("assistant", item.content, f"{param}.content")
            self._assistant(item.id).texts.append(message.content)
        else:
            role = "system" if item.role == "developer" else item.role
            self.add_message(self._shown(role, item.content, f"{param}.content"))

    def add_response(self, response_id: str) -> None:
        """Add the conversation up to a response, without its `instructions`, which are not inherited."""
        param = "previous_response_id"
        match = _matched(_RESPONSE_ID, response_id, param)
        messages = self._conversation(match["call"], response_id, param)
        if any(message.images for message in messages):  # the session has the image tokens, but not the files
            raise UnsupportedParameter(
                "a conversation with images cannot be continued by id: send the complete history as `input`",
                param=param,
            )
        for message in messages[int(match["has_instructions"]) :]:
            self.add_message(message)

    def _add_reference(self, item_id: str, param: str) -> None:
        match = _matched(_ITEM_ID, item_id, param)
        reply, number = self._conversation(match["call"], item_id, param)[-1], int(match["number"])
        turn = self._assistant(item_id, is_opening=match["kind"] == _PREFIXES[BlockKind.REASONING])
        if match["kind"] == _PREFIXES[BlockKind.CALL]:
            if number >= len(reply.tool_calls):
                raise not_found(item_id, param)
            turn.calls.append(reply.tool_calls[number])
        # A streamed reply may have several text items. A reference to the first one is expanded to the complete
        # text.
        elif number == 0 and match["kind"] == _PREFIXES[BlockKind.TEXT]:
            turn.texts.append(reply.content)
        elif number == 0:
            turn.reasoning.append(reply.reasoning)

    def _conversation(self, call_id: str, given: str, param: str) -> Sequence[Message]:
        try:
            messages = self._turns(call_id) if self._turns is not None else ()
        except NotFound:
            messages = ()
        if not messages:
            raise not_found(given, param)
        return messages

    def _shown(self, role: str, content: str | Sequence[Any] | None, param: str) -> Message:
        text, images, refs = read_content(content, role, param)
        if images and role not in ("user", "tool"):
            raise UnsupportedParameter(f"a message of role {role!r} cannot have images", param=param)
        self.images += images
        return Message(role, text, images=tuple(refs))

    def add_message(self, message: Message) -> None:
        self._entries.append(message)
        self._turn = None

    def messages(self) -> list[Message]:
        return [entry.message() if isinstance(entry, _AssistantTurn) else entry for entry in self._entries]

    def _assistant(self, item_id: str | None, *, is_opening: bool = False) -> _AssistantTurn:
        """Return the turn of an item: the turn with its id's call, else the turn that it directly follows."""
        match = _ITEM_ID.fullmatch(item_id) if item_id is not None else None
        source = match["call"] if match else None
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


def _matched(pattern: re.Pattern[str], given: str, param: str) -> re.Match[str]:
    match = pattern.fullmatch(given)
    if match is None:
        raise not_found(given, param)
    return match


# Answers


class ResponseWriter(BlockWriter):
    """Writes one response, as a whole or as stream events. Call `begin` before the first event."""

    def __init__(self, body: ResponsesBody, texts: TokenTexts, created_at: int) -> None:
        super().__init__()
        self._body = body
        self._texts = texts
        self._created_at = created_at
        self._session_id = self._call_id = ""
        self._num_events = 0
        self._piece: TurnPiece | None = None  # the last piece, until its tokens are assigned to a block
        self._logprobs: dict[int, list[Answer]] = {}  # logprobs entries of text blocks, by block index
        self._places = {_full_name(space, tool.name): (space, tool.name) for space, tool in _functions(body)}

    def begin(self, session_id: str, call_id: str) -> None:
        """Derive the response's id from its call, so that a retry of the call gets the same ids."""
        self._session_id, self._call_id = session_id, call_id

    def error_event(self, error: AgentLoopError) -> Answer:
        """Return the event of a failure within a stream. Its nested envelope makes the client library raise."""
        return self._event("error", code=error.code, message=error.message, param=error.param, **error.to_wire())

    def _begun(self) -> Iterator[Answer]:
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))

    def _added(self, piece: TurnPiece) -> Iterator[Answer]:
        self._piece = piece
        if not (piece.content or piece.reasoning or piece.calls) and self._blocks:
            self._take_logprobs(self._blocks[-1])  # tokens without text, such as the stop token
        yield from super()._added(piece)

    def _take_logprobs(self, block: Block) -> list[Answer]:
        """Return the logprobs of the last piece, and record them for the completed text block."""
        piece, self._piece = self._piece, None
        if piece is None or block.kind is not BlockKind.TEXT or not self._body.shows_logprobs:
            return []
        entries = self._texts.entries(piece.token_ids, piece.logprobs, piece.top_logprobs)
        self._logprobs.setdefault(block.index, []).extend(entries)
        return entries

    def _opened(self, block: Block) -> Iterator[Answer]:
        position: Answer = {"output_index": block.index}
        yield self._event("response.output_item.added", **position, item=self._item(block, "in_progress"))
        if block.kind is not BlockKind.CALL:
            position |= {"item_id": self._item_id(block), "content_index": 0}
            yield self._event("response.content_part.added", **position, part=self._part(block))

    def _grown(self, block: Block, text: str) -> Iterator[Answer]:
        position = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind is BlockKind.CALL:
            yield self._event("response.function_call_arguments.delta", **position, delta=text)
        elif block.kind is BlockKind.REASONING:
            yield self._event("response.reasoning_text.delta", **position, content_index=0, delta=text)
        else:
            logprobs = self._take_logprobs(block)
            yield self._event(
                "response.output_text.delta", **position, content_index=0, delta=text, logprobs=logprobs
            )

    def _closed(self, block: Block, finish: TurnFinish | None) -> Iterator[Answer]:
        yield from self._done(block)
        item = self._item(block, _item_status(finish))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _ended(self, result: ChatResult, blocks: list[Block]) -> Iterator[Answer]:
        final = self._answer(result, blocks)
        yield self._event(f"response.{final['status']}", response=final)

    def _done(self, block: Block) -> Iterator[Answer]:
        position = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind is BlockKind.CALL:
            _, name = self._places.get(block.name, (None, block.name))
            yield self._event("response.function_call_arguments.done", **position, name=name, arguments=block.text)
            return
        position["content_index"] = 0
        if block.kind is BlockKind.REASONING:
            yield self._event("response.reasoning_text.done", **position, text=block.text)
        else:
            logprobs = self._logprobs.get(block.index, [])
            yield self._event("response.output_text.done", **position, text=block.text, logprobs=logprobs)
        yield self._event("response.content_part.done", **position, part=self._part(block))

    def _event(self, kind: str, **fields: Any) -> Answer:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _answer(self, result: ChatResult, blocks: list[Block]) -> Answer:
        reply = result.choices[0].reply
        self.begin(result.session_id, result.call_id)
        if self._body.shows_logprobs:  # recompute: one piece of a stream may contain tokens of several blocks
            texts = [block.index for block in blocks if block.kind is BlockKind.TEXT]
            self._logprobs = {index: self._text_logprobs(reply) for index in texts[:1]}
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
            "id": f"resp_{self._call_id}_{int(bool(body.instructions))}_{self._session_id}",
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
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": _echo(body.text.format if body.text is not None else None),
            "tool_choice": _echoed_choice(body),
            "tools": [_echoed_tool(tool, body) for tool in body.tools or () if not isinstance(tool, HostedSearch)],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._call_id}_{block.number}_{self._session_id}"

    def _text_logprobs(self, reply: Reply) -> list[Answer]:
        """Return the logprobs of the tokens between the reasoning and the first call."""
        start = reply.num_reasoning_tokens
        end = min((call.token_start for call in reply.message.tool_calls), default=len(reply.token_ids))
        token_ids, logprobs = reply.token_ids[start:end].tolist(), reply.logprobs[start:end].tolist()
        return self._texts.entries(token_ids, logprobs, reply.top_logprobs[start:end])

    def _part(self, block: Block) -> Answer:
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs.get(block.index, [])
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block, status: str) -> Answer:
        """Return the output item of a block. An item that is in progress has no content."""
        item: Answer = {"id": self._item_id(block), "status": status}
        parts = [] if status == "in_progress" else [self._part(block)]
        if block.kind is BlockKind.CALL:
            namespace, name = self._places.get(block.name, (None, block.name))
            qualifier = {} if namespace is None else {"namespace": namespace}
            call = {"call_id": block.call_id, "name": name, "arguments": block.text}
            return {**item, "type": "function_call", **call, **qualifier}
        if block.kind is BlockKind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        return {**item, "type": "message", "role": "assistant", "content": parts}


def _item_status(finish: TurnFinish | None) -> str:
    return "incomplete" if finish is TurnFinish.LENGTH else "completed"


def _echo(wanted: ResponsesTextFormat | None) -> dict[str, JSON]:
    if wanted is None:
        return {"format": {"type": "text"}}
    return {"format": wanted.model_dump(by_alias=True, exclude_none=True)}


def _echoed_choice(body: ResponsesBody) -> JSON:
    choice = body.tool_choice
    return (
        choice.model_dump() if isinstance(choice, ResponsesNamedTool | ResponsesAllowedTools) else choice or "auto"
    )


def _echoed_tool(tool: ResponsesFunctionTool | NamespaceTool, body: ResponsesBody) -> dict[str, JSON]:
    if isinstance(tool, NamespaceTool):
        tools = [_echoed_tool(function, body) for function in tool.tools]
        return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": tools}
    echoed = tool.model_dump(include={"type", "name", "description", "parameters", "strict"})
    # A grammar enforces only the schemas of forced calls, so the answer reports `strict: false` otherwise.
    is_enforced = _tool_choice(body)[0] is ToolChoice.REQUIRED
    return echoed | {"strict": False} if tool.strict and not is_enforced else echoed


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
