"""Limits of one trajectory, and the StopReason of the first that is reached.

- A turn that was cut by the task's token limit or its time ends the trajectory: its text is incomplete.
- A turn that was cut by the loop's own `max_tokens` is returned to the loop, which may continue.
- The tool calls of the last allowed turn are not run: no turn could read their results.
- Calls beyond a turn's limit get an error message, or stop the trajectory (`on_excess_tool_calls`).
- A tool response beyond its limit is cut with a visible mark, or stops it (`on_long_tool_response`).

`StalenessGuard` applies the run's limit on versions to a running trajectory: an update may come at any token, so
the rule at admission (`scheduling/staleness_budget.py`) is not enough for a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentloop.generation.leased_engine import NewestVersion
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import FinishReason, Limits, OnExcess, OnStale, StalenessLimit, StopReason, WeightVersionSpan


class LimitReached(Exception):
    """The end of a running loop by a limit; its worker makes it the trajectory's stop reason."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(slots=True)
class Budget:
    """The limits of one trajectory, and what it has used of them."""

    limits: Limits
    max_context_tokens: int  # the smaller of the engine's and the task's
    num_turns: int = 0
    num_sampled_tokens: int = 0
    num_tool_calls: int = 0

    def tokens_for_turn(self, num_prompt_tokens: int, wanted: int | None = None) -> int:
        """Return the number of tokens the next turn may sample. Raises LimitReached if it may sample none."""
        if self.num_turns >= self.limits.max_turns:
            raise LimitReached(StopReason.MAX_TURNS)
        if num_prompt_tokens >= self.max_context_tokens:
            raise LimitReached(StopReason.MAX_CONTEXT if self.num_turns else StopReason.PROMPT_TOO_LONG)
        if self.num_sampled_tokens >= self.limits.max_sampled_tokens:
            raise LimitReached(StopReason.MAX_SAMPLED_TOKENS)
        room = self._room(num_prompt_tokens)
        return min(wanted, *room.values()) if wanted is not None else min(room.values())

    def _room(self, num_prompt_tokens: int) -> dict[StopReason, int]:
        """Tokens left under each limit on sampling, the most specific reason first."""
        return {
            StopReason.MAX_TOKENS_PER_TURN: self.limits.max_tokens_per_turn,
            StopReason.MAX_SAMPLED_TOKENS: self.limits.max_sampled_tokens - self.num_sampled_tokens,
            StopReason.MAX_CONTEXT: self.max_context_tokens - num_prompt_tokens,
        }

    def turn_ended(
        self, num_prompt_tokens: int, num_sampled: int, finish_reason: FinishReason, wanted: int | None = None
    ) -> None:
        """Count a turn. `wanted` is the most tokens that the loop itself asked for.

        Raises LimitReached if a limit of the task cut the turn, or its time.
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
                raise LimitReached(StopReason.MAX_TOKENS_PER_TURN)  # by a bound of the engine's own

    def calls_to_run(self, num_calls: int) -> int:
        """Return the number of a turn's calls that may run. Raises LimitReached where the limit says stop."""
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
    """One trajectory against its run's limit, asked before each turn and its tool calls, and at the end.

    A turn is never interrupted for staleness: its worker learns of a commit from the answers of other turns, if at
    all, and the limits on a turn's tokens bound the waste. A turn that an engine-side abort cut does not continue.
    """

    def __init__(self, limit: StalenessLimit, newest: NewestVersion) -> None:
        self._limit = limit
        self._newest = newest

    @property
    def newest_version(self) -> int | None:
        """The newest version in this worker's generations."""
        return self._newest.value

    def learn(self, version: int) -> None:
        """Record the newest version of the worker that had this trajectory before."""
        self._newest.value = version if self._newest.value is None else max(version, self._newest.value)

    def must_end(self, path: GrowingPath, sampled: Sequence[WeightVersionSpan] = ()) -> bool:
        """Return True if the trajectory is over its limit, as far as the worker knows, and `on_stale` stops it.

        `sampled` are the versions of a turn that is not in the path yet.
        """
        return self._limit.on_stale is not OnStale.MASK and self._over(path, sampled) is not None

    def check(self, path: GrowingPath) -> None:
        """Raises LimitReached (STALE) if the trajectory must end."""
        if self.must_end(path):
            raise LimitReached(StopReason.STALE)

    def settle(self, path: GrowingPath) -> OnStale | None:
        """Apply the policy to a path whose loop has ended. Returns the policy if the path is over its limit.

        MASK takes the tokens out of the mask that are too old for the newest version. FINISH keeps the tokens that
        were sampled while the limit held, and takes out those that the turn sampled after the update. DROP leaves
        the path as it is: its caller discards it.
        """
        found = self._over(path)
        if found is None:
            return None
        oldest, newest = found
        match self._limit.on_stale:
            case OnStale.MASK:
                path.mask_older_than(newest - self._limit.max_staleness)
            case OnStale.FINISH:
                path.mask_newer_than(oldest + self._limit.max_staleness)
            case OnStale.DROP:
                pass
        return self._limit.on_stale

    def _over(self, path: GrowingPath, sampled: Sequence[WeightVersionSpan] = ()) -> tuple[int, int] | None:
        """Return the oldest and the newest version, if they are too far apart."""
        versions = path.versions | {span.version for span in sampled}
        if not versions:
            return None
        # The newest version of the fleet is older than the path's newest where the fleet was taken back.
        of_fleet = set() if self._newest.value is None else {self._newest.value}
        oldest, newest = min(versions), max(versions | of_fleet)
        return (oldest, newest) if newest - oldest > self._limit.max_staleness else None
