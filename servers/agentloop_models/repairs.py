"""Repairs of a converted model folder: facts of the GGUF file's metadata that transformers' conversion loses.

Each function changes one JSON document of the folder and is idempotent. Without the repairs of the tokenizer, ids
differ from those of llama.cpp, with which the file was made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Metadata = Mapping[str, Any]
"""The key-value pairs of a GGUF file."""

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split_digits(tokenizer: dict[str, Any], metadata: Metadata) -> None:
    """Split numbers into single digits for the pre-tokenizer `smollm`, as llama.cpp does for `½` and `²`, too."""
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, _BYTE_LEVEL]}


def add_bos(tokenizer: dict[str, Any], metadata: Metadata) -> None:
    """Begin encoded texts with the BOS token if the metadata requires it, as SentencePiece files do by default."""
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    default = metadata.get("tokenizer.ggml.model") == "llama"
    if bos_id is None or not metadata.get("tokenizer.ggml.add_bos_token", default):
        return
    bos = metadata["tokenizer.ggml.tokens"][bos_id]
    special, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def limit_length(tokenizer_config: dict[str, Any], metadata: Metadata) -> None:
    """Set `model_max_length` to the context length. The conversion sets it to 1e30."""
    context_length = metadata.get(f"{metadata['general.architecture']}.context_length")
    if context_length is not None:
        tokenizer_config["model_max_length"] = int(context_length)


def forget_quantization(config: dict[str, Any], metadata: Metadata) -> None:
    """Remove the quantization from config.json: the folder's weights are dequantized."""
    config.pop("quantization_config", None)


def declare_stops(generation_config: dict[str, Any], metadata: Metadata) -> None:
    """Set the special tokens of generation to those of the metadata: an end of turn is a stop token, too."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    stops = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None))
    declared = {"bos_token_id": ids["bos"], "eos_token_id": stops or None, "pad_token_id": ids["padding"]}
    generation_config.update({name: value for name, value in declared.items() if value is not None})
    # Transformers would replace the values by those of config.json.
    generation_config.pop("_from_model_config", None)


REPAIRS: Mapping[str, tuple[Callable[[dict[str, Any], Metadata], None], ...]] = {
    "tokenizer.json": (split_digits, add_bos),
    "tokenizer_config.json": (limit_length,),
    "config.json": (forget_quantization,),
    "generation_config.json": (declare_stops,),
}
"""The repairs by the file that they change."""


def repair_folder(folder: Path, metadata: Metadata) -> None:
    """Apply all repairs to a converted folder."""
    for name, repairs in REPAIRS.items():
        path = folder / name
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for repair in repairs:
            repair(document, metadata)
        path.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
