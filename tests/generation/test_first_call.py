"""A turn of one call ends after the call, in all formats: the same tokens, and an equally rendered history."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.generation.turn_sampler import TurnRequest, sample_turn
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.trajectory.node import Reply
from agentloop.types import FinishReason, GenerateRequest, Message, SamplingParams, ToolCall, ToolCallStatus
from tests.generation.test_turn_sampler import Tape, streamed
from tests.support.engine.engines import leased
from tests.support.families.table import FAMILIES, FAMILY, write_family
from tests.support.records.model_folder import TOOLS

ASKED = [Message("user", "What is 6*7?")]
CALLS = tuple(ToolCall(f"c0000000{i}", "calculator", {"expression": text}) for i, text in enumerate(("6*7", "}]1")))
FORK = RenderSettings(OnUnstable.FORK)


async def sampled(
    renderer: TemplateRenderer, parser: str, text: str, sizes: list[int], *, is_parallel: bool = False
) -> Reply:
    """Return the reply of an engine that samples `text` and its stop token; it is the same if streamed."""
    reader, prompt = TurnReader(renderer, get_parser(parser)), tuple(renderer.render(ASKED, TOOLS))
    said = ((*renderer.ids(text), renderer.stop_token_ids[0]), FinishReason.STOP)
    sampling = SamplingParams(1000, stop_token_ids=renderer.stop_token_ids)
    wanted = TurnRequest(
        GenerateRequest("r", prompt, sampling),
        Reading(TOOLS, 0, reads_calls=True, reads_reasoning=True),
        is_parallel=is_parallel,
    )
    whole = await sample_turn(leased(Tape([said], sizes)), reader, wanted)
    _, reply = await streamed(Tape([said], sizes), wanted, reader)
    assert (whole.message, whole.token_ids.tolist()) == (reply.message, reply.token_ids.tolist())
    return reply


def written(renderer: TemplateRenderer, turn: Message, answers: list[Message]) -> str:
    """A turn as the template writes it, without its stop token."""
    prompt, whole = (renderer.decode(renderer.render(made, TOOLS)) for made in (ASKED, [*ASKED, turn, *answers]))
    stops = "|".join(map(re.escape, renderer.facts.stop_tokens))
    return re.split(stops, whole[len(prompt) :])[0]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", [one.name for one in FAMILIES if one.calls and one.num_parallel > 1])
async def test_a_turn_ends_after_its_first_call_and_renders_unchanged(tmp_path: Path, name: str, size: int):
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, name), FORK)
    parser = FAMILY[name].calls
    if not renderer.facts.supports_tools:
        return
    reader, thought = TurnReader(renderer, get_parser(parser)), "I look." if FAMILY[name].think else ""
    answers = [Message("tool", f"is {i}", tool_call_id=one.id, name=one.name) for i, one in enumerate(CALLS)]
    text = written(renderer, Message("assistant", "", CALLS, reasoning=thought), answers)
    both = await sampled(renderer, parser, text, [size] * 999, is_parallel=True)
    assert [one.arguments for one in both.message.tool_calls] == [one.arguments for one in CALLS]
    reply = await sampled(renderer, parser, text, [size] * 999)
    (call,) = reply.message.tool_calls
    assert (call.status, call.arguments) == (ToolCallStatus.OK, CALLS[0].arguments)
    assert reply.finish_reason is FinishReason.STOP
    assert both.token_ids.tolist()[: len(reply.token_ids)] == reply.token_ids.tolist()
    assert call.token_end <= len(reply.token_ids)
    one = written(renderer, Message("assistant", "", CALLS[:1], reasoning=thought), answers[:1])
    assert renderer.decode(reply.token_ids.tolist()) + (reply.closing or "") == one.rstrip()
    answer = Message("tool", "is 0", tool_call_id=call.id, name=call.name)
    bridge = renderer.bridge([answer], TOOLS, reader.end_of(reply, ASKED))
    path = [*renderer.render(ASKED, TOOLS), *reply.token_ids.tolist(), *bridge]
    assert renderer.decode(path) == renderer.decode(renderer.render([*ASKED, reply.message, answer], TOOLS))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("So.\n{0}", ("So.", "{0}<|im_end|>")),  # nothing follows the call, so the turn keeps its original end
        ("{0}\n", ("", "{0}\n<|im_end|>")),
        ("{0}\nAnd then I wait.", ("", "{0}")),
        ("So.\n<tool_call>{{bad}}</tool_call>{0}{1}", ("So.", "So.\n<tool_call>{{bad}}</tool_call>{0}")),
        ("{0}<tool_call>{{bad}}</tool_call>", ("", "{0}")),
        ("<tool_call>{{bad}}</tool_call>", ("", "<tool_call>{{bad}}</tool_call><|im_end|>")),
        ("No calls.", ("No calls.", "No calls.<|im_end|>")),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
async def test_what_follows_the_first_call_is_not_sampled(
    tmp_path: Path, size: int, text: str, shown: tuple[str, str]
):
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, "qwen2_5"), FORK)
    calls = [
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{n}"}}}}\n</tool_call>' for n in "12"
    ]
    reply = await sampled(renderer, "hermes", text.format(*calls), [size] * 999)
    ids = reply.token_ids.tolist()
    assert renderer.decode(ids).removeprefix("So.\n") == shown[1].format(*calls).removeprefix("So.\n")
    assert reply.message.content == shown[0]
    assert reply.is_closed == (ids[-1] == renderer.stop_token_ids[0])


@pytest.mark.parametrize(
    ("parser", "tokens", "num_kept", "closing"),
    [
        ("mistral", ["[TOOL_CALLS] [", '{"name": "f", "arguments": {"x": 3', "}}, ", '{"name": "g"}]'], 2, "}}]"),
        ("mistral", ["[TOOL_CALLS] [", '{"name": "f", "arguments": {"x": 3}}', ", {", '"name": "g"}]'], 2, "]"),
        ("mistral", ["[TOOL_CALLS]", "f", '[ARGS]{"x": 3}', "[TOOL_CALLS]", "g[ARGS]{}"], 3, ""),
        ("lfm2", ["<|tool_call_start|>[", "f(x=3", "), g", "()]"], 2, ")]<|tool_call_end|>"),
        ("lfm2", ["<|tool_call_start|>[", "f(x=3)", "]"], None, None),  # its end may still arrive
        ("hermes", ["<tool_call>\n", '{"name": "f", "arguments": {}}', "<tool_call>", "{"], 2, "\n</tool_call>"),
        ("hermes", ["<tool_call>\n", '{"name": "f", "arguments": {}}', "\n</too"], None, None),
    ],
)
def test_a_token_that_also_begins_what_follows_is_not_kept(
    tmp_path: Path, parser: str, tokens: list[str], num_kept: int | None, closing: str | None
):
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, "qwen2_5"), FORK)
    decoded = DecodedText("".join(tokens), tuple(itertools.accumulate(map(len, tokens))))
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    reading = Reading(tools, 0, reads_calls=True, reads_reasoning=True)
    cut = TurnReader(renderer, get_parser(parser)).first_call(decoded, reading)
    if num_kept is None:
        assert cut is None
        return
    assert cut is not None
    assert (len(cut[0].ends), cut[1]) == (num_kept, closing)
    assert cut[0].text == "".join(tokens[:num_kept]) + closing
