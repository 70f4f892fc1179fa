"""vLLM's own trainer helper as the trainer of a service: by CUDA IPC, by NCCL, and by gloo where there is no GPU.

Everything but gloo's group is vLLM's: the order of the verbs, their bodies, the packing and the handles.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from typing import Any

import requests
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_common import worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferInitInfo,
)

PACKED_BYTES = 1 << 30


class Tensors(WeightSource):
    """Tensors by name; they may change between two updates."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def _metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    iter_full = __iter__  # its name from vLLM 0.33 on, where `metadata` is no method
    metadata: Any = cached_property(_metadata) if hasattr(WeightSource, "iter_full") else _metadata


class GlooTrainer(NCCLTrainerWeightTransferEngine):
    """vLLM's NCCL engine with a gloo group in the place of its communicator."""

    @classmethod
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: Any, source: Any = None) -> GlooTrainer:
        engine = cls(client=client, source=source, packed=False)
        address, port, world_size = init_info.master_address, init_info.master_port, init_info.world_size
        info = NCCLWeightTransferInitInfo(
            master_address=address, master_port=port, rank_offset=1, world_size=world_size
        )
        with ThreadPoolExecutor(1) as calls:
            joining = calls.submit(client.init_weight_transfer_engine, worker_init_payload(info))
            store = dist.TCPStore(address, port, world_size, is_master=True, wait_for_workers=False)
            for prefix in ("vllm", "vllm/", "cpu/"):  # as torch names the keys of a group
                store = dist.PrefixStore(prefix, store)
            engine.model_update_group = dist.ProcessGroupGloo(store, 0, world_size, timedelta(seconds=60))
            joining.result()
        return engine

    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.contiguous(), 0).wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def native_trainer(
    url: str, tensors: Mapping[str, torch.Tensor], kind: str | None = None, client: Any = None
) -> Any:
    """Have vLLM's trainer engine join the service, by vLLM's client or another one of its four methods.

    `send_weights` makes one whole update of it. `kind` is `native-ipc`, `native-nccl` or `native-gloo`; None: as
    the machine allows.
    """
    kind = kind or ("native-nccl" if torch.cuda.is_available() else "native-gloo")
    use_device_of(tensors)
    client, source = client or HTTPVLLMWeightSyncClient(url), Tensors(tensors)
    if kind == "native-ipc":
        by_ipc = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=PACKED_BYTES)
        return WeightTransferTrainerFactory.trainer_init(by_ipc, client=client, source=source)
    world_size = 1 + requests.get(f"{url}/get_world_size", timeout=30).json()["world_size"]
    init = NCCLTrainerInitInfo("127.0.0.1", free_port(), world_size, rank=0)
    if kind == "native-gloo":
        return GlooTrainer.trainer_init(init, client=client, source=source)
    return WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)


def send_weights(trainer: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Update the service by the trainer's tensors."""
    use_device_of(tensors)
    trainer.send_weights()


def use_device_of(tensors: Mapping[str, torch.Tensor]) -> None:
    """Make the tensors' device the thread's own: NCCL's ranks are on it, whatever thread makes them."""
    if (device := next(iter(tensors.values())).device).type == "cuda":
        torch.cuda.set_device(device)
