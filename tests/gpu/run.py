"""Check and measure one engine lane on the GPUs of this host, part by part, in one command.

    tests/gpu/run.sh vllm                                    # the default parts; within 9 minutes on one GPU
    tests/gpu/run.sh sglang --only contract,recompute        # some of them
    tests/gpu/run.sh vllm --only contract-tp2,sampling-tp2   # an engine over two GPUs
    tests/gpu/run.sh vllm --only throughput-full --out runs/gpu-vllm
    tests/gpu/run.sh vllm --list                             # every part, what it needs and what it answers
    tests/gpu/run.sh vllm --device cpu --only contract       # a rehearsal of some parts without a GPU

Most parts run in parallel on the same GPU: they use little of its memory, and starting engines takes most of their
time. The throughput is measured when all others have ended. A part has its own time limit, and the whole run has
`--budget-s`; a part that fails or is cut short does not stop the others. Everything is written to one folder
(`--out`): a folder per part, with its output (`log.txt`), figures (`result.json`) and verdict (`part.json`). After
a second run with the same folder and `--only`, the final table still shows the other parts' earlier results. Exit
status: 0 if every part that ran passed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

CHECKOUT = Path(__file__).resolve().parents[2]
LANES = ("vllm", "sglang")
BUDGET_S = 530.0
END_S = 20.0  # time for a part past its limit to stop its service
GATE = "quiet"
PRECOMPILE_S = 60.0
LEAST_S = 2.0  # remaining time required to start another part
TINY = "examples/tiny_policy/v1"
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0",
}
"""Variables that keep every library from NVLink multicast: a program that ends abruptly can put the GPUs of a
host, which others may share, out of service."""


@dataclass(frozen=True, slots=True)
class Run:
    """State shared by the parts of one command."""

    lane: str
    device: str
    out: Path
    num_gpus: int
    tests: str = ""  # pytest's expression that selects tests of suites; empty: all

    def folder(self, part: str) -> Path:
        """Return the part's folder, under `--out`."""
        return self.out / part

    def result(self, part: str) -> Path:
        """Return the file of its figures."""
        return self.folder(part) / "result.json"


Figures = Callable[[Run, str], str]


@dataclass(frozen=True, slots=True)
class Part:
    """One command with a verdict. It starts once the parts in `after` have ended, as far as they are selected."""

    name: str
    answers: str
    command: Callable[[Run], list[str]]
    timeout_s: float
    figures: Figures
    after: tuple[str, ...] = ()
    is_alone: bool = False  # it starts when all parts before it have ended
    has_gate: bool = False  # its measurements wait for the end of all other parts, signaled by a file
    min_gpus: int = 1
    is_default: bool = True
    lanes: tuple[str, ...] = LANES
    env: tuple[tuple[str, str], ...] = ()
    reserve_s: float = 0.0  # time that earlier stages reserve for it

    def runs_in(self, run: Run) -> bool:
        """Return True if this host and lane meet its requirements."""
        return run.lane in self.lanes and (run.device == "cpu" or run.num_gpus >= self.min_gpus)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of one part: PASS, FAIL, TIME (its own limit), or CUT (the limit of the whole run)."""

    part: str
    verdict: str
    seconds: float
    figures: str


# Commands


def module(name: str, *arguments: str, out: str) -> Callable[[Run], list[str]]:
    """Return the command of a module that writes its figures as JSON."""

    def command(run: Run) -> list[str]:
        filled = [argument.format(lane=run.lane, device=run.device, gate=run.out / GATE) for argument in arguments]
        return [sys.executable, "-m", name, *filled, "--out", str(run.result(out))]

    return command


def suite(*paths: str) -> Callable[[Run], list[str]]:
    """Return the command of contract tests of the lane's engine alone."""

    def command(run: Run) -> list[str]:
        chosen = f"{run.lane} and ({run.tests})" if run.tests else run.lane
        options = ["-q", "-m", "engine", "-k", chosen, "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
        return [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "--durations=5",
            *(f"tests/contract/{path}" for path in paths),
        ]

    return command


def throughput(name: str, *arguments: str) -> Callable[[Run], list[str]]:
    """Compare the service with the bare engine; on CPU in a small form."""
    always = ("--engine", "{lane}", "--device", "{device}")
    gpu = module("tests.benchmarks.gpu_throughput", *always, *arguments, "--gate", "{gate}", out=name)
    small = ("--model", TINY, "--at-once", "8", "--sampled", "24", "--load-processes", "1")
    small += ("--window-s", "8", "--ramp-s", "3", "--rounds", "200")
    cpu = module("tests.benchmarks.gpu_throughput", *always, *small, out=name)
    return lambda run: (cpu if run.device == "cpu" else gpu)(run)


def delta_updates(run: Run) -> list[str]:
    """Measure published deltas, with the 4B shape; on CPU with a tiny shape."""
    small = ("--shape", "tiny", "--at-once", "4", "--max-tokens", "32", "--eager") if run.device == "cpu" else ()
    return module("tests.gpu.deltas", "--engine", "{lane}", "--device", "{device}", *small, out="deltas")(run)


# Figures


def log_of(run: Run, part: str) -> str:
    """Return the part's output."""
    path = run.folder(part) / "log.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def results_of(run: Run, part: str) -> Any:
    """Return the results that the part wrote; an empty dict without results."""
    path = run.result(part)
    return json.loads(path.read_text())["results"] if path.exists() else {}


def suite_counts(run: Run, part: str) -> str:
    """Return pytest's last line, and the first tests that failed."""
    log = log_of(run, part)
    lines = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|error|skipped|deselected).*?)(?: =+)?$", log, re.M)
    failed = [name.rpartition("::")[2] for name in re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.M)]
    return "; ".join(filter(None, [lines[-1] if lines else "", ", ".join(failed[:3])])) or last_line(run, part)


def last_line(run: Run, part: str) -> str:
    """Return the last line of the part's output."""
    lines = [line.strip() for line in log_of(run, part).splitlines() if line.strip()]
    return lines[-1][:120] if lines else ""


def gap_of(run: Run, part: str) -> str:
    """Return the gap, and each part of it: p50 and maximum in milliseconds."""
    found = results_of(run, part)["single"]
    parts = {"gap": found["gaps"], **found["parts"]}
    return "; ".join(f"{name} {one['p50']:.1f}, {one['maximum']:.1f}" for name, one in parts.items())


def recomputed(run: Run, part: str) -> str:
    """Return success and differences."""
    found = results_of(run, part).get("outcome")
    if not found:
        return last_line(run, part)
    return (
        f"success {found['success_v0']:.1%} / {found['success_v1']:.1%}, |recorded - recomputed|"
        f" {found['difference_named']:.4f} ({found['num_mixed']} of both versions),"
        f" {found['tokens_per_s']:,.0f} tok/s"
    )


def continued(run: Run, part: str) -> str:
    """Return the number of prompts that continued like a fresh engine, and the pause."""
    results = results_of(run, part)
    if not results:
        return last_line(run, part)
    found, *further = results["outcome"], *results["reports"][1:]
    first = [f"{one['transport']}, stall {one['stall_ms']:.0f} ms" for one in results["reports"][0]["replicas"]]
    later = [one for report in further for one in report["replicas"]]
    stalls = [f"then up to {max(one['stall_ms'] for one in later):.0f} ms"] if later else []
    counts = f"{results['verdict']}, {found['num_equal_after']} of {found['num_prompts']} as a fresh engine"
    return ", ".join([counts, *first, *stalls])


def cycled(run: Run, part: str) -> str:
    """Return the requests lost over the cycles, and the slowest update except for the first."""
    cycles = results_of(run, part)
    if not cycles:
        return last_line(run, part)
    updates = [one["update_ms"] for one in cycles[1:]]
    return (
        f"{len(cycles)} cycles, {sum(one['num_lost'] for one in cycles)} lost, update up to {max(updates):.0f} ms"
    )


def followed(run: Run, part: str) -> str:
    """Return size, preparation and pause for each share of changed bytes, and those of a directory push."""
    rows = results_of(run, part)
    return "; ".join(
        f"{row['share']:.1%}: {row['size']:.1%}, prepared {row['prepare_s']:.1f} s"
        f" (push {row['push_prepare_s']:.1f}), pause {row['pause_ms']:.0f} ms (push {row['push_pause_ms']:.0f})"
        for row in rows
    ) or last_line(run, part)


def prepared(run: Run, part: str) -> str:
    """Return the seconds of writing the model, and of the first start."""
    return ", ".join(f"{name.removesuffix('_s')} {value:.0f} s" for name, value in results_of(run, part).items())


def ratios(run: Run, part: str) -> str:
    """Return each arm's throughput relative to the bare engine; without a bare engine, tokens per second."""
    results = results_of(run, part)
    if not results:
        return last_line(run, part)
    bare = [
        f"{name} {value:,.0f} tok/s" for name, value in results["tokens_per_s"].items() if name.startswith("bare")
    ]
    shares = [f"{name} {value:.3f}" for name, value in results["ratios"].items()]
    alone = [] if shares else [f"{name} {value:,.0f} tok/s" for name, value in results["tokens_per_s"].items()]
    return ", ".join([*bare, *shares, *alone, *results["failures"][:1]])


# Parts

TENSOR_PARALLEL = (
    ("CONTRACT_TENSOR_PARALLEL", "2"),
    ("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0"),  # other processes use the GPUs
)
NO_SHARED_MEMORY = (("NCCL_SHM_DISABLE", "1"), ("NCCL_P2P_DISABLE", "1"))  # as between two hosts: over sockets
STEADY = ("--shape", "qwen3-4b", "--arms", "service,streams", "--cycles", "1", "--window-s", "45")
STEADY += ("--ramp-s", "8", "--kv-mib", "56000")  # fits into 80 GB without other parts
CONTINUATION = ("--engine", "{lane}", "--device", "{device}")


def continuation_2(name: str, answers: str, *arguments: str, after: str, is_alone: bool = False) -> Part:
    """Return a continuation part on two GPUs. Parts ordered by `after` run one after another."""
    command = module("tests.gpu.continuation", *CONTINUATION, "--transport", "auto", *arguments, out=name)
    fields = {"after": (after,) if after else (), "is_alone": is_alone, "min_gpus": 2, "is_default": False}
    return Part(name, answers, command, 300, continued, **fields)  # type: ignore[arg-type]


PARTS = (
    Part(
        "contract",
        "the engine keeps its contract: pauses, updates, versions, aborts",
        suite("test_engine_contract.py"),
        400,
        suite_counts,
    ),
    Part(
        "sampling",
        "logprobs and sampling are what an independent model says",
        suite("test_logprobs_contract.py", "test_sampling_contract.py"),
        400,
        suite_counts,
    ),
    Part(
        "recompute",
        "success and logprobs of the shipped policy on a whole service, over an update",
        module("tests.gpu.recompute", "--engine", "{lane}", "--device", "{device}", "--eager", out="recompute"),
        240,
        recomputed,
    ),
    Part(
        "continuation-ipc",
        "what follows an update is what a fresh engine says, over CUDA IPC",
        module("tests.gpu.continuation", *CONTINUATION, "--transport", "ipc", out="continuation-ipc"),
        240,
        continued,
    ),
    Part(
        "routes",
        "routed experts of a mixture of experts: their rows, the mismatch with a replay, and their cost",
        module("tests.gpu.routes", out="routes"),
        560,
        last_line,
        is_alone=True,
        is_default=False,
        lanes=("vllm",),
    ),
    Part(
        "continuation-nccl",
        "the same over NCCL, from another GPU",
        module("tests.gpu.continuation", *CONTINUATION, "--transport", "nccl", out="continuation-nccl"),
        240,
        continued,
        after=("continuation-ipc", "continuation-dp2"),
        min_gpus=2,
    ),
    Part(
        "native-ipc",
        "the same by vLLM's own trainer helper over CUDA IPC, 4B into two engines on one GPU",
        module(
            "tests.gpu.continuation",
            *(*CONTINUATION, "--transport", "native-ipc", "--shape", "qwen3-4b", "--replicas", "2", "--one-gpu"),
            out="native-ipc",
        ),
        400,
        continued,
        is_alone=True,
        is_default=False,
        lanes=("vllm",),
    ),
    Part(
        "native-nccl",
        "the same over NCCL, from another GPU",
        module("tests.gpu.continuation", *CONTINUATION, "--transport", "native-nccl", out="native-nccl"),
        300,
        continued,
        min_gpus=2,
        is_alone=True,
        is_default=False,
        lanes=("vllm",),
    ),
    Part(
        "slime-nccl",
        "the same by SGLang's verbs and a group of the trainer's own over NCCL",
        module("tests.gpu.continuation", *CONTINUATION, "--transport", "slime-nccl", out="slime-nccl"),
        300,
        continued,
        min_gpus=2,
        is_alone=True,
        is_default=False,
    ),
    Part(
        "continuation-moe",
        "the same of a model with experts, on one GPU",
        module(
            "tests.gpu.continuation",
            *(*CONTINUATION, "--transport", "ipc", "--shape", "small-moe"),
            out="continuation-moe",
        ),
        240,
        continued,
        is_default=False,
    ),
    Part(
        "model",
        "the throughput's model is written, and its graphs are compiled, before they are needed",
        module("tests.benchmarks.gpu_warm_up", "--engine", "{lane}", "--device", "{device}", out="model"),
        240,
        prepared,
    ),
    Part(
        "hybrid",
        "sleep, a training step, new weights and wake lose no request",
        module(
            "tests.gpu.hybrid_cycle",
            *("--engine", "{lane}", "--device", "{device}", "--shape", "small", "--kv-gib", "8"),
            out="hybrid",
        ),
        300,
        cycled,
    ),
    Part(
        "model-turns",
        "two models take turns on one GPU: 20 switches under load, and 512 judge rewards",
        module("tests.gpu.model_turns", "--device", "{device}", "--eager", out="model-turns"),
        480,
        last_line,
        is_alone=True,
        is_default=False,
        lanes=("vllm",),
    ),
    Part(
        "adapters",
        "LoRA adapters by name: 8 beside 1, beside the base, and 40 pushes under load",
        module("tests.gpu.adapters", "--device", "{device}", out="adapters"),
        480,
        last_line,
        is_alone=True,
        is_default=False,
        lanes=("vllm",),
    ),
    Part(
        "speculative",
        "drafts of n-grams at 1, 8, 64 and 512 in flight: speed, acceptance, and logprobs recomputed",
        module("tests.gpu.speculative", "--device", "{device}", out="speculative"),
        300,
        last_line,
        is_alone=True,
        is_default=False,
        lanes=("vllm",),
    ),
    Part(
        "deltas",
        "a store of published versions is followed under load: preparation, pause and size beside directory pushes",
        delta_updates,
        480,
        followed,
        is_alone=True,
        is_default=False,
    ),
    Part(
        "throughput",
        "the service's share of the bare engine's throughput, 512 in flight, 4B shape",
        throughput("throughput", "--shape", "qwen3-4b", "--cycles", "1", "--window-s", "20"),
        400,
        ratios,
        after=("continuation-ipc", "continuation-nccl", "hybrid", "model"),
        has_gate=True,
        reserve_s=150,
    ),
    Part(
        "throughput-full",
        "service and bare engine in turn, twice, in windows of 45 s",
        throughput("throughput-full", "--shape", "qwen3-4b", "--arms", "service,bare"),
        540,
        ratios,
        is_alone=True,
        is_default=False,
    ),
    Part(
        "throughput-shipped",
        "the same for the shipped policy",
        throughput("throughput-shipped", "--model", TINY, "--sampled", "64", "--rounds", "60", "--cycles", "1"),
        400,
        ratios,
        is_alone=True,
        is_default=False,
    ),
    Part(
        "throughput-1",
        "one replica, streams too: the other arm of throughput-2",
        throughput("throughput-1", *STEADY),
        350,
        ratios,
        is_alone=True,
        is_default=False,
    ),
    Part(
        "throughput-2",
        "two replicas on two GPUs: compare its tokens a second with throughput-1's",
        throughput("throughput-2", *STEADY, "--replicas", "2", "--at-once", "1024", "--load-processes", "8"),
        350,
        ratios,
        is_alone=True,
        min_gpus=2,
        is_default=False,
    ),
    Part(
        "throughput-tp2",
        "one replica over two GPUs",
        throughput("throughput-tp2", "--shape", "qwen3-4b", "--tp", "2", "--arms", "service,bare", "--cycles", "1"),
        400,
        ratios,
        is_alone=True,
        min_gpus=2,
        is_default=False,
    ),
    Part(
        "contract-tp2",
        "the contract of an engine over two GPUs",
        suite("test_engine_contract.py"),
        500,
        suite_counts,
        min_gpus=2,
        is_default=False,
        env=TENSOR_PARALLEL,
    ),
    Part(
        "sampling-tp2",
        "its logprobs and sampling",
        suite("test_logprobs_contract.py", "test_sampling_contract.py"),
        500,
        suite_counts,
        after=("contract-tp2",),  # two engines that each wait for both GPUs slow each other down
        min_gpus=2,
        is_default=False,
        env=TENSOR_PARALLEL,
    ),
    continuation_2(
        "continuation-ep2",
        "an update of experts that are spread over two tensor-parallel ranks",
        *("--shape", "small-moe", "--tp", "2", "--expert-parallel"),
        after="",
    ),
    continuation_2(
        "continuation-ep-dp2",
        "an update of experts that are spread over a gang of two data-parallel ranks",
        *("--shape", "small-moe", "--dp", "2", "--expert-parallel"),
        after="continuation-ep2",
    ),
    continuation_2(
        "continuation-2",
        "one push to two replicas, over IPC and over NCCL",
        *("--replicas", "2"),
        after="",
    ),
    continuation_2(
        "continuation-dp2",
        "an update of a gang of two data-parallel ranks",
        *("--dp", "2"),
        after="continuation-2",
    ),
    continuation_2(
        "continuation-tp2",
        "one push to both ranks of a replica, over IPC and over NCCL",
        *("--tp", "2"),
        after="continuation-dp2",
    ),
    Part(
        "gap-nccl",
        "what requests see of an update over NCCL, beside vLLM's own path and a torch broadcast; 4B shape, eager",
        module(
            "tests.benchmarks.weight_updates",
            *("--engine", "{lane}", "--shape", "qwen3-4b", "--transport", "nccl", "--kv-gib", "46"),
            *("--context", "5120", "--window-s", "2", "--consecutive", "10", "--deadline-s", "240"),
            *("--variants", "link,staged,native"),
            out="gap-nccl",
        ),
        260,
        last_line,
        is_alone=True,
        min_gpus=2,
        is_default=False,
    ),
    continuation_2(
        "push-2",
        "times of one push to two replicas, over IPC and over NCCL, 4B shape",
        *("--replicas", "2", "--shape", "qwen3-4b", "--no-batch-invariant", "--more", "5"),
        after="",
        is_alone=True,
    ),
    Part(
        "transports",
        "bytes arrive over every transport, with lost receivers and senders",
        module("tests.gpu.push_transports", out="transports"),
        400,
        last_line,
        is_alone=True,
        is_default=False,
    ),
    Part(
        "hybrid-2",
        "sleep, a step of two FSDP2 ranks, new weights and wake of an engine over the same two GPUs, 4B shape",
        module(
            "tests.gpu.hybrid_cycle",
            *("--engine", "{lane}", "--device", "{device}", "--shape", "qwen3-4b", "--kv-gib", "8"),
            *("--ranks", "2", "--tp", "2", "--cycles", "2", "--tokens", "192"),
            out="hybrid-2",
        ),
        360,
        cycled,
        min_gpus=2,
        is_default=False,
    ),
    Part(
        "ranks-2",
        "pushes of two FSDP2 ranks to two replicas, each with a GPU of its own: NCCL alone, 4B shape",
        module(
            "tests.gpu.hybrid_cycle",
            *("--engine", "{lane}", "--device", "{device}", "--shape", "qwen3-4b", "--kv-gib", "24"),
            *("--ranks", "2", "--apart", "--replicas", "2", "--cycles", "8"),
            out="ranks-2",
        ),
        360,
        cycled,
        is_alone=True,
        min_gpus=4,
        is_default=False,
    ),
    Part(
        "transports-2",
        "bytes of the 4B shape's size arrive over NCCL, and over IPC and NCCL in one push, with lost receivers",
        module(
            "tests.gpu.push_transports",
            *("--transports", "nccl,auto", "--gib", "7.5", "--updates", "10"),
            out="transports-2",
        ),
        200,
        last_line,
        is_alone=True,
        min_gpus=2,
        is_default=False,
    ),
    Part(
        "link-sockets",
        "a torch broadcast as between two hosts: no shared memory, no peer-to-peer copies",
        module("tests.benchmarks.link_speed", out="link-sockets"),
        120,
        last_line,
        is_alone=True,
        min_gpus=2,
        is_default=False,
        env=NO_SHARED_MEMORY,
    ),
    Part(
        "transports-sockets",
        "bytes arrive over NCCL as between two hosts",
        module(
            "tests.gpu.push_transports",
            *("--transports", "nccl,auto", "--gib", "4", "--updates", "5", "--shared"),
            out="transports-sockets",
        ),
        200,
        last_line,
        min_gpus=2,
        is_default=False,
        env=NO_SHARED_MEMORY,
    ),
    Part(
        "gap-ipc",
        "what requests see of an update over CUDA IPC, 4B shape, CUDA graphs",
        module(
            "tests.benchmarks.weight_updates",
            *("--engine", "{lane}", "--graphs", "--shape", "qwen3-4b", "--transport", "ipc"),
            out="gap-ipc",
        ),
        560,
        last_line,
        is_alone=True,
        is_default=False,
    ),
    Part(
        "swap",
        "the parts of the gap at an update over CUDA IPC, 4B shape, CUDA graphs, 20 updates",
        module(
            "tests.benchmarks.weight_updates",
            *(
                "--engine",
                "{lane}",
                "--graphs",
                "--shape",
                "qwen3-4b",
                "--transport",
                "ipc",
                "--variants",
                "single",
            ),
            *("--updates", "20", "--spacing-s", "0.2", "--context", "3072", "--kv-gib", "22", "--gate", "{gate}"),
            out="swap",
        ),
        300,
        gap_of,
        has_gate=True,
        is_default=False,
    ),
    Part(
        "native-sampler",
        "what SGLang's own sampler does otherwise than ours",
        module("tests.gpu.sglang_native_sampler", out="native-sampler"),
        300,
        last_line,
        is_alone=True,
        is_default=False,
        lanes=("sglang",),
    ),
    Part(
        "step-times",
        "the seconds of prefills and decode steps, for the balancer",
        module("tests.gpu.step_times", out="step-times"),
        560,
        last_line,
        is_alone=True,
        is_default=False,
        lanes=("vllm",),
    ),
)


# Running


async def run_part(part: Part, run: Run, ends_at: float) -> Verdict:
    """Run one part until it ends or exceeds its time, and write its verdict to disk."""
    folder = run.folder(part.name)
    folder.mkdir(parents=True, exist_ok=True)
    run.result(part.name).unlink(missing_ok=True)
    command, began_at = part.command(run), time.monotonic()
    left_s = ends_at - began_at
    if left_s < LEAST_S:
        return kept(run, Verdict(part.name, "CUT", 0.0, "no time was left"))
    say(f"{part.name} begins")
    with (folder / "log.txt").open("wb") as log:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=CHECKOUT,
            env=environment(part),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(min(part.timeout_s, left_s)):
                status = await process.wait()
            word = "FAIL" if status else "PASS"
        except TimeoutError:
            word = "TIME" if part.timeout_s <= left_s else "CUT"
        finally:
            await end(process)
    try:
        figures = part.figures(run, part.name)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        figures = f"no figures: {error!r}"
    verdict = Verdict(part.name, word, time.monotonic() - began_at, figures)
    say(f"{part.name}: {verdict.verdict} after {verdict.seconds:.0f} s: {verdict.figures}")
    return kept(run, verdict)


async def end(process: asyncio.subprocess.Process) -> None:
    """Stop a part and its remaining processes: first by SIGINT, so that a service shuts down cleanly."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def environment(part: Part) -> dict[str, str]:
    """Return the part's environment variables, with the path of the sandbox's binary."""
    found = {**os.environ, **WITHOUT_MULTICAST, **dict(part.env)}
    if "MONTY_BIN" not in found:  # packages unpacked into a folder have their programs next to it
        places = (Path(entry) / "bin" / "monty" for entry in sys.path)
        binary = next((place for place in places if place.is_file()), None)
        if binary is not None:
            found["MONTY_BIN"] = str(binary)
    return found


def kept(run: Run, verdict: Verdict) -> Verdict:
    """Write a verdict to disk."""
    run.folder(verdict.part).mkdir(parents=True, exist_ok=True)
    (run.folder(verdict.part) / "part.json").write_text(json.dumps(asdict(verdict)))
    return verdict


async def run_parts(parts: Sequence[Part], run: Run, budget_s: float) -> list[Verdict]:
    """Run the parts in parallel, as far as they do not have to wait for each other."""
    ends_at = time.monotonic() + budget_s
    reserved_s = sum(part.reserve_s for part in parts)
    ended = {part.name: asyncio.Event() for part in parts}
    gate = run.out / GATE
    gate.unlink(missing_ok=True)

    async def run_one(number: int, part: Part) -> Verdict:
        before = [one.name for one in parts[:number]] if part.is_alone else part.after
        for name in before:
            if name in ended:
                await ended[name].wait()
        try:
            is_last = part.is_alone or part.has_gate
            return await run_part(part, run, ends_at if is_last else ends_at - reserved_s)
        finally:
            ended[part.name].set()
            if all(ended[one.name].is_set() for one in parts if not one.is_alone and not one.has_gate):
                gate.touch()

    if all(part.is_alone or part.has_gate for part in parts):
        gate.touch()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_one(number, part)) for number, part in enumerate(parts)]
    return [task.result() for task in tasks]


def summary(run: Run) -> str:
    """Return the table of all parts in this folder, in order."""
    rows = []
    for part in PARTS:
        path = run.folder(part.name) / "part.json"
        if path.exists():
            verdict = Verdict(**json.loads(path.read_text()))
            rows.append(f"| {verdict.part} | {verdict.verdict} | {verdict.seconds:.0f} | {verdict.figures} |")
    return "\n".join(["| part | verdict | s | figures |", "|---|---|---:|---|", *rows])


def say(what: str) -> None:
    """Print progress, with the seconds since the start."""
    print(f"{time.monotonic() - STARTED_AT:6.1f} s  {what}", flush=True)


STARTED_AT = time.monotonic()


def precompile(package: str) -> None:
    """Compile packages that were unpacked next to an engine; otherwise every starting process compiles them."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or (Path(found.origin).parent / "__pycache__").is_dir():
        return
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(Path(found.origin).parents[1])]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=PRECOMPILE_S)
    say(f"{package}'s folder is compiled")


def count_gpus() -> int:
    """Return the number of GPUs of this host, without making a context on any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def chosen(options: argparse.Namespace, run: Run) -> list[Part]:
    """Return the parts to run. Exits for an unknown name."""
    only, skipped = (set(filter(None, (text or "").split(","))) for text in (options.only, options.skip))
    unknown = (only | skipped) - {part.name for part in PARTS}
    if unknown:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    wanted = [
        part for part in PARTS if (part.name in only if only else part.is_default) and part.name not in skipped
    ]
    for part in wanted:
        if not part.runs_in(run):
            say(f"{part.name} is left out: {part.min_gpus} GPU(s) and lane {' or '.join(part.lanes)} are needed")
    return [part for part in wanted if part.runs_in(run)]


def describe(run: Run) -> str:
    """Print every part: its command, needs and question."""
    lines = []
    for part in PARTS:
        needs = f"{part.min_gpus} GPU(s), at most {part.timeout_s:.0f} s" + (
            "" if part.is_default else ", by name only"
        )
        lines += [
            f"{part.name}: {part.answers} ({needs}; {', '.join(part.lanes)})",
            f"    {' '.join(part.command(run))}",
        ]
    return "\n".join(lines)


def main() -> None:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", choices=LANES)
    parser.add_argument("--only", metavar="PART[,PART]")
    parser.add_argument("--skip", metavar="PART[,PART]")
    parser.add_argument(
        "--tests", default="", metavar="EXPRESSION", help="of suites, only those that pytest's -k takes"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="the time limit of all parts together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="describe every part and stop")
    parser.add_argument("--dry", action="store_true", help="print what would run and stop")
    options = parser.parse_args()
    name = f"gpu-{options.lane}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
    out = (options.out or CHECKOUT / "runs" / name).resolve()
    is_shown = options.list or options.dry  # as on a host with a GPU
    run = Run(options.lane, options.device, out, max(count_gpus(), is_shown), options.tests)
    if options.list:
        print(describe(run))
        return
    parts = chosen(options, run)
    if options.dry:
        for part in parts:
            begins = "alone" if part.is_alone else f"after {', '.join(part.after)}" if part.after else "at once"
            print(f"{part.name}, {begins}: {' '.join(part.command(run))}")
        return
    out.mkdir(parents=True, exist_ok=True)
    say(f"{len(parts)} parts on {run.num_gpus} GPU(s), into {out}")
    precompile(run.lane)
    found = asyncio.run(run_parts(parts, run, options.budget_s - (time.monotonic() - STARTED_AT)))
    table = summary(run)
    (out / "summary.md").write_text(table + "\n")
    print(f"\n{table}\n\n{time.monotonic() - STARTED_AT:.0f} s; details in {out}", flush=True)
    sys.exit(any(verdict.verdict != "PASS" for verdict in found) or not found)


if __name__ == "__main__":
    main()
