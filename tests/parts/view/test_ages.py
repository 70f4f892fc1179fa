"""Mismatch by age of weights, and the ledger: one row per sampled token, with the trainer's logprobs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentloop.api.annotations import SampleAnnotation, annotation_of
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader, TrajectoryStore
from agentloop.types import SplitReason, Trajectory
from agentloop.values.mismatch import mismatch
from agentloop_servers.cli.commands import app
from agentloop_view.ages import TRAINER_LOGPROBS, TRAINER_VERSION, mismatch_by_age
from tests.support.records.samples import encoded, make_path, make_trajectory

NAN = float("nan")


def crossed() -> Trajectory:
    """Three tokens of version 3 and three of version 5, received while version 6 was served; one is masked."""
    record = make_trajectory("crossed", spans=((3, 0, 3), (5, 5, 8)))
    [path] = record.paths
    mask = path.response_mask.copy()
    mask[7] = False
    return replace(record, paths=(replace(path, response_mask=mask),), staleness=3, num_masked_tokens=1)


def branched() -> Trajectory:
    """A second path that shares the first turn; its staleness is unknown."""
    first = make_path(((4, 0, 3), (4, 5, 8)))
    mask = first.response_mask.copy()
    mask[:3] = False
    second = replace(first, parent=0, num_shared=13, split_reason=SplitReason.BRANCH, response_mask=mask)
    return make_trajectory("branched", paths=(first, second))


TRAINER = np.array([-0.25, -0.3, -0.25, 9, 9, -0.5, -0.75, -5], np.float32)
ANNOTATIONS = {
    "crossed": {TRAINER_LOGPROBS: [TRAINER.tolist()]},
    "branched": {TRAINER_LOGPROBS: [TRAINER.tolist(), []]},
}


async def stored(folder: Path, **more: dict[str, float]) -> Path:
    store = TrajectoryStore(folder / STORE_NAME)
    await store.accept("r", [])
    await store.add_records(encoded([crossed(), branched(), make_trajectory("plain")]))
    for group in ANNOTATIONS:
        for name, values in {**ANNOTATIONS[group], **more.get(group, {})}.items():
            await store.annotate("r", [SampleAnnotation(group, 0, name, annotation_of(values))])  # type: ignore
    await store.close()
    return folder


def table(folder: Path) -> dict[int | None, tuple[int, float]]:
    reader = TrajectoryReader(folder / STORE_NAME)
    rows = mismatch_by_age(reader.annotated(TRAINER_LOGPROBS))
    reader.close()
    return {row.age: (row.distance.num_tokens, round(row.distance.mean_abs_diff, 6)) for row in rows}


async def test_tokens_are_counted_by_the_age_of_their_weights(tmp_path: Path) -> None:
    folder = await stored(tmp_path)
    # The masked token, with the largest difference, does not count.
    assert table(folder) == {1: (2, 0.375), 3: (3, 0.016667), None: (6, round((0.05 + 0.25 + 0.5 + 4.75) / 6, 6))}


async def test_a_trainer_can_name_its_version(tmp_path: Path) -> None:
    folder = await stored(tmp_path, crossed={TRAINER_VERSION: 5.0}, branched={TRAINER_VERSION: 5.0})
    assert {age: num for age, (num, _) in table(folder).items()} == {0: 2, 1: 6, 2: 3}


async def test_a_report_has_the_table(tmp_path: Path) -> None:
    folder = await stored(tmp_path)
    assert CliRunner().invoke(app, ["export", str(folder), "--format", "html"]).exit_code == 0
    [text] = re.findall(
        r'<script type="application/json" id="held">(.*?)</script>', (folder / "trajectories.html").read_text()
    )
    rows = orjson.loads(text)["/trajectories"]["mismatch"]
    assert [row["age"] for row in rows] == [1, 3, None]
    assert rows[0]["distance"]["k3_kl"] == pytest.approx(mismatch([-0.25] * 2, [-0.5, -0.75]).k3_kl)


async def test_the_ledger_has_each_sampled_token_once(tmp_path: Path) -> None:
    folder = await stored(tmp_path)
    result = CliRunner().invoke(app, ["export", str(folder), "--format", "ledger"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"21 tokens in {folder / 'trajectories.ledger.parquet'}\n"
    rows = pq.read_table(folder / "trajectories.ledger.parquet").to_pylist()
    first = [row for row in rows if row["group_id"] == "crossed"]
    assert [(row["token_id"], row["position"], row["turn_id"]) for row in first[2:5]] == [
        (102, 2, "0"),
        (105, 5, "1"),
        (106, 6, "1"),
    ]
    assert [row["weight_version"] for row in first] == [3, 3, 3, 5, 5, 5]
    assert [row["age"] for row in first] == [3, 3, 3, 1, 1, 1]
    assert [row["trained"] for row in first] == [True] * 5 + [False]
    assert [row["logprob"] for row in first] == [-0.25] * 6
    assert np.float32([row["trainer_logprob"] for row in first]).tolist() == TRAINER[[0, 1, 2, 5, 6, 7]].tolist()
    second = [row for row in rows if row["group_id"] == "branched"]
    assert [(row["path"], row["position"]) for row in second] == [
        *((0, at) for at in (0, 1, 2, 5, 6, 7)),
        *((1, at) for at in (5, 6, 7)),
    ]
    assert {row["age"] for row in second} == {None}
    assert [row["trainer_logprob"] is None for row in second] == [False] * 6 + [True] * 3
    assert {row["trainer_logprob"] for row in rows if row["group_id"] == "plain"} == {None}
    result = CliRunner().invoke(app, ["export", str(folder), "--format", "ledger", "--rollout-id", "other"])
    assert (result.exit_code, "unknown rollout 'other'" in result.stderr) == (1, True)


async def test_a_large_ledger_is_written_in_several_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop_view.rows._ROW_GROUP_TURNS", 4)
    folder = await stored(tmp_path)
    assert CliRunner().invoke(app, ["export", str(folder), "--format", "ledger"]).exit_code == 0
    written = pq.ParquetFile(folder / "trajectories.ledger.parquet")
    assert (written.metadata.num_rows, written.metadata.num_row_groups) == (21, 2)
