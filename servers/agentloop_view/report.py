"""A run in one file that opens anywhere: the viewer's own pages, with what they would read inside them.

Of the run it has the facts of the latest records, the totals of all, and a handful of records whole: the best, the
worst, the slowest, failed ones, and such as crossed a weight update.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from agentloop.api.facts import MAX_LISTED, FactsQuery
from agentloop.observability.metrics import phase_seconds
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import TrajectoryReader, folder_of
from agentloop.values import codec
from agentloop_servers.ingress.records import NOTABLE, TokenLabels, notable
from agentloop_view.pages import PAGES_FOLDER

_ENTRY = "app.js"
_IMPORT = re.compile(r'from "\./([\w-]+\.js)"')


def write_report(
    where: Path | Home, model: Path | None, file: Path, curves: Mapping[str, Sequence[float]] | None = None
) -> int:
    """Write a run's report; returns the number of records that are whole in it. Raises as TrajectoryReader.

    `curves` are a trainer's numbers by step, by their title.
    """
    reader = TrajectoryReader(where)
    try:
        pages = {reason: reader.list_records(query) for reason, query in NOTABLE.items()}
        found, latest = notable(pages), reader.list_records(FactsQuery(limit=MAX_LISTED))
        whole, labels = [one.record for one in found], TokenLabels(model, folder_of(where))
        page = replace(latest, records=tuple(dict.fromkeys((*latest.records, *whole))))
        listed = {**codec.to_builtins(page), "curves": [_bars(*curve) for curve in (curves or {}).items()]}
        answers = {"/trajectories": listed, "/trajectories/notable": codec.to_builtins(found)}
        answers["/updates"] = codec.to_builtins(reader.updates())
        answers["/phases"] = phase_seconds(reader.metrics())
        for one in whole:
            answers[f"/trajectories/{one.seq}"] = codec.to_builtins(labels.page(reader.record_at(one.seq)))
    finally:
        reader.close()
    file.write_text(one_file(answers))
    return len(whole)


def _bars(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Return what the pages' `Bars` show of a curve."""
    bars = [{"value": value, "words": f"step {step}: {value:.3g}"} for step, value in enumerate(values, 1)]
    about = f"by step, from {min(values):.3g} to {max(values):.3g}" if bars else "by step"
    return {"title": title, "about": about, "bars": bars, "from": "step 1", "to": f"step {len(bars)}"}


def one_file(answers: dict[str, Any]) -> str:
    """Return the pages as one document that reads `answers`, by path, instead of a server's."""
    held = orjson.dumps(answers).decode().replace("<", "\\u003c")  # no text within ends the element
    modules = {path.name: path.read_text() for path in PAGES_FOLDER.glob("*.js") if path.name != "uplot.js"}
    modules = {name: _IMPORT.sub(r'from "agentloop/\1"', text) for name, text in modules.items()}
    imports = {f"agentloop/{name}": _data_url("text/javascript", text) for name, text in modules.items()}
    styles = "".join((PAGES_FOLDER / name).read_text() for name in ("uplot.css", "style.css"))
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>agentloop</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{styles}</style>",
            f"<script>{(PAGES_FOLDER / 'uplot.js').read_text()}</script>",
            f'<script type="application/json" id="held">{held}</script>',
            f'<script type="importmap">{orjson.dumps({"imports": imports}).decode()}</script>',
            f'<body><script type="module">import "agentloop/{_ENTRY}";</script></body>\n</html>\n',
        )
    )


def _data_url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"
