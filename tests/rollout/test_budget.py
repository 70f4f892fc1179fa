"""Each limit ends a trajectory with its own stop reason."""

import pytest

from agentloop.rollout.budget import Budget, LimitReached
from agentloop.types import FinishReason, Limits, OnExcess, StopReason


def reason(call, *arguments) -> StopReason:
    with pytest.raises(LimitReached) as caught:
        call(*arguments)
    return caught.value.reason


def test_a_turn_gets_the_smallest_budget():
    budget = Budget(Limits(max_tokens_per_turn=50, max_sampled_tokens=80), max_context_tokens=100)
    assert budget.tokens_for_turn(10) == 50
    assert budget.tokens_for_turn(70) == 30
    assert budget.tokens_for_turn(70, wanted=5) == 5
    budget.turn_ended(10, 45, FinishReason.STOP)
    assert budget.tokens_for_turn(60) == 35


@pytest.mark.parametrize(
    ("limits", "context", "prompt", "expected"),
    [
        (Limits(max_tokens_per_turn=5), 100, 10, StopReason.MAX_TOKENS_PER_TURN),
        (Limits(max_sampled_tokens=5), 100, 10, StopReason.MAX_SAMPLED_TOKENS),
        (Limits(), 15, 10, StopReason.MAX_CONTEXT),
    ],
)
def test_a_cut_turn_names_the_limit_that_cut_it(limits, context, prompt, expected):
    budget = Budget(limits, context)
    assert budget.tokens_for_turn(prompt) == 5
    assert reason(budget.turn_ended, prompt, 5, FinishReason.LENGTH) is expected


@pytest.mark.parametrize(
    ("limits", "context", "expected"),
    [
        (Limits(), 100, None),
        (Limits(max_tokens_per_turn=5), 100, StopReason.MAX_TOKENS_PER_TURN),
        (Limits(max_sampled_tokens=5), 100, StopReason.MAX_SAMPLED_TOKENS),
        (Limits(), 15, StopReason.MAX_CONTEXT),
    ],
)
def test_a_turn_that_the_loop_itself_cut_goes_on_unless_a_limit_is_met_too(limits, context, expected):
    budget = Budget(limits, context)
    assert budget.tokens_for_turn(10, wanted=5) == 5
    if expected is None:
        budget.turn_ended(10, 5, FinishReason.LENGTH, wanted=5)
    else:
        assert reason(budget.turn_ended, 10, 5, FinishReason.LENGTH, 5) is expected
    assert (budget.num_turns, budget.num_sampled_tokens) == (1, 5)


def test_a_turn_shorter_than_anybody_asked_for_ends_the_trajectory():
    assert reason(Budget(Limits(), 100).turn_ended, 10, 4, FinishReason.LENGTH, 5) is StopReason.MAX_TOKENS_PER_TURN
    assert reason(Budget(Limits(), 100).turn_ended, 10, 5, FinishReason.DEADLINE, 5) is StopReason.DEADLINE


def test_spent_budgets_refuse_the_next_turn():
    assert reason(Budget(Limits(), 10).tokens_for_turn, 10) is StopReason.PROMPT_TOO_LONG
    budget = Budget(Limits(max_turns=2, max_sampled_tokens=5), 100)
    budget.turn_ended(1, 3, FinishReason.STOP)
    assert reason(budget.tokens_for_turn, 100) is StopReason.MAX_CONTEXT
    budget.num_sampled_tokens = 5
    assert reason(budget.tokens_for_turn, 10) is StopReason.MAX_SAMPLED_TOKENS
    budget.num_turns = 2
    assert reason(budget.tokens_for_turn, 10) is StopReason.MAX_TURNS


def test_calls_of_the_last_turn_are_not_run():
    budget = Budget(Limits(max_turns=1), 100)
    budget.turn_ended(1, 3, FinishReason.STOP)
    assert reason(budget.calls_to_run, 1) is StopReason.MAX_TURNS


def test_excess_calls_are_answered_or_stop():
    budget = Budget(Limits(max_tool_calls_per_turn=2), 100)
    assert budget.calls_to_run(5) == 2
    assert budget.num_tool_calls == 2
    strict = Budget(Limits(max_tool_calls_per_turn=2, on_excess_tool_calls=OnExcess.STOP), 100)
    assert reason(strict.calls_to_run, 3) is StopReason.MAX_TOOL_CALLS_PER_TURN
    assert strict.calls_to_run(2) == 2


def test_the_trajectory_has_a_budget_of_calls():
    budget = Budget(Limits(max_tool_calls=3), 100)
    assert budget.calls_to_run(2) == 2
    assert reason(budget.calls_to_run, 2) is StopReason.MAX_TOOL_CALLS
