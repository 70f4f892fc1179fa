"""Routed experts of a mixture of experts on a whole service: the rows, the gain of a replay, and the cost in speed.

    python -m tests.gpu.routes                                   # about 7 minutes on one GPU
    python -m tests.gpu.routes --only records                    # rows and mismatch, without the throughput
    python -m tests.gpu.routes --only speed --shape moe-30b-a3b-4l --cycles 3
    python -m tests.gpu.routes --device cpu --engine simulated --shape tiny-moe   # a rehearsal of the rows only

The weights are random, of a Qwen3-MoE shape. `records`: agent loops of three turns run over a weight update. In
each record the experts must cover all positions before the last sampled token, name experts of the model, and be
distinct in each row and layer. Then transformers computes the logprobs of the tokens of the first version in three
ways: with its own routers, with the recorded experts, and with the experts of the next position. The k3 mismatch to
the recorded logprobs must be lower with the recorded experts than with both others. `speed`: services with and
without routed experts in turn, with many trajectories in flight: tokens per second, and the longest delays of the
coordinator's event loop. The goal is 0.97 of the throughput without.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from agentloop.client.client import RolloutClient
from agentloop.simulation.policy import NUM_EXPERTS, ROUTES_SHAPE
from agentloop.types import TokenPath, Trajectory
from agentloop.values.mismatch import mismatch
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import running_service
from agentloop_verify.transformers_reference import ReferenceModel
from tests.benchmarks.gpu_load import Window, Workload, turns_of
from tests.benchmarks.gpu_throughput import let_workers_import_loop, quantile, run_loops
from tests.benchmarks.report import finish, say, table
from tests.benchmarks.shapes import SHAPES, Shape, make_tensors, set_version
from tests.gpu.policy import show_gpus, write_policy

CONTEXT_TOKENS = 4096
MIN_SPEED = 0.97  # tokens per second with experts, relative to those without
MIN_GAIN = 0.5  # k3 with the recorded experts, relative to that with the trainer's own routers
NUM_REPLAYED = 24  # records
SCRAPE_S = 0.5
_LAG = re.compile(r'^\w*loop_lag_seconds\{[^}]*process="coordinator[^}]*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Rows:
    """Counts over the token paths of all records."""

    num_paths: int
    num_turns: int
    num_mixed: int  # paths with tokens of several versions
    num_missing: int  # paths without experts
    num_misaligned: int  # paths whose rows do not end before the last sampled token, or have another shape
    num_unknown: int  # rows with an expert that the model does not have, or twice in a layer
    num_bytes_per_token: float

    @property
    def is_right(self) -> bool:
        wrong = self.num_missing + self.num_misaligned + self.num_unknown
        return wrong == 0 and self.num_paths > 0 and self.num_mixed > 0


def service_config(options: argparse.Namespace, model: Path, *, has_routes: bool) -> ServiceConfig:
    """Return a config with one replica."""
    is_gpu = options.device == "cuda"
    engine = {
        "kind": options.engine,
        "device": options.device,
        "max_running": options.at_once,
        "kv_cache_mib": options.kv_mib if is_gpu else None,
        "gpu_memory_utilization": 0.5,  # must be free; the cache has its own size
        "enforce_eager": options.eager,
        "routed_experts": has_routes,
    }
    return ServiceConfig.model_validate(
        {"model": str(model), "model_version": 0, "kv_policy": "recompute", "engine": engine, "port": 0}
    )


def load_of(options: argparse.Namespace, seconds: float, num_trajectories: int) -> Workload:
    """Return a load that ends after `seconds`."""
    return Workload(
        num_trajectories=num_trajectories,
        num_at_once=options.at_once,
        until=time.perf_counter() + seconds,
        num_sampled=options.sampled,
        spread=0.5,
    )


# Rows and replay


def rows_of(records: Sequence[Trajectory], layers: int, chosen: int, num_experts: int) -> Rows:
    """Check the experts of all paths."""
    paths = [path for record in records for path in record.paths if path.turns]
    missing = misaligned = unknown = num_bytes = num_tokens = 0
    for path in paths:
        experts = path.routed_experts
        if experts is None:
            missing += 1
            continue
        num_rows = len(path.prompt_ids) + path.turns[-1].end - 1
        if experts.shape != (num_rows, layers, chosen):
            misaligned += 1
            continue
        in_order = np.sort(experts, axis=-1)
        is_twice = (in_order[..., 1:] == in_order[..., :-1]).any(axis=(1, 2))
        unknown += int((is_twice | (experts >= num_experts).any(axis=(1, 2))).sum())
        num_bytes += sum(len(rows.frame) for kind in (path.aux or {}).values() for rows in kind)
        num_tokens += num_rows
    return Rows(
        num_paths=len(paths),
        num_turns=sum(len(path.turns) for path in paths),
        num_mixed=sum(len({span.version for span in path.weight_versions}) > 1 for path in paths),
        num_missing=missing,
        num_misaligned=misaligned,
        num_unknown=unknown,
        num_bytes_per_token=num_bytes / max(num_tokens, 1),
    )


class Replay:
    """Makes the routers of a transformers model choose given experts, with the weights that they compute."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.experts: torch.Tensor | None = None  # [positions, layers, experts per token]; None: the routers' own
        routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
        for layer, router in enumerate(routers):
            router.register_forward_hook(
                lambda module, _, output, layer=layer: self._replayed(module, output, layer)
            )
        self.num_layers = len(routers)

    def _replayed(self, router: Any, output: Any, layer: int) -> Any:
        if self.experts is None:
            return output
        logits, scores, _ = output
        chosen = self.experts[: len(logits), layer].to(logits.device, torch.int64)
        weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(scores.dtype), chosen


def replayed_logprobs(reference: ReferenceModel, replay: Replay, path: TokenPath, shift: int | None) -> np.ndarray:
    """Return the logprobs of a path's sampled tokens with the experts of `shift` positions later; None: its own."""
    experts = path.routed_experts
    assert experts is not None
    rows = None if shift is None else np.roll(experts, -shift, axis=0).astype(np.int64)
    replay.experts = None if rows is None else torch.from_numpy(rows)
    ids = np.concatenate([path.prompt_ids, path.response_ids])
    return reference.logprobs(ids, len(path.prompt_ids) + np.flatnonzero(path.response_mask))


def mismatches(options: argparse.Namespace, model: Path, records: Sequence[Trajectory]) -> dict[str, float]:
    """Return the k3 mismatch of the recorded logprobs to three forward passes, over tokens of version 0."""
    reference = ReferenceModel(model, device=options.device, dtype="bfloat16")
    replay = Replay(reference.model)
    paths = [record.path for record in records if record.is_complete and record.versions == (0,)][:NUM_REPLAYED]
    recorded = np.concatenate([path.logprobs[path.response_mask] for path in paths])
    ways = {"own routers": None, "recorded experts": 0, "experts of the next position": 1}
    found = {}
    for name, shift in ways.items():
        ours = np.concatenate([replayed_logprobs(reference, replay, path, shift) for path in paths])
        found[name] = mismatch(recorded, ours).k3_kl
        say(f"{name}: k3 {found[name]:.6f} over {len(recorded)} tokens of {len(paths)} records")
    return found


async def records_of(options: argparse.Namespace, work: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Run loops over an update; check the rows, and replay them."""
    shape = SHAPES[options.shape]
    model = write_policy(shape, tensors, work / "v0", max_context_tokens=CONTEXT_TOKENS, dtype="bfloat16")
    config = service_config(options, model, has_routes=True)
    async with running_service(config, work / "run") as url, RolloutClient(url) as client:
        say("the service with routed experts is ready")
        before, _ = await run_loops(url, load_of(options, options.window_s / 2, 4 * options.at_once))
        set_version(shape, tensors, 1)
        load = load_of(options, options.window_s / 2, options.rounds * options.at_once)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(run_loops(url, load))
            await asyncio.sleep(options.window_s / 6)
            await client.update_weights(tensors.items(), version=1)
    records = [*before, *running.result()[0]]
    layers, chosen, num_experts = shape.num_layers, shape.num_chosen, shape.num_experts
    if options.engine == "simulated":
        (layers, chosen), num_experts = ROUTES_SHAPE, NUM_EXPERTS
    rows = rows_of(records, layers, chosen, num_experts)
    say(str(rows))
    found: dict[str, Any] = {"rows": asdict(rows), "is_right": rows.is_right}
    if options.engine == "vllm":
        k3 = await asyncio.to_thread(mismatches, options, model, records)
        own, replay, other = k3.values()
        found |= {"k3": k3, "is_right": rows.is_right and replay <= MIN_GAIN * own and replay < other}
    return found


# Throughput


async def lags_of(url: str, into: list[float]) -> None:
    """Read the coordinator's longest event-loop delays until cancelled."""
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/metrics") as answer:
                into += [float(value) for value in _LAG.findall(await answer.text())]
            await asyncio.sleep(SCRAPE_S)


async def speed_of(
    options: argparse.Namespace, model: Path, run_dir: Path, *, has_routes: bool
) -> dict[str, float]:
    """Return tokens per second over a window, and the coordinator's delays in ms."""
    lags: list[float] = []
    async with running_service(service_config(options, model, has_routes=has_routes), run_dir) as url:
        await run_loops(url, load_of(options, options.ramp_s, 4 * options.at_once))  # kernels and graphs are made
        lasting = asyncio.create_task(lags_of(url, lags))
        load = load_of(options, options.ramp_s + options.window_s, options.rounds * options.at_once)
        window = Window(load.until - options.window_s, load.until)
        records, _ = await run_loops(url, load)
        lasting.cancel()
        await asyncio.wait([lasting])
    turns = [turn for record in records for turn in turns_of(record)]
    if max(turn.began_at for turn in turns) < window.ends_at - window.seconds / 4:
        raise RuntimeError("the load ended before its window: give it more --rounds")
    tokens_per_s = window.num_tokens(turns) / window.seconds
    found = {"tokens_per_s": tokens_per_s, "lag_p99_ms": 1e3 * quantile(lags, 0.99) if lags else -1.0}
    say(f"routed experts {'on' if has_routes else 'off'}: {found}")
    return found


async def speeds(options: argparse.Namespace, work: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Run the arms in turn; compare the medians."""
    shape = SHAPES[options.shape]
    model = write_policy(shape, tensors, work / "speed", max_context_tokens=CONTEXT_TOKENS, dtype="bfloat16")
    tensors.clear()
    torch.cuda.empty_cache()  # the engines are in other processes
    arms: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for cycle in range(options.cycles):
        for name, found in arms.items():
            run_dir = work / f"run-{name}-{cycle}"
            found.append(await speed_of(options, model, run_dir, has_routes=name == "on"))
    off, on = (statistics.median(one["tokens_per_s"] for one in found) for found in arms.values())
    return {"arms": arms, "ratio": on / off, "is_right": on >= MIN_SPEED * off}


def _figures(found: dict[str, Any]) -> str:
    if "ratio" in found:
        arms = {name: [f"{one['tokens_per_s']:,.0f}" for one in runs] for name, runs in found["arms"].items()}
        lags = {name: max(one["lag_p99_ms"] for one in runs) for name, runs in found["arms"].items()}
        return f"on/off {found['ratio']:.3f}, tokens/s {arms}, coordinator's delay p99 in ms {lags}"
    k3 = ", ".join(f"k3 with {name} {value:.6f}" for name, value in found.get("k3", {}).items())
    return f"{found['rows']} {k3}"


PARTS = {"records": records_of, "speed": speeds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--shape", choices=[name for name in SHAPES if "moe" in name], default="moe-4l")
    parser.add_argument("--only", default="records,speed", help="parts, comma-separated")
    parser.add_argument("--at-once", type=int, default=512, help="trajectories in flight")
    parser.add_argument("--sampled", type=int, default=160, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=12, help="trajectories of a load, in multiples of --at-once")
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--ramp-s", type=float, default=10.0)
    parser.add_argument("--window-s", type=float, default=30.0)
    parser.add_argument("--kv-mib", type=int, default=16384)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: the engine starts sooner")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    let_workers_import_loop()
    if options.device == "cuda":
        show_gpus(1)
    results: dict[str, Any] = {}
    for part in options.only.split(","):
        with tempfile.TemporaryDirectory() as work:
            shape: Shape = SHAPES[options.shape]
            tensors = make_tensors(shape, torch.device(options.device), torch.bfloat16, version=0)
            results[part] = asyncio.run(PARTS[part](options, Path(work), tensors))
    rows = [(part, "RIGHT" if found["is_right"] else "WRONG", _figures(found)) for part, found in results.items()]
    title = f"Routed experts, {options.engine}, {options.shape}, {options.device}"
    finish(title, {"": table(("part", "verdict", "figures"), rows)}, results, options.out)
    return 0 if all(found["is_right"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
