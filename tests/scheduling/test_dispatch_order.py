"""The order within a queue, admission, and the bound on waiting. Shares and priorities: `test_rollout_queue.py`."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.api.coordinator import RolloutTerms, group_key
from agentloop.scheduling.samples import NoPlace
from agentloop.types import Message, RolloutGroup, RolloutTask
from tests.support.fleet.placing_queue import LEASE, PlacingQueue


def group(group_id, num_samples=2, rollout_id="r"):
    return RolloutGroup(group_id, RolloutTask(group_id, (Message("user", "hi"),)), num_samples, rollout_id)


def submit(queue, rollout_id, *groups, **terms):
    queue.reserve(
        rollout_id, [group(name, size, rollout_id) for name, size in groups], RolloutTerms(run_id="run", **terms)
    )
    queue.add(rollout_id, 0.0)


def take(queue, num, try_to_place=lambda _: LEASE, worker="w"):
    taken = [sample.assignment_id for sample in queue.take(worker, num, 1.0, try_to_place)]
    queue.check()
    return taken


def groups_of(names):
    return [name.split("/")[1] for name in names]


def test_of_groups_that_have_begun_the_one_with_the_fewest_left_goes_first():
    queue = PlacingQueue()
    work = [(group("many", 4), (1, 2, 3)), (group("whole", 1), (0,)), (group("few", 4), (2,))]
    queue.restore("r", work, 0.0, num_finished=4)
    assert groups_of(take(queue, 9)) == ["few", "many", "many", "many", "whole"]


def test_groups_of_which_workers_still_run_samples_after_a_restart_go_first():
    queue = PlacingQueue()
    queue.restore("r", [(group("old", 2), (0, 1)), (group("new", 2), (0, 1))], 0.0)
    queue.report("v", ["r/new/0"], 0.0)
    assert groups_of(take(queue, 9)) == ["new", "old", "old"]


def test_what_a_worker_had_before_goes_first():
    queue = PlacingQueue()
    submit(queue, "r", ("a", 2), ("b", 1))
    take(queue, 3)
    queue.give_back("w", "r/b/0")
    submit(queue, "s", ("c", 1))
    assert take(queue, 9) == ["r/b/0", "s/c/0"]


def test_nothing_overtakes_what_has_no_room():
    queue = PlacingQueue()
    submit(queue, "low", ("g", 2), priority=0)
    submit(queue, "high", ("g", 2), priority=1)
    asked = []

    def try_to_place(sample):
        asked.append(sample.assignment_id)
        return NoPlace.FULL

    assert take(queue, 9, try_to_place) == []
    assert asked == ["high/g/0"]
    assert take(queue, 9) == ["high/g/0", "high/g/1", "low/g/0", "low/g/1"]


def test_a_group_that_waits_for_its_own_sake_is_passed_by_and_keeps_its_turn():
    queue = PlacingQueue()
    submit(queue, "r", ("a", 2), ("b", 2), ("c", 1))
    submit(queue, "low", ("z", 1), priority=-1)
    began: Counter[str] = Counter()

    def try_to_place(sample):
        key = group_key(sample.assignment_id)
        if began[key]:
            return NoPlace.LATER  # queued after the leader of its group
        began[key] += 1
        return LEASE

    assert take(queue, 9, try_to_place) == ["r/a/0", "r/b/0", "r/c/0", "low/z/0"]
    assert take(queue, 9) == ["r/a/1", "r/b/1"]


def test_suspects_wait_for_room_too():
    queue = PlacingQueue()
    submit(queue, "r", ("a", 1))
    take(queue, 1)
    queue.worker_lost("w", 1.0)
    assert take(queue, 1, lambda _: NoPlace.FULL, "v") == []
    assert take(queue, 1, worker="v") == ["r/a/0"]


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=60),
    laters=st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_nobody_starves_whatever_comes_after_them(arrivals, laters):
    """A sample with n others before it in its queue waits for at most n + 1 free slots."""
    queue = PlacingQueue(max_queued=10_000)
    num_places = 0
    waiting: dict[str, int] = {}  # the slot number by which it must have started

    def place():
        nonlocal num_places
        (name,) = take(queue, 1)
        num_places += 1
        assert num_places <= waiting.pop(name), name

    for index, (gap, size) in enumerate(arrivals):
        rollout_id = f"r{index}"
        bound = num_places + len(waiting) + size
        submit(queue, rollout_id, ("g", size))
        waiting |= {f"{rollout_id}/g/{sample}": bound for sample in range(size)}
        for _ in range(gap if laters[index % len(laters)] else 1):
            if waiting:
                place()
    while waiting:
        place()
    assert queue.num_queued == 0
