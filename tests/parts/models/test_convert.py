"""The conversion of a small GGUF file that the test writes, read again by transformers."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from agentloop.errors import InvalidRequest
from agentloop_models.fetch import CACHE_VARIABLE, CONVERTER_REQUIREMENTS, cache_folder, converted_folder
from agentloop_servers.config.models import with_model_folders
from agentloop_servers.config.service import ServiceConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEMPLATE = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
TOKENS = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 32, 4, 2, 64


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the package that writes GGUF files, installed or from the converter in the user's cache."""
    installed = importlib.metadata.packages_distributions()
    missing = [requirement for name, requirement in CONVERTER_REQUIREMENTS.items() if name not in installed]
    folder = cache_folder() / "converter" / "-".join(missing)
    if missing and not folder.is_dir():
        pytest.skip(f"needs {' and '.join(missing)}: pip install -e '.[models]', or agentloop models fetch NAME")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return importlib.import_module("gguf")


def llama_tensors() -> dict[str, npt.NDArray[np.float32]]:
    """Return random weights of one layer, by the names of GGUF files."""
    random, head = np.random.default_rng(0), HIDDEN // HEADS
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
    }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_llama(gguf: Any, file: Path, architecture: str = "llama") -> dict[str, npt.NDArray[np.float32]]:
    """Write a one-layer Llama with 8-bit blocks, and return its tensors as the blocks store them."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    stored = {}
    for name, tensor in llama_tensors().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        blocks = gguf.quantize(tensor, kind)
        stored[name] = gguf.dequantize(blocks, kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def test_a_gguf_file_becomes_a_folder_with_its_weights_tokenizer_and_template(gguf: Any, tmp_path: Path) -> None:
    import torch  # noqa: PLC0415 - slow to import, and not needed where the test is skipped
    from safetensors.torch import load_file  # noqa: PLC0415

    file = tmp_path / "small.Q8_0.gguf"
    stored = write_llama(gguf, file)
    lines: list[str] = []
    config = with_model_folders(ServiceConfig(model=str(file)), lines.append)
    assert config.served_name == "small.Q8_0"
    assert (
        lines[-1]
        == "note: the weights are dequantized from small.Q8_0.gguf and score as that file does, not as its original"
    )
    folder = Path(config.model)
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    layer = "model.layers.0"
    # llama.cpp stores the two halves of each rotary pair next to each other.
    pairs = stored["blk.0.attn_k.weight"].reshape(KV_HEADS, HIDDEN // HEADS // 2, 2, HIDDEN).swapaxes(1, 2)
    for name, expected in {
        "model.embed_tokens.weight": stored["token_embd.weight"],
        f"{layer}.mlp.down_proj.weight": stored["blk.0.ffn_down.weight"],
        f"{layer}.self_attn.k_proj.weight": pairs.reshape(-1, HIDDEN),
        f"{layer}.input_layernorm.weight": stored["blk.0.attn_norm.weight"],
    }.items():
        torch.testing.assert_close(tensors[name], torch.from_numpy(expected.copy()).to(torch.bfloat16))
    read = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert "quantization_config" not in read["config.json"]
    assert (read["config.json"]["max_position_embeddings"], read["tokenizer_config.json"]["model_max_length"]) == (
        512,
        512,
    )
    assert read["generation_config.json"]["eos_token_id"] == [1]
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("12</s>").tokens == ["<s>", "1", "2", "</s>"]
    del lines[:]
    assert converted_folder(file, lines.append) == folder
    assert lines == []


def test_an_architecture_that_cannot_be_converted_is_one_line(gguf: Any, tmp_path: Path) -> None:
    write_llama(gguf, tmp_path / "other.gguf", "grok")
    with pytest.raises(
        InvalidRequest, match=r"cannot convert other\.gguf: GGUF model with architecture grok is not"
    ) as caught:
        converted_folder(tmp_path / "other.gguf", lambda line: None)
    assert "\n" not in caught.value.message
    assert list(cache_folder().glob("*other*")) == []
