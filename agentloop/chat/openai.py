"""The OpenAI Chat Completions dialect: converts a body to a `ChatCall`, and writes the answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from agentloop.api.requests import ImagePart
from agentloop.chat import openai_bodies as bodies
from agentloop.chat.body_cache import BodyCache, CachedMessage, CachedTools, cache_key
from agentloop.chat.call import (
    Answer,
    ChatCall,
    ChatModel,
    ChatResult,
    ToolChoice,
    allowed_tools,
    answer_constraint,
    check_tool_choice,
    check_tool_names,
    function_definition,
    read_call,
    read_content,
    schema_constraint,
    strict_report,
    with_tool_names,
)
from agentloop.chat.choices import ChoiceWriter, TokenTexts
from agentloop.chat.fields import checked, read_json
from agentloop.chat.openai_bodies import ChatBody, ChoiceFields
from agentloop.chat.sampling import sampling_params, template_kwargs
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.generation.turn_reader import TurnPiece, arguments_text
from agentloop.images import each_once
from agentloop.parsers.base import Parser
from agentloop.rendering.port import NAMED_ROLES
from agentloop.trajectory.node import Reply, tools_key
from agentloop.types import JSON, Constraint, ConstraintKind, Message, SamplingParams, TopLogprobs

# Requests


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated body with its parsed messages and tools."""

    body: ChatBody
    messages: Sequence[CachedMessage]
    tools: CachedTools


def read_chat(data: bytes, cache: BodyCache) -> ChatRequest:
    """Parse a chat request and add new messages and tools to the cache. Raises the errors of `read_body`."""
    value = read_json(data)
    history, tools = (value.get("messages"), value.get("tools")) if isinstance(value, dict) else (None, None)
    last = history[-1] if isinstance(history, list) and history and isinstance(history[-1], dict) else {}
    if last.get("role") == "assistant" and last.get("prefix") is True:
        # On earlier messages `prefix` belongs to an earlier call; on the last message it requests a continuation.
        message = (
            "`prefix` is not supported: send `continue_final_message`: true and `add_generation_prompt`: false"
        )
        raise UnsupportedParameter(message, param=f"messages.{len(value['messages']) - 1}.prefix")
    lookups = cache.messages.find(history) if isinstance(history, list) else []
    if isinstance(history, list):
        # Validation accepts a `CachedMessage` as it is, so only new messages cost time.
        value["messages"] = [cached or message for (_, cached), message in zip(lookups, history, strict=True)]
    tools_cache_key = cache_key(tools) if isinstance(tools, list) else None
    cached_tools = cache.tools.get(tools_cache_key)
    if cached_tools is not None:
        value["tools"] = cached_tools.bodies
    body = checked(value, ChatBody)
    if cached_tools is None:
        definitions = _definitions(body.tools)
        cached_tools = CachedTools(body.tools or [], definitions, tools_key(definitions))
        cache.tools.add(tools_cache_key, cached_tools, cached_tools.num_bytes)
    messages = []
    # Known messages passed the validation as `CachedMessage`; convert and cache the new ones.
    for index, (key, cached) in enumerate(lookups):
        if cached is None:
            cached = _cached(body.messages[index], f"messages.{index}.content", cache.shown_names)
            cache.messages.add(key, cached, cached.num_bytes)
        messages.append(cached)
    return ChatRequest(body, messages, cached_tools)


def to_call(request: ChatRequest, model: ChatModel) -> ChatCall:
    """Convert a request to a `ChatCall`. Raises InvalidRequest for inconsistent fields."""
    body = request.body
    images = each_once(image for message in request.messages for image in message.images)
    if images and not model.takes_images:
        _refuse_images(request.messages, "this service's model takes no images")
    tools, choice, forced = _tools(body, request.tools.definitions)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    is_parallel = body.parallel_tool_calls is not False
    priority = body.call_priority(has_priority=model.has_priority)
    constraint = answer_constraint(_wanted(body), model.parser, tools, choice, is_parallel=is_parallel)
    return ChatCall(
        messages=_conversation(request.messages),
        keys=tuple(message.key for message in request.messages),
        tools_key=request.tools.key if tools is request.tools.definitions else None,
        sampling=sampling_of(body, max_tokens, model.vocab_size, body.top_logprobs or 0, constraint, priority),
        tools=tools,
        tool_choice=choice,
        forced_tool=forced,
        is_parallel=is_parallel,
        max_tokens=max_tokens,
        num_choices=body.n or 1,
        stop=stops_of(body),
        template_kwargs=template_kwargs(body, model.template_arguments, body.reasoning_effort),
        is_strict=body.strict_history is True,
        stop_in_reasoning=body.stop_in_reasoning is True,
        timeout_s=model.timeout_s,
        constraint_param="response_format" if body.structured_outputs is None else "structured_outputs",
        images=images,
        continues=_continues(body, request.messages, model.parser),
        affinity=body.prompt_cache_key or "",
    )


def _continues(body: ChatBody, messages: Sequence[CachedMessage], parser: Parser) -> bool:
    """Return True if the reply continues the last message. Raises InvalidRequest if it cannot be continued."""
    if not body.continue_final_message:
        return False
    last, marks, param = messages[-1].message, parser.delimiters.reasoning, "continue_final_message"
    if last.role != "assistant" or not last.content.strip():
        raise InvalidRequest(
            "'continue_final_message' requires an assistant message with text as the last message", param=param
        )
    if last.tool_calls or last.reasoning or marks.open in last.content or marks.close in last.content:
        raise UnsupportedParameter("only text can be continued, not reasoning or tool calls", param=param)
    return True


def conversation_of(
    messages: Sequence[bodies.AnyMessage], tools: Sequence[bodies.ToolBody] | None
) -> tuple[tuple[Message, ...], tuple[dict[str, JSON], ...]]:
    """Return messages and tool definitions in the renderer's form. Raises UnsupportedParameter for images."""
    parsed = [_cached(message, f"messages.{index}.content") for index, message in enumerate(messages)]
    # Only an engine can compute the number of an image's tokens.
    _refuse_images(parsed, "image tokens can only be counted within a session")
    return _conversation(parsed), _definitions(tools)


def _refuse_images(messages: Sequence[CachedMessage], reason: str) -> None:
    for index, message in enumerate(messages):
        if message.images:
            raise UnsupportedParameter(reason, param=f"messages.{index}.content.{message.first_image}")


def sampling_of(
    body: ChoiceFields,
    max_tokens: int | None,
    vocab_size: int,
    num_top: int,
    constraint: Constraint | None = None,
    priority: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a body. Raises InvalidRequest."""
    sampling = sampling_params(body, max_tokens, vocab_size, constraint)
    biases = sorted((int(text), bias) for text, bias in (body.logit_bias or {}).items())
    if biases and biases[-1][0] >= vocab_size:
        raise InvalidRequest(f"token id {biases[-1][0]} is outside [0, {vocab_size})", param="logit_bias")
    return replace(
        sampling,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=tuple(biases),
        num_top_logprobs=num_top,
        priority=priority or 0,
    )


def stops_of(body: ChoiceFields) -> tuple[str, ...]:
    """Return the stop strings without duplicates."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(dict.fromkeys(body.stop))


def _wanted(body: ChatBody) -> Constraint | None:
    if body.structured_outputs is not None:
        return _structured(body.structured_outputs)
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return None
    if isinstance(response_format, bodies.JsonSchemaFormat):
        return schema_constraint(response_format.json_schema.schema_, "response_format.json_schema.schema")
    return Constraint(ConstraintKind.JSON_OBJECT)


def _structured(wanted: bodies.StructuredOutputs) -> Constraint | None:
    if wanted.regex is not None:
        return Constraint(ConstraintKind.REGEX, wanted.regex)
    if wanted.choice is not None:
        return Constraint(ConstraintKind.REGEX, "|".join(f"({re.escape(answer)})" for answer in wanted.choice))
    if wanted.structural_tag is not None:
        return Constraint(ConstraintKind.STRUCTURAL_TAG, wanted.structural_tag)
    if wanted.json_ is not None:
        return schema_constraint(wanted.json_, "structured_outputs.json")
    return Constraint(ConstraintKind.JSON_OBJECT) if wanted.json_object else None


def _tools(
    body: ChatBody, tools: tuple[dict[str, JSON], ...]
) -> tuple[tuple[dict[str, JSON], ...], ToolChoice, str | None]:
    """Return the tools shown to the policy, the tool choice, and the name of the forced tool or None."""
    tool_choice, forced, choice = body.tool_choice, None, _choice(body)
    if isinstance(tool_choice, bodies.AllowedToolsChoice):
        names = {tool.function.name for tool in tool_choice.allowed_tools.tools}
        tools = allowed_tools(tools, names, "tool_choice.allowed_tools.tools")
    elif isinstance(tool_choice, bodies.NamedTool):
        forced = tool_choice.function.name
    check_tool_names(tools)
    check_tool_choice(choice, forced, tools)
    return tools, choice, forced


def _choice(body: ChatBody) -> ToolChoice:
    tool_choice = body.tool_choice
    if isinstance(tool_choice, bodies.NamedTool):
        return ToolChoice.REQUIRED
    return ToolChoice(
        tool_choice.allowed_tools.mode
        if isinstance(tool_choice, bodies.AllowedToolsChoice)
        else tool_choice or "auto"
    )


def _definitions(tools: Sequence[bodies.ToolBody] | None) -> tuple[dict[str, JSON], ...]:
    functions = (tool.function for tool in tools or ())
    return tuple(function_definition(tool.name, tool.description, tool.parameters) for tool in functions)


def _conversation(cached: Sequence[CachedMessage]) -> tuple[Message, ...]:
    return with_tool_names([entry.message for entry in cached], lambda index, name: cached[index].with_name(name))


def _cached(message: bodies.AnyMessage, param: str, shown_names: Collection[str] = NAMED_ROLES) -> CachedMessage:
    """Convert a message whose content is the field `param`. A name that is not shown to the policy is dropped."""
    if isinstance(message, CachedMessage):
        return message
    role = "system" if message.role == "developer" else message.role
    if message.name is not None and role in NAMED_ROLES.difference(shown_names):
        message = message.model_copy(update={"name": None})
    if isinstance(message, bodies.UserMessage | bodies.ToolMessage):
        return _shown(message, param)
    if isinstance(message, bodies.AssistantMessage):
        return CachedMessage(_assistant(message, param))
    return CachedMessage(Message("system", read_content(message.content, "system", param)[0], name=message.name))


def _shown(body: bodies.UserMessage | bodies.ToolMessage, param: str) -> CachedMessage:
    """Convert a message that may have images."""
    text, images, refs = read_content(body.content, body.role, param)
    parts = body.content if images and body.content is not None else ()
    first_image = next((position for position, part in enumerate(parts) if isinstance(part, ImagePart)), 0)
    call_id = body.tool_call_id if isinstance(body, bodies.ToolMessage) else None
    message = Message(body.role, text, tool_call_id=call_id, name=body.name, images=tuple(refs))
    return CachedMessage(message, tuple(images), first_image)


def _assistant(body: bodies.AssistantMessage, param: str) -> Message:
    content, _, _ = read_content(body.content, "assistant", param)
    calls = tuple(read_call(call.id, call.function.name, call.function.arguments) for call in body.tool_calls or ())
    return Message(
        "assistant",
        content + (body.refusal or ""),
        calls,
        name=body.name,
        reasoning=body.reasoning_content or body.reasoning or "",
    )


# Answers


class ChatWriter(ChoiceWriter):
    """Writes one chat completion."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    opening: ClassVar[Answer | None] = {"delta": {"role": "assistant", "content": "", "refusal": None}}
    empty: ClassVar[Answer] = {"delta": {}}

    def __init__(self, body: ChatBody, texts: TokenTexts, created_at: int) -> None:
        super().__init__(body, texts, created_at, shows_logprobs=body.logprobs is True)
        self._chat = body

    def _extras(self, result: ChatResult) -> Answer:
        functions = (tool.function for tool in self._chat.tools or ())
        report = strict_report((function.name for function in functions if function.strict), _choice(self._chat))
        return super()._extras(result) | report

    def parts(self, piece: TurnPiece) -> list[Answer]:
        """Return the deltas of a piece: its text, then one delta per call entry."""
        # OpenAI sends one call entry per chunk, and some clients read only the first entry.
        text: Answer = {}
        if piece.reasoning:
            text["reasoning_content"] = piece.reasoning
        if piece.content:
            text["content"] = piece.content
        entries = [{"index": call.index, **_call_entry(call.id, call.name, call.arguments)} for call in piece.calls]
        deltas = ([text] if text else []) + [{"tool_calls": [entry]} for entry in entries]
        return [{"delta": delta} for delta in deltas]

    def whole_part(self, reply: Reply) -> Answer:
        message = reply.message
        answer: Answer = {"role": "assistant", "content": message.content, "refusal": None}
        if message.tool_calls:
            answer["content"] = message.content or None
            answer["tool_calls"] = [
                _call_entry(call.id, call.name, arguments_text(call)) for call in message.tool_calls
            ]
        if message.reasoning:
            answer["reasoning_content"] = message.reasoning
        return {"message": answer}

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs) -> Answer:
        return {"content": self.texts.entries(token_ids, logprobs, top), "refusal": None}


def _call_entry(call_id: str | None, name: str | None, arguments: str) -> Answer:
    if call_id is None:
        return {"function": {"arguments": arguments}}
    return {"id": call_id, "type": "function", "function": {"name": name or "", "arguments": arguments}}
