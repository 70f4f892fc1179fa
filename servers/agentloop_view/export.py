"""`agentloop export`: the records of a run in one of the registered formats. It needs no service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentloop import parts
from agentloop.storage.exports import ExportRequest
from agentloop_servers.cli.terminal import clear_errors, store_of

app = typer.Typer()

_FORMATS = ", ".join(sorted(parts.registered(parts.EXPORTERS)))


@app.command("export")
def export_records(
    run: Annotated[str, typer.Argument(help="A run directory, a run's id, or a store file.")],
    format: Annotated[str, typer.Option(help=f"One of {_FORMATS}.")] = "parquet",
    out: Annotated[Path | None, typer.Option(help="The file or folder; by default in the run directory.")] = None,
    rollout_id: Annotated[str | None, typer.Option(help="Only this rollout.")] = None,
    mask_constrained: Annotated[
        bool, typer.Option(help="Take tokens that a grammar, a bias or min_tokens shaped out of the mask.")
    ] = False,
    endpoint: Annotated[str, typer.Option(help="The receiver of `--format otlp`.")] = "http://127.0.0.1:4318",
    content: Annotated[bool, typer.Option(help="Send messages with traces.")] = False,
) -> None:
    """Write a run's trajectories, also while it is running."""
    if format not in parts.registered(parts.EXPORTERS):
        raise typer.BadParameter(f"{format!r} is none of {_FORMATS}", param_hint="--format")
    with clear_errors():
        exporter = parts.load(parts.EXPORTERS, format, param="format")
        request = ExportRequest(store_of(run), out, rollout_id, mask_constrained, endpoint, content)
        Console().print(exporter(request), highlight=False, soft_wrap=True)
