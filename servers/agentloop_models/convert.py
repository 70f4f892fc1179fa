"""`python -m agentloop_models.convert FILE FOLDER`: convert a GGUF file to a Hugging Face folder in bfloat16.

It runs as a separate process, so that torch, transformers and the dequantized weights do not stay in the memory of
the caller. A failure is one line on stderr, which begins with `error: `, and exit code 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader

from agentloop_models.repairs import repair_folder


def metadata_of(file: Path) -> dict[str, Any]:
    """Return the key-value pairs of a GGUF file."""
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


def convert(file: Path, folder: Path) -> None:
    """Write config.json, safetensors, tokenizer, chat template and generation config of a GGUF file."""
    metadata = metadata_of(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    # Newer releases keep the weights of some architectures in GGUF blocks without this option.
    gguf_config = getattr(transformers, "GgufConfig", None)
    options = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, **options
    )
    # The quantizer refuses to save, although the weights are plain tensors now.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    repair_folder(folder, metadata)


def main() -> None:
    """Convert the file that the arguments name."""
    file, folder = map(Path, sys.argv[1:])
    try:
        convert(file, folder)
    except Exception as error:  # the reader, transformers, torch and the disk have many errors
        sys.exit(f"error: {' '.join(str(error).split()) or type(error).__name__}")


if __name__ == "__main__":
    main()
