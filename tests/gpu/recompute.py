"""The shipped policy on a whole service: its success under each version, and its logprobs by an independent model.

    python -m tests.gpu.recompute --engine vllm --out runs/recompute.json
    python -m tests.gpu.recompute --device cpu --samples 1

Three rollouts: under v0, with v1 pushed midway, and under v1. The records are then recomputed by transformers in
float32, on exactly the recorded ids. The run passes if the mean absolute difference is below 0.05 under the version
that each span names, if there are trajectories of both versions, and if the success matches the CPU's: 47.5 % under
v0, within four standard errors, and at least 99 % under v1.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from agentloop.client.client import RolloutClient
from agentloop.client.rollout import load_tasks
from agentloop.types import Trajectory
from agentloop_servers.config.service import CHECKOUT, ServiceConfig
from agentloop_servers.local import running_service
from tests.benchmarks.report import finish, table
from tests.servers.recompute import POLICY, difference

TASKS = CHECKOUT / "examples" / "data" / "tasks.jsonl"
MAX_DIFFERENCE = 0.05  # mean absolute, of logprobs in bfloat16
V0_SUCCESS, V1_SUCCESS = 0.475, 0.99  # v0 on CPU in float32; minimum for v1
MAX_ERRORS = 4.0  # standard errors of the success under v0
NUM_RECOMPUTED = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of all rollouts. Differences are mean absolute ones, in nats."""

    num_trajectories: int
    num_incomplete: int
    num_mixed: int  # records with tokens of both versions
    success_v0: float
    success_v1: float
    num_v0: int
    difference_named: float
    difference_other: float  # under the other version than the span's
    stall_ms: float
    tokens_per_s: float  # in the rollout with the update

    @property
    def is_right(self) -> bool:
        error = math.sqrt(V0_SUCCESS * (1 - V0_SUCCESS) / self.num_v0)
        has_policy = abs(self.success_v0 - V0_SUCCESS) <= MAX_ERRORS * error and self.success_v1 >= V1_SUCCESS
        is_named = self.difference_named < MAX_DIFFERENCE < self.difference_other
        return has_policy and is_named and self.num_mixed > 0 and self.num_incomplete == 0


def service_config(options: argparse.Namespace) -> ServiceConfig:
    """Return a config with one replica of v0 and little memory: other parts may run on the same GPU."""
    is_cpu = options.device == "cpu"
    engine = {
        "kind": options.engine,
        "device": options.device,
        "dtype": "float32" if is_cpu else "bfloat16",
        "max_running": 32 if is_cpu else 256,
        "block_size": 32 if is_cpu else 16,
        "kv_cache_mib": 256 if is_cpu else 2048,
        "gpu_memory_utilization": 0.2,
        "tensor_parallel_size": options.tp,
        "num_cpus": 0.5 if is_cpu else 1.0,
        "enforce_eager": options.eager,
    }
    return ServiceConfig.model_validate(
        {"model": str(POLICY / "v0"), "model_version": 0, "kv_policy": "recompute", "engine": engine, "port": 0}
    )


async def roll_out(client: RolloutClient, options: argparse.Namespace) -> list[Trajectory]:
    """Roll out every task, with a fixed number of samples."""
    rollout = await client.submit(load_tasks(TASKS)[: options.tasks], num_samples=options.samples)
    return [record async for record in rollout]


async def roll_out_over_update(
    client: RolloutClient, options: argparse.Namespace
) -> tuple[list[Trajectory], float, float]:
    """Roll out, and push v1 once a third has ended; returns also the pause in ms, and tokens per second."""
    began_at = time.perf_counter()
    rollout = await client.submit(load_tasks(TASKS)[: options.tasks], num_samples=options.samples)
    records, updating = [], None
    async with asyncio.TaskGroup() as group:
        async for record in rollout:
            records.append(record)
            if updating is None and 3 * len(records) >= rollout.num_trajectories:
                updating = group.create_task(client.update_weights(str(POLICY / "v1"), version=1))
    seconds = time.perf_counter() - began_at
    assert updating is not None
    stall_ms = updating.result().stall_ms
    return records, stall_ms, sum(record.num_sampled_tokens for record in records) / seconds


def success(records: Sequence[Trajectory]) -> float:
    """Return the share of rewarded trajectories."""
    return sum(record.reward == 1.0 for record in records) / len(records)


def differences(records: Sequence[Trajectory]) -> tuple[float, float]:
    """Recompute the first of these records."""
    found = []
    for record in records[:NUM_RECOMPUTED]:
        path = record.path
        row = {name: getattr(path, name) for name in ("prompt_ids", "response_ids", "response_mask", "logprobs")}
        found.append(difference({**row, "weight_versions": [asdict(span) for span in path.weight_versions]}))
    named, other = (np.concatenate([getattr(one, name) for one in found]).mean() for name in ("named", "other"))
    return float(named), float(other)


async def measure(options: argparse.Namespace, run_dir: Path) -> Outcome:
    """Run all rollouts on one service. Raises TimeoutError at the deadline."""
    async with (
        asyncio.timeout(options.deadline_s),
        running_service(service_config(options), run_dir) as url,
        RolloutClient(url) as client,
    ):
        old = await roll_out(client, options)
        both, stall_ms, tokens_per_s = await roll_out_over_update(client, options)
        new = await roll_out(client, options)
    records = [*old, *both, *new]
    mixed = [record for record in both if len(record.versions) > 1]
    third = NUM_RECOMPUTED // 3
    named, other = differences([*mixed[:third], *old[:third], *new[:third]])
    return Outcome(
        num_trajectories=len(records),
        num_incomplete=sum(not record.is_complete for record in records),
        num_mixed=len(mixed),
        success_v0=success(old),
        success_v1=success(new),
        num_v0=len(old),
        difference_named=named,
        difference_other=other,
        stall_ms=stall_ms,
        tokens_per_s=tokens_per_s,
    )


def main() -> None:
    """Print the outcome; exit with 1 if the run does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tasks", type=int, help="of the shipped ones; else all")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: the engine starts sooner")
    parser.add_argument("--deadline-s", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as run_dir:
        outcome = asyncio.run(measure(options, Path(run_dir)))
    verdict = "RIGHT" if outcome.is_right else "WRONG"
    heading = f"{verdict}: shipped policy, {options.engine}, {options.device}"
    results = {"verdict": verdict, "outcome": outcome}
    finish("Recomputation", {heading: table(("", ""), list(asdict(outcome).items()))}, results, options.out)
    sys.exit(not outcome.is_right)


if __name__ == "__main__":
    main()
