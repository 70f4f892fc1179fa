"""The command `rollout`. On a running service it needs only the client's packages."""

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
    EnvironmentTasks,
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
    Model,
    Out,
    TaskCount,
    TaskSeed,
    clear_errors,
    find_modules_here,
    given,
    loaded_config,
    run_to_end,
)
from agentloop_servers.config.service import ServiceConfig

Tasks = Annotated[
    Path | None,
    typer.Option(
        help="A file of tasks, one JSON object per line. Default: examples/data/tasks.jsonl; with --model"
        " examples/data/short_answers.jsonl."
    ),
]
Config = Annotated[Path, typer.Option("--config", help="The config file of the service to start.")]
Keep = Annotated[
    int | None, typer.Option(min=1, help="Keep the first N complete trajectories of each task; cancel the rest.")
]
SHIPPED_PUSH = Path("examples/tiny_policy/v1")
SHIPPED_TASKS = Path("examples/data/tasks.jsonl")
MODEL_TASKS = Path("examples/data/short_answers.jsonl")

app = typer.Typer()

EnvironmentName = Annotated[
    str | None,
    typer.Option(
        "--environment",
        help="Use an environment's tasks: a registered name, a task set such as bfcl:multi_turn_base or "
        "reasoning_gym:chain_sum, or a path such as my_env:Shop.",
    ),
]
Push = Annotated[
    Path | None,
    typer.Option(help=f"A folder of weights to push during the run; {SHIPPED_PUSH} for the shipped config."),
]
Agent = Annotated[
    str | None,
    typer.Option(help="Your agent, my_module:run: run(task, base_url, api_key) returns a reward or None."),
]
AgentCommand = Annotated[
    str | None,
    typer.Option(help="Your agent as a command, with OPENAI_BASE_URL, OPENAI_API_KEY and AGENTLOOP_TASK set."),
]


@app.command()
def rollout(
    tasks: Tasks = None,
    environment: EnvironmentName = None,
    task_count: TaskCount = None,
    task_seed: TaskSeed = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Trajectories per task.")] = 2,
    keep: Keep = None,
    config: Config = DEFAULT_CONFIG,
    model: Model = None,
    push: Push = None,
    no_push: Annotated[bool, typer.Option("--no-push", help="Push no weights.")] = False,
    push_version: Annotated[int, typer.Option(min=0, help="The version of the pushed weights.")] = 1,
    push_after: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Push when this share of the trajectories has finished.")
    ] = 0.25,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="Weight versions that a trajectory may be behind; 0: on-policy.")
    ] = None,
    on_stale: Annotated[
        OnStale | None, typer.Option(help="Handling of trajectories that are too stale. Default: mask.")
    ] = None,
    trajectories_per_version: Annotated[
        int | None,
        typer.Option(min=1, help="Trajectories that the trainer uses per version; limits how many are started."),
    ] = None,
    agent: Agent = None,
    agent_command: AgentCommand = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Concurrent runs of your agent.")] = 16,
    out: Out = Path("runs"),
    url: Annotated[
        str | None,
        typer.Option(envvar="AGENTLOOP_URL", help="The URL of a running service. Default: start one for this run."),
    ] = None,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
) -> None:
    """Roll out a task file, on a running service or a service that is started for the run."""
    limit = _limit(max_staleness, on_stale, trajectories_per_version)
    if limit is not None and (agent is not None or agent_command is not None):
        raise typer.BadParameter(
            "--max-staleness is not supported with agents: it applies to the service's own loops"
        )
    if url is not None and (config != DEFAULT_CONFIG or model is not None):
        raise typer.BadParameter(
            "--url excludes --config and --model: they start a service, --url uses a running one with its model"
        )
    with clear_errors():
        is_shipped = url is None and model is None and config == DEFAULT_CONFIG
        shipped = SHIPPED_PUSH if is_shipped else None  # weights of the shipped model only
        weights = None
        if not no_push and (directory := push or shipped) is not None:
            weights = WeightPush(given("weights", "--push", directory), push_version, push_after)
        source = _source(
            tasks or (SHIPPED_TASKS if model is None else MODEL_TASKS), environment, task_seed, task_count
        )
        options = RunOptions(source, samples, out, weights, limit, keep)
        where = loaded_config(config, model, Console()) if url is None else ServiceAddress(url, api_key, admin_key)
        _roll_out(where, options, agent, agent_command, concurrency)


def _source(tasks: Path, environment: str | None, seed: int | None, count: int | None) -> Path | EnvironmentTasks:
    if environment is None:
        if seed is not None or count is not None:
            raise typer.BadParameter("--task-seed and --task-count need --environment")
        return given("tasks", "--tasks", tasks)
    find_modules_here()
    return EnvironmentTasks(environment, seed, count)


def _roll_out(
    where: ServiceConfig | ServiceAddress,
    options: RunOptions,
    agent: str | None,
    command: str | None,
    concurrency: int,
) -> None:
    """Run on the service at an address, or start one, and show the summary. Exits with 1 after a failure."""
    console = Console()
    if isinstance(where, ServiceAddress):
        run = partial(run_on, where)
    else:
        if options.push is not None:  # this run's own service may load the folder that its user pushes
            roots = [*where.weight_roots, str(options.push.directory.parent)]
            where = where.model_copy(update={"weight_roots": roots})
        run = partial(load("own_service").run_rollout, where)
    program = load_program(agent, command, where if isinstance(where, ServiceConfig) else None)
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
