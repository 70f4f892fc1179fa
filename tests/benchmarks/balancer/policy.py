"""What a routing policy sees of the simulated fleet, and what it decides. Every arm is a `Policy`.

Time is virtual, in seconds. A policy is told everything that a balancer of the service can know and nothing else:
of a turn its prompt and, when it has ended, what was sampled; of an engine its load once a second and, if the
policy asks for them, its KV events at once. Oracles get the whole workload when they are made.

The life of a turn: `place` until it answers a replica; `began` (the request is sent: it may still wait there);
`prefilled` (its first token is out); `ended`. A turn whose replica is lost is asked anew (`is_retry`), its prompt
grown by what was sampled before; no `ended` comes for the lost attempt, so `replica_lost` must forget it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tests.benchmarks.balancer.step_curves import StepTimes

if TYPE_CHECKING:
    from tests.benchmarks.balancer.workload import Workload


def step_s(times: StepTimes, num_decoding: float, num_context_tokens: float) -> float:
    """Seconds for one token of each of `num_decoding` requests: alpha + beta B + gamma C."""
    return times.step_s + times.step_sequence_s * num_decoding + times.step_token_s * num_context_tokens


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The replicas, all alike. Those that are added get the next numbers; numbers are never used twice."""

    num_replicas: int
    capacity_blocks: int  # of KV, a replica
    block_size: int  # tokens
    step_times: StepTimes
    max_batched_tokens: int = 8192  # prefilled and decoded in one step
    max_running: int = 256
    max_live: int = 256  # trajectories that the workers have places for

    @property
    def capacity_tokens(self) -> int:
        return self.capacity_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class TurnAsk:
    """A turn that needs a replica; the first one of a trajectory asks for its admission too.

    `hashes` names the full blocks of the prompt, equal for equal prefixes under equal KV versions: the first
    `num_prompt_tokens // block_size` entries. It is the trajectory's own array: later turns extend it in place (a
    flush replaces it), nobody else may change it.
    """

    trajectory: int
    group: int
    sample: int  # within its group
    turn: int  # from 0
    num_prompt_tokens: int
    hashes: array[int]
    last_replica: int | None  # where the turn before ran; it may be lost by now
    is_retry: bool = False  # its replica was lost; the prompt holds what was sampled before


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What became of a turn. `TurnAsk.hashes` has the sampled tokens' full blocks by now."""

    replica: int
    num_cached_tokens: int  # of the prompt, at its first admission on the engine
    num_sampled_tokens: int
    num_context_tokens: int  # prompt and sampled
    tool: str  # what runs now; empty after the last turn


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load at one moment, as its heartbeat tells it."""

    num_running: int
    num_waiting: int
    num_held_blocks: int  # of requests that run
    num_preemptions: int  # since it started
    num_unprefilled_tokens: int  # of requests that wait or are being prefilled


@dataclass(frozen=True, slots=True)
class KVChange:
    """Blocks that an engine stored, in order after `parent` (None: the first of a chain), and that it evicted."""

    stored: array[int] = field(default_factory=lambda: array("Q"))
    parent: int | None = None
    removed: array[int] = field(default_factory=lambda: array("Q"))
    is_cleared: bool = False  # all that no request holds is gone


class Policy(Protocol):
    """A balancer. One object decides for the whole fleet; it is never called from two threads."""

    hears_kv: bool  # has `kv_changed` called

    def place(self, turn: TurnAsk, now: float) -> int | None:
        """Return the replica of a turn, or None: it waits.

        A turn that waits is asked again whenever something changed (a turn was prefilled or ended, a trajectory
        finished, an update, a replica lost or added) and every second: later turns first, then first turns as long
        as workers have places, each in the order of `rank`. A round stops after 4 refusals, after `look` 64,
        unless no engine has anything to do.
        """

    def rank(self, turn: TurnAsk, now: float) -> float:
        """Return where a turn that waits stands: smallest first, equals by arrival. Asked when it begins to wait,
        and of every turn that waits just after `look`."""

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        """Hear that a turn was sent to the replica that `place` chose."""

    def prefilled(self, turn: TurnAsk, replica: int, now: float) -> None:
        """Hear that a turn's first token is out: its prompt is cached where it runs."""

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        """Hear that a turn has ended; its tool runs now, or `finished` follows."""

    def finished(self, trajectory: int, now: float) -> None:
        """Hear that a trajectory has ended or was aborted."""

    def updated(self, is_flushed: bool, now: float) -> None:
        """Hear of new weights on all replicas. Flushed: all KV is gone, and requests in flight are prefilled again.
        Kept: trajectories that began before go on with their KV, and new ones share nothing with them."""

    def replica_lost(self, replica: int, now: float) -> None:
        """Hear that a replica is gone. Turns in flight there are asked anew after this."""

    def replica_added(self, replica: int, now: float) -> None:
        """Hear of a replica with an empty cache; its number is the next one."""

    def kv_changed(self, replica: int, change: KVChange, now: float) -> None:
        """Hear an engine's KV event, if the policy `hears_kv`."""

    def look(self, loads: Sequence[EngineLoad | None], now: float) -> None:
        """Look at all engines, once a second; `loads` by replica number, None for a lost one."""


class QuietPolicy:
    """A base for policies: everything but `place` may be left out, and turns wait in order of arrival."""

    hears_kv = False

    def rank(self, turn: TurnAsk, now: float) -> float:
        return 0.0

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        return

    def prefilled(self, turn: TurnAsk, replica: int, now: float) -> None:
        return

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        return

    def finished(self, trajectory: int, now: float) -> None:
        return

    def updated(self, is_flushed: bool, now: float) -> None:
        return

    def replica_lost(self, replica: int, now: float) -> None:
        return

    def replica_added(self, replica: int, now: float) -> None:
        return

    def kv_changed(self, replica: int, change: KVChange, now: float) -> None:
        return

    def look(self, loads: Sequence[EngineLoad | None], now: float) -> None:
        return


@dataclass(frozen=True, slots=True)
class Arm:
    """One competitor: how its policy is made for a fleet, a workload (for oracles alone to read) and a seed."""

    name: str
    make: Callable[[FleetShape, Workload, int], Policy]
    parameters: dict[str, float | str] = field(default_factory=dict)  # printed with the results
    is_oracle: bool = False  # knows what no balancer can know: shown, and no goal is measured against it
    has_infinite_kv: bool = False  # its engines never evict
