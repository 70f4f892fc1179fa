"""A run in a single file: its contents, and that it needs no other file or server."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path

import orjson

from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import StopReason
from agentloop_view.report import write_report
from tests.support.records.samples import encoded, make_trajectory

MODEL = Path("examples/tiny_policy/v0").resolve()
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'


async def report_of(tmp_path: Path, *made: object) -> str:
    store = TrajectoryStore(tmp_path / "trajectories.sqlite")
    await store.add_records(encoded(list(made)))
    await store.close()
    write_report(tmp_path / "trajectories.sqlite", MODEL, tmp_path / "report.html", {"Loss": [0.5, -0.25]})
    return (tmp_path / "report.html").read_text()


def staging_device(page: str) -> dict[str, dict[str, object]]:
    [text] = re.findall(r'<script type="application/json" id="held">(.*?)</script>', page, re.DOTALL)
    found: dict[str, dict[str, object]] = orjson.loads(text)
    return found


async def test_it_holds_the_rows_and_those_worth_a_look_whole(tmp_path: Path) -> None:
    made = [make_trajectory("g", n, reward=n / 40) for n in range(40)]
    failed = make_trajectory("bad", stop_reason=StopReason.LOOP_FAILED)
    crossed = make_trajectory("crossed", spans=((0, 0, 3), (1, 5, 8)))
    held = staging_device(await report_of(tmp_path, crossed, *made, failed))
    assert len(held["/trajectories"]["records"]) == 42
    whole = {
        (one["record"]["group_id"], one["record"]["sample_index"])
        for path, one in held.items()
        if path[-1].isdigit()
    }
    assert len(whole) <= 12
    assert whole >= {("crossed", 0), ("bad", 0), ("g", 39), ("g", 0)}
    reasons = {one["record"]["group_id"]: one["reasons"] for one in held["/trajectories/notable"]}
    assert ("crossed an update" in reasons["crossed"], "failed" in reasons["bad"]) == (True, True)
    assert len(held["/trajectories/notable"]) == len(whole)
    assert sum(held["/trajectories"]["histograms"]["total_s"]["counts"]) == 42
    [curve] = held["/trajectories"]["curves"]
    assert (curve["title"], [bar["value"] for bar in curve["bars"]], curve["to"]) == (
        "Loss",
        [0.5, -0.25],
        "step 2",
    )


async def test_nothing_that_was_written_ends_an_element_and_each_module_is_inside(tmp_path: Path) -> None:
    one = make_trajectory()
    page = await report_of(tmp_path, replace(one, error=EVIL, task_id=EVIL))
    assert page.count("<script") == page.count("</script>") == 4
    [held] = [one for path, one in staging_device(page).items() if path[-1].isdigit()]
    assert held["record"]["error"] == EVIL
    [imports] = re.findall(r'<script type="importmap">(.*?)</script>', page)
    modules = orjson.loads(imports)["imports"]
    assert "agentloop/app.js" in modules
    for url in modules.values():
        text = base64.b64decode(url.partition(",")[2]).decode()
        assert set(re.findall(r'from "([^"]+)"', text)) <= set(modules)
    assert not re.search(r'(src|href)="(?!data:)[^"#]', page)
