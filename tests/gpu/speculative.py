"""Speculative decoding of an engine: speed by load, acceptance rate, and logprobs by an independent model.

    python -m tests.gpu.speculative                                # without drafts, and with them at any load
    python -m tests.gpu.speculative --arms plain,32                # with them up to 32 running requests
    python -m tests.gpu.speculative --arms plain,512 --logprobs-mode both
    python -m tests.gpu.speculative --device cpu --shape tiny --at-once 1 8 --arms plain,8 --tokens 64

The weights are random, and the layers add little to the residual stream, so the model repeats its last token: most
of the time at temperature 1 (`repeats`), hardly ever at 2 (`wanders`). Each load is a burst of as many requests.
The run passes if the recorded logprobs of the arms with drafts are as close to those that transformers computes
from the same weights, in the same precision, as those of the arm without.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentloop.types import GenerateRequest, Generation, SamplingParams
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.vllm.config import Speculative, VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.engines.vllm.process import SchedulerStats
from agentloop_verify.transformers_reference import ReferenceModel
from tests.benchmarks.report import finish, say, table
from tests.benchmarks.shapes import SHAPES, Shape, make_tensors, random_prompts
from tests.gpu.policy import write_policy

CONTEXT_TOKENS = 1024
PROMPT_TOKENS = 64
TEMPERATURES = {"repeats": 1.0, "wanders": 2.0}
LAYER_SHARE = 1 / 16  # scale of the layers' contribution in `make_tensors`
NUM_RECOMPUTED = 8  # records per load
# Limits of mean and worst difference, relative to the plain arm, and in nats.
NEAR, FAR = ((1.5, 0.005), (2.0, 0.05))


class DraftStats(SchedulerStats):
    """Also counts drafts."""

    num_drafted = num_accepted = 0

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        super().record(scheduler_stats, iteration_stats)
        found = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if found is not None:
            self.num_drafted += found.num_draft_tokens
            self.num_accepted += found.num_accepted_tokens


class CountingEngine(VllmEngine):
    """An engine whose drafts are counted."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self._process.scheduler_stats = self.drafts = DraftStats()


@dataclass(frozen=True, slots=True)
class Burst:
    """One load of one arm. Gaps are absolute differences of logprobs, in nats."""

    arm: str
    prompts: str
    num_at_once: int
    tokens_per_s: float
    accepted: float | None  # share of the drafts; None: no drafts
    tokens_per_step: float  # per request
    mean_gap: float = 0.0
    worst_gap: float = 0.0


def write_target(shape: Shape, folder: Path, device: str) -> Path:
    """Write a checkpoint that repeats itself."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = make_tensors(shape, torch.device(device), dtype, version=0)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= LAYER_SHARE
    name = str(dtype).removeprefix("torch.")
    return write_policy(shape, tensors, folder, max_context_tokens=CONTEXT_TOKENS, dtype=name)


def engine_config(options: argparse.Namespace, arm: str, model: Path) -> VllmConfig:
    """Return the arm's engine config: `plain`, or the number of running requests up to which it drafts."""
    is_cpu = options.device == "cpu"
    speculative = None
    if arm != "plain":
        speculative = Speculative(options.num_tokens, max_running=int(arm))
    return VllmConfig(
        model=str(model),
        initial_version=0,
        device=options.device,
        dtype="float32" if is_cpu else "bfloat16",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=max(options.at_once),
        block_size=32 if is_cpu else 16,
        kv_cache_memory_bytes=(256 if is_cpu else 32768) * 2**20,
        max_step_tokens=4096,  # fits the drafts of 512 requests, and prefill
        max_graph_tokens=1024,
        enforce_eager=options.eager,
        logprobs_mode=LogprobsMode(options.logprobs_mode),
        speculative=speculative,
    )


async def burst(
    engine: VllmEngine, shape: Shape, prompts: str, num_at_once: int, num_tokens: int
) -> tuple[list[tuple[GenerateRequest, Generation]], float]:
    """Run `num_at_once` requests concurrently; returns the seconds until all have ended."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=TEMPERATURES[prompts])
    ids = random_prompts(shape, num_at_once, PROMPT_TOKENS, seed=time.monotonic_ns() % 2**31)
    requests = [GenerateRequest(f"{time.monotonic_ns()}-{n}", one, sampling) for n, one in enumerate(ids)]
    began_at = time.perf_counter()
    answers = await asyncio.gather(*map(engine.generate, requests))
    return list(zip(requests, answers, strict=True)), time.perf_counter() - began_at


Answers = list[tuple[Burst, list[tuple[GenerateRequest, Generation]]]]


async def run_arm(options: argparse.Namespace, arm: str, model: Path) -> Answers:
    """Start the arm's engine, and run each load."""
    shape, found = SHAPES[options.shape], []
    engine = CountingEngine(engine_config(options, arm, model))
    stats = engine.drafts
    try:
        await engine.start()
        say(f"{arm} is up")
        for num_at_once in options.at_once:  # the first steps of each size compile kernels
            await burst(engine, shape, "repeats", num_at_once, 16)
        for prompts in TEMPERATURES:
            for num_at_once in options.at_once:
                before = stats.num_drafted, stats.num_accepted, stats.num_steps
                answers, seconds = await burst(engine, shape, prompts, num_at_once, options.tokens)
                drafted, accepted = stats.num_drafted - before[0], stats.num_accepted - before[1]
                one = Burst(
                    arm,
                    prompts,
                    num_at_once,
                    tokens_per_s=num_at_once * options.tokens / seconds,
                    accepted=accepted / drafted if drafted else None,
                    tokens_per_step=options.tokens / (stats.num_steps - before[2]),
                )
                say(str(one))
                found.append((one, answers[:NUM_RECOMPUTED]))
    finally:
        await engine.close()
    return found


def recomputed(model: Path, device: str, found: Answers) -> list[Burst]:
    """Add the differences between the recorded logprobs and the independent model's."""
    reference = ReferenceModel(model, device=device, dtype="float32" if device == "cpu" else "bfloat16")
    bursts = []
    for one, answers in found:
        gaps = []
        for request, answer in answers:
            places = range(PROMPT_TOKENS, PROMPT_TOKENS + len(answer.token_ids))
            ids, temperatures = (
                (*request.token_ids, *answer.token_ids),
                [request.sampling.temperature] * len(places),
            )
            gaps.append(np.abs(reference.logprobs(ids, places, temperatures) - answer.logprobs))
            if answer.raw_logprobs:
                gaps.append(np.abs(reference.logprobs(ids, places) - answer.raw_logprobs))
        every = np.concatenate(gaps)
        fields = {name: getattr(one, name) for name in Burst.__dataclass_fields__}
        bursts.append(Burst(**fields | {"mean_gap": float(every.mean()), "worst_gap": float(every.max())}))
    return bursts


def is_right(bursts: list[Burst]) -> bool:
    """Return True if arms with drafts are as close as the plain one, and one of them accepted drafts."""
    for prompts in TEMPERATURES:
        plain = [one for one in bursts if one.arm == "plain" and one.prompts == prompts]
        others = [one for one in bursts if one.arm != "plain" and one.prompts == prompts]
        for name, (share, nats) in (("mean_gap", NEAR), ("worst_gap", FAR)):
            most = share * max(getattr(one, name) for one in plain) + nats
            if any(not getattr(one, name) <= most for one in others):  # NaN is wrong too
                return False
    return any(one.accepted for one in bursts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--arms", default="plain,512", help="plain, or the requests up to which there are drafts")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--tokens", type=int, default=256, help="sampled for each prompt")
    parser.add_argument("--num-tokens", type=int, default=4, help="drafts of a request in a step")
    parser.add_argument("--logprobs-mode", choices=("sampled", "both"), default="sampled")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: the engine starts sooner")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: Answers = []
    with tempfile.TemporaryDirectory() as work:
        shape = SHAPES[options.shape]
        model = write_target(shape, Path(work) / "target", options.device)
        torch.cuda.empty_cache()  # the engines are in other processes
        say("the model is written")
        for arm in options.arms.split(","):
            found += asyncio.run(run_arm(options, arm, model))
        bursts = recomputed(model, options.device, found)
    verdict = "RIGHT" if is_right(bursts) else "WRONG"
    columns = tuple(Burst.__dataclass_fields__)
    rows = [tuple("-" if getattr(one, name) is None else getattr(one, name) for name in columns) for one in bursts]
    heading = f"{verdict}: {options.shape}, {options.device}, {options.logprobs_mode}"
    finish(
        "Speculative decoding", {heading: table(columns, rows)}, {"verdict": verdict, "bursts": bursts}, options.out
    )
    return 0 if verdict == "RIGHT" else 1


if __name__ == "__main__":
    sys.exit(main())
