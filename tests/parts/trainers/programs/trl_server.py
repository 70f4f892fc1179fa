"""Trains the shipped policy with TRL's GRPOTrainer in `vllm_mode="server"`, with the service as the vLLM server.

python trl_server.py URL NUM_STEPS

No line of ours is in the trainer: it samples and pushes by its own client. On a CPU gloo replaces NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_HOST_IP"] = "127.0.0.1"
sys.path.append(str(Path(__file__).parents[4] / ".venv" / "lib" / "python3.11" / "site-packages"))

import torch
import torch.distributed as dist
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from tests.servers.weight_transfer.group_trainer import GROUP, joined, runs

ROOT = Path(__file__).parents[4]
_init_communicator = vllm_client.VLLMClient.init_communicator


def init_communicator(client: vllm_client.VLLMClient, device: Any = 0) -> None:
    """Join the workers' group from a CPU, which TRL refuses because its own group is NCCL's."""
    _init_communicator(client, torch.device("cuda"))  # without an index the device is not used


def open_endpoint(info: dict[str, Any]) -> dist.ProcessGroup:
    return joined(GROUP, info["master_port"], info["world_size"])


def broadcast(iterator: Any, group: dist.ProcessGroup, **_: Any) -> None:
    for data in runs([tensor.detach() for _, tensor in iterator], DEFAULT_PACKED_BUFFER_SIZE_BYTES):
        dist.broadcast(data, src=0, group=group)


vllm_client.VLLMClient.init_communicator = init_communicator
vllm_client.open_trainer_endpoint = open_endpoint
vllm_client.packed_nccl_broadcast_producer = broadcast


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Prefer short answers."""
    return [-len(completion[0]["content"]) / 100 for completion in completions]


def main(url: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    questions = [[{"role": "user", "content": f"What is {number} + {number}?"}] for number in range(8)]
    config = GRPOConfig(
        tempfile.mkdtemp(),
        max_steps=num_steps,
        learning_rate=1e-4,
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=32,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        str(ROOT / "examples" / "tiny_policy" / "v0"),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": questions}),
        reward_funcs=reward,
    )
    trainer.train()
    trainer.vllm_generation.vllm_client.communicator = None
    print(json.dumps({"history": trainer.state.log_history}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
