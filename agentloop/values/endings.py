"""The ends of a trajectory, and whose failure each of them is.

Limits and failures are data: every end has its own `StopReason`. `failure_of_end` is the one place that says whose
failure an end is.
"""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """The reason why a trajectory ended. Limits and failures are data: each has its own member."""

    COMPLETED = "completed"  # the loop returned: for `tool_loop`, the policy answered without a tool call
    MAX_TURNS = "max_turns"  # the last allowed turn still asked for tools
    MAX_TOOL_CALLS_PER_TURN = "max_tool_calls_per_turn"  # one turn made too many calls
    MAX_TOOL_CALLS = "max_tool_calls"  # the trajectory made too many calls
    MAX_TOKENS_PER_TURN = "max_tokens_per_turn"  # one turn was cut by its token limit
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"  # the trajectory's budget of sampled tokens is spent
    MAX_CONTEXT = "max_context"  # the next prompt does not fit the context
    MALFORMED_CALL = "malformed_call"  # an agent session's last turn called a tool in a way that cannot be read
    TOOL_RESPONSE_TOO_LONG = "tool_response_too_long"  # a tool answered more than allowed
    DEADLINE = "deadline"  # the wall-clock budget is spent
    CANCELLED = "cancelled"  # the client cancelled it
    PROMPT_TOO_LONG = "prompt_too_long"  # the first prompt does not fit the context; nothing was sampled
    INVALID_TASK = "invalid_task"  # unknown loop, tool or reward; nothing was sampled
    ENGINE_FAILED = "engine_failed"  # no replica could finish a turn within the retry budget
    LOOP_FAILED = "loop_failed"  # the user's loop raised
    TOOL_FAILED = "tool_failed"  # a tool could not be opened for it, or was lost with its state
    STALE = "stale"  # stopped before its own end: older than its run allows, or its weight version is not served


FAILURES = frozenset(
    {
        StopReason.INVALID_TASK,
        StopReason.ENGINE_FAILED,
        StopReason.LOOP_FAILED,
        StopReason.TOOL_FAILED,
        StopReason.PROMPT_TOO_LONG,
    }
)
"""Stop reasons of trajectories that never look trainable."""

_ENDS_OF_THEIR_OWN = {StopReason.COMPLETED, StopReason.MALFORMED_CALL, StopReason.CANCELLED}
TRUNCATIONS = frozenset(StopReason) - FAILURES - _ENDS_OF_THEIR_OWN
"""Stop reasons of trajectories that a limit cut: the policy had not ended them."""


class FailureClass(StrEnum):
    """Failures that end a trajectory, by the party at fault."""

    POLICY = "policy"  # it spent its budget, or wrote what cannot be read: an answer, and rewarded as one
    TOOL = "tool"  # an environment was lost, answered too much, or took the time
    INFRASTRUCTURE = "infrastructure"  # the service, the user's code around the policy, or the scoring; no reward
    STALE = "stale"  # weight updates overtook it before its own end; no reward


NOT_THE_POLICYS = frozenset({FailureClass.INFRASTRUCTURE, FailureClass.STALE})
"""Failures that say nothing about the policy: they take the reward, the keep place, and the share in a baseline."""


_FAILURE_OF: dict[StopReason, FailureClass] = {
    StopReason.MAX_TURNS: FailureClass.POLICY,
    StopReason.MAX_TOOL_CALLS_PER_TURN: FailureClass.POLICY,
    StopReason.MAX_TOOL_CALLS: FailureClass.POLICY,
    StopReason.MAX_TOKENS_PER_TURN: FailureClass.POLICY,
    StopReason.MAX_SAMPLED_TOKENS: FailureClass.POLICY,
    StopReason.MAX_CONTEXT: FailureClass.POLICY,
    StopReason.MALFORMED_CALL: FailureClass.POLICY,
    StopReason.TOOL_RESPONSE_TOO_LONG: FailureClass.TOOL,
    StopReason.TOOL_FAILED: FailureClass.TOOL,
    StopReason.PROMPT_TOO_LONG: FailureClass.INFRASTRUCTURE,
    StopReason.INVALID_TASK: FailureClass.INFRASTRUCTURE,
    StopReason.ENGINE_FAILED: FailureClass.INFRASTRUCTURE,
    StopReason.LOOP_FAILED: FailureClass.INFRASTRUCTURE,
    StopReason.STALE: FailureClass.STALE,
}


def failure_of_end(
    stop_reason: StopReason, *, is_complete: bool, has_no_score: bool, is_tools_time: bool
) -> FailureClass | None:
    """Return the party whose failure an end is; None for completed and cancelled trajectories.

    `is_complete` is false where a call was lost; `has_no_score` where scoring failed; `is_tools_time` where tools
    took longer than the policy, which decides about a deadline.
    """
    if stop_reason is StopReason.CANCELLED:
        return None
    found = _FAILURE_OF.get(stop_reason)
    if stop_reason in FAILURES or stop_reason is StopReason.STALE:
        return found
    if not is_complete or has_no_score:
        return FailureClass.INFRASTRUCTURE
    if stop_reason is StopReason.DEADLINE:
        return FailureClass.TOOL if is_tools_time else FailureClass.POLICY
    return found
