"""Incremental decoding of ids to text, and parsing of a turn's text into reasoning, content and calls."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.prompt_text import ChatTemplate
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.rendering.tokenizer import Tokens
from agentloop.types import Message
from tests.support.records.model_folder import IGNORES_TOOLS, TEMPLATE, write_folder

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer.from_directory(write_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reader(renderer: TemplateRenderer) -> TurnReader:
    return TurnReader(renderer, get_parser("hermes"))


@functools.cache
def byte_fallback_renderer() -> TemplateRenderer:
    """Return a renderer whose tokenizer writes unknown characters as single-byte tokens."""
    words = ["▁", "a", "b", "▁a", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("▁", "a")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    template = IGNORES_TOOLS.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")
    return TemplateRenderer(ChatTemplate(template, {}), Tokens(tokenizer), stop_token_ids=[5], vocab_size=300)


def cut(values: list[int], sizes: list[int]) -> list[list[int]]:
    """Return the values in pieces of these sizes, followed by the rest."""
    pieces = []
    for size in sizes:
        pieces.append(values[:size])
        values = values[size:]
    return [*pieces, values]


def decoded_in_pieces(reader: TurnReader, pieces: list[list[int]]) -> tuple[list[str], DecodedText]:
    decoder, texts, ends, num_chars = reader.decoder(), [], [], 0
    for piece in pieces:
        decoded = decoder.add(piece)
        texts.append(decoded.text)
        ends += [num_chars + end for end in decoded.ends]
        num_chars += len(decoded.text)
    tail = decoder.finish()
    ends += [num_chars + end for end in tail.ends]
    return texts, DecodedText("".join([*texts, tail.text]), tuple(ends))


# Ids 0-255 are the byte tokens; ids from 500 on are padding without text.
token_ids = st.lists(st.one_of(st.integers(0, 511), st.sampled_from([160, 240, 255, 511, 254, 253])), max_size=60)
sizes = st.lists(st.integers(0, 5), max_size=40)


@given(token_ids, sizes)
def test_ids_in_pieces_decode_as_all_at_once(
    reader: TurnReader, renderer: TemplateRenderer, ids: list[int], at: list[int]
):
    _, whole = decoded_in_pieces(reader, cut(ids, at))
    assert whole == renderer.decode_with_offsets(ids)


def test_a_character_is_given_out_once_all_of_its_bytes_are_there(reader: TurnReader, renderer: TemplateRenderer):
    ids = renderer.ids("é😀x€")
    texts, _ = decoded_in_pieces(reader, [[token_id] for token_id in ids])
    assert [text for text in texts if text] == ["é", "😀", "x", "€"]
    texts, whole = decoded_in_pieces(reader, [[token_id] for token_id in ids[:-1]])
    assert "".join(texts) == "é😀x"
    assert whole.text == "é😀x\ufffd"


@given(st.text("ab é😀€", max_size=12), sizes)
def test_byte_tokens_of_other_tokenizers_make_characters_too(text: str, at: list[int]):
    renderer = byte_fallback_renderer()
    ids = renderer.ids(text)
    texts, whole = decoded_in_pieces(TurnReader(renderer, get_parser("hermes")), cut(ids, at))
    assert whole.text == renderer.decode(ids)
    assert "\ufffd" not in "".join(texts)


@given(st.lists(st.integers(0, 7) | st.sampled_from([6 + 0xC3, 6 + 0xA9, 6 + 0xFF, 6 + 0xF0, 290])), sizes)
def test_bytes_that_make_no_character_agree_with_all_at_once(ids: list[int], at: list[int]):
    renderer = byte_fallback_renderer()
    _, whole = decoded_in_pieces(TurnReader(renderer, get_parser("hermes")), cut(ids, at))
    assert whole == renderer.decode_with_offsets(ids)


@pytest.mark.parametrize("size", [1, 7, 500])
def test_bytes_that_make_no_character_do_not_vanish(size: int):
    renderer = byte_fallback_renderer()
    ids = [6 + 0xFF] * 500 + renderer.ids("ab")
    _, whole = decoded_in_pieces(TurnReader(renderer, get_parser("hermes")), cut(ids, [size] * (500 // size)))
    assert whole.text == renderer.decode(ids)
    assert len(whole.ends) == len(ids)


def test_unfinished_characters_cost_linear_time(reader: TurnReader, renderer: TemplateRenderer):
    lead = renderer.ids("😀")[0]
    for ids in ([lead] * 6_000, [lead] + [511] * 6_000):
        decoder = reader.decoder()
        started = time.process_time()
        text = "".join(decoder.add([token_id]).text for token_id in ids) + decoder.finish().text
        assert time.process_time() - started < 3  # takes about 0.2 s, or 9 s if all held ids were decoded each time
        assert text == renderer.decode(ids)


# Turns


def read(reader: TurnReader, text: str, *, calls: bool = True, reasoning: bool = True, is_thinking: bool = False):
    """Read with one token per character, so that spans are offsets into the text."""
    decoded = DecodedText(text, tuple(range(1, len(text) + 1)))
    return reader.read(decoded, Reading((), 3, calls, reasoning, is_thinking))


def test_a_thought_at_the_start_is_no_content(reader: TurnReader):
    turn = read(reader, "<think>\nLet me see.\n</think>\n\nFour.\n")
    assert turn == (Message("assistant", "Four.", reasoning="Let me see."), 28)


def test_a_thought_that_the_prompt_opened_runs_to_its_mark(reader: TurnReader):
    turn = read(reader, "Hm.</think>Four.", is_thinking=True)
    assert turn == (Message("assistant", "Four.", reasoning="Hm."), 11)


@pytest.mark.parametrize(("text", "is_thinking"), [("<think>\nHm, so", False), ("Hm, so ", True)])
def test_an_unfinished_thought_is_all_there_is(reader: TurnReader, text: str, is_thinking: bool):
    turn = read(reader, text, is_thinking=is_thinking)
    assert turn == (Message("assistant", "", reasoning="Hm, so"), len(text))


@pytest.mark.parametrize("text", ["So <think>hm</think>", f"{' ' * 9}<think>hm", "<thinking>", "hm</think>"])
def test_marks_elsewhere_are_content(reader: TurnReader, text: str):
    assert read(reader, text) == (Message("assistant", text.strip()), 0)


def test_calls_are_read_after_the_thought_only(reader: TurnReader):
    thought = f"<think>I could write {CALL}</think>"
    message, _ = read(reader, f"{thought} Now: {CALL}")
    assert message.reasoning == f"I could write {CALL}"
    assert message.content == "Now:"
    (call,) = message.tool_calls
    assert (call.id, call.name, call.arguments) == ("call_3_0", "add", {"a": 1})
    start = len(thought) + len(" Now: ")
    assert (call.token_start, call.token_end) == (start, start + len(CALL))


def test_without_calls_and_thoughts_the_text_stays_as_it_is(reader: TurnReader):
    text = f"<think>x</think> {CALL}\n"
    assert read(reader, text, calls=False, reasoning=False)[0] == Message("assistant", text)
    assert read(reader, " x \n", calls=False)[0] == Message("assistant", " x \n")
    assert read(reader, text, calls=False)[0] == Message("assistant", f"{CALL}\n", reasoning="x")


def test_a_prompt_tells_whether_it_leaves_a_thought_open(tmp_path: Path):
    prompt = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    opening = TEMPLATE.rpartition("{%- if add_generation_prompt %}")[0] + prompt
    for template, is_thinking in ((opening, True), (opening.replace("<think>\\n", "<think>\\n</think>"), False)):
        folder = write_folder(tmp_path, template)
        renderer = TemplateRenderer.from_directory(folder, RenderSettings(on_unstable=OnUnstable.FORK))
        ids = renderer.render([Message("user", "?")], [])
        assert TurnReader(renderer, get_parser("hermes")).is_thinking(ids) is is_thinking
