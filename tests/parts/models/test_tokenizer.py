"""The repairs of converted folders. SmolLM2's ids are compared with those of llama.cpp (`reference_ids.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from agentloop_models.fetch import cache_folder
from agentloop_models.repairs import (
    REPAIRS,
    Metadata,
    add_bos,
    declare_stops,
    forget_quantization,
    limit_length,
    repair_folder,
    split_digits,
)
from tests.parts.models.reference_ids import IDS_FILE, TEXTS

SMOLLM2 = "smollm2-135m-instruct-q4_1"
METADATA: Metadata = {
    "general.architecture": "llama",
    "llama.context_length": 8192,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "<end_of_turn>"],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 2,
    "tokenizer.ggml.padding_token_id": 1,
}
# `½` and `²` end with bytes that other characters start with, and 12 is a token: without the split they merge.
TEXT = "12 ½ ² 12"


def converted() -> dict[str, Any]:
    """A byte-level tokenizer with merges across digits, as transformers converts it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("Ġ", "Â"), ("ĠÂ", "½"), ("ĠÂ", "²")]
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", "<end_of_turn>", *alphabet])}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return dict(json.loads(tokenizer.to_str()))


def tokens(document: dict[str, Any], text: str) -> list[str]:
    return list(Tokenizer.from_str(json.dumps(document)).encode(text).tokens)


def test_digits_are_split_for_smollm_only() -> None:
    document = converted()
    merged = ["12", "ĠÂ½", "ĠÂ²", "Ġ", "12"]
    assert tokens(document, TEXT) == merged
    split_digits(document, {**METADATA, "tokenizer.ggml.pre": "qwen2"})
    assert tokens(document, TEXT) == merged
    split_digits(document, METADATA)
    assert tokens(document, TEXT) == ["1", "2", "Ġ", "Â", "½", "Ġ", "Â", "²", "Ġ", "1", "2"]


@pytest.mark.parametrize(
    ("changed", "has_bos"),
    [
        ({}, True),
        ({"tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": None}, False),
        ({"tokenizer.ggml.bos_token_id": None}, False),
    ],
)
def test_bos_begins_a_text_where_the_metadata_says_so(changed: dict[str, Any], has_bos: bool) -> None:
    document = converted()
    add_bos(document, {name: value for name, value in {**METADATA, **changed}.items() if value is not None})
    assert tokens(document, "a") == (["<s>", "a"] if has_bos else ["a"])


def test_sentencepiece_files_have_bos_by_default() -> None:
    document = converted()
    metadata = {name: value for name, value in METADATA.items() if name != "tokenizer.ggml.add_bos_token"}
    add_bos(document, {**metadata, "tokenizer.ggml.model": "llama"})
    assert tokens(document, "a") == ["<s>", "a"]


# By repair: the file that it changes, and a document as transformers would write it.
CONVERTED: dict[Callable[[dict[str, Any], Metadata], None], tuple[str, dict[str, Any]]] = {
    split_digits: ("tokenizer.json", converted()),
    add_bos: ("tokenizer.json", converted()),
    limit_length: ("tokenizer_config.json", {"model_max_length": 10**30}),
    forget_quantization: ("config.json", {"quantization_config": {"quant_method": "gguf"}, "vocab_size": 3}),
    declare_stops: ("generation_config.json", {"_from_model_config": True, "eos_token_id": 0}),
}


@pytest.mark.parametrize("left_out", [None, *CONVERTED])
def test_a_folder_is_right_with_every_repair_and_wrong_without_any_of_them(
    left_out: Callable[[dict[str, Any], Metadata], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, document in CONVERTED.values():
        (tmp_path / name).write_text(json.dumps(document))
    for name, repairs in REPAIRS.items():
        monkeypatch.setitem(REPAIRS, name, tuple(one for one in repairs if one is not left_out))  # type: ignore[arg-type]
    repair_folder(tmp_path, METADATA)
    read = {name: json.loads((tmp_path / name).read_text()) for name in REPAIRS}
    facts = (
        tokens(read["tokenizer.json"], TEXT),
        read["tokenizer_config.json"]["model_max_length"],
        "quantization_config" in read["config.json"],
        read["generation_config.json"],
    )
    split = ["<s>", "1", "2", "Ġ", "Â", "½", "Ġ", "Â", "²", "Ġ", "1", "2"]
    expected = (split, 8192, False, {"eos_token_id": [1, 2], "bos_token_id": 0, "pad_token_id": 1})
    assert (facts == expected) == (left_out is None), facts


@pytest.fixture
def smollm2() -> Path:
    folder = cache_folder() / SMOLLM2
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"needs {SMOLLM2} in {folder.parent}: agentloop models fetch {SMOLLM2}")
    return folder


def differing(document: dict[str, Any]) -> list[str]:
    """Return the texts whose ids differ from llama.cpp's."""
    tokenizer = Tokenizer.from_str(json.dumps(document))
    reference = json.loads(IDS_FILE.read_text())
    pairs = zip(TEXTS, reference, strict=True)
    return [text for text, ids in pairs if tokenizer.encode(text, add_special_tokens=False).ids != ids]


def test_the_ids_of_smollm2_are_those_of_llama_cpp(smollm2: Path) -> None:
    document = json.loads((smollm2 / "tokenizer.json").read_text())
    assert len(TEXTS) == 40
    assert differing(document) == []
    document["pre_tokenizer"] = document["pre_tokenizer"]["pretokenizers"][1]  # as transformers converts it
    assert differing(document) == [text for text in TEXTS if set("½²Ⅻ") & set(text)]


def test_the_folder_of_smollm2_declares_its_stop_and_its_context(smollm2: Path) -> None:
    read = {name: json.loads((smollm2 / name).read_text()) for name in REPAIRS}
    assert read["generation_config.json"]["eos_token_id"] == [2]
    assert (
        read["tokenizer_config.json"]["model_max_length"] == read["config.json"]["max_position_embeddings"] == 8192
    )
    assert "quantization_config" not in read["config.json"]
    assert (smollm2 / "chat_template.jinja").is_file()
