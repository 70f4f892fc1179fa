"""Reinforcement learning of a published model on published tasks, from the first evaluation to the report.

    make learn-real                                          # SmolLM2-135M on two CPU cores
    make learn-real ARGS="--resume runs/DIRECTORY"           # after an interruption
    python -m examples.train.real --config examples/train/real_gpu.yaml --environment bfcl:multiple    # on a GPU

It starts the service (or uses --url), evaluates held-out tasks, trains as `grpo.py` does, evaluates next to the
training every few steps, and evaluates again. The run directory has the checkpoint, evaluations, learn.json,
curves.png and report.html.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentloop.client import BatchPosition, RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.observability.logs import LOG_NAME, configure_logging
from agentloop.types import RolloutTask
from agentloop_eval import Evaluation, evaluate, figures_of
from agentloop_eval.evaluation import FILE_NAME, PRIORITY
from agentloop_models.table import PUBLISHED
from agentloop_servers.cli.run import REPORT_NAME
from agentloop_servers.cli.terminal import clear_errors, run_to_end
from agentloop_servers.config.models import with_model_folders
from agentloop_servers.config.service import ServiceConfig, new_run_dir
from agentloop_servers.local import running_service
from agentloop_servers.run.store import has_store, resumed_config, store_in
from agentloop_view.report import write_report
from examples.train.checkpoint import load_checkpoint, save_checkpoint, serve_weights
from examples.train.grpo import Recipe, Step, Training, optimizer_of, train
from examples.train.results import curves_of, log_of, numbers_of, shown, write_results
from examples.train.run import HERE, Progress, settle_torch
from examples.train.tasks import environment_tasks

OPTIONS, CHECKPOINT = "options.json", "checkpoint.pt"
FIRST_PRIORITY, NOT_PUSHED = 1, -1  # the priority of evaluations before and after; a weight version


class Run:
    """One run: its options, folder and tasks, and what training and evaluations share."""

    def __init__(self, options: argparse.Namespace, run_dir: Path, client: RolloutClient, console: Console) -> None:
        self.options, self.run_dir, self.client, self.console = options, run_dir, client, console
        self.log = log_of(options.log, run_dir, console)
        self.held_out, self.tasks = tasks_of_run(options)
        self.saved_at = time.monotonic()

    async def evaluated(self, name: str, priority: int, num_steps: int) -> Evaluation:
        """Evaluate the policy after `num_steps` steps on the held-out tasks, unless an earlier process has."""
        folder = self.run_dir / "evaluations" / name
        if (folder / FILE_NAME).exists():
            return Evaluation.load(folder)
        found = await evaluate(self.client, self.held_out, num_samples=self.options.samples, priority=priority)
        found.save(folder)
        figures = figures_of(found)
        self.say(f"evaluate {name}: {shown(figures)}")
        if name == "before" and not figures.num_mixed:
            self.say("hint     no task has passed and failed samples, so groups have no signal: try --shots 3")
        if figures.pass_at_1 is not None:
            self.log(num_steps, {"held_out/pass_at_1": figures.pass_at_1.mean})
        return found

    async def train(self, model: torch.nn.Module, recipe: Recipe, progress: Progress) -> list[Step]:
        """Train from the checkpoint, or from the start, with evaluations next to it."""
        file, optimizer = self.run_dir / CHECKPOINT, optimizer_of(model, recipe)
        is_resumed = file.exists()
        training = load_checkpoint(file, model, optimizer) if is_resumed else Training(optimizer, NOT_PUSHED)
        is_pushed = await serve_weights(self.client, model, training)
        if is_resumed:
            for folder in (self.run_dir / "evaluations").glob("step-*"):
                if int(folder.name.rpartition("-")[2]) > len(training.steps):
                    shutil.rmtree(folder)  # its weights are lost: they were trained after the checkpoint
            version = f"version {training.version}{', pushed' * is_pushed}"
            self.say(f"resume   after step {len(training.steps)} as {version}")
        else:
            await self.evaluated("before", FIRST_PRIORITY, 0)
            training.position = BatchPosition(f"train-{self.run_dir.name}").encode()
            await self.save(model, training)
        progress.advance(training.steps)
        async with asyncio.TaskGroup() as evaluations:

            async def after_step() -> None:
                step, number = training.steps[-1], len(training.steps)
                self.log(number, numbers_of(step))
                if time.monotonic() - self.saved_at >= self.options.checkpoint_every_s:
                    await self.save(model, training)
                every = self.options.eval_every
                if every and number % every == 0 and number < recipe.num_steps:
                    evaluations.create_task(self.evaluated(f"step-{number}", PRIORITY, number))

            steps = await train(
                self.client, model, self.tasks, recipe, progress.step, training=training, after_step=after_step
            )
            await self.save(model, training)
        return steps

    async def save(self, model: torch.nn.Module, training: Training) -> None:
        """Write a checkpoint."""
        await asyncio.to_thread(save_checkpoint, self.run_dir / CHECKPOINT, model, training)
        self.saved_at = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def tasks_of_run(options: argparse.Namespace) -> tuple[list[RolloutTask], Iterator[RolloutTask]]:
    """Return the held-out tasks and the stream of training tasks that the options name."""
    return environment_tasks(
        options.environment,
        options.held_out,
        options.seed,
        num_shown=options.shots,
        max_tokens=options.max_tokens,
    )


def recipe_of(options: argparse.Namespace) -> Recipe:
    """Return the recipe that the options name."""
    names = {"groups": "num_groups", "steps": "num_steps"}
    chosen = ("steps", "groups", "group_size", "over_provision", "max_replaced", "max_staleness", "learning_rate")
    found = {names.get(name, name): getattr(options, name) for name in (*chosen, "seed", "loss", "compute")}
    max_s = None if options.max_minutes is None else 60 * options.max_minutes
    return Recipe(**found, max_s=max_s, num_warmup_steps=2)


@asynccontextmanager
async def service_of(options: argparse.Namespace, config: ServiceConfig, run_dir: Path) -> AsyncIterator[str]:
    """Use the service at --url, or start one; after an interruption with the records and the queue of the run."""
    if options.url is not None:
        yield options.url
        return
    private = config.model_copy(update={"port": 0, "run_dir": None})
    async with running_service(private, run_dir, waits_for_weights=has_store(run_dir)) as url:
        yield url


async def learn(options: argparse.Namespace, config: ServiceConfig, run_dir: Path, console: Console) -> None:
    """Run everything, and write the results."""
    configure_logging(run_dir / LOG_NAME)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    recipe, folder = recipe_of(options), config.model_path()
    keys = {"api_key": os.environ.get("AGENTLOOP_KEY"), "admin_key": os.environ.get("AGENTLOOP_ADMIN_KEY")}
    async with service_of(options, config, run_dir) as url, RolloutClient(url, **keys) as client:
        run = Run(options, run_dir, client, console)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(options.device)
        started_at = time.monotonic()
        with Progress(console, recipe.num_steps) as progress:
            steps = await run.train(model, recipe, progress)
            after = await run.evaluated("after", FIRST_PRIORITY, len(steps))
    before = Evaluation.load(run_dir / "evaluations" / "before")
    for line in write_results(run_dir, options, steps, before, after, time.monotonic() - started_at):
        run.say(line)
    model.save_pretrained(run_dir / "policy")
    if options.url is None:
        write_report(store_in(run_dir), folder, run_dir / REPORT_NAME, curves_of(run_dir, steps))
        run.say(f"to look at: {run_dir / REPORT_NAME}")


def check(options: argparse.Namespace, config: ServiceConfig, console: Console) -> None:
    """Check the config, the model's name, the tasks and the recipe, without a download or a process."""
    recipe, (held_out, tasks) = recipe_of(options), tasks_of_run(options)
    is_known = config.model in PUBLISHED or config.model_path().is_dir()
    lines = [
        f"model    {config.model}{'' if is_known else ': neither published nor a folder, so it must be a hub id'}",
        f"engine   {config.engine.kind} on {config.engine.device}, trainer on {options.device}: {options.compute}",
        f"tasks    {len(held_out)} held out, such as {held_out[0].task_id}; trained from {next(tasks).task_id} on",
        f"steps    {recipe.num_steps} of {recipe.num_groups} groups of {recipe.group_size}",
    ]
    if options.device == "cuda" and not torch.cuda.is_available():
        lines.append("device   this machine has no CUDA device: run it on a machine with one")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def parser_of_run() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=HERE / "real_cpu.yaml", help="the service's config, and the model")
    add("--url", help="a running service, which must serve the config's model; default: start one")
    add("--model", help="a folder, or a name of `agentloop models list`, in place of the config's")
    add("--environment", default="reasoning_gym:aiw", help="such as bfcl:multiple, or my_env:Shop")
    add("--shots", type=int, default=0, help="solved tasks in each prompt, for a model that misses the format")
    add("--max-tokens", type=int, help="tokens of a turn; default: the tasks' limit")
    add("--held-out", type=int, default=64, help="tasks of the evaluations, never trained on")
    add("--samples", type=int, default=4, help="samples of each of them")
    add("--eval-every", type=int, default=5, help="steps between evaluations next to the training; 0: none")
    add("--steps", type=int, default=10)
    add("--max-minutes", type=float, help="of training: the step that ends after this time is the last one")
    add("--groups", type=int, default=8, help="tasks of a step")
    add("--group-size", type=int, default=8, help="samples of a task")
    add(
        "--over-provision",
        type=float,
        default=2.0,
        help="groups in progress per group of a step; 1: as many as a step has",
    )
    add("--max-replaced", type=int, default=0, help="groups with equal rewards that a step may replace")
    add("--max-staleness", type=int, default=4, help="versions that a trained token may be behind; 0: synchronous")
    add("--learning-rate", type=float, default=1e-5)
    add("--loss", choices=("ppo", "cispo"), default="ppo")
    add("--seed", type=int, default=0, help="of the training tasks")
    add("--device", help="the trainer's; default: the engines'")
    add("--compute", choices=("float32", "bfloat16"), help="of the trainer; default: bfloat16 on a GPU")
    add("--threads", type=int, default=1, help="the trainer's")
    add("--checkpoint-every-s", type=float, default=60.0, help="seconds between checkpoints; 0: every step")
    add("--log", choices=("none", "tensorboard", "wandb"), default="none")
    add("--out", type=Path, default=Path("runs"), help="where run directories go")
    add(
        "--resume",
        type=Path,
        metavar="RUN",
        help="a run directory to continue; other options are those of its start",
    )
    add("--dry-run", action="store_true", help="check options, config and tasks, and start nothing")
    return parser


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the options; with --resume, those of the run's start are the defaults. Raises InvalidRequest."""
    parser = parser_of_run()
    options = parser.parse_args(arguments)
    if options.resume is None:
        return options
    file = options.resume / OPTIONS
    if not file.exists():
        raise InvalidRequest(f"--resume {options.resume}: not a run of examples.train.real, it has no {OPTIONS}")
    earlier = argparse.Namespace(**json.loads(file.read_text(encoding="utf-8")))
    earlier.config, earlier.out = Path(earlier.config), Path(earlier.out)
    return parser.parse_args(arguments, earlier)


def prepared(options: argparse.Namespace, console: Console) -> tuple[ServiceConfig, Path]:
    """Return the config, with the model's folder, and the run directory. Raises InvalidRequest."""
    # A run that used --url has no config of a service.
    config = (resumed_config(options.resume) if options.resume else None) or ServiceConfig.load(options.config)
    if options.model is not None:
        config = config.model_copy(update={"model": options.model})
    options.device = options.device or ("cuda" if config.engine.device == "cuda" else "cpu")
    options.compute = options.compute or ("bfloat16" if options.device == "cuda" else "float32")
    if options.dry_run:
        return config, options.out
    config = with_model_folders(config, lambda line: console.print(f"model    {line}", highlight=False))
    if options.device == "cuda":
        # Gradients of a published model were NaN in 6 of 33 groups (torch 2.11, H200); the other kernels had none.
        torch.backends.cuda.enable_cudnn_sdp(False)
    run_dir = options.resume or new_run_dir(options.out)
    saved = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    if options.resume is None:
        (run_dir / OPTIONS).write_text(json.dumps(saved, indent=1), encoding="utf-8")
    return config, run_dir


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    console = Console()
    try:
        with clear_errors():
            options = options_of(arguments)
            config, run_dir = prepared(options, console)
            if options.dry_run:
                check(options, config, console)
                return
            console.print(f"run      {run_dir}   (continue it with --resume)", highlight=False, soft_wrap=True)
            if options.device == "cpu":
                settle_torch(options.threads)
            run_to_end(learn(options, config, run_dir, console))
    except typer.Exit as stop:
        sys.exit(stop.exit_code)


if __name__ == "__main__":
    main()
