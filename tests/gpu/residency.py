"""The residency model against a vLLM on this GPU: the cached tokens that it foretells, turn by turn.

    python -m tests.gpu.residency --shape qwen3-4b --out runs/residency.json

One engine with dummy weights and as many blocks as asked for. The first workload fits in them, the second needs
about three times as many; the model goes on from the first to the second, and hears no events.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from agentloop.scheduling.residency import ReplicaKV
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.benchmarks import report
from tests.benchmarks.shapes import SHAPES, TOKENS_START, Shape, write_model_folder
from tests.support.engine.residency_replay import Agreement, ReplayShape, capacity_blocks, replay

DTYPE_BYTES = 2
CONTEXT_TOKENS = 8192
FITS_SHARE, LARGER_SHARE = 0.4, 3.0  # of the cache that a workload's trajectories need at their ends


def config_of(shape: Shape, folder: Path, args: argparse.Namespace) -> VllmConfig:
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES
    return VllmConfig(
        str(write_model_folder(shape, folder, max_context_tokens=CONTEXT_TOKENS, dtype="bfloat16")),
        None,
        load_format="dummy",
        device="cuda",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=256,
        block_size=args.block_size,
        kv_cache_memory_bytes=args.kv_blocks * args.block_size * token_bytes,
    )


def workload(shape: Shape, num_groups: int) -> ReplayShape:
    """Contexts of about 3,400 tokens at their ends."""
    return ReplayShape(
        num_groups=num_groups,
        num_samples=8,
        num_turns=6,
        num_together=16,
        system=512,
        prompt=800,
        observation=250,
        max_sampled=100,
        vocab=(TOKENS_START, shape.vocab),
    )


def final_tokens(one: ReplayShape) -> int:
    """Return the tokens of a group's trajectories at their ends, their shared prompt counted once."""
    return one.prompt + one.num_samples * one.num_turns * (one.max_sampled + one.observation)


async def measure(shape: Shape, args: argparse.Namespace, folder: Path) -> dict[str, Agreement]:
    """Run both workloads on one engine."""
    engine = VllmEngine(config_of(shape, folder, args))
    await engine.start()
    try:
        info = engine.info
        kv = ReplicaKV(capacity_blocks(info.kv_capacity_tokens, info.block_size))
        found = {}
        for name, share in (("fits", FITS_SHARE), ("larger", LARGER_SHARE)):
            one = workload(shape, 1)
            num_groups = max(1, round(share * info.kv_capacity_tokens / final_tokens(one)))
            one = replace(one, num_groups=num_groups)
            found[name] = await replay(engine, kv, info.block_size, one, seed=args.seed, name=name)
            print(f"{name}: {found[name]}; {kv.num_blocks} of {kv.capacity_blocks} blocks in use", flush=True)
        return found
    finally:
        await engine.close()


def main() -> None:
    """Replay, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-blocks", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(SHAPES[args.shape], args, Path(folder)))
    columns = ["workload", "turns", "turns equal", "blocks", "foretold", "cached", "agreement %"]
    rows = [
        (name, a.num_turns, a.num_equal_turns, a.num_blocks, a.num_foretold, a.num_cached, 100 * a.share)
        for name, a in found.items()
    ]
    report.finish("Residency", {"": report.table(columns, rows)}, found, args.out)


if __name__ == "__main__":
    main()
