"""One tensor-parallel rank without an engine: builds vLLM's models and compares plans with vLLM's own loading.

Run as `python -m tests.servers.weight_transfer.plan_rank <rank> <ranks> <port> <empty folder>`; writes `found.json`
there.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from agentloop.engine.interface import StagingDevice, TensorInfo
from agentloop_servers.weight_transfer.copy_plan import CopyPlan, PlanRefused, apply, apply_fills, check_plan, trace
from agentloop_servers.weight_transfer.quantised import check_quantised, dense
from agentloop_servers.weight_transfer.staged_weights import ShadowParameters
from agentloop_servers.weight_transfer.verify import compare_layers
from agentloop_servers.weight_transfer.vllm_worker import quantised_layers

NUM_LAYERS = 2
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERT_FFN, EXPERTS = 64, 4, 2, 16, 96, 32, 4
VOCAB = 250  # not a multiple of 64: the embeddings are padded, and of two ranks only the second is
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_FFN,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "tied": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "untied": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "dtype": "float32",
    },
}
MODELS["quantised"] = {**MODELS["llama"], "dtype": "bfloat16"}
MODELS["spread_moe"] = MODELS["moe"]  # the same, but expert-parallel
CHECKPOINT_DTYPES = {"untied": torch.float32}  # cast during loading; the others have the model's dtype


def shapes(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the tensors of a checkpoint by transformers' names."""
    fields = MODELS[name]
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{prefix}.self_attn.{part}_proj.weight", (heads * HEAD_DIM, HIDDEN)
            if fields.get("attention_bias"):
                yield f"{prefix}.self_attn.{part}_proj.bias", (heads * HEAD_DIM,)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        if fields.get("attention_bias"):
            yield f"{prefix}.self_attn.o_proj.bias", (HIDDEN,)
        if fields["model_type"] != "llama":
            yield f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,)
            yield f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,)
        if fields is MODELS["moe"]:
            yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for owner, width in (
            [(f"mlp.experts.{i}", EXPERT_FFN) for i in range(EXPERTS)]
            if fields is MODELS["moe"]
            else [("mlp", FFN)]
        ):
            yield f"{prefix}.{owner}.gate_proj.weight", (width, HIDDEN)
            yield f"{prefix}.{owner}.up_proj.weight", (width, HIDDEN)
            yield f"{prefix}.{owner}.down_proj.weight", (HIDDEN, width)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    if not fields["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCAB, HIDDEN)


def checkpoint(name: str) -> dict[str, torch.Tensor]:
    """Return random tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    dtype = CHECKPOINT_DTYPES.get(name, getattr(torch, {**FIELDS, **MODELS[name]}["dtype"]))
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes(name)}


def infos(tensors: Mapping[str, torch.Tensor]) -> list[TensorInfo]:
    return [
        TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def build(config: VllmConfig) -> torch.nn.Module:
    """Build a model whose parameters hold random values that no checkpoint has."""
    config.compilation_config.static_forward_context.clear()  # the layers of the previous model
    with set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(7.0, 9.0)
    return model


def state(model: torch.nn.Module) -> list[Any]:
    """Return all of a model except its bytes: identities, addresses, attributes."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found += [(name, {key: id(value) for key, value in vars(module).items()})]
        found += [
            (name, {key: id(value) for key, value in part.items()})
            for part in (
                dict(module.named_parameters(recurse=False, remove_duplicate=False)),
                dict(module.named_buffers(recurse=False, remove_duplicate=False)),
            )
        ]
    for name, parameter in model.named_parameters():
        attributes = {key: id(value) for key, value in vars(parameter).items()}
        found.append((name, parameter.data_ptr(), parameter.shape, parameter.stride(), attributes))
    return found


def refusal(call: Any, *args: Any, kind: type[Exception] = PlanRefused) -> str:
    """Return the reason of a refusal; empty if it was not refused."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    return ""


def compare(name: str, config: VllmConfig) -> dict[str, Any]:
    """Load one model by plan and another by vLLM, and return the results for the tests."""
    tensors = checkpoint(name)
    model, reference = build(config), build(config)
    before, bytes_before = state(model), {key: value.clone() for key, value in model.named_parameters()}
    plan = trace(model, infos(tensors))
    parameters = dict(model.named_parameters())
    is_unchanged = state(model) == before and all(
        torch.equal(parameters[key], bytes_before[key]) for key in parameters
    )
    apply_fills(plan, parameters)
    for key in sorted(tensors, reverse=True):  # in a different order
        apply(plan, key, tensors[key], parameters)
    reference.load_weights(iter(tensors.items()))
    expected = dict(reference.named_parameters())
    found = {
        "num_copies": len(plan.copies),
        "num_fills": len(plan.fills),
        "unused": [name for name, copies in plan.by_tensor.items() if not copies],
        "is_unchanged": is_unchanged,
        "differing": [key for key in expected if not torch.equal(parameters[key], expected[key])],
        "num_parameters": len(expected),
        "num_checked": check_plan(plan, parameters, tensors.__getitem__),
        "num_copied": sum(math.prod(copy.into.size) for copy in plan.copies),
        "num_elements": sum(parameter.numel() for parameter in expected.values()),
        "unnoticed": unnoticed(plan, parameters, tensors),
    }
    with set_current_vllm_config(config):
        process_weights_after_loading(reference, config.model_config, torch.device("cpu"))
    found["after_processing"] = refusal(trace, reference, infos(tensors))
    less = dict(tensors)
    del less["model.layers.1.self_attn.k_proj.weight"]
    found["missing"] = refusal(trace, model, infos(less))
    found["unknown"] = refusal(trace, model, infos({**tensors, "model.layers.1.nose.weight": torch.ones(2)}))
    if name == "moe":
        found["experts"] = experts(model, config, plan, tensors)
    return found


def unnoticed(
    plan: CopyPlan, parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the tensors whose wrong values in the parameters the check did not detect."""
    missed = []
    for name, tensor in tensors.items():
        apply(plan, name, tensor + 1, parameters)
        missed += [] if refusal(check_plan, plan, parameters, tensors.__getitem__) else [name]
        apply(plan, name, tensor, parameters)
    return missed


def experts(
    model: torch.nn.Module, config: VllmConfig, plan: CopyPlan, tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return the refusals of experts in another layout: the same shape with gate and up swapped, and packed."""
    name, layer = next((name, layer) for name, layer in model.named_modules() if hasattr(layer, "w13_weight"))
    layer.w13_weight.data.copy_(layer.w13_weight.data.roll(layer.w13_weight.shape[1] // 2, dims=1))
    swapped = refusal(check_plan, plan, dict(model.named_parameters()), tensors.__getitem__)
    with set_current_vllm_config(config):
        layer.quant_method.process_weights_after_loading(layer)
    return {"name": name, "swapped": swapped, "packed": refusal(trace, model, infos(tensors))}


def loaded(config: VllmConfig, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return a model loaded by vLLM's own loader, without the packed copies that layers on CPU compute with."""
    model = build(config)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_processing(model, config.model_config)
    return model


@dataclass
class Served:
    """See `ServedModel`: the part that a commit of shadows uses."""

    parameters: dict[str, torch.Tensor]


def served(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: dense(parameter.data) for name, parameter in model.named_parameters()}


def quantise(config: VllmConfig) -> dict[str, Any]:
    """Stage and commit another version in a quantized model, and compare it with a model that has loaded it."""
    old = checkpoint("quantised")
    new = {name: tensor * 1.5 + 0.125 for name, tensor in old.items()}
    model, fresh = loaded(config, old), loaded(config, new)
    layers = quantised_layers(model)
    found: dict[str, Any] = {"layers": [layer.name for layer in layers]}
    if not layers:
        return found | {"refused": refusal(trace, model, infos(old), layers)}
    before, bytes_before = state(model), {name: tensor.clone() for name, tensor in served(model).items()}
    plan = trace(model, infos(old), layers)
    found["is_unchanged"] = state(model) == before
    found["of_another_version"] = refusal(check_quantised, plan, served(model), new.__getitem__)
    check_quantised(plan, served(model), old.__getitem__)
    found["num_checked"] = check_plan(plan, served(model), old.__getitem__)
    shadows = {name: torch.empty_like(tensor) for name, tensor in served(model).items()}
    staged = ShadowParameters(plan, shadows, served(model), StagingDevice.HOST)
    for again in (False, True):  # if a receiver is lost half-way, all tensors are sent again
        for name in sorted(new)[: None if again else len(new) // 2]:
            staged.accept(name, new[name])
    staged.finish_staging()
    found["is_untouched"] = all(
        torch.equal(as_bytes(tensor), as_bytes(bytes_before[name])) for name, tensor in served(model).items()
    )
    staged.commit(Served(served(model)))
    wanted = served(fresh)
    found["differing"] = [
        name for name, tensor in served(model).items() if not torch.equal(as_bytes(tensor), as_bytes(wanted[name]))
    ]
    found["num_parameters"] = len(wanted)
    found["num_compared"] = compare_layers(fresh, new.keys(), new.__getitem__)
    one_old = {**new, "model.layers.1.mlp.down_proj.weight": old["model.layers.1.mlp.down_proj.weight"]}
    found["one_old"] = refusal(compare_layers, fresh, one_old.keys(), one_old.__getitem__, kind=RuntimeError)
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def main(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    found: dict[str, Any] = {}
    for name, fields in MODELS.items():  # the one with experts first: only it makes vLLM create their group
        model_folder = folder / name
        model_folder.mkdir()
        (model_folder / "config.json").write_text(json.dumps({**FIELDS, **fields}))
        config = EngineArgs(
            model=str(model_folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            load_format="dummy",
            max_model_len=64,
            tensor_parallel_size=num_ranks,
            enable_expert_parallel=name == "spread_moe",
            quantization="fp8_per_channel" if name == "quantised" else None,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not found:
                init_distributed_environment(
                    num_ranks, rank, f"tcp://127.0.0.1:{port}", local_rank=rank, backend="gloo"
                )
                initialize_model_parallel(num_ranks)
        found[name] = quantise(config) if name == "quantised" else compare(name, config)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
