"""The timeline of a run: as many slices as turns, calls and update steps, each on a named track."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import orjson

from agentloop.api.coordinator import ReplicaUpdate, UpdateReport
from agentloop.storage.trajectory_store import UPDATES, TrajectoryStore
from agentloop.types import KVPolicy
from agentloop_view.timeline import Tracks, write_timeline
from tests.support.records.samples import encoded, interleaved_paths, make_group, make_trajectory

STEPS = ReplicaUpdate("replica-0", stage_ms=40.0, stall_ms=5.0, canary_ms=2.0, paused_at_ms=41.0)


def test_turns_are_numbered_as_they_began() -> None:
    events = Tracks().of_record(make_trajectory(paths=interleaved_paths()))
    turns = {one["args"]["turn"]: one["name"] for one in events if "turn" in one.get("args", {})}
    assert turns == {turn_id: f"turn {turn_id}" for turn_id in "1234"}


async def test_it_has_every_turn_call_and_step(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories.sqlite")
    await store.accept("r", [make_group()])
    records = [make_trajectory("g", n, num_tool_errors=n % 2) for n in range(5)]
    await store.add_records(encoded([*records, replace(make_trajectory("old"), times=None)]))
    both = (STEPS, replace(STEPS, replica_id="replica-1"))
    update = UpdateReport(1, 0, KVPolicy.RECOMPUTE, both, 50.0, began_at=1.7e9)
    await store.save_state(UPDATES, (update,))
    await store.close()
    num = await asyncio.to_thread(write_timeline, tmp_path / "trajectories.sqlite", tmp_path / "t.json")
    events = orjson.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    assert num == 6
    slices = Counter(one["name"].partition(" ")[0] for one in events if one["ph"] == "X")
    turns = [turn for record in records for path in record.paths for turn in path.own_turns]
    calls = [call for record in records for call in record.times.tool_calls] if records[0].times else []
    assert slices["turn"] == len(turns) == 10
    assert sum(slices[name] for name in {call.name for call in calls}) == len(calls) > 0
    assert (slices["stage"], slices["stall"], slices["canary"], slices["trajectory"]) == (2, 2, 2, 5)
    assert Counter(one["ph"] for one in events if one["ph"] in "besf") == {"b": 10, "e": 10, "s": 1, "f": 1}
    whole = [one for one in events if one["ph"] == "X"]
    for a, b in itertools.combinations(whole, 2):
        if (a["pid"], a["tid"]) == (b["pid"], b["tid"]):
            spans = sorted((one["ts"], -one["ts"] - one["dur"]) for one in (a, b))
            (_, end), (second, other) = spans
            assert second >= -end or other >= end
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in events if "ts" in one} == named
    assert all(one["ts"] >= 1.69e15 for one in events if "ts" in one)
    [stall] = [one for one in events if one["name"] == "stall 1" and one["tid"] == 1]
    assert (round(stall["ts"] - 1.7e15), stall["dur"]) == (41_000, 5_000)
