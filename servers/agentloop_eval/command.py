"""The command `eval`: evaluate a served policy on environments, and compare two evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from agentloop.api.requests import DEFAULT_HOLD_S
from agentloop.client.rollout import load_tasks
from agentloop.errors import InvalidRequest
from agentloop.rollout.environment import tasks_of
from agentloop.types import RolloutTask
from agentloop_eval.evaluation import FILE_NAME, HOLD_PRIORITY, PRIORITY, Evaluation, evaluate
from agentloop_eval.figures import Figures, Interval, compare, figures_of, rows_of
from agentloop_servers.cli.run import ServiceAddress
from agentloop_servers.cli.terminal import (
    DEFAULT_URL,
    AdminKey,
    ApiKey,
    TaskCount,
    TaskSeed,
    Url,
    clear_errors,
    find_modules_here,
    given,
    run_to_end,
)

_LEGEND = "[low, high]: 95 % confidence interval over tasks"
_MAX_CAUSES = 3  # causes of errors that the table shows


class _RunByDefault(TyperGroup):
    """`agentloop eval NAME` is `agentloop eval run NAME`."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def] # typer may, or may not, bring its own click
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer()
_group = typer.Typer(cls=_RunByDefault, no_args_is_help=True)
app.add_typer(
    _group,
    name="eval",
    help="Evaluate a served policy on environments (`agentloop eval NAME`), and compare two evaluations.",
)


@_group.command("run")
def run(
    environments: Annotated[
        list[str] | None,
        typer.Argument(help="Environments: registered names, or paths such as my_env:Shop. Each is a category."),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="A file of tasks, one JSON object per line, instead of environments.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, max=1024, help="Samples per task.")] = 8,
    task_count: TaskCount = None,
    task_seed: TaskSeed = None,
    pass_at: Annotated[float, typer.Option(help="A sample passes with at least this reward.")] = 1.0,
    hold: Annotated[
        int, typer.Option(min=0, help="Keep this many replicas at their weight version, and sample only there.")
    ] = 0,
    hold_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds after which held replicas follow weight updates again in any case."),
    ] = DEFAULT_HOLD_S,
    priority: Annotated[
        int | None,
        typer.Option(
            help="Below 0: samples start when no training sample waits; above 0: they overtake it. Default:"
            f" {PRIORITY}, with --hold {HOLD_PRIORITY}."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model of the service next to the policy. Default: the policy.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for evaluation.json. Default: a new folder in runs/.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Sample each task several times on a running service, and report pass rates with confidence intervals."""
    console = Console()
    with clear_errors():
        chosen = _chosen_tasks(environments or [], tasks, task_seed, task_count)
        folder = out or _new_folder()
        if (folder / FILE_NAME).exists():
            raise InvalidRequest(f"{folder} has an evaluation already: choose another --out", param="--out")
        address = ServiceAddress(url if model is None else f"{url.rstrip('/')}/models/{model}", api_key, admin_key)
        options: dict[str, Any] = {"num_samples": samples, "pass_at": pass_at, "priority": priority}
        options |= {"hold": hold, "hold_timeout_s": hold_timeout}
        result = run_to_end(_evaluated(address, chosen, console, **options))
        path = result.save(folder)
    figures = {category: figures_of(result, category) for category in rows_of(result)}
    console.print(_table(figures))
    console.print(_LEGEND, highlight=False, markup=False)
    if result.held_version is not None:
        note = f" ({result.hold_note})" if result.hold_note else ""
        console.print(
            f"all samples are of weight version {result.held_version}{note}", highlight=False, markup=False
        )
    _print_details(console, figures[None])
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


@_group.command("compare")
def compare_evaluations(
    before: Annotated[Path, typer.Argument(help="The folder or file of the first evaluation.")],
    after: Annotated[Path, typer.Argument(help="The folder or file of the second evaluation.")],
) -> None:
    """Compare two evaluations of the same tasks, task by task."""
    with clear_errors():
        first, second = Evaluation.load(before), Evaluation.load(after)
        table = _new_table("category", "tasks", "pass@1 change %", "reward change", "better", "worse")
        for category in rows_of(first):
            change = compare(first, second, category)  # the last one is of all tasks
            table.add_row(
                "all" if category is None else category,
                str(change.num_tasks),
                _percent(change.pass_at_1, "+"),
                f"{change.mean_reward.mean:+.3f}",
                str(change.num_better),
                str(change.num_worse),
            )
    console = Console()
    console.print(table)
    verdict = "excludes zero" if change.pass_at_1.excludes_zero else "contains zero: no difference is shown"
    console.print(f"The 95 % confidence interval of the pass@1 change {verdict}.", highlight=False)


def _chosen_tasks(
    environments: list[str], file: Path | None, seed: int | None, count: int | None
) -> list[RolloutTask]:
    if bool(environments) == (file is not None):
        raise InvalidRequest("give either environments or --tasks", param="environments")
    if file is not None:
        return load_tasks(given("tasks", "--tasks", file))
    find_modules_here()
    return [task for name in environments for task in tasks_of(name, seed=seed, count=count)]


def _new_folder() -> Path:
    number = 1
    while (folder := Path("runs") / f"eval-{number}").exists():
        number += 1
    return folder


async def _evaluated(
    address: ServiceAddress,
    tasks: list[RolloutTask],
    console: Console,
    *,
    num_samples: int,
    **options: Any,
) -> Evaluation:
    columns = TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    async with address.client() as client:
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("samples", total=len(tasks) * num_samples)
            return await evaluate(
                client, tasks, num_samples=num_samples, on_sample=lambda: progress.advance(bar), **options
            )


def _table(figures: Mapping[str | None, Figures]) -> Table:
    rates = "pass@1 %", f"pass@{figures[None].k} %"
    table = _new_table("category", "tasks", "samples", "errors", *rates, "reward")
    for category, one in figures.items():
        table.add_row(
            "all" if category is None else category,
            str(one.num_tasks),
            str(one.num_judged),
            str(one.num_errors),
            _percent(one.pass_at_1),
            _percent(one.pass_at_k),
            "-" if one.mean_reward is None else f"{one.mean_reward.mean:.3f}",
        )
    return table


def _new_table(category: str, *figures: str) -> Table:
    """Return a table whose first column breaks long names, so that figures stay on one line."""
    table = Table(box=None)
    table.add_column(category, overflow="fold")
    for name in figures:
        table.add_column(name, no_wrap=True)
    return table


def _print_details(console: Console, figures: Figures) -> None:
    """Print sizes, weight versions, stop reasons and the most frequent errors."""
    sizes = f"{figures.mean_tokens:.0f} tokens and {figures.median_seconds:.1f} s per sample (mean, median)"
    console.print(f"{figures.num_mixed} tasks with passed and failed samples; {sizes}", highlight=False)
    if len(figures.version_shares) > 1:
        shares = ", ".join(f"version {name} {share:.0%}" for name, share in figures.version_shares.items())
        console.print(f"sampled tokens by weight version: {shares}", highlight=False)
    reasons = sorted(figures.stop_reasons.items(), key=lambda item: -item[1])
    console.print("stop reasons: " + ", ".join(f"{name} {count}" for name, count in reasons), highlight=False)
    for error, count in sorted(figures.errors.items(), key=lambda item: -item[1])[:_MAX_CAUSES]:
        console.print(f"{count} errors: {error}", highlight=False, markup=False)


def _percent(value: Interval | None, sign: str = "") -> str:
    if value is None:
        return "-"
    shown = f"{100 * value.mean:{sign}.1f}"
    if value.low is None or value.high is None:
        return shown
    return f"{shown} [{100 * value.low:{sign}.0f}, {100 * value.high:{sign}.0f}]"
