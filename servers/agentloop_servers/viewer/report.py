"""A run in one file that opens anywhere: the viewer's own pages, with what they would read inside them.

Of the run it has the facts of the latest records, the totals of all, and a handful of records whole: the best, the
worst, the slowest, failed ones, and such as crossed a weight update.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from agentloop import codec
from agentloop.api.facts import MAX_LISTED, FactsPage, FactsQuery, ListOrder, RecordFacts
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import TrajectoryReader
from agentloop.types import Trajectory
from agentloop_servers.viewer.pages import PAGES_FOLDER
from agentloop_servers.viewer.records import TokenLabels

MAX_WHOLE = 12
_MAX_OF_A_KIND = 3

_ENTRY = "app.js"
_IMPORT = re.compile(r'from "\./([\w-]+\.js)"')


def write_report(where: Path | Home, model: Path | None, file: Path) -> int:
    """Write a run's report; returns the number of records that are whole in it. Raises as TrajectoryReader."""
    reader = TrajectoryReader(where)
    try:
        page = reader.list_records(FactsQuery(limit=MAX_LISTED))
        whole = dict.fromkeys(_worth_a_look(reader, page))
        seqs, labels = [one.seq for one in whole][:MAX_WHOLE], TokenLabels(model)
        records = tuple(dict.fromkeys((*page.records, *whole)))
        answers: dict[str, Any] = {"/trajectories": codec.to_builtins(replace(page, records=records, cursor=""))}
        for seq in seqs:
            shown = labels.page(codec.decode(reader.record_at(seq), Trajectory))
            answers[f"/trajectories/{seq}"] = codec.to_builtins(shown)
    finally:
        reader.close()
    file.write_text(one_file(answers))
    return len(seqs)


def _worth_a_look(reader: TrajectoryReader, page: FactsPage) -> Iterator[RecordFacts]:
    crossed = [one for one in page.records if one.oldest_version != one.newest_version]
    yield from crossed[:_MAX_OF_A_KIND]
    for order in (ListOrder.BEST, ListOrder.WORST, ListOrder.SLOWEST):
        yield from reader.list_records(FactsQuery(order, limit=_MAX_OF_A_KIND - 1)).records
    yield from reader.list_records(FactsQuery(failed=True, limit=_MAX_OF_A_KIND)).records


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
