"""The interface between a routing policy and the simulated fleet. Every arm is a `Policy`.

Time is virtual, in seconds. A policy receives exactly the information that a balancer of the service can have: a
turn's prompt, its sampled tokens once it has ended, and each engine's load once a second. Oracles receive the whole
workload at construction.

The life of a turn: `place` until it returns a replica; `began` (the request is sent, and may wait at the replica);
`ended`. A turn whose replica is lost is placed again (`is_retry`), with the sampled tokens added to its prompt.
`ended` is not called for the lost attempt, so `replica_lost` must discard it.
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
        """Return the duration of a step without prefill in seconds."""
        return self.step_s + self.step_sequence_s * num_decoding + self.step_token_s * num_context_tokens

    def step_with_prefill(
        self, chunks: Iterable[tuple[int, int]], num_decoding: int = 0, num_context_tokens: int = 0
    ) -> float:
        """Return the seconds of a step that also computes chunks of prompts, given by their first and last
        token.
        """
        seconds = max(self.prefill_s, self.step_s if num_decoding else 0.0)
        seconds += self.step_sequence_s * num_decoding + self.step_token_s * num_context_tokens
        for start, end in chunks:
            seconds += self.prefill_token_s * (end - start) + self.prefill_pair_s * (end * end - start * start)
        return max(self.prefill_floor_s, seconds)


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The replicas, all identical. Added replicas get the next numbers; numbers are never reused."""

    num_replicas: int
    capacity_blocks: int  # KV blocks per replica
    block_size: int  # tokens
    step_times: StepTimes
    max_batched_tokens: int = 8192  # prefilled and decoded in one step
    max_running: int = 256
    max_live: int = 256  # trajectory slots of the workers

    @property
    def capacity_tokens(self) -> int:
        return self.capacity_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class TurnAsk:
    """A turn that needs a replica; the first turn of a trajectory also requests admission."""

    trajectory: int
    group: int
    turn: int  # from 0
    num_prompt_tokens: int
    last_replica: int | None  # replica of the previous turn; it may be lost by now
    is_retry: bool = False  # its replica was lost; the prompt includes the tokens sampled there


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The result of a turn."""

    replica: int
    num_cached_tokens: int  # cached prompt tokens at its first admission on the engine
    num_sampled_tokens: int
    num_context_tokens: int  # prompt and sampled


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load at one moment, as reported by its heartbeat."""

    num_running: int
    num_waiting: int
    num_held_blocks: int  # held by running requests


class Policy(Protocol):
    """A balancer. One object decides for the whole fleet; it is never called from two threads."""

    def place(self, turn: TurnAsk, now: float) -> int | None:
        """Return the replica of a turn, or None to let it wait.

        A waiting turn is placed again after every change (a turn or trajectory ended, an update, a replica lost or
        added) and every second: later turns first, then first turns while workers have free slots, each in the
        order of `rank`. A round stops after 4 refusals (64 after `look`), unless all engines are idle.
        """

    def rank(self, turn: TurnAsk, now: float) -> float:
        """Return the priority of a turn that starts to wait: smallest first, ties by arrival."""

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        """A turn was sent to the replica that `place` chose."""

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        """A turn has ended; its tool runs now, or `finished` follows."""

    def finished(self, trajectory: int, now: float) -> None:
        """A trajectory has ended or was aborted."""

    def updated(self, is_flushed: bool, now: float) -> None:
        """All replicas have new weights.

        Flushed: all KV is dropped, and requests in flight are prefilled again. Kept: trajectories that started
        before the update keep their KV, and new ones share nothing with them.
        """

    def replica_lost(self, replica: int, now: float) -> None:
        """A replica is lost. Its turns in flight are placed again after this call."""

    def replica_added(self, replica: int, now: float) -> None:
        """A replica with an empty cache joined; its number is the next one."""

    def look(self, loads: Sequence[EngineLoad | None], now: float) -> None:
        """Receive the loads of all engines, once a second; `loads` by replica number, None for a lost one."""


class QuietPolicy:
    """A base for policies: everything except `place` is optional, and turns wait in order of arrival."""

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
"""Makes an arm's policy for a fleet, a workload (lengths and times are only for oracles) and a seed."""
