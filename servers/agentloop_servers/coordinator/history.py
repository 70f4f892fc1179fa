"""The series of the last quarter of an hour, in bounded memory. A coordinator that begins has none."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from agentloop.api.history import HISTORY_FAMILIES, HISTORY_S, HistoryPage, HistorySeries
from agentloop.metrics import Labels, MetricSample

MAX_BYTES = 4 << 20
_VALUE_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Row:
    at: float
    places: Mapping[tuple[str, Labels], int]  # in `values`; rows of the same series share it
    values: array[float]


class History:
    """Rows of values, each a second or, where so many would not fit, more seconds apart."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque()
        self._num_values = 0

    @property
    def interval_s(self) -> float:
        """The time to the next row: whole seconds, so that rows as long as the last one fit for `HISTORY_S`."""
        length = len(self._rows[-1].values) if self._rows else 0
        return float(max(1, math.ceil(length * _VALUE_BYTES * HISTORY_S / MAX_BYTES)))

    def add(self, at: float, samples: Iterable[MetricSample]) -> None:
        """Keep the samples of `HISTORY_FAMILIES` as they are at `at`, in seconds since 1970."""
        kept = {(one.name, one.labels): one.value for one in samples if one.name in HISTORY_FAMILIES}
        places: Mapping[tuple[str, Labels], int] = {key: place for place, key in enumerate(kept)}
        if self._rows and self._rows[-1].places == places:
            places = self._rows[-1].places
        self._rows.append(_Row(at, places, array("d", [kept[key] for key in places])))
        self._num_values += len(kept)
        while self._num_values * _VALUE_BYTES > MAX_BYTES or self._rows[0].at <= at - HISTORY_S:
            self._num_values -= len(self._rows.popleft().values)

    def page(self, names: Collection[str], since: float) -> HistoryPage:
        """Return the rows after `since`, in seconds since 1970, of the families in `names`; empty: of all."""
        rows = [row for row in self._rows if row.at > since]
        keys = dict.fromkeys(key for row in rows for key in row.places if not names or key[0] in names)
        series = (
            HistorySeries(
                *key, tuple(None if (at := row.places.get(key)) is None else row.values[at] for row in rows)
            )
            for key in keys
        )
        return HistoryPage(self.interval_s, tuple(row.at for row in rows), tuple(series))
