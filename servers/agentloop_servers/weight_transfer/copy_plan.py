"""Copy plans: a model's own `load_weights` as a list of plain copies from checkpoint tensors to parameters.

`trace` runs `load_weights` on meta tensors and records each write to a parameter instead of executing it; the
model does not change. With a plan a commit writes into the existing parameters, and each tensor-parallel rank
knows its slices.

A plan is exact or refused: every element of every parameter is written by one copy or one fill, and a copy reads a
strided view of one checkpoint tensor, with at most a float cast. Models whose layers derive other data from their
weights are refused, except for quantized layers that the engine names (`QuantisedLayer`). `check_plan` finds
errors that only values show, such as exchanged rows. A plan belongs to one model object: replaced layers or
rebalanced experts need a new one.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentloop.engine.interface import TensorInfo
from agentloop_servers.weight_transfer.layout import CAST_DTYPES
from agentloop_servers.weight_transfer.verify import Read

# vLLM's names of the methods whose layers compute with their parameters as loaded.
PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
# Hooks of complete models: SGLang's and vLLM's
LOADED_HOOKS = ("post_load_weights", "process_weights_after_loading")
PLAIN_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON"}
MAX_RUNS = 2**22  # per parameter; with more the coverage check takes seconds and gigabytes
SPOT_CHECK_ELEMENTS = 16
MAX_REASON_CHARS = 120


class PlanRefused(Exception):
    """The model's loading is not a list of plain copies, or a parameter differs from its tensor."""


@dataclass(frozen=True, slots=True)
class Region:
    """A strided view of a contiguous tensor, in elements from the tensor's first."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.size)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a plan: `parameter[into] <- tensor[out_of]`, two regions of the same size."""

    parameter: str
    into: Region
    tensor: str
    out_of: Region


@dataclass(frozen=True, slots=True)
class Fill:
    """A fill of a plan, for padding: `parameter[into] <- value`."""

    parameter: str
    into: Region
    value: float


@dataclass(frozen=True, slots=True)
class QuantisedLayer:
    """A layer that loads tensors of one form and serves others, which its `quant_method` derives from them.

    `load_form` maps parameter names to meta tensors with the engine's loaders. `kept` are the layer's own names of
    parameters that are served as loaded.
    """

    name: str
    module: torch.nn.Module
    load_form: Mapping[str, torch.Tensor]
    device: torch.device
    kept: frozenset[str]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """A model's loading as copies, in checkpoint order, and fills.

    A parameter with several names has the first one. Copies of `layers` are into their load forms.
    """

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of the traced checkpoint's tensors
    layers: Mapping[str, QuantisedLayer] = field(default_factory=dict)  # parameter name -> its layer
    # Has an empty tuple for a tensor without a copy, such as a tied head or another rank's experts.
    by_tensor: Mapping[str, tuple[Copy, ...]] = field(init=False)

    def __post_init__(self) -> None:
        copies: dict[str, list[Copy]] = {name: [] for name in self.shapes}
        for copy in self.copies:
            copies.setdefault(copy.tensor, []).append(copy)
        frozen = {name: tuple(of_tensor) for name, of_tensor in copies.items()}
        object.__setattr__(self, "by_tensor", MappingProxyType(frozen))


def target(copy: Copy | Fill, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the view of the parameter that a copy or fill writes."""
    return _view(parameters[copy.parameter], copy.into)


def source(copy: Copy, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of the checkpoint tensor that a copy reads.

    Raises ValueError if the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"tensor {copy.tensor} is not contiguous")
    return _view(tensor, copy.out_of)


def apply(plan: CopyPlan, name: str, tensor: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint tensor to all its targets in the parameters. No effect if it has none.

    Raises ValueError for another shape than the plan's. On CUDA the copies are only enqueued.
    """
    if tuple(tensor.shape) != plan.shapes[name]:
        raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, but the plan has {plan.shapes[name]}")
    with torch.no_grad():
        for copy in plan.by_tensor[name]:
            target(copy, parameters).copy_(source(copy, tensor), non_blocking=True)


def apply_fills(plan: CopyPlan, parameters: Mapping[str, torch.Tensor]) -> None:
    """Write the padding. Needed only once, because no copy writes there."""
    with torch.no_grad():
        for fill in plan.fills:
            target(fill, parameters).fill_(fill.value)


def trace(
    model: torch.nn.Module, tensors: Sequence[TensorInfo], quantised: Sequence[QuantisedLayer] = ()
) -> CopyPlan:
    """Make the plan of `model.load_weights` for a checkpoint of these tensors. Raises PlanRefused.

    The model must be loaded and ready to serve. No other thread may use it during the trace.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for info in tensors:
        if info.name in shapes:
            raise PlanRefused(f"tensor {info.name} occurs twice in the checkpoint")
        shapes[info.name] = tuple(info.shape)
    _check_layers(model, quantised)
    layers = {name: layer for layer in quantised for name in layer.load_form}
    with _in_load_form(quantised):
        copies, fills = _traced(model, tensors, _Targets(model, layers))
    if padded := next((fill.parameter for fill in fills if fill.parameter in layers), None):
        raise PlanRefused(f"parameter {padded} is quantized with padding")
    return CopyPlan(tuple(copies), tuple(fills), MappingProxyType(shapes), MappingProxyType(layers))


def _traced(
    model: torch.nn.Module, tensors: Sequence[TensorInfo], targets: _Targets
) -> tuple[list[Copy], list[Fill]]:
    recorder = _Recorder(targets)
    snapshot = _LoadingSnapshot(model)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(recorder.sources(tensors))
    except PlanRefused:
        raise
    except Exception as error:
        # Some of vLLM's assertions have no message, and some messages list every parameter.
        reason = f"{type(error).__name__}: {str(error)[:MAX_REASON_CHARS]}"
        raise PlanRefused(f"the model's load_weights raised {reason}") from error
    finally:
        replaced = snapshot.restore()
    if recorder.refusal is not None:  # a loader may have caught it
        raise recorder.refusal
    if replaced is not None:
        raise PlanRefused(f"load_weights replaces parameter {replaced}")
    _check_coverage(targets, [*recorder.copies, *recorder.fills])
    return recorder.copies, recorder.fills


@contextlib.contextmanager
def _in_load_form(quantised: Sequence[QuantisedLayer]) -> Iterator[None]:
    """Replace the parameters of layers by the ones that they load, during the block."""
    served = [(layer.module._parameters, dict(layer.module._parameters)) for layer in quantised]
    try:
        for layer, (parameters, own) in zip(quantised, served, strict=True):
            parameters.clear()
            parameters.update({name: own[name] for name in layer.kept})
            parameters.update(
                (name.removeprefix(f"{layer.name}."), tensor) for name, tensor in layer.load_form.items()
            )
        yield
    finally:
        for parameters, own in served:
            parameters.clear()
            parameters.update(own)


def check_plan(plan: CopyPlan, parameters: Mapping[str, torch.Tensor], read: Read) -> int:
    """Compare three spots of every copy's target with the checkpoint, bit for bit. Returns the number of copies.

    `check_quantised` checks quantized layers. Raises PlanRefused at the first difference. Syncs once per pair of
    dtypes.
    """
    groups: defaultdict[tuple[Any, ...], list[tuple[Copy, torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for name, copies in plan.by_tensor.items():
        tensor = read(name)
        for copy in (one for one in copies if one.parameter not in plan.layers):
            for into, index in _spots(copy, plan.shapes[name]):
                actual, expected = _view(parameters[copy.parameter], into), tensor[index].reshape(-1)
                if actual.shape != expected.shape:
                    raise PlanRefused(f"tensor {name} has another shape than the plan's {plan.shapes[name]}")
                key = (actual.device, actual.dtype, expected.device, expected.dtype)
                groups[key].append((copy, actual, expected))
    for (device, dtype, _, _), spots in groups.items():
        actual = torch.cat([spot[1] for spot in spots])
        expected = torch.cat([spot[2] for spot in spots]).to(device=device, dtype=dtype)
        differs = (actual.view(torch.uint8) != expected.view(torch.uint8)).cpu().numpy()
        if differs.any():
            ends = np.cumsum([spot[1].nbytes for spot in spots])
            copy = spots[int(np.searchsorted(ends, differs.argmax(), side="right"))][0]
            raise PlanRefused(f"parameter {copy.parameter} differs from tensor {copy.tensor}")
    return len(plan.copies)


def _view(base: torch.Tensor, region: Region) -> torch.Tensor:
    return torch.as_strided(base, region.size, region.stride, base.storage_offset() + region.offset)


def _spots(copy: Copy, shape: tuple[int, ...]) -> Iterator[tuple[Region, tuple[slice, ...]]]:
    """Yield three spots of a copy, each as a region of the parameter and an index into the tensor."""
    size = copy.into.size or (1,)
    into, out_of = copy.into.stride or (1,), copy.out_of.stride or (1,)
    num_rows = prod(size[:-1])
    some = zlib.crc32(f"{copy.parameter} {copy.tensor}".encode())
    longest = min(SPOT_CHECK_ELEMENTS, size[-1]) if out_of[-1] == 1 else 1
    for row, column in (
        (0, 0),
        (some % num_rows, some % (size[-1] - longest + 1)),
        (num_rows - 1, size[-1] - longest),
    ):
        place = (*(int(i) for i in np.unravel_index(row, size[:-1])), column)
        first = np.unravel_index(copy.out_of.offset + sum(map(int.__mul__, place, out_of)), shape)
        length = min(longest, shape[-1] - int(first[-1])) if shape else 1
        start = copy.into.offset + sum(map(int.__mul__, place, into))
        index = [slice(int(i), int(i) + 1) for i in first]
        index[-1:] = [slice(int(i), int(i) + length) for i in first[-1:]]
        yield Region(start, (length,), (into[-1],)), tuple(index)


def _check_layers(model: torch.nn.Module, quantised: Sequence[QuantisedLayer]) -> None:
    """Raise PlanRefused if a layer computes with other tensors than its parameters, except for `quantised` ones."""
    known = {layer.name for layer in quantised}
    if any(hasattr(model, hook) for hook in LOADED_HOOKS):
        raise PlanRefused("the model derives other weights from the loaded ones")
    if getattr(model, "_do_torchao_reload", False):
        raise PlanRefused("the model is quantized by torchao")
    for name, module in model.named_modules():
        if vars(module).get("cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear:
            raise PlanRefused(f"layer {name} computes with a packed copy of its weight")
        if any(impl.sinks is not impl._sinks_source for impl in _with_sinks(module)):
            raise PlanRefused(f"layer {name} computes with a cast copy of its sinks")
        method = getattr(module, "quant_method", None)
        method = getattr(method, "old_quant_method", method)  # vLLM wraps the method of an expert layer
        if name in known or method is None or not any(True for _ in module.parameters(recurse=False)):
            continue
        if type(method).__name__ not in PLAIN_METHODS:
            raise PlanRefused(f"layer {name} is quantized or has another layout ({type(method).__name__})")
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        if getattr(method, "moe_kernel", None) is not None and backend not in PLAIN_MOE_BACKENDS:
            raise PlanRefused(f"layer {name} stores its experts in the layout of {backend}")
        parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
        if getattr(parallel, "enable_eplb", False):
            raise PlanRefused(f"layer {name} rebalances its experts while it serves")


def _with_sinks(module: torch.nn.Module) -> Iterator[Any]:
    """Yield an attention layer's implementations in vLLM that may keep a cast copy of the sinks."""
    impl: Any = getattr(module, "impl", None)
    variants = impl.get_impl_variants() if hasattr(impl, "get_impl_variants") else (impl,)
    return (one for one in variants if hasattr(one, "_sinks_source"))


class _Targets:
    """The model's parameters by storage, and its other tensors, which a plan may not write.

    `on_meta` are the names of parameters without memory.
    """

    def __init__(self, model: torch.nn.Module, on_meta: Collection[str]) -> None:
        self._on_meta = on_meta
        self.num_elements: dict[str, int] = {}
        self._spans: defaultdict[int, list[tuple[int, int, str, torch.dtype]]] = defaultdict(list)
        self._others: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            self._add(name, parameter)
        for prefix, module in model.named_modules():
            attributes = {**module._buffers, **vars(module)}
            for name, tensor in attributes.items():
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self._others.setdefault(_storage_key(tensor), f"{prefix}.{name}")

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.numel() == 0:
            raise PlanRefused(f"parameter {name} is empty: its layer stores the weight elsewhere")
        if parameter.is_meta is not (name in self._on_meta) or not parameter.is_contiguous():
            raise PlanRefused(f"parameter {name} has no storage, or is not contiguous")
        first = parameter.storage_offset()
        span = (first, first + parameter.numel(), name, parameter.dtype)
        spans = self._spans[_storage_key(parameter)]
        for start, stop, other, _ in spans:  # tied parameters are one object, which `named_parameters` returns once
            if start < span[1] and span[0] < stop:
                raise PlanRefused(f"parameters {other} and {name} share memory")
        spans.append(span)
        self.num_elements[name] = parameter.numel()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and (
            _storage_key(tensor) in self._spans or _storage_key(tensor) in self._others
        )

    def place(self, tensor: torch.Tensor) -> tuple[str, Region]:
        """Return the parameter and the region that a tensor views. Raises PlanRefused."""
        key, offset = _storage_key(tensor), tensor.storage_offset()
        for start, stop, name, dtype in self._spans.get(key, ()):
            if start <= offset < stop:
                if tensor.dtype != dtype:
                    raise PlanRefused(f"load_weights writes {tensor.dtype} bits into parameter {name}")
                return name, Region(offset - start, tuple(tensor.shape), tensor.stride())
        raise PlanRefused(f"load_weights writes {self._others.get(key, 'a tensor')}, which is not a parameter")


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records writes to parameters instead of executing them. Everything else runs on meta tensors."""

    def __init__(self, targets: _Targets) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.refusal: PlanRefused | None = None
        self._targets = targets
        # Keeps the tensors alive, so that storage keys are unique
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}

    def sources(self, tensors: Iterable[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        for info in tensors:
            dtype = getattr(torch, info.dtype, None)
            if not isinstance(dtype, torch.dtype):
                self._refuse(f"tensor {info.name} has the unknown dtype {info.dtype}")
            tensor = torch.empty(info.shape, dtype=dtype, device="meta")
            self._sources[_storage_key(tensor)] = (info.name, tensor)
            yield info.name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for written in _written(func, args, kwargs):
            if self._targets.holds(written):
                if written.numel() > 0:
                    self._record(func, written, args)
                return args[0]
        if func is torch.ops.aten._to_copy.default and _storage_key(args[0]) in self._sources:
            return self._moved(args[0], kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)

    def _moved(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the result of `.to(device)` on a part of a checkpoint tensor, which is the same part."""
        name, base = self._sources[_storage_key(tensor)]
        if tensor.dtype != base.dtype or dtype != base.dtype:
            self._refuse(f"load_weights casts tensor {name} before copying it")
        moved = torch.empty(base.shape, dtype=dtype, device="meta")
        self._sources[_storage_key(moved)] = (name, moved)
        return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _record(self, func: Any, written: torch.Tensor, args: tuple[Any, ...]) -> None:
        try:
            parameter, into = self._targets.place(written)
        except PlanRefused as refusal:
            self._refuse(str(refusal))
        aten = torch.ops.aten
        if func is aten.copy_.default or (func is aten.fill_.Tensor and args[1].is_meta):
            self.copies.append(self._copy(parameter, into, written, args[1]))
        elif func is aten.fill_.Scalar or func is aten.fill_.Tensor:
            self.fills.append(Fill(parameter, into, float(args[1])))
        elif func is aten.zero_.default:
            self.fills.append(Fill(parameter, into, 0.0))
        else:
            self._refuse(f"load_weights writes parameter {parameter} with {func}")

    def _copy(self, parameter: str, into: Region, written: torch.Tensor, value: torch.Tensor) -> Copy:
        name, base = self._sources.get(_storage_key(value), ("", None))
        if base is None or value.dtype != base.dtype:
            self._refuse(f"parameter {parameter} gets computed values instead of a part of one checkpoint tensor")
        if written.dtype != value.dtype and not {written.dtype, value.dtype} <= set(CAST_DTYPES.values()):
            self._refuse(f"parameter {parameter} has dtype {written.dtype}, tensor {name} has {value.dtype}")
        value = value.expand(written.shape)
        return Copy(parameter, into, name, Region(value.storage_offset(), into.size, value.stride()))

    def _refuse(self, reason: str) -> NoReturn:
        self.refusal = self.refusal or PlanRefused(reason)
        raise self.refusal


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes according to its schema."""
    for position, name in _write_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from (item for item in (value if isinstance(value, list | tuple) else [value]) if item is not None)


@functools.cache
def _write_arguments(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(i, argument.name) for i, argument in arguments if argument.alias_info and argument.alias_info.is_write]


def _check_coverage(targets: _Targets, writes: Sequence[Copy | Fill]) -> None:
    """Raise PlanRefused unless the writes cover every element of every parameter exactly once."""
    by_parameter: defaultdict[str, list[Region]] = defaultdict(list)
    for write in writes:
        by_parameter[write.parameter].append(write.into)
    for name, num_elements in targets.num_elements.items():
        regions = by_parameter[name]
        num_written = sum(region.num_elements for region in regions)
        if num_written < num_elements:
            missing = num_elements - num_written
            raise PlanRefused(f"parameter {name} has {num_elements} elements, of which {missing} are not written")
        runs = [_runs(name, region) for region in regions]
        starts = np.concatenate([run[0] for run in runs])
        lengths = np.concatenate([np.full(len(run[0]), run[1]) for run in runs])
        order = np.argsort(starts)
        ends = starts[order] + lengths[order]
        if (starts[order][1:] < ends[:-1]).any():
            raise PlanRefused(f"parameter {name} has elements that are written twice")
        if ends[-1] > num_elements:
            raise PlanRefused(f"parameter {name} is written beyond its end")
        # No run overlaps another or exceeds the parameter, and their lengths sum to its size: each element is
        # written once.


def _runs(name: str, region: Region) -> tuple[Any, int]:
    """Return a region as the start indexes of equally long runs of adjacent elements."""
    dimensions = sorted((stride, size) for stride, size in zip(region.stride, region.size, strict=True) if size > 1)
    length = 1
    while dimensions and dimensions[0][0] == length:
        length *= dimensions.pop(0)[1]
    if prod(size for _, size in dimensions) > MAX_RUNS:
        raise PlanRefused(f"parameter {name} is written in too many pieces")
    starts = np.array([region.offset], dtype=np.int64)
    for stride, size in dimensions:
        starts = (starts[:, None] + stride * np.arange(size, dtype=np.int64)).ravel()
    return starts, length


def _storage_key(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage, valid while it lives. Meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)


class _LoadingSnapshot:
    """The Python state of a model's modules and parameters, so that running its loader can be undone.

    The weights themselves are not saved, because the trace does not write them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # `detach` keeps the storage alive that an assignment to `.data` would release.
        self._parameters = [(name, parameter, parameter.detach()) for name, parameter in model.named_parameters()]
        states: list[Any] = [vars(parameter) for _, parameter, _ in self._parameters]
        for module in model.modules():
            states += (vars(module), module._parameters, module._buffers, module._modules)
        self._states = [(state, state.copy()) for state in states]

    def restore(self) -> str | None:
        """Undo the changes of the loader. Returns the first parameter that was replaced or got another storage."""
        found = dict(self._model.named_parameters())
        replaced = found.keys() - {name for name, _, _ in self._parameters}
        for name, parameter, data in self._parameters:
            if found.get(name) is not parameter or _geometry(parameter) != _geometry(data):
                replaced.add(name)
                parameter.data = data
        for state, saved in self._states:
            state.clear()
            state.update(saved)
        return min(replaced, default=None)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
