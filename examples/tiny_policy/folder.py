"""The parts of a checkpoint folder that are not weights: tokenizer, chat template, configuration.

The tokenizer is byte-level, so any text round-trips. Its pre-tokenizer splits digits, and gives a space to the
word before it: a number, or a word before a full stop or a quote, is the same ids wherever it stands, which makes
copying learnable for a small model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
VOCAB_SIZE = 1024
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "dtype": "bfloat16",
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of exactly VOCAB_SIZE ids; `texts` hold none of the added tokens."""
    tokenizer = Tokenizer(models.BPE())
    signs = r"[^\s\p{L}\p{N}]+"
    pieces = Regex(rf"\p{{N}}|\p{{L}}+ ?| ?{signs}(?: {signs})* ?|[^\S\r\n]+|[\r\n]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for text in (PAD, TURN_START, TURN_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} ids, not {VOCAB_SIZE}")
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer) -> None:
    """Write all files of a checkpoint folder but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    turn_end, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(PAD)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(CHAT_TEMPLATE, folder / CHAT_TEMPLATE.name)
    _write_json(folder / "config.json", CONFIG | {"eos_token_id": turn_end, "pad_token_id": pad})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": PAD,
            "unk_token": None,
            "additional_special_tokens": [TURN_START, TURN_END],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 1.0, "eos_token_id": turn_end, "pad_token_id": pad},
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
