"""A report of a run in a single HTML file: the viewer's pages with embedded data, which need no server.

It contains the summaries of the latest records, the totals of all records, and a few full records: the best, the
worst, the slowest, failed ones, and records with tokens of several weight versions. If the trainer has annotated
records with its logprobs, it has the table of their mismatch by the age of the weights.
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
from agentloop_view.ages import TRAINER_LOGPROBS, mismatch_by_age
from agentloop_view.pages import PAGES_FOLDER

_ENTRY = "app.js"
_IMPORT = re.compile(r'from "\./([\w-]+\.js)"')


def write_report(
    where: Path | Home, model: Path | None, file: Path, curves: Mapping[str, Sequence[float]] | None = None
) -> int:
    """Write a run's report; return the number of full records in it. Raises the errors of TrajectoryReader.

    `curves` maps titles to a trainer's values by step.
    """
    reader = TrajectoryReader(where)
    try:
        pages = {reason: reader.list_records(query) for reason, query in NOTABLE.items()}
        notables, latest = notable(pages), reader.list_records(FactsQuery(limit=MAX_LISTED))
        full, labels = [entry.record for entry in notables], TokenLabels(model, folder_of(where))
        page = replace(latest, records=tuple(dict.fromkeys((*latest.records, *full))))
        listed = {**codec.to_builtins(page), "curves": [_bars(*curve) for curve in (curves or {}).items()]}
        listed["mismatch"] = codec.to_builtins(mismatch_by_age(reader.annotated(TRAINER_LOGPROBS)))
        answers = {"/trajectories": listed, "/trajectories/notable": codec.to_builtins(notables)}
        answers["/updates"] = codec.to_builtins(reader.updates())
        answers["/phases"] = phase_seconds(reader.metrics())
        for facts in full:
            answers[f"/trajectories/{facts.seq}"] = codec.to_builtins(labels.page(reader.record_at(facts.seq)))
    finally:
        reader.close()
    file.write_text(one_file(answers))
    return len(full)


def _bars(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the data of a curve for the pages' `Bars`."""
    bars = [{"value": value, "words": f"step {step}: {value:.3g}"} for step, value in enumerate(values, 1)]
    about = f"by step, from {min(values):.3g} to {max(values):.3g}" if bars else "by step"
    return {"title": title, "about": about, "bars": bars, "from": "step 1", "to": f"step {len(bars)}"}


def one_file(answers: dict[str, Any]) -> str:
    """Return the pages as a single document that reads `answers` by path instead of calling a server."""
    held = orjson.dumps(answers).decode().replace("<", "\\u003c")  # so that no text can close the script element
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
