"""What the balancer expects: lengths, the KV needed at once, and the times of tools."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.scheduling.expected_work import ExpectedWork, WorkPriors
from agentloop.scheduling.kv_forecast import KVForecast, KVNeed
from agentloop.scheduling.step_times import StepTimes
from agentloop.scheduling.tool_times import ToolTimes


def finish(work, group, growth):
    work.begin(group)
    work.end(group, growth, 0.0)


def test_short_trajectories_that_end_first_are_not_taken_for_all():
    """Half of the trajectories take 1,000 tokens and end; the others have grown to 8,000 and go on."""
    work = ExpectedWork()
    for index in range(200):
        finish(work, f"short{index}", 1000.0)
        work.begin(f"long{index}")
        for grown in range(1000, 9000, 1000):
            work.turn(f"long{index}", float(grown), 1000.0, 300)
    assert work.remaining("fresh", 0.0).growth_tokens > 4500.0


def test_siblings_say_more_than_others():
    work, drawn = ExpectedWork(), random.Random(0)
    for group in range(60):
        median = drawn.lognormvariate(9.0, 0.8)
        for _ in range(8):
            finish(work, f"g{group}", median * drawn.lognormvariate(0.0, 0.2))
    for group, median in (("long", 60_000.0), ("short", 2000.0)):
        for _ in range(5):
            work.begin(group)
        for _ in range(4):
            work.end(group, median, 0.0)
    alone = work.remaining("fresh", 0.0).growth_tokens
    assert work.remaining("short", 0.0).growth_tokens == pytest.approx(2000.0, rel=0.4)
    assert work.remaining("long", 0.0).growth_tokens == pytest.approx(60_000.0, rel=0.4)
    assert work.remaining("short", 0.0).growth_tokens < alone / 2 < alone * 2 < 60_000.0


def test_a_sibling_that_outgrows_what_was_expected_raises_it():
    work = ExpectedWork()
    work.begin("g")
    before = work.remaining("g", 0.0).growth_tokens
    work.turn("g", 100_000.0, 500.0, 100)
    assert work.remaining("g", 0.0).growth_tokens > 3 * before


@pytest.mark.parametrize("grown", [3000.0, 10_000.0, 25_000.0])
def test_a_sibling_that_goes_on_tells_what_a_draw_of_groups_tells(grown):
    """Of groups drawn from the priors, those whose first sample grows beyond `grown`: how long is the second?"""
    priors, drawn, seconds = WorkPriors(), random.Random(0), []
    between, within = priors.between_groups, priors.within_group
    middle = math.log(priors.growth_tokens) - (between**2 + within**2) / 2
    while len(seconds) < 3000:
        of_group = drawn.gauss(middle, between)
        if drawn.gauss(of_group, within) > math.log(grown):
            seconds.append(math.exp(drawn.gauss(of_group, within)))
    work = ExpectedWork(priors)
    work.begin("g")
    work.turn("g", grown, 500.0, 100)
    assert work.remaining("g", 0.0).growth_tokens == pytest.approx(sum(seconds) / len(seconds), rel=0.06)


def test_what_a_sample_has_outgrown_itself_counts_once():
    work = ExpectedWork()
    work.begin("g")
    before = work.remaining("g", 12_000.0)
    work.turn("g", 12_000.0, 500.0, 100)
    assert work.remaining("g", 12_000.0).growth_tokens == pytest.approx(before.growth_tokens)


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_who_has_grown_more_ends_longer_and_something_is_always_left(one, other):
    work = ExpectedWork()
    least, most = sorted((one, other))
    left_least, left_most = work.remaining("g", least), work.remaining("g", most)
    assert left_most.growth_tokens >= 0.0
    assert least + left_least.growth_tokens <= (most + left_most.growth_tokens) * 1.05 + 1.0
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
        work.turn("long", 60_000.0, 60_000.0, 100)
    assert work.hoped("long") > unknown
    work.begin("short")
    work.begin("short")
    work.end("short", 100.0, 100.0)
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
