"""What the balancer expects: lengths, the KV needed at once, and the times of tools."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.scheduling.expected_work import ExpectedWork, WorkPriors
from agentloop.scheduling.kv_forecast import KVForecast, KVNeed
from tests.benchmarks.balancer.step_curves import StepTimes
from agentloop.scheduling.tool_times import ToolTimes

TURN = 800.0  # tokens


def take_turns(work, group, num_turns, first=1):
    for number in range(first, num_turns + 1):
        work.turn(group, number, TURN, 250)


def finish(work, group, num_turns):
    work.begin(group)
    take_turns(work, group, num_turns)
    work.end(group, num_turns)


def test_short_trajectories_that_end_first_are_not_taken_for_all():
    """Half of the trajectories take 2 turns and end; the others have had 12 and go on."""
    work = ExpectedWork()
    for index in range(200):
        finish(work, f"short{index}", 2)
        work.begin(f"long{index}")
        take_turns(work, f"long{index}", 12)
    assert work.remaining("fresh", 0).num_turns > 6.0


def test_siblings_say_more_than_others():
    work, drawn = ExpectedWork(), random.Random(0)
    for group in range(60):
        median = drawn.lognormvariate(2.5, 0.8)
        for _ in range(8):
            finish(work, f"g{group}", max(round(median * drawn.lognormvariate(0.0, 0.2)), 1))
    for group, num_turns in (("long", 60), ("short", 3)):
        for _ in range(5):
            work.begin(group)
        for _ in range(4):
            take_turns(work, group, num_turns)
            work.end(group, num_turns)
    alone = work.remaining("fresh", 0).num_turns
    assert work.remaining("short", 0).num_turns == pytest.approx(3, rel=0.4)
    assert work.remaining("long", 0).num_turns == pytest.approx(60, rel=0.4)
    assert work.remaining("short", 0).num_turns < alone / 2 < alone * 2 < 60


def test_a_group_s_turns_are_as_long_as_its_own():
    work = ExpectedWork()
    for group, tokens in (("short", 100.0), ("long", 3000.0)):
        for _ in range(100):
            work.begin(group)
            work.turn(group, 1, tokens, 50)
            work.end(group, 1)
    assert work.remaining("long", 0).growth_tokens > 3 * work.remaining("short", 0).growth_tokens


def test_a_sibling_that_outgrows_what_was_expected_raises_it():
    work = ExpectedWork()
    work.begin("g")
    before = work.remaining("g", 0).num_turns
    work.turn("g", 100, TURN, 250)
    assert work.remaining("g", 0).num_turns > 3 * before


@pytest.mark.parametrize("num_turns", [4, 12, 30])
def test_a_sibling_that_goes_on_tells_what_a_draw_of_groups_tells(num_turns):
    """Of groups drawn from the priors, those whose first sample has its nth turn: how long is the second?"""
    priors, drawn, seconds = WorkPriors(), random.Random(0), []
    between, within = priors.between_groups, priors.within_group
    middle = math.log(priors.growth_tokens / priors.turn_tokens) - (between**2 + within**2) / 2
    while len(seconds) < 3000:
        of_group = drawn.gauss(middle, between)
        if drawn.gauss(of_group, within) > math.log(num_turns - 0.5):
            seconds.append(math.exp(drawn.gauss(of_group, within)))
    work = ExpectedWork(priors)
    work.begin("g")
    work.turn("g", num_turns, TURN, 250)
    assert work.remaining("g", 0).num_turns == pytest.approx(sum(seconds) / len(seconds), rel=0.06)


def test_what_a_sample_has_outgrown_itself_counts_once():
    work = ExpectedWork()
    work.begin("g")
    before = work.remaining("g", 15)
    work.turn("g", 15, TURN, 250)
    assert work.remaining("g", 15).num_turns == pytest.approx(before.num_turns)


def test_one_sample_that_gave_up_does_not_condemn_its_group():
    work = ExpectedWork()
    for index in range(200):
        finish(work, f"g{index}", (8, 15, 20, 30)[index % 4])
    alone = work.remaining("new", 0).num_turns
    finish(work, "gave-up", 1)
    assert work.remaining("gave-up", 0).num_turns > 0.8 * alone
    for num_turns in (20, 20, 1):
        finish(work, "long", num_turns)
    assert work.remaining("long", 0).num_turns == pytest.approx(20, rel=0.2)
    for _ in range(3):
        finish(work, "short", 5)
    assert work.remaining("short", 0).num_turns < alone / 2


def test_a_group_is_known_when_more_of_its_samples_begin_later():
    work = ExpectedWork()
    for _ in range(4):
        finish(work, "long", 60)
    known = work.remaining("long", 0)
    assert known.num_turns > 2 * work.remaining("fresh", 0).num_turns
    work.begin("long")
    assert work.remaining("long", 0) == known


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_who_has_had_more_turns_ends_later_and_something_is_always_left(one, other):
    work = ExpectedWork()
    least, most = sorted((one, other))
    left_least, left_most = work.remaining("g", least), work.remaining("g", most)
    assert left_most.num_turns >= 0.0
    assert least + left_least.num_turns <= (most + left_most.num_turns) * 1.05 + 1.0
    assert left_most.sampled_tokens <= left_most.growth_tokens


NEEDS = st.lists(
    st.tuples(st.floats(0.0, 50_000.0), st.floats(0.0, 200_000.0), st.sampled_from(["g", "h", "i"])), max_size=30
)


@given(NEEDS, st.floats(0.0, 50_000.0), st.floats(0.0, 200_000.0), st.sampled_from(["g", "h", "j"]))
def test_the_forecast_is_a_walk_over_all_with_prompts_counted_once_a_group(drawn, held, growth, group):
    forecast, shared = KVForecast(), {"g": 100.0, "h": 2000.0, "i": 0.0, "j": 700.0}
    for one_held, one_growth, one_group in drawn:
        forecast.add(KVNeed(one_held, one_growth), one_group, shared[one_group])
    common = sum(shared[one] for one in {one for _, _, one in drawn})
    assert forecast.now_tokens == pytest.approx(common + sum(one[0] for one in drawn))
    assert forecast.soon_tokens == pytest.approx(common + sum(one[0] + one[1] for one in drawn))
    foreseen = forecast.with_one(KVNeed(held, growth), group, shared[group])
    forecast.add(KVNeed(held, growth), group, shared[group])
    assert forecast.soon_tokens == pytest.approx(foreseen)
    forecast.remove(KVNeed(held, growth), group)
    for one_held, one_growth, one_group in drawn:
        forecast.remove(KVNeed(one_held, one_growth), one_group)
    assert forecast.soon_tokens == forecast.now_tokens == forecast.num_trajectories == 0


def test_groups_are_tried_one_by_one_until_one_is_known_to_be_long():
    work = ExpectedWork()
    unknown = work.hoped("new")
    work.begin("begun")
    assert work.hoped("begun") < unknown  # its sample will tell
    for _ in range(4):
        work.begin("long")
        work.turn("long", 75, TURN, 250)
    assert work.hoped("long") > unknown
    for _ in range(3):
        work.begin("short")
    for _ in range(2):
        work.end("short", 1)
    assert work.hoped("short") < work.hoped("begun")


def test_tools_are_told_apart_and_a_new_one_is_like_all():
    times = ToolTimes()
    for _ in range(200):
        times.returned("read", 0.4)
        times.returned("tests", 100.0)
    assert times.expected_wait("read", 0.0, 1000.0) < 5.0 < 70.0 < times.expected_wait("tests", 0.0, 1000.0)
    assert 20.0 < times.expected_wait("new", 0.0, 1000.0) < 80.0
    assert times.expected_wait("tests", 0.0, 10.0) == pytest.approx(10.0, rel=0.1)


def test_a_tool_that_runs_longer_than_ever_is_expected_to_run_as_long_again():
    times = ToolTimes()
    times.returned("read", 1.0)
    assert times.expected_wait("read", 500.0, 1000.0) == 500.0


def test_the_formulas_of_step_times():
    times = StepTimes(1.0, 0.1, 0.01, 2.0, 0.2, 0.02)
    assert times.prefill(10) == pytest.approx(1 + 0.1 * 10 + 0.01 * 100)
    assert times.prefill(10, 4) == pytest.approx(1 + 0.1 * 6 + 0.01 * (100 - 16))
    assert times.prefill(10, 10) == 0.0
