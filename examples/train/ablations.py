"""Versions, recorded logprobs and exact ids, measured for their worth: `docs/learning.md` shows the results.

    python -m examples.train.ablations table RUN --model 0=examples/tiny_policy/v0 --model 1=examples/tiny_policy/v1
    python -m examples.train.ablations train --arms sync,stale4 --seeds 3 --into runs/arms
    python -m examples.train.curves runs/arms

`table` needs a run directory and the checkpoints of its versions, and trains nothing. `train` trains once for each
arm and seed in one service, from the same checkpoint and on the same tasks; `--into` goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections import Counter, defaultdict
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
from agentloop.export import read_all
from agentloop.logs import LOG_NAME, configure_logging
from agentloop.storage import STORE_NAME, TrajectoryReader
from agentloop.trainers import TrainingRow, group_rows
from agentloop.trainers.mismatch import Mismatch, mismatch
from agentloop_servers.config import ServiceConfig, new_run_dir
from agentloop_servers.local import running_service
from examples.train.grpo import Prepare, Recipe, by_prompt, evaluate, logprobs_of, push_next, unchanged
from examples.train.run import Progress, Setting, learn, parser_of_runs, recipe_of, setting_of, settle_torch
from examples.train.tasks import held_out_tasks

Choice = Callable[[TrainingRow], np.ndarray]
"""The version under which each token of a row is given its logprob."""


def by_span(row: TrainingRow) -> np.ndarray:
    """The version that sampled each token."""
    return row.versions[row.mask]


def by_first(row: TrainingRow) -> np.ndarray:
    """The oldest version of the row, for all its tokens."""
    return np.full(int(row.mask.sum()), row.oldest_version)


def by_last(row: TrainingRow) -> np.ndarray:
    """The newest version of the row, for all its tokens."""
    return np.full(int(row.mask.sum()), row.newest_version)


CHOICES: dict[str, Choice] = {"its span's version": by_span, "the first version": by_first, "the last": by_last}


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


# --- tables of a finished run -----------------------------------------------------------------------------


def rows_of_run(run_dir: Path) -> list[TrainingRow]:
    """All rows of a run directory. Raises InvalidRequest if it holds no store."""
    groups: dict[str, list[Any]] = defaultdict(list)
    store = TrajectoryReader(run_dir / STORE_NAME)
    try:
        for trajectory in read_all(store):
            groups[trajectory.group_id].append(trajectory)
    finally:
        store.close()
    return [row for group in groups.values() for row in group_rows(group)]


def mismatch_table(rows: Sequence[TrainingRow], models: Mapping[int, torch.nn.Module]) -> dict[str, Mismatch]:
    """The distance of recorded to recomputed logprobs, by the version; in rows that have several."""
    mixed = [row for row in rows if row.oldest_version != row.newest_version]
    recorded = _joined([row.logprobs[row.mask] for row in mixed])
    return {
        name: mismatch(recorded, _joined(recomputed(mixed, models, choice))) for name, choice in CHOICES.items()
    }


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.float32), *parts])


def retokenised_table(rows: Sequence[TrainingRow], tokenizer: Tokenizer) -> dict[str, tuple[int, int, int, int]]:
    """Rows and turns that a decode and an encode would change, of how many: by versions, and by task family."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        versions = f"all v{row.oldest_version}" if row.oldest_version == row.newest_version else "several versions"
        turns = retokenised(row.input_ids, row.mask, tokenizer)
        num_changed = sum(not np.array_equal(*turn) for turn in turns)
        for name in (versions, row.task_id.rpartition("-")[0]):
            counts[name].update(rows=1, rows_changed=num_changed > 0, turns=len(turns), turns_changed=num_changed)
    kinds = ("rows_changed", "rows", "turns_changed", "turns")
    return {name: tuple(count[kind] for kind in kinds) for name, count in counts.items()}  # type: ignore[misc]


def print_tables(run_dir: Path, checkpoints: Mapping[int, Path], num_rows: int | None) -> None:
    """Print both tables as Markdown; the first one of `num_rows` rows, evenly spaced, if that is not None."""
    models = {version: load(folder) for version, folder in checkpoints.items()}
    tokenizer = Tokenizer.from_file(str(next(iter(checkpoints.values())) / "tokenizer.json"))
    rows = [row for row in rows_of_run(run_dir) if set(row.versions[row.mask].tolist()) <= models.keys()]
    chosen = rows if num_rows is None else rows[:: max(1, len(rows) // num_rows)]
    print(
        "| logprob of the token under | tokens | mean abs diff | max | k3-KL | ESS | ratio <0.5 | ratio p1, p99 |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, one in mismatch_table(chosen, models).items():
        low, high = one.ratio_percentiles[0], one.ratio_percentiles[-1]
        print(
            f"| {name} | {one.num_tokens:,} | {one.mean_abs_diff:.6f} | {one.max_abs_diff:.4f} | {one.k3_kl:.6f}"
            f" | {one.ess:.3f} | {100 * one.share_below_half:.1f} % | {low:.3f}, {high:.3f} |"
        )
    print("\n| decode and encode change | trajectories | turns |\n|---|---:|---:|")
    for name, (changed, of, turns_changed, of_turns) in sorted(retokenised_table(rows, tokenizer).items()):
        print(
            f"| {name} | {100 * changed / of:.1f} % ({changed}/{of})"
            f" | {100 * turns_changed / of_turns:.1f} % ({turns_changed}/{of_turns}) |"
        )


def load(folder: Path) -> torch.nn.Module:
    """The checkpoint in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# --- arms that train --------------------------------------------------------------------------------------


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
            chosen = replace(recipe, max_staleness=arm.max_staleness, loss=arm.loss or recipe.loss, seed=seed)
            with Progress(console, recipe.num_steps, f"{name}-seed{seed} ") as progress:
                found, _ = await learn(client, setting, chosen, progress, prepare, before)
            _write(file, found)
            print_arms(run_dir, names, console)


async def _baseline(client: RolloutClient, setting: Setting, file: Path) -> dict[str, float]:
    """Held-out success of the first checkpoint, by task; from the file if it was measured before."""
    if (found := _read(file)) is None:
        await push_next(client, load(setting.policy))
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
    configure_logging(service_dir / LOG_NAME, rotation=config.log.rotation)
    console.print(f"run      {run_dir}", highlight=False)
    setting, recipe = setting_of(arguments), recipe_of(arguments)
    private = config.model_copy(update={"port": 0, "run_dir": None})
    async with running_service(private, service_dir) as url, RolloutClient(url) as client:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        await train_arms(client, arguments.arms.split(","), seeds, setting, recipe, run_dir, console)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="tables of a finished run")
    table.add_argument("run", type=Path)
    table.add_argument("--model", action="append", default=[], metavar="VERSION=DIR")
    table.add_argument("--versions", type=Path, help="a directory of checkpoints named by their versions")
    table.add_argument("--rows", type=int, help="recompute this many, evenly spaced; all by default")
    training = commands.add_parser("train", parents=[parser_of_runs()], help="train arms")
    training.add_argument("--arms", default="sync,stale1,stale4,stale8", help=f"some of {', '.join(ARMS)}")
    training.add_argument("--seeds", type=int, default=3)
    training.add_argument("--first-seed", type=int, default=0)
    training.add_argument("--into", type=Path, help="a directory to go on with")
    arguments = parser.parse_args()
    if arguments.command == "table":
        checkpoints = {
            int(version): Path(folder) for version, folder in (one.split("=", 1) for one in arguments.model)
        }
        if arguments.versions is not None:
            checkpoints |= {int(folder.name): folder for folder in arguments.versions.iterdir()}
        settle_torch(1)
        print_tables(arguments.run, checkpoints, arguments.rows)
        return
    settle_torch(arguments.threads)
    asyncio.run(run(arguments, Console()))


if __name__ == "__main__":
    main()
