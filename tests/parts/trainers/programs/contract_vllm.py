"""vLLM's own trainer helper, in the project's environment; gloo replaces NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from safetensors.torch import load_file
from verbs import serve

from examples.native_trainer import native_trainer
from tests.servers.recompute import POLICY


class Helper:
    """`HTTPVLLMWeightSyncClient` and the trainer engine that drives it."""

    def __init__(self, url: str, _: list[list[int]]) -> None:
        self.url = url
        self.tensors = load_file(POLICY / "v1" / "model.safetensors")
        self.trainer: Any = None

    def update(self, _: str) -> dict[str, str]:
        """Join the group, and send all tensors once."""
        self.trainer = native_trainer(self.url, self.tensors)
        self.trainer.send_weights()
        return {}

    def killed(self) -> dict[str, str]:
        """Send to a group that has lost a replica, which is refused, and then to a new group."""
        with pytest.raises(requests.HTTPError, match="409"):
            self.trainer.send_weights()
        return self.update("")


serve(Helper)
