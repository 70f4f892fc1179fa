"""The party that a failed trajectory is attributed to, and missing rewards after infrastructure failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentloop.score import judged
from agentloop.types import Timings
from agentloop.values.endings import FAILURES, FailureClass, StopReason, failure_of_end
from tests.support.records.samples import make_trajectory

POLICY, TOOL, INFRASTRUCTURE = FailureClass.POLICY, FailureClass.TOOL, FailureClass.INFRASTRUCTURE

WELL = {
    StopReason.COMPLETED: None,
    StopReason.MAX_TURNS: POLICY,
    StopReason.MAX_TOOL_CALLS_PER_TURN: POLICY,
    StopReason.MAX_TOOL_CALLS: POLICY,
    StopReason.MAX_TOKENS_PER_TURN: POLICY,
    StopReason.MAX_SAMPLED_TOKENS: POLICY,
    StopReason.MAX_CONTEXT: POLICY,
    StopReason.MALFORMED_CALL: POLICY,
    StopReason.TOOL_RESPONSE_TOO_LONG: TOOL,
    StopReason.DEADLINE: POLICY,
    StopReason.STALE: FailureClass.STALE,
    StopReason.CANCELLED: None,
    StopReason.PROMPT_TOO_LONG: INFRASTRUCTURE,
    StopReason.INVALID_TASK: INFRASTRUCTURE,
    StopReason.ENGINE_FAILED: INFRASTRUCTURE,
    StopReason.LOOP_FAILED: INFRASTRUCTURE,
    StopReason.TOOL_FAILED: TOOL,
}


@pytest.mark.parametrize("reason", StopReason)
def test_every_end_has_its_class(reason: StopReason) -> None:
    found = failure_of_end(reason, is_complete=True, has_no_score=False, is_tools_time=False)
    assert found is WELL[reason]


@pytest.mark.parametrize("reason", sorted(set(StopReason) - FAILURES - {StopReason.CANCELLED, StopReason.STALE}))
def test_a_lost_call_or_a_failed_score_is_the_infrastructures(reason: StopReason) -> None:
    for is_complete, has_no_score in ((False, False), (True, True)):
        found = failure_of_end(reason, is_complete=is_complete, has_no_score=has_no_score, is_tools_time=False)
        assert found is INFRASTRUCTURE


def test_a_deadline_is_of_who_took_the_time() -> None:
    late = replace(make_trajectory(), stop_reason=StopReason.DEADLINE)
    assert replace(late, timings=Timings(generate_s=20.0, tool_s=10.0)).failure is POLICY
    assert replace(late, timings=Timings(generate_s=10.0, tool_s=20.0)).failure is TOOL


def test_a_reward_of_what_the_infrastructure_ended_is_taken_away_and_no_other() -> None:
    lost_call = replace(make_trajectory(), is_complete=False)
    assert lost_call.reward == 1.0
    assert judged(lost_call).reward is None
    unscored = replace(make_trajectory(), reward=None, reward_error="timed out after 30 s")
    assert judged(unscored).failure is INFRASTRUCTURE
    stopped = replace(make_trajectory(), stop_reason=StopReason.STALE)
    assert (judged(stopped).reward, stopped.is_sound, stopped.is_trained) == (None, False, False)
    for good in (make_trajectory(), replace(make_trajectory(), stop_reason=StopReason.MAX_TURNS)):
        assert judged(good) is good
    assert replace(make_trajectory(), reward_error="a component failed").failure is None


def test_what_a_trainer_consumes_is_complete_and_has_a_token_in_its_mask() -> None:
    whole = make_trajectory()
    masked = replace(whole.paths[0], response_mask=whole.paths[0].response_mask & False)
    assert whole.is_trained
    assert not replace(whole, is_complete=False).is_trained
    assert not replace(whole, paths=(masked,)).is_trained
