"""The ids of a run's traces, and the W3C trace contexts that engines receive before a trace is created.

Ids are derived from the names of the run and of the traced item. An engine's spans therefore belong to the trace
that is created later, and sending a trace again results in the same trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash


class TraceIds:
    """The ids of one trace. With a caller's `traceparent`, the spans belong to the caller's trace."""

    def __init__(self, name: str, traceparent: str = "") -> None:
        """`name` must be unique among all traces of all runs."""
        _, trace_id, caller_id, flags = traceparent.split("-") if traceparent else ("", "", "", "0")
        self.traceparent = traceparent
        self._name = name
        self._is_recorded = bool(int(flags, 16) & 1)
        self.trace_id = bytes.fromhex(trace_id) or xxhash.xxh3_128_digest(name.encode())
        self.caller_id = bytes.fromhex(caller_id)
        self.root_id = self.span_id("")

    def span_id(self, key: str) -> bytes:
        """Return the id of the span with the key `key` in this trace; the key of the root span is ""."""
        return xxhash.xxh3_64_digest(f"{self._name} {key}".encode())

    def is_sampled(self, share: float) -> bool:
        """Return True if the trace is in the sampled fraction `share`, by its id, or if its caller's trace is
        sampled."""
        return self._is_recorded or int.from_bytes(self.trace_id[:8]) < share * 2**64


def turn_key(turn_id: str) -> str:
    """Return the span key of a turn."""
    return f"turn {turn_id}"


@dataclass(frozen=True, slots=True)
class EngineTraces:
    """Settings of the engines' own spans in a run: the fraction `sample` of traces has them."""

    run: str
    sample: float


def turn_context(traces: EngineTraces | None, trajectory_id: str, caller: str, turn_id: str) -> str:
    """Return the W3C trace context (`traceparent`) of a turn for its engine; "" if engines send no spans.

    `trajectory_id` must include the attempt. `caller` is the trace context of the trajectory's caller.
    """
    if traces is None:
        return ""
    ids = TraceIds(f"{traces.run}/{trajectory_id}", caller)
    return f"00-{ids.trace_id.hex()}-{ids.span_id(turn_key(turn_id)).hex()}-{ids.is_sampled(traces.sample):02}"
