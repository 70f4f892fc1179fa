"""Two models share one GPU in turns: weight swaps under load, and judge rewards that arrive in batches.

    python -m tests.gpu.model_turns --out runs/turns.json
    python -m tests.gpu.model_turns --replicas 2                               # on two GPUs
    python -m tests.gpu.model_turns --device cpu --shape tiny --other tiny     # simulated engines

First both models have more calls than they can answer, so that each swap waits for `--stay-s`; a call that a swap
freezes continues after the next one. Then trajectories of the shipped policy are scored by a judge on the same GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from agentloop.client.client import RolloutClient
from agentloop.observability.logs import LOG_NAME
from agentloop.types import Generation, Judge, Limits, Message, RolloutTask
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import running_service
from tests.benchmarks.gpu_models import model_folder
from tests.benchmarks.report import finish, say, table
from tests.benchmarks.shapes import SHAPES, random_prompts

TINY = Path(__file__).parents[2] / "examples" / "tiny_policy" / "v1"
JUDGE = Judge("judge", "Is the answer right?")
SHORT = Limits(max_sampled_tokens=64)
MAX_TOKENS = 256
PROMPT_TOKENS = 64


@dataclass
class Calls:
    """Calls of one model during the load."""

    num_answered: int = 0
    num_failed: int = 0
    longest_s: float = 0.0


def config_of(
    options: argparse.Namespace, policy: Path, other: Path, stay_s: float, wait_s: float
) -> ServiceConfig:
    """Return a config in which two models each have the memory of a whole GPU, on every GPU."""

    def own(gpu_share: float) -> dict[str, Any]:
        """Return the settings of one model's replicas.

        Two replicas of one model do not fit on a GPU with more than half of it: each GPU gets one replica of each
        model.
        """
        engine: dict[str, Any] = {"kind": "simulated", "num_cpus": 0.1}
        if options.device != "cpu":
            sizes = {"gpu_memory_utilization": 0.85, "gpu_share": gpu_share, "enforce_eager": options.eager}
            engine = {"kind": "vllm", "device": "cuda", "dtype": "bfloat16", **sizes}
        engine["max_context_tokens"] = 1024
        return {"mode": "colocated", "replicas": options.replicas, "engine": engine}

    return ServiceConfig.model_validate(
        {
            **own(0.6),
            "model": str(policy),
            "models": [{"name": "judge", "model": str(other), **own(0.4)}],
            "turns": {"min_stay_s": stay_s, "max_wait_s": wait_s},
            "workers": {"replicas": 1, "capacity": 1024},
            "port": 0,
        }
    )


async def load(client: RolloutClient, shape: str, num_at_once: int, ends: asyncio.Event) -> Calls:
    """Keep calls running until the end, and wait for all of them."""
    calls, prompts = Calls(), random_prompts(SHAPES[shape], num_at_once, PROMPT_TOKENS)

    async def one(prompt: tuple[int, ...]) -> None:
        while not ends.is_set():
            began_at = time.monotonic()
            try:
                answer = await client.generate(prompt, max_tokens=MAX_TOKENS)
                is_whole = isinstance(answer, Generation) and len(answer.token_ids) > 0
            except Exception as error:
                print(f"a call failed: {error!r}", file=sys.stderr)
                is_whole = False
            calls.num_answered += is_whole
            calls.num_failed += not is_whole
            calls.longest_s = max(calls.longest_s, time.monotonic() - began_at)

    await asyncio.gather(*map(one, prompts))
    return calls


def switches(run_dir: Path) -> list[dict[str, Any]]:
    """Return the turns that the service has logged."""
    lines = (json.loads(line) for line in (run_dir / LOG_NAME).read_text().splitlines())
    return [line for line in lines if line.get("event") == "model_turn"]


async def under_load(options: argparse.Namespace, run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Calls]]:
    folders = [model_folder(shape, options.device) for shape in (options.shape, options.other)]
    config = config_of(options, *folders, stay_s=options.stay_s, wait_s=options.stay_s)
    async with (
        running_service(config, run_dir, say=say) as url,
        RolloutClient(url) as policy,
        RolloutClient(f"{url}/models/judge") as judge,
    ):
        ends = asyncio.Event()
        loads = [
            asyncio.create_task(load(client, shape, options.at_once, ends))
            for client, shape in ((policy, options.shape), (judge, options.other))
        ]
        deadline_at = time.monotonic() + options.limit_s
        while len(switches(run_dir)) < options.switches and time.monotonic() < deadline_at:
            await asyncio.sleep(0.5)
        ends.set()
        found = await asyncio.gather(*loads)
    return switches(run_dir), dict(zip(("policy", "judge"), found, strict=True))


async def judged(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    config = config_of(options, TINY, TINY, stay_s=2.0, wait_s=120.0)
    async with running_service(config, run_dir, say=say) as url, RolloutClient(url) as client:
        tasks = [
            RolloutTask(f"t{number}", (Message("user", f"What is {number} + 3?"),), reward=JUDGE, limits=SHORT)
            for number in range(options.trajectories)
        ]
        began_at = time.monotonic()
        rollout = await client.submit(tasks)
        records = [record async for record in rollout]
        took_s = time.monotonic() - began_at
    # The tiny policies give no verdicts, and the record then says so.
    asked = sum(record.reward is not None or "no verdict" in (record.reward_error or "") for record in records)
    return {"trajectories": len(records), "judged": asked, "switches": len(switches(run_dir)), "seconds": took_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="qwen3-4b", choices=SHAPES)
    parser.add_argument("--other", default="small", choices=SHAPES)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--replicas", type=int, default=1, help="of each model, a GPU each")
    parser.add_argument("--switches", type=int, default=20)
    parser.add_argument("--stay-s", type=float, default=3.0)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        (first := Path(work) / "load").mkdir()
        turns, calls = asyncio.run(under_load(options, first))
        times = [turn["switch_s"] for turn in turns]
        say(f"{len(turns)} switches, median {median(times):.2f} s, longest {max(times):.2f} s; {calls}")
        (second := Path(work) / "judge").mkdir()
        rewards = asyncio.run(judged(options, second))
    rows = [[name, one.num_answered, one.num_failed, one.longest_s] for name, one in calls.items()]
    tables = {
        f"{len(turns)} switches": table(
            ("", "median s", "longest s"), [["sleep and wake", median(times), max(times)]]
        ),
        "calls": table(("model", "answered", "failed", "longest s"), rows),
        "judge rewards": table(tuple(rewards), [list(rewards.values())]),
    }
    results = {"turns": turns, "calls": {name: vars(one) for name, one in calls.items()}, "rewards": rewards}
    finish(f"Models in turns, {options.shape} and {options.other}", tables, results, options.out)
    alternate = all(before["model"] != after["model"] for before, after in pairwise(turns))
    is_good = alternate and len(turns) >= options.switches and not any(one.num_failed for one in calls.values())
    is_good = is_good and rewards["judged"] == options.trajectories and rewards["switches"] <= 4
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
