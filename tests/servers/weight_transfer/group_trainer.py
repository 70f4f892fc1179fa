"""A trainer with its own broadcast group, as a process that a test can kill; gloo replaces NCCL.

python -m tests.servers.weight_transfer.group_trainer URL ORDER
    ORDER (JSON): {"folder": a checkpoint, "version": null, "packed": 0, "parts": 1, "rounds": 1,
        "dies_after": null}
    stdout: the answer of `/finish_weight_update`, a line for each round

It sends vLLM's verbs in the order of vLLM's own helper, and creates the group as slime and Miles do.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

TIMEOUT = timedelta(seconds=30)
GROUP = "vllm"
REFUSED = 3  # the exit code after an error answer of the service


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def joined(name: str, port: int, world_size: int, backend: str = "gloo") -> dist.ProcessGroup:
    """Return rank 0 of a group that is not the default group, like SGLang's `init_custom_process_group`."""
    store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    store = dist.PrefixStore(name, store)
    group, _ = _new_process_group_helper(world_size, 0, [], backend, store, group_name=name, timeout=TIMEOUT)
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def runs(tensors: Sequence[torch.Tensor], packed_bytes: int) -> Iterator[torch.Tensor]:
    """Return the broadcasts of tensors: each one separately, or in buffers as vLLM's `pack_tensors` fills them."""
    if not packed_bytes:
        yield from tensors
        return
    waiting: list[torch.Tensor] = []
    for tensor in tensors:
        waiting.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(one.numel() for one in waiting) > packed_bytes:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
    }


class Trainer:
    """The requests and the group of one trainer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._calls = ThreadPoolExecutor(1)
        self.group: dist.ProcessGroup | None = None

    def begin(self, path: str, body: Any) -> Future[dict[str, Any]]:
        """Post during a collective of the group. A failure ends the process: the collective would not end."""

        def look(call: Future[dict[str, Any]]) -> None:
            if (error := call.exception()) is not None:
                print(error, file=sys.stderr, flush=True)
                os._exit(REFUSED)

        call = self._calls.submit(self.call, "POST", path, body)
        call.add_done_callback(look)
        return call

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from error

    def init(self, packed_bytes: int) -> None:
        world_size = 1 + self.call("GET", "/get_world_size")["world_size"]
        port = free_port()
        info: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        info |= {
            "world_size": world_size,
            "packed": packed_bytes > 0,
            "packed_buffer_size_bytes": packed_bytes or 1,
        }
        joining = self.begin("/init_weight_transfer_engine", {"init_info": info})
        self.group = joined(GROUP, port, world_size)
        joining.result()

    def send(self, tensors: Mapping[str, torch.Tensor], packed_bytes: int, dies_after: int | None = None) -> None:
        part = {"update_info": described(tensors)}
        receiving = self.begin("/update_weights", part)
        for number, data in enumerate(runs(list(tensors.values()), packed_bytes)):
            if number == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.broadcast(data, src=0, group=self.group)
        receiving.result()


def main(url: str, order: dict[str, Any]) -> None:
    trainer, packed_bytes = Trainer(url), order.get("packed", 0)
    tensors = load_file(Path(order["folder"]) / "model.safetensors")
    trainer.init(packed_bytes)
    for _ in range(order.get("rounds", 1)):
        trainer.call("POST", "/start_weight_update")
        names, size = list(tensors), math.ceil(len(tensors) / order.get("parts", 1))
        for first in range(0, len(names), size):
            part = {name: tensors[name] for name in names[first : first + size]}
            trainer.send(part, packed_bytes, order.get("dies_after"))
        version = order.get("version")
        finish = None if version is None else {"weight_version": str(version)}
        print(json.dumps(trainer.call("POST", "/finish_weight_update", finish)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]))
