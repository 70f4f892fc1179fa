"""The same requests sent directly to an engine, without our service: one process, token ids, final-only output.

`gpu_throughput` starts it next to a service, on the same GPU. Lines on its standard input say when to run which
load; it writes its figures as JSON lines. The engine has the service's arguments, except those that only the
service needs: events of the KV cache, and our code in its workers.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from agentloop.concurrency.aio import tune_interpreter
from agentloop.types import SamplingParams
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.engines.vllm import config as vllm
from agentloop_servers.engines.vllm.convert import sampling_params
from agentloop_servers.processes import engine_parts
from agentloop_sglang import config as sglang
from agentloop_sglang.kind import config_of
from tests.benchmarks.cpu_seconds import CpuSeconds
from tests.benchmarks.gpu_load import PromptSizes, Turn, Workload


@dataclass(frozen=True, slots=True)
class BareRun:
    """One window's figures."""

    turns: list[Turn]
    cpu_s: dict[str, float] = field(default_factory=dict)


class BareEngine(ABC):
    """An engine that samples an exact number of tokens."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config

    @abstractmethod
    def load(self) -> None:
        """Import the engine without touching a GPU."""

    @abstractmethod
    async def start(self) -> None:
        """Start the engine."""

    @abstractmethod
    async def sample(self, request_id: str, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """Return the sampled ids. Logprobs are requested, as in the service."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine."""


class BareVllm(BareEngine):
    """vLLM's AsyncLLM."""

    def load(self) -> None:
        self._config = engine_parts.vllm_config(self.config)
        vllm.prepare_environment(self._config)
        self._args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        self._make = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args

    async def start(self) -> None:
        arguments = vllm.engine_arguments(self._config)
        del arguments["worker_extension_cls"]
        self._llm = await asyncio.to_thread(self._make, self._args(**arguments))

    async def sample(self, request_id: str, prompt_ids: list[int], num_tokens: int) -> list[int]:
        sampling = sampling_params(SamplingParams(max_tokens=num_tokens), num_tokens, is_streamed=False)
        ids: list[int] = []
        async for output in self._llm.generate({"prompt_token_ids": prompt_ids}, sampling, request_id):
            ids = list(output.outputs[0].token_ids)
        return ids

    async def close(self) -> None:
        self._llm.shutdown()
        self._llm.shutdown = lambda *_: None  # its destructor calls it again, and would fail


class BareSglang(BareEngine):
    """SGLang's own Engine."""

    def load(self) -> None:
        [entry] = self.config.entries
        _, settings = entry.registered()
        self._config = config_of(engine_parts.process_fields(self.config, entry), **settings)
        sglang.prepare_environment(self._config)
        self._make = importlib.import_module("sglang").Engine

    async def start(self) -> None:
        arguments = sglang.server_arguments(self._config)
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


async def run_load(engine: BareEngine, load: Workload, sizes: PromptSizes) -> BareRun:
    """Run trajectories of the service's sizes with random ids until the load's end, a fixed number concurrently."""
    turns: list[Turn] = []
    vocab_size = model_sizes(engine.config).vocab_size
    plain_ids = range(vocab_size // 2, 3 * vocab_size // 4)
    common = random.Random("shared").choices(plain_ids, k=sizes.num_shared)
    numbers = iter(range(load.num_trajectories))
    run_name = f"{time.time_ns():x}"  # unique prompts: nothing of an earlier window is cached

    async def seat() -> None:
        for number in numbers:
            choose = random.Random(f"{run_name}-{number}")
            ids = common + choose.choices(plain_ids, k=sizes.num_own)
            for turn, length in enumerate(load.lengths(number)):
                began_at = time.perf_counter()
                if began_at >= load.until:
                    return
                sampled = await engine.sample(f"{run_name}-{number}-{turn}", ids, length)
                if len(sampled) != length:
                    raise RuntimeError(f"{len(sampled)} tokens were sampled, not {length}")
                turns.append(Turn(began_at, time.perf_counter(), length))
                ids = ids + sampled + choose.choices(plain_ids, k=sizes.num_observed)

    cpu = CpuSeconds(os.getpid(), root="front end")
    async with asyncio.TaskGroup() as group:
        for _ in range(load.num_at_once):
            group.create_task(seat())
    return BareRun(turns, cpu.used())


async def run(options: argparse.Namespace) -> None:
    """Start the engine, and run one load per line of standard input; each writes one line to `--out`."""
    config = ServiceConfig.model_validate_json(options.config.read_text())
    engine = ENGINES[config.engine.kind](config)
    began_at = time.perf_counter()
    await asyncio.to_thread(engine.load)
    loaded_at = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - loaded_at
    try:
        with options.out.open("a", buffering=1) as out:
            out.write(json.dumps({"import_s": loaded_at - began_at, "start_s": start_s}) + "\n")
            tune_interpreter()
            while line := await asyncio.to_thread(sys.stdin.readline):
                asked = json.loads(line)
                ran = await run_load(engine, Workload(**asked["load"]), PromptSizes(**asked["sizes"]))
                turns = [astuple(turn) for turn in ran.turns]
                out.write(json.dumps({"turns": turns, "cpu_s": ran.cpu_s}) + "\n")
    finally:
        await engine.close()


def main() -> None:
    """Run loads until standard input ends; `--out` gets one line of figures per load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a ServiceConfig, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
