"""`agentloop view`: the viewer over a run's files. It needs no service."""

from __future__ import annotations

from typing import Annotated

import typer
import uvicorn
from fastapi import FastAPI
from rich.console import Console

from agentloop.storage.trajectory_store import folder_of
from agentloop_servers.cli.terminal import clear_errors, store_of
from agentloop_servers.config import located, saved_config
from agentloop_servers.http.guard import HttpGuard, HttpLimits, add_error_handlers
from agentloop_servers.viewer.pages import pages
from agentloop_servers.viewer.records import RecordRoutes, StoredRun, TokenTexts

app = typer.Typer()


@app.command()
def view(
    run: Annotated[str, typer.Argument(help="A run directory, a run's id, or a store file.")] = "latest",
    port: Annotated[int, typer.Option(help="The port, on this machine alone.")] = 8010,
) -> None:
    """Show a run's trajectories in the browser, also while it is running or after it crashed."""
    with clear_errors():
        store = store_of(run)
        config = saved_config(folder_of(store))
        stored = StoredRun(store)
        try:
            Console().print(f"http://127.0.0.1:{port}/ui/   (Ctrl-C ends it)", highlight=False)
            viewer = viewer_app(stored, TokenTexts(None if config is None else located(config.model)))
            uvicorn.run(viewer, host="127.0.0.1", port=port, log_level="warning")
        finally:
            stored.close()


def viewer_app(stored: StoredRun, texts: TokenTexts) -> FastAPI:
    """Return the viewer of a stored run, for callers of this machine."""
    limits = HttpLimits()
    app = FastAPI(title="agentloop view", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpGuard, limits=limits, is_local_only=True)
    add_error_handlers(app, limits)
    app.include_router(RecordRoutes(stored, texts).router())
    app.include_router(pages())
    return app
