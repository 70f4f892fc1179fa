"""A trainer with its own broadcast group that uses SGLang's verbs, like slime and Miles; gloo replaces NCCL.

python -m tests.parts.contracts.sglang_group_trainer URL ORDER
    ORDER (JSON): {"folder": a checkpoint, "version": the first, "rounds": 1, "parts": 1, "is_flat": false,
        "has_session": false}
    stdout: the served version after each round, a line for each
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.servers.weight_transfer.group_trainer import Trainer, described, free_port, joined

GROUP = "slime-pp_0"


class SglangTrainer(Trainer):
    """The requests and the group of one trainer."""

    def join(self, backend: str = "gloo") -> None:
        world_size, port = 1 + self.call("GET", "/server_info")["tp_size"], free_port()
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
        joining = self.begin("/init_weights_update_group", {**body, "group_name": GROUP, "backend": backend})
        self.group = joined(GROUP, port, world_size, backend)
        joining.result()

    def update(self, tensors: Mapping[str, torch.Tensor], version: int, *, is_flat: bool) -> None:
        told = described(tensors)
        body = {"names": told["names"], "dtypes": told["dtype_names"], "shapes": told["shapes"]}
        body |= {"group_name": GROUP, "flush_cache": False, "weight_version": str(version)}
        if is_flat:
            body["load_format"] = "flattened_bucket"
        receiving = self.begin("/update_weights_from_distributed", body)
        data = list(tensors.values())
        if is_flat:
            data = [torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in data])]
        for one in data:
            dist.broadcast(one, src=0, group=self.group)
        receiving.result()

    def round(
        self, tensors: Mapping[str, torch.Tensor], version: int, parts: int = 1, *, is_flat: bool, has_session: bool
    ) -> None:
        """Push all tensors during a pause. Without a session, the end of the pause ends the update."""
        self.call("POST", "/pause_generation", {"mode": "in_place"})
        self.call("GET", "/flush_cache")
        if has_session:
            self.call("POST", "/begin_weight_update", {"selector": "all"})
        names, size = list(tensors), math.ceil(len(tensors) / parts)
        for first in range(0, len(names), size):
            part = {name: tensors[name] for name in names[first : first + size]}
            self.update(part, version, is_flat=is_flat)
        if has_session:
            self.call("POST", "/end_weight_update", {})
        self.call("POST", "/continue_generation", {})

    def leave(self) -> None:
        self.call("POST", "/destroy_weights_update_group", {"group_name": GROUP})


def main(url: str, order: dict[str, Any]) -> None:
    trainer = SglangTrainer(url)
    tensors = load_file(Path(order["folder"]) / "model.safetensors")
    options = {"parts": 1, "is_flat": False, "has_session": False}
    options |= {name: order[name] for name in options.keys() & order.keys()}
    trainer.join()
    for version in range(order["version"], order["version"] + order.get("rounds", 1)):
        trainer.round(tensors, version, **options)
        print(trainer.call("GET", "/get_weight_version")["weight_version"], flush=True)
    trainer.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]))
