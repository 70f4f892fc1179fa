"""The same requests straight into an engine, without our service: one process, token ids, final-only output.

`gpu_throughput` starts it beside a service and lets it begin when that is gone: it imports its engine, waits for a
line on its standard input, and writes its figures as JSON. The engine has the service's own arguments, less what
only the service needs: events of the KV cache, and our code in its workers.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from agentloop.aio import freeze_gc
from agentloop.types import SamplingParams
from agentloop_servers import engine_parts
from agentloop_servers.config import ServiceConfig
from agentloop_servers.engines.sglang import config as sglang
from agentloop_servers.engines.vllm import config as vllm
from agentloop_servers.engines.vllm.convert import sampling_params
from tests.benchmarks.cpu_seconds import CpuSeconds
from tests.benchmarks.gpu_load import Planned

OURS = ("kv_events_config", "worker_extension_cls")
WARM_UP_TOKENS = 16  # of each of the most that are asked for at once, as the service is warmed up


@dataclass(frozen=True, slots=True)
class BareRun:
    """One plan's figures."""

    num_at_once: int
    num_turns: int
    num_tokens: int
    seconds: float
    turn_s: list[float]
    cpu_s: dict[str, float] = field(default_factory=dict)


class BareEngine(ABC):
    """An engine that samples exactly so many tokens."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config

    @abstractmethod
    def load(self) -> None:
        """Import the engine; no GPU is touched."""

    @abstractmethod
    async def start(self) -> None:
        """Start it."""

    @abstractmethod
    async def sample(self, request_id: str, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """Return the sampled ids; their logprobs were asked for, as the service does."""

    @abstractmethod
    async def close(self) -> None:
        """End it."""


class BareVllm(BareEngine):
    """vLLM's AsyncLLM."""

    def load(self) -> None:
        self._config = engine_parts.vllm_config(self.config)
        vllm.prepare_environment(self._config)
        self._args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        self._make = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args

    async def start(self) -> None:
        arguments = vllm.engine_arguments(self._config, "ipc:///unused")
        for name in OURS:
            del arguments[name]
        self._llm = await asyncio.to_thread(self._make, self._args(**arguments))

    async def sample(self, request_id: str, prompt_ids: list[int], num_tokens: int) -> list[int]:
        sampling = sampling_params(SamplingParams(max_tokens=num_tokens), num_tokens, is_streamed=False)
        ids: list[int] = []
        async for output in self._llm.generate({"prompt_token_ids": prompt_ids}, sampling, request_id):
            ids = list(output.outputs[0].token_ids)
        return ids

    async def close(self) -> None:
        self._llm.shutdown()
        self._llm.shutdown = lambda *_: None  # its destructor shuts it down once more, and fails by then


class BareSglang(BareEngine):
    """SGLang's own Engine."""

    def load(self) -> None:
        self._config = engine_parts.sglang_config(self.config)
        sglang.prepare_environment(self._config)
        self._make = importlib.import_module("sglang").Engine

    async def start(self) -> None:
        arguments = sglang.server_arguments(self._config, "ipc:///unused")
        del arguments["kv_events_config"]
        self._engine = self._make(**arguments)

    async def sample(self, request_id: str, prompt_ids: list[int], num_tokens: int) -> list[int]:
        sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        answer: Any = await self._engine.async_generate(
            input_ids=prompt_ids, sampling_params=sampling, return_logprob=True, logprob_start_len=-1
        )
        return list(answer["output_ids"])

    async def close(self) -> None:
        self._engine.shutdown()


ENGINES: dict[str, type[BareEngine]] = {"vllm": BareVllm, "sglang": BareSglang}


async def run_plan(engine: BareEngine, plan: Sequence[Planned], num_at_once: int) -> BareRun:
    """Run all trajectories, so many at once; each asks for its turns one after another."""
    seats, turn_s, num_tokens = asyncio.Semaphore(num_at_once), [], 0

    async def one(number: int, planned: Planned) -> None:
        nonlocal num_tokens
        async with seats:
            ids = list(planned.prompt_ids)
            for turn, (length, observed) in enumerate(planned.turns):
                began_at = time.perf_counter()
                sampled = await engine.sample(f"{num_at_once}-{number}-{turn}", ids, length)
                turn_s.append(time.perf_counter() - began_at)
                if len(sampled) != length:
                    raise RuntimeError(f"{len(sampled)} tokens were sampled, not {length}")
                num_tokens += length
                ids = ids + sampled + observed

    cpu = CpuSeconds(os.getpid(), root="front end")
    began_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, planned in enumerate(plan):
            group.create_task(one(number, planned))
    seconds = time.perf_counter() - began_at
    return BareRun(num_at_once, len(turn_s), num_tokens, seconds, turn_s, cpu.used())


async def run(options: argparse.Namespace) -> list[BareRun]:
    """Start the engine, warm it up, and run every plan."""
    config = ServiceConfig.model_validate_json(options.config.read_text())
    engine = ENGINES[config.engine.kind](config)
    await asyncio.to_thread(engine.load)
    print("loaded", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began_at = time.perf_counter()
    await engine.start()
    print(f"the bare engine is ready after {time.perf_counter() - began_at:.0f} s", flush=True)
    found = []
    try:
        plans = {at_once: path.read_text().splitlines() for at_once, path in options.plan}
        freeze_gc()
        most = max(plans)
        some = [Planned.from_json(line).prompt_ids for line in plans[most][:most]]
        calls = (engine.sample(f"warm-{n}", ids[::-1], WARM_UP_TOKENS) for n, ids in enumerate(some))
        await asyncio.gather(*calls)
        for at_once, lines in plans.items():
            found.append(await run_plan(engine, [Planned.from_json(line) for line in lines], at_once))
            print(f"{at_once} at once: {found[-1].num_tokens / found[-1].seconds:,.0f} tok/s", flush=True)
            options.out.write_text(json.dumps([asdict(one) for one in found]))
    finally:
        await engine.close()
    return found


def _plan(text: str) -> tuple[int, Path]:
    at_once, _, path = text.partition("=")
    return int(at_once), Path(path)


def main() -> None:
    """Run the plans; the figures are in `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a ServiceConfig, as JSON")
    parser.add_argument("--plan", type=_plan, action="append", required=True, metavar="AT_ONCE=FILE")
    parser.add_argument("--out", type=Path, required=True)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
