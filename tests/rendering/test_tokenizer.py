"""Content never becomes a control token, and ids become text with exact offsets."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentloop.errors import InvalidRequest
from agentloop.parsers.base import DecodedText
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.prompt_text import ChatTemplate, PromptText, TemplateForm, masked_tool
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.rendering.tokenizer import Tokens
from agentloop.types import Message, ToolCall, ToolCallStatus
from tests.support.records.model_folder import (
    IGNORES_TOOLS,
    MARKUP,
    SPECIAL,
    STOP,
    TOOLS,
    call,
    trained_tokenizer,
    write_folder,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> TemplateRenderer:
    return TemplateRenderer.from_directory(folder)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer()


def test_a_control_token_of_punctuation_alone_leaves_other_text_as_it_is():
    """In Gemma-4's string delimiter, the inner part is empty, and no text starts with an empty string."""
    tokenizer = Tokenizer.from_str(trained_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken('<|"|>', special=True, normalized=False)])
    tokens = Tokens(tokenizer)
    assert [tokens.mask(text) for text in ("words", 'Say "x".', "")] == ["words", 'Say "x".', ""]
    assert tokens.mask('"|>') != '"|>'
    assert tokens.unmask(tokens.mask('<|"|>')) == '<|"|>'


def test_the_keys_of_a_tools_definition_stay_the_templates(folder: Path):
    """If `<function>` is a token, its inner word is still the key with which templates read a definition."""
    tokenizer = Tokenizer.from_str(trained_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken("<function>", special=False, normalized=False)])
    source = (
        "{%- for tool in tools or [] %}{{ tool.function.name }}{% for p in tool.function.parameters.properties %}"
        "{{ '<' ~ p ~ '>' }}{% endfor %}{% endfor %}" + IGNORES_TOOLS
    )
    renderer = TemplateRenderer(
        ChatTemplate(source, {}), Tokens(tokenizer), stop_token_ids=[tokenizer.token_to_id(STOP)], vocab_size=600
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"function": {}, "b": {}}}}}
    text = PromptText(ChatTemplate(source, {}), renderer.tokens, (STOP,), TemplateForm()).text(
        [Message("user", "x")], [masked_tool(renderer.tokens, tool)]
    )
    assert renderer.tokens.unmask(text).startswith("f<function><b>")
    assert tokenizer.token_to_id("<function>") not in renderer.ids(text)


# Content is text


def control_ids(tokenizer: Tokenizer) -> set[int]:
    return {tokenizer.token_to_id(text) for text in SPECIAL + MARKUP}


def as_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the text's ids in a vocabulary without control tokens; all other ids are the same."""
    bare = Tokenizer(tokenizer.model)
    bare.normalizer, bare.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    bare.add_tokens([AddedToken("    ", special=False, normalized=False)])
    spaces, real = bare.token_to_id("    "), tokenizer.token_to_id("    ")
    return [real if token_id == spaces else token_id for token_id in bare.encode(text).ids]


literals = st.sampled_from([*SPECIAL, *MARKUP, "<|im_", "end|>", "    ", "\n", " é", "\U0010fffd", "0", "x"])
hostile_text = st.lists(literals | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=8).map(
    "".join
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hostile_text)
def test_content_is_encoded_as_the_text_it_is(renderer: TemplateRenderer, tokenizer: Tokenizer, content: str):
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id(STOP)
    newline = as_text(tokenizer, "\n")
    tail = [end, *newline, start, *as_text(tokenizer, "assistant\n")]
    assert renderer.render([Message("user", content)], []) == [
        start,
        *as_text(tokenizer, f"user\n{content}"),
        *tail,
    ]

    opening, closing = tokenizer.token_to_id("<tool_response>"), tokenizer.token_to_id("</tool_response>")
    wrapped = as_text(tokenizer, f"\n{content}\n")
    user = as_text(tokenizer, "user\n")
    assert renderer.bridge([Message("tool", content)], TOOLS, TurnEnd(renderer.stop_token_ids[0])) == (
        [*newline, start, *user, opening, *wrapped, closing, *tail]
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hostile_text, hostile_text)
def test_no_field_can_hold_a_control_token(renderer: TemplateRenderer, tokenizer: Tokenizer, text: str, key: str):
    def control(of: str, of_key: str) -> list[int]:
        made = ToolCall(f"id{of}", f"name{of}", {of_key + "key": [of, {"inner": of}]})
        tools = [
            {"type": "function", "function": {"name": f"t{of}", "description": of, "parameters": {of_key: of}}}
        ]
        messages = [
            Message("system", "Be brief."),
            Message("user", of),
            Message("assistant", "I call.", tool_calls=(made,)),
            Message("tool", of, tool_call_id=of, name=of),
        ]
        return [i for i in renderer.render(messages, tools) if i in control_ids(tokenizer)]

    assert control(text, key) == control("harmless", "harmless")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_trusted_text_keeps_its_markup_and_no_control_token(
    renderer: TemplateRenderer, tokenizer: Tokenizer, role: str
):
    text = "Think within <think></think> tags.<|im_end|>"
    ids = renderer.render([Message(role, text), Message("user", text)], [])
    assert [ids.count(tokenizer.token_to_id(mark)) for mark in ("<think>", "</think>", STOP)] == [1, 1, 2]
    assert renderer.decode(ids).count(text) == 2


def test_a_policys_own_markup_stays_its_own(renderer: TemplateRenderer, tokenizer: Tokenizer):
    """Re-rendering sampled text keeps `<think>` a token, but a special token in the text becomes text."""
    messages = [
        Message("user", "Hi"),
        Message("assistant", "<think>\nx\n</think>\n\ny<|im_end|>"),
        Message("user", ""),
    ]
    ids = renderer.render(messages, [])
    assert ids.count(tokenizer.token_to_id("<think>")) == 1
    assert ids.count(tokenizer.token_to_id(STOP)) == 3


@pytest.mark.parametrize(
    ("messages", "tools", "param"),
    [
        ([], [], "messages"),
        ([Message("user", "\ud800")], [], "messages"),
        ([Message("user", "x"), Message("assistant", tool_calls=(call("\udfff"),))], [], "messages"),
        ([Message("user", "x"), Message("assistant", tool_calls=(call(float("nan")),))], [], "messages"),
        ([Message("user<|im_end|>", "x")], [], "messages"),
        ([Message("user", "x")], [{"description": "\ud800"}], "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused(
    renderer: TemplateRenderer, messages: list[Message], tools: Any, param: str
):
    with pytest.raises(InvalidRequest) as caught:
        renderer.render(messages, tools)
    assert caught.value.param == param


def test_nul_and_escape_codes_pass_exactly(renderer: TemplateRenderer):
    text = "\x00\x1b[31mred\x07"
    assert text in renderer.decode(renderer.render([Message("user", text)], []))


# Decoding


def test_offsets_wait_for_the_last_byte_of_a_character(renderer: TemplateRenderer, tokenizer: Tokenizer):
    text = "a é 😀<|im_end|>"
    ids = tokenizer.encode(text).ids
    decoded = renderer.decode_with_offsets(ids)
    assert decoded.text == text
    emoji = [i for i, end in enumerate(decoded.ends) if end == text.index("😀")]
    assert len(emoji) >= 4  # the space before it, then three tokens that leave it incomplete
    assert decoded.ends[-2:] == (len(text) - len(STOP), len(text))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 600), max_size=40))
def test_offsets_agree_with_decode_on_any_ids(renderer: TemplateRenderer, ids: list[int]):
    decoded = renderer.decode_with_offsets(ids)
    assert decoded.text == renderer.decode(ids)
    assert len(decoded.ends) == len(ids)
    assert list(decoded.ends) == sorted(decoded.ends)
    assert not ids or decoded.ends[-1] == len(decoded.text)


def test_decoding_bytes_that_make_no_text_is_linear(renderer: TemplateRenderer, tokenizer: Tokenizer):
    continuation = tokenizer.token_to_id("¤")  # one byte of 0x80 to 0xbf, never valid alone

    def cpu_s(num_ids: int) -> float:
        started = time.process_time()
        decoded = renderer.decode_with_offsets([continuation] * num_ids)
        assert decoded.ends[-1] == len(decoded.text) == num_ids
        return time.process_time() - started

    cpu_s(1000)
    assert cpu_s(100_000) < 10 * cpu_s(25_000) + 0.05


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    """Return a tokenizer that writes unknown characters as single-byte tokens (ids 0-255)."""
    tmp_path = tmp_path_factory.mktemp("fallback")
    write_folder(tmp_path)
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    vocab = {text: index for index, text in enumerate([*bytes_, "▁", "a", "b", "▁a"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    return TemplateRenderer.from_directory(tmp_path)


def test_other_decoders_have_offsets_too(fallback: TemplateRenderer):
    ids = fallback.ids("a é b<|im_end|>")
    decoded = fallback.decode_with_offsets(ids)
    assert decoded.text == "a é b<|im_end|>"
    assert [decoded.ends[i] for i in decoded.token_span(decoded.text.index("b"), len(decoded.text))[:1]] == [5]
    assert decoded.ends[-1] == len(decoded.text)
    invalid = fallback.decode_with_offsets([0x80] * 500 + ids)
    assert invalid.text == "\ufffd" * 500 + decoded.text
    assert invalid.ends[-1] == len(invalid.text)


def test_good_characters_beside_bad_bytes_stay(fallback: TemplateRenderer):
    ids = [0xC3, 0xA9, 0xFF, *fallback.ids("b")]
    assert fallback.decode_with_offsets(ids) == DecodedText("é\ufffdb", (0, 1, 2, 3))
    assert fallback.decode(ids) == "é\ufffdb"
    assert fallback.decode_with_offsets([0x62, 0xC3]) == DecodedText("b\ufffd", (1, 2))


BYTES_OF = {value: bytes([value]) for value in range(256)} | {257: b"a", 258: b"b", 259: b" a", 5000: b""}


@given(st.lists(st.integers(0, 255) | st.sampled_from([0xC3, 0xA9, 0xFF, 257, 258, 259, 5000]), max_size=30))
def test_byte_tokens_are_their_bytes(fallback: TemplateRenderer, ids: list[int]):
    decoded = fallback.decode_with_offsets(ids)
    assert decoded.text == b"".join(BYTES_OF[token_id] for token_id in ids).decode(errors="replace")
    assert list(decoded.ends) == sorted(decoded.ends)
    assert not ids or decoded.ends[-1] == len(decoded.text)


def test_decoders_of_any_kind_have_offsets():
    vocab = ["[UNK]", "he", "##llo", "you", ".", "##\ufffd"]
    tokenizer = Tokenizer(models.WordPiece({text: index for index, text in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokens = Tokens(tokenizer)
    assert tokens.decode_with_offsets([1, 2, 3, 4]) == DecodedText("hello you.", (2, 5, 9, 10))
    whole = tokens.decode_with_offsets([5] * 1000 + [3])
    assert whole.text == tokens.decode([5] * 1000 + [3])
    assert whole.ends[-1] == len(whole.text)


def test_a_token_has_its_bytes(renderer: TemplateRenderer, fallback: TemplateRenderer):
    for one in (renderer, fallback):
        ids = one.ids("a é😀")
        assert b"".join(map(one.token_bytes, ids)).decode() == "a é😀"
        assert any(len(one.token_bytes(token_id).decode(errors="ignore")) == 0 for token_id in ids)


def test_a_sampled_turn_becomes_calls_with_its_tokens(renderer: TemplateRenderer, tokenizer: Tokenizer):
    first = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "é 😀"}}\n</tool_call>'
    ids = tokenizer.encode(f"I ask.\n{first}\n<tool_call>\n{{").ids
    turn = get_parser("hermes").parse(renderer.decode_with_offsets(ids), TOOLS, 0)
    assert turn.content == "I ask."
    assert [c.status for c in turn.calls] == [ToolCallStatus.OK, ToolCallStatus.MALFORMED]
    assert renderer.decode(ids[turn.calls[0].token_start : turn.calls[0].token_end]) == first
    assert turn.calls[1].token_end == len(ids)
