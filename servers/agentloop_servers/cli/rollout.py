"""The command `rollout`: a run on a running service (needs the client's packages only), or on its own service."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentloop.types import OnStale, StalenessLimit
from agentloop_servers.cli import load
from agentloop_servers.cli.progress import summary_table
from agentloop_servers.cli.run import (
    REPORT_NAME,
    AgentCollect,
    RunOptions,
    ServiceAddress,
    WeightPush,
    load_program,
    run_on,
)
from agentloop_servers.cli.terminal import (
    DEFAULT_CONFIG,
    AdminKey,
    ApiKey,
    Out,
    clear_errors,
    find_modules_here,
    given,
    run_to_end,
)
from agentloop_servers.config.service import ServiceConfig

Config = Annotated[Path, typer.Option("--config", help="A Serve config file.")]
Keep = Annotated[
    int | None, typer.Option(min=1, help="Keep the first so many complete ones of each task; cancel the rest.")
]
SHIPPED_PUSH = Path("examples/tiny_policy/v1")

app = typer.Typer()


@app.command()
def rollout(
    tasks: Annotated[Path, typer.Option(help="Tasks, one JSON object a line.")] = Path("examples/data/tasks.jsonl"),
    environment: Annotated[str | None, typer.Option(help="Roll out its own tasks: my_env:Shop.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Trajectories of each task.")] = 2,
    keep: Keep = None,
    config: Config = DEFAULT_CONFIG,
    push: Annotated[
        Path | None,
        typer.Option(
            help=f"Weights to push while trajectories are in flight; {SHIPPED_PUSH} for the shipped config."
        ),
    ] = None,
    no_push: Annotated[bool, typer.Option("--no-push", help="Push nothing.")] = False,
    push_version: Annotated[int, typer.Option(min=0, help="The version they become.")] = 1,
    push_after: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Push once this share of the trajectories has finished.")
    ] = 0.25,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="How many weight versions a trajectory may fall behind; 0: on-policy.")
    ] = None,
    on_stale: Annotated[
        OnStale | None, typer.Option(help="What happens to one that falls further behind. Default: mask.")
    ] = None,
    trajectories_per_version: Annotated[
        int | None, typer.Option(min=1, help="Begin no more than a trainer of this many a version takes in time.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Your own agent, my_module:run, as run(task, base_url, api_key); it returns a reward or None."
        ),
    ] = None,
    agent_command: Annotated[
        str | None,
        typer.Option(help="Your own agent as a command; it finds OPENAI_BASE_URL, OPENAI_API_KEY, AGENTLOOP_TASK."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Runs of your agent at once.")] = 16,
    out: Out = Path("runs"),
    url: Annotated[
        str | None,
        typer.Option(help="A running service that does it, in place of one that is started for the run."),
    ] = None,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Roll out a task file, by a service of its own or by a running one, and write a run directory."""
    limit = _limit(max_staleness, on_stale, trajectories_per_version)
    if limit is not None and (agent is not None or agent_command is not None):
        raise typer.BadParameter("--max-staleness is for the service's own loops, not for --agent")
    if url is not None and config != DEFAULT_CONFIG:
        raise typer.BadParameter("--config is of a service that is started here, --url of one that runs")
    with clear_errors():
        shipped = SHIPPED_PUSH if url is None and config == DEFAULT_CONFIG else None
        weights = None
        if not no_push and (directory := push or shipped) is not None:
            weights = WeightPush(given("weights", "--push", directory), push_version, push_after)
        options = RunOptions(_source(tasks, environment), samples, out, weights, limit, keep)
        where = config if url is None else ServiceAddress(url, api_key, admin_key)
        _roll_out(where, options, agent, agent_command, concurrency)


def _source(tasks: Path, environment: str | None) -> Path | str:
    if environment is None:
        return given("tasks", "--tasks", tasks)
    find_modules_here()
    return environment


def _roll_out(
    where: Path | ServiceAddress, options: RunOptions, agent: str | None, command: str | None, concurrency: int
) -> None:
    """Run by the service at an address, or by one of a config, and show the summary. Exits with 1 if not good."""
    console = Console()
    settings: ServiceConfig | None = None
    if isinstance(where, ServiceAddress):
        run = partial(run_on, where)
    else:
        settings = ServiceConfig.load(given("the config", "--config", where))
        run = partial(load("own_service").run_rollout, settings)
    program = load_program(agent, command, settings)
    collect_with = None if program is None else AgentCollect(program, concurrency)
    try:
        result = run_to_end(run(options, console, collect_with))
    finally:
        if program is not None:
            program.close()
    console.print(summary_table(result.summary, result.push_error))
    console.print(f"written to {result.run_dir}", highlight=False, soft_wrap=True)
    if (report := result.run_dir / REPORT_NAME).exists():
        console.print(f"to look at: {report}", highlight=False, soft_wrap=True)
    if not result.is_good:
        raise typer.Exit(1)


def _limit(
    max_staleness: int | None, on_stale: OnStale | None, trajectories_per_version: int | None
) -> StalenessLimit | None:
    if max_staleness is not None:
        return StalenessLimit(max_staleness, on_stale or OnStale.MASK, trajectories_per_version)
    if on_stale is not None or trajectories_per_version is not None:
        raise typer.BadParameter("--on-stale and --trajectories-per-version need --max-staleness")
    return None
