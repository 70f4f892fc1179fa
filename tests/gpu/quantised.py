"""Quantized rollout with bf16 pushes: the served bytes, continuations, update gap, speed, and mismatch.

    python -m tests.gpu.quantised --only weights,mismatch,gaps --out runs/a.json    # about 5 minutes
    python -m tests.gpu.quantised --only speed,speed-bf16 --out runs/b.json         # about 7 minutes
    python -m tests.gpu.quantised --device cpu --shape tiny --quantization fp8_per_channel --only weights,gaps

`weights`: an engine with dummy weights gets pushes by directory and from a trainer's memory (CUDA IPC, on CPU
shared memory). After each push of one checkpoint, every parameter has the bytes of a fresh engine on that
checkpoint. The last push arrives while greedy requests run, and the fresh engine has to produce the same
continuations; on a GPU both are batch-invariant for it. `mismatch`: k3 between the recorded logprobs of sampled
tokens and those of the engine's own prefill, and those of the bf16 checkpoint by transformers. `gaps`:
`weight_updates`, quantized and bf16; the goal is a gap of at most 1.5 times the bf16 gap. `speed` and `speed-bf16`:
`gpu_throughput` of a bare engine, quantized and not.

Each part is a separate process. The exit status is 1 unless all bytes and continuations are equal and the gap's
goal is met.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentloop.engine.interface import CommitReport, PushSource, StageReport, WeightUpdate
from agentloop.types import GenerateRequest, Generation, KVPolicy, PauseMode, SamplingParams
from agentloop.values.mismatch import mismatch
from agentloop_servers.config.service import CHECKOUT
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.layout import tensor_info
from agentloop_servers.weight_transfer.sender import WeightSender
from agentloop_servers.weight_transfer.vllm_worker import WeightWorker
from agentloop_verify.transformers_reference import ReferenceModel
from tests.benchmarks.report import finish, say, table
from tests.benchmarks.shapes import SHAPES, make_tensors, random_prompts, set_version
from tests.gpu.continuation import Run, compare
from tests.gpu.policy import write_policy

DIGESTS = "AGENTLOOP_TEST_DIGESTS"  # environment variable with the path of a worker's file
CONTEXT_TOKENS = 1024
MAX_GAP = 1.5  # times the gap of bf16
MAX_OWN_K3 = 0.5  # k3 to the engine's own prefill, relative to that to the bf16 checkpoint
SEND_TIMEOUT_S = 120.0
UPDATE_AT = 0.4  # share of an undisturbed run's duration
# Engine worker


class DigestingWorker(WeightWorker):
    """Writes each parameter's dtype, shape and SHA-256 in memory order, at its start and after each commit."""

    def weights_prepare(self, setup: bytes) -> None:
        super().weights_prepare(setup)
        self._write()

    def weights_commit(self, number: int) -> bytes:
        report = super().weights_commit(number)
        self._write()
        return report

    def _write(self) -> None:
        found = {}
        for name, tensor in self.weights_model().parameters.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
            found[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
        Path(os.environ[DIGESTS]).write_text(json.dumps(found))


# Engines


def engine_config(options: argparse.Namespace, model: Path, **changed: Any) -> VllmConfig:
    """Return an eager engine with a small cache: two of them and a trainer are on the GPU at the same time."""
    is_cpu = options.device == "cpu"
    settings: dict[str, Any] = {
        "initial_version": 1,
        "device": options.device,
        "quantization": options.quantization,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_seqs": 128,
        "block_size": 32 if is_cpu else 16,
        "kv_cache_memory_bytes": (256 if is_cpu else 8192) * 2**20,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": True,
    }
    return VllmConfig(model=str(model), **{**settings, **changed})


async def start(engine: VllmEngine, digests: Path) -> None:
    """Start an engine whose workers write to this file."""
    os.environ[DIGESTS] = str(digests)
    await engine.start()


async def sampled(
    engine: VllmEngine, prompts: Sequence[tuple[int, ...]], num_tokens: int, temperature: float
) -> list[Generation]:
    """Sample `num_tokens` tokens for each prompt."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature)
    requests = [GenerateRequest(f"{time.monotonic_ns()}-{n}", ids, sampling) for n, ids in enumerate(prompts)]
    return list(await asyncio.gather(*map(engine.generate, requests)))


async def install(engine: VllmEngine, update: WeightUpdate) -> tuple[StageReport, CommitReport]:
    """Stage and commit; all KV is recomputed."""
    staged = await engine.stage(update)
    await engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
    committed = await engine.commit(update.version)
    await engine.resume()
    return staged, committed


class Trainer:
    """Tensors in this process, which `install` transfers over IPC or shared memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._device = torch.device("cpu" if options.device == "cpu" else "cuda:0")
        self._shape = SHAPES[options.shape]
        self.tensors = make_tensors(self._shape, self._device, torch.bfloat16, version=1)
        transport = "shm" if options.device == "cpu" else "ipc"
        self._sender = WeightSender(device=self._device, transport=transport)

    def set_version(self, version: int) -> None:
        set_version(self._shape, self.tensors, version)

    def offer(self) -> PushSource:
        items = [
            Outgoing(tensor_info(name, tensor), partial(torch.Tensor.detach, tensor))
            for name, tensor in self.tensors.items()
        ]
        return replace(self._sender.offer(items), num_receivers=1)

    async def push(self, engine: VllmEngine, version: int) -> tuple[StageReport, CommitReport]:
        source = self.offer()
        sending = asyncio.create_task(asyncio.to_thread(self._sender.run, SEND_TIMEOUT_S))
        try:
            return await install(engine, WeightUpdate(version, push=source))
        except BaseException:
            self._sender.cancel("the update failed")
            raise
        finally:
            await asyncio.gather(sending, return_exceptions=True)

    def close(self) -> None:
        self._sender.close()


# Parts


async def weights(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Push two checkpoints alternately into one engine; compare it with a fresh engine after the first pushes."""
    trainer = Trainer(options)
    facts = {"max_context_tokens": CONTEXT_TOKENS, "dtype": "bfloat16"}
    folder = write_policy(SHAPES[options.shape], trainer.tensors, work / "v1", **facts)
    say("the checkpoint is written")
    always = {
        "batch_invariant": options.device == "cuda",
        "worker_extension": "tests.gpu.quantised.DigestingWorker",
    }
    fresh = VllmEngine(engine_config(options, folder, **always))
    dummy = {"load_format": "dummy", "initial_version": None}
    engine = VllmEngine(engine_config(options, folder, **dummy, **always))
    updates: list[dict[str, Any]] = []
    try:
        await start(engine, work / "digests")
        await start(fresh, work / "wanted")
        say("both engines are up")
        wanted = json.loads(await asyncio.to_thread((work / "wanted").read_text))
        prompts = [ids[: 16 + 3 * n] for n, ids in enumerate(random_prompts(SHAPES[options.shape], 32, 128))]

        async def put(version: int, way: str, of: int) -> None:
            if way == "directory":
                reports = await install(engine, WeightUpdate(version, str(folder)))
            else:
                await asyncio.to_thread(trainer.set_version, of)
                reports = await trainer.push(engine, version)
            staged, committed = reports
            row = {"way": staged.transport, "weights": of, "staging_device": staged.staging_device.value}
            updates.append({**row, **asdict(committed), "differing": None})

        async def check() -> None:
            found = json.loads(await asyncio.to_thread((work / "digests").read_text))
            names = [name for name in wanted | found if wanted.get(name) != found.get(name)]
            updates[-1] |= {"differing": len(names), "first": names[:1]}
            say(f"{updates[-1]}")

        await put(1, "directory", 1)
        await check()
        await put(2, "push", 2)
        await put(3, "directory", 1)
        await check()
        await put(4, "push", 2)
        began_at = time.perf_counter()
        undisturbed = await sampled(engine, prompts, options.tokens, 0.0)
        duration_s = time.perf_counter() - began_at
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(sampled(engine, prompts, options.tokens, 0.0))
            await asyncio.sleep(UPDATE_AT * duration_s)
            await put(5, "push", 1)
        await check()
        answers = [_with_old_as_0(answer, new=5) for answer in answering.result()]
        outcome = await compare(fresh, Run(prompts, undisturbed, answers, ()), None)  # type: ignore[arg-type]
    finally:
        await engine.close()
        await fresh.close()
        trainer.close()
    is_equal = all(not update["differing"] for update in updates)
    # The engine loads the first two pushes itself, which verifies the copy plan for the others; on CPU there is no
    # plan.
    is_planned = options.device == "cpu" or all(one["num_verified"] == len(wanted) for one in updates[2:])
    is_right = is_equal and is_planned and outcome.is_right(1.0)
    return {"is_right": is_right, "updates": updates, "parameters": len(wanted), "continuation": asdict(outcome)}


def _with_old_as_0(answer: Generation, new: int) -> Generation:
    spans = tuple(replace(span, version=int(span.version == new)) for span in answer.weight_versions)
    return replace(answer, weight_versions=spans)


async def mismatches(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Sample from a quantized engine, and recompute the logprobs in two ways."""
    shape = SHAPES[options.shape]
    device = torch.device("cpu" if options.device == "cpu" else "cuda:0")
    tensors = make_tensors(shape, device, torch.bfloat16, version=1)
    folder = write_policy(shape, tensors, work / "v1", max_context_tokens=CONTEXT_TOKENS, dtype="bfloat16")
    tensors.clear()
    engine = VllmEngine(engine_config(options, folder))
    try:
        await engine.start()
        say("the engine is up")
        prompts = random_prompts(shape, 32, 64)
        answers = await sampled(engine, prompts, options.tokens, 1.0)
        ids = [(*prompt, *answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
        scoring = SamplingParams(max_tokens=1, score_from=64)
        scores = await asyncio.gather(
            *(engine.generate(GenerateRequest(f"score-{n}", one, scoring)) for n, one in enumerate(ids))
        )
    finally:
        await engine.close()
    reference = ReferenceModel(folder, device=options.device, dtype="bfloat16")
    plain = [reference.logprobs(one, range(64, len(one))) for one in ids]
    recorded = np.concatenate([answer.logprobs for answer in answers])
    own = mismatch(recorded, np.concatenate([score.logprobs for score in scores]))
    bf16 = mismatch(recorded, np.concatenate(plain))
    return {
        "is_right": own.k3_kl <= MAX_OWN_K3 * bf16.k3_kl,
        "own prefill": asdict(own),
        "bf16 checkpoint": asdict(bf16),
    }


def command_of(part: str, options: argparse.Namespace, out: Path) -> list[str]:
    """Return the command of one part, which writes its results to `out`."""
    is_cpu = options.device == "cpu"
    always = ["--device", options.device, "--shape", options.shape, "--out", str(out)]
    if part in PARTS:
        own = ["--quantization", options.quantization, "--tokens", str(options.tokens), "--only", part]
        return ["tests.gpu.quantised", *always, *own]
    if part == "gaps":
        own = ["--variants", "quantised,staged", "--quantization", options.quantization, "--dtype", "bfloat16"]
        own += ["--transport", "shm" if is_cpu else "ipc", "--consecutive", "4", "--window-s", "1"]
        return ["tests.benchmarks.weight_updates", *always, *own, "--kv-gib", "0.25" if is_cpu else "24"]
    own = ["--arms", "bare", "--cycles", "1", "--window-s", str(options.window_s), "--at-once", *options.at_once]
    quantization = json.dumps(options.quantization if part == "speed" else None)
    own += ["--set", f'dtype="bfloat16",quantization={quantization}']
    return ["tests.benchmarks.gpu_throughput", *always, *own]


PARTS = {"weights": weights, "mismatch": mismatches}


def judged(part: str, results: dict[str, Any]) -> bool:
    """Return True if a part's results meet its requirements."""
    if part == "gaps":
        gaps = [results["quantised"]["gaps"], results["staged"]["single"]["gaps"]]
        return bool(gaps[0]["p50"] <= MAX_GAP * gaps[1]["p50"])
    return bool(results.get("is_right", True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--quantization", default="fp8")
    parser.add_argument("--only", default="weights,mismatch,gaps,speed,speed-bf16", help="parts, comma-separated")
    parser.add_argument("--tokens", type=int, default=256, help="sampled for each prompt")
    parser.add_argument("--at-once", nargs="+", default=["256", "512"], help="in flight, of the speed")
    parser.add_argument("--window-s", type=float, default=45.0, help="of the speed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.only in PARTS:
        with tempfile.TemporaryDirectory() as work:
            results = asyncio.run(PARTS[options.only](options, Path(work)))
        if options.out is not None:
            options.out.write_text(json.dumps({"results": results}))
        print(json.dumps(results, indent=1))
        return 0 if results["is_right"] else 1
    found: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for part in options.only.split(","):
            out, began_at = Path(work) / f"{part}.json", time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", *command_of(part, options, out)], check=False, cwd=CHECKOUT
            )
            found[part] = json.loads(out.read_text())["results"] if out.exists() else {}
            is_right = done.returncode == 0 and out.exists() and judged(part, found[part])
            rows.append((part, "RIGHT" if is_right else "WRONG", time.monotonic() - began_at))
            if options.out is not None:  # a later part may be cut short
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.with_suffix(".partial.json").write_text(json.dumps(found))
    title = f"Quantised rollout, {options.quantization}, {options.shape}, {options.device}"
    finish(title, {"": table(("part", "verdict", "seconds"), rows)}, found, options.out)
    return 0 if all(row[1] == "RIGHT" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
