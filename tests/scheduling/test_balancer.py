from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentloop.api.coordinator import LeaseReport, ReplicaRegistration
from agentloop.engine.interface import EngineInfo
from agentloop.errors import NoHealthyReplica
from agentloop.fleet.registry import Fleet, ReplicaState
from agentloop.scheduling.balancer import Balancer, BalancerConfig
from agentloop.scheduling.lease_table import Demand


def add(fleet, replica_id, kv_tokens=10_000_000, url=None, max_context=1 << 20):
    info = EngineInfo("fake", max_context, 1000, 16, kv_tokens, 8)
    replica = fleet.register(ReplicaRegistration(replica_id, url or f"http://{replica_id}", info, 0), 0.0)
    fleet.begin_update(replica)
    fleet.admit(replica)


def fleet_of(*replica_ids):
    fleet = Fleet()
    for replica_id in replica_ids:
        add(fleet, replica_id)
    return fleet


def spread(balancer, *replica_ids):
    return [balancer.num_leases(replica_id) for replica_id in replica_ids]


def demand(holder_id, group_id, num_prompt_tokens, process_id="w1", group_size=1):
    return Demand(holder_id, process_id, group_id, num_prompt_tokens, group_size)


def session(session_id, expires_at):
    return Demand(session_id, num_prompt_tokens=100, is_session=True, expires_at=expires_at)


NOW = 0.0


def test_a_trajectory_keeps_its_lease():
    balancer = Balancer(fleet_of("a", "b"))
    lease = balancer.acquire(demand("r/g/0", "r/g", 100), NOW)
    assert balancer.acquire(demand("r/g/0", "r/g", 100), NOW) == lease
    assert balancer.lease_of("r/g/0") == lease
    assert sum(spread(balancer, "a", "b")) == 1


def test_lease_ids_are_unique_over_coordinators():
    fleet = fleet_of("a")
    leases = [Balancer(fleet).acquire(demand("r/g/0", "r/g", 1), NOW).lease_id for _ in range(3)]
    assert len(set(leases)) == 3


def test_groups_go_to_the_least_loaded_replica():
    balancer = Balancer(fleet_of("a", "b", "c"))
    for index in range(30):
        balancer.acquire(demand(f"r/g{index}/0", f"r/g{index}", 100), NOW)
    assert spread(balancer, "a", "b", "c") == [10, 10, 10]


def test_work_counts_and_not_requests():
    balancer = Balancer(fleet_of("a", "b"))
    long = balancer.acquire(demand("r/long/0", "r/long", 400_000), NOW)
    others = [balancer.acquire(demand(f"r/g{i}/0", f"r/g{i}", 0), NOW).replica_id for i in range(9)]
    assert set(others) == {"a", "b"} - {long.replica_id}


def test_load_is_relative_to_capacity():
    fleet = Fleet()
    add(fleet, "small", 10_000_000)
    add(fleet, "large", 30_000_000)
    balancer = Balancer(fleet)
    for index in range(40):
        balancer.acquire(demand(f"r/g{index}/0", f"r/g{index}", 0), NOW)
    assert spread(balancer, "small", "large") == [10, 30]


def test_siblings_share_a_replica():
    balancer = Balancer(fleet_of("a", "b"))
    first, second = (
        [balancer.acquire(demand(f"r/{g}/{i}", f"r/{g}", 5000, group_size=4), NOW).replica_id for i in range(4)]
        for g in ("g1", "g2")
    )
    assert len(set(first)) == 1
    assert len(set(second)) == 1
    assert first[0] != second[0]


def test_a_large_group_is_split_when_its_replica_has_much_more():
    balancer = Balancer(fleet_of("a", "b"))
    for index in range(40):
        balancer.acquire(demand(f"r/g/{index}", "r/g", 1000, group_size=40), NOW)
    counts = spread(balancer, "a", "b")
    assert min(counts) >= 15
    assert sum(counts) == 40


def test_release_is_idempotent_and_keyed_by_lease():
    balancer = Balancer(fleet_of("a"))
    old = balancer.acquire(demand("r/g/0", "r/g", 1), NOW)
    balancer.release(old, None, NOW)
    new = balancer.acquire(demand("r/g/0", "r/g", 1), NOW)
    balancer.release(old, None, NOW)
    assert balancer.lease_of("r/g/0") == new
    balancer.release(new, None, NOW)
    balancer.release(new, None, NOW)
    assert balancer.num_leases("a") == 0
    balancer.check()


def test_no_replica():
    with pytest.raises(NoHealthyReplica):
        Balancer(Fleet()).acquire(demand("r/g/0", "r/g", 1), NOW)


def test_a_failed_move_goes_elsewhere_and_stays_only_if_there_is_no_other():
    fleet = fleet_of("a", "b")
    balancer = Balancer(fleet)
    lease = balancer.acquire(demand("r/g/0", "r/g", 1), NOW)
    moved = balancer.move(lease, is_failed=True)
    assert moved.replica_id != lease.replica_id
    assert moved.lease_id != lease.lease_id
    fleet.deregister(lease.replica_id)
    balancer.drop_replica(lease.replica_id)
    assert balancer.move(moved, is_failed=True).replica_id == moved.replica_id
    assert sum(spread(balancer, "a", "b")) == 1


def test_a_move_without_failure_stays_with_its_kv():
    balancer = Balancer(fleet_of("a", "b"))
    lease = balancer.acquire(demand("r/g/0", "r/g", 1), NOW)
    moved = balancer.move(lease, is_failed=False)
    assert moved.replica_id == lease.replica_id


def test_a_move_that_finds_no_replica_keeps_the_lease():
    fleet = fleet_of("a")
    balancer = Balancer(fleet)
    lease = balancer.acquire(demand("r/g/0", "r/g", 1), NOW)
    fleet.set_weight_version(1)  # no replica has it yet
    with pytest.raises(NoHealthyReplica):
        balancer.move(lease, is_failed=True)
    assert balancer.lease_of("r/g/0") == lease
    assert balancer.num_leases("a") == 1


def test_the_leases_of_a_dropped_replica_count_no_more_even_when_it_returns():
    fleet = fleet_of("a")
    balancer = Balancer(fleet)
    lease = balancer.acquire(demand("r/g/0", "r/g", 1), NOW)
    fleet.deregister("a")
    balancer.drop_replica("a")
    add(fleet, "a")
    assert balancer.num_leases("a") == 0
    again = balancer.acquire(demand("r/g/0", "r/g", 1), NOW)  # its KV is lost, so it gets a new lease
    assert again.lease_id != lease.lease_id
    assert balancer.num_leases("a") == 1
    balancer.release(again, None, NOW)
    balancer.check()


def test_an_adopted_lease_counts_and_can_move():
    fleet = fleet_of("a", "b")
    lease = Balancer(fleet).acquire(demand("r/g/0", "r/g", 1), NOW)  # a lease of an earlier coordinator
    balancer = Balancer(fleet)
    balancer.adopt(demand("r/g/0", "r/g", 1), lease, NOW)
    balancer.adopt(demand("r/g/0", "r/g", 1), lease, NOW)
    assert balancer.num_leases(lease.replica_id) == 1
    assert balancer.move(lease, is_failed=True).replica_id != lease.replica_id


def test_an_adopted_lease_whose_holder_asks_again_with_all_its_demand_is_taken_out_as_it_was_counted():
    fleet = fleet_of("a")
    lease = Balancer(fleet).acquire(demand("r/g/0", "r/g", 1), NOW)
    balancer = Balancer(fleet)
    balancer.adopt(demand("r/g/0", "r/g", 1), lease, NOW)
    assert balancer.acquire(demand("r/g/0", "r/g", 100, group_size=8), NOW) == lease
    balancer.check()
    balancer.release(lease, None, NOW)
    assert balancer.num_leases("a") == 0
    balancer.check()


def test_direct_leases_expire():
    balancer = Balancer(fleet_of("a"))
    balancer.acquire(session("s", expires_at=10.0), NOW)
    balancer.acquire(demand("r/g/0", "r/g", 1), NOW)
    assert balancer.expire(9.9) == 0
    balancer.acquire(session("s", expires_at=20.0), NOW)  # used again, so it expires later
    assert balancer.expire(10.0) == 0
    assert balancer.expire(20.0) == 1
    assert balancer.num_leases("a") == 1


def test_the_leases_of_a_silent_process_end_and_those_of_others_do_not():
    balancer = Balancer(fleet_of("a"), BalancerConfig(lease_ttl_s=60.0))
    lost = [balancer.acquire(demand(f"r/g/{i}", "r/g", 1, "dies"), 0.0) for i in range(3)]
    kept = balancer.acquire(demand("r/g/9", "r/g", 1, "lives"), 0.0)
    balancer.took(LeaseReport("lives", 1), 50.0)
    assert balancer.expire(59.9) == 0
    assert balancer.expire(60.0) == 3
    assert balancer.expire(109.9) == 0
    assert balancer.num_leases("a") == 1
    assert balancer.lease_of("r/g/9") == kept
    balancer.release(lost[0], None, 110.0)  # the process was only slow: leases of others are unaffected
    assert balancer.num_leases("a") == 1


def test_a_process_that_takes_a_trajectory_over_keeps_its_lease_alive():
    balancer = Balancer(fleet_of("a"), BalancerConfig(lease_ttl_s=60.0))
    lease = balancer.acquire(demand("r/g/0", "r/g", 1, "dies"), 0.0)
    assert balancer.acquire(demand("r/g/0", "r/g", 1, "lives"), 59.0) == lease
    assert balancer.expire(61.0) == 0
    assert balancer.expire(119.0) == 1


def test_placement_follows_every_change_of_the_fleet():
    fleet = fleet_of("a", "b")
    balancer = Balancer(fleet)
    balancer.acquire(demand("r/g0/0", "r/g0", 0), NOW)
    fleet.begin_update(fleet.get("b"))
    assert {balancer.acquire(demand(f"r/g{i}/0", f"r/g{i}", 0), NOW).replica_id for i in (1, 2)} == {"a"}
    fleet.put_back(replace(fleet.get("b"), state=ReplicaState.READY))
    assert {balancer.acquire(demand(f"r/g{i}/0", f"r/g{i}", 0), NOW).replica_id for i in (3, 4)} == {"b"}
    fleet.withhold_version()
    with pytest.raises(NoHealthyReplica):
        balancer.acquire(demand("r/g5/0", "r/g5", 0), NOW)
    fleet.stay_at(0)
    assert balancer.acquire(demand("r/g5/0", "r/g5", 0), NOW).replica_id == "b"


def test_idle_replicas_take_turns_with_short_calls():
    balancer = Balancer(fleet_of("a", "b", "c"))
    used = Counter()
    for index in range(30):
        lease = balancer.acquire(session(f"s{index}", expires_at=10.0), NOW)
        used[lease.replica_id] += 1
        balancer.release(lease, None, NOW)
    assert used == {"a": 10, "b": 10, "c": 10}


class BalancerMachine(RuleBasedStateMachine):
    """After any sequence of events, a replica's leases and work are the sums over its holders."""

    holders = st.integers(0, 7)

    def __init__(self):
        super().__init__()
        self.fleet = fleet_of("a", "b")
        self.balancer = Balancer(self.fleet)
        self.held = {}
        self.used_ids = set()

    def _hold(self, holder, lease):
        old = self.held.get(holder)
        if old is None or old.lease_id != lease.lease_id:
            assert lease.lease_id not in self.used_ids
        self.used_ids.add(lease.lease_id)
        self.held[holder] = lease

    @rule(holder=holders)
    def acquire(self, holder):
        if self.fleet.placeable():
            self._hold(
                holder, self.balancer.acquire(demand(f"r/g{holder % 2}/{holder}", f"r/g{holder % 2}", 10), NOW)
            )

    @rule(holder=holders, is_failed=st.booleans())
    def move(self, holder, is_failed):
        if holder in self.held and self.fleet.placeable():
            self._hold(holder, self.balancer.move(self.held[holder], is_failed))

    @rule(holder=holders, tokens=st.sampled_from([None, 7, 70]))
    def release(self, holder, tokens):
        if holder in self.held:
            self.balancer.release(self.held.pop(holder), tokens, NOW)

    @rule(name=st.sampled_from("ab"))
    def lose(self, name):
        self.fleet.deregister(name)
        self.balancer.drop_replica(name)

    @rule(name=st.sampled_from("ab"))
    def join(self, name):
        if self.fleet.get(name) is None:
            add(self.fleet, name)

    @invariant()
    def adds_up(self):
        self.balancer.check()
        for holder in range(8):
            name = f"r/g{holder % 2}/{holder}"
            assert self.balancer.lease_of(name) == self.held.get(holder)


BalancerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBalancerMachine = BalancerMachine.TestCase
