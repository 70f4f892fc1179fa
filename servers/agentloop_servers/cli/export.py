"""`agentloop export`: the records of a run as a file, for trainers or for people. It needs no service."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentloop.export import ExportFormat, export
from agentloop.storage.trajectory_store import folder_of
from agentloop_servers.cli.terminal import clear_errors, store_of
from agentloop_servers.config import model_of
from agentloop_servers.viewer.report import write_report

app = typer.Typer()


class Format(StrEnum):
    """File formats that `export` writes."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    HTML = "html"


@app.command("export")
def export_records(
    run: Annotated[str, typer.Argument(help="A run directory, a run's id, or a store file.")],
    format: Annotated[Format, typer.Option(help="The file format.")] = Format.PARQUET,
    out: Annotated[Path | None, typer.Option(help="The file; beside the store if left out.")] = None,
    rollout_id: Annotated[str | None, typer.Option(help="Only this rollout.")] = None,
    mask_constrained: Annotated[
        bool, typer.Option(help="Take tokens that a grammar, a bias or min_tokens shaped out of the mask.")
    ] = False,
) -> None:
    """Write a run's trajectories, also while it is running."""
    with clear_errors():
        store = store_of(run)
        target = out if out is not None else folder_of(store) / f"trajectories.{format.value}"
        if format is Format.HTML:
            num_whole = write_report(store, model_of(folder_of(store)), target)
            Console().print(f"{num_whole} records whole in {target}", highlight=False, soft_wrap=True)
            return
        kind: ExportFormat = "jsonl" if format is Format.JSONL else "parquet"
        num_rows = export(store, target, kind, rollout_id, mask_constrained=mask_constrained)
    Console().print(f"{num_rows} rows in {target}", highlight=False, soft_wrap=True)
