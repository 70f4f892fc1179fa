"""Chat completions: the body to a `ChatCall`, and a result or its pieces to the answer.

Invariants: the finish chunk of a stream comes after its `ChatResult`, so who has seen an end has a turn that is
recorded; a stream's chunks concatenate to the answer of the same result. Answers are plain dicts for `orjson`: what
`openai.types` describes, and what trainers want beside it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from agentloop.api.requests import ImagePart, read_parts
from agentloop.chat import openai_bodies as bodies
from agentloop.chat.body_cache import BodyCache, CachedMessage, CachedTools, cache_key
from agentloop.chat.call import ChatCall, ChatModel, ChatResult, ToolChoice
from agentloop.chat.dialect import (
    Answer,
    answer_constraint,
    check_tool_choice,
    check_tool_names,
    function_definition,
    joined_text,
    read_call,
    schema_constraint,
    session_extra,
    versions_of,
    with_tool_names,
)
from agentloop.chat.fields import RefusalPart, TextPart, checked, read_json
from agentloop.chat.logprobs import TokenTexts
from agentloop.chat.openai_bodies import CallBase, ChatBody, ChoiceFields
from agentloop.chat.sampling import sampling_params, template_kwargs
from agentloop.errors import InvalidRequest, UnsupportedParameter
from agentloop.generation.turn_piece import CallDelta, TurnPiece, arguments_text, finish_of
from agentloop.images import Image, ImageRef, each_once, shown
from agentloop.parsers.base import Parser
from agentloop.rendering.port import NAMED_ROLES
from agentloop.trajectory.message_key import tools_key
from agentloop.trajectory.node import Node
from agentloop.types import JSON, Constraint, ConstraintKind, Message, SamplingParams

# --- requests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked body, its messages and tools read."""

    body: ChatBody
    messages: Sequence[CachedMessage]
    tools: CachedTools


def read_chat(data: bytes, cache: BodyCache) -> ChatRequest:
    """Read the request that `data` holds; what of it is not in the cache is then. Raises as `read_body`."""
    value = read_json(data)
    given, tools = (value.get("messages"), value.get("tools")) if isinstance(value, dict) else (None, None)
    found = cache.messages.find(given) if isinstance(given, list) else []
    if isinstance(given, list):
        value["messages"] = [one or message for (_, one), message in zip(found, given, strict=True)]
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
    for index, (key, one) in enumerate(found):
        if one is None:
            one = _cached(body.messages[index], f"messages.{index}.content", cache.shown_names)
            cache.messages.add(key, one, one.num_bytes)
        messages.append(one)
    return ChatRequest(body, messages, cached_tools)


def to_call(request: ChatRequest, model: ChatModel) -> ChatCall:
    """The call that is asked for. Raises InvalidRequest for what does not fit together."""
    body = request.body
    images = each_once(image for message in request.messages for image in message.images)
    if images and not model.takes_images:
        _refuse_images(request.messages, "this service's model takes no images")
    tools, choice, forced = _tools(body, request.tools.definitions)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    is_parallel = body.parallel_tool_calls is not False
    constraint = answer_constraint(_wanted(body), model.parser, tools, choice, is_parallel=is_parallel)
    return ChatCall(
        messages=_conversation(request.messages),
        keys=tuple(message.key for message in request.messages),
        tools_key=request.tools.key if tools is request.tools.definitions else None,
        sampling=sampling_of(body, max_tokens, model.vocab_size, body.top_logprobs or 0, constraint, body.priority),
        tools=tools,
        tool_choice=choice,
        forced_tool=forced,
        is_parallel=is_parallel,
        max_tokens=max_tokens,
        num_choices=body.n or 1,
        stop=stops_of(body),
        template_kwargs=template_kwargs(body, model.template_arguments, body.reasoning_effort),
        is_strict=body.strict_history is True,
        timeout_s=model.timeout_s,
        constraint_param="response_format" if body.structured_outputs is None else "structured_outputs",
        images=images,
        continues=_continues(body, request.messages, model.parser),
    )


def _continues(body: ChatBody, messages: Sequence[CachedMessage], parser: Parser) -> bool:
    """Tell if the last message begins the reply. Raises InvalidRequest where it cannot be gone on from."""
    if not body.continue_final_message:
        return False
    last, marks, param = messages[-1].message, parser.marks.thoughts, "continue_final_message"
    if last.role != "assistant" or not last.content.strip():
        raise InvalidRequest("the last message is an assistant's, with a text to continue", param=param)
    if last.tool_calls or last.reasoning or marks.open in last.content or marks.close in last.content:
        raise UnsupportedParameter("thoughts and tool calls are not continued, text is", param=param)
    return True


def conversation_of(
    messages: Sequence[bodies.AnyMessage], tools: Sequence[bodies.ToolBody] | None
) -> tuple[tuple[Message, ...], tuple[dict[str, JSON], ...]]:
    """Return messages and tool definitions as the renderer takes them. Raises UnsupportedParameter for images: only
    an engine knows their tokens."""
    read = [_cached(one, f"messages.{index}.content") for index, one in enumerate(messages)]
    _refuse_images(read, "the tokens of images are counted in a session only")
    return _conversation(read), _definitions(tools)


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
    sampling = sampling_params(body, max_tokens, vocab_size)
    biases = sorted((int(text), bias) for text, bias in (body.logit_bias or {}).items())
    if biases and biases[-1][0] >= vocab_size:
        raise InvalidRequest(f"token id {biases[-1][0]} is outside [0, {vocab_size})", param="logit_bias")
    return replace(
        sampling,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=tuple(biases),
        num_top_logprobs=num_top,
        constraint=constraint,
        priority=priority or 0,
    )


def stops_of(body: ChoiceFields) -> tuple[str, ...]:
    """The stop strings, each once."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(dict.fromkeys(body.stop))


def _wanted(body: ChatBody) -> Constraint | None:
    """Return the constraint of the response format."""
    if body.structured_outputs is not None:
        return _structured(body.structured_outputs)
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if isinstance(wanted, bodies.JsonSchemaFormat):
        return schema_constraint(wanted.json_schema.schema_)
    return Constraint(ConstraintKind.JSON_OBJECT)


def _structured(wanted: bodies.StructuredOutputs) -> Constraint | None:
    """Return the constraint of what vLLM calls structured outputs."""
    if wanted.regex is not None:
        return Constraint(ConstraintKind.REGEX, wanted.regex)
    if wanted.choice is not None:
        return Constraint(ConstraintKind.REGEX, "|".join(f"({re.escape(one)})" for one in wanted.choice))
    if wanted.structural_tag is not None:
        return Constraint(ConstraintKind.STRUCTURAL_TAG, wanted.structural_tag)
    if wanted.json_ is not None:
        return schema_constraint(wanted.json_)
    return Constraint(ConstraintKind.JSON_OBJECT) if wanted.json_object else None


def _tools(
    body: ChatBody, tools: tuple[dict[str, JSON], ...]
) -> tuple[tuple[dict[str, JSON], ...], ToolChoice, str | None]:
    """The tools that the policy sees, whether it must call one, and which."""
    wanted, forced = body.tool_choice, None
    choice = ToolChoice.AUTO
    if isinstance(wanted, bodies.AllowedToolsChoice):
        choice = ToolChoice(wanted.allowed_tools.mode)
        tools = _allowed(tools, [tool.function.name for tool in wanted.allowed_tools.tools])
    elif isinstance(wanted, bodies.NamedTool):
        choice, forced = ToolChoice.REQUIRED, wanted.function.name
    elif wanted is not None:
        choice = ToolChoice(wanted)
    check_tool_names(tools)
    check_tool_choice(choice, forced, tools)
    return tools, choice, forced


def _allowed(tools: tuple[dict[str, JSON], ...], names: list[str]) -> tuple[dict[str, JSON], ...]:
    known = {tool["function"]["name"] for tool in tools}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidRequest(f"there is no tool {unknown[0]!r} to allow", param="tool_choice.allowed_tools.tools")
    return tuple(tool for tool in tools if tool["function"]["name"] in set(names))


def _definitions(tools: Sequence[bodies.ToolBody] | None) -> tuple[dict[str, JSON], ...]:
    functions = (tool.function for tool in tools or ())
    return tuple(function_definition(one.name, one.description, one.parameters) for one in functions)


def _conversation(cached: Sequence[CachedMessage]) -> tuple[Message, ...]:
    return with_tool_names([one.message for one in cached], lambda index, name: cached[index].with_name(name))


def _cached(message: bodies.AnyMessage, param: str, shown_names: Collection[str] = NAMED_ROLES) -> CachedMessage:
    """Read a message whose content is the field `param`; a name that the policy is not shown is dropped."""
    if isinstance(message, CachedMessage):
        return message
    role = "system" if message.role == "developer" else message.role
    if message.name is not None and role in NAMED_ROLES.difference(shown_names):
        message = message.model_copy(update={"name": None})
    if isinstance(message, bodies.UserMessage | bodies.ToolMessage):
        return _shown(message, param)
    if isinstance(message, bodies.AssistantMessage):
        return CachedMessage(_assistant(message))
    return CachedMessage(Message("system", _text(message.content, "system"), name=message.name))


def _shown(body: bodies.UserMessage | bodies.ToolMessage, param: str) -> CachedMessage:
    """Read a message that may show images. With one, texts stand beside it as they are; else each is a line."""
    text, refs, images = "", tuple[ImageRef, ...](), tuple[Image, ...]()
    first_image = None
    if isinstance(body.content, str):
        text = body.content
    else:
        places = (place for place, part in enumerate(body.content) if isinstance(part, ImagePart))
        first_image = next(places, None)
        parts = read_parts(body.content, (), param)
        if first_image is None:
            text = joined_text((part for part in parts if isinstance(part, str)), body.role)
        else:
            text, refs = shown(parts)
            images = tuple(part for part in parts if isinstance(part, Image))
    call_id = body.tool_call_id if isinstance(body, bodies.ToolMessage) else None
    message = Message(body.role, text, tool_call_id=call_id, name=body.name, images=refs)
    return CachedMessage(message, images, first_image or 0)


def _assistant(body: bodies.AssistantMessage) -> Message:
    content = _text(body.content, "assistant") if body.content is not None else ""
    calls = tuple(read_call(call.id, call.function.name, call.function.arguments) for call in body.tool_calls or ())
    return Message(
        "assistant",
        content + (body.refusal or ""),
        calls,
        name=body.name,
        reasoning=body.reasoning_content or body.reasoning or "",
    )


def _text(content: str | Sequence[TextPart | RefusalPart], role: str) -> str:
    if isinstance(content, str):
        return content
    parts = [part.text if isinstance(part, TextPart) else part.refusal for part in content]
    return joined_text(parts, role)


# --- answers ----------------------------------------------------------------------------------------------


def render_chat(result: ChatResult, body: ChatBody, texts: TokenTexts) -> Answer:
    """The whole answer."""
    texts = texts.written(as_ids=body.return_tokens_as_token_ids)
    choices = [_choice(node, body, texts) for node in result.choices]
    return answer_of(result, body, "chatcmpl", "chat.completion", choices)


def _choice(node: Node, body: ChatBody, texts: TokenTexts) -> Answer:
    reply = node.reply
    choice: Answer = {
        "index": node.choice_index,
        "message": _answer_message(reply.message),
        "logprobs": None,
        "finish_reason": finish_of(reply).value,
        "weight_versions": versions_of(node),
    }
    if body.logprobs:
        ids, logprobs = reply.token_ids.tolist(), reply.logprobs.tolist()
        choice["logprobs"] = {"content": texts.entries(ids, logprobs, reply.top_logprobs), "refusal": None}
    if body.return_token_ids:
        choice["token_ids"] = reply.token_ids.tolist()
    return choice


def _answer_message(message: Message) -> Answer:
    answer: Answer = {"role": "assistant", "content": message.content, "refusal": None}
    if message.tool_calls:
        answer["content"] = message.content or None
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
            for call in message.tool_calls
        ]
    if message.reasoning:
        answer["reasoning_content"] = message.reasoning
    return answer


def answer_of(result: ChatResult, body: CallBase, id_prefix: str, kind: str, choices: list[Answer]) -> Answer:
    """Return an answer in OpenAI's form, around `choices`."""
    answer: Answer = {
        "id": f"{id_prefix}-{result.call_id}",
        "object": kind,
        "created": result.created_at,
        "model": body.model,
        "system_fingerprint": fingerprint(result),
        "choices": choices,
        "usage": usage_of(result),
        "session": session_extra(result),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = list(result.prompt_ids)
    return answer


def usage_of(result: ChatResult) -> Answer:
    """Return the token counts; the prompt counts once, however many choices there are."""
    num_prompt = len(result.prompt_ids)
    num_sampled = sum(len(node.reply.token_ids) for node in result.choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": result.choices[0].reply.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(node.reply.num_reasoning_tokens for node in result.choices)
        },
    }


def fingerprint(result: ChatResult) -> str | None:
    """Return the weight version of the answer's last token, as a label."""
    spans = result.choices[0].reply.weight_versions
    return f"v{spans[-1].version}" if spans else None


# --- streams ----------------------------------------------------------------------------------------------


async def chat_chunks(
    pieces: AsyncIterator[TurnPiece | ChatResult], body: ChatBody, texts: TokenTexts, created_at: int
) -> AsyncIterator[Answer]:
    """The chunks of a stream, in order. The caller writes them, and `[DONE]` behind the last."""
    stream = _ChatStream(body, texts, created_at)
    async for piece in pieces:
        for chunk in stream.finish(piece) if isinstance(piece, ChatResult) else stream.feed(piece):
            yield chunk


class _ChatStream:
    """The chunks of one answer; all of them have one id."""

    def __init__(self, body: ChatBody, texts: TokenTexts, created_at: int) -> None:
        self._body = body
        self._texts = texts.written(as_ids=body.return_tokens_as_token_ids)
        self._head: Answer = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": created_at,
            "model": body.model,
            "system_fingerprint": None,
        }
        self._has_role: set[int] = set()
        self._shows_tokens = bool(body.logprobs or body.return_token_ids)

    def feed(self, piece: TurnPiece) -> Iterator[Answer]:
        """The chunks of one piece: none where it shows nothing that was asked for."""
        index = piece.choice_index
        if piece.weight_versions:
            self._head["system_fingerprint"] = f"v{piece.weight_versions[-1].version}"
        yield from self._role(index)
        shows_tokens = bool(piece.token_ids) and self._shows_tokens
        for place, delta in enumerate(_deltas(piece) or ([{}] if shows_tokens else [])):
            choice: Answer = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if place == 0:  # the tokens of the whole piece
                self._add_tokens(choice, piece)
            yield self._chunk([choice])

    def _add_tokens(self, choice: Answer, piece: TurnPiece) -> None:
        if self._body.logprobs and piece.token_ids:
            entries = self._texts.entries(piece.token_ids, piece.logprobs, piece.top_logprobs)
            choice["logprobs"] = {"content": entries, "refusal": None}
        if self._body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)

    def finish(self, result: ChatResult) -> Iterator[Answer]:
        """The finish chunks, which have what only the whole answer knows, and the usage if asked for."""
        self._head["system_fingerprint"] = fingerprint(result)
        for node in result.choices:
            yield from self._role(node.choice_index)
            choice: Answer = {
                "index": node.choice_index,
                "delta": {},
                "logprobs": None,
                "finish_reason": finish_of(node.reply).value,
                "weight_versions": versions_of(node),
            }
            chunk = self._chunk([choice])
            if node is result.choices[-1]:
                chunk["session"] = session_extra(result)
                if self._body.return_token_ids:
                    chunk["prompt_token_ids"] = list(result.prompt_ids)
            yield chunk
        if self._body.includes_usage:
            yield {**self._chunk([]), "usage": usage_of(result)}

    def _role(self, index: int) -> Iterator[Answer]:
        if index not in self._has_role:
            self._has_role.add(index)
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _chunk(self, choices: list[Answer]) -> Answer:
        chunk: Answer = {**self._head, "choices": choices}
        if self._body.includes_usage:
            chunk["usage"] = None
        return chunk


def _deltas(piece: TurnPiece) -> list[Answer]:
    """Return the deltas of a piece: its text, then one for each entry of a call, as OpenAI sends them.

    Some clients read only the first entry of a chunk.
    """
    text: Answer = {}
    if piece.reasoning:
        text["reasoning_content"] = piece.reasoning
    if piece.content:
        text["content"] = piece.content
    return ([text] if text else []) + [{"tool_calls": [_call_entry(call)]} for call in piece.calls]


def _call_entry(call: CallDelta) -> Answer:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name or "", "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
