"""The reasons why trajectories end, and the party responsible for each failure.

Limits and failures are data: each has its own `StopReason`. Only `failure_of_end` attributes a failure to a party.
"""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """The reason why a trajectory ended. Limits and failures are data: each has its own member."""

    COMPLETED = "completed"  # the loop returned: for `tool_loop`, the policy answered without a tool call
    MAX_TURNS = "max_turns"  # the last allowed turn still called tools
    MAX_TOOL_CALLS_PER_TURN = "max_tool_calls_per_turn"  # one turn made too many calls
    MAX_TOOL_CALLS = "max_tool_calls"  # the trajectory made too many calls
    MAX_TOKENS_PER_TURN = "max_tokens_per_turn"  # one turn was cut by its token limit
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"  # the trajectory's budget of sampled tokens is exhausted
    MAX_CONTEXT = "max_context"  # the next prompt does not fit into the context
    MALFORMED_CALL = "malformed_call"  # the parser could not read a tool call in an agent session's last turn
    TOOL_RESPONSE_TOO_LONG = "tool_response_too_long"  # a tool's response exceeded its limit
    DEADLINE = "deadline"  # the wall-clock budget is exhausted
    CANCELLED = "cancelled"  # the client cancelled it
    PROMPT_TOO_LONG = "prompt_too_long"  # the first prompt does not fit into the context; nothing was sampled
    INVALID_TASK = "invalid_task"  # unknown loop, tool or reward; nothing was sampled
    ENGINE_FAILED = "engine_failed"  # no replica could finish a turn within the retry budget
    LOOP_FAILED = "loop_failed"  # the user's loop raised
    TOOL_FAILED = "tool_failed"  # a tool could not be opened for the trajectory, or was lost with its state
    STALE = "stale"  # stopped early: older than its run allows, or its weight version is no longer served


FAILURES = frozenset(
    {
        StopReason.INVALID_TASK,
        StopReason.ENGINE_FAILED,
        StopReason.LOOP_FAILED,
        StopReason.TOOL_FAILED,
        StopReason.PROMPT_TOO_LONG,
    }
)
"""Stop reasons of trajectories that are never trainable."""

_ENDS_OF_THEIR_OWN = {StopReason.COMPLETED, StopReason.MALFORMED_CALL, StopReason.CANCELLED}
TRUNCATIONS = frozenset(StopReason) - FAILURES - _ENDS_OF_THEIR_OWN
"""Stop reasons of trajectories that a limit cut before the policy had finished."""


class FailureClass(StrEnum):
    """The party at fault for a failure that ended a trajectory."""

    POLICY = "policy"  # it exhausted its budget or wrote an unreadable call; the result is rewarded like an answer
    TOOL = "tool"  # a tool was lost, returned too much, or used up the time
    INFRASTRUCTURE = "infrastructure"  # the service, the user's code around the policy, or the scoring; no reward
    STALE = "stale"  # weight updates overtook the trajectory before it had finished; no reward


NOT_THE_POLICYS = frozenset({FailureClass.INFRASTRUCTURE, FailureClass.STALE})
"""Failures that are independent of the policy: the trajectory has no reward, is not kept in its group, and does not
count in a baseline."""


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
    """Return the party at fault for a trajectory's end; None for completed and cancelled trajectories.

    `is_complete` is False if a call was lost, `has_no_score` is True if scoring failed, and `is_tools_time` is True
    if tools took longer than the policy, which attributes a deadline.
    """
    if stop_reason is StopReason.CANCELLED:
        return None
    failure = _FAILURE_OF.get(stop_reason)
    if stop_reason in FAILURES or stop_reason is StopReason.STALE:
        return failure
    if not is_complete or has_no_score:
        return FailureClass.INFRASTRUCTURE
    if stop_reason is StopReason.DEADLINE:
        return FailureClass.TOOL if is_tools_time else FailureClass.POLICY
    return failure
