"""`agentloop export`: the records of a run as a file for trainers or people, or as traces. It needs no service."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from agentloop.export import ExportFormat, export
from agentloop.plugins import resolve_extra
from agentloop.storage.trajectory_store import folder_of
from agentloop.trace_events import write_timeline
from agentloop_servers.cli.terminal import clear_errors, store_of
from agentloop_servers.config import model_of
from agentloop_servers.viewer.report import write_report

app = typer.Typer()


class Format(StrEnum):
    """Formats that `export` writes: files, of `datasets` a folder (`hf`); OTLP goes to a receiver."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    HF = "hf"
    HTML = "html"
    PERFETTO = "perfetto"
    OTLP = "otlp"


@app.command("export")
def export_records(
    run: Annotated[str, typer.Argument(help="A run directory, a run's id, or a store file.")],
    format: Annotated[Format, typer.Option(help="The file format.")] = Format.PARQUET,
    out: Annotated[Path | None, typer.Option(help="The file or folder; beside the store if left out.")] = None,
    rollout_id: Annotated[str | None, typer.Option(help="Only this rollout.")] = None,
    mask_constrained: Annotated[
        bool, typer.Option(help="Take tokens that a grammar, a bias or min_tokens shaped out of the mask.")
    ] = False,
    endpoint: Annotated[str, typer.Option(help="The receiver of `--format otlp`.")] = "http://127.0.0.1:4318",
    content: Annotated[bool, typer.Option(help="Give traces their messages.")] = False,
) -> None:
    """Write a run's trajectories, also while it is running."""
    with clear_errors():
        store = store_of(run)
        ending = "perfetto.json" if format is Format.PERFETTO else format.value
        target = out if out is not None else folder_of(store) / f"trajectories.{ending}"
        match format:
            case Format.OTLP:
                send_run = cast(Callable[..., int], resolve_extra("agentloop_servers.tracing:send_run", "otel"))
                said = f"{send_run(store, rollout_id, endpoint, content=content)} traces sent to {endpoint}"
            case Format.HTML:
                num_whole = write_report(store, model_of(folder_of(store)), target)
                said = f"{num_whole} records whole in {target}"
            case Format.PERFETTO:
                said = f"{write_timeline(store, target, rollout_id)} trajectories in {target}, for ui.perfetto.dev"
            case Format.PARQUET | Format.JSONL | Format.HF:
                kind = cast(ExportFormat, format.value)
                model = model_of(folder_of(store)) if format is Format.HF else None
                about = {} if model is None else {"model": model.name}
                num_rows = export(store, target, kind, rollout_id, mask_constrained=mask_constrained, **about)
                said = f"{num_rows} rows in {target}"
    Console().print(said, highlight=False, soft_wrap=True)
