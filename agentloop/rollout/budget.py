"""Budgets of one trajectory, and the StopReason of whichever is spent first.

The rules, in one place:
- a turn that a limit of the task or its time cut ends the trajectory: its text has no proper end;
- a turn that the loop's own `max_tokens` cut is an answer to the loop, which may go on from it;
- the calls of the last allowed turn are not run: no turn could read their results;
- calls beyond a turn's cap are answered with an error message, or stop the trajectory (`on_excess_tool_calls`);
- a tool response beyond its cap is cut with a visible mark, or stops it (`on_long_tool_response`).
"""

from __future__ import annotations

from dataclasses import dataclass

from agentloop.types import FinishReason, Limits, OnExcess, StopReason


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
