"""One training from first to last: success before it, the training, success after it; and its options."""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from transformers import AutoModelForCausalLM

from agentloop.client import RolloutClient
from examples.train.grpo import Prepare, Recipe, Step, evaluate, paired, push_next, train, unchanged
from examples.train.tasks import FAMILIES, held_out_tasks, training_tasks

HERE = Path(__file__).parent
CONFIG = HERE / "service.yaml"
POLICY = HERE.parent / "tiny_policy" / "v0"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run trains; and how it is measured, before and after: tasks, and samples of each."""

    family: str | None = "recovery"
    policy: Path = POLICY
    device: str = "cpu"
    num_held_out: int = 48
    num_samples: int = 16


async def learn(
    client: RolloutClient,
    setting: Setting,
    recipe: Recipe,
    progress: Progress,
    prepare: Prepare = unchanged,
    before: dict[str, float] | None = None,
) -> tuple[dict[str, Any], torch.nn.Module]:
    """Run one training from the first checkpoint; returns its numbers and the trained model.

    `before` is an earlier evaluation of that checkpoint on the same tasks, which is then not measured again.
    """
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_pretrained(setting.policy, dtype=torch.float32).to(setting.device)
    held_out = held_out_tasks(setting.num_held_out, setting.family)
    started_at = time.monotonic()
    if before is None:
        progress.doing(f"measures the first policy on {len(held_out)} held-out tasks")
        await push_next(client, model)
        before = await evaluate(client, held_out, setting.num_samples)
    progress.doing("trains")
    training_at, cpu_at = time.monotonic(), time.process_time()
    tasks = training_tasks(recipe.seed, setting.family, setting.num_held_out)
    steps = await train(client, model, tasks, recipe, progress.step, prepare)
    training_s, trainer_cpu_s = time.monotonic() - training_at, time.process_time() - cpu_at
    progress.doing("measures the trained policy")
    after = await evaluate(client, held_out, setting.num_samples)
    gain, standard_error = paired(before, after)
    return {
        "setting": {**asdict(setting), "policy": str(setting.policy)},
        "recipe": asdict(recipe),
        "held_out": {"before": before, "after": after, "gain": gain, "standard_error": standard_error},
        "wall_s": time.monotonic() - started_at,
        "training_s": training_s,
        "trainer_cpu_s": trainer_cpu_s,
        "trajectories_per_minute": 60 * sum(step.num_trajectories for step in steps) / training_s,
        "steps": [asdict(step) for step in steps],
    }, model


def settle_torch(num_threads: int) -> None:
    """Have torch use so many threads, and the allocator keep what it has: else the kernel maps activations anew."""
    torch.set_num_threads(num_threads)
    mmap_max, trim_threshold, libc = -4, -1, ctypes.CDLL(None)  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)


class Progress:
    """A line for each step, and on a terminal a bar below them; a context manager."""

    def __init__(self, console: Console, num_steps: int, name: str = "") -> None:
        self._name = name
        self._rewards: list[float] = []
        self._bar = RichProgress(
            TextColumn("learn   "),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._num_steps = num_steps

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, steps: Sequence[Step]) -> None:
        """Count the steps of an earlier process."""
        self._rewards += [step.reward for step in steps]
        self._bar.update(self._task, advance=len(steps))

    def doing(self, what: str) -> None:
        """Say what goes on between steps."""
        self._bar.update(self._task, description=what)
        self._say(f"learn    {self._name}{what}")

    def step(self, step: Step) -> None:
        """Show a finished step."""
        self._rewards.append(step.reward)
        mean = sum(self._rewards[-5:]) / len(self._rewards[-5:])
        self._bar.update(self._task, advance=1, description=f"reward {mean:.2f}")
        self._say(
            f"step     {self._name}{len(self._rewards)}/{self._num_steps}"
            f"  reward {step.reward:.2f}, over 5 steps {mean:.2f}"
            f"  {step.staleness_mean:.1f} versions old, at most {step.staleness_max}"
            f"  waited {step.wait_s:.1f} s, trained {step.train_s:.1f} s, pushed {step.push_s:.1f} s"
        )

    def _say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, soft_wrap=True)


def parser_of_runs() -> argparse.ArgumentParser:
    """The options that every training has: a parent of its command's parser."""
    parser, recipe = argparse.ArgumentParser(add_help=False), Recipe()
    parser.add_argument("--config", type=Path, default=CONFIG, help="a Serve config file")
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="recovery")
    parser.add_argument("--environment", dest="family", help="in place of a family: its import path, my_env:Shop")
    parser.add_argument("--steps", type=int, default=recipe.num_steps)
    parser.add_argument("--groups", type=int, default=recipe.num_groups, help="tasks a step, of 8 samples each")
    parser.add_argument("--over-provision", type=float, default=0.0, help="groups offered for each of a step's")
    parser.add_argument("--carry", choices=("next", "cancel"), default=recipe.carry, help="of those left over")
    parser.add_argument("--loss", choices=("ppo", "cispo", "distill"), default=recipe.loss)
    parser.add_argument("--learning-rate", type=float, default=recipe.learning_rate)
    parser.add_argument("--held-out", type=int, default=48, help="tasks of the evaluation")
    parser.add_argument("--samples", type=int, default=16, help="samples of each of them")
    parser.add_argument("--device", default="cpu", help="the trainer's")
    parser.add_argument("--threads", type=int, default=1, help="the trainer's")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where run directories go")
    return parser


def setting_of(arguments: argparse.Namespace) -> Setting:
    """The setting that the options name."""
    return Setting(
        None if arguments.family == "all" else arguments.family,
        device=arguments.device,
        num_held_out=arguments.held_out,
        num_samples=arguments.samples,
    )


def recipe_of(arguments: argparse.Namespace, **chosen: Any) -> Recipe:
    """The recipe that the options name, but for what is chosen."""
    named = {"num_steps": arguments.steps, "num_groups": arguments.groups, "loss": arguments.loss}
    named |= {"over_provision": arguments.over_provision, "carry": arguments.carry}
    return Recipe(**named, learning_rate=arguments.learning_rate, **chosen)
