"""Each arm's rule, on choices worked out by hand; every arm in a run with updates, a loss and an addition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest

from agentloop.api.coordinator import Prefix, TurnEnded
from agentloop.scheduling.lease_table import Demand
from tests.benchmarks.balancer.__main__ import ARMS, missing, read_rows
from tests.benchmarks.balancer.arms.oracle import LongestFirst
from tests.benchmarks.balancer.arms.ours import OursPolicy
from tests.benchmarks.balancer.arms.peers import CacheAware, Counting, LeastLoaded, RoundRobin, Sticky
from tests.benchmarks.balancer.compare import Row, regime_table
from tests.benchmarks.balancer.policy import EngineLoad, FleetShape, Policy, StepTimes, TurnAsk, TurnEnd
from tests.benchmarks.balancer.regimes import REGIMES, fleet
from tests.benchmarks.balancer.simulate import Disturbance, run
from tests.benchmarks.balancer.workload import ToolTimes, Trajectory, Workload, WorkloadParameters, generate

BLOCK = 16
TIMES = StepTimes(0.01, 0.01, 1e-5, 0.0, 0.01, 1e-5, 1e-8)


def shape_of(num_replicas: int, capacity_blocks: int = 1000) -> FleetShape:
    return FleetShape(num_replicas, capacity_blocks, BLOCK, TIMES)


def ask(trajectory: int, num_tokens: int = 100, group: int = 0, turn: int = 0) -> TurnAsk:
    return TurnAsk(trajectory, group, turn, num_tokens, None)


def begin(policy: Policy, turn: TurnAsk, replica: int | None = None) -> int:
    """Place a turn, and start it there or on the given replica."""
    chosen = policy.place(turn, 0.0)
    assert chosen is not None
    chosen = chosen if replica is None else replica
    policy.began(turn, chosen, 0.0)
    return chosen


def end(policy: Policy, turn: TurnAsk, replica: int) -> None:
    policy.ended(turn, TurnEnd(replica, 0, 1, turn.num_prompt_tokens + 1), 0.0)


def trajectory(
    number: int, group: int = 0, num_turns: int = 1, tool_s: float = 1.0, num_system: int = 0, num_group: int = 160
) -> Trajectory:
    between = num_turns - 1
    outputs = (100,) * num_turns
    return Trajectory(number, group, 0, num_system, num_group, outputs, (60,) * between, (tool_s,) * between)


def test_round_robin_goes_round_over_the_replicas_that_live() -> None:
    policy = RoundRobin(shape_of(3), 0)
    assert [begin(policy, ask(number)) for number in range(4)] == [0, 1, 2, 0]
    policy.replica_lost(1, 0.0)
    policy.replica_added(3, 0.0)
    assert [begin(policy, ask(number)) for number in range(4, 8)] == [2, 3, 0, 2]


def test_least_loaded_counts_turns_from_their_begin_to_their_end() -> None:
    policy = LeastLoaded(shape_of(3), 0)
    turns = [ask(number) for number in range(4)]
    for turn, replica in zip(turns, (0, 0, 1, 2), strict=True):
        begin(policy, turn, replica)
    end(policy, turns[3], 2)
    assert policy.place(ask(9), 0.0) == 2
    end(policy, turns[0], 0)
    policy.replica_lost(2, 0.0)
    assert {policy.place(ask(9), 0.0) for _ in range(50)} == {0, 1}


def test_sticky_counts_trajectories_until_they_are_finished() -> None:
    policy = Sticky(shape_of(2), 0)
    first = begin(policy, ask(0))
    end(policy, ask(0), first)
    assert begin(policy, ask(1)) == 1 - first  # trajectory 0 still counts
    policy.finished(0, 0.0)
    assert begin(policy, ask(2)) == first
    assert begin(policy, ask(2, turn=1)) == first
    assert policy.num_live == {0: 1, 1: 1}
    policy.replica_lost(first, 0.0)
    assert begin(policy, ask(2, turn=1)) == 1 - first
    assert policy.num_live == {1 - first: 2}


# cache_aware

PROMPTS = Workload(
    (
        *(trajectory(number, group=number // 4, num_system=100, num_group=400) for number in range(12)),
        *(trajectory(number, group=number, num_system=100, num_group=200) for number in range(12, 90)),
    )
)


def prompt(number: int, num_more: int = 0, turn: int = 0) -> TurnAsk:
    one = PROMPTS.trajectories[number]
    return ask(number, one.num_group_tokens + num_more, one.group, turn)


@pytest.mark.parametrize("misses_to_smallest", [True, False])
def test_siblings_and_later_turns_match_and_a_system_prompt_alone_is_too_little(misses_to_smallest: bool) -> None:
    policy = CacheAware(shape_of(3), PROMPTS, 0, misses_to_smallest=misses_to_smallest)
    assert begin(policy, prompt(0)) == 0
    assert begin(policy, prompt(1)) == 0  # a sibling
    assert policy.matched(prompt(4)) == {0: 100}  # 25 % of the prompt
    assert begin(policy, prompt(4)) == 1
    assert policy.matched(prompt(4, 160, turn=1)) == {1: 400, 0: 100}
    assert begin(policy, prompt(4, 160, turn=1)) == 1
    assert policy.matched(prompt(4, 300, turn=2)) == {1: 560, 0: 100}
    assert policy.matched(prompt(12)) == {0: 100, 1: 100}  # 50 % of the prompt
    assert begin(policy, prompt(12)) == 0
    policy.replica_lost(0, 0.0)
    assert policy.matched(prompt(0)) == {1: 100}


def test_a_miss_goes_to_the_least_loaded_replica_or_to_the_smallest_tree() -> None:
    smg, vllm = (CacheAware(shape_of(2), PROMPTS, 0, misses_to_smallest=smallest) for smallest in (False, True))
    for policy in (smg, vllm):
        assert begin(policy, prompt(0)) == 0
        assert begin(policy, prompt(4)) == 1
        assert begin(policy, prompt(4, 160, turn=1)) == 1
        end(policy, prompt(4), 1)
    assert smg.in_flight == {0: 1, 1: 1}
    assert vllm.place(prompt(8), 0.0) == 0  # 400 tokens there, 560 on the other replica
    begin(smg, prompt(1))
    assert smg.place(prompt(8), 0.0) == 1


def test_an_imbalance_by_both_bounds_goes_to_the_shortest_queue_whatever_matches() -> None:
    policy = CacheAware(shape_of(2), PROMPTS, 0, misses_to_smallest=False)
    for number in range(12, 77):  # half of each is the system prompt
        assert begin(policy, prompt(number)) == 0
    assert begin(policy, prompt(77)) == 1  # 65 to 0
    assert begin(policy, prompt(78)) == 0  # 65 to 1


# Oracle


def test_the_longest_begins_first_and_groups_go_to_the_least_known_work() -> None:
    work = (
        trajectory(0, 0, 2),
        trajectory(1, 0, 2),
        trajectory(2, 1, 9),
        trajectory(3, 2, 3, tool_s=500.0),
        trajectory(4, 2, 3),
    )
    policy = LongestFirst(shape_of(2), Workload(work), 0)
    asks = [ask(one.number, group=one.group) for one in work]
    order = sorted(asks, key=lambda turn: policy.rank(turn, 0.0))
    assert [turn.trajectory for turn in order][:2] == [3, 2]  # tools make the first long, turns the second
    home = begin(policy, asks[3])
    assert begin(policy, asks[2]) == 1 - home
    assert begin(policy, asks[4]) == home
    assert begin(policy, asks[0]) == home  # 6 turns of work there, 9 elsewhere
    end(policy, asks[2], 1 - home)
    policy.replica_lost(home, 0.0)
    assert begin(policy, asks[0]) == 1 - home


# All arms


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("is_flushed", [True, False])
def test_every_arm_brings_a_run_to_its_end(arm: str, is_flushed: bool) -> None:
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
        policies.append(ARMS[arm](shape, work, seed))
        return policies[-1]

    recording = run(make, shape, workload, disturbance)
    assert recording.num_turns == workload.num_turns
    (policy,) = policies
    if isinstance(policy, Counting):
        assert policy.in_flight == {0: 0, 2: 0, 3: 0}


@pytest.mark.long
def test_every_regime_has_a_fleet_that_holds_its_longest_context() -> None:
    for regime in REGIMES.values():
        assert fleet(regime).capacity_tokens >= regime.workload.max_context


def test_a_second_call_does_only_what_the_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert read_rows(path) == []
    path.write_text('{"regime": "base", "arm": "ours", "seed": 0}\n{"regime": "3x", "arm": "ours", "seed": 1}\n')
    assert missing(read_rows(path), ["base"], ["ours", "sticky"], range(2)) == [
        ("base", 0, "sticky"),
        ("base", 1, "ours"),
        ("base", 1, "sticky"),
    ]


def test_a_table_has_the_ratio_of_what_its_regime_is_judged_by() -> None:
    figures: Row = dict.fromkeys(
        ("group_p50_s", "reuse", "reuse_bound", "prefilled_tokens", "idle_share", "num_preemptions", "num_moves"),
        0.5,
    )
    rows: list[Row] = [
        {
            **figures,
            "arm": arm,
            "seed": seed,
            "makespan_s": makespan_s,
            "quartile_tokens_per_s": rate,
            "policy_us_per_turn": 3.0,
        }
        for arm, makespan_s, rate in (("ours", 90.0, 300.0), ("sticky", 100.0, 200.0))
        for seed in range(3)
    ]
    assert "0.900 (0.900 to 0.900)" in regime_table(rows, is_steady=False, against="ours")
    assert "1.500 (1.500 to 1.500)" in regime_table(rows, is_steady=True, against="ours")


class HeldKV(OursPolicy):
    """Counts the KV of running requests and of trajectories that wait for tools, independently of the balancer."""

    most_held_tokens = 0

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        super().began(turn, replica, now)
        self._idle.pop(turn.trajectory, None)

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        super().ended(turn, end, now)
        self._idle[turn.trajectory] = end.num_context_tokens

    def finished(self, trajectory: int, now: float) -> None:
        super().finished(trajectory, now)
        self._idle.pop(trajectory)

    def look(self, loads: Sequence[EngineLoad | None], now: float) -> None:
        super().look(loads, now)
        [load] = loads
        assert load is not None
        idle = [tokens for number, tokens in self._idle.items() if not self.balancer.orders(str(number))]
        self.most_held_tokens = max(self.most_held_tokens, load.num_held_blocks * BLOCK + sum(idle))

    @cached_property
    def _idle(self) -> dict[int, int]:
        return {}


AGENTS = WorkloadParameters(
    num_groups=192,
    num_samples=1,
    system_tokens=256,
    prompt=(1300.0, 0.3),
    turns=(8.0, 0.05),
    output=(185.0, 0.25),
    observation=(480.0, 0.3),
    aborted=0.0,
    tools=ToolTimes(short=(1.0, 0.9), shares=(1.0, 0.0, 0.0)),
)
"""Agents whose contexts grow to three times the KV of `pressed`."""


@pytest.mark.parametrize("share", [1.0, 1.81], ids=["fresh", "after an earlier load"])
@pytest.mark.parametrize("prefixes", [None, dict.fromkeys(range(192), ())], ids=["trajectories", "sessions"])
def test_held_kv_never_exceeds_what_the_engine_reported(
    share: float, prefixes: Mapping[int, tuple[Prefix, ...]] | None
) -> None:
    shape, workload, policies = (
        replace(fleet(REGIMES["base"]), num_replicas=1, max_live=64),
        generate(AGENTS, 0),
        [],
    )
    pressed = replace(shape, capacity_blocks=82_000 // BLOCK)

    def make(*_: object) -> HeldKV:
        policies.append(HeldKV(pressed, dict.fromkeys(range(192), 1), prefixes))
        policies[-1].balancer.share.value = share
        return policies[-1]

    record = run(make, pressed, workload, Disturbance())
    assert 0.8 * pressed.capacity_tokens < policies[0].most_held_tokens <= pressed.capacity_tokens
    assert record.num_cached_tokens > 0.6 * record.num_input_tokens


class SeenKV(HeldKV):
    """Records the share of KV in use once a second, in the half minute after the first minute."""

    def look(self, loads: Sequence[EngineLoad | None], now: float) -> None:
        self.most_held_tokens = 0
        super().look(loads, now)
        if 60.0 <= now < 90.0:
            self.seen.append(self.most_held_tokens / self._shape.capacity_tokens)

    @cached_property
    def seen(self) -> list[float]:
        return []


@pytest.mark.parametrize(
    ("share", "num_earlier_turns"),
    [(1.0, 0), (0.3, 0), (1.0, 1000), (4.0, 1000)],
    ids=["fresh", "low share", "large growth", "large growth and high share"],
)
def test_after_a_minute_nothing_is_left_of_an_earlier_load(share: float, num_earlier_turns: int) -> None:
    """Virtual time. The earlier turns grew by 5,000 tokens each, eight times as much as the agents' turns."""
    shape = replace(fleet(REGIMES["base"]), num_replicas=1, max_live=64)
    pressed, policies = replace(shape, capacity_blocks=82_000 // BLOCK), list[SeenKV]()

    def make(*_: object) -> SeenKV:
        policy = SeenKV(pressed, {}, dict.fromkeys(range(192), ()))
        policies.append(policy)
        lease = policy.balancer.acquire(Demand("earlier", "earlier", is_session=True), 0.0)
        for _number in range(num_earlier_turns):
            policy.balancer.turn_ended(TurnEnded(lease.lease_id, 10_000, 100, 5000, 5000), 0.0)
        policy.balancer.release(lease, None, 0.0)
        policy.balancer.share.value = share
        return policy

    run(make, pressed, generate(AGENTS, 0), Disturbance())
    seen = policies[0].seen
    assert len(seen) >= 25
    assert sum(seen) / len(seen) > 0.75
