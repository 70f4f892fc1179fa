"""Staging of one worker's new weights: received during decoding, held, and committed.

nothing ─► receiving (a thread) ─► held ─► committed        any ─► nothing after a new stage, a drop, or a failure

The engine calls `stage`, `poll`, `drop`, `commit` and `offer` one at a time on the worker's own thread; all but
`commit` return at once. The thread of a stage owns the received update until its state is HELD. The form of a held
update (`staged_weights.py`) depends on the copy plan. A plan is traced once per tensor list, while nothing is
decoded or loaded, and is used only after it agrees with weights that the engine itself has loaded.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from agentloop.engine.interface import (
    CommitReport,
    GroupInit,
    GroupOrder,
    PushSource,
    StageReport,
    StagingDevice,
    TensorInfo,
    TensorNames,
    TransferPart,
)
from agentloop.engine.weight_digest import sums_digest
from agentloop.errors import AgentLoopError, CheckpointUnreadable
from agentloop.values import codec
from agentloop_servers.net.tcp import ADDRESS_VARIABLE, ENCRYPT_VARIABLE
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.checkpoint import check_tied, head_and_twins, inspect_checkpoint
from agentloop_servers.weight_transfer.copy_plan import Copy, CopyPlan, PlanRefused, Region, check_plan, trace
from agentloop_servers.weight_transfer.group_member import GroupMember, mapped
from agentloop_servers.weight_transfer.layout import DEFAULT_BUCKET_BYTES, dtype_of, tensor_info
from agentloop_servers.weight_transfer.quantised import check_quantised
from agentloop_servers.weight_transfer.receiver import Incoming, Receiver, receive
from agentloop_servers.weight_transfer.sender import WeightSender
from agentloop_servers.weight_transfer.staged_weights import (
    OpenCheckpoint,
    ServedModel,
    ShadowParameters,
    StagedCheckpoint,
    StagedFiles,
    StagedWeights,
    StreamedWeights,
)
from agentloop_servers.weight_transfer.verify import checksum, to_host
from agentloop_servers.weight_transfer.worker_calls import (
    CheckedFolder,
    StageOrder,
    StageProgress,
    StageState,
    StagingSetup,
)

OFFER_TIMEOUT_S = 300.0
RESERVE_BYTES = 2**30
HOST_SHARE = 2 / 3
PART_POLL_S = 0.05  # seconds between two checks of a stage that waits for a part
THREAD_JOIN_TIMEOUT_S = 10.0  # for a stage's thread to end, which checks every 50 ms whether it was dropped

_log = structlog.stdlib.get_logger(__name__)

Form = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]


@dataclass(slots=True)
class _Stage:
    """One stage. Its thread writes the fields, `state` last."""

    number: int
    state: StageState = StageState.RECEIVING
    error: str = ""
    report: StageReport | None = None
    staged: StagedWeights | None = None
    incoming: Incoming | None = None
    is_dropped: bool = False
    thread: threading.Thread | None = None
    # A part without tensors is the end
    parts: queue.SimpleQueue[TransferPart] = field(default_factory=queue.SimpleQueue)
    num_parts: int = 0  # received parts

    def check(self) -> None:
        if self.is_dropped:
            raise CheckpointUnreadable("the stage was dropped", param="update_info")


@dataclass(slots=True)
class _KnownPlan:
    """A copy plan for tensors of these names and shapes, in any order and dtype.

    `is_checked` is True once the plan agrees with weights that the engine itself has loaded.
    """

    shapes: Mapping[str, tuple[int, ...]]
    plan: CopyPlan
    is_checked: bool = False


class WeightStager:
    """Receives, holds and sends the weights of one worker process.

    Without `can_trace` there are no copy plans, because the model computes with packed copies of its parameters.
    """

    def __init__(
        self,
        model: ServedModel,
        module: torch.nn.Module,
        device: torch.device,
        rank: int,
        *,
        policy: str,
        can_trace: bool,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._module = module
        self._device = device
        self._can_trace = can_trace
        self._timeout_s = timeout_s
        self._memory = StagingMemory(device, policy)
        self._receiver = Receiver(device, rank)
        self._rank = rank
        self._groups: dict[str, GroupMember] = {}
        self._stream: torch.cuda.Stream | None = None
        self._known: _KnownPlan | None = None
        self._refused: Mapping[str, tuple[int, ...]] = {}
        self._stage: _Stage | None = None
        # The last push's tensors, kept if the parameters cannot be read back.
        self._served: StagedCheckpoint | None = None
        self._sender: WeightSender | None = None
        self._sending: threading.Thread | None = None

    # Copy plans

    def prepare(self, loaded: CheckedFolder) -> None:
        """Trace the plan for a folder that the engine itself has loaded, and check it against the parameters."""
        known = self._plan_for(loaded.tensors)
        if known is not None:
            with OpenCheckpoint(inspect_checkpoint(loaded.directory)) as checkpoint:
                self._check_plan(known, checkpoint.read)

    def _plan_for(self, tensors: tuple[TensorInfo, ...]) -> _KnownPlan | None:
        """Return the plan for these tensors, and trace it if needed; None if the model cannot have a plan.

        Call only on the worker's own thread, because the trace runs the model's loader.
        """
        shapes = {tensor.name: tuple(tensor.shape) for tensor in tensors}
        if not self._can_trace or shapes == self._refused:
            return None
        if self._known is None or self._known.shapes != shapes:
            try:
                plan = trace(self._module, tensors, self._model.quantised_layers())
            except PlanRefused as error:
                _log.info("no_copy_plan", reason=str(error), consequence="updates use the engine's own loader")
                self._refused = shapes
                return None
            # Tensors without a copy, such as a tied output head, may be in only one of the lists.
            is_checked = self._known is not None and self._known.is_checked and _is_same(self._known.plan, plan)
            self._known = _KnownPlan(shapes, plan, is_checked)
        return self._known

    def _check_plan(self, known: _KnownPlan, read: Any) -> None:
        try:
            check_plan(known.plan, self._model.parameters, read)
            check_quantised(known.plan, self._model.parameters, read)
        except PlanRefused as error:
            _log.info("no_copy_plan", reason=str(error), consequence="updates use the engine's own loader")
            self._refused, self._known = known.shapes, None
        else:
            known.is_checked = True

    # Staging

    def stage(self, order: StageOrder) -> None:
        """Start to receive an update, and drop the update that was staged before."""
        if self._stage is not None:
            self.drop(self._stage.number)
        stage = self._stage = _Stage(order.number)
        if order.push is not None and order.push.names is TensorNames.RUNTIME:
            plan: CopyPlan | None = self._plan_of_parameters()
        else:
            known = self._plan_for(order.tensors)
            plan = known.plan if known is not None and known.is_checked else None
        if plan is None and self._served is not None:  # its memory is needed for the stage
            self._end_offer()
            self._served = None
        stage.thread = threading.Thread(
            target=self._run, args=(stage, order, plan), name=f"stage-{order.number}", daemon=True
        )
        stage.thread.start()

    def poll(self, number: int) -> StageProgress:
        """Return the progress of stage `number`: FAILED if another stage has replaced it."""
        stage = self._stage
        if stage is None or stage.number != number:
            return StageProgress(StageState.FAILED, "another stage has replaced it")
        return StageProgress(stage.state, stage.error, stage.report, stage.num_parts)

    def drop(self, number: int) -> None:
        """End a stage and wait for its thread. No effect if `number` is not the present stage."""
        stage = self._stage
        if stage is None or stage.number != number:
            return
        self._stage = None
        stage.is_dropped = True
        if stage.incoming is not None and (
            stage.state is not StageState.HELD or isinstance(stage.staged, StreamedWeights)
        ):
            stage.incoming.abort()  # otherwise everything has arrived, and the next update reuses the connection
        if stage.thread is not None:
            stage.thread.join(THREAD_JOIN_TIMEOUT_S)
            if stage.thread.is_alive():
                # The thread hangs in the driver or the loader and may still write its memory, so that is not used
                # again.
                self._memory = StagingMemory(self._device, "none")

    def release(self) -> None:
        """Release all memory except the model's: the stage, the peer source, buffers and connections."""
        if self._stage is not None:
            self.drop(self._stage.number)
        self._end_offer()
        self._served = None
        self._memory.release()
        self._receiver.close()

    def _run(self, stage: _Stage, order: StageOrder, plan: CopyPlan | None) -> None:
        try:
            with self._side_stream():
                if order.push is not None:
                    self._receive_push(stage, order.push, plan, is_tied=order.is_tied)
                elif order.folder is not None:
                    self._read_folder(stage, order.folder.directory, plan)
                else:
                    self._receive_parts(stage, plan, is_tied=order.is_tied)
        except AgentLoopError as error:
            stage.error = error.message
        except Exception as error:  # the update has failed, but the worker keeps serving
            stage.error = f"{type(error).__name__}: {error}"
        stage.state = StageState.FAILED if stage.error else StageState.HELD

    def _receive_push(self, stage: _Stage, push: PushSource, plan: CopyPlan | None, *, is_tied: bool) -> None:
        form = _form(push.tensors) if plan is None else self._parameter_form()
        staging_device = self._memory.choose(form, _buffer_bytes(push.tensors))
        incoming = self._receiver.open(
            push,
            can_hold=staging_device is not StagingDevice.NOWHERE,
            timeout_s=self._timeout_s,
            is_given_up=lambda: stage.is_dropped,
        )
        stage.incoming = incoming
        if stage.is_dropped:
            incoming.abort()
            raise CheckpointUnreadable("the stage was dropped", param="push")
        if incoming.is_one_phase:
            # A blocking update has no memory to quantize a layer in, so the engine's own loader does it.
            stage.staged = StreamedWeights(incoming, None if plan is not None and plan.layers else plan)
        else:
            try:
                staged = self._place_for(plan, form, staging_device)
                receive(incoming, staged.accept, is_tied=is_tied)
            except BaseException as error:
                incoming.fail(str(error) or type(error).__name__)
                raise
            self._finish_staging(staged)
            stage.staged = staged
        stage.report = StageReport(
            stage.staged.staging_device,
            incoming.transport,
            incoming.layout.num_bytes,
            incoming.transfer_ms,
            incoming.digest,
        )

    def _receive_parts(self, stage: _Stage, plan: CopyPlan | None, *, is_tied: bool) -> None:
        """Receive parts until the last one, into shadows by the plan or as they are."""
        staged: StagedCheckpoint | ShadowParameters | None = None
        transport, num_bytes, transfer_s = "", 0, 0.0
        buffers: dict[Any, torch.Tensor] = {}
        tensors: list[TensorInfo] = []
        sums: dict[str, torch.Tensor] = {}  # computed here, because a trainer's group sends no checksums
        while (part := self._next_part(stage)).tensors:
            started_at, form = time.monotonic(), _form(part.tensors)
            if staged is None:
                staged = self._place_of_parts(plan, form)
            if isinstance(staged, StagedCheckpoint):
                staged.tensors |= self._memory.extend(form, staged.staging_device)
            member = self._groups.get(part.group)
            if member is None and not part.handles:
                raise CheckpointUnreadable(
                    f"the worker is not a member of group {part.group!r}: create the group first",
                    param="update_info",
                )
            arriving = mapped(part, self._device, buffers) if member is None else member.receive(part, stage.check)
            tensors += part.tensors
            for name, tensor in arriving:
                sums[name] = checksum(tensor)
                if plan is None or name in plan.shapes:  # the plan has no target for a tied head that is not stored
                    staged.accept(name, tensor)
            self._synchronize()  # after this the trainer may change the memory of a mapped tensor
            transport = "ipc" if member is None else member.transport
            num_bytes, transfer_s = num_bytes + _num_bytes(form), transfer_s + time.monotonic() - started_at
            stage.num_parts += 1
        if staged is None:
            raise CheckpointUnreadable("the transfer ended without a tensor", param="update_info")
        self._finish_staging(staged)
        by_name = dict(zip(sums, to_host(list(sums.values())), strict=True))
        if is_tied:
            check_tied(head_and_twins(tensors), by_name)
        stage.staged = staged
        tensors.sort(key=lambda one: one.name)
        digest = sums_digest(tensors, [by_name[one.name] for one in tensors])
        stage.report = StageReport(staged.staging_device, transport, num_bytes, transfer_s * 1000.0, digest)

    def _next_part(self, stage: _Stage) -> TransferPart:
        """Wait for a part. Raises CheckpointUnreadable if the trainer sends nothing for the timeout."""
        silent_at = time.monotonic() + self._timeout_s
        while time.monotonic() < silent_at:
            stage.check()
            with contextlib.suppress(queue.Empty):
                return stage.parts.get(timeout=PART_POLL_S)
        raise CheckpointUnreadable(
            f"the trainer sent nothing for {self._timeout_s:g} s: check it, and push again", param="update_info"
        )

    def _place_of_parts(self, plan: CopyPlan | None, form: Form) -> StagedCheckpoint | ShadowParameters:
        wanted = form if plan is None else self._parameter_form()
        staging_device = self._memory.choose(wanted, 2 * _num_bytes(form))
        if staging_device is StagingDevice.NOWHERE:
            raise CheckpointUnreadable(
                "a trainer's group needs staging memory in addition to the served weights: "
                "set `weight_staging: host`, or call `/update_weights` with a `weight_dir`",
                param="update_info",
            )
        return (
            StagedCheckpoint({}, staging_device) if plan is None else self._place_for(plan, wanted, staging_device)
        )

    # Groups of a trainer

    def follow(self, order: GroupOrder) -> None:
        """Start to join a group (in place of one with the same name), leave it, or receive a part.

        Returns at once. A part without tensors ends the transfer. A group can be left during a broadcast.
        """
        if isinstance(order, TransferPart):
            if self._stage is not None:
                self._stage.parts.put(order)
            return
        if (member := self._groups.pop(order.name, None)) is not None:
            member.leave()
        if isinstance(order, GroupInit):
            self._groups[order.name] = GroupMember(order, self._rank, self._device, self._timeout_s)

    def poll_group(self, name: str) -> StageProgress:
        """Return the progress of joining a group: HELD once it is joined."""
        member = self._groups.get(name)
        return (
            StageProgress(StageState.FAILED, "the worker has left the group") if member is None else member.progress
        )

    def _read_folder(self, stage: _Stage, directory: str, plan: CopyPlan | None) -> None:
        files = StagedFiles(directory)
        form = self._parameter_form()
        staging_device = StagingDevice.NOWHERE if plan is None else self._memory.choose(form, 0)
        if plan is None or staging_device is StagingDevice.NOWHERE:
            stage.staged = files
        else:
            staged = self._place_for(plan, form, staging_device)
            with OpenCheckpoint(files.info) as checkpoint:
                for name, tensor in checkpoint.tensors():
                    if stage.is_dropped:
                        raise CheckpointUnreadable("the stage was dropped", param="directory")
                    staged.accept(name, tensor)
            self._finish_staging(staged)
            stage.staged = staged
        stage.report = StageReport(stage.staged.staging_device, "directory", files.info.num_bytes)

    def _place_for(
        self, plan: CopyPlan | None, form: Form, staging_device: StagingDevice
    ) -> StagedCheckpoint | ShadowParameters:
        tensors = self._memory.take(form, staging_device)
        if plan is None:
            return StagedCheckpoint(tensors, staging_device)
        return ShadowParameters(plan, tensors, self._model.parameters, staging_device)

    def _finish_staging(self, staged: StagedCheckpoint | ShadowParameters) -> None:
        """Wait until the staged tensors are complete and can be read from any stream."""
        self._synchronize()
        staged.finish_staging()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # Commit

    def commit(self, number: int) -> CommitReport:
        """Load stage `number` into the model and verify it.

        If this raises, the weights are in an unknown state.
        """
        stage, self._stage = self._stage, None
        if stage is None or stage.number != number or stage.staged is None or stage.state is not StageState.HELD:
            raise RuntimeError(f"stage {number} is not held, so it cannot be committed")
        self._end_offer()
        self._served = None
        staged = stage.staged
        try:
            report = staged.commit(self._model)
        except BaseException as error:
            if stage.incoming is not None:
                stage.incoming.fail(str(error) or type(error).__name__)
            raise
        if staged.loaded and self._known is not None and not self._known.is_checked:
            self._check_plan(self._known, staged.loaded.__getitem__)
            self._memory.release()  # the next update's tensors have another form
        elif isinstance(staged, StagedCheckpoint):
            self._served = staged
        staged.loaded = {}
        return report

    # Sending to another worker

    def offer(self, token: str) -> PushSource | None:
        """Start to send the served weights to workers with this token; None if they cannot be read back."""
        self._end_offer()
        if self._can_trace:
            names, tensors = TensorNames.RUNTIME, self._model.parameters
        elif self._served is not None:
            names, tensors = TensorNames.CHECKPOINT, self._served.tensors
        else:
            return None
        items = [
            Outgoing(tensor_info(name, tensor), partial(torch.Tensor.detach, tensor))
            for name, tensor in tensors.items()
        ]
        listen_host = os.environ.get(ADDRESS_VARIABLE, "127.0.0.1")
        is_encrypted = ENCRYPT_VARIABLE in os.environ
        sender = self._sender = WeightSender(
            listen_host=listen_host, device=self._device, is_encrypted=is_encrypted
        )
        push = sender.offer(items, names, token)
        self._sending = threading.Thread(target=_send, args=(sender,), name="offer", daemon=True)
        self._sending.start()
        return push

    def _end_offer(self) -> None:
        sender, self._sender = self._sender, None
        sending, self._sending = self._sending, None
        if sender is not None and sending is not None:
            sender.cancel("the peer source was closed")
            sending.join(THREAD_JOIN_TIMEOUT_S)
            sender.close()

    def _parameter_form(self) -> Form:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._model.parameters.items()]

    def _plan_of_parameters(self) -> CopyPlan:
        """Return the plan for tensors with the parameters' names and shapes: each is copied completely."""
        if not self._can_trace:
            raise CheckpointUnreadable(
                "an engine on CPU cannot load another engine's parameters, because it computes with packed copies: "
                "update it from a trainer or a directory",
                param="push",
            )
        parameters = self._model.parameters
        copies = []
        for name, tensor in parameters.items():
            whole = Region(0, tuple(tensor.shape), tuple(tensor.stride()))
            dense = Region(0, tuple(tensor.shape), tuple(torch.empty(tensor.shape, device="meta").stride()))
            copies.append(Copy(parameter=name, into=whole, tensor=name, out_of=dense))
        return CopyPlan(tuple(copies), (), {name: tuple(tensor.shape) for name, tensor in parameters.items()})

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Run the block's device work on a separate stream, so that decoding continues."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._device.type == "cuda":
                # One stream for all updates, because torch's memory cache belongs to a stream
                if self._stream is None:
                    self._stream = torch.cuda.Stream(self._device)
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield


class StagingCalls:
    """The `weights_...` methods of `WorkerMethod`, mixed into the engine's own worker class.

    Arguments and results are strings, numbers and codec bytes. Method names must not collide with the engine's.
    """

    _stager: WeightStager

    def agentloop_call(self, method: str, *arguments: Any) -> tuple[Any, str]:
        """Run a method by its name. Returns its result and its error message.

        It never raises, so that every rank of an engine returns a result. Otherwise SGLang's loop would end, and
        vLLM's next call would receive the results of the ranks after the failed one.
        """
        try:
            with contextlib.ExitStack() as stack:
                if method.startswith("weights_"):
                    # SGLang's loop runs in inference mode, whose tensors the stager's thread cannot write.
                    stack.enter_context(torch.inference_mode(False))
                    stack.enter_context(torch.no_grad())
                return getattr(self, method)(*arguments), ""
        except AgentLoopError as error:
            return None, error.message
        except Exception as error:  # the call has failed, but the worker keeps serving
            _log.exception("worker_call_failed", method=method)
            return None, f"{type(error).__name__}: {error}"

    def weights_stager(self, setup: StagingSetup) -> WeightStager:
        """Make this worker's stager."""
        raise NotImplementedError

    def weights_prepare(self, setup: bytes) -> None:
        """Create this worker's stager from an encoded `StagingSetup`.

        Call it once after the engine's start, before other `weights_...` calls and before any generation.
        """
        settings = codec.decode(setup, StagingSetup)
        self._stager = self.weights_stager(settings)
        if settings.loaded is not None:
            self._stager.prepare(settings.loaded)

    def weights_stage(self, order: bytes) -> None:
        """Start to receive the update of a `StageOrder`."""
        self._stager.stage(codec.decode(order, StageOrder))

    def weights_follow(self, order: bytes) -> None:
        """Start to execute a `GroupOrder`. Returns at once."""
        self._stager.follow(codec.decode(order, GroupOrder))  # type: ignore[arg-type] # a union is not a class

    def weights_poll_group(self, name: str) -> bytes:
        """Return a group's `StageProgress`."""
        return codec.encode(self._stager.poll_group(name))

    def weights_poll(self, number: int) -> bytes:
        """Return a stage's `StageProgress`."""
        return codec.encode(self._stager.poll(number))

    def weights_drop(self, number: int) -> None:
        """End a stage without a commit."""
        self._stager.drop(number)

    def weights_commit(self, number: int) -> bytes:
        """Load a stage into the model while generation is paused. Returns a `CommitReport`."""
        return codec.encode(self._stager.commit(number))

    def weights_offer(self, token: str) -> bytes | None:
        """Make a `PushSource` for the served weights; None if they cannot be read back."""
        push = self._stager.offer(token)
        return None if push is None else codec.encode(push)

    def weights_release(self) -> None:
        """Release all memory except the model's."""
        self._stager.release()


def _is_same(one: CopyPlan, other: CopyPlan) -> bool:
    return set(one.copies) == set(other.copies) and set(one.fills) == set(other.fills)


def _send(sender: WeightSender) -> None:
    with contextlib.suppress(AgentLoopError):  # the receivers were notified, and this worker keeps serving
        sender.run(OFFER_TIMEOUT_S)


def _buffer_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Return the size of two buckets of these tensors, in bytes."""
    largest = max(_num_bytes([one]) for one in _form(tensors))
    return int(2 * max(largest, DEFAULT_BUCKET_BYTES))


def _form(tensors: Sequence[TensorInfo]) -> Form:
    return [(tensor.name, dtype_of(tensor), tuple(tensor.shape)) for tensor in tensors]


class StagingMemory:
    """The memory for staged weights: one set of named tensors at a time.

    Memory is kept for the next update: what fits once always fits then, and pinning gigabytes takes seconds.
    """

    def __init__(self, device: torch.device, policy: str) -> None:
        """`policy` is "auto", "device", "host" or "none"."""
        self._device = device
        self._policy = policy
        self._staging_device = StagingDevice.NOWHERE
        self._form: Form = ()
        self._tensors: dict[str, torch.Tensor] = {}

    def choose(self, form: Form, buffer_bytes: int) -> StagingDevice:
        """Return where tensors of this form are held.

        `buffer_bytes` of device memory are needed for their arrival.
        """
        if self._policy == "none":
            return StagingDevice.NOWHERE
        if self._tensors and form == self._form:
            return self._staging_device
        # "auto" prefers device memory if a reserve stays free, from which quantizing a layer takes. Then pinned
        # host memory up to a share of the available memory; otherwise the update is blocking.
        num_bytes = _num_bytes(form)
        free = _free_device_bytes(self._device) + self._held_bytes(StagingDevice.DEVICE)
        is_roomy = num_bytes + buffer_bytes + RESERVE_BYTES <= free
        if self._device.type != "cpu" and (self._policy == "device" or (self._policy == "auto" and is_roomy)):
            return StagingDevice.DEVICE
        available = _available_host_bytes() + self._held_bytes(StagingDevice.HOST)
        if self._policy == "host" or num_bytes <= HOST_SHARE * available:
            return StagingDevice.HOST
        return StagingDevice.NOWHERE

    def take(self, form: Form, staging_device: StagingDevice) -> dict[str, torch.Tensor]:
        """Return tensors of this form, and release all others. Their values are undefined."""
        if form != self._form:
            self.release()
        return self.extend(form, staging_device)

    def extend(self, form: Form, staging_device: StagingDevice) -> dict[str, torch.Tensor]:
        """Return tensors of this form, and keep those with other names. Their values are undefined."""
        if staging_device is not self._staging_device:
            self.release()
        self._staging_device = staging_device
        for name, dtype, shape in form:
            held = self._tensors.get(name)
            if held is None or (held.dtype, tuple(held.shape)) != (dtype, shape):
                self._tensors[name] = self._empty(dtype, shape, staging_device)
        self._form = [(name, one.dtype, tuple(one.shape)) for name, one in self._tensors.items()]
        return {name: self._tensors[name] for name, _, _ in form}

    def release(self) -> None:
        """Release the memory. Its tensors must not be in use."""
        had_device_memory = self._held_bytes(StagingDevice.DEVICE) > 0
        self._tensors, self._form = {}, ()
        if had_device_memory:
            torch.cuda.empty_cache()

    def _held_bytes(self, staging_device: StagingDevice) -> int:
        return _num_bytes(self._form) if self._tensors and self._staging_device is staging_device else 0

    def _empty(self, dtype: torch.dtype, shape: tuple[int, ...], staging_device: StagingDevice) -> torch.Tensor:
        if staging_device is StagingDevice.DEVICE:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type != "cpu")


def _num_bytes(form: Form) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in form)


def _free_device_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _available_host_bytes() -> int:
    """Return Linux's estimate of memory that is available without swapping, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
