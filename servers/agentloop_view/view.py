"""`agentloop view`: show a run's files in the browser, without a service."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Annotated

import typer
import uvicorn
from rich.console import Console

from agentloop.storage.trajectory_store import TrajectoryReader, folder_of
from agentloop_servers.cli.terminal import clear_errors, store_of
from agentloop_servers.config.service import model_of
from agentloop_servers.ingress.records import TokenLabels
from agentloop_view.app import viewer_app
from agentloop_view.stored_run import StoredRun

app = typer.Typer()


@app.command()
def view(
    run: Annotated[str, typer.Argument(help="Run directory, run id, or store file.")] = "latest",
    port: Annotated[int, typer.Option(help="Port on the loopback interface; 0: a free port.")] = 8010,
) -> None:
    """Show a run's trajectories in the browser. The run may still be running, or have crashed."""
    with clear_errors():
        store = store_of(run)
        with closing(TrajectoryReader(store)) as reader:
            num_accepted, num_finished = reader.progress()
        if num_finished < num_accepted:
            progress = f"{num_finished:,} of {num_accepted:,} accepted trajectories have a record"
            Console().print(progress, highlight=False)
        stored = StoredRun(store)
        try:
            viewer = viewer_app(stored, TokenLabels(model_of(folder_of(store)), folder_of(store)))
            with socket.create_server(("127.0.0.1", port)) as listener:
                Console().print(f"http://127.0.0.1:{listener.getsockname()[1]}/ui/", highlight=False)
                uvicorn.Server(uvicorn.Config(viewer, log_level="warning")).run([listener])
        finally:
            stored.close()
