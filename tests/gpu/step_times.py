"""Step times of a model on this GPU: the measured points to which the balancer's simulator fits its steps.

    python -m tests.gpu.step_times --shape qwen3-4b --out tests/benchmarks/balancer/step_times/h200-qwen3-4b.json

A point of prefill is (uncached tokens, seconds); a point of decode is (requests, tokens in all of them, seconds).
`balancer.regimes.fit_step_times` fits both. Steps that prefill and decode together are not measured.

vLLM runs alone, without our service, with the prefix cache off and dummy weights, because speed does not depend on
their values. A prefill is the time from its request to its first token; a decode step is the median time between
two outputs while all B requests run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.benchmarks.shapes import SHAPES, Shape, random_prompts, write_model_folder

PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32000)
DECODE_REQUESTS = (1, 4, 16, 64, 128, 256, 512)
DECODE_CONTEXTS = (256, 1024, 4096, 16384)
CONTEXT_TOKENS = 32768
NUM_STEPS = 40  # decode steps timed together
REPEATS = 5  # per prefill
KV_SHARE = 0.9  # share of the cache that a point may use: beyond it requests would be preempted


def engine_of(shape: Shape, folder: Path, args: argparse.Namespace) -> LLMEngine:
    """Start vLLM's synchronous engine."""
    model = write_model_folder(shape, folder, max_context_tokens=CONTEXT_TOKENS, dtype=args.dtype)
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            load_format="dummy",
            dtype=args.dtype,
            skip_tokenizer_init=True,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=max(DECODE_REQUESTS),
            max_num_batched_tokens=args.batched_tokens,
            tensor_parallel_size=args.tensor_parallel_size,
            enable_prefix_caching=False,
            enforce_eager=args.eager,
            gpu_memory_utilization=0.9,
            disable_log_stats=True,
        )
    )


def ask(engine: LLMEngine, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> None:
    """Queue requests that each sample `num_tokens` tokens."""
    sampling = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{number}", {"prompt_token_ids": list(prompt)}, sampling)


def prefill_s(engine: LLMEngine, shape: Shape, num_tokens: int) -> float:
    """Return the median seconds from a request of `num_tokens` tokens to its first token."""
    times = []
    for repeat in range(REPEATS + 1):
        prompts = random_prompts(shape, 1, num_tokens, seed=repeat)
        begun = time.perf_counter()
        ask(engine, prompts, 1)
        while engine.has_unfinished_requests():
            engine.step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])  # the first one may compile


def decode_s(engine: LLMEngine, shape: Shape, num_requests: int, context: int) -> float:
    """Return the median seconds of a decode step with `num_requests` requests of `context` tokens each."""
    prompts = random_prompts(shape, num_requests, context)
    ask(engine, prompts, num_sampled(num_requests, context))
    full: list[float] = []
    before, begun = None, time.perf_counter()
    while engine.has_unfinished_requests() and len(full) < NUM_STEPS and time.perf_counter() - begun < 60:
        num_outputs = len(engine.step())
        now = time.perf_counter()
        if num_outputs == num_requests:
            if before is not None:
                full.append(now - before)
            before = now
        elif num_outputs:
            before = None
    finish(engine)
    if len(full) < NUM_STEPS // 4:
        raise RuntimeError(f"{num_requests} requests of {context} tokens never ran together")
    return statistics.median(full)


def num_sampled(num_requests: int, context: int) -> int:
    """Return the number of tokens that keep the first request running for `NUM_STEPS` steps after all prefills."""
    return 2 * NUM_STEPS + num_requests * context // 2048


def finish(engine: LLMEngine) -> None:
    """Abort the running requests."""
    engine.abort_request(list(engine.output_processor.request_states))
    while engine.has_unfinished_requests():
        engine.step()
    time.sleep(0.2)  # the engine core processes the abort asynchronously


def main() -> None:
    """Run all measurements, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(shape, Path(folder), args)
        cache = engine.vllm_config.cache_config
        kv_tokens = int(cache.num_gpu_blocks * cache.block_size)
        prefills = [(num, prefill_s(engine, shape, num)) for num in PREFILL_TOKENS]
        print("prefill", prefills, flush=True)
        decodes = []
        for context in DECODE_CONTEXTS:
            for num_requests in DECODE_REQUESTS:
                if num_requests * (context + num_sampled(num_requests, context)) > KV_SHARE * kv_tokens:
                    continue
                decodes.append(
                    (num_requests, num_requests * context, decode_s(engine, shape, num_requests, context))
                )
                print("decode", decodes[-1], flush=True)
    result = {
        "device": torch.cuda.get_device_name(),
        "shape": shape.name,
        "dtype": args.dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
        "batched_tokens": args.batched_tokens,
        "kv_tokens": kv_tokens,
        "prefill": {"points": prefills},
        "decode": {"points": decodes},
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: result[name] for name in ("device", "kv_tokens")}))


if __name__ == "__main__":
    main()
