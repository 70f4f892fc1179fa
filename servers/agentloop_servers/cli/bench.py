"""`agentloop try`, `validate` and `new`: run an environment in this process, without a service."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from agentloop import parts
from agentloop.errors import InvalidRequest
from agentloop.observability.logs import configure_logging
from agentloop.plugins import resolve
from agentloop.rollout.environment import load_environment, tasks_of
from agentloop.rollout.tool import Tool, load_tools
from agentloop.storage.trajectory_store import TrajectoryReader
from agentloop.testing import ScriptedTurns, play, validate
from agentloop.types import Message, RolloutTask, Trajectory
from agentloop_servers.cli.records import record_lines, show_message, write_run
from agentloop_servers.cli.terminal import clear_errors, find_modules_here, run_to_end, store_of

Named = Annotated[
    str,
    typer.Argument(
        help="An environment: a registered name, or an import path such as my_env:Shop.", metavar="ENVIRONMENT"
    ),
]
ToolPaths = Annotated[
    list[str] | None,
    typer.Option(
        "--tool", metavar="NAME=PATH", help="A tool that tasks use, and its import path; may be repeated."
    ),
]
Debug = Annotated[bool, typer.Option(help="Print the tracebacks of failing tools.")]
OPENAI_POLICY = "agentloop.testing.openai_policy:OpenAIPolicy"  # imported when used: the import takes a second
TEMPLATES = Path(__file__).with_name("new_env")

app = typer.Typer()


@app.command("try")
def try_environment(
    environment: Named,
    task: Annotated[str, typer.Option(help="A task's id or index, or all.")] = "0",
    policy: Annotated[
        str,
        typer.Option(help="scripted (the gold solution), openai:URL, or run:RUN (the replies of a recorded run)."),
    ] = "scripted",
    model: Annotated[
        str, typer.Option(help="The model name for openai:URL. The key is OPENAI_API_KEY.")
    ] = "default",
    out: Annotated[Path | None, typer.Option(help="The parent of a run directory with the records.")] = None,
    tool: ToolPaths = None,
    debug: Debug = False,
) -> None:
    """Run one episode of an environment in this process, and print it turn by turn."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with clear_errors():
        _begin(debug)
        tasks = _chosen(tasks_of(environment), task)
        is_one = len(tasks) == 1
        tell: Callable[[Message], None] = (lambda one: show_message(console, one)) if is_one else lambda one: None
        play_one = partial(play, environment, tools=_tools(tasks, tool), on_message=tell)

        async def played() -> list[Trajectory]:
            records = [await play_one(one, **_policy(policy, model, one)) for one in tasks]
            if out is not None:
                console.print(f"written to {await write_run(records, out)}")
            return records

        records = run_to_end(played())
    if is_one:
        console.rule()
    for record in records:
        lines = record_lines(record) if is_one else [f"{record.task_id}  {record.stop_reason}  {record.reward}"]
        for line in lines:
            console.print(line)
    rewards = [record.reward for record in records if record.reward is not None]
    if not is_one and rewards:
        console.print(f"mean reward {sum(rewards) / len(rewards):g} of {len(rewards)}")
    if not all(record.is_complete and record.reward_error is None for record in records):
        raise typer.Exit(1)


@app.command("validate")
def validate_environment(
    environment: Named,
    max_tasks: Annotated[int, typer.Option(min=1, help="Check the first N tasks.")] = 20,
    tool: ToolPaths = None,
    debug: Debug = False,
) -> None:
    """Check an environment: leaked answers, rewards by chance or for nothing, failing tools."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with clear_errors():
        _begin(debug)
        tasks, kind = tasks_of(environment), load_environment(environment).kind
        faults = run_to_end(validate(environment, max_tasks=max_tasks, tools=_tools(tasks, tool)))
        num_gold = sum(kind.gold(task) is not None for task in tasks[:max_tasks])
    for fault in faults:
        console.print(str(fault))
    console.print(f"{len(faults) or 'no'} faults; {num_gold} tasks with a gold solution")
    if faults:
        raise typer.Exit(1)


@app.command("new")
def new(
    kind: Annotated[str, typer.Argument(help="env")],
    name: Annotated[str, typer.Argument(help="The name of the module and of the folder.")],
) -> None:
    """Create a folder with an environment: a task, a tool, a reward and a test."""
    with clear_errors():
        if kind != "env" or re.fullmatch(r"[a-z_][a-z0-9_]*", name) is None:
            raise InvalidRequest("agentloop new env NAME, with a module's name in lower case", param="name")
        folder, title = Path(name), "".join(part.title() for part in name.split("_")) or "Env"
        if folder.exists():
            raise InvalidRequest(f"{name} is there already", param="name")
        folder.mkdir()
        for template, file in (("environment", name), ("test_environment", f"test_{name}")):
            text = (TEMPLATES / f"{template}.py.in").read_text()
            (folder / f"{file}.py").write_text(text.replace("NAME", name).replace("CLASS", title))
    Console().print(f"cd {name} && agentloop try {name}:{title}", highlight=False)


def _begin(is_debug: bool) -> None:
    find_modules_here()
    configure_logging(None, level="debug", console_level="debug" if is_debug else "warning")


def _policy(policy: str, model: str, task: RolloutTask) -> dict[str, Any]:
    """Return the options of `play` for the policy that the command line names. Raises InvalidRequest."""
    kind, _, where = policy.partition(":")
    if policy == "scripted":
        return {}
    if kind == "openai" and where:
        outside = cast(Callable[[str, str], Any], resolve(OPENAI_POLICY, param="policy"))(where, model)
        return {"policy": outside, "models": outside}
    if kind != "run":
        raise InvalidRequest(f"unknown policy {policy!r}: expected scripted, openai:URL or run:RUN", param="policy")
    with closing(TrajectoryReader(store_of(where))) as reader:
        found = next((one for one in reader.trajectories() if one.task_id == task.task_id), None)
    if found is None:
        raise InvalidRequest(f"run {where!r} has no record of task {task.task_id!r}", param="policy")
    turns = [one for one in found.messages[len(task.messages) :] if one.role == "assistant"]
    return {"policy": ScriptedTurns(turns, name=policy)}


def _chosen(tasks: list[RolloutTask], wanted: str) -> list[RolloutTask]:
    """Return the tasks with an id or index. Raises InvalidRequest if none matches."""
    if wanted == "all" and tasks:
        return tasks
    named = [task for task in tasks if task.task_id == wanted]
    if not named and wanted.isdecimal():
        named = tasks[int(wanted) :]
    if not named:
        raise InvalidRequest(f"no task {wanted!r} among {len(tasks)}", param="task")
    return named[:1]


def _tools(tasks: list[RolloutTask], given: list[str] | None) -> list[Tool]:
    """Return the tools that tasks name: registered ones, and those of the command line. Raises InvalidRequest."""
    names = sorted({name for task in tasks for name in task.tools})
    known = parts.registered(parts.TOOLS) | parts.registered(parts.DEFAULT_TOOLS)
    known |= dict(one.partition("=")[::2] for one in given or ())
    if missing := [name for name in names if name not in known]:
        raise InvalidRequest(
            f"tasks name the tool {missing[0]!r}: say --tool {missing[0]}=my_tools:it", param="tool"
        )
    return load_tools(names, known)
