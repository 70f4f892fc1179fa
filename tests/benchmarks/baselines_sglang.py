"""SGLang's own ways of updating weights, on an unmodified SGLang (0.5.17).

`update_weights_from_distributed`: the trainer and the schedulers are one process group, and each bucket of tensors
is one broadcast (`flattened_bucket`). `update_weights_from_tensor`: a bucket's CUDA IPC handle travels with the
request. Both run while generation is paused in place, as SGLang documents it for requests in flight. A pause by
abort checks only once a second whether the last request has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from agentloop_servers.local import free_port
from agentloop_sglang.config import SglangConfig, prepare_environment, server_arguments
from tests.benchmarks.baselines import NATIVE_TIMEOUT_S, PlainEngine
from tests.benchmarks.streams import Piece
from tests.benchmarks.trainer import Call, NativeConnect, NativeSend, TrainerProcess

BUCKET_BYTES = 2**30
GROUP = "benchmark"
ENDED_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together: their names, dtypes and shapes, and the payload unless it is broadcast."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    payload: bytes | None = None


class PlainSglang(PlainEngine):
    """SGLang's own Engine."""

    def __init__(self, config: SglangConfig) -> None:
        self._config = config
        self._engine: Any = None
        self._children: list[psutil.Process] = []
        self._clears_cache = False

    async def start(self) -> None:
        prepare_environment(self._config)
        from sglang import Engine  # noqa: PLC0415

        arguments = server_arguments(self._config)
        before = set(psutil.Process().children(recursive=True))
        self._engine = Engine(**arguments)
        self._children = [one for one in psutil.Process().children(recursive=True) if one not in before]

    async def close(self) -> None:
        """Stop its processes; its own shutdown would stop the trainer's too."""
        engine, self._engine = self._engine, None
        if engine is not None:
            vars(engine.tokenizer_manager)["_subprocess_watchdog"].stop()  # it would end this process with them
        for child in self._children:
            child.terminate()
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._children, ENDED_TIMEOUT_S)
        for child in alive:
            child.kill()
        self._children = []

    async def connect(self, trainer: TrainerProcess) -> None:
        await trainer.ask(NativeConnect(free_port("127.0.0.1")), timeout_s=NATIVE_TIMEOUT_S, serve=self.serve)

    async def stream(self, request_id: str, prompt: tuple[int, ...]) -> AsyncIterator[Piece]:
        room = self._config.max_model_len - len(prompt)
        num_told = 0
        async for output in await self._generate(request_id, prompt, room, temperature=1.0, is_streamed=True):
            ids = output["output_ids"]
            yield Piece(tuple(ids[num_told:]))
            num_told = len(ids)

    async def greedy(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[tuple[int, ...]]:
        calls = (
            self._generate(f"greedy-{n}", prompt, num_tokens, temperature=0.0, is_streamed=False)
            for n, prompt in enumerate(prompts)
        )
        return [tuple(answer["output_ids"]) for answer in await asyncio.gather(*calls)]

    async def abort(self, request_id: str) -> None:
        self._engine.tokenizer_manager.abort_request(request_id)

    async def pause(self, *, is_aborting: bool, is_cache_cleared: bool) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput  # noqa: PLC0415

        self._clears_cache = is_cache_cleared  # during the update
        mode = "abort" if is_aborting else "in_place"
        await self._engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput  # noqa: PLC0415

        await self._engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput())

    async def transfer(self, trainer: TrainerProcess) -> None:
        await trainer.ask(NativeSend(), timeout_s=NATIVE_TIMEOUT_S, serve=self.serve)

    async def serve(self, call: Call) -> None:
        """Execute a call from the trainer on the engine. Raises RuntimeError for a failure that SGLang reports."""
        from sglang.srt.managers import io_struct  # noqa: PLC0415

        manager = self._engine.tokenizer_manager
        match call.verb, call.payload:
            case "connect", (int(port), str(backend)):
                group = io_struct.InitWeightsUpdateGroupReqInput(
                    master_address="127.0.0.1",
                    master_port=port,
                    rank_offset=1,
                    world_size=1 + self._config.tensor_parallel_size,
                    group_name=GROUP,
                    backend=backend,
                )
                found = await manager.init_weights_update_group(group, None)
            case "update", Bucket(names, dtypes, shapes, None):
                broadcast = io_struct.UpdateWeightsFromDistributedReqInput(
                    names=names,
                    dtypes=dtypes,
                    shapes=shapes,
                    group_name=GROUP,
                    load_format="flattened_bucket",
                    flush_cache=self._clears_cache,
                )
                found = await manager.update_weights_from_distributed(broadcast, None)
            case "update", Bucket(payload=bytes(payload)):
                handles = io_struct.UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=[payload] * self._config.tensor_parallel_size,
                    load_format="flattened_bucket",
                    flush_cache=self._clears_cache,
                )
                found = await manager.update_weights_from_tensor(handles, None)
            case _:
                raise ValueError(f"the trainer called {call.verb}")
        is_done, message = found
        if not is_done:
            raise RuntimeError(message)

    async def _generate(
        self, request_id: str, prompt: tuple[int, ...], num_tokens: int, *, temperature: float, is_streamed: bool
    ) -> Any:
        return await self._engine.async_generate(
            input_ids=list(prompt),
            sampling_params={"max_new_tokens": num_tokens, "temperature": temperature, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=-1,
            stream=is_streamed,
            rid=request_id,
        )


class SglangSender:
    """The trainer's side, in its process. With `is_shared`, the engine is on this device and maps the tensors."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], call: Callable[[str, Any], None], *, is_shared: bool
    ) -> None:
        self._tensors = tensors
        self._call = call
        self._is_shared = is_shared
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1)  # a call lasts as long as the engine takes part in the transfer

    def connect(self, port: int) -> None:
        """Open the process group, if tensors are broadcast."""
        if self._is_shared:
            return
        from sglang.srt.utils import init_custom_process_group  # noqa: PLC0415

        backend = "nccl" if next(iter(self._tensors.values())).is_cuda else "gloo"
        theirs = self._thread.submit(self._call, "connect", (port, backend))
        self._group = init_custom_process_group(
            backend=backend, init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=GROUP
        )
        theirs.result()

    def send_weights(self) -> None:
        """Send all tensors, bucket by bucket."""
        from sglang.srt.utils import MultiprocessingSerializer  # noqa: PLC0415
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions  # noqa: PLC0415
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # noqa: PLC0415

        for named in _buckets(self._tensors):
            names = [name for name, _ in named]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in named]
            bucket = FlattenedTensorBucket(named_tensors=named)
            flat, payload = bucket.get_flattened_tensor(), None
            if self._is_shared:
                monkey_patch_torch_reductions()
                told = {"flattened_tensor": flat, "metadata": bucket.get_metadata()}
                payload = MultiprocessingSerializer.serialize(told)
            shapes = [list(tensor.shape) for _, tensor in named]
            theirs = self._thread.submit(self._call, "update", Bucket(names, dtypes, shapes, payload))
            if not self._is_shared:
                torch.distributed.broadcast(flat, src=0, group=self._group)
            theirs.result()

    def shutdown(self) -> None:
        """Stop the thread; the group ends with the process."""
        self._thread.shutdown(wait=False)


def _buckets(tensors: dict[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if bucket and num_bytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    yield bucket
