"""Scores of given tokens against transformers, and the memory that they take, by length.

    python -m tests.benchmarks.scores                                      # the shipped policy, then 8k and 32k
    python -m tests.benchmarks.scores --lengths 1000 8000 --out runs/scores.json

Float32 on CPU, a service with one vLLM engine a model: the shipped policy up to its context, a random tiny model
beyond. `memory`: the most that the engine's processes have taken so far, in MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from agentloop.client.client import RolloutClient
from agentloop_servers.config import CHECKOUT, ServiceConfig
from agentloop_servers.local import running_service
from agentloop_servers.recompute import ReferenceModel
from tests.benchmarks.gpu_models import model_folder
from tests.benchmarks.report import finish, table
from tests.benchmarks.shapes import TOKENS_START

SHIPPED = CHECKOUT / "examples" / "tiny_policy" / "v1"
SHIPPED_CONTEXT = 1024
GOAL = 0.002


def folder_for(num_ids: int, work: Path) -> Path:
    """The folder of a model with room for so many ids."""
    if num_ids < SHIPPED_CONTEXT:
        return SHIPPED
    folder = work / f"tiny-{num_ids}"
    shutil.copytree(model_folder("tiny", "cpu"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": num_ids + 64}))
    return folder


def engine_mib() -> float:
    """The greatest resident memory so far of this host's largest vLLM process below us, in MiB."""
    ours = psutil.Process(os.getpid()).children(recursive=True)
    cores = [one for one in ours if any("VLLM::" in word for word in one.cmdline())]
    return max(_peak_kib(one.pid) for one in cores) / 1024


def _peak_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


async def compared(num_ids: int, work: Path) -> tuple[object, ...]:
    """A row: the length, the largest and mean difference, seconds of a score, and the memory before and after."""
    folder = folder_for(num_ids, work)
    engine = {"kind": "vllm", "device": "cpu", "dtype": "float32", "kv_cache_mib": 512, "num_cpus": 0.5}
    config = {"model": str(folder), "mode": "debug", "port": 0, "engine": engine}
    ids = random.Random(num_ids).choices(range(TOKENS_START, 1024), k=num_ids)
    async with running_service(ServiceConfig.model_validate(config), work / f"run-{num_ids}") as url:
        async with RolloutClient(url) as client:
            await client.score([ids[:64]])
            before_mib, began_at = engine_mib(), time.perf_counter()
            (found,) = await client.score([ids])
            took_s = time.perf_counter() - began_at
        after_mib = engine_mib()
    wanted = ReferenceModel(folder, device="cpu").logprobs(ids)
    difference = np.abs(np.asarray(found.logprobs) - wanted)
    return num_ids, float(difference.max()), float(difference.mean()), took_s, before_mib, after_mib


def main() -> None:
    """Print the table; exit with 1 if a score is further off than the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 8000, 32000])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rows = [asyncio.run(compared(num_ids, Path(work))) for num_ids in options.lengths]
    columns = ["ids", "largest difference", "mean", "seconds", "MiB before", "MiB after"]
    finish("Scores against transformers", {"": table(columns, rows)}, rows, options.out)
    if any(float(str(row[1])) > GOAL for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
