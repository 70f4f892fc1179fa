from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from agentloop.api.coordinator import ReplicaUpdate, UpdateReport
from agentloop.storage.summary import LengthSummary, StaleSummary, UpdateSummary, VersionSuccess, summarize
from agentloop.types import KVPolicy, StopReason
from tests.support.records.samples import make_path, make_trajectory

V1 = ((1, 0, 3), (1, 5, 8))
BOTH = ((0, 0, 3), (1, 5, 8))

RECORDS = [
    make_trajectory("a", 0, reward=0.0),
    make_trajectory("a", 1, reward=1.0, num_tool_errors=1),
    make_trajectory("b", 0, spans=V1, reward=1.0),
    make_trajectory("b", 1, spans=V1, reward=None, num_tool_errors=2),
    make_trajectory("c", 0, spans=BOTH, reward=1.0),
    make_trajectory("c", 1, paths=(), reward=None, stop_reason=StopReason.INVALID_TASK),
]


def test_counts_tokens_and_shares() -> None:
    summary = summarize(RECORDS, num_accepted=6, wall_s=10.0)
    assert (summary.accepted, summary.records, summary.lost, summary.complete) == (6, 6, 0, 5)
    assert summary.stop_reasons == {"completed": 5, "invalid_task": 1}
    assert (summary.prompt_tokens, summary.sampled_tokens, summary.observed_tokens) == (50, 30, 10)
    assert summary.sampled_tokens_per_s == 3.0
    assert (summary.partial, summary.partial_share) == (1, pytest.approx(1 / 6, abs=1e-4))
    assert summary.recovered_from_tool_error == 1
    assert summary.prefix_cache_hit_share == pytest.approx(8 / 25)


def test_success_is_told_by_version_and_apart_for_mixed_ones() -> None:
    summary = summarize(RECORDS, num_accepted=6, wall_s=10.0)
    assert list(summary.success_by_version) == ["0", "1", "none", "mixed"]
    assert summary.success_by_version["0"] == VersionSuccess(2, 2, 0.5)
    assert summary.success_by_version["1"] == VersionSuccess(2, 1, 1.0)
    assert summary.success_by_version["mixed"] == VersionSuccess(1, 1, 1.0)
    assert summary.success_by_version["none"] == VersionSuccess(1, 0, None)
    assert summary.success == 0.75


def test_what_has_no_record_is_lost_and_a_duplicate_does_not_make_up_for_it() -> None:
    assert summarize(RECORDS[:4], num_accepted=6, wall_s=1.0).lost == 2
    assert summarize([RECORDS[0]] * 6, num_accepted=6, wall_s=1.0).lost == 5


def test_stale_trajectories_are_counted_by_what_became_of_them() -> None:
    limited = [replace(one, max_staleness=1, staleness=1) for one in RECORDS[:5]]
    dropped = replace(limited[0], stop_reason=StopReason.STALE, is_complete=False, paths=(), num_stale_attempts=3)
    finished = replace(
        limited[1], stop_reason=StopReason.STALE, is_complete=False, staleness=2, num_masked_tokens=1
    )
    masked = replace(limited[2], num_masked_tokens=4)
    late = replace(limited[3], staleness=2, num_stale_attempts=1)
    summary = summarize([dropped, finished, masked, late, limited[4]], num_accepted=5, wall_s=1.0)
    assert summary.stale == StaleSummary(
        dropped_attempts=4, given_up=1, masked=1, finished=1, late=1, masked_tokens=5
    )
    assert summarize(RECORDS, num_accepted=6, wall_s=1.0).stale is None
    well = summarize(limited, num_accepted=5, wall_s=1.0)
    assert well.stale == StaleSummary(0, 0, 0, 0, 0, 0)


def test_masked_tokens_were_sampled_all_the_same() -> None:
    (path,) = RECORDS[0].paths
    mask = path.response_mask.copy()
    mask[:3] = False
    masked = replace(RECORDS[0], paths=(replace(path, response_mask=mask),), num_masked_tokens=3)
    summary = summarize([masked], num_accepted=1, wall_s=1.0)
    assert (summary.sampled_tokens, summary.observed_tokens) == (6, 2)


def test_an_empty_run_divides_by_nothing(tmp_path: Path) -> None:
    summary = summarize([], num_accepted=0, wall_s=0.0)
    assert (summary.success, summary.partial_share, summary.sampled_tokens_per_s) == (None, None, None)


def test_summary_json_holds_every_update(tmp_path: Path) -> None:
    replicas = (ReplicaUpdate("x", 5.0, 12.3456), ReplicaUpdate("y", 6.0, 20.5, error="gone"))
    report = UpdateReport(1, 0, KVPolicy.RECOMPUTE, replicas, 31.0)
    summary = summarize(RECORDS, num_accepted=6, wall_s=10.0, updates=[report])
    assert summary.updates == (UpdateSummary(1, 20.5, 31.0, 1),)
    path = tmp_path / "summary.json"
    summary.write(path)
    written = orjson.loads(path.read_bytes())
    assert written["lost"] == 0
    assert written["updates"] == [
        {"version": 1, "pause_to_resume_ms": 20.5, "total_ms": 31.0, "num_failed_replicas": 1}
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_lengths_of_what_is_trained_stand_beside_those_of_all() -> None:
    cut = replace(RECORDS[0], stop_reason=StopReason.CANCELLED, is_complete=False)
    short = replace(make_path(((0, 0, 3),)), response_mask=np.array([1, 1, 1, 0, 0, 0, 0, 0], np.bool_))
    records = [cut, make_trajectory("a", 1, paths=(short,)), *RECORDS[2:]]
    lengths = summarize(records, num_accepted=6, wall_s=1.0).lengths
    assert lengths.submitted == LengthSummary(5, 5.4, 6.0, 6.0, 6.0, 6)
    assert lengths.trained == LengthSummary(4, 5.2, 6.0, 6.0, 6.0, 6)
    assert lengths.num_unknown == 1
    acknowledged = {("r", "a", 1), ("r", "a", 0)}
    assert summarize(
        records, num_accepted=6, wall_s=1.0, acknowledged=acknowledged
    ).lengths.trained == LengthSummary(1, 3.0, 3.0, 3.0, 3.0, 3)
    none = summarize([], num_accepted=0, wall_s=1.0).lengths
    assert none.trained == none.submitted == LengthSummary(0, 0.0, 0.0, 0.0, 0.0, 0)


def test_failures_are_counted_by_whose_they_are() -> None:
    late = replace(RECORDS[0], stop_reason=StopReason.MAX_TURNS)
    counts = summarize([late, *RECORDS[1:]], num_accepted=6, wall_s=1.0).failures
    assert counts == {"infrastructure": 1, "policy": 1}
