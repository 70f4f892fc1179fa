"""The four ways in which a worker holds an update until its commit:

    ShadowParameters  a copy of the model's parameters in their own layout, also quantized, filled while the engine
                      decodes; the commit copies it over the parameters. Needs a `CopyPlan`. The fastest, and each
                      rank holds only its shard.
    StagedCheckpoint  the tensors as received; the commit loads them with vLLM's own loader.
    StagedFiles       only the folder's name; the commit loads it with vLLM's own loader.
    StreamedWeights   nothing; the commit receives (blocking update), by the plan or with vLLM's own loader.

Every commit verifies its result by checksums or spot checks (`verify.py`). After a commit that raises, the weights
are in an unknown state until a later commit. NaN and infinite values are never served: `finish_staging` refuses
staged tensors, and after a load the parameters are checked too, because a loader may produce NaN from finite
tensors (a zero scale).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import safe_open

from agentloop.engine.interface import CommitReport, StagingDevice
from agentloop.engine.weight_digest import check_unchanged
from agentloop.errors import CheckpointUnreadable
from agentloop_servers.weight_transfer.checkpoint import CheckpointInfo, inspect_checkpoint, not_finite
from agentloop_servers.weight_transfer.copy_plan import Copy, CopyPlan, QuantisedLayer, apply_fills, source, target
from agentloop_servers.weight_transfer.layout import view
from agentloop_servers.weight_transfer.quantised import QuantisedLoad
from agentloop_servers.weight_transfer.receiver import Incoming, receive
from agentloop_servers.weight_transfer.verify import (
    Read,
    RowChecksums,
    checksum,
    first_not_finite,
    to_host,
)

Tensors = Iterator[tuple[str, torch.Tensor]]


class ServedModel(Protocol):
    """The running model during a commit: used from the worker's own thread while nothing is decoded."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The model's own tensors by name, each once and in memory order. Writing them changes the model."""

    def quantised_layers(self) -> Sequence[QuantisedLayer]:
        """Return the layers that can be quantized next to the serving ones, with new load forms."""

    def reload(self, tensors: Tensors) -> None:
        """Load checkpoint tensors with the engine's own loader."""

    def compare(self, names: Sequence[str], read: Read) -> tuple[int, int]:
        """Compare the layers with a checkpoint. Returns the numbers of compared and of not comparable layers.

        Raises RuntimeError for a difference.
        """

    def synchronize(self) -> None:
        """Wait for all work on the device."""


class ShadowParameters:
    """A second set of the model's parameters, filled by a copy plan. The commit copies it over the parameters.

    `shadows` has a tensor with each parameter's dtype and shape. Everything except copies and sums is done before
    the commit, because generation is frozen during the commit.
    """

    def __init__(
        self,
        plan: CopyPlan,
        shadows: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        staging_device: StagingDevice,
    ) -> None:
        self.staging_device = staging_device
        self.loaded: Mapping[str, torch.Tensor] = {}
        self._shadows = shadows
        self._into = {name: parameters[name] for name in shadows}
        self._staged_sums = RowChecksums(shadows, self._into)
        self._served_sums = RowChecksums(self._into)
        self._load = QuantisedLoad(
            plan, shadows, lambda name, tensor: shadows[name].copy_(tensor, non_blocking=True)
        )
        apply_fills(plan, shadows)

    def accept(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a checkpoint tensor into the shadows, on the current stream."""
        self._load.accept(name, tensor)

    def finish_staging(self) -> None:
        """Compute the shadows' checksums, after the copies of all tensors.

        Raises CheckpointUnreadable for values that are not finite.
        """
        self._staged_sums.compute()
        self._staged_sums.load_kernels()
        _require_numbers(first_not_finite(self._shadows))

    def commit(self, model: ServedModel) -> CommitReport:
        device = next(iter(self._into.values())).device
        started = _Mark(device)
        with torch.no_grad():
            self._staged_sums.copy()
        swapped = _Mark(device)
        served = model.parameters  # the checks below run during the copies, without a sync
        for name, tensor in self._into.items():
            if served[name].data_ptr() != tensor.data_ptr():
                raise RuntimeError(f"parameter {name} was replaced after the update was staged: stage it again")
        self._served_sums.compute()
        verified = _Mark(device)
        wrong = self._served_sums.first_difference(self._staged_sums)
        if wrong is not None:
            raise RuntimeError(f"parameter {wrong} differs from the staged weights after the commit")
        return CommitReport(started.ms_to(swapped), swapped.ms_to(verified), len(self._into))


class StagedCheckpoint:
    """The update's tensors as received. `tensors` has memory with the right dtype and shape for each name."""

    def __init__(self, tensors: dict[str, torch.Tensor], staging_device: StagingDevice) -> None:
        self.staging_device = staging_device
        self.tensors = tensors
        self.loaded: Mapping[str, torch.Tensor] = tensors

    def accept(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the stage, on the current stream."""
        self.tensors[name].copy_(tensor, non_blocking=True)

    def finish_staging(self) -> None:
        """Raise CheckpointUnreadable for values that are not finite."""
        _require_numbers(first_not_finite(self.tensors))

    def commit(self, model: ServedModel) -> CommitReport:
        started_at = time.perf_counter()
        model.reload(iter(self.tensors.items()))
        model.synchronize()
        swapped_at = time.perf_counter()
        compared = _compare_load(model, list(self.tensors), self.tensors.__getitem__)
        return CommitReport(_ms(started_at, swapped_at), _ms(swapped_at), *compared)


class StagedFiles:
    """A folder that the commit loads. Raises CheckpointUnreadable if the folder is unreadable."""

    staging_device = StagingDevice.FILES

    def __init__(self, directory: str) -> None:
        self.loaded: Mapping[str, torch.Tensor] = {}
        self._directory = directory
        self.info = inspect_checkpoint(directory)

    def commit(self, model: ServedModel) -> CommitReport:
        started_at = time.perf_counter()
        check_unchanged(self._directory, self.info.stamps)
        if inspect_checkpoint(self._directory) != self.info:
            raise CheckpointUnreadable(
                "the checkpoint changed after it was staged: push it again", param="directory"
            )
        with OpenCheckpoint(self.info) as checkpoint:
            model.reload(checkpoint.tensors())
            model.synchronize()
            swapped_at = time.perf_counter()
            compared = _compare_load(model, list(self.info.tensors), checkpoint.read)
        return CommitReport(_ms(started_at, swapped_at), _ms(swapped_at), *compared)


class StreamedWeights:
    """An update that the commit receives, by the plan or, if it is None, with the engine's own loader.

    With the loader it cannot restart when another receiver is lost.
    """

    staging_device = StagingDevice.NOWHERE

    def __init__(self, incoming: Incoming, plan: CopyPlan | None) -> None:
        self.loaded: Mapping[str, torch.Tensor] = {}
        self._incoming = incoming
        self._plan = plan

    def commit(self, model: ServedModel) -> CommitReport:
        started_at = time.perf_counter()
        report = self._by_plan(self._plan, model) if self._plan is not None else self._by_loader(model)
        swap_ms = _ms(started_at) - report.verify_ms
        return replace(report, swap_ms=swap_ms, transfer_ms=self._incoming.transfer_ms)

    def _by_plan(self, plan: CopyPlan, model: ServedModel) -> CommitReport:
        parameters = model.parameters
        wanted: dict[Copy, torch.Tensor] = {}

        def accept(name: str, tensor: torch.Tensor) -> None:
            for copy in plan.by_tensor[name]:
                into = target(copy, parameters)
                piece = source(copy, tensor).to(into.dtype)
                into.copy_(piece, non_blocking=True)
                wanted[copy] = checksum(piece)

        with torch.no_grad():
            apply_fills(plan, parameters)
            receive(self._incoming, accept)
        model.synchronize()
        copied_at = time.perf_counter()
        found = to_host([checksum(target(copy, parameters)) for copy in wanted])
        _compare_sums([copy.parameter for copy in wanted], found, to_host(list(wanted.values())))
        _require_numbers(first_not_finite(parameters))
        return CommitReport(0.0, _ms(copied_at), len(wanted))

    def _by_loader(self, model: ServedModel) -> CommitReport:
        names = [place.name for place in self._incoming.layout.places]
        kept: dict[str, torch.Tensor] = {}  # copies for the comparison afterwards, in host memory

        def arriving() -> Tensors:
            for bucket, data in self._incoming.receive_attempt():
                for place in self._incoming.layout.in_bucket(bucket):
                    tensor = view(data, place).clone()  # the loader may keep it longer than this bucket is valid
                    kept[place.name] = tensor.cpu()
                    yield place.name, tensor

        model.reload(arriving())
        self._incoming.finish()
        model.synchronize()
        loaded_at = time.perf_counter()
        compared = _compare_load(model, names, kept.__getitem__)
        self.loaded = kept
        return CommitReport(0.0, _ms(loaded_at), *compared)


StagedWeights: TypeAlias = ShadowParameters | StagedCheckpoint | StagedFiles | StreamedWeights
"""A staged update in one of its four forms.

After a commit `loaded` has the tensors that the engine's own loader has loaded, if they are kept. Copy plans are
checked against them.
"""


class OpenCheckpoint:
    """The open safetensors files of a folder, as a context manager."""

    def __init__(self, info: CheckpointInfo) -> None:
        self._info = info
        self._stack = ExitStack()
        self._file_by_name: dict[str, Any] = {}

    def __enter__(self) -> OpenCheckpoint:
        with ExitStack() as stack:
            for path in self._info.files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                self._file_by_name |= dict.fromkeys(file.keys(), file)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file_by_name = {}
        self._stack.close()

    def tensors(self) -> Tensors:
        """Yield every tensor, in file order."""
        for name, file in self._file_by_name.items():
            yield name, file.get_tensor(name)

    def read(self, name: str) -> Any:
        """Return a tensor as a safetensors slice, which reads only the indexed parts."""
        return self._file_by_name[name].get_slice(name)


class _Mark:
    """A point in time of a device's work. Call `ms_to` after both points have passed."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def ms_to(self, later: _Mark) -> float:
        if self._event is None or later._event is None:
            return _ms(self._at, later._at)
        return float(self._event.elapsed_time(later._event))


def _compare_load(model: ServedModel, names: Sequence[str], read: Read) -> tuple[int, int]:
    """Verify a load by the engine's own loader. Returns the result of `ServedModel.compare`."""
    compared = model.compare(names, read)
    _require_numbers(first_not_finite(model.parameters))
    return compared


def _require_numbers(name: str | None) -> None:
    """Raise CheckpointUnreadable for the tensor `name`, unless it is None."""
    if name is not None:
        raise CheckpointUnreadable(not_finite(name), param="directory")


def _compare_sums(names: Sequence[str], found: Sequence[int], wanted: Sequence[int]) -> None:
    wrong = [name for name, one, other in zip(names, found, wanted, strict=True) if one != other]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} of {len(found)} parameters differ from the received weights, the first is {wrong[0]}"
        )


def _ms(start: float, end: float | None = None) -> float:
    return ((time.perf_counter() if end is None else end) - start) * 1000.0
