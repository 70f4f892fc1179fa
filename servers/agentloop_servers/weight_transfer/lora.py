"""LoRA adapter folders in the PEFT format, read without torch from the configuration and the safetensors header.

`adapter_config.json` has the rank and the scaling. `adapter_model.safetensors` has for every adapted linear layer
`base_model.model.<layer>.lora_A.weight` [rank, in] and `....lora_B.weight` [out, rank]; the layer adds `scaling *
B @ A`. Settings that vLLM ignores, or refuses only during loading, are refused here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentloop.engine.interface import TensorInfo
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.checkpoint import CheckpointInfo, inspect_checkpoint

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")
_EXPERTS = ".experts."


class _PeftConfig(msgspec.Struct):
    """The settings that change the result of an adapter."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    bias: str = "none"
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    # Not supported by vLLM, so other values than these defaults are refused.
    use_dora: bool = False
    lora_bias: bool = False
    use_qalora: bool = False
    use_bdlora: dict[str, object] | None = None
    modules_to_save: list[str] | None = None
    layer_replication: list[list[int]] | None = None
    alora_invocation_tokens: list[int] | None = None


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """The adapter of one linear layer, which adds `scaling * B @ A` to the layer's weight [out, in]."""

    rank: int
    num_inputs: int
    num_outputs: int
    scaling: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The content of an adapter folder, by the layers' checkpoint names ("model.layers.0.self_attn.q_proj")."""

    layers: Mapping[str, AdaptedLayer]
    num_bytes: int


def check_adapter(directory: str, max_rank: int, served: Mapping[str, TensorInfo] | None = None) -> AdapterContent:
    """Read and check an adapter folder. Blocks. Raises CheckpointUnreadable with a one-line message.

    `served` has the base model's tensors by name. Every adapted layer must be one of them.
    """
    adapter = read_adapter(directory)
    for name, layer in adapter.layers.items():
        if layer.rank > max_rank:
            raise _unreadable(
                f"layer {name} has rank {layer.rank}, above the engine's {max_rank} (engine.lora_rank)"
            )
        weight = served.get(f"{name}.weight") if served is not None else None
        if weight is not None and weight.shape != layer.shape:
            raise _unreadable(
                f"layer {name} adapts a weight of shape {layer.shape}, but the served one has {weight.shape}"
            )
        if served is not None and weight is None and _EXPERTS not in name:  # experts may be stored fused
            raise _unreadable(f"the served model has no layer {name}")
    return adapter


def read_adapter(directory: str) -> AdapterContent:
    """Read an adapter folder as `check_adapter` does, with any rank and for any model."""
    config = _read_config(Path(directory) / CONFIG_FILE)
    checkpoint = inspect_checkpoint(directory)
    names = [path.name for path in checkpoint.files]
    if names != [WEIGHTS_FILE]:
        raise _unreadable(f"expected only the file {WEIGHTS_FILE}, found {', '.join(names)}")
    halves = _halves(checkpoint)
    layers = {}
    for name in dict.fromkeys(name for name, _ in halves):
        try:
            a, b = halves[name, "A"].shape, halves[name, "B"].shape
        except KeyError as error:
            raise _unreadable(f"layer {name} has no lora_{error.args[0][1]}") from error
        rank = int(_by_pattern(config.rank_pattern, name, config.r))
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise _unreadable(f"layer {name} has the shapes {a} and {b}, which do not have rank {rank}")
        alpha = _by_pattern(config.alpha_pattern, name, config.lora_alpha)
        scaling = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        layers[name] = AdaptedLayer(rank, a[1], b[0], scaling)
    return AdapterContent(layers, checkpoint.num_bytes)


def tensor_names(layer: str) -> tuple[str, str]:
    """Return the names of a layer's A and B tensors."""
    return f"{_PEFT_PREFIX}{layer}.lora_A.weight", f"{_PEFT_PREFIX}{layer}.lora_B.weight"


def is_expert(layer: str) -> bool:
    """Return True if a layer belongs to a mixture of experts, which engines store fused."""
    return _EXPERTS in layer


def write_zero_adapter(model: str, directory: str) -> None:
    """Write an adapter of zeros with rank 1 and one layer for the model in folder `model`.

    Raises CheckpointUnreadable if no shape of a linear layer can be found.
    """
    name, (num_outputs, num_inputs) = _some_layer(Path(model))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "bias": "none"}
    config["target_modules"] = [name.rpartition(".")[2]]
    (Path(directory) / CONFIG_FILE).write_text(json.dumps(config))
    header, end = {}, 0
    for tensor, shape in zip(tensor_names(name), ((1, num_inputs), (num_outputs, 1)), strict=True):
        start, end = end, end + 4 * math.prod(shape)
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format requires aligned data
    content = len(encoded).to_bytes(8, "little") + encoded + bytes(end)
    (Path(directory) / WEIGHTS_FILE).write_bytes(content)


def _read_config(path: Path) -> _PeftConfig:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_PeftConfig)
    except OSError as error:
        raise _unreadable(f"cannot read {path.name}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise _unreadable(f"{path.name}: {error}") from error
    if config.peft_type != "LORA" or config.r < 1:
        raise _unreadable(
            f"{path.name}: expected peft_type LORA with rank 1 or more, got {config.peft_type} with rank {config.r}"
        )
    if config.bias != "none":
        raise _unreadable(f"{path.name}: bias {config.bias!r} is not supported, only 'none'")
    unsupported = [
        name
        for name in (
            "use_dora",
            "lora_bias",
            "use_qalora",
            "use_bdlora",
            "modules_to_save",
            "layer_replication",
            "alora_invocation_tokens",
        )
        if getattr(config, name)
    ]
    if unsupported:
        raise _unreadable(f"{path.name}: {unsupported[0]} is not supported")
    return config


def _halves(checkpoint: CheckpointInfo) -> dict[tuple[str, str], TensorInfo]:
    """Return the tensors by layer and half."""
    halves = {}
    for name, tensor in checkpoint.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise _unreadable(f"tensor {name} is not the lora_A or lora_B weight of a linear layer")
        halves[match["layer"], match["half"]] = tensor
    if not halves:
        raise _unreadable("the file has no LoRA tensors")
    return halves


def _by_pattern(patterns: Mapping[str, int | float] | None, layer: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of the layer's name, at a dot, as PEFT does."""
    matches = (value for key, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({key})", layer))
    return next(matches, default)


def _some_layer(model: Path) -> tuple[str, tuple[int, int]]:
    """Return a linear layer that vLLM can adapt, and the shape of its weight."""
    if any(model.glob("*.safetensors")):
        for name, tensor in inspect_checkpoint(str(model)).tensors.items():
            layer, _, leaf = name.rpartition(".")
            if leaf == "weight" and layer.endswith("_proj") and len(tensor.shape) == 2 and not is_expert(name):
                return layer, (tensor.shape[0], tensor.shape[1])
    try:  # Without weights: the query projection of the common architectures.
        config = json.loads((model / "config.json").read_bytes())
        num_heads, num_inputs = int(config["num_attention_heads"]), int(config["hidden_size"])
        num_outputs = num_heads * int(config.get("head_dim") or num_inputs // num_heads)
        return "model.layers.0.self_attn.q_proj", (num_outputs, num_inputs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(
            f"{model.name} has no weights or usable config.json to find a layer to adapt ({error!r})"
        ) from error


def _unreadable(reason: str) -> CheckpointUnreadable:
    return CheckpointUnreadable(f"adapter: {reason}", param="adapter")
