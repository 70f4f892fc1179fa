"""Shared by all commands: options, the files that the user names, errors in one line, and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop_servers.config.models import fitted, with_model_folders
from agentloop_servers.config.service import CHECKOUT, ServiceConfig, located
from agentloop_servers.run.store import has_store, store_in

T = TypeVar("T")

Url = Annotated[str, typer.Option("--url", envvar="AGENTLOOP_URL", help="The URL of the service.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="AGENTLOOP_KEY", help="A user's API key.")]
AdminKey = Annotated[str | None, typer.Option("--admin-key", envvar="AGENTLOOP_ADMIN_KEY", help="The admin key.")]
TaskCount = Annotated[
    int | None, typer.Option(min=1, help="Use this many of the environment's tasks. Default: all.")
]
TaskSeed = Annotated[
    int | None, typer.Option(min=0, help="Shuffle or generate the environment's tasks with this seed.")
]
Out = Annotated[Path, typer.Option("--out", help="The parent folder of run directories.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A model in place of the config's: a folder, a name of `agentloop models list`, a Hugging Face id"
        " (org/name or org/name@revision), or a .gguf file.",
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_CONFIG = Path("servers/cpu.yaml")
PLAIN: Mapping[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
"""Options with which a rich Console prints a line unchanged."""


def given(what: str, option: str, path: Path) -> Path:
    """Return the user's path as `located` finds it. Raises InvalidRequest if it does not exist."""
    found = located(str(path))
    if not found.exists():
        where = "there" if path.is_absolute() else f"here, nor in {CHECKOUT}"
        raise InvalidRequest(f"cannot read {what}: {option} {path}: nothing of that name is {where}", param=option)
    return found


def loaded_config(config: Path, model: str | None, console: Console) -> ServiceConfig:
    """Return a config file's settings with the model folder, downloaded on first use. Raises InvalidRequest."""
    settings = ServiceConfig.load(given("the config", "--config", config))
    if model is not None:
        settings = settings.model_copy(update={"model": model})
    settings = with_model_folders(settings, lambda line: console.print(f"model    {line}", **PLAIN))
    # The KV cache of the shipped config is too small for one context of most models.
    return fitted(settings) if model is not None and config == DEFAULT_CONFIG else settings


def store_of(run: str) -> Path | Home:
    """Return the store of a run: a folder, an id, or the file itself. Raises InvalidRequest."""
    for path in (Path(run), Path("runs") / run):
        if has_store(path):
            return store_in(path)
        if path.is_file():
            return path
    raise InvalidRequest(f"no run {run!r}: no {STORE_NAME} there, nor in runs/{run}")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; Ctrl-C and SIGTERM cancel it, and the process ends after its cleanup."""

    async def guarded() -> T:
        end_on_sigterm()
        return await work

    try:
        return asyncio.run(guarded())
    except KeyboardInterrupt as stop:
        Console(stderr=True).print("interrupted; all started processes are stopped")
        raise typer.Exit(130) from stop
    except asyncio.CancelledError as stop:
        Console(stderr=True).print("received SIGTERM; all started processes are stopped")
        raise typer.Exit(143) from stop


def end_on_sigterm() -> None:
    """Make SIGTERM cancel the current task, so that its cleanup runs."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def find_modules_here() -> None:
    """Make modules of the working directory importable, also in child processes."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


@contextmanager
def clear_errors() -> Iterator[None]:
    """Print an AgentLoopError or OSError of the block as one line on stderr, and exit with 1."""
    try:
        yield
    except* (AgentLoopError, OSError) as group:
        for error in _leaves(group):
            Console(stderr=True).print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from group


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
