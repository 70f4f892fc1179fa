"""`make learn`: train the shipped policy through the real service, with live progress, curves and numbers.

It starts the service, measures held-out success, trains as `grpo.py` does, measures again on the same tasks, and
writes `learn.json`, `curves.png`, `report.html` and the trained policy into the run directory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from agentloop.client import RolloutClient
from agentloop.observability.logs import LOG_NAME, configure_logging
from agentloop_servers.cli.run import REPORT_NAME
from agentloop_servers.config.service import NamedModel, ServiceConfig, new_run_dir
from agentloop_servers.local import running_service
from agentloop_servers.run.store import store_in
from agentloop_trainers import TrainingRow
from agentloop_view.report import write_report
from examples.train.curves import draw
from examples.train.grpo import TEACHER, Prepare, unchanged
from examples.train.run import POLICY, Progress, learn, parser_of_runs, recipe_of, setting_of, settle_torch


def saving(folder: Path, policy: Path) -> Prepare:
    """Write the weights of each version to `folder/VERSION` before they are trained further."""

    def save(rows: list[TrainingRow], model: Any, version: int) -> list[TrainingRow]:
        model.save_pretrained(folder / str(version))
        shutil.copy(policy / "tokenizer.json", folder / str(version))
        return rows

    return save


async def run(arguments: argparse.Namespace, console: Console) -> Path:
    """Start the service, learn, stop it, and write the run directory; returns its report."""
    config = ServiceConfig.load(arguments.config)
    run_dir = new_run_dir(arguments.out)
    configure_logging(run_dir / LOG_NAME)
    console.print(f"run      {run_dir}", highlight=False)
    setting = setting_of(arguments)
    recipe = recipe_of(arguments, max_staleness=arguments.max_staleness, seed=arguments.seed)
    private = config.model_copy(update={"port": 0, "run_dir": None})
    if recipe.loss == "distill":
        teacher = NamedModel(name=TEACHER, model=str(arguments.teacher), engine=config.engine)
        private = private.model_copy(update={"models": [teacher]})
    async with running_service(private, run_dir) as url, RolloutClient(url) as client:
        prepare = saving(run_dir / "versions", POLICY) if arguments.save_versions else unchanged
        with Progress(console, recipe.num_steps) as progress:
            found, model = await learn(client, setting, recipe, progress, prepare)
    (run_dir / "learn.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw({f"staleness {recipe.max_staleness}": [found]}, run_dir / "curves.png")
    model.save_pretrained(run_dir / "policy")
    held_out = found["held_out"]
    before, after = (sum(held_out[key].values()) / len(held_out[key]) for key in ("before", "after"))
    console.print(
        f"held out {before:.3f} -> {after:.3f}: {held_out['gain']:+.3f} ± {held_out['standard_error']:.3f}"
        f" (paired, {len(held_out['before'])} tasks x {setting.num_samples})",
        highlight=False,
    )
    console.print(
        f"speed    {found['trajectories_per_minute']:.0f} trajectories a minute,"
        f" {found['training_s']:.0f} s of training, {found['wall_s']:.0f} s in all",
        highlight=False,
    )
    steps, report = found["steps"], run_dir / REPORT_NAME
    curves = {f"Training {name}": [step[name] for step in steps] for name in ("reward", "loss")}
    write_report(store_in(run_dir), setting.policy, report, curves)
    return report


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[parser_of_runs()]
    )
    parser.add_argument("--max-staleness", type=int, default=4, help="0: synchronous")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--teacher",
        type=Path,
        default=POLICY.with_name("v1"),
        help="the checkpoint that --loss distill learns from",
    )
    parser.add_argument(
        "--save-versions", action="store_true", help="write the weights of every version, 7 MB each"
    )
    arguments = parser.parse_args()
    settle_torch(arguments.threads)
    console = Console()
    report = asyncio.run(run(arguments, console))
    console.print(f"to look at: {report}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
