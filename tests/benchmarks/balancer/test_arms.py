"""Each arm's rule, by choices worked out by hand; every arm through a run with updates, a loss and an addition."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.balancer.arms.catalog import default_arms, grid_arms
from tests.benchmarks.balancer.arms.oracles import KnownPrograms, LongestFirst, StickyGroups
from tests.benchmarks.balancer.arms.prefix_tree import PrefixTree, RadixTree, Texts
from tests.benchmarks.balancer.arms.programs import Programs
from tests.benchmarks.balancer.arms.scored import WeightedScores
from tests.benchmarks.balancer.arms.spread import Counting, LeastInFlight, Random, RoundRobin
from tests.benchmarks.balancer.arms.sticky import ConsistentHash, StickyInFlight, StickySessions
from tests.benchmarks.balancer.policy import Arm, FleetShape, KVChange, Policy, TurnAsk, TurnEnd
from tests.benchmarks.balancer.simulate import Disturbance, run
from tests.benchmarks.balancer.step_curves import StepTimes
from tests.benchmarks.balancer.workload import Trajectory, Workload, WorkloadParameters, generate

BLOCK = 16
TIMES = StepTimes(0.01, 1e-5, 0.0, 0.01, 1e-5, 1e-8)


def fleet(num_replicas: int, capacity_blocks: int = 1000) -> FleetShape:
    return FleetShape(num_replicas, capacity_blocks, BLOCK, TIMES)


def ask(trajectory: int, names: Iterable[int] = (1,), group: int = 0, turn: int = 0) -> TurnAsk:
    """A turn whose prompt is the named blocks and a token."""
    hashes = array("Q", names)
    return TurnAsk(trajectory, group, 0, turn, len(hashes) * BLOCK + 1, hashes, None)


def begin(policy: Policy, turn: TurnAsk, replica: int | None = None) -> int:
    """Place a turn, or put it on a replica, and begin it."""
    chosen = policy.place(turn, 0.0) if replica is None else replica
    assert chosen is not None
    policy.began(turn, chosen, 0.0)
    return chosen


def end(policy: Policy, turn: TurnAsk, replica: int) -> None:
    policy.ended(turn, TurnEnd(replica, 0, 1, turn.num_prompt_tokens + 1, "read"), 0.0)


# --- spread ---


def test_round_robin_goes_round_over_the_replicas_that_live() -> None:
    policy = RoundRobin(fleet(3), 0)
    assert [begin(policy, ask(number)) for number in range(4)] == [0, 1, 2, 0]
    policy.replica_lost(1, 0.0)
    policy.replica_added(3, 0.0)
    assert [begin(policy, ask(number)) for number in range(4, 8)] == [2, 3, 0, 2]


def test_random_reaches_all_that_live_and_nothing_else() -> None:
    policy = Random(fleet(4), 0)
    policy.replica_lost(2, 0.0)
    assert {policy.place(ask(number), 0.0) for number in range(100)} == {0, 1, 3}


def test_least_in_flight_counts_turns_from_their_begin_to_their_end() -> None:
    policy = LeastInFlight(fleet(3), 0)
    turns = [ask(number) for number in range(4)]
    for turn, replica in zip(turns, (0, 0, 1, 2), strict=True):
        begin(policy, turn, replica)
    end(policy, turns[3], 2)
    assert policy.place(ask(9), 0.0) == 2
    end(policy, turns[0], 0)
    end(policy, turns[1], 0)
    assert {policy.place(ask(9), 0.0) for _ in range(50)} == {0, 2}
    policy.replica_lost(0, 0.0)
    policy.replica_lost(2, 0.0)
    assert policy.place(ask(9), 0.0) == 1


def test_a_turn_of_a_lost_replica_is_counted_where_it_is_asked_anew() -> None:
    policy = LeastInFlight(fleet(2), 0)
    turn = ask(0)
    begin(policy, turn, 0)
    policy.replica_lost(0, 0.0)
    begin(policy, turn, 1)
    end(policy, turn, 1)
    assert policy.in_flight == {1: 0}


# --- sticky ---


def test_a_loss_moves_only_the_trajectories_of_the_lost_part_of_the_ring() -> None:
    policy = ConsistentHash(fleet(8), 0)
    before = [policy.place(ask(number), 0.0) for number in range(400)]
    assert max(Counter(before).values()) < 2 * 400 / 8
    policy.replica_lost(3, 0.0)
    after = [policy.place(ask(number), 0.0) for number in range(400)]
    assert 3 not in after
    assert [new for old, new in zip(before, after, strict=True) if old != 3] == [old for old in before if old != 3]
    policy.replica_added(8, 0.0)
    moved = [number for number in range(400) if policy.place(ask(number), 0.0) != after[number]]
    assert all(policy.place(ask(number), 0.0) == 8 for number in moved)
    assert moved


def test_verls_rule_stays_and_counts_what_is_in_flight() -> None:
    policy = StickyInFlight(fleet(2), 0)
    first = begin(policy, ask(0))
    assert begin(policy, ask(1)) == 1 - first
    end(policy, ask(1), 1 - first)
    begin(policy, ask(2))  # trajectory 1 waits for its tool: its replica looks idle
    assert policy.in_flight == {first: 1, 1 - first: 1}
    assert policy.place(ask(0, turn=1), 0.0) == first
    policy.replica_lost(first, 0.0)
    assert policy.place(ask(0, turn=1), 0.0) == 1 - first


def test_verls_rule_forgets_the_oldest_of_more_than_ten_thousand() -> None:
    policy = StickyInFlight(fleet(2), 0)
    home = begin(policy, ask(0))
    for number in range(1, 10_001):
        policy.place(ask(number), 0.0)
    assert policy.place(ask(0, turn=1), 0.0) == 1 - home  # where nothing is in flight


def test_sessions_count_until_their_trajectory_is_finished() -> None:
    policy = StickySessions(fleet(2), 0)
    first = begin(policy, ask(0))
    end(policy, ask(0), first)
    assert begin(policy, ask(1)) == 1 - first  # trajectory 0 still counts
    policy.finished(0, 0.0)
    assert begin(policy, ask(2)) == first
    assert policy.num_sessions == {0: 1, 1: 1}
    policy.replica_lost(first, 0.0)
    assert begin(policy, ask(2, turn=1)) == 1 - first
    assert policy.num_sessions == {1 - first: 2}


def test_ties_of_sessions_depend_on_the_session_alone() -> None:
    chosen = {number: StickySessions(fleet(4), 7).place(ask(number), 0.0) for number in range(40)}
    assert chosen == {number: StickySessions(fleet(4), 7).place(ask(number), 0.0) for number in reversed(range(40))}
    assert set(chosen.values()) == {0, 1, 2, 3}


# --- prefix tree ---

texts = st.lists(st.integers(0, 2), max_size=6)


def chained(symbols: Sequence[int]) -> array[int]:
    """Name each block by all symbols up to it."""
    names, name = array("Q"), 1
    for symbol in symbols:
        name = name * 3 + symbol
        names.append(name)
    return names


@given(st.lists(st.tuples(texts, st.integers(0, 2)), max_size=12), texts)
def test_the_tree_matches_the_longest_prefix_that_anyone_was_sent(
    sent: list[tuple[list[int], int]], asked: list[int]
) -> None:
    tree = RadixTree()
    prefixes: dict[tuple[int, ...], set[int]] = {}
    for symbols, tenant in sent:
        tree.insert(chained(symbols), tenant, 0.0)
        for length in range(len(symbols) + 1):
            prefixes.setdefault(tuple(symbols[:length]), set()).add(tenant)
    for tenant in range(3):
        assert tree.sizes[tenant] == sum(tenant in tenants for prefix, tenants in prefixes.items() if prefix)
    num_matched, tenant = tree.match(chained(asked), 1.0)
    assert num_matched == max((len(p) for p in prefixes if tuple(asked[: len(p)]) == p), default=0)
    if sent:
        assert tenant in prefixes[tuple(asked[:num_matched])]
    for gone in range(3):
        tree.remove_tenant(gone)
    assert tree.match(chained(asked), 2.0) == (0, None)


def test_the_tree_evicts_the_leaves_used_least_recently_of_tenants_that_have_too_much() -> None:
    tree = RadixTree()
    tree.insert(chained([0, 0, 0]), 0, 1.0)
    tree.insert(chained([0, 1, 1]), 0, 2.0)
    tree.insert(chained([0, 0, 0]), 1, 0.0)
    tree.match(chained([0, 0, 0]), 3.0)
    tree.evict(3)
    assert tree.sizes == {0: 3, 1: 3}
    assert tree.match(chained([0, 1, 1]), 4.0) == (1, 0)
    tree.evict(0)
    assert tree.sizes == {0: 0, 1: 0}


def test_a_match_above_the_threshold_goes_to_its_worker_and_any_other_to_the_smallest_tree() -> None:
    policy = PrefixTree(fleet(3), 0, threshold=0.5)
    assert begin(policy, ask(0, chained([0] * 10))) == 0
    assert begin(policy, ask(1, chained([0] * 6 + [1] * 4), group=1)) == 0  # 0.6 of it match
    assert begin(policy, ask(2, chained([0] * 5 + [2] * 5), group=2)) == 1  # 0.5 are not more than 0.5
    assert begin(policy, ask(3, chained([1] * 3), group=3)) == 2
    assert begin(policy, ask(4, chained([2] * 3), group=4)) == 2  # 3 blocks there, 14 and 10 elsewhere


def test_a_miss_can_go_to_the_shortest_queue() -> None:
    policy = PrefixTree(fleet(2), 0, misses_to_least=True)
    begin(policy, ask(0, chained([0] * 10)), 0)
    assert begin(policy, ask(1, chained([1] * 2), group=1)) == 1
    end(policy, ask(0), 0)
    assert policy.place(ask(2, chained([2] * 2), group=2), 0.0) == 0


def test_an_imbalance_by_both_bounds_goes_to_the_shortest_queue_whatever_matches() -> None:
    policy = PrefixTree(fleet(2), 0, absolute=4, relative=1.5)
    turns = [ask(number, chained([0] * 4)) for number in range(16)]
    assert [begin(policy, turn) for turn in turns[:5]] == [0] * 5  # 5 to 0 comes with the fifth
    assert begin(policy, turns[5]) == 1
    for turn in turns[6:11]:
        begin(policy, turn, 1)
    for turn in turns[11:16]:
        begin(policy, turn, 0)
    assert policy.in_flight == {0: 10, 1: 6}  # more than 1.5 times, but by no more than 4
    assert policy.place(ask(20, chained([0] * 4)), 0.0) == 0


def test_text_stays_the_same_when_an_update_renames_blocks() -> None:
    known = Texts()
    old = ask(0, [1, 2, 3, 4], group=5)
    assert known.of(old, BLOCK) == array("Q", [1, 2, 3, 4])
    renamed = ask(0, [11, 12, 13, 14, 15], group=5, turn=1)
    assert known.of(renamed, BLOCK) == array("Q", [1, 2, 3, 4, 15])
    sibling = ask(1, [11, 12, 13, 14], group=5)
    assert known.of(sibling, BLOCK) == array("Q", [1, 2, 3, 4])
    of_other_group = ask(2, [11, 12, 20], group=6)  # the same system prompt
    assert known.of(of_other_group, BLOCK) == array("Q", [1, 2, 20])


# --- weighted scores ---


def test_scores_are_the_weighted_sum_of_match_free_kv_and_short_queue() -> None:
    policy = WeightedScores(fleet(3, capacity_blocks=100), 0)
    policy.kv_changed(0, KVChange(stored=array("Q", [1, 2, 3, 4])), 0.0)
    policy.kv_changed(1, KVChange(stored=array("Q", [1])), 0.0)
    waiting = [ask(number, range(100, 150)) for number in range(3)]
    for turn, replica in zip(waiting, (0, 0, 1), strict=True):
        begin(policy, turn, replica)
    policy.prefilled(waiting[2], 1, 0.0)
    used = waiting[0].num_prompt_tokens / (100 * BLOCK)
    scores = policy.scores(ask(9, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert scores[0] == pytest.approx(3 * 4 / 8 + 0 + 0)
    assert scores[1] == pytest.approx(3 * 1 / 8 + 2 * (1 - used) + 2)
    assert scores[2] == pytest.approx(0 + 2 + 2)
    assert policy.place(ask(9, [1, 2, 3, 4, 5, 6, 7, 8]), 0.0) == 2


def test_scores_forget_what_engines_evicted_cleared_or_lost() -> None:
    policy = WeightedScores(fleet(2), 0, kv=0.0, queue=0.0)
    policy.kv_changed(0, KVChange(stored=array("Q", [1, 2, 3])), 0.0)
    policy.kv_changed(1, KVChange(stored=array("Q", [1, 2])), 0.0)
    assert policy.scores(ask(0, [1, 2, 3])) == {0: 3.0, 1: 2.0}
    policy.kv_changed(0, KVChange(removed=array("Q", [2, 3])), 0.0)
    assert policy.scores(ask(0, [1, 2, 3])) == {0: 1.0, 1: 2.0}
    policy.kv_changed(1, KVChange(is_cleared=True), 0.0)
    assert policy.scores(ask(0, [1, 2, 3])) == {0: 1.0, 1: 0.0}
    policy.replica_lost(0, 0.0)
    policy.replica_added(2, 0.0)
    assert policy.scores(ask(0, [1, 2, 3])) == {1: 0.0, 2: 0.0}


# --- programs ---


def sized(trajectory: int, num_tokens: int, turn: int = 0) -> TurnAsk:
    """A turn that asks for so many tokens, the buffer for its outputs included."""
    return TurnAsk(trajectory, trajectory, 0, turn, num_tokens - 256, array("Q"), None)


def test_programs_begin_where_their_tokens_fit_and_wait_otherwise() -> None:
    policy = Programs(fleet(2, capacity_blocks=100), 0)  # 1,600 tokens each
    assert begin(policy, sized(0, 1000)) == 0
    assert begin(policy, sized(1, 900)) == 1
    assert policy.place(sized(2, 701), 0.0) is None
    assert begin(policy, sized(3, 700)) == 1
    assert policy.used_tokens == {0: 1000, 1: 1600}
    policy.finished(3, 0.0)
    assert policy.used_tokens == {0: 1000, 1: 900}
    assert policy.place(sized(4, 5000), 299.0) is None
    assert policy.place(sized(4, 5000), 299.0 + 300.0) == 1  # it waited long enough


def test_a_program_keeps_its_place_while_a_short_tool_runs_and_then_comes_back_to_it_or_moves() -> None:
    policy = Programs(fleet(2, capacity_blocks=100), 0, ttl_s=10.0)
    first = sized(0, 1000)
    assert begin(policy, first) == 0
    policy.ended(first, TurnEnd(0, 0, 1, 900, "read"), 100.0)
    assert policy.used_tokens == {0: 900, 1: 0}
    assert policy.place(sized(1, 800), 109.0) == 1
    assert policy.place(sized(0, 1100, turn=1), 109.0) == 0
    assert policy.used_tokens == {0: 1100, 1: 800}
    policy.began(sized(0, 1100, turn=1), 0, 109.0)
    policy.ended(sized(0, 1100, turn=1), TurnEnd(0, 0, 1, 1100, "tests"), 110.0)
    assert policy.place(sized(2, 1500), 120.0) == 0  # the TTL is over
    policy.finished(1, 120.0)
    assert policy.place(sized(0, 1200, turn=2), 120.0) is None
    assert policy.place(sized(0, 1200, turn=2), 121.0) == 1  # 1,600 tokens of room there, 100 at home
    assert policy.used_tokens == {0: 1500, 1: 1200}


def test_the_latest_to_pause_resumes_first() -> None:
    policy = Programs(fleet(1), 0)
    for number, ended_at in ((0, 5.0), (1, 9.0)):
        begin(policy, sized(number, 500))
        policy.ended(sized(number, 500), TurnEnd(0, 0, 1, 500, "read"), ended_at)
    waiting = [sized(0, 600, 1), sized(1, 600, 1), sized(2, 600)]
    assert sorted(waiting, key=lambda turn: policy.rank(turn, 9.0)) == [waiting[1], waiting[0], waiting[2]]


# --- oracles ---


def trajectory(number: int, group: int, num_turns: int, tool_s: float = 1.0) -> Trajectory:
    outputs, between = (100,) * num_turns, num_turns - 1
    return Trajectory(number, group, 0, 0, 0, 160, outputs, (60,) * between, (("read", tool_s),) * between)


def test_siblings_stay_together_until_another_replica_has_fewer_by_the_slack() -> None:
    policy = StickyGroups(fleet(2), 0, slack=2)
    home = begin(policy, ask(0, group=1))
    assert begin(policy, ask(1, group=1)) == home
    assert begin(policy, ask(2, group=1)) == 1 - home  # 2 against 0
    assert begin(policy, ask(3, group=1)) == 1 - home  # the group's home now
    assert begin(policy, ask(3, group=1, turn=1)) == 1 - home


def test_the_longest_begins_first_and_groups_go_to_the_least_known_work() -> None:
    work = (
        trajectory(0, 0, 2),
        trajectory(1, 0, 2),
        trajectory(2, 1, 9),
        trajectory(3, 2, 3, tool_s=500.0),
        trajectory(4, 2, 3),
    )
    workload = Workload(WorkloadParameters(), 0, work)
    policy = LongestFirst(fleet(2), workload, 0, fill=None, is_together=True)
    asks = [ask(one.number, group=one.group) for one in work]
    order = sorted(asks, key=lambda turn: policy.rank(turn, 0.0))
    assert [turn.trajectory for turn in order][:2] == [3, 2]  # tools make the first long, turns the second
    home = begin(policy, asks[3])
    assert begin(policy, asks[2]) == 1 - home
    assert begin(policy, asks[4]) == home
    assert begin(policy, asks[0]) == home  # 6 turns' work there, 9 elsewhere
    end(policy, asks[2], 1 - home)
    policy.replica_lost(home, 0.0)
    assert begin(policy, asks[0]) == 1 - home


def test_known_contexts_bound_how_many_begin() -> None:
    work = tuple(trajectory(number, number, 1) for number in range(4))  # of 260 tokens each
    policy = LongestFirst(fleet(1, capacity_blocks=33), Workload(WorkloadParameters(), 0, work), 0, 1.0, True)
    asks = [ask(number, group=number) for number in range(4)]
    assert begin(policy, asks[0]) == begin(policy, asks[1]) == 0  # 520 of 528 tokens
    assert policy.place(asks[2], 0.0) is None
    end(policy, asks[0], 0)
    policy.finished(0, 0.0)
    assert policy.place(asks[2], 0.0) == 0


def test_known_tools_say_whether_a_context_counts_while_they_run() -> None:
    work = (trajectory(0, 0, 2, tool_s=3.0), trajectory(1, 1, 2, tool_s=9.0), trajectory(2, 2, 9, tool_s=1.0))
    policy = KnownPrograms(fleet(1, capacity_blocks=100), Workload(WorkloadParameters(), 0, work), 0, 1.0, 5.0)
    for number in (0, 1):
        begin(policy, sized(number, 800))
        policy.ended(sized(number, 800), TurnEnd(0, 0, 100, 700, "read"), 0.0)
    assert policy.used_tokens == {0: 700}
    assert policy.place(sized(0, 900, turn=1), 10_000.0) == 0
    waiting = [sized(0, 900, 1), sized(1, 900, 1), sized(2, 600)]
    assert sorted(waiting, key=lambda turn: policy.rank(turn, 0.0))[0] is waiting[2]
    assert policy.place(sized(1, 900, turn=1), 3.0) is None


# --- all ---


def test_arms_and_their_variants_are_told_apart() -> None:
    names = {arm.name for arm in default_arms()}
    variants = [(arm.name, tuple(arm.parameters.items())) for arm in (*default_arms(), *grid_arms())]
    assert len(set(variants)) == len(variants)
    assert {arm.name for arm in grid_arms()} <= names


@pytest.mark.parametrize("arm", default_arms(), ids=lambda arm: arm.name)
@pytest.mark.parametrize("is_flushed", [True, False])
def test_every_arm_brings_a_run_to_its_end(arm: Arm, is_flushed: bool) -> None:
    parameters = WorkloadParameters(
        num_groups=6, num_samples=4, num_systems=2, system_tokens=64, prompt=(200.0, 0.6), turns=(4.0, 0.5)
    )
    workload = generate(parameters, 1)
    disturbance = Disturbance(
        update_every_s=20.0, first_update_s=3.0, is_flushed=is_flushed, loses_replica=True, adds_replica=True
    )
    shape = FleetShape(3, 1500, BLOCK, TIMES, max_live=12)
    policies: list[Policy] = []

    def make(shape: FleetShape, work: Workload, seed: int) -> Policy:
        policies.append(arm.make(shape, work, seed))
        return policies[-1]

    recording = run(Arm(arm.name, make, has_infinite_kv=arm.has_infinite_kv), shape, workload, disturbance)
    assert recording.num_turns == workload.num_turns
    (policy,) = policies
    assert isinstance(policy, Counting)
    assert policy.in_flight == {0: 0, 2: 0, 3: 0}
