"""What a training of `real.py` shows: numbers of steps, evaluations in words, files, and a logger of choice."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from agentloop_eval import Evaluation, Figures, compare, figures_of
from agentloop_eval.evaluation import FILE_NAME
from examples.train.curves import draw
from examples.train.grpo import Step

LEARNED = "learn.json"

Log: TypeAlias = Callable[[int, dict[str, float]], object]
"""Logs numbers of a step."""


def shown(figures: Figures) -> str:
    """Return the result of an evaluation in words."""
    rate = figures.pass_at_1
    if rate is None:
        return f"no sample has a reward: {dict(figures.errors)}"
    spread = "" if rate.low is None or rate.high is None else f" [{100 * rate.low:.0f}, {100 * rate.high:.0f}]"
    versions = ", ".join(f"version {name} {share:.0%}" for name, share in figures.version_shares.items())
    return (
        f"pass@1 {100 * rate.mean:.1f} %{spread}, {figures.num_mixed} of {figures.num_tasks} tasks mixed,"
        f" {figures.num_errors} errors, {figures.mean_tokens:.0f} tokens a sample; {versions}"
    )


def numbers_of(step: Step) -> dict[str, float]:
    """Return the numbers of a step for a log and the report."""
    total_s = step.wait_s + step.train_s + step.push_s
    return {
        "train/reward": step.reward,
        "train/loss": step.loss,
        "train/mixed_groups": step.num_informative,
        "train/replaced_groups": step.num_replaced,
        "train/k3": step.mismatch.k3_kl,
        "train/staleness": step.staleness_mean,
        "train/crossed_share": step.num_crossed / max(step.num_trajectories, 1),
        "speed/tokens_per_s": step.num_sampled / total_s,
        "speed/pause_ms": step.stall_ms,
        "time/wait_s": step.wait_s,
        "time/train_s": step.train_s,
        "time/push_s": step.push_s,
    }


def log_of(kind: str, run_dir: Path, console: Console) -> Log:
    """Return the function that logs the numbers of a step. A missing package is one line, and nothing is logged."""
    try:
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

            writer = SummaryWriter(str(run_dir / "tensorboard"))
            return lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()]
        if kind == "wandb":
            import wandb  # noqa: PLC0415 - an extra

            run = wandb.init(project="agentloop", id=run_dir.name, resume="allow", dir=str(run_dir))
            return lambda step, values: run.log({**values, "step": step})  # evaluations are logged late
    except ModuleNotFoundError as error:
        console.print(f"log      {kind} is not installed ({error.name}): pip install -e '.[{kind}]'", markup=False)
    return lambda step, values: None


def write_results(
    run_dir: Path,
    options: Namespace,
    steps: Sequence[Step],
    before: Evaluation,
    after: Evaluation,
    wall_s: float,
) -> Iterator[str]:
    """Write learn.json and curves.png, and yield the lines of the summary."""
    change = compare(before, after).pass_at_1
    error = 0.0 if change.low is None or change.high is None else (change.high - change.low) / 3.92
    held_out = {"gain": change.mean, "standard_error": error, "interval": [change.low, change.high]}
    learned = {"options": {name: str(value) for name, value in vars(options).items()}, "held_out": held_out}
    learned |= {"wall_s": wall_s, "steps": [asdict(step) for step in steps]}
    (run_dir / LEARNED).write_text(json.dumps(learned, indent=1), encoding="utf-8")
    draw({options.environment: [learned]}, run_dir / "curves.png")
    yield f"before   {shown(figures_of(before))}"
    yield f"after    {shown(figures_of(after))}"
    if change.low is not None and change.high is not None:
        verdict = "excludes zero" if change.excludes_zero else "contains zero"
        bounds = f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
        yield f"change   pass@1 {100 * change.mean:+.1f} points {bounds}, paired by task: the interval {verdict}"
    yield from summary(steps)


def curves_of(run_dir: Path, steps: Sequence[Step]) -> dict[str, list[float]]:
    """Return the curves of the report: the evaluations in their order, and the numbers of the steps."""
    files = sorted((run_dir / "evaluations").iterdir(), key=lambda folder: (folder / FILE_NAME).stat().st_mtime_ns)
    rates = [figures_of(Evaluation.load(folder)).pass_at_1 for folder in files]
    numbers = [numbers_of(step) for step in steps]
    found = {f"Held-out pass@1: {', '.join(folder.name for folder in files)}": [one.mean for one in rates if one]}
    return found | {name: [one[name] for one in numbers] for name in (numbers[0] if numbers else ())}


def summary(steps: Sequence[Step]) -> Iterator[str]:
    """Yield the lines about speed, age and mismatch."""
    names = ("wait_s", "train_s", "push_s")
    times = {name: sum(getattr(step, name) for step in steps) for name in names}
    total_s, num_trajectories = sum(times.values()), sum(step.num_trajectories for step in steps)
    shares = ", ".join(f"{name[:-2]} {value / total_s:.0%}" for name, value in times.items())
    tokens = sum(step.num_sampled for step in steps)
    yield f"time     {total_s:.0f} s in {len(steps)} steps: {shares}; {tokens / total_s:.0f} sampled tokens/s"
    pauses = [step.stall_ms for step in steps]
    crossed = sum(step.num_crossed for step in steps) / num_trajectories
    pause = f"pause {sum(pauses) / len(pauses):.0f} ms (mean), {max(pauses):.0f} ms (max)"
    yield f"updates  {pause}; {crossed:.0%} of the trajectories crossed one"
    lags = sorted({int(lag) for step in steps for lag in step.k3_by_lag})
    k3 = {lag: [step.k3_by_lag[str(lag)] for step in steps if str(lag) in step.k3_by_lag] for lag in lags}
    yield "k3       " + ", ".join(f"lag {lag}: {sum(found) / len(found):.6f}" for lag, found in k3.items())
