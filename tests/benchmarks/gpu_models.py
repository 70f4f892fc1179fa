"""Model folders of known shapes that a whole service can serve: random weights, and a tokenizer of the full size.

    python -m tests.benchmarks.gpu_models qwen3-4b cuda

A folder is written once per machine, in a separate process, so that no GPU memory stays allocated. Every id decodes
to a word, as in a real model. The rows of the stop tokens are zero: a turn ends only at its requested length.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from agentloop_servers.config.service import CHECKOUT
from tests.benchmarks.shapes import SHAPES, Shape, make_tensors, write_checkpoint, write_model_folder
from tests.support.records.model_folder import write_folder

CONTEXT_TOKENS = 16384


def model_folder(shape: str, device: str) -> Path:
    """Return the folder of a shape on this machine, and write it if it does not exist. Takes 20 s for 4B."""
    folder = _place(shape, device)
    if not folder.is_dir():
        command = [sys.executable, "-m", "tests.benchmarks.gpu_models", shape, device]
        subprocess.run(command, check=True, cwd=CHECKOUT)
    return folder


def _place(shape: str, device: str) -> Path:
    return Path(tempfile.gettempdir()) / "agentloop-models" / f"{shape}-{device}"


def write_whole_folder(shape: Shape, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Write weights, config, chat template and tokenizer."""
    folder.mkdir(parents=True)
    write_folder(folder)
    stop_ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    write_model_folder(shape, folder, max_context_tokens=CONTEXT_TOKENS, dtype=str(dtype).removeprefix("torch."))
    grow_tokenizer(folder / "tokenizer.json", shape.vocab)
    tensors = make_tensors(shape, device, dtype, version=0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name][stop_ids] = 0.0
    write_checkpoint(tensors, folder)


def grow_tokenizer(path: Path, vocab_size: int) -> None:
    """Assign a word to every id up to `vocab_size`; no text is encoded to these ids."""
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    vocab |= {token["content"]: token["id"] for token in document["added_tokens"]}
    taken = set(vocab.values())
    vocab |= {f"Ġw{number}": number for number in range(vocab_size) if number not in taken}
    path.write_text(json.dumps(document))


def main() -> None:
    """Write one folder atomically."""
    name, device = sys.argv[1:]
    target = _place(name, device)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        with torch.inference_mode():
            write_whole_folder(SHAPES[name], work / name, torch.device(device), dtype)
        if not target.exists():
            (work / name).rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
