"""TRL's client of a vLLM server, and its weight sender. vLLM is the project's, and gloo replaces NCCL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[4] / ".venv" / "lib" / "python3.11" / "site-packages"))

import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors.torch import load_file
from trl.experimental.async_grpo import weight_transfer
from trl.experimental.async_grpo.vllm_client import VLLMClient as ControlClient
from trl.generation.vllm_client import VLLMClient
from verbs import NEVER, error_of, frozen, serve
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from tests.servers.recompute import POLICY
from tests.servers.weight_transfer.group_trainer import GROUP, described, joined, runs


def open_endpoint(info: dict[str, Any]) -> dist.ProcessGroup:
    return joined(GROUP, info["master_port"], info["world_size"])


def broadcast(iterator: Any, group: dist.ProcessGroup, **_: Any) -> None:
    for data in runs([tensor for _, tensor in iterator], DEFAULT_PACKED_BUFFER_SIZE_BYTES):
        dist.broadcast(data, src=0, group=group)


weight_transfer.open_trainer_endpoint = open_endpoint
weight_transfer.packed_nccl_broadcast_producer = broadcast


class Trl:
    """The client that `GRPOTrainer` samples with, and the sender that `AsyncGRPOTrainer` updates with."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        torch.set_num_threads(1)
        PartialState()  # as its trainers do, because their logger requires it
        self.prompts = prompts
        self.client = VLLMClient(base_url=url)
        self.tensors = load_file(POLICY / "v1" / "model.safetensors")
        self.weights = weight_transfer.WeightTransferClient(ControlClient(url), described(self.tensors))

    def rollouts(self, num_tokens: int = 16, **asked: Any) -> dict[str, Any]:
        """Sample all prompts in one call, with logprobs."""
        said = self.client.generate(self.prompts, max_tokens=num_tokens, generation_kwargs=asked)
        assert said["prompt_ids"] == self.prompts
        for ids, logprobs, named in zip(
            said["completion_ids"], said["logprobs"], said["logprob_token_ids"], strict=True
        ):
            assert [[one] for one in ids] == named
            assert len(logprobs) == len(ids)
        return {"served": list(zip(self.prompts, said["completion_ids"], strict=True))}

    def update(self, _: str) -> dict[str, str]:
        """Update as `AsyncGRPOTrainer` does: in its own pause, with all tensors packed."""
        self.weights.init_weight_transfer()
        self.weights.pause()
        self.weights.send_weights(iter(self.tensors.items()))
        self.weights.resume()
        return {}

    def pause(self) -> dict[str, Any]:
        self.weights.pause()
        return frozen(self.rollouts, self.weights.resume)

    def refused(self) -> dict[str, str]:
        return error_of(lambda: self.rollouts(weight_version={"min_version": NEVER}))

    def killed(self) -> dict[str, Any]:
        return self.rollouts(900, ignore_eos=True)


serve(Trl)
