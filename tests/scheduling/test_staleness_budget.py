"""The two parts of a staleness limit: how many samples may start, and the handling of running samples."""

from __future__ import annotations

import pytest

from agentloop.errors import InvalidRequest
from agentloop.generation.leased_engine import NewestVersion
from agentloop.rollout.budget import LimitReached, StalenessGuard
from agentloop.scheduling.staleness_budget import UNBOUNDED, FleetVersions, StalenessBudget, StalenessBudgets
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import (
    FinishReason,
    Generation,
    Load,
    OnStale,
    RolloutGroup,
    RolloutTask,
    StalenessLimit,
    StopReason,
    WeightVersionSpan,
)
from tests.support.records.turns import make_reply


def generation(*versions: int, load_version: int | None = None, replica_id: str = "") -> Generation:
    """Return a generation with two tokens for each version."""
    spans = tuple(WeightVersionSpan(version, 2 * at, 2 * at + 2) for at, version in enumerate(versions))
    num_tokens = 2 * len(versions)
    load = Load(weight_version=load_version)
    ids, logprobs = tuple(range(num_tokens)), (-0.5,) * num_tokens
    return Generation("r", ids, logprobs, spans, FinishReason.STOP, replica_id=replica_id, load=load)


def guarded(limit: StalenessLimit, *turns: Generation) -> tuple[StalenessGuard, GrowingPath, NewestVersion]:
    growing, newest = GrowingPath(), NewestVersion()
    growing.start([1, 2, 3])
    for turn in turns:
        growing.add_turn(make_reply(turn))
        growing.add_observed([7])
        newest.see(turn)
    return StalenessGuard(limit, newest), growing, newest


# Admission


def begun(limit: StalenessLimit, num_begun: int, first_version: int = 0) -> StalenessBudget:
    budget = StalenessBudget(limit)
    for _ in range(num_begun):
        budget.begin(first_version)
    return budget


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_room_grows_with_every_version(max_staleness: int) -> None:
    budget = begun(StalenessLimit(max_staleness, trajectories_per_version=4), 4 * (max_staleness + 1))
    assert budget.room(FleetVersions(0)) == 0
    assert budget.room(FleetVersions(1)) == 4
    assert budget.room(FleetVersions(5)) == 20


def test_versions_are_counted_from_the_first_hand_out() -> None:
    budget = begun(StalenessLimit(0, trajectories_per_version=4), 4, first_version=7)
    assert budget.room(FleetVersions(7)) == 0
    assert budget.room(FleetVersions(8)) == 4
    assert begun(StalenessLimit(0, trajectories_per_version=4), 0).room(FleetVersions(7)) == 4


def test_what_failed_gives_its_place_back() -> None:
    budget = begun(StalenessLimit(0, trajectories_per_version=2), 2)
    budget.give_back()
    assert budget.room(FleetVersions(0)) == 1


@pytest.mark.parametrize(("coming", "expected"), [(None, UNBOUNDED), (6, 0), (7, 0)])
def test_on_policy_nothing_is_begun_while_an_update_is_on_its_way(coming: int | None, expected: int) -> None:
    assert StalenessBudget(StalenessLimit(0)).room(FleetVersions(5, coming)) == expected


def test_with_a_limit_above_zero_only_an_update_that_jumps_over_it_holds() -> None:
    budget = StalenessBudget(StalenessLimit(1))
    assert budget.room(FleetVersions(0, 1)) == UNBOUNDED
    assert budget.room(FleetVersions(0, 2)) == 0


def test_rollouts_of_one_run_share_a_budget_until_the_last_is_done() -> None:
    budgets = StalenessBudgets()
    limit = StalenessLimit(1, trajectories_per_version=2, run_id="run")
    one, two = budgets.join("a", limit), budgets.join("b", limit)
    assert one is two
    assert budgets.join("run", StalenessLimit(1)) is not one, "a rollout's id is no run's"
    budgets.leave("a", one)
    assert budgets.join("c", limit) is two
    budgets.leave("b", one)
    budgets.leave("c", one)
    assert budgets.join("d", limit) is not one
    assert budgets.join("e", None) is None


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ([StalenessLimit(-1)], "max_staleness"),
        ([StalenessLimit(0, trajectories_per_version=0)], "trajectories_per_version"),
        ([StalenessLimit(0), None], "max_staleness"),
        ([StalenessLimit(1, run_id="run")], "run_id"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: list[StalenessLimit | None], param: str) -> None:
    budgets = StalenessBudgets()
    budgets.join("other", StalenessLimit(0, run_id="run"))
    groups = [RolloutGroup(f"g{n}", RolloutTask("t", ()), 1, "r", limit) for n, limit in enumerate(limits)]
    with pytest.raises(InvalidRequest) as caught:
        budgets.check("r", groups)
    assert caught.value.param == param
    budgets.check("r", [RolloutGroup("g", RolloutTask("t", ()), 1, "r", StalenessLimit(0, run_id="run"))])


# In flight


def test_the_newest_version_comes_from_loads_and_spans_and_goes_back_with_a_replica() -> None:
    newest = NewestVersion()
    newest.see(generation())
    assert newest.value is None
    newest.see(generation(0))
    assert newest.value == 0
    newest.see(generation(0, load_version=3))
    newest.see(generation(1, 2, load_version=2, replica_id="behind"))  # an answer that took long
    assert newest.value == 3
    newest.see(generation(3, 1, load_version=1))  # in flight during the rollback of the fleet
    assert newest.value == 2
    for _ in range(1000):
        newest.see(generation(1, load_version=1))
    assert newest.value == 1  # the other replica has sent no report since


def test_a_fleet_that_is_taken_back_goes_on_counting() -> None:
    budgets = StalenessBudgets()
    budget = budgets.join("r", StalenessLimit(0, trajectories_per_version=4))
    assert budget is not None
    budgets.learn(FleetVersions(940))
    for _ in range(11 * 4):
        budget.begin(940)
    budgets.learn(FleetVersions(950))
    assert budget.room(FleetVersions(950)) == 0
    budgets.learn(FleetVersions(900))
    assert budget.room(FleetVersions(900)) == 0
    assert budget.room(FleetVersions(901)) == 4


@pytest.mark.parametrize("on_stale", OnStale)
@pytest.mark.parametrize(("load_version", "is_over"), [(1, False), (2, True)])
def test_a_trajectory_ends_when_its_oldest_token_is_too_old(
    on_stale: OnStale, load_version: int, is_over: bool
) -> None:
    guard, growing, _ = guarded(StalenessLimit(1, on_stale), generation(0, load_version=load_version))
    must_end = is_over and on_stale is not OnStale.MASK
    assert guard.must_end(growing) is must_end
    if must_end:
        with pytest.raises(LimitReached) as caught:
            guard.check(growing)
        assert caught.value.reason is StopReason.STALE
    else:
        guard.check(growing)


def test_before_anything_is_sampled_nothing_is_too_old() -> None:
    guard, growing, newest = guarded(StalenessLimit(0))
    newest.see(generation(9))
    guard.check(growing)
    assert guard.settle(growing) is None


@pytest.mark.parametrize(
    ("on_stale", "max_staleness", "in_mask"),
    [
        (OnStale.MASK, 0, {2}),
        (OnStale.MASK, 1, {1, 2}),
        (OnStale.MASK, 2, {0, 1, 2}),
        (OnStale.FINISH, 0, {0}),
        (OnStale.FINISH, 1, {0, 1}),
        (OnStale.FINISH, 2, {0, 1, 2}),
        (OnStale.DROP, 0, {0, 1, 2}),
    ],
)
def test_a_turn_that_spans_updates_is_settled_token_by_token(
    on_stale: OnStale, max_staleness: int, in_mask: set[int]
) -> None:
    guard, growing, _ = guarded(StalenessLimit(max_staleness, on_stale), generation(0), generation(0, 1, 2))
    assert guard.settle(growing) is (on_stale if max_staleness < 2 else None)
    (path,) = growing.paths()
    assert path.trained_versions == in_mask
    num_out = sum(2 * (1 + (version == 0)) for version in {0, 1, 2} - in_mask)
    assert path.num_masked_tokens == num_out == 8 - int(path.response_mask.sum())
    assert not path.response_mask[[2, 9]].any(), "observed tokens are never in the mask"


def test_a_fleet_that_was_taken_back_leaves_a_mixed_path_over_its_limit() -> None:
    guard, growing, newest = guarded(StalenessLimit(0, OnStale.DROP), generation(0, 1, replica_id="a"))
    newest.see(generation(0, replica_id="a"))
    assert newest.value == 0
    assert guard.settle(growing) is OnStale.DROP


def test_mask_may_leave_nothing() -> None:
    guard, growing, _ = guarded(StalenessLimit(0, OnStale.MASK), generation(0, load_version=1))
    assert guard.settle(growing) is OnStale.MASK
    assert growing.paths()[0].trained_versions == frozenset()
