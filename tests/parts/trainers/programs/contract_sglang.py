"""Requests of slime and Miles, which are not usable packages: our implementation of their published code.

python contract_sglang.py URL PROMPTS {slime,miles}, in the project's environment; gloo replaces NCCL.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file
from verbs import NEVER, serve

from tests.parts.contracts.sglang_group_trainer import SglangTrainer
from tests.parts.contracts.test_sglang_dialect import Sample, SlimeLikeTrainer
from tests.servers.recompute import POLICY


class Sglang:
    """A trainer with the service as its router and its only engine."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        torch.set_num_threads(1)
        self.url, self.prompts = url, prompts
        self.is_miles = sys.argv[3] == "miles"

    def run(self, work: Callable[[SlimeLikeTrainer, list[Sample]], Awaitable[None]]) -> dict[str, Any]:
        samples = [Sample(uuid.uuid4().hex, list(prompt)) for prompt in self.prompts]

        async def main() -> None:
            async with aiohttp.ClientSession() as http:
                await work(SlimeLikeTrainer(http, self.url), samples)

        asyncio.run(main())
        return {"served": [(sample.prompt, sample.response) for sample in samples]}

    def rollouts(self, num_tokens: int = 16) -> dict[str, Any]:
        async def work(trainer: SlimeLikeTrainer, samples: list[Sample]) -> None:
            await trainer.attach()
            await asyncio.gather(*(trainer.generate(sample, num_tokens) for sample in samples))
            assert {sample.status for sample in samples} == {"truncated"}

        return self.run(work)

    def update(self, version: str) -> dict[str, str]:
        """Push all tensors in a pause: plain and without an end (slime), or flat and with an end (Miles)."""
        trainer = SglangTrainer(self.url)
        trainer.join()
        tensors = load_file(POLICY / "v1" / "model.safetensors")
        trainer.round(tensors, int(version), is_flat=self.is_miles, has_session=self.is_miles)
        trainer.leave()
        return {}

    def pause(self) -> dict[str, Any]:
        """Pause and resume. Calls end with their tokens and are resent (slime), or wait and continue (Miles)."""

        async def work(trainer: SlimeLikeTrainer, samples: list[Sample]) -> None:
            running = [asyncio.create_task(trainer.generate(sample, 300)) for sample in samples]
            await asyncio.sleep(0.2)
            await trainer.control("/pause_generation", **({"mode": "in_place"} if self.is_miles else {}))
            if not self.is_miles:
                await asyncio.gather(*running)
                assert {sample.status for sample in samples} == {"aborted"}
                running = [asyncio.create_task(trainer.generate(sample, 300)) for sample in samples]
            await asyncio.sleep(0.3)
            assert not any(one.done() for one in running)
            await trainer.control("/continue_generation")
            await asyncio.gather(*running)
            assert {(sample.status, len(sample.response)) for sample in samples} == {("truncated", 300)}

        return self.run(work)

    def refused(self) -> dict[str, str]:
        found: dict[str, str] = {}

        async def work(trainer: SlimeLikeTrainer, samples: list[Sample]) -> None:
            asked = {"input_ids": samples[0].prompt, "weight_version": {"min_version": NEVER}}
            found["refused"] = repr(await trainer.post("/generate", asked))

        self.run(work)
        return found

    def killed(self) -> dict[str, Any]:
        return self.rollouts(900)


serve(Sglang)
