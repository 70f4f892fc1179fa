"""Live trajectories and sessions: the current activity of each, its duration and its process.

Workers report the activities of their trajectories once a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Doing(StrEnum):
    """The activity of a live trajectory."""

    LOAD = "load"  # loading its loop, opening its tools, or reading the journal of a lost worker
    PLACE = "place"  # waiting for capacity on a replica
    PREFILL = "prefill"  # waiting for the first token of a turn
    DECODE = "decode"
    TOOL = "tool"
    LOOP = "loop"  # running the loop's own code, or the agent's
    REWARD = "reward"
    HAND_IN = "hand_in"  # submitting its record to the coordinator


@dataclass(frozen=True, slots=True)
class Flight:
    """The state of a live trajectory, as reported by its worker."""

    doing: Doing
    for_s: float  # duration of the current activity
    age_s: float  # since the trajectory started
    what: str = ""  # the name of the running tool
    turn: int = 0
    num_tokens: int = 0  # sampled so far, including the current turn
    left_s: float | None = None  # until the trajectory's deadline

    @property
    def name(self) -> str:
        """The activity as text: "decode", "tool NAME"."""
        return f"{self.doing} {self.what}".rstrip()


@dataclass(frozen=True, slots=True)
class FlightRow:
    """A live trajectory, or a session that has a lease or waits for one; a session has no `worker`."""

    id: str
    flight: Flight
    worker: str
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The latest time that the event loop of a process was blocked for at least one second."""

    process: str  # as in metrics: "worker-ID", "ingress-0", ...
    place: str  # FILE:LINE of the blocking code; "": the host was short of CPU
    ago_s: float


@dataclass(frozen=True, slots=True)
class FlightPage:
    """The oldest live trajectories and sessions, and the number of trajectories by activity.

    A trajectory or session that the request names is appended.
    """

    oldest: tuple[FlightRow, ...]
    sessions: tuple[FlightRow, ...]  # the longest waits for KV cache, then the longest idle
    doing: tuple[tuple[str, int], ...]  # number of trajectories by `Flight.name`: "decode", "tool NAME", ...
    num_free: int  # free slots of workers
    silent: tuple[tuple[str, float], ...] = ()  # silent workers, and the seconds since their last report
    longest_tools: tuple[FlightRow, ...] = ()  # the longest-running tools and rewards
    blocked: tuple[Blocked, ...] = ()


def doing_of(flights: Iterable[Flight]) -> tuple[tuple[str, int], ...]:
    """Count flights by activity, the most frequent first."""
    return tuple(Counter(flight.name for flight in flights).most_common())
