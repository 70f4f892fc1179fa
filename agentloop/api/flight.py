"""Live trajectories and sessions: what each is doing, since when, and where. A worker tells it once a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Doing(StrEnum):
    """The work that a trajectory waits for."""

    LOAD = "load"  # its loop, its tools, or what a lost worker left
    PLACE = "place"  # a place on a replica
    PREFILL = "prefill"  # its turn's first token
    DECODE = "decode"
    TOOL = "tool"
    LOOP = "loop"  # its loop's own code, or that of its agent
    REWARD = "reward"
    HAND_IN = "hand_in"  # the coordinator, for its record


@dataclass(frozen=True, slots=True)
class Flight:
    """A live trajectory at one moment, as its worker tells it."""

    doing: Doing
    for_s: float  # since when
    age_s: float  # since it began
    what: str = ""  # the tool that it waits for
    turn: int = 0
    num_tokens: int = 0  # sampled so far, of the turn under way too
    left_s: float | None = None  # until its deadline

    @property
    def name(self) -> str:
        """The work that it waits for, in words: "decode", "tool NAME"."""
        return f"{self.doing} {self.what}".rstrip()


@dataclass(frozen=True, slots=True)
class FlightRow:
    """A live trajectory, or a session that has a lease or waits for one (`worker` is then empty)."""

    id: str
    flight: Flight
    worker: str
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The latest code that blocked the event loop of a process for a second or more."""

    process: str  # as in metrics: "worker-ID", "ingress-0", ...
    place: str  # FILE:LINE; "": no code, the host was short of CPU
    ago_s: float


@dataclass(frozen=True, slots=True)
class FlightPage:
    """The live trajectories and sessions: the oldest, and how many there are of each kind. One that was asked for
    by name comes after them."""

    oldest: tuple[FlightRow, ...]
    sessions: tuple[FlightRow, ...]  # the longest waits for KV, then the longest idle
    doing: tuple[tuple[str, int], ...]  # of all trajectories: "decode", "tool NAME", ...
    num_free: int  # places of workers
    silent: tuple[tuple[str, float], ...] = ()  # workers, and the seconds since they were heard
    longest_tools: tuple[FlightRow, ...] = ()  # of all, those that a tool or a reward runs for longest
    blocked: tuple[Blocked, ...] = ()


def doing_of(flights: Iterable[Flight]) -> tuple[tuple[str, int], ...]:
    """Count flights by what they do, the most first."""
    return tuple(Counter(flight.name for flight in flights).most_common())
