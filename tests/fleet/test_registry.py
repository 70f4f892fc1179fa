from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentloop.api.coordinator import ReplicaRegistration, ReplicaReport
from agentloop.engine.interface import EngineInfo
from agentloop.errors import InvariantBroken
from agentloop.fleet.registry import MOVES, Fleet, FleetConfig, ReplicaState
from agentloop.types import Load

INFO = EngineInfo("fake", 4096, 1000, 16, 10_000, 8)
CONFIG = FleetConfig(suspect_after_s=3.0, dead_after_s=10.0)


def registration(replica_id="a", version=0, url=None):
    return ReplicaRegistration(replica_id, url or f"http://{replica_id}", INFO, version)


def ready(fleet, replica_id="a", version=0, now=0.0):
    replica = fleet.register(registration(replica_id, version), now)
    fleet.begin_update(replica)
    fleet.admit(replica)
    return fleet.get(replica_id)


def state(fleet, replica_id="a"):
    return fleet.get(replica_id).state


def replica_ids(replicas):
    return [replica.replica_id for replica in replicas]


def test_a_new_replica_takes_no_traffic_before_it_is_admitted():
    fleet = Fleet(CONFIG)
    replica = fleet.register(registration(), now=0.0)
    assert replica.state is ReplicaState.JOINING
    assert not fleet.placeable()
    fleet.begin_update(replica)
    assert fleet.admit(replica)
    assert replica_ids(fleet.placeable()) == ["a"]
    assert fleet.weight_version == 0


def test_dummy_weights_are_never_admitted():
    fleet = Fleet(CONFIG)
    replica = fleet.register(registration(version=None), now=0.0)
    fleet.begin_update(replica)
    assert not fleet.admit(replica)
    assert state(fleet) is ReplicaState.JOINING
    fleet.begin_update(replica)
    fleet.committed(replica, 1)
    fleet.set_weight_version(1)
    assert fleet.admit(replica)


def test_before_an_update_the_newest_version_counts_and_later_it_does_not():
    fleet = Fleet(CONFIG)
    ready(fleet, "a", 0)
    ready(fleet, "b", 3)
    assert fleet.weight_version == 3
    assert replica_ids(fleet.placeable()) == ["b"]
    assert state(fleet, "a") is ReplicaState.JOINING
    fleet.set_weight_version(4)
    assert not fleet.placeable()
    fleet.register(registration("c", 9), 0.0)
    assert fleet.weight_version == 4


def test_version_zero_is_a_version():
    fleet = Fleet(CONFIG)
    assert fleet.weight_version is None
    ready(fleet, "a", 0)
    assert fleet.placeable()


def test_silence_makes_suspect_then_dead_and_a_heartbeat_clears():
    fleet = Fleet(CONFIG)
    ready(fleet)
    assert fleet.expire(2.9) == ()
    assert state(fleet) is ReplicaState.READY
    assert fleet.expire(3.0) == ()
    assert state(fleet) is ReplicaState.SUSPECT
    assert not fleet.placeable()
    assert fleet.heartbeat("a", ReplicaReport(Load(), True), now=4.0)
    assert state(fleet) is ReplicaState.READY
    assert fleet.expire(13.9) == ()
    assert fleet.expire(14.0) == ("a",)
    assert fleet.get("a") is None
    assert not fleet.heartbeat("a", ReplicaReport(Load(), True), now=15.0)


def test_a_suspect_that_missed_an_update_does_not_come_back_with_old_weights():
    fleet = Fleet(CONFIG)
    ready(fleet)
    fleet.expire(3.0)
    fleet.set_weight_version(1)
    fleet.heartbeat("a", ReplicaReport(Load(), True), now=4.0)
    assert state(fleet) is ReplicaState.JOINING
    assert not fleet.placeable()


def test_a_busy_update_is_not_judged_by_silence():
    fleet = Fleet(CONFIG)
    replica = ready(fleet)
    fleet.begin_update(replica)
    assert fleet.expire(100.0) == ()
    fleet.quarantine(replica, "no answer")
    assert fleet.expire(100.0) == ("a",)


def test_failed_calls_make_suspect_until_a_generation_proves_it_good():
    fleet = Fleet(CONFIG)
    ready(fleet)
    for now in range(CONFIG.max_failures - 1):
        fleet.report_failure("a", now)
        fleet.heartbeat("a", ReplicaReport(Load(), True), now)  # clears no failure
    assert fleet.placeable()
    fleet.report_failure("a", 3.0)
    assert state(fleet) is ReplicaState.SUSPECT
    assert "3 calls" in fleet.get("a").error
    fleet.heartbeat("a", ReplicaReport(Load(), True, num_answered=5), 4.0)  # answered before the replica hung
    assert state(fleet) is ReplicaState.SUSPECT
    (suspect,) = fleet.to_probe()
    fleet.probe_answered(suspect)
    assert fleet.placeable()
    assert not fleet.to_probe()
    assert fleet.get("a").error is None
    fleet.report_failure("nobody", 5.0)


def test_a_replica_on_probation_is_suspect_at_the_next_failure_unless_it_answers_callers():
    for answers in (False, True):
        fleet = Fleet(CONFIG)
        ready(fleet)
        for now in range(CONFIG.max_failures):
            fleet.report_failure("a", now)
        fleet.probe_answered(fleet.get("a"))
        if answers:
            fleet.heartbeat("a", ReplicaReport(Load(), True, num_answered=1), 4.0)
        fleet.report_failure("a", 5.0)
        assert bool(fleet.placeable()) is answers


def test_failures_count_within_a_window():
    fleet = Fleet(CONFIG)
    ready(fleet)
    for number in range(2 * CONFIG.max_failures):
        fleet.report_failure("a", number * CONFIG.failure_window_s / 2)
    assert fleet.placeable()
    fleet.report_failure("a", (2 * CONFIG.max_failures - 1) * CONFIG.failure_window_s / 2)
    assert state(fleet) is ReplicaState.SUSPECT


def test_neither_a_sleep_nor_an_update_is_a_proof():
    fleet = Fleet(CONFIG)
    ready(fleet)
    for now in range(CONFIG.max_failures):
        fleet.report_failure("a", now)
    replica = fleet.begin_update(fleet.get("a"))
    fleet.fall_asleep(replica)
    fleet.begin_update(replica)
    fleet.committed(replica, 0)
    fleet.admit(replica)
    assert state(fleet) is ReplicaState.SUSPECT
    fleet.heartbeat("a", ReplicaReport(Load(weight_version=0), True), 9.0)
    assert not fleet.placeable()
    fleet.probe_answered(fleet.get("a"))
    assert fleet.placeable()


def test_one_contradicting_report_may_have_crossed_an_update_two_may_not():
    fleet = Fleet(CONFIG)
    ready(fleet, version=1)
    fleet.heartbeat("a", ReplicaReport(Load(weight_version=0), True), 1.0)
    assert fleet.placeable()
    fleet.heartbeat("a", ReplicaReport(Load(weight_version=1), True), 2.0)
    fleet.heartbeat("a", ReplicaReport(Load(weight_version=0), True), 3.0)
    assert fleet.placeable()
    fleet.heartbeat("a", ReplicaReport(Load(weight_version=0), True), 4.0)
    assert state(fleet) is ReplicaState.JOINING
    assert fleet.get("a").weight_version == 0


def test_an_unusable_engine_is_quarantined_and_only_a_commit_readmits_it():
    fleet = Fleet(CONFIG)
    replica = ready(fleet)
    for now in (1.0, 2.0):
        fleet.heartbeat("a", ReplicaReport(Load(), False), now)
    assert state(fleet) is ReplicaState.QUARANTINED
    fleet.heartbeat("a", ReplicaReport(Load(weight_version=0), True), 3.0)
    fleet.register(registration(), 4.0)
    assert state(fleet) is ReplicaState.QUARANTINED
    assert not fleet.admit(replica)
    fleet.begin_update(replica)
    fleet.committed(replica, 0)
    assert fleet.admit(replica)
    assert fleet.get("a").error is None


def test_the_same_introduction_again_changes_nothing():
    fleet = Fleet(CONFIG)
    before = ready(fleet)
    after = fleet.register(registration(), 5.0)
    assert (after.state, after.incarnation) == (ReplicaState.READY, before.incarnation)
    assert after.seen_at == 5.0


def test_another_url_is_a_new_process_and_verbs_on_the_old_one_do_nothing():
    fleet = Fleet(CONFIG)
    old = ready(fleet, version=1)
    fleet.begin_update(old)
    new = fleet.register(registration(version=None, url="http://elsewhere"), 1.0)
    assert new.state is ReplicaState.JOINING
    assert fleet.begin_update(old) is None
    fleet.committed(old, 1)
    assert not fleet.admit(old)
    fleet.quarantine(old, "late")
    fleet.put_back(old)
    assert fleet.get("a") == new


def test_a_restart_behind_the_same_url_with_other_weights_joins_anew():
    fleet = Fleet(CONFIG)
    ready(fleet, version=2)
    fleet.set_weight_version(2)
    assert fleet.register(registration(version=0), 1.0).state is ReplicaState.JOINING
    assert not fleet.placeable()


def test_an_attempt_before_the_commit_gives_the_state_back():
    fleet = Fleet(CONFIG)
    replica = fleet.register(registration(), 0.0)
    fleet.begin_update(replica)
    fleet.put_back(replica)
    assert state(fleet) is ReplicaState.JOINING
    fleet.put_back(replica)
    assert state(fleet) is ReplicaState.JOINING


def asleep(fleet, replica_id="a", version=0):
    replica = ready(fleet, replica_id, version)
    fleet.begin_update(replica)
    fleet.fall_asleep(replica)
    return fleet.get(replica_id)


def test_a_sleeper_takes_no_traffic_and_what_it_says_of_its_weights_does_not_count():
    fleet = Fleet(CONFIG)
    replica = asleep(fleet)
    assert state(fleet) is ReplicaState.ASLEEP
    assert not fleet.placeable()
    assert not fleet.behind()
    for now in (1.0, 2.0, 2.5):
        assert fleet.heartbeat("a", ReplicaReport(Load(weight_version=7), False), now)
        fleet.register(registration(version=None), now)
    assert (state(fleet), fleet.get("a").weight_version) == (ReplicaState.ASLEEP, 0)
    fleet.begin_update(replica)
    assert fleet.admit(replica)
    assert fleet.placeable()


def test_a_silent_sleeper_is_dead_in_the_end_and_not_suspect_before():
    fleet = Fleet(CONFIG)
    asleep(fleet)
    assert fleet.expire(9.0) == ()
    assert state(fleet) is ReplicaState.ASLEEP
    assert fleet.expire(10.0) == ("a",)


def test_a_sleeper_that_missed_an_update_joins_when_it_wakes():
    fleet = Fleet(CONFIG)
    replica = asleep(fleet)
    fleet.set_weight_version(1)
    fleet.begin_update(replica)
    assert not fleet.admit(replica)
    assert state(fleet) is ReplicaState.JOINING


def test_who_did_not_follow_joins_anew_with_the_weights_it_has():
    fleet = Fleet(CONFIG)
    replica = asleep(fleet)
    fleet.rejoin(replica, "it would not wake")
    assert state(fleet) is ReplicaState.JOINING
    assert (fleet.get("a").weight_version, fleet.get("a").error) == (0, "it would not wake")
    fleet.quarantine(replica, "worse")
    fleet.rejoin(replica, "again")
    assert state(fleet) is ReplicaState.QUARANTINED
    fleet.fall_asleep(replica)
    assert state(fleet) is ReplicaState.QUARANTINED


def test_deregister_is_idempotent():
    fleet = Fleet(CONFIG)
    ready(fleet)
    assert fleet.deregister("a")
    assert not fleet.deregister("a")
    assert fleet.replicas == ()


def test_a_move_that_is_not_in_the_table_is_a_bug():
    fleet = Fleet(CONFIG)
    replica = fleet.register(registration(), 0.0)
    with pytest.raises(InvariantBroken):
        fleet._move(replica, ReplicaState.READY)
    assert MOVES[ReplicaState.GONE] == frozenset()


class FleetMachine(RuleBasedStateMachine):
    """Traffic goes only to current, admitted replicas after any sequence of events."""

    names = st.sampled_from("abc")
    versions = st.sampled_from([None, 0, 1, 2])

    def __init__(self):
        super().__init__()
        self.fleet = Fleet(CONFIG)
        self.now = 0.0

    @rule(name=names, version=versions, url=st.sampled_from(["http://x", "http://y"]))
    def register(self, name, version, url):
        self.fleet.register(registration(name, version, url), self.now)

    @rule(name=names, version=versions, is_usable=st.booleans())
    def heartbeat(self, name, version, is_usable):
        self.fleet.heartbeat(name, ReplicaReport(Load(weight_version=version), is_usable), self.now)

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0]))
    def pass_time(self, seconds):
        self.now += seconds
        self.fleet.expire(self.now)

    @rule(name=names)
    def fail(self, name):
        self.fleet.report_failure(name, self.now)

    @rule(name=names)
    def probe(self, name):
        for replica in self.fleet.to_probe():
            if replica.replica_id == name:
                self.fleet.probe_answered(replica)

    @rule(name=names, version=st.sampled_from([None, 0, 1, 2]))
    def update(self, name, version):
        replica = self.fleet.get(name)
        if replica is not None and self.fleet.begin_update(replica) is not None:
            self.fleet.forget_version(replica)
            if version is None:
                self.fleet.quarantine(replica, "commit failed")
            else:
                self.fleet.committed(replica, version)
                self.fleet.admit(replica)

    @rule(name=names, is_deep=st.booleans())
    def sleep(self, name, is_deep):
        replica = self.fleet.get(name)
        if replica is not None and replica.state is not ReplicaState.QUARANTINED:
            self.fleet.begin_update(replica)
            if is_deep:
                self.fleet.forget_version(replica)
            self.fleet.fall_asleep(replica)

    @rule(name=names, follows=st.booleans())
    def wake(self, name, follows):
        replica = self.fleet.get(name)
        if replica is not None and replica.state is ReplicaState.ASLEEP:
            if not follows:
                self.fleet.rejoin(replica, "it did not wake")
            else:
                self.fleet.begin_update(replica)
                self.fleet.admit(replica)

    @rule(version=st.sampled_from([0, 1, 2]))
    def serve(self, version):
        self.fleet.set_weight_version(version)

    @rule(name=names)
    def leave(self, name):
        self.fleet.deregister(name)

    @invariant()
    def only_current_ready_replicas_take_traffic(self):
        for replica in self.fleet.placeable():
            assert replica.state is ReplicaState.READY
            assert replica.weight_version is not None
            assert not replica.needs_probe
            assert replica.weight_version == self.fleet.weight_version
            assert replace(replica) == self.fleet.get(replica.replica_id)


FleetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestFleetMachine = FleetMachine.TestCase
