"""The cost of following a store of published versions under load, compared with directory pushes.

    python -m tests.gpu.deltas --engine vllm --shape qwen3-4b --out runs/deltas.json
    python -m tests.gpu.deltas --engine vllm --device cpu --shape tiny --at-once 4       # a rehearsal

One replica, with requests running all the time. For 0.5 %, 3 % and 100 % changed bytes, a version is published as a
delta to the previous one and followed; then the folder that the host built from it is pushed as the next version.
Both measure the stage (for the delta including fetching, unpacking, checking and writing), the pause, and the time
until the replica serves the version; the delta also measures its size, and the seconds to encode and to store it.
The run passes if every update is served, no request fails, and the host's folder equals the published version byte
for byte. Needs eight times the checkpoint in `TMPDIR`: on a slow disk, disk writes dominate the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentloop.api.coordinator import UpdateReport
from agentloop.client.client import RolloutClient
from agentloop.client.publish import PublishOptions, PublishReport, TensorBytes, open_publisher
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import running_service
from agentloop_store.publisher import tensors_of
from tests.benchmarks.gpu_models import model_folder
from tests.benchmarks.report import finish, table
from tests.benchmarks.shapes import SHAPES, random_prompts

SHARES = (0.005, 0.03, 1.0)
RUN = "deltas"


@dataclass(frozen=True, slots=True)
class Row:
    """One version through the store, and the same through a directory. Times in seconds, pauses in milliseconds."""

    share: float
    size: float  # as a share of the checkpoint's size
    encode_s: float
    upload_s: float
    prepare_s: float  # duration of the stage
    pause_ms: float
    converged_s: float  # since the pointer moved
    push_prepare_s: float
    push_pause_ms: float
    push_converged_s: float
    is_equal: bool


def varied(tensors: Sequence[TensorBytes], share: float, seed: int, itemsize: int) -> list[TensorBytes]:
    """Return the tensors with this share of bytes changed: low bits of values, or all bytes.

    All values stay finite.
    """

    def tensor(number: int, one: TensorBytes) -> TensorBytes:
        def load() -> Any:
            rng, data = np.random.default_rng((seed, number)), one.load().reshape(-1, itemsize)
            if share < 1.0:
                data[:, 0] ^= (rng.random(len(data), np.float32) < share * itemsize).astype(np.uint8)
            else:
                data[:, :-1] ^= rng.integers(1, 128, (len(data), itemsize - 1), np.uint8)
                data[:, -1] ^= 0x80
            return data.reshape(-1)

        return TensorBytes(one.name, one.dtype, one.shape, load)

    return [tensor(number, one) for number, one in enumerate(tensors)]


def is_equal(folder: Path, expected: Sequence[TensorBytes]) -> bool:
    """Return True if a folder equals the published version."""
    made = {one.name: one for one in tensors_of(folder)}
    return made.keys() == {one.name for one in expected} and all(
        np.array_equal(made[one.name].load(), one.load()) for one in expected
    )


async def generate_for_ever(client: RolloutClient, prompt: Sequence[int], max_tokens: int) -> None:
    while True:
        await client.generate(prompt, max_tokens=max_tokens)


async def served(client: RolloutClient, version: int) -> UpdateReport:
    """Wait until the fleet serves a version, and its report exists."""
    while True:
        status = await client.status()
        if reports := [one for one in status.updates if one.version == version]:
            return reports[0]
        await asyncio.sleep(0.02)


async def measure(options: argparse.Namespace, work: Path) -> list[Row]:
    """Publish, follow and push. Raises the error of a failed request or update."""
    config, folder = config_of(options, work), model_folder(options.shape, options.device)
    prompts = random_prompts(SHAPES[options.shape], options.at_once, 64)
    publisher = open_publisher(PublishOptions(str(work / "store"), RUN, cache=str(work / "cache"), full_every=99))
    base = tensors_of(folder)
    itemsize = 4 if options.device == "cpu" else 2
    await asyncio.to_thread(publisher.publish, base, 1)
    rows = []
    async with running_service(config, work / "run") as url, RolloutClient(url) as client:
        await client.wait_until_ready()
        await served(client, 1)
        async with asyncio.TaskGroup() as group:
            load = [group.create_task(generate_for_ever(client, prompt, options.max_tokens)) for prompt in prompts]
            await asyncio.sleep(options.ramp_s)
            for number, share in enumerate(options.shares):
                rows.append(await one_version(client, publisher, base, share, number, itemsize, work))
                print(rows[-1], flush=True)
            for task in load:
                task.cancel()
    return rows


async def one_version(
    client: RolloutClient,
    publisher: Any,
    base: Sequence[TensorBytes],
    share: float,
    number: int,
    itemsize: int,
    work: Path,
) -> Row:
    version, tensors = 2 + 2 * number, varied(base, share, number, itemsize)
    published: PublishReport = await asyncio.to_thread(publisher.publish, tensors, version)
    began_at = time.perf_counter()
    followed = await served(client, version)
    converged_s = time.perf_counter() - began_at
    made = work / "run" / "weights" / f"weight_v{version:06d}"
    equal = await asyncio.to_thread(is_equal, made, tensors)
    began_at = time.perf_counter()
    pushed = await client.update_weights(made, version=version + 1)
    push_s = time.perf_counter() - began_at
    ours, theirs = followed.replicas[0], pushed.replicas[0]
    return Row(
        share,
        published.num_bytes / published.num_full_bytes,
        published.encode_s,
        published.upload_s,
        ours.stage_ms / 1000,
        ours.stall_ms,
        converged_s,
        theirs.stage_ms / 1000,
        theirs.stall_ms,
        push_s,
        equal,
    )


def config_of(options: argparse.Namespace, work: Path) -> ServiceConfig:
    is_cpu = options.device == "cpu"
    engine = {
        "kind": options.engine,
        "device": options.device,
        "dtype": "float32" if is_cpu else "bfloat16",
        "max_running": options.at_once,
        "block_size": 32 if is_cpu else 16,
        "kv_cache_mib": 256 if is_cpu else 8192,
        "gpu_memory_utilization": 0.6,
        "num_cpus": 0.5 if is_cpu else 1.0,
        "enforce_eager": options.eager,
    }
    return ServiceConfig.model_validate(
        {
            "model": str(model_folder(options.shape, options.device)),
            "engine": engine,
            "port": 0,
            "weights": {"store": str(work / "store"), "run": RUN, "poll_s": 0.2},
            "weight_roots": [str(work / "run" / "weights")],
        }
    )


def main() -> None:
    """Print the table; exit with 1 if an update differs from the published version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--ramp-s", type=float, default=3.0)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: the engine starts sooner")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rows = asyncio.run(measure(options, Path(work)))
    columns = ("changed", "size", "encode s", "store s", "prepare s", "pause ms", "converged s")
    columns += ("push: prepare s", "push: pause ms", "push: converged s", "equal")
    cells = [
        (
            f"{row.share:.1%}",
            f"{row.size:.1%}",
            *(f"{value:.2f}" for value in list(asdict(row).values())[2:-1]),
            row.is_equal,
        )
        for row in rows
    ]
    finish(
        f"published deltas, {options.shape}",
        {"updates": table(columns, cells)},
        [asdict(row) for row in rows],
        options.out,
    )
    if not all(row.is_equal for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
