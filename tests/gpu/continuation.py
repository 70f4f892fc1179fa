"""Acceptance test of asynchronous weight updates on a whole service, against a fresh engine on the new weights.

    python -m tests.gpu.continuation --transport nccl     # trainer's tensors on GPU 1, service on GPU 0
    python -m tests.gpu.continuation --transport ipc      # both on GPU 0
    python -m tests.gpu.continuation --transport auto --replicas 2 --more 5   # GPUs 0 and 1, the trainer on GPU 0
    python -m tests.gpu.continuation --transport auto --tp 2 --expert-parallel --shape small-moe
    python -m tests.gpu.continuation --transport native-ipc --replicas 2 --one-gpu    # by vLLM's own trainer helper
    python -m tests.gpu.continuation --transport slime-nccl --engine sglang           # by SGLang's verbs, as slime
    python -m tests.gpu.continuation --device cpu --shape tiny     # over shared memory
    python -m tests.gpu.continuation --device cpu --shape tiny --transport native-gloo

Greedy requests are in flight when `client.update_weights(tensors)` is called, with policy RECOMPUTE. Then a fresh
engine on the new weights, given prompt + the tokens of version 0, must sample exactly the tokens of version 1, for
every prompt. The tokens before the update must equal those of an undisturbed run. On GPUs the engine is
batch-invariant, so that no near tie can hide or cause a difference. The exit status is 0 if all were equal.

`--no-batch-invariant` turns that mode off, which restricts NCCL. Rounding then makes most continuations diverge
within some hundred tokens, so only the first token after the update is compared, and half of them have to be equal.
`--more`: number of further updates while requests run, for times of warm connections.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from agentloop.api.coordinator import UpdateReport
from agentloop.client.client import RolloutClient
from agentloop.engine.interface import Engine
from agentloop.types import GenerateRequest, Generation, KVPolicy, SamplingParams
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import running_service
from agentloop_servers.processes.engine_parts import build_engine
from tests.benchmarks.report import finish, say, table
from tests.benchmarks.shapes import SHAPES, make_tensors, random_prompts, set_version
from tests.gpu.policy import service_config, show_gpus, write_policy
from tests.parts.contracts.sglang_group_trainer import SglangTrainer

UPDATE_AT = 0.4  # share of an undisturbed run's duration
MIN_EQUAL = 0.5  # share of prompts, when batches round differently; wrong weights make nearly all differ
SPACING_S = 0.7  # between further updates
CONTEXT_TOKENS = 1024
NCCL_SETTINGS = {
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "ring,tree;allreduce:tree",
    "NCCL_NTHREADS": "1",
}
"""The settings of batch-invariant vLLM 0.32 in its workers: the trainer's process group with them needs the
same."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results over all prompts. All fields except the token count are numbers of prompts."""

    num_prompts: int
    num_old_tokens: int  # sampled before the update
    num_new_tokens: int
    num_mixed: int  # answers with tokens of both versions
    num_equal_before: int  # same beginning as the undisturbed run
    num_equal_after: int  # same continuation as the fresh engine, for the tokens compared
    num_changed: int  # other continuation than the undisturbed run: the new weights differ

    @property
    def is_exact(self) -> bool:
        """Return True if every prompt is equal, before and after the update."""
        return self.num_equal_before == self.num_equal_after == self.num_prompts

    def is_right(self, least_equal: float) -> bool:
        """Return True if this share of the prompts is equal, and the update hit them midway and changed them."""
        equal = min(self.num_equal_before, self.num_equal_after) >= least_equal * self.num_prompts
        return equal and self.num_mixed >= 0.75 * self.num_prompts and self.num_changed >= 0.9 * self.num_mixed


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of the service."""

    prompts: Sequence[tuple[int, ...]]
    undisturbed: Sequence[Generation]
    answers: Sequence[Generation]
    reports: Sequence[UpdateReport]  # the first one is of the checked update


async def run_service(
    config: ServiceConfig, run_dir: Path, tensors: dict[str, torch.Tensor], options: argparse.Namespace
) -> Run:
    """Run all prompts once undisturbed, and once with the update in the middle."""
    shape = SHAPES[options.shape]
    prompts = [prompt[: 16 + 3 * n] for n, prompt in enumerate(random_prompts(shape, options.prompts, 128))]
    async with running_service(config, run_dir) as url, RolloutClient(url) as client:

        async def answer_all(max_tokens: int = options.tokens) -> list[Generation]:
            calls = (client.generate(prompt, max_tokens=max_tokens, temperature=0.0) for prompt in prompts)
            return list(await asyncio.gather(*calls))

        while sum(one.state == "ready" for one in (await client.status()).replicas) < options.replicas:
            await asyncio.sleep(0.5)
        say("the service is ready")
        native, slime = None, None
        if options.transport.startswith("slime-"):
            slime = SglangTrainer(url)
            await asyncio.to_thread(slime.join, options.transport.removeprefix("slime-"))
        if options.transport.startswith("native-"):
            from examples.native_trainer import native_trainer, send_weights  # noqa: PLC0415 - vLLM is slow to import

            native = await asyncio.to_thread(native_trainer, url, tensors, options.transport)

        async def update(version: int, kv_policy: KVPolicy | None = None) -> UpdateReport:
            if slime is not None:
                await asyncio.to_thread(slime.round, tensors, version, is_flat=False, has_session=False)
            elif native is not None:
                await asyncio.to_thread(send_weights, native, tensors)
            else:
                return await client.update_weights(
                    tensors.items(), version=version, kv_policy=kv_policy, transport=options.transport
                )
            return (await client.status()).updates[-1]  # RECOMPUTE is the service's own policy

        await answer_all(8)  # the first calls warm up each replica
        began_at = time.perf_counter()
        undisturbed = await answer_all()
        duration_s = time.perf_counter() - began_at
        say(f"an undisturbed run took {duration_s:.1f} s; again, with an update in the middle")
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(answer_all())
            await asyncio.sleep(UPDATE_AT * duration_s)
            report = await update(1, KVPolicy.RECOMPUTE)
        say("updated and answered")
        reports = [report]
        load = asyncio.create_task(answer_all())
        for version in range(2, 2 + options.more):
            await asyncio.sleep(SPACING_S)
            set_version(shape, tensors, version)
            reports.append(await update(version))
        await load
        return Run(prompts, undisturbed, answering.result(), reports)


async def compare(engine: Engine, run: Run, most: int | None) -> Outcome:
    """Compare every continuation, or its first `most` tokens, with a fresh engine on the new weights."""
    are_equal = await asyncio.gather(
        *(_goes_on(engine, n, prompt, run.answers[n], most) for n, prompt in enumerate(run.prompts))
    )
    old = [num_old(answer) for answer in run.answers]
    pairs = list(zip(run.answers, run.undisturbed, old, strict=True))
    return Outcome(
        num_prompts=len(run.prompts),
        num_old_tokens=sum(old),
        num_new_tokens=sum(len(answer.token_ids) - count for answer, _, count in pairs),
        num_mixed=sum(0 < count < len(answer.token_ids) for answer, _, count in pairs),
        num_equal_before=sum(answer.token_ids[:n] == other.token_ids[:n] for answer, other, n in pairs),
        num_equal_after=sum(are_equal),
        num_changed=sum(n > 0 and answer.token_ids[n:] != other.token_ids[n:] for answer, other, n in pairs),
    )


async def _goes_on(
    engine: Engine, number: int, prompt: tuple[int, ...], answer: Generation, most: int | None
) -> bool:
    """Return True if the fresh engine samples the tokens that followed the update."""
    left = answer.token_ids[num_old(answer) :][:most]
    if not left:
        return True
    sampling = SamplingParams(max_tokens=len(left), temperature=0.0)
    told = prompt + answer.token_ids[: num_old(answer)]
    return (await engine.generate(GenerateRequest(f"fresh-{number}", told, sampling))).token_ids == left


def num_old(answer: Generation) -> int:
    """Return the number of tokens sampled under version 0."""
    return sum(span.end - span.start for span in answer.weight_versions if span.version == 0)


async def check(options: argparse.Namespace, work: Path) -> tuple[Outcome, Sequence[UpdateReport]]:
    """Run the whole check. Raises TimeoutError at the deadline."""
    shape = SHAPES[options.shape]
    device = torch.device("cpu" if options.device == "cpu" else options.trainer_device)
    tensors = make_tensors(shape, device, getattr(torch, options.dtype), version=0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        show_gpus(1 if options.one_gpu else options.tp * options.dp * options.replicas)
    facts = {"max_context_tokens": CONTEXT_TOKENS, "dtype": options.dtype}
    old = write_policy(shape, tensors, work / "v0", **facts)
    set_version(shape, tensors, 1)
    new = write_policy(shape, tensors, work / "v1", **facts)
    config = service_config(
        old,
        device=options.device,
        dtype=options.dtype,
        max_running=options.prompts,
        kv_cache_mib=256 if options.device == "cpu" else 3072,
        kv_policy="recompute",
        tensor_parallel_size=options.tp,
        data_parallel_size=options.dp,
        expert_parallel=options.expert_parallel,
        replicas=options.replicas,
        gpu_share=1.0 / options.replicas if options.one_gpu else 1.0,
        kind=options.engine,
        quantization=options.quantization,
        batch_invariant=options.batch_invariant,
    )
    run_dir = work / "run"
    run_dir.mkdir()
    fresh = build_engine(config.model_copy(update={"model": str(new), "model_version": 1}))
    async with asyncio.timeout(options.deadline_s):
        starting = asyncio.create_task(fresh.start())  # starts take most of the time
        try:
            run = await run_service(config, run_dir, tensors, options)
            await starting
            say("the fresh engine is ready")
            outcome = await compare(fresh, run, None if options.is_exact else 1)
        finally:
            await asyncio.wait([starting])
            await fresh.close()
    return outcome, run.reports


UPDATE_COLUMNS = (
    *("version", "replica", "transport", "held in", "GB", "transfer ms", "GB/s", "stage ms", "swap ms"),
    *("pause to resume ms", "tensors compared", "error"),
)


def update_rows(report: UpdateReport) -> list[tuple[object, ...]]:
    """Return one row per replica of an update."""
    return [
        (
            report.version,
            one.replica_id,
            one.transport,
            one.staging_device,
            one.num_bytes / 1e9,
            one.transfer_ms,
            one.num_bytes / 1e6 / one.transfer_ms if one.transfer_ms else None,
            one.stage_ms,
            one.swap_ms,
            one.stall_ms,
            one.num_verified,
            one.error,
        )
        for one in report.replicas
    ]


def main() -> None:
    """Print the counts; exit with 1 if any prompt differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    native = ("native-ipc", "native-nccl", "native-gloo")  # vLLM's own trainer helper
    slime = ("slime-nccl", "slime-gloo")  # SGLang's verbs and the trainer's own process group
    parser.add_argument("--transport", choices=("nccl", "ipc", "shm", "auto", *native, *slime))
    parser.add_argument("--tp", type=int, default=1, help="the replica's tensor-parallel size; transport auto")
    parser.add_argument("--dp", type=int, default=1, help="its data-parallel size; transport auto")
    parser.add_argument("--expert-parallel", action="store_true", help="of a shape with experts")
    parser.add_argument("--quantization", help="of the engines, such as fp8; both load it themselves")
    parser.add_argument("--replicas", type=int, default=1, help="transport auto: the first one shares the GPU")
    parser.add_argument("--one-gpu", action="store_true", help="all replicas share the GPU")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, help="default on a GPU")
    parser.add_argument("--more", type=int, default=0, help="further updates, for their times")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--deadline-s", type=float, default=400.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    is_cpu = options.device == "cpu"
    options.transport = options.transport or ("shm" if is_cpu else "nccl")
    options.dtype = "float32" if is_cpu else "bfloat16"
    options.trainer_device = "cuda:1" if options.transport.endswith("nccl") else "cuda:0"
    if options.batch_invariant is None:
        options.batch_invariant = not is_cpu
    if options.batch_invariant:
        # Set before vLLM is imported or NCCL used anywhere; child processes inherit it.
        os.environ |= NCCL_SETTINGS
    options.is_exact = options.batch_invariant or is_cpu
    with tempfile.TemporaryDirectory() as work:
        outcome, reports = asyncio.run(check(options, Path(work)))
    is_right = outcome.is_right(1.0 if options.is_exact else MIN_EQUAL)
    is_whole = all(one.error is None for report in reports for one in report.replicas)
    verdict = (
        ("EXACT" if options.is_exact and outcome.is_exact else "RIGHT") if is_right and is_whole else "DIFFERENT"
    )
    tables = {
        f"{verdict}: continuation after an update, against a fresh engine": table(
            ("", ""), list(asdict(outcome).items())
        ),
        "Updates": table(UPDATE_COLUMNS, [row for report in reports for row in update_rows(report)]),
    }
    results = {"verdict": verdict, "outcome": outcome, "reports": reports}
    finish(f"Continuation, {options.engine}, {options.shape}, {options.dtype}", tables, results, options.out)
    sys.exit(verdict == "DIFFERENT")


if __name__ == "__main__":
    main()
