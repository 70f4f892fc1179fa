"""Stop strings in a text that comes in pieces.

The first stop string that is complete ends the text; of several complete at the same character the longest, which
began first. What is found does not depend on how the text is cut, and time is linear in the text (Knuth, Morris and
Pratt), however the strings repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentloop.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string's characters `[start, end)` in the whole text."""

    text: str
    start: int
    end: int


class StopFinder:
    """Reads a text from left to right, until the first match."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty stop string: it would end every text at once."""
        if not all(stops):
            raise InvalidRequest("a stop string is empty", param="stop")
        self._progress = [_Progress(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._num_read = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of what was read that may begin a stop string."""
        return max((progress.num_matched for progress in self._progress), default=0)

    def add(self, text: str) -> StopMatch | None:
        """The first match that `text` completes; nothing may be added after one."""
        ends = [(end, place) for place, one in enumerate(self._progress) if (end := one.read(text)) is not None]
        if not ends:
            self._num_read += len(text)
            return None
        end, place = min(ends)
        stop = self._progress[place].stop
        return StopMatch(stop, self._num_read + end - len(stop), self._num_read + end)


class _Progress:
    """The length of one stop string that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = _borders(stop)

    def read(self, text: str) -> int | None:
        """Return where in `text` the string is first complete; None if it is not."""
        stop, shorter, matched = self.stop, self._shorter, self.num_matched
        place = 0
        while place < len(text):
            if not matched and (place := text.find(stop[0], place)) < 0:
                break
            char = text[place]
            while matched and char != stop[matched]:
                matched = shorter[matched - 1]
            matched += char == stop[matched]
            place += 1
            if matched == len(stop):
                return place
        self.num_matched = matched
        return None


def _borders(stop: str) -> list[int]:
    """For every prefix, how long the longest of its own beginnings is that it ends with."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders
