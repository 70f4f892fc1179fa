"""The command `models`: the published models, and their download."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentloop.errors import InvalidRequest
from agentloop_models.fetch import CACHE_VARIABLE, cache_folder, caution, fetched_folder, is_complete
from agentloop_models.table import PUBLISHED, published
from agentloop_servers.cli.terminal import clear_errors

app = typer.Typer()
models = typer.Typer(help="List published models, and download one as a model folder.", no_args_is_help=True)
app.add_typer(models, name="models")


@models.command("list")
def list_models() -> None:
    """List the published models: their size, license and packages, and the ones in the cache."""
    console = Console()
    for model in PUBLISHED.values():
        first, *others = model.packages
        state = "in the cache" if is_complete(cache_folder() / model.name) else "not in the cache"
        lines = (
            model.name,
            f"  download {model.gguf_bytes / 1e6:,.0f} MB, folder {model.folder_bytes / 1e6:,.0f} MB, {state}",
            f"  license  {model.license}",
            f"  original {model.original}",
            f"  packages {first.requirement}{f' and {len(others)} more' if others else ''}",
        )
        console.print("\n".join(lines), highlight=False, soft_wrap=True)
    console.print(f"\ncache: {cache_folder()} (change it with {CACHE_VARIABLE})", highlight=False, soft_wrap=True)
    console.print("use one with: agentloop rollout --model NAME", highlight=False)


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A published model; `agentloop models list` shows the names.")],
    out: Annotated[
        Path | None, typer.Option(help="Copy the model folder to this path. Default: keep it in the cache only.")
    ] = None,
) -> None:
    """Download a published model with pip, verify it, and convert it to a Hugging Face folder.

    An interrupted download continues with the missing packages. `--model NAME` of `rollout`, `serve` and `doctor`
    does the same on first use.
    """
    console = Console()
    with clear_errors():
        model = published(name)
        if out is not None and out.exists():
            raise InvalidRequest(f"--out {out} exists: choose a path that does not", param="out")
        was_cached = is_complete(cache_folder() / model.name)
        folder = fetched_folder(
            model, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)
        )
        if was_cached:
            console.print(caution(model), highlight=False, soft_wrap=True)
        if out is not None:
            folder = Path(shutil.copytree(folder, out))
        console.print(f"model folder: {folder}", highlight=False, soft_wrap=True)
