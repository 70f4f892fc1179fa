"""Versions, recorded logprobs and exact ids, measured for their worth: `docs/guides/learning.md` shows the results.

    python -m examples.train.ablations --arms sync,stale4 --seeds 3 --into runs/arms
    python -m examples.train.curves runs/arms

It trains once for each arm and seed in one service, from the same checkpoint and on the same tasks; `--into` goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from agentloop.client import RolloutClient
from agentloop.observability.logs import LOG_NAME, configure_logging
from agentloop_servers.config.service import ServiceConfig, new_run_dir
from agentloop_servers.local import running_service
from agentloop_trainers import TrainingRow
from examples.train.grpo import Prepare, Recipe, by_prompt, evaluate, logprobs_of, push_next, unchanged
from examples.train.run import Progress, Setting, learn, parser_of_runs, recipe_of, setting_of, settle_torch
from examples.train.tasks import held_out_tasks

Choice = Callable[[TrainingRow], np.ndarray]
"""The version under which each token of a row is given its logprob."""


def by_first(row: TrainingRow) -> np.ndarray:
    """The oldest version of the row, for all its tokens."""
    return np.full(int(row.mask.sum()), row.oldest_version)


def by_last(row: TrainingRow) -> np.ndarray:
    """The newest version of the row, for all its tokens."""
    return np.full(int(row.mask.sum()), row.newest_version)


def recomputed(
    rows: Sequence[TrainingRow], models: Mapping[int, torch.nn.Module], choice: Choice
) -> list[np.ndarray]:
    """The logprobs of the rows' masked tokens under the chosen versions, one array a row."""
    found: dict[int, np.ndarray] = {}
    for group in by_prompt(rows):
        chosen = [choice(row) for row in group]
        values = np.zeros(sum(map(len, chosen)), np.float32)
        versions = np.concatenate(chosen)
        for version in np.unique(versions):
            with torch.inference_mode():
                under = logprobs_of(models[int(version)], group).numpy(force=True)
            values[versions == version] = under[versions == version]
        ends = np.cumsum([len(part) for part in chosen])[:-1]
        found |= {id(row): part for row, part in zip(group, np.split(values, ends), strict=True)}
    return [found[id(row)] for row in rows]


def retokenised(ids: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each sampled turn of a sequence, as it was sampled and as a decode and an encode give it back."""
    turns = []
    for is_sampled, places in groupby(range(len(ids)), key=lambda place: bool(mask[place])):
        if is_sampled:
            sampled = ids[list(places)]
            text = tokenizer.decode(sampled.tolist(), skip_special_tokens=False)
            turns.append((sampled, np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)))
    return turns


class RecomputedLogprobs:
    """A trainer that has no recorded logprobs: it computes those of the batch anew, under versions of its choice.

    It keeps a copy of the weights of each version that it trained.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._models: dict[int, torch.nn.Module] = {}

    def __call__(self, rows: list[TrainingRow], model: torch.nn.Module, version: int) -> list[TrainingRow]:
        self._models[version] = copy.deepcopy(model).eval()
        values = recomputed(rows, self._models, self._choice)
        return [with_logprobs(row, value) for row, value in zip(rows, values, strict=True)]


def treated_as_on_policy(rows: list[TrainingRow], model: torch.nn.Module, version: int) -> list[TrainingRow]:
    """Every token as if the current weights had sampled it: all ratios are 1."""
    values = recomputed(rows, {version: model}, lambda row: np.full(int(row.mask.sum()), version))
    return [with_logprobs(row, value) for row, value in zip(rows, values, strict=True)]


class RetokenisedIds:
    """A trainer that gets text: each turn's ids are encoded anew, and the recorded logprobs go with their places.

    Where there are more ids than logprobs, the last ids leave the mask.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: list[TrainingRow], model: torch.nn.Module, version: int) -> list[TrainingRow]:
        return [self._changed(row) for row in rows]

    def _changed(self, row: TrainingRow) -> TrainingRow:
        turns = iter(retokenised(row.input_ids, row.mask, self._tokenizer))
        parts: list[tuple[np.ndarray, ...]] = []
        for is_sampled, places in groupby(range(len(row.input_ids)), key=lambda place: bool(row.mask[place])):
            at = list(places)
            if not is_sampled:
                parts.append((row.input_ids[at], row.mask[at], row.logprobs[at], row.versions[at]))
                continue
            ids = next(turns)[1]
            kept = at[: len(ids)]
            surplus = (0, len(ids) - len(kept))
            parts.append(
                (
                    ids,
                    np.pad(row.mask[kept], surplus),
                    np.pad(row.logprobs[kept], surplus),
                    np.pad(row.versions[kept], surplus, mode="edge"),
                )
            )
        ids, mask, logprobs, versions = (np.concatenate(column) for column in zip(*parts, strict=True))
        return replace(row, input_ids=ids, mask=mask, logprobs=logprobs, versions=versions)


def with_logprobs(row: TrainingRow, values: np.ndarray) -> TrainingRow:
    """The row with other logprobs of its masked tokens."""
    logprobs = row.logprobs.copy()
    logprobs[row.mask] = values
    return replace(row, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train: how far the service may be ahead, and what the trainer makes of what it gets."""

    max_staleness: int
    prepare: Callable[[Setting], Prepare] | None = None  # one for each run
    loss: str | None = None  # None: as the command line says
    over_provision: float = 0.0  # of steps that are asked for one by one


def _retokenised_ids(setting: Setting) -> Prepare:
    return RetokenisedIds(Tokenizer.from_file(str(setting.policy / "tokenizer.json")))


ARMS: dict[str, Arm] = {
    "sync": Arm(0),
    "stale1": Arm(1),
    "stale4": Arm(4),
    "stale8": Arm(8),
    "stale4-cispo": Arm(4, loss="cispo"),
    "stale8-cispo": Arm(8, loss="cispo"),
    "stale8-as-on-policy": Arm(8, lambda setting: treated_as_on_policy),
    "stale8-first-version": Arm(8, lambda setting: RecomputedLogprobs(by_first)),
    "stale8-last-version": Arm(8, lambda setting: RecomputedLogprobs(by_last)),
    "stale4-retokenised": Arm(4, _retokenised_ids),
    "steps-1x": Arm(4, over_provision=1.0),
    "steps-1.25x": Arm(4, over_provision=1.25),
    "steps-2x": Arm(4, over_provision=2.0),
}


async def train_arms(
    client: RolloutClient,
    names: Sequence[str],
    seeds: Iterable[int],
    setting: Setting,
    recipe: Recipe,
    run_dir: Path,
    console: Console,
) -> None:
    """Train each arm with each seed, those that have no file yet; write a file for each, and the picture."""
    before = await _baseline(client, setting, run_dir / "before.json")
    for seed in seeds:
        for name in names:
            file = run_dir / f"{name}-seed{seed}.json"
            if _read(file) is not None:
                continue
            arm = ARMS[name]
            prepare = arm.prepare(setting) if arm.prepare else unchanged
            own = {"max_staleness": arm.max_staleness, "over_provision": arm.over_provision}
            chosen = replace(recipe, **own, loss=arm.loss or recipe.loss, seed=seed)
            with Progress(console, recipe.num_steps, f"{name}-seed{seed} ") as progress:
                found, _ = await learn(client, setting, chosen, progress, prepare, before)
            _write(file, found)
            print_arms(run_dir, names, console)


async def _baseline(client: RolloutClient, setting: Setting, file: Path) -> dict[str, float]:
    """Held-out success of the first checkpoint, by task; from the file if it was measured before."""
    if (found := _read(file)) is None:
        model = AutoModelForCausalLM.from_pretrained(setting.policy, dtype=torch.float32)
        await push_next(client, model)
        found = await evaluate(client, held_out_tasks(setting.num_held_out, setting.family), setting.num_samples)
        _write(file, found)
    return found


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _write(file: Path, found: Any) -> None:
    file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def arms_of(run_dir: Path, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What was written for each arm, by seed; arms without a file are left out."""
    found = {name: sorted(run_dir.glob(f"{name}-seed*.json")) for name in names}
    return {name: [_read(file) for file in files] for name, files in found.items() if files}


def print_arms(run_dir: Path, names: Sequence[str], console: Console) -> None:
    """Print the arms as a Markdown table. Standard errors are over tasks, of the mean of the seeds."""
    lines = [
        "| arm | seeds | held-out gain | by seed | last 5 steps | trajectories/min | staleness"
        " | k3 median, max | ESS min |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for name, runs in arms_of(run_dir, names).items():
        gains = [run["held_out"]["gain"] for run in runs]
        before = runs[0]["held_out"]["before"]
        of_task = np.array(
            [[run["held_out"]["after"][task] - before[task] for task in sorted(before)] for run in runs]
        ).mean(axis=0)
        error = of_task.std(ddof=1) / np.sqrt(len(of_task))
        steps = [step for run in runs for step in run["steps"]]
        k3 = [step["mismatch"]["k3_kl"] for step in steps]
        last = np.mean([step["reward"] for run in runs for step in run["steps"][-5:]])
        speed = np.mean([run["trajectories_per_minute"] for run in runs])
        lines.append(
            f"| {name} | {len(runs)} | {np.mean(gains):+.3f} ± {error:.3f}"
            f" | {', '.join(f'{gain:+.3f}' for gain in gains)} | {last:.3f} | {speed:.0f}"
            f" | {np.mean([step['staleness_mean'] for step in steps]):.1f}"
            f" | {np.median(k3):.5f}, {max(k3):.5f} | {min(step['mismatch']['ess'] for step in steps):.3f} |"
        )
    text = "\n".join(lines)
    (run_dir / "arms.md").write_text(text + "\n", encoding="utf-8")
    console.print(text, highlight=False, soft_wrap=True, markup=False)


async def run(arguments: argparse.Namespace, console: Console) -> None:
    """Start one service, and train all arms in it."""
    config = ServiceConfig.load(arguments.config)
    run_dir = arguments.into or new_run_dir(arguments.out)
    run_dir.mkdir(parents=True, exist_ok=True)
    service_dir = new_run_dir(run_dir / "service")
    configure_logging(service_dir / LOG_NAME)
    console.print(f"run      {run_dir}", highlight=False)
    setting, recipe = setting_of(arguments), recipe_of(arguments)
    private = config.model_copy(update={"port": 0, "run_dir": None})
    async with running_service(private, service_dir) as url, RolloutClient(url) as client:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        await train_arms(client, arguments.arms.split(","), seeds, setting, recipe, run_dir, console)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[parser_of_runs()]
    )
    parser.add_argument("--arms", default="sync,stale1,stale4,stale8", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--into", type=Path, help="a directory to go on with")
    arguments = parser.parse_args()
    settle_torch(arguments.threads)
    asyncio.run(run(arguments, Console()))


if __name__ == "__main__":
    main()
