"""`agentloop export`: write the records of a run in a registered format, without a service."""

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
    run: Annotated[str, typer.Argument(help="Run directory, run id, or store file.")],
    format: Annotated[str, typer.Option(help=f"One of {_FORMATS}.")] = "parquet",
    out: Annotated[Path | None, typer.Option(help="Output file or folder. Default: in the run directory.")] = None,
    rollout_id: Annotated[str | None, typer.Option(help="Export only this rollout.")] = None,
    mask_constrained: Annotated[
        bool, typer.Option(help="Exclude tokens constrained by a grammar, a bias or min_tokens from the mask.")
    ] = False,
    endpoint: Annotated[str, typer.Option(help="OTLP receiver for `--format otlp`.")] = "http://127.0.0.1:4318",
    content: Annotated[bool, typer.Option(help="Include messages in traces.")] = False,
    prompt_ids: Annotated[
        bool, typer.Option(help="Include each turn's prompt ids in ATIF files, whose size grows with the turns.")
    ] = True,
) -> None:
    """Export a run's trajectories. The run may still be running."""
    if format not in parts.registered(parts.EXPORTERS):
        raise typer.BadParameter(f"unknown format {format!r}: expected one of {_FORMATS}", param_hint="--format")
    with clear_errors():
        exporter = parts.load(parts.EXPORTERS, format, param="format")
        request = ExportRequest(store_of(run), out, rollout_id, mask_constrained, endpoint, content, prompt_ids)
        Console().print(exporter(request), highlight=False, soft_wrap=True)
