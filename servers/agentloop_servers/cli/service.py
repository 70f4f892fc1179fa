"""The command `serve`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentloop.observability.logs import LOG_NAME, configure_logging
from agentloop.storage.trajectory_store import folder_of
from agentloop_servers.cli.run import link_latest
from agentloop_servers.cli.terminal import (
    DEFAULT_CONFIG,
    Model,
    Out,
    clear_errors,
    loaded_config,
    run_to_end,
    store_of,
)
from agentloop_servers.config.service import ServiceConfig, run_dir_in
from agentloop_servers.local import drain, running_service
from agentloop_servers.run.locks import take_run_lock
from agentloop_servers.run.store import has_store, restore_run, resumed_config

app = typer.Typer()


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help=f"The config file. Default: {DEFAULT_CONFIG}.")
    ] = None,
    model: Model = None,
    out: Out = Path("runs"),
    resume: Annotated[
        str | None,
        typer.Option(help="A run directory or id to resume: its queue, sessions, weights and records."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster, HOST:PORT or auto; run the command on its head node.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds for running trajectories to finish after SIGTERM.")
    ] = 30.0,
) -> None:
    """Run the service, on a local Ray or on a Ray cluster, until Ctrl-C or SIGTERM."""
    if resume is not None and model is not None:
        raise typer.BadParameter("--model and --resume exclude each other: a run continues with its own model")
    with clear_errors():
        run_dir = None if resume is None else folder_of(store_of(resume))
        saved = None if run_dir is None or config is not None else resumed_config(run_dir)
        settings = saved or loaded_config(config or DEFAULT_CONFIG, model, Console())
        if run_dir is None:
            run_dir = run_dir_in(out) if settings.run_dir is None else Path(settings.run_dir)
        restore_run(settings, run_dir)
        run_to_end(_serve(settings, run_dir, address, grace_s, is_resumed=has_store(run_dir)))


async def _serve(
    config: ServiceConfig, run_dir: Path, address: str | None, grace_s: float, *, is_resumed: bool
) -> None:
    """Check that the run is free. Raises Conflict if a service uses its directory."""
    configure_logging(None)  # the run directory does not exist yet
    if is_resumed:
        (await take_run_lock(run_dir, 0.0)).release()  # the coordinator takes it when it starts
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def begin() -> None:
        link_latest(run_dir)
        configure_logging(run_dir / LOG_NAME)
        say(f"{'resuming' if is_resumed else 'starting'}; log and trajectories in {run_dir}")

    waits_for_weights = is_resumed or config.awaits_weights
    async with running_service(
        config, run_dir, address=address, waits_for_weights=waits_for_weights, begin=begin, say=say
    ) as url:
        stopping = _stop_on_sigterm()
        say(f"ready at {url}   (Ctrl-C stops it)")
        say(f"chat     {url}/v1")
        await stopping.wait()
        num_left = await drain(config, run_dir, grace_s)
    if num_left > 0:
        say(f"stopped; {num_left} unfinished trajectories continue with: agentloop serve --resume {run_dir}")


def _stop_on_sigterm() -> asyncio.Event:
    """Return an event that the first SIGTERM sets; the second one cancels the current task."""
    task, loop, stopping = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
    assert task is not None

    def stop() -> None:
        stopping.set()
        loop.add_signal_handler(signal.SIGTERM, task.cancel)

    loop.add_signal_handler(signal.SIGTERM, stop)
    return stopping
