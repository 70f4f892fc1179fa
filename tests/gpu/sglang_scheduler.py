"""Our code inside SGLang's scheduler, on a stock `sglang.Engine`: pauses, counts, staged weights, ends, NaN.

    python -m tests.gpu.sglang_scheduler --device cpu --shape tiny --prompts 8 --tokens 96
    python -m tests.gpu.sglang_scheduler [--shape small] [--graphs] [--tp 1] [--out FOLDER/scheduler.json]

Our adapter is not used: calls go over SGLang's own RPC socket. Greedy requests are in flight, in SGLang's
deterministic mode, while new weights are staged; they are paused, updated and resumed. The checks are printed as a
table; the exit status is 0 if all of them pass.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agentloop.engine.interface import CommitReport
from agentloop.values import codec
from agentloop_servers.weight_transfer.checkpoint import inspect_checkpoint
from agentloop_servers.weight_transfer.worker_calls import (
    CALL,
    CheckedFolder,
    RequestCounts,
    SchedulerAnswers,
    SchedulerCall,
    StageOrder,
    StageProgress,
    StageState,
    StagingSetup,
    from_text,
    to_text,
)
from agentloop_sglang.worker import run_scheduler
from tests.benchmarks.report import finish, say, table
from tests.benchmarks.shapes import SHAPES, make_tensors, random_prompts, set_version
from tests.gpu.policy import write_policy

CONTEXT_TOKENS = 2048


@dataclass
class Site:
    """A running engine, its calls, and the results."""

    engine: Any
    rows: list[tuple[str, object, str]] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def expect(self, what: str, value: object, is_right: bool) -> None:
        self.rows.append((what, value, "ok" if is_right else "WRONG"))
        say(f"{what}: {value} {'' if is_right else '   WRONG'}")

    def call(self, method: str, *arguments: Any) -> list[Any]:
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send  # noqa: PLC0415

        call = SchedulerCall(next(self.numbers), method, arguments)
        sock_send(self.engine.send_to_rpc, RpcReqInput(method=CALL, parameters={"call": to_text(call)}))
        output = sock_recv(self.engine.send_to_rpc)
        if not output.success:
            raise RuntimeError(output.message)
        answers = from_text(output.message, SchedulerAnswers)
        if any(answers.errors):
            raise RuntimeError(f"{method}: {answers.errors}")
        return list(answers.answers)

    def pause(self, *, is_cache_cleared: bool) -> RequestCounts:
        answers = self.call("requests_pause", is_cache_cleared)
        if len(set(answers)) != 1:
            raise RuntimeError("ranks differ in their requests")
        return codec.decode(answers[0], RequestCounts)

    async def stage(self, number: int, directory: Path) -> list[StageProgress]:
        info = inspect_checkpoint(str(directory))
        folder = CheckedFolder(str(directory), tuple(info.tensors.values()))
        self.call("weights_stage", codec.encode(StageOrder(number, folder=folder)))
        while True:
            stages = [codec.decode(answer, StageProgress) for answer in self.call("weights_poll", number)]
            if all(stage.state is not StageState.RECEIVING for stage in stages):
                return stages
            await asyncio.sleep(0.02)

    async def generate(self, rid: str, prompt: tuple[int, ...], num_tokens: int, key: str) -> tuple[int, ...]:
        from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        request = GenerateReqInput(
            rid=rid, input_ids=list(prompt), sampling_params=sampling, return_logprob=True, extra_key=key
        )
        async for output in self.engine.tokenizer_manager.generate_request(request, None):
            last = output
        return tuple(last["output_ids"])


async def in_flight(site: Site, prompts: list[tuple[int, ...]], num_tokens: int, name: str) -> list[asyncio.Task]:
    tasks = [
        asyncio.create_task(site.generate(f"{name}-{n:03d}", prompt, num_tokens, name))
        for n, prompt in enumerate(prompts)
    ]
    while True:  # until some of them have tokens
        await asyncio.sleep(0.3)
        counts = site.pause(is_cache_cleared=False)
        site.call("requests_resume")
        if sum(counts.num_output_ids.values()) > len(prompts) * num_tokens // 8:
            return tasks


async def check_update(
    site: Site, prompts: list[tuple[int, ...]], folder: Path, options: argparse.Namespace, *, is_cleared: bool
) -> None:
    """Check an update with requests in flight: the counts are right, and later tokens follow the new weights."""
    kind, number = ("recompute", 101) if is_cleared else ("keep", 102)
    tasks = await in_flight(site, prompts, options.tokens, kind)
    stages = await site.stage(number, folder)
    held = {str(stage.report.staging_device) if stage.report else stage.error for stage in stages}
    site.expect(f"{kind}: staged", held, held == {"host" if options.device == "cpu" else "device"})
    before = time.perf_counter()
    counts = site.pause(is_cache_cleared=is_cleared)
    paused_ms = (time.perf_counter() - before) * 1e3
    await asyncio.sleep(0.5)
    later = site.pause(is_cache_cleared=is_cleared)
    site.expect(f"{kind}: a paused scheduler samples nothing", len(counts.num_output_ids), counts == later)
    began = time.perf_counter()
    reports = [codec.decode(answer, CommitReport) for answer in site.call("weights_commit", number)]
    commit_ms = (time.perf_counter() - began) * 1e3
    site.call("requests_resume")
    outputs = await asyncio.gather(*tasks)
    site.expect(f"{kind}: pause ms", round(paused_ms, 1), True)
    site.expect(
        f"{kind}: commit ms (swap, verify)",
        f"{commit_ms:.1f} ({reports[0].swap_ms:.1f}, {reports[0].verify_ms:.1f})",
        True,
    )
    site.expect(f"{kind}: parameters compared", reports[0].num_verified, reports[0].num_verified > 0)
    complete = sum(len(output) == options.tokens for output in outputs)
    site.expect(f"{kind}: complete outputs", complete, complete == len(prompts))
    olds = [counts.num_output_ids.get(f"{kind}-{n:03d}", options.tokens) for n in range(len(prompts))]
    num_mixed = sum(0 < old < options.tokens for old in olds)
    site.expect(f"{kind}: requests with both versions", num_mixed, num_mixed > 0)
    if is_cleared:
        again = [
            site.generate(f"again-{n:03d}", prompts[n] + outputs[n][:old], options.tokens - old, "new")
            for n, old in enumerate(olds)
            if old < options.tokens
        ]
        rests = [output[old:] for output, old in zip(outputs, olds, strict=True) if old < options.tokens]
        num_equal = sum(one == other for one, other in zip(await asyncio.gather(*again), rests, strict=True))
        site.expect(f"{kind}: go on exactly as the new weights say", num_equal, num_equal == len(rests))


async def check_ends(site: Site, prompts: list[tuple[int, ...]], num_tokens: int) -> None:
    """Check that requests end during a pause with their tokens so far, and that the others continue."""
    for is_cleared in (False, True):
        name = "end-cleared" if is_cleared else "end"
        tasks = await in_flight(site, prompts, num_tokens, name)
        counts = site.pause(is_cache_cleared=is_cleared)
        ended = [f"{name}-{n:03d}" for n in range(0, len(prompts), 2)]
        site.call("requests_end", codec.encode(tuple(ended)))
        try:
            async with asyncio.timeout(10.0):
                outputs = await asyncio.gather(*tasks[::2])
            lengths = [len(output) for output in outputs]
        except TimeoutError:
            lengths = []
        wanted = [counts.num_output_ids.get(rid, num_tokens) for rid in ended]
        site.expect(f"{name}: in a pause, with all their tokens", sum(lengths), lengths == wanted)
        site.call("requests_resume")
        others = await asyncio.gather(*tasks[1::2])
        site.expect(f"{name}: the others go on", len(others), all(len(one) == num_tokens for one in others))


async def check_poison(site: Site, source: Path, work: Path) -> None:
    """Check that a checkpoint with NaN is refused while it is staged."""
    folder = work / "poisoned"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("k_proj.weight"))
    tensors[name][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    errors = {stage.error for stage in await site.stage(103, folder)}
    site.expect("NaN is refused at the stage", errors, all("not finite" in error for error in errors))
    site.call("weights_drop", 103)


def make_engine(model: Path, options: argparse.Namespace) -> Any:
    from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415

    class OurEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler)

    backend = {
        "cuda": {"attention_backend": "triton", "enable_deterministic_inference": True, "mem_fraction_static": 0.5},
        "cpu": {"attention_backend": "torch_native", "mem_fraction_static": 0.1, "max_total_tokens": 16384},
    }[options.device]
    return OurEngine(
        model_path=str(model),
        device=options.device,
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        disable_cuda_graph=not options.graphs,
        tp_size=options.tp,
        context_length=CONTEXT_TOKENS,
        dtype=options.dtype,
        page_size=16,
        max_running_requests=options.prompts,
        log_level="error",
        **backend,
    )


async def check(options: argparse.Namespace, work: Path) -> Site:
    shape = SHAPES[options.shape]
    device = torch.device("cpu" if options.device == "cpu" else "cuda:0")
    tensors = make_tensors(shape, device, getattr(torch, options.dtype), version=0)
    facts = {"max_context_tokens": CONTEXT_TOKENS, "dtype": options.dtype}
    old = write_policy(shape, tensors, work / "v0", **facts)
    set_version(shape, tensors, 1)
    new = write_policy(shape, tensors, work / "v1", **facts)
    del tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
    site = Site(make_engine(old, options))
    say("SGLang is up")
    try:
        info = inspect_checkpoint(str(old))
        setup = StagingSetup(CheckedFolder(str(old), tuple(info.tensors.values())), "auto", 120.0)
        site.call("weights_prepare", codec.encode(setup))
        prompts = random_prompts(shape, options.prompts, 64)
        await site.generate("warm", prompts[0], 8, "warm")
        for what in (
            check_update(site, prompts, new, options, is_cleared=True),
            check_update(site, prompts, old, options, is_cleared=False),
            check_ends(site, prompts, options.tokens),
            check_poison(site, old, work),
        ):
            try:
                async with asyncio.timeout(options.deadline_s):
                    await what
            except Exception as error:
                site.expect(getattr(what, "__name__", "part"), repr(error)[:300], is_right=False)
    finally:
        site.engine.shutdown()
    return site


def main() -> None:
    """Print the table; exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--deadline-s", type=float, default=90.0, help="of each part")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.dtype = "float32" if options.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as work:
        site = asyncio.run(check(options, Path(work)))
    rows = table(("", "", ""), site.rows)
    finish(f"SGLang's scheduler, {options.shape}", {"": rows}, site.rows, options.out)
    sys.exit(any(row[2] == "WRONG" for row in site.rows))


if __name__ == "__main__":
    main()
