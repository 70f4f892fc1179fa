from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentloop.api.coordinator import RolloutTerms
from agentloop.api.owners import UserLimits, UserTable
from agentloop.errors import Conflict, InvalidRequest, Overloaded
from agentloop.scheduling.dispatch_order import UserTurns
from agentloop.scheduling.samples import NoPlace
from agentloop.scheduling.staleness_budget import FleetVersions
from agentloop.types import Message, OnStale, RolloutGroup, RolloutTask, StalenessLimit, StopReason
from agentloop.values.sampling import VersionDemand
from tests.benchmarks.dispatch import LATE_S, simulate
from tests.support.fleet.placing_queue import LEASE, PlacingQueue


def group(group_id="g", num_samples=2, rollout_id="r", limit=None, keep=None):
    task = RolloutTask(group_id, (Message("user", "hi"),))
    return RolloutGroup(group_id, task, num_samples, rollout_id, limit, keep)


def queue_of(*sizes, **config):
    queue = PlacingQueue(**config)
    queue.reserve("r", [group(f"g{i}", size) for i, size in enumerate(sizes)])
    queue.add("r", now=0.0)
    queue.check()
    return queue


def names(samples):
    return [sample.assignment_id for sample in samples]


def test_samples_in_order_as_places_become_free():
    queue = queue_of(2, 3, 2)
    assert names(queue.take("w", 4, 1.0)) == ["r/g0/0", "r/g0/1", "r/g1/0", "r/g1/1"]
    assert names(queue.take("v", 2, 1.0)) == ["r/g1/2", "r/g2/0"]
    assert names(queue.take("w", 2, 1.0)) == ["r/g2/1"]
    assert queue.take("w", 10, 1.0) == ()
    assert queue.status("r").num_running == 7
    queue.check()


@pytest.mark.parametrize("num_samples", [1, 200, 1000])
def test_no_place_stays_empty_while_samples_wait(num_samples):
    outcome = simulate(2000, num_samples)
    assert outcome.used_share > 0.99


def test_the_other_rollouts_go_on_beside_a_large_group():
    queue = queue_of(100)
    queue.reserve("s", [group("g", 1)], RolloutTerms(owner="other"))
    queue.add("s", 0.0)
    assert "s/g/0" in names(queue.take("w", 4, 0.0))


def test_time_in_the_queue_is_told():
    queue = queue_of(1)
    assert queue.take("w", 1, 2.5)[0].queued_s == 2.5


def test_the_bound_counts_reservations():
    queue = PlacingQueue(max_queued=4)
    queue.reserve("a", [group(num_samples=3)])
    with pytest.raises(Overloaded):
        queue.reserve("b", [group(num_samples=2)])
    queue.unreserve("a")
    queue.reserve("b", [group(num_samples=4)])
    queue.add("b", 0.0)
    with pytest.raises(Overloaded):
        queue.reserve("c", [group(num_samples=1)])
    queue.take("w", 4, 0.0)
    queue.reserve("c", [group(num_samples=4)])  # running samples are not queued


@pytest.mark.parametrize(
    ("rollout_id", "groups", "error"),
    [
        ("r", [group()], Conflict),
        ("x", [], InvalidRequest),
        ("x", [group(), group()], InvalidRequest),
        ("x", [group(num_samples=0)], InvalidRequest),
        ("x/y", [group()], InvalidRequest),
        ("", [group()], InvalidRequest),
    ],
)
def test_bad_submissions_change_nothing(rollout_id, groups, error):
    queue = queue_of(1)
    with pytest.raises(error):
        queue.reserve(rollout_id, groups)
    assert queue.num_queued == 1
    queue.check()


def test_rollouts_may_use_the_same_group_ids():
    queue = queue_of(1)
    queue.reserve("s", [group("g0", 1)])
    queue.add("s", 0.0)
    assert names(queue.take("w", 2, 0.0)) == ["r/g0/0", "s/g0/0"]


def test_finished_once():
    queue = queue_of(2)
    queue.take("w", 2, 0.0)
    assert queue.finished("r/g0/0")
    assert not queue.finished("r/g0/0")
    assert not queue.finished("r/nobody/0")
    assert queue.status("r").num_finished == 1
    assert queue.finished("r/g0/1")
    assert queue.status("r") is None
    assert [status.is_done for status in queue.rollouts] == [True]


def test_cancel_drops_what_is_queued_and_names_what_runs():
    queue = queue_of(2, 2)
    queue.take("w", 2, 0.0)
    cancellation = queue.cancel("r")
    assert cancellation.dropped == ("r/g1/0", "r/g1/1")
    assert cancellation.running == ("r/g0/0", "r/g0/1")
    assert [(owed.sample.assignment_id, owed.stop_reason) for owed in queue.pending_records(0.0)] == [
        ("r/g1/0", StopReason.CANCELLED),
        ("r/g1/1", StopReason.CANCELLED),
    ]
    assert queue.take("v", 4, 0.0) == ()
    assert queue.has_new_cancels("w")
    assert queue.cancels("w") == ("r/g0/0", "r/g0/1")
    queue.cancels_told("w", queue.cancels("w"))
    assert not queue.has_new_cancels("w")
    assert queue.cancels("w")  # repeated with every answer, in case one was lost
    queue.check()
    for name in ("r/g1/0", "r/g1/1", "r/g0/0", "r/g0/1"):
        assert queue.finished(name)
    assert queue.pending_records(0.0) == ()
    assert queue.cancel("r").dropped == ()


def test_a_lost_workers_samples_are_tried_first_and_apart():
    queue = queue_of(2, 1, max_attempts=3)
    queue.take("w", 2, 0.0)
    assert queue.worker_lost("w", 10.0) == ("r/g0/0", "r/g0/1")
    again = queue.take("v", 3, 10.0)
    assert [(h.assignment_id, h.attempt) for h in again] == [("r/g0/0", 1), ("r/g0/1", 1)]
    assert queue.take("v", 1, 20.0) == ()  # a task may kill its worker again if it was the cause
    assert names(queue.take("v", 1, 20.1)) == ["r/g1/0"]
    assert queue.worker_lost("unknown", 40.0) == ()
    queue.check()


def test_suspects_are_tried_in_shares_of_those_that_shared_the_death():
    queue = queue_of(100)
    assert len(queue.take("w", 64, 0.0)) == 64
    queue.worker_lost("w", 50.0)
    assert len(queue.take("v", 64, 50.0)) == 4
    assert len(queue.take("u", 64, 50.0)) == 4
    queue.worker_lost("v", 60.0)
    assert [sample.num_deaths for sample in queue.take("v2", 64, 60.0)] == [2]
    assert len(queue.take("u", 60, 101.0)) == 1  # its four tasks survived: the next smallest group of suspects
    assert queue.take("u", 59, 101.0) == ()
    assert len(queue.take("t", 64, 101.0)) == 1
    queue.check()


def test_a_suspect_that_finds_no_worker_for_itself_is_tried_beside_other_work():
    queue = queue_of(1, 1, 1, 1)
    queue.take("w", 1, 0.0)
    queue.take("v", 1, 0.0)
    queue.worker_lost("w", 10.0)
    assert names(queue.take("v", 1, 10.0)) == ["r/g2/0"]
    queue.finished("r/g2/0")
    assert names(queue.take("v", 2, 70.0)) == ["r/g0/0", "r/g3/0"]
    queue.check()


def test_a_trial_of_hours_lets_other_work_begin():
    queue = queue_of(1, 1)
    queue.take("w", 1, 0.0)
    queue.worker_lost("w", 36_000.0)
    assert names(queue.take("v", 1, 36_000.0)) == ["r/g0/0"]
    assert queue.take("v", 1, 36_300.0) == ()
    assert names(queue.take("v", 1, 36_301.0)) == ["r/g1/0"]


@pytest.mark.parametrize(("num_workers", "num_poisons"), [(1, 1), (4, 3)])
def test_a_poison_task_costs_itself_and_few_others(num_workers, num_poisons):
    outcome = simulate(1024, 1, num_workers, num_poisons)
    assert (outcome.num_innocents_failed, outcome.num_poisons_failed) == (0, num_poisons)
    assert outcome.num_thrown_away <= num_poisons * (256 + 48)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_poison_task_kills_three_workers_however_late_their_deaths_are_noticed(num_workers, seed):
    """B5: deaths were dated by their detection, so tasks seemed to survive; a task killed up to 28 workers."""
    outcome = simulate(1024, 1, num_workers, 1, seed, noticed_s=LATE_S)
    assert list(outcome.kills.values()) == [3]
    assert (outcome.num_innocents_failed, outcome.num_poisons_failed) == (0, 1)


def test_those_that_shared_a_death_are_cleared_when_it_happens_again_without_them():
    queue = queue_of(100)
    queue.take("w", 64, 0.0)
    queue.worker_lost("w", 50.0)
    tried = names(queue.take("v", 64, 50.0))
    assert len(tried) == 4
    queue.worker_lost("v", 60.0)
    assert names(queue.take("u", 64, 60.0)) == tried[:1]
    rest = queue.take("t", 64, 60.0)
    assert [sample.num_deaths for sample in rest] == [2]
    assert queue.take("t", 63, 70.0) == ()
    others = queue.take("t", 63, 70.1)  # the third of the four, alone
    assert [sample.num_deaths for sample in others] == [2]
    queue.finished(rest[0].assignment_id)
    queue.finished(others[0].assignment_id)
    assert [sample.num_deaths for sample in queue.take("s", 64, 71.0)] == [2]
    free = queue.take("r", 96, 71.0)
    assert len(free) == 96
    assert not any(sample.num_deaths for sample in free)
    queue.check()


def test_a_worker_heard_again_has_its_work_back_without_a_mark():
    queue = queue_of(1)
    for number in range(5):
        queue.take("w", 1, 100.0 * number)
        queue.worker_lost("w", 100.0 * number + 30.0)
        queue.report("w", ["r/g0/0"], 100.0 * number + 35.0)
        assert queue.is_running_at("w", "r/g0/0")
    assert queue.pending_records(500.0) == ()
    queue.check()


# Priorities, shares and limits


def queue_with(**rollouts):
    queue = PlacingQueue()
    for rollout_id, (num_samples, terms) in rollouts.items():
        queue.reserve(rollout_id, [group("g", num_samples, rollout_id)], terms)
        queue.add(rollout_id, 0.0)
    return queue


def counts(samples):
    return Counter(name.partition("/")[0] for name in names(samples))


def test_an_evaluation_overtakes_training():
    queue = queue_with(train=(100, RolloutTerms()), evaluation=(10, RolloutTerms(priority=1)))
    assert counts(queue.take("w", 16, 0.0)) == {"evaluation": 10, "train": 6}
    assert {status.rollout_id: status.priority for status in queue.rollouts} == {"train": 0, "evaluation": 1}
    queue.check()


def test_users_share_however_many_runs_each_has():
    runs = {f"a{index}": (100, RolloutTerms("alice", run_id=f"run-{index}", share=9)) for index in range(5)}
    queue = queue_with(**runs, b=(100, RolloutTerms("bob")))
    found = counts(queue.take("w", 40, 0.0))
    assert found["b"] == 20
    assert [found[f"a{index}"] for index in range(5)] == [4] * 5
    queue.check()


def test_a_users_share_and_its_live_trajectories_are_its_limits():
    users = UserTurns()
    names = {"alice": "alice", "digest": "alice", "bob": "bob"}
    users.table = UserTable(names, {"alice": UserLimits(share=3.0), "bob": UserLimits(live_trajectories=6)})
    queue = PlacingQueue(users=users)
    for rollout_id, owner in {"a": "alice", "old": "digest", "b": "bob"}.items():
        queue.reserve(rollout_id, [group("g", 100, rollout_id)], RolloutTerms(owner))
        queue.add(rollout_id, 0.0)
    found = counts(queue.take("w", 16, 0.0))
    assert (found["b"], found["a"] + found["old"]) == (4, 12)
    assert found["a"] == found["old"]  # they belong to one user, under both names in the store
    assert counts(queue.take("w", 40, 0.0))["b"] == 2
    assert queue.by_user()[0]["bob"] == 6
    queue.finished("b/g/0")
    assert counts(queue.take("w", 4, 0.0))["b"] == 1
    queue.check()


def test_runs_share_by_weight_whoever_came_first():
    queue = queue_with(a=(1000, RolloutTerms(run_id="a", share=3)), b=(1000, RolloutTerms(run_id="b")))
    assert counts(queue.take("w", 400, 0.0)) == {"a": 300, "b": 100}
    queue.reserve("c", [group("g", 1000, "c")], RolloutTerms(owner="c", share=4))
    queue.add("c", 0.0)
    found = counts(queue.take("w", 400, 0.0))  # missed slots are not compensated
    assert [found[name] for name in "abc"] == pytest.approx([150, 50, 200], abs=1)


def test_submits_of_one_run_go_out_in_their_order():
    terms = RolloutTerms(run_id="run", share=2)
    queue = queue_with(a=(4, terms), b=(4, terms), other=(4, RolloutTerms(run_id="other")))
    assert counts(queue.take("w", 6, 0.0)) == {"a": 4, "other": 2}


def test_no_more_than_max_running_are_live():
    queue = queue_with(
        a=(9, RolloutTerms(max_running=2)), b=(9, RolloutTerms(max_running=2)), c=(1, RolloutTerms())
    )
    assert counts(queue.take("w", 16, 0.0)) == {"a": 2, "b": 2, "c": 1}
    assert queue.take("v", 16, 0.0) == ()
    queue.finished("b/g/0")
    assert counts(queue.take("v", 16, 0.0)) == {"b": 1}
    queue.worker_lost("w", 0.0)
    assert sum(counts(queue.take("u", 16, 0.0)).values()) <= 4
    queue.check()


def test_tasks_are_bounded_in_bytes():
    queue = PlacingQueue(max_queued_bytes=3000)
    large = replace(group("g", 4), task=RolloutTask("t", (Message("user", "x" * 2000),)))
    queue.reserve("a", [large])
    with pytest.raises(Overloaded):
        queue.reserve("b", [large])
    queue.add("a", 0.0)
    queue.take("w", 4, 0.0)  # running samples use memory too
    with pytest.raises(Overloaded):
        queue.reserve("b", [large])
    for index in range(4):
        queue.finished(f"a/g/{index}")
    queue.reserve("b", [replace(large, task=RolloutTask("t", (Message("user", "x" * 9000),)))])  # it runs alone


def test_out_of_attempts_is_a_failure_of_the_loop():
    queue = queue_of(1, max_attempts=2)
    for worker in ("w", "v"):
        queue.take(worker, 1, 0.0)
        queue.worker_lost(worker, 0.0)
    (owed,) = queue.pending_records(0.0)
    assert owed.stop_reason is StopReason.LOOP_FAILED
    assert owed.sample.attempt == 2
    assert queue.take("u", 1, 0.0) == ()
    queue.check()


def test_a_lost_workers_cancelled_samples_are_not_run_again():
    queue = queue_of(1)
    queue.take("w", 1, 0.0)
    queue.cancel("r")
    queue.worker_lost("w", 0.0)
    assert [owed.stop_reason for owed in queue.pending_records(0.0)] == [StopReason.CANCELLED]


def test_a_restarted_queue_adopts_what_workers_run():
    queue = PlacingQueue()
    queue.restore("r", [(group("g", 4), (1, 3))], 0.0, num_finished=2)
    assert queue.status("r").num_finished == 2
    queue.report("w", ["r/g/1", "r/gone/0"], 0.0)
    assert queue.cancels("w") == ("r/gone/0",)
    assert names(queue.take("v", 4, 0.0)) == ["r/g/3"]
    queue.check()
    assert queue.finished("r/g/1")
    assert queue.finished("r/g/3")
    assert queue.rollouts[-1].num_finished == 4


def test_a_sample_whose_handing_out_was_lost_is_queued_again():
    queue = queue_of(1, missing_after_s=10.0)
    queue.take("w", 1, 0.0)
    assert queue.report("w", [], 1.0) == ()
    assert queue.report("w", ["r/g0/0"], 5.0) == ()  # the report was only late
    assert queue.report("w", [], 6.0) == ()
    assert queue.report("w", [], 15.0) == ()
    assert queue.report("w", [], 16.0) == ("r/g0/0",)
    assert queue.take("v", 1, 16.0)[0].attempt == 1
    queue.check()


def test_a_worker_that_returns_from_the_dead_loses_what_others_run():
    queue = queue_of(1, 1)
    queue.take("w", 2, 0.0)
    queue.worker_lost("w", 0.0)
    queue.take("v", 1, 0.0)
    queue.report("w", ["r/g0/0", "r/g1/0"], 1.0)
    on_v = [name for name in ("r/g0/0", "r/g1/0") if queue.is_running_at("v", name)]
    assert len(on_v) == 1
    assert list(queue.cancels("w")) == on_v
    assert sum(queue.is_running_at("w", name) for name in ("r/g0/0", "r/g1/0")) == 1
    queue.check()


def test_silence_that_was_a_stall_costs_no_attempt():
    queue = queue_of(1, 1, max_attempts=2)
    queue.take("w", 1, 0.0)
    for _ in range(5):
        queue.worker_lost("w", 0.0)
        assert queue.report("w", ["r/g0/0"], 1.0) == ()
        assert queue.is_running_at("w", "r/g0/0")
        queue.check()
    queue.worker_lost("w", 0.0)
    (again,) = queue.take("v", 1, 2.0)
    assert (again.assignment_id, again.attempt) == ("r/g0/0", 1)


@pytest.mark.parametrize(("at_w", "at_v", "keeper"), [(40, 30, "w"), (40, 40, "v"), (0, 0, "v"), (40, 60, "v")])
def test_of_two_workers_the_one_with_more_tokens_keeps_a_sample(at_w, at_v, keeper):
    queue = queue_of(1, max_attempts=2)
    name = "r/g0/0"
    queue.take("w", 1, 0.0)
    queue.worker_lost("w", 0.0)
    queue.take("v", 1, 0.0)
    queue.report("v", [name], 1.0, [at_v])
    queue.report("w", [name], 1.0, [at_w])
    other = {"w": "v", "v": "w"}[keeper]
    assert queue.is_running_at(keeper, name)
    assert (queue.cancels(keeper), queue.cancels(other)) == ((), (name,))
    assert queue.has_new_cancels(other)
    queue.check()
    queue.worker_lost(keeper, 1.0)  # the stall does not count, so this is the first of two failures
    (again,) = queue.take("u", 1, 2.0)
    assert again.attempt == 2


def test_a_worker_heard_again_takes_back_what_was_given_up():
    queue = queue_of(1, max_attempts=1)
    queue.take("w", 1, 0.0)
    queue.worker_lost("w", 0.0)
    assert len(queue.pending_records(0.0)) == 1
    queue.report("w", ["r/g0/0"], 1.0)
    assert queue.pending_records(1.0) == ()
    assert queue.is_running_at("w", "r/g0/0")
    queue.check()


def test_a_death_that_several_share_is_the_end_of_none_of_them():
    queue = queue_of(2, max_attempts=1)
    queue.take("w", 2, 0.0)
    queue.worker_lost("w", 0.0)
    assert queue.pending_records(0.0) == ()
    assert queue.num_queued == 2
    queue.check()


def test_the_other_runner_of_a_finished_sample_is_told_to_stop():
    queue = queue_of(1)
    queue.take("w", 1, 0.0)
    queue.worker_lost("w", 0.0)
    queue.take("v", 1, 0.0)
    queue.finished("r/g0/0")  # finished by w after all
    assert queue.has_new_cancels("v")
    assert queue.cancels("v") == ("r/g0/0",)
    queue.report("v", [], 1.0)
    assert queue.cancels("v") == ()


def test_a_late_record_of_a_queued_sample_finishes_it():
    queue = queue_of(1)
    queue.take("w", 1, 0.0)
    queue.worker_lost("w", 0.0)
    assert queue.finished("r/g0/0")
    assert queue.take("v", 1, 0.0) == ()
    queue.check()


def test_give_back():
    queue = queue_of(1)
    queue.take("w", 1, 0.0)
    assert not queue.give_back("v", "r/g0/0")
    assert queue.give_back("w", "r/g0/0")
    assert queue.take("v", 1, 0.0)[0].attempt == 1


# Staleness


def limited(limit, *sizes, served=0, rollout_id="r", queue=None, **config):
    queue = queue or PlacingQueue(**config)
    queue.set_versions(FleetVersions(served), 0.0)
    queue.reserve(rollout_id, [group(f"g{i}", size, rollout_id, limit) for i, size in enumerate(sizes)])
    queue.add(rollout_id, now=0.0)
    queue.check()
    return queue


def test_no_more_is_begun_than_the_trainer_consumes_in_time():
    queue = limited(StalenessLimit(1, trajectories_per_version=2), 2, 2, 2, 2)
    assert len(queue.take("w", 100, 0.0)) == 4
    assert queue.take("w", 100, 0.0) == ()
    status = queue.status("r")
    assert (status.num_queued, status.num_held) == (4, 4)
    queue.set_versions(FleetVersions(1), 0.0)
    assert queue.status("r").num_held == 2
    assert names(queue.take("w", 100, 0.0)) == ["r/g2/0", "r/g2/1"]
    queue.finished("r/g0/0")  # finished samples remain counted
    assert queue.take("w", 100, 0.0) == ()
    queue.set_versions(FleetVersions(2), 0.0)
    assert len(queue.take("w", 100, 0.0)) == 2
    queue.check()


def test_what_fails_or_is_lost_or_dropped_gives_its_place_back():
    queue = limited(StalenessLimit(0, trajectories_per_version=2), 1, 1, 1, 1)
    assert names(queue.take("w", 9, 0.0)) == ["r/g0/0", "r/g1/0"]
    queue.finished("r/g0/0", is_trained=False)
    assert names(queue.take("w", 9, 0.0)) == ["r/g2/0"]
    queue.drop_stale("w", "r/g1/0", 0)
    assert [(h.assignment_id, h.attempt) for h in queue.take("w", 9, 0.0)] == [("r/g1/0", 1)]
    queue.worker_lost("w", 0.0)
    queue.check()
    assert len(queue.take("v", 9, 0.0)) == 2
    assert queue.take("v", 9, 0.0) == ()
    queue.check()


def test_a_late_record_of_a_queued_sample_takes_a_place():
    queue = limited(StalenessLimit(0, trajectories_per_version=1), 1, 1)
    queue.take("w", 1, 0.0)
    queue.worker_lost("w", 0.0)
    assert queue.finished("r/g0/0")
    assert queue.take("v", 1, 0.0) == ()
    queue.check()


def test_a_group_is_divided_where_its_run_admits_a_part():
    queue = limited(StalenessLimit(0, trajectories_per_version=3), 8)
    assert names(queue.take("w", 8, 0.0)) == ["r/g0/0", "r/g0/1", "r/g0/2"]
    queue.set_versions(FleetVersions(1), 0.0)
    assert names(queue.take("w", 2, 0.0)) == ["r/g0/3", "r/g0/4"]
    assert names(queue.take("v", 8, 0.0)) == ["r/g0/5"]
    queue.check()


def test_what_is_held_back_is_passed_by():
    queue = limited(StalenessLimit(0, trajectories_per_version=1), 2, 2)
    limited(None, 2, rollout_id="s", queue=queue)
    assert names(queue.take("w", 9, 0.0)) == ["r/g0/0", "s/g0/0", "s/g0/1"]
    assert [status.num_held for status in queue.rollouts] == [3, 0]
    queue.set_versions(FleetVersions(0, coming=1), 0.0)
    assert [status.num_held for status in queue.rollouts] == [3, 0]


def test_nothing_on_policy_is_begun_while_an_update_is_on_its_way():
    queue = limited(StalenessLimit(0), 2)
    queue.set_versions(FleetVersions(0, coming=1), 0.0)
    assert queue.take("w", 9, 0.0) == ()
    assert queue.status("r").num_held == 2
    queue.set_versions(FleetVersions(1), 0.0)
    assert len(queue.take("w", 9, 0.0)) == 2


def test_samples_that_wait_for_a_version_or_an_adapter_are_held():
    limit, demanded = StalenessLimit(1, trajectories_per_version=2), VersionDemand(min_version=6, wait_s=100.0)
    groups = [group(f"g{number}", 2, "r", limit) for number in range(3)]
    groups[:2] = [replace(one, task=replace(one.task, weight_version=demanded)) for one in groups[:2]]
    queue = PlacingQueue()
    for name, work, adapter in (("r", groups, ""), ("s", groups[:1], ""), ("a", [group("g", 3, "a")], "a")):
        work = [replace(one, rollout_id=name, staleness=limit if name == "r" else None) for one in work]
        queue.reserve(name, work, RolloutTerms(adapter=adapter))
        queue.add(name, now=10.0)

    def held(versions, now):
        queue.set_versions(versions, now)
        return [status.num_held for status in queue.rollouts]

    assert held(FleetVersions(), 10.0) == [2, 0, 3], (
        "the budget admits four, and which version is served is not known"
    )
    assert held(FleetVersions(5), 10.0) == [4, 2, 3]
    assert held(FleetVersions(5, adapters={"a": 1}), 10.0) == [4, 2, 0]
    assert held(FleetVersions(5), 110.0) == [2, 0, 3], "they have waited as long as they demand"
    assert held(FleetVersions(6), 10.0) == [2, 0, 3]
    assert (
        len(queue.take("w", 9, 110.0, lambda one: LEASE if one.rollout.rollout_id == "s" else NoPlace.LATER)) == 2
    )
    assert held(FleetVersions(5), 20.0) == [4, 0, 3], "what runs is not held"
    queue.check()


def test_a_cancelled_rollout_holds_nothing_back():
    queue = limited(StalenessLimit(0, trajectories_per_version=1), 3)
    queue.take("w", 1, 0.0)
    assert len(queue.cancel("r").dropped) == 2
    assert queue.status("r").num_held == 0
    for owed in queue.pending_records(0.0):
        queue.finished(owed.sample.assignment_id, is_trained=False)
    queue.check()


def test_rollouts_of_one_run_share_the_budget():
    limit = StalenessLimit(0, trajectories_per_version=3, run_id="run")
    queue = limited(limit, 2)
    limited(limit, 2, rollout_id="s", queue=queue)
    assert [status.num_held for status in queue.rollouts] == [0, 1]
    assert names(queue.take("w", 9, 0.0)) == ["r/g0/0", "r/g0/1", "s/g0/0"]
    for name in ("r/g0/0", "r/g0/1"):
        queue.finished(name)
    assert queue.take("w", 9, 0.0) == ()  # r is done; its used slots stay used
    with pytest.raises(InvalidRequest):
        limited(StalenessLimit(1, run_id="run"), 1, rollout_id="t", queue=queue)
    assert queue.finished("s/g0/0")
    queue.set_versions(FleetVersions(1), 0.0)
    assert names(queue.take("w", 9, 0.0)) == ["s/g0/1"]


def test_a_dropped_sample_is_begun_anew_until_its_attempts_are_used_up():
    queue = limited(StalenessLimit(0, OnStale.DROP), 1, max_attempts=2)
    queue.take("w", 1, 0.0)
    assert not queue.drop_stale("v", "r/g0/0", 0)  # it runs on another worker
    assert queue.drop_stale("w", "r/g0/0", 0)
    assert not queue.drop_stale("w", "r/g0/0", 0)  # repeated because its answer was lost
    (again,) = queue.take("w", 1, 0.0)
    assert (again.attempt, again.num_stale_attempts) == (1, 1)
    assert not queue.drop_stale("w", "r/g0/0", 0)  # repeated when the worker has it again
    assert queue.is_running_at("w", "r/g0/0")
    assert queue.drop_stale("w", "r/g0/0", 1)
    (owed,) = queue.pending_records(0.0)
    assert owed.stop_reason is StopReason.STALE
    assert (owed.sample.attempt, owed.sample.num_stale_attempts) == (2, 2)
    assert queue.take("w", 1, 0.0) == ()
    queue.check()
    assert queue.finished("r/g0/0", is_trained=False)


def test_a_restored_queue_counts_what_was_finished():
    limit = StalenessLimit(1, trajectories_per_version=2)
    queue = PlacingQueue()
    queue.set_versions(FleetVersions(6), 0.0)
    queue.restore("r", [(group("g", 12, "r", limit), tuple(range(4, 12)))], 0.0, 4, num_trained=3, first_version=5)
    queue.adopt("w", {"r/g/4": 0}, 0.0)
    assert len(queue.take("v", 9, 0.0)) == 2  # 3 of (1 + 1 + 1) * 2 are finished and 1 is running
    queue.check()


def test_what_is_adopted_before_the_fleets_version_is_known_counts_from_the_first_one_known():
    queue = PlacingQueue()
    queue.restore("r", [(group("g", 4, "r", StalenessLimit(0, trajectories_per_version=1)), (0, 1, 2, 3))], 0.0)
    queue.adopt("w", {"r/g/0": 0}, 0.0)
    queue.set_versions(FleetVersions(0), 0.0)
    assert queue.take("w", 9, 0.0) == ()
    queue.set_versions(FleetVersions(1), 0.0)
    assert len(queue.take("w", 9, 0.0)) == 1


class QueueMachine(RuleBasedStateMachine):
    """Every accepted sample ends exactly once, after any sequence of losses, delays, cancellations and restarts."""

    workers = st.sampled_from(["u", "v"])
    terms = st.sampled_from([RolloutTerms(), RolloutTerms(priority=1, max_running=2), RolloutTerms(run_id="run")])
    limits = st.sampled_from(
        [
            None,
            StalenessLimit(0, OnStale.DROP, 2),
            StalenessLimit(1, OnStale.MASK, 3, "run"),
            StalenessLimit(0, OnStale.FINISH),
        ]
    )

    def __init__(self):
        super().__init__()
        self.queue = PlacingQueue(max_queued=40, max_attempts=3, missing_after_s=2.0)
        self.now = 0.0
        self.num_rollouts = 0
        self.accepted = {}  # name -> group, never forgotten
        self.finished = set()
        self.complete = Counter()  # durable complete records, by rollout and group
        self.at_worker = {"u": set(), "v": set()}  # the names that each worker believes it runs
        self.num_sampled = {}  # (worker, name) -> tokens
        self.attempts = {}  # (worker, name) -> the assigned attempt
        self.served = 0
        self.is_stuck = False

    @rule(
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        limit=limits,
        terms=terms,
        keep=st.none() | st.integers(1, 3),
    )
    def submit(self, sizes, limit, terms, keep):
        rollout_id = f"r{self.num_rollouts}"
        kept = [None if keep is None else min(keep, size) for size in sizes]
        groups = [group(f"g{i}", size, rollout_id, limit, kept[i]) for i, size in enumerate(sizes)]
        try:
            self.queue.reserve(rollout_id, groups, terms)
        except Overloaded:
            assert self.queue.num_queued + sum(sizes) > 40
            return
        self.num_rollouts += 1
        self.queue.add(rollout_id, self.now)
        for one in groups:
            for index in range(one.num_samples):
                self.accepted[f"{rollout_id}/{one.group_id}/{index}"] = one

    @rule(worker=workers, num_free=st.integers(0, 6), is_answer_lost=st.booleans())
    def take(self, worker, num_free, is_answer_lost):
        num_sampled = [self.num_sampled.get((worker, name), 0) for name in self.at_worker[worker]]
        self.queue.report(worker, self.at_worker[worker], self.now, num_sampled)
        taken = self.queue.take(worker, num_free, self.now)
        handed = names(taken)
        assert len(handed) <= num_free
        assert not self.finished & set(handed)
        if not is_answer_lost:
            self.at_worker[worker] |= set(handed)
            self.attempts |= {(worker, sample.assignment_id): sample.attempt for sample in taken}

    @rule(worker=workers, data=st.data(), num_tokens=st.integers(1, 3))
    def sample(self, worker, data, num_tokens):
        if self.at_worker[worker]:
            at = worker, data.draw(st.sampled_from(sorted(self.at_worker[worker])))
            self.num_sampled[at] = self.num_sampled.get(at, 0) + num_tokens

    @rule(worker=workers, data=st.data(), is_complete=st.booleans(), is_disk_full=st.booleans())
    def finish(self, worker, data, is_complete, is_disk_full):
        if self.at_worker[worker]:
            name = data.draw(st.sampled_from(sorted(self.at_worker[worker])))
            self.end(name, is_complete, is_disk_full)
            if not is_disk_full:
                self.at_worker[worker].discard(name)

    def end(self, name, is_complete=True, is_disk_full=False):
        """Submit a record as the coordinator does."""
        is_complete = is_complete and self.queue.take_keep_place(name)
        if is_disk_full:
            self.queue.give_back_keep_place(name)
            return
        is_new = name not in self.finished
        assert self.queue.finished(name, is_kept=is_complete) == is_new
        self.finished.add(name)
        self.complete[name.rpartition("/")[0]] += is_complete and is_new

    @rule(worker=workers, data=st.data(), is_repeated=st.booleans())
    def drop(self, worker, data, is_repeated):
        if self.at_worker[worker]:
            name = data.draw(st.sampled_from(sorted(self.at_worker[worker])))
            self.at_worker[worker].discard(name)
            for _ in range(1 + is_repeated):
                self.queue.drop_stale(worker, name, self.attempts.get((worker, name), 0))

    @rule(is_coming=st.booleans())
    def update(self, is_coming):
        self.served += 1
        self.queue.set_versions(FleetVersions(self.served, self.served + 1 if is_coming else None), self.now)

    @rule(worker=workers)
    def obey(self, worker):
        told = set(self.queue.cancels(worker))
        self.queue.cancels_told(worker, told)
        for name in told & self.at_worker[worker]:
            self.at_worker[worker].discard(name)
            if self.queue.is_running_at(worker, name) and self.queue.is_cancelled(name):
                assert self.queue.finished(name)
                self.finished.add(name)

    @rule(worker=workers, is_dead=st.booleans())
    def lose_worker(self, worker, is_dead):
        self.queue.worker_lost(worker, self.now)
        if is_dead:
            self.at_worker[worker].clear()

    @rule(number=st.integers(0, 5))
    def cancel(self, number):
        self.queue.cancel(f"r{number}")

    @rule()
    def flush_pending(self):
        for owed in self.queue.pending_records(self.now):
            assert self.queue.finished(owed.sample.assignment_id)
            assert owed.sample.assignment_id not in self.finished
            self.finished.add(owed.sample.assignment_id)

    @rule()
    def pass_time(self):
        self.now += 1.5

    @rule()
    def restart(self):
        """Start a new coordinator that has only the durable state."""
        before, self.queue = self.queue, PlacingQueue(max_queued=40, max_attempts=3, missing_after_s=2.0)
        before.check()
        self.queue.set_versions(FleetVersions(self.served), self.now)
        rollouts = {name.partition("/")[0] for name in self.accepted}
        for rollout_id in sorted(rollouts):
            mine = {n: g for n, g in self.accepted.items() if n.startswith(f"{rollout_id}/")}
            missing = {}
            for name, one in mine.items():
                if name not in self.finished:
                    missing.setdefault(one.group_id, (one, []))[1].append(int(name.rpartition("/")[2]))
            if missing:
                work = [(one, tuple(indexes)) for one, indexes in missing.values()]
                num_complete = {one.group_id: self.complete[f"{rollout_id}/{one.group_id}"] for one, _ in work}
                num_finished = len(mine.keys() & self.finished)
                self.queue.restore(rollout_id, work, self.now, num_finished, num_complete=num_complete)

    @invariant()
    def exactly_once(self):
        self.queue.check()
        for status in self.queue.rollouts:
            assert 0 <= status.num_held <= status.num_queued
        live = {name for name in self.accepted if self.queue.is_live(name)}
        assert live == self.accepted.keys() - self.finished
        for name, one in self.accepted.items():
            assert one.keep is None or self.complete[name.rpartition("/")[0]] <= one.keep

    def teardown(self):
        """Finish all work from any state."""
        for worker in self.at_worker:
            self.queue.worker_lost(worker, self.now)
        # Samples that start before the fleet's version is known count from the first known one, so set it first.
        self.queue.set_versions(FleetVersions(self.served), self.now)
        while self.queue.num_queued:
            handed = self.queue.take("last", 100, self.now)
            for name in names(handed):
                self.end(name)
            assert handed or not self.is_stuck, "no version lets anything go"
            self.is_stuck = not handed
            self.served += 1  # the trainer has consumed its batch
            self.queue.set_versions(FleetVersions(self.served), self.now)
        self.flush_pending()
        assert self.finished == self.accepted.keys()


QueueMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestQueueMachine = QueueMachine.TestCase


def test_tokens_of_lost_workers_are_told_to_the_next():
    queue = queue_of(1)
    queue.take("w", 1, 0.0)
    queue.report("w", ["r/g0/0"], 1.0, [70])
    queue.worker_left("w")
    (sample,) = queue.take("v", 1, 2.0)
    assert (dict(sample.lost_tokens), sample.num_sampled_before) == ({"kill": 70}, 70)
    queue.report("v", ["r/g0/0"], 3.0, [5])
    assert queue.drop_stale("v", "r/g0/0", 1, {"kill": 70, "stale": 5})
    (sample,) = queue.take("v", 1, 4.0)
    assert (dict(+sample.lost_tokens), sample.num_sampled_before) == ({"kill": 70, "stale": 5}, 0)
