"""Engine and trainer on the same GPUs: sleep, a training step, new weights, and the same requests continue.

    python -m tests.gpu.hybrid_cycle --shape qwen3-4b --out runs/hybrid.json
    python -m tests.gpu.hybrid_cycle --shape qwen3-4b --ranks 2 --tp 2 --kv-gib 24   # on two GPUs
    python -m tests.gpu.hybrid_cycle --shape qwen3-4b --ranks 2 --apart --replicas 2   # on four
    python -m tests.gpu.hybrid_cycle --device cpu --shape tiny [--ranks 2]     # simulated engine

A cycle: 64 requests start; `client.sleep(level)` midway; one AdamW step of the same model in this process;
`client.update_weights(model.named_parameters())`, which wakes the engine; all requests run to their ends. Each
level has some cycles. With `--ranks`, FSDP2 shards the model over that many processes, of which this one is rank 0;
all step and push together. Every rank's device is idle before the requests continue, because a rank that waits
within a collective would share its GPU with the engine. Memory is the use by all processes together on the first
GPU.

`--apart`: the engines have their own GPUs, before the trainer's. Nothing sleeps (level 0): the step precedes the
requests, and the push happens midway. With several replicas, a row is that of the replica with the longest pause.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

from agentloop.api.coordinator import ReplicaUpdate
from agentloop.client.client import RolloutClient
from agentloop.types import Generation
from agentloop_servers.local import running_service
from tests.benchmarks.report import finish, say, table
from tests.benchmarks.shapes import SHAPES, Shape, random_prompts, set_version
from tests.gpu.policy import service_config, show_gpus, write_policy

LEVELS = (1, 2)
APART = (0,)
CONTEXT_TOKENS = 2048
PROMPT_TOKENS = 128
BATCH = (4, 512)  # sequences and tokens of a training step
SLEEP_AFTER_S = 0.5  # after the start of generation
END_S = 30.0  # limit for another rank to end, and for its device to become idle after an update


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle. Memory in GB, None without a GPU."""

    level: int  # 0: no sleep
    sleep_ms: float
    step_ms: float
    update_ms: float  # wake, transfer, swap and resume
    stall_ms: float
    transfer_ms: float
    gb_per_s: float
    swap_ms: float
    verify_ms: float
    used_awake_gb: float | None
    used_asleep_gb: float | None
    used_training_gb: float | None  # in use right after the step
    used_again_gb: float | None
    transport: str | None
    num_requests: int
    num_mixed: int  # answers with tokens from before and from after
    num_lost: int  # requests that failed, or whose answer is incomplete

    @property
    def given_back_gb(self) -> float | None:
        if self.used_awake_gb is None or self.used_asleep_gb is None:
            return None
        return self.used_awake_gb - self.used_asleep_gb


class Trainer:
    """A transformers model with AdamW on this process's device; `begin` shards it over all ranks."""

    def __init__(self, options: argparse.Namespace, rank: int = 0) -> None:
        self.shape: Shape = SHAPES[options.shape]
        number = rank + (options.tp * options.replicas if options.apart else 0)
        self.device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", number)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        shape, device, dtype = self.shape, self.device, getattr(torch, options.dtype)
        if options.ranks > 1:
            backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
            meeting = f"file://{options.work / 'ranks'}"
            dist.init_process_group(backend, meeting, rank=rank, world_size=options.ranks)
        config = Qwen3Config(**shape.config(CONTEXT_TOKENS, str(dtype).removeprefix("torch.")))
        with torch.device(device):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        set_version(shape, self.tensors(), 0)

    def begin(self) -> None:
        """Shard the model if there are other ranks, and create the optimizer."""
        if dist.is_initialized():
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Yield each tensor once, under its checkpoint name."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def step(self) -> float:
        """Run one step on random tokens; returns the loss. Its temporary memory is released."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # sets this thread's device
        tokens = torch.randint(0, self.shape.vocab, BATCH, device=self.device)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return value


@contextmanager
def other_ranks(options: argparse.Namespace) -> Iterator[Sequence[Connection]]:
    """Start the other ranks; each receives the service's URL, then one version per cycle, and ends at None.

    A rank answers a version once the update is over and its device is idle.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(1, options.ranks):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_follow, args=(options, rank, theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        yield pipes
        tell(pipes, None)
        for process in processes:
            process.join(END_S)
    finally:
        for process in processes:
            process.kill()


def tell(ranks: Sequence[Connection], what: object) -> None:
    """Send a message to each rank."""
    for rank in ranks:
        rank.send(what)


def await_idle(ranks: Sequence[Connection]) -> None:
    """Wait until the devices of this rank and of all others are idle. Raises TimeoutError."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for number, rank in enumerate(ranks, start=1):
        if not rank.poll(END_S):
            raise TimeoutError(f"rank {number} is not through the update after {END_S:.0f} s")
        rank.recv()


def _follow(options: argparse.Namespace, rank: int, pipe: Connection) -> None:
    asyncio.run(_take_part(options, rank, pipe))


async def _take_part(options: argparse.Namespace, rank: int, pipe: Connection) -> None:
    """Step and push with rank 0."""
    trainer = Trainer(options, rank)
    trainer.begin()
    async with RolloutClient(await asyncio.to_thread(pipe.recv)) as client:
        while (version := await asyncio.to_thread(pipe.recv)) is not None:
            trainer.step()  # runs in this thread, whose device is this rank's
            await client.update_weights(trainer.model.named_parameters(), version=version)
            await_idle(())
            pipe.send(version)
    dist.destroy_process_group()


async def cycle(
    client: RolloutClient,
    trainer: Trainer,
    ranks: Sequence[Connection],
    options: argparse.Namespace,
    level: int,
    version: int,
) -> Cycle:
    """Run one cycle; `version` is the version of the new weights."""
    step_ms, sleep_ms, used_asleep = 0.0, 0.0, None
    if not level:
        step_ms = await _step(trainer, ranks, version)
    prompts = random_prompts(trainer.shape, options.requests, PROMPT_TOKENS, seed=version)
    calls = [asyncio.create_task(client.generate(prompt, max_tokens=options.tokens)) for prompt in prompts]
    try:
        await asyncio.sleep(SLEEP_AFTER_S)
        used_awake = used_gb()
        if level:
            began_at = time.perf_counter()
            await client.sleep(level)
            sleep_ms = ms_since(began_at)
            say(f"asleep, level {level}")
            used_asleep = used_gb()
            step_ms = await _step(trainer, ranks, version)
        used_training = used_gb()
        began_at = time.perf_counter()
        update = await _update(client, trainer, version)
        update_ms = ms_since(began_at)
        used_again = used_gb()
        say(f"updated over {update.transport}")
        await asyncio.to_thread(await_idle, ranks)
        say("all ranks are idle")
        answers = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    whole = [answer for answer in answers if isinstance(answer, Generation) and _is_whole(answer, options.tokens)]
    for error in answers:
        if isinstance(error, BaseException):
            print(f"a request failed: {error!r}", file=sys.stderr)
    return Cycle(
        level=level,
        sleep_ms=sleep_ms,
        step_ms=step_ms,
        update_ms=update_ms,
        stall_ms=update.stall_ms,
        transfer_ms=update.transfer_ms,
        gb_per_s=update.num_bytes / 1e6 / update.transfer_ms,
        swap_ms=update.swap_ms,
        verify_ms=update.verify_ms,
        used_awake_gb=used_awake,
        used_asleep_gb=used_asleep,
        used_training_gb=used_training,
        used_again_gb=used_again,
        transport=update.transport,
        num_requests=len(calls),
        num_mixed=sum(len(answer.weight_versions) > 1 for answer in whole),
        num_lost=len(calls) - len(whole),
    )


async def _step(trainer: Trainer, ranks: Sequence[Connection], version: int) -> float:
    """Run one training step of all ranks; returns milliseconds. The other ranks then push that version."""
    tell(ranks, version)
    began_at = time.perf_counter()
    await asyncio.to_thread(trainer.step)
    say("one training step")
    return ms_since(began_at)


def ms_since(began_at: float) -> float:
    """Return the milliseconds since a `time.perf_counter` value."""
    return (time.perf_counter() - began_at) * 1000


async def _update(client: RolloutClient, trainer: Trainer, version: int) -> ReplicaUpdate:
    report = await client.update_weights(trainer.model.named_parameters(), version=version)
    for replica in report.replicas:
        if replica.error is not None:
            raise RuntimeError(f"the replica did not take version {version}: {replica.error}")
    return max(report.replicas, key=lambda replica: replica.stall_ms)


def _is_whole(answer: Generation, num_tokens: int) -> bool:
    starts = [*(span.start for span in answer.weight_versions), len(answer.token_ids)]
    ends = [0, *(span.end for span in answer.weight_versions)]
    return len(answer.token_ids) == len(answer.logprobs) == num_tokens and starts == ends


def used_gb() -> float | None:
    """Return the memory in use on the first GPU, by all processes."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return float(total - free) / 1e9


async def run(options: argparse.Namespace) -> list[Cycle]:
    """Run all cycles on one service. Raises TimeoutError at the deadline."""
    with other_ranks(options) as ranks:
        return await _run(options, ranks)


async def _run(options: argparse.Namespace, ranks: Sequence[Connection]) -> list[Cycle]:
    is_cpu = options.device == "cpu"
    trainer = Trainer(options)
    facts = {"max_context_tokens": CONTEXT_TOKENS, "dtype": options.dtype}
    model = write_policy(trainer.shape, trainer.tensors(), options.work / "v0", **facts)
    trainer.begin()
    if options.apart and not is_cpu:
        show_gpus(options.tp * options.replicas)
    config = service_config(
        model,
        device=options.device,
        dtype=options.dtype,
        max_running=options.requests,
        kv_cache_mib=256 if is_cpu else int(options.kv_gib * 1024),
        kind="simulated" if is_cpu else options.engine,
        tensor_parallel_size=options.tp,
        mode="standalone" if options.apart else "hybrid",
        replicas=options.replicas,
    )
    run_dir = options.work / "run"
    run_dir.mkdir()
    cycles: list[Cycle] = []
    say("the trainer is ready")
    async with (
        asyncio.timeout(options.deadline_s),
        running_service(config, run_dir) as url,
        RolloutClient(url) as client,
    ):
        say("the service is ready")
        tell(ranks, url)
        for level in APART if options.apart else LEVELS:
            for _ in range(options.cycles):
                cycles.append(await cycle(client, trainer, ranks, options, level, version=len(cycles) + 1))
                say(str(cycles[-1]))
    say("the service has ended")
    return cycles


def cycles_table(cycles: Sequence[Cycle]) -> str:
    """Return one row per cycle."""
    names = [field.name for field in fields(Cycle)]
    rows = [[*(getattr(one, name) for name in names), one.given_back_gb] for one in cycles]
    return table([*(name.replace("_", " ") for name in names), "given back gb"], rows)


def main() -> None:
    """Print the table; exit with 1 if a request was lost or no request continued across an update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, a GPU each")
    parser.add_argument("--tp", type=int, default=1, help="the engine's tensor-parallel size")
    parser.add_argument("--apart", action="store_true", help="the engines have GPUs of their own")
    parser.add_argument("--replicas", type=int, default=1, help="of the engine; apart only")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--cycles", type=int, default=3, help="of each level")
    parser.add_argument("--kv-gib", type=float, default=40.0)
    parser.add_argument("--deadline-s", type=float, default=480.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.dtype = "float32" if options.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as work:
        options.work = Path(work)
        cycles = asyncio.run(run(options))
    finish(f"Hybrid cycles, {options.shape}", {"A row a cycle": cycles_table(cycles)}, cycles, options.out)
    sys.exit(any(one.num_lost or not one.num_mixed for one in cycles))


if __name__ == "__main__":
    main()
