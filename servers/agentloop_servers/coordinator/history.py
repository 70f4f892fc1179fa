"""The series of the last quarter of an hour, in bounded memory. A coordinator that begins has none."""

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
_MOST_GONE = 64  # series without a value, and as many as there are


@dataclass(frozen=True, slots=True)
class _Row:
    at: float
    places: Mapping[tuple[str, Labels], int]  # in `values`, and further ones that came later; rows share it
    values: array[float]  # NaN: the series was not there

    def value(self, key: tuple[str, Labels]) -> float | None:
        place = self.places.get(key, len(self.values))
        return None if place >= len(self.values) or math.isnan(self.values[place]) else self.values[place]


class History:
    """Rows of values, each a second or, where so many would not fit, more seconds apart."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque()
        self._num_values = 0
        self._places: dict[tuple[str, Labels], int] = {}

    @property
    def interval_s(self) -> float:
        """The time to the next row: whole seconds, so that rows as long as the last one fit for `HISTORY_S`."""
        length = len(self._rows[-1].values) if self._rows else 0
        return float(max(1, math.ceil(length * _VALUE_BYTES * HISTORY_S / MAX_BYTES)))

    def add(self, at: float, samples: Iterable[MetricSample]) -> None:
        """Keep the samples of `HISTORY_FAMILIES` as they are at `at`, in seconds since 1970."""
        kept = {(one.name, one.labels): one.value for one in samples if one.name in HISTORY_FAMILIES}
        if len(self._places) > 2 * len(kept) + _MOST_GONE:  # replicas of before
            self._places = {}
        for key in kept:
            self._places.setdefault(key, len(self._places))
        self._rows.append(_Row(at, self._places, array("d", [kept.get(key, math.nan) for key in self._places])))
        self._num_values += len(self._places)
        while self._num_values * _VALUE_BYTES > MAX_BYTES or self._rows[0].at <= at - HISTORY_S:
            self._num_values -= len(self._rows.popleft().values)

    def page(self, names: Collection[str], since: float) -> HistoryPage:
        """Return the rows after `since`, in seconds since 1970, of the families in `names`; empty: of all."""
        rows = [row for row in self._rows if row.at > since]
        maps = {id(row.places): row.places for row in rows}.values()
        keys = dict.fromkeys(key for places in maps for key in places if not names or key[0] in names)
        series = ((key, tuple(row.value(key) for row in rows)) for key in keys)
        there = (HistorySeries(*key, values) for key, values in series if any(one is not None for one in values))
        return HistoryPage(self.interval_s, tuple(row.at for row in rows), tuple(there))
