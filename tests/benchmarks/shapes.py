"""Model folders and trainer tensors of known shapes, without a download: Qwen3 and Qwen3-MoE, seeded weights.

The tensors of a version depend only on the shape and the version, so two processes (or two runs on one kind of
device) that make the same version hold the same bytes. They are scaled so that logits spread by about 3, attention
is concentrated on few tokens, and layers outweigh the embedding: greedy continuations then neither repeat one token
nor forget their prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

LOGIT_SPREAD = 3.0
LAYER_GAIN = 8.0  # over the whole depth: the layers' contribution relative to the embedding
SHARPNESS = 2.0  # scale of queries and keys
CHANGE = 0.05  # distance of a version from the common base, in standard deviations of a weight
TOKENS_START = 16  # random prompts avoid the first ids, where models keep their special tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3 or Qwen3-MoE model. `intermediate` is the size of one expert for MoE."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool
    num_experts: int = 0  # per layer; 0: dense
    num_chosen: int = 0  # experts per token

    def config(self, max_context_tokens: int, dtype: str) -> dict[str, object]:
        """Return the `config.json` of a Hugging Face folder."""
        fields: dict[str, object] = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": max_context_tokens,
            "rope_theta": 1e6,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.is_tied,
            "use_cache": True,
            "dtype": dtype,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        if self.num_experts:
            fields |= {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_chosen,
                "moe_intermediate_size": self.intermediate,
                "decoder_sparse_step": 1,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
            }
        return fields

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return names and shapes as in the model's safetensors files, layer by layer."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            yield at + "input_layernorm.weight", (self.hidden,)
            yield at + "self_attn.q_proj.weight", (queries, self.hidden)
            yield at + "self_attn.k_proj.weight", (keys, self.hidden)
            yield at + "self_attn.v_proj.weight", (keys, self.hidden)
            yield at + "self_attn.o_proj.weight", (self.hidden, queries)
            yield at + "self_attn.q_norm.weight", (self.head_dim,)
            yield at + "self_attn.k_norm.weight", (self.head_dim,)
            yield at + "post_attention_layernorm.weight", (self.hidden,)
            if self.num_experts:
                yield at + "mlp.gate.weight", (self.num_experts, self.hidden)
            for block in [f"mlp.experts.{n}." for n in range(self.num_experts)] or ["mlp."]:
                yield at + block + "gate_proj.weight", (self.intermediate, self.hidden)
                yield at + block + "up_proj.weight", (self.intermediate, self.hidden)
                yield at + block + "down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        if not self.is_tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(size) for _, size in self.tensors())

    def num_bytes(self, dtype: str) -> int:
        """Return the size of all weights in `dtype`, a torch dtype's name."""
        itemsize: int = getattr(torch, dtype).itemsize
        return self.num_parameters * itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 128, 2, 4, 2, 32, 384, 1024, is_tied=True),
        Shape("small", 1024, 24, 16, 8, 128, 3072, 32768, is_tied=True),
        Shape("qwen3-4b", 2560, 36, 32, 8, 128, 9728, 151936, is_tied=True),
        Shape("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936, is_tied=False),
        Shape("tiny-moe", 128, 2, 4, 2, 32, 64, 1024, is_tied=False, num_experts=4, num_chosen=2),
        Shape("moe-4l", 1024, 4, 16, 8, 128, 512, 32768, is_tied=False, num_experts=64, num_chosen=8),
        # Four of the layers of a model with 30 billion parameters, of which 3 billion are active.
        Shape("moe-30b-a3b-4l", 2048, 4, 32, 4, 128, 768, 151936, is_tied=False, num_experts=128, num_chosen=8),
        Shape("small-moe", 1024, 12, 16, 8, 128, 512, 32768, is_tied=False, num_experts=32, num_chosen=4),
    )
}


def write_model_folder(shape: Shape, folder: Path, *, max_context_tokens: int, dtype: str) -> Path:
    """Write a folder that an engine with dummy weights starts from: no weights, no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(max_context_tokens, dtype), indent=2))
    return folder


def write_checkpoint(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """Add the weights to a model folder, in one file."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_tensors(shape: Shape, device: torch.device, dtype: torch.dtype, version: int) -> dict[str, torch.Tensor]:
    """Return a trainer's weights at `version`, by checkpoint name."""
    tensors = {name: torch.empty(size, device=device, dtype=dtype) for name, size in shape.tensors()}
    set_version(shape, tensors, version)
    return tensors


@torch.no_grad()
def set_version(shape: Shape, tensors: dict[str, torch.Tensor], version: int) -> None:
    """Overwrite the weights in place with those of `version`: the common base plus a small unique change."""
    some = next(iter(tensors.values()))
    generator = torch.Generator(device=some.device)
    for index, (name, tensor) in enumerate(tensors.items()):
        spread = _spread(shape, name, tensor)
        generator.manual_seed(index)
        tensor.normal_(generator=generator).mul_(spread)
        generator.manual_seed((version + 1) * 1_000_003 + index)
        change = torch.empty_like(tensor).normal_(generator=generator)
        tensor.add_(change, alpha=CHANGE * spread)
        if tensor.dim() == 1:
            tensor.add_(SHARPNESS if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
    if some.is_cuda:
        torch.cuda.synchronize(some.device)


def _spread(shape: Shape, name: str, tensor: torch.Tensor) -> float:
    if tensor.dim() == 1:
        return 0.05  # a norm's weights, around 1
    if name == "lm_head.weight" or (shape.is_tied and "embed_tokens" in name):
        return LOGIT_SPREAD / math.sqrt(shape.hidden)
    if "embed_tokens" in name:
        return 0.1
    spread = 1.0 / math.sqrt(tensor.shape[1])
    adds_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return spread * max(1.0, LAYER_GAIN / math.sqrt(shape.num_layers)) if adds_to_residual else spread


def random_prompts(shape: Shape, num_prompts: int, num_tokens: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Return prompts of random ids; none is a prefix of another."""
    generator = torch.Generator().manual_seed(seed)
    size = (num_prompts, num_tokens)
    rows = torch.randint(TOKENS_START, shape.vocab, size, generator=generator).tolist()
    return [tuple(row) for row in rows]
