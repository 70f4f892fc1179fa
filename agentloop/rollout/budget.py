"""Limits of one trajectory: tokens, turns, tool calls and staleness. The first limit reached gives the StopReason.

`Budget` counts turns, tokens and tool calls. `StalenessGuard` applies the run's staleness limit while a trajectory
runs. The limit at admission (`scheduling/staleness_budget.py`) is not sufficient, because a weight update can
commit at any token of a long trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentloop.generation.leased_engine import NewestVersion
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import FinishReason, Limits, OnExcess, OnStale, StalenessLimit, StopReason, WeightVersionSpan


class LimitReached(Exception):
    """Ends a running loop at a limit. The worker records `reason` as the trajectory's stop reason."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(slots=True)
class Budget:
    """The limits of one trajectory and its usage so far."""

    limits: Limits
    max_context_tokens: int  # the smaller of the engine's and the task's limits
    num_turns: int = 0
    num_sampled_tokens: int = 0
    num_tool_calls: int = 0

    def tokens_for_turn(self, num_prompt_tokens: int, wanted: int | None = None) -> int:
        """Return the number of tokens that the next turn may sample, at most `wanted`.

        Raises LimitReached if a limit leaves no token or no turn.
        """
        if self.num_turns >= self.limits.max_turns:
            raise LimitReached(StopReason.MAX_TURNS)
        if num_prompt_tokens >= self.max_context_tokens:
            raise LimitReached(StopReason.MAX_CONTEXT if self.num_turns else StopReason.PROMPT_TOO_LONG)
        if self.num_sampled_tokens >= self.limits.max_sampled_tokens:
            raise LimitReached(StopReason.MAX_SAMPLED_TOKENS)
        room = self._room(num_prompt_tokens)
        return min(wanted, *room.values()) if wanted is not None else min(room.values())

    def _room(self, num_prompt_tokens: int) -> dict[StopReason, int]:
        # The most specific reason first: of equal limits, `min` in `turn_ended` selects the first.
        return {
            StopReason.MAX_TOKENS_PER_TURN: self.limits.max_tokens_per_turn,
            StopReason.MAX_SAMPLED_TOKENS: self.limits.max_sampled_tokens - self.num_sampled_tokens,
            StopReason.MAX_CONTEXT: self.max_context_tokens - num_prompt_tokens,
        }

    def turn_ended(
        self, num_prompt_tokens: int, num_sampled: int, finish_reason: FinishReason, wanted: int | None = None
    ) -> None:
        """Count a turn. `wanted` is the `max_tokens` of the loop, if it set one.

        Raises LimitReached if a limit or the deadline of the task cut the turn, because its text is incomplete. A
        turn that only `wanted` cut does not raise: the loop may continue it.
        """
        room = self._room(num_prompt_tokens)
        self.num_turns += 1
        self.num_sampled_tokens += num_sampled
        if finish_reason is FinishReason.DEADLINE:
            raise LimitReached(StopReason.DEADLINE)
        if finish_reason is FinishReason.LENGTH:
            tightest = min(room, key=lambda reason: room[reason])
            if num_sampled >= room[tightest]:
                raise LimitReached(tightest)
            if wanted is None or num_sampled < wanted:
                raise LimitReached(StopReason.MAX_TOKENS_PER_TURN)  # the engine applied a lower limit

    def calls_to_run(self, num_calls: int) -> int:
        """Return the number of a turn's `num_calls` tool calls that may run, and count them.

        Raises LimitReached after the last allowed turn, at `max_tool_calls`, and, with `on_excess_tool_calls:
        stop`, at `max_tool_calls_per_turn`.
        """
        # After the last allowed turn no turn could read the results.
        if self.num_turns >= self.limits.max_turns:
            raise LimitReached(StopReason.MAX_TURNS)
        if num_calls > self.limits.max_tool_calls_per_turn and (self.limits.on_excess_tool_calls is OnExcess.STOP):
            raise LimitReached(StopReason.MAX_TOOL_CALLS_PER_TURN)
        if self.num_tool_calls + min(num_calls, self.limits.max_tool_calls_per_turn) > self.limits.max_tool_calls:
            raise LimitReached(StopReason.MAX_TOOL_CALLS)
        allowed = min(num_calls, self.limits.max_tool_calls_per_turn)
        self.num_tool_calls += allowed
        return allowed


class StalenessGuard:
    """Applies the run's staleness limit to one trajectory: before each turn, before its tool calls and at the end.

    A turn is never interrupted for staleness. The worker detects a commit only from the weight versions in other
    responses, and `max_tokens_per_turn` bounds the wasted tokens. A turn that the engine aborted is not continued
    if the trajectory is too stale.
    """

    def __init__(self, limit: StalenessLimit, newest: NewestVersion) -> None:
        self._limit = limit
        self._newest = newest

    @property
    def newest_version(self) -> int | None:
        """The newest weight version that this worker has received tokens of; None before the first."""
        return self._newest.value

    def learn(self, version: int) -> None:
        """Record the newest version that an earlier worker of this trajectory received tokens of."""
        self._newest.value = version if self._newest.value is None else max(version, self._newest.value)

    def must_end(self, path: GrowingPath, sampled: Sequence[WeightVersionSpan] = ()) -> bool:
        """Return True if the trajectory exceeds the staleness limit and `on_stale` requires that it ends.

        `sampled` are the version spans of a turn that is not in the path yet.
        """
        return self._limit.on_stale is not OnStale.MASK and self._over(path, sampled) is not None

    def check(self, path: GrowingPath) -> None:
        """Raise LimitReached (STALE) if the trajectory must end."""
        if self.must_end(path):
            raise LimitReached(StopReason.STALE)

    def settle(self, path: GrowingPath) -> OnStale | None:
        """Apply `on_stale` to a path whose loop has ended. Returns the policy, or None within the limit.

        MASK removes tokens from the loss mask that are too old relative to the newest version. FINISH removes those
        that were sampled after the update that exceeded the limit. DROP does not change the path; the caller
        discards it.
        """
        exceeded = self._over(path)
        if exceeded is None:
            return None
        oldest, newest = exceeded
        match self._limit.on_stale:
            case OnStale.MASK:
                path.mask_older_than(newest - self._limit.max_staleness)
            case OnStale.FINISH:
                path.mask_newer_than(oldest + self._limit.max_staleness)
            case OnStale.DROP:
                pass
        return self._limit.on_stale

    def _over(self, path: GrowingPath, sampled: Sequence[WeightVersionSpan] = ()) -> tuple[int, int] | None:
        """Return the oldest and the newest version if their distance exceeds the limit."""
        versions = path.versions | {span.version for span in sampled}
        if not versions:
            return None
        # After a rollback of the weights the fleet's newest version is older than the path's newest.
        of_fleet = set() if self._newest.value is None else {self._newest.value}
        oldest, newest = min(versions), max(versions | of_fleet)
        return (oldest, newest) if newest - oldest > self._limit.max_staleness else None
