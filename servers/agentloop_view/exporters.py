"""The formats of `agentloop export`: each function takes an ExportRequest and returns the line to print."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import cast

from agentloop.images import IMAGES_FOLDER
from agentloop.plugins import resolve_extra
from agentloop.storage.exports import ExportRequest, complete_output
from agentloop.storage.trajectory_store import TrajectoryReader, folder_of
from agentloop_servers.config.service import model_of
from agentloop_view.atif import AtifWriter
from agentloop_view.report import write_report
from agentloop_view.timeline import write_timeline


def parquet(request: ExportRequest) -> str:
    """Write a Parquet file with one row per token path."""
    return _rows(request, "parquet")


def jsonl(request: ExportRequest) -> str:
    """Write a file with one line of JSON per token path."""
    return _rows(request, "jsonl")


def hf(request: ExportRequest) -> str:
    """Write a dataset folder for the package `datasets`."""
    model = model_of(folder_of(request.store))
    return _rows(request, "hf", **({} if model is None else {"model": model.name}))


def atif(request: ExportRequest) -> str:
    """Write a folder with the ATIF files of each trajectory."""
    target, run_dir = request.target("atif"), folder_of(request.store)
    model = model_of(run_dir)
    with closing(TrajectoryReader(request.store)) as reader, complete_output(target) as folder:
        folder.mkdir()
        if not isinstance(request.store, Path):
            reader.write_images(run_dir / IMAGES_FOLDER)
        writer = AtifWriter(folder, target, run_dir, None if model is None else model.name, request.prompt_ids)
        records = reader.trajectories(request.rollout_id)
        masked = (one.without_constrained() if request.mask_constrained else one for one in records)
        num_files = [writer.write(record, number) for number, record in enumerate(masked)]
    return f"{len(num_files)} trajectories in {sum(num_files)} files in {target}"


def html(request: ExportRequest) -> str:
    """Write a single file with the viewer's pages and the run's data."""
    target = request.target("html")
    num_full = write_report(request.store, model_of(folder_of(request.store)), target)
    return f"{num_full} full records in {target}"


def ledger(request: ExportRequest) -> str:
    """Write a Parquet file with one row per sampled token: ids, versions, ages and both sides' logprobs."""
    export = cast(Callable[..., int], resolve_extra("agentloop_view.rows:export_ledger", "export"))
    target = request.target("ledger.parquet")
    return f"{export(request.store, target, request.rollout_id):,} tokens in {target}"


def perfetto(request: ExportRequest) -> str:
    """Write a timeline for Perfetto."""
    target = request.target("perfetto.json")
    num = write_timeline(request.store, target, request.rollout_id)
    return f"{num} trajectories in {target}: open it at ui.perfetto.dev"


def _rows(request: ExportRequest, kind: str, **about: object) -> str:
    export = cast(Callable[..., int], resolve_extra("agentloop_view.rows:export", "export"))  # imports pyarrow
    target = request.target(kind)
    about["mask_constrained"] = request.mask_constrained
    num = export(request.store, target, kind, request.rollout_id, **about)
    return f"{num} rows in {target}"
