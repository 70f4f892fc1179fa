"""Published vocabularies, read from a complete model folder like tiktoken and mistral-common read them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from agentloop.errors import TemplateError
from agentloop.generation.round_trip import round_trip_test
from agentloop.parsers.by_name import get_parser
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer, model_text
from agentloop.types import Message
from tests.support.families.table import FAMILY, write_family
from tests.support.records.model_folder import TOOLS

tiktoken = pytest.importorskip("tiktoken")
tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
pytest.importorskip("transformers")

WORDS = ["th", "he", "the", "in", "ing", "b", "bi", "bird", "rd", "12", "é", "\n\n"]
RANKS = [bytes([value]) for value in range(256)] + [word.encode() for word in WORDS if len(word.encode()) > 1]
RANKS += [b" the", b" b", b" bi", b" bird", "塔".encode()[:2], "塔".encode()]
HAN = r"[\p{Han}]+"
LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+"
REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = ("the bird the thing, 1234!\n\n", "Ein Bau: 塔 é 日本the塔", "  \n x\t", "", "🐦 naïve\r\n the")
CODE = f'''
class KimiTokenizer:
    pat_str = "|".join([
        r"""{HAN}""",
        r"""{LETTERS}""",
        r"""{REST}""",
    ])

    def __init__(self):
        raise RuntimeError("a folder's code is never run")
'''
NAMES = [token.value for token in tekken.SpecialTokens]


def kimi(folder: Path) -> Path:
    """Return a folder like Kimi-K2's: ranks, code with the pattern, and special token ids with a gap."""
    write_family(folder, "kimi_k2")
    (folder / "tokenizer.json").unlink()
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(RANKS))
    (folder / "tiktoken.model").write_text("\n".join(lines))
    (folder / "tokenization_kimi.py").write_text(CODE)
    family, first = FAMILY["kimi_k2"], len(RANKS)
    marks = {first + 2 * at: mark for at, mark in enumerate((*family.special, *family.markup))}
    added = {str(at): {"content": mark, "special": mark in family.special} for at, mark in marks.items()}
    config = {"eos_token": family.eos, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [at for at, mark in marks.items() if mark in family.stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def test_a_tiktoken_vocabulary_is_read_as_tiktoken_reads_it(tmp_path: Path) -> None:
    tokens = model_text(kimi(tmp_path)).tokens
    added = json.loads((tmp_path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    special = {token["content"]: int(number) for number, token in added.items()}
    pattern = "|".join((HAN, LETTERS, REST))
    ranks = {token: rank for rank, token in enumerate(RANKS)}
    expected = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    for text in (*TEXTS, f"{'<|im_end|>'.join(TEXTS)}<|tool_call_begin|>"):
        ids = tokens.encode(text)
        assert ids == expected.encode(text, allowed_special="all")
        assert tokens.decode(ids) == text
    renderer = TemplateRenderer.from_directory(tmp_path, RenderSettings(on_unstable=OnUnstable.FORK))
    assert round_trip_test(renderer, get_parser("kimi_k2"), "kimi_k2").call_text


def test_marks_at_other_ids_than_declared_are_refused(tmp_path: Path) -> None:
    kimi(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["7"] = {"content": "<|late|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TemplateError, match=r"'<\|late\|>' is declared with id 7"):
        model_text(tmp_path)


def test_a_tekken_vocabulary_is_read_with_the_template_of_its_library(tmp_path: Path) -> None:
    ranks = [token for token in RANKS if token != "塔".encode()[:2]]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(ranks)
    ]
    config = {
        "pattern": f"[^\\r\\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|{REST}",
        "num_vocab_tokens": len(ranks),
        "default_vocab_size": len(ranks) + len(NAMES),
        "default_num_special_tokens": len(NAMES),
        "version": "v13",
    }
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(NAMES)]
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": NAMES.index("</s>")}))
    expected = tekken.Tekkenizer.from_file(path)
    renderer = TemplateRenderer.from_directory(tmp_path, RenderSettings(on_unstable=OnUnstable.FORK))
    for text in TEXTS:
        assert renderer.tokens.encode(text) == expected.encode(text, bos=False, eos=False)
    prompt = renderer.render([Message("user", "the bird")], TOOLS)
    assert prompt[0] == NAMES.index("<s>")
    assert round_trip_test(renderer, get_parser("mistral"), "mistral").call_text
