"""The metric history of the last 15 minutes, in bounded memory. It is empty after a coordinator restart."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from agentloop.api.history import HISTORY_FAMILIES, HISTORY_S, HistoryPage, HistorySeries
from agentloop.observability.metrics import Labels, MetricSample

MAX_BYTES = 4 << 20
_VALUE_BYTES = 8
_MOST_GONE = 64  # vanished series that may be kept, in addition to as many as the present ones


@dataclass(frozen=True, slots=True)
class _Row:
    at: float
    # Series -> index in `values`; rows share this dict, which may have later series too
    places: Mapping[tuple[str, Labels], int]
    values: array[float]  # NaN: the series had no value

    def value(self, key: tuple[str, Labels]) -> float | None:
        place = self.places.get(key, len(self.values))
        return None if place >= len(self.values) or math.isnan(self.values[place]) else self.values[place]


class History:
    """Rows of values, one per second, or at a longer interval if the memory bound requires it."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque()
        self._num_values = 0
        self._places: dict[tuple[str, Labels], int] = {}

    @property
    def interval_s(self) -> float:
        """Seconds until the next row: whole seconds, so that rows of the last one's length fit for `HISTORY_S`."""
        length = len(self._rows[-1].values) if self._rows else 0
        return float(max(1, math.ceil(length * _VALUE_BYTES * HISTORY_S / MAX_BYTES)))

    def add(self, at: float, samples: Iterable[MetricSample]) -> None:
        """Store the samples of `HISTORY_FAMILIES` with the time `at`, in seconds since 1970."""
        kept = {(one.name, one.labels): one.value for one in samples if one.name in HISTORY_FAMILIES}
        # Most indexes belong to series that are gone: start new ones
        if len(self._places) > 2 * len(kept) + _MOST_GONE:
            self._places = {}
        for key in kept:
            self._places.setdefault(key, len(self._places))
        self._rows.append(_Row(at, self._places, array("d", [kept.get(key, math.nan) for key in self._places])))
        self._num_values += len(self._places)
        while self._num_values * _VALUE_BYTES > MAX_BYTES or self._rows[0].at <= at - HISTORY_S:
            self._num_values -= len(self._rows.popleft().values)

    def page(self, names: Collection[str], since: float) -> HistoryPage:
        """Return the rows after `since` (seconds since 1970) of the families in `names`, or of all if it is
        empty."""
        rows = [row for row in self._rows if row.at > since]
        maps = {id(row.places): row.places for row in rows}.values()
        keys = dict.fromkeys(key for places in maps for key in places if not names or key[0] in names)
        series = ((key, tuple(row.value(key) for row in rows)) for key in keys)
        there = (HistorySeries(*key, values) for key, values in series if any(one is not None for one in values))
        return HistoryPage(self.interval_s, tuple(row.at for row in rows), tuple(there))
