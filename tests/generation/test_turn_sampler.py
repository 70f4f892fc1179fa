"""A sampled turn, complete and streamed: the same reply, consistent pieces, and no request left running."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.engine.interface import Delta, OnProgress, TokenEngine
from agentloop.errors import DeadlineExceeded, EngineLost, EnginePaused, InvalidRequest, MalformedEngineResponse
from agentloop.generation.leased_engine import MAX_ABORTS
from agentloop.generation.turn_reader import CallDelta, Reading, TurnFinish, TurnPiece, TurnReader, arguments_text
from agentloop.generation.turn_sampler import (
    AnswerText,
    TurnRequest,
    sample_turn,
    stream_turn,
)
from agentloop.parsers.by_name import get_parser
from agentloop.simulation.engine import SimulatedEngine
from agentloop.simulation.policy import LatencyModel
from agentloop.trajectory.node import Reply
from agentloop.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    SamplingParams,
    WeightVersionSpan,
)
from agentloop.values.codec import encode
from tests.support.engine.engines import leased
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import RENDERER, SPEC, call, ids, started
from tests.support.records.samples import counted

READER = TurnReader(RENDERER, get_parser("hermes"))
STOP_ID = RENDERER.stop_token_ids[0]
PROMPT = tuple(RENDERER.render([Message("user", "What is 2 + 3?")], []))


SAMPLING = SamplingParams(1000, seed=7, stop_token_ids=RENDERER.stop_token_ids)


def order(max_tokens: int = 1000, **fields: object) -> TurnRequest:
    sampling = replace(SAMPLING, max_tokens=max_tokens)
    request = GenerateRequest("r", PROMPT, fields.pop("sampling", sampling))  # type: ignore[arg-type]
    reads = {name: fields.pop(name, True) for name in ("reads_calls", "reads_reasoning")}
    return TurnRequest(request, Reading((), 0, **reads), **fields)  # type: ignore[arg-type]


@dataclass
class Tape:
    """An engine that samples given tokens in deltas of given sizes, one script per request: ids and a finish."""

    takes: Sequence[tuple[Sequence[int], FinishReason]]
    sizes: Sequence[int] = ()
    versions: Sequence[int] = (0,)  # one token each; the last version covers the rest
    requests: list[GenerateRequest] = field(default_factory=list)
    num_open: int = 0

    def _next(self, request: GenerateRequest) -> Generation:
        token_ids, reason = self.takes[len(self.requests)]
        start = len(request.token_ids) - len(PROMPT)
        self.requests.append(request)
        numbers = range(start, start + len(token_ids))
        spans = [
            WeightVersionSpan(self.versions[min(n, len(self.versions) - 1)], i, i + 1)
            for i, n in enumerate(numbers)
        ]
        has_tops = request.sampling.num_top_logprobs > 0
        tops = tuple((((n + 3) % 99, -0.1), (0, -n % 50 / 3 - 20)) for n in numbers) if has_tops else ()
        logprobs = tuple(-(n % 50) / 7 for n in numbers)
        cached = 5 if start == 0 else 9
        return Generation(
            request.request_id,
            tuple(token_ids),
            logprobs,
            tuple(spans),
            reason,
            cached,
            "replica",
            top_logprobs=tops,
        )

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        return self._next(request)

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncGenerator[Delta | Generation, None]:
        made = self._next(request)
        at, sizes, total = 0, iter(self.sizes), len(made.token_ids)
        self.num_open += 1
        try:
            while at < total:
                end = min(at + next(sizes, total), total)
                spans = made.weight_versions[at:end]  # one token each
                spans = tuple(WeightVersionSpan(s.version, s.start - at, s.end - at) for s in spans)
                yield Delta(made.token_ids[at:end], made.logprobs[at:end], spans, made.top_logprobs[at:end])
                at = end
            yield made
        finally:
            self.num_open -= 1


def said(text: str, **fields: object) -> Tape:
    return Tape([((*ids(text), STOP_ID), FinishReason.STOP)], **fields)  # type: ignore[arg-type]


async def whole_turn(engine: TokenEngine, wanted: TurnRequest) -> Reply:
    return await sample_turn(leased(engine), READER, wanted)


async def streamed(engine: TokenEngine, wanted: TurnRequest, reader: TurnReader = READER):
    items = [item async for item in stream_turn(leased(engine), reader, wanted)]
    *pieces, reply = items
    assert isinstance(reply, Reply)
    check_pieces(pieces, reply)
    return pieces, reply


def check_pieces(pieces: list[TurnPiece], reply: Reply) -> None:
    """Check that the pieces concatenate to the reply, and that only the last one has a finish."""
    message = reply.message
    assert "".join(piece.content for piece in pieces) == message.content
    assert "".join(piece.reasoning for piece in pieces) == message.reasoning
    assert [i for piece in pieces for i in piece.token_ids] == reply.token_ids.tolist()
    assert [value for piece in pieces for value in piece.logprobs] == reply.logprobs.tolist()
    assert tuple(tops for piece in pieces for tops in piece.top_logprobs) == reply.top_logprobs
    deltas = [delta for piece in pieces for delta in piece.calls]
    texts = [(n, c.id, c.name, arguments_text(c)) for n, c in enumerate(message.tool_calls)]
    assert deltas == [d for n, i, f, a in texts for d in (CallDelta(n, i, f), CallDelta(n, arguments=a))]
    versions = [s.version for piece in pieces for s in piece.weight_versions for _ in range(s.start, s.end)]
    assert versions == [span.version for span in reply.weight_versions for _ in range(span.start, span.end)]
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


# The same reply, complete and streamed

PIECES = ["<think>", "</think>", "Hi ", " \n", "é😀", "x", "STOP", "ST", "OP!", "<tool_call>", "</tool_call>", "{"]
CALLS = [call("add", a=1), call("sub", text="STOP é"), "<|im_end|>", "<tool_call>{bad}</tool_call>", "<to"]
parts = st.sampled_from([*PIECES, *CALLS])


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(st.one_of(parts.map(ids), st.lists(st.integers(3, SPEC.vocab_size - 1), max_size=3)), max_size=12),
    st.lists(st.integers(1, 6), max_size=40),
    st.lists(st.sampled_from(["STOP", "TOP", "OP!", "é", "\ufffd", "</think>", "call>"]), max_size=3, unique=True),
    st.booleans(),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_a_stream_gives_the_reply_of_the_whole_call_however_it_is_cut(
    written: list[list[int]], sizes: list[int], stop: list[str], reads: bool, reason: FinishReason
):
    sampled = [i for piece in written for i in piece] + ([STOP_ID] if reason is FinishReason.STOP else [5])
    sampling = replace(SAMPLING, num_top_logprobs=2)
    wanted = order(sampling=sampling, stop=tuple(stop), reads_calls=reads, reads_reasoning=reads)

    async def both() -> tuple[Reply, Reply]:
        whole = await whole_turn(Tape([(sampled, reason)]), wanted)
        _, reply = await streamed(Tape([(sampled, reason)], sizes, versions=(0, 0, 1, 2)), wanted)
        return whole, replace(reply, weight_versions=whole.weight_versions)

    whole, reply = asyncio.run(both())
    assert encode(reply) == encode(whole)
    visible = whole.message.content + whole.message.reasoning
    assert not any(text in visible for text in stop if text != "\ufffd")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stop", [(), ("e",), ("<tool", "in", "\n")])
async def test_a_simulated_engine_gives_both_the_same(seed: int, stop: tuple[str, ...]):
    wanted = order(
        stop=stop, sampling=replace(SAMPLING, max_tokens=200, temperature=1.0, seed=seed), reads_calls=True
    )
    async with started(SimulatedEngine(SPEC)) as engine:
        whole = await whole_turn(engine, wanted)
        _, reply = await streamed(engine, wanted)
        assert encode(replace(whole, replica_id="", cached_tokens=0)) == encode(replace(reply, cached_tokens=0))
        assert engine.load().num_running == 0
    assert (whole.stop_text != "") is (whole.finish_reason is FinishReason.STOP and not whole.is_closed)


async def test_a_scripted_turn_streams_its_thought_its_text_and_its_call():
    text = f"<think>\nadd\n</think>\n\nI add. {call('add', a=2, b=3)}"
    async with started(SimulatedEngine(SPEC, policy=ScriptedPolicy(lambda prompt: ids(text)))) as engine:
        pieces, reply = await streamed(engine, order())
    assert (reply.message.reasoning, reply.message.content) == ("add", "I add.")
    assert reply.is_closed
    assert reply.finish_reason is FinishReason.STOP
    assert pieces[-1].finish is TurnFinish.TOOL_CALLS
    assert reply.num_reasoning_tokens == len(ids("<think>\nadd\n</think>"))
    (made,) = reply.message.tool_calls
    assert RENDERER.decode(reply.token_ids[made.token_start : made.token_end].tolist()).strip().startswith("<tool")
    assert (reply.token_ids.dtype, reply.logprobs.dtype) == (np.int32, np.float32)


async def test_a_turn_cut_by_its_length_is_neither_closed_nor_stopped():
    _, reply = await streamed(Tape([(ids("<think>so é")[:-1], FinishReason.LENGTH)], [1] * 20), order())
    assert reply.finish_reason is FinishReason.LENGTH
    assert not reply.is_closed
    assert reply.message == Message("assistant", "", reasoning="so \ufffd")


async def test_a_character_is_streamed_once_it_is_whole():
    pieces, _ = await streamed(said("é😀!", sizes=[1] * 20), order(reads_calls=False))
    assert [piece.content for piece in pieces if piece.content] == ["é", "😀", "!"]


# Stop strings


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_ids_end_with_the_token_that_completes_the_first_stop_string(size: int):
    before, after = ids("Thought: go\nObs"), ids("ervation: none Calling")
    tape = Tape([((*before, *after, STOP_ID), FinishReason.STOP)], [size] * 99)
    _, reply = await streamed(tape, order(stop=("Calling", "Observation:")))
    assert reply.message.content == "Thought: go"
    assert (reply.stop_text, reply.is_closed, reply.finish_reason) == ("Observation:", False, FinishReason.STOP)
    text = RENDERER.decode(reply.token_ids.tolist())
    assert "Observation:" in text
    assert "Observation:" not in RENDERER.decode(reply.token_ids[:-1].tolist())
    assert tape.num_open == 0


async def test_no_part_of_a_stop_string_is_streamed_and_what_is_none_is():
    pieces, _ = await streamed(said("a STOx b STOP c", sizes=[1] * 99), order(stop=("STOP",), reads_calls=False))
    assert "".join(piece.content for piece in pieces) == "a STOx b "


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>I END now</think>Hi", "I", ""),
        ("<think>I</think>Hi END", "I", "Hi"),
        (f"Hi {call('add', a='END')}", "", "Hi"),
    ],
)
async def test_stop_strings_count_in_thoughts_and_calls_too(text: str, reasoning: str, content: str):
    _, reply = await streamed(said(text, sizes=[2] * 99), order(stop=("END",)))
    assert (reply.message.reasoning, reply.message.content, reply.stop_text) == (reasoning, content, "END")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content", "stop_text"),
    [
        (
            "<think>A Question: what?</think>\n\n42.\nQuestion: next",
            "Question:",
            "A Question: what?",
            "42.",
            "Question:",
        ),
        ("<think>I END now</think>Hi", "END", "I END now", "Hi", ""),
        ("<think>a\n\nb</think>\n\nHi\n\nthere", "\n\n", "a\n\nb", "Hi", "\n\n"),
        # no match crosses the end of the reasoning
        ("<think>an EN</think>D of it END", "END", "an EN", "D of it", "END"),
        ("<think>a</think>\nb", "</think>\nb", "a", "b", ""),
        ("<think>END", "END", "END", "", ""),
        ("Hi END <think>END</think>", "END", "", "Hi", "END"),  # a turn without reasoning
        ("<thi END", "END", "", "<thi", "END"),
        ("<thi", "<thi", "", "", "<thi"),
        ("\n\n<think>a</think>END", "END", "a", "", "END"),
        ("\n\nHi", "\n\n", "", "", "\n\n"),
    ],
)
async def test_stop_strings_may_count_in_the_answer_alone(
    size: int, text: str, stop: str, reasoning: str, content: str, stop_text: str
):
    wanted = order(stop=(stop,), stop_in_reasoning=False)
    _, reply = await streamed(said(text, sizes=[size] * 99), wanted)
    assert (reply.message.reasoning, reply.message.content, reply.stop_text) == (reasoning, content, stop_text)
    whole = await whole_turn(said(text, sizes=[size] * 99), wanted)
    assert (whole.message, whole.token_ids.tolist()) == (reply.message, reply.token_ids.tolist())
    if stop_text:
        assert stop not in RENDERER.decode(reply.token_ids.tolist()[:-1]).rpartition("</think>")[2].lstrip()


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_the_answer_of_a_format_with_headers_is_outside_all_its_reasoning(size: int):
    start, final = "<|start|>assistant", "<|channel|>final<|message|>"
    thought = "<|channel|>analysis<|message|>a STOP<|end|>"
    text = f"{thought}{start}{thought}{start}{final}Hi STOP"
    answer, shown, place = AnswerText(get_parser("harmony").delimiters, is_thinking=False), [], 0
    for at in range(0, len(text), size):
        for num_skipped, part in answer.add(text[at : at + size], is_last=at + size >= len(text)):
            place += num_skipped
            assert text.startswith(part, place)
            place += len(part)
            shown.append(part)
    assert "".join(shown) == f"{start}{start}{final}Hi STOP"
    assert place == len(text)


async def test_the_stop_token_is_no_text():
    _, reply = await streamed(said("Hi"), order(stop=("<|im_end|>",)))
    assert (reply.message.content, reply.stop_text, reply.is_closed) == ("Hi", "", True)


async def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequest):
        await whole_turn(said("Hi"), order(stop=("",)))


# Aborts, faults, cancellation


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_abort_is_continued_where_it_cut(is_streamed: bool):
    first, second = ids("Hello, wor"), (*ids("ld"), STOP_ID)
    takes = [(first, FinishReason.ABORT), ((), FinishReason.ABORT), (second, FinishReason.STOP)]
    tape = Tape(takes, [2] * 9, versions=(3,) * len(first) + (4,))
    sampling = replace(SAMPLING, min_tokens=2)
    run = streamed(tape, order(sampling=sampling)) if is_streamed else whole_turn(tape, order())
    reply = (await run)[1] if is_streamed else await run
    assert reply.message.content == "Hello, world"
    assert reply.token_ids.tolist() == [*first, *second]
    assert reply.weight_versions == (
        WeightVersionSpan(3, 0, len(first)),
        WeightVersionSpan(4, len(first), len(first) + len(second)),
    )
    assert (reply.cached_tokens, reply.replica_id) == (5, "replica")
    assert [request.request_id for request in tape.requests] == ["r", "r~1", "r~2"]
    assert tape.requests[2].token_ids == (*PROMPT, *first)
    assert tape.requests[2].sampling.max_tokens == 1000 - len(first)
    assert tape.requests[2].sampling.min_tokens == 0


async def test_an_abort_with_no_room_left_is_a_length():
    reply = await whole_turn(Tape([(ids("abcd"), FinishReason.ABORT)]), order(len(ids("abcd"))))
    assert reply.finish_reason is FinishReason.LENGTH


LOOKS_BACK = [
    {"constraint": Constraint(ConstraintKind.JSON_OBJECT)},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.5},
]


@pytest.mark.parametrize("shape", LOOKS_BACK)
@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_a_turn_that_looks_back_is_sampled_again_if_it_was_cut(stop: tuple[str, ...], shape: dict[str, Any]):
    wanted = order(sampling=replace(SAMPLING, **shape), stop=stop)
    cut, whole = (ids("{"), FinishReason.ABORT), ((*ids("{}"), STOP_ID), FinishReason.STOP)
    tape = Tape([cut, cut, whole])
    reply = await whole_turn(tape, wanted)
    assert reply.message.content == "{}"
    assert [request.request_id for request in tape.requests] == ["r", "r~1", "r~2"]
    assert {request.token_ids for request in tape.requests} == {PROMPT}
    endless = Tape([cut] * 100)
    with pytest.raises(EnginePaused):
        await whole_turn(endless, wanted)
    assert len(endless.requests) == MAX_ABORTS


async def test_a_constrained_stream_that_was_cut_cannot_go_on():
    wanted = order(sampling=replace(SAMPLING, constraint=Constraint(ConstraintKind.JSON_OBJECT)))
    with pytest.raises(EnginePaused):
        await streamed(Tape([(ids("{"), FinishReason.ABORT)]), wanted)


SLOW = replace(SPEC, latency=LatencyModel(decode_s=0.002))


async def test_a_stream_that_is_closed_runs_no_more():
    async with started(SimulatedEngine(SLOW, policy=ScriptedPolicy(lambda _: ids("word ") * 300))) as engine:
        async with aclosing(stream_turn(leased(engine), READER, order())) as pieces:
            assert (await anext(pieces)).content
            assert engine.load().num_running == 1
        assert engine.load().num_running == 0


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_a_call_that_is_cancelled_runs_no_more(stop: tuple[str, ...]):
    async with started(SimulatedEngine(SLOW, policy=ScriptedPolicy(lambda _: ids("word ") * 300))) as engine:
        task = asyncio.create_task(whole_turn(engine, order(stop=stop)))
        while engine.load().num_running == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.load().num_running == 0


async def test_a_found_stop_string_ends_the_engine_request():
    async with started(SimulatedEngine(SLOW, policy=ScriptedPolicy(lambda _: ids("word STOP ") * 50))) as engine:
        async for item in stream_turn(leased(engine), READER, order(stop=("STOP",))):
            if isinstance(item, Reply) or item.finish is not None:
                assert engine.load().num_running == 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_that_does_not_answer_meets_the_deadline(is_streamed: bool):
    request = GenerateRequest("r", PROMPT, SAMPLING, timeout_s=0.05)
    async with started(SimulatedEngine(SPEC)) as engine, asyncio.timeout(20):
        engine.faults.num_hung = 1
        with pytest.raises(DeadlineExceeded):
            await (anext(leased(engine).stream(request)) if is_streamed else leased(engine).generate(request))
        assert engine.load().num_running + engine.load().num_waiting == 0


@dataclass
class Broken(Tape):
    """Like a Tape, but its last delta is invalid."""

    how: str = ""

    async def stream(
        self, request: GenerateRequest, on_progress: OnProgress | None = None
    ) -> AsyncGenerator[Delta | Generation, None]:
        made = self._next(request)
        delta = Delta(made.token_ids, made.logprobs, made.weight_versions)
        if self.how == "logprob":
            delta = replace(delta, logprobs=(math.nan, *made.logprobs[1:]))
        if self.how == "other ids":
            delta = replace(delta, token_ids=(*made.token_ids[:-1], 5))
        yield delta
        if self.how != "no end":
            yield made


@pytest.mark.parametrize(
    ("how", "error"),
    [("logprob", MalformedEngineResponse), ("other ids", MalformedEngineResponse), ("no end", EngineLost)],
)
async def test_what_a_stream_cannot_be_is_refused_and_counted(how: str, error: type[Exception]):
    engine = leased(Broken([((*ids("Hi"), STOP_ID), FinishReason.STOP)], how=how))
    with pytest.raises(error):
        [item async for item in stream_turn(engine, READER, order())]
    is_counted = error is MalformedEngineResponse
    assert counted(engine.tally) == ({("logprob_problems_total", ()): 1} if is_counted else {})


async def test_calls_that_the_parser_cannot_read_are_counted_by_its_name():
    reader, broken = TurnReader(RENDERER, get_parser("hermes"), "hermes"), "<tool_call>\n{not json\n</tool_call>"
    engine = leased(said(broken + call("calculator", expression="1") + broken))
    await sample_turn(engine, reader, order())
    assert counted(engine.tally) == {("malformed_calls_total", ("hermes",)): 2}


@pytest.mark.parametrize("num_chars", [50_000, pytest.param(500_000, marks=pytest.mark.long)])
async def test_a_long_turn_streams_in_linear_time(num_chars: int):
    """The bounds are a few times the time that two shared cores need."""
    unit = ids("<tool_call>{ é <to </tool")
    sampled = unit * (num_chars // len(RENDERER.decode(unit)))
    wanted = order(len(sampled), stop=("no such text", "<to no"))
    started = time.process_time()
    await whole_turn(Tape([(sampled, FinishReason.LENGTH)]), wanted)
    whole_s = time.process_time() - started
    await streamed(Tape([(sampled, FinishReason.LENGTH)], [16] * len(sampled)), wanted)
    assert time.process_time() - started - whole_s < 8 * whole_s + 2
