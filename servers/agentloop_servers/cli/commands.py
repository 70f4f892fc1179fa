"""The commands of `agentloop`. Each is imported once it is chosen: help and a typo import none.

Exit codes: 0 good; 1 a clear error, lost trajectories, or something needed is broken; 2 wrong usage; 130 Ctrl-C;
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
    "serve": ("service", "Run the service on a Ray of its own, or on a cluster, until Ctrl-C, or SIGTERM."),
    "rollout": ("rollout", "Roll out a task file, by a service of its own or by a running one."),
    "try": ("bench", "Play one episode of an environment in this process, and print it turn by turn."),
    "validate": (
        "bench",
        "Look for faults of an environment: leaks, chance, free rewards, tools that break.",
    ),
    "new": ("bench", "Write a folder with an environment: a task, a tool, a reward and a test."),
    "show": ("records", "Show one trajectory of a run: its conversation, versions and rewards."),
    "list": ("records", "List a run's trajectories: newest, slowest, failed, by reward, task or text."),
    "status": ("remote", "Show a running service."),
    "why": ("remote", "Say why nothing moves, or why it is slow."),
    "top": ("top", "Watch a running service: replicas, queue, the oldest in flight, tools, and what is wrong."),
    "cancel": ("remote", "End what is queued or running of a rollout; each sample still gets its record."),
    "weights": ("remote", "Weights of a running service."),
    "pause": ("remote", "Freeze all replicas between two tokens, until `resume`."),
    "resume": ("remote", "Let frozen replicas go on."),
    "sleep": ("remote", "Freeze all replicas and give their memory back, until `wake`."),
    "wake": ("remote", "Take memory back; once all of it is, generation goes on."),
    "drain": ("remote", "Give a host no more work, and wait until it may go."),
    "doctor": ("doctor", "Check this machine, or a model folder."),
}
"""Each command's module in this package, and its line in the help."""

OF_PARTS = {
    "view": "Show a run's trajectories in the browser.",
    "export": "Write a run's trajectories, also while it is running.",
    "check-logprobs": "Compare a run's recorded logprobs with those of the checkpoints that sampled them.",
}
"""The line in the help of the commands of our optional parts."""


class _Chosen(TyperGroup):
    """A group whose commands are stand-ins, until one is chosen."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def] # typer may, or may not, bring its own click
        """Replace the stand-in by the command of its module."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and command.name is not None:
            command = typer.main.get_group(_application(command.name)).commands[command.name]
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the one that asyncio replaces by its own
        return name, command, rest


def _application(command: str) -> typer.Typer:
    """Import the application that has a command. Exits with one line if a package is missing."""
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
    """Stand before every command."""


def _stand_in() -> None:
    """Stand for a command until it is chosen."""


_helps = {_name: _help for _name, (_, _help) in COMMANDS.items()}
for _name in parts.registered(parts.COMMANDS):
    _helps.setdefault(_name, OF_PARTS.get(_name, "Of another package."))
for _name, _help in _helps.items():
    app.command(_name, help=_help)(_stand_in)
