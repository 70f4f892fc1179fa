"""Prompts that depend on the template and its arguments: refused bridges, reasoning, and forks with a reason."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.sessions.session import Session
from agentloop.simulation.engine import SimulatedEngine
from agentloop.types import Message, SplitReason, Thinking
from tests.support.endpoint.sessions import CALCULATOR, ask, key, make_session
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import SPEC, started
from tests.support.families.table import FAMILY, write_family
from tests.support.records.model_folder import TEMPLATE, write_folder

REASONING = "Seven sixes are forty-two."
REPLY = f"<think>\n{REASONING}\n</think>\n\nIt is 42."
# Reasoning stays at every position, but the last user message is rendered differently from earlier ones.
MARKS_THE_LAST = TEMPLATE.replace(
    "{{- '<|im_start|>user\\n' +", "{{- '<|im_start|>user' + (' now' if loop.last else '') + '\\n' +"
)


@dataclass
class Talk:
    session: Session
    renderer: TemplateRenderer


@asynccontextmanager
async def conversing(
    folder: Path, settings: RenderSettings, reply: str = REPLY, parser: str = "hermes"
) -> AsyncIterator[Talk]:
    """Return a session whose policy always gives this reply."""
    renderer = TemplateRenderer.from_directory(folder, settings)

    def script(prompt: Sequence[int]) -> Sequence[int]:
        is_thinking = renderer.decode(prompt[-12:]).rstrip().endswith("<think>")
        return renderer.ids(reply.removeprefix("<think>\n") if is_thinking else reply)

    spec = replace(SPEC, vocab_size=renderer.vocab_size)
    async with started(SimulatedEngine(spec, policy=ScriptedPolicy(script))) as engine:
        session = make_session(engine, renderer=renderer, parser=get_parser(parser), vocab_size=renderer.vocab_size)
        yield Talk(session, renderer)


async def converse(talk: Talk, *texts: str, **fields: object) -> list[str]:
    """Run a conversation that echoes replies without their reasoning, like clients. Returns the prompts."""
    messages, prompts = list[Message](), list[str]()
    for number, text in enumerate(texts):
        messages.append(Message("user", text))
        result = await talk.session.call(ask(*messages, **{"max_tokens": 200, **fields}), key(f"{number}"))
        prompts.append(talk.renderer.decode(result.prompt_ids))
        messages.append(replace(result.choices[0].reply.message, reasoning=""))
    return prompts


async def test_in_a_fork_the_sessions_own_thoughts_stand_in_for_the_echo(tmp_path: Path):
    folder = write_folder(tmp_path, MARKS_THE_LAST)
    async with conversing(folder, RenderSettings(OnUnstable.FORK)) as talk:
        prompts = await converse(talk, "6*7?", "Sure?")
        first, second = talk.session.graph.nodes
        assert first.reply.message.reasoning == REASONING
        assert (second.parent_id, second.split.reason) == (None, SplitReason.TEMPLATE)
        assert second.split.detail.startswith(
            "the chat template cannot append a user message to a turn: earlier text changes"
        )
        assert "user\n6*7?" in prompts[1]
        assert f"{REPLY}<|im_end|>" in prompts[1]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
async def test_thoughts_stay_or_go_as_the_settings_say(tmp_path: Path, name: str):
    folder = write_family(tmp_path, name)
    async with conversing(folder, RenderSettings()) as talk:
        prompts = await converse(talk, "6*7?", "Sure?", "Really?")
        assert prompts[2].count(REASONING) == 2
        record = talk.session.trajectory()
        assert [path.split_reason for path in record.paths] == [None]
        assert record.thinking is Thinking.KEEP
    async with conversing(folder, RenderSettings(thinking=Thinking.TEMPLATE)) as talk:
        prompts = await converse(talk, "6*7?", "Sure?")
        assert talk.session.trajectory().thinking is Thinking.TEMPLATE
        assert REASONING not in prompts[1]
        split = talk.session.graph.nodes[1].split
        assert split.reason is SplitReason.TEMPLATE
        assert split.detail.startswith("'thinking' follows the chat template, which drops earlier reasoning")
        assert "tokens[" in split.detail


async def test_a_fork_by_other_tools_keeps_the_sessions_own_thoughts(tmp_path: Path):
    async with conversing(write_folder(tmp_path, TEMPLATE), RenderSettings()) as talk:
        await converse(talk, "6*7?", "Sure?")
        own = talk.session.graph.nodes[1]
        echo = [Message("user", "6*7?"), Message("assistant", "It is 42."), Message("user", "Sure?")]
        asked = ask(
            *echo, Message("assistant", "It is 42."), Message("user", "Now?"), tools=(CALCULATOR,), max_tokens=200
        )
        result = await talk.session.call(asked, key("with tools"))
        fork = talk.session.graph.nodes[2]
        assert (fork.parent_id, fork.split.reason) == (None, SplitReason.TOOLS_CHANGED)
        assert fork.split.from_node == own.node_id
        assert talk.renderer.decode(result.prompt_ids).count(f"{REPLY}<|im_end|>") == 2
        assert [message.reasoning for message in fork.observed] == ["", REASONING, "", REASONING, ""]
        more = ask(
            *asked.messages,
            Message("assistant", "It is 42."),
            Message("user", "So?"),
            tools=(CALCULATOR,),
            max_tokens=200,
        )
        await talk.session.call(more, key("goes on"))
        assert talk.session.graph.nodes[3].parent_id == fork.node_id


async def test_without_thoughts_nothing_forks(tmp_path: Path):
    folder = write_family(tmp_path, "qwen3")
    async with conversing(folder, RenderSettings(thinking=Thinking.TEMPLATE), "It is 42.") as talk:
        await converse(talk, "6*7?", "Sure?", "Really?")
        assert [path.split_reason for path in talk.session.trajectory().paths] == [None]


async def test_a_thought_that_was_cut_is_closed_before_the_next_message(tmp_path: Path):
    async with conversing(write_family(tmp_path, "qwen3_5"), RenderSettings()) as talk:
        prompts = await converse(talk, "6*7?", "Go on.", max_tokens=4)
        first, second = talk.session.graph.nodes
        assert (first.reply.is_closed, second.parent_id) == (False, first.node_id)
        cut = prompts[1].removeprefix(prompts[0])
        assert cut.startswith(f"{first.reply.message.reasoning}\n</think>\n\n<|im_end|>\n<|im_start|>user\nGo on.")


async def test_a_prompt_extends_turns_under_its_own_template_arguments(tmp_path: Path):
    async with conversing(write_family(tmp_path, "qwen3"), RenderSettings(), "It is 42.") as talk:
        off = {"enable_thinking": False}
        prompts = await converse(talk, "6*7?", "Sure?", template_kwargs=off)
        assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts)
        assert talk.session.graph.nodes[1].parent_id == talk.session.graph.nodes[0].node_id
        await talk.session.call(ask("6*7?", Message("assistant", "It is 42."), "Sure?"), key("other"))
        other = talk.session.graph.nodes[2]
        assert (other.parent_id, other.split.reason) == (None, SplitReason.TOOLS_CHANGED)
        assert other.split.detail == "tools: template arguments removed"


# Ids rewritten by a client

KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.calculator:{0}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
WRITTEN = {
    "kimi_k2": (KIMI.format(KIMI_CALL.format(0) + KIMI_CALL.format(1)), "functions.calculator:{}"),
    "mistral_small_3_1": (
        '[TOOL_CALLS] [{"name": "calculator", "arguments": {}, "id": "abcdefgh0"}, '
        '{"name": "calculator", "arguments": {}, "id": "abcdefgh1"}]',
        "abcdefgh{}",
    ),
}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("family", WRITTEN)
async def test_an_answer_has_its_calls_id_whatever_a_client_wrote(tmp_path: Path, family: str, is_whole: bool):
    reply, written_id = WRITTEN[family]
    folder = write_family(tmp_path / "model", family)
    async with conversing(folder, RenderSettings(OnUnstable.FORK), reply, FAMILY[family].calls) as talk:
        tools = (CALCULATOR,)
        asked = Message("user", "6*7?")
        first = await talk.session.call(ask(asked, tools=tools, max_tokens=600), key("1"))
        turn = first.choices[0].reply.message
        assert [call.written_id for call in turn.tool_calls] == [written_id.format(0), written_id.format(1)]
        echo = replace(
            turn, tool_calls=tuple(replace(c, id=f"client-{c.id}", written_id="") for c in turn.tool_calls)
        )
        # The answers arrive in the other order; a change of the tools renders the complete conversation.
        answers = [Message("tool", f"is {c.id[-1]}", tool_call_id=c.id) for c in reversed(echo.tool_calls)]
        tools = (CALCULATOR, {"type": "function", "function": {"name": "other"}}) if is_whole else tools
        second = await talk.session.call(ask(asked, echo, *answers, tools=tools, max_tokens=600), key("2"))
        assert (second.choices[0].parent_id is None) == is_whole
        text = talk.renderer.decode(second.prompt_ids)
        assert "client" not in text
        for number in range(2):
            assert text.count(written_id.format(number)) == 2
            # The id is directly before or after the answer.
            assert abs(text.rindex(written_id.format(number)) - text.index(f"is {number}")) < 30
