"""The Anthropic Messages dialect: converts a body to a `ChatCall`, and results to messages and stream events.

Pure functions. The blocks of one assistant turn become one Message; each tool result becomes its own message. A
malformed call is a `tool_use` block whose input has the single key `MALFORMED_KEY`, so that it is recognized when
the client resends it. Events: https://docs.anthropic.com/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final

import orjson

from agentloop.api.requests import ImagePart
from agentloop.chat.anthropic_bodies import (
    ContentBlock,
    CountTokensBody,
    CustomTool,
    HistoryTurn,
    MessagesBody,
    TextContent,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from agentloop.chat.blocks import Block, BlockKind, BlockWriter
from agentloop.chat.call import (
    Answer,
    ChatCall,
    ChatModel,
    ChatResult,
    ToolChoice,
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
    strict_report,
    with_tool_names,
)
from agentloop.chat.fields import TextPart
from agentloop.chat.sampling import sampling_params, template_kwargs
from agentloop.errors import AgentLoopError, InvalidRequest, UnsupportedParameter
from agentloop.generation.turn_reader import TurnFinish, finish_of
from agentloop.images import Image
from agentloop.types import JSON, Message, ToolCall, ToolCallStatus

MALFORMED_KEY: Final = "malformed_tool_call"
"""The only key in the input of a malformed call. Its value is the text that the policy wrote."""

SIGNATURE: Final = "agentloop"
"""The signature of thinking blocks, which is not verified. Many clients resend only signed thinking blocks."""

_NO_THREADS = "thread_unsupported_request"
"""On this code in an error's details, Anthropic's clients retry without a thread and send the complete history."""

_BUDGET: Final = "thinking_budget"
"""The chat template argument that limits reasoning tokens, as in Seed-OSS."""

_ERROR_MARK: Final = "Error: "
"""The prefix of a tool result with `is_error`."""

_BLOCK_TYPES = {
    "user": ("text", "image", "redacted_thinking", "tool_result"),
    "system": ("text", "redacted_thinking"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_BILLING = "x-anthropic-billing-header:"
_CHOICES = {
    "auto": ToolChoice.AUTO,
    "any": ToolChoice.REQUIRED,
    "tool": ToolChoice.REQUIRED,
    "none": ToolChoice.NONE,
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# Requests


def to_call(body: MessagesBody, model: ChatModel) -> ChatCall:
    """Convert a body to a `ChatCall`.

    Raises InvalidRequest, and UnsupportedParameter for an unsupported field that would change the answer.
    """
    messages, tools, images = prompt(body)
    choice = _choice(body)
    forced = _forced_tool(body)
    check_tool_choice(choice, forced, tools)
    is_parallel = body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use
    schema = body.output_config.format if body.output_config is not None else None
    constraint_param = "output_config.format" if schema is not None else "output_format"
    schema = schema if schema is not None else body.output_format
    format_constraint = schema_constraint(schema.schema_, constraint_param) if schema is not None else None
    constraint = answer_constraint(format_constraint, model.parser, tools, choice, is_parallel=is_parallel)
    budget = body.thinking.budget_tokens if body.thinking is not None and body.thinking.is_thinking else None
    # A budget of max_tokens - 1 or more has no effect beyond the limit of `max_tokens`, so it is accepted.
    if budget is not None and budget + 1 < body.max_tokens and _BUDGET not in model.template_arguments:
        raise UnsupportedParameter(
            f"`budget_tokens` is not supported: this model's chat template has no argument `{_BUDGET}`."
            " Use the type 'adaptive', or limit the complete answer with `max_tokens`",
            param="thinking.budget_tokens",
        )
    return ChatCall(
        messages=messages,
        images=shown_images(images, model, "messages"),
        sampling=sampling_params(body, body.max_tokens, model.vocab_size, constraint),
        tools=tools,
        tool_choice=choice,
        forced_tool=forced,
        is_parallel=is_parallel,
        max_tokens=body.max_tokens,
        stop=tuple(dict.fromkeys(body.stop_sequences)),
        template_kwargs=template_arguments(body, model),
        is_strict=body.strict_history is True,
        stop_in_reasoning=body.stop_in_reasoning is True,
        timeout_s=model.timeout_s,
        constraint_param=constraint_param,
    )


def template_arguments(body: CountTokensBody, model: ChatModel) -> dict[str, JSON]:
    """Return the chat template arguments of a body."""
    effort = body.output_config.effort if body.output_config is not None else None
    is_thinking = body.thinking.is_thinking if body.thinking is not None else None
    budget = body.thinking.budget_tokens if is_thinking and body.thinking is not None else None
    own: dict[str, JSON] = {} if budget is None else {_BUDGET: budget}
    return template_kwargs(body, model.template_arguments, effort, is_thinking=is_thinking, own=own)


def prompt(body: CountTokensBody) -> tuple[tuple[Message, ...], tuple[Mapping[str, JSON], ...], list[Image]]:
    """Return the messages, the tools and the images of a body's prompt. Raises the errors of `to_call`."""
    tools = tuple(
        function_definition(tool.name, _description(tool), tool.input_schema)
        for tool in body.tools or []
        if isinstance(tool, CustomTool)
    )
    check_tool_names(tools)
    if body.messages[-1].role == "assistant":
        raise UnsupportedParameter(
            "the last message has role 'assistant', but prefilled replies are not supported: remove it",
            param="messages",
        )
    images: list[Image] = []
    turns = enumerate(body.messages)
    messages = [
        message for index, turn in turns for message in _messages(turn, f"messages.{index}.content", images)
    ]
    if system := _system_text(body.system):
        messages.insert(0, Message("system", system))
    return with_tool_names(messages), tools, images


def _description(tool: CustomTool) -> str | None:
    """Return a tool's description followed by its input examples: chat templates have no field for examples."""
    if not tool.input_examples:
        return tool.description
    examples = [orjson.dumps(example).decode() for example in tool.input_examples]
    return "\n".join([*([tool.description] if tool.description else []), "Examples of the input:", *examples])


def _choice(body: MessagesBody) -> ToolChoice:
    return ToolChoice.AUTO if body.tool_choice is None else _CHOICES[body.tool_choice.type]


def _forced_tool(body: MessagesBody) -> str | None:
    choice = body.tool_choice
    if choice is None or choice.type != "tool":
        return None
    if choice.name is None:
        raise InvalidRequest("tool_choice of type 'tool' requires the `name` of a tool", param="tool_choice.name")
    return choice.name


def _system_text(system: TextContent | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    # Remove Claude Code's billing line: it differs in every call, so it would split the history, and is not a
    # prompt.
    return joined_text((block.text for block in system if not block.text.startswith(_BILLING)), "system")


def _messages(turn: HistoryTurn, param: str, images: list[Image]) -> Iterator[Message]:
    """Yield the messages of a turn and append their images to `images`. `param` names the content's field."""
    if isinstance(turn.content, str):
        yield Message(turn.role, turn.content)
        return
    for block in turn.content:
        if (kind := _type(block)) not in _BLOCK_TYPES[turn.role]:
            raise InvalidRequest(
                f"a message of role {turn.role!r} cannot have a block of type {kind!r}: expected one of "
                f"{', '.join(_BLOCK_TYPES[turn.role])}",
                param="messages",
            )
    if turn.role == "assistant":
        yield _assistant(turn.content)
        return
    if not turn.content:
        yield Message(turn.role, "")
    # Each tool result is one message, and so is each run of other blocks between tool results.
    for is_result, group in groupby(enumerate(turn.content), lambda item: isinstance(item[1], ToolResultBlock)):
        blocks = dict(group)
        for index, block in blocks.items():
            if isinstance(block, ToolResultBlock):
                yield _result(block, f"{param}.{index}.content", images)
        if not is_result:
            parts = [block for block in blocks.values() if not isinstance(block, ThinkingBlock)]
            yield _shown(turn.role, parts, param, images, first=min(blocks))


def _assistant(blocks: Sequence[ContentBlock]) -> Message:
    texts = [block.text for block in blocks if isinstance(block, TextPart)]
    thoughts = [block.thinking or "" for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_read_tool_use(block) for block in blocks if isinstance(block, ToolUseBlock)]
    return Message("assistant", joined_text(texts, "assistant"), tuple(calls), reasoning="".join(thoughts))


def _shown(
    role: str, content: str | Sequence[Any] | None, param: str, images: list[Image], *, first: int = 0
) -> Message:
    text, new_images, refs = read_content(content, role, param, first=first)
    images.extend(new_images)
    return Message(role, text, images=tuple(refs))


def _result(block: ToolResultBlock, param: str, images: list[Image]) -> Message:
    message = replace(_shown("tool", block.content, param, images), tool_call_id=block.tool_use_id)
    if not block.is_error or message.content.startswith(_ERROR_MARK):
        return message
    moved = tuple(replace(ref, at=ref.at + len(_ERROR_MARK)) for ref in message.images)
    return replace(message, content=_ERROR_MARK + message.content, images=moved)


def _type(block: ContentBlock) -> str:
    return "image" if isinstance(block, ImagePart) else block.type


def _read_tool_use(block: ToolUseBlock) -> ToolCall:
    written = block.input.get(MALFORMED_KEY)
    if len(block.input) == 1 and isinstance(written, str):
        return ToolCall(
            block.id, block.name, {}, ToolCallStatus.MALFORMED, "not parseable as a tool call", text=written
        )
    return ToolCall(block.id, block.name, block.input)


# Answers


class MessageWriter(BlockWriter):
    """Writes one message. `message_key` is a unique string of 32 hexadecimal digits.

    In a stream, a call's arguments are sent in one event after the call is complete: only then is it known if they
    can be parsed.
    """

    def __init__(self, body: MessagesBody, message_key: str) -> None:
        super().__init__()
        self._body = body
        self._key = message_key

    def _answer(self, result: ChatResult, blocks: list[Block]) -> Answer:
        message = self._message([_content_block(block) for block in blocks])
        return message | _stop(result) | {"usage": _usage(result)} | self._extras(result)

    def _begun(self) -> Iterator[Answer]:
        yield {"type": "message_start", "message": self._message([])}
        yield {"type": "ping"}

    def _opened(self, block: Block) -> Iterator[Answer]:
        yield {"type": "content_block_start", "index": block.index, "content_block": _opened(block)}

    def _grown(self, block: Block, text: str) -> Iterator[Answer]:
        if block.kind is not BlockKind.CALL:
            name = "thinking" if block.kind is BlockKind.REASONING else "text"
            yield _delta(block, {"type": f"{name}_delta", name: text})

    def _closed(self, block: Block, finish: TurnFinish | None) -> Iterator[Answer]:
        if block.kind is BlockKind.CALL:
            written = orjson.dumps(_tool_input(block)).decode()
            yield _delta(block, {"type": "input_json_delta", "partial_json": written})
        elif block.kind is BlockKind.REASONING:
            yield _delta(block, {"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": block.index}

    def _ended(self, result: ChatResult, blocks: list[Block]) -> Iterator[Answer]:
        yield {"type": "message_delta", "delta": _stop(result), "usage": _usage(result), **self._extras(result)}
        yield {"type": "message_stop"}

    def _extras(self, result: ChatResult) -> Answer:
        strict_tools = (
            tool.name for tool in self._body.tools or () if isinstance(tool, CustomTool) and tool.strict
        )
        extras = capture_extras(result, with_token_ids=self._body.return_token_ids is True)
        return extras | strict_report(strict_tools, _choice(self._body))

    def _message(self, content: list[dict[str, Any]]) -> Answer:
        return {
            "id": f"msg_{self._key}",
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }


def models_page(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all models as one page in Anthropic's form."""
    page = [model_info(model) for model in models]
    return {"data": page, "has_more": False, "first_id": page[0]["id"], "last_id": page[-1]["id"]}


def model_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a model object from OpenAI's to Anthropic's form. Fields specific to this service are kept."""
    own = {name: value for name, value in model.items() if name not in ("object", "created", "owned_by")}
    created_at, length = datetime.fromtimestamp(model["created"], UTC), model["max_model_len"]
    sizes = {"max_input_tokens": length, "max_tokens": length}
    names = {"type": "model", "display_name": model["id"], "lifecycle": "active"}
    return {**own, **names, **sizes, "created_at": created_at.strftime("%Y-%m-%dT%H:%M:%SZ")}


def error_body(error: AgentLoopError, request_id: str | None) -> dict[str, Any]:
    """Return an error in Anthropic's form, for a response or an event. `code` and `param` are added fields."""
    kind = _ERROR_TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "api_error"
    envelope: dict[str, JSON] = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    if error.details is not None:
        envelope["details"] = dict(error.details)
    if isinstance(error, UnsupportedParameter) and error.param == "thread":
        envelope["details"] = {"error_code": _NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": envelope, "request_id": request_id}


def _delta(block: Block, delta: dict[str, JSON]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _opened(block: Block) -> dict[str, JSON]:
    if block.kind is BlockKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _content_block(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        return {**_opened(block), "input": _tool_input(block)}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    return {"type": "text", "text": block.text}


def _tool_input(block: Block) -> Mapping[str, JSON]:
    call = read_call(block.call_id, block.name, block.text)
    return call.arguments if call.status is ToolCallStatus.OK else {MALFORMED_KEY: block.text}


def _stop(result: ChatResult) -> dict[str, JSON]:
    reply = result.choices[0].reply
    finish = finish_of(reply)
    sequence = reply.stop_text or None
    if finish is TurnFinish.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if finish is TurnFinish.TOOL_CALLS:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "end_turn" if sequence is None else "stop_sequence", "stop_sequence": sequence}


def _usage(result: ChatResult) -> dict[str, JSON]:
    reply = result.choices[0].reply
    # In Anthropic's format `input_tokens` excludes tokens read from the cache.
    return {
        "input_tokens": len(result.prompt_ids) - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": len(reply.token_ids),
        "output_tokens_details": {"thinking_tokens": reply.num_reasoning_tokens},
    }
