"""The residency model against vLLM with a model of a known shape: the cached tokens that it foretells.

    python -m tests.gpu.residency --shape qwen3-4b --out runs/residency.json
    python -m tests.gpu.residency --shape tiny --device cpu --block-size 32 --context 1024 --kv-blocks 256

One engine with dummy weights and as many blocks as asked for; vLLM runs alone, without our service. The first
workload fits in the blocks, the second needs about three times as many; the model goes on from the first to the
second, and hears no events.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from agentloop.scheduling.residency import ReplicaKV
from agentloop.types import FinishReason, GenerateRequest, Generation, WeightVersionSpan
from tests.benchmarks import report
from tests.benchmarks.shapes import SHAPES, TOKENS_START, Shape, write_model_folder
from tests.support.engine.residency_replay import Agreement, ReplayShape, replay

DTYPE_BYTES = 2
FITS_SHARE, LARGER_SHARE = 0.4, 3.0  # of the cache that a workload's trajectories need at their ends


def engine_of(shape: Shape, folder: Path, args: argparse.Namespace) -> AsyncLLM:
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(write_model_folder(shape, folder, max_context_tokens=args.context, dtype="bfloat16")),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=args.context,
            max_num_seqs=64,
            block_size=args.block_size,
            kv_cache_memory_bytes=args.kv_blocks * args.block_size * token_bytes,
            enable_prefix_caching=True,
            enforce_eager=args.device == "cpu",
            disable_log_stats=True,
        )
    )


async def generate(llm: AsyncLLM, request: GenerateRequest) -> Generation:
    """Sample one turn."""
    sampling = SamplingParams(
        max_tokens=request.sampling.max_tokens, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    prompt = TokensPrompt(prompt_token_ids=list(request.token_ids))
    outputs = [output async for output in llm.generate(prompt, sampling, request.request_id)]
    ids = tuple(outputs[-1].outputs[0].token_ids)
    return Generation(
        request.request_id,
        ids,
        (0.0,) * len(ids),
        (WeightVersionSpan(0, 0, len(ids)),),
        FinishReason.LENGTH,
        cached_tokens=outputs[-1].num_cached_tokens or 0,
    )


def workload(shape: Shape, context: int) -> ReplayShape:
    """One group, whose trajectories end at about 0.4 of the longest context."""
    return ReplayShape(
        num_groups=1,
        num_samples=8,
        num_turns=6,
        num_together=16,
        system=context // 16,
        prompt=context // 10,
        observation=context // 32,
        max_sampled=context // 80,
        vocab=(TOKENS_START, shape.vocab),
    )


def final_tokens(one: ReplayShape) -> int:
    """Return the tokens of a group's trajectories at their ends, their shared prompt counted once."""
    return one.prompt + one.num_samples * one.num_turns * (one.max_sampled + one.observation)


async def measure(shape: Shape, args: argparse.Namespace, folder: Path) -> dict[str, Agreement]:
    """Run both workloads on one engine."""
    llm = engine_of(shape, folder, args)
    try:
        cache = llm.vllm_config.cache_config
        num_tokens = cache.num_gpu_blocks * cache.block_size
        kv = ReplicaKV(cache.num_gpu_blocks - 1)  # vLLM keeps one for itself
        found = {}
        for name, share in (("fits", FITS_SHARE), ("larger", LARGER_SHARE)):
            one = workload(shape, args.context)
            one = replace(one, num_groups=max(1, round(share * num_tokens / final_tokens(one))))
            found[name] = await replay(
                lambda request: generate(llm, request), kv, cache.block_size, one, seed=args.seed, name=name
            )
            print(f"{name}: {found[name]}; {kv.num_blocks} of {kv.capacity_blocks} blocks in use", flush=True)
        return found
    finally:
        llm.shutdown()


def main() -> None:
    """Replay, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16, help="on CPU a multiple of 32")
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
