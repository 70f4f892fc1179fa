"""A trainer in a separate process: seeded tensors on its device, controlled over a pipe.

It sends with our `WeightSender`, or in the engine's own way; the resulting engine calls travel back over the same
pipe (`Call`) while the parent waits. One command at a time; each has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from agentloop.engine.interface import PushSource, TensorInfo
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.sender import WeightSender
from tests.benchmarks.shapes import SHAPES, make_tensors, set_version

START_TIMEOUT_S = 180.0  # torch, a context, and 16 GB of random numbers


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """`transport` is WeightSender's: auto, nccl, ipc or shm. `version` is the version of the initial tensors."""

    shape: str
    device: str
    dtype: str
    transport: str
    version: int
    engine: str = "vllm"  # engine whose own way NativeConnect and NativeSend use


@dataclass(frozen=True, slots=True)
class SetVersion:
    """Overwrite the tensors with those of `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer the tensors; answered with a PushSource."""


@dataclass(frozen=True, slots=True)
class Send:
    """Serve one transfer to its end; answered with a SendReport."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class NativeConnect:
    """Open the transport of the engine's own updates, with one engine worker."""

    port: int


@dataclass(frozen=True, slots=True)
class NativeSend:
    """Run one update in the engine's own way."""


@dataclass(frozen=True, slots=True)
class MeasureMemory:
    """Answered with the bytes in use on every GPU, by all processes."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


@dataclass(frozen=True, slots=True)
class Call:
    """Sent by the trainer: call this method of the engine, and return an Answer."""

    verb: str
    payload: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a command (by its number) or a Call; `error` is the text of the error."""

    number: int
    value: Any = None
    error: str | None = None


Serve = Callable[[Call], Awaitable[Any]]


class TrainerFailed(Exception):
    """The trainer process failed to execute a command."""


class TrainerProcess:
    """The parent's side. Use as a context manager; call `ask` from one task at a time."""

    def __init__(self, config: TrainerConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config), daemon=True)
        self._process.start()
        theirs.close()
        self._number = 0  # number of the latest command; 0: the start
        self._is_started = False

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # the process has already ended
            self._pipe.send((0, Stop()))
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
        self._pipe.close()

    async def started(self) -> None:
        """Wait until the tensors exist. Idempotent."""
        if not self._is_started:
            self._value(await self._receive(START_TIMEOUT_S))
            self._is_started = True

    async def ask(self, command: object, *, timeout_s: float = 120.0, serve: Serve | None = None) -> Any:
        """Send a command and return its answer; `serve` executes the trainer's calls in the meantime.

        Raises TrainerFailed.
        """
        self._number += 1
        self._pipe.send((self._number, command))
        while True:
            message = await self._receive(timeout_s)
            if not isinstance(message, Call):
                return self._value(message)
            if serve is None:  # the caller gave up
                raise TrainerFailed(f"it called {message.verb}, and nobody serves it")
            try:
                answer = Answer(self._number, await serve(message))
            except Exception as error:
                answer = Answer(self._number, error=repr(error))
            self._pipe.send(answer)

    async def _receive(self, timeout_s: float) -> Any:
        while True:
            if not await asyncio.to_thread(self._pipe.poll, timeout_s):
                raise TrainerFailed(f"no answer within {timeout_s:g} s")
            try:
                message = self._pipe.recv()
            except EOFError as error:
                raise TrainerFailed("the trainer process is gone") from error
            if not isinstance(message, Answer) or message.number == self._number:
                return message  # other messages answer a command whose caller gave up

    @staticmethod
    def _value(answer: Answer) -> Any:
        if answer.error is not None:
            raise TrainerFailed(answer.error)
        return answer.value


class _Trainer:
    """The trainer inside the process."""

    def __init__(self, pipe: Connection, config: TrainerConfig) -> None:
        self._pipe = pipe
        self._config = config
        self._shape = SHAPES[config.shape]
        self._device = torch.device(config.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(1)  # the engine runs on the same CPUs
        self._tensors = make_tensors(
            self._shape, self._device, getattr(torch, config.dtype), version=config.version
        )
        self._sender = WeightSender(transport=config.transport)
        self._native: Any = None

    def close(self) -> None:
        self._sender.close()
        if self._native is not None:
            self._native.shutdown()

    def do(self, command: object) -> Any:
        match command:
            case SetVersion(version):
                return set_version(self._shape, self._tensors, version)
            case Offer():
                return self._offer()
            case Send(timeout_s):
                return self._sender.run(timeout_s)
            case NativeConnect(port):
                return self._connect(port)
            case NativeSend():
                return self._native.send_weights()
            case MeasureMemory():
                return _used_bytes()
        raise TypeError(f"not a command: {command!r}")

    def _offer(self) -> PushSource:
        outgoing = [
            Outgoing(
                TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), _given(tensor)
            )
            for name, tensor in self._tensors.items()
        ]
        return self._sender.offer(outgoing)

    def _connect(self, port: int) -> None:
        if self._config.engine == "sglang":
            from tests.benchmarks.baselines_sglang import SglangSender  # noqa: PLC0415

            # On CPU, the broadcast over gloo is the transport that works between any two processes.
            is_shared = self._config.transport == "ipc"
            self._native = SglangSender(self._tensors, _PipeClient(self._pipe).call, is_shared=is_shared)
            self._native.connect(port)
            return
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: PLC0415
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: PLC0415

        from examples.native_trainer import Tensors  # noqa: PLC0415

        info = NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=port, world_size=2, packed=True, rank=0)
        self._native = WeightTransferTrainerFactory.trainer_init(
            info, client=_PipeClient(self._pipe), source=Tensors(self._tensors)
        )


class _PipeClient:
    """Engine calls over the pipe; vLLM's weight-sync client."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()  # vLLM calls from two threads alternately

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        self.call("shutdown_weight_transfer_engine", None)

    def start_weight_update(self) -> None:
        self.call("start_weight_update", None)

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)

    def call(self, verb: str, payload: Any) -> None:
        """Call the engine and wait for the result. Raises RuntimeError."""
        with self._lock:
            self._pipe.send(Call(verb, payload))
            answer = self._pipe.recv()
        if answer.error is not None:
            raise RuntimeError(f"{verb}: {answer.error}")


def _given(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _used_bytes() -> list[int]:
    if not torch.cuda.is_available():
        return []
    pairs = [torch.cuda.mem_get_info(n) for n in range(torch.cuda.device_count())]
    return [total - free for free, total in pairs]


def _serve(pipe: Connection, config: TrainerConfig) -> None:
    try:
        trainer = _Trainer(pipe, config)
        _used_bytes()  # creates its contexts now, so that memory use does not grow later
        pipe.send(Answer(0))
    except Exception as error:
        pipe.send(Answer(0, error=repr(error)))
        return
    try:
        while True:
            number, command = pipe.recv()
            if isinstance(command, Stop):
                return
            try:
                answer = Answer(number, trainer.do(command))
            except Exception as error:
                answer = Answer(number, error=repr(error))
            pipe.send(answer)
    except EOFError:
        pass  # the parent has ended
    finally:
        trainer.close()
