"""Export of a run as a timeline for Perfetto or other readers of Chrome's trace events.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times
are Unix times in microseconds. Tracks are trajectories, grouped by worker, with queue, turns, tool calls and
reward; replicas, with their overlapping turns; and weight updates, with the steps of each replica.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from agentloop.api.coordinator import UpdateReport, assignment_id_of
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import TrajectoryReader
from agentloop.types import Trajectory

_UPDATES, _REPLICAS, _FIRST_WORKER = 1, 2, 3  # process ids of the trace

Event = dict[str, Any]


def write_timeline(where: Path | Home, file: Path, rollout_id: str | None = None) -> int:
    """Write the timeline of a run or of one rollout; return the number of trajectories. Raises NotFound."""
    reader, num, tracks = TrajectoryReader(where), 0, Tracks()
    try:
        with file.open("wb") as out:
            out.write(b'{"traceEvents":[\n')
            for update in reader.updates():
                _write(out, tracks.of_update(update))
            for record in reader.trajectories(rollout_id):
                _write(out, tracks.of_record(record))
                num += 1
            _write(out, tracks.names())
            out.write(b'{"ph":"M","name":"end","pid":0}\n]}\n')  # JSON does not allow a comma after the last event
    finally:
        reader.close()
    return num


def _write(out: Any, events: Iterable[Event]) -> None:
    for event in events:
        out.write(orjson.dumps(event) + b",\n")


class Tracks:
    """Assigns process and thread ids of the trace to tracks, by name."""

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}
        self._threads: defaultdict[int, dict[str, int]] = defaultdict(dict)  # thread ids by name, by process id
        self._num_spans = 0

    def of_record(self, record: Trajectory) -> Iterator[Event]:
        """Yield the events of a trajectory; no events if it has no times."""
        if (times := record.times) is None:
            return
        began_us, ended_us = times.began_at * 1e6, times.began_at * 1e6 + times.ended_us
        name = assignment_id_of(record.rollout_id, record.group_id, record.sample_index)
        place = self._place(self._workers.setdefault(times.worker, _FIRST_WORKER + len(self._workers)), name)
        about: Event = {"task": record.task_id, "reward": record.reward, "stop_reason": record.stop_reason}
        yield _slice("trajectory", place, began_us, ended_us, about)
        if record.timings.queue_s:
            yield _slice("queue", place, began_us - record.timings.queue_s * 1e6, began_us)
        if record.timings.reward_s:
            yield _slice("reward", place, ended_us - record.timings.reward_s * 1e6, ended_us)
        inner = []
        turns = [turn for path in record.paths for turn in path.own_turns]
        turns.sort(key=lambda turn: 0 if turn.times is None else turn.times.begun_us)  # the viewer's order of turns
        for number, turn in enumerate(turns, 1):
            if turn.times is not None:
                about = {"turn": turn.turn_id, "replica": turn.replica_id, "tokens": turn.end - turn.start}
                about["unavailable_us"] = turn.times.unavailable_us
                span = began_us + turn.times.begun_us, began_us + turn.times.ended_us
                inner.append((*span, f"turn {number}", about))
                yield from self._overlapping(name, self._place(_REPLICAS, turn.replica_id), *span, {})
        for call in times.tool_calls:
            begun_us = began_us + call.begun_us
            inner.append((begun_us, begun_us + call.duration_us, call.name, {"outcome": call.outcome}))
        free_at = 0.0
        for begun_us, end_us, label, about in sorted(inner, key=lambda item: item[:2]):
            if begun_us >= free_at:
                free_at = end_us
                yield _slice(label, place, begun_us, end_us, about)
            else:  # concurrent calls or turns of a session: the slices of a track must not overlap
                yield from self._overlapping(label, place, begun_us, end_us, about)
        for move in times.moves:
            at_us = round(began_us + move.at_us)
            yield {"ph": "i", "s": "t", "name": f"to {move.replica_id}", "ts": at_us, **place}

    def of_update(self, report: UpdateReport) -> Iterator[Event]:
        """Yield the steps of an update on each replica, and a flow from the first replica to the others."""
        began_us = report.began_at * 1e6
        for index, replica in enumerate(report.replicas):
            place, stall_us = self._place(_UPDATES, replica.replica_id), began_us + replica.paused_at_ms * 1e3
            canary_us = stall_us + replica.stall_ms * 1e3
            steps = {
                "stage": (began_us, began_us + replica.stage_ms * 1e3),
                "stall": (stall_us, canary_us),
                "canary": (canary_us, canary_us + replica.canary_ms * 1e3),
            }
            about = {"version": report.version, "transport": replica.transport, "error": replica.error}
            for step, span in steps.items():
                yield _slice(f"{step} {report.version}", place, *span, about)
            flow = {"name": "update", "cat": "update", "id": report.version, "ts": round(stall_us), **place}
            yield {"ph": "s", **flow} if index == 0 else {"ph": "f", "bp": "e", **flow}

    def names(self) -> Iterator[Event]:
        """Yield the names of the tracks."""
        processes = {"weight updates": _UPDATES, "replicas": _REPLICAS}
        processes |= {f"worker {worker}": process for worker, process in self._workers.items()}
        for name, process in processes.items():
            yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        for process, threads in self._threads.items():
            for name, thread in threads.items():
                yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}

    def _place(self, process: int, name: str) -> Event:
        threads = self._threads[process]
        return {"pid": process, "tid": threads.setdefault(name, len(threads) + 1)}

    def _overlapping(
        self, name: str, place: Event, begun_us: float, end_us: float, about: Event
    ) -> Iterator[Event]:
        self._num_spans += 1
        span = {"cat": "overlapping", "id": self._num_spans, "name": name, **place}
        yield {"ph": "b", "ts": round(begun_us), "args": about, **span}
        yield {"ph": "e", "ts": round(end_us), **span}


def _slice(name: str, place: Event, begun_us: float, end_us: float, about: Event | None = None) -> Event:
    # Round to integer microseconds: with fractions, adjacent slices of a track would overlap.
    at_us = round(begun_us)
    return {"ph": "X", "name": name, "ts": at_us, "dur": round(end_us) - at_us, **place, "args": about or {}}
