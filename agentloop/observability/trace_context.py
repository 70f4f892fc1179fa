"""The ids of a run's traces, and the W3C trace contexts that engines get before a trace is made.

Ids follow from the names of the run and of what is traced. So an engine's spans are in the trace made later,
and what is sent again is the same trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash


class TraceIds:
    """The ids of one trace. With a caller's `traceparent` the trace is the caller's."""

    def __init__(self, name: str, traceparent: str = "") -> None:
        """`name` is unique among all traces of all runs."""
        _, trace_id, caller_id, flags = traceparent.split("-") if traceparent else ("", "", "", "0")
        self.traceparent = traceparent
        self._name = name
        self._is_recorded = bool(int(flags, 16) & 1)
        self.trace_id = bytes.fromhex(trace_id) or xxhash.xxh3_128_digest(name.encode())
        self.caller_id = bytes.fromhex(caller_id)
        self.root_id = self.span_id("")

    def span_id(self, key: str) -> bytes:
        """Return the id of the span whose key within the trace is `key`; the root's is empty."""
        return xxhash.xxh3_64_digest(f"{self._name} {key}".encode())

    def is_sampled(self, share: float) -> bool:
        """Tell if it is of this `share` of all, by its trace id, or its caller's trace is recorded."""
        return self._is_recorded or int.from_bytes(self.trace_id[:8]) < share * 2**64


def turn_key(turn_id: str) -> str:
    """Return the key of a turn's span."""
    return f"turn {turn_id}"


@dataclass(frozen=True, slots=True)
class EngineTraces:
    """The traces of a run in which engines record their spans: a share of all, `sample`."""

    run: str
    sample: float


def turn_context(traces: EngineTraces | None, trajectory_id: str, caller: str, turn_id: str) -> str:
    """Return the trace context of a turn for its engine; empty if engines have no traces.

    `trajectory_id` has the attempt, and `caller` is the trace context of the trajectory's caller.
    """
    if traces is None:
        return ""
    ids = TraceIds(f"{traces.run}/{trajectory_id}", caller)
    return f"00-{ids.trace_id.hex()}-{ids.span_id(turn_key(turn_id)).hex()}-{ids.is_sampled(traces.sample):02}"
