"""What a routing policy sees of the simulated fleet, and what it decides. Every arm is a `Policy`.

Time is virtual, in seconds. A policy is told everything that a balancer of the service can know and nothing else:
of a turn its prompt and, when it has ended, what was sampled; of an engine its load once a second. Oracles get the
whole workload when they are made.

The life of a turn: `place` until it answers a replica; `began` (the request is sent: it may still wait there);
`ended`. A turn whose replica is lost is asked anew (`is_retry`), its prompt grown by what was sampled before; no
`ended` comes for the lost attempt, so `replica_lost` must forget it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from tests.benchmarks.balancer.workload import Workload


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of an engine's steps, of B sequences that decode with C tokens of context, and chunks of prompts.

    decode                      alpha + beta B + gamma C
    with chunks from s to e     max(floor, max(a, alpha) + beta B + gamma C + sum of b (e - s) + c (e^2 - s^2))
    """

    prefill_floor_s: float
    prefill_s: float  # a
    prefill_token_s: float  # b
    prefill_pair_s: float  # c
    step_s: float  # alpha
    step_sequence_s: float  # beta
    step_token_s: float  # gamma

    def step(self, num_decoding: float, num_context_tokens: float) -> float:
        """Return the seconds of a step without prefill."""
        return self.step_s + self.step_sequence_s * num_decoding + self.step_token_s * num_context_tokens

    def step_with_prefill(
        self, chunks: Iterable[tuple[int, int]], num_decoding: int = 0, num_context_tokens: int = 0
    ) -> float:
        """Return the seconds of a step that computes chunks of prompts, from and to a token each, too."""
        seconds = max(self.prefill_s, self.step_s if num_decoding else 0.0)
        seconds += self.step_sequence_s * num_decoding + self.step_token_s * num_context_tokens
        for start, end in chunks:
            seconds += self.prefill_token_s * (end - start) + self.prefill_pair_s * (end * end - start * start)
        return max(self.prefill_floor_s, seconds)


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
    """A turn that needs a replica; the first one of a trajectory asks for its admission too."""

    trajectory: int
    group: int
    turn: int  # from 0
    num_prompt_tokens: int
    last_replica: int | None  # where the turn before ran; it may be lost by now
    is_retry: bool = False  # its replica was lost; the prompt holds what was sampled before


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What became of a turn."""

    replica: int
    num_cached_tokens: int  # of the prompt, at its first admission on the engine
    num_sampled_tokens: int
    num_context_tokens: int  # prompt and sampled


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load at one moment, as its heartbeat tells it."""

    num_running: int
    num_waiting: int
    num_held_blocks: int  # of requests that run


class Policy(Protocol):
    """A balancer. One object decides for the whole fleet; it is never called from two threads."""

    def place(self, turn: TurnAsk, now: float) -> int | None:
        """Return the replica of a turn, or None: it waits.

        A turn that waits is asked again whenever something changed (a turn or trajectory ended, an update, a
        replica lost or added) and every second: later turns first, then first turns as long as workers have places,
        each in the order of `rank`. A round stops after 4 refusals, after `look` 64, unless all engines are idle.
        """

    def rank(self, turn: TurnAsk, now: float) -> float:
        """Return the place of a turn that begins to wait: smallest first, equals by arrival."""

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        """A turn was sent to the replica that `place` chose."""

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        """A turn has ended; its tool runs now, or `finished` follows."""

    def finished(self, trajectory: int, now: float) -> None:
        """A trajectory has ended or was aborted."""

    def updated(self, is_flushed: bool, now: float) -> None:
        """All replicas have new weights. Flushed: all KV is gone, and requests in flight are prefilled again.
        Kept: trajectories that began before go on with their KV, and new ones share nothing with them."""

    def replica_lost(self, replica: int, now: float) -> None:
        """A replica is gone. Turns in flight there are asked anew after this."""

    def replica_added(self, replica: int, now: float) -> None:
        """A replica with an empty cache joined; its number is the next one."""

    def look(self, loads: Sequence[EngineLoad | None], now: float) -> None:
        """Look at all engines, once a second; `loads` by replica number, None for a lost one."""


class QuietPolicy:
    """A base for policies: everything but `place` may be left out, and turns wait in order of arrival."""

    def rank(self, turn: TurnAsk, now: float) -> float:
        return 0.0

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
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

    def look(self, loads: Sequence[EngineLoad | None], now: float) -> None:
        return


ArmMaker: TypeAlias = Callable[[FleetShape, "Workload", int], Policy]
"""Makes the policy of one competitor for a fleet, a workload (lengths and times are for oracles) and a seed."""
