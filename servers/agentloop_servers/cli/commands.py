"""The commands of `agentloop`. The module of a command is imported when the command runs, so help is fast.

Exit codes: 0 success; 1 an error, lost trajectories or a broken requirement; 2 wrong usage; 130 Ctrl-C;
143 SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated, cast

import typer
from typer.core import TyperGroup

from agentloop import __version__, parts
from agentloop.errors import InvalidRequest
from agentloop_servers.cli import load

COMMANDS = {
    "serve": ("service", "Run the service, on a local Ray or on a Ray cluster, until Ctrl-C or SIGTERM."),
    "rollout": ("rollout", "Roll out a task file, on a running service or a service that is started for the run."),
    "try": ("bench", "Run one episode of an environment in this process, and print it turn by turn."),
    "validate": (
        "bench",
        "Check an environment: leaked answers, rewards by chance or for nothing, failing tools.",
    ),
    "new": ("bench", "Create a folder with an environment: a task, a tool, a reward and a test."),
    "show": ("records", "Show one trajectory of a run: its conversation, versions and rewards."),
    "list": ("records", "List a run's trajectories: newest, slowest, failed, by reward, task or text."),
    "status": ("remote", "Show the state of a running service."),
    "why": ("remote", "Explain why a service or a trajectory makes no progress, or is slow."),
    "top": ("top", "Watch a running service: replicas, queue, oldest trajectories, tools and problems."),
    "cancel": ("remote", "Cancel a rollout; each of its samples still gets a record."),
    "weights": ("remote", "Push or publish weights."),
    "pause": ("remote", "Pause generation on all replicas between two tokens, until `resume`."),
    "resume": ("remote", "Resume generation after `pause`."),
    "sleep": ("remote", "Pause all replicas and release their memory, until `wake`."),
    "wake": ("remote", "Allocate the released memory again; generation resumes when all of it is back."),
    "drain": ("remote", "Assign no more work to a host, and wait until it can be removed."),
    "doctor": ("doctor", "Check this machine, or a model folder."),
}
"""By command: its module in this package, and its line in the help."""

OF_PARTS = {
    "view": "Show a run's trajectories in the browser.",
    "export": "Export a run's trajectories, also while it is running.",
    "import": "Write trajectories of ATIF files or JSON lines into a new run, for show and view.",
    "eval": "Evaluate a served policy on environments, and compare two evaluations.",
    "models": "List published models, and download one as a model folder.",
    "check-logprobs": "Compare a run's recorded logprobs with those of the checkpoints that sampled them.",
    "replay": "Re-execute a recorded trajectory, and name the first difference and its cause.",
}
"""By command of an optional part: its line in the help."""


class _Chosen(TyperGroup):
    """A group whose commands are placeholders until one is run."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def] # typer may, or may not, bring its own click
        """Replace the placeholder by the command of its module."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and command.name is not None:
            command = typer.main.get_group(_application(command.name)).commands[command.name]
            # The handler that asyncio expects and replaces.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return name, command, rest


def _application(command: str) -> typer.Typer:
    """Import the application that has a command. Exits with an error line if a package is missing."""
    if command in COMMANDS:
        return cast(typer.Typer, load(COMMANDS[command][0]).app)
    try:
        return cast(typer.Typer, parts.load(parts.COMMANDS, command, param="command"))
    except InvalidRequest as error:
        sys.exit(f"agentloop: {error.message}")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"agentloop {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_Chosen,
    help="Asynchronous rollouts of language-model agents for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Handle the options before the command."""


def _stand_in() -> None:
    """A placeholder for a command."""


_helps = {_name: _help for _name, (_, _help) in COMMANDS.items()}
for _name in parts.registered(parts.COMMANDS):
    _helps.setdefault(_name, OF_PARTS.get(_name, "A command of another package."))
for _name, _help in _helps.items():
    app.command(_name, help=_help)(_stand_in)
