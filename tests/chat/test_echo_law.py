"""Echo property: a field that the template does not render forks no path, in any dialect and for any family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.chat import anthropic as anthropic_chat
from agentloop.chat import openai as openai_chat
from agentloop.chat import responses as responses_chat
from agentloop.chat.anthropic_bodies import MessagesBody
from agentloop.chat.body_cache import BodyCache
from agentloop.chat.call import ChatCall, ChatModel
from agentloop.chat.fields import read_body
from agentloop.chat.responses_bodies import ResponsesBody
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.trajectory.node import Node, Reply
from agentloop.trajectory.turn_graph import Match, TurnGraph
from agentloop.types import FinishReason, Message, ToolCall, WeightVersionSpan
from tests.support.families.table import FAMILIES, UNTAUGHT, write_family
from tests.support.records.model_folder import IGNORES_TOOLS, write_folder

MODEL = ChatModel(get_parser("hermes"), 1 << 20)
REPLY = Message(
    "assistant", "I look.", (ToolCall("call_0_0", "look_up", {"word": "rook", "n": 2}),), reasoning="Hm."
)
TOOL: dict[str, Any] = {"type": "object", "properties": {"word": {"type": "string"}}}
names = st.sampled_from(["alice", "Bob_2", "agent-x"])
ids = st.sampled_from(["call_0_0", "toolu_1", "x"])


@cache
def shown_names(family: str) -> frozenset[str]:
    folder = write_family(Path(mkdtemp()), family)
    return TemplateRenderer.from_directory(folder, RenderSettings(OnUnstable.FORK)).facts.shown_names


@dataclass
class Drawn:
    """Draws the fields that an echo has in addition to the sampled reply."""

    draw: Any

    def one(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def some(self, **fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if self.draw(st.booleans())}


def chat(drawn: Drawn, unseen: frozenset[str], *, is_echo: bool) -> ChatCall:
    """Return the first chat completion, or the one that echoes it and answers the call."""

    def named(role: str) -> dict[str, Any]:
        return drawn.some(name=drawn.draw(names)) if role in unseen else {}

    def text(said: str) -> Any:
        return drawn.one(said, [{"type": "text", "text": said, **drawn.some(cache_control={"type": "ephemeral"})}])

    arguments = {"word": "rook", "n": 2}
    call_id = drawn.draw(ids)
    written = drawn.one('{"word":"rook","n":2}', '{ "n": 2.0, "word": "rook" }', arguments)
    calls = [
        {
            "id": call_id,
            "function": {"name": "look_up", "arguments": written},
            **drawn.some(type="function", index=0),
        }
    ]
    nothing = drawn.some(
        refusal=None, annotations=[], provider_specific_fields={"a": 1}, audio=None, function_call=None
    )
    thought = drawn.some(**{drawn.one("reasoning", "reasoning_content"): "Hm."})
    messages = [
        {"role": drawn.one("system", "developer"), "content": text("Be brief."), **named("system")},
        {"role": "user", "content": text("What is a rook?"), **named("user")},
    ]
    if is_echo:
        echo = {"role": "assistant", "content": text("I look."), "tool_calls": calls, **nothing, **thought}
        messages += [
            echo | named("assistant"),
            {"role": "tool", "content": text("a bird"), "tool_call_id": call_id},
        ]
        messages[-1] |= drawn.some(name=drawn.draw(names))
    body = {
        "model": "m",
        "messages": messages,
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": TOOL}}],
    }
    shown = frozenset({"system", "user", "assistant"}) - unseen
    return openai_chat.to_call(openai_chat.read_chat(orjson.dumps(body), BodyCache(shown_names=shown)), MODEL)


def messages_of(drawn: Drawn, unseen: frozenset[str], *, is_echo: bool) -> ChatCall:
    """Return a Messages call."""
    cached = {"cache_control": {"type": "ephemeral"}}

    def text(said: str) -> dict[str, Any]:
        return {"type": "text", "text": said, **drawn.some(**cached, citations=None)}

    messages: list[dict[str, Any]] = [
        {"role": "user", "content": drawn.one("What is a rook?", [text("What is a rook?")])}
    ]
    if is_echo:
        call_id = drawn.draw(ids)
        thought = {"type": "thinking", "thinking": "Hm.", **drawn.some(signature="s")}
        called = {"type": "tool_use", "id": call_id, "name": "look_up", "input": {"n": 2, "word": "rook"}}
        blocks = [
            *drawn.one([], [thought], [{"type": "redacted_thinking", "data": "x"}]),
            text("I look."),
            called | drawn.some(**cached),
        ]
        result = {"type": "tool_result", "tool_use_id": call_id, "content": drawn.one("a bird", [text("a bird")])}
        messages += [{"role": "assistant", "content": blocks, **drawn.some(id="msg_1", stop_reason="tool_use")}]
        messages += [{"role": "user", "content": [result | drawn.some(is_error=False, **cached)]}]
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": messages,
        "system": drawn.one("Be brief.", [text("Be brief.")]),
    }
    body["tools"] = [{"name": "look_up", "input_schema": TOOL}]
    return anthropic_chat.to_call(read_body(orjson.dumps(body), MessagesBody), MODEL)


def responses_of(drawn: Drawn, unseen: frozenset[str], *, is_echo: bool) -> ChatCall:
    """Return a Responses call."""

    def text(kind: str, said: str) -> Any:
        return drawn.one(said, [{"type": kind, "text": said, **drawn.some(annotations=[], logprobs=[])}])

    items: list[dict[str, Any]] = [
        {
            "role": drawn.one("system", "developer"),
            "content": text("input_text", "Be brief."),
            **drawn.some(id="i"),
        },
        {
            "role": "user",
            "content": text("input_text", "What is a rook?"),
            **drawn.some(type="message", status="completed"),
        },
    ]
    if is_echo:
        call_id = drawn.draw(ids)
        thought = {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            **drawn.some(id="rs_1", status="completed"),
        }
        said = {"type": "message", "role": "assistant", "content": text("output_text", "I look.")}
        arguments = drawn.one('{"word":"rook","n":2}', '{"n": 2, "word": "rook"}')
        called = {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": arguments}
        items += [*drawn.one([], [thought]), said | drawn.some(id="msg", status="completed", phase="commentary")]
        items += [called | drawn.some(id="fc_1", status="completed")]
        items += [
            {
                "type": "function_call_output",
                "call_id": call_id,
                "output": "a bird",
                **drawn.some(id="o", status="completed"),
            }
        ]
    body = {"model": "m", "input": items, "tools": [{"type": "function", "name": "look_up", "parameters": TOOL}]}
    return responses_chat.to_call(read_body(orjson.dumps(body), ResponsesBody), MODEL)


def echoed(first: ChatCall, second: ChatCall) -> tuple[Node, Match]:
    """Return the node of REPLY, committed for the first call, and the match of the second call against it."""
    graph = TurnGraph()
    match = graph.match(first.messages, first.tools, keys=first.keys, tools_key=first.tools_key)
    one, none = np.zeros(1, np.int32), np.zeros(1, np.float32)
    reply = Reply(REPLY, one, none, (WeightVersionSpan(0, 0, 1),), FinishReason.STOP, is_closed=True)
    node = Node("n", "c", 0, None, first.messages, one, reply, match.tools_key)
    graph.add(node)
    return node, graph.match(second.messages, second.tools, keys=second.keys, tools_key=second.tools_key)


@pytest.mark.parametrize("dialect", [chat, messages_of, responses_of])
@given(data=st.data())
def test_what_is_not_rendered_forks_nothing(dialect: Any, data: st.DataObject):
    family = data.draw(st.sampled_from([family.name for family in (*FAMILIES, *UNTAUGHT)]))
    unseen = frozenset({"system", "user", "assistant"}) - shown_names(family)
    drawn = Drawn(data.draw)
    node, match = echoed(dialect(drawn, unseen, is_echo=False), dialect(drawn, unseen, is_echo=True))
    assert (match.parent, match.split) == (node, None), match.split
    assert [message.content for message in match.appended] == ["a bird"]


def test_names_count_where_the_template_shows_them(tmp_path: Path):
    assert shown_names("qwen3") == frozenset()
    named = IGNORES_TOOLS.replace(
        "message.role +", "(message.name if message.role == 'user' and message.name else message.role) +"
    )
    assert TemplateRenderer.from_directory(write_folder(tmp_path, named)).facts.shown_names == {"user"}


def test_a_name_that_is_shown_forks_and_the_detail_says_so():
    def asked(name: str) -> ChatCall:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi", "name": name}]
        body = {
            "model": "m",
            "messages": [*messages, {"role": "assistant", "content": "I look."}, {"role": "user", "content": "?"}],
        }
        return openai_chat.to_call(openai_chat.read_chat(orjson.dumps(body), BodyCache()), MODEL)

    graph, first = TurnGraph(), asked("alice")
    one, none = np.zeros(1, np.int32), np.zeros(1, np.float32)
    reply = Reply(
        Message("assistant", "I look."), one, none, (WeightVersionSpan(0, 0, 1),), FinishReason.STOP, is_closed=True
    )
    graph.add(Node("n", "c", 0, None, first.messages[:1], one, reply))
    split = graph.match(asked("bob").messages, ()).split
    assert split is not None
    assert split.detail == "messages[0].name: 'alice' was there, 'bob' came"
