"""A mixed fleet on the shipped policy: one task set, two kinds of engines, a weight update in the middle.

    python -m tests.gpu.mixed_fleet --paths '' /stacks/sglang --out runs/mixed_fleet.json
    python -m tests.gpu.mixed_fleet --kinds vllm vllm --device cpu --samples 1

One replica of each kind, each on its own GPU. `--paths` gives for each kind a folder of packages that precedes the
service's own on its replica's PYTHONPATH; empty: none. Every trajectory is then recomputed by transformers in
float32, on exactly the recorded ids, under the version that each span names. The run passes if the mean absolute
difference is below 0.05 for the tokens of each kind, each kind sampled turns, trajectories have tokens of both
versions, and nothing is incomplete.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentloop.client.client import RolloutClient
from agentloop.types import Trajectory
from agentloop_servers.config.service import CHECKOUT, ServiceConfig
from agentloop_servers.local import running_service
from tests.benchmarks.report import finish, table
from tests.gpu.recompute import MAX_DIFFERENCE, roll_out_over_update
from tests.servers.recompute import POLICY, difference

SOURCES = (CHECKOUT, CHECKOUT / "servers", CHECKOUT / "tools")


@dataclass(frozen=True, slots=True)
class KindOutcome:
    """Results of one engine pool. Differences are mean absolute ones, in nats."""

    name: str
    engine: str
    num_turns: int
    num_tokens: int
    difference_named: float
    difference_other: float  # under the other version than the span's


def config_of(options: argparse.Namespace) -> ServiceConfig:
    """Return a config with one replica of each kind, on v0."""
    is_cpu = options.device == "cpu"
    engines = []
    for number, (kind, folder) in enumerate(zip(options.kinds, options.paths, strict=True)):
        variables = {"PYTHONPATH": os.pathsep.join([*map(str, SOURCES), folder])}
        engines.append(
            {
                "name": f"{kind}-{number}",
                "kind": kind,
                "device": options.device,
                "dtype": "float32" if is_cpu else "bfloat16",
                "max_running": 32 if is_cpu else 256,
                "block_size": 32 if is_cpu else 16,
                "kv_cache_mib": 256 if is_cpu else 4096,
                "gpu_memory_utilization": 0.2,
                "num_cpus": 0.5 if is_cpu else 1.0,
                "enforce_eager": options.eager,
                "environment": {"runtime_env": {"env_vars": variables}} if folder else None,
            }
        )
    return ServiceConfig.model_validate(
        {"model": str(POLICY / "v0"), "model_version": 0, "kv_policy": "recompute", "engines": engines}
    )


def by_entry(records: Sequence[Trajectory], names: Sequence[str]) -> list[KindOutcome]:
    """Recompute all records, and assign the differences to the engine pools whose replicas sampled the tokens."""
    named: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    other: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    engines: defaultdict[str, set[str]] = defaultdict(set)
    for record in records:
        path = record.path
        row: dict[str, Any] = {
            field: getattr(path, field) for field in ("prompt_ids", "response_ids", "response_mask", "logprobs")
        }
        found = difference({**row, "weight_versions": [asdict(span) for span in path.weight_versions]})
        start = 0  # sampled tokens only, as `difference` returns them
        for turn in path.turns:
            end = start + int(path.response_mask[turn.start : turn.end].sum())
            entry = next(name for name in names if turn.replica_id.startswith(f"{name}-"))
            engines[entry].add(turn.engine)
            named[entry].append(found.named[start:end])
            other[entry].append(found.other[start:end])
            start = end
    return [
        KindOutcome(
            name,
            "/".join(sorted(engines[name])),
            len(named[name]),
            sum(map(len, named[name])),
            float(np.concatenate([*named[name], []]).mean()) if named[name] else float("nan"),
            float(np.concatenate([*other[name], []]).mean()) if other[name] else float("nan"),
        )
        for name in names
    ]


async def measure(options: argparse.Namespace, run_dir: Path) -> tuple[list[Trajectory], float, int]:
    """Roll out; return also the update's longest pause in ms and the number of replicas. Raises TimeoutError."""
    async with (
        asyncio.timeout(options.deadline_s),
        running_service(config_of(options), run_dir) as url,
        RolloutClient(url) as client,
    ):
        while sum(one.state == "ready" for one in (await client.status()).replicas) < len(options.kinds):
            await asyncio.sleep(0.5)
        records, stall_ms, _ = await roll_out_over_update(client, options)
        status = await client.status()
    return records, stall_ms, sum(one.weight_version == 1 for one in status.replicas)


def main() -> None:
    """Print the outcome; exit with 1 if the run does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs=2, choices=("vllm", "sglang"), default=["vllm", "sglang"])
    parser.add_argument("--paths", nargs=2, default=["", ""], metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tasks", type=int, help="of the shipped ones; else all")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: the engines start sooner")
    parser.add_argument("--deadline-s", type=float, default=400.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as run_dir:
        records, stall_ms, num_updated = asyncio.run(measure(options, Path(run_dir)))
    names = [f"{kind}-{number}" for number, kind in enumerate(options.kinds)]
    kinds = by_entry(records, names)
    num_incomplete = sum(not record.is_complete for record in records)
    num_mixed = sum(len(record.versions) > 1 for record in records)
    is_right = (
        all(
            one.num_turns > 0
            and one.engine == kind
            and one.difference_named < MAX_DIFFERENCE < one.difference_other
            for one, kind in zip(kinds, options.kinds, strict=True)
        )
        and num_incomplete == 0
        and num_mixed > 0
        and num_updated == len(names)
    )
    facts = {
        "trajectories, all recomputed": len(records),
        "incomplete": num_incomplete,
        "with tokens of both versions": num_mixed,
        "moved between kinds": sum(len({turn.engine for turn in one.path.turns}) > 1 for one in records),
        "replicas at the new version": num_updated,
        "longest stall of the update, ms": round(stall_ms, 1),
    }
    verdict = "RIGHT" if is_right else "WRONG"
    tables = {
        f"{verdict}: a mixed fleet, {options.device}": table(("", ""), list(facts.items())),
        "By entry": table(tuple(asdict(kinds[0])), [tuple(asdict(one).values()) for one in kinds]),
    }
    finish("Mixed fleet", tables, {"verdict": verdict, "facts": facts, "kinds": kinds}, options.out)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
