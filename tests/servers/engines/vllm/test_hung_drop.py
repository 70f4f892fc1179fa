"""A vLLM that does not answer while a stage is dropped delays the next order only for a bounded time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentloop.engine.interface import PushSource, TensorInfo, TensorNames, WeightUpdate
from agentloop.errors import CheckpointUnreadable
from agentloop.values import codec
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.weights import vllm_weights
from agentloop_servers.weight_transfer.worker_calls import StageProgress, StageState

MODEL = Path(__file__).parents[4] / "examples" / "tiny_policy" / "v0"


class HungWorkers:
    """The calls that reach the workers. Every stage fails, and no drop returns."""

    is_up = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def label(self, version: int) -> None:
        raise AssertionError("nothing is committed")

    async def on_workers(self, method: str, *arguments: object) -> list[bytes]:
        self.calls.append(method)
        if method == "weights_drop":
            await asyncio.Event().wait()
        return [codec.encode(StageProgress(StageState.FAILED, "the sender is gone", None))]


async def test_a_drop_without_an_answer_holds_no_lock() -> None:
    process = HungWorkers()
    weights = vllm_weights(VllmConfig(str(MODEL), 0, device="cuda", control_timeout_s=0.05), process)  # type: ignore[arg-type]
    await weights.check()
    push = PushSource(
        ("127.0.0.1:1",), "t", (TensorInfo("w", "float32", (1,)),), TensorNames.RUNTIME, num_receivers=1
    )
    async with asyncio.timeout(30.0):
        for version in (1, 2):
            with pytest.raises(CheckpointUnreadable, match="the sender is gone") as refusal:
                await weights.stage(WeightUpdate(version, push=push))
            assert refusal.value.param == "push"
    assert process.calls == ["weights_stage", "weights_poll", "weights_drop"] * 2
